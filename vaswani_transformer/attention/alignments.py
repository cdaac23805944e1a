"""Which source word each target word comes from, read off the encoder-decoder attention."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ..data.batching import PairCollator
from ..data.tokenization import SIDES, has_two_sides, side_of
from ..data.words import word_places, words_at
from ..decoding.scoring import batches_by_length, check_length
from ..errors import UserError
from ..model.sentencepiece_vaswani import SEPARATOR
from .weights import forming_attention, pass_with_attention

Links = list[tuple[int, int]]  # (source word, target word), both counted from 0


@torch.no_grad()
def align(
    model, tokenizer, sources: list[str], targets: list[str], layer: int = -1, tokens_per_batch: int = 4096
) -> list[Links]:
    """Return word alignments of sentence pairs, from one pass of the model over each pair.

    A word is what spaces separate; of scripts that are written without spaces, a character (`words_of` of
    `data/words.py`). Each target word is linked to the source word that got most of the attention while the target word
    was predicted: the attention of one decoder layer, mean over its heads, summed over the pieces of both words, of
    which one may belong to several words; that on `</s>` is left out. The last layer is the default because it agreed
    best with known alignments (docs/decoding.md).

    Args:
        model: the model, or an [`Ensemble`], whose members' attention is averaged; other threads may use it meanwhile.
        tokenizer: its tokenizer.
        sources, targets: sentences, such as the model's own translations.
        layer: decoder layer, from 0, or from the end when negative.
        tokens_per_batch: tokens a side at once, padding counted.

    Returns:
        for each pair a link for each target word, in the order of the target; none where a side is blank.

    Raises:
        IndexError: for a layer that the decoder does not have.
        ValueError: for lists of different lengths.
        UserError: for a sentence that the model has no positions for, naming its line.
    """
    links: list[Links] = [[] for _ in sources]
    pairs = enumerate(zip(sources, targets, strict=True))
    filled = [index for index, (source, target) in pairs if source.strip() and target.strip()]
    if not filled:
        return links
    sides = [
        tokens_and_words(side_of(tokenizer, side), [texts[index] for index in filled])
        for side, texts in zip(SIDES, (sources, targets), strict=True)
    ]
    lengths = [max(len(ids) for ids, _ in pair) for pair in zip(*sides, strict=True)]
    for index, length in zip(filled, lengths, strict=True):
        check_length(model.config, index + 1, length)
    members = [forming_attention(member) for member in getattr(model, "members", [model])]
    collator = PairCollator(model.config.pad_token_id)
    for rows in batches_by_length(lengths, tokens_per_batch):
        batch = collator([{"input_ids": sides[0][row][0], "labels": sides[1][row][0]} for row in rows])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        passes = [pass_with_attention(member, batch) for member in members]
        attention = [one_pass.cross_attentions[layer].float().mean(dim=1) for one_pass in passes]  # mean of the heads
        for row, weights in zip(rows, torch.stack(attention).mean(dim=0).cpu(), strict=True):
            links[filled[row]] = strongest_links(weights, sides[0][row][1], sides[1][row][1])
    return links


def pharaoh(links: Links) -> str:
    """Return links as text, `0-0 1-2 2-1`: source word, target word, counted from 0, in the order of the source."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def tokens_and_words(tokenizer, texts: list[str]) -> list[tuple[list[int], list[range]]]:
    """Return the token ids of each text, and for each token the numbers of the words that it has a part in, from 0.

    Raises:
        UserError: the tokenizer cannot say which part of a text a token stands for, or reads a text as other words.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} does not say which word a token belongs to: words can be aligned with fast"
            " tokenizers only"
        )
    encoded = tokenizer(texts, return_offsets_mapping=True)
    columns = texts, encoded["input_ids"], encoded["offset_mapping"]
    return [(ids, _words_at(tokenizer, text, offsets)) for text, ids, offsets in zip(*columns, strict=True)]


def _words_at(tokenizer, text: str, offsets: list[tuple[int, int]]) -> list[range]:
    if not has_two_sides(tokenizer):
        return words_at(text, offsets)
    read = tokenizer.rewritten(text)  # offsets are those of the text that its backend gets
    if SEPARATOR in read:
        without = list(accumulate((character != SEPARATOR for character in read), initial=0))
        offsets = [(without[start], without[end]) for start, end in offsets]
        read = read.replace(SEPARATOR, "")
    if len(word_places(read)) != len(word_places(text)):
        raise UserError(f"{text!r:.60}: the tokenizer cuts this into other words by rules: its words cannot be aligned")
    return words_at(read, offsets)


def parts_in_words(words: Sequence[range]) -> np.ndarray:
    """Return `(tokens, words + 1)` float32: 1 where a token has a part in a word; the last column is for no word."""
    parts = np.zeros((len(words), max((each.stop for each in words), default=0) + 1), np.float32)
    for row, numbers in zip(parts, words, strict=True):
        row[numbers if numbers else -1] = 1
    return parts


def strongest_links(weights: torch.Tensor, source_words: Sequence[range], target_words: Sequence[range]) -> Links:
    """Return for each target word the source word with the largest sum of `(target_length, source_length)` weights."""
    source, target = (torch.from_numpy(parts_in_words(words)[:, :-1]) for words in (source_words, target_words))
    rows, columns = len(target_words), len(source_words)
    sums = target.T @ weights[:rows, :columns] @ source
    return [(best, word) for word, best in enumerate(sums.argmax(dim=1).tolist())]


__all__ = ["align", "pharaoh"]
