"""What is never shown to a model, which would change it or leave it out."""

import regex

from ..data.words import is_inner, word_places

STAND_IN = "\ufffc" * 4  # for a point that is like a word, also where sentences are split
#: Characters without a width: soft hyphens, zero-width spaces, marks of direction. Joiners are parts of words.
INVISIBLE = regex.compile(r"(?V1)([\p{Default_Ignorable_Code_Point}--[\p{L}\p{M}\u200c\u200d]]+)")
_LETTER = r"a-zA-Z\u00aa-\u1fff\u2c00-\u2fff\u3040-\ud7ff"  # all others of the patterns below are ASCII's
_IN_URL = r"[^\s\xa0\u2000-\u200a\u202f\u3000-\u303f\uff00-\uff65<>“”„«»‹›"
_CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_OF_URL = rf"(?<![a-zA-Z\d])[{_CJK}]|[{_CJK}](?=[{_CJK}]{{0,40}}+[/&=#%])"  # others are glued to its last word
_OWN_BRACKET = r"(?<=//[^\s()<>]{1,300}\w\([^\s()<>]{1,200})\)"  # as in `/wiki/Python_(language)`
_URL = rf'(?:{_IN_URL}"{_CJK}]|{_OF_URL})*(?:{_IN_URL}"{_CJK}\'‘’.,;:!?)\]}}*_]|{_OF_URL}|{_OWN_BRACKET})'
ADDRESS = (  # of the web, of mail
    rf"""\b(?:[a-zA-Z][\w+.-]{{1,20}}+://|www\.|(?:mailto|tel):){_URL}
    | \b(?:[a-zA-Z\d-]{{1,63}}+\.){{1,8}}?(?:[a-z]{{2,24}}+/{_URL}|(?:com|org|net|edu|gov|io|dev)\b)
    | (?<![\w.+-])[\w.+-]{{1,64}}+@[\w-]{{1,63}}+(?:\.[\w-]{{1,63}}+)+"""
)
# Addresses; handles and tags; Apple's variables; templates, ICU; printf; variables; Pandoc's marks; shortcodes.
UNTRANSLATED = (
    rf"""(?:{ADDRESS} | (?<![\w@/&\#.])(?:@\w[\w-]*+(?:[.@/]\w[\w-]*+)*|\#(?:[{_LETTER}][{_LETTER}\w]*+|\d+\b))"""
    r"""
    | %(?:\d\$)?\#@\w+@ | \{\{.{0,1000}?\}\} | [{<]%[\s\S]{0,1000}?%[}>] | \[\[[^\[\]\n]{1,200}\]\]
    | \\(?:begin\{.{1,2000}?\\end|\w{0,9}ref|cite\w{0,9}|label)\{[^{}]{1,100}\}
    | \{\s*[\w.-]{1,60}\s*,\s*(?:plural|select(?:ordinal)?|number|date|time|duration|spellout|ordinal|choice)\b
      (?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,200}+\}){0,200}+\}){0,200}+\}){0,1000}+\}
    | \{\s?[\#.:][^{}\n]{0,200}\} | [\#$%]?\{\s{0,3}[^{}\s]{0,100}+\s{0,3}\}
    | (?<!%)(?:(?<!\d)|(?=%(?:\d+\$|[(<]\w)))
      (?:%(?:\(\w{1,60}\)|<\w{1,60}>|\d+\$)?[-+\#0']*[\d*]*(?:\.[\d*]+)?(?:[a-zA-Z]\w*|@))+%{0,2}
    | (?<!%)%L?\d{1,2}(?!\d) | %% | (?<=\S)(?:(?<!~)~[\w+-]{1,6}~(?!~)|\^[\w+-]{1,6}\^)
    | \$t?\((?:[^()\s]|(?<=,)\s|\([^()]{0,200}\)){1,200}+\) | (?<![\w$])\$[a-zA-Z_]\w*+(?:\$(?!\w))?
    | (?<![^\s(\[]):[a-zA-Z_][\w+-]*+:? | (?<!\w)__\w+?__(?!\w) | \ufffc+)"""
)
KEPT = regex.compile(rf"{UNTRANSLATED}(?:['’][{_LETTER}]{{1,2}}(?![{_LETTER}]))?", regex.VERBOSE | regex.ASCII)
# Emoji, arrows and what private fonts show: they separate words.
_SEPARATOR = regex.compile(
    r"(?:(?:[#*\d]\ufe0f?\u20e3|\p{Extended_Pictographic}|\p{Regional_Indicator}|[\p{Co}\u2190-\u21ff\u2500-\u2bff])"
    r"[\ufe0e\ufe0f\u200d\p{Emoji_Modifier}\U000e0020-\U000e007f]*)+"
)
_BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">", '"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "„": "“"}


def kept_places(text: str) -> list[tuple[int, int, str]]:
    """Return start and end of what is kept in a text, and the text of its point: a stand-in, or a space.

    With it go the letters of a word that it is in the middle of, signs between two such things, brackets around one.
    """
    kept = [(*match.span(), STAND_IN) for match in KEPT.finditer(text)]
    covered = KEPT.sub(lambda match: "_" * len(match[0]), text)  # of words, but no letter
    result = [(*match.span(), " ") for match in _SEPARATOR.finditer(covered)]
    covered, number = _SEPARATOR.sub(lambda match: " " * len(match[0]), covered), 0
    for begin, end in word_places(covered) if kept else ():
        first = number
        while number < len(kept) and kept[number][0] < end:
            number += 1
        result += _of_word(covered, begin, end, kept[first:number])
    return sorted(result)


def has_words(text: str) -> bool:
    """Return whether a text has letters besides what is kept; without them a model would invent something."""
    for start, end, _ in reversed(kept_places(text)):
        text = text[:start] + text[end:]
    return any(map(str.isalpha, text))


def _of_word(text: str, begin: int, end: int, kept: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Return what is kept of a word, of which at least this is."""
    places = [index for index in range(begin, end) if is_inner(text[index])]  # of its other letters
    if places and any(places[0] < start and stop <= places[-1] for start, stop, _ in kept):
        return [(min(places[0], kept[0][0]), max(places[-1] + 1, kept[-1][1]), STAND_IN)]
    result: list[tuple[int, int, str]] = []
    for start, stop, stand_in in kept:
        if result and not any(result[-1][1] <= place < start for place in places):
            start = result.pop()[0]
        while begin < start and stop < end and _BRACKETS.get(text[start - 1]) == text[stop]:
            start, stop = start - 1, stop + 1
        result.append((start, stop, stand_in))
    return result
