"""One decoder step at a time, for `generate()`: the arithmetic of `VaswaniDecoder` a second time, with less around it.

A step of the search has one token a row; there the layers' handling of whole sequences, masks and caches of any kind
costs as much as the arithmetic. `IncrementalDecoder` computes the steps, `DecodingCache` stores keys and values:

- in buffers with room for the steps to come, instead of tensors that grow by copying;
- of the source once a sentence, shared by its beams;
- of a sentence's beams in one buffer, with a mask of which slots are a beam's own past: when beams change places, rows
  of the mask are moved and no keys or values;
- without those that no beam looks at any more, which are dropped whenever the buffers are full.

The search is `search_vaswani.Search`, or transformers' own.
"""

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.cache_utils import Cache, EncoderDecoderCache

from .layers_vaswani import CACHE, VaswaniAttention, VaswaniDecoderLayer, attention
from .linear_vaswani import Projection, has_hooks, has_own_methods
from .local_attention_vaswani import additive

_ROOM = 32  # target tokens that the buffers have room for at first
_MANY = 16  # sentences, from which on plain products are faster on a CPU than torch's kernel for few queries each
# After self-attention, encoder-decoder attention and feed-forward sublayer.
_NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
_METHODS = ((VaswaniAttention, "forward"), (VaswaniDecoderLayer, "forward"), (VaswaniDecoderLayer, "compute"))
_OWN = [getattr(kind, name) for kind, name in _METHODS]  # before somebody may replace them
_MODES = ("greedy_search", "sample", "assisted_generation", "beam_search", "beam_sample")


