"""`vaswani translate` on files: what it writes, what it refuses, and what it wants to resume."""

import gzip
import json
from unittest.mock import Mock

import pytest
import torch
import translating
from model_folders import PAIRS, write_model
from translating import LINES, OPTIONS, run

from vaswani_transformer.decoding.output import notes_path
from vaswani_transformer.decoding.translator import Translator

model, source, expected = translating.model, translating.source, translating.expected


def test_a_line_for_each_line_and_nothing_beside_it(expected, model, source, tmp_path):
    assert expected.count(b"\n") == len(LINES) and expected.decode().split("\n")[len(PAIRS)] == ""
    with gzip.open(tmp_path / "in.gz", "wb") as file:
        file.write(source.read_bytes())
    assert run("translate", model, "--input", tmp_path / "in.gz", "--output", tmp_path / "out", *OPTIONS) == 0
    assert (tmp_path / "out").read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gz", "out"]


def test_what_is_written_is_there_for_readers_at_once(model, source, tmp_path, monkeypatch):
    seen = []
    translate = Translator.translate_prepared

    def look(self, prepared, progress=None):
        seen.append((tmp_path / "out").read_bytes().count(b"\n"))
        return translate(self, prepared, progress)

    monkeypatch.setattr(Translator, "translate_prepared", look)
    assert run("translate", model, "--input", source, "--output", tmp_path / "out", *OPTIONS) == 0
    assert seen == list(range(0, len(LINES), 7))


def test_nbest_with_scores_and_json(model, source, expected, tmp_path):
    command = ["translate", model, "--input", source, *OPTIONS[:2], "--window", "7", "--beams", "2", "--nbest", "2"]
    assert run(*command, "--output", tmp_path / "text") == 0
    assert run(*command, "--output", tmp_path / "json", "--format", "json", "--return-alignments") == 0
    rows = [line.split("\t") for line in (tmp_path / "text").read_text().split("\n")[:-1]]
    assert [int(row[0]) for row in rows] == [number for number in range(1, len(LINES) + 1) for _ in range(2)]
    assert all(float(one[1]) >= float(two[1]) for one, two in zip(rows[::2], rows[1::2], strict=True))
    best = expected.decode().split("\n")[:-1]
    assert [row[2] for row in rows[::2]] == [line.replace("\t", " ") for line in best]
    records = [json.loads(line) for line in (tmp_path / "json").read_text().split("\n")[:-1]]
    assert [record["line"] for record in records] == list(range(1, len(LINES) + 1))
    found = [hypothesis for record in records for hypothesis in record["hypotheses"]]
    for row, hypothesis in zip(rows, found, strict=True):
        assert hypothesis["text"].replace("\t", " ") == row[2]
        assert float(row[1]) == pytest.approx(hypothesis["score"], abs=1e-6)
        if hypothesis["text"].strip():  # the paper's rule, alpha 0.6
            wanted = hypothesis["log_probability"] / ((5 + hypothesis["tokens"]) / 6) ** 0.6
            assert hypothesis["score"] == pytest.approx(wanted) and hypothesis["alignment"]


def test_a_seed_repeats_a_sample_and_windows_do_not_repeat_each_other(model, tmp_path):
    (tmp_path / "in").write_text("A dog.\n" * 14)
    command = ["translate", model, "--input", tmp_path / "in", *OPTIONS[:2], "--window", "7", "--sample"]
    texts = []
    for name, seed in (("one", ["--seed", "5"]), ("two", ["--seed", "5"]), ("three", ["--seed", "6"])):
        assert run(*command, *seed, "--output", tmp_path / name) == 0
        texts.append((tmp_path / name).read_text().split("\n"))
    assert texts[0] == texts[1] and texts[0] != texts[2]
    assert texts[0][:7] != texts[0][7:14]
    assert run(*command, "--seed", "5", "--top-k", "1", "--output", tmp_path / "greedy") == 0
    assert run(*command[:-1], "--beams", "1", "--output", tmp_path / "plain") == 0
    assert (tmp_path / "greedy").read_text() == (tmp_path / "plain").read_text()


