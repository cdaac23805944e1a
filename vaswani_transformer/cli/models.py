"""Commands for a finished model: `vaswani average`, `push`, `import` and `export`."""

import os
import shlex
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ..errors import UserError
from .options import REQUIRED, SEVERAL, Model, Overwrite, Path_, exclude, require, within

_CARD = Parameter(group="model card")


def average(
    *folders: Annotated[Path_, REQUIRED],
    output: Path_,
    last: Annotated[int | None, within(1, 10**6)] = None,
    overwrite: Overwrite = False,
) -> None:
    """Average checkpoints, or several models, into a model.

    Args:
        folders: output folder of a training, of which the last 5 checkpoints are taken; or checkpoints, or models
        output: folder for the averaged model
        last: the last N checkpoints (default: 5, or as many as the training averaged, if fewer)
    """
    from ..json_and_yaml import read_yaml
    from ..output_folder import RECIPE
    from ..training.averaging import average_models, last_checkpoints
    from ..training.checkpoints import step_of
    from ..training.run_folder import CHECKPOINTS

    chosen = [Path(folder) for folder in folders]
    first = chosen[0]
    of_a_run = len(chosen) == 1 and (first / CHECKPOINTS).is_dir()
    require("the output folder of one training", of_a_run, {"last": last})
    if of_a_run:
        made = first / CHECKPOINTS / RECIPE  # 5 as Section 6.1 for the base model
        own = (made.is_file() and read_yaml(made).get("average_checkpoints")) or 5
        chosen = last_checkpoints(first, last or min(5, own))
    elif len({folder.resolve() for folder in chosen}) != len(chosen) or (len(chosen) == 1 and first.is_dir()):
        raise UserError(f"{first}: give the output folder of a training, or two or more checkpoints, each once")
    folder = average_models(chosen, output, overwrite=overwrite)
    names = [f"{step_of(path):,}" for path in chosen] if of_a_run else list(map(str, chosen))
    steps = "steps " if of_a_run else ""
    print(f"averaged {len(chosen)} checkpoint{'s' if len(chosen) > 1 else ''}: {steps}{', '.join(names)}")
    print(f"model: {folder}")


@Parameter(name="*")
@dataclass
class Push:
    """Options of a push, by the names of the arguments of `hub.push.publish`."""

    dry_run: bool = False
    """print the files and the card, send nothing"""
    private: bool = False
    """create the repository as a private one"""
    revision: str = "main"
    """branch, created if it does not exist"""
    token: str | None = None
    """prefer HF_TOKEN, which no list of processes shows"""
    overwrite_card: Annotated[bool, _CARD] = False
    """replace the card even if someone wrote or edited it"""
    languages: Annotated[tuple[str, ...], _CARD, Parameter(name="--language")] = ()
    """language, such as en; repeat it, source first"""
    license: Annotated[str | None, _CARD] = None
    """licence of the weights, such as mit"""
    datasets: Annotated[tuple[str, ...], _CARD, Parameter(name="--dataset")] = ()
    """data set on the Hub; may be repeated"""
    evaluations: Annotated[tuple[Path_, ...], _CARD, Parameter(name="--evaluation")] = ()
    """scores from `evaluate --json`; may be repeated"""


def push(
    model: Model,
    repository: str,
    /,
    *,
    options: Push = Push(),  # noqa: B008 (of cyclopts)
    space: Annotated[bool, Parameter(alias="--static")] = False,
) -> None:
    """Put a trained model on the Hugging Face Hub, with a model card, or as a page that translates, in one commit.

    The same command updates it, or resumes an interrupted push. The token is that of `hf auth login` or HF_TOKEN.

    Args:
        repository: OWNER/NAME on the Hub; created if it does not exist
        space: a static Space in the model's place: the site of `export --format web`
    """
    from huggingface_hub.utils import logging as hub_logging

    from ..hub.push import clear_staging, publish, publish_site

    settings, of_card = vars(options), {"overwrite_card", "languages", "license", "datasets", "evaluations"}
    exclude("--space", space, {name.removesuffix("s"): settings[name] for name in of_card - {"languages"}})

    def stop(number, _):
        # Not by an exception: the client would wait for its threads to finish sending their files.
        os.write(2, f"interrupted: {repository} has all of the new files or none; push again\n".encode())
        clear_staging()
        os._exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    hub_logging.set_verbosity_error()  # not a line for every attempt: if the last one fails, our error explains it
    try:
        if space:
            site = partial(_write_site, model, options.languages)
            result = publish_site(site, repository, **{name: settings[name] for name in settings.keys() - of_card})
        else:
            result = publish(model, repository, **settings)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    goal = f"{result.url or result.repo_id}, branch {result.revision}"
    if options.dry_run:
        print(f"would go to {goal} (nothing was sent):")
    elif result.changed:
        print(f"pushed to {goal}, commit {result.commit[:12]}:")
    else:
        print(f"{goal}, has all of this already; nothing was changed:")
    for name, size in result.files.items():
        print(f"{size:14,}  {name}")
    for name in result.removed:
        print(f"{'removed':>14}  {name}")
    if options.dry_run:
        print(f"\n{result.card}", end="")


