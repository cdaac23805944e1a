"""Pickled weights to safetensors, without running what a pickle may hold."""

import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..errors import UserError, one_line
from ..files import check_path, finish
from ..json_and_yaml import read_json
from ..loading import read_config, refuse_exported
from ..model.checkpoint_vaswani import PICKLED_WEIGHTS
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..output_folder import locked

WEIGHTS = "model.safetensors"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HARMLESS = 10**8  # parameters, 800 MB in float64: so many may come from a file that is smaller


def convert_pickled_weights(folder: str | Path) -> Path:
    """Write the weights of `pytorch_model.bin`, sharded or not, as `model.safetensors` beside it; returns its path.

    Tensors are read with torch's restricted unpickler, which refuses everything else, and written bit for bit, each in
    its own dtype. The pickle stays where it is.

    Raises:
        UserError: for a folder without pickled weights or with safetensors already, for a pickle or an index that is
            damaged or holds more than dense floating-point tensors, for weights that do not fit `config.json` exactly,
            and for a folder that cannot be written to.
    """
    check_path(folder, "the model folder")
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no model folder {folder}")
    with locked(folder):
        return _convert(folder)


def _convert(folder: Path) -> Path:
    refuse_exported(folder)
    if any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} already holds safetensors: there is nothing to convert")
    if not any((folder / name).is_file() for name in PICKLED_WEIGHTS):
        raise UserError(f"{folder} holds no {PICKLED_WEIGHTS[0]}: there is nothing to convert")
    try:
        with torch.device("meta"):
            model = VaswaniForConditionalGeneration(read_config(folder))
    except UserError:
        raise
    except Exception as error:  # values of a wrong kind make transformers raise errors of many kinds
        raise UserError(f"{folder} has no usable config.json: {one_line(error)}") from error
    weights = _fitted(_read_pickles(folder, model.config.num_parameters()), model, folder)
    try:
        # A new folder of its own, so that nothing that lies there already, such as a link, is written to or through.
        with tempfile.TemporaryDirectory(prefix=".converted-", dir=folder) as staging:
            save_file(weights, Path(staging) / WEIGHTS, metadata={"format": "pt"})
            finish(Path(staging) / WEIGHTS)
            (Path(staging) / WEIGHTS).replace(folder / WEIGHTS)
    except Exception as error:  # safetensors has an error of its own for a full disk
        raise UserError(f"cannot write {folder / WEIGHTS}: {one_line(error)}") from error
    return folder / WEIGHTS


def _fitted(weights: dict[str, torch.Tensor], model, folder: Path) -> dict[str, torch.Tensor]:
    """The weights as `save_pretrained` writes them, the tied matrix once, after a check against those of the model."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    ties = model._tied_weights_keys or {}
    # A tied matrix may stand there once or under each of its names.
    tied = ties.keys() | ties.values()
    needed = shapes.keys() - (tied if tied & weights.keys() else set())
    misfit = f"the pickled weights in {folder} do not fit its config.json"
    if wrong := (weights.keys() - shapes.keys()) | (needed - weights.keys()):
        raise UserError(f"{misfit}, such as {min(wrong)[:200]!r}")
    fitted, storages = {}, set()
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            layout = "nested" if tensor.is_nested else tensor.layout
            raise UserError(
                f"{name} in {folder} is a tensor of {tensor.dtype} ({layout}, on {tensor.device.type}): weights must be"
                f" dense tensors of {', '.join(map(str, DTYPES))}, with data; save them so"
            )
        if tensor.shape != shapes[name]:
            raise UserError(
                f"{misfit}: {name} has the shape {tuple(tensor.shape)} and config.json makes it {tuple(shapes[name])}"
            )
        written_name = ties.get(name, name)
        tensor = tensor.detach().resolve_neg().contiguous()
        if written_name not in fitted:
            # safetensors refuses tensors that share memory.
            shared = tensor.untyped_storage().data_ptr() in storages
            fitted[written_name] = tensor.clone() if shared else tensor
            storages.add(fitted[written_name].untyped_storage().data_ptr())
        elif not _same_bits(tensor, fitted[written_name]):
            raise UserError(
                f"{name} in {folder} differs from the matrix that config.json ties it to: set tie_word_embeddings"
                " to false there if the weights were trained untied"
            )
    return fitted


def _same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors are the same; NaN is the same as itself."""
    return tensor.dtype == other.dtype and torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


def _read_pickles(folder: Path, parameters: int) -> dict[str, torch.Tensor]:
    """All tensors of a folder's pickled weights by name, for a model of so many parameters."""
    single, index = (folder / name for name in PICKLED_WEIGHTS)
    paths = [single] if single.is_file() else _files_of_index(index)
    size = sum(path.stat().st_size for path in paths)
    if parameters > max(_HARMLESS, size // 2):  # no dtype has less than 2 bytes; tensors may repeat one number for ever
        raise UserError(
            f"the pickled weights in {folder} do not fit its config.json: that describes {parameters:,} parameters, and"
            f" files of {size:,} bytes cannot hold so many"
        )
    weights = {}
    for path in paths:
        try:
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                        raise UserError(f"{path} is compressed, which torch.save never does: save the weights again")
            part = torch.load(path, map_location="cpu", weights_only=True)
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"cannot read {path}: {one_line(error)}") from error
        except Exception as error:  # bytes that are no pickle make torch raise errors of any kind
            raise UserError(
                f"{path} is damaged or holds more than tensors, which could run code: get the weights as safetensors"
            ) from error
        if not isinstance(part, dict) or not all(
            isinstance(key, str) and isinstance(tensor, torch.Tensor) for key, tensor in part.items()
        ):
            raise UserError(f"{path} is not a table of weights by name: save model.state_dict() and nothing else")
        if repeated := weights.keys() & part.keys():
            raise UserError(f"{min(repeated)[:200]!r} is in {path} and in another file of its index: keep one of them")
        weights |= part
    if not weights:
        raise UserError(f"the pickled weights in {folder} are empty")
    return weights


def _files_of_index(index: Path) -> list[Path]:
    """The files that an index of weights lists, all in the index's own folder."""
    try:
        names = sorted(set(read_json(index, "copy it again")["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not an index of weight files: copy it again") from error
    present = {path.name for path in index.parent.iterdir() if path.is_file()}
    if missing := [name for name in names if name not in present]:  # also whatever leads to another folder
        raise UserError(
            f"{index} names {missing[0]!r:.200}, and that is no file in its folder: copy the files of the model again"
        )
    return [index.parent / name for name in names]
