"""Options of the commands that use a model, and the model and the search that they name."""

import argparse
import contextlib
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..decoding.ensemble import COMBINATIONS
from ..errors import UserError
from ..files import written_whole
from ..loading import is_exported


def add_model_options(parser: argparse.ArgumentParser, ensemble: bool = True) -> None:
    """What the model is and how it computes."""
    group = parser.add_argument_group("model")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps, ...; auto: an accelerator if any")
    group.add_argument(
        "--precision",
        metavar="TYPE",
        help="float32, bfloat16, float16, or int8 on a CPU; of an exported model what CTranslate2 has (default: as the"
        " model was saved)",
    )
    group.add_argument(
        "--tokens-per-batch", metavar="N", type=int, default=2048, help="source tokens at once (default: 2048)"
    )
    if ensemble:
        group.add_argument(
            "--ensemble",
            metavar="FOLDER",
            nargs="+",
            default=[],
            help="further models that decide together with MODEL; all words up to the next option",
        )
        group.add_argument(
            "--combine",
            choices=COMBINATIONS,
            help="what the ensemble takes the mean of (default: probabilities)",
        )


def add_search_options(parser: argparse.ArgumentParser, exact: bool = False) -> None:
    """How translations are looked for; `exact`: whether exported models are taken, and so --exact."""
    group = parser.add_argument_group("search")
    group.add_argument("--beams", metavar="N", type=int, help="beam size; the model's own if not given")
    group.add_argument(
        "--length-penalty", metavar="X", type=float, help="alpha of the length normalisation; the model's own"
    )
    how = "longest output in tokens; if not given, those of the source and what the model adds (50, a parser 300)"
    group.add_argument("--max-new-tokens", metavar="N", type=int, help=how)
    if exact:
        group.add_argument(
            "--exact",
            action="store_true",
            default=None,
            help="prove for each sentence that an exported model's search has missed nothing, as a model's own always"
            " does; slower",
        )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Random translations."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--sample", action="store_true", help="draw translations from the model instead of searching")
    group.add_argument("--temperature", metavar="X", type=float, help="below 1 likelier ones, above 1 stranger ones")
    group.add_argument("--top-k", metavar="N", type=int, help="only among the N likeliest tokens")
    group.add_argument(
        "--top-p", metavar="X", type=float, help="only among the likeliest tokens that make up X together"
    )
    group.add_argument("--seed", metavar="N", type=int, help="the same seed gives the same translations")


# Option: least, most.
_RANGES = {
    "beams": (1, 10_000),
    "nbest": (1, 10_000),
    "max_new_tokens": (1, 10**6),
    "tokens_per_batch": (1, 10**9),
    "max_source_tokens": (2, 10**6),
    "window": (1, 10**7),
    "length_penalty": (-100, 100),
    "temperature": (1e-6, 10**6),
    "top_k": (1, 10**9),
    "top_p": (1e-6, 1),
    "seed": (0, 2**62),
}


def check_options(arguments: argparse.Namespace) -> None:
    """Check all that can be checked without a model.

    Raises:
        UserError: naming the option, its value and the rule.
    """
    for name, (least, most) in _RANGES.items():
        value = getattr(arguments, name, None)
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            raise UserError(f"{_flag(name)} is {value}: it must be from {least:g} to {most:,}")
    if getattr(arguments, "combine", None) is not None and not arguments.ensemble:
        raise UserError("--combine is for several models: give --ensemble too, or leave it out")
    if not getattr(arguments, "sample", True):
        for name in ("temperature", "top_k", "top_p", "seed"):
            if getattr(arguments, name) is not None:
                raise UserError(f"{_flag(name)} is for sampling: give --sample too, or leave it out")


def check_files(arguments: argparse.Namespace, read: Sequence[str], written: Sequence[str]) -> None:
    """Check all that can be checked of files before a model is loaded for them.

    Args:
        arguments: of the command line.
        read: names of the options whose files are read.
        written: names of those whose files are written.

    Raises:
        UserError: naming the option: for a folder in a file's place, a file to write for which there is no folder, and
            what `refuse_equal_files` refuses.
    """
    for name in (*read, *written):
        value = getattr(arguments, name)
        if value is None:
            continue
        if not value:
            raise UserError(f"{_flag(name)} is empty: give a file")
        path = Path(value)
        if path.is_dir():
            raise UserError(f"{_flag(name)} is {value}, a folder: give a file")
        folder = path.resolve().parent  # of what a link leads to
        if name in written and not folder.is_dir():
            mend = "is a file, not a folder: give another file" if folder.exists() else "is not there: make it first"
            raise UserError(f"{_flag(name)} is {value}, and the folder {path.parent} {mend}")
    refuse_equal_files(arguments, read, written)


