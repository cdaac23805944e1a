"""Messages of programs, of which a translation has to have each placeholder once, and the edges of the source.

Placeholders are shown to the model, as in training. Of its best translations the first that is valid is taken; if none
is, the message is translated as a document, without them. What is invalid even so stays untranslated, with the reason.
"""

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import regex

from ..catalogues.catalogue import CODE, CODES, Entry, Filling, plural_forms, read_label, with_codes, without_mark
from ..data.memory import Memory
from .kept import ADDRESS, STAND_IN, UNTRANSLATED, has_words
from .pieces import Document, Kind, Piece, text_piece

NO_WORDS = "it has no words"
_MARKUP = (
    rf"[{chr(CODE)}-\U0010fffd] | <!(?:--.*?--|[^<>]*)> | <(?:script|style)\b(?s:.*?)</(?:script|style)\s*>"
    r" | (?<!\w)`[^`'\n%{$~]+`(?!\w) | <(?:code|kbd|samp)\b[^<>%{$~]*>[^<>%{$~]*</(?:code|kbd|samp)>"
    r" | </?(?:\d+\s*/?|[A-Za-z\xaa-\uffff][^<>]*)> | <%[-=@\s].*?%> | < | &\#?\w+;"
    r" | \$t\([^()]*\) | @(?:\.\w+)?:(?:\([\w.]+\)|[\w.]+) | \$\{[^{}]*\} | \{\{.*?\}\}"
    r" | \{\s*\w+\s*,(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"  # ICU's
)
# As in C, Objective C, PHP, Perl, Python and Ruby; a sign alone, which programs may refuse, counts as one too.
_PERCENT = (
    r"%(?:\{\w+\}|(?:\d+\$|\(\w+\)|<\w+>(?=[a-z]))?[-+\ \#0'Iq]*(?:\d+|\*(?:\d+\$)?)?(?:\.(?:\d+|\*(?:\d+\$)?)?)?"
    r"(?:<PRI\w+>|(?:hh|ll|[hljztLqw])?[a-zA-Z@%]))|%"
)
_GCC = r"%(?:[<>{}%]|(?:\d+\$)?[-+#0q]*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:ll|[hlwzt])?[a-zA-Z@])|%(?!')"
_STYLES = dict.fromkeys(("gcc-internal", "gfc-internal"), _GCC)
_STYLES |= {"sh": r"\$\w+", "object-pascal": r"%(?:\d+:)?-?(?:\d+|\*)?(?:\.(?:\d+|\*))?[a-zA-Z]|%%?"}
_STYLES |= {"boost": rf"%\|[^|]*\||%\d+%|{_PERCENT}"}
_STYLES |= dict.fromkeys(("python-brace", "perl-brace", "csharp", "java"), r"\{[^{}]*\}|[{}]")
_STYLES |= dict.fromkeys(("lisp", "scheme"), r"~(?:[-+]?\d+|'.|[vV\#])?(?:,(?:[-+]?\d+|'.|[vV\#])?)*[:@]*(?:.|$)")
_STYLES |= dict.fromkeys(("qt", "qt-plural", "kde", "kde-kuit", "smalltalk", "ycp"), r"%L?(?:\d{1,2}|n)")
_HAS_PLACE = re.compile(r"%(?!\d+[$:]|[({%>}]|<(?!PRI)|\||L?\d+%?$|m?$)|~(?![%~\s]|$)|\{[:!}]")  # the next argument
_NUMBER = re.compile(r"(?<!%)%(\d+)\$")
_NUMBERING = {"c", "objc", "gcc-internal", "gfc-internal", "php", "perl", "java-printf", "awk", "tcl", "ruby", "boost"}
_NUMERIC = re.compile(r"%(?:\d\$)?[l\d]*[diu]|%n|%L?\d|%[{(]\w+[})]d?|\{+\s*[#\w]*\s*\}+")
# ICU's plurals and choices, whose cases are messages of their own.
_CHOICE = regex.compile(
    r"""(?sx)(?(DEFINE)(?P<block>\{(?:[^{}]|(?&block))*\}))
    (?P<head>\{\s*\w+\s*,\s*(?P<kind>plural|select)\s*,(?:\s*offset:\d+)?)(?:\s*(?P<key>=?\w+)\s*(?P<case>(?&block)))+\s*\}"""
)
_ADDRESS = regex.compile(ADDRESS, regex.VERBOSE | regex.ASCII)
_TAG = re.compile(r"<(/?)([A-Za-z][\w:.-]*|\d+)[^<>]*?(/?)>")
_FULL_STOPS = "。۔।։።\u104b\u0f0d\u17d4\u1c7e\uabeb"  # Chinese to Ethiopic; Burmese, Tibetan, Khmer, Santali, Meitei
_END = regex.compile(rf"(?:\s*+(?:\.{{3}}|[….:!?：！？؟;\u037e{_FULL_STOPS}]))?$")
_ASCII_MARKS = {"…": "...", "：": ":", "！": "!"} | dict.fromkeys(_FULL_STOPS, ".") | dict.fromkeys("？؟;\u037e", "?")
# Behind letters of these scripts the mark of their own, where the source's would be added.
_OWN_MARKS = {
    (r"[\p{Han}\p{Hiragana}\p{Katakana}ー]$", "."): "。", (r"\p{Arabic}$", "?"): "؟", (r"[\p{Thai}\p{Lao}]$", "."): "",
}  # fmt: skip
_NAME = re.compile(r"\w+(_\w+)+|translator-credits|Your (?:names|emails)")  # for whoever translates, and programs
# Letters that have accelerators on them, and what is between lines or columns.
_LETTERS = regex.compile(r"(?V1)[\pL\pN--[\p{Lo}--[\p{Arabic}\p{Hebrew}\p{Thai}]]]")
_GAPS = regex.compile(r"(?s:<style\b.*?</style>)(*SKIP)(*FAIL)|(\n|(?<=[^\s.!?:;,])(?: {2,}|\t+)(?=\S))")


