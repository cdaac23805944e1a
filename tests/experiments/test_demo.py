"""The demo from end to end: minutes long, so only with `make slow`."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_demo_learns_unseen_combinations_and_draws(tmp_path):
    folder = tmp_path / "demo_output"
    command = [sys.executable, "-m", "vaswani_transformer", "demo"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"unseen test sentences: BLEU ([0-9.]+)", done.stdout)[1]) >= 90
    for picture in (folder / "attention.png", folder / "model" / "learning_curve.png"):
        assert picture.read_bytes()[:4] == b"\x89PNG"
    log = [json.loads(line) for line in (folder / "model" / "training_log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 1100
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {"heute", "Vögel", "Garten"} & set(re.findall(r"\w+", done.stdout)), done.stdout
