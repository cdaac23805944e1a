"""The model in float32 that exporting to every format starts from, and what it computes for comparison."""

import copy

import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import UserError
from ..model.layers_vaswani import VaswaniSinusoidalPositions
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, shift_right


def set_positions(model: VaswaniForConditionalGeneration, positions: int | None) -> int:
    """Give both stacks a table of `positions` rows, since an exported model computes no further ones.

    Not given, the table has as many rows as the model. Returns their number. The model is changed in place.
    """
    config, most, kind = model.config, VaswaniSinusoidalPositions.max_rows, "positions of a sinusoidal table"
    if config.position_encoding == "learned":
        most, kind = config.max_position_embeddings, "learned positions"
    if positions is not None and not 1 <= positions <= most:
        raise UserError(f"positions is {positions}: it must be from 1 to the {most} {kind}")
    rows = positions or min(config.max_position_embeddings, most)
    for stack in (model.model.encoder, model.model.decoder):
        if config.position_encoding == "learned":
            stack.embed_positions.weight = torch.nn.Parameter(stack.embed_positions.weight[:rows].detach())
        else:
            resized = copy.copy(config)
            resized.max_position_embeddings = rows
            stack.embed_positions = VaswaniSinusoidalPositions(resized)
    return rows


def position_table(positions: torch.nn.Module) -> torch.Tensor:
    """Return the encodings of a stack's positions, `(rows, d_model)`."""
    table = positions.table if isinstance(positions, VaswaniSinusoidalPositions) else positions.weight
    return table.detach().clone()


def padded_pairs(facts, sentences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sentences as source and target at once: ids, mask and decoder inputs, each `(sentences, longest)`."""
    rows = [torch.tensor(sentence) for sentence in sentences]
    ids = pad_sequence(rows, batch_first=True, padding_value=facts.pad_token_id)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, mask, shift_right(ids, facts.pad_token_id, facts.decoder_start_token_id)


@torch.no_grad()
def reference_logits(model: VaswaniForConditionalGeneration, sentences: list[list[int]]) -> torch.Tensor:
    """Return the model's own logits for `padded_pairs`: `(sentences, longest, vocab_size)`."""
    ids, mask, inputs = padded_pairs(model.config, sentences)
    return model(input_ids=ids, attention_mask=mask, decoder_input_ids=inputs).logits
