"""Whole runs through `train`: which weights are kept, and when a run ends or resumes."""

import dataclasses
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training_runs
from conftest import error_of, tiny_recipe
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import equation_3
from training_runs import complete_checkpoints, equal, kill_before_selection, log_of, stop_after, weights_of
from transformers import trainer, trainer_utils
from transformers.trainer_callback import TrainerState

from vaswani_transformer import VaswaniConfig, average_checkpoints, load_model, train, train_tokenizer
from vaswani_transformer.hub.card_facts import facts_of, known_languages
from vaswani_transformer.recipes.recipe import load_recipe
from vaswani_transformer.training import callbacks
from vaswani_transformer.training import run as training
from vaswani_transformer.training.averaging import last_checkpoints
from vaswani_transformer.training.checkpoints import Checkpoint, step_of, surplus

STEPS = 8


pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture
def recipe(tmp_path, text):
    return make_recipe(text, tmp_path / "run")


def make_recipe(text, output):
    return tiny_recipe(text, output, max_steps=STEPS, evaluate_every=2, average_checkpoints=3)


@pytest.fixture(scope="module")
def trained(without_pictures, tmp_path_factory, text):
    recipe = make_recipe(text, tmp_path_factory.mktemp("trained") / "run")
    kill_before_selection(recipe)
    return Path(recipe.output)


@pytest.fixture(scope="module")
def straight(without_pictures, tmp_path_factory, text):
    return train(make_recipe(text, tmp_path_factory.mktemp("straight") / "run"), progress=False)


def test_a_model_knows_the_languages_of_its_catalogues(recipe, text):
    sides = ((text / f"train.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de"))
    entries = [f'\nmsgid "{source}"\nmsgstr "{target}"\n' for source, target in zip(*sides, strict=True)]
    header = 'msgid ""\nmsgstr ""\n"Language: es_MX\\n"\n'
    (path := Path(recipe.output).parent / "a.po").write_text("".join([header, *entries]), encoding="utf-8")
    own = {"train_source": None, "train_target": None, "train_data": str(path), "max_steps": 2}
    folder = train(dataclasses.replace(recipe, **own, average_checkpoints=1), progress=False).folder
    assert known_languages(folder) == ["", "es"]
    facts = facts_of(load_model(folder, "cpu")[0], "a/b", folder)
    assert facts.languages == ["es"] and facts.generation["min_new_tokens"] == 1  # no output is empty


def test_codes_that_the_tokenizer_lacks_are_refused_and_none_at_all_is_said(recipe, tmp_path, caplog):
    tokenizer = train_tokenizer(["a dog sees a cat"], vocab_size=300)
    tokenizer.add_tokens([">>deu<<", ">>fra<<"])
    tokenizer.save_pretrained(tmp_path / "coded")
    (table := tmp_path / "pairs.tsv").write_text("".join(f">>fao<< a dog {n}\tein Hund {n}\n" for n in range(40)))
    own = {"train_source": None, "train_target": None, "train_data": str(table), "tokenizer": str(tmp_path / "coded")}
    recipe = dataclasses.replace(recipe, **own, max_steps=2, average_checkpoints=1)
    assert "'>>fao<<' is no target language of the model: it has >>deu<<, >>fra<<" in error_of(train, recipe)
    table.write_text(table.read_text().replace(">>fao<< ", ""))
    train(recipe, progress=False)
    assert "sources have no code, as this model's do (>>deu<<, >>fra<<)" in caplog.text


