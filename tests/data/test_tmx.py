"""Translation memories: what TMX files hold, in the encodings and dialects of their programs, and hostile ones."""

import gzip
import logging
import tracemalloc
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_files import GERMAN, PAIRS, SWAPPED, read, write

from vaswani_transformer.data.tmx import read_tmx

HEADER = '<?xml version="1.0"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4"><header srclang="en"/><body>\n'
END = "</body></tmx>\n"


def unit(*variants: tuple[str, str], attribute: str = "xml:lang") -> str:
    """A unit with variants of a language and the XML of its segment."""
    body = "".join(f'<tuv {attribute}="{lang}"><prop type="p">x</prop><seg>{seg}</seg></tuv>' for lang, seg in variants)
    return f'<tu tuid="7"><note>a note</note>{body}</tu>\n'


def memory(path, *units: str):
    return write(path, HEADER + "".join(units) + END)


def by_library(pairs, languages=("en-US", "DE_de"), encoding="utf-8") -> bytes:
    """A TMX file of pairs, written by the standard library."""
    root = ET.Element("tmx", version="1.4")
    body = ET.SubElement(root, "body")
    for pair in pairs:
        tu = ET.SubElement(body, "tu")
        for language, text in zip(languages, pair, strict=True):
            tuv = ET.SubElement(tu, "tuv", {"{http://www.w3.org/XML/1998/namespace}lang": language})
            ET.SubElement(tuv, "seg").text = text
    return ET.tostring(root, encoding=encoding, xml_declaration=True)


def texts_of(path, languages=("en", "de")) -> list[tuple[str, str]]:
    return list(read_tmx(path, languages))


@pytest.mark.parametrize("name", ["a.tmx", "a.tmx.gz", "A.TMX"])
def test_a_memory_is_read_in_both_directions(tmp_path, name):
    path = write(tmp_path / name, by_library(PAIRS))
    assert read(data=path, **GERMAN) == PAIRS
    assert read(data=path, source_column="de", target_column="en") == SWAPPED
    assert read(data=tmp_path / f"*{name[1:]}", **GERMAN) == PAIRS


LETTERS = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp", "Cn"], exclude_characters="\ufeff"), min_size=1
)


@given(st.lists(st.tuples(LETTERS, LETTERS), min_size=1), st.sampled_from(["utf-8", "utf-16", "us-ascii", "utf-8-sig"]))
def test_any_text_in_any_encoding_is_what_another_library_wrote(tmp_path_factory, pairs, encoding):
    content = by_library(pairs, encoding=encoding.removesuffix("-sig"))
    path = tmp_path_factory.getbasetemp() / "any.tmx"
    path.write_bytes(b"\xef\xbb\xbf" + content if encoding.endswith("-sig") else content)
    assert texts_of(path) == pairs


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "iso-8859-1", "windows-1252"])
def test_encodings_by_mark_or_declaration(tmp_path, encoding):
    mark = "\ufeff" if encoding.startswith("utf-16") else ""
    declared = f'<?xml version="1.0" encoding="{"utf-16" if mark else encoding}"?>'
    text = declared + HEADER.partition("\n")[2] + unit(("en", "café"), ("de", "Kaffee „süß“" if mark else "süß")) + END
    (tmp_path / "a.tmx").write_bytes((mark + text).encode(encoding))
    assert texts_of(tmp_path / "a.tmx") == [("café", "Kaffee „süß“" if mark else "süß")]


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        ("plain &lt;b&gt; &amp; &#228;&#x1F600;", "plain <b> & ä😀"),
        ('a <bpt i="1">&lt;b&gt;</bpt>bold<ept i="1">&lt;/b&gt;</ept> word', "a bold word"),
        ('a <hi type="italic">strong <ph>[i]</ph>word</hi> here', "a strong word here"),
        ("fi<ph>&lt;brand&gt;</ph>le.<ph>&lt;BR/&gt;</ph>New", "file. New"),
        ("before <!-- a comment --> <?program x?>after", "before  after"),
        ("<unknown>kept</unknown>", "kept"),
    ],
)  # fmt: skip
def test_inline_elements_leave_the_text(tmp_path, segment, text):
    assert texts_of(memory(tmp_path / "a.tmx", unit(("en", segment), ("de", "x")))) == [(text, "x")]


