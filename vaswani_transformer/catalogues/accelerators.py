"""Accelerators of menus and buttons: the key that a mark is before, as in `&File`, `_File` or `~File`."""

import re

import regex

_MARKED = regex.compile(r"(?<![&\p{Lu}])&(?=[\p{L}\p{N}])(?!\w+;)|~(?=\p{L})|(?<!\w)_(?=\p{L})|(?<=\b\p{L})_(?=\p{Ll})")
_NO_LABEL = re.compile(r"[/\\=]|\w\w_\w")  # paths, formulas, names of programs' things


def read_label(text: str) -> tuple[str, str, str]:
    """Return a text without its accelerator, the mark and the letter; these are empty unless it has a single one."""
    places = [match.start() for match in _MARKED.finditer(text)]
    if len(places) != 1 or _NO_LABEL.search(re.sub(r"<[^<>]*>", "", text)):
        return text, "", ""
    place = places[0]
    return text[:place] + text[place + 1 :], text[place], text[place + 1]