@pytest.mark.parametrize("best_by", ["loss", "bleu"])
def test_the_better_of_best_checkpoint_and_average_is_kept(recipe, best_by):
    """By the loss where that is asked for, and where a BLEU of about 0 says nothing, which does not end training."""
    fields = {"validation_bleu": 4, "early_stopping": 1} if best_by == "bleu" else {}
    result = train(dataclasses.replace(recipe, best_by=best_by, **fields), progress=False)
    entries = log_of(result.folder)
    validations = {entry["step"]: entry for entry in entries if "eval_loss" in entry}
    assert result.steps == STEPS and all(entry.get("eval_bleu", 0) < 1 for entry in validations.values())
    chosen = min(validations, key=lambda step: validations[step]["eval_loss"])
    [best] = [entry["best_loss"] for entry in entries if "best_loss" in entry]
    [average] = [entry["average_loss"] for entry in entries if "average_loss" in entry]
    assert best == pytest.approx(validations[chosen]["eval_loss"], rel=1e-4)
    checkpoints = complete_checkpoints(result.folder / "checkpoints")
    averaged = [path for path in checkpoints if step_of(path) in (4, 6, 8)]
    expected = averaged if average < best else [path for path in checkpoints if step_of(path) == chosen]
    assert result.averaged == (3 if average < best else 0)
    assert equal(weights_of(result.folder), average_checkpoints(expected))


# Validations (loss, BLEU, its standard error), the step of the best one after each, and how many have come since.
TRAJECTORIES = {
    "nothing but zeros": ([(5, 0, 0), (4, 0, 0), (4.5, 0, 0), (4.4, 0, 0)], [1, 2, 2, 2], 0),
    "one sentence for all sources": (  # measured
        [(6.91, 0.03, 0.002), (5.54, 1.89, 0.37), (5.17, 1.18, 0.23), (4.96, 2.27, 0.47), (4.85, 0.96, 0.22)],
        [1, 2, 3, 4, 5], 0,
    ),
    "a plateau of the loss before BLEU moves": ([(4.7, 0.3, 0.1), (4.8, 1.9, 0.4), (4.8, 0.6, 0.2)], [1, 1, 1], 0),
    "equal ones": ([(2, 20, 0), (1.9, 20, 0), (1.95, 20, 0)], [1, 2, 2], 1),
    "higher by more than the error": ([(2, 20, 0.9), (2.1, 22, 0.9), (2.2, 24, 0.9)], [1, 2, 3], 0),
    "as high as one can tell": ([(2, 20, 0.9), (1.9, 19.5, 0.9), (1.8, 19.2, 0.9), (1.7, 18.9, 0.9)], [1, 2, 3, 3], 1),
    "worse and worse": ([(2, 20, 0.9), (2.2, 18, 0.9), (1.9, 17, 0.9), (2.5, 0.1, 0.05)], [1, 1, 1, 1], 3),
    "few pairs": ([(2, 30, 5), (1.9, 27, 5), (2.2, 29, 5)], [1, 2, 2], 1),
    "known well": ([(3, 2.0, 0.1), (2.9, 2.4, 0.1), (2.8, 2.2, 0.1)], [1, 2, 2], 1),
    "one pair": ([(3, 4, 0), (2.9, 3, 0), (2.8, 2, None)], [1, 2, 3], 0),
    "of an earlier version": ([(3, 20, None), (3.1, 21, None), (2.9, 20.5, None)], [1, 2, 2], 1),
}  # fmt: skip


@pytest.mark.parametrize(("scores", "steps", "stalled"), TRAJECTORIES.values(), ids=TRAJECTORIES)
def test_the_best_validation_and_how_long_there_was_none(scores, steps, stalled):
    """Also over a resume: what is known is the log, and the step of the best so far."""
    state, control = TrainerState(), SimpleNamespace(should_training_stop=False)
    for number, (step, (loss, bleu, error)) in enumerate(zip(steps, scores, strict=True), 1):
        entry = {"step": number, "eval_loss": loss, "eval_bleu": bleu}
        state = dataclasses.replace(state, global_step=number)  # as it is read again
        state.log_history.append(entry if error is None else entry | {"eval_bleu_error": error})
        assert not control.should_training_stop
        callbacks.BestValidationCallback(None, "bleu", stalled or len(scores)).on_evaluate(None, state, control)
        assert state.best_global_step == step
    assert callbacks.stalled_validations(state, "bleu") == stalled
    assert control.should_training_stop == (stalled > 0)


