"""Loading saved models: their folder, settings and weights, device and precision."""

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
from .errors import UserError, reading
from .exported import refuse_exported
from .files import check_path
from .hardware import PRECISIONS, choose_device
from .json_and_yaml import read_json
from .model.checkpoint_vaswani import WEIGHT_TYPES, check_finite
from .model.configuration_vaswani import VaswaniConfig
from .model.modeling_vaswani import VaswaniForConditionalGeneration
from .model.settings_vaswani import SETTING_RANGES, broken_range


def load_model(
    folder: str | Path, device: str = "auto", precision: str | None = None
) -> tuple[VaswaniForConditionalGeneration, PreTrainedTokenizerBase]:
    """Load a saved model in evaluation mode, and its tokenizer.

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
    if precision is not None and (dtype := getattr(torch, precision)) != model.dtype:
        model = model.to(dtype)
        with reading(f"{folder} in {precision}"):  # a greater range, such as bfloat16's, may hold them
            check_finite(model.named_parameters(), "the model")
    return model.to(device=choose_device(device)), tokenizer


def check_folder(folder: str | Path) -> None:
    """Raise `UserError` for a folder that is missing, or holds no model, an exported one or an adapter."""
    check_path(folder, "the model folder")
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"there is no model folder {folder}")
    refuse_exported(path)
    if not (path / "config.json").is_file():
        is_unfinished = (path / "checkpoints").is_dir() and not (path / "model.safetensors").is_file()
        hint = " (training there is not finished: run the same `vaswani train` again)" if is_unfinished else ""
        raise UserError(f"{folder} holds no model: it has no config.json{hint}")
    refuse_special_files(path)  # a pipe would be waited for
    if (path / "adapter_config.json").exists():  # transformers would fetch the model that it names
        raise UserError(
            f"{folder} holds an adapter (adapter_config.json): load the model that it belongs to, and add the adapter"
            " with model.load_adapter; or remove that file, if the weights are whole without it"
        )


def _read_model(folder: Path) -> VaswaniForConditionalGeneration:
    settings = folder / "generation_config.json"
    with quiet_transformers():
        with reading(folder):
            config = read_config(folder)
            check_generation_config(settings, config.target_vocab_size)
            model, report = VaswaniForConditionalGeneration.from_pretrained(
                folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True
            )
        for kind in ("missing", "unexpected", "mismatched"):
            if keys := report[f"{kind}_keys"]:
                example = min(map(str, keys))  # a name, or a name with the shapes in the file and of config.json
                raise UserError(f"{folder} does not fit its own config.json: {kind} weights, such as {example}")
        for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(model.generation_config, name) is None:  # a generation_config.json without it
                setattr(model.generation_config, name, getattr(model.config, name))
        with reading(settings):
            model.eval().open_search()  # transformers checks values and makes all processors
    return model


# These settings, and torch's default type, which transformers changes while it loads, are of the whole process: two
# threads at once would each put back what the other has changed.
_one_at_a_time = RLock()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers while the body runs, in one thread at a time."""
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
    """Return the configuration in a folder; no code in it runs. Values of a wrong kind raise errors of any kind."""
    values = read_json(folder / "config.json", "copy it again")
    if (kind := values.get("model_type")) != VaswaniConfig.model_type:
        raise UserError(f"{folder} holds a {kind!r} model: this command takes models of type 'vaswani'")
    types = (None, *(str(kind).removeprefix("torch.") for kind in WEIGHT_TYPES.values()))
    # Weights would be cast to integers, or read as quantized ones, without a word.
    names = [name for name in ("dtype", "torch_dtype") if values.get(name) not in types]
    names += [name for name in ("quantization_config", "compression_config") if values.get(name) is not None]
    if names:
        raise UserError(f"{names[0]} in {folder}/config.json asks for other weights than those of {types[1:]}")
    return VaswaniConfig.from_dict(values)


# What the search takes from `generation_config.json` besides `SETTING_RANGES`: tokens, by the type of their values;
# flags; and what transformers and the search check themselves, or what has no effect without a second model.
_IDS = {
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id"), int),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), int | list),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), list),
}
_FLAGS = {
    *("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "_from_model_config"),
}
_OTHERS = {
    *("bad_words_ids", "sequence_bias", "exponential_decay_length_penalty", "early_stopping", "length_normalization"),
    *("num_assistant_tokens", "assistant_confidence_threshold", "num_assistant_tokens_schedule"),
    *("assistant_lookbehind", "target_lookbehind"),
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
    """Check the settings of a `generation_config.json`, if there is one, that a search would ignore or misread.

    Raises:
        UserError: for a damaged file, a setting that our search does not follow, and a number, flag or token of no
            use, naming the setting.
    """
    with contextlib.suppress(FileNotFoundError):
        # NaN is let through, so that the setting is named.
        settings = read_json(path, "copy it again, or delete it for the defaults", finite=False)
        check_settings(settings, path, vocab_size)


def check_settings(settings: dict[str, Any], path: Path, vocab_size: int) -> None:
    """Check as `check_generation_config` does, settings that were read from `path` already."""
    draws = settings.get("do_sample") not in (None, False)
    for name, value in settings.items():
        is_unset = value is None and not hasattr(GenerationConfig, name)  # nor hides one of its methods
        is_unused = name in _OF_SAMPLING and not draws and isinstance(value, int | float) and math.isfinite(value)
        if is_unset or is_unused or name in _ABOUT_THE_FILE or value in _NO_EFFECT.get(name, ()):
            continue
        rule = None
        if name in SETTING_RANGES:
            rule = broken_range(name, value)
        elif name in _FLAGS:
            rule = None if isinstance(value, bool) else "true or false"
        elif name in _IDS:
            is_right = isinstance(value, _IDS[name]) and _are_ids(value, vocab_size)
            rule = None if is_right else f"a token id, or a list of some, at least 0 and below {vocab_size}"
        elif name not in _OTHERS:
            raise UserError(f"{name!r:.100} in {path} is no setting that this search supports: remove it from the file")
        if rule:
            raise UserError(f"{name} in {path} is {value!r:.200}: it must be {rule}")
    with reading(path):
        GenerationConfig(**settings)


def _are_ids(value: Any, vocab_size: int) -> bool:
    """Return whether a value is a token of a vocabulary, or a list of some and not of all."""
    ids = value if isinstance(value, list) else [value]
    return 0 < len(ids) < vocab_size and all(type(token) is int and 0 <= token < vocab_size for token in ids)
