"""Which source word each target word comes from, read off the encoder-decoder attention."""

import re

import torch

from ..data.batching import PairCollator, batches_by_length
from ..decoding.streaming import check_length
from ..errors import UserError
from .weights import pass_with_attention

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
        model: the model, or an [`Ensemble`], whose members' attention is averaged. Its attention implementation is
            changed for the time of the call, so no other thread may use it meanwhile.
        tokenizer: its tokenizer.
        sources: source sentences.
        targets: their targets, such as the model's translations.
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
    sides = [tokens_and_words(tokenizer, [texts[index] for index in filled]) for texts in (sources, targets)]
    lengths = [max(len(ids) for ids, _ in pair) for pair in zip(*sides, strict=True)]
    for index, length in zip(filled, lengths, strict=True):
        check_length(model.config, index + 1, length)
    collator = PairCollator(model.config.pad_token_id)
    members = list(getattr(model, "members", [model]))
    for rows in batches_by_length(lengths, tokens_per_batch):
        batch = collator([{"input_ids": sides[0][row][0], "labels": sides[1][row][0]} for row in rows])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        attention = torch.stack([_layer_attention(member, batch, layer) for member in members]).mean(dim=0).cpu()
        for row, weights in zip(rows, attention, strict=True):
            links[filled[row]] = _strongest_links(weights, sides[0][row][1], sides[1][row][1])
    return links


def pharaoh(links: Links) -> str:
    """Links as text, `0-0 1-2 2-1`: source word, target word, counted from 0, in the order of the source."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def tokens_and_words(tokenizer, texts: list[str]) -> list[tuple[list[int], list[int]]]:
    """Of each text its token ids and for each token the word it belongs to, -1 for none."""
    encoded = tokenizer(texts, return_offsets_mapping=True)
    sides = []
    for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        words, end = [-1] * len(text), 0
        for number, match in enumerate(re.finditer(r"\S+", text)):
            words[end : match.end()] = [number] * (match.end() - end)  # spaces belong to the word that follows
            end = match.end()
        sides.append((ids, [words[end - 1] if end > start else -1 for start, end in offsets]))  # `</s>` covers no text
    return sides


def _layer_attention(model, batch: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    """`(batch_size, target_length, source_length)`: where one layer looks to predict each token, mean of its heads."""
    output = pass_with_attention(model, batch)
    return output.cross_attentions[layer].float().mean(dim=1)


def _strongest_links(weights: torch.Tensor, source_words: list[int], target_words: list[int]) -> Links:
    """For each target word the source word with the largest sum of `(target_length, source_length)` weights."""
    sums = torch.zeros(max(target_words) + 1, max(source_words) + 1)
    kept = [[index for index, word in enumerate(words) if word >= 0] for words in (target_words, source_words)]
    rows, columns = (torch.tensor(indices) for indices in kept)
    by_column = torch.zeros(len(rows), sums.shape[1])
    by_column.index_add_(1, torch.tensor(source_words)[columns], weights[rows][:, columns])
    sums.index_add_(0, torch.tensor(target_words)[rows], by_column)
    return [(source, target) for target, source in enumerate(sums.argmax(dim=1).tolist())]


__all__ = ["align", "pharaoh"]
