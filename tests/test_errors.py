"""The boundary of errors: what a library raises over a user's file becomes one line that names the file."""

import errno
import json

import datasets
import pytest
from conftest import error_of
from pair_files import write

from vaswani_transformer.cli.main import main
from vaswani_transformer.errors import UserError, reading

LARGE = datasets.Value("large_string")


def read(path, body):
    with reading(path):
        body()


def fail(error):
    raise error


def test_an_error_of_a_library_names_the_file_on_one_line(tmp_path):
    assert error_of(read, "a.json", lambda: json.loads("{")).startswith("a.json: Expecting property name")
    assert error_of(read, "a.txt", lambda: fail(ValueError("two\nlines"))) == "a.txt: two lines"
    assert error_of(read, "a.txt", lambda: fail(ValueError())) == "a.txt: ValueError"
    assert error_of(read, "a.txt", (tmp_path / "a.txt").read_text) == "a.txt: No such file or directory"
    assert error_of(read, tmp_path, tmp_path.read_bytes) == f"{tmp_path}: Is a directory"


def test_a_panic_of_rust_is_an_error_of_the_file():
    panic = type("PanicException", (BaseException,), {})
    assert error_of(read, "tokenizer.json", lambda: fail(panic("gave up"))) == "tokenizer.json: gave up"


@pytest.mark.parametrize(
    "error", [UserError("mine"), KeyboardInterrupt(), MemoryError(), OSError(errno.ENOSPC, "full"), SystemExit(3)]
)
def test_errors_that_are_not_about_the_file_pass(error):
    with pytest.raises(type(error)) as caught:
        read("a.txt", lambda: fail(error))
    assert caught.value is error


@pytest.mark.parametrize("kind", ["csv", "parquet", "saved"])
@pytest.mark.parametrize("place", ["file", "file/deeper", "/proc/none"])
def test_a_cache_that_cannot_be_written_is_not_the_texts_fault(tmp_path, monkeypatch, capsys, kind, place):
    cache, text = str(write(tmp_path / "file", "").parent / place), tmp_path / f"text.{kind}"
    pairs = datasets.Dataset.from_dict({"source": ["a dog"] * 3, "target": ["Hund"] * 3}).cast_column("source", LARGE)
    {"csv": pairs.to_csv, "parquet": pairs.to_parquet, "saved": pairs.save_to_disk}[kind](text)
    monkeypatch.setenv("HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    recipe = write(tmp_path / "recipe.yaml", f"train_data: {text}\nvalidation_size: 1\n")
    assert main(["prepare", str(recipe), "--output", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert f"({cache}" in message and "by HF_HOME, HF_DATASETS_CACHE" in message and str(text) not in message
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # a file there that the user has named is the user's
    assert error_of(read, tmp_path, (tmp_path / "a").read_text) == f"{tmp_path}: No such file or directory"
