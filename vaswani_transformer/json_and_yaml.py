"""Strict readers of JSON and YAML: of files that people edit and strangers send, nothing is guessed.

Both formats let a key occur twice (the last one wins), nest without end, and name numbers that no program can use. YAML
moreover has aliases, by which a kilobyte grows to gigabytes, octal numbers (`010`) and sexagesimal ones (`1:30`).
"""

import json
import math
import re
import stat
from collections.abc import Iterable
from json.decoder import JSONDecodeError
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError, one_line

MOST_BYTES = 1 << 24  # of a file: the largest that we write, the manifest of a billion pairs, has a quarter of it
MOST_YAML = 1 << 18  # which PyYAML reads in two seconds
DEEPEST = 50  # levels of nesting


def read_text(path: str | Path, advice: str, most_bytes: int = MOST_BYTES) -> str:
    """The text of a regular file.

    Raises:
        UserError: for anything but a file, one that may not be read, more than `most_bytes`, or bytes that are not
            UTF-8; it names the file and is followed by `advice`: what to do about it.
        FileNotFoundError: if there is none.
    """
    path = Path(path) if isinstance(path, str) else path  # or a URL's
    try:
        if not isinstance(path, Path):
            content = path.fs.cat_file(path.path, end=most_bytes + 1)
        elif not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is not a regular file")  # a pipe could keep us waiting for ever
        else:
            with path.open("rb") as file:
                content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ValueError(f"it has more than {most_bytes:,} bytes")
        return content.decode("utf-8")
    except FileNotFoundError:
        if path.is_symlink():
            raise UserError(f"{path} cannot be read (it is a link to nothing): {advice}") from None
        raise
    except OSError as error:
        fix = "check its permissions" if isinstance(error, PermissionError) else advice
        raise UserError(f"{path} cannot be read ({error.strerror or error}): {fix}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read (it is not UTF-8 text, byte {error.start}): {advice}") from None
    except ValueError as error:
        raise UserError(f"{path!s:.300} cannot be read ({error}): {advice}") from None


def read_json(
    path: str | Path, advice: str, *, kind: type = dict, most_bytes: int = MOST_BYTES, finite: bool = True
) -> Any:
    """The object (a `dict`), or the list, in a JSON file; the arguments are those of `read_text` and `parse_json`.

    Raises:
        UserError: naming file, line and mistake, followed by `advice`: what to do about a damaged file.
        FileNotFoundError: if there is none.
    """
    text = read_text(path, advice, most_bytes)
    try:
        value = parse_json(text, finite)
        if not isinstance(value, kind):
            raise ValueError(f"it must hold one JSON {'object' if kind is dict else 'list'}")
        return value
    except ValueError as error:
        raise UserError(f"{path} is damaged ({one_line(error)}): {advice}") from error


def parse_json(text: str, finite: bool = True) -> Any:
    """The value of a JSON text.

    Args:
        text: one JSON value.
        finite: refuse `NaN`, `Infinity` and numbers beyond floats, which are no JSON; transformers writes them
            into the state of its trainer.

    Raises:
        ValueError: for what is no JSON, a key that occurs twice in an object, nesting deeper than `DEEPEST`, and
            halves of surrogate pairs, which no file in UTF-8 can hold.
    """
    hooks = {"parse_constant": _no_constant, "parse_float": _finite_float} if finite else {}
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, **hooks)
    except JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    _check_nesting(value)
    if ("\\ud" in text or "\\uD" in text) and _PERHAPS_HALF.search(text):
        _check_surrogates(value)
    return value


# What an escape of half a surrogate pair looks like, the only way that it comes into UTF-8 text; where a backslash is
# escaped itself, this may take something else for it, but never overlooks one.
_PERHAPS_HALF = re.compile(
    r"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])|\\\\u[dD]", re.S
)


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in JSON as a dictionary, for `object_pairs_hook` of `json`; `ValueError` for a key twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        key = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {key!r} is there twice")
    return values


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


