"""The numbers of a search: their ranges, the limit of an output, the length penalty (Section 6.1). Imports no torch."""

from numbers import Integral, Real

#: Rules for the score of a hypothesis: the paper's `length_normalization`, and transformers' own |Y|^alpha.
LENGTH_NORMALIZATIONS = ("gnmt", "power")

#: How many tokens longer than its source an output may get (Section 6.1: "input length + 50").
MAX_EXTRA_TOKENS = 50

#: Type, least and greatest value of the settings of a search, for recipes, commands, `generate()` and model folders.
#: Greater ones would only fill the memory or the time.
SETTING_RANGES: dict[str, tuple[type, float, float]] = {
    "num_beams": (int, 1, 10_000),
    "num_return_sequences": (int, 1, 10_000),
    "length_penalty": (float, -100, 100),
    "max_extra_tokens": (int, 0, 10**6),
    "max_new_tokens": (int, 1, 10**6),
    "max_length": (int, 2, 10**6),  # the decoder's start token counts
    "min_new_tokens": (int, 0, 10**6),
    "max_time": (float, 0, 10**9),
    "encoder_no_repeat_ngram_size": (int, 0, 10**6),
    "repetition_penalty": (float, 1e-6, 10**6),
    "temperature": (float, 1e-6, 10**6),
    "top_k": (int, 0, 10**9),
    "top_p": (float, 1e-6, 1),
    "top_h": (float, 1e-6, 1),
    "typical_p": (float, 1e-6, 1),
}


def broken_range(name: str, value) -> str | None:
    """Return the rule of a setting that `value` breaks, or None; a NaN breaks any rule of a number."""
    if name == "length_normalization":
        return None if value in LENGTH_NORMALIZATIONS else f"one of {', '.join(LENGTH_NORMALIZATIONS)}"
    kind, least, most = SETTING_RANGES[name]
    is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if is_number and least <= value <= most:
        return None
    return f"{'a whole number' if kind is int else 'a number'} from {least:g} to {most:,}"


def length_normalization(length: int, length_penalty: float, rule: str = LENGTH_NORMALIZATIONS[0]) -> float:
    r"""Section 6.1, the length penalty: a hypothesis' log-probability is divided by \(((5 + |Y|) / 6)^\alpha\).

    The paper takes the rule and alpha = 0.6 from Wu et al. (2016), "Google's Neural Machine Translation System",
    Equation 14. transformers' own rule is \(|Y|^\alpha\), which treats short outputs very differently.

    Args:
        length: generated tokens |Y|, including the end token; no token at all counts as one by the rule `"power"`.
        length_penalty: alpha; 0 compares plain log-probabilities.
        rule: one of `LENGTH_NORMALIZATIONS`.
    """
    return (max(length, 1) if rule == "power" else (5 + length) / 6) ** length_penalty