def test_averaged_checkpoints_are_written_near_the_end_alone(recipe):
    changes = {"average_every": 2, "keep_weights": "average", "keep_checkpoints": 1}
    recipe = dataclasses.replace(recipe, max_steps=14, evaluate_every=5, **changes)
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
    assert "padding_free takes a GPU" in error_of(training.is_padding_free, wanted, config, on_gpu)
    assert training.is_padding_free(wanted, config, on_cpu)
    assert not any(training.is_padding_free(recipe, config, where) for where in (on_gpu, on_cpu))
    config.attention_window = 8
    assert "no attention_window" in error_of(training.is_padding_free, wanted, config, on_cpu)


@pytest.mark.parametrize(("step", "overwrite"), [(4, False), (4, True), (STEPS, False)])
def test_a_signal_stops_with_a_checkpoint_and_the_run_ends_as_if_uninterrupted(recipe, straight, step, overwrite):
    number = signal.SIGINT if overwrite else signal.SIGTERM
    recipe = dataclasses.replace(recipe, overwrite=overwrite)
    handler = signal.getsignal(number)
    stop_after(step, recipe, number)
    assert signal.getsignal(number) == handler
    where = recipe.data_dir if overwrite else f"{recipe.data_dir}/."  # of the same text
    result = train(dataclasses.replace(recipe, data_dir=where), progress=False)
    assert result.steps == STEPS and result.averaged == straight.averaged
    assert equal(weights_of(result.folder), weights_of(straight.folder))
    assert not load_recipe(str(result.folder / "recipe.yaml")).overwrite  # which would replace the model when it is run


def test_a_torn_recipe_is_no_proof_of_the_same_settings(recipe, trained):
    shutil.copytree(trained, recipe.output)
    (Path(recipe.output) / "recipe.yaml").write_text("a: [b")  # another lies with the checkpoints
    assert "other settings (seed: 1, was 0)" in error_of(train, dataclasses.replace(recipe, seed=1), progress=False)
    assert train(recipe, progress=False).steps == STEPS


def test_a_run_in_place_of_another_has_nothing_of_its_search(recipe, straight):
    shutil.copytree(straight.folder, recipe.output)
    stop_after(2, dataclasses.replace(recipe, overwrite=True, seed=1))
    assert not (Path(recipe.output) / "generation_config.json").exists()


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
    changes = {"augmentation": "upper:0.2,typos:0.3,repeat:0.2", "augmentation_start": 5}
    recipe = dataclasses.replace(recipe, max_steps=8, evaluate_every=4, dropout=0.3, **changes)
    straight = train(recipe, progress=False)
    recipe = dataclasses.replace(recipe, data_workers=1, output=recipe.output + "2")
    stop_after(3, recipe)
    stopped = train(recipe, progress=False)
    assert equal(weights_of(straight.folder), weights_of(stopped.folder))
    assert training_runs.without_clocks(straight.folder) == training_runs.without_clocks(stopped.folder)


