"""Word alignments: the source word that each target word comes from, by the encoder-decoder attention."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat

import numpy as np
import torch

from ..data.batching import PairCollator
from ..data.tokenization import SIDES, has_two_sides, side_of
from ..data.words import word_places, words_at
from ..decoding.scoring import batches_by_length, check_length
from ..errors import UserError, reading, texts_in
from ..model.language_codes_vaswani import LanguageCodes
from ..model.sentencepiece_vaswani import SEPARATOR
from .weights import attention_of_batch, forming_attention

Links = list[tuple[int, int]]  # (source word, target word), both counted from 0


def align(
    model, tokenizer, sources: list[str], targets: list[str], layer: int = -1, tokens_per_batch: int = 4096
) -> list[Links]:
    """Return word alignments of sentence pairs, from one pass of the model over each pair.

    A word is what spaces separate; of scripts that are written without spaces, a character (`words_of` of
    `data/words.py`). Each target word is linked to the source word that got most of the attention while the target word
    was predicted: the attention of one decoder layer, mean over its heads, summed over the pieces of both words, of
    which one may belong to several words; that on `</s>` is left out. The last layer is the default because it agreed
    best with known alignments.

    Args:
        model: the model, or an `Ensemble`, whose members' attention is averaged; other threads may use it meanwhile.
        sources, targets: sentences, such as the model's own translations; a language code before a source is no word.
        layer: decoder layer, from 0, or from the end when negative.
        tokens_per_batch: tokens a side at once, padding counted.

    Returns:
        for each pair a link for each target word, in the order of the target; none where a side is blank.

    Raises:
        IndexError: for a layer that the decoder does not have.
        ValueError: for lists of different lengths.
        UserError: for a sentence that the model has no positions for, or with an unknown code, naming its line.
    """
    sources, targets = texts_in(sources, "source"), texts_in(targets, "target")
    links: list[Links] = [[] for _ in sources]
    members = [forming_attention(member) for member in getattr(model, "members", [model])]
    filled = [index for index, pair in enumerate(zip(sources, targets, strict=True)) if all(map(str.strip, pair))]
    if not filled:
        return links
    codes, collator, starts = LanguageCodes(tokenizer), PairCollator(model.config.pad_token_id), []
    for index in filled:
        with reading(f"line {1 + index}"):
            starts.append(len(sources[index]) - len(codes.split(sources[index])[1]))
    sides = [  # ids and words of each text
        tokens_and_words(side_of(tokenizer, name), [texts[index] for index in filled], begins)
        for name, texts, begins in zip(SIDES, (sources, targets), (starts, repeat(0)), strict=True)
    ]
    lengths = [max(len(ids) for ids, _ in pair) for pair in zip(*sides, strict=True)]
    for index, length in zip(filled, lengths, strict=True):
        check_length(model.config, 1 + index, length)
    for rows in batches_by_length(lengths, tokens_per_batch):
        batch = collator([{"input_ids": sides[0][row][0], "labels": sides[1][row][0]} for row in rows])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        attention = [attention_of_batch(member, batch)["encoder-decoder"][layer] for member in members]
        attention = [weights.float().mean(dim=1) for weights in attention]  # mean of the heads
        for row, weights in zip(rows, torch.stack(attention).mean(dim=0).cpu().numpy(), strict=True):
            source, target = (parts_in_words(side[row][1]) for side in sides)
            sums = target.T @ weights[: len(target), : len(source)] @ source  # (target words, source words)
            links[filled[row]] = [(best, word) for word, best in enumerate(sums.argmax(axis=1).tolist())]
    return links


def pharaoh(links: Links) -> str:
    """Return links as text, `0-0 1-2 2-1`: source word, target word, counted from 0, in the order of the source."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def tokens_and_words(
    tokenizer, texts: list[str], starts: Iterable[int] = repeat(0)
) -> list[tuple[list[int], list[range]]]:
    """Return the token ids of each text, and for each token the numbers of the words that it has a part in, from 0.

    The words of a text begin at its number of `starts`, such as behind a language code.

    Raises:
        UserError: the tokenizer cannot say which part of a text a token stands for, or reads a text as other words.
    """
    if not tokenizer.is_fast:
        problem = f"{type(tokenizer).__name__} does not say which word a token belongs to"
        raise UserError(f"{problem}: words can be aligned with fast tokenizers only")
    encoded = tokenizer(texts, return_offsets_mapping=True)
    columns = texts, starts, encoded["input_ids"], encoded["offset_mapping"]
    return [(ids, _words_at(tokenizer, *text, offsets)) for *text, ids, offsets in zip(*columns, strict=False)]


def _words_at(tokenizer, text: str, begin: int, offsets: list[tuple[int, int]]) -> list[range]:
    read = tokenizer.rewritten(text) if has_two_sides(tokenizer) else text  # which the backend gets, and offsets are of
    if SEPARATOR in read:
        without = list(accumulate((character != SEPARATOR for character in read), initial=0))
        offsets = [(without[start], without[end]) for start, end in offsets]
        read = read.replace(SEPARATOR, "")
    if len(word_places(read)) != len(word_places(text)):
        raise UserError(f"{text!r:.60}: the tokenizer cuts this into other words by rules: its words cannot be aligned")
    return words_at(read[begin:], [(max(start - begin, 0), max(end - begin, 0)) for start, end in offsets])


def parts_in_words(words: Sequence[range]) -> np.ndarray:
    """Return `(tokens, words)` float32: 1 where a token has a part in a word."""
    number = max((part.stop for part in words), default=0)
    return np.array([[word in part for word in range(number)] for part in words], np.float32)
