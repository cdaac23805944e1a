"""The search settings of a model exported to CTranslate2: those that its search follows, and those that it refuses."""

import os
from pathlib import Path

from transformers import GenerationConfig

from ..errors import UserError
from ..loading import check_generation_config
from ..model.generation_vaswani import unset_trainer_defaults

# Settings of a generation configuration that this search does not follow, and the values at which they do nothing.
_NEUTRAL = {
    "do_sample": False, "num_beam_groups": 1, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0,
    "begin_suppress_tokens": None, "sequence_bias": None, "forced_bos_token_id": None,
    "exponential_decay_length_penalty": None, "guidance_scale": None, "diversity_penalty": 0.0, "early_stopping": False,
}  # fmt: skip


def read_generation_config(folder: str | Path, vocab_size: int) -> GenerationConfig:
    """The exported `generation_config.json`, or the paper's for want of one."""
    path = Path(folder) / "generation_config.json"
    if not os.path.lexists(path):
        return GenerationConfig(num_beams=4, length_penalty=0.6)
    check_generation_config(path, vocab_size)
    settings = GenerationConfig.from_pretrained(folder)
    unset_trainer_defaults(settings, set())
    for name in _NEUTRAL:
        value = getattr(settings, name, None)
        if not does_nothing(name, value):
            raise UserError(
                f"{name} in {path} is {value!r}: the search of an exported model does not follow it;"
                " delete it there, or translate with the model itself"
            )
    return settings


def does_nothing(name: str, value) -> bool:
    """Whether a setting leaves every result as it is."""
    if name == "early_stopping" and value == "never":  # the same as False to a search that ends on a bound anyway
        return True
    return value is None or value == _NEUTRAL.get(name)


def suppressed(settings: GenerationConfig, vocabulary: list[str], eos_token_id: int) -> list[list[str]]:
    """The tokens of `suppress_tokens` and `bad_words_ids`, as CTranslate2 takes them."""
    words = [word for word in settings.bad_words_ids or () if word != [eos_token_id]]  # as transformers does
    sequences = [[token] for token in settings.suppress_tokens or ()] + words
    return [[vocabulary[number] for number in sequence] for sequence in sequences]


def is_end_forced(settings: GenerationConfig, folder: str | Path, eos_token_id: int) -> bool:
    """Whether the last token that an output may have is the end token, at no cost.

    Raises:
        UserError: if it is another token.
    """
    end = settings.forced_eos_token_id
    if end not in (None, eos_token_id, [eos_token_id]):
        raise UserError(
            f"forced_eos_token_id in {folder}/generation_config.json is {end}: the search of an exported model can"
            f" force its end token alone, {eos_token_id}"
        )
    return end is not None
