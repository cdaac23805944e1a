"""A cell that several processes train: the same result, one lock, one scoring, signals passed on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import error_of
from experimenting import TINY, experiment, write_gum, write_multi30k
from safetensors.torch import load_file

from vaswani_transformer.experiments.base import Setup, run_cell
from vaswani_transformer.experiments.launch import device_seconds, read_sessions, record_session
from vaswani_transformer.experiments.table3 import Table3
from vaswani_transformer.experiments.table4 import Table4
from vaswani_transformer.training.callbacks import read_training_log
from vaswani_transformer.training.checkpoints import complete_checkpoints

# One process takes a batch in two parts, as two processes do.
CHANGES = dict(word.split("=") for word in TINY) | {"dropout": "0.0", "tokens_per_batch": "1000"}
CHANGES |= {"tokens_per_device": "500"}
CELL = "d-smoothing-0.0"


@pytest.fixture(scope="module")
def multi30k(tmp_path_factory, cache) -> Path:
    return write_multi30k(tmp_path_factory.mktemp("multi30k"))


def run(multi30k, output, processes, **changes):
    setup = Setup("laptop", output, multi30k, CHANGES | changes, processes)
    table = Table3()
    return run_cell(table, setup, next(cell for cell in table.cells(setup) if cell.name == CELL))


@pytest.mark.slow
def test_two_processes_make_the_cell_of_one(multi30k, tmp_path):
    pytest.importorskip("sacremoses")
    one, two = (run(multi30k, tmp_path / name, number) for name, number in (("one", 1), ("two", 2)))
    folders = [tmp_path / name / "table3/laptop" / CELL for name in ("one", "two")]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    for name, tensor in weights[0].items():
        assert (weights[1][name] - tensor).abs().max() < 1e-4, name
    for key in ("steps", "parameters", "sentences", "flops_counted"):
        assert one["figures"][key] == two["figures"][key], key
    assert two["figures"]["perplexity"] == pytest.approx(one["figures"]["perplexity"], rel=1e-4)
    assert one["settings"] == two["settings"]
    assert [found["figures"]["devices"] for found in (one, two)] == [1, 2]
    assert "processes" not in one["machine"] and two["machine"]["processes"] == 2
    seconds = read_training_log(folders[1] / "training_log.jsonl")[-1]["seconds"]
    assert two["figures"]["flops_by_time"] == pytest.approx(two["figures"]["sustained_tflops"] * 1e12 * 2 * seconds)
    assert two["processor_seconds"] > one["processor_seconds"] + 2.0  # importing alone takes each of them longer
    log = (folders[1] / "log.txt").read_text()
    assert log.count(f"table3 {CELL}: finished") == 1
    assert log.count("training data: 150 pairs read") == 1  # one process tells
    # A second call finds it finished, with whatever number.
    assert run(multi30k, tmp_path / "two", 3) == two


@pytest.mark.slow
def test_a_mistake_is_told_as_the_processes_tell_it(multi30k, tmp_path):
    message = error_of(run, multi30k, tmp_path, 2, max_length="50", tokens_per_batch="100", tokens_per_device="50")
    assert message.startswith("a batch of 100 source and 100 target tokens may hold as few as 2 pairs")
    folder = tmp_path / "table3/laptop" / CELL
    assert not (folder / "result.json").exists() and message in (folder / "log.txt").read_text()


def test_device_seconds_by_hand():
    assert device_seconds(100, []) == 100
    assert device_seconds(100, [(0, 8)]) == 800
    assert device_seconds(100, [(0, 8), (60, 2)]) == 60 * 8 + 40 * 2
    assert device_seconds(100, [(30, 4)]) == 30 + 70 * 4
    assert device_seconds(100, [(0, 8), (100, 2)]) == 800  # only the choice of weights was missing


def test_sessions_are_recorded_from_the_checkpoint_that_they_resume(tmp_path):
    record_session(tmp_path, 1)
    assert not list(tmp_path.iterdir())  # one process all along: nothing to record
    record_session(tmp_path, 8)
    record_session(tmp_path, 4)  # the first left no checkpoint
    assert read_sessions(tmp_path) == [(0.0, 4)]
    log = [{"step": step, "seconds": 10.0 * step} for step in (1, 2, 3)]
    (tmp_path / "training_log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    checkpoint = tmp_path / "checkpoints/checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    record_session(tmp_path, 1)
    assert read_sessions(tmp_path) == [(0.0, 4), (20.0, 1)]


def test_options_that_do_not_go_together(tmp_path, capsys):
    for words, message in (
        (["table3", "--processes", "0"], "--processes is 0: it must be from 1 to 256"),
        (["table1", "--processes", "2"], "a cell of table1 runs in one process"),
        (["table3", "--processes", "2", "--dry-run", "--device", "p100 x8"], "names 8 devices and --processes is 2"),
    ):
        status, _, errors = experiment(capsys, *words, "--output", tmp_path)
        assert status == 2 and message in errors and errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_dry_run_reckons_with_the_devices_of_a_cell(tmp_path, capsys):
    words = ["table3", "--scale", "paper", "--dry-run", "--output", tmp_path, "--only", "c-layers-4"]
    hours = []
    for options in (["--device", "a100"], ["--device", "a100", "--processes", "4"], ["--device", "a100 x4"]):
        status, output, errors = experiment(capsys, *words, *options)
        assert status == 0, errors
        hours.append(float(output.partition("FLOPs, ")[2].partition(" hours")[0]))
    assert hours[1] == hours[2] == pytest.approx(hours[0] / 4, rel=0.01)
    output = experiment(capsys, *words, "--processes", "4")[1]
    assert "hours are for p100 x4" in output


@pytest.mark.slow
def test_an_interrupted_cell_of_two_processes_goes_on(multi30k, tmp_path):
    """Through the command, which starts the cell's process, which starts the two."""
    changes = [f"{name}={value}" for name, value in CHANGES.items()]
    changes += ["max_steps=200", "evaluate_every=200", "warmup_steps=100", "log_every=5"]
    command = [sys.executable, "-m", "vaswani_transformer", "experiment", "table3", "--data-dir", str(multi30k)]
    command += ["--output", str(tmp_path), "--only", CELL, "--processes", "2", "--set", *changes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    folder = tmp_path / "table3/laptop" / CELL
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until, log = time.monotonic() + 120, folder / "training_log.jsonl"
    while not (log.is_file() and log.read_text().count("\n") > 2):
        assert process.poll() is None and time.monotonic() < until, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "run the same command again" in output, errors
    [checkpoint] = complete_checkpoints(folder / "checkpoints")
    assert not (folder / "result.json").exists()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    step = int(checkpoint.name.rpartition("-")[2])
    assert 0 < step < 200 and f"resuming from step {step}" in (folder / "log.txt").read_text()
    figures = json.loads((folder / "result.json").read_text())["figures"]
    assert figures["steps"] == 200 and figures["devices"] == 2


@pytest.mark.slow
def test_two_processes_make_the_parser_of_one(tmp_path, cache):
    data, changes = write_gum(tmp_path / "trees"), CHANGES | {"max_length": "60", "vocab_size": "700"}
    weights = []
    for processes in (1, 2):
        table, setup = Table4(), Setup("laptop", tmp_path / str(processes), data, changes, processes)
        found = run_cell(table, setup, next(cell for cell in table.cells(setup) if cell.name == "transformer"))
        assert found["figures"]["well_formed"] == 100.0 and found["machine"].get("processes", 1) == processes
        weights.append(load_file(tmp_path / str(processes) / "table4/laptop/transformer/model.safetensors"))
    for name, tensor in weights[0].items():
        assert (weights[1][name] - tensor).abs().max() < 1e-4, name
