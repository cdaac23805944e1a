"""Loads saved models: checks their folder and files, reads the weights, chooses device and precision."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .data.tokenization import check_tokenizer_matches, load_tokenizer
from .errors import UserError, one_line
from .files import check_path
from .hardware import PRECISIONS, choose_device
from .model.configuration_vaswani import VaswaniConfig
from .model.generation_vaswani import LENGTH_NORMALIZATIONS, take_back_defaults
from .model.modeling_vaswani import VaswaniForConditionalGeneration


def load_model(
    folder: str | Path, device: str = "auto", precision: str | None = None
) -> tuple[VaswaniForConditionalGeneration, PreTrainedTokenizerBase]:
    """A saved model in evaluation mode, and its tokenizer.

    Args:
        folder: a folder that `vaswani train` or `save_pretrained` wrote.
        device: where to put the model.
        precision: what it computes in, a name of `PRECISIONS`; as it was saved if not given.

    Raises:
        UserError: for a folder that is missing, incomplete, damaged, exported or not of this architecture, a tokenizer
            that does not match the model, a device that is not there, or an unknown precision.
    """
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}: it must be one of {', '.join(PRECISIONS)}")
    _check_folder(folder)
    model = _read_model(Path(folder))
    tokenizer = load_tokenizer(Path(folder))
    check_tokenizer_matches(tokenizer, model.config)
    take_back_defaults(model.generation_config, set())  # of models saved before training did
    return model.eval().to(device=choose_device(device), dtype=PRECISIONS.get(precision)), tokenizer


def _check_folder(folder: str | Path) -> None:
    check_path(folder, "the model folder")
    path = Path(folder)
    if not path.is_dir():
        raise UserError(
            f"{folder} is a file: give the folder of a model" if path.exists() else f"there is no model folder {folder}"
        )
    refuse_exported(path)
    if not (path / "config.json").is_file():
        is_unfinished = (path / "checkpoints").is_dir() and not (path / "model.safetensors").is_file()
        hint = " (training there is not finished: run the same `vaswani train` again)" if is_unfinished else ""
        raise UserError(f"{folder} holds no model: it has no config.json{hint}")


def _read_model(folder: Path) -> VaswaniForConditionalGeneration:
    try:
        with _quiet_transformers():
            config = read_config(folder)
            _check_generation_config(folder, config)
            model, report = VaswaniForConditionalGeneration.from_pretrained(
                folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{folder} holds no complete model: {one_line(error)}") from error
    if report["mismatched_keys"]:
        name, in_file, in_config = sorted(report["mismatched_keys"])[0]
        raise UserError(
            f"{folder} does not fit its own config.json: {name} has the shape {tuple(in_file)} and config.json makes it"
            f" {tuple(in_config)}; both files must come from the same model"
        )
    for kind in ("missing", "unexpected"):
        if names := sorted(map(str, report[f"{kind}_keys"])):
            raise UserError(f"{folder} does not fit its own config.json: {kind} weights, such as {names[0]}")
    return model


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and warnings of transformers while the body runs."""
    progress, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress:
            transformers_logging.enable_progress_bar()


def read_config(folder: Path) -> VaswaniConfig:
    """The configuration in a folder; no code in it runs. A damaged file raises an error of any kind."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise UserError(f"{folder} has no usable config.json: it must hold one JSON object")
    if (kind := values.get("model_type")) != VaswaniConfig.model_type:
        raise UserError(f"{folder} holds a {kind!r} model: this command takes models of type 'vaswani'")
    return VaswaniConfig.from_pretrained(folder)


# Settings of `generation_config.json`: type, least and greatest value; greater ones would fill the memory.
_GENERATION_RULES = {
    "num_beams": (int, 1, 10_000),
    "num_return_sequences": (int, 1, 10_000),
    "max_extra_tokens": (int, 0, 10**6),
    "max_new_tokens": (int, 1, 10**6),
    "max_length": (int, 1, 10**6),
    "min_length": (int, 0, 10**6),
    "length_penalty": (float, -100, 100),
    "temperature": (float, 1e-6, 10**6),
    "repetition_penalty": (float, 1e-6, 10**6),
}


def _check_generation_config(folder: Path, config: VaswaniConfig) -> None:
    """Raise `UserError` for a setting of `generation_config.json` that would fill the memory or fit no vocabulary."""
    path = folder / "generation_config.json"
    if not path.exists():
        return
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it must hold one JSON object")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({one_line(error)}): copy it again, or delete it for the defaults"
        ) from error
    for name, value in settings.items():
        if value is not None and (rule := _broken_rule(name, value, config)):
            raise UserError(f"{name} in {path} is {value!r}: it must be {rule}")


def _broken_rule(name: str, value: Any, config: VaswaniConfig) -> str | None:
    """What a setting must be, if it is not."""
    if name in _GENERATION_RULES:
        kind, least, most = _GENERATION_RULES[name]
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not (is_number and least <= value <= most):
            return f"{'a whole number' if kind is int else 'a number'} from {least:g} to {most:,}"
    if name == "length_normalization" and value not in LENGTH_NORMALIZATIONS:
        return f"one of {', '.join(LENGTH_NORMALIZATIONS)}"
    if name.endswith("_token_id"):
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < config.vocab_size for token in ids):
            return f"a token id, at least 0 and below {config.vocab_size}"
    return None


FACTS = "export.json"  # in the folder of an exported model: what it is and what it needs


def is_exported(folder: str | Path) -> bool:
    """Whether a folder was written by `vaswani export`."""
    return (Path(folder) / FACTS).is_file()


def refuse_exported(folder: str | Path) -> None:
    """Raise `UserError` for the folder of an exported model, with what can be done with it."""
    if not is_exported(folder):
        return
    path = Path(folder) / FACTS
    try:
        format = json.loads(path.read_text(encoding="utf-8"))["format"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({one_line(error)}): export the model again") from error
    use = {
        "ctranslate2": "`vaswani translate`, `score` and `evaluate` and CTranslate2Translator take it",
        "onnx": "ONNX Runtime runs it (scripts/translate_onnx.py)",
    }
    raise UserError(
        f"{folder} holds a model exported to {format}, which cannot be made a model again: give the folder that it was"
        f" exported from; {use.get(format, 'another program takes it')}"
    )
