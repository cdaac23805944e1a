"""What an exported model's folder holds beside the weights, and what exporting to every format shares."""

import copy
import importlib.util
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import UserError
from ..json_and_yaml import read_json
from ..loading import FACTS
from ..model.configuration_vaswani import VaswaniConfig
from ..model.layers_vaswani import VaswaniSinusoidalPositions
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, shift_right

#: Formats, the extra of this package that each needs, and the modules that the extra brings.
EXTRAS = {"ctranslate2": ("ctranslate2",), "onnx": ("onnx", "onnxruntime", "onnxscript"), "marian": ()}
#: Types that CTranslate2 stores weights in. What they are computed in is decided where the model is used.
QUANTIZATIONS = ("float32", "int8", "int8_float32", "bfloat16", "float16", "int16")
#: What an export to Marian may write: the model, settings, and one vocabulary or two.
MARIAN_FILES = ("model.npz", "decoder.yml", "vocab.yml", "source.yml", "target.yml")
#: Files of a model folder that are copied beside the exported weights.
COPIED = (
    "tokenizer.json", "target_tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "target_vocab.json", "vocab-src.json", "vocab-tgt.json", "vocab.txt", "merges.txt", "source.spm",
    "target.spm", "generation_config.json", "tokenization_vaswani.py", "sentencepiece_vaswani.py", "words_vaswani.py",
)  # fmt: skip
# CTranslate2's names: one file if source and target have the same tokens.
VOCABULARIES = ("shared_vocabulary.json", "source_vocabulary.json", "target_vocabulary.json")
_AGAIN = "export the model again"


@dataclass(frozen=True)
class ExportFacts:
    """`export.json`: what a program that uses the exported model has to know."""

    format: str  # one of `EXTRAS`
    positions: int  # rows of the position table: neither source nor output can have more tokens
    vocab_size: int  # of the model; the tokenizer may have fewer
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int
    decoder_layers: int
    num_heads: int
    d_k: int
    d_v: int
    quantization: str  # of the weights
    vaswani_transformer: str  # the version that wrote it

    def write(self, folder: Path) -> None:
        """Write `export.json` into a folder that is not yet published."""
        (folder / FACTS).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path, wanted: str | None = None) -> "ExportFacts":
        """Read `export.json` of a folder, which must have the format `wanted` if one is given.

        Raises:
            UserError: for a folder that is missing, holds no export, a damaged one, or one of another format.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}: give one written by `vaswani export`")
        if not (folder / FACTS).is_file():
            raise UserError(f"{folder} holds no exported model: it has no {FACTS}; make one with `vaswani export`")
        values = read_json(folder / FACTS, _AGAIN)
        kinds = {field.name: field.type for field in fields(cls)}
        for name in dict.fromkeys((*kinds, *values)):
            if name not in kinds or type(values.get(name)) is not kinds[name]:
                raise UserError(f"{folder / FACTS} is damaged ({name} is {values.get(name)!r:.40}): {_AGAIN}")
        facts = cls(**values)
        if wanted is not None and facts.format != wanted:
            raise UserError(f"{folder} holds a model exported to {facts.format}: export it with --format {wanted}")
        return facts


def read_vocabularies(folder: str | Path) -> tuple[list[str], list[str]]:
    """The tokens of an exported model for source and target, by id."""
    shared, *sides = (Path(folder) / name for name in VOCABULARIES)
    if all(side.is_file() for side in sides) and not shared.is_file():
        return _read_vocabulary(sides[0]), _read_vocabulary(sides[1])
    tokens = _read_vocabulary(shared)
    return tokens, tokens


def _read_vocabulary(path: Path) -> list[str]:
    try:
        tokens = read_json(path, _AGAIN, kind=list)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {_AGAIN}") from None
    if not all(isinstance(token, str) for token in tokens):
        raise UserError(f"{path} is damaged (it must hold a list of texts): {_AGAIN}")
    return tokens


def require(format: str) -> None:
    """Refuse a format whose libraries are not installed."""
    missing = [name for name in EXTRAS[format] if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} not installed, which models exported to {format} need:"
            f" pip install 'vaswani_transformer[{format}]'"
        )


def check_expressible(config: VaswaniConfig) -> None:
    """Refuse what no exported format can express."""
    if isinstance(config.eos_token_id, list):
        raise UserError(
            f"eos_token_id is {config.eos_token_id}: a model with several end tokens cannot be exported; leave one in"
            " config.json"
        )
    if config.eos_token_id is None:
        raise UserError("eos_token_id is not set in config.json: an exported model needs it")


def set_positions(model: VaswaniForConditionalGeneration, positions: int | None) -> int:
    """Give both stacks a table of so many positions, since an exported model computes no further ones.

    `positions` rows, or those that the model has when not given; returns their number. The model is changed in place.
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
            longer = copy.copy(config)
            longer.max_position_embeddings = rows
            stack.embed_positions = VaswaniSinusoidalPositions(longer)
    return rows


def position_table(positions: torch.nn.Module) -> torch.Tensor:
    """The encodings of a stack's positions, `(rows, d_model)`."""
    table = positions.table if isinstance(positions, VaswaniSinusoidalPositions) else positions.weight
    return table.detach().clone()


def padded_pairs(facts, sentences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sentences as source and target at once: ids, mask and decoder inputs, each `(sentences, longest)`."""
    rows = [torch.tensor(sentence) for sentence in sentences]
    ids = pad_sequence(rows, batch_first=True, padding_value=facts.pad_token_id)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, mask, shift_right(ids, facts.pad_token_id, facts.decoder_start_token_id)


@torch.no_grad()
def reference_logits(model: VaswaniForConditionalGeneration, sentences: list[list[int]]) -> torch.Tensor:
    """What the model itself computes for `padded_pairs`: `(sentences, longest, vocab_size)`."""
    ids, mask, inputs = padded_pairs(model.config, sentences)
    return model(input_ids=ids, attention_mask=mask, decoder_input_ids=inputs).logits
