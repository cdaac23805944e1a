"""What a run tells of itself: lines or a bar, the log, TensorBoard, curves, and a loss that is no number."""

import dataclasses
import io
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import error_of, tiny_recipe
from training_runs import complete_checkpoints, kill_before_selection, log_of, stop_after

from vaswani_transformer import train
from vaswani_transformer.data.batching import IGNORE_INDEX
from vaswani_transformer.training import run as training
from vaswani_transformer.training.run_folder import plot_learning_curve

pytestmark = pytest.mark.usefixtures("without_pictures")
STEPS = 6


@pytest.fixture
def recipe(tmp_path, text):
    return tiny_recipe(
        text, tmp_path / "run", tokens_per_device=300, max_steps=STEPS, evaluate_every=3, average_checkpoints=0
    )


def checkpoint_names(recipe):
    return [path.name for path in complete_checkpoints(Path(recipe.output) / "checkpoints")]


SEARCHED = {"validation_bleu": 4, "length_penalty": "auto", "num_beams": 2, "max_extra_tokens": 2}


def test_without_a_terminal_every_logged_step_is_a_line(recipe, capfd, caplog):
    caplog.set_level("INFO", "vaswani_transformer")
    folder = train(dataclasses.replace(recipe, **SEARCHED, bleu_tokenizer="char", average_checkpoints=2)).folder
    lines = capfd.readouterr().err.splitlines()
    steps = [entry for entry in log_of(folder) if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    shown = [line for line in lines if re.match(r"step \d+ of 6: ", line)]
    assert len(shown) == STEPS
    for entry, line in zip(steps, shown, strict=True):
        assert f"loss {entry['loss']:.3f}, rate {entry['learning_rate']:.2e}, " in line
        assert f"{entry['source_tokens']:,} + {entry['target_tokens']:,} tokens a step" in line
        assert f"gradient {entry['grad_norm']:.2f}" in line and f"padding {entry['padding']:.1%}" in line
        assert line.endswith(" left")
    lines += caplog.messages
    validated = [line for line in lines if re.search(": validation loss .*, perplexity .*, BLEU ", line)]
    assert [re.sub(r"[ :].*", "", line) for line in validated] == ["step", "step", "best", "average"]
    assert "validation BLEU: on the tokens of char" in caplog.messages
    assert any(re.match(r"length penalty 0.6, beam 2: validation BLEU \d", line) for line in caplog.messages)


def test_a_terminal_has_a_bar(recipe, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    train(dataclasses.replace(recipe, max_steps=3))
    shown = terminal.getvalue()
    assert "training: 100%" in shown and "3/3" in shown and " left" in shown and "step 3 of 3" not in shown
    searched = dataclasses.replace(recipe, **SEARCHED, output=f"{recipe.output}-searched")
    kill_before_selection(searched)
    terminal.truncate(0)
    train(searched)  # which only selects weights and length penalty
    assert "training:" not in terminal.getvalue() and terminal.getvalue().count("\rvalidating: ") == 2


def test_logged_padding_and_tokens_are_those_of_the_batches(recipe, monkeypatch):
    """Counted again from the batches that the model was given, over both parts of each step."""
    seen = []
    step = training.VaswaniTrainer.training_step

    def recorded(self, model, inputs, *arguments, **options):
        seen.append([inputs["attention_mask"].numpy().copy(), (inputs["labels"] != IGNORE_INDEX).numpy()])
        return step(self, model, inputs, *arguments, **options)

    monkeypatch.setattr(training.VaswaniTrainer, "training_step", recorded)
    entries = [entry for entry in log_of(train(recipe, progress=False).folder) if "loss" in entry]
    assert len(seen) == 2 * len(entries)
    paddings, seen_before = [], [0, 0]
    for index, entry in enumerate(entries):
        parts = seen[2 * index : 2 * index + 2]
        tokens = [sum(int(part[side].sum()) for part in parts) for side in (0, 1)]
        positions = sum(mask.size for part in parts for mask in part)
        assert [entry["source_tokens"], entry["target_tokens"]] == tokens
        seen_before = [before + new for before, new in zip(seen_before, tokens, strict=True)]
        assert [entry["source_tokens_seen"], entry["target_tokens_seen"]] == seen_before
        assert entry["padding"] == pytest.approx(1 - sum(tokens) / positions)
        assert entry["target_tokens_per_second"] > 0
        paddings.append(entry["padding"])
    assert max(paddings) > 0


def test_tensorboard_holds_what_the_log_holds(recipe):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = train(dataclasses.replace(recipe, report_to="tensorboard"), progress=False).folder
    entries = log_of(folder)
    accumulator = events.EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    tags = {f"train/{key}": key for key in ("loss", "padding", "grad_norm", "target_tokens_per_second")}
    for tag, key in (tags | {"eval/loss": "eval_loss"}).items():
        logged = {event.step: event.value for event in accumulator.Scalars(tag)}
        expected = {entry["step"]: entry[key] for entry in entries if key in entry}
        assert logged == pytest.approx(expected, rel=1e-5), tag
    assert not list((folder / "checkpoints").glob("runs*"))


def test_the_curve_is_drawn_when_training_stops_and_when_it_ends(recipe, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(training.run_folder, "plot_learning_curve", plot_learning_curve)
    picture = Path(recipe.output) / "learning_curve.png"
    stop_after(4, recipe)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    picture.unlink()
    train(recipe, progress=False)
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("poison", "step", "log_every"), [("nan", 4, 1), ("inf", 5, 1), ("nan", 3, 100)])
def test_a_loss_that_is_not_finite_stops_the_run_where_it_would_be_logged(recipe, monkeypatch, poison, step, log_every):
    """In the middle, in the step that a checkpoint follows, or in a validation; checkpoint 3 stays the last."""
    loss = training.VaswaniTrainer.compute_loss

    def poisoned(self, model, inputs, *arguments, **options):
        value = loss(self, model, inputs, *arguments, **options)
        return value * float(poison) if self.state.global_step == step and self.model.training else value

    monkeypatch.setattr(training.VaswaniTrainer, "compute_loss", poisoned)
    seen = step + 1 if log_every == 1 else STEPS
    recipe = dataclasses.replace(recipe, log_every=log_every)
    assert f"loss is not finite at step {seen}" in error_of(train, recipe, progress=False)
    assert checkpoint_names(recipe) == ["checkpoint-3"]
    assert "NaN" not in (Path(recipe.output) / "training_log.jsonl").read_text()


def test_weights_that_a_gradient_ruined_reach_no_checkpoint(recipe, monkeypatch):
    """The loss of the step is finite, the gradient is not, and a checkpoint follows before there is another loss."""
    recipe = dataclasses.replace(recipe, evaluate_every=5, average_every=2, average_checkpoints=2)
    step = training.VaswaniTrainer.training_step

    def poisoned(self, model, *arguments, **options):
        loss = step(self, model, *arguments, **options)
        if self.state.global_step == 3:
            model.lm_head.weight.grad[3, 2] = float("nan")
        return loss

    monkeypatch.setattr(training.VaswaniTrainer, "training_step", poisoned)
    assert "weights are not finite at step 4" in error_of(train, recipe, progress=False)
    assert not checkpoint_names(recipe)


def test_validation_is_left_out_of_the_tokens_a_second(recipe, monkeypatch):
    """By a clock on which a part of a step takes a second, and a validation a thousand."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time_ns=time.time_ns)
    monkeypatch.setattr("vaswani_transformer.training.trainer.time", clock)
    for name, seconds in (("training_step", 1.0), ("prediction_step", 1000.0)):
        method = getattr(training.VaswaniTrainer, name)

        def slow(self, *arguments, method=method, seconds=seconds, **options):
            now[0] += seconds
            return method(self, *arguments, **options)

        monkeypatch.setattr(training.VaswaniTrainer, name, slow)
    entries = [entry for entry in log_of(train(recipe, progress=False).folder) if "loss" in entry]
    for entry in entries:
        assert entry["target_tokens_per_second"] == pytest.approx(entry["target_tokens"] / 2)  # two parts a step
