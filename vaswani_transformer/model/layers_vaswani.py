"""Building blocks of the Transformer: positions, attention, encoder and decoder layers (Sections 3.1 to 3.5).

Axis names in shapes: `batch_size`, `source_length` and `target_length` in tokens, `query_length` and `key_length` for
either, `num_heads` (the paper's h), `d_model`, `d_k`, `d_v`, `d_ff` and `vocab_size` as in the configuration.
"""

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .configuration_vaswani import VaswaniConfig
from .linear_vaswani import has_hooks, project_together
from .local_attention_vaswani import NeighbourMask, restricted_attention
from .packed_sentences_vaswani import PackedSentences, gather, packed_attention, spread

# How transformers calls a cache of keys and values among arguments and outputs: since 5.24 by another name.
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
Mask = torch.Tensor | NeighbourMask | PackedSentences | None  # what each position sees


def either_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return what was given by either name, with transformers' warning where it has given the older one up."""
    if past_key_values is not None and CACHE == "cache" and not torch.compiler.is_compiling():
        warnings.warn("`past_key_values` is deprecated: give it as `cache`", FutureWarning, stacklevel=3)
    return past_key_values if cache is None else cache


def dropout(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """`torch.nn.functional.dropout`, with cheaper random numbers on a CPU.

    There torch draws one double a value, which costs a training step time; here one 64-bit number decides on four
    values, so p is met to within 1/65536, with the scale that belongs to it. Random numbers come from torch's default
    generator, so that seeds and checkpoints work as usual.
    """
    if p == 0 or not training or not states.is_cpu or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return nn.functional.dropout(states, p=p, training=training)
    threshold = min(round(p * 65_536), 65_535)
    bits = torch.empty((states.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = bits.view(torch.int16)[: states.numel()].view(states.shape) >= threshold - 32_768
    return states * kept.to(states.dtype).mul_(65_536 / (65_536 - threshold))


def normalized(norm: nn.LayerNorm, states: torch.Tensor) -> torch.Tensor:
    """`norm(states)`, `(..., d_model)`, in the dtype of `states`, which on a GPU autocast would turn into float32.

    torch's kernels compute mean and variance in float32 in any case.
    """
    if states.dtype == norm.weight.dtype or type(norm) is not nn.LayerNorm or has_hooks(norm):
        return norm(states).to(states.dtype)
    weight, bias = norm.weight.to(states.dtype), norm.bias.to(states.dtype)  # a GPU's kernel wants one dtype for all
    with torch.autocast(states.device.type, enabled=False):
        return nn.functional.layer_norm(states, norm.normalized_shape, weight, bias, norm.eps)


def sinusoidal_positions(positions: torch.Tensor, d_model: int, kind: str = "sinusoidal") -> torch.Tensor:
    r"""Section 3.5: \(PE_{(pos,2i)} = \sin(pos/10000^{2i/d})\) and \(PE_{(pos,2i+1)} = \cos(pos/10000^{2i/d})\).

    For integer positions from 0, of any shape `(...)`, and an even `d_model`: float64, `(..., d_model)`. Of the other
    kinds of `config.position_encoding`, `"sinusoidal-halves"` has all sines before all cosines, and besides this
    `"sinusoidal-tensor2tensor"` the frequencies \(10000^{-i/(d/2-1)}\) (`get_timing_signal_1d` of tensor2tensor).
    """
    positions = positions.cpu() if positions.is_mps else positions  # which has no float64
    pairs = torch.arange(d_model // 2, dtype=torch.float64, device=positions.device)
    steps = max(1, d_model // 2 - 1) if kind == "sinusoidal-tensor2tensor" else d_model / 2
    angles = positions.to(torch.float64)[..., None] / 10_000.0 ** (pairs / steps)  # (..., d_model / 2)
    if kind == "sinusoidal":
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class VaswaniSinusoidalPositions(nn.Module):
    """A computed table, which no checkpoint holds; positions past its end are computed when needed."""

    max_rows = 16_384  # no sentence is longer, and no configuration may ask for terabytes

    def __init__(self, config: VaswaniConfig):
        super().__init__()
        self.num_positions, self.d_model = min(config.max_position_embeddings, self.max_rows), config.d_model
        self.kind, self.offset = config.position_encoding, config.position_offset
        self.register_buffer("table", self.compute_table(), persistent=False)

    def compute_table(self) -> torch.Tensor:
        """`(num_positions, d_model)`, in torch's default floating-point type."""
        return self._compute(rows := torch.arange(self.num_positions)).to(rows.device, torch.get_default_dtype())

    def _compute(self, position_ids: torch.Tensor) -> torch.Tensor:
        return sinusoidal_positions(position_ids + self.offset, self.d_model, self.kind)

    def forward(self, position_ids: torch.Tensor, end: int) -> torch.Tensor:
        """Encodings of shape `(length, d_model)` of `position_ids`, all below `end`."""
        if end <= self.num_positions:
            return nn.functional.embedding(position_ids, self.table)
        return self._compute(position_ids).to(self.table)


class VaswaniLearnedPositions(nn.Embedding):
    """One trained vector a position (Table 3, row E)."""

    def forward(self, position_ids: torch.Tensor, end: int) -> torch.Tensor:
        """Encodings of shape `(length, d_model)`.

        Raises:
            ValueError: for a sequence longer than the table.
        """
        if end > self.num_embeddings:
            limit = f"the {self.num_embeddings} learned positions of this model"
            raise ValueError(f"a sequence of {end} tokens is longer than {limit}: shorten it, or train with more")
        return super().forward(position_ids)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float, p: float = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Section 3.2.1, Equation (1): \(\mathrm{softmax}(QK^T/\sqrt{d_k})V\), head by head.

    Args:
        query: `(batch_size, num_heads, query_length, d_k)`.
        key: `(batch_size, num_heads, key_length, d_k)`.
        value: `(batch_size, num_heads, key_length, d_v)`.
        mask: added to the scores, broadcast to `(batch_size, num_heads, query_length, key_length)`: 0 where attention
            is allowed, very negative elsewhere.
        scaling: \(1/\sqrt{d_k}\).
        p: probability of dropping an attention weight.

    Returns:
        the output, `(batch_size, num_heads, query_length, d_v)`, and the weights, of the shape of the scores.
    """
    scores = query * scaling @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask  # in float32 where the mask is: in place, autocast's bf16 would turn it into -inf
    weights = scores.softmax(dim=-1)
    if p:
        weights = nn.functional.dropout(weights, p=p)
    return weights @ value, weights


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Compute `attention` as transformers' attention interface asks, with lengths before heads in the output."""
    output, weights = attention(query, key, value, attention_mask, scaling, dropout if module.training else 0.0)
    return output.transpose(1, 2).contiguous(), weights


class VaswaniAttention(nn.Module):
    """Multi-head attention (Section 3.2.2), over its own input or, given `key_value_states`, over another sequence."""

    def __init__(self, config: VaswaniConfig, layer_idx: int, is_causal: bool = False, is_cross: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.d_k, self.d_v = config.d_k, config.d_v
        self.scaling = config.d_k**-0.5
        self.dropout = config.attention_dropout
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.d_model, config.num_heads * config.d_k, bias=bias)
        self.k_proj = nn.Linear(config.d_model, config.num_heads * config.d_k, bias=bias)
        self.v_proj = nn.Linear(config.d_model, config.num_heads * config.d_v, bias=bias)
        self.out_proj = nn.Linear(config.num_heads * config.d_v, config.d_model, bias=bias)
        # Those that read the same input started as one matrix in the authors' code (`_init_weights`).
        joined = [self.k_proj, self.v_proj] if is_cross else [self.q_proj, self.k_proj, self.v_proj]
        for projection in joined:
            projection.joined_features = sum(each.out_features for each in joined)

    def _split_heads(self, states: torch.Tensor, head_width: int) -> torch.Tensor:
        # To (batch_size, num_heads, length, head_width). `unflatten` would fix the length in a traced model.
        return states.view(*states.shape[:-1], -1, head_width).transpose(1, 2)

    def _keys_and_values(self, states: torch.Tensor, cache: EncoderDecoderCache | None, is_cross_attention: bool):
        """Project `states`, or take what the cache holds; a source is projected once for a whole generation."""
        if cache is not None and is_cross_attention and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        key = self._split_heads(self.k_proj(states), self.d_k)
        value = self._split_heads(self.v_proj(states), self.d_v)
        if cache is not None:
            layers = cache.cross_attention_cache if is_cross_attention else cache.self_attention_cache
            key, value = layers.update(key, value, self.layer_idx)
            if is_cross_attention:
                cache.is_updated[self.layer_idx] = True
        return key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: Mask = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` to itself, or to `key_value_states`, the encoder's output.

        The mask has the form that the attention implementation takes; a cache, named `CACHE`, is read and extended.

        Returns:
            the output, `(batch_size, query_length, d_model)`, and the weights,
            `(batch_size, num_heads, query_length, key_length)`, or `None` from implementations that form none.
        """
        is_cross_attention = key_value_states is not None
        states = key_value_states if is_cross_attention else hidden_states
        if (own := kwargs.pop(CACHE, None)) is None and self.training:
            if is_cross_attention:
                parts = self.q_proj(hidden_states), *project_together([self.k_proj, self.v_proj], states)
            else:
                parts = project_together([self.q_proj, self.k_proj, self.v_proj], states)
            widths = self.d_k, self.d_k, self.d_v
            query, key, value = [self._split_heads(part, width) for part, width in zip(parts, widths, strict=True)]
        else:
            query = self._split_heads(self.q_proj(hidden_states), self.d_k)
            key, value = self._keys_and_values(states, own, is_cross_attention)
        p, weights = self.dropout if self.training else 0.0, None
        if isinstance(attention_mask, NeighbourMask):
            output = restricted_attention(query, key, value, attention_mask, self.scaling, p)
        elif isinstance(attention_mask, PackedSentences):
            output = self._attend_to_own_sentence(query, key, value, attention_mask, p)
        else:  # Equation (1), by transformers' name: "eager" is `attention` above, "sdpa" torch's fused kernels
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            output, weights = attend(self, query, key, value, attention_mask, dropout=p, scaling=self.scaling, **kwargs)
        return self.out_proj(output.flatten(-2)), weights

    def _attend_to_own_sentence(self, query, key, value, packed: PackedSentences, p: float) -> torch.Tensor:
        if packed.mask is None:
            return packed_attention(packed, query, key, value)
        query, key, value = spread(query, packed.queries), spread(key, packed.keys), spread(value, packed.keys)
        kind = "eager" if self.config._attn_implementation == "eager" else "sdpa"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager_attention_forward)
        output, _ = attend(self, query, key, value, packed.mask, dropout=p, scaling=self.scaling)
        return gather(output, packed.queries)


@cache
def compiled(function: Callable, has_static_shapes: bool) -> Callable:
    """`torch.compile` of a function that all layers of a kind share, and with it the graph."""
    return torch.compile(function, dynamic=None if has_static_shapes else True)


class VaswaniLayer(GradientCheckpointingLayer):
    """The common part of all layers: self-attention, feed-forward sublayer, post-norm residual (Section 3.1)."""

    # Whether torch.compile is wanted, for training: generation has other shapes, and caches that name each layer.
    is_compiled = False

    def __init__(self, config: VaswaniConfig, layer_idx: int, is_causal: bool = False):
        super().__init__()
        self.dropout = config.dropout
        self.activation_dropout = config.activation_dropout
        self.activation = config.activation_function
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.self_attn = VaswaniAttention(config, layer_idx, is_causal)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Mask, *inputs, **options) -> torch.Tensor:
        """Call `compute` of the layer's class with these arguments, compiled if that is wanted."""
        compute = type(self).compute
        if self.is_compiled and self.training:
            is_static = isinstance(attention_mask, PackedSentences) and attention_mask.mask is None
            if is_static:  # but for the number of sentences
                torch._dynamo.mark_dynamic(attention_mask.queries.offsets, 0)
                torch._dynamo.mark_dynamic(attention_mask.keys.offsets, 0)
            compute = compiled(compute, is_static)
        return compute(self, hidden_states, attention_mask, *inputs, **options)

    def add_and_norm(self, norm: nn.LayerNorm, residual: torch.Tensor, sublayer_output: torch.Tensor) -> torch.Tensor:
        """LayerNorm(x + Dropout(Sublayer(x))), Sections 3.1 and 5.4; all of `(batch_size, length, d_model)`.

        The result has the dtype of the residual.
        """
        summed = residual + dropout(sublayer_output, p=self.dropout, training=self.training)
        return normalized(norm, summed.to(residual.dtype))

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Section 3.3, Equation (2): max(0, xW1 + b1)W2 + b2, of `(batch_size, length, d_model)`, with its residual.

        The maximum is the ReLU, in whose place `config.activation_function` may name another function.
        """
        inner = getattr(nn.functional, self.activation)(self.fc1(hidden_states))  # (batch_size, length, d_ff)
        inner = dropout(inner, p=self.activation_dropout, training=self.training)
        return self.add_and_norm(self.final_layer_norm, hidden_states, self.fc2(inner))


class VaswaniEncoderLayer(VaswaniLayer):
    """Self-attention, then feed-forward (Section 3.1, left of Figure 1)."""

    def compute(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Unpack[TransformersKwargs]
    ) -> torch.Tensor:
        """`(batch_size, source_length, d_model)` to the same shape."""
        attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states = self.add_and_norm(self.self_attn_layer_norm, hidden_states, attended)
        return self.feed_forward(hidden_states)


class VaswaniDecoderLayer(VaswaniLayer):
    """Masked self-attention, attention over the encoder's output, feed-forward (Section 3.1, right of Figure 1)."""

    def __init__(self, config: VaswaniConfig, layer_idx: int):
        super().__init__(config, layer_idx, is_causal=True)
        self.encoder_attn = VaswaniAttention(config, layer_idx, is_cross=True)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def compute(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`(batch_size, target_length, d_model)` to the same shape, attending to the encoder's output if given.

        A cache, named `CACHE`, among the further arguments serves both attentions.
        """
        attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states = self.add_and_norm(self.self_attn_layer_norm, hidden_states, attended)
        if encoder_hidden_states is not None:
            attended, _ = self.encoder_attn(
                hidden_states, encoder_hidden_states, attention_mask=encoder_attention_mask, **kwargs
            )
            hidden_states = self.add_and_norm(self.encoder_attn_layer_norm, hidden_states, attended)
        return self.feed_forward(hidden_states)
