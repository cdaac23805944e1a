"""Catalogues in XML: XLIFF, Qt Linguist's `.ts`, Android's `strings.xml`."""

import html
import re
from dataclasses import replace
from functools import cache, partial
from xml.parsers import expat

import regex

from .catalogue import CODE, MARK, Catalogue, Edit, Entry, Filling, logger, unescaped, with_codes

_ATTRIBUTES = r"""(?:[^<>"'/]|"[^"]*+"|'[^']*+'|/(?!>))*+"""
# CDATA, and what is kept as a whole: comments, codes of a format, what XLIFF protects, tags, a document's own entities.
_INLINE = regex.compile(
    rf"""<!\[CDATA\[(?P<data>.*?)\]\]> | <!--.*?--> | <(?P<name>bpt|ept|it|ph|ut|xliff:g
    |mrk(?=[^<>]*\s(?:translate=["']no|mtype=["']protected)["']))(?=[\s/>]){_ATTRIBUTES}(?:/>|>.*?</(?P=name)\s*>)
    | </?\w{_ATTRIBUTES}/?> | &(?!(?:amp|lt|gt|quot|apos|\#\w+);)[\w.:-]+;""",
    regex.DOTALL | regex.VERBOSE,
)
# A sentence of XLIFF 1.2, in which marks of other kinds may be.
_SEGMENT = regex.compile(
    rf"""(?s)(?&kept)(*SKIP)(*FAIL)|<mrk\b(?=[^<>]*\smtype=["']seg["']){_ATTRIBUTES}(?:/>|>((?:(?&kept)|(?!</?mrk\b)."""
    rf"""|(<mrk\b{_ATTRIBUTES}(?:/>|>(?:(?&kept)|(?!</?mrk\b).|(?2))*+</mrk\s*>)))*+)</mrk\s*>)"""
    r"""(?(DEFINE)(?P<kept><!--.*?-->|<!\[CDATA\[.*?\]\]>))"""
)
_IN_ANDROID = str.maketrans({"\\": "\\\\", '"': '\\"', "'": "\\'", "\n": "\\n", "\t": "\\t"})


@cache
def _element(names: str, tag: str = "(?!)") -> regex.Pattern:
    """Return the pattern of elements with the white space before them, and of single tags."""
    return regex.compile(
        rf"(?P<space>\s*+)(?P<start>)<(?P<name>{names})(?=[\s/>])(?P<attributes>{_ATTRIBUTES})(?:/>|>(?P<inner>(?:[^<]++"
        rf"|<!--.*?-->|<!\[CDATA\[.*?\]\]>|<(?!/(?P=name)\s*>))*+)</(?P=name)\s*>)"
        rf"|<!--.*?-->|<!\[CDATA\[.*?\]\]>|<(?P<name>{tag})(?=[\s>])(?P<attributes>{_ATTRIBUTES})>",
        regex.DOTALL,
    )


def _children(match: regex.Match, names: str) -> list[regex.Match]:
    """Return the elements of some names in another one, which do not contain each other."""
    start, end = match.span("inner")
    proposals = match.string.find("<alt-trans", start, end)  # other tools' targets
    found = _element(names).finditer(match.string, start, end if proposals < 0 else proposals)
    return [child for child in found if child["name"]]


def _child(match: regex.Match, names: str) -> regex.Match | None:
    return next(iter(_children(match, names)), None)


def _attribute(element: regex.Match | None, name: str) -> str:
    """Return the value of an attribute, empty if there is none."""
    match = re.search(rf"""\s{name}\s*=\s*(["'])(.*?)\1""", element["attributes"] if element else "", re.DOTALL)
    return html.unescape(match[2]) if match else ""


def _with(element: regex.Match | None, values: dict[str, str]) -> str:
    """Return the attributes of an element with other values of some, those with an empty one left out."""
    attributes = element["attributes"] if element else ""
    for name, value in values.items():
        attributes = re.sub(rf"""\s+{name}\s*=\s*(?:"[^"]*"|'[^']*')""", "", attributes.rstrip())
        attributes += f' {name}="{value}"' if value else ""
    return attributes


