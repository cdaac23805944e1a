"""A small model's folder, as `vaswani train` leaves it, for tests to damage; modules take the fixtures by name."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import tiny_model

from vaswani_transformer import train_tokenizer

TEXTS = ["a small sentence", "another small sentence of words", "words and more words"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A complete model folder; leave it as it is."""
    tokenizer, folder = train_tokenizer(TEXTS, vocab_size=270), tmp_path_factory.mktemp("saved")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(saved, tmp_path / "model")


def change(folder: Path, file: str = "tokenizer.json", **entries) -> None:
    """Give entries of a JSON file other values; a file that is not there gets these alone."""
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | entries))
