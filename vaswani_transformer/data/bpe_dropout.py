"""BPE-dropout (Provilkov et al., 2020, arXiv 1910.13267): each text in several segmentations, drawn by a seed."""

import json
import random
from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from typing import Any

from tokenizers.models import BPE

from ..errors import UserError
from .tokenization import has_two_sides

SEGMENTATIONS = 32  # of each text: an epoch has each so many times
_LONGEST = 100  # letters of a word; where there are no spaces a word may be a whole line
_MOST_WORDS = 200_000  # whose segmentations are remembered


class BpeDropout:
    """Segmentations of texts in which merges of byte-pair encoding are left out at random.

    The library `tokenizers` has BPE-dropout too, without a seed: a run could neither be resumed nor repeated. What the
    merges do not make of a word's letters stays as it is: tokens that were added, bytes, words of over 100 letters.

    Args:
        tokenizer: fast tokenizer of byte-pair encoding with one side, such as `train_tokenizer` makes.
        dropout: probability with which a merge is left out each time that it could be made.
        seed: with a word, determines its segmentations.

    Raises:
        UserError: for a tokenizer of another kind, and for a probability that is none.
    """

    def __init__(self, tokenizer: Any, dropout: float, seed: int = 0):
        if not 0 <= dropout < 1:
            raise UserError(f"bpe_dropout is {dropout}: it must be at least 0 and below 1")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        sides = has_two_sides(tokenizer) or getattr(tokenizer, "known_tokens", None)
        model = getattr(backend, "model", None)
        if not isinstance(model, BPE) or sides or model.end_of_word_suffix or model.continuing_subword_prefix:
            raise UserError(
                "bpe_dropout needs a fast tokenizer of byte-pair encoding, the same for source and target, whose pieces"
                " have no marks of their own, and this one is of another kind: leave bpe_dropout out"
            )
        self.dropout, self.seed = dropout, seed
        self._vocabulary = backend.get_vocab(with_added_tokens=False)
        merges = json.loads(backend.to_str())["model"]["merges"]
        self._ranks = {tuple(merge): rank for rank, merge in enumerate(merges)}
        self._drawn: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def segment(self, word: str, dropout: float, draw: random.Random) -> tuple[int | None, ...]:
        """Ids of one segmentation (Algorithm 1): the first of the merges that are not left out, until there is none."""
        pieces = list(word)
        while len(pieces) > 1:
            possible = [(self._ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in self._ranks]
            merges = [merge for merge in possible if draw.random() >= dropout]
            if not merges:
                break
            _, first = min(merges)
            pieces[first : first + 2] = ["".join(pieces[first : first + 2])]
        return tuple(map(self._vocabulary.get, pieces))

    def _segmentations(self, word: str, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those of a word of which the tokenizer makes these ids."""
        if ids not in self._drawn:
            if len(self._drawn) >= _MOST_WORDS:
                self._drawn.clear()
            draw = random.Random(f"{self.seed} {word}")  # whatever else the text holds, and in which order
            drawn, distinct = [ids] * SEGMENTATIONS, {}
            if len(word) <= _LONGEST and self.segment(word, 0, draw) == ids:
                drawn = [self.segment(word, self.dropout, draw) for _ in range(SEGMENTATIONS)]
            self._drawn[ids] = [distinct.setdefault(one, one) for one in drawn]
        return self._drawn[ids]

    def __call__(self, encodings: Sequence[Any]) -> list[list[int]]:
        """All texts in their first segmentation, then all in their second, and so on, as ids.

        Args:
            encodings: of `tokenizers`, as `tokenizer(texts).encodings` has them.
        """
        texts = []
        for encoding in encodings:
            tokens = zip(encoding.word_ids, encoding.tokens, encoding.ids, strict=True)
            parts = []
            for number, group in groupby(tokens, key=lambda token: token[0]):
                _, pieces, ids = zip(*group, strict=True)
                is_word = number is not None  # a special token is none
                parts.append(self._segmentations("".join(pieces), ids) if is_word else [ids] * SEGMENTATIONS)
            texts.append(parts)
        return [
            list(chain.from_iterable(part[number] for part in parts))
            for number in range(SEGMENTATIONS)
            for parts in texts
        ]