class _XmlFile(Catalogue):
    """A catalogue in XML, whose entries are elements; expat checks it, and patterns find the spans."""

    is_xml, errors = True, "xmlcharrefreplace"
    # Comments and elements without an end.
    gap = re.compile(r"<(?:!--|!\[CDATA\[|(?:trans-unit|unit|message|string|string-array|plurals)[\s/>])")
    declaration = re.compile(rb"""^\s*<\?xml[^>]*encoding=["']([\w.:-]+)""")

    def takes(self, entry: Entry, filling: Filling | None) -> bool:
        """Return whether the texts are XML whose elements nest, with prefixes and entities that this file declares."""
        root = regex.match(rf"(?s).*?<(?:xliff|TS|resources)\b{_ATTRIBUTES}>", self.head)
        if not (root and super().takes(entry, filling)):
            return False
        texts = (f"<t>{self._xml(target, entry.codes)}</t>" for target in filling.targets)
        try:
            expat.ParserCreate(namespace_separator=" ").Parse(root[0] + "".join(texts))
        except expat.ExpatError:
            logger.warning(f"{self.path}, line {entry.line}: not filled, its XML needs what the file does not declare")
            return False
        return True

    def _text(self, element: regex.Match | None, codes: list[str], is_target: bool = False) -> str:
        """Return the text of an element, whose inline elements are added to `codes`; those of a target may be there."""
        known = dict(enumerate(codes)) if is_target else {}

        def written(inline: regex.Match) -> str:
            if inline["data"] is not None:
                return html.escape(inline["data"])
            number = next((number for number, code in known.items() if code == inline[0]), len(codes))
            codes[number : number + 1] = [known.pop(number, inline[0])]
            return chr(CODE + number)

        return html.unescape(_INLINE.sub(written, _SEGMENT.sub(r"\1", (element and element["inner"]) or "")))

    def _xml(self, text: str, codes: tuple[str, ...] = ()) -> str:
        """Return text as XML, with inline elements."""
        return with_codes(html.escape(text, quote=False), codes)


class XliffFile(_XmlFile):
    """XLIFF 1.2, and 2.x, whose units may have several segments: the texts of one entry."""

    pattern, file, kept = _element("trans-unit|unit", "file|/?group"), "", ()  # whether file and groups are kept

    def _entries(self, match: regex.Match) -> list[Entry]:
        if (name := match["name"]) == "file":
            self.file = _attribute(match, "original") or _attribute(match, "id")
            self.language = _attribute(match, "target-language") or self.language
        if name in ("file", "group"):
            outer = self.kept if name == "group" else ()
            self.kept = *outer, (_attribute(match, "translate") or "no" * any(outer[-1:])) == "no"
        self.kept = self.kept[:-1] if name == "/group" else self.kept
        if name in (None, "file", "group", "/group"):
            return []
        codes, sources, targets, segments, is_old = [], [], [], [], name == "trans-unit"
        for segment in [match] if is_old else _children(match, "segment"):
            target = _child(segment, "target")
            sources.append(self._text(_child(segment, "source"), codes))
            targets.append(self._text(target, codes, is_target=True))
            mark = re.match(r"new|initial|needs-(review)?", _attribute(target if is_old else segment, "state"))
            has_text = re.sub(r"</?(?:g|mrk|pc)\b[^<>]*>", "", with_codes(targets[-1], tuple(codes))).strip()
            state = "untranslated" if not has_text else "translated" if not mark else "kept" if mark[1] else "fuzzy"
            segments.append((segment, target, state))
        get, states = partial(_attribute, match), [state for _, _, state in segments]
        state = next((state for state in ("untranslated", "fuzzy", "kept") if state in states), "translated")
        state = "translated" if state != "untranslated" and get("approved") == "yes" else state
        state = "kept" if (get("translate") or "no" * any(self.kept[-1:])) == "no" or not any(sources) else state
        notes = "\n".join(self._text(note, []) for note in _children(match, "note") if f">{MARK}" not in note[0])
        texts, context = (tuple(sources), tuple(targets)), get("resname") or get("name") or ""
        name, place = f"{self.file}\4{get('id')}", (match, segments)
        return [Entry(name, *texts, state, self.line, context, "", notes, (), tuple(codes), place)]

    def _edits(self, entry: Entry, filling: Filling) -> list[Edit]:
        """Return the targets that lacked, and a note: in 1.2 behind the target, in 2.x among the unit's notes."""
        (match, segments), note = entry.place, f"<note>{self._xml(filling.note)}</note>"
        is_old = match["name"] == "trans-unit"
        edits = [(*old.span(), "") for old in _children(match, "note") if f">{MARK}" in old[0]]
        marks = {"state": "needs-translation", "state-qualifier": "mt-suggestion"} if is_old else {}
        outer = {"approved": ""} if is_old else {"state": "initial", "subState": "vaswani:mt"}
        for (segment, target, state), text in zip(segments, filling.targets, strict=True):
            if state == "translated":
                continue
            last = target or _child(segment, "seg-source") or _child(segment, "source")
            space = last["space"]
            written = f"{space}<target{_with(target, marks)}>{self._xml(text, entry.codes)}</target>"
            edits.append((last.start() if target else last.end(), last.end(), written + (space + note) * is_old))
            edits.append((*segment.span("attributes"), _with(segment, outer)))
        if not is_old:
            notes, first = _child(match, "notes"), _child(match, "originalData|segment|ignorable")
            if notes and notes["inner"] is None:  # `<notes/>`
                edits, notes = [*edits, (*notes.span(), "")], None
            place = notes.start("inner") if notes else first.start()
            edits.append((place, place, note if notes else f"{first['space']}<notes>{note}</notes>"))
        return edits


