"""Averaging of checkpoints (Section 6.1: the last 5 of the base model, the last 20 of the big one)."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from .checkpoints import INDEX, WEIGHTS


class WeightFiles:
    """The weights of a folder, in one safetensors file or several with an index, read one at a time.

    Args:
        folder: holds `model.safetensors` or `model.safetensors.index.json`.

    Raises:
        UserError: for a missing or damaged file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files = {}
        for name in self._file_names():
            path = self.folder / name
            try:
                file = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                if path.exists():  # safetensors says the same of a file that it may not read
                    raise UserError(f"{path} cannot be read: check access") from error
                raise UserError(f"{self.folder} is not a whole checkpoint: it has no {name}") from error
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} is damaged ({' '.join(str(error).split())[:200]}): leave it out") from error
            for weight in file.keys():  # noqa: SIM118
                if weight in self.files:
                    raise UserError(f"{weight} is in two files of {self.folder}: its index and files do not fit")
                self.files[weight] = file

    def _file_names(self) -> list[str]:
        if (self.folder / WEIGHTS).is_file() or not (self.folder / INDEX).is_file():
            return [WEIGHTS]
        try:
            listed = set(json.loads((self.folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.folder / INDEX} is not an index of weight files: leave it out") from error
        return sorted(Path(name).name for name in listed)  # in the folder itself and nowhere else

    def shape(self, name: str) -> tuple[int, ...]:
        """A weight's shape, without reading it."""
        return tuple(self.files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """A weight's type as safetensors names it, without reading it."""
        return self.files[name].get_slice(name).get_dtype()

    def read(self, name: str) -> torch.Tensor:
        """One weight."""
        return self.files[name].get_tensor(name)


def open_all(folders: Sequence[str | Path]) -> list[WeightFiles]:
    """The checkpoints' weights, found to be of one model."""
    if not folders:
        raise UserError("no checkpoints to average")
    all_weights = [WeightFiles(folder) for folder in folders]
    first = all_weights[0]
    for weights in all_weights[1:]:
        if other := sorted(first.files.keys() ^ weights.files.keys()):
            raise UserError(
                f"{weights.folder} and {first.folder} are not of one model: only one has the weight {other[0]}"
            )
        for name in sorted(first.files):
            if weights.shape(name) != first.shape(name):
                raise UserError(
                    f"{name} has shape {weights.shape(name)} in {weights.folder} and {first.shape(name)} in"
                    f" {first.folder}: only checkpoints of one model can be averaged"
                )
    return all_weights


def _mean(tensors: Iterator[torch.Tensor], count: int) -> torch.Tensor:
    """The mean of tensors in float64, in the type of the first.

    What each addition rounds off is summed apart (Knuth's TwoSum), so that the order does not matter.
    """
    first = next(tensors)
    total, lost = first.double(), torch.zeros(first.shape, dtype=torch.float64)
    for tensor in tensors:
        term = tensor.double()
        new = total + term
        part = new - total
        lost += (total - (new - part)) + (term - part)
        total = new
    # Where a weight is infinite, so is its mean, and what was lost is not a number.
    total = torch.where(lost.isfinite(), total + lost, total)
    return (total / count).to(first.dtype)


def average_checkpoints(folders: Sequence[str | Path]) -> dict[str, torch.Tensor]:
    """The mean of each weight over checkpoints, summed in float64 and returned in the first one's type.

    Args:
        folders: checkpoints, each with `model.safetensors` or several files and their index; of all of them one weight
            at a time is held in memory.

    Raises:
        UserError: for no folders, a missing file, or weights of other names or shapes than the first one's.
    """
    all_weights = open_all(folders)
    return {
        name: _mean((weights.read(name) for weights in all_weights), len(all_weights))
        for name in sorted(all_weights[0].files)
    }


def write_average(all_weights: list[WeightFiles], path: Path) -> None:
    """Write the mean as one safetensors file, with one weight at a time in memory.

    The format is a length of 8 bytes, a JSON table of so many bytes, and the tensors' bytes in the order of the table.
    """
    first = all_weights[0]
    # Larger elements first, so that each tensor begins at a multiple of its element's size.
    sizes = {name: first.read(name).element_size() for name in first.files}
    names = sorted(first.files, key=lambda name: (-sizes[name], name))
    table, end = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        start, end = end, end + sizes[name] * torch.Size(first.shape(name)).numel()
        table[name] = {"dtype": first.dtype(name), "shape": first.shape(name), "data_offsets": [start, end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            mean = _mean((weights.read(name) for weights in all_weights), len(all_weights))
            file.write(mean.contiguous().flatten().view(torch.uint8).numpy().data)