class _Attention:
    """The projections of one attention of a decoder layer."""

    def __init__(self, module: VaswaniAttention):
        self.q_proj, self.k_proj = Projection(module.q_proj), Projection(module.k_proj)
        self.v_proj, self.out_proj = Projection(module.v_proj), Projection(module.out_proj)
        self.d_k, self.d_v, self.scaling = module.d_k, module.d_v, module.scaling

    def queries(self, states: torch.Tensor, sentences: int) -> torch.Tensor:
        """Return the queries of `(rows, d_model)`, `(sentences, num_heads, rows of a sentence, d_k)`."""
        return _split_heads(self.q_proj(states), sentences, self.d_k)

    def keys_and_values(self, states: torch.Tensor, sentences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values in the same form, of width `d_k` and `d_v`."""
        key, value = self.k_proj(states), self.v_proj(states)
        return _split_heads(key, sentences, self.d_k), _split_heads(value, sentences, self.d_v)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """Compute Equation (1), projected and added to `residual`, `(rows, d_model)`."""
        if query.is_cpu and query.shape[0] >= _MANY:
            output, _ = attention(query, key, value, mask, self.scaling)
        else:
            output = scaled_dot_product_attention(query, key, value, mask, scale=self.scaling)
        return self.out_proj(output.transpose(1, 2).reshape(residual.shape[0], -1)) + residual


def _split_heads(states: torch.Tensor, sentences: int, width: int) -> torch.Tensor:
    return states.view(sentences, states.shape[0] // sentences, -1, width).transpose(1, 2)


class _Layer:
    """A decoder layer taken apart."""

    def __init__(self, layer: VaswaniDecoderLayer):
        self.self_attn, self.encoder_attn = _Attention(layer.self_attn), _Attention(layer.encoder_attn)
        self.fc1, self.fc2 = Projection(layer.fc1), Projection(layer.fc2)
        self.norms = [getattr(layer, name).forward for name in _NORMS]


class IncrementalDecoder:
    """Computes the decoder's steps of one `generate()`, reading and extending a `DecodingCache`."""

    def __init__(self, model):
        self.stack, self.lm_head = model.model.decoder, Projection(model.lm_head)
        self.layers = [_Layer(layer) for layer in self.stack.layers]
        self.activation: str = model.config.activation_function

    def read_source(
        self, states: torch.Tensor, mask: torch.Tensor | None, cache: "DecodingCache", places: list[int] | None = None
    ) -> None:
        """Project the encoder's output, `(sentences, source_length, d_model)`, for all steps.

        The mask is 0 for padding. With `places` these join others from the next step on: in places of some, or behind.
        """
        rows = states.flatten(0, 1)
        projected = (layer.encoder_attn.keys_and_values(rows, len(states)) for layer in self.layers)
        source = [[part.contiguous() for part in parts] for parts in projected]
        if mask is not None:
            mask = mask.bool()
            is_full = mask.is_cpu and mask.all()  # other devices would have to be waited for
            mask = None if is_full else additive(mask[:, None, None, :], states.dtype)
        cache.join(source, mask, places)

    def step(self, input_ids: torch.LongTensor, cache: "DecodingCache") -> torch.Tensor:
        """Compute the decoder's output at the next positions, `(rows * new tokens, d_model)`, and extend the cache.

        `input_ids` is `(rows, new tokens)`, with one new token if rows are beams.
        """
        states = self._embed(input_ids, cache)
        written, mask = cache.take_slots(len(input_ids), input_ids.shape[1], states)
        groups, seen = len(input_ids) // cache.beams, slice(0, written.stop)
        for layer, (keys, values), source in zip(self.layers, cache.target, cache.source, strict=True):
            query = layer.self_attn.queries(states, groups)
            keys[:, :, written], values[:, :, written] = layer.self_attn.keys_and_values(states, groups)
            attended = layer.self_attn.attend(query, keys[:, :, seen], values[:, :, seen], mask, states)
            states = layer.norms[0](attended)
            query = layer.encoder_attn.queries(states, source[0].shape[0])
            attended = layer.encoder_attn.attend(query, *source, cache.source_mask, states)
            states = layer.norms[1](attended)
            inner = getattr(nn.functional, self.activation)(layer.fc1(states))
            states = layer.norms[2](layer.fc2(inner) + states)
        return self.stack.output_of(states)

    def _embed(self, input_ids: torch.LongTensor, cache: "DecodingCache") -> torch.Tensor:
        """Return the first layer's input at the next positions, `(rows * new tokens, d_model)`."""
        encodings, starts = self.stack.embed_positions, cache.starts
        start = cache.length - min(starts)
        end = start + input_ids.shape[1]
        embeddings = self.stack.token_embeddings(input_ids, None, "decoder_input")
        if min(starts) != max(starts):  # each row has one new token
            positions = torch.tensor([cache.length - own for own in starts], device=embeddings.device)
            encoding = encodings(positions.repeat_interleave(cache.beams), end)[:, None]
        else:
            encoding = encodings(torch.arange(start, end, device=embeddings.device), end)
        return (embeddings * self.stack.embed_scale + encoding.to(embeddings.dtype)).flatten(0, 1)

    def logits(self, input_ids: torch.LongTensor, cache: "DecodingCache") -> torch.Tensor:
        """Compute logits, `(rows, new tokens, vocab_size)`, after each of the tokens; of beams, after the last one."""
        if cache.beams == 1:
            return self.lm_head(self.step(input_ids, cache)).view(*input_ids.shape, -1)
        for token in input_ids.split(1, dim=1):  # a given prefix takes as many steps as generating it would
            states = self.step(token, cache)
        return self.lm_head(states).unsqueeze(1)


class DecodingCache(EncoderDecoderCache):
    """The keys and values that a search has computed so far; the rows of one sentence are adjacent.

    Args:
        decoder: what computes the next step.
        beams: rows of a sentence that may change places; 1 if rows stay where they are.
        copies: how often the encoder's output holds each sentence.
    """

    is_linear = (False,)  # of its layers, of which transformers would find none

    def __init__(self, decoder: IncrementalDecoder, beams: int = 1, copies: int = 1):
        super().__init__(Cache([]), Cache([]))  # no DynamicCache: selecting its rows would change nothing
        self.decoder, self.beams, self.copies = decoder, beams, copies
        # Of each layer keys and values, (sentences or groups of beams, num_heads, slots or source_length, d_k or d_v),
        # as steps see them, and the buffers that these are parts of.
        self.target: list[list[torch.Tensor]] = [[] for _ in decoder.layers]
        self.source: list[list[torch.Tensor]] = []
        self._target: list[list[torch.Tensor]] = [[] for _ in decoder.layers]
        self._source: list[list[torch.Tensor]] = []
        self.source_mask: torch.Tensor | None = None  # (sentences, 1, 1, source_length), added to scores
        self.source_lengths: list[int] = []  # of each sentence, with padding
        self.starts: list[int] = []  # `length` when each sentence joined
        self.length = 0  # target tokens
        self.filled = self.room = 0  # slots in use, and all that there are
        # (groups of beams, beams, room): 0 for a beam's own past, else -inf; without beams where sentences have joined
        self.past: torch.Tensor | None = None
        self.own: torch.Tensor | None = None  # (beams, beams): the same for the slots that a step fills

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of target tokens so far."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of the target, their number as a negative one, as assisted decoding does."""
        self.length = self.filled = max(0, self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let each row continue from the row of its sentence whose number `beam_idx`, `(rows,)`, gives.

        Raises:
            ValueError: where there are no beams, and so no rows to choose from.
        """
        if self.beams == 1 and not torch.equal(beam_idx.cpu(), torch.arange(len(beam_idx))):
            raise ValueError(f"this cache has no beams to reorder: give {CACHE}=EncoderDecoderCache(...)")
        if self.beams > 1:
            index = (beam_idx.to(self.past.device) % self.beams).view(-1, self.beams, 1).expand(-1, -1, self.room)
            self.past = self.past.gather(1, index)

    def join(self, source: list[list[torch.Tensor]], mask: torch.Tensor | None, places: list[int] | None) -> None:
        """Put new sentences in the places of others, or behind them; the first ones have no `places`.

        `source` has keys and values of each layer, and `mask` is added to scores.
        """
        sentences, _, length, _ = source[0][0].shape
        if places is None:
            self.source, self._source, self.source_mask = source, list(source), mask
            self.source_lengths, self.starts = [length] * sentences, [0] * sentences
            return
        new = max(places) + 1 - len(self.starts)
        for own, value in ((self.starts, self.length), (self.source_lengths, length)):
            own += [value] * new
            for place in places:
                own[place] = value
        index, longest = torch.tensor(places, device=source[0][0].device), max(self.source_lengths)
        if self.source_mask is not None or mask is not None or min(self.source_lengths) < longest:
            masks = [part[0][0].new_zeros(len(part[0][0]), 1, 1, part[0][0].shape[2]) for part in (self.source, source)]
            masks = [zeros if own is None else own for zeros, own in zip(masks, (self.source_mask, mask), strict=True)]
            self.source_mask = _resized(_resized(masks[0], 3, longest), 0, len(self.starts))
            self.source_mask[index] = _resized(masks[1], 3, longest)
        if self.filled and self.past is None:
            self._see_by_mask(len(self.target[0][0]), self.target[0][0])
        for layer, added in enumerate(source):  # one after the other, so that few are in memory twice
            self._source[layer] = [_with_room(states, len(self.starts), longest) for states in self._source[layer]]
            self._target[layer] = [_with_room(states, len(self.starts), self.room) for states in self._target[layer]]
            for states, new in zip(self._source[layer], added, strict=True):
                states[index] = 0  # of a sentence that was here nothing is left, should it be NaN
                states[index, :, :length] = new
            for states in self._target[layer]:
                states[index, :, : self.filled] = 0
            self._see(layer, len(self.starts), longest)
        if self.filled:
            self.past = _resized(self.past, 0, len(self.starts))
            self.past[index] = -torch.inf

    def _see(self, layer: int, rows: int, longest: int) -> None:
        """Let steps see the first `rows` rows of a layer's buffers, and the first `longest` tokens of sources."""
        self.source[layer] = [states[:rows, :, :longest] for states in self._source[layer]]
        self.target[layer] = [states[:rows] for states in self._target[layer]]

    def retire(self, places: list[int]) -> None:
        """Mark the rows of finished sentences as free."""
        for place in places:
            self.starts[place] = max(self.starts)  # a position that others have passed
            self.source_lengths[place] = 0

    def move(self, old: list[int], new: list[int], kept: int) -> None:
        """Let sentences take the places of others, and forget those from `kept` on."""
        old, new = (torch.tensor(places, dtype=torch.long, device=self.source[0][0].device) for places in (old, new))

        def moved(states: torch.Tensor | None, end: int | None = None) -> torch.Tensor | None:
            if states is None:
                return None
            states[new, ..., :end, :] = states[old, ..., :end, :]
            return states[:kept]

        for layer, source in enumerate(self.source):
            for states in source:
                moved(states)
            for states in self.target[layer]:
                moved(states, self.filled)
            self._see(layer, kept, source[0].shape[2])
        self.source_mask, self.past = moved(self.source_mask), moved(self.past)
        for own in (self.starts, self.source_lengths):
            for place, before in zip(new.tolist(), old.tolist(), strict=True):
                own[place] = own[before]
            del own[kept:]

    def take_slots(self, rows: int, new: int, like: torch.Tensor) -> tuple[slice, torch.Tensor | None]:
        """Reserve slots for `new` tokens of each row, in which the caller then writes keys and values such as `like`.

        Returns:
            the slots to write to, and the mask of them and those before, `(groups of beams or 1, 1, beams or new
            tokens, slots)`, or None where all are seen.
        """
        more = new * self.beams
        if self.filled + more > self.room:
            self._make_room(rows, more, like)
        start, end = self.filled, self.filled + more
        mask = None
        if self.past is not None:
            self.past[:, :, start:end] = self.own
            mask = self.past[:, None, :, :end]
        elif new > 1:
            seen = torch.ones(new, end, dtype=torch.bool, device=like.device).tril(self.length)
            mask = additive(seen[None, None], like.dtype)
        self.length, self.filled = self.length + new, end
        return slice(start, end), mask

    def _make_room(self, rows: int, more: int, like: torch.Tensor) -> None:
        """Make room for `more` slots in all buffers: first by dropping what no beam sees, then by larger buffers."""
        groups, beams = rows // self.beams, self.beams
        if self.past is not None:
            self._drop_unseen()
        if 2 * (self.filled + more) <= self.room:
            return
        room = max(_ROOM * beams, 2 * self.room, self.filled + more)
        for layer, source in enumerate(self.source):
            larger = [like.new_zeros(groups, states.shape[1], room, states.shape[3]) for states in source]
            for new, old in zip(larger, self.target[layer], strict=False):  # at first there are none
                new[:, :, : self.room] = old
            self._target[layer] = self.target[layer] = larger
        if beams > 1 and self.past is None:
            self._see_by_mask(groups, like)
        if self.past is not None:
            self.past = pad(self.past, (0, room - self.room), value=-torch.inf)
        self.room = room

    def _see_by_mask(self, groups: int, like: torch.Tensor) -> None:
        """Start a mask of the slots that are a row's own past; until now all that are filled are."""
        self.past = like.new_full((groups, self.beams, self.room), -torch.inf)
        self.past[:, :, : self.filled] = 0
        self.own = additive(torch.eye(self.beams, dtype=torch.bool, device=like.device), like.dtype)

    def _drop_unseen(self) -> None:
        """Keep the slots that are some beam's past; sentences with fewer than others keep some unseen ones too."""
        seen = (self.past[:, :, : self.filled] == 0).any(dim=1)
        filled = int(seen.sum(dim=1).max())
        kept = seen.byte().sort(dim=1, descending=True, stable=True).indices[:, :filled]  # (groups, filled)
        past = self.past.gather(2, kept[:, None].expand(-1, self.beams, -1))
        self.past.fill_(-torch.inf)[:, :, :filled] = past
        for target in self.target:
            for states in target:
                index = kept[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                states[:, :, :filled] = states.gather(2, index)
        self.filled = filled


def _with_room(states: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Return keys or values with room for rows and tokens; where they have to be copied, for a quarter more.

    The new part is 0: queries give it no weight, but no weight of NaN would be NaN.
    """
    has_rows, heads, has_length, width = states.shape
    if rows <= has_rows and length <= has_length:
        return states
    kept = states[:rows, :, :length]
    length += length // 4 if length > has_length else 0
    larger = states.new_zeros(rows + rows // 4, heads, length, width)
    larger[: kept.shape[0], :, : kept.shape[2]] = kept
    return larger


def _resized(mask: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Return the first entries of a mask along an axis, filled up with minus infinity where there are fewer."""
    missing = size - mask.shape[axis]
    if missing <= 0:
        return mask.narrow(axis, 0, size)
    return pad(mask, (0, 0) * (mask.dim() - 1 - axis) + (0, missing), value=-torch.inf)


def can_decode_incrementally(model, generation_config, generation_mode: str, model_kwargs: dict) -> bool:
    """Return whether `IncrementalDecoder` computes what the model's own forward would in this `generate()`.

    It does not in training, in windows, if layers are observed, replaced (linear ones may be of any class) or spread
    over devices, or if another kind of cache or mask is asked for.
    """
    config, decoder = model.config, model.model.decoder
    if not (
        generation_mode in _MODES
        and generation_config.use_cache
        and not (model.training or decoder.training)
        and not torch.is_grad_enabled()  # writing into buffers cannot be differentiated
        and generation_config.cache_implementation is None
        and not any(getattr(generation_config, f"output_{name}", None) for name in ("attentions", "hidden_states"))
        and model_kwargs.get("decoder_attention_mask") is None
        and model_kwargs.get("decoder_inputs_embeds") is None
        and config._attn_implementation in ("sdpa", "eager")
        and config.attention_window is None
        and not torch.is_autocast_enabled(model.device.type)
        and not nn.modules.module._has_any_global_hook()
    ):
        return False
    kinds = [(layer, VaswaniDecoderLayer) for layer in decoder.layers]
    kinds += [(part, VaswaniAttention) for layer in decoder.layers for part in (layer.self_attn, layer.encoder_attn)]
    kinds += [(getattr(layer, name), nn.LayerNorm) for layer in decoder.layers for name in _NORMS]
    kinds += [] if decoder.layer_norm is None else [(decoder.layer_norm, nn.LayerNorm)]
    return (
        all(type(module) is kind for module, kind in kinds)
        and not any(has_hooks(module) for module in (model, model.model, model.lm_head, *decoder.modules()))
        and not any(has_own_methods(module) for module in (decoder, *decoder.layers))
        and [getattr(kind, name) for kind, name in _METHODS] == _OWN
    )
