"""Strategies for damaged files: random bytes, random values, and the valid file with something changed."""

import copy
import gzip
import json
from collections.abc import Callable, Iterator

import yaml
from hypothesis import strategies as st

STRINGS = st.one_of(
    st.text(max_size=20),
    st.sampled_from([
        "", " ", "\x1b[31mred", "a\nerror: b", "\x00", "\u202e", "../../outside", "/etc/passwd", "NaN", "1e400",
        "{{ 7*7 }}", "${HOME}", "%s%n", "x" * 10_000, "<script>", "None", "someone/kernel", "cuda:99",
    ]),
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, 10**30, -(10**12), 10**9, 1e308, -0.0, 0.5, 1e-320, float("nan"), float("inf")]),
    st.integers(),
    st.floats(),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=5,
)
DEEP = st.integers(2, 100_000).map(lambda depth: "[" * depth + "]" * depth)
#: Texts of JSON that no value stands for.
RAW = st.one_of(DEEP, st.sampled_from(["1e400", '"\\ud800"', "9" * 5000, "-", "[1,]", "{'a': 1}", "01", "tru"]))
_HOLE = "a hole for text"
LINES = [
    b"", b"\xff\xfe", b"\x00", b"\xef\xbb\xbf", b"\r", b"(" * 5000, b"a" * 100_000, b"\t" * 50, b'"', b"0-0 " * 99,
    b"(S " * 1000 + b"(N a" + b")" * 1001, b"(S" * 390 + b"(N a" + b")" * 391, b"9" * 5000 + b"-0", b"[]", b"((",
    "\u0661-\u0662 \u00b2-\u00b2".encode(), b"{}", b"null", b"(S (NP))", b"()", b"( (X))", b"\xe2\x80\xa8", b"\x1b[2J",
    b'{"source": 1}', b'{"step": "x"}', b'{"step": 1e400}',
]  # fmt: skip


def _containers(value) -> Iterator[dict | list]:
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _containers(inner)


@st.composite
def changed_value(draw, value, dump: Callable[[object], str]) -> str:
    """The text of a JSON or YAML value with one thing in it changed: replaced, removed, renamed, given twice."""
    value = copy.deepcopy(value)
    container = draw(st.sampled_from([*_containers(value)][:400] or [[None]]))
    key = draw(st.sampled_from([*container] if isinstance(container, dict) else range(len(container))))
    how = draw(st.sampled_from(["replace", "raw", "remove", "rename", "twice"]))
    if how == "replace":
        container[key] = draw(VALUES)
    elif how == "raw":
        container[key] = _HOLE
        return dump(value).replace(json.dumps(_HOLE), _HOLE).replace(_HOLE, draw(RAW))
    elif how == "twice" and isinstance(container, dict):
        container[_HOLE] = draw(VALUES)
        return dump(value).replace(_HOLE, str(key))
    else:
        removed = container.pop(key)
        if how == "rename" and isinstance(container, dict):
            container[draw(STRINGS)] = removed
    return dump(value)


def _json(value) -> str:
    return json.dumps(value, indent=1)


def _yaml(value) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


@st.composite
def changed_bytes(draw, content: bytes) -> bytes:
    """Bytes with some flipped, cut off, put in, removed or repeated."""
    how = draw(st.sampled_from(["flip", "cut", "insert", "remove", "repeat"]))
    start = draw(st.integers(0, max(0, len(content) - 1)))
    end = start + draw(st.integers(1, 200))
    if how == "cut":
        return content[:start]
    if how == "flip":
        return content[:start] + bytes(255 - byte for byte in content[start : start + 1]) + content[start + 1 :]
    if how == "insert":
        return content[:start] + draw(st.binary(min_size=1, max_size=20)) + content[start:]
    return content[:start] + content[end:] if how == "remove" else content[:end] + content[start:]


@st.composite
def changed_lines(draw, content: bytes, line_of: Callable | None = None) -> bytes:
    """Text with a line dropped, doubled, replaced by a strange one, or changed by a strategy `line_of` it."""
    lines = content.split(b"\n")
    number = draw(st.integers(0, len(lines) - 1))
    strange = st.sampled_from([[], 2 * [lines[number]], *([line] for line in LINES), *([line, b""] for line in LINES)])
    if line_of is not None and lines[number]:
        strange |= line_of(lines[number]).map(lambda line: [line])
    lines[number : number + 1] = draw(strange)
    return b"\n".join(lines)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _changed_header(content: bytes):
    """A safetensors file with something changed in its header."""
    end = 8 + int.from_bytes(content[:8], "little")
    headers = changed_value(json.loads(content[8:end]), json.dumps).map(_encode)
    return headers.map(lambda header: len(header).to_bytes(8, "little") + header + content[end:])


def damaged(form: str, content: bytes):
    """Contents for a file of a form whose valid content this is; the first are no file of the form at all."""
    anything = st.binary(max_size=200) | changed_bytes(content)
    if form == "json":
        value = json.loads(content)
        return st.one_of(anything, VALUES.map(_json).map(_encode), *3 * [changed_value(value, _json).map(_encode)])
    if form == "yaml":
        value = yaml.safe_load(content)
        aliases = b"a: &a [x, x]\n" + b"".join(b"b%d: &b%d [*a, *a]\n" % (n, n) for n in range(30))
        own = [aliases, b"seed: 010\n", b"? [a]\n: b\n", b"!!python/object:os.system {}\n", b"--- a\n--- b\n"]
        changes = [changed_value(value, dump).map(_encode) for dump in (_yaml, _json)]  # JSON is YAML too
        return st.one_of(anything, st.sampled_from(own), VALUES.map(_json).map(_encode), *changes, *changes)
    if form == "lines of json":
        return anything | changed_lines(content, lambda line: changed_value(json.loads(line), json.dumps).map(_encode))
    if form == "text":
        return anything | changed_lines(content)
    if form == "safetensors":
        return anything | _changed_header(content)
    if form == "gzip":
        return anything | changed_lines(gzip.decompress(content)).map(gzip.compress)
    assert form == "bytes"
    return anything
