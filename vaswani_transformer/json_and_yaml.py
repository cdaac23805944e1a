"""Strict readers of JSON and YAML: in files that people edit and strangers send, nothing is guessed.

Both formats let a key occur twice (the last one wins), nest without end, and name numbers that no program can use. YAML
also has aliases, by which a kilobyte grows to gigabytes, octal numbers (`010`) and sexagesimal ones (`1:30`).
"""

import contextlib
import json
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError, one_line, reading

MOST_BYTES = 1 << 24  # of a file: the largest that we write, the manifest of a billion pairs, has a quarter of it
MOST_YAML = 1 << 18  # which PyYAML reads in two seconds
DEEPEST = 50  # levels of nesting


@contextlib.contextmanager
def _checked(path: str | Path, problem: str, advice: str) -> Iterator[None]:
    """Report a mistake in a file as `errors.reading` does, with the fix; a missing file is left to the caller."""
    try:
        with reading(path):
            yield
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        reason = str(error).removeprefix(f"{path}: ")
        raise UserError(f"{path!s:.300} {problem} ({reason}): {advice}") from error


def read_text(path: str | Path, advice: str, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file.

    Raises:
        UserError: for anything but a file of at most `most_bytes` in UTF-8; it names the file and ends with `advice`:
            what to do about it.
        FileNotFoundError: if there is none.
    """
    path = Path(path) if isinstance(path, str) else path  # or a URL's
    with _checked(path, "cannot be read", advice):
        if not isinstance(path, Path):
            content = path.fs.cat_file(path.path, end=most_bytes + 1)
        else:
            if not stat.S_ISREG(path.stat().st_mode):
                raise UserError("it is not a regular file")  # reading a pipe could block
            with path.open("rb") as file:
                content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise UserError(f"it has more than {most_bytes:,} bytes")
        return content.decode("utf-8")


def read_json(
    path: str | Path, advice: str, *, kind: type = dict, most_bytes: int = MOST_BYTES, finite: bool = True
) -> Any:
    """Return the object (a `dict`) or the list in a JSON file; arguments and errors of `read_text` and `parse_json`."""
    text = read_text(path, advice, most_bytes)
    with _checked(path, "is damaged", advice):
        value = parse_json(text, finite)
        if not isinstance(value, kind):
            raise UserError(f"it must hold one JSON {'object' if kind is dict else 'list'}")
        return value


def parse_json(text: str, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    With `finite`, `NaN`, `Infinity` and numbers beyond floats are refused, which are not JSON; transformers writes them
    into the state of its trainer.

    Raises:
        ValueError: for text that is not JSON, a key that occurs twice in an object, and nesting deeper than `DEEPEST`.
    """
    hooks = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, **hooks)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    containers = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        items = (item for each in containers for item in (each.values() if type(each) is dict else each))
        containers = [item for item in items if type(item) is dict or type(item) is list]
    if containers:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object in JSON as a dictionary, for `object_pairs_hook` of `json`; `ValueError` for a repeated key."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r:.100} is there twice")
        values[key] = value
    return values


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is not a number that JSON has")
    return value


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text of plain types; dates and other tags of YAML that need no code are understood.

    Raises:
        ValueError: naming the line, for text that is not YAML, a key that occurs twice, an alias (`*name`), a number
            in octal or sexagesimal notation, and nesting deeper than `DEEPEST`.
    """
    try:
        return yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, AttributeError, LookupError, TypeError) as error:  # the latter of `!!int []` and the like
        raise ValueError(one_line(error)) from None


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without the values that silently turn into something else."""

    depth = 0

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or self.depth > DEEPEST:
            problem = f"it is nested deeper than {DEEPEST} levels" if self.depth > DEEPEST else "it has an alias"
            raise yaml.MarkedYAMLError(None, None, f"{problem}: write the values out", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node, deep=False):
        keys = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in keys:
                problem = f"{key.value!r:.100} was given before: give it once"
                raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
            keys.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def construct_number(self, node):
        """Return the value of an int or float in decimal notation."""
        digits, is_int = node.value.lstrip("+-").replace("_", ""), node.tag.endswith(":int")
        if ":" in digits or (is_int and digits[:1] == "0" and digits[1:2].isdigit()):
            kind = "a sexagesimal" if ":" in digits else "an octal"
            problem = f"{node.value} is {kind} number in YAML: write it as a decimal one, or as text in quotes"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
        return (self.construct_yaml_int if is_int else self.construct_yaml_float)(node)


for _tag in ("int", "float"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _StrictLoader.construct_number)


def read_yaml(path: str | Path, advice: str) -> Any:
    """Return the value in a YAML file of at most `MOST_YAML` bytes; errors as of `read_json` and `parse_yaml`."""
    text = read_text(path, advice, MOST_YAML)
    with _checked(path, "is not valid YAML", advice):
        return parse_yaml(text)
