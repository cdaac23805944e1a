"""Gettext's catalogues: all but the filled entries stays byte for byte, and what is filled is valid and read back."""

import io
import re
import shutil
import subprocess

import pytest
from babel.messages.pofile import read_po
from catalogue_files import FEW, SOME_TEXTS, TEXTS, check_damage, check_parts, filled, nothing, read
from hypothesis import given, settings
from hypothesis import strategies as st

from vaswani_transformer.catalogues.catalogue import MARK, Filling
from vaswani_transformer.catalogues.formats import pairs

RUSSIAN = (
    'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n"Plural-Forms: nplurals=3; plural=(n%10==1 && '
    'n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n"\n"%100>=20) ? 1 : 2);\\n"\n'
)
TEMPLATE = (
    '# A title.\n#, fuzzy\nmsgid ""\nmsgstr ""\n"Project-Id-Version: a 1\\n"\n"Language: \\n"\n"MIME-Version: 1.0\\n"\n'
    '"Content-Type: text/plain; charset=CHARSET\\n"\n"Content-Transfer-Encoding: 8bit\\n"\n'
    '"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\\n"\n\n#: a.c:1\n#, c-format\nmsgid "%d file"\n'
    'msgid_plural "%d files"\nmsgstr[0] ""\nmsgstr[1] ""\n'
)
needs_msgfmt = pytest.mark.skipif(not shutil.which("msgfmt"), reason="gettext is not installed")


