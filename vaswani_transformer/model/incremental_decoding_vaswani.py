"""One decoder step at a time, for `generate()`: the arithmetic of `VaswaniDecoder` a second time, with less around it.

A step of the search feeds one token a row. The layers' forward handles whole sequences, masks and caches of any kind,
and at one token all of that costs as much as the arithmetic. `IncrementalDecoder` computes the steps, `DecodingCache`
keeps what they have computed:

- keys and values lie in buffers with room for the steps to come, in place of tensors that grow by copying;
- rows that are beams of one sentence share its source: its keys and values exist once;
- beams that change places are not copied: the beams of a sentence look at one set of keys and values, through a mask
  that says which of them are a beam's own past, and it is the mask's rows that change places;
- what no beam looks at any more is dropped whenever the buffers are full;
- masks are made once a step, and not at all where nothing is hidden.

The search itself is transformers'. This file travels to the Hub beside the weights: it may import installed libraries
and siblings in its own folder only.
"""

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMode

from .layers_vaswani import VaswaniAttention, VaswaniDecoderLayer, VaswaniSinusoidalPositions, attention
from .linear_vaswani import Projection, has_hooks, has_own_methods
from .local_attention_vaswani import reach

_ROOM = 32  # target tokens that the buffers have room for at first
_MANY = 16  # sentences from which on, with so few queries each, plain products are faster on a CPU than torch's kernel
_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


