r"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al., 2017, arXiv 1706.03762v7).

Written for transformers 5: it runs under `generate()`, `Trainer`, `torch.compile` and the attention interface. Checked
against `torch.nn.Transformer` in `tests/test_modeling.py`. Axis names in shapes: `batch_size`, `source_length` and
`target_length` in tokens, `query_length` and `key_length` for either, `num_heads` (the paper's h), `d_model`, `d_k`,
`d_v`, `d_ff` and `vocab_size` as in the configuration.

This file travels to the Hub beside the weights: it may import installed libraries and siblings in its own folder only.
"""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vaswani import VaswaniConfig
from .generation_vaswani import VaswaniGenerationMixin

IGNORE_INDEX = -100  # the label that torch, transformers and the Trainer leave out of a loss


def dropout(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """`torch.nn.functional.dropout`, with cheaper random numbers on a CPU.

    There torch draws one double a value, which took a quarter of a training step
    (`scripts/benchmark_training_step.py`); here one 64-bit number decides on four values, so p is met to within
    1/65536, with the scale that belongs to it. Random numbers come from torch's default generator, so that seeds and
    checkpoints work as usual.

    Args:
        states: any shape.
        p: the probability of zeroing a value.
        training: whether to drop anything at all.
    """
    if p == 0 or not training or not states.is_cpu or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return nn.functional.dropout(states, p=p, training=training)
    threshold = min(round(p * 65_536), 65_535)
    bits = torch.empty((states.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = bits.view(torch.int16)[: states.numel()].view(states.shape) >= threshold - 32_768
    return states * kept.to(states.dtype).mul_(65_536 / (65_536 - threshold))


def sinusoidal_positions(positions: torch.Tensor, d_model: int) -> torch.Tensor:
    r"""Section 3.5: \(PE_{(pos,2i)} = \sin(pos/10000^{2i/d})\) and \(PE_{(pos,2i+1)} = \cos(pos/10000^{2i/d})\).

    Args:
        positions: integer positions from 0, of any shape `(...)`.
        d_model: width, even.

    Returns:
        float64 tensor of shape `(..., d_model)`, sines on even and cosines on odd columns.
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device) / d_model
    angles = positions.to(torch.float64)[..., None] / 10_000.0**exponents  # (..., d_model / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class VaswaniSinusoidalPositions(nn.Module):
    """Adds nothing to a checkpoint: the table is computed, and positions past its end are computed on the spot."""

    def __init__(self, num_positions: int, d_model: int):
        super().__init__()
        self.num_positions, self.d_model = num_positions, d_model
        self.register_buffer("table", self.compute_table(), persistent=False)

    def compute_table(self) -> torch.Tensor:
        """The first `num_positions` rows, `(num_positions, d_model)` in torch's default floating-point type."""
        return sinusoidal_positions(torch.arange(self.num_positions), self.d_model).to(torch.get_default_dtype())

    def forward(self, position_ids: torch.Tensor, end: int) -> torch.Tensor:
        """Encodings of shape `(length, d_model)` of `position_ids`, all below `end`."""
        if end <= self.num_positions:
            return nn.functional.embedding(position_ids, self.table)
        return sinusoidal_positions(position_ids, self.d_model).to(self.table.dtype)


