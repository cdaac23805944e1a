"""The Python examples of README and docs, run as they stand there."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT, tiny_model

from vaswani_transformer import train_tokenizer

PAGES = ["README.md", "docs/usage.md"]
EXAMPLES = [
    pytest.param(code, id=f"{page} {number}")
    for page in PAGES
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S), 1
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the examples run: a model lies where the demo and the commands of the pages leave theirs."""
    folder = tmp_path_factory.mktemp("examples")
    tokenizer = train_tokenizer(["Today my father sees three small birds in the garden."] * 3, vocab_size=300)
    for name in ("demo_output/model", "runs/mine"):
        tiny_model(seed=1, vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs(code, folder):
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
