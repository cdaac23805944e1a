"""A trained model written in another engine's format: `vaswani export`.

A module `to_FORMAT` has `write`, and `largest_difference` from the model if its engine can be asked.
"""

import copy
import math
import random
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import UserError
from ..exported import FACTS
from ..loading import load_model
from ..model.layers_vaswani import VaswaniSinusoidalPositions
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, shift_right
from ..output_folder import written_at_once
from .facts import QUANTIZATIONS, ExportFacts, require

_TOLERANCE = 0.01  # of log-probabilities and logits in float32; differences seen are below 0.001


class Export(NamedTuple):
    """The result of `export_model`."""

    folder: Path
    positions: int  # rows of the position table
    bytes: int  # size of the folder
    #: The largest difference of a log-probability (CTranslate2) or a logit (ONNX) from the model's, over a few
    #: sentences of random tokens, as this machine computes them; None for Marian, which is not run.
    difference: float | None


def export_model(
    model: str | Path,
    output: str | Path,
    format: str = "ctranslate2",
    quantization: str | None = None,
    positions: int | None = None,
    overwrite: bool = False,
) -> Export:
    """Write a model folder in the format of another engine, tokenizer beside it, and compare the two.

    Args:
        model: a folder that `vaswani train` or `save_pretrained` wrote.
        output: a new or empty folder; it appears when all of it is written and compared.
        format: `"ctranslate2"`, `"onnx"` or `"marian"`.
        quantization: how CTranslate2 stores weights: float32 (the default), int8, int8_float32, bfloat16, float16 or
            int16.
        positions: rows of the exported position table; the model's max_position_embeddings if not given.
        overwrite: replace an exported model in the output folder.

    Raises:
        UserError: for a model that cannot be loaded or expressed, naming the setting; a format that is unknown or not
            installed; an output that is there.
    """
    require(format)
    quantization, output = quantization or "float32", Path(output)
    if quantization not in (known := QUANTIZATIONS if format == "ctranslate2" else ("float32",)):
        raise UserError(f"quantization is {quantization!r}: weights exported to {format} are {' or '.join(known)}")
    with written_at_once(output, overwrite, last=FACTS) as staging:
        model, tokenizer = load_model(model, "cpu")
        model = model.float()
        rows = set_positions(model, positions)
        difference = _write(format, model, tokenizer, staging, rows, quantization)
        size = sum(path.stat().st_size for path in staging.iterdir())
    return Export(output.absolute(), rows, size, difference)


def _write(format: str, model, tokenizer, staging: Path, rows: int, quantization: str) -> float | None:
    """Write all files of an export; returns the largest difference from the model, where that can be computed."""
    from .. import __version__

    config = model.config
    numbers, known = random.Random(0), min(config.vocab_size, config.target_vocab_size)
    sentences = [
        [numbers.randrange(known) for _ in range(min(length, rows) - 1)] + [config.eos_token_id]
        for length in (12, 5, 20)
    ]
    logits = reference_logits(model, sentences)  # first: writing changes the model
    writer = import_module(f".to_{format}", __package__)
    writer.write(model, tokenizer, staging, quantization)
    tokenizer.save_pretrained(staging)
    model.generation_config.save_pretrained(staging)
    names = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id", "decoder_layers", "num_heads")
    ExportFacts(
        format=format,
        positions=rows,
        quantization=quantization,
        vaswani_transformer=__version__,
        **{name: getattr(config, name) for name in (*names, "d_k", "d_v")},
    ).write(staging)
    if format == "marian":
        return None
    difference = writer.largest_difference(staging, sentences, logits)
    if not difference <= (_TOLERANCE if quantization == "float32" else math.inf):  # NaN is above both
        raise UserError(
            f"log-probabilities in {quantization} differ from the model's by {difference:.3g}, so nothing was written:"
            " give another --quantization, or report this where it is float32"
        )
    return difference


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