@pytest.mark.parametrize("evaluate_every", [7, 10**5])
def test_the_time_limit_includes_what_comes_after_training(recipe, monkeypatch, evaluate_every):
    """By a clock on which a step takes 9 seconds, and a batch of a validation 8, of a beam search three times that."""
    now = [0.0]
    clock = SimpleNamespace(**{**vars(time), "time": lambda: now[0], "monotonic": lambda: now[0]})
    for module in (callbacks, trainer, trainer_utils):
        monkeypatch.setattr(module, "time", clock)
    for name, seconds in (("training_step", 9), ("prediction_step", 8), ("_save_checkpoint", 5)):
        method = getattr(training.VaswaniTrainer, name)

        def slow(self, *arguments, method=method, seconds=seconds, **options):
            now[0] += seconds * (3 if options.get("num_beams", 1) > 1 else 1)
            return method(self, *arguments, **options)

        monkeypatch.setattr(training.VaswaniTrainer, name, slow)
    fields = {"max_steps": 10**6, "evaluate_every": evaluate_every, "max_minutes": 5, "validation_bleu": 2}
    recipe = dataclasses.replace(recipe, **fields, length_penalty="auto", max_extra_tokens=1)
    scores = {"bleu": 9.0, "bleu_error": 0.5, "chrf": 9.0, "chrf_error": 0.5}
    monkeypatch.setattr(training, "_scores", lambda *_: scores)
    result = train(recipe, progress=False)
    assert 240 <= result.seconds <= 300 and result.seconds == now[0]
    assert log_of(result.folder)[-1]["step"] == result.steps


def test_a_rate_that_declines_does_so_within_the_minutes(recipe, monkeypatch):
    """Steps take a minute: of 40 that were thought to fit 22 do; and if it is resumed between two validations."""
    now, step = [0.0], training.VaswaniTrainer.training_step

    def slow(self, *arguments, **options):
        now[0] = 60.0 * (self.state.global_step + 1)
        return step(self, *arguments, **options)

    monkeypatch.setattr(training.VaswaniTrainer, "training_step", slow)
    monkeypatch.setattr(callbacks.TrainingLogCallback, "seconds", lambda self: now[0])
    fields = {"max_steps": 40, "decline_steps": 20, "warmup_steps": 2, "evaluate_every": 4, "validation_bleu": 0}
    recipe = dataclasses.replace(recipe, **fields, max_minutes=22.5, log_every=1, average_every=3)
    result = train(recipe, progress=False)
    assert [step_of(path) for path in last_checkpoints(result.folder, 3)] == [18, 21, 22]
    rates = [entry["learning_rate"] for entry in log_of(result.folder) if "learning_rate" in entry]
    constant = [equation_3(step, 16, 2) for step in range(1, 23)]
    assert result.steps == len(rates) == 22
    assert rates == pytest.approx([rate * min(1, (22 - step) / 11) for step, rate in enumerate(constant)], rel=1e-6)
    stop_after(17, recipe := dataclasses.replace(recipe, output=recipe.output + "2"))
    kill_before_selection(recipe)
    again = log_of(train(recipe, progress=False).folder)
    assert rates == [entry["learning_rate"] for entry in again if "learning_rate" in entry]


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


def test_a_run_can_be_ended_before_its_first_validation(recipe):
    recipe = dataclasses.replace(recipe, evaluate_every=100, average_checkpoints=0)
    stop_after(3, recipe)
    result = train(dataclasses.replace(recipe, max_steps=3), progress=False)
    assert result.steps == 3 and result.kept.startswith("last")
    assert equal(weights_of(result.folder), weights_of(Path(recipe.output) / "checkpoints" / "checkpoint-3"))


# "time": of a run of an earlier version.
reasons = st.sampled_from([{"validation"}, {"time"}, {"stop", "validation"}, {"stop"}, set()])


@given(
    st.dictionaries(st.integers(1, 30), reasons, min_size=1),
    st.integers(0, 5) | st.none(),
    st.integers(1, 30) | st.none(),
)
def test_kinds_of_checkpoints_do_not_push_each_other_out(why, limit, best):
    marked = [Checkpoint(Path(f"checkpoint-{step}"), reasons == {"stop"}) for step, reasons in sorted(why.items())]
    gone = {one.step for one in surplus(marked, limit, best)}
    assert max(why) not in gone and best not in gone
    others = sorted(step for step in why if why[step] != {"stop"})
    if not limit:
        assert not gone
    else:
        room = limit - (best in others)
        newest = [step for step in others if step != best][-room:] if room else []
        assert gone == why.keys() - {*newest, max(why), best}
