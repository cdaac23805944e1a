r"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al., 2017, arXiv 1706.03762v7).

Written for transformers 5: it runs under `generate()`, `Trainer`, `torch.compile` and the attention interface. Checked
against `torch.nn.Transformer` in `tests/model/test_modeling.py`. Shapes name their axes as `layers_vaswani` does.
"""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_masks_for_generate
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .checkpoint_vaswani import VaswaniCheckpointMixin
from .configuration_vaswani import VaswaniConfig
from .generation_vaswani import OWN_SETTINGS, VaswaniGenerationMixin
from .incremental_decoding_vaswani import DecodingCache, IncrementalDecoder, can_decode_incrementally
from .layers_vaswani import (
    CACHE,
    VaswaniAttention,
    VaswaniDecoderLayer,
    VaswaniEncoderLayer,
    VaswaniLearnedPositions,
    VaswaniSinusoidalPositions,
    dropout,
    either_cache,
    normalized,
)
from .linear_vaswani import product_dtype
from .local_attention_vaswani import in_window, restricted_mask
from .loss_vaswani import IGNORE_INDEX, can_be_fused, label_smoothed_cross_entropy, projected_cross_entropy
from .packed_sentences_vaswani import check_packed, pack_sentences, place_sentences

_SYNCHRONOUS = "cpu"  # the type of device whose values can be read without waiting for it


class VaswaniPreTrainedModel(VaswaniCheckpointMixin, PreTrainedModel):
    """Weight initialisation, and what transformers needs to know of the architecture."""

    config: VaswaniConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VaswaniEncoderLayer", "VaswaniDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Xavier-uniform projections and embeddings of variance 1/d_model; `config.initialization` may say otherwise.

        The paper prints no initialisation. The authors' code (`multihead_attention` in an early `common_attention` of
        tensor2tensor) had one matrix for queries, keys and values, and one for the keys and values of a source, whose
        width each of them is initialised for. Embeddings times sqrt(d_model) have unit variance, like LayerNorm's.
        """
        kind, d_model = self.config.initialization, self.config.d_model
        is_embedding = isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None)
        if is_embedding or (isinstance(module, nn.Linear) and kind == "normal"):
            init.normal_(module.weight, mean=0.0, std=0.02 if kind == "normal" else d_model**-0.5)
        elif isinstance(module, nn.Linear):
            outputs = getattr(module, "joined_features", 0) if kind == "tensor2tensor" else 0
            bound = math.sqrt(6 / (module.in_features + (outputs or module.out_features)))
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
        elif isinstance(module, VaswaniSinusoidalPositions):
            init.copy_(module.table, module.compute_table())
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)
        padding = getattr(module, "padding_idx", None)
        if padding is not None and not getattr(module.weight, "_is_hf_initialized", False):
            init.zeros_(module.weight[padding])

    @property
    def device(self) -> torch.device:
        """Return where the model computes, which is not where weights are kept that accelerate has offloaded."""
        if (device := super().device).type != "meta":
            return device
        hooks = [getattr(module, "_hf_hook", None) for module in self.modules()]
        devices = [getattr(part, "execution_device", None) for hook in hooks for part in getattr(hook, "hooks", [hook])]
        return torch.device(next((place for place in devices if place is not None), device))

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the vocabulary of both sides; untied, the decoder's embeddings follow the encoder's.

        Raises:
            ValueError: for a model with two vocabularies.
        """
        if self.config.target_vocab_size != self.config.vocab_size:
            sizes = f"{self.config.vocab_size} and {self.config.target_vocab_size} entries"
            raise ValueError(f"the model has two vocabularies, of {sizes}: resizing would not know which")
        self.config.decoder_vocab_size = None
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        decoder, size = getattr(self.base_model, "decoder", None), embeddings.num_embeddings
        if decoder is not None and decoder.embed_tokens.num_embeddings != size:
            decoder.embed_tokens = self._get_resized_embeddings(decoder.embed_tokens, size, None, mean_resizing)
            self.tie_weights()  # which gives a tied projection's bias the new size
        return embeddings

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return ties as `PreTrainedModel` does, which has none if the output projection has a matrix of its own."""
        if all_submodels or self.config.tie_word_embeddings or not self.config.shares_embeddings:
            return super().get_expanded_tied_weights_keys(all_submodels)
        return dict(self._tied_weights_keys or {})


