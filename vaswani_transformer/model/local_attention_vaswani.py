r"""Restricted self-attention (Section 4): each position sees a neighbourhood of size r only.

The paper leaves the exact form open ("a neighborhood of size r in the input sequence centered around the respective
output position"). Here position i sees position j where \(|i - j| \le \lfloor r/2 \rfloor\); in the decoder, as
everywhere, only j up to i. A path between two positions n apart then takes \(n / \lfloor r/2 \rfloor\) layers
(Table 1: O(n/r)).

Masked full attention computes this at the cost of full attention. `restricted_attention` computes blocks of neighbours
and costs O(r n d), as in Table 1.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

_SMALLEST_BLOCK = 32  # queries that are computed together at least: smaller products are slow on every device
_EVERYTHING = 2**31 - 1  # positions: no sequence is longer, and it fits the integers that it is compared with


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that is added to scores: 0 where attention is allowed, else minus infinity."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)


def reach(window: int) -> int:
    """Return how many positions to each side one position sees."""
    return min(window // 2, _EVERYTHING)


def _is_near(query: torch.Tensor, key: torch.Tensor, window: int, is_causal: bool = False) -> torch.Tensor:
    """Return which key positions the query positions see, as booleans."""
    far = reach(window)
    return (query - key <= far) & (key - query <= (0 if is_causal else far))


def in_window(window: int) -> Callable:
    """Return a mask function of transformers' kind."""
    return lambda batch_idx, head_idx, q_idx, kv_idx: _is_near(q_idx, kv_idx, window)


def block_size(window: int) -> int:
    """Return the number of queries that are computed together: at least as many as one of them sees to each side."""
    return max(reach(window), _SMALLEST_BLOCK)


class NeighbourMask(NamedTuple):
    """The positions that each query sees of its own block and the ones beside it, for `restricted_attention`."""

    # (batch_size * blocks, 1, block, span) booleans; a span is the block before, the block itself and, unless causal,
    # the next block.
    seen: torch.Tensor
    window: int
    is_causal: bool


def block_mask(padding_mask: torch.Tensor, window: int, is_causal: bool) -> NeighbourMask:
    """Return the mask of blocks for a `(batch_size, length)` mask, 0 for padding.

    Every query sees itself, even if it is padding, so that no row is empty.
    """
    block = block_size(window)
    spans = _spans(padding_mask.bool()[:, None, :, None], block, is_causal)[:, 0, :, :, 0]  # (batch, blocks, span)
    query = torch.arange(block, device=padding_mask.device)[:, None] + block
    key = torch.arange(spans.shape[-1], device=padding_mask.device)
    near = _is_near(query, key, window, is_causal)  # (block, span)
    seen = (near & spans[:, :, None]) | (query == key)
    return NeighbourMask(seen.flatten(0, 1).unsqueeze(1), window, is_causal)


def restricted_mask(
    config, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None, is_causal: bool, cache
) -> NeighbourMask | torch.Tensor | None:
    """Return the mask of a self-attention within `config.attention_window`, where `cache` is its own.

    `padding_mask` is `(batch_size, cached + length)`, 0 for padding.

    Returns:
        a mask of blocks in sdpa for sequences without a past that are long enough, else one of all positions; None
        where transformers has to make it, with `in_window`: in flex attention and for static caches. A mask of four
        axes is the caller's own: it has to say all that is seen.
    """
    kind, window, length = config._attn_implementation, config.attention_window, hidden_states.shape[1]
    is_static = cache is not None and cache.is_compileable
    if kind not in ("sdpa", "eager") or is_static or (padding_mask is not None and padding_mask.dim() != 2):
        return None
    past = 0 if cache is None else cache.get_seq_length()
    if padding_mask is None:
        padding_mask = torch.ones(hidden_states.shape[0], past + length, device=hidden_states.device)
    # An exported program must work for every length, so it gets the mask that does.
    traced = torch.compiler.is_exporting() or torch.jit.is_tracing()
    covers_less = length > 4 * block_size(window)  # than the whole square of the sequence's positions
    if kind == "sdpa" and past == 0 and not traced and covers_less:
        return block_mask(padding_mask, window, is_causal)
    key = torch.arange(past + length, device=hidden_states.device)
    query = key[past:, None]
    # (batch_size, 1, length, past + length); every query sees itself, so that no row is empty.
    seen = (_is_near(query, key, window, is_causal) & padding_mask.bool()[:, None, None]) | (query == key)
    return seen if kind == "sdpa" else additive(seen, hidden_states.dtype)


def _spans(states: torch.Tensor, block: int, is_causal: bool) -> torch.Tensor:
    """`(batch, heads, length, width)` to `(batch, heads, blocks, span, width)`, zeros outside the sequence."""
    behind = -states.shape[2] % block + (0 if is_causal else block)
    states = pad(states, (0, 0, block, behind))
    return states.unfold(2, (2 if is_causal else 3) * block, block).transpose(-1, -2)


def restricted_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: NeighbourMask, scaling: float, p: float = 0.0
) -> torch.Tensor:
    """Equation (1) over a neighbourhood of r positions, in time and memory O(length * (r + block)).

    Arguments as in `layers_vaswani.attention`, with a `block_mask`; output `(batch_size, length, num_heads, d_v)`.
    """
    block, (batch_size, heads, length, _) = block_size(mask.window), query.shape
    query = pad(query, (0, 0, 0, -length % block)).unflatten(2, (-1, block))
    parts = query, _spans(key, block, mask.is_causal), _spans(value, block, mask.is_causal)
    # (batch, heads, blocks, ...) -> (batch * blocks, heads, ...): kernels want four axes.
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in parts)
    output = scaled_dot_product_attention(query, key, value, mask.seen, dropout_p=p, scale=scaling)
    return output.transpose(1, 2).reshape(batch_size, -1, heads, output.shape[-1])[:, :length]
