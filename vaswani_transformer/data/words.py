"""Words of a text: runs between spaces, and each character of a script that is written without spaces."""

from collections.abc import Iterable

import regex

# Chinese, Japanese, Thai, Lao, Khmer, Burmese: what their words are, dictionaries say, and Unicode's rules do not.
LETTER = r"[\p{Han}\p{Hiragana}\p{Katakana}ー\p{Line_Break=Complex_Context}]"
_MARK = r"[\p{M}\u200c\u200dー]"  # belongs to the letter before it, as joiners do
# Punctuation goes with a character as it does with words: opening brackets with the one behind them, the rest with the
# one before. At most three signs are skipped to find a character behind them, or long rows of signs would take long.
_BEFORE = r"(?:(?<!\S)[^\w\s]{1,3}|[\p{Ps}\p{Pi}]{0,3})"
_WORD = regex.compile(
    rf"{_BEFORE}{LETTER}{_MARK}*[^\w\s\p{{Ps}}\p{{Pi}}]* | (?:(?!{_BEFORE}{LETTER})\S)+", regex.VERBOSE
)
#: A character that is a word by itself; other letters and digits of a word; a sign.
LETTERS_OR_SIGN = regex.compile(rf"{LETTER}{_MARK}*|(?:(?!{LETTER})\w)+|[^\w\s]")
_START = regex.compile(r"(?<!\S)[^\w\s]*\p{L}")
#: Find a full stop, a question mark or the like, of any script, at the end of a text.
ends_a_sentence = regex.compile(r"[\p{Sentence_Terminal}…]\s*$").search


def title_case(text: str) -> str:
    """Begin each word with a capital."""
    return _START.sub(lambda at: at[0].title(), text)


def word_places(text: str) -> list[tuple[int, int]]:
    """Return the start and end of each word of a text."""
    return [match.span() for match in _WORD.finditer(text)]


def words_of(text: str) -> list[str]:
    """Return the words of a text, with the punctuation attached to them."""
    return [text[start:end] for start, end in word_places(text)]


def has_case(text: str) -> bool:
    """Return whether most words have capitals: many scripts have none, and a Latin name is no sentence."""
    words = [word for word in words_of(text) if any(map(str.isalpha, word))]
    return 2 * sum(word.upper() != word.lower() for word in words) > len(words)


def words_at(text: str, places: Iterable[tuple[int, int]]) -> list[range]:
    """Return the numbers of the words that each part of a text overlaps; none for a part without text.

    White space belongs to the word behind it.
    """
    number_at = []
    for number, (_, end) in enumerate(word_places(text)):
        number_at += [number] * (end - len(number_at))
    parts = (number_at[start:end] for start, end in places)
    return [range(part[0], part[-1] + 1) if part else range(0) for part in parts]


def stands_alone(text: str) -> bool:
    """Return whether a text begins with a character that is a word by itself."""
    return regex.match(LETTER, text) is not None


def is_inner(character: str) -> bool:
    """Return whether it is a letter, a digit, a mark upon one (vowel signs, accents) or a joiner of two."""
    return regex.match(r"[\w\p{N}--\p{Pc}]", character, regex.V1) is not None


def is_part(text: str, start: int, end: int) -> bool:
    """Return whether `text[start:end]` cuts a word in two; punctuation is not part of a word."""
    if regex.match(_MARK, text[end : end + 1]):
        return True
    seams = (text[start - 1 : start], text[start]), (text[end : end + 1], text[end - 1])  # a letter outside, one inside
    return any(regex.match(r"\w", outer) and not any(map(stands_alone, (outer, inner))) for outer, inner in seams)