def refuse_equal_files(arguments: argparse.Namespace, read: Sequence[str], written: Sequence[str]) -> None:
    """No file that is written may be one that is read, or be written twice; devices and pipes may.

    Args:
        arguments: of the command line.
        read: names of the options whose files are read.
        written: names of those whose files are written.

    Raises:
        UserError: naming both options and the file.
    """

    def equal(one: Path, other: Path) -> bool:
        if one.exists() and other.exists():
            return one.is_file() and one.samefile(other)
        return one.resolve() == other.resolve()

    files: dict[str, Path] = {}
    for name in (*read, *written):
        if not getattr(arguments, name):
            continue
        path = Path(getattr(arguments, name))
        for other in files if name in written else ():
            if equal(path, files[other]):
                raise UserError(
                    f"{_flag(name)} and {_flag(other)} are the same file, {path}: give another {_flag(name)}"
                )
        files[name] = path


@contextlib.contextmanager
def written_at_the_end(path: Path) -> Iterator[TextIO]:
    """A text file to write, which takes the place of an earlier one only once all of it is there.

    Raises:
        OSError: at once, where it cannot be written.
    """
    target = path.resolve()  # a link stays one
    if target.exists() and not target.is_file():  # a device or a pipe
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    if target.exists():
        target.open("r+").close()  # one that is protected is reported now
    with written_whole(target) as new:
        try:
            file = new.open("w", encoding="utf-8")
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        with file:
            yield file
        if target.exists():
            shutil.copymode(target, new)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def load_for_decoding(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model or the ensemble that the options name, ready for use, and its tokenizer.

    On a CPU it is good for nothing else afterwards (`prepare_for_inference`).

    Raises:
        UserError: as `load_model` and `load_ensemble` say, for int8 elsewhere than on a CPU, and for what exported
            models cannot do or models need not be asked for.
    """
    from ..hardware import PRECISIONS
    from ..loading import load_model

    options = {"precision": arguments.precision}
    folders = getattr(arguments, "ensemble", [])
    if any(map(is_exported, [arguments.model, *folders])):
        return _load_exported(arguments)
    if getattr(arguments, "exact", None):
        raise UserError(
            "--exact is for exported models: leave it out, a model's own search ends when nothing can win any more"
        )
    in_int8 = arguments.precision == "int8"
    if not in_int8 and arguments.precision not in (None, *PRECISIONS):
        known = ", ".join((*PRECISIONS, "int8"))
        raise UserError(f"--precision is {arguments.precision!r}: it must be one of {known}")
    if in_int8:
        options = {}
    if folders:
        from ..decoding.ensemble import load_ensemble

        for folder in folders if getattr(arguments, "sentences", None) is not None else ():
            if not Path(folder).exists():
                raise UserError(f"--ensemble: there is no model folder {folder} (sentences stand before --ensemble)")
        folders = [arguments.model, *folders]
        options["combine"] = arguments.combine or COMBINATIONS[0]
        model, tokenizer = load_ensemble(folders, arguments.device, **options)
    else:
        model, tokenizer = load_model(arguments.model, arguments.device, **options)
    if model.device.type == "cpu":
        from ..decoding.cpu_inference import prepare_for_inference

        for member in getattr(model, "members", [model]):
            prepare_for_inference(member, "int8" if in_int8 else None)
    elif in_int8:
        raise UserError(f"--precision int8 is for a CPU and the model is on {model.device}: give --device cpu")
    return model, tokenizer


def _load_exported(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from ..export.exporting import load_exported

    for name in ("ensemble", "sample", "alignments", "prefix"):
        if getattr(arguments, name, None):
            raise UserError(f"{_flag(name)} is not possible with an exported model: give the model itself")
    exact = bool(getattr(arguments, "exact", None))
    model, tokenizer = load_exported(arguments.model, arguments.device, arguments.precision, exact)
    if exact and (arguments.beams or model.generation_config.num_beams or 1) == 1:
        raise UserError("--exact is for beam search and the beam size is 1: give more --beams, or leave it out")
    return model, tokenizer


def generate_options(arguments: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The options of `generate()` that were given; None where the model's own configuration counts.

    Raises:
        UserError: for more translations than the search has beams.
    """
    own = model.generation_config
    beams = arguments.beams
    options = {"length_penalty": arguments.length_penalty, "max_new_tokens": arguments.max_new_tokens}
    if getattr(arguments, "sample", False):
        beams = beams or 1
        top_k = 0 if arguments.top_k is None and own.top_k is None else arguments.top_k  # the library's default is 50
        options |= {"do_sample": True, "temperature": arguments.temperature, "top_k": top_k, "top_p": arguments.top_p}
    options["num_beams"] = beams
    nbest = getattr(arguments, "nbest", None)
    options["num_return_sequences"] = nbest
    if nbest is None and (own.num_return_sequences or 1) > 1:
        options["num_return_sequences"] = 1  # one line out for one line in
    if nbest is not None:
        size = beams or own.num_beams or 1
        drawn = size == 1 and (options.get("do_sample") or own.do_sample)
        if nbest > size and not drawn:
            raise UserError(f"--nbest is {nbest} and the beam size is {size}: give --beams {nbest} or more")
    return options
