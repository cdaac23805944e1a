"""BPE-dropout (Provilkov et al., 2020, arXiv 1910.13267): each text in several segmentations, drawn by a seed."""

import json
import random
from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from typing import Any

from tokenizers.models import BPE

from ..errors import UserError

SEGMENTATIONS = 32  # of each text: an epoch has each so many times


class BpeDropout:
    """Segmentations of texts in which merges of byte-pair encoding are left out at random.

    The library `tokenizers` has BPE-dropout too, without a seed: a run could neither be resumed nor repeated.

    Args:
        tokenizer: fast tokenizer of byte-pair encoding, such as `train_tokenizer` makes.
        dropout: probability with which a merge is left out each time that it could be made.
        seed: with a word, determines its segmentations.

    Raises:
        UserError: for a tokenizer of another kind.
    """

    def __init__(self, tokenizer: Any, dropout: float, seed: int = 0):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = getattr(backend, "model", None)
        if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
            raise UserError(
                "bpe_dropout needs a tokenizer of byte-pair encoding as the package makes them, and this one is of"
                " another kind: leave bpe_dropout out"
            )
        self.dropout, self.seed = dropout, seed
        self._vocabulary = backend.get_vocab(with_added_tokens=False)
        merges = json.loads(backend.to_str())["model"]["merges"]
        self._ranks = {tuple(merge): rank for rank, merge in enumerate(merges)}
        self._drawn: dict[str, list[list[int]]] = {}

    def segment(self, word: str, draw: random.Random) -> list[int]:
        """Ids of one segmentation (Algorithm 1): the first of the merges that are not left out, until there is none."""
        pieces = list(word)
        while len(pieces) > 1:
            possible = [(self._ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in self._ranks]
            merges = [merge for merge in possible if draw.random() >= self.dropout]
            if not merges:
                break
            _, first = min(merges)
            pieces[first : first + 2] = ["".join(pieces[first : first + 2])]
        return [self._vocabulary[piece] for piece in pieces]

    def _segmentations(self, word: str) -> list[list[int]]:
        if word not in self._drawn:
            draw = random.Random(f"{self.seed} {word}")  # whatever else the text holds, and in which order
            self._drawn[word] = [self.segment(word, draw) for _ in range(SEGMENTATIONS)]
        return self._drawn[word]

    def __call__(self, encodings: Sequence[Any]) -> list[list[int]]:
        """All texts in their first segmentation, then all in their second, and so on, as ids.

        Args:
            encodings: of `tokenizers`, as `tokenizer(texts).encodings` has them.
        """
        texts = []
        for encoding in encodings:
            tokens = zip(encoding.word_ids, encoding.tokens, encoding.ids, strict=True)
            parts = []
            for word, group in groupby(tokens, key=lambda token: token[0]):
                _, pieces, ids = zip(*group, strict=True)
                known = word is not None and all(letter in self._vocabulary for letter in "".join(pieces))
                parts.append(self._segmentations("".join(pieces)) if known else [list(ids)] * SEGMENTATIONS)
            texts.append(parts)
        return [list(chain.from_iterable(part[i] for part in parts)) for i in range(SEGMENTATIONS) for parts in texts]
