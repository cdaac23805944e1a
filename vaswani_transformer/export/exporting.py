"""A trained model written in another engine's format: `vaswani export`.

A module `to_FORMAT` has `write`, and `largest_difference` from the model if its engine can be asked.
"""

import json
import math
import random
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from .. import __version__
from ..data.batching import PairCollator
from ..data.tokenization import has_two_sides
from ..errors import UserError, reading
from ..exported import FACTS, NUMBERS, QUANTIZATIONS
from ..hub.card_facts import known_languages, longest_source
from ..loading import load_model
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..output_folder import written_at_once
from .one_tokenizer import with_one_tokenizer

TRANSFORMERS_JS = "transformers.js"  # a format: ONNX, with int8 beside float32
_TOLERANCE = 0.01  # of log-probabilities and logits in float32; differences seen are below 0.001


class TablePositions(torch.nn.Embedding):
    """Positions of a table, without the check of a length that is not known when a graph is made."""

    def forward(self, position_ids: torch.Tensor, end: int) -> torch.Tensor:
        """Return the rows of `position_ids`; `end` has no effect."""
        return super().forward(position_ids)


class Export(NamedTuple):
    """The result of `export_model`."""

    folder: Path
    positions: int  # rows of the position table
    bytes: int  # size of the folder
    #: The largest difference of a log-probability (CTranslate2) or a logit (ONNX) from the model's, over a few
    #: sentences of random tokens, as this machine computes them; None for Marian, which is not run.
    difference: float | None


@torch.no_grad()
def export_model(
    model: str | Path,
    output: str | Path,
    format: str = "ctranslate2",
    quantization: str | None = None,
    overwrite: bool = False,
    languages: Sequence[str] = (),
) -> Export:
    """Write a model folder in the format of another engine, tokenizer beside it, and compare the two.

    Args:
        model: a folder that `vaswani train` or `save_pretrained` wrote.
        output: a new or empty folder; it appears when all of it is written and compared.
        format: `"ctranslate2"`, `"onnx"`, `"transformers.js"` or `"marian"`.
        quantization: how CTranslate2 stores weights: float32 (the default), int8, int8_float32, bfloat16, float16 or
            int16; for transformers.js int8 (the default) is beside float32.
        overwrite: replace an exported model in the output folder.
        languages: codes of source and target, noted in `export.json`; by default the model's, if they are known.

    Raises:
        UserError: for a model that cannot be loaded or expressed, an unknown or missing format, an output that exists.
    """
    kind = "onnx" if format == TRANSFORMERS_JS else format
    with reading(f"the format {format} (pip install 'vaswani_transformer[{kind}]')"):
        writer = import_module(f".to_{kind}", __package__)
    languages = languages or known_languages(model)
    known = {"ctranslate2": QUANTIZATIONS, TRANSFORMERS_JS: ("int8", "float32")}.get(format, ("float32",))
    quantization, output = quantization or known[0], Path(output)
    if quantization not in known:
        raise UserError(f"quantization is {quantization!r}: weights exported to {format} are {' or '.join(known)}")
    with written_at_once(output, overwrite, last=FACTS) as staging:
        longest = longest_source(model)
        model, tokenizer = load_model(model, "cpu")
        model, config = model.float(), model.config
        rows = set_positions(model)
        if format == TRANSFORMERS_JS and (has_two_sides(tokenizer) or not tokenizer.is_fast):
            tokenizer = with_one_tokenizer(model, tokenizer)
        numbers, known, end = random.Random(0), min(config.vocab_size, config.target_vocab_size), config.eos_token_id
        sentences = [[*(numbers.randrange(known) for _ in range(min(n, rows) - 1)), end] for n in (12, 5, 20)]
        sample = PairCollator(config.pad_token_id)([{"input_ids": ids, "labels": ids} for ids in sentences])
        sample["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(sample.pop("labels"))
        logits = model(**sample).logits  # first: writing changes the model
        writer.write(model, tokenizer, staging, quantization)
        tokenizer.init_kwargs.setdefault("clean_up_tokenization_spaces", tokenizer.clean_up_tokenization_spaces)
        tokenizer.save_pretrained(staging)  # transformers.js would take true for a missing one
        model.generation_config.to_json_file(staging / "generation_config.json")  # saving refuses alpha for one beam
        # Neither a source nor an output can have more tokens than there are positions.
        facts = {"format": format, "positions": rows, "quantization": quantization, "vaswani_transformer": __version__}
        facts |= {"languages": [*languages], "max_length": longest} | {name: getattr(config, name) for name in NUMBERS}
        (staging / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        difference = None if format == "marian" else writer.largest_difference(staging, sample, logits)
        most = _TOLERANCE if quantization == "float32" or format == TRANSFORMERS_JS else math.inf
        if difference is not None and not difference <= most:  # NaN is above both
            problem = f"log-probabilities in {quantization} differ from the model's by {difference:.3g}"
            fix = "give another --quantization, or report this where it is float32"
            raise UserError(f"{problem}, so nothing was written: {fix}")
        if format == TRANSFORMERS_JS and quantization == "int8":  # what is loaded; the exact graphs lie beside
            difference = writer.largest_difference(staging, sample, logits, writer.QUANTIZED)
    return Export(output.absolute(), rows, size_of(output), difference)


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def set_positions(model: VaswaniForConditionalGeneration) -> int:
    """Give both stacks, in place, a table of positions, as exported models compute no others; returns its rows."""
    for stack in (model.model.encoder, model.model.decoder):
        positions = stack.embed_positions
        table = positions.weight if model.config.position_encoding == "learned" else positions.compute_table()
        stack.embed_positions = TablePositions.from_pretrained(table.detach().clone())
    return len(table)
