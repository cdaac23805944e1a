"""Preparations of a small text, for the tests of making prepared pairs and of reading them."""

import dataclasses
import hashlib
import multiprocessing
from pathlib import Path

import pytest
from conftest import TINY_SIZES

from vaswani_transformer import train_tokenizer
from vaswani_transformer.data import prepare as preparation
from vaswani_transformer.data.prepare import prepare
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.output_folder import OWN
from vaswani_transformer.recipes.recipe import Recipe

CHUNK = 40  # pairs of a shard


@pytest.fixture
def forked_workers(monkeypatch) -> None:
    """Workers as of a real run, but that they need not import anything."""
    forks = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # its threads stay behind


def new_recipe(text: Path, tokenizer: Path) -> Recipe:
    """A recipe of these shards, which holds out 15 pairs."""
    return Recipe(
        data_dir=str(text), train_source="part.*.en", train_target="part.*.de", validation_size=15, seed=3,
        tokenizer=str(tokenizer), max_length=60, tokens_per_batch=600, tokens_per_device=600, **TINY_SIZES,
    )  # fmt: skip


def with_validation(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, validation_source="validation.en", validation_target="validation.de")


def make(recipe: Recipe, folder: Path, **options) -> dict:
    """`prepare` in this process, silently; returns the manifest."""
    return prepare(recipe, folder, **{"workers": 1, "progress": False, **options})


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a prepared folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in OWN]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def noted_writes(monkeypatch, stop_at: int | None = None) -> list[str]:
    """Names of the shards that are made from now on; before one more than `stop_at`, Ctrl-C."""
    written, write = [], preparation._ShardWriter._write

    def noted(self, path, part, first):
        if len(written) == stop_at:
            raise KeyboardInterrupt
        written.append(path.name)
        write(self, path, part, first)

    monkeypatch.setattr(preparation._ShardWriter, "_write", noted)
    return written


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "CHUNK", CHUNK)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The folder of three shards of 70 pairs, some of which every filter drops, and 20 pairs to validate on."""
    folder = tmp_path_factory.mktemp("text")
    write_corpus(generate_corpus(210, 20, 20), folder)
    for side in ("en", "de"):
        lines = (folder / f"train.{side}").read_text(encoding="utf-8").splitlines()[:210]
        lines[3] = "" if side == "en" else lines[3]
        lines[50] = "a b c d " * 40
        lines[90] = "one two three four five six seven eight nine ten" if side == "en" else "x"
        lines[200] = " \t"
        for number in range(3):
            part = "\n".join(lines[70 * number : 70 * number + 70]) + "\n"
            (folder / f"part.{number}.{side}").write_text(part, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer_folder(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    lines = [line for path in sorted(text.glob("part.*")) for line in path.read_text(encoding="utf-8").splitlines()]
    train_tokenizer(lines, vocab_size=400).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(text, tokenizer_folder):
    return new_recipe(text, tokenizer_folder)