class _Segment(NamedTuple):
    """What is translated at once: a line of a message, or lines that a sentence goes over."""

    text: str
    flags: str
    count: int | None  # of a plural form, an example of its numbers
    is_alone: bool  # whether it is all of the message, so that arguments can be numbered
    codes: tuple[str, ...]  # the inline elements of the entry, which a model sees as the file has them


def _kinds(flags: str) -> list[str]:
    """Return the kinds of format that flags name: `c` of `c-format`."""
    return [kind for kind in re.findall(r"([\w-]+)-format", flags) if not kind.startswith("no-")]


@cache
def pattern_of(flags: str) -> regex.Pattern:
    """Return the pattern of placeholders by an entry's flags, such as `c-format`; without them by their looks."""
    style = "|".join(_STYLES.get(kind, _PERCENT) for kind in _kinds(flags)) or rf"{UNTRANSLATED}|\$\d+|\|"
    return regex.compile(rf"{_MARKUP}|{style}", regex.VERBOSE | regex.DOTALL | regex.ASCII)


def problem(source: str, target: str, flags: str = "", codes: tuple[str, ...] = ()) -> str:
    """Return why a translation is not valid; empty if it is."""
    target = target if _NUMBER.search(source) else _NUMBER.sub("%", target)
    find = pattern_of(flags).findall
    wanted, there = (Counter(_generic(part, text) for part in find(text)) for text in (source, target))
    for part in (wanted - there) | (there - wanted):
        return f"{part}: {wanted[part]} in the source, {there[part]} in the translation"
    for address in _ADDRESS.findall(source) if _kinds(flags) else ():
        if address not in target:
            return f"{address} is not in the translation"
    return "its tags do not nest" if _is_nested(source, codes) and not _is_nested(target, codes) else ""


def _generic(part: str, text: str) -> str:
    """Return a placeholder of a text; `<file>`, which is no tag and may be translated, as `<>`."""
    name = re.fullmatch(r"<(?!%|(?:br|hr|img|li|p|wbr)\b)([^<>=/]+)>", part)
    return "<>" if name and f"</{name[1]}" not in text else part


def _is_nested(text: str, codes: tuple[str, ...]) -> bool:
    opened = []
    for close, name, is_empty in _TAG.findall(with_codes(text, codes)):
        if close and (not opened or opened.pop() != name):
            return False
        opened += [] if close or is_empty else [name]
    return not opened


def _without_doubled(text: str, flags: str) -> str:
    """Return a text of Java with single apostrophes, unless one of them quotes."""
    is_plain = "java" in _kinds(flags) and "'{" not in text.replace("''", "")
    return text.replace("''", "'") if is_plain else text


