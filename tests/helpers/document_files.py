"""Documents of each format, and translators whose every word is known."""

import io
import re
import zipfile
from xml.sax.saxutils import escape

from hypothesis import strategies as st

from vaswani_transformer.documents.formats import translate_document

SPACE = 'xml:space="preserve"'
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def same(sentences):
    """A translation that changes nothing."""
    return sentences


def louder(sentences):
    """Each word in capitals, at its place."""
    return [sentence.upper() for sentence in sentences]


def in_place(sources, targets):
    """The alignment of `louder`."""
    return [[(number, number) for number in range(len(target.split()))] for target in targets]


def backwards(sentences):
    """Each word in capitals, the last one first."""
    return [" ".join(reversed(sentence.upper().split())) for sentence in sentences]


def turned(sources, targets):
    """The alignment of `backwards`."""
    lengths = [len(target.split()) for target in targets]
    return [[(length - 1 - number, number) for number in range(length)] for length in lengths]


def translated(text, format, translate=louder, align=in_place, **options):
    """A document of text, translated."""
    return translate_document(text.encode(), format, translate, align, **options).decode()


def word_file(body, **others):
    """A Word file with this XML in its body, and other parts."""
    xml = f'<?xml version="1.0" encoding="UTF-8"?>\r\n<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/document.xml", xml)
        for name, content in others.items():
            archive.writestr(f"word/{name}.xml", content)
        archive.writestr("word/media/image1.png", bytes(range(256)))
    return data.getvalue()


def parts(data):
    """The parts of a Word file, in order."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def body(data):
    """What `word_file` was given."""
    return re.search("<w:body>(.*)</w:body>", parts(data)["word/document.xml"].decode(), re.DOTALL)[1]


def run(text, bold=False, space=SPACE):
    return f"<w:r>{'<w:rPr><w:b/></w:rPr>' * bold}<w:t{' ' * bool(space)}{space}>{escape(text)}</w:t></w:r>"


#: Words and spans of them in words, with no white space at the ends of a span: `("b", [...])`.
INLINE = st.recursive(
    st.sampled_from(["a", "dog", "runs", "grün", "well-known", "it's"]),
    lambda inner: st.tuples(st.sampled_from(["b", "i", "a"]), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)
SENTENCES = st.lists(INLINE, min_size=1, max_size=6)
