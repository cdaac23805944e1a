"""Several models of one vocabulary that translate together (ensembles)."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import can_return_tuple

from ..data.tokenization import tokenizer_sha256
from ..errors import UserError, items_of
from ..loading import load_model
from ..model.generation_vaswani import VaswaniGenerationMixin
from ..model.layers_vaswani import CACHE, either_cache
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniPreTrainedModel

_SAME = ("vocab_size", "target_vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")


class _MemberCaches:
    """The caches of all members in one search, with the interface of one cache of transformers."""

    is_compileable = is_croppable = False
    is_linear = (False,)

    def __init__(self, caches: list):
        self.caches = caches

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.caches[0].get_seq_length(layer_idx)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        for cache in self.caches:
            cache.reorder_cache(beam_idx)


class _MemberEncoders(nn.Module):
    """The members' encoders as one, whose states are concatenated along the last axis."""

    main_input_name = "input_ids"

    def __init__(self, members: Sequence[nn.Module]):
        super().__init__()
        self.encoders = [member.get_encoder() for member in members]  # a plain list: weights belong to the members

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs) -> BaseModelOutput:
        """Encode `(batch_size, source_length)` ids; `last_hidden_state` is as wide as all members together."""
        states = [encoder(input_ids, attention_mask).last_hidden_state for encoder in self.encoders]
        return BaseModelOutput(last_hidden_state=torch.cat(states, dim=-1))


class Ensemble(VaswaniPreTrainedModel, VaswaniGenerationMixin, GenerationMixin):
    """Models that translate together; `generate()`, `Translator` and `score_pairs` take it as they take a model.

    At each step the members' distributions of the next token are averaged, as by default in fairseq and Sockeye:
    `P(y_t | y_<t, X)` is the mean of theirs. Sizes and architectures of the members may differ.

    The generation configuration is the first member's. An ensemble cannot be saved, trained or assisted by a draft.

    Args:
        models: the members, each a `VaswaniForConditionalGeneration` in evaluation mode.

    Raises:
        UserError: for members of different vocabularies or special tokens. Vocabularies of the same size look alike
            here; `load_ensemble` compares tokenizers.
    """

    def __init__(self, models: Sequence[nn.Module]):
        models = list(models)
        for name in _SAME:
            values = [getattr(model.config, name) for model in models]
            if len(set(map(str, values))) > 1:
                raise UserError(f"members of an ensemble must share one vocabulary: their {name} are {values}")
        config = copy.deepcopy(models[0].config)
        learned = [model.config for model in models if model.config.position_encoding == "learned"]
        if learned:
            config.position_encoding = "learned"
            config.max_position_embeddings = min(member.max_position_embeddings for member in learned)
        super().__init__(config)
        self.members = nn.ModuleList(models)
        self.generation_config = copy.deepcopy(models[0].generation_config)
        self.training = models[0].training  # the members keep their own

    def get_encoder(self, modality: str | None = None) -> _MemberEncoders:
        """Return the members' encoders as one; `modality` has no effect."""
        return _MemberEncoders(self.members)

    def _parts(self, encoder_outputs: BaseModelOutput) -> list[BaseModelOutput]:
        """Return each member's own part of what `_MemberEncoders` returned."""
        states = encoder_outputs[0].split([member.config.d_model for member in self.members], dim=-1)
        pairs = zip(states, self.members, strict=True)
        return [BaseModelOutput(last_hidden_state=part.to(member.dtype)) for part, member in pairs]

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        if model_kwargs.get(CACHE) is not None or generation_config.use_cache is False:
            return
        caches = []
        for member, part in zip(self.members, self._parts(model_kwargs["encoder_outputs"]), strict=True):
            kwargs = {**model_kwargs, "encoder_outputs": part}
            member._prepare_cache_for_generation(generation_config, kwargs, *args)
            caches.append(kwargs[CACHE])
        model_kwargs[CACHE] = _MemberCaches(caches)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> Seq2SeqLMOutput:
        """Compute the common distribution of the next token at every position.

        Accepts a member's `forward` arguments, except labels and those that ask for attention weights or hidden states.
        The logits, `(batch_size, target_length, vocab_size)`, are log-probabilities up to a constant at each position.
        """
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)
        given = either_cache(kwargs.get("cache"), kwargs.get("past_key_values"))
        caches = [None] * len(self.members) if given is None else given.caches
        inputs = {"attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids, "use_cache": use_cache}
        inputs["decoder_attention_mask"] = decoder_attention_mask
        log_probs, caches_after = [], []
        for member, part, cache in zip(self.members, self._parts(encoder_outputs), caches, strict=True):
            output = member(encoder_outputs=part, cache=cache, **inputs)
            log_probs.append(output.logits.float().log_softmax(dim=-1))
            caches_after.append(output.get(CACHE))
        return Seq2SeqLMOutput(
            logits=torch.stack(log_probs).logsumexp(dim=0) - math.log(len(log_probs)),
            **{CACHE: _MemberCaches(caches_after) if use_cache else None},
            encoder_last_hidden_state=encoder_outputs[0],
        )

    prepare_decoder_input_ids_from_labels = VaswaniForConditionalGeneration.prepare_decoder_input_ids_from_labels

    def save_pretrained(self, *args, **kwargs):
        """Raise `UserError`: an ensemble is not saved."""
        raise UserError("an ensemble is not saved: save its members, and put them together again with Ensemble")


def load_ensemble(
    folders: Sequence[str | Path], device: str = "auto", **options
) -> tuple[Ensemble, PreTrainedTokenizerBase]:
    """Return the models of folders as one `Ensemble`, and their tokenizer; `options` are for `load_model`.

    Raises:
        UserError: as `load_model` and `Ensemble`, and for members whose tokenizers differ.
    """
    folders = list(items_of(folders))
    models, tokenizers = zip(*(load_model(folder, device, **options) for folder in folders), strict=True)
    if len(set(map(tokenizer_sha256, tokenizers))) > 1:
        names = " and ".join(map(str, folders))
        raise UserError(f"{names} have different tokenizers: members of an ensemble must share one vocabulary")
    return Ensemble(models), tokenizers[0]
