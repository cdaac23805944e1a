"""The strict readers agree with json and PyYAML on what is unmistakable, and refuse the rest in one line."""

import json
import math
import os

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vaswani_transformer import UserError
from vaswani_transformer.json_and_yaml import parse_json, parse_yaml, read_json, read_yaml

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | FLOATS | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=20
)


@given(VALUES)
def test_what_others_write_is_read(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False, indent=1)) == value


@given(VALUES)
def test_what_pyyaml_writes_is_read(value):
    text = yaml.safe_dump(value, allow_unicode=True)
    assert parse_yaml(text) == yaml.safe_load(text)


@given(st.text(max_size=30) | st.text('{}[]",:0123456789eE-+truefalsnN\\d \n', max_size=30))
def test_any_other_text_is_a_value_error(text):
    for parse, reference in ((parse_json, json.loads), (parse_yaml, yaml.safe_load)):
        try:
            value = parse(text)
        except ValueError:
            continue
        expected = reference(text)
        assert value == expected or value != value


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": {"b": 1}, "b": {"a": 1, "a": 1}}', '[{"a": 1, "a": 2}]'])
def test_a_repeated_json_key_is_named(text):
    with pytest.raises(ValueError, match=r"^the key 'a' is there twice$"):
        parse_json(text)


@pytest.mark.parametrize(
    "text", ["NaN", "[-Infinity]", "1e400", "[" * 10**6, "[" * 51 + "]" * 51, '"\\uD800"', "9" * 5000]
)
def test_json_that_no_program_can_use_is_refused(text):
    with pytest.raises(ValueError) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 300


@given(st.lists(st.sampled_from(["\\ud83d", "\\uDE00", "\\uD8ff", "\\\\", "\\u0041", "uDE00", "\\n", "x"]), max_size=6))
def test_exactly_halves_of_surrogate_pairs_are_refused(parts):
    text = f'{{"a": ["{"".join(parts)}"]}}'
    expected = json.loads(text)
    try:
        json.dumps(expected, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(ValueError, match="surrogate"):
            parse_json(text)
    else:
        assert parse_json(text) == expected


def test_constants_of_the_trainer_are_read_where_they_are_expected():
    assert math.isnan(parse_json('{"loss": NaN}', finite=False)["loss"])


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "line 2: *a0 is an alias"),
        ("a: &a [*a]", "alias"),
        ("a: 1\nb: 2\na: 3", "line 3: 'a' was given before, on line 1"),
        ("a: {b: 1,\n b: 2}", "line 2: 'b' was given before"),
        ("seed: 010", "line 1: 010 is an octal number"),
        ("x: 1\nseed: -1:30", "line 2: -1:30 is a sexagesimal number"),
        ("seed: 1:30.5", "sexagesimal"),
        ("seed: " + "9" * 5000, "line 1"),
        ("day: 2026-13-45", "line 1"),
        ("[" * 10**5, "nested deeper"),
        ("a: !!python/object/apply:os.system [ls]", "line 1"),
        ("a: !!int []", "tag"),
        ("a: !!bool x", "tag"),
        ("a: !!timestamp x", "tag"),
        ('a: "\\ud800"', "surrogate"),
        ('a: "\\U0000D800"', "surrogate"),
        ("a: 1\n---\nb: 2", "line 2"),
    ],
    ids=lambda value: value[:20],
)
def test_yaml_that_turns_into_something_else_is_refused(text, words):
    with pytest.raises(ValueError) as caught:
        parse_yaml(text)
    assert words in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, read):
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        read(path, "write it again")
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"file .*not a regular file.*: write it again$"):
        read(path, "write it again")
    path.unlink()
    path.write_bytes(b"{\n" + b" " * (1 << 25))
    with pytest.raises(UserError, match="more than"):
        read(path, "write it again")
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match="not UTF-8 text, byte 7"):
        read(path, "write it again")
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="not a regular file"):
        read(path, "write it again")
