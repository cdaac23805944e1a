"""Whole runs through `train`: which weights are kept, and when a run ends or resumes."""

import dataclasses
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training_runs
from conftest import tiny_recipe
from hypothesis import given
from hypothesis import strategies as st
from training_runs import (
    complete_checkpoints,
    equal,
    kill_before_selection,
    log_of,
    stop_after,
    weights_of,
    without_clocks,
)
from transformers.trainer_callback import TrainerCallback, TrainerState

from vaswani_transformer import UserError, VaswaniConfig, average_checkpoints, train
from vaswani_transformer.recipes.recipe import load_recipe
from vaswani_transformer.training import callbacks
from vaswani_transformer.training import run as training
from vaswani_transformer.training.averaging import last_checkpoints
from vaswani_transformer.training.checkpoints import Checkpoint, read_checkpoints, step_of, surplus

STEPS = 8


pytestmark = pytest.mark.usefixtures("without_pictures")
without_pictures = training_runs.without_pictures


@pytest.fixture
def recipe(tmp_path, text):
    return make_recipe(text, tmp_path / "run")


def make_recipe(text, output):
    return tiny_recipe(text, output, max_steps=STEPS, evaluate_every=2, average_checkpoints=3)


@pytest.fixture(scope="module")
def trained(without_pictures, tmp_path_factory, text):
    """The folder of a run of `recipe` that was killed before model selection."""
    recipe = make_recipe(text, tmp_path_factory.mktemp("trained") / "run")
    kill_before_selection(recipe)
    return Path(recipe.output)


@pytest.fixture(scope="module")
def straight(without_pictures, tmp_path_factory, text):
    """An uninterrupted run of `recipe`."""
    return train(make_recipe(text, tmp_path_factory.mktemp("straight") / "run"), progress=False)


@pytest.mark.parametrize("best_by", ["loss", "bleu"])
def test_the_better_of_best_checkpoint_and_average_is_kept(recipe, best_by):
    recipe = dataclasses.replace(recipe, best_by=best_by, validation_bleu=20 if best_by == "bleu" else 0)
    result = train(recipe, progress=False)
    entries = log_of(result.folder)
    [best] = [entry for entry in entries if "best_loss" in entry]
    [average] = [entry for entry in entries if "average_loss" in entry]
    checkpoints = complete_checkpoints(result.folder / "checkpoints")
    averaged = average_checkpoints([path for path in checkpoints if step_of(path) in (4, 6, 8)])
    higher = average[f"average_{best_by}"] > best[f"best_{best_by}"]
    if higher == (best_by == "bleu") and average[f"average_{best_by}"] != best[f"best_{best_by}"]:
        assert result.averaged == 3 and equal(weights_of(result.folder), averaged)
    else:
        validations = [entry for entry in entries if "eval_loss" in entry]
        chosen = max(validations, key=lambda entry: entry[f"eval_{best_by}"] * (1 if best_by == "bleu" else -1))
        assert result.averaged == 0
        assert equal(
            weights_of(result.folder), weights_of(result.folder / "checkpoints" / f"checkpoint-{chosen['step']}")
        )
    losses = [entry["eval_loss"] for entry in entries if "eval_loss" in entry]
    assert best["best_loss"] == pytest.approx(min(losses), rel=1e-4) or best_by == "bleu"


def test_averaged_checkpoints_are_written_near_the_end_alone(recipe):
    recipe = dataclasses.replace(
        recipe, max_steps=14, evaluate_every=5, average_every=2, keep_weights="average", keep_checkpoints=1
    )
    result = train(recipe, progress=False)
    checkpoints = complete_checkpoints(result.folder / "checkpoints")
    assert [step_of(path) for path in checkpoints] == [5, 10, 12, 14]
    assert equal(weights_of(result.folder), average_checkpoints(checkpoints[1:]))
    assert last_checkpoints(result.folder, 3) == checkpoints[1:]


def test_batches_without_padding_need_a_gpus_attention_for_them(recipe, trained):
    config = VaswaniConfig.from_pretrained(trained / "checkpoints" / f"checkpoint-{STEPS}")
    wanted = dataclasses.replace(recipe, padding_free=True)
    on_gpu = SimpleNamespace(bf16=False, fp16=False, device=torch.device("meta"))
    on_cpu = SimpleNamespace(bf16=False, fp16=False, device=torch.device("cpu"))
    with pytest.raises(UserError, match="padding_free takes a GPU"):
        training.is_padding_free(wanted, config, on_gpu)
    assert training.is_padding_free(wanted, config, on_cpu)
    assert not any(training.is_padding_free(recipe, config, where) for where in (on_gpu, on_cpu))
    config.attention_window = 8
    with pytest.raises(UserError, match="no attention_window"):
        training.is_padding_free(wanted, config, on_cpu)


