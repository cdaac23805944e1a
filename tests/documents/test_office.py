"""OpenDocument texts and slides: paragraphs change, every other byte stays."""

import io
import re
import tracemalloc
import zipfile
from xml.dom import minidom

import pytest
from conftest import error_of
from document_files import body, run, word_file

from vaswani_transformer.documents import office_file
from vaswani_transformer.documents.formats import translate_document

ODT = """<?xml version="1.0"?><office:document-content xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0"
 xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0"><office:body><office:text>
<text:h>{}</text:h><text:p>{}<text:tab/><text:span text:style-name="T1">{}</text:span>
<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>A<text:note><text:p>{}</text:p></text:note>
</text:p></text:note-body></text:note><office:annotation><text:p>{}</text:p></office:annotation
> {}</text:p><text:p>{}.<text:s text:c="2"/>It<text:line-break/>{}</text:p>
</office:text></office:body></office:document-content>"""
SLIDE = """<?xml version="1.0"?><p:sld xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"
 xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main"><p:sp><p:txBody>
<a:p><a:r><a:rPr b="1"/><a:t>{} </a:t></a:r><a:r><a:t>{}</a:t></a:r></a:p><a:p><a:r><a:t>{}</a:t></a:r></a:p>
</p:txBody></p:sp></p:sld>"""
SENTENCES = "Two dogs", "The bird sees", "a cat", "Note.", "Comment.", "here.", "First line", "second &amp; last"
CASES = {
    "odt": ("content.xml", ODT, SENTENCES),
    "pptx": ("ppt/slides/slide1.xml", SLIDE, ["Red", "birds sleep.", "It rains."]),
}


