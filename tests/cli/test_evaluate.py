"""`vaswani evaluate`: files that it writes or leaves alone, and the record of the search."""

import json
import os
import re
import shutil
import sys
import unicodedata
from pathlib import Path
from unittest.mock import Mock

import pytest
import translating
from conftest import error_of
from model_folders import change, write_model
from translating import run

from vaswani_transformer.hub.card_facts import results_of_record

model = translating.model


@pytest.fixture
def evaluate(model, tmp_path):
    """Evaluates on three lines; returns the exit status."""
    for side, line in (("en", "The dog sees a cat."), ("de", "Der Hund sieht eine Katze.")):
        (tmp_path / f"test.{side}").write_text(f"{line}\n" * 3)
    files = ["--source", tmp_path / "test.en", "--reference", tmp_path / "test.de"]
    return lambda *options, folder=model: run("evaluate", folder, *files, "--max-new-tokens", "8", *options)


def test_evaluate_may_write_to_devices_and_through_links(evaluate, tmp_path, capsys):
    (tmp_path / "out").write_text("earlier\n")
    (tmp_path / "out").chmod(0o640)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert evaluate("--output", os.devnull, "--json", os.devnull) == 0
    assert Path(os.devnull).is_char_device()
    assert evaluate("--output", "/dev/stdout") == 0  # before the scores, wherever the shell has led it
    assert capsys.readouterr().out.splitlines()[-4].startswith("BLEU ")
    assert evaluate("--output", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "out").read_text().count("\n") == 3
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


def test_a_reference_may_have_its_accents_as_signs_of_their_own(evaluate, tmp_path):
    found = []
    for form in ("NFC", "NFD"):
        (tmp_path / "test.de").write_text(unicodedata.normalize(form, "Über die Brücke läuft eine Kuh.\n") * 3)
        (tmp_path / "other.de").write_text("Über die Brücke läuft ein Hund.\n" * 3)
        names = ["bleu", "chrf", "perplexity"]
        assert evaluate("--json", tmp_path / "scores.json", "--stress") == 0
        scores = json.loads((tmp_path / "scores.json").read_text())
        assert scores["stress"]["clean"]["chrf"] == scores["chrf"] > 0
        words = ["evaluate", tmp_path / "test.de", tmp_path / "other.de", "--source", tmp_path / "test.en"]
        assert run(*words, "--reference", tmp_path / "other.de", "--json", tmp_path / "two.json") == 0
        systems = json.loads((tmp_path / "two.json").read_text())["systems"]
        found.append([[scores[name] for name in names], [system["chrf"] for system in systems]])
    assert found[0] == found[1] and found[0][1][0] > 50


def test_an_interrupted_evaluation_leaves_the_earlier_files(evaluate, tmp_path, monkeypatch):
    for name in ("scores.json", "out"):
        (tmp_path / name).write_text("earlier\n")
    before = sorted(tmp_path.iterdir())
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("vaswani_transformer.decoding.translator.Translator.hypotheses", interrupt)
    assert evaluate("--json", tmp_path / "scores.json", "--output", tmp_path / "out") == 130
    assert sorted(tmp_path.iterdir()) == before
    assert {(tmp_path / name).read_text() for name in ("scores.json", "out")} == {"earlier\n"}
    monkeypatch.undo()
    assert evaluate("--json", tmp_path / "scores.json", "--output", tmp_path / "out") == 0
    assert sorted(tmp_path.iterdir()) == before and json.loads((tmp_path / "scores.json").read_text())["sentences"] == 3


def test_a_sampled_search_is_recorded_as_one(evaluate, tmp_path):
    folder = write_model(tmp_path / "sampled")
    change(folder, "generation_config.json", do_sample=True, temperature=0.7)
    assert evaluate("--beams", "1", "--json", tmp_path / "scores.json", folder=folder) == 0
    generation = json.loads((tmp_path / "scores.json").read_text())["generation"]
    assert {"num_beams": 1, "do_sample": True, "temperature": 0.7, "max_new_tokens": 8}.items() <= generation.items()
    assert not any(name.endswith("_id") for name in generation) and "transformers_version" not in generation


def test_a_stress_test_is_printed_recorded_and_on_the_card(evaluate, tmp_path, capsys):
    assert evaluate("--json", tmp_path / "scores.json", "--stress") == 0
    printed, record = capsys.readouterr().out, json.loads((tmp_path / "scores.json").read_text())
    assert record["command"].endswith("--stress")
    rows = record["stress"]
    assert rows["clean"]["chrf"] == record["chrf"]
    assert rows["emoji"]["returned"] == 0 and rows["repeat"]["sentences"] == 3
    assert all(re.search(rf"^{kind} +3 +", printed, re.MULTILINE) for kind in rows)
    scores = {result.metric_name: result.metric_value for result in results_of_record(record, "scores.json")}
    assert scores["emoji: returned"] == 0 and scores["upper: sentences"] == rows["upper"]["sentences"]
    assert scores["title: chrf_kept"] == rows["title"]["chrf_kept"] and "word: returned" not in scores
    record["stress"] |= {"upper": {"chrf_kept": "|"}, "other": {}}
    assert "scores.json" in error_of(results_of_record, record, "scores.json")