class VaswaniStack(VaswaniPreTrainedModel):
    """The common part of both stacks: embeddings times sqrt(d_model) plus positions, with dropout (3.4, 3.5, 5.4)."""

    def __init__(self, config: VaswaniConfig, vocab_size: int):
        super().__init__(config)
        self.dropout = config.dropout
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model, config.pad_token_id)
        if config.position_encoding == "learned":
            self.embed_positions = VaswaniLearnedPositions(config.max_position_embeddings, config.d_model)
        else:
            self.embed_positions = VaswaniSinusoidalPositions(config)
        norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.layer_norm = norm if config.add_final_layer_norm else None

    def token_embeddings(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, name: str
    ) -> torch.Tensor:
        """Return embeddings `(batch_size, length, d_model)`, not yet scaled; `name` is what errors call the input."""
        if (input_ids is None) == (inputs_embeds is None):
            number = "neither" if input_ids is None else "both"
            raise ValueError(f"give either {name}_ids or {name.replace('input', 'inputs')}_embeds; {number} given")
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def embed(self, embeddings: torch.Tensor, position_ids: torch.Tensor, end: int) -> torch.Tensor:
        """Scale `(batch_size, length, d_model)` embeddings, add those of positions below `end`, and apply dropout."""
        positions = self.embed_positions(position_ids, end).to(embeddings)  # they may be on another device
        summed = embeddings * self.embed_scale + positions
        if self.training:  # layers pass states on in autocast's type: a norm ends each, so that roundings do not add up
            summed = summed.to(product_dtype(summed))
        return dropout(summed, p=self.dropout, training=self.training)

    def output_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the stack's output, given that of its last layer, both `(batch_size, length, d_model)`."""
        return hidden_states if self.layer_norm is None else normalized(self.layer_norm, hidden_states)

    def self_attention_mask(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        is_causal: bool = False,
        cache: Cache | None = None,
    ):
        """Return what each position sees, in the form that the attention implementation takes.

        `attention_mask` is `(batch_size, cached + length)`, 0 for padding.
        """
        config, options = self.config, {CACHE: cache}
        # A kernel of the Hub, which would take the source's mask for the target's.
        if is_flash_attention_requested(config):
            raise ValueError("attn_implementation cannot be flash attention: choose sdpa, eager or flex_attention")
        if config.attention_window is not None:
            mask = restricted_mask(config, hidden_states, attention_mask, is_causal, cache)
            if mask is not None:
                return mask
            options["and_mask_function"] = in_window(config.attention_window)
        make = create_causal_mask if is_causal else create_bidirectional_mask
        if not is_causal:
            attention_mask = self.expand_padding_mask(attention_mask)
        return make(config=config, inputs_embeds=hidden_states, attention_mask=attention_mask, **options)

    def expand_padding_mask(self, padding_mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return `(batch_size, 1, 1, key_length)` for `(batch_size, key_length)` in training on an accelerator.

        Given the latter, transformers asks the device whether there is any padding, and waits for its answer.
        """
        asks = self.training and self.config._attn_implementation == "sdpa"
        if asks and padding_mask is not None and padding_mask.dim() == 2 and padding_mask.device.type != _SYNCHRONOUS:
            return padding_mask.bool()[:, None, None, :]
        return padding_mask


class VaswaniEncoder(VaswaniStack):
    """The encoder: `encoder_layers` times `VaswaniEncoderLayer` over the embedded source."""

    _can_record_outputs = {"hidden_states": VaswaniEncoderLayer, "attentions": VaswaniAttention}  # noqa: RUF012

    def __init__(self, config: VaswaniConfig):
        super().__init__(config, config.vocab_size)
        self.layers = nn.ModuleList(VaswaniEncoderLayer(config, index) for index in range(config.encoder_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        source_offsets: torch.Tensor | None = None,
        max_length: int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode a source; arguments and errors as in `VaswaniForConditionalGeneration`'s `forward`."""
        embeddings = self.token_embeddings(input_ids, inputs_embeds, "input")
        length = embeddings.shape[1]
        if source_offsets is None:
            hidden_states = self.embed(embeddings, torch.arange(length, device=embeddings.device), length)
            mask = self.self_attention_mask(hidden_states, attention_mask)
        else:
            places = place_sentences(source_offsets, length, max_length)
            hidden_states = self.embed(embeddings, places.positions, places.longest)
            mask = pack_sentences(self.config, hidden_states, places, places, self.training)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.output_of(hidden_states))


