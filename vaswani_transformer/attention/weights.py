"""All attention weights of a sentence pair, with tokens that people can read (Section 3.2.3, Figures 3 to 5)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..data.tokenization import side_of
from ..data.words import is_inner
from ..decoding.scoring import check_length, token_texts
from ..errors import UserError, reading
from ..model.copying_vaswani import copy_sharing_weights


def forming_attention(model):
    """Return the same weights in a model for `attention_of_batch`; other threads may use `model` meanwhile."""
    copied = copy_sharing_weights(model)
    copied.set_attn_implementation("eager")
    return copied


#: The paper's three kinds of attention (Section 3.2.3), by the names that commands take.
KINDS = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "encoder-decoder": "encoder-decoder attention",
}
LIMIT = 400  # of a side: the weights of a longer pair would fill the memory
CONTINUES, SPACE = "·", "␣"  # before a piece that continues a word; for a token of spaces


@dataclass(frozen=True)
class AttentionWeights:
    """The attention weights of one sentence pair, float32.

    Rows are queries, the tokens that look, and each sums to 1; columns are keys, the tokens that are looked at. Arrays
    are indexed from 0 as all arrays are; commands and pictures count layers and heads from 1, as the paper.

    While it predicts token i of the target the decoder reads token i - 1, the first time the start token. In decoder
    self-attention a query is the token that is read; in encoder-decoder attention it is shown as the one predicted.
    """

    source: str
    target: str
    source_tokens: list[str]  # as text, `</s>` at the end
    target_tokens: list[str]  # that the decoder predicts, `</s>` at the end
    decoder_tokens: list[str]  # that the decoder reads, as many, the start token first
    encoder: np.ndarray  # (encoder_layers, num_heads, source_length, source_length)
    decoder: np.ndarray  # (decoder_layers, num_heads, target_length, target_length), 0 right of the diagonal
    encoder_decoder: np.ndarray  # (decoder_layers, num_heads, target_length, source_length)

    def of(self, kind: str) -> tuple[np.ndarray, list[str], list[str]]:
        """Return weights `(layers, num_heads, queries, keys)` of one of `KINDS`, its queries and its keys as text."""
        return {
            "encoder": (self.encoder, self.source_tokens, self.source_tokens),
            "decoder": (self.decoder, self.decoder_tokens, self.decoder_tokens),
            "encoder-decoder": (self.encoder_decoder, self.target_tokens, self.source_tokens),
        }[kind]


def check_choice(name: str, chosen: Sequence[int] | None, number: int, where: str) -> list[int]:
    """Return the chosen layers or heads of `number`, counted from 1; all when none is chosen.

    Raises:
        UserError: for a number out of range; `name` and `where` are for its message.
    """
    for choice in chosen or [1]:
        if not 1 <= choice <= number:
            raise UserError(f"there is no {name} {choice}: {where} has {number} {name}s, numbered from 1")
    return sorted(set(chosen)) if chosen else list(range(1, number + 1))


def attend(model, tokenizer, source: str, target: str | None = None, **generate_options) -> AttentionWeights:
    """Return what every head of a model looks at in a sentence pair.

    Args:
        model: one model, no ensemble, of any attention implementation, in any mode; other threads may use it, too.
        target: its translation; if not given, the tokens that the model's own search finds.
        **generate_options: for that search, over the model's own generation configuration.

    Raises:
        UserError: as `token_ids`.
    """
    source_ids = token_ids(model, tokenizer, "source", source)
    inputs = torch.tensor([source_ids], device=model.device)
    mask = torch.ones_like(inputs)
    if target is not None:
        target_ids = token_ids(model, tokenizer, "target", target)
    else:
        options = generate_options | {"return_dict_in_generate": False}
        generated = copy_sharing_weights(model).generate(input_ids=inputs, attention_mask=mask, **options)[0, 1:]
        target_ids = generated[generated != model.config.pad_token_id].tolist()
        target = tokenizer.decode(target_ids, skip_special_tokens=True)
    batch = {"input_ids": inputs, "attention_mask": mask, "labels": torch.tensor([target_ids], device=model.device)}
    by_kind = attention_of_batch(forming_attention(model), batch)
    return AttentionWeights(
        source=source,
        target=target,
        source_tokens=readable_tokens(side_of(tokenizer, "source"), source_ids),
        target_tokens=readable_tokens(tokenizer, target_ids),
        decoder_tokens=readable_tokens(tokenizer, [model.config.decoder_start_token_id, *target_ids[:-1]]),
        **{kind.replace("-", "_"): torch.stack(layers)[:, 0].float().cpu().numpy() for kind, layers in by_kind.items()},
    )


@torch.no_grad()
def attention_of_batch(model, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the weights of each layer by kind, from one pass of a model of `forming_attention` over a batch.

    A layer's weights are `(batch_size, num_heads, queries, keys)`; padding's mean nothing. `batch`: a `PairCollator`'s.
    """
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    output = model(**inputs, output_attentions=True, use_cache=False)
    kinds = (output.encoder_attentions, output.decoder_attentions, output.cross_attentions)
    return dict(zip(KINDS, kinds, strict=True))


def readable_tokens(tokenizer, ids: list[int]) -> list[str]:
    """Return tokens as people read them.

    Words are left as they are, a piece that continues a word begins with `·`, special tokens have their names (`<s>`,
    `</s>`, `<unk>`), spaces are `␣`, other invisible characters their number (`U+200B`). Of a character made of several
    tokens the first is the character and the others are `·`.
    """
    special, labels, before = set(tokenizer.all_special_ids), [], " "
    for token, text in zip(ids, token_texts(tokenizer, [ids])[0], strict=True):
        if token in special:
            labels.append(text)
            before = " "
        elif not text:
            labels.append(CONTINUES)
        else:
            shown = "".join(map(_shown, text.strip(" "))) or SPACE
            continues = is_inner(before) and is_inner(text[0])
            labels.append(CONTINUES + shown if continues else shown)
            before = text[-1]
    return labels


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return SPACE if character.isspace() else f"U+{ord(character):04X}"


def token_ids(model, tokenizer, side: str, text: str) -> list[int]:
    """Return the token ids of a sentence, which is the `"source"` or `"target"` of messages, `</s>` at the end.

    Raises:
        UserError: for a text that is blank, no UTF-8, or has more tokens than `LIMIT` or the model's positions.
    """
    with reading(f"the {side}"):  # which may hold bytes of the command line that are not UTF-8
        if not text.strip():
            raise UserError(f"the {side} is empty: give a sentence")
        ids = side_of(tokenizer, side)([text.strip()])["input_ids"][0]
    check_length(model.config, 1, len(ids))
    if len(ids) > LIMIT:
        raise UserError(f"the {side} has {len(ids):,} tokens, too many to show, at most {LIMIT}")
    return ids
