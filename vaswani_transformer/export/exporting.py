"""A trained model written in another engine's format: `vaswani export`."""

import math
import random
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..data.tokenization import load_tokenizer
from ..errors import UserError
from ..files import check_path
from ..hardware import choose_device
from ..loading import FACTS, load_model
from ..model.checkpoint_vaswani import is_finite
from ..output_folder import OutputFolder, is_empty, locked
from .folder import (
    COPIED,
    EXTRAS,
    MARIAN_FILES,
    QUANTIZATIONS,
    VOCABULARIES,
    ExportFacts,
    check_expressible,
    reference_logits,
    require,
    set_positions,
)

_TOLERANCE = 0.01  # of log-probabilities and logits in float32; differences seen are below 0.001


class Export(NamedTuple):
    """What `export_model` did."""

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
    if format not in EXTRAS:
        raise UserError(f"format is {format!r}: it must be one of {', '.join(EXTRAS)}")
    require(format)
    quantization = quantization or "float32"
    if format == "ctranslate2" and quantization not in QUANTIZATIONS:
        raise UserError(f"quantization is {quantization!r}: it must be one of {', '.join(QUANTIZATIONS)}")
    if format != "ctranslate2" and quantization != "float32":
        raise UserError(
            f"quantization is {quantization!r}: weights exported to {format} are float32; for others use ctranslate2"
        )
    check_path(model, "model")
    with locked(output):
        return _export(Path(model), Path(output), format, quantization, positions, overwrite)


def _export(
    folder: Path, output: Path, format: str, quantization: str, positions: int | None, overwrite: bool
) -> Export:
    written = _check_output(output, folder, format, overwrite)
    loaded, tokenizer = load_model(folder, "cpu")
    loaded = loaded.float()
    check_expressible(loaded.config)
    rows = set_positions(loaded, positions)
    with written.staging() as place:
        staging = place / format
        difference = _write(format, folder, loaded, tokenizer, staging, rows, quantization)
        size = sum(path.stat().st_size for path in staging.iterdir())
        written.place(staging, last=FACTS, stale=[FACTS, *(name for kind in EXTRAS for name in _names(kind))])
    return Export(output.absolute(), rows, size, difference)


def _names(format: str) -> tuple[str, ...]:
    """What an export may write."""
    own = {
        "ctranslate2": ("config.json", "model.bin", *VOCABULARIES),
        "onnx": ("encoder.onnx", "decoder.onnx"),
        "marian": MARIAN_FILES,
    }
    return (*own[format], *COPIED, FACTS)


def _check_output(output: Path, model: Path, format: str, overwrite: bool) -> OutputFolder:
    """Refuse an output that would destroy anything but an earlier export."""
    written = OutputFolder(output)
    if is_empty(output):
        return written
    if not overwrite:
        raise UserError(f"output {output} is not empty: give another one, or --overwrite to replace a model in it")
    if FACTS not in written:
        raise UserError(f"output {output} holds no exported model that could be overwritten: give another folder")
    if model.resolve().is_relative_to(output.resolve()):
        raise UserError(f"output {output} holds the model itself: give another folder")
    written.check(_names(format))
    return written


def _write(format: str, folder: Path, model, tokenizer, staging: Path, rows: int, quantization: str) -> float | None:
    """Write all files of an export; returns the largest difference from the model, where that can be computed."""
    from .. import __version__

    config = model.config
    random_numbers = random.Random(0)
    sentences = [
        [
            random_numbers.randrange(min(config.vocab_size, config.target_vocab_size))
            for _ in range(min(length, rows) - 1)
        ]
        + [config.eos_token_id]
        for length in (12, 5, 20)
    ]
    logits = reference_logits(model, sentences)  # first: writing changes the model
    if not is_finite(logits):
        raise UserError(f"the model in {folder} computes numbers that are infinite or NaN: export another checkpoint")
    if format == "ctranslate2":
        from .to_ctranslate2 import largest_difference, write_ctranslate2

        write_ctranslate2(folder, model, tokenizer, staging, quantization)
    elif format == "marian":
        from .to_marian import write_marian

        write_marian(model, tokenizer, staging, rows)
    else:
        from .to_onnx import largest_difference, write_onnx

        write_onnx(model, staging)
    for name in COPIED:
        if (folder / name).is_file():
            (staging / name).write_bytes((folder / name).read_bytes())
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
    difference = largest_difference(staging, sentences, logits)
    if quantization != "float32" and not math.isfinite(difference):
        raise UserError(
            f"quantization is {quantization!r}, in which this model's numbers are out of range (log-probabilities"
            f" differ by {difference}): give another one, such as float32 or int8"
        )
    if quantization == "float32" and not difference <= _TOLERANCE:  # NaN is above it
        raise RuntimeError(
            f"the exported model differs from the model by {difference:.3g} and was discarded: please report this"
        )
    return difference


def load_exported(
    folder: str | Path, device: str = "auto", precision: str | None = None
) -> tuple[Any, PreTrainedTokenizerBase]:
    """An exported model and its tokenizer, as `load_model` gives a model.

    Args: as of `CTranslate2Translator`; of a precision of None, what the weights are stored in.

    Raises:
        UserError: for a folder that holds no such model, or a device or precision that CTranslate2 has not.
    """
    facts = ExportFacts.read(folder)
    if facts.format != "ctranslate2":
        raise UserError(
            f"{folder} holds a model exported to {facts.format}, which this command does not run: export it with"
            " --format ctranslate2, or give the model itself"
        )
    require(facts.format)
    from .ctranslate2_model import CTranslate2Model

    if device == "auto":
        chosen = choose_device()  # each of several processes its own
        device = str(chosen) if chosen.type == "cuda" else "cpu"
    return CTranslate2Model(folder, device, precision or "default"), load_tokenizer(folder)
