"""How sure a model is of the words that it has written: the probability of each, given those before it.

The probability of a word is that of its tokens together, and the confidence in a sentence is the mean of its words'. It
ranks words and sentences; how many words are right it does not say, which a model over- or underestimates.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from ..data.words import word_places, words_at, words_of
from .scoring import PairScore, score_tokens

Words = list[tuple[str, float]]  # words of an output and the probability of each


def word_probabilities(score: PairScore) -> Words:
    """Return the words of a scored output; the end token is none, and a token of several words counts for each."""
    tokens, text = score.tokens[:-1], "".join(score.tokens[:-1])
    ends = list(accumulate(map(len, tokens)))
    # A token of no text is a part of the character before it.
    spans = [(end - max(len(token), 1), end) for token, end in zip(tokens, ends, strict=True)]
    sums = [0.0] * len(word_places(text))
    for words, log_probability in zip(words_at(text, spans), score.log_probabilities[:-1], strict=True):
        for number in words:
            sums[number] += log_probability
    return list(zip(words_of(text), map(math.exp, sums), strict=True))


def mean_confidence(words: Words) -> float:
    """Return the mean probability of words; 1 for no words."""
    return sum(probability for _, probability in words) / len(words) if words else 1.0


def word_confidences(model, tokenizer, sources: Sequence[str], outputs: Sequence[str]) -> list[Words]:
    """Return the words of each output of a source and their probabilities; an empty output has none.

    Raises:
        UserError: as `score_tokens`.
    """
    filled = [number for number, output in enumerate(outputs) if output.strip()]
    pairs = ([side[number] for number in filled] for side in (sources, outputs))
    words = dict(zip(filled, map(word_probabilities, score_tokens(model, tokenizer, *pairs)), strict=True))
    return [words.get(number, []) for number in range(len(outputs))]
