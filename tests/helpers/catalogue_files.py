"""Catalogues of tests: what fills their entries, and what damages their files."""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from vaswani_transformer.catalogues.catalogue import CODE, CODES, MARK, Filling
from vaswani_transformer.catalogues.formats import open_catalogue
from vaswani_transformer.errors import UserError

TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Co", "Cn"], include_characters="\n\t\\\"'%&<>@"),
    max_size=20,
)
SOME_TEXTS = TEXTS.filter(lambda text: text.strip() and MARK not in text)
FEW = settings(max_examples=50, suppress_health_check=list(HealthCheck))


def read(path, **options):
    return open_catalogue(path, **options).entries()


def echo(entries, text=None):
    """Fill entries with their sources, or with a text and the inline elements of the sources."""
    for entry in entries:
        texts = (source for source, _ in entry.texts())
        if text is not None:
            texts = (text + "".join(character for character in source if ord(character) >= CODE) for source in texts)
        yield Filling(tuple(texts), 0.5, "test")


def nothing(entries):
    """Fill no entry, the first because of a reason."""
    return [Filling((), 0, "", reason="no letters"), *[None] * (len(entries) - 1)]


def filled(path, answer=echo, **options):
    """The bytes of a filled catalogue."""
    return open_catalogue(path, **options).fill(answer)


def check_parts(path, parts, text, **options):
    """Fill a file of parts, each with whether it is to be filled, with a text.

    All other parts stay as they are, in order; each that is filled has our mark; filling again changes nothing.
    """
    path.write_bytes("".join(part for _, part in parts).encode())
    assert filled(path, nothing, **options) == path.read_bytes()
    result = filled(path, lambda entries: echo(entries, text), **options)
    place = 0
    for is_filled, part in parts:
        place = place if is_filled else result.decode().index(part, place) + len(part)
    number = sum(is_filled for is_filled, _ in parts)
    assert result.decode().count(MARK) == number
    path.write_bytes(result)
    fuzzy = [entry for entry in read(path, **options) if entry.state == "fuzzy"]
    assert len(fuzzy) == number
    assert all(CODES.sub("", target) == text for entry in fuzzy for target in entry.targets)
    assert filled(path, lambda entries: echo(entries, text), **options) == result


def check_damage(path, times, **options):
    """Cut a file, or change a byte of it: it stays as it is with a line for each refusal, or is refused on one line."""
    data, chance = path.read_bytes(), random.Random(path.name)
    for _ in range(times):
        place = chance.randrange(len(data))
        byte = chance.choice([b"<", b'"', b"\xff", b"{", b"\\", b"\0"])
        for damaged in (data[:place], data[:place] + byte + data[place + 1 :]):
            path.write_bytes(damaged)
            try:
                refused = [entry for entry in read(path, **options) if entry.state == "refused"]
                assert filled(path, nothing, **options) == damaged
                assert all(entry.line and entry.notes for entry in refused)
            except UserError as error:
                assert str(error).startswith(str(path)) and "\n" not in str(error)
