"""scripts/bleu_flavours.py: scores of flavours against sacreBLEU's command and against hand-made sentences."""

import json
import re
import subprocess
import sys

import pytest
from bleu_flavours import flavours, main, split_compounds
from sacrebleu import corpus_bleu

REFERENCES = [
    "Der 16-jährige Hans sagte: „Das ist ein Science-Fiction-Film.“",
    "Zwei Hunde spielen im Schnee, nicht wahr?",
    "Ein Mann steht auf einer Leiter und streicht die Wand.",
    "Kinder laufen über die Straße.",
] * 3
TRANSLATIONS = [
    'der 16-jährige Hans sagte: "Das ist ein Science-Fiction-Film."',
    "Zwei Hunde spielen im schnee, oder nicht?",
    "Ein Mann steht auf einer Leiter und malt die Wand.",
    "Die Kinder laufen über eine Straße.",
] * 3


def named(rows, start):
    return next(value for name, value in rows if name.startswith(start))


def test_rows_are_those_of_sacrebleus_own_command(tmp_path):
    for name, lines in (("out", TRANSLATIONS), ("ref", REFERENCES)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = flavours(TRANSLATIONS, REFERENCES)
    for start, options in (
        ("sacreBLEU as it comes", []),
        ("lower-cased", ["-lc"]),
        ("`--tokenize intl`", ["--tokenize", "intl"]),
        ("words between spaces", ["--tokenize", "none"]),
    ):
        command = [sys.executable, "-m", "sacrebleu", str(tmp_path / "ref"), "-i", str(tmp_path / "out"), "-w", "6"]
        output = subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout
        assert named(rows, start) == pytest.approx(json.loads(output)["score"], abs=1e-5)


def test_compounds_are_split_as_the_scripts_do():
    assert split_compounds("rich-text format") == "rich ##AT##-##AT## text format"
    assert split_compounds("Science-Fiction-Film") == "Science ##AT##-##AT## Fiction ##AT##-##AT## Film"
    assert split_compounds("- ein - Strich -") == "- ein - Strich -"


def test_flavours_order_as_they_must():
    rows = flavours(TRANSLATIONS, REFERENCES)
    assert named(rows, "lower-cased") > rows[0][1]  # two words differ in case alone
    assert named(rows, "13a tokens, compounds split at") > rows[0][1]  # the compounds are right
    assert named(rows, "13a tokens, compounds split, lower-cased") > named(rows, "13a tokens, compounds split at")
    assert named(rows, "words between spaces") < rows[0][1]
    assert named(rows, "13a, the first 11 of 12") == corpus_bleu(TRANSLATIONS[:11], [REFERENCES[:11]]).score
    assert named(rows, "Moses' tokens") > rows[0][1]


def test_right_translations_are_100_in_every_flavour():
    assert [value for _, value in flavours(REFERENCES, REFERENCES)] == pytest.approx([100.0] * 11)


def test_subwords_are_scored_where_there_is_a_model():
    class Letters:
        def tokenize(self, text):
            return list(text)

    rows = flavours(TRANSLATIONS, REFERENCES, Letters())
    expected = corpus_bleu([" ".join(x) for x in TRANSLATIONS], [[" ".join(x) for x in REFERENCES]], tokenize="none")
    assert rows[-1][1] == pytest.approx(expected.score)
    assert rows[-1][1] > rows[0][1]


def test_it_says_how_good_the_figure_is(tmp_path, monkeypatch, capsys):
    for name, lines in (("out", TRANSLATIONS), ("ref", REFERENCES)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["bleu_flavours.py", "--translations", str(tmp_path / "out"), "--reference", str(tmp_path / "ref")]
    monkeypatch.setattr(sys, "argv", words)
    main()
    *rows, _, last = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + 11 and re.search(r"good to \d+\.\d\d either way \(95% of 1,000 bootstrap samples\)$", last)
