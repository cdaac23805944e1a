"""Catalogues in lines of text: gettext's `.po` and `.pot`, Apple's `.strings`, Java's `.properties`."""

import contextlib
import gettext
import json
import re
from dataclasses import replace
from pathlib import Path

import regex

from ..errors import reading
from .catalogue import IN_C, MARK, NUMBERS, Catalogue, Edit, Entry, Filling, unescaped

_STRINGS = r'(?:\s*+"(?:[^"\\\n]|\\.)*+"[ \t]*+(?:\r?\n|\Z))++'


class GettextFile(Catalogue):
    """A catalogue whose header has its plural forms; that of a template is completed."""

    pattern = regex.compile(
        rf"""^\ufeff?+(?:(?P<comments>(?:[ \t]*+\#(?!~)[^\n]*+\n)*+)(?P<start>)[ \t]*+
        (?:msgctxt(?P<context>{_STRINGS})\s*+)?+msgid(?P<id>{_STRINGS})(?:\s*+msgid_plural(?P<plural>{_STRINGS}))?+
        (?P<targets>(?:\s*+msgstr(?:\[\d++\])?+(?P<form>{_STRINGS}))++) | (?:[ \t]*+\#[^\n]*+(?:\n|\Z))++)""",
        regex.MULTILINE | regex.VERBOSE,
    )
    declaration = re.compile(rb'(?m)^[ \t]*(?:msgstr[ \t]*)?"[^\n]*?Content-Type:[^\n]*?charset=(?!CHARSET)([\w.:-]+)')
    gap = re.compile(r"^[ \t\ufeff]*[^\s\ufeff]", re.MULTILINE)
    counts: tuple[int, ...] = ()

    def _entries(self, match: regex.Match) -> list[Entry]:
        if match["id"] is None:  # comments
            return []
        context, source, plural = (_text(match[name]) for name in ("context", "id", "plural"))
        targets = tuple(map(_text, match.captures("form")))
        flags = ", ".join(re.findall(r"(?m)^[ \t]*#,(.*)", match["comments"])).strip()
        notes = "\n".join(re.findall(r"(?m)^[ \t]*#[.] ?(.*)", match["comments"]))
        is_whole = all(targets) and (not plural or len(targets) >= len(self.counts))
        state = "fuzzy" if re.search(r"\bfuzzy\b", flags) else "translated" if is_whole else "untranslated"
        place = match
        if not source and match["context"] is None:
            state, self.counts = "kept", _counts(targets[0])
            if self.language and not self.counts and ("fuzzy" in flags or re.search("CHARSET|INTEGER", match[0])):
                state, place = "header", (*match.span(), self._header(match[0]))
        elif re.search("[\udc80-\udcff]", match[0]):
            state, notes = "refused", f"not {self.encoding}, which the header names"
        elif plural and not self.counts:
            state, notes = "refused", "the header has no Plural-Forms that can be read"
        name, counts = f"{context}\4{source}" if match["context"] else source, self.counts if plural else ()
        sources = (source, plural) if plural else (source,)
        return [Entry(name, sources, targets, state, self.line, context, flags, notes, counts, place=place)]

    def _header(self, text: str) -> str:
        """Return a template's header with the language that it is for."""
        with reading("plural forms (pip install 'vaswani_transformer[documents]')"):
            from babel.messages.plurals import get_plural

            language = self.language.replace("-", "_")
            values = {"Language": language, "Plural-Forms": f"{get_plural(language)}"}
        text = re.sub(r"(?m)^#, fuzzy\r?\n", "", text.rstrip("\r\n") + self.newline).replace("=CHARSET", "=UTF-8")
        for name, value in values.items():
            text = re.sub(rf'(?m)^"{name}:.*{self.newline}', "", text) + f'"{name}: {value}\\n"{self.newline}'
        self.counts = _counts(text)
        return text

    def _edits(self, entry: Entry, filling: Filling) -> list[Edit]:
        match, newline = entry.place, self.newline
        comments = re.sub(rf"(?m)^[ \t]*#(?:\|| {MARK}).*\n", "", match["comments"])  # the earlier source, ours
        if entry.state != "fuzzy":
            comments, number = re.subn(r"(?m)^[ \t]*#,", "#, fuzzy,", comments, count=1)
            comments += "" if number else f"#, fuzzy{newline}"
        lines, there = [], dict(enumerate(match.captures("form") if entry.state != "fuzzy" else ()))
        for form, target in enumerate(filling.targets):
            strings = [f'"{line.translate(IN_C)}"' for line in re.findall(r"[^\n]*\n|[^\n]+", target)]
            name = f"msgstr[{form}]" if match["plural"] else "msgstr"
            made = [f"{name} {strings[0]}"] if len(strings) == 1 else [f'{name} ""', *strings]
            lines += [name + there[form].rstrip("\r\n")] if _text(there.get(form)) else made
        start, end = match.end() - len(match["targets"].lstrip()), match.start() + len(match[0].rstrip("\r\n"))
        return [(*match.span("comments"), f"# {filling.note}{newline}{comments}"), (start, end, newline.join(lines))]


