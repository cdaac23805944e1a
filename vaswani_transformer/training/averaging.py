"""Averaging of checkpoints (Section 6.1: the last 5 of the base model, the last 20 of the big one)."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from ..data.tokenization import SIDES, TOKENIZER_FILES, has_two_sides, load_tokenizer, side_of, tokenizer_sha256
from ..errors import UserError, one_line
from ..files import check_path
from ..json_and_yaml import read_json
from ..loading import refuse_exported
from ..model.checkpoint_vaswani import check_finite
from ..output_folder import OutputFolder, is_empty, locked
from .checkpoints import (
    INDEX,
    WEIGHTS,
    Checkpoint,
    check_contents,
    read_checkpoints,
    read_state,
    to_average,
)
from .run_folder import CHECKPOINTS, IMPORT


def _open_weights(folder: Path) -> dict[str, safe_open]:
    """The open safetensors file that holds each weight of a folder, by the weight's name."""
    weights = {}
    for name in _file_names(folder):
        path = folder / name
        if not path.is_file():
            raise UserError(f"{folder} is not a complete checkpoint: it has no {name}")
        try:
            file = safe_open(path, framework="pt")
        except FileNotFoundError as error:  # which safetensors raises for a file that it may not read
            raise UserError(f"{path} cannot be read: check access") from error
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} is damaged ({one_line(error, 200)}): leave {folder} out") from error
        if twice := sorted(weights.keys() & set(file.keys())):
            raise UserError(f"{twice[0]} is in two files of {folder}: its index and files do not fit")
        weights |= dict.fromkeys(file.keys(), file)
    return weights


def _file_names(folder: Path) -> list[str]:
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    try:
        files = read_json(folder / INDEX, f"leave {folder} out")["weight_map"].values()
        return sorted({Path(name).name for name in files})  # in the folder itself and nowhere else
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX} is not an index of weight files: leave {folder} out") from error


def _open_checkpoints(folders: Sequence[Path]) -> list[dict[str, safe_open]]:
    """The open files of checkpoints, whose weights have the same names and shapes."""
    if not folders:
        raise UserError("no checkpoints to average")
    checkpoints = [_open_weights(folder) for folder in folders]
    first_folder, first = folders[0], checkpoints[0]
    for folder, weights in zip(folders[1:], checkpoints[1:], strict=True):
        if different := sorted(first.keys() ^ weights.keys()):
            raise UserError(f"{folder} and {first_folder} are not of one model: only one has the weight {different[0]}")
        for name in sorted(first):
            shapes = [tuple(files[name].get_slice(name).get_shape()) for files in (weights, first)]
            if shapes[0] != shapes[1]:
                where = f"{shapes[0]} in {folder} and {shapes[1]} in {first_folder}"
                raise UserError(f"{name} has shape {where}: only checkpoints of one model can be averaged")
    return checkpoints


def average_checkpoints(folders: Sequence[str | Path], checked: bool = False) -> dict[str, torch.Tensor]:
    """The mean of each weight over checkpoints, summed in float64 and returned in the first one's type.

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


CONFIG, STATE = "config.json", TRAINER_STATE_NAME
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab-src.json")  # one of which a folder with a tokenizer has
# What else belongs to a model; optimizer, random states and the like belong to a checkpoint.
_COPIED = (
    CONFIG, "generation_config.json", "tokenizer.json", "target_tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "target_vocab.json", "vocab-src.json",
    "vocab-tgt.json", "vocab.txt", "merges.txt", "*.model", "*.spm", "*.py", IMPORT,
)  # fmt: skip
# Of a configuration, what does not decide what a model computes from its weights.
_NO_DIFFERENCE = {"_name_or_path", "transformers_version", "use_cache", "architectures", "auto_map", "custom_pipelines"}
_NO_DIFFERENCE |= {"label_smoothing"}  # of training alone, and older checkpoints do not have it


def _read_config(folder: Path) -> dict:
    try:
        return read_json(folder / CONFIG, f"leave {folder} out")
    except FileNotFoundError:
        raise UserError(f"{folder} has no {CONFIG}: give folders of checkpoints or models") from None


def _check_same_model(folders: Sequence[Path]) -> None:
    """Refuse folders whose configurations, or tokenizers where there are any, differ from the first one's."""
    first, config = folders[0], _read_config(folders[0])
    for folder in folders[1:]:
        other = _read_config(folder)
        for name in sorted((config.keys() | other.keys()) - _NO_DIFFERENCE):
            if config.get(name) != other.get(name):
                values = f"{other.get(name)!r:.100} and {config.get(name)!r:.100}"
                raise UserError(
                    f"{folder} and {first} differ in {name} ({values}): only checkpoints of one model can be averaged"
                )
    named = [folder for folder in folders if _has_tokenizer(folder)]
    first_tokenizer = load_tokenizer(named[0]) if named else None
    for folder in named[1:]:
        tokenizer = load_tokenizer(folder)
        if tokenizer_sha256(tokenizer) != tokenizer_sha256(first_tokenizer):
            raise UserError(
                f"{folder} and {named[0]} have different vocabularies ({_difference(tokenizer, first_tokenizer)}): only"
                " checkpoints of one model can be averaged"
            )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _difference(one, other) -> str:
    """A first difference of two tokenizers, in words."""
    for side in SIDES if has_two_sides(one) and has_two_sides(other) else SIDES[:1]:
        ids, other_ids = ({n: token for token, n in side_of(each, side).get_vocab().items()} for each in (one, other))
        differing = sorted(n for n in ids.keys() | other_ids.keys() if ids.get(n) != other_ids.get(n))
        if differing:
            number = differing[0]
            return f"token {number} is {ids.get(number)!r} and {other_ids.get(number)!r}"
    return "the same tokens, made in another way"


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
    for folder in folders:
        check_path(folder, "a checkpoint")
    if not folders:
        raise UserError("no checkpoints to average")
    check_path(output, "output")
    folders, output = [Path(folder) for folder in folders], Path(output)
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}: give checkpoints, or a training with --last or --best")
        refuse_exported(folder)
        if output.exists() and output.samefile(folder):
            raise UserError(f"output {output} is one of the checkpoints: give another one")
    with locked(output):
        return _average_models(folders, output, overwrite)