def test_which_variant_counts(tmp_path, caplog):
    path = memory(
        tmp_path / "a.tmx",
        unit(("en-US", "color"), ("en-GB", "colour"), ("de", "Farbe"), ("de-AT", "andere")),
        unit(("en-GB", ""), ("en-US", "elevator"), ("fr", "ascenseur"), ("de", "Aufzug")),
        unit(("en", "no German"), ("fr", "pas d'allemand")),
        unit(("EN", "old"), ("DE", "alt"), attribute="lang"),
        '<tu><tuv xml:lang="en"></tuv><tuv xml:lang="de"><seg>ohne Segment</seg></tuv></tu>',
    )
    with caplog.at_level(logging.INFO):
        assert texts_of(path) == [("color", "Farbe"), ("elevator", "Aufzug"), ("old", "alt")]
    assert "2 of 5 units have no segments in both en and de: dropped" in caplog.text
    assert texts_of(path, ("en", "en-GB")) == [("color", "colour"), ("elevator", "")]
    assert texts_of(path, ("de", "fr")) == [("Aufzug", "ascenseur")]


def test_a_missing_language_is_named_with_those_that_are_there(tmp_path):
    path = memory(tmp_path / "a.tmx", unit(("en-US", "a"), ("de-DE", "b")), unit(("fr", "c"), ("", "d")))
    message = read(data=path)
    assert "no unit has segments in both 'source' and 'target'; the languages are: , de-DE, en-US, fr" in message
    assert "--source-column" in message and str(path) in message
    assert "'en' and 'es'" in read(data=path, source_column="en", target_column="es")
    assert "empty, no pair" in read(data=memory(tmp_path / "b.tmx"), **GERMAN)
    path = memory(tmp_path / "c.tmx", *('<tu><tuv xml:lang="en">a</tuv><tuv xml:lang="de-AT">b</tuv></tu>',) * 2)
    assert "'en' and 'de'; both are there, but without a <seg>, or never in one <tu>" in read(data=path, **GERMAN)


def bomb(levels: int = 30) -> str:
    entities = "".join(f'<!ENTITY l{n} "&l{n - 1};&l{n - 1};">' for n in range(1, levels))
    return HEADER.replace('SYSTEM "tmx14.dtd"', f'[<!ENTITY l0 "ha">{entities}]')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no element found: line 1"),
        ("<html><body/></html>", "not a translation memory: it begins with <html>"),
        (HEADER + '<tuv xml:lang="en"><seg>a</seg></tuv>' + END, "empty, no pair"),
        (HEADER + "<tu>\n</body>", "mismatched tag: line 5"),
        (bomb() + unit(("en", "&l29;"), ("de", "b")) + END, "limit on input amplification"),
        (HEADER + unit(("en", "a\x00b"), ("de", "b")) + END, "not well-formed (invalid token): line 4"),
    ],
)  # fmt: skip
def test_what_is_no_memory_is_refused_with_its_line(tmp_path, content, message):
    answer = read(data=write(tmp_path / "a.tmx", content), **GERMAN)
    assert isinstance(answer, str) and message in answer and str(tmp_path / "a.tmx") in answer


def test_a_large_memory_takes_little_memory(tmp_path):
    """Also one unit of many variants, and a packed file of much larger size."""
    path = tmp_path / "a.tmx.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write(HEADER)
        for _ in range(20):
            file.write(unit(("en", "a" * 10_000), ("de", "b" * 10_000)) * 50)
        file.write(unit(("en", "a"), *[("fr", "c" * 1000)] * 20_000, ("de", "b")))
        file.write(END)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_tmx(path, ("en", "de"))) == 1001
        assert tracemalloc.get_traced_memory()[1] < 2 << 20  # of 40 MB; expat's own buffers are not counted
    finally:
        tracemalloc.stop()
