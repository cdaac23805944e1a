"""The exported weights in CTranslate2, and the search settings that it follows."""

from pathlib import Path
from types import SimpleNamespace

import ctranslate2

from ..errors import UserError, reading
from ..json_and_yaml import read_json
from ..model.settings_vaswani import LENGTH_NORMALIZATIONS, SETTING_RANGES, broken_range
from .facts import NotExpressibleError

#: Settings of numbers, and rules, that the search follows.
FOLLOWED = {
    "num_beams", "num_return_sequences", "length_penalty", "max_extra_tokens", "max_new_tokens", "max_length",
    "length_normalization",
}  # fmt: skip
# Those of tokens, and those that change no output of a search.
_TOKENS = {
    "suppress_tokens", "bad_words_ids", "forced_eos_token_id", "eos_token_id", "pad_token_id", "bos_token_id",
    "decoder_start_token_id",
}  # fmt: skip
_HARMLESS = {
    "transformers_version", "_from_model_config", "_commit_hash", "use_cache", "return_dict_in_generate",
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "cache_implementation",
    "disable_compile", "return_legacy_cache", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
}  # fmt: skip
# Settings that the search does not follow, and the values at which they do nothing.
_NEUTRAL = {
    "do_sample": False, "num_beam_groups": 1, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0,
    "diversity_penalty": 0.0, "renormalize_logits": True, "guidance_scale": 1.0, "penalty_alpha": 0.0,
    "early_stopping": "never",  # as False to a search that ends on a bound anyway
}  # fmt: skip


def read_settings(folder: str | Path) -> SimpleNamespace:
    """Return the exported `generation_config.json`, or the paper's settings where there is none.

    Raises:
        UserError: for a damaged file, and a value out of range.
        NotExpressibleError: for a setting that the search does not follow.
    """
    path = Path(folder) / "generation_config.json"
    values = {"num_beams": 4, "length_penalty": 0.6}
    if path.exists() or path.is_symlink():
        values = read_json(path)
    settings = dict.fromkeys((*FOLLOWED, *_TOKENS, "do_sample", "top_k"))
    for name, value in values.items():
        check_setting(name, value, f" in {path}")
        if name in settings:
            settings[name] = value
    return SimpleNamespace(**settings)


def check_setting(name: str, value, place: str = "") -> None:
    """Refuse a setting that the search cannot follow; `place` says where it is set."""
    if (value in (None, False, [], {}) and name not in FOLLOWED) or value == _NEUTRAL.get(name, {}):
        return
    rule = broken_range(name, value) if name in FOLLOWED & SETTING_RANGES.keys() and value is not None else None
    if name == "length_normalization" and value not in (None, *LENGTH_NORMALIZATIONS):
        rule = f"one of {', '.join(LENGTH_NORMALIZATIONS)}"
    if rule:
        raise UserError(f"{name}{place} is {value!r:.100}: it must be {rule}")
    if name not in FOLLOWED | _TOKENS | _HARMLESS:
        raise NotExpressibleError(
            f"{name}{place} is {value!r:.100}, which the search of an exported model does not follow: leave it out, or"
            " translate with the model itself"
        )


def open_engine(folder: str | Path, device: str = "cpu", **options) -> ctranslate2.Translator:
    """Return CTranslate2's own translator of an exported folder.

    Raises:
        UserError: for files that are missing or damaged, and what CTranslate2 cannot load on this device.
    """
    kind, _, number = device.partition(":")
    with reading(folder):
        for name in ("model.bin", "config.json"):
            if not (Path(folder) / name).is_file():  # a pipe would be waited for
                raise ValueError(f"there is no file {name}: export the model again")
        return ctranslate2.Translator(str(folder), device=kind, device_index=int(number or 0), **options)
