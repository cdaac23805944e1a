"""Strategies for damaged files: random bytes, random values, and the valid file with something changed."""

import copy
import gzip
import json

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
_HERE = "a place for raw text"


def _places(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


@st.composite
def changed_values(draw, value, dump):
    """The text of a JSON or YAML value with one thing in it changed: replaced, removed, renamed, given twice."""
    value = copy.deepcopy(value)
    path = draw(st.sampled_from(list(_places(value))[:400]))
    how = draw(st.sampled_from(["replace", "raw", "remove", "rename", "twice"]))
    if not path:
        return draw(VALUES.map(dump) | RAW)
    container = value
    for key in path[:-1]:
        container = container[key]
    old = container[path[-1]]
    if how == "replace":
        container[path[-1]] = draw(VALUES)
    elif how == "raw":
        container[path[-1]] = _HERE
    elif how == "remove":
        del container[path[-1]]
    elif isinstance(container, list):
        container.append(old)
    elif how == "rename":
        del container[path[-1]]
        container[draw(STRINGS)] = old
    else:
        container[_HERE] = draw(VALUES)
    text = dump(value)
    if how == "raw":
        return text.replace(json.dumps(_HERE), _HERE).replace(_HERE, draw(RAW))
    return text.replace(_HERE, str(path[-1]))


def _json(value) -> str:
    return json.dumps(value, indent=1)


def _yaml(value) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


@st.composite
def changed_bytes(draw, content: bytes):
    """Bytes with some flipped, cut off, put in, left out or repeated."""
    how = draw(st.sampled_from(["flip", "cut", "insert", "remove", "repeat"]))
    place = draw(st.integers(0, max(0, len(content) - 1)))
    if how == "cut":
        return content[:place]
    if how == "flip":
        changed = bytearray(content or b"\0")
        for _ in range(draw(st.integers(1, 4))):
            changed[draw(st.integers(0, len(changed) - 1))] ^= draw(st.integers(1, 255))
        return bytes(changed)
    if how == "insert":
        return content[:place] + draw(st.binary(min_size=1, max_size=20)) + content[place:]
    end = place + draw(st.integers(1, 200))
    return content[:place] + content[end:] if how == "remove" else content[:end] + content[place:]


@st.composite
def changed_lines(draw, content: bytes):
    """Text with a line dropped, doubled, put in or made strange."""
    lines = content.split(b"\n")
    place = draw(st.integers(0, len(lines) - 1))
    how = draw(st.sampled_from(["drop", "double", "insert", "swap"]))
    strange = [b"", b"\xff\xfe", b"\x00", b"\xef\xbb\xbf", b"\r", b"(" * 5000, b"a" * 100_000, b"\t" * 50, b'"']
    strange += [b"0-0 " * 99, b"(S " * 1000 + b"(N a" + b")" * 1001, b"(S" * 390 + b"(N a" + b")" * 391]
    strange += [b"9" * 5000 + b"-0", "\u0661-\u0662 \u00b2-\u00b2".encode(), b"{}", b"null", b"[]", b"((", b"(S (NP))"]
    strange += [b"()", b"( (X))", b"\xe2\x80\xa8", b"\x1b[2J", b'{"source": 1}', b'{"step": "x"}', b'{"step": 1e400}']
    if how == "drop":
        del lines[place]
    elif how == "double":
        lines.insert(place, lines[place])
    elif how == "insert":
        lines.insert(place, draw(st.sampled_from(strange)))
    else:
        lines[place] = draw(st.sampled_from(strange))
    return b"\n".join(lines)


@st.composite
def _changed_entries(draw, content: bytes):
    """JSON lines with something changed in one of them."""
    lines = content.decode().splitlines()
    place = draw(st.integers(0, len(lines) - 1))
    lines[place] = draw(changed_values(json.loads(lines[place]), json.dumps)).replace("\n", " ")
    return "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"


@st.composite
def _changed_header(draw, content: bytes):
    """A safetensors file with something changed in its header."""
    length = int.from_bytes(content[:8], "little")
    header = draw(changed_values(json.loads(content[8 : 8 + length]), json.dumps)).encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def damaged(form: str, content: bytes):
    """Contents for a file of a form whose valid content this is; the first are no file of the form at all."""
    anything = st.binary(max_size=200) | changed_bytes(content)
    encode = lambda text: text.encode("utf-8", "surrogatepass")  # noqa: E731
    if form == "json":
        value = json.loads(content)
        return st.one_of(anything, VALUES.map(_json).map(encode), *3 * [changed_values(value, _json).map(encode)])
    if form == "yaml":
        value = yaml.safe_load(content)
        aliases = b"a: &a [x, x]\n" + b"".join(b"b%d: &b%d [*a, *a]\n" % (n, n) for n in range(30))
        own = [aliases, b"seed: 010\n", b"? [a]\n: b\n", b"!!python/object:os.system {}\n", b"--- a\n--- b\n"]
        changes = [changed_values(value, dump).map(encode) for dump in (_yaml, _json)]  # JSON is YAML too
        return st.one_of(anything, st.sampled_from(own), VALUES.map(_json).map(encode), *changes, *changes)
    if form == "lines of json":
        return anything | changed_lines(content) | _changed_entries(content)
    if form == "text":
        return anything | changed_lines(content)
    if form == "safetensors":
        return anything | _changed_header(content)
    if form == "gzip":
        return anything | changed_lines(gzip.decompress(content)).map(gzip.compress)
    assert form == "bytes"
    return anything