class _Attention:
    """The projections of one attention of a decoder layer."""

    def __init__(self, module: VaswaniAttention):
        self.q_proj, self.k_proj = Projection(module.q_proj), Projection(module.k_proj)
        self.v_proj, self.out_proj = Projection(module.v_proj), Projection(module.out_proj)
        self.d_k, self.d_v, self.scaling = module.d_k, module.d_v, module.scaling
        joined = getattr(module, "qkv_proj", None)  # `prepare_for_inference` makes it
        self.qkv_proj = None if joined is None else Projection(joined)

    def queries(self, states: torch.Tensor, sentences: int) -> torch.Tensor:
        """Queries of `(rows, d_model)`, `(sentences, num_heads, rows of a sentence, d_k)`."""
        return _split_heads(self.q_proj(states), sentences, self.d_k)

    def keys_and_values(self, states: torch.Tensor, sentences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the same form, of width `d_k` and `d_v`."""
        key, value = self.k_proj(states), self.v_proj(states)
        return _split_heads(key, sentences, self.d_k), _split_heads(value, sentences, self.d_v)

    def project(self, states: torch.Tensor, sentences: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, in one product where the weights lie together."""
        if self.qkv_proj is None:
            return self.queries(states, sentences), *self.keys_and_values(states, sentences)
        heads = self.out_proj.module.in_features // self.d_v
        widths = [heads * width for width in (self.d_k, self.d_k, self.d_v)]
        query, key, value = self.qkv_proj(states).split(widths, dim=-1)
        return (
            _split_heads(query, sentences, self.d_k),
            _split_heads(key, sentences, self.d_k),
            _split_heads(value, sentences, self.d_v),
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """Equation (1), projected and added to `residual`, `(rows, d_model)`."""
        if query.is_cpu and len(query) >= _MANY:
            output, _ = attention(query, key, value, mask, self.scaling)
        else:
            output = scaled_dot_product_attention(query, key, value, mask, scale=self.scaling)
        return self.out_proj.plus(output.transpose(1, 2).reshape(len(residual), -1), residual)


def _split_heads(states: torch.Tensor, sentences: int, width: int) -> torch.Tensor:
    return states.view(sentences, len(states) // sentences, -1, width).transpose(1, 2)


class _Layer:
    """A decoder layer taken apart."""

    def __init__(self, layer: VaswaniDecoderLayer):
        self.self_attn, self.encoder_attn = _Attention(layer.self_attn), _Attention(layer.encoder_attn)
        self.fc1, self.fc2 = Projection(layer.fc1), Projection(layer.fc2)
        self.norms = self.norms_of(layer)

    @staticmethod
    def norms_of(layer: VaswaniDecoderLayer) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Layer norms after self-attention, encoder-decoder attention and feed-forward sublayer."""
        return layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm


def _normalize(norm: nn.LayerNorm, states: torch.Tensor) -> torch.Tensor:
    return torch.layer_norm(states, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class IncrementalDecoder:
    """Computes the next step of the decoder, and reads and writes a `DecodingCache` for it; for one `generate()`.

    Args:
        model: the model that generates.
    """

    def __init__(self, model):
        self.stack, self.lm_head = model.model.decoder, Projection(model.lm_head)
        self.layers = [_Layer(layer) for layer in self.stack.layers]
        self.window: int | None = model.config.attention_window

    def read_source(self, states: torch.Tensor, mask: torch.Tensor | None, cache: "DecodingCache") -> None:
        """Project the encoder's output for all steps to come.

        Args:
            states: `(rows, source_length, d_model)`.
            mask: `(rows, source_length)`, 0 for padding.
            cache: keeps the keys and values.
        """
        states = states[:: cache.copies]
        for layer, source in zip(self.layers, cache.source, strict=True):
            keys, values = layer.encoder_attn.keys_and_values(states.flatten(0, 1), states.shape[0])
            source.keys, source.values = keys.contiguous(), values.contiguous()
        if mask is not None:
            mask = mask[:: cache.copies].bool()
            if not (mask.is_cpu and mask.all()):  # elsewhere the answer would have to be waited for
                cache.source_mask = _additive(mask[:, None, None, :], states.dtype)
        cache.has_source = True

    def step(self, input_ids: torch.LongTensor, cache: "DecodingCache") -> torch.Tensor:
        """The decoder's output at the next positions, `(rows * new tokens, d_model)`.

        Args:
            input_ids: `(rows, new tokens)`; one token where rows are beams.
            cache: what has been computed so far; holds the new tokens too afterwards.
        """
        states, everything = self._embed(input_ids, cache.length), slice(None)
        written, seen, mask = cache.take_slots(len(input_ids), input_ids.shape[1], states)
        groups = len(input_ids) // cache.beams
        for layer, target, source in zip(self.layers, cache.target, cache.source, strict=True):
            query, target.keys[:, :, written], target.values[:, :, written] = layer.self_attn.project(states, groups)
            states = _normalize(layer.norms[0], layer.self_attn.attend(query, *target.of(seen), mask, states))
            query = layer.encoder_attn.queries(states, len(source.keys))
            attended = layer.encoder_attn.attend(query, *source.of(everything), cache.source_mask, states)
            states = _normalize(layer.norms[1], attended)
            states = _normalize(layer.norms[2], layer.fc2.plus(layer.fc1.relu(states), states))
        return states

    def _embed(self, input_ids: torch.LongTensor, start: int) -> torch.Tensor:
        """What enters the first layer from position `start` on, `(rows * new tokens, d_model)`."""
        encodings, end = self.stack.embed_positions, start + input_ids.shape[1]
        embeddings = self.stack.look_up(input_ids, None, "decoder_input")
        if isinstance(encodings, VaswaniSinusoidalPositions) and end <= encodings.num_positions:
            encoding = encodings.table[start:end]
        else:
            encoding = encodings(torch.arange(start, end, device=embeddings.device), end)
        return (embeddings * self.stack.embed_scale + encoding.to(embeddings.dtype)).flatten(0, 1)

    def logits(self, input_ids: torch.LongTensor, cache: "DecodingCache") -> torch.Tensor:
        """Logits after each of `(rows, new tokens)`, `(rows, new tokens, vocab_size)`; of beams, after the last one."""
        if cache.beams == 1:
            return self.lm_head(self.step(input_ids, cache)).view(*input_ids.shape, -1)
        for token in input_ids.split(1, dim=1):  # a prefix that is given: as many steps as generating it would take
            states = self.step(token, cache)
        return self.lm_head(states).unsqueeze(1)


class _KeysAndValues:
    """Keys and values of one attention, `(sentences, num_heads, slots, d_k or d_v)`."""

    keys: torch.Tensor
    values: torch.Tensor

    def of(self, slots: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Those in some slots."""
        return self.keys[:, :, slots], self.values[:, :, slots]


class DecodingCache(EncoderDecoderCache):
    """The keys and values that a search has computed so far; the rows of one sentence stand together.

    Args:
        decoder: what computes the next step with it.
        beams: rows of a sentence that may change places; 1 where rows stay where they are.
        copies: rows of a sentence, in whose number the encoder's output is handed over.
    """

    def __init__(self, decoder: IncrementalDecoder, beams: int = 1, copies: int = 1):
        super().__init__(DynamicCache(), DynamicCache())
        self.decoder, self.beams, self.copies = decoder, beams, copies
        self.target, self.source = ([_KeysAndValues() for _ in decoder.layers] for _ in range(2))  # of each layer
        self.has_source = False
        self.source_mask: torch.Tensor | None = None  # (sentences, 1, 1, source_length), added to scores
        self.length = self.filled = self.room = 0  # target tokens; slots of keys and values in use, and all there are
        self.past: torch.Tensor | None = None  # (groups of beams, beams, room): 0 for a beam's own past, else -inf
        self.own: torch.Tensor | None = None  # (beams, beams): the same for the slots that a step fills
        self.positions: torch.Tensor | None = None  # (groups of beams, room): of the slots, where `reach` matters
        self.reach = None if decoder.window is None else reach(decoder.window)  # tokens back that are seen, if not all

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the target so far."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of the target, as assisted decoding does.

        Args:
            tokens_to_remove: how many, as a negative number or 0.

        Raises:
            ValueError: for a positive number, which transformers once understood as the length to keep.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}: it must be negative, or 0")
        self.length = self.filled = max(0, self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let each row continue from another row of its sentence.

        Args:
            beam_idx: `(rows,)`, for each row the number of the one that it continues from.
        """
        if self.beams > 1:
            index = (beam_idx % self.beams).view(-1, self.beams, 1).expand(-1, -1, self.room)
            self.past = self.past.gather(1, index)

    def take_slots(self, rows: int, new: int, like: torch.Tensor) -> tuple[slice, slice, torch.Tensor | None]:
        """Count `new` tokens of each row in, for which the caller then writes keys and values.

        Args:
            rows: how many there are.
            new: tokens a row; 1 where rows are beams.
            like: of the type and on the device of the keys and values.

        Returns:
            the slots to write to, the slots that are looked at, and the mask over those, `(groups of beams or 1, 1,
            beams or new tokens, slots)`, or None where all of them are seen.
        """
        more = new * self.beams
        if self.filled + more > self.room:
            self._make_room(rows, more, like)
        start, end = self.filled, self.filled + more
        mask, seen = self._mask(new, end, like), slice(0, end)
        if self.reach is not None and mask is None:
            seen = slice(max(0, start - self.reach), end)
        self.length, self.filled = self.length + new, end
        return slice(start, end), seen, mask

    def _mask(self, new: int, end: int, like: torch.Tensor) -> torch.Tensor | None:
        """What each row may look at of the first `end` slots of its group."""
        if self.beams > 1:
            self.past[:, :, self.filled : end] = self.own
            if self.reach is not None:
                self.positions[:, self.filled : end] = self.length
                far = self.positions[:, None, :end] < self.length - self.reach
                self.past[:, :, :end].masked_fill_(far, -torch.inf)
            return self.past[:, None, :, :end]
        if new == 1:
            return None  # what a window hides is not handed over
        seen = torch.ones(new, end, dtype=torch.bool, device=like.device).tril(self.length)
        if self.reach is not None:
            seen = seen.triu(self.length - self.reach)
        return _additive(seen[None, None], like.dtype)

    def _make_room(self, rows: int, more: int, like: torch.Tensor) -> None:
        """Room for `more` slots in all buffers: what nobody looks at goes first."""
        groups, beams = rows // self.beams, self.beams
        if beams > 1 and self.filled:
            self._drop_unseen()
        if 2 * (self.filled + more) <= self.room:
            return
        room = max(_ROOM * beams, 2 * self.room, self.filled + more)
        for target, source in zip(self.target, self.source, strict=True):
            for name in ("keys", "values"):
                _, heads, _, width = getattr(source, name).shape
                larger = like.new_empty(groups, heads, room, width)
                if self.room:
                    larger[:, :, : self.room] = getattr(target, name)
                setattr(target, name, larger)
        if beams > 1:
            if self.past is None:
                self.past = like.new_empty(groups, beams, 0)
                self.positions = torch.empty(groups, 0, dtype=torch.long, device=like.device)
                self.own = _additive(torch.eye(beams, dtype=torch.bool, device=like.device), like.dtype)
            self.past = pad(self.past, (0, room - self.room), value=-torch.inf)
            self.positions = pad(self.positions, (0, room - self.room))
        self.room = room

    def _drop_unseen(self) -> None:
        """Keep the slots that a beam's past is in; a sentence with fewer of them keeps some of the others."""
        seen = (self.past[:, :, : self.filled] == 0).any(dim=1)
        filled = int(seen.sum(dim=1).max())
        kept = seen.byte().sort(dim=1, descending=True, stable=True).indices[:, :filled]  # (groups, filled)
        past = self.past.gather(2, kept[:, None].expand(-1, self.beams, -1))
        self.past.fill_(-torch.inf)[:, :, :filled] = past
        self.positions[:, :filled] = self.positions.gather(1, kept)
        for target in self.target:
            for states in (target.keys, target.values):
                index = kept[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                states[:, :, :filled] = states.gather(2, index)
        self.filled = filled


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that is added to scores: 0 where attention is allowed, else minus infinity."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def can_decode_incrementally(model, generation_config, generation_mode: GenerationMode, model_kwargs: dict) -> bool:
    """Whether `IncrementalDecoder` does what the model's own forward would do in this `generate()`.

    It does not where somebody looks into the layers, has replaced one or spread it over devices, where another kind of
    cache or mask is asked for, and in training. A linear layer may be of any class.
    """
    config, decoder = model.config, model.model.decoder
    if generation_mode not in _MODES or not generation_config.use_cache or model.training or decoder.training:
        return False
    if torch.is_grad_enabled():  # buffers that are written to cannot be gone back through
        return False
    if generation_config.cache_implementation not in (None, "dynamic"):
        return False
    looks_into = ("output_attentions", "output_hidden_states")
    if any(getattr(generation_config, name, None) for name in looks_into):
        return False
    if model_kwargs.get("decoder_attention_mask") is not None:
        return False
    if config._attn_implementation not in ("sdpa", "eager") or torch.is_autocast_enabled(model.device.type):
        return False
    return _is_as_built(model) and not nn.modules.module._has_any_global_hook()


def _is_as_built(model) -> bool:
    """Whether decoder and projection are of our classes but for linear layers, on one device, without hooks."""
    decoder = model.model.decoder
    if any(has_hooks(module) for module in (model, model.model, model.lm_head, *decoder.modules())):
        return False
    if any(type(layer) is not VaswaniDecoderLayer for layer in decoder.layers):
        return False
    attentions = [attention for layer in decoder.layers for attention in (layer.self_attn, layer.encoder_attn)]
    if any(type(attention) is not VaswaniAttention for attention in attentions):
        return False
    norms = [norm for layer in decoder.layers for norm in _Layer.norms_of(layer)]
    if any(type(norm) is not nn.LayerNorm or norm.weight is None for norm in norms):
        return False
    if any(has_own_methods(module) for module in (decoder, *decoder.layers)):
        return False
    weights = [parameter for module in (decoder, model.lm_head) for parameter in module.parameters()]
    return len({weight.device for weight in weights}) == 1 and not any(hasattr(w, "device_mesh") for w in weights)