class VaswaniDecoder(VaswaniStack):
    """The decoder: `decoder_layers` times `VaswaniDecoderLayer` over the embedded target so far.

    Its arithmetic is repeated in `incremental_decoding_vaswani`, for steps of `generate()` alone, where what is done
    here for whole sequences, any mask and any cache would cost as much; tests hold the two to the same outputs.
    """

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": OutputRecorder(VaswaniDecoderLayer, num_hidden_layers_key="decoder_layers"),
        "attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: VaswaniConfig):
        super().__init__(config, config.target_vocab_size)
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
        source_offsets: torch.Tensor | None = None,
        target_offsets: torch.Tensor | None = None,
        max_length: int | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode a target prefix; position t sees positions up to t only.

        `input_ids`, `attention_mask` and `inputs_embeds` are those that `VaswaniForConditionalGeneration`'s `forward`
        calls `decoder_...`; `encoder_hidden_states` is `(batch_size, source_length, d_model)`. A cache that is no
        `EncoderDecoderCache` holds the target's keys and values, and the source's are computed again.
        """
        cache = either_cache(cache, past_key_values)
        if isinstance(cache, DecodingCache):
            raise ValueError(f"{CACHE} comes from generate(): give the decoder a DynamicCache")
        embeddings = self.token_embeddings(input_ids, inputs_embeds, "decoder_input")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None and not isinstance(cache, EncoderDecoderCache):
            # Without a cache of its own the source would be added to the target's.
            cache = EncoderDecoderCache(cache, DynamicCache(config=self.config))
        own_cache = None if cache is None else cache.self_attention_cache
        if target_offsets is None:
            length = embeddings.shape[1]
            past = own_cache.get_seq_length() if own_cache is not None else 0
            end = past + length
            # A static cache counts in a tensor; its capacity bounds the positions without waiting for the device.
            if isinstance(past, torch.Tensor):
                end = own_cache.get_max_length()
                if self.config.position_encoding == "learned":
                    end = min(end, self.config.max_position_embeddings)
            hidden_states = self.embed(embeddings, torch.arange(length, device=embeddings.device) + past, end)
            causal_mask = self.self_attention_mask(hidden_states, attention_mask, is_causal=True, cache=own_cache)
            encoder_attention_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=self.expand_padding_mask(encoder_attention_mask),
                encoder_hidden_states=encoder_hidden_states,
            )
        else:
            targets = place_sentences(target_offsets, embeddings.shape[1], max_length)
            sources = place_sentences(source_offsets, encoder_hidden_states.shape[1], max_length)
            hidden_states = self.embed(embeddings, targets.positions, targets.longest)
            causal_mask = pack_sentences(self.config, hidden_states, targets, targets, self.training, is_causal=True)
            encoder_attention_mask = pack_sentences(self.config, hidden_states, targets, sources, self.training)
        options = {"encoder_attention_mask": encoder_attention_mask, CACHE: cache, **kwargs}
        for layer in self.layers:  # states are positional, so that gradient checkpointing sees them
            hidden_states = layer(hidden_states, causal_mask, encoder_hidden_states, **options)
        return BaseModelOutputWithPastAndCrossAttentions(self.output_of(hidden_states), **{CACHE: cache})


class VaswaniModel(VaswaniPreTrainedModel):
    """Encoder and decoder without the output projection.

    Where `config.shares_embeddings`, both embeddings are the one matrix `shared` (Section 3.4); else each has its own.
    """

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        if config.shares_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
            stacks = ("encoder", "decoder")
            self._tied_weights_keys = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in stacks}
        self.encoder = VaswaniEncoder(config)
        self.decoder = VaswaniDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the source embeddings: the shared matrix where there is one."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the shared matrix, or the source embeddings alone."""
        self.encoder.embed_tokens = value
        if self.config.shares_embeddings:
            self.shared = self.decoder.embed_tokens = value

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
        target_offsets: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Compute the decoder's output, `(batch_size, target_length, d_model)`.

        Arguments and errors as in `VaswaniForConditionalGeneration`'s `forward`, without those about the loss.
        """
        cache, source_offsets = either_cache(cache, past_key_values), kwargs.get("source_offsets")
        if source_offsets is not None or target_offsets is not None:
            wants_weights = kwargs.get("output_attentions", self.config.output_attentions) or None
            others = attention_mask, decoder_attention_mask, cache, wants_weights
            check_packed(self.config, (source_offsets, target_offsets), others)
            use_cache = False
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, **kwargs)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            target_offsets=target_offsets,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            **{CACHE: decoder_outputs.get(CACHE)},
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class VaswaniForConditionalGeneration(VaswaniPreTrainedModel, VaswaniGenerationMixin, GenerationMixin):
    """The whole model of Figure 1: encoder, decoder, and the projection to the vocabulary."""

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        self._decoder: IncrementalDecoder | None = None
        self.model = VaswaniModel(config)
        self.lm_head = nn.Linear(config.d_model, config.target_vocab_size, bias=config.output_bias)
        target = "model.shared.weight" if config.shares_embeddings else "model.decoder.embed_tokens.weight"
        ties = {"lm_head.weight": target} if config.tie_word_embeddings else {}
        if config.shares_embeddings:
            ties |= {f"model.{stack}.embed_tokens.weight": target for stack in ("encoder", "decoder")}
        self._tied_weights_keys = ties or None
        self.post_init()
        # Marked as made from the model's configuration, it would lose our own entries when it is loaded again.
        self.generation_config._from_model_config = False
        vars(self.generation_config).update(OWN_SETTINGS)

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
        skip_logits: bool = False,
        source_offsets: torch.Tensor | None = None,
        target_offsets: torch.Tensor | None = None,
        max_length: int | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Compute logits of the next token at every position and, given `labels`, the loss.

        Args:
            input_ids: `(batch_size, source_length)` token ids.
            attention_mask: `(batch_size, source_length)`, 1 for a token and 0 for padding.
            decoder_input_ids: `(batch_size, target_length)`: `decoder_start_token_id`, then the target but its last;
                made from `labels` when not given.
            decoder_attention_mask: `(batch_size, cached + target_length)`; not needed for padding on the right.
            encoder_outputs: what the encoder returned for this source.
            past_key_values: keys and values of earlier decoding steps; transformers calls it `cache` since 5.24.
            inputs_embeds: `(batch_size, source_length, d_model)` in place of `input_ids`, not yet scaled.
            decoder_inputs_embeds: `(batch_size, target_length, d_model)` in place of `decoder_input_ids`.
            labels: `(batch_size, target_length)` target token ids, the end token included; -100 is left out.
            use_cache: keep keys and values for the next step; off when labels are given.
            num_items_in_batch: label tokens of the whole optimizer step, over accumulated batches and devices. The
                loss is then the sum over this batch divided by it; otherwise the mean over this batch's labels.
            source_offsets: `(sentences + 1,)` int32, for a batch without padding: where the sentences of `input_ids`,
                `(1, tokens)`, start, and the number of tokens. Not with masks, caches, windows or attention weights.
            target_offsets: the same for `labels` or `decoder_input_ids`, also `(1, tokens)`.
            max_length: tokens of the longest sentence that these two may have; it is not needed on a CPU.
            skip_logits: with labels, return the loss alone, in far less memory: where possible it is computed together
                with the projection, in blocks of tokens, and the logits of the whole batch never exist at once.
            **kwargs: `output_attentions`, `output_hidden_states` and the like.

        Returns:
            logits `(batch_size, target_length, vocab_size)` and the cross-entropy in nats a token: in training mode
            smoothed by `config.label_smoothing` (Section 5.4), in evaluation mode plain, so that perplexity is exact.

        Raises:
            ValueError: unless exactly one of ids and embeddings is given, for more tokens than learned positions, for
                flash attention, and for what cannot be beside offsets.
        """
        cache = either_cache(cache, past_key_values)
        if isinstance(cache, DecodingCache):
            if not cache.source:
                once = slice(None, None, cache.copies)
                mask = None if attention_mask is None else attention_mask[once]
                cache.decoder.read_source(encoder_outputs[0][once], mask, cache)
            return Seq2SeqLMOutput(
                logits=cache.decoder.logits(decoder_input_ids, cache),
                **{CACHE: cache},
                encoder_last_hidden_state=None if encoder_outputs is None else encoder_outputs[0],
            )
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
                if target_offsets is not None:
                    starts = place_sentences(target_offsets, labels.shape[1], max_length).positions == 0
                    decoder_input_ids.masked_fill_(starts, self.config.decoder_start_token_id)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            source_offsets=source_offsets,
            target_offsets=target_offsets,
            max_length=max_length,
            **kwargs,
        )
        smoothing = self.config.label_smoothing if self.training else 0.0  # Section 5.4
        hidden_states = outputs.last_hidden_state
        if skip_logits and can_be_fused(self.lm_head, hidden_states):
            weight, bias = self.lm_head.weight, self.lm_head.bias
            loss = projected_cross_entropy(hidden_states, weight, labels, smoothing, num_items_in_batch, bias)
            return Seq2SeqLMOutput(loss=loss)  # accelerate copies all that is returned to float32
        logits = self.lm_head(hidden_states)  # Section 3.4
        loss = None if labels is None else label_smoothed_cross_entropy(logits, labels, smoothing, num_items_in_batch)
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=None if skip_logits else logits, **others)

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, **kwargs):
        """Prepare as `GenerationMixin` does; for our own steps, only what they need."""
        cache = kwargs.get(CACHE)
        if not isinstance(cache, DecodingCache):
            return super().prepare_inputs_for_generation(input_ids, next_sequence_length=next_sequence_length, **kwargs)
        inputs = {name: kwargs.get(name) for name in ("encoder_outputs", "attention_mask")}
        new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        return {**inputs, "decoder_input_ids": new.to(self.device), CACHE: cache}

    def keep_decoder(self):
        """Let all `generate()` to come share one `IncrementalDecoder`, while no weight of the decoder is trained."""
        self._decoder = IncrementalDecoder(self.requires_grad_(False))

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *sizes):
        own = model_kwargs.get(CACHE) is None
        as_built = type(self.model) is VaswaniModel and type(self.model.decoder) is VaswaniDecoder
        if own and as_built and can_decode_incrementally(self, generation_config, generation_mode, model_kwargs):
            beams, returned = generation_config.num_beams, generation_config.num_return_sequences
            is_trained = any(weight.requires_grad for weight in self.parameters())
            decoder = IncrementalDecoder(self) if is_trained or self._decoder is None else self._decoder
            model_kwargs[CACHE] = DecodingCache(decoder, beams, max(beams, returned))
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *sizes)

    @staticmethod
    def create_masks_for_generate(config, **options):
        """Make masks as transformers does for `generate()` with static caches, limited to `attention_window`."""
        if config.attention_window is not None:
            options["and_mask_function"] = in_window(config.attention_window)
        return create_masks_for_generate(config=config, **options)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Decoder inputs for `labels` (Section 3.1, "outputs shifted right"): the start token, then all but the last.

        Both are `(batch_size, target_length)` token ids; -100 among the labels becomes padding. Collators call this.
        """
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        shifted = torch.cat((start, labels[:, :-1]), dim=1)
        return shifted.masked_fill(shifted == IGNORE_INDEX, self.config.pad_token_id)
