"""Options of the commands that use a model, and the model and the search that they name."""

import argparse
import math
from pathlib import Path
from typing import Any

from ..decoding.ensemble import COMBINATIONS
from ..errors import UserError
from ..model.settings_vaswani import SETTING_RANGES, broken_range
from .files import option_flag


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the model, for commands that take exported ones too."""
    parser.add_argument("model", metavar="MODEL", help="model folder, or one exported to CTranslate2")


def add_model_options(parser: argparse.ArgumentParser, ensemble: bool = True) -> None:
    """Add how the model computes, and with which others."""
    group = parser.add_argument_group("model")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps, ...; auto: an accelerator if any")
    how = "float32, bfloat16, float16, int8 on a CPU, or a type of CTranslate2 (default: as the model was saved)"
    group.add_argument("--precision", metavar="TYPE", help=how)
    how = "source tokens in a batch (default: 2048)"
    group.add_argument("--tokens-per-batch", metavar="N", type=int, default=2048, help=how)
    if ensemble:
        how = "further models that translate together with MODEL; all words up to the next option"
        group.add_argument("--ensemble", metavar="FOLDER", nargs="+", default=[], help=how)
        how = "what the ensemble averages (default: probabilities)"
        group.add_argument("--combine", choices=COMBINATIONS, help=how)


def add_length_penalty(parser: Any) -> None:
    """Add `--length-penalty` to a parser or to one of its groups."""
    how = "alpha of the length normalisation (default: as the model was saved)"
    parser.add_argument("--length-penalty", metavar="X", type=float, help=how)


def add_window(parser: Any, items: str) -> None:
    """Add `--window`, a number of lines, sentences or pairs."""
    how = f"{items} that are sorted by length and written together (default: 2000)"
    parser.add_argument("--window", metavar="N", type=int, help=how)


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the search."""
    group = parser.add_argument_group("search")
    group.add_argument("--beams", metavar="N", type=int, help="beam size (default: as the model was saved)")
    add_length_penalty(group)
    how = "longest output in tokens (default: as the model was saved, or 50 more than the source has)"
    group.add_argument("--max-new-tokens", metavar="N", type=int, help=how)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the settings of random translations."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--sample", action="store_true", help="draw translations at random instead of searching")
    group.add_argument("--temperature", metavar="X", type=float, help="below 1 likelier tokens, above 1 rarer ones")
    group.add_argument("--top-k", metavar="N", type=int, help="draw from the N likeliest tokens only")
    how = "draw only from the likeliest tokens that make up X of the probability"
    group.add_argument("--top-p", metavar="X", type=float, help=how)
    group.add_argument("--seed", metavar="N", type=int, help="the same seed gives the same translations")


# Least and greatest value of each option; those of the search have the ranges of the settings that they stand for.
_RANGES = (
    {
        "tokens_per_batch": (1, 10**9),
        "max_source_tokens": (2, 10**6),
        "window": (1, 10**7),
        "top_k": (1, 10**9),  # 0, no limit, is said by leaving it out
        "seed": (0, 2**62),
        "port": (0, 65_535),
        "max_models": (1, 10**6),
        "max_characters": (1, 10**8),
        "queue": (1, 10**8),
        "timeout": (0.1, 10**6),
    }
    | {
        option: SETTING_RANGES[setting][1:]
        for option, setting in (
            *(("beams", "num_beams"), ("nbest", "num_return_sequences")),
            *((name, name) for name in ("max_new_tokens", "length_penalty", "temperature", "top_p")),
        )
    }
)


def check_options(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for an option that is wrong whatever the model is."""
    for name, (least, most) in _RANGES.items():
        value = getattr(arguments, name, None)
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            raise UserError(f"{option_flag(name)} is {value}: it must be from {least:g} to {most:,}")
    if getattr(arguments, "combine", None) is not None and not arguments.ensemble:
        raise UserError("--combine is for several models: give --ensemble too, or leave it out")
    if not getattr(arguments, "sample", True):
        for name in ("temperature", "top_k", "top_p", "seed"):
            if getattr(arguments, name) is not None:
                raise UserError(f"{option_flag(name)} is for sampling: give --sample too, or leave it out")


def load_for_decoding(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model or the ensemble that the options name, and its tokenizer."""
    from ..export.engine import load_for_decoding as load

    ensemble = getattr(arguments, "ensemble", [])
    for folder in ensemble if getattr(arguments, "sentences", None) is not None else ():
        if not Path(folder).exists():
            raise UserError(f"--ensemble: there is no model folder {folder} (sentences go before --ensemble)")
    needs = [
        name for name in ("sample", "alignments", "glossary", "prefix", "constrained") if getattr(arguments, name, None)
    ]
    combine = getattr(arguments, "combine", None)
    folders, needs = [arguments.model, *ensemble], [option_flag(name) for name in needs]
    return load(folders, arguments.device, arguments.precision, combine=combine, needs=needs)


def generate_options(arguments: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The options for `generate()`; None where the model's own configuration decides."""
    own, beams, nbest = model.generation_config, arguments.beams, getattr(arguments, "nbest", None)
    options = {"length_penalty": arguments.length_penalty, "max_new_tokens": arguments.max_new_tokens}
    if getattr(arguments, "sample", False):
        beams = beams or 1
        top_k = 0 if arguments.top_k is None and own.top_k is None else arguments.top_k  # the library's default is 50
        drawing = {"temperature": arguments.temperature, "top_k": top_k, "top_p": arguments.top_p}
        for name in [name for name, value in drawing.items() if value is None and getattr(own, name) is not None]:
            if rule := broken_range(name, getattr(own, name)):  # of no effect, and not checked, without --sample
                raise UserError(
                    f"{name} in the model's generation_config.json is {getattr(own, name)}: with --sample it must be"
                    f" {rule}; give {option_flag(name)}"
                )
        options |= {"do_sample": True} | drawing
    options |= {"num_beams": beams, "num_return_sequences": nbest}
    if nbest is None and (own.num_return_sequences or 1) > 1:
        options["num_return_sequences"] = 1  # one line out for one line in
    if nbest is not None:
        size = beams or own.num_beams or 1
        draws = size == 1 and (options.get("do_sample") or own.do_sample)
        if nbest > size and not draws:
            raise UserError(f"--nbest is {nbest} and the beam size is {size}: give --beams {nbest} or more")
    return options
