"""Which source word each target word comes from, read off the encoder-decoder attention."""

import re

import torch

from ..data.batching import PairCollator, batches_by_length
from ..data.tokenization import SIDES, has_two_sides, side_of
from ..decoding.scoring import check_length
from ..errors import UserError
from .weights import forming_attention, pass_with_attention

Links = list[tuple[int, int]]  # (source word, target word), both counted from 0


@torch.no_grad()
def align(
    model, tokenizer, sources: list[str], targets: list[str], layer: int = -1, tokens_per_batch: int = 4096
) -> list[Links]:
    """Word alignments of sentence pairs, from one pass of the model over each pair.

    A word is what stands between spaces. Each target word is linked to the source word that got most of the attention
    while the target word was predicted: the attention of one decoder layer, mean over its heads, summed over the pieces
    of both words; that on `</s>` is left out. The last layer is the default because it agreed best with known
    alignments (docs/decoding.md).

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
        UserError: for lists of different lengths, or a sentence that the model has no positions for, naming its line.
    """
    if len(sources) != len(targets):
        raise UserError(f"{len(sources)} sources and {len(targets)} targets: give as many of both")
    links: list[Links] = [[] for _ in sources]
    filled = [index for index in range(len(sources)) if sources[index].strip() and targets[index].strip()]
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
    """Links as text, `0-0 1-2 2-1`: source word, target word, counted from 0, in the order of the source."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def tokens_and_words(tokenizer, texts: list[str]) -> list[tuple[list[int], list[int]]]:
    """The token ids of each text, and for each token the number of its word, from 0; -1 for a token of no word.

    Raises:
        UserError: the tokenizer cannot say which part of a text a token stands for.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} does not say which word a token belongs to: words can be aligned with fast"
            " tokenizers only"
        )
    if has_two_sides(tokenizer):  # places are those of the text that its backend gets
        texts = tokenizer.rewritten(texts)
    encoded = tokenizer(texts, return_offsets_mapping=True)
    sides = []
    for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        words, end = [-1] * len(text), 0
        for number, match in enumerate(re.finditer(r"\S+", text)):
            words[end : match.end()] = [number] * (match.end() - end)  # a space belongs to the word behind it
            end = match.end()
        sides.append((ids, [words[end - 1] if end > start else -1 for start, end in offsets]))  # `</s>` covers no text
    return sides


def strongest_links(weights: torch.Tensor, source_words: list[int], target_words: list[int]) -> Links:
    """For each target word the source word with the largest sum of `(target_length, source_length)` weights."""
    # A row for each token that marks its word; tokens of no word, -1, fall into the last column, which is left out.
    source, target = (torch.eye(max(words) + 2)[words][:, :-1] for words in (source_words, target_words))
    rows, columns = len(target_words), len(source_words)
    sums = target.T @ weights[:rows, :columns] @ source
    return [(best, word) for word, best in enumerate(sums.argmax(dim=1).tolist())]


__all__ = ["align", "pharaoh"]
