"""The formats of documents by name, and a whole document translated."""

import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import UserError
from ..model.language_codes_vaswani import typed_code

Translate = Callable[[list[str]], Iterable[str]]  # sentences to their translations
Align = Callable[[list[str], list[str]], Iterable[list[tuple[int, int]]]]  # to links of words, counted from 0

_READERS = {  # the function of each format, whose module is imported when it is needed: commands list the names
    "paragraphs": "plain_text:read_paragraphs",
    "html": "web_page:read_web_page",
    "markdown": "markdown_text:read_markdown",
    **dict.fromkeys(("srt", "vtt"), "plain_text:read_subtitles"),
}
_OTHER = re.compile(rb"""(?i)<meta[^>]*\bcharset\s*=\s*["']?(?!utf-?8)\w""")  # names another encoding than UTF-8
_FRONT_MATTER = r"(?:(---|\+\+\+)[ \t]*\r?\n(?=\S)(?:.*?\n)??(?:\1|\.\.\.)[ \t]*(?:\r?\n|\Z))?"
OFFICE = ("docx", "pptx", "odt")
#: Names of the formats.
FORMATS = (*_READERS, *OFFICE)
#: The formats by the ends of files' names.
ENDINGS = {".txt": "paragraphs", ".htm": "html", ".xhtml": "html", ".odp": "odt", ".ods": "odt"}
ENDINGS |= dict.fromkeys((".md", ".mdx"), "markdown")
ENDINGS |= {f".{name}": name for name in ("html", "markdown", "srt", "vtt", *OFFICE)}


def translate_document(
    data: bytes, format: str, translate: Translate, align: Align | None = None, language: str = "en"
) -> bytes:
    """Return a document of one of `FORMATS`, UTF-8 if it is text, with its sentences translated and all else as it was.

    `translate` gives as many translations as it gets sentences, in which white space is single spaces; `align` word
    alignments, as `vaswani_transformer.align` does, for those with markup in them: without it words are taken to be in
    the same order. `language` is the code of the document's, for the splitting of sentences.
    """
    if format in OFFICE:
        from .office_file import translate_office_file

        return translate_office_file(data, lambda parts: translate_parts(parts, translate, align, language))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"line {line} is not valid UTF-8: convert the document first, or name its format") from error
    mark = re.match("\ufeff?", text)[0]
    code, text = typed_code(text[len(mark) :])  # which counts for all of it
    front = re.match(rf"(?s){_FRONT_MATTER if format in ('markdown', 'html') else ''}", text)[0]  # no text
    code, text = (code, text[len(front) :]) if code else typed_code(text[len(front) :])
    read = pkgutil.resolve_name(f"{__package__}.{_READERS[format]}")
    encoding = "ascii" if format == "html" and data.isascii() and _OTHER.search(data[:1024]) else "utf-8"
    result = mark + front + translate_parts([read(text)], translate, align, language, [code])[0]
    return result.encode(encoding, "xmlcharrefreplace")


def translate_parts(
    documents: list, translate: Translate, align: Align | None = None, language: str = "en", codes: Sequence[str] = ()
) -> list[str]:
    """Return documents, as readers give them, translated; `codes` as in `Translation`."""
    from .document import Translation

    work = Translation(documents, language, codes)
    pairs = work.take(translate(work.sentences) if work.sentences else [])
    return work.written((align or _in_order)(*pairs) if pairs[0] else [])


def aligner(model: Any, tokenizer: Any, coded: Callable[[str], str] = str) -> Align:
    """Return what aligns words by a model's attention, for `translate_document`; `coded` puts codes before sources.

    Where that is not possible (exports, slow tokenizers, too long a sentence), words are taken to be in the same order.
    """
    if not (hasattr(getattr(model, "members", [model])[0], "set_attn_implementation") and tokenizer.is_fast):
        return _in_order
    from ..attention.alignments import align

    def links(sources: list[str], targets: list[str]) -> list[list[tuple[int, int]]]:
        try:
            return align(model, tokenizer, list(map(coded, sources)), targets)
        except UserError:
            if len(sources) == 1:
                return _in_order(sources, targets)
            return [links([source], [target])[0] for source, target in zip(sources, targets, strict=True)]

    return links


def _in_order(sources: list[str], targets: list[str]) -> list[list[tuple[int, int]]]:
    """Return links from each target word to the source word at the same share of the sentence."""
    from ..data.words import word_places

    pairs = zip((typed_code(source)[1] for source in sources), targets, strict=True)
    lengths = [(len(word_places(source)), len(word_places(target))) for source, target in pairs]
    return [[(place * rows // columns, place) for place in range(columns)] for rows, columns in lengths]
