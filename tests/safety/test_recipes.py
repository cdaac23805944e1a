"""Recipes: nothing that YAML turns into something else reaches a training; each mistake is one line, at once."""

import os
import re
import sys

import pytest
from children import fork, wait

from vaswani_transformer.cli.main import main
from vaswani_transformer.errors import UserError
from vaswani_transformer.hub.card_facts import read_run
from vaswani_transformer.recipes.recipe import Recipe, convert, load_recipe

ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))


def refused(path, *words) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(str(path))
    message = str(caught.value)
    assert len(message) < 600 and "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nmax_steps: 5\nseed: 2\n", ["line 3", "'seed'", "line 1"]),
        ("seed: 1\nmax_steps: 010\n", ["line 2", "octal"]),
        ("max_steps: 1:30\n", ["line 1", "sexagesimal"]),
        (ALIASES, ["alias"]),
        ("train_source: " + "[" * 60, ["nested"]),
        ("train_source: " + "[" * 100_000, ["nested"]),
        ("seed: 1\nmax_steps: " + "9" * 5000, ["line 2"]),
        ("source_column: no\n", ["source_column", "quotes"]),
        ("target_column: on\n", ["target_column", "quotes"]),
        ("data_config: 2014-01-01\n", ["data_config", "quotes"]),
        ("train_split: 2014.10\n", ["train_split", "quotes"]),
        ("data_config: 1_000\n", ["data_config", "quotes"]),
        ("max_steps: 1e30\n", ["max_steps", "whole number"]),
        ("max_steps: 1.0e+30\n", ["max_steps", "whole number"]),
        ("train_source: \"a\\0b\"\n", ["train_source", "control characters"]),
        ("output: \"a\\tb\\e[2J\"\n", ["output", "control characters"]),
        ("output: \"\\udc80\"\n", ["surrogate"]),
        (f"preset: {'x' * 10_000}\n", ["preset"]),
        (f"{'x' * 1000}: 1\n", ["no recipe field"]),
        (" " * (1 << 20), ["bytes"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_yaml_turns_into_something_else(tmp_path, text, words):
    (tmp_path / "mine.yaml").write_text(text)
    refused(tmp_path / "mine.yaml", *words)


def test_a_recipe_in_a_model_folder_that_is_pushed(tmp_path):
    (tmp_path / "recipe.yaml").write_text(ALIASES)
    assert read_run(tmp_path) == ({}, [])


def test_the_code_of_norwegian_in_quotes_is_text(tmp_path):
    (tmp_path / "mine.yaml").write_text("source_column: 'no'\ntarget_column: \"on\"\ntrain_split: '2014.10'\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    assert (recipe.source_column, recipe.target_column, recipe.train_split) == ("no", "on", "2014.10")


@pytest.mark.parametrize("suffix", ["", ".yaml"])
def test_what_is_no_file(tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    os.mkfifo(path)
    refused(path, "not a regular file")
    path.unlink()
    path.mkdir()
    refused(path, "not a regular file")
    path.rmdir()
    with path.open("wb") as file:
        file.truncate(1 << 40)  # bytes, none of them on the disk
    refused(path, "more than")
    path.unlink()
    path.symlink_to(path)
    refused(path, "there is no recipe" if not suffix else "cannot be read")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX")
def test_a_recipe_that_may_not_be_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 1\n")
    path.chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    if os.geteuid() != 0:
        refused(path, "check its permissions")
        return

    def as_nobody():
        os.setuid(65534)
        refused(path, "cannot be read", "check its permissions")

    assert wait(fork(as_nobody)) == 0


@pytest.mark.parametrize("name", ["seed", "max_steps", "dropout"])
def test_numbers_of_any_length_on_the_command_line(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "demo", f"--{name.replace('_', '-')}", "1" + "0" * 5000]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and len(error) < 300 and name in error
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("value", [2**63, -(2**63), "1" * 400, 1e300])
def test_whole_numbers_fit_64_bits(value):
    with pytest.raises(UserError, match="whole number"):
        convert("max_steps", value)


def test_names_of_files_that_are_not_utf8_are_refused_before_anything_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"caf\xe9") if sys.platform != "darwin" else "caf\udce9"
    assert main(["train", "demo", "--output", name]) == 2
    assert re.fullmatch(r"error: output is 'caf\\udce9': .*\n", capsys.readouterr().err)
    assert not any(tmp_path.iterdir())


def test_all_defaults_pass():
    for name, value in vars(Recipe()).items():
        if value is not None:
            assert convert(name, value) == value