def test_prefixes_begin_their_translations(model, source, tmp_path, fails):
    begins = [target.split()[0] if number % 2 else "" for number, (_, target) in enumerate(PAIRS)]
    (tmp_path / "prefix").write_text("\n".join(begins + ["Ein"] * (len(LINES) - len(PAIRS))) + "\n")
    command = ["translate", model, "--input", source, "--output", tmp_path / "out", "--prefix", tmp_path / "prefix"]
    assert run(*command, "--beams", "2", "--max-new-tokens", "24") == 0
    out = (tmp_path / "out").read_text().split("\n")
    assert all(line.startswith(begin) for line, begin in zip(out, begins, strict=False))
    assert out[len(PAIRS)] == ""  # an empty line stays one
    line = fails(*command[:-3], tmp_path / "short", *command[-2:], "--max-new-tokens", "2")
    assert "line 2 of the prefixes has" in line and "an output of at most 2" in line


def test_mistakes_in_options(model, source, tmp_path, fails):
    (tmp_path / "prefix").write_text("Ein\n")
    for message, words in (
        ("--nbest is 3 and the beam size is 2: give --beams 3", ["A dog.", "--beams", "2", "--nbest", "3"]),
        ("--top-p", ["A dog.", "--top-p", "0.5"]),
        ("precision is 'int3': it must be one of float32", ["A dog.", "--precision", "int3"]),
        ("give --input FILE and --output FILE", ["--input", source, "--resume"]),
        ("give --input FILE and --output FILE", ["--glossary", source, "--output", source, "--resume"]),
        ("has 1 lines", ["--input", source, "--prefix", tmp_path / "prefix"]),
    ):
        assert message in fails("translate", model, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("MPS backend out of memory (9 MiB).")]
)
def test_a_batch_too_large_for_the_memory(model, monkeypatch, fails, error):
    full = Mock(side_effect=error)
    monkeypatch.setattr("vaswani_transformer.decoding.search.generate", full)
    assert "out of memory: lower --tokens-per-batch or --beams" in fails("translate", model, "A dog.", status=1)
    words = ["--target", "A dog.", "--output", "unused.html"]
    monkeypatch.setattr("vaswani_transformer.attention.weights.attend", full)
    assert fails("attention", model, "A dog.", *words, status=1).endswith("use a machine with more of it")


def test_lines_longer_than_all_of_the_training_are_split(tmp_path, capsys, caplog):
    folder = write_model(tmp_path / "model")
    (tmp_path / "in").write_text("A dog sees a cat. The cat sees two dogs. One dog is here. A cat was there.\n" * 2)
    command, outputs = ["translate", folder, "--input", tmp_path / "in", *OPTIONS], []
    for most, options in ((30, []), (None, ["--max-source-tokens", "30"]), (30, ["--long-lines", "refuse"])):
        (folder / "recipe.yaml").write_text(f"max_length: {most}\n" if most else "")
        assert run(*command, *options) == 0
        outputs.append(capsys.readouterr().out)
        assert ("2 lines were longer" in caplog.text) == ("refuse" not in options)
        caplog.clear()
    assert outputs[0] == outputs[1] != outputs[2]
    (tmp_path / "in").write_text(" ".join(f"{number} dogs see a cat." for number in range(200)))
    (folder / "recipe.yaml").unlink()  # an imported model says nothing of it
    assert run(*command) == 0 and "1 line was longer" in caplog.text


def test_resuming_wants_the_same_input_model_and_options(model, source, tmp_path, fails):
    command = ["translate", model, "--output", tmp_path / "out"]
    bad = tmp_path / "bad"
    bad.write_text("A dog.\n" * 8 + "sees a dog " * 60 + "\n")
    refused = [*command, *OPTIONS, "--max-source-tokens", "50", "--long-lines", "refuse"]
    assert "line 9" in fails(*refused, "--input", bad)
    written = (tmp_path / "out").read_text()
    assert written.count("\n") == 8
    assert "--input was " in fails(*refused, "--input", source, "--resume")
    other = write_model(tmp_path / "model", seed=3)
    assert "MODEL was " in fails("translate", other, *refused[2:], "--input", bad, "--resume")
    assert (tmp_path / "out").read_text() == written
    assert run(*refused[:-1], "split", "--input", bad, "--resume") == 0
    assert (tmp_path / "out").read_text().startswith(written) and not notes_path(tmp_path / "out").exists()
