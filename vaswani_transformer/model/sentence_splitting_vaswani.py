"""A text divided into its sentences, by the library sentencex, which has rules and abbreviations of 300 languages."""

import re


def sentence_parts(text: str, language: str = "en") -> list[str]:
    """Cut one paragraph after each sentence; the parts, concatenated, are the text.

    Args:
        text: any text; white space of all kinds counts as spaces.
        language: code of the text's language (`"de"`, `"de_DE"`); sentencex takes the nearest that it knows, else
            English.

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
        parts.append(text[start : start + len(sentence)])
        start += len(sentence)
    return parts


def split_into_sentences(text: str, language: str = "en") -> list[str]:
    """Split a text into sentences; an empty line ends one too. Nothing but white space is lost.

    Args:
        text: any text.
        language: as of `sentence_parts`.

    Returns:
        the sentences without white space around them; none for a blank text.

    Raises:
        ImportError: sentencex is not installed.
    """
    paragraphs = re.split(r"\n[^\S\n]*\n", text)
    sentences = [part.strip() for paragraph in paragraphs for part in sentence_parts(paragraph, language)]
    return [sentence for sentence in sentences if sentence]