def test_what_is_evaluated_is_what_translate_writes(model, tmp_path):
    source, out = tmp_path / "s.en", [tmp_path / name for name in "ab"]
    source.write_text("the dog sleeps. the dog sleeps. the dog sleeps.\n")
    assert run("translate", model, "--input", source, "--output", out[0]) == 0
    assert run("evaluate", model, "--source", source, "--reference", source, "--output", out[1]) == 0
    assert out[0].read_text() == out[1].read_text()


def test_the_language_of_the_model_decides_bleus_tokenizer(model, evaluate, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "import.json").write_text(json.dumps({"toolkit": "x", "source": "y", "languages": ["en", "zh"]}))
    assert evaluate("--json", tmp_path / "scores.json", folder=folder) == 0
    assert "|tok:zh|" in json.loads((tmp_path / "scores.json").read_text())["bleu_signature"]


def test_a_translation_memory_is_a_test_set(model, evaluate, tmp_path, fails):
    assert evaluate("--json", tmp_path / "lines.json", "--bleu-tokenizer", "char") == 0
    record = json.loads((tmp_path / "lines.json").read_text())
    assert "|tok:char|" in record["bleu_signature"] and "--bleu-tokenizer char" in record["command"]
    assert evaluate("--json", tmp_path / "lines.json") == 0
    texts = {"en-GB": "The dog sees a cat.", "de": "Der Hund sieht eine Katze."}  # of the lines
    unit = "".join(f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>' for code, text in texts.items())
    memory = tmp_path / "test.tmx"
    memory.write_text(f'<tmx version="1.4"><header/><body>{f"<tu>{unit}</tu>" * 3}</body></tmx>')
    command = ["evaluate", model, "--source", memory, "--reference", memory, "--max-new-tokens", "8"]
    columns = ["--source-column", "en", "--target-column", "de", "--json", tmp_path / "units.json"]
    assert run(*command, *columns) == 0
    one, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("lines", "units"))
    names = ("bleu", "chrf", "perplexity", "sentences")
    assert [one[name] for name in names] == [other[name] for name in names]
    (tmp_path / "link.tmx").symlink_to(memory)
    command[5] = tmp_path / "link.tmx"
    assert run(*command, *columns) == 0
    assert json.loads((tmp_path / "units.json").read_text())["bleu"] == one["bleu"]
    assert "the languages are: de, en-GB" in fails(*command)
    for reference in (tmp_path / "test.de", shutil.copy(memory, tmp_path / "other.tmx")):  # with as many lines
        command[5] = reference
        assert f"error: {memory} holds pairs" in fails(*command, *columns)
    assert f"error: {memory} holds pairs" in fails("score", model, "--source", memory, "--target", memory)
    assert f"error: {memory} holds pairs" in fails("translate", model, "--input", memory)
    assert "a.html.gz is packed" in fails("translate", model, "--input", "a.html.gz")
    command[3:6] = tmp_path / "test.en", "--reference", tmp_path / "test.de"
    assert "--source-column is for one table" in fails(*command, *columns)
    assert "--reference specified multiple times" in fails(*command, "--reference", memory)


def test_models_and_files_are_compared_and_checked(model, evaluate, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_check.py").write_text("def german(source, output, reference):\n    return 'Hund' in reference\n")
    assert evaluate("--output", "out", "--checker", "my_check:german", "--json", "scores.json") == 0
    assert "\ngerman 1.0000\n" in capsys.readouterr().out
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["checked"] == {"german": 1.0} and "--checker my_check:german" in scores["command"]
    assert results_of_record(scores, "a")[-1].metric_name == "checked german"
    assert evaluate("scores.json") == 2
    assert "scores.json holds pairs, not lines: give translations, one a line" in capsys.readouterr().err
    assert evaluate("out", write_model(tmp_path / "other", seed=1), "--json", "scores.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{model}: BLEU ") and len(lines) == 6 + 4 + 2
    assert lines[6] == f"out shows no difference on this test set from {model}: BLEU +0.00"
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert [row["name"] for row in scores["systems"]] == [str(model), "out", str(tmp_path / "other")]
    assert scores["sentences"] == 3 and scores["verdicts"] == lines[6:10]
    assert evaluate("--output", "kept", "--checker", "builtins:print") == 2 and len(Path("kept").read_text()) > 0
    capsys.readouterr()
    assert evaluate(folder="out") == 0 and capsys.readouterr().out.startswith("out: BLEU ")
    (tmp_path / "test.en").write_text("\nA dog.\n" + "dog " * 150 + "\n")
    short = write_model(tmp_path / "learned", position_encoding="learned", max_position_embeddings=40)
    assert evaluate(folder=short) == 2 and "line 3 has" in capsys.readouterr().err  # blank lines count
    (tmp_path / "short").write_text("Ein Hund.\n")
    refused = {
        ("short",): "short has 1 lines for 3 references", ("none",): "no model folder none",
        ("out", "--json", "out"): "--json", ("out", "--output", "x"): "a file of translations, and --output cannot",
        ("--checker", "my_check"): "my_check (MODULE:FUNCTION of source, output and reference): module",
    }  # fmt: skip
    for words, reason in refused.items():
        assert evaluate(*words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and reason in error