def in_order(source: str, target: str, flags: str = "", may_number: bool = True) -> str:
    """Return a valid translation with the arguments that changed places numbered, as `%2$s`; empty if they cannot be.

    C's way, which Python and what has no flag do not have. Java's apostrophes, one of which quotes, are doubled.
    """
    if _without_doubled(f"{source}''", flags) != f"{source}''":
        target = re.sub("''?", "''", target)
    places = [_generic(part, source) for part in pattern_of(flags).findall(source) if _HAS_PLACE.match(part)]
    left, numbers = dict(enumerate(places, 1)), []

    def numbered(match: regex.Match) -> str:
        part, number = _NUMBER.sub("%", match[0]), _NUMBER.match(match[0])
        if not _HAS_PLACE.match(part):
            return match[0]
        plain = _generic(part, source)
        number = int(number[1]) if number else next((number for number, other in left.items() if other == plain), 0)
        numbers.append(number if left.pop(number, "") == plain else 0)
        return f"%{number}${part[1:]}"

    result = pattern_of(flags).sub(numbered, target)
    if _NUMBER.search(source) or (numbers == sorted(numbers) and not _NUMBER.search(target)):
        return target
    may_number &= all(numbers) and not _NUMBERING.isdisjoint(_kinds(flags)) and "*" not in "".join(places)
    return result if may_number else ""


def _with_end(source: str, target: str) -> str:
    """Return a translation that ends with the punctuation of its source, in its own script if it has it."""
    wanted, there = _END.search(source)[0], _END.search(target)[0]
    is_same = len({_ASCII_MARKS.get(mark.strip(), mark.strip()) for mark in (wanted, there)}) == 1
    text = target.removesuffix(there)
    own = (mark for (letters, other), mark in _OWN_MARKS.items() if wanted == other and regex.search(letters, text))
    return target if is_same else text + next(own, wanted)


class Message:
    """A text as segments, and what is around them: white space, line breaks, an accelerator."""

    def __init__(self, text: str, count: int | None, entry: Entry, memory: Memory | None):
        self.text, self.mark, self.letter = read_label(text)
        self.remembered = self._remembered(text, count, entry, memory) if memory else ""
        self.parts: list[list] = []  # of each its lines, a segment unless it is kept, and what is behind it
        pieces, width = [] if self.remembered else _GAPS.split(self.text), max(map(len, self.text.split("\n")))
        for line, behind in zip(pieces[::2], [*pieces[1::2], ""], strict=False):
            lines, _, gap = self.parts[-1] if self.parts else ([""], None, "")
            same = line.removeprefix(re.match(r"\s*", lines[-1])[0])  # of an indented text
            is_sentence = gap == "\n" and re.search(r"[\w,)]$", lines[-1]) and regex.match(r"(?!\w+:)\p{Ll}", same)
            if is_sentence and len(lines[-1]) > 40 and len(f"{lines[-1]} {line.split()[0]}") > width - 10:
                self.parts[-1] = [[*lines, line], None, behind]  # it was broken, as its next word had no room
            else:
                self.parts.append([[line], None, behind])
        pattern, is_alone = pattern_of(entry.flags), not _GAPS.search(self.text.strip())
        for part in self.parts:
            joined, is_name = " ".join(" ".join(part[0]).split()), part[2].strip("\n") and part[0][0][:1] in " -"
            if not (is_name or _NAME.fullmatch(self.text)) and has_words(pattern.sub("0", joined)):
                part[1] = _Segment(joined, entry.flags, count, is_alone, entry.codes)

    def _remembered(self, label: str, count: int | None, entry: Entry, memory: Memory) -> str:
        """Return a memory's translation of all of the text, or of its plural form, if it is valid."""
        keys = f"{label}\4{count}", label, self.text
        known = [memory.exact(with_codes(key, entry.codes), entry.context) for key in keys]
        target = _without_codes(next(filter(None, known), "").strip(), self.text, entry.codes)
        is_valid = target and not problem(self.text, target, entry.flags, entry.codes)
        if not is_valid or ("\n" in self.text.strip()) > ("\n" in target):
            return ""
        target = in_order(self.text, target, entry.flags)
        if target and any(known[:2]) and without_mark(target, self.mark)[1]:  # it stays where it is
            self.mark, self.letter = "", re.search(rf"{self.mark}(\w)", target)[1]
        return target and re.sub(r"(?s)\S(?:.*\S)?", lambda _: target, self.text)

    def written(self, found: dict[_Segment, Filling], taken: set[str]) -> str:
        """Return the translation, with an accelerator that is not among those taken, and becomes one of them."""
        text = self.remembered
        for lines, segment, behind in self.parts:
            target = "\n".join(lines)
            if segment:
                [target], width, last = found[segment].targets, max(map(len, lines)), lines[-1]
                first, indent = (re.match(r"\s*", line)[0] for line in (lines[0], last))
                indents = {"initial_indent": first, "subsequent_indent": indent}
                wrap = partial(textwrap.fill, width=width, break_long_words=False, **indents)
                target = (wrap(target) if len(lines) > 1 else first + target) + last[len(last.rstrip()) :]
            text += target + behind
        text = text if self.remembered or "'{" in self.text else re.sub(r"(?<=\w)'(?=\{\w)", "’", text)  # or ICU quotes
        taken.update("" if self.mark else self.letter.lower())
        return self._with_accelerator(text, taken) if self.mark else text

    def _with_accelerator(self, text: str, taken: set[str]) -> str:
        """Return a text with the mark before the source's letter, a word's first, or any; CJK has one in brackets."""
        plain = pattern_of("").sub(lambda match: "\0" * len(match[0]), text)
        letters = [match.start() for match in _LETTERS.finditer(plain)]
        if not letters:
            end = _END.search(text.rstrip()).start()
            return f"{text[:end]}({self.mark}{self.letter.upper()}){text[end:]}"
        keys, own = [*map(str.lower, text)], self.letter.lower()
        place = min(letters, key=lambda n: (keys[n] in taken, keys[n] != own, text[:n][-1:].isalnum()))
        taken.add(keys[place])
        return text[:place] + self.mark + text[place:]


