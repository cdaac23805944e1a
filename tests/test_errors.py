"""The boundary of errors: what a library raises over a user's file becomes one line that names the file."""

import errno
import json

import pytest
from conftest import error_of

from vaswani_transformer import VaswaniConfig
from vaswani_transformer.errors import UserError, one_line, reading


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


def test_a_configuration_says_which_rule_it_breaks():
    with pytest.raises(Exception) as caught:
        VaswaniConfig(dropout=2.0)
    assert "dropout" in one_line(caught.value) and "\n" not in one_line(caught.value)
