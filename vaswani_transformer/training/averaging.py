"""Averaging of checkpoints (Section 6.1: the last 5 of the base model, the last 20 of the big one)."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from ..data.tokenization import TOKENIZER_FILES, load_tokenizer, tokenizer_sha256
from ..errors import UserError, reading
from ..json_and_yaml import read_json
from ..model.checkpoint_vaswani import check_finite
from ..output_folder import OutputFolder, is_empty, locked
from .checkpoints import INDEX, WEIGHTS, Checkpoint, check_contents, read_checkpoints, read_state, to_average
from .run_folder import CHECKPOINTS, IMPORT


def _open_weights(folder: Path) -> dict[str, safe_open]:
    """Return the open safetensors file that holds each weight of a folder, by the weight's name."""
    names = [WEIGHTS]
    with reading(folder):
        if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
            files = read_json(folder / INDEX, "")["weight_map"].values()
            names = sorted({Path(name).name for name in files})  # in the folder itself and nowhere else
        files = [safe_open(folder / name, framework="pt") for name in names]
        return {weight: file for file in files for weight in file.keys()}  # noqa: SIM118 - it is no dictionary


def _open_checkpoints(folders: Sequence[Path]) -> list[dict[str, safe_open]]:
    """Open the files of checkpoints, whose weights have the same names and shapes: torch would broadcast others."""
    if not folders:
        raise UserError("no checkpoints to average")
    checkpoints = [_open_weights(folder) for folder in folders]
    shapes = [
        {name: tuple(file.get_slice(name).get_shape()) for name, file in weights.items()} for weights in checkpoints
    ]
    for folder, others in zip(folders[1:], shapes[1:], strict=True):
        if different := sorted(name for name in shapes[0] | others if shapes[0].get(name) != others.get(name)):
            name = different[0]
            raise UserError(
                f"{folder} and {folders[0]} are not of one model: {name} has the shapes {others.get(name)} and"
                f" {shapes[0].get(name)}"
            )
    return checkpoints


def average_checkpoints(folders: Sequence[str | Path], checked: bool = False) -> dict[str, torch.Tensor]:
    """Return the mean of each weight over checkpoints, summed in float64 and returned in the first one's type.

    Args:
        folders: checkpoints, each with `model.safetensors` or several files and their index. Besides the result, one
            weight of one checkpoint at a time is in memory.
        checked: whether their files have been compared with their sums before, so that they need not be read twice.

    Raises:
        UserError: for no folders, a missing file, one that has changed since a training wrote it, or weights of other
            names or shapes than the first one's.
    """
    checkpoints = _open_checkpoints([Path(folder) for folder in folders])
    for folder in [] if checked else folders:
        check_contents(Path(folder), weights_only=True)
    average = {}
    for name in sorted(checkpoints[0]):
        first = checkpoints[0][name].get_tensor(name)
        total = first.to(torch.float64, copy=True)
        for weights in checkpoints[1:]:
            total += weights[name].get_tensor(name)
        average[name] = (total / len(checkpoints)).to(first.dtype)
    return average


CONFIG = "config.json"
# What else belongs to a model; optimizer, random states and the like belong to a checkpoint.
_COPIED = (
    CONFIG, "generation_config.json", "tokenizer*.json", "target_tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "*vocab*", "merges.txt", "*.model", "*.spm", "*.py", IMPORT,
)  # fmt: skip
# Of a configuration, what does not decide what a model computes from its weights.
_NO_DIFFERENCE = {"_name_or_path", "transformers_version", "use_cache", "architectures", "auto_map", "custom_pipelines"}
_NO_DIFFERENCE |= {"label_smoothing"}  # of training alone


def _check_same_model(folders: Sequence[Path]) -> None:
    """Refuse folders whose configurations, or tokenizers where there are any, differ from the first one's."""
    configs = []
    for folder in folders:
        with reading(folder / CONFIG):
            configs.append(read_json(folder / CONFIG, ""))
    for folder, config in zip(folders[1:], configs[1:], strict=True):
        names = config.keys() | configs[0].keys()
        different = sorted(n for n in names - _NO_DIFFERENCE if config.get(n) != configs[0].get(n))
        if different:
            raise UserError(f"{folder} and {folders[0]} are not of one model: they differ in {', '.join(different)}")
    hashes = {tokenizer_sha256(load_tokenizer(folder)): folder for folder in folders if _has_tokenizer(folder)}
    if len(hashes) > 1:
        first, second, *_ = hashes.values()
        raise UserError(f"{first} and {second} have different vocabularies: only checkpoints of one model are averaged")


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


def average_models(folders: Sequence[str | Path], output: str | Path, overwrite: bool = False) -> Path:
    """Write the average of checkpoints as a model folder, complete and at once; the first one's configuration goes in.

    Args:
        folders: checkpoints or model folders of one model.
        output: a new folder, or with `overwrite` one whose model is replaced.
        overwrite: replace a model that this program has written there; other files stay.

    Returns:
        The folder.

    Raises:
        UserError: for what cannot be averaged, naming two folders and the difference, for an average that is not
            finite, naming the weight, and for an output that is there or is one of the folders.
    """
    folders, output = [Path(folder) for folder in folders], Path(output)
    for folder in folders:
        if output.exists() and folder.exists() and output.samefile(folder):
            raise UserError(f"output {output} is one of the checkpoints: give another one")
    with locked(output):
        return _average_models(folders, output, overwrite)


