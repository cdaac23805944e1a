"""Documents whose sentences are their own translations: no byte changes, whatever the document is."""

import re

import pytest
from document_files import SPACE, WORD, body, louder, parts, run, same, translated, word_file
from hypothesis import example, given
from hypothesis import strategies as st

from vaswani_transformer.documents.formats import translate_document

TEXT = [
    "A dog runs.", " ", "It's old! ", "\n", "\r\n", "\t", "{name}", "%s", "https://a.b/c?d=1&e=2.", "a@b.cd", "é", "a",
    "。", "«", "\xa0", "\u2028", "\x0c", "1.", "-", "don't", "\u200d", "\ufeff", "𝒳", "{{ x", "{", "%", "Dr. No. 5",
]  # fmt: skip
MARKUP = {
    "paragraphs": [],
    "html": [
        "<b>", "</b>", "<i class='x>y'>", "</i>", "<a href=u>", "</a>", "<br>", "<br/>", "<p>", "</p>", "&amp;",
        "&#8217;", "&eacute", "&nbsp;", "&", "<", ">", "<!-- x -->", "<!--", "-->", "<script>", "</script>", "a<b) x",
        "<style>", "</style>", "<code>", "</code>", "<p translate=no>", "<pre>", "</pre>", "<img src='x'>",
        "<!DOCTYPE html>", "</", "<![CDATA[", "]]>", "<![x[", "<?php", "<svg/>", "<svg>", "</svg>", "<b", "<textarea>",
        "&#x110000;", "<title>", "&#1", "\x00",
    ],
    "markdown": [
        "*", "**", "_", "`", "```", "# ", "> ", "- ", "1. ", "[", "](u)", "]", "[r]: x\n", "![", "<b>", "</b>", "<br>",
        "<https://a.b>", "&amp;", "\\", "\\*", "| ", "|---|\n", "\n\n", "  \n", "    ", "~~", "$", "[^1]", "[^1]: ",
        "---\n", "<div>\n", "- [x] ", "==", "<!-- x -->",
    ],
    "srt": [
        "1\n", "00:00:01,000 --> 00:00:02,000\n", "<i>", "</i>", "<b>", "</b>", "- ", "\n\n", '<font color="x">',
        "</font>", "{\\an8}",
    ],
}  # fmt: skip
START = {"srt": "00:00:01,000 --> 00:00:02,000\n"}


@pytest.mark.parametrize("format", MARKUP)
def test_text(format):
    @given(st.lists(st.sampled_from(TEXT + 2 * MARKUP[format]), max_size=25).map("".join))
    @example("")
    @example("\ufeffA dog.\n")
    def check(text):
        text = START.get(format, "") + text
        assert translated(text, format, same) == text

    check()


RUN_TEXTS = st.sampled_from(["A dog", " runs. It", "&<>", "", "é ", "{x}"])
RUNS = st.builds(run, RUN_TEXTS, st.booleans(), st.sampled_from([SPACE, ""]))
XML = st.sampled_from(
    [
        "<w:p>", "<w:proofErr/>", '<w:hyperlink r="x">', "<w:ins>", "text", "<w:r/>", "<w:r><w:t/></w:r>",
        "<w:r><w:t>a&#8217;<!-- x -->b</w:t></w:r>", "<w:r><w:t><![CDATA[A b.]]></w:t></w:r>",
        "<w:r><w:tab/><w:t>Tab.</w:t></w:r>", "<w:r><w:footnoteReference/></w:r>",
        "<w:r><w:lastRenderedPageBreak/><w:t>Page one</w:t></w:r>",
        "<w:del><w:r><w:delText>x</w:delText></w:r></w:del>",
        "<w:r><w:drawing><w:p><w:r><w:t>Box.</w:t></w:r></w:p></w:drawing></w:r>",
    ]
)  # fmt: skip


def closed(pieces):
    """XML in which the elements that only begin do end, the last first."""
    names = [match[1] for piece in pieces if (match := re.fullmatch(r"<w:(\w+)[^/]*>", piece))]
    return "".join(pieces) + "".join(f"</w:{name}>" for name in reversed(names))


@given(st.lists(st.one_of(RUNS, XML), max_size=12).map(closed))
def test_word_files(xml):
    data = word_file(xml, header1="<hdr>No Word.</hdr>", styles="<s>A b.</s>")
    assert translate_document(data, "docx", same) == data


def test_a_word_file_changes_in_its_texts_only():
    xml = f"<w:p><w:pPr><w:jc/></w:pPr>{run('A dog', space='')}<w:r><w:tab/></w:r>{run('It’s &')}</w:p>"
    header = f'<w:hdr xmlns:w="{WORD}">{run("Page one")}</w:hdr>'
    data = word_file(xml, header1=header)
    result = translate_document(data, "docx", louder)
    before, after = parts(data), parts(result)
    assert list(before) == list(after)
    assert body(result) == xml.replace("A dog", "A DOG").replace("<w:t>", f"<w:t {SPACE}>").replace("It’s", "IT’S")
    assert after["word/header1.xml"].decode() == header.replace("Page one", "PAGE ONE")
    assert after["word/media/image1.png"] == before["word/media/image1.png"]
