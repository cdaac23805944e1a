"""Loads saved models: checks their folder and files, reads the weights, chooses device and precision."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .data.tokenization import check_tokenizer_matches, load_tokenizer, refuse_special_files
from .errors import UserError, one_line
from .files import check_path
from .hardware import PRECISIONS, choose_device
from .json_and_yaml import read_json
from .model.checkpoint_vaswani import WEIGHT_TYPES, check_finite, check_shard_name
from .model.configuration_vaswani import VaswaniConfig
from .model.generation_vaswani import unset_trainer_defaults
from .model.modeling_vaswani import VaswaniForConditionalGeneration
from .model.settings_vaswani import LENGTH_NORMALIZATIONS, SETTING_RANGES, broken_range


def load_model(
    folder: str | Path, device: str = "auto", precision: str | None = None
) -> tuple[VaswaniForConditionalGeneration, PreTrainedTokenizerBase]:
    """A saved model in evaluation mode, and its tokenizer.

    Args:
        folder: a folder that `vaswani train` or `save_pretrained` wrote.
        device: where to put the model.
        precision: what it computes in, a name of `PRECISIONS`; as it was saved if not given.

    Raises:
        UserError: for a folder that is missing, incomplete, damaged, exported or not of this architecture, weights that
            are not finite (in this precision either), settings that the search does not support, a tokenizer that does
            not match the model or does not end texts, a device that is not there, or an unknown precision.
    """
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}: it must be one of {', '.join(PRECISIONS)}")
    check_folder(folder)
    model = _read_model(Path(folder))
    tokenizer = load_tokenizer(Path(folder))
    check_tokenizer_matches(tokenizer, model.config)
    unset_trainer_defaults(model.generation_config, set())  # of models saved before training did
    for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(model.generation_config, name) is None:  # a generation_config.json without it
            setattr(model.generation_config, name, getattr(model.config, name))
    if precision is not None and (dtype := getattr(torch, precision)) != model.dtype:
        model = model.to(dtype)
        try:
            check_finite(model.named_parameters(), f"{folder} in {precision}")
        except ValueError as error:
            raise UserError(f"{one_line(error)}; or give a precision of a greater range, such as bfloat16") from error
    return model.eval().to(device=choose_device(device)), tokenizer


def check_folder(folder: str | Path) -> None:
    """Raise `UserError` for a folder that is missing, or holds no model, an exported one or an adapter."""
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
    refuse_special_files(path)
    if (path / "adapter_config.json").exists():  # transformers would fetch the model that it names
        raise UserError(
            f"{folder} holds an adapter (adapter_config.json): load the model that it belongs to, and add the adapter"
            " with model.load_adapter; or remove that file, if the weights are whole without it"
        )
    _check_index(path)


def _check_index(folder: Path) -> None:
    """Refuse an index of weight files that is damaged or leads out of the folder."""
    path = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not path.exists():
        return
    files = read_json(path, "copy the files of the model again").get("weight_map")
    if not isinstance(files, dict) or not files:
        raise UserError(f"{path} is damaged (weight_map must be a table of files by weight): copy the model again")
    try:
        for name in files.values():
            check_shard_name(name)
    except ValueError as error:
        raise UserError(f"{path} cannot be used: {error}") from error


def _read_model(folder: Path) -> VaswaniForConditionalGeneration:
    try:
        with quiet_transformers():
            config = read_config(folder)
            check_generation_config(folder / "generation_config.json", config.target_vocab_size)
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


# These settings, and torch's default type, which transformers changes while it loads, are of the whole process: two
# threads at once would each put back what the other has changed.
_one_at_a_time = RLock()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and warnings of transformers while the body runs, in one thread at a time."""
    with _one_at_a_time:
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
    """The configuration in a folder; no code in it runs. Values of a wrong kind raise errors of any kind."""
    values = read_json(folder / "config.json", "copy it again")
    if (kind := values.get("model_type")) != VaswaniConfig.model_type:
        raise UserError(f"{folder} holds a {kind!r} model: this command takes models of type 'vaswani'")
    for name in ("quantization_config", "compression_config"):
        if values.get(name) is not None:
            raise UserError(f"{folder}/config.json has a {name}: give a model whose weights are not quantized")
    types = [str(kind).removeprefix("torch.") for kind in WEIGHT_TYPES.values()]
    for name in ("dtype", "torch_dtype"):
        if values.get(name) is not None and values[name] not in types:
            raise UserError(
                f"{name} in {folder}/config.json is {values[name]!r:.100}: it must be one of {', '.join(types)}"
            )
    return VaswaniConfig.from_dict(values)


def _is_ids(value: Any, vocab_size: int) -> bool:
    """Whether a value is a list of one or more tokens of a vocabulary, and not of all."""
    is_list = isinstance(value, list) and 0 < len(value) < vocab_size
    return is_list and all(type(one) is int and 0 <= one < vocab_size for one in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id_or_ids(value: Any, vocab_size: int) -> bool:
    return _is_ids(value if isinstance(value, list) else [value], vocab_size)


def _is_phrases(value: Any, vocab_size: int) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_ids(one, vocab_size) for one in value)


def _is_biases(value: Any, vocab_size: int) -> bool:
    pairs = isinstance(value, list) and bool(value) and all(isinstance(one, list) and len(one) == 2 for one in value)
    return pairs and all(_is_ids(ids, vocab_size) and _is_number(bias) and abs(bias) <= 10**6 for ids, bias in value)


def _is_decay(value: Any, _: int) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and type(value[0]) is int and _is_number(value[1])
    return is_pair and 0 <= value[0] <= 10**6 and 0 < value[1] <= 100


