"""Averaging of checkpoints (Section 6.1: the last 5 of the base model, the last 20 of the big one)."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..data.tokenization import load_tokenizer, tokenizer_sha256
from ..errors import UserError
from ..files import place_files, publish, remove, sync, unfinished
from ..loading import refuse_exported
from .checkpoints import INDEX, WEIGHTS, Checkpoint, read_checkpoints, to_average
from .run_folder import CHECKPOINTS


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


CONFIG, TOKENIZER, STATE = "config.json", "tokenizer.json", "trainer_state.json"
# What else belongs to a model; optimizer, random states and the like belong to a checkpoint.
_COPIED = (
    CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.spm", "*.py",
)  # fmt: skip
# Of a configuration, what does not decide what a model computes from its weights.
_NO_DIFFERENCE = {"_name_or_path", "transformers_version", "use_cache", "architectures", "auto_map", "custom_pipelines"}


def _read_config(folder: Path) -> dict:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if isinstance(config, dict):
            return config
    except (OSError, ValueError):
        pass
    raise UserError(f"{folder} has no usable {CONFIG}: give folders of checkpoints or models")


def check_same_model(folders: Sequence[Path]) -> None:
    """Refuse folders whose configurations or tokenizers differ from the first one's.

    Folders without a tokenizer are told apart by their configurations alone.

    Raises:
        UserError: naming two folders and what differs.
    """
    first, config = folders[0], _read_config(folders[0])
    named = next((folder for folder in folders if (folder / TOKENIZER).is_file()), None)
    vocabulary = load_tokenizer(named) if named is not None else None
    for folder in folders[1:]:
        other = _read_config(folder)
        for name in sorted((config.keys() | other.keys()) - _NO_DIFFERENCE):
            if config.get(name) != other.get(name):
                raise UserError(
                    f"{folder} and {first} differ in {name} ({other.get(name)!r} and {config.get(name)!r}): only"
                    " checkpoints of one model can be averaged"
                )
        if not (folder / TOKENIZER).is_file() or folder == named:
            continue
        tokenizer = load_tokenizer(folder)
        if tokenizer_sha256(tokenizer) != tokenizer_sha256(vocabulary):
            raise UserError(
                f"{folder} and {named} have different vocabularies ({_difference(tokenizer, vocabulary)}): only"
                " checkpoints of one model can be averaged"
            )


def _difference(one, other) -> str:
    """A first difference of two tokenizers, in words."""
    ids, other_ids = one.get_vocab(), other.get_vocab()
    differing = sorted(ids.items() ^ other_ids.items(), key=lambda item: item[1])
    if not differing:
        return "the same tokens, made in another way"
    number = differing[0][1]
    return f"token {number} is {one.convert_ids_to_tokens(number)!r} and {other.convert_ids_to_tokens(number)!r}"


def average_models(folders: Sequence[str | Path], output: str | Path, overwrite: bool = False) -> Path:
    """Write the average of checkpoints as a model folder, complete and at once; the first one's configuration goes in.

    Args:
        folders: checkpoints or model folders of one model.
        output: a new folder, or with `overwrite` one whose model is replaced.
        overwrite: replace a model that is there; other files stay.

    Returns:
        The folder.

    Raises:
        UserError: for what cannot be averaged, naming two folders and the difference, and for an output that is there
            or is one of the folders.
    """
    folders, output = [Path(folder) for folder in folders], Path(output)
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}: give checkpoints, or a training's folder with --last or --best"
            )
        refuse_exported(folder)
        if output.exists() and output.samefile(folder):
            raise UserError(f"output {output} is one of the checkpoints: give another one")
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file: give a folder")
    taken = output.is_dir() and any(output.iterdir())
    if taken and not overwrite:
        raise UserError(f"output {output} is not empty: give another one, or --overwrite to replace the model in it")
    all_weights = open_all(folders)
    check_same_model(folders)
    output = output.absolute()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = unfinished(output)
        remove(staging)
        staging.mkdir()
    except OSError as error:
        raise UserError(f"cannot write to {output.parent}: {error.strerror}") from error
    try:
        _copy_rest(folders, staging)
        write_average(all_weights, staging / WEIGHTS)
        if taken:
            for stale in (WEIGHTS, INDEX, *(path.name for path in output.glob("model-*-of-*.safetensors"))):
                (output / stale).unlink(missing_ok=True)
            place_files(staging, output, last=WEIGHTS)
        else:
            publish(staging, output)
    finally:
        remove(staging)
    sync(output.parent)
    return output


def _copy_rest(folders: list[Path], staging: Path) -> None:
    """Copy configuration, code and tokenizer, the latter from the first folder that has one."""
    named = next((folder for folder in folders if (folder / TOKENIZER).is_file()), folders[0])
    for pattern in _COPIED:
        for folder in (named, folders[0]):  # the first folder's own files count
            for path in folder.glob(pattern):
                shutil.copyfile(path, staging / path.name)
    config = _read_config(staging)
    if (folders[0] / STATE).is_file():
        config.pop("use_cache", None)  # the Trainer had switched it off for training
        (staging / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _checkpoints_of(run: str | Path) -> list[Checkpoint]:
    """The whole checkpoints of a training, by step."""
    folder = Path(run)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: give the output folder of a training")
    folder = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    found = read_checkpoints(folder)
    if not found:
        raise UserError(f"{folder} holds no whole checkpoint: give the output folder of a training, or checkpoints")
    return found


def _state(checkpoint: Checkpoint) -> dict:
    try:
        return json.loads((checkpoint.path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{checkpoint.path} has no usable {STATE}: give the checkpoints themselves") from error


def last_checkpoints(run: str | Path, count: int) -> list[Path]:
    """The last checkpoints of a training, as it would average them itself: by the clock if it had set one, and the end.

    Args:
        run: output folder of a training, or its folder of checkpoints.
        count: how many.

    Raises:
        UserError: for a folder without checkpoints, or fewer than `count`.
    """
    found = _checkpoints_of(run)
    state = _state(found[-1])
    timed, every = any(one.timed for one in found), max(1, int(state.get("eval_steps") or 1))
    chosen = to_average(found, count, timed, every, found[-1].step)
    if len(chosen) < count:
        kind = "timed checkpoints and the last" if timed else "checkpoints"
        steps = ", ".join(f"{one.step:,}" for one in chosen)
        raise UserError(f"{run} holds {len(chosen)} {kind} (steps {steps}), fewer than {count}: give a lower --last")
    return [one.path for one in chosen]


def best_checkpoints(run: str | Path, count: int, by: str) -> tuple[list[Path], list[tuple[int, float]]]:
    """The checkpoints of a training that validated best, best first.

    Args:
        run: output folder of a training, or its folder of checkpoints.
        count: how many.
        by: loss or bleu.

    Returns:
        The checkpoints, and step and score of validations better than the last of them whose checkpoints are gone.

    Raises:
        UserError: where there are no such validations, or not so many of their checkpoints.
    """
    found = {one.step: one.path for one in _checkpoints_of(run)}
    history = _state(read_checkpoints(next(iter(found.values())).parent)[-1]).get("log_history", [])
    scores = {entry["step"]: entry[f"eval_{by}"] for entry in history if f"eval_{by}" in entry}
    if not scores:
        raise UserError(f"{run} has no validations by {by}: give --last, or checkpoints by their folders")
    ranked = sorted(scores.items(), key=lambda item: (-item[1] if by == "bleu" else item[1], item[0]))
    chosen = [step for step, _ in ranked if step in found][:count]
    if len(chosen) < count:
        gone = ", ".join(f"{step:,}" for step in sorted(scores.keys() - found.keys()))
        raise UserError(
            f"{run} holds {len(chosen)} validated checkpoints and {count} were asked for"
            f" (gone: {f'steps {gone}' if gone else 'none'}): give --best lower, or train with more keep_checkpoints"
        )
    worst = [step for step, _ in ranked].index(chosen[-1])
    return [found[step] for step in chosen], [(step, score) for step, score in ranked[:worst] if step not in found]