def _average_models(folders: list[Path], output: Path, overwrite: bool) -> Path:
    if not overwrite and not is_empty(output):
        raise UserError(f"output {output} is not empty: give another one, or --overwrite to replace the model in it")
    if any(".lora_A." in name for name in _open_checkpoints(folders)[0]):  # mistakes are found before the work
        raise UserError(f"{folders[0]} holds adapters (LoRA), which their training merges: average finished models")
    _check_same_model(folders)
    written = OutputFolder(output)
    written.check_ours()
    written.check([WEIGHTS, *(path.name for path in _files_to_copy(folders))])
    with written.staging() as staging:
        _copy_rest(folders, staging)
        average = average_checkpoints(folders)
        with reading(f"the average of {folders[0]} and others"):
            check_finite(average.items(), "it")
        save_file(average, staging / WEIGHTS, metadata={"format": "pt"})
        written.place(staging, last=WEIGHTS, stale=[WEIGHTS, INDEX, *TOKENIZER_FILES, *written.names("model-")])
    return output.absolute()


def _files_to_copy(folders: list[Path]) -> list[Path]:
    """Return configuration, code and tokenizer, the latter of the first folder that has one; a later file counts."""
    named = next((folder for folder in folders if _has_tokenizer(folder)), folders[0])
    files = [path for pattern in _COPIED for folder in (named, folders[0]) for path in folder.glob(pattern)]
    run = folders[0].resolve().parent.parent  # of a checkpoint
    is_of_run = folders[0].resolve().parent.name == CHECKPOINTS and (run / IMPORT).is_file()
    return [run / IMPORT, *files] if is_of_run else files


def _copy_rest(folders: list[Path], staging: Path) -> None:
    for path in _files_to_copy(folders):
        (staging / path.name).write_bytes(path.read_bytes())
    if (folders[0] / TRAINER_STATE_NAME).is_file():
        config = read_json(staging / CONFIG, "")
        config.pop("use_cache", None)  # the Trainer had switched it off for training
        (staging / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _checkpoints_of(run: str | Path) -> tuple[list[Checkpoint], TrainerState]:
    """Return the whole checkpoints of a training, by step, and the trainer's state in the last one."""
    folder = Path(run) / CHECKPOINTS if (Path(run) / CHECKPOINTS).is_dir() else Path(run)
    checkpoints = read_checkpoints(folder)
    if not checkpoints:
        raise UserError(f"{folder} has no complete checkpoint: give the output folder of a training, or checkpoints")
    return checkpoints, read_state(checkpoints[-1].path)


def last_checkpoints(run: str | Path, count: int) -> list[Path]:
    """Return the last `count` checkpoints in a training's output folder, as it would average them itself.

    Raises:
        UserError: for a folder without checkpoints, or fewer than `count`.
    """
    checkpoints, state = _checkpoints_of(run)
    timed, every = any(one.timed for one in checkpoints), max(1, int(state.save_steps or state.eval_steps or 1))
    chosen = to_average(checkpoints, count, timed, every, checkpoints[-1].step)
    if len(chosen) < count:
        kind = "timed checkpoints and the last" if timed else "checkpoints"
        steps = ", ".join(f"{one.step:,}" for one in chosen)
        raise UserError(f"{run} holds {len(chosen)} {kind} (steps {steps}), fewer than {count}: give a lower --last")
    return [one.path for one in chosen]


def best_checkpoints(run: str | Path, count: int, by: str) -> tuple[list[Path], list[tuple[int, float]]]:
    """Return the `count` checkpoints in a training's output folder with the best validations by loss or bleu.

    Returns:
        The checkpoints, best first, and step and score of validations better than the last of them whose checkpoints
        were removed.

    Raises:
        UserError: where there are not so many checkpoints of validations.
    """
    checkpoints, state = _checkpoints_of(run)
    paths = {one.step: one.path for one in checkpoints}
    scores = {entry["step"]: entry[f"eval_{by}"] for entry in state.log_history if f"eval_{by}" in entry}
    ranked = sorted(scores, key=lambda step: (-scores[step] if by == "bleu" else scores[step], step))
    chosen = [step for step in ranked if step in paths][:count]
    if len(chosen) < count:
        removed = ", ".join(f"{step:,}" for step in sorted(scores.keys() - paths.keys()))
        raise UserError(
            f"{run} holds {len(chosen)} checkpoints validated by {by}, fewer than {count} (removed:"
            f" {f'steps {removed}' if removed else 'none'}): give a lower --best, or train with more keep_checkpoints"
        )
    better = ranked[: ranked.index(chosen[-1])]
    return [paths[step] for step in chosen], [(step, scores[step]) for step in better if step not in paths]