class VaswaniLearnedPositions(nn.Embedding):
    """One trained vector a position (Table 3, row E)."""

    def forward(self, position_ids: torch.Tensor, end: int) -> torch.Tensor:
        """Encodings of shape `(length, d_model)`.

        Raises:
            ValueError: for a sequence longer than the table.
        """
        if end > self.num_embeddings:
            raise ValueError(
                f"a sequence of {end} tokens is longer than the {self.num_embeddings} learned positions of this model:"
                " shorten it, or train with a larger max_position_embeddings or with sinusoids"
            )
        return super().forward(position_ids)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Equation 1: \(\mathrm{softmax}(QK^T/\sqrt{d_k})V\), with an additive mask.

    Args:
        module: the attention module; its training mode decides on dropout.
        query: `(batch_size, num_heads, query_length, d_k)`.
        key: `(batch_size, num_heads, key_length, d_k)`.
        value: `(batch_size, num_heads, key_length, d_v)`.
        attention_mask: 0 where attention is allowed and very negative where it is not, broadcast to
            `(batch_size, num_heads, query_length, key_length)`.
        scaling: the factor of Equation 1, \(1/\sqrt{d_k}\).
        dropout: probability of dropping an attention weight.
        **kwargs: taken for the attention interface's sake and not used.

    Returns:
        the output, `(batch_size, query_length, num_heads, d_v)`, and the weights,
        `(batch_size, num_heads, query_length, key_length)`.
    """
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.dropout(scores.softmax(dim=-1), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class VaswaniAttention(nn.Module):
    """Multi-head attention (Section 3.2.2), over its own input or, given `key_value_states`, over another sequence."""

    def __init__(self, config: VaswaniConfig, layer_idx: int, is_causal: bool = False):
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

    @staticmethod
    def _split_heads(states: torch.Tensor, head_width: int) -> torch.Tensor:
        # (batch_size, length, num_heads * head_width) -> (batch_size, num_heads, length, head_width)
        return states.view(*states.shape[:-1], -1, head_width).transpose(1, 2)

    def _keys_and_values(self, states: torch.Tensor, cache: Cache | None, is_cross_attention: bool):
        """Project `states`, or take what the cache holds; a source is projected once for a whole generation."""
        if isinstance(cache, EncoderDecoderCache):
            if is_cross_attention and cache.is_updated.get(self.layer_idx):
                layer = cache.cross_attention_cache.layers[self.layer_idx]
                return layer.keys, layer.values
            layers = cache.cross_attention_cache if is_cross_attention else cache.self_attention_cache
        else:
            layers = cache
        key = self._split_heads(self.k_proj(states), self.d_k)
        value = self._split_heads(self.v_proj(states), self.d_v)
        if layers is not None:
            key, value = layers.update(key, value, self.layer_idx)
            if is_cross_attention and isinstance(cache, EncoderDecoderCache):
                cache.is_updated[self.layer_idx] = True
        return key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` to `key_value_states`, or to itself.

        Args:
            hidden_states: `(batch_size, query_length, d_model)`.
            key_value_states: `(batch_size, key_length, d_model)`, the encoder's output in encoder-decoder attention.
            attention_mask: mask in the form of the chosen attention implementation.
            past_key_values: the cache to read and extend.
            **kwargs: handed to the attention implementation.

        Returns:
            the output, `(batch_size, query_length, d_model)`, and the weights,
            `(batch_size, num_heads, query_length, key_length)`, or `None` from implementations that form none.
        """
        query = self._split_heads(self.q_proj(hidden_states), self.d_k)
        is_cross_attention = key_value_states is not None
        states = key_value_states if is_cross_attention else hidden_states
        key, value = self._keys_and_values(states, past_key_values, is_cross_attention)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.out_proj(output.flatten(-2)), weights


