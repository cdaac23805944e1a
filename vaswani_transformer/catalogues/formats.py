"""Catalogues by the names of their formats: opened, read, and as pairs to train on."""

import contextlib
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from ..files import to_path
from .catalogue import Catalogue, Entry, read_label, with_codes, without_mark

logger = logging.getLogger(__name__)

_READERS = {  # the class of each format, whose module is imported when it is needed: commands list the names
    "po": "line_files:GettextFile",
    "xliff": "xml_files:XliffFile",
    "android": "xml_files:AndroidFile",
    "ts": "xml_files:QtFile",
    "properties": "line_files:PropertiesFile",
    "strings": "line_files:StringsFile",
    "i18next": "tree_files:JsonFile",
    "yaml": "tree_files:YamlFile",
}
#: Names of the formats.
FORMATS = tuple(_READERS)
#: The formats by the ends of files' names.
ENDINGS = {".po": "po", ".pot": "po", ".xlf": "xliff", ".xliff": "xliff", "strings.xml": "android", ".ts": "ts"}
ENDINGS |= {".properties": "properties", ".strings": "strings", ".yml": "yaml", ".yaml": "yaml"}
ENDINGS |= dict.fromkeys((".json", ".arb"), "i18next")


def open_catalogue(
    path: str | Path, format: str | None = None, source: str | Path | None = None, language: str | None = None
) -> Catalogue:
    """Return a catalogue of one of `FORMATS`, by default that of its name's ending; `UserError` for another ending.

    `source` is the source language's catalogue, for a format with one language; `language` the code of the target
    language, for plural forms that the file does not name.
    """
    path = to_path(path)
    if len(language or "") == 3:  # as OPUS-MT's models have it, where files have two letters
        with contextlib.suppress(ImportError):  # of an extra
            from babel.core import get_global

            language = get_global("language_aliases").get(language, language)
    format = format or next((name for end, name in ENDINGS.items() if path.name.lower().endswith(end)), None)
    if not format:
        raise UserError(f"{path}: its name has none of the endings {', '.join(ENDINGS)}; name its format")
    entries = {entry.id: entry for entry in open_catalogue(source, format=format).entries()} if source else None
    return pkgutil.resolve_name(f"{__package__}.{_READERS[format]}")(path, entries, language)


def pairs(path: str | Path) -> Iterator[tuple[str, str]]:
    """Yield sources and targets of what is translated; a warning says where a part of the file cannot be read."""
    refused = []
    for entry in open_catalogue(path).entries():
        if entry.state == "refused":
            refused.append(f"line {entry.line}: {entry.notes}")
        elif entry.state == "translated":
            yield from pairs_of(entry)
    if refused:
        logger.warning("%s: %d parts are left out, the first in %s", path, len(refused), refused[0])


def pairs_of(entry: Entry, all_forms: bool = False) -> Iterator[tuple[str, str]]:
    """Yield sources and targets of a translated entry, with inline elements as the file has them.

    Of a plural these are the texts for one and for many; the mark of an accelerator is left out where both sides have
    one. With `all_forms` also plural forms and labels as they are, with EOT and an example of a form's numbers, or
    None, behind the source.
    """
    targets, forms = entry.targets, dict(zip(entry.counts, entry.targets, strict=False))
    if forms:
        is_many = lambda count: (count % 10 != 1 or count == 11, count)  # noqa: E731
        targets = [forms[choose(forms, key=is_many)] for choose in (min, max)]
    for pair in zip(entry.sources, targets, strict=False):  # arrays may have lost an item
        source, target = (with_codes(text, entry.codes) for text in pair)
        plain, mark, _ = read_label(source)
        other, number = without_mark(target, mark)
        yield (plain, other) if number == 1 else (source, target)
    for (text, count), target in zip(entry.texts() if all_forms else (), entry.targets, strict=False):
        if count is not None or read_label(text)[1]:
            yield with_codes(f"{text}\4{count}", entry.codes), with_codes(target, entry.codes)