def _average_models(folders: list[Path], output: Path, overwrite: bool) -> Path:
    if not overwrite and not is_empty(output):
        raise UserError(f"output {output} is not empty: give another one, or --overwrite to replace the model in it")
    written = OutputFolder(output)
    written.check_ours()
    copied = [path.name for path in _files_to_copy(folders)]
    written.check([WEIGHTS, *copied])
    if any(".lora_A." in name for name in _open_checkpoints(folders)[0]):  # mistakes are found before the work
        raise UserError(f"{folders[0]} holds adapters (LoRA), which their training merges: average finished models")
    _check_same_model(folders)
    with written.staging() as staging:
        _copy_rest(folders, staging)
        average = average_checkpoints(folders)
        try:
            check_finite(average.items(), f"the average of {folders[0]} and others")
        except ValueError as error:
            raise UserError(str(error)) from error
        save_file(average, staging / WEIGHTS, metadata={"format": "pt"})
        written.place(staging, last=WEIGHTS, stale=[WEIGHTS, INDEX, *TOKENIZER_FILES, *written.names("model-")])
    return output.absolute()


def _files_to_copy(folders: list[Path]) -> list[Path]:
    """Configuration, code and tokenizer, the latter from the first folder that has one; a later file counts."""
    named = next((folder for folder in folders if _has_tokenizer(folder)), folders[0])
    found = [path for pattern in _COPIED for folder in (named, folders[0]) for path in folder.glob(pattern)]
    run = folders[0].resolve().parent.parent  # of a checkpoint
    is_of_run = folders[0].resolve().parent.name == CHECKPOINTS and (run / IMPORT).is_file()
    return [run / IMPORT, *found] if is_of_run else found


def _copy_rest(folders: list[Path], staging: Path) -> None:
    for path in _files_to_copy(folders):
        (staging / path.name).write_bytes(path.read_bytes())
    config = _read_config(staging)
    if (folders[0] / STATE).is_file():
        config.pop("use_cache", None)  # the Trainer had switched it off for training
        (staging / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _checkpoints_of(run: str | Path) -> tuple[list[Checkpoint], TrainerState]:
    """The whole checkpoints of a training, by step, and the trainer's state in the last one."""
    check_path(run, "the folder of a training")
    folder = Path(run)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: give the output folder of a training")
    folder = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    checkpoints = read_checkpoints(folder)
    if not checkpoints:
        raise UserError(f"{folder} has no complete checkpoint: give the output folder of a training, or checkpoints")
    return checkpoints, read_state(checkpoints[-1].path)


def last_checkpoints(run: str | Path, count: int) -> list[Path]:
    """The last `count` checkpoints in a training's output folder, as it would average them itself.

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
    """The `count` checkpoints in a training's output folder with the best validations by loss or bleu, best first.

    Returns:
        The checkpoints, and step and score of validations better than the last of them whose checkpoints were removed.

    Raises:
        UserError: where there are no such validations, or not so many of their checkpoints.
    """
    checkpoints, state = _checkpoints_of(run)
    paths = {one.step: one.path for one in checkpoints}
    scores = {entry["step"]: entry.get(f"eval_{by}") for entry in state.log_history}
    scores = {step: score for step, score in scores.items() if isinstance(score, int | float)}
    if not scores:
        raise UserError(f"{run} has no validations by {by}: give --last, or checkpoints by their folders")
    ranked = sorted(scores, key=lambda step: (-scores[step] if by == "bleu" else scores[step], step))
    chosen = [step for step in ranked if step in paths][:count]
    if len(chosen) < count:
        removed = ", ".join(f"{step:,}" for step in sorted(scores.keys() - paths.keys()))
        raise UserError(
            f"{run} holds {len(chosen)} validated checkpoints, fewer than {count} (removed:"
            f" {f'steps {removed}' if removed else 'none'}): give a lower --best, or train with more keep_checkpoints"
        )
    better = ranked[: ranked.index(chosen[-1])]
    return [paths[step] for step in chosen], [(step, scores[step]) for step in better if step not in paths]