class QtFile(_XmlFile):
    """Qt Linguist's `.ts`; what it calls vanished or obsolete is kept."""

    pattern, context = _element("message|name", "TS"), ""

    def _entries(self, match: regex.Match) -> list[Entry]:
        if match["name"] == "name":
            self.context = html.unescape(match["inner"] or "")
        elif match["name"] == "TS":
            self.language = _attribute(match, "language") or self.language
        if match["name"] != "message" or not (translation := _child(match, "translation")):
            return []
        codes, kind = [], _attribute(translation, "type")
        source, comment, extra = (self._text(_child(match, n), codes) for n in ("source", "comment", "extracomment"))
        forms, is_plural = _children(translation, "numerusform"), _attribute(match, "numerus") == "yes"
        targets = tuple(self._text(form, codes, is_target=True) for form in forms or [translation])
        state = "untranslated" if not all(targets) else "fuzzy" if kind == "unfinished" else "translated"
        if kind in ("vanished", "obsolete") or not source or (is_plural and not forms):  # lupdate writes the forms
            state = "kept"
        counts = (*dict.fromkeys(self.plurals.values()), 2, 2)[: len(forms)] if is_plural else ()  # none for fractions
        counts = (21, 2, 0) if len(counts) == 3 and "zero" in self.plurals else counts  # Qt's order of Latvian
        name = "\4".join(filter(None, (self.context, source, comment)))
        sources, notes = (source,) * (1 + is_plural), "\n".join(filter(None, (comment, extra)))
        return [Entry(name, sources, targets, state, self.line, self.context, "", notes, counts, tuple(codes), match)]

    def _edits(self, entry: Entry, filling: Filling) -> list[Edit]:
        translation, ours = _child(entry.place, "translation"), _child(entry.place, "translatorcomment")
        lines = [line for line in (ours["inner"] if ours else "").split("\n") if line and not line.startswith(MARK)]
        comment, space = "\n".join([*lines, self._xml(filling.note)]), translation["space"]
        parts = [self._xml(target, entry.codes) for target in filling.targets]
        if entry.counts:
            old = _children(translation, "numerusform") if entry.state == "untranslated" else [None] * len(parts)
            parts = [form["inner"] if self._text(form, []) else part for form, part in zip(old, parts, strict=True)]
            parts = [*(f"{space}    <numerusform>{part}</numerusform>" for part in parts), space]
        tag = f"<translation{_with(translation, {'type': 'unfinished'})}>"
        place = ours.span() if ours else (translation.start(), translation.start())
        note = (*place, f"{space}<translatorcomment>{comment}</translatorcomment>")
        return [note, (*translation.span(), f"{space}{tag}{''.join(parts)}</translation>")]