@pytest.mark.parametrize(("number", "overwrite"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_signal_stops_with_a_checkpoint_and_the_run_ends_as_if_uninterrupted(recipe, straight, number, overwrite):
    recipe = dataclasses.replace(recipe, overwrite=overwrite)
    handler = signal.getsignal(number)
    stop_after(4, recipe, number)
    assert signal.getsignal(number) == handler
    result = train(recipe, progress=False)
    assert result.steps == STEPS and result.averaged == straight.averaged
    assert equal(weights_of(result.folder), weights_of(straight.folder))
    assert not load_recipe(str(result.folder / "recipe.yaml")).overwrite  # which would replace the model when it is run


def test_a_torn_recipe_is_no_proof_of_the_same_settings(recipe, trained):
    shutil.copytree(trained, recipe.output)
    (Path(recipe.output) / "recipe.yaml").write_text("a: [b")  # another lies with the checkpoints
    with pytest.raises(UserError, match=r"other settings \(seed: 1, was 0\)"):
        train(dataclasses.replace(recipe, seed=1), progress=False)
    assert train(recipe, progress=False).steps == STEPS


def test_time_limit_ends_with_a_validation_and_a_model(recipe):
    result = train(dataclasses.replace(recipe, max_steps=10**6, evaluate_every=10**5, max_minutes=1e-9), progress=False)
    assert result.steps == 1 and (result.folder / "model.safetensors").is_file()
    assert [entry["step"] for entry in log_of(result.folder) if "eval_loss" in entry] == [1]


def test_early_stopping_counts_over_a_resume(recipe):
    recipe = dataclasses.replace(
        recipe, max_steps=40, evaluate_every=1, early_stopping=3, learning_rate_scale=1e-9, average_checkpoints=0
    )  # nothing is learned, so no validation is better than the first
    straight = train(recipe, progress=False)
    assert straight.steps == 4
    interrupted = dataclasses.replace(recipe, output=recipe.output + "2")
    stop_after(3, interrupted)
    assert train(interrupted, progress=False).steps == straight.steps


def test_stops_do_not_push_out_what_is_averaged(recipe):
    """Also where the best checkpoint is an early one that lies apart."""
    recipe = dataclasses.replace(recipe, max_steps=10, keep_weights="average", learning_rate_scale=200.0)
    straight = train(recipe, progress=False)
    recipe = dataclasses.replace(recipe, output=recipe.output + "2")
    for step in (5, 7, 9):
        stop_after(step, recipe)
    stopped = train(recipe, progress=False)
    assert straight.averaged == stopped.averaged == 3
    assert equal(weights_of(straight.folder), weights_of(stopped.folder))
    kept = [sorted(path.name for path in (one.folder / "checkpoints").iterdir()) for one in (straight, stopped)]
    assert kept[0] == kept[1]


def test_workers_change_nothing_and_a_resume_is_exact_with_them(recipe):
    """Over the end of an epoch, with validations: what starts workers must not draw from dropout's generator."""
    recipe = dataclasses.replace(recipe, max_steps=20, evaluate_every=4, dropout=0.3)
    straight = train(recipe, progress=False)
    recipe = dataclasses.replace(recipe, data_workers=1, output=recipe.output + "2")
    stop_after(5, recipe)
    stopped = train(recipe, progress=False)
    assert equal(weights_of(straight.folder), weights_of(stopped.folder))
    assert without_clocks(straight.folder) == without_clocks(stopped.folder)


class _Minutes(TrainerCallback):
    """A clock by which each step takes a minute; goes before those who look at it."""

    now = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        _Minutes.now = 60.0 * (state.global_step + 1)


@pytest.fixture
def by_the_minute(monkeypatch):
    make = training.TrainingRun._make_trainer

    def make_with_clock(self, *arguments):
        trainer = make(self, *arguments)
        trainer.add_callback(_Minutes())
        return trainer

    monkeypatch.setattr(training.TrainingRun, "_make_trainer", make_with_clock)
    monkeypatch.setattr(_Minutes, "now", 0.0)
    monkeypatch.setattr(callbacks.TrainingLogCallback, "seconds", lambda self: _Minutes.now)


def test_checkpoints_by_the_clock_are_the_averaged_ones(recipe, by_the_minute):
    """Section 6.1: every so many minutes, here 3, and the last ones averaged, whatever validation asks for besides."""
    recipe = dataclasses.replace(
        recipe, max_steps=14, evaluate_every=5, checkpoint_minutes=3, keep_checkpoints=1, keep_weights="average"
    )
    result = train(recipe, progress=False)
    checkpoints = read_checkpoints(result.folder / "checkpoints")
    why = {checkpoint.step: checkpoint.reasons for checkpoint in checkpoints}
    assert why.pop(14) == {"validation", "end"}
    assert {step for step, reasons in why.items() if reasons == {"time"}} == {6, 9, 12}
    validated = {step for step, reasons in why.items() if reasons == {"validation"}}
    assert validated <= {5, 10} and len(why) == 3 + len(validated)
    averaged = average_checkpoints([one.path for one in checkpoints if one.step in (9, 12, 14)])
    assert result.averaged == 3 and equal(weights_of(result.folder), averaged)


def test_the_clock_goes_on_over_a_resume(recipe, by_the_minute):
    recipe = dataclasses.replace(recipe, max_steps=14, evaluate_every=50, checkpoint_minutes=4, keep_weights="average")
    stop_after(7, recipe)
    _Minutes.now = 60.0 * step_of(complete_checkpoints(Path(recipe.output) / "checkpoints")[-1])
    result = train(recipe, progress=False)
    why = {one.step: one.reasons for one in read_checkpoints(result.folder / "checkpoints")}
    assert [step for step, reasons in why.items() if "time" in reasons] == [4, 8, 12] and result.averaged == 3


def test_log_and_seconds_go_on_from_the_checkpoint_and_not_from_the_file(tmp_path):
    log = callbacks.TrainingLogCallback(tmp_path / "log.jsonl")
    log.path.write_text('{"step": 9, "seconds": 60.0, "loss": 1.0}\n{"step')
    history = [{"step": 1, "seconds": 5.0, "loss": 1.0}, {"loss": 1.0, "step": 2}]  # the latter of commit b26e237
    state = TrainerState(global_step=7, is_world_process_zero=True, log_history=history)
    state.stateful_callbacks = {"TrainingLogCallback": {"args": {}, "attributes": {"earlier_seconds": 42.5}}}
    log.on_train_begin(None, state, None)
    assert 42.5 <= log.seconds() < 45 and 42.5 <= log.state()["attributes"]["earlier_seconds"] < 45
    assert [entry["step"] for entry in callbacks.read_training_log(log.path)] == [1, 2]


@pytest.mark.parametrize("keep", ["average", "best", "last"])
def test_what_is_kept_is_what_was_asked_for_and_all_is_logged(recipe, trained, keep):
    """Also of a run that is over but for the choice: what to keep may be changed then."""
    shutil.copytree(trained, recipe.output)
    result = train(dataclasses.replace(recipe, keep_weights=keep), progress=False)
    assert result.steps == STEPS
    whole = complete_checkpoints(result.folder / "checkpoints")
    entries = log_of(result.folder)
    losses = {entry["step"]: entry["eval_loss"] for entry in entries if "eval_loss" in entry}
    expected = {
        "average": average_checkpoints([path for path in whole if step_of(path) in (4, 6, 8)]),
        "best": weights_of(next(path for path in whole if step_of(path) == min(losses, key=losses.get))),
        "last": weights_of(whole[-1]),
    }
    assert equal(weights_of(result.folder), expected[keep])
    assert result.kept.startswith(keep) and (result.averaged == 3) == (keep == "average")
    losses = {key for entry in entries for key in entry if key.endswith("_loss")}
    assert losses == {"eval_loss", "best_loss", "average_loss"} | ({"last_loss"} if keep == "last" else set())
    [loss] = [entry[f"{keep}_loss"] for entry in entries if f"{keep}_loss" in entry]
    assert result.metrics["eval_loss"] == loss


@pytest.mark.parametrize("limit", [{"early_stopping": 2, "learning_rate_scale": 1e-9}, {"max_minutes": 1e-9}])
def test_a_run_that_had_ended_early_trains_no_further(recipe, limit):
    """Killed after its last checkpoint, by early stopping or the time limit, and started again."""
    recipe = dataclasses.replace(recipe, max_steps=40, evaluate_every=1, **limit)
    kill_before_selection(recipe)
    steps = step_of(complete_checkpoints(Path(recipe.output) / "checkpoints")[-1])
    assert steps < 40 and train(recipe, progress=False).steps == steps


def marked(why: dict[int, set[str]]) -> list[Checkpoint]:
    return [Checkpoint(Path(f"checkpoint-{step}"), frozenset(reasons)) for step, reasons in sorted(why.items())]


reasons = st.sampled_from([{"validation"}, {"time"}, {"time", "validation"}, {"stop"}, set()])


@given(
    st.dictionaries(st.integers(1, 30), reasons, min_size=1),
    st.integers(1, 5) | st.none(),
    st.integers(1, 5) | st.none(),
    st.integers(1, 30) | st.none(),
)
def test_kinds_of_checkpoints_do_not_push_each_other_out(why, limit, timed_limit, best):
    gone = {one.step for one in surplus(marked(why), limit, timed_limit, best)}
    assert max(why) not in gone and best not in gone
    timed = sorted(step for step in why if "time" in why[step])
    others = sorted(step for step in why if why[step] not in ({"time"}, {"stop"}))
    if timed_limit is not None:
        assert not gone & set(timed[-timed_limit:])
        assert {step for step in timed[:-timed_limit] if why[step] == {"time"}} - {max(why), best} <= gone
    if limit is not None:
        room = limit - (best in others)
        newest = [step for step in others if step != best][-room:] if room else []
        assert not gone & set(newest)
        assert {step for step in others if "time" not in why[step]} - {*newest, max(why), best} <= gone
    if limit is None and timed_limit is None:
        assert not gone