def import_(
    source: Path_,
    /,
    *,
    output: Path_,
    vocabulary: Annotated[list[Path_] | None, SEVERAL] = None,
    bpe_codes: Path_ | None = None,
    positions: Literal["marian", "transformers"] | None = None,
    overwrite: Overwrite = False,
) -> None:
    """Make a model of another toolkit a model of this package, with its tokenizer and a card.

    SOURCE is the folder or Hub name (owner/name) of a MarianMT (OPUS-MT) model of transformers, Marian's .npz, or
    fairseq's .pt. Code in pickles does not run.

    Args:
        source: file, folder, or name of a model on the Hub
        output: a new folder for the model
        vocabulary: vocabulary of both languages, or of source and target, where it is not beside SOURCE
        bpe_codes: merges of byte-pair encoding, of fairseq
        positions: of a MarianMT folder: Marian's own, which Helsinki-NLP/opus-mt-* and all others that Marian trained
            have, or those of transformers, for a model that was trained or fine-tuned there (default: marian, or
            transformers where its Trainer has left training_args.bin or trainer_state.json)
    """
    from ..importing.importing import import_model

    print(f"importing {source}", file=sys.stderr)
    options = {"bpe_codes": bpe_codes, "positions": positions, "overwrite": overwrite}
    result = import_model(source, output, vocabularies=vocabulary or [], **options)
    print(f"imported {result.format}: {output}, {result.parameters:,} parameters")
    for note in result.facts.notes:
        print(note)
    print(f"use it with: vaswani translate {shlex.quote(output)}")


def export(
    model: Model,
    /,
    *,
    output: Path_,
    format: Literal["ctranslate2", "onnx", "transformers.js", "web", "marian"] = "ctranslate2",
    quantization: Literal["float32", "int8", "int8_float32", "bfloat16", "float16", "int16"] | None = None,
    languages: tuple[str, str] | None = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a model for CTranslate2, ONNX Runtime, transformers.js or Marian, or a site that translates in the browser.

    It is compared with the original on a few sentences before the folder appears, except for Marian, which is not run.
    CTranslate2 and ONNX (transformers.js too) are extras: pip install 'vaswani_transformer[ctranslate2]' or '[onnx]'.

    Args:
        output: a new folder for the exported model
        format: of the exported model
        quantization: how CTranslate2 stores the weights (default: float32); transformers.js gets int8 beside float32, a
            site int8 or float32
        languages: of source and target, such as en de (default: as the model was trained)
    """
    from ..export.exporting import export_model

    print(f"exporting {model} to {format}", file=sys.stderr)
    if format == "web":
        result = _write_site(model, languages, output, quantization, overwrite)
    else:
        result = export_model(model, output, format, quantization, overwrite, languages or ())
    print(f"exported: {output}, {result.bytes / 1e6:,.1f} MB, {result.positions:,} positions")
    if format == "marian":
        settings = shlex.quote(f"{output}/decoder.yml")
        print(f"use it with: marian-decoder -c {settings}, on tokens of the folder's vocabularies, separated by spaces")
        return
    compared = "log-probabilities" if format == "ctranslate2" else "logits"
    print(f"{compared} differ from the model's by at most {result.difference:.2g} on this CPU (3 random sentences)")
    if format == "web":
        print(f"look at it: {shlex.join([sys.executable, '-m', 'http.server', '--directory', output])}")
    if format == "ctranslate2":
        if "int8" in (quantization or ""):
            print("on a processor without VNNI int8 differs more: give `translate` --precision float32 there")
        print(f"use it with: vaswani translate {shlex.quote(output)}")


def _write_site(model: str, languages: tuple[str, ...] | None, output: str | Path, *options):
    from ..export.to_web import export_site
    from ..hub.card_facts import known_languages

    if len(languages := languages or tuple(filter(None, known_languages(model)))) != 2:
        raise UserError(f"the languages of {model} are not known: give --languages en de (push: --language twice)")
    return export_site(model, output, languages, *options)
