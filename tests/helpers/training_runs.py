"""Trainings that are stopped or killed, and the weights and logs that trainings leave."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.trainer_callback import TrainerCallback

from vaswani_transformer import train
from vaswani_transformer.recipes.recipe import Recipe
from vaswani_transformer.training import run as training
from vaswani_transformer.training.checkpoints import read_checkpoints


class Signal(TrainerCallback):
    """Sends this process a signal during a step, as a cluster or a user would."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


def stop_after_step(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
    """A signal ends trainings at this step."""
    make = training.TrainingRun._make_trainer

    def make_with_signal(self, *arguments):
        trainer = make(self, *arguments)
        trainer.add_callback(Signal(step, number))
        return trainer

    monkeypatch.setattr(training.TrainingRun, "_make_trainer", make_with_signal)


def stop_after(step: int, recipe: Recipe, number: int = signal.SIGTERM) -> None:
    """Train until a signal that comes so that this is the last step."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after_step(step, patch, number)
        with pytest.raises(training.TrainingStopped) as stopped:
            train(recipe, progress=False)
    assert (stopped.value.step, stopped.value.signal_number) == (step, number)


def kill_before_selection(recipe: Recipe) -> None:
    """Train to the end, as if killed between the last checkpoint and model selection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "select_weights", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(recipe, progress=False)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether weights are the same bit by bit, under the same names."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def complete_checkpoints(folder: Path) -> list[Path]:
    return [checkpoint.path for checkpoint in read_checkpoints(folder)]


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def without_clocks(folder: Path) -> list[dict]:
    """The log without what depends on the clock, or on the steps since the last line or the start."""
    others = ("seconds", "_runtime", "_per_second", "_preparation_time")
    return [
        {key: value for key, value in entry.items() if not key.endswith(others) and key not in ("loss", "padding")}
        for entry in log_of(folder)
    ]
