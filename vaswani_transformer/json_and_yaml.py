"""Strict readers of JSON and YAML: in files that people edit and strangers send, nothing is guessed.

Both formats let a key occur twice (the last one wins) and name numbers that no program can use. YAML also has aliases,
by which a kilobyte grows to gigabytes, octal numbers (`010`) and sexagesimal ones (`1:30`).
"""

import json
import math
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

import yaml

from .errors import reading

MOST_BYTES = 1 << 24  # of a file: the largest that we write, the manifest of a billion pairs, has a quarter of it
MOST_YAML = 1 << 18  # which PyYAML reads in two seconds


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file in UTF-8; `UserError` for anything else, or for more than `most_bytes`."""
    path = Path(path) if isinstance(path, str) else path  # or a URL's
    with reading(path):
        if isinstance(path, Path) and not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is not a regular file")  # reading a pipe could block
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ValueError(f"it has more than {most_bytes:,} bytes")
        return content.decode("utf-8")


def read_json(path: str | Path, *, most_bytes: int = MOST_BYTES, finite: bool = True) -> dict[str, Any]:
    """Return the object in a JSON file; arguments of `read_text` and `parse_json`, errors of the former."""
    with reading(path):
        value = parse_json(read_text(path, most_bytes), finite)
        if not isinstance(value, dict):
            raise ValueError("it must hold one JSON object")
        return value


def parse_json(text: str, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    With `finite`, `NaN`, `Infinity` and numbers beyond floats are refused, which transformers' trainer state may have.
    `ValueError` for text that is not JSON and a key that occurs twice in an object, `RecursionError` for deep nesting.
    """
    hooks = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
    return json.loads(text, object_pairs_hook=_unique_keys, **hooks)


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

    `YAMLError` names the line, for text that is not YAML, a key that occurs twice, an alias (`*name`), and a number in
    octal or sexagesimal notation. Nonsense such as `!!int []` raises errors of other kinds.
    """
    return yaml.load(text, _StrictLoader)


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without the values that silently turn into something else."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            _refuse("it has an alias: write the values out", self.peek_event())
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in keys:
                _refuse(f"{key.value!r:.100} was given before: give it once", key)
            keys.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _refuse(problem: str, node: yaml.Node | yaml.Event) -> NoReturn:
    raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)


def _decimal(loader: _StrictLoader, node: yaml.ScalarNode) -> int | float:
    if re.match(r"[-+]?0_*\d|.*:", node.value):
        _refuse(f"{node.value} is octal or sexagesimal in YAML: write it in decimal, or as text in quotes", node)
    return (loader.construct_yaml_int if node.tag.endswith(":int") else loader.construct_yaml_float)(node)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _decimal)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _decimal)


def read_yaml(path: str | Path) -> Any:
    """Return the value in a YAML file of at most `MOST_YAML` bytes; errors as in `read_text`."""
    with reading(path):
        return parse_yaml(read_text(path, MOST_YAML))
