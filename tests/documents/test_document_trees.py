"""Random trees of each format: each element and kept string is there again, whatever a model writes, and all parses.

`TREES=10000` in the environment makes it as many trees of each format.
"""

import os
import random
import re
from itertools import count, pairwise
from xml.etree import ElementTree

import pytest
from document_files import WORD, body, run, word_file
from hypothesis import given, settings
from hypothesis import strategies as st

from vaswani_transformer.data.words import words_of
from vaswani_transformer.documents.formats import translate_document

WORDS = ["a", "dog", "Runs", "on.", "grün", "It's", "(red)", "狗", "と", " ", " ", "3", "–"]
# What is kept, points, and spans, each with a number of its own; of style, the latter may be in pieces afterwards.
KEPT = [
    "{{k{}}}", "%{}$s", " https://a.b/{}?c=d ", " k{}@b.cd ", "%{{k{}}}", "{{k{}, plural, one {{# x}} other {{y}}}}",
    " x{{k{}}}y ",
]  # fmt: skip
POINTS = {
    "html": ['<img n="{}"/>', "<code>f({})</code>", "<!--{}-->", '<br n="{}"/>', "<sup>[{}]</sup>", '<wbr n="{}"/>'],
    "markdown": ["`f({})`", " ![i](u{}) ", "<!--{}-->", " $x_{}$ ", "<https://a.b/{}>"],
    "vtt": ["<00:{}.000>", "\n\nNOTE {}\n\n00:01.000 --> 00:02.000\n"],
    "docx": [
        '<w:bookmarkStart w:id="{}"/>', '<w:r><w:footnoteReference w:id="{}"/></w:r>', '<w:r><w:br w:n="{}"/></w:r>',
        '<w:r><w:sym w:char="{}"/></w:r>', '<w:r><w:noBreakHyphen w:n="{}"/></w:r>',
    ],
}  # fmt: skip
STYLES = {
    "html": [('<b n="{}">', "</b>"), ('<i n="{}">', "</i>"), ('<span n="{}">', "</span>"), ('<sub n="{}">', "</sub>")],
    "markdown": [("**", "**"), ("*", "*"), ('<b n="{}">', "</b>")],
    "vtt": [("<b.n{}>", "</b>"), ("<c.n{}>", "</c>"), ("<i.n{}>", "</i>")],
    "docx": [],
}
SINGLE = {
    "html": [('<a href="{}">', "</a>"), ('<u id="{}">', "</u>"), ('<p n="{}">', "</p>")],
    "markdown": [("[x", "](u{})"), ('<a href="{}">', "</a>")],
    "vtt": [],
    "docx": [('<w:hyperlink w:id="{}">', "</w:hyperlink>"), ('<w:ins w:id="{}">', "</w:ins>")],
}
START = {"vtt": "WEBVTT\n\n00:01.000 --> 00:02.000\n"}


def trees(format):
    leaf = st.sampled_from(3 * WORDS + KEPT + POINTS[format])
    spans = st.sampled_from(STYLES[format] + SINGLE[format])
    inner = st.recursive(leaf, lambda node: st.tuples(spans, st.lists(node, min_size=1, max_size=6)), max_leaves=25)
    return st.lists(inner, max_size=8)


def written(tree, format, numbers, marks, around=()):
    """A tree as text; `marks` gets what has to be there again, with whether it may be there more than once."""
    parts = []
    for node in tree:
        number = next(numbers)
        if isinstance(node, str):
            text = node.format(number) if (is_mark := node not in WORDS) else node
            marks += [(text.strip(), False)] * is_mark
            if format == "docx" and node not in POINTS[format]:
                middle = len(text) // (2 if number % 3 == 0 else 1)
                text = run(text[:middle]) + run(text[middle:], True) * (middle < len(text))
            parts.append(text)
        elif node[0] in around:  # no link in a link
            parts.append(written(node[1], format, numbers, marks, around))
        else:
            first, last = node[0][0].format(number), node[0][1].format(number)
            marks += [(tag, node[0] in STYLES[format]) for tag in (first, last) if str(number) in tag]
            parts += [first, written(node[1], format, numbers, marks, (*around, node[0])), last]
    return "".join(parts)


def verify(format, tree, seed):
    """Translate a tree by the words of its sentences, in their order or any other, and look for all of its marks."""
    marks, draw, in_order = [], random.Random(seed), seed % 3 == 0
    text = START.get(format, "") + written(tree, format, count(10), marks)

    def translate(sentences):
        for sentence in sentences:
            words = words_of(sentence)
            draw.shuffle(words)
            yield sentence.upper() if in_order else " ".join(words[: draw.randint(1, len(words))])

    def align(sources, targets):
        for source, target in zip(sources, targets, strict=True):
            size, places = len(words_of(source)), range(len(words_of(target)))
            yield [(n if in_order else draw.randrange(size), n) for n in places if in_order or draw.random() < 0.8]

    data = word_file(f"<w:p>{text}</w:p>") if format == "docx" else text.encode()
    result = translate_document(data, format, translate, align)
    result = body(result) if format == "docx" else result.decode()
    shown = re.sub("<[^>]*>", "", result) if format == "docx" else result
    for mark, is_style in marks:
        found = (result if "<" in mark else shown).count(mark)
        assert found == 1 or (is_style and found), (mark, found, text, result)
    if format in ("html", "docx"):
        root = ElementTree.fromstring(f'<x xmlns:w="{WORD}">{result}</x>')
        assert format == "html" or not any(n.tail or (n.text and not n.tag.endswith("}t")) for n in root.iter()), result
        for first, second in (pair for node in root.iter() for pair in pairwise(node)):  # pieces side by side are one
            assert not first.attrib or first.attrib != second.attrib or (first.tail or "").strip(), result


@pytest.mark.parametrize("format", POINTS)
def test_every_element_is_there_again(format):
    check = given(st.just(format), trees(format), st.integers(0, 1000))(verify)
    settings(max_examples=int(os.environ.get("TREES", 40)))(check)()
