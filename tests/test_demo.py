"""The demo from end to end: minutes long, so only with `make test-slow`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_demo_learns_unseen_combinations_and_leaves_what_it_names(tmp_path):
    folder = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "vaswani_transformer", "demo", "--output", str(folder)],
        cwd=ROOT, text=True, capture_output=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    bleu = float(re.search(r"unseen test sentences: BLEU ([0-9.]+)", done.stdout)[1])
    assert bleu >= 90
    for name in re.findall(rf"^     ({re.escape(str(folder))}\S*)   ", done.stdout, flags=re.M):
        assert Path(name).exists(), name
    for picture in (folder / "attention.png", folder / "model" / "learning_curve.png"):
        assert picture.read_bytes()[:4] == b"\x89PNG"
    log = [json.loads(line) for line in (folder / "model" / "training_log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 1100