def packed(name: str, text: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/x", zipfile.ZIP_STORED)
        archive.writestr(name, text)
        archive.writestr("Pictures/a.png", b"\x89PNG")
    return data.getvalue()


@pytest.mark.parametrize("format", CASES)
def test_words_change_and_nothing_else(format):
    name, template, texts = CASES[format]
    data, seen = packed(name, template.format(*texts)), []
    louder = lambda sentences: seen.extend(sentences) or list(map(str.upper, sentences))  # noqa: E731
    assert translate_document(data, format, list) == data
    with zipfile.ZipFile(io.BytesIO(translate_document(data, format, louder))) as archive:
        expected = template.replace("It<", "IT<").format(*(text.upper().replace("AMP", "amp") for text in texts))
        assert archive.read(name).decode() == expected
        first, _, picture = archive.infolist()
        assert (first.filename, first.compress_type) == ("mimetype", zipfile.ZIP_STORED)
        assert archive.read(picture) == b"\x89PNG"
    assert "a cat here." in seen or "Red birds sleep." in seen


def test_a_file_that_unpacks_more_than_it_says_or_is_nested_without_end_is_refused():
    bomb, louder = io.BytesIO(), lambda sentences: list(map(str.upper, sentences))
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("word/document.xml", "<a/>")
    assert "packed in a way that office files are not" in error_of(translate_document, bomb.getvalue(), "docx", louder)
    lying = io.BytesIO()
    with zipfile.ZipFile(lying, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b"<a>" + b"<b/>" * 10**6 + b"</a>")
    size = (4 * 10**6 + 7).to_bytes(4, "little")
    data = lying.getvalue().replace(size, (10).to_bytes(4, "little"))
    tracemalloc.start()
    assert "CRC" in error_of(translate_document, data, "docx", louder)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
    nested = word_file("<w:p>" + "<w:r>" * 300 + "</w:r>" * 300 + "</w:p>")
    assert "more than 200 elements are within each other" in error_of(translate_document, nested, "docx", louder)


def test_fields_that_begin_without_end_take_no_square_of_time(monkeypatch):
    sought, end = [], office_file._end
    monkeypatch.setattr(office_file, "_end", lambda events, number: sought.append(number) or end(events, number))
    begins = '<w:r><w:fldChar w:fldCharType="begin"/></w:r>' * 1000
    result = body(translate_document(word_file(f"<w:p>{begins}{run('a')}</w:p>"), "docx", lambda _: ["A"]))
    assert ">A<" in result and len(sought) < 100_000


def test_hyphens_and_page_breaks_do_not_part_words():
    hard, soft = "</w:t><w:noBreakHyphen/><w:t>", "</w:t><w:softHyphen/><w:t>"
    text = f"<w:p><w:r><w:t>A well{hard}made{hard}up cooperative at www.a{hard}b.de</w:t></w:r></w:p>"
    louder = lambda sentences: seen.extend(sentences) or list(map(str.upper, sentences))  # noqa: E731
    data, seen = word_file(text), []
    result = body(translate_document(data, "docx", louder))
    assert (
        seen == ["A well\u2011made\u2011up cooperative at"]
        and f"at www.a{hard}b.de</w:t>".replace("at", "AT", 1) in result
    )
    assert ">A WELL\u2011MADE\u2011UP COOPERATIVE" in result and translate_document(data, "docx", list) == data
    others = f"<w:t>a co{soft}op</w:t>", f"<w:t/>{hard[6:]}b</w:t>", f"<w:t>c{hard[:-1]}/>"
    for xml in (f"<w:p><w:r>{each}</w:r></w:p>" for each in others):
        result = body(translate_document(word_file(xml), "docx", lambda texts: ["Un deux"] * len(texts)))
        minidom.parseString(f'<a xmlns:w="x">{result}</a>')
        assert not re.search("<w:t> |<w:t>[^<]* <", result)  # which Word would drop
    alone = f"<w:p>{run('1')}<w:r><w:noBreakHyphen/></w:r>{run('24 hours')}</w:p>"
    result = body(translate_document(word_file(alone), "docx", louder))
    assert result.index(">1<") < result.index("noBreakHyphen") < result.index(">24 HOURS<")
    translate_document(word_file(alone.replace("1", "an e").replace("24 hours", "mail")), "docx", louder)
    assert seen[-1] == "an email"
    seen, texts = [], ("Two do<text:soft-page-break/>gs", *SENTENCES[1:])
    translate_document(packed("content.xml", ODT.format(*texts)), "odt", louder)
    assert "Two dogs" in seen


def test_fields_formulas_and_deleted_text_are_points():
    begin, end = (f'<w:fldChar w:fldCharType="{kind}"/>' for kind in ("begin", "end"))
    field = f"<w:r>{begin}</w:r>\n{run('REF')}<w:r>{begin}{end}</w:r>{run('Table 1')}<w:r>{end}</w:r>"
    formula = '<m:oMath xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"><m:r>x</m:r></m:oMath>'
    picture = "<w:r><w:drawing/></w:r>"
    cited = f"<w:sdt><w:tag w:val='MENDELEY_CITATION'/>{run('(1)')}</w:sdt>"
    others = f"<w:fldSimple>{run('7')}</w:fldSimple>", f"<w:del>{run('no')}</w:del>{cited}", formula
    text, seen = f"<w:p>{run('a ')}{field}{run(' b ')}{run(' c ').join(others)}{run(' d')}</w:p>", []
    unended = f"<w:p>{run('e')}{picture}{run('e')}<w:r>{begin}</w:r>{run('f')}</w:p>"
    unended += f"<w:p><w:r><w:pict><w:p>{run('g')}{field}</w:p></w:pict></w:r></w:p>"  # a text box
    louder = lambda sentences: seen.extend(sentences) or list(map(str.upper, sentences))  # noqa: E731
    result = body(translate_document(word_file(text + unended), "docx", louder))
    assert seen == ["a b c c d", "e e", "f", "g"] and all(part in result for part in (field, *others))
    assert re.sub("<.*?>", "", result) == "A \nREFTable 1 B 7 C no(1) C x DE EFG\nREFTable 1"
