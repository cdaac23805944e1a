"""What a word of a text is: what stands between spaces, and each letter of a script that is written without them."""

from collections.abc import Iterable

import regex  # transformers requires it

# Chinese, Japanese, Thai, Lao, Khmer, Burmese: what their words are, dictionaries say, and Unicode's rules do not.
_LETTER = r"[\p{Han}\p{Hiragana}\p{Katakana}ー\p{Line_Break=Complex_Context}]"
_MARK = r"[\p{M}ー]"  # belongs to the letter before it
# Punctuation goes with a letter as it does with words: brackets that open with the one behind them, the rest with the
# one before. Three signs at most are looked at to find a letter behind them, or long rows of them would take long.
_BEFORE = r"(?:(?<!\S)[^\w\s]{1,3}|[\p{Ps}\p{Pi}]{0,3})"
_WORD = regex.compile(
    rf"{_BEFORE}{_LETTER}{_MARK}*[^\w\s\p{{Ps}}\p{{Pi}}]* | (?:(?!{_BEFORE}{_LETTER})\S)+", regex.VERBOSE
)
#: A letter that is a word by itself; what else are a word's letters and digits; a sign.
LETTERS_OR_SIGN = regex.compile(rf"{_LETTER}{_MARK}*|(?:(?!{_LETTER})\w)+|[^\w\s]")


def word_places(text: str) -> list[tuple[int, int]]:
    """Where each word of a text begins and ends."""
    return [match.span() for match in _WORD.finditer(text)]


def words_of(text: str) -> list[str]:
    """The words of a text, with the punctuation that stands at them."""
    return [text[start:end] for start, end in word_places(text)]


def words_at(text: str, places: Iterable[tuple[int, int]]) -> list[range]:
    """The numbers of the words that each of these parts of a text has something of; none for a part without text.

    White space belongs to the word behind it.
    """
    number_at = []
    for number, (_, end) in enumerate(word_places(text)):
        number_at += [number] * (end - len(number_at))
    parts = (number_at[start:end] for start, end in places)
    return [range(part[0], part[-1] + 1) if part else range(0) for part in parts]


def stands_alone(text: str) -> bool:
    """Whether a text begins with a letter that is a word by itself."""
    return regex.match(_LETTER, text) is not None


def is_part(text: str, start: int, end: int) -> bool:
    """Whether `text[start:end]` takes a part of a word away from the rest of it; punctuation is not of a word."""
    if regex.match(_MARK, text[end : end + 1]):
        return True
    seams = (text[start - 1 : start], text[start]), (text[end : end + 1], text[end - 1])  # a letter outside, one inside
    return any(regex.match(r"\w", outer) and not any(map(stands_alone, (outer, inner))) for outer, inner in seams)