class VaswaniLayer(GradientCheckpointingLayer):
    """What encoder and decoder layers share: the feed-forward sublayer and the post-norm residual (Section 3.1)."""

    def __init__(self, config: VaswaniConfig):
        super().__init__()
        self.dropout = config.dropout
        self.activation_dropout = config.activation_dropout
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def add_and_norm(self, norm: nn.LayerNorm, residual: torch.Tensor, sublayer_output: torch.Tensor) -> torch.Tensor:
        """LayerNorm(x + Dropout(Sublayer(x))), Sections 3.1 and 5.4; all of `(batch_size, length, d_model)`."""
        return norm(residual + dropout(sublayer_output, p=self.dropout, training=self.training))

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Equation 2, max(0, xW1 + b1)W2 + b2, of `(batch_size, length, d_model)`, with its residual."""
        inner = nn.functional.relu(self.fc1(hidden_states))  # (batch_size, length, d_ff)
        inner = dropout(inner, p=self.activation_dropout, training=self.training)
        return self.add_and_norm(self.final_layer_norm, hidden_states, self.fc2(inner))


class VaswaniEncoderLayer(VaswaniLayer):
    """Self-attention, then feed-forward (Section 3.1, left of Figure 1)."""

    def __init__(self, config: VaswaniConfig, layer_idx: int):
        super().__init__(config)
        self.self_attn = VaswaniAttention(config, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Unpack[TransformersKwargs]
    ) -> torch.Tensor:
        """`(batch_size, source_length, d_model)` to the same shape."""
        attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states = self.add_and_norm(self.self_attn_layer_norm, hidden_states, attended)
        return self.feed_forward(hidden_states)


class VaswaniDecoderLayer(VaswaniLayer):
    """Masked self-attention, attention over the encoder's output, feed-forward (Section 3.1, right of Figure 1)."""

    def __init__(self, config: VaswaniConfig, layer_idx: int):
        super().__init__(config)
        self.self_attn = VaswaniAttention(config, layer_idx, is_causal=True)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.encoder_attn = VaswaniAttention(config, layer_idx)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`(batch_size, target_length, d_model)` to the same shape, attending to the encoder's output if given."""
        attended, _ = self.self_attn(
            hidden_states, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs
        )
        hidden_states = self.add_and_norm(self.self_attn_layer_norm, hidden_states, attended)
        if encoder_hidden_states is not None:
            attended, _ = self.encoder_attn(
                hidden_states,
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            hidden_states = self.add_and_norm(self.encoder_attn_layer_norm, hidden_states, attended)
        return self.feed_forward(hidden_states)


class VaswaniPreTrainedModel(PreTrainedModel):
    """Weight initialisation, and what transformers needs to know of the architecture."""

    config: VaswaniConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VaswaniEncoderLayer", "VaswaniDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Xavier-uniform projections and embeddings of variance 1/d_model.

        The paper prints no initialisation. With transformers' usual normal(0, 0.02) a post-norm stack trained from
        scratch can stay blind to its input; with these scales, embeddings times sqrt(d_model) have unit variance, as
        layer-normalised activations have.
        """
        embedding_std = self.config.d_model**-0.5
        if isinstance(module, nn.Linear):
            if module is getattr(self, "lm_head", None):  # its own matrix only when it is not tied
                init.normal_(module.weight, mean=0.0, std=embedding_std)
            else:
                init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=embedding_std)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, VaswaniSinusoidalPositions):
            init.copy_(module.table, module.compute_table())

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        """Two short sentences, one padded, for tracing."""
        pad, eos = self.config.pad_token_id, self.config.eos_token_id
        input_ids = torch.tensor([[4, 6, 5, 4, eos], [4, 7, eos, pad, pad]], device=self.device)
        return {"input_ids": input_ids, "attention_mask": input_ids.ne(pad), "decoder_input_ids": input_ids}


class VaswaniStack(VaswaniPreTrainedModel):
    """What encoder and decoder share: embeddings times sqrt(d_model) plus positions, with dropout (3.4, 3.5, 5.4)."""

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        self.dropout = config.dropout
        self.embed_scale = math.sqrt(config.d_model)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        if config.position_encoding == "sinusoidal":
            self.embed_positions = VaswaniSinusoidalPositions(config.max_position_embeddings, config.d_model)
        else:
            self.embed_positions = VaswaniLearnedPositions(config.max_position_embeddings, config.d_model)
        self.gradient_checkpointing = False

    def look_up(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, name: str) -> torch.Tensor:
        """Token embeddings `(batch_size, length, d_model)`, not yet scaled.

        Raises:
            ValueError: unless exactly one of the two is given, or for a token id beyond the vocabulary (on a CPU; on
                other devices torch reports it when it next waits for the device).
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"give either {name}_ids or {name.replace('input', 'inputs')}_embeds; {given} given")
        if inputs_embeds is not None:
            return inputs_embeds
        try:
            return self.embed_tokens(input_ids)
        except IndexError as error:
            raise ValueError(
                f"{name}_ids has token ids from {int(input_ids.min())} to {int(input_ids.max())}: they must be at"
                f" least 0 and below the vocabulary size {self.embed_tokens.num_embeddings}; is this the tokenizer"
                " that the model was trained with?"
            ) from error

    def embed(self, embeddings: torch.Tensor, position_ids: torch.Tensor, end: int) -> torch.Tensor:
        """Scale, add the encodings of `position_ids` (all below `end`), drop; `(batch_size, length, d_model)`."""
        positions = self.embed_positions(position_ids, end).to(embeddings.dtype)
        summed = embeddings * self.embed_scale + positions
        return dropout(summed, p=self.dropout, training=self.training)


