"""Catalogues that are trees of keys and values: JSON and YAML."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from locale import locale_alias
from typing import NamedTuple

import yaml

from .catalogue import CATEGORIES, Catalogue, Edit, Entry, Filling

_DEEPEST = 200  # maps and lists in each other
_NULL = ("", "~", "null")  # in the place of a text or a map that is still to come
_LANGUAGES = {re.split("[_.@]", name)[0] for name in locale_alias} | {"ceb", "dsb", "gsw", "haw", "jv", "rm"}
_written = partial(json.dumps, ensure_ascii=False)
_PLURAL = re.compile(rf"(.*_|)({'|'.join(CATEGORIES)})")
# Of YAML, before the first value in it: any other may be behind the end of a text that started on an earlier line.
_LINE_START = re.compile(r"""([ \t]*)(?:(?:- +)*(?:"[^"]*"|'[^']*')[ \t]*:[ \t]*|[^"'{}\[\],]*)""")


class Node(NamedTuple):
    """A value: its span, its text, or None, and its members. Keys of lists start at -1."""

    start: int
    end: int
    text: str | None
    members: "list[tuple[Node, Node]]"


class JsonFile(Catalogue):
    """JSON; siblings such as `key_one` and `key_other` (i18next), `one` and `other` (Rails) are a plural.

    An id is a path of keys, in lists of numbers in brackets; the last of a plural ends with `*`, of a list is `[]`.
    """

    comment = ""
    unread = 0  # characters that the parser does not count: YAML's byte order mark

    def _read(self) -> list[Entry]:
        self.root = self._parse(self.text)
        entries, groups = [], {}  # by ids the nodes of each entry
        header = next((value for key, value in self.root.members if key.text == "@@locale" and value.text), None)
        key, below = self.root.members[0] if len(self.root.members) == 1 else (self.root, self.root)
        is_language = re.split("[-_]", key.text or "")[0] in _LANGUAGES
        is_map = below.members or (self.source and self.text[below.start : below.end] in ("{}", *_NULL))
        if is_map and is_language and (self.comment or f"{key.text}." in self.path.name):  # as in Rails' YAML
            self.root, header = below, key
        if header and self.source is None and self.language:
            is_quoted = self.text[header.start] in "\"'" or self.language == "no"  # which is false in YAML
            name = _written(self.language) if is_quoted else self.language
            entries.append(Entry("", state="header", place=(*header[:2], name)))
        for key, form, node in self._texts(self.root, ()):
            groups.setdefault(key, {})[form] = node
        for key, nodes in groups.items():
            is_plural = "other" in nodes
            forms = nodes if not is_plural else ("one", "other") if self.source is None else self.plurals
            texts = tuple(nodes[form].text if form in nodes else "" for form in forms)
            if is_plural and self.source is None:  # of a language with one form
                texts = (texts[0] or texts[1], texts[1])
            self._count_lines(next(iter(nodes.values())).start)
            entries.append(self._own(key, texts, nodes, is_plural))
        # What a list lacks is not added, but lists of texts alone are.
        in_lists = [self.missing.pop(key) for key in [*self.missing] if re.search(r"\[\d+\](\x04|$)", key)]
        in_lists = [(each, each.id.replace("\4", ".")) for each in in_lists if each.state == "untranslated"]
        entries += [replace(each, state="refused", notes=f"its list lacks {name}") for each, name in in_lists]
        return entries

    def _texts(self, node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, str, Node]]:
        """Yield the texts below a node: an entry's id, the plural form or the number of the item, the text's node."""
        names = {key.text: value.text for key, value in node.members if value.text is not None}
        for key, value in node.members:
            if not path and re.match(r"@@|\$schema$" if value.text else "@", key.text or ""):
                continue  # metadata of the file, in Flutter's and MediaWiki's also of each message
            name, plural, form = key.text or " ", _PLURAL.fullmatch(key.text or ""), ""
            yield from self._texts(value, (*path, name))
            if key.start < 0 and len(names) == len(node.members):
                name, form = "[]", name
            elif (
                plural
                and f"{plural[1]}other" in names
                and (plural[1] or {*names} <= {*CATEGORIES})  # beside other keys it is a word
                and (plural[2] not in ("zero", "two") or plural[2] in self.plurals)
                and self._is_counted("\4".join([*path, f"{plural[1]}*"]), plural[1], names)
            ):
                name, form = f"{plural[1]}*", plural[2]
            is_ordinal = plural and plural[1].endswith("ordinal_") and f"{plural[1]}other" in names
            if value.text is not None and not is_ordinal:  # which is kept
                yield "\4".join([*path, name]), form, value

    def takes(self, entry: Entry, filling: Filling | None) -> bool:
        """Return whether it can be written, where it is new too."""
        path = entry.id.removesuffix("\4[]").split("\4")
        return (entry.place is not None or self._has_room(self.root, path)) and super().takes(entry, filling)

    def _has_room(self, node: Node, path: list[str]) -> bool:
        """Return whether there are maps, or room for them, on the way to a new key, and nothing in its place."""
        text, is_list = self.text[node.start : node.end], node.members and node.members[0][0].start < 0
        is_empty = node is self.root or text[:1] == "{" or (node.text == "" and text in _NULL)
        below = {name.text or " ": value for name, value in node.members}.get(path[0])
        is_free = not below or (len(path) > 1 and self._has_room(below, path[1:]))
        return bool(not is_list and (node.members or is_empty) and is_free)

    def _is_counted(self, key: str, prefix: str, names: dict[str, str]) -> bool:
        """Return whether texts are a plural, by the source, and not a list of which one is called `reason_other`."""
        is_own = {f"{prefix}one", f"{prefix}zero"} & names.keys() or re.search("[{%]", names[f"{prefix}other"])
        return bool(is_own if self.source is None else key in self.source)

    def _edits(self, entry: Entry, filling: Filling) -> list[Edit]:
        """Return the texts where one is to be replaced, with comments; plural forms that are translated stay."""
        edits, texts = [], dict(zip(self.plurals if entry.counts else entry.place, filling.targets, strict=False))
        for form, (start, end, text, _) in entry.place.items():
            if text and self.source is not None:
                continue
            text = texts.get(form, filling.targets[-1] if entry.counts else text)
            edits.append((start, end, " " * (start == end) + _written(text)))
            if self.comment and (line := _LINE_START.fullmatch(self.text, self.text.rfind("\n", 0, start) + 1, start)):
                edits.append((line.start(), line.start(), line[1] + self.comment.format(filling.note) + self.newline))
        return edits

    def _all_edits(self, pairs: list[tuple[Entry, Filling]]) -> list[Edit]:
        """Return also what is missing, behind the others of the nearest map that there is, in it new ones on a line."""
        tree: dict = {}
        for entry, filling in (pair for pair in pairs if pair[0].counts or not pair[0].place):
            *path, last = entry.id.removesuffix("\4[]").split("\4")
            texts = [list(filling.targets)] if entry.id.endswith("\4[]") else filling.targets
            texts, inner = ((filling.note, text) for text in texts), tree
            for key in path:
                inner = inner.setdefault(key, {})
            names = [last[:-1] + name for name in self.plurals] if entry.counts else [last]
            inner.update(zip(names, texts, strict=True))
        edits = super()._all_edits([pair for pair in pairs if pair[0].place])
        return edits + self._added(self.root, tree) if tree else edits

    def _added(self, node: Node, tree: dict) -> list[Edit]:
        """Return the edits that add what a map lacks, in the way that its last member is written."""
        members = {key.text or " ": value for key, value in node.members}
        inner = [(members[key], value) for key, value in tree.items() if key in members and isinstance(value, dict)]
        edits = [edit for below in inner for edit in self._added(*below)]  # first: they may end at the same place
        new = {key: value for key, value in tree.items() if key not in members}
        key, value = node.members[-1] if node.members else (None, None)
        if new and node.text == "" and self.text[node.start : node.end] in _NULL:  # a map in its key's style
            line = re.fullmatch(r"( *)[^\s{}\[\]?&-][^{}\[\]]*", self.text[: node.start].rpartition("\n")[2])
            block = self._members(new, f"{self.newline}  {line[1]}", "") if line and self.comment else ""
            space = " " * (node.start == node.end and not block)
            return [(node.start, node.end, block or f"{space}{{{self._members(new, ' ', ',')}}}")]
        comma = "," if self.text[node.start : node.end][:1] == "{" else ""
        if not new or (key.start < 0 if key else not comma and node.end <= len(self.text)):
            return edits  # nothing, or a list, or a text
        if key:
            space, place = self.text[len(self.text[: key.start].rstrip()) : key.start], value.end
            space, end = space if comma else self.newline + space.rpartition("\n")[2], ""
            place = place if comma else re.compile(r"(?:[ \t]+#[^\r\n]*)?").match(self.text, place).end()
        else:
            space, place, end = self.newline + "  " * bool(comma), node.end - 1, self.newline * bool(comma)
        return [*edits, (place, place, comma * bool(key) + self._members(new, space, comma) + end)]

    def _members(self, tree: dict, space: str, comma: str) -> str:
        """Return members of a map, each behind the white space; keys that are no strings have no quotation marks."""
        start, parts = self.root.members[0][0].start if self.root.members else 0, []
        first = self.text[:start].rpartition("\n")[2]  # what is before the first member of all
        inner = space + (first if first.isspace() else "  ") if "\n" in space else ""
        for key, value in tree.items():
            is_plain = self.comment and re.fullmatch(r"(?a)[A-Za-z_]\w*", key) and yaml.safe_load(key) == key
            start = space + (key.removeprefix("\0") if key[0] == "\0" or is_plain else _written(key)) + ":"
            if isinstance(value, dict):
                written = self._members(value, inner, comma)
                parts.append(start + (f" {{{written}{space * bool(inner)}}}" if comma else written))
            else:
                comment = space + self.comment.format(value[0]) if self.comment and not comma else ""
                parts.append(f"{comment}{start} {_written(value[1])}")
        return comma.join(parts)

    def _parse(self, text: str) -> Node:
        """Return the tree: JSON is YAML but for tabs, and for some escapes and characters in its strings."""
        json.loads(text.lstrip("\ufeff"))
        return self._node(_composed(re.sub(r"\\.|[^\n -~]", lambda match: " " * len(match[0]), text)), text)

    def _node(self, part: yaml.Node, text: str, place: int = 0) -> Node:
        start, end = (mark.index + self.unread for mark in (part.start_mark, part.end_mark))
        if start < place:  # it is what an alias behind `place` stands for
            return Node(place, re.compile(r"\*[^\s,\[\]{}]+").search(text, place).end(), None, [])
        if isinstance(part, yaml.ScalarNode):
            written = text[start:end].rstrip(" \t\r\n")
            return Node(start, start + len(written), self._value(part, written), [])
        members = []
        for key, value in enumerate(part.value) if isinstance(part, yaml.SequenceNode) else part.value:
            name = Node(-1, start, f"[{key}]", []) if isinstance(key, int) else self._node(key, text, start)
            if name.text is None and isinstance(key, yaml.ScalarNode):  # such as `no` and 404, which are no strings
                name = name._replace(text="\0" + text[name.start : name.end])
            below = self._node(value, text, name.end)
            is_null = text[below.start : below.end] in _NULL and ":" in text[name.end : below.start]
            members.append((name, below._replace(text="") if self.source and is_null and name.start >= 0 else below))
        is_flow = not members or text[start] in "{["
        return Node(start, end if is_flow else members[-1][1].end, None, members)  # else the end is behind comments

    def _value(self, part: yaml.ScalarNode, written: str) -> str | None:
        return json.loads(written) if written[0] == '"' else None


class YamlFile(JsonFile):
    """YAML; what has an anchor or a tag, and Ruby's symbols, are kept."""

    comment = "# {}"

    def _parse(self, text: str) -> Node:
        self.unread, root = int(text[:1] == "\ufeff"), _composed(text)
        is_empty = root is None or (root.value == "" and root.tag.endswith(":null"))
        return Node(0, len(text) + 1, None, []) if is_empty else self._node(root, text)

    def _value(self, part: yaml.ScalarNode, written: str) -> str | None:
        return part.value if part.tag == "tag:yaml.org,2002:str" and written[0] not in "&!:" else None


def _composed(text: str) -> yaml.Node | None:
    """Return the root of YAML. Its depth is looked at first: the composer's recursion has no limit but the stack's."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.YAMLError(f"more than {_DEEPEST} maps or lists are in each other")
    return yaml.compose(text, Loader=yaml.CSafeLoader)