def _text(strings: str | None) -> str:
    """Return what C strings mean."""
    return unescaped("".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', strings or "")))


def _counts(header: str) -> tuple[int, ...]:
    """Return an example of the numbers of each plural form; nothing if the header has no rule for them."""
    rule = re.search(r"nplurals\s*=\s*([1-9])\s*;\s*plural\s*=\s*([^;\n]+)", header)
    with contextlib.suppress(ValueError, ZeroDivisionError, TypeError):  # the last: there is none
        forms = list(map(gettext.c2py(rule[2]), NUMBERS))
        return tuple(NUMBERS[forms.index(n)] if n in forms else 2 for n in range(int(rule[1])))
    return ()


class StringsFile(Catalogue):
    """Apple's `.strings`, in UTF-8 or UTF-16; a comment before each text that is filled."""

    comment, assignment, gap = "/* {} */", "{} = {};", re.compile(r"[^\s\ufeff]")
    pattern = regex.compile(
        r'(?s)/\*(?:.*?\*/|.*+\Z)|//[^\n]*+|(?P<start>)(?:"(?P<key>(?:[^"\\]|\\.)*+)"|(?P<key>[\w.$-]++))\s*+=\s*+'
        r'(?P<written>"(?P<value>(?:[^"\\]|\\.)*+)"|(?P<value>[\w.$-]++))\s*+;'
    )

    def _entries(self, match: regex.Match) -> list[Entry]:
        value = match["value"]
        return [] if value is None else [self._own(unescaped(match["key"]), (unescaped(value),), match)]

    def _edits(self, entry: Entry, filling: Filling) -> list[Edit]:
        comment, value = self.comment.format(filling.note) + self.newline, self._escaped(filling.targets[0])
        if entry.place:
            return [(*entry.place.span("start"), comment), (*entry.place.span("written"), value)]
        line, end = self.assignment.format(self._key(entry.id), value), len(self.text.rstrip("\r\n"))
        return [(end, end, self.newline + comment + line)]

    def _escaped(self, text: str) -> str:
        return f'"{text.translate(IN_C)}"'

    _key = _escaped


class PropertiesFile(StringsFile):
    """Java's `.properties`, in UTF-8 or Latin-1; an ASCII file stays one."""

    comment, assignment = "# {}", "{} = {}"
    pattern = regex.compile(
        r"(?sma)^\ufeff?+(?P<start>)[ \t\f]*+(?:[#!][^\r\n]*+|(?P<key>(?:[^\s:=\\#!]|\\.)(?:[^\s:=\\]|\\.)*+)[ \t\f]*+"
        r"[:=]?+[ \t\f]*+(?P<written>(?P<value>(?:[^\\\r\n]|\\(?:\r\n|.))*+)))"
    )

    def __init__(self, path: Path, *arguments, **options):
        with reading(path):
            if re.search("[\udc80-\udcff]", path.read_text("utf-8", "surrogateescape")):  # bytes that are not UTF-8
                self.encoding, self.errors = "latin-1", "backslashreplace"
        super().__init__(path, *arguments, **options)

    def _entries(self, match: regex.Match) -> list[Entry]:
        """Return the entry, of Java's MessageFormat if it has arguments such as `{0}`."""
        entries = super()._entries(match)
        return [replace(e, flags="java-format" if re.search(r"\{\d", "".join(e.sources)) else "") for e in entries]

    def _escaped(self, text: str) -> str:
        is_ascii = self.head.isascii() or self.encoding == "latin-1"
        text = json.dumps(text, ensure_ascii=is_ascii)[1:-1].replace('\\"', '"')
        return "\\" + text if text[:1] == " " else text  # which would be lost

    def _key(self, text: str) -> str:
        return re.sub(r"[\s:=#!]", r"\\\g<0>", self._escaped(text))
