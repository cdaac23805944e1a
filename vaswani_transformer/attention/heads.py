"""What each attention head does, by where its attention goes on average: previous token, delimiters, alignment, ..."""

import unicodedata
from collections.abc import Sequence

import numpy as np

from .alignments import Links
from .weights import CONTINUES, visible

NAMED_FROM = 0.5  # a measure has to reach this for a head to be named after it,
OVER_CHANCE = 1.5  # and so many times what even attention over the visible tokens would give
BROAD_FROM = 0.7  # of the greatest entropy
NEARBY = 2  # tokens away at most
#: What a head may be named after, and how it is measured. Those of self-attention, those of encoder-decoder attention.
MEASURES = {
    "previous token": "mean weight on the token before, over tokens that have one",
    "next token": "mean weight on the token after, over tokens that have one",
    "same token": "mean weight on the token itself",
    "delimiter": "mean weight on start, end and punctuation, over tokens that are none",
    "nearby": f"mean weight on tokens at most {NEARBY} away",
}
CROSS_MEASURES = {
    "alignment": "share of target words that look most at the source word they are aligned with, not at another or the"
    " end",
    "same place": "share of target words that look most at the source word at the same relative place",
    "delimiter": "mean weight on the end and on punctuation, over target tokens that are none",
}
#: Measures that are told and name no head but "broad".
SPREAD = {
    "entropy": "entropy of the weights over that of even ones, mean over tokens: 1 looks everywhere alike",
    "distance": "mean distance of what is looked at, in tokens",
}


def measures_of(kind: str) -> list[str]:
    """Names of the measures of a kind of attention, in the order of the tables."""
    return [*CROSS_MEASURES, "entropy"] if kind == "encoder-decoder" else [*MEASURES, *SPREAD]


def delimiters(tokens: Sequence[str]) -> np.ndarray:
    """Which tokens, as `readable_tokens` writes them, are delimiters: `<s>`, `</s>`, and those of punctuation alone.

    Punctuation is what Unicode calls so; symbols (`$`, `+`) and the marks that `readable_tokens` adds are none.
    """

    def is_delimiter(token: str) -> bool:
        if token in ("<s>", "</s>"):
            return True
        return token not in (CONTINUES, "") and all(unicodedata.category(letter)[0] == "P" for letter in token)

    return np.array([is_delimiter(token) for token in tokens], bool)


