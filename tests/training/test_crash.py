"""Runs that are killed, told to stop, or find the disk full: they end as undisturbed ones."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from children import fork, limit_files, run_in_child, wait, wait_for
from conftest import error_of, tiny_recipe
from training_runs import complete_checkpoints, kill_before_selection, log_of
from training_runs import without_clocks as entries

from vaswani_transformer import train
from vaswani_transformer.training import run as training
from vaswani_transformer.training.checkpoints import read_checkpoints

STEPS, EVERY = 12, 2


@pytest.fixture(scope="module")
def recipe(text):
    """Five steps an epoch, dropout, and lines of the log that fall between checkpoints."""
    return tiny_recipe(
        text, dropout=0.1, tokens_per_device=300, max_steps=STEPS, evaluate_every=EVERY, log_every=3,
        average_checkpoints=3, keep_checkpoints=2, keep_weights="average", precision="fp32",
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(dataclasses.replace(recipe, output=str(folder)), progress=False)
    return folder


def options(recipe, output) -> list[str]:
    path = Path(recipe.data_dir) / f"recipe-{abs(hash(str(recipe)))}.yaml"
    path.write_text(yaml.safe_dump(dataclasses.asdict(recipe)))
    return ["train", str(path), "--output", str(output), "--quiet"]


def check_same_end(folder, undisturbed):
    """Bit-identical weights and optimizer, the same log, state and files; nothing left over."""
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    log = entries(folder)
    assert log == entries(undisturbed)
    assert [entry["step"] for entry in log if "grad_norm" in entry] == list(range(3, STEPS + 1, 3))
    assert [entry["step"] for entry in log if "eval_loss" in entry] == list(range(EVERY, STEPS + 1, EVERY))
    seconds = [entry["seconds"] for entry in log_of(folder)]
    assert seconds == sorted(seconds)
    ends = [one / "checkpoints" / f"checkpoint-{STEPS}" for one in (folder, undisturbed)]
    assert all(end in complete_checkpoints(end.parent) for end in ends)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert ends[0].joinpath(name).read_bytes() == ends[1].joinpath(name).read_bytes(), name
    ours, theirs = (json.loads((end / "trainer_state.json").read_text()) for end in ends)
    for name in ("best_metric", "best_global_step", "global_step", "epoch", "total_flos"):
        assert ours[name] == theirs[name], name
    best = folder / "checkpoints" / f"checkpoint-{ours['best_global_step']}"
    assert ours["best_model_checkpoint"] == str(best) and best in complete_checkpoints(best.parent)
    names = {one: {str(path.relative_to(one)) for path in one.rglob("*")} for one in (folder, undisturbed)}
    assert names[folder] == names[undisturbed]
    assert not [name for name in names[folder] if ".writing" in name or ".removing" in name]


@pytest.mark.slow
def test_deterministic_kernels_change_nothing_on_a_cpu(recipe, undisturbed, tmp_path, monkeypatch):
    modes, select = [], training.select_weights
    noting = lambda *a: modes.append(torch.are_deterministic_algorithms_enabled()) or select(*a)  # noqa: E731
    monkeypatch.setattr(training, "select_weights", noting)
    train(dataclasses.replace(recipe, output=str(tmp_path / "run"), deterministic=True), progress=False)
    assert modes == [True] and not torch.are_deterministic_algorithms_enabled()
    check_same_end(tmp_path / "run", undisturbed)


class DieAtFile:
    """Kills its process right before the n-th time that it opens, renames, makes or removes something in a folder.

    These are the moments that tell whether files are written and removed in a safe order.
    """

    EVENTS = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"})

    def __init__(self, folder, count):
        self.folder, self.left = str(folder), count
        sys.addaudithook(self.hear)  # stays until the process ends: only for forked ones

    def hear(self, event, arguments):
        if event in self.EVENTS and self.folder in str(arguments[0]):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def die_in_training(recipe, count) -> int:
    """A forked training that dies before its `count`-th file; returns its exit status."""

    def work():
        DieAtFile(recipe.output, count)
        train(recipe, progress=False)

    return wait(fork(work))


@pytest.mark.slow
def test_killed_at_every_few_file_operations(recipe, undisturbed, tmp_path):
    """A fresh run each time, killed a little later than the one before, and resumed once."""
    count, step, one = 1, 23, dataclasses.replace(recipe, output=str(tmp_path / "run"))
    while (status := die_in_training(one, count)) == -signal.SIGKILL:
        if not (Path(one.output) / "model.safetensors").exists():
            assert die_in_training(one, -1) == 0
        (Path(one.output) / ".lock").unlink(missing_ok=True)  # to remove it may be all that is left to do
        check_same_end(Path(one.output), undisturbed)
        shutil.rmtree(one.output)
        count += step
    assert status == 0 and count > 10 * step


@pytest.mark.slow
def test_a_new_run_over_a_finished_one_may_die_too(recipe, undisturbed, tmp_path):
    """With `overwrite`, and another recipe: the end is that of the new one, whenever the old one was half removed."""
    other = dataclasses.replace(recipe, max_steps=4, seed=5, output=str(tmp_path / "run"))
    assert train(other, progress=False).steps == 4
    recipe = dataclasses.replace(recipe, output=str(tmp_path / "run"), overwrite=True)
    for count in range(2, 92, 6):
        assert die_in_training(recipe, count) == -signal.SIGKILL
    assert die_in_training(recipe, -1) == 0
    check_same_end(tmp_path / "run", undisturbed)


def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_later(recipe, undisturbed, tmp_path):
    """Files may grow to so many bytes, and the system refuses the rest: weights fail, then the optimizer's state."""
    words = options(recipe, tmp_path / "run")
    checkpoint = undisturbed / "checkpoints" / f"checkpoint-{STEPS}"
    sizes = [(checkpoint / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")]
    assert sizes[0] < sizes[1]
    assert run_in_child([*words, "--max-steps", "4"], tmp_path, _leave_before_the_end)[0] == 130
    for limit, name in ((sizes[0] - 1000, "model"), (sizes[1] - 1000, "optimizer")):
        status, shown = run_in_child(words, tmp_path, lambda limit=limit: limit_files(limit))
        said = [line for line in shown.splitlines() if line.startswith("error: ")]
        assert status == 1 and len(said) == 1, (name, shown)
        assert "checkpoint of step 6 could not be written" in said[0] and "free some space" in said[0]
        assert said[0].endswith("then the same command continues from step 4")
        assert "Traceback" not in shown
        assert [one.step for one in read_checkpoints(tmp_path / "run" / "checkpoints")] == [2, 4]
        assert not list((tmp_path / "run").rglob(".writing*"))
    assert run_in_child(words, tmp_path)[0] == 0
    check_same_end(tmp_path / "run", undisturbed)


def _leave_before_the_end() -> None:
    training.select_weights = Mock(side_effect=KeyboardInterrupt)


def test_another_tokenizer_or_other_data_is_refused_by_content(recipe, undisturbed, text, tmp_path):
    shutil.copytree(text, tmp_path / "text")
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(undisturbed / "checkpoints" / "tokenizer", tokenizer)
    places = {"data_dir": str(tmp_path / "text"), "tokenizer": str(tokenizer), "output": str(tmp_path / "run")}
    one = dataclasses.replace(recipe, **places)
    kill_before_selection(one)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*") if path.is_file())

    def refused(said):
        assert said in error_of(train, one, progress=False)
        after = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*") if path.is_file())
        assert after == before

    for name, said in (("train.en", "the training data changed"), ("validation.de", "the validation data changed")):
        path = tmp_path / "text" / name
        original = path.read_text()
        lines = original.splitlines()
        lines[7], lines[8] = lines[8], lines[7]
        path.write_text("\n".join(lines) + "\n")
        refused(said)
        path.write_text(original)  # the same content at another time
    made = json.loads((tokenizer / "tokenizer.json").read_text())
    merges = made["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    (tokenizer / "tokenizer.json").write_text(json.dumps(made))
    refused("the tokenizer")
    shutil.rmtree(tokenizer)
    shutil.copytree(undisturbed / "checkpoints" / "tokenizer", tokenizer)
    assert train(one, progress=False).steps == STEPS


def start(recipe, folder, *more) -> subprocess.Popen:
    words = [sys.executable, "-m", "vaswani_transformer", *options(recipe, folder), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_real_command_leaves_with_a_checkpoint_on_sigterm(recipe, tmp_path, workers):
    """Processes that make batches get the signal too, as from a cluster; they go when the trainer does."""
    recipe = dataclasses.replace(recipe, max_steps=100, evaluate_every=50, log_every=7, data_workers=workers)
    train(dataclasses.replace(recipe, output=str(tmp_path / "undisturbed")), progress=False)
    folder = tmp_path / "run"
    process = start(recipe, folder)
    wait_for(lambda: (folder / "training_log.jsonl").is_file() and len(entries(folder)) > 0, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= workers
    for pid in (*map(int, children), process.pid):
        os.kill(pid, signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM and "run the same command again" in out
    [checkpoint] = read_checkpoints(folder / "checkpoints")
    assert checkpoint.by_signal and checkpoint.step not in (50, 100)
    out = start(recipe, folder).communicate()[0]
    assert f"resuming from step {checkpoint.step}" in out
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "undisturbed/model.safetensors").read_bytes()
    assert entries(folder) == entries(tmp_path / "undisturbed")
