"""Training as a process of its own: a disk that fills up, Ctrl-C, and the same command once more."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
import yaml
from conftest import ROOT, TINY_RECIPE


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, text):
    settings = {"max_steps": 6, "evaluate_every": 3, "validation_bleu": 10, "average_checkpoints": 2}
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY_RECIPE | settings | {"data_dir": str(text)}))
    return path


def _run(*arguments, limit_bytes: int | None = None, **options) -> subprocess.CompletedProcess:
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        [sys.executable, "-m", "vaswani_transformer", *map(str, arguments)],
        cwd=ROOT, text=True, capture_output=True, timeout=120, preexec_fn=limit if limit_bytes else None, **options,
    )  # fmt: skip


def test_disk_that_fills_up_during_training_loses_no_checkpoint(recipe, tmp_path, cache):
    folder = tmp_path / "out"
    done = _run("train", recipe, "--output", folder, "--quiet", limit_bytes=60_000)  # the weights alone take more
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
    done = _run("train", recipe, "--output", folder, "--quiet")  # with room again, the same command goes through
    assert done.returncode == 0, done.stderr
    assert (folder / "model.safetensors").is_file()


def test_interrupted_training_writes_a_checkpoint_and_resumes(recipe, tmp_path, cache):
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "vaswani_transformer", "train", str(recipe), "--output", str(folder), "--quiet",
               "--evaluate-every", "100000"]  # fmt: skip
    process = subprocess.Popen(
        [*command, "--max-steps", "1000000"], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    log, waited = folder / "training_log.jsonl", time.monotonic()
    while not (log.is_file() and log.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() - waited < 100, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "stopped at step" in out and f"train {recipe} --output" in out and "Traceback" not in error
    [checkpoint] = (folder / "checkpoints").glob("checkpoint-*")
    step = int(checkpoint.name.rpartition("-")[2])
    assert (checkpoint / "model.safetensors").is_file() and (checkpoint / "optimizer.pt").is_file()
    done = subprocess.run(
        [*command, "--max-steps", str(step + 2)], cwd=ROOT, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"resuming from step {step:,}" in done.stderr
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps[-1] == step + 2 and steps == sorted(steps)
