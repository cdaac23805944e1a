"""`vaswani translate --format po` and its page: files as they were but for what is filled."""

import json
import re
import shutil
from unittest.mock import Mock

import pytest
import translating
from catalogue_files import echo, read
from model_folders import change
from translating import run

from vaswani_transformer.cli import catalogues
from vaswani_transformer.errors import UserError

model = translating.model

PO = """\
# by hand
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Plural-Forms: nplurals=2; plural=n != 1;\\n"

#, c-format
msgid "%d dog sleeps"
msgid_plural "%d dogs sleep"
msgstr[0] ""
msgstr[1] ""

msgctxt "menu"
msgid "The &red <b>bird</b>..."
msgstr ""

msgid "Two dogs"
msgstr "Zwei Hunde"

msgid "<12>"
msgstr ""
"""


@pytest.fixture
def po(tmp_path):
    path = tmp_path / "de.po"
    path.write_text(PO, encoding="utf-8")
    return path


def test_terms_are_translated_as_the_catalogue_has_them(model, po, whole_outputs, tmp_path, capsys, monkeypatch):
    change(shutil.copytree(model, tmp_path / "plain"), "generation_config.json", no_repeat_ngram_size=None)
    earlier = "".join(f'msgid "{word} yellow bird"\nmsgstr "{word} piep"\n\n' for word in ("A", "My", "One"))
    po.write_text(earlier + 'msgid "The yellow bird sleeps"\nmsgstr ""\n', encoding="utf-8")
    command = ["translate", tmp_path / "plain", "--device", "cpu", "--format", "po", "--input", po]
    assert run(*command, "--beams", "2", "--consistent-terms") == 0
    out, errors = capsys.readouterr()
    assert "term: yellow bird: piep (3 of 3)\n" in errors and out.count("piep") == 4
    (tmp_path / "own.tsv").write_text("bird\tpip\n", encoding="utf-8")
    assert run(*command, "--beams", "2", "--consistent-terms", "--glossary", tmp_path / "own.tsv") == 0
    out, errors = capsys.readouterr()
    assert "term: " not in errors and out.count("pip") == 1
    refuse = Mock(side_effect=UserError("the model's vocabulary cannot write it"))
    monkeypatch.setattr(catalogues, "term_forms", refuse)
    assert run(*command, "--consistent-terms") == 0 and "term: " not in capsys.readouterr().err


