"""Pickles of tensors, and training checkpoints of other toolkits, read by torch's restricted reader."""

import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError, one_line

_HEAD = 1 << 22  # bytes in which the names of a checkpoint's entries stand; tensors lie behind them


def holds_entries(path: Path, names: Sequence[str]) -> bool:
    """Whether a file begins as a pickle of torch that has these names in it; a quick look without reading it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD)
    # A string in a pickle of protocol 2, which torch.save writes: X and its length in 4 bytes.
    return all(b"X" + len(name).to_bytes(4, "little") + name.encode() in head for name in names)


def read_pickle(path: Path, advice: str, classes: Sequence[type] = ()) -> Any:
    """What `torch.save` wrote, of tensors, plain values and instances of `classes`; on the CPU.

    Args:
        path: the file.
        advice: how to save the model without other objects.
        classes: classes that run nothing of a file's when their instances are read.

    Raises:
        UserError: for a file that cannot be read, is damaged, compressed, or holds other objects, which could run code,
            or tensors of more numbers than it has.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                    raise UserError(f"{path} is compressed, which torch.save never does: save it again")
        with torch.serialization.safe_globals(list(classes)):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path} ({one_line(error)}): copy or download it again") from error
    except Exception as error:  # bytes that are no pickle make torch raise errors of any kind
        if name := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserError(f"{path} holds {name[1]}, and such an object could run code: {advice}") from error
        raise UserError(
            f"{path} is damaged or holds more than tensors and plain values, which could run code: copy it again, or"
            f" {advice}"
        ) from error
    if any(tensor.numel() * tensor.element_size() > _bytes_of(tensor) for tensor in _tensors(content)):
        raise UserError(f"{path} holds tensors of more numbers than it has (by strides of 0): {advice}")
    return content


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    """All dense tensors in containers of containers, each container once."""
    rest, seen = [content], set()
    while rest:
        value = rest.pop()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not (value.is_nested or value.is_meta):
            yield value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            rest += value.values() if isinstance(value, dict) else value


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def read_checkpoint(path: Path, advice: str, classes: Sequence[type] = ()) -> dict[str, Any]:
    """The dictionary that `torch.save` wrote; the arguments are those of `read_pickle`.

    Raises:
        UserError: as `read_pickle`, and for anything but a dictionary.
    """
    content = read_pickle(path, advice, classes)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a checkpoint, which is a table of entries by name: {advice}")
    return content


def tensors_of(content: dict[str, Any], name: str, path: Path) -> dict[str, torch.Tensor]:
    """An entry of a checkpoint that is a table of tensors by name.

    Raises:
        UserError: it is missing or something else.
    """
    tensors = content.get(name)
    is_table = isinstance(tensors, dict) and all(
        isinstance(key, str) and isinstance(tensor, torch.Tensor) for key, tensor in tensors.items()
    )
    if not (is_table and tensors):
        raise UserError(f"{name} in {path} is not a table of tensors by name: give a checkpoint that holds a model")
    return dict(tensors)