_TOKEN = (lambda value, vocab_size: _is_ids([value], vocab_size), "a token id, at least 0 and below {}")
_TOKENS = (_is_id_or_ids, "a token id, or a list of them, at least 0 and below {}")
_ID_LIST = (_is_ids, "a list of token ids, each at least 0 and below {}, and not of all tokens")
_FLAG = (lambda value, _: isinstance(value, bool), "true or false")
# What the search takes from `generation_config.json` besides `SETTING_RANGES`: a test of value and vocabulary size, and
# the rule in words.
_GENERATION_RULES = {
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id"), _TOKEN),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), _TOKENS),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _ID_LIST),
    "bad_words_ids": (_is_phrases, "a list of lists of token ids, each at least 0 and below {}"),
    "sequence_bias": (_is_biases, "a list of pairs, a list of token ids below {} and a number within a million of 0"),
    "exponential_decay_length_penalty": (_is_decay, "a whole number of tokens and a factor above 0 and at most 100"),
    **dict.fromkeys(
        (
            *("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "return_dict_in_generate"),
            *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "_from_model_config"),
        ),
        _FLAG,
    ),
    "early_stopping": (lambda value, _: isinstance(value, bool) or value == "never", 'true, false or "never"'),
    "length_normalization": (
        lambda value, _: value in LENGTH_NORMALIZATIONS,
        f"one of {', '.join(LENGTH_NORMALIZATIONS)}",
    ),
    # of drafts, which have no effect unless a program gives a second model
    "num_assistant_tokens": (lambda value, _: type(value) is int and 0 < value <= 10**6, "1 or more"),
    "assistant_confidence_threshold": (lambda value, _: _is_number(value) and 0 <= value <= 1, "from 0 to 1"),
    "num_assistant_tokens_schedule": (
        lambda value, _: value in ("constant", "heuristic", "heuristic_transient"),
        "constant, heuristic or heuristic_transient",
    ),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), (lambda value, _: type(value) is int, "a number")),
}
# Values at which settings that the search does not follow do nothing; transformers writes some of them.
_NO_EFFECT = {
    "num_beam_groups": [1], "diversity_penalty": [0.0], "guidance_scale": [1.0], "token_healing": [False],
    "low_memory": [False], "is_assistant": [False], "use_mtp": [False], "disable_compile": [True, False],
    "cache_implementation": ["dynamic"], "penalty_alpha": [0.0], "return_legacy_cache": [True, False],
    "suppress_tokens": [[]], "begin_suppress_tokens": [[]], "generation_kwargs": [{}],
}  # fmt: skip
# Settings without effect unless tokens are drawn; `vaswani translate --sample` checks them then.
_OF_SAMPLING = ("temperature", "top_k", "top_p")
_ABOUT_THE_FILE = {"transformers_version", "_commit_hash"}


def check_generation_config(path: Path, vocab_size: int) -> None:
    """Check every setting of a `generation_config.json`, if there is one.

    Raises:
        UserError: for a damaged file, a setting that our search does not follow, and a value that it cannot work with,
            naming the setting.
    """
    try:
        # NaN is let through, so that the setting is named.
        settings = read_json(path, "copy it again, or delete it for the defaults", finite=False)
    except FileNotFoundError:
        return
    check_settings(settings, path, vocab_size)


def check_settings(settings: dict[str, Any], path: Path, vocab_size: int) -> None:
    """As `check_generation_config`, of settings that were read from `path` already."""
    draws = settings.get("do_sample") not in (None, False)
    for name, value in settings.items():
        is_unset = value is None and not hasattr(GenerationConfig, name)  # nor hides one of its methods
        is_unused = name in _OF_SAMPLING and _is_number(value) and math.isfinite(value) and not draws
        if is_unset or is_unused or name in _ABOUT_THE_FILE or value in _NO_EFFECT.get(name, ()):
            continue
        if name in SETTING_RANGES:
            rule = broken_range(name, value)
        elif name in _GENERATION_RULES:
            is_right, rule = _GENERATION_RULES[name]
            rule = None if is_right(value, vocab_size) else rule.format(vocab_size)
        else:
            raise UserError(f"{name!r:.100} in {path} is no setting that this search supports: remove it from the file")
        if rule:
            raise UserError(f"{name} in {path} is {value!r:.200}: it must be {rule}")
    try:
        GenerationConfig(**settings)
    except Exception as error:  # combinations of settings that transformers refuses
        raise UserError(
            f"{path} cannot be used ({one_line(error)}): change it, or delete it for the defaults"
        ) from error


FACTS = "export.json"  # in the folder of an exported model: what it is and what it needs


def is_exported(folder: str | Path) -> bool:
    """Whether a folder was written by `vaswani export`."""
    return (Path(folder) / FACTS).is_file()


def refuse_exported(folder: str | Path) -> None:
    """Raise `UserError` for the folder of an exported model, with what can be done with it."""
    if not is_exported(folder):
        return
    path = Path(folder) / FACTS
    format = read_json(path, "export the model again").get("format")
    use = {
        "ctranslate2": "`vaswani translate`, `score` and `evaluate` and CTranslate2Translator take it",
        "onnx": "ONNX Runtime runs it (scripts/translate_onnx.py)",
        "marian": "marian-decoder runs it, and `vaswani import` reads its model.npz",
    }
    raise UserError(
        f"{folder} holds a model exported to {format}, which cannot be made a model again: give the folder that it was"
        f" exported from; {use.get(str(format), 'another program takes it')}"
    )