class VaswaniEncoder(VaswaniStack):
    """The encoder: `encoder_layers` times [`VaswaniEncoderLayer`] over the embedded source."""

    _can_record_outputs = {"hidden_states": VaswaniEncoderLayer, "attentions": VaswaniAttention}  # noqa: RUF012

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(VaswaniEncoderLayer(config, index) for index in range(config.encoder_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode a source.

        Args:
            input_ids: `(batch_size, source_length)` token ids.
            attention_mask: `(batch_size, source_length)`, 1 for a token and 0 for padding.
            inputs_embeds: `(batch_size, source_length, d_model)` in place of ids: embeddings not yet scaled.
            **kwargs: `output_attentions`, `output_hidden_states` and the like.

        Raises:
            ValueError: as [`VaswaniStack.look_up`] and the position encoding say.
        """
        embeddings = self.look_up(input_ids, inputs_embeds, "input")
        length = embeddings.shape[1]
        hidden_states = self.embed(embeddings, torch.arange(length, device=embeddings.device), length)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden_states)


class VaswaniDecoder(VaswaniStack):
    """The decoder: `decoder_layers` times [`VaswaniDecoderLayer`] over the embedded target so far."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": VaswaniDecoderLayer,
        "attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(VaswaniDecoderLayer(config, index) for index in range(config.decoder_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode a target prefix; position t sees positions up to t only.

        Args:
            input_ids: `(batch_size, target_length)` token ids; with a cache, those not yet in it.
            attention_mask: `(batch_size, cached + target_length)`, 0 for padding; not needed for padding on the right.
            encoder_hidden_states: `(batch_size, source_length, d_model)`.
            encoder_attention_mask: `(batch_size, source_length)`, 0 for padding.
            past_key_values: keys and values of earlier steps.
            inputs_embeds: `(batch_size, target_length, d_model)` in place of ids: embeddings not yet scaled.
            use_cache: keep keys and values for the next step.
            **kwargs: `output_attentions`, `output_hidden_states` and the like.

        Raises:
            ValueError: as [`VaswaniStack.look_up`] and the position encoding say.
        """
        embeddings = self.look_up(input_ids, inputs_embeds, "decoder_input")
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        self_attention_cache = (
            past_key_values.self_attention_cache
            if isinstance(past_key_values, EncoderDecoderCache)
            else past_key_values
        )
        length = embeddings.shape[1]
        past_length = self_attention_cache.get_seq_length() if self_attention_cache is not None else 0
        # A static cache counts in a tensor; its capacity bounds the positions without waiting for the device.
        end = self_attention_cache.get_max_length() if isinstance(past_length, torch.Tensor) else past_length + length
        position_ids = torch.arange(length, device=embeddings.device) + past_length
        hidden_states = self.embed(embeddings, position_ids, end)
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=self_attention_cache,
        )
        encoder_attention_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                causal_mask,
                encoder_hidden_states,  # positional, so that gradient checkpointing sees it
                encoder_attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )


class VaswaniModel(VaswaniPreTrainedModel):
    """Encoder and decoder without the output projection.

    With `config.tie_word_embeddings` both embeddings are the one matrix `shared` (Section 3.4); without it each has
    its own.
    """

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        if config.tie_word_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
            self._tied_weights_keys = {
                "encoder.embed_tokens.weight": "shared.weight",
                "decoder.embed_tokens.weight": "shared.weight",
            }
        self.encoder = VaswaniEncoder(config)
        self.decoder = VaswaniDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The source embeddings: the shared matrix when tied."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the shared matrix, or the source embeddings alone when untied."""
        self.encoder.embed_tokens = value
        if self.config.tie_word_embeddings:
            self.shared = value
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: tuple | BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless `encoder_outputs` holds it already, and decode the target prefix.

        Args:
            input_ids: `(batch_size, source_length)` token ids.
            attention_mask: `(batch_size, source_length)`, 1 for a token and 0 for padding.
            decoder_input_ids: `(batch_size, target_length)`: `decoder_start_token_id`, then the target but its last.
            decoder_attention_mask: `(batch_size, target_length)`; not needed for padding on the right.
            encoder_outputs: what the encoder returned for this source.
            past_key_values: keys and values of earlier decoding steps.
            inputs_embeds: `(batch_size, source_length, d_model)` in place of `input_ids`, not yet scaled.
            decoder_inputs_embeds: `(batch_size, target_length, d_model)` in place of `decoder_input_ids`.
            use_cache: keep keys and values for the next step.
            **kwargs: `output_attentions`, `output_hidden_states` and the like.

        Raises:
            ValueError: for ids beyond the vocabulary, or when neither or both of ids and embeddings are given.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(
                **dict(zip(("last_hidden_state", "hidden_states", "attentions"), encoder_outputs, strict=False))
            )
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


def shift_right(labels: torch.Tensor, pad_token_id: int, decoder_start_token_id: int) -> torch.Tensor:
    """Decoder inputs for `labels` (Section 3.1, "outputs shifted right"): the start token, then all but the last.

    Args:
        labels: `(batch_size, target_length)` token ids, -100 where there is padding.
        pad_token_id: put where labels are -100.
        decoder_start_token_id: put first.

    Returns:
        `(batch_size, target_length)` token ids.
    """
    start = labels.new_full((labels.shape[0], 1), decoder_start_token_id)
    shifted = torch.cat((start, labels[:, :-1]), dim=1)
    return shifted.masked_fill(shifted == IGNORE_INDEX, pad_token_id)


class VaswaniForConditionalGeneration(VaswaniPreTrainedModel, VaswaniGenerationMixin, GenerationMixin):
    """The whole model of Figure 1: encoder, decoder, and the projection to the vocabulary."""

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        self.model = VaswaniModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self._tied_weights_keys = {
                "lm_head.weight": "model.shared.weight",
                "model.encoder.embed_tokens.weight": "model.shared.weight",
                "model.decoder.embed_tokens.weight": "model.shared.weight",
            }
        self.post_init()

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs) -> nn.Embedding:
        """Resize the vocabulary; untied, the decoder's embeddings follow the encoder's."""
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        decoder = self.model.decoder
        if decoder.embed_tokens.num_embeddings != embeddings.num_embeddings:
            decoder.embed_tokens = self._get_resized_embeddings(decoder.embed_tokens, embeddings.num_embeddings)
        return embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: tuple | BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Logits of the next token at every position and, given `labels`, the loss.

        Args:
            input_ids: `(batch_size, source_length)` token ids.
            attention_mask: `(batch_size, source_length)`, 1 for a token and 0 for padding.
            decoder_input_ids: `(batch_size, target_length)`; made from `labels` when not given.
            decoder_attention_mask: `(batch_size, target_length)`; not needed for padding on the right.
            encoder_outputs: what the encoder returned for this source.
            past_key_values: keys and values of earlier decoding steps.
            inputs_embeds: `(batch_size, source_length, d_model)` in place of `input_ids`, not yet scaled.
            decoder_inputs_embeds: `(batch_size, target_length, d_model)` in place of `decoder_input_ids`.
            labels: `(batch_size, target_length)` target token ids, the end token included; -100 is left out.
            use_cache: keep keys and values for the next step; off when labels are given.
            num_items_in_batch: label tokens of the whole optimizer step, over accumulated batches and devices. The
                loss is then the sum over this batch divided by it; otherwise the mean over this batch's labels.
            **kwargs: `output_attentions`, `output_hidden_states` and the like.

        Returns:
            logits `(batch_size, target_length, vocab_size)` and the cross-entropy in nats a token, not smoothed
            (smoothing belongs to training: Section 5.4).

        Raises:
            ValueError: for ids beyond the vocabulary, or when neither or both of ids and embeddings are given.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            labels = labels.to(logits.device)
            total = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
            loss = total / (num_items_in_batch if num_items_in_batch is not None else (labels != IGNORE_INDEX).sum())
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """`shift_right` with this model's special tokens; transformers' collator for label smoothing calls it."""
        return shift_right(labels, self.config.pad_token_id, self.config.decoder_start_token_id)


__all__ = [
    "VaswaniForConditionalGeneration",
    "VaswaniModel",
    "VaswaniPreTrainedModel",
    "shift_right",
    "sinusoidal_positions",
]
