"""JSON, YAML and recipes: agreed with json and PyYAML where a text is unmistakable, refused in one line elsewhere."""

import json
import math
import os
import re

import pytest
import yaml
from conftest import error_of
from hypothesis import given
from hypothesis import strategies as st

from vaswani_transformer.json_and_yaml import parse_json, parse_yaml, read_json, read_yaml
from vaswani_transformer.recipes.recipe import convert, load_recipe

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | FLOATS | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=20
)


@given(VALUES)
def test_json_and_yaml_of_their_libraries_are_read(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False, indent=1)) == value
    text = yaml.safe_dump(value, allow_unicode=True)
    assert parse_yaml(text) == yaml.safe_load(text)


@given(st.text(max_size=30) | st.text('{}[]",:0123456789eE-+truefalsnN\\d \n', max_size=30))
def test_any_other_text_is_an_error(text):
    for parse, reference in ((parse_json, json.loads), (parse_yaml, yaml.safe_load)):
        try:
            value = parse(text)
        except (ValueError, yaml.YAMLError, AttributeError, LookupError, TypeError):
            continue
        assert value == reference(text) or value != value


@pytest.mark.parametrize("text", ['{"a": {"b": 1}, "b": {"a": 1, "a": 1}}', "NaN", "[-Infinity]", "1e400", "[" * 10**6])
def test_json_that_no_program_can_use_is_refused(text):
    with pytest.raises((ValueError, RecursionError)) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 300


def test_constants_of_the_trainer_are_read_where_they_are_expected():
    assert math.isnan(parse_json('{"loss": NaN}', finite=False)["loss"])


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, read):
    path = tmp_path / "file"
    assert "file: No such file" in error_of(read, path)
    os.mkfifo(path)
    assert "file: it is not a regular file" in error_of(read, path)
    path.unlink()
    for content, words in ((b"{\n" + b" " * (1 << 25), "more than"), (b'{"a": "\xff"}', "utf-8.*position 7")):
        path.write_bytes(content)
        assert re.search(words, error_of(read, path))


ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nmax_steps: 5\nseed: 2\n", ["line 3", "'seed'"]),
        ("seed: 1\nmax_steps: 010\n", ["line 2", "octal"]),
        ("seed: 1\nmax_steps: -1:30\n", ["line 2", "sexagesimal"]),
        ("seed: 1\nmax_minutes: 1:30.5\n", ["line 2", "sexagesimal"]),
        (ALIASES, ["alias"]),
        ("train_source: " + "[" * 100_000, ["recursion"]),
        ("max_steps: " + "9" * 5000, ["mine.yaml"]),
        ("a: !!python/object/apply:os.system [ls]", ["line 1"]),
        ("source_column: no\n", ["source_column", "quotes"]),
        ("train_split: 2014.10\n", ["train_split", "quotes"]),
        ("max_steps: 1e30\n", ["max_steps", "whole number"]),
        ("train_source: \"a\\0b\"\n", ["train_source", "control characters"]),
        ("output: \"\\udc80\"\n", ["output", "UTF-8"]),
        (f"{'x' * 1000}: 1\n", ["no recipe field"]),
        (" " * (1 << 20), ["bytes"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_recipe_that_yaml_turns_into_something_else_is_refused(tmp_path, text, words):
    (tmp_path / "mine.yaml").write_text(text)
    message = error_of(load_recipe, str(tmp_path / "mine.yaml"))
    assert len(message) < 800 and all(word in message for word in words), message


def test_text_in_quotes_stays_text(tmp_path):
    (tmp_path / "mine.yaml").write_text("source_column: 'no'\ntarget_column: \"on\"\ntrain_split: '2014.10'\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    assert (recipe.source_column, recipe.target_column, recipe.train_split) == ("no", "on", "2014.10")


@pytest.mark.parametrize("value", [2**63, -(2**63), "1" + "0" * 5000, 1e300])
def test_whole_numbers_fit_64_bits(value):
    assert "whole number" in error_of(convert, "max_steps", value)