class HeadStatistics:
    """Sums over sentences of what the heads of one kind of attention do.

    Args:
        kind: `"encoder"`, `"decoder"` or `"encoder-decoder"`.
        layers: how many.
        heads: of each layer.
        window: the model's `attention_window`, for self-attention.
    """

    def __init__(self, kind: str, layers: int, heads: int, window: int | None = None):
        self.kind, self.shape, self.window = kind, (layers, heads), window
        self._sums = {name: np.zeros(self.shape) for name in measures_of(kind)}
        self._chances = dict.fromkeys(self._sums, 0.0)
        self._counts = dict.fromkeys(self._sums, 0)

    def _add(self, name: str, values: np.ndarray, chances: np.ndarray) -> None:
        """Values `(layers, heads, items)` of a measure, and what even attention gives, `(items,)`."""
        self._sums[name] += values.sum(axis=-1)
        self._chances[name] += float(chances.sum())
        self._counts[name] += len(chances)

    def add_self_attention(self, weights: np.ndarray, is_delimiter: np.ndarray) -> None:
        """Take in a sentence; tokens that see themselves alone say nothing and are left out.

        Args:
            weights: `(layers, heads, length, length)`.
            is_delimiter: `(length,)`.
        """
        length = weights.shape[-1]
        steps = np.arange(length) - np.arange(length)[:, None]  # key minus query
        visible_keys = visible(self.kind, length, length, self.window)
        seen = visible_keys.sum(axis=1)
        chosen = seen > 1
        patterns = {
            "previous token": (steps == -1, chosen),
            "next token": (steps == 1, chosen),
            "same token": (steps == 0, chosen),
            "nearby": (abs(steps) <= NEARBY, chosen),
            "delimiter": (np.broadcast_to(is_delimiter, visible_keys.shape), chosen & ~is_delimiter),
        }
        for name, (pattern, queries) in patterns.items():
            pattern = pattern & visible_keys
            if name in ("previous token", "next token"):
                queries = queries & pattern.any(axis=1)
            values = (weights * pattern).sum(axis=-1)[..., queries]
            self._add(name, values, (pattern.sum(axis=1) / seen)[queries])
        self._add_entropy(weights, seen)
        values = (weights * abs(steps)).sum(axis=-1)[..., chosen]
        self._add("distance", values, ((abs(steps) * visible_keys).sum(axis=1) / seen)[chosen])

    def add_encoder_decoder(
        self,
        weights: np.ndarray,
        source_delimiters: np.ndarray,
        target_delimiters: np.ndarray,
        words: tuple[Sequence[int], Sequence[int]],
        links: Links,
    ) -> None:
        """Take in a sentence pair.

        Args:
            weights: `(layers, heads, target_length, source_length)`.
            source_delimiters: `(source_length,)`.
            target_delimiters: `(target_length,)`.
            words: the word that each source and each target token belongs to, -1 for none.
            links: words known to be translations of each other; target words without a link count nowhere.
        """
        keys = weights.shape[-1]
        values = (weights * source_delimiters).sum(axis=-1)[..., ~target_delimiters]
        self._add("delimiter", values, np.full(values.shape[-1], source_delimiters.mean()))
        self._add_entropy(weights, np.full(weights.shape[-2], keys))
        # Of both sides the words, and in the last column, -1, what belongs to none.
        source_of, target_of = (np.eye(max(side) + 2)[np.asarray(side)] for side in words)
        strongest = (target_of[:, :-1].T @ weights @ source_of).argmax(axis=-1)  # (layers, heads, target_words)
        sources, targets = source_of.shape[1] - 1, target_of.shape[1] - 1
        linked = np.zeros((targets, sources + 1), bool)
        for source, target in links:
            linked[target, source] = True
        rows = np.flatnonzero(linked.any(axis=1))
        self._add("alignment", linked[rows, strongest[..., rows]], linked[rows].mean(axis=1))
        place = np.rint(np.arange(targets) * (sources - 1) / max(targets - 1, 1))
        self._add("same place", strongest == place, np.full(targets, 1 / (sources + 1)))

    def _add_entropy(self, weights: np.ndarray, seen: np.ndarray) -> None:
        chosen = seen > 1
        logs = np.log(weights, out=np.zeros(weights.shape), where=weights > 0)
        entropy = -(weights * logs).sum(axis=-1)[..., chosen] / np.log(seen[chosen])
        self._add("entropy", entropy, np.ones(chosen.sum()))

    def chances(self) -> dict[str, float | None]:
        """What even attention gives of each measure; None where no token counted."""
        return {name: self._chances[name] / count if count else None for name, count in self._counts.items()}

    def heads(self) -> list[dict]:
        """A dict a head: `layer` and `head` from 1, `role`, and `measures` by name (None where no token counted)."""
        chances, rows = self.chances(), []
        for layer, head in np.ndindex(*self.shape):
            means = {
                name: float(self._sums[name][layer, head]) / count if count else None
                for name, count in self._counts.items()
            }
            rows.append({"layer": layer + 1, "head": head + 1, "role": role(means, chances), "measures": means})
        return rows


def role(measures: dict[str, float | None], chances: dict[str, float | None]) -> str:
    """The name of a head: the largest measure that reaches `NAMED_FROM` and `OVER_CHANCE` times its chance.

    "nearby" counts where no narrower measure does; a head that nothing names is "broad" from an entropy of `BROAD_FROM`
    on, else "mixed".

    Args:
        measures: of the head, by name.
        chances: what even attention gives, by name.
    """
    reached = {
        name: value
        for name, value in measures.items()
        if name not in SPREAD and value is not None and value >= max(NAMED_FROM, OVER_CHANCE * (chances[name] or 0))
    }
    narrow = {name: value for name, value in reached.items() if name != "nearby"}
    if reached:
        return max(narrow, key=narrow.__getitem__) if narrow else "nearby"
    entropy = measures.get("entropy")
    return "broad" if entropy is not None and entropy >= BROAD_FROM else "mixed"