def _check_nesting(value: Any) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def parse_yaml(text: str) -> Any:
    """The value of a YAML text of plain types; dates and other tags of YAML that need no code are understood.

    Raises:
        ValueError: naming the line, for what is no YAML, a key that occurs twice, an alias (`*name`), a number in
            octal or sexagesimal notation, and nesting deeper than `DEEPEST`, and halves of
            surrogate pairs.
    """
    try:
        value = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{one_line(getattr(error, 'problem', None) or error)}") from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # PyYAML's own, of `!!int []` and the like
        raise ValueError(f"a value does not fit its tag ({one_line(error)})") from None
    _check_surrogates(value)
    return value


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without what silently turns into something else."""

    depth = 0

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _mistake(f"*{event.anchor} is an alias, which is not allowed here: write the value out", event)
        if self.depth > DEEPEST:
            raise _mistake(f"it is nested deeper than {DEEPEST} levels", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node, deep=False):
        first_lines = {}
        for key_node, _ in node.value:
            key = (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key in first_lines:
                first = first_lines[key]
                raise _mistake(f"{key_node.value!r} was given before, on line {first}: give it once", key_node)
            if key is not None:
                first_lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_number(self, node):
        """An int or float in decimal notation."""
        digits = node.value.lstrip("+-").replace("_", "")
        if ":" in digits or (node.tag.endswith(":int") and digits[:1] == "0" and digits[1:2].isdigit()):
            kind = "a sexagesimal number" if ":" in digits else "an octal number"
            raise _mistake(f"{node.value} is {kind} in YAML: write it as a decimal one, or as text in quotes", node)
        construct = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        return _constructed(construct, node)

    def construct_time(self, node):
        """A date or a time."""
        return _constructed(self.construct_yaml_timestamp, node)


def _constructed(construct, node) -> Any:
    try:
        return construct(node)
    except ValueError as error:  # a number of 5,000 digits, the 45th of a month
        raise _mistake(f"{node.value[:20]} is not a value that can be used: {error}", node) from error


def _mistake(problem: str, node: yaml.Node | yaml.Event) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


for _tag in ("int", "float"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _StrictLoader.construct_number)
_StrictLoader.add_constructor("tag:yaml.org,2002:timestamp", _StrictLoader.construct_time)


def read_yaml(path: str | Path, advice: str) -> Any:
    """The value in a YAML file of at most `MOST_YAML` bytes.

    Raises:
        UserError: naming file, line and mistake, followed by `advice`: what to do about it.
        FileNotFoundError: if there is none.
    """
    text = read_text(path, advice, MOST_YAML)
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML ({one_line(error)}): {advice}") from error


def read_vocabulary(path: str | Path, advice: str) -> list[tuple[str, str]]:
    """The entries of a YAML (or JSON) file of at most `MOST_BYTES` bytes that holds one flat mapping, all as texts.

    In their order in the file; a key may be there twice. Made for vocabularies, in which `null`, `1.5` and `yes` are
    words, and which have a hundred thousand entries: no value is built from them but the two texts.

    Raises:
        UserError: naming file and mistake, followed by `advice`: what to do about it.
        FileNotFoundError: if there is none.
    """
    text = read_text(path, advice)
    try:
        scalars = _scalars(yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        return list(zip(scalars[::2], scalars[1::2], strict=True))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = one_line(getattr(error, "problem", None) or error)
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise UserError(f"{path} is no vocabulary in YAML ({where}{reason}): {advice}") from error


def _scalars(events: Iterable[yaml.Event]) -> list[str]:
    """Keys and values of the one mapping in a document, in turn."""
    start = (yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.MappingStartEvent)
    end = (yaml.MappingEndEvent, yaml.DocumentEndEvent, yaml.StreamEndEvent)
    scalars, others = [], []
    for event in events:
        if type(event) is yaml.ScalarEvent:
            scalars.append(event.value)
        else:
            others.append(type(event))
            if len(others) > len(start + end):
                break
    if tuple(others) != start + end:
        raise ValueError("it must hold one mapping of texts to numbers and nothing else")
    return scalars
