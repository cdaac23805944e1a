"""One tokenizer for both sides, as transformers.js needs it: it encodes sources and decodes targets."""

import json

import torch
from tokenizers import Tokenizer, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from ..data.tokenization import SIDES
from ..exported import NotExpressibleError
from ..model.sentencepiece_vaswani import MADE_UP, SentencePieceText

_IDS = ("_token_id", "words_ids", "suppress_tokens")  # how settings of ids end


class _Side(nn.Module):
    """An embedding whose rows have the ids from `first` on; any other id is the unknown token's."""

    def __init__(self, table: nn.Embedding, first: int, unknown: int):
        super().__init__()
        self.table, self.first, self.unknown = table, first, unknown

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows, `(batch_size, length, d_model)`."""
        rows = ids - self.first
        return self.table(torch.where((rows >= 0) & (rows < self.table.num_embeddings), rows, self.unknown))


def with_one_tokenizer(model, tokenizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer for both sides of a model, which is changed in place to have its ids.

    They are the model's own where one vocabulary serves both sides. Of two, the target's ids come after the source's,
    and its tokens have names that no text can become. `NotExpressibleError` for a tokenizer that has Moses' rules
    or no `tokenizer.json`.
    """
    if not tokenizer.is_fast or tokenizer.moses:
        raise NotExpressibleError("transformers.js reads a tokenizer.json and no more: give --format onnx")
    source, target = (tokenizer.side(side).backend_tokenizer for side in SIDES)
    if SentencePieceText.for_backend(source):  # its splitting saves time alone; transformers.js would cut spaces off
        source.pre_tokenizer = pre_tokenizers.Split("<", "isolated")
    known, first = range(model.config.target_vocab_size), 1 + max(source.get_vocab().values())
    if len(known) > first or any(source.decode([number] * 2) != target.decode([number] * 2) for number in known):
        source = _joined(source, target, first, len(known))
        decoder, config = model.model.decoder, model.config
        decoder.embed_tokens = _Side(decoder.embed_tokens, first, config.decoder_start_token_id)
        model.lm_head = nn.Sequential(model.lm_head, nn.ConstantPad1d((first, 0), -1e9))
        config.vocab_size = config.decoder_vocab_size = first + len(known)
        for settings in map(vars, (config, model.generation_config)):
            ids = json.dumps({name: value for name, value in settings.items() if name.endswith(_IDS)})
            settings.update(json.loads(ids, parse_int=lambda number: int(number) + first))
    encoder = model.model.encoder  # there may be pieces that the model lacks
    encoder.embed_tokens = _Side(encoder.embed_tokens, 0, tokenizer.unk_token_id or 0)
    options = {"clean_up_tokenization_spaces": False, **tokenizer.special_tokens_map}  # there the default is True
    return PreTrainedTokenizerFast(tokenizer_object=source, **options)


def _joined(source: Tokenizer, target: Tokenizer, first: int, count: int) -> Tokenizer:
    """Return the source's tokenizer with the first `count` tokens of the target after its own, and its decoder."""
    state, theirs = json.loads(source.to_str()), json.loads(target.to_str())
    names = [MADE_UP + (target.id_to_token(number) or str(number)) for number in range(count)]
    pieces = state["model"]["vocab"]
    if isinstance(pieces, list):  # of a unigram model, with scores
        lowest = min(score for _, score in pieces)
        own = [[source.id_to_token(number) or f"{MADE_UP}{number}", lowest] for number in range(len(pieces), first)]
        pieces += [*own, *([name, lowest] for name in names)]
    else:
        pieces |= source.get_vocab() | {name: first + number for number, name in enumerate(names)}
    for token in theirs["added_tokens"]:
        if token["special"] and token["id"] < count:
            state["added_tokens"].append(token | {"id": first + token["id"], "content": MADE_UP + token["content"]})
    rename = {"type": "Replace", "pattern": {"String": MADE_UP}, "content": ""}
    spaced = {"type": "WordPiece", "prefix": "\uffff", "cleanup": False}  # as words without a decoder are joined
    state["decoder"] = {"type": "Sequence", "decoders": [rename, theirs["decoder"] or spaced]}
    return Tokenizer.from_str(json.dumps(state))
