"""Training as a process of its own: a disk that fills up, Ctrl-C, and the same command once more."""

import json
import os
import signal
import time

import pytest
import yaml
from children import limit_files, run_in_child
from conftest import TINY_RECIPE


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, text):
    settings = {"max_steps": 6, "evaluate_every": 3, "validation_bleu": 10, "average_checkpoints": 2}
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY_RECIPE | settings | {"data_dir": str(text)}))
    return path


@pytest.mark.slow
def test_disk_that_fills_up_during_training_loses_no_checkpoint(forked, recipe, tmp_path):
    command = ["train", str(recipe), "--output", str(tmp_path / "out"), "--quiet"]
    status, error = run_in_child(command, tmp_path, lambda: limit_files(60_000))  # the weights alone take more
    assert status == 1 and error.splitlines()[-1].startswith("error: "), error
    assert "Traceback" not in error
    done = forked.vaswani(*command)  # with room again, the same command finishes
    assert done.status == 0, done.err
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_interrupted_training_writes_a_checkpoint_and_resumes(forked, recipe, tmp_path):
    folder = tmp_path / "out"
    command = ["train", recipe, "--output", folder, "--quiet", "--evaluate-every", "100000", "--max-steps"]
    pid = forked.start(*command, "1000000")
    log, started = folder / "training_log.jsonl", time.monotonic()
    while not (log.is_file() and log.read_text().count("\n") > 3):
        assert time.monotonic() - started < 100
        time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    done = forked.wait()
    assert done.status == 130, done.err
    assert "stopped at step" in done.out and f"train {recipe} --output" in done.out and "Traceback" not in done.err
    [checkpoint] = (folder / "checkpoints").glob("checkpoint-*")
    step = int(checkpoint.name.rpartition("-")[2])
    assert (checkpoint / "model.safetensors").is_file() and (checkpoint / "optimizer.pt").is_file()
    done = forked.vaswani(*command, step + 2)
    assert done.status == 0, done.err
    assert f"resuming from step {step:,}" in done.err
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps[-1] == step + 2 and steps == sorted(steps)


def test_an_interrupted_command_ends_in_one_line(forked, tmp_path):
    os.mkfifo(tmp_path / "text")
    pid = forked.start("tokenizer", tmp_path / "text", "--output", tmp_path / "out")
    with (tmp_path / "text").open("w"):  # the command reads it and waits for lines
        os.kill(pid, signal.SIGINT)
        done = forked.wait()
    assert (done.status, done.out, done.err) == (130, "", "interrupted\n")