class _Choice:
    """A text with ICU's plural or choice: a message for each case, and each plural form of the language."""

    remembered = ""

    def __init__(self, match: regex.Match, read: Callable[[str, int | None], Any], language: str | None):
        texts = dict(zip(match.captures("key"), match.captures("case"), strict=True))
        cases = dict.fromkeys(texts)
        if match["kind"] == "plural":
            cases = {key: int(key[1:]) for key in texts if key[0] == "="} | plural_forms(language)
            texts = {key: text.replace("#", "{#}") for key, text in texts.items()}  # a placeholder as others are
        self.head, self.cases = match["head"], {}
        for key, count in cases.items():
            text = texts["other"] if key == "one" and count not in (None, 1) else texts.get(key, texts["other"])
            self.cases[key] = read(match.string.replace(match[0], text[1:-1]), count)
        self.parts = [part for case in self.cases.values() for part in case.parts]

    def written(self, found: dict[_Segment, Filling], taken: set[str]) -> str:
        """Return the translation; an apostrophe before a brace would quote it."""
        cases = (f" {key} {{{case.written(found, taken)}}}" for key, case in self.cases.items())
        return re.sub("(?<!')'(?=[{}])", "’", f"{self.head}{''.join(cases)}}}").replace("{#}", "#")


@dataclass
class Messages:
    """Translations of the entries of a catalogue; equal texts get one."""

    translate: Callable[[list[str]], Iterable[list[str]]]  # translations of each of some texts, the best first
    place: Callable[[list[Document]], Iterable[str]]  # translates documents, of which a message is a small one
    confidence: Callable[[list[str], list[str]], Iterable[float]]  # the model's, 0 to 1, in translations of texts
    origin: str  # what is noted as where translations come from
    memory: Memory | None = None  # whose translation of a text is taken, if it is valid
    language: str | None = None  # code of the target language, for ICU's plurals
    _found: dict[_Segment, Filling] = field(default_factory=dict, init=False)
    _taken: dict[str, set[str]] = field(default_factory=partial(defaultdict, set), init=False)  # keys by context

    def __call__(self, entries: list[Entry]) -> list[Filling]:
        """Return the translations of entries, or why there is none."""
        works = [[self._read(entry, *text) for text in entry.texts()] for entry in entries]
        segments = (segment for work in works for message in work for _, segment, _ in message.parts if segment)
        self._fill([segment for segment in dict.fromkeys(segments) if segment not in self._found])
        return [self._filling(*pair) for pair in zip(entries, works, strict=True)]

    def _read(self, entry: Entry, text: str, count: int | None) -> Message | _Choice:
        message, match = Message(text, count, entry, self.memory), _CHOICE.search(text)
        if message.remembered or not match or "other" not in match.captures("key") or "'{" in text:
            return message
        number = len(re.findall(r",\s*plural\s*,", text))
        is_single = number == 1 and "#" not in text.replace(match[0], "")
        are_few = "#" not in text and number < 3  # or their cases would be thousands
        is_clear = is_single or match["kind"] == "select" or are_few  # whose number it is
        read = lambda case, number: self._read(entry, case, number if count is None else None)  # noqa: E731
        return _Choice(match, read, self.language) if is_clear else message

    def _filling(self, entry: Entry, work: list[Message]) -> Filling:
        found = [self._found[segment] for message in work for _, segment, _ in message.parts if segment]
        found += [Filling((), 1.0, "the memory") for message in work if message.remembered]
        worst = min(found, key=lambda each: each.confidence, default=Filling((), 0.0, self.origin, NO_WORDS))
        if worst.reason:
            return worst
        taken = self._taken[entry.context] if entry.context else set()
        letters = [set(taken) for _ in work]  # plural forms may share theirs
        targets = tuple(message.written(self._found, each) for message, each in zip(work, letters, strict=True))
        taken.update(*letters)
        return worst._replace(targets=targets)

    def _fill(self, segments: list[_Segment]) -> None:
        """Translate segments: plural forms with a number first, then as they are, then without placeholders."""
        for shown in (_with_number, lambda segment: (segment.text, str)):
            left = [(each, *made) for each in segments if each not in self._found and (made := shown(each))]
            texts = [with_codes(_without_doubled(text, each.flags), each.codes) for each, text, _ in left]
            translated = self.translate(texts) if left else ()
            for (segment, _, restore), targets in zip(left, translated, strict=True):
                any(self._take(segment, restore(target)) for target in targets)
        left = [segment for segment in segments if segment not in self._found]
        for segment, target in zip(left, self.place(list(map(_document, left))) if left else (), strict=True):
            target = _without_surplus(segment, target)
            if not self._take(segment, target):
                reason = "its arguments would come in another order" if target else "nothing valid was written"
                reason = problem(segment.text, target, segment.flags, segment.codes) or reason
                self._found[segment] = Filling((), 0.0, self.origin, reason)
        made = [segment for segment in segments if self._found[segment].targets]
        sides = [segment.text for segment in made], [self._found[segment].targets[0] for segment in made]
        pairs = [list(map(with_codes, side, (segment.codes for segment in made))) for side in sides]
        for segment, confidence in zip(made, self.confidence(*pairs) if made else (), strict=True):
            self._found[segment] = self._found[segment]._replace(confidence=confidence)

    def _take(self, segment: _Segment, target: str) -> bool:
        """Take a translation if it is valid; returns whether it is."""
        target = _without_codes(target, segment.text, segment.codes)
        target = _with_end(segment.text, re.sub(r"[ \t\n]+", " ", target).strip()) if target else ""
        is_valid = target and not problem(segment.text, target, segment.flags, segment.codes)
        if is_valid and (target := in_order(segment.text, target, segment.flags, segment.is_alone)):
            self._found[segment] = Filling((target,), 1.0, self.origin)
        return segment in self._found