def test_a_catalogue_is_filled_in_its_place(model, po, tmp_path, capsys, monkeypatch):
    command = ["translate", model, "--device", "cpu", "--format", "po", "--input", po]
    assert run(*command, "--output", po, "--report", tmp_path / "page.html") == 0
    plural, menu, two, wordless = (entry for entry in read(po) if entry.sources[0])
    assert plural.state == menu.state == "fuzzy" and two.targets == ("Zwei Hunde",) and wordless.state == "untranslated"
    assert all(target.count("%d") == 1 for target in plural.targets)
    assert re.fullmatch(r".*<b>.*</b>.*\.\.\.", menu.targets[0]) and menu.targets[0].count("&") == 1
    text = po.read_text(encoding="utf-8")
    assert text.startswith(PO[: PO.index("#, c-format")]) and text.endswith(PO[PO.index('msgid "Two') :])
    errors, page = capsys.readouterr().err, (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "entries: 2 filled, 0 refused, 1 without words, 1 translated before" in errors
    assert "Entries: 2 filled" in page and "The &amp;red &lt;b&gt;bird&lt;/b&gt;..." in page
    assert run(*command) == 0  # again, to standard output: the same
    assert capsys.readouterr().out == text
    po.write_text(PO.replace("UTF-8", "US-ASCII"))
    monkeypatch.setattr(catalogues.Messages, "__call__", lambda _, entries: list(echo(entries, "ж")))
    assert run(*command) == 0 and "entries: 0 filled, 3 refused" in capsys.readouterr().err


def test_a_memory_is_obeyed_where_it_is_valid(model, po, tmp_path, capsys):
    pytest.importorskip("rapidfuzz")
    lines = ["source\ttarget", "The red <b>bird</b>...\tDer <b>rote</b> Vogel...", "%d dog sleeps\tEin Hund"]
    (tmp_path / "memory.tsv").write_text("\n".join([*lines, ""]), encoding="utf-8")
    command = ["translate", model, "--device", "cpu", "--format", "po", "--input", po, "--output", po]
    assert run(*command, "--memory", tmp_path / "memory.tsv", "--report", tmp_path / "page.html") == 0
    plural, menu = (entry for entry in read(po) if entry.state == "fuzzy")
    assert menu.targets == ("Der <b>&rote</b> Vogel...",) and plural.targets[0] != "Ein Hund"
    assert "by the memory, confidence 1.00" in po.read_text(encoding="utf-8")
    assert "near match" in (tmp_path / "page.html").read_text(encoding="utf-8")
    po.write_text(PO, encoding="utf-8")  # and it knows contexts
    capsys.readouterr()
    entry = 'msgctxt "{}"\nmsgid "The &red <b>bird</b>..."\nmsgstr "{} <b>&bird</b>..."\n\n'
    (tmp_path / "memory.po").write_text(entry.format("menu", "one") + entry.format("tool", "two"), encoding="utf-8")
    assert run(*command[:-2], "--memory", tmp_path / "memory.po") == 0
    assert '"one <b>&bird</b>..."' in capsys.readouterr().out
    other = entry.replace("red", "green").format("menu", "one") + entry.format("tool", "two")
    (tmp_path / "memory.po").write_text(other, encoding="utf-8")
    assert run(*command[:-2], "--memory", tmp_path / "memory.po") == 0
    assert "two" not in capsys.readouterr().out
    sides = (f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>' for code, text in (("en", "Four"), ("da", "Fire")))
    (tmp_path / "m.tmx").write_text(f"<tmx><body><tu>{''.join(sides)}</tu></body></tmx>")
    assert run("translate", model, "Four", "--memory", tmp_path / "m.tmx", "--target-language", "da") == 0
    assert capsys.readouterr().out == "Fire\n"


def test_a_catalogue_with_one_language(model, tmp_path):
    birds = "{n, plural, one {A red bird} other {# red birds}}"
    content = json.dumps(
        {"dogs": "Two dogs", "format": "{{n}} %", "menu": {"bird": "The red {{bird}}"}, "birds": birds}
    )
    (tmp_path / "en.json").write_text(content)
    (tmp_path / "de.json").write_text('{\n  "dogs": "Zwei Hunde"\n}\n')
    command = ["translate", model, "--device", "cpu", "--format", "i18next", "--input", tmp_path / "de.json"]
    command += ["--source-catalogue", tmp_path / "en.json", "--output", tmp_path / "new.json"]
    assert run(*command, "--target-language", "lv") == 0  # of its plural forms: the model has no code of it
    text = (tmp_path / "new.json").read_text(encoding="utf-8")
    assert text.startswith('{\n  "dogs": "Zwei Hunde",\n') and text.count("{{bird}}") == 1
    assert '"format": "{{n}} %"' in text  # or programs would show the key
    assert re.match(r"\{n, plural, zero \{.+\} one \{.+\} other \{.+\}\}$", json.loads(text)["birds"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "po"], "give --input FILE"),
        (["--report", "page.html"], "--report is for --format po"),
        (["--consistent-terms"], "--consistent-terms is for --format po"),
        (["--format", "po", "--consistent-terms", "--sample"], "--consistent-terms and --sample cannot be combined"),
        (["--format", "po", "--input", "de.po", "--nbest", "2"], "cannot be combined"),
        (["--format", "po", "--input", "de.po", "--output", "o.po", "--report", "o.po"], "is the same file as --"),
        (["--format", "po", "--input", "de.po", "--report", "de.po"], "is the same file as --input"),
        (["--format", "xliff", "--input", "de.po"], "de.po"),
        (["--input", "de.po", "--source-catalogue", "en.po"], "both languages, and --source-catalogue cannot be"),
    ],
)
def test_what_is_refused(fails, model, po, monkeypatch, options, message):
    monkeypatch.chdir(po.parent)
    assert message in fails("translate", model, *options)
