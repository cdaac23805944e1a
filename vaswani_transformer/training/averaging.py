"""Averaging of checkpoints (Section 6.1: the last 5 of the base model, the last 20 of the big one)."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from ..data.tokenization import load_tokenizer, refuse_special_files, tokenizer_sha256
from ..errors import UserError, items_of, reading
from ..json_and_yaml import read_json
from ..loading import load_model
from ..model.checkpoint_vaswani import check_finite
from ..output_folder import RECIPE, written_at_once
from ..recipes.recipe import DROPOUTS
from .checkpoints import WEIGHTS, check_contents, read_checkpoints, read_state, to_average
from .run_folder import CHECKPOINTS, DISTILLATION, IMPORT, LOG, ORIGIN, VERDICT

# Of a configuration, what does not decide what a model computes from its weights.
_NO_DIFFERENCE = {"_name_or_path", "transformers_version", "use_cache", "architectures", "auto_map", "custom_pipelines"}
_NO_DIFFERENCE |= {"label_smoothing", *DROPOUTS}  # of training alone


def average_checkpoints(folders: Sequence[str | Path]) -> dict[str, torch.Tensor]:
    """Return the mean of each weight over one or more checkpoints, summed in float64, in the first one's type.

    Besides the result, one weight of one checkpoint at a time is in memory.

    Raises:
        UserError: for a missing file, one that has changed since a training wrote it, or weights of other names or
            shapes than the first one's, some of which torch would broadcast.
    """
    files, folders = [], [Path(folder) for folder in items_of(folders)]
    for folder in folders:
        check_contents(folder, weights_only=True)
        with reading(folder):
            refuse_special_files(folder)  # a pipe would be waited for
            files.append(safe_open(folder / WEIGHTS, framework="pt"))
    shapes = [{name: file.get_slice(name).get_shape() for name in file.keys()} for file in files]  # noqa: SIM118
    for folder, others in zip(folders[1:], shapes[1:], strict=True):
        if different := sorted(name for name in shapes[0] | others if shapes[0].get(name) != others.get(name)):
            name = different[0]
            both = f"{others.get(name)} and {shapes[0].get(name)}"
            raise UserError(f"{folder} and {folders[0]} are not of one model: {name} has the shapes {both}")
    average = {}
    for name in sorted(shapes[0]):
        first = files[0].get_tensor(name)
        total = first.to(torch.float64, copy=True)
        for file in files[1:]:
            total += file.get_tensor(name)
        average[name] = (total / len(files)).to(first.dtype)
    return average


def _check_same_model(folders: Sequence[Path]) -> None:
    """Refuse folders whose configurations or tokenizers differ from the first one's."""
    facts = [read_json(folder / "config.json") for folder in folders]
    for folder, config in zip(folders, facts, strict=True):
        config["the tokenizer"] = tokenizer_sha256(load_tokenizer(folder))
    for folder, others in zip(folders[1:], facts[1:], strict=True):
        names = (others.keys() | facts[0].keys()) - _NO_DIFFERENCE
        if different := sorted(name for name in names if others.get(name) != facts[0].get(name)):
            raise UserError(f"{folder} and {folders[0]} are not of one model: they differ in {', '.join(different)}")


def average_models(folders: Sequence[str | Path], output: str | Path, overwrite: bool = False) -> Path:
    """Write the average of checkpoints or model folders of one model as a model folder, and return this one.

    It is written complete and at once, into a new folder, or with `overwrite` in place of a model that was averaged or
    imported there; other files stay. All but the weights is as in the first one.

    Raises:
        UserError: for what cannot be averaged, naming two folders and the difference, for an average that is not
            finite, naming the weight, and for an output that is there.
    """
    folders = [Path(folder) for folder in items_of(folders)]
    with written_at_once(output, overwrite, last=WEIGHTS, no=(LOG,)) as staging:
        _check_same_model(folders)
        model, tokenizer = load_model(folders[0], "cpu")
        model.load_state_dict(average_checkpoints(folders), strict=False)  # a file holds one of tied weights
        with reading(f"the average of {folders[0]} and others"):
            check_finite(model.named_parameters(), "it")
        model.config.use_cache = True  # the Trainer switches it off for training
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        first = folders[0].resolve()
        run = first.parent.parent if first.parent.name == CHECKPOINTS else first
        # `generation_config.json` has alpha, which a training chooses last.
        for name in (IMPORT, ORIGIN, RECIPE, DISTILLATION, "generation_config.json"):
            if (run / name).is_file():
                (staging / name).write_bytes((run / name).read_bytes())
        if (run / VERDICT).is_file() and (languages := read_json(run / VERDICT).get("languages")):  # of catalogues
            facts = read_json(run / ORIGIN) if (run / ORIGIN).is_file() else {}
            (staging / ORIGIN).write_text(json.dumps(facts | {"languages": languages}), encoding="utf-8")
    return Path(output).absolute()


def last_checkpoints(run: str | Path, count: int) -> list[Path]:
    """Return the last `count` checkpoints of a run, as it would average them; raises `UserError` if it has fewer."""
    checkpoints, chosen = read_checkpoints(Path(run) / CHECKPOINTS), []
    if checkpoints:
        state, end = read_state(checkpoints[-1].path), checkpoints[-1].step
        chosen = to_average(checkpoints, count, max(1, int(state.save_steps or state.eval_steps or 1)), end)
    if len(chosen) < count:
        shown = ", ".join(f"{each.step:,}" for each in chosen)
        problem = f"{run} holds {len(chosen)} checkpoints (steps {shown}), fewer than {count}"
        raise UserError(f"{problem}: give a lower number")
    return [each.path for each in chosen]