def quoted(draw, text: str, newline: str) -> str:
    """A C string, on one line or cut anywhere."""
    escaped = [{"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}.get(character, character) for character in text]
    cut = draw(st.integers(0, len(escaped)))
    parts = ["".join(part) for part in (escaped[:cut], escaped[cut:]) if part or not cut]
    return draw(st.sampled_from([" ", "\t"])) + newline.join(f'"{part}"' for part in parts) + newline


@st.composite
def po_files(draw, kinds=("untranslated", "fuzzy", "translated", "obsolete", "comment", "broken")):
    """A catalogue as parts, each with whether it is to be filled."""
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    parts = [(False, draw(st.sampled_from(["", "\ufeff"])) + RUSSIAN.replace("\n", newline))]
    alone = {"obsolete": '# old\n#~ msgid "x"\n#~ msgstr "y"\n', "comment": "# alone\n", "broken": 'msgid "a"\n"b\n'}
    for number in range(draw(st.integers(0, 6))):
        kind, gap = draw(st.sampled_from(kinds)), newline * draw(st.integers(1, 2))
        if kind in alone:
            parts.append((False, gap + alone[kind].replace("\n", newline)))
            continue
        comments = draw(st.lists(st.sampled_from(["# hand", "#. for you", "#: a.c:1", "#, c-format", "#"]), max_size=3))
        comments += ["#, fuzzy", '#| msgid "before"'] if kind == "fuzzy" else []
        text = "".join(line + newline for line in comments)
        text += f"msgctxt{quoted(draw, draw(TEXTS), newline)}" if draw(st.booleans()) else ""
        text += f"msgid{quoted(draw, str(number) + draw(TEXTS), newline)}"
        is_plural = draw(st.booleans())
        text += f"msgid_plural{quoted(draw, draw(SOME_TEXTS), newline)}" if is_plural else ""
        for name in ("msgstr[0]", "msgstr[1]", "msgstr[2]") if is_plural else ("msgstr",):
            text += name + quoted(draw, "" if kind == "untranslated" else draw(SOME_TEXTS), newline)
        parts.append((kind in ("untranslated", "fuzzy"), gap + text))
    if draw(st.booleans()):
        parts[-1] = (parts[-1][0], parts[-1][1].rstrip("\r\n"))
    return parts


@FEW
@given(po_files(), SOME_TEXTS)
def test_all_but_the_filled_entries_stays_and_filling_again_changes_nothing(tmp_path_factory, parts, text):
    path = tmp_path_factory.mktemp("po") / "a.po"
    check_parts(path, parts, text)


@FEW
@given(po_files(kinds=("untranslated", "fuzzy", "translated", "obsolete")))
def test_what_is_read_is_what_babel_reads_before_and_after(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("po") / "a.po"
    path.write_bytes("".join(part for _, part in parts).encode().removeprefix("\ufeff".encode()))
    for _ in range(2):
        expected = []
        data = re.sub(rb'(?m)^(msg\S+)\t"', rb'\1 "', path.read_bytes())  # babel knows no tab there
        for message in read_po(io.BytesIO(data), ignore_obsolete=True, abort_invalid=True):
            texts = [part if isinstance(part, (tuple, list)) else (part,) for part in (message.id, message.string)]
            expected += [(message.context or "", *map(tuple, texts), message.fuzzy)] * (message.id != "")
        entries = [entry for entry in read(path) if entry.state != "kept"]
        assert [(e.context, e.sources, e.targets, e.state == "fuzzy") for e in entries] == expected
        path.write_bytes(filled(path))


def check_by_msgfmt(path):
    done = subprocess.run(["msgfmt", "--check", "--use-fuzzy", "-o", "/dev/null", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_msgfmt
@pytest.mark.parametrize(("language", "forms"), [("de", 2), ("de-AT", 2), ("ru", 3), ("ja", 1), ("ar", 6)])
def test_a_template_gets_a_header_and_all_plural_forms_of_the_language(tmp_path, language, forms):
    template = TEMPLATE + '\nmsgid "é charset=ISO-8859-2"\nmsgstr ""\n'  # which says nothing of the file
    (path := tmp_path / "a.pot").write_text(template, encoding="utf-8")
    assert [*read(path)][-1].sources == ("é charset=ISO-8859-2",)
    assert filled(path, nothing).decode() == template  # without a language
    path.write_text(re.sub('"Plural-.*\n', "", template.replace("=CHARSET", "=utf-8")))  # as pybabel writes it
    assert re.search('msgstr.1. "[^"]', filled(path, language="de").decode())
    path.write_text(template)
    result = filled(path, language=language)
    (tmp_path / "a.po").write_bytes(result)
    check_by_msgfmt(tmp_path / "a.po")
    assert result.count(b"msgstr[") == forms and f'"Language: {language.replace("-", "_")}\\n"' in result.decode()
    header, entry, _ = read(tmp_path / "a.po")
    assert header.state == "kept" and entry.state == "fuzzy" and len(set(entry.counts)) == forms


def test_a_header_without_plural_forms_stays_and_plurals_are_refused(tmp_path):
    header = 'msgid ""\nmsgstr ""\n"Language: bg\\n"\n"Content-Type: text/plain; charset=UTF-8\\n"\n'
    rules = ("", '"Plural-Forms: nplurals=2; plural=n/0;\\n"\n', '"Plural-Forms: nplurals=x; plural=;\\n"\n')
    for rule in rules:
        text = f'{header}{rule}\nmsgid "a"\nmsgid_plural "b"\nmsgstr[0] ""\n\nmsgid "c"\nmsgstr ""\n'
        (path := tmp_path / "a.po").write_text(text)
        entries = list(read(path, language="de"))
        assert [entry.state for entry in entries] == ["kept", "refused", "untranslated"]
        assert "Plural-Forms" in entries[1].notes
        assert entries[1].line == text[: text.index('msgid "a"')].count("\n") + 1
        assert filled(path, language="de").decode().startswith(text[: text.index('msgid "c"')])


def test_plural_forms_that_are_there_stay_also_where_there_are_fewer_than_in_the_language(tmp_path):
    (path := tmp_path / "a.po").write_text(
        f'{RUSSIAN}\nmsgid "%d day"\nmsgid_plural "%d days"\nmsgstr[0] ""\n"%d "\n"день"\nmsgstr[1] ""\n\n'
        'msgid "hour"\nmsgid_plural "hours"\nmsgstr[0] "час"\nmsgstr[1] "часа"\n', encoding="utf-8"
    )  # fmt: skip
    result = filled(path).decode()
    assert '\nmsgstr[0] ""\n"%d "\n"день"\nmsgstr[1] "%d days"\nmsgstr[2] "%d days"\n' in result
    assert result.endswith('msgstr[0] "час"\nmsgstr[1] "часа"\nmsgstr[2] "hours"\n')


def test_bytes_that_are_not_of_the_named_encoding_are_refused_by_entry(tmp_path, caplog):
    (path := tmp_path / "a.po").write_bytes(
        b'msgid ""\nmsgstr "Content-Type: text/plain; charset=ASCII\\n"\n\nmsgid "caf\xc3\xa9"\nmsgstr ""\n\n'
        b'msgid "b"\nmsgstr ""\n\nmsgid "c"\nmsgstr ""\n'
    )
    assert [(entry.state, entry.line) for entry in read(path)] == [
        ("kept", 1), ("refused", 4), ("untranslated", 7), ("untranslated", 10)
    ]  # fmt: skip
    result = filled(path, lambda entries: [Filling(("é",), 1, "m"), Filling(("e",), 1, "m")])
    new = f'# {MARK}machine translation by m, confidence 1.00\n#, fuzzy\nmsgid "c"\nmsgstr "e"'
    assert result == path.read_bytes().replace(b'msgid "c"\nmsgstr ""', new.encode())
    assert caplog.messages == [f"{path}, line 7: not filled, ASCII cannot write it"]
    path.write_bytes(path.read_bytes().replace(b"ASCII", b"KLINGON"))
    with pytest.raises(ValueError, match=r"a\.po: unknown encoding: KLINGON"):
        list(read(path))


def test_pairs_are_of_what_is_translated(tmp_path):
    plural = 'msgid "%d day"\nmsgid_plural "%d days"\nmsgstr[0] "%d день"\nmsgstr[1] "%d дня"\nmsgstr[2] "%d дней"\n'
    others = 'msgid "_Open\\n"\nmsgstr "_Öffnen\\n"\n\n#, fuzzy\nmsgid "a"\nmsgstr "b"\n\nmsgid "c"\nmsgstr ""\n'
    (path := tmp_path / "a.po").write_text(f"{RUSSIAN}\n{plural}\n{others}", encoding="utf-8")
    expected = [("%d day", "%d день"), ("%d days", "%d дней"), ("Open\n", "Öffnen\n")]
    assert list(pairs(path)) == expected
    path.write_bytes(filled(path))
    assert list(pairs(path)) == expected
    check_by_msgfmt(path)


@settings(FEW, max_examples=10)
@given(po_files())
def test_damage_is_refused_by_entry_or_on_one_line(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("po") / "a.po"
    path.write_bytes("".join(part for _, part in parts).encode())
    check_damage(path, 6)
