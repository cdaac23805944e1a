"""Texts as the server translates them: sentences, and the white space between them."""

import re
from collections.abc import Callable, Sequence

from ..model.sentence_splitting_vaswani import split_into_sentences

_ENDLESS = re.compile(r"\S{500}(?=\S)")  # part of a word for which a tokenizer would take long


class SplitText:
    """A text as its sentences and the white space before, between and behind them.

    Args:
        text: any text.
        language: its language's code.
        divide: divides what is too long to be translated at once, of this language.
        split: whether sentences are translated by themselves, or lines as they are.
    """

    def __init__(self, text: str, language: str, divide: Callable[[str, str], list[str]], split: bool = True):
        self.sentences: list[str] = []
        self.gaps = [""]  # one more than sentences
        for line in re.split(r"([\r\n]+)", text):
            end = 0
            for sentence in split_into_sentences(line, language) if split else filter(None, [line.strip()]):
                start = line.index(sentence, end)
                self.gaps[-1] += line[end:start]
                end = start + len(sentence)
                parts = divide(_ENDLESS.sub(r"\g<0> ", " ".join(sentence.split())), language)
                self.sentences += parts
                self.gaps += [" "] * (len(parts) - 1) + [""]
            self.gaps[-1] += line[end:]

    def before(self, number: int) -> str:
        """Return the white space before the translation of a sentence."""
        return self.gaps[number] or (" " if number else "")

    def joined(self, translations: Sequence[str]) -> str:
        """Return the text with its sentences replaced by translations."""
        parts = [self.before(number) + translation for number, translation in enumerate(translations)]
        return "".join(parts) + self.gaps[-1]
