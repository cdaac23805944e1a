"""Models that are recognised and refused, each in one line that says why."""

import zipfile
from pathlib import Path

from ..errors import UserError
from .source import model_type

_MOST_PICKLE = 1 << 28  # bytes
_PRE_NORM = "normalises before each sublayer, where the paper's architecture normalises after it"
# `model_type` of a folder of transformers -> name and reason.
_TYPES = {
    "m2m_100": ("NLLB or M2M100", _PRE_NORM),
    "nllb-moe": ("NLLB", _PRE_NORM),
    "mbart": ("mBART", _PRE_NORM),
    "plbart": ("PLBart", "normalises the embeddings, which the paper's architecture does not"),
    "bart": ("BART", "normalises the embeddings (layernorm_embedding), which the paper's architecture does not"),
    "pegasus": ("Pegasus", _PRE_NORM),
    "pegasus_x": ("Pegasus-X", _PRE_NORM),
    "blenderbot": ("Blenderbot", _PRE_NORM),
    "t5": ("T5", f"{_PRE_NORM}, and has relative positions"),
    "mt5": ("mT5", f"{_PRE_NORM}, and has relative positions"),
    "umt5": ("UMT5", f"{_PRE_NORM}, and has relative positions"),
    "longt5": ("LongT5", f"{_PRE_NORM}, and has relative positions"),
    "seamless_m4t": ("SeamlessM4T", _PRE_NORM),
    "seamless_m4t_v2": ("SeamlessM4T", _PRE_NORM),
}


def refuse(source: Path) -> None:
    """Raise `UserError` for a source that is recognised as something that cannot be imported."""
    if found := _reason(source):
        name, reason = found
        raise UserError(f"{source} holds {name}, which cannot be imported: it {reason}")


def _reason(source: Path) -> tuple[str, str] | None:
    if source.is_file():
        return _reason_of_file(source)
    names = {path.name for path in source.iterdir()}
    if (kind := model_type(source)) in _TYPES:
        return _TYPES[kind]
    if "model.bin" in names and any(name.endswith(("_vocabulary.txt", "_vocabulary.json")) for name in names):
        return "a model for CTranslate2", "is meant for that engine alone: give the model that it was converted from"
    if "model.00.safetensors" in names:
        return "an Eole model", _PRE_NORM
    if {"model", "metadata.json"} <= names:  # an unpacked .argosmodel
        return "an Argos Translate package", f"{_PRE_NORM}, and is converted for CTranslate2"
    return None


def _reason_of_file(source: Path) -> tuple[str, str] | None:
    if source.suffix == ".argosmodel":
        return "an Argos Translate package", f"{_PRE_NORM}, and is converted for CTranslate2"
    if source.suffix == ".pt" and zipfile.is_zipfile(source):
        text = _pickle_in(source)
        if b"global_attention_function" in text or b"copy_attn_force" in text:
            return "an OpenNMT-py model", _PRE_NORM
    return None


def _pickle_in(source: Path) -> bytes:
    """The bytes of the pickle in an archive of torch's; none where it is damaged, which its reader will say."""
    try:
        with zipfile.ZipFile(source) as archive:
            # Texts stand in a pickle as they are, also the names of OpenNMT-py's settings.
            entry = next((entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")), None)
            is_plain = entry is not None and entry.compress_type == zipfile.ZIP_STORED
            return archive.read(entry) if is_plain and entry.file_size < _MOST_PICKLE else b""
    except OSError:
        raise
    except Exception:  # damaged archives make zipfile raise errors of many kinds
        return b""
