"""A text divided into its sentences, by the library sentencex, which has rules and abbreviations of 300 languages."""

import re
import unicodedata
from collections.abc import Iterable


def sentence_parts(text: str, language: str = "en") -> list[str]:
    """Cut one paragraph after each sentence; the parts, concatenated, are the text.

    Args:
        text: any text; white space of all kinds counts as spaces.
        language: code of the text's language (`"de"`, `"de_DE"`); sentencex takes the nearest it knows, or English.

    Raises:
        ImportError: sentencex is not installed.
    """
    try:
        import sentencex
    except ImportError as error:
        raise ImportError("sentences are split by the library sentencex: pip install sentencex") from error
    # Other white space than spaces has broken it: line breaks were lost, wide spaces ended in a panic.
    parts, start = [], 0
    for sentence in sentencex.segment(re.split("[_-]", language)[0], re.sub(r"\s", " ", text)):
        part = text[start : start + len(sentence)]
        if parts and (parts[-1][-1] + part[0]).isascii() and not parts[-1][-1].isspace():  # .NET, torch.nn.Module
            parts[-1] += part
        else:
            parts.append(part)
        start += len(sentence)
    return parts


def split_into_sentences(text: str, language: str = "en") -> list[str]:
    """Split a text into sentences, without white space around them; an empty line ends one too.

    Nothing but white space is lost, and a blank text has none. Language and errors are as in `sentence_parts`.
    """
    paragraphs = re.split(r"\n[^\S\n]*\n", text)
    sentences = [part.strip() for paragraph in paragraphs for part in sentence_parts(paragraph, language)]
    return [sentence for sentence in sentences if sentence]


def space_behind(translation: str, space: str = "") -> str:
    """Return the white space between the `translation` of a sentence, or of all up to it, and the next one.

    `space` is what is between the two in the source. Behind a character of Chinese or Japanese spaces become nothing,
    behind others nothing becomes a space.
    """
    last = translation.rstrip("\"'”’…—")[-1:] or " "
    is_wide = unicodedata.east_asian_width(last) in "WF" and unicodedata.category(last) != "So"
    if is_wide and "HANGUL" not in unicodedata.name(last, ""):
        return space if space.strip(" ") else ""
    return space or " "


def join_translations(translations: Iterable[str]) -> str:
    """Return the translations of a text's sentences as one text."""
    text = ""
    for translation in filter(None, translations):
        text += space_behind(text) + translation if text else translation
    return text