def _with_number(segment: _Segment) -> tuple[str, Callable[[str], str]] | None:
    """Return the text with a number for its one placeholder of such, and what gives a translation this one again."""
    places = [match for match in pattern_of(segment.flags).finditer(segment.text) if _NUMERIC.fullmatch(match[0])]
    sure = [match for match in places if re.search(r"#|%n|\bcount\b", match[0])]  # not a file's name
    places = sure or [match for match in places if segment.count not in (0, 1) or re.search(r"\d|[diu]$", match[0])]
    if segment.count is None or len(places) != 1:
        return None

    def restore(target: str) -> str:  # empty if the number is not there once
        parts = re.split(rf"(?<!\d){segment.count}(?!\d)", target)
        return places[0][0].join(parts) if len(parts) == 2 else ""

    return segment.text[: places[0].start()] + str(segment.count) + segment.text[places[0].end() :], restore


def _without_codes(target: str, source: str, codes: tuple[str, ...]) -> str:
    """Return a translation with characters for the inline elements of its source, as entries have them."""
    for character in CODES.findall(source):
        target = target.replace(codes[ord(character) - CODE], character, 1)
    return target


def _without_surplus(segment: _Segment, target: str) -> str:
    """Return a translation without placeholders that the model, which saw none, has made up."""
    pattern = pattern_of(segment.flags)
    left = Counter(pattern.findall(segment.text))

    def kept(match: regex.Match) -> str:
        left[match[0]] -= 1
        return match[0] if left[match[0]] >= 0 else ""

    return pattern.sub(kept, target)


def _document(segment: _Segment) -> Document:
    """Return a text as a document: tags are spans, other placeholders points."""
    pieces, end = [], 0
    for match in pattern_of(segment.flags).finditer(segment.text):
        pieces += [text_piece(segment.text[end : match.start()])] if match.start() > end else []
        tag, end = _TAG.fullmatch(with_codes(match[0], segment.codes)), match.end()
        is_point = not tag or tag[3] or _generic(match[0], segment.text) == "<>"
        kind = Kind.POINT if is_point else Kind.CLOSE if tag[1] else Kind.OPEN
        pieces.append(Piece(match[0], kind, STAND_IN * (kind is Kind.POINT), tag[2] if tag else ""))
    rest = segment.text[end:]
    return Document([*pieces, text_piece(rest)] if rest else pieces)