class AndroidFile(_XmlFile):
    """Android's `strings.xml`: strings, plurals, arrays."""

    pattern = _element("string-array|string|plurals")

    def _entries(self, match: regex.Match) -> list[Entry]:
        if not match["name"]:
            return []
        items, codes, is_plural = _children(match, "item"), [], match["name"] == "plurals"
        texts = [self._text(item, codes) for item in (items if match["name"] != "string" else [match])]
        if is_plural:
            of = dict(zip((_attribute(item, "quantity") for item in items), texts, strict=True))
            of = {"one": of.get("other", "")} | of if self.source is None else of
            texts = [of.get(form, "") for form in (("one", "other") if self.source is None else self.plurals)]
        key = f"{match['name']} {_attribute(match, 'name')}"
        if match["name"] == "string-array" and key in self.missing:
            texts += [""] * (len(self.missing[key].sources) - len(texts))
        state = "kept" if _attribute(match, "translatable") == "false" else ""
        flags = ' formatted="false"' * (_attribute(match, "formatted") == "false")
        return [replace(self._own(key, tuple(texts), match, is_plural, tuple(codes), state), flags=flags)]

    def _edits(self, entry: Entry, filling: Filling) -> list[Edit]:
        """Return the element with its texts, a comment before it; items that are there stay in their places."""
        name, key = entry.id.split(" ", 1)
        if match := entry.place:
            (start, end), space, attributes = match.span(), match["space"], match["attributes"]
        else:
            start = end = len(self.text[: self.text.rindex("</")].rstrip())
            space, attributes = f"{self.newline}    ", f' name="{key}"{entry.flags}'
        parts, note = [self._xml(target, entry.codes) for target in filling.targets], f"{space}<!-- {filling.note} -->"
        items = _children(match, "item") if match and match["inner"] else []
        old = {_attribute(item, "quantity") if entry.counts else n: item for n, item in enumerate(items)}
        new = dict(zip(self.plurals if entry.counts else range(len(parts)), parts, strict=True))
        edits = [(*old[key].span(), "") for key in old.keys() - new if self.source is None]  # not of the language
        place = items[-1].end() if items else 0
        for key, part in new.items():
            if not (item := old.get(key)):
                quantity = f' quantity="{key}"' if entry.counts else ""
                edits.append((place, place, f"{space}    <item{quantity}>{part}</item>"))
            elif self.source is None or not self._text(item, []):
                edits.append((*item.span(), f"{item['space']}<item{item['attributes']}>{part}</item>"))
        if items:
            return [(start, start, note), *edits]
        inner = "".join(item for *_, item in edits) + space if name != "string" else parts[0]
        return [(start, end, f"{note}{space}<{name}{attributes}>{inner}</{name}>")]

    def _text(self, element: regex.Match | None, codes: list[str], is_target: bool = False) -> str:
        """Return text without Android's escapes; white space counts in quotation marks alone, references are codes."""
        if re.fullmatch(r"\s*[@?][\w.:/+]+\s*", inner := (element["inner"] or "") if element else ""):
            codes.append(inner.strip())
            return chr(CODE + len(codes) - 1)
        parts = re.findall(r'(?s)"((?:[^"\\]|\\.)*)"|((?:[^"\\]|\\.)+)', super()._text(element, codes, is_target))
        shown = (quoted.replace(" ", "\0") or re.sub(r"(?a)\s+", " ", plain) for quoted, plain in parts)
        return unescaped("".join(shown).strip(" ")).replace("\0", " ")

    def _xml(self, text: str, codes: tuple[str, ...] = ()) -> str:
        text, is_plain = re.sub(r"^[@?]", r"\\\g<0>", text.translate(_IN_ANDROID)), text == " ".join(text.split())
        return super()._xml(text if is_plain else f'"{text}"', codes)
