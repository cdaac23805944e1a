"""The files of an exported model beside its weights; imports no torch, so that such a model runs without."""

import importlib.util
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..errors import UserError, reading
from ..exported import FACTS
from ..json_and_yaml import parse_json, read_json, read_text

#: Formats, the extra of this package that each needs, and the modules that the extra brings.
EXTRAS = {"ctranslate2": ("ctranslate2",), "onnx": ("onnx", "onnxruntime", "onnxscript"), "marian": ()}
#: Types that CTranslate2 stores weights in. What they are computed in is decided where the model is used.
QUANTIZATIONS = ("float32", "int8", "int8_float32", "bfloat16", "float16", "int16")
# CTranslate2's names: one file if source and target have the same tokens.
VOCABULARIES = ("shared_vocabulary.json", "source_vocabulary.json", "target_vocabulary.json")


class NotExpressibleError(UserError):
    """A model or a setting that the other engine has nothing for."""


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

    position_encoding = "learned"  # as of a configuration: whatever it was before, it is a table now, and has an end

    @property
    def max_position_embeddings(self) -> int:
        """Return the rows of the table, named as in a configuration."""
        return self.positions

    def write(self, folder: Path) -> None:
        """Write `export.json` into a folder that is not yet published."""
        (folder / FACTS).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path, format: str | None = None) -> "ExportFacts":
        """Read `export.json` of a folder, which must have this format if one is given."""
        path = Path(folder) / FACTS
        with reading(path):
            values = read_json(path)
            facts = cls(**{field.name: field.type(values[field.name]) for field in fields(cls)})
        if format is not None and facts.format != format:
            raise UserError(f"{folder} holds a model exported to {facts.format}: export it with --format {format}")
        return facts


def read_vocabularies(folder: str | Path) -> tuple[list[str], list[str]]:
    """Return the tokens of an exported model for source and target, by id."""
    shared, *sides = (Path(folder) / name for name in VOCABULARIES)
    tokens = []
    for path in sides if sides[0].is_file() else [shared]:
        with reading(path):
            tokens.append(list(parse_json(read_text(path))))
    return tokens[0], tokens[-1]


def require(format: str) -> None:
    """Refuse a format whose libraries are not installed."""
    missing = [name for name in EXTRAS[format] if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"{' and '.join(missing)} not installed, which models exported to {format} need"
        raise UserError(f"{problem}: pip install 'vaswani_transformer[{format}]'")
