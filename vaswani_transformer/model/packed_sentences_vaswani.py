"""Batches without padding: all sentences one after the other, as one row of tokens.

Such a row passes through the model as a batch of one, `(1, tokens, d_model)`; attention alone has to know where
sentences start. On a GPU in half precision two of torch's kernels take the row as it is; elsewhere the sentences are
padded for attention and for nothing else. Nothing here reads a value from another device than a CPU.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from .configuration_vaswani import VaswaniConfig
from .linear_vaswani import product_dtype
from .local_attention_vaswani import additive

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an earlier torch
    varlen_attn = None

SHORT = 128  # tokens of a sentence, on average: below, blocks of 64 are quicker than `varlen_attn`'s (on an H200)
efficient_attention = torch.ops.aten._efficient_attention_forward
_WIDEST_HEAD = 256  # of flash attention, which takes multiples of 8


class SentencePlaces(NamedTuple):
    """The places of the sentences of a row of tokens."""

    offsets: torch.Tensor  # (sentences + 1,) int32: where each sentence starts, and the end of the last one
    positions: torch.Tensor  # (tokens,): that of each token in its sentence, from 0
    slots: torch.Tensor  # (tokens,): that of each token among sentences * longest places
    longest: int  # tokens of the longest sentence: on a CPU exactly, elsewhere an upper bound


class PackedSentences(NamedTuple):
    """The keys that each query sees, in a mask's place: those of its own sentence, up to its position if causal."""

    queries: SentencePlaces
    keys: SentencePlaces
    is_causal: bool
    # For masked attention, broadcast to (sentences, 1, longest, longest); None where flash attention needs none.
    mask: torch.Tensor | None


def check_packed(config: VaswaniConfig, offsets: Sequence[torch.Tensor | None], others: Sequence) -> None:
    """Raise `ValueError` for lone offsets, and for other arguments of `forward`, which would be ignored."""
    is_pair = all(side is not None and side.shape == offsets[0].shape for side in offsets)
    if not is_pair or config.attention_window is not None or any(value is not None for value in others):
        rule = "with the same number of sentences, without masks, caches, attention_window and attention weights"
        raise ValueError(f"source_offsets and target_offsets go together, {rule}: give padded sentences and a mask")


def place_sentences(offsets: torch.Tensor, tokens: int, max_length: int | None) -> SentencePlaces:
    """Return where the sentences of a row of `tokens` tokens are, on the device of `offsets`.

    `max_length` bounds the length of a sentence where the offsets cannot be read without waiting for a device. On a
    CPU `ValueError` for offsets that do not end at `tokens`.
    """
    offsets = offsets.to(torch.int32)  # which flash attention takes
    if offsets.is_cpu:
        if int(offsets[-1]) != tokens:
            raise ValueError(f"offsets end at {int(offsets[-1])} and there are {tokens} tokens: they must be the same")
        longest = int(offsets.diff().max())
    else:
        longest = tokens if max_length is None else min(max_length, tokens)
    indices = torch.arange(tokens, device=offsets.device, dtype=torch.int32)
    sentence = torch.searchsorted(offsets, indices, right=True) - 1  # the last that starts there: others are empty
    positions = indices - offsets[sentence]
    return SentencePlaces(offsets, positions, sentence * longest + positions, longest)


def pack_sentences(
    config: VaswaniConfig,
    hidden_states: torch.Tensor,
    queries: SentencePlaces,
    keys: SentencePlaces,
    training: bool,
    is_causal: bool = False,
) -> PackedSentences:
    """Return what each token of `hidden_states`, `(1, tokens, d_model)`, sees of the tokens that `keys` places."""
    drops_weights = training and config.attention_dropout > 0  # which flash attention cannot
    if can_use_flash_attention(config, hidden_states) and not drops_weights:
        return PackedSentences(queries, keys, is_causal, None)
    place = torch.arange(keys.longest, device=hidden_states.device)
    if is_causal:  # a sentence's places beyond its end come later than all of its queries
        seen = (place <= place[:, None])[None, None]  # (1, 1, longest, longest)
    else:
        lengths = keys.offsets.diff()[:, None, None, None]
        seen = (place < lengths) | (lengths == 0)  # (sentences, 1, 1, longest); no row is empty
    mask = additive(seen, hidden_states.dtype) if config._attn_implementation == "eager" else seen
    return PackedSentences(queries, keys, is_causal, mask)


def can_use_flash_attention(config: VaswaniConfig, states: torch.Tensor) -> bool:
    """Return whether torch has `varlen_attn` for heads of this width, device of `states` and type of products."""
    # The first `varlen_attn` that torch had took other arguments.
    has_function = "window_size" in getattr(varlen_attn, "__annotations__", ())
    if not has_function or states.device.type != "cuda" or not _has_kernel(states.device.index):
        return False
    width, is_half = config.d_k, product_dtype(states) in (torch.float16, torch.bfloat16)
    return is_half and width == config.d_v and width % 8 == 0 and width <= _WIDEST_HEAD


@cache
def _has_kernel(index: int | None) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (8, 0)


def packed_attention(packed: PackedSentences, *states: torch.Tensor) -> torch.Tensor:
    """Compute Equation (1) in each sentence: query, key, value, `(1, heads, tokens, d)`, to `(1, tokens, heads, d)`."""
    rows = [each.transpose(1, 2) for each in states]
    places = packed.queries.offsets, packed.keys.offsets, packed.queries.longest, packed.keys.longest
    if rows[0].shape[1] < SHORT * len(places[0]):
        # Given a `scale`, even the usual one, torch's compiler fails.
        return efficient_attention(*rows, None, *places, 0.0, int(packed.is_causal), True)[0]
    return varlen_attn(*(row[0] for row in rows), *places, window_size=(-1, 0 if packed.is_causal else -1))[None]


def spread(states: torch.Tensor, places: SentencePlaces) -> torch.Tensor:
    """Put sentences beside each other: `(1, num_heads, tokens, width)` to `(sentences, num_heads, longest, width)`."""
    rows = states[0].transpose(0, 1)
    sentences = len(places.offsets) - 1
    empty = rows.new_zeros(sentences * places.longest, *rows.shape[1:])
    padded = empty.index_add(0, places.slots, rows)  # half the time of index_copy on a CPU
    return padded.unflatten(0, (sentences, places.longest)).transpose(1, 2)


def gather(states: torch.Tensor, places: SentencePlaces) -> torch.Tensor:
    """Put sentences in one row: `(sentences, longest, num_heads, width)` to `(1, tokens, num_heads, width)`."""
    return states.flatten(0, 1).index_select(0, places.slots)[None]
