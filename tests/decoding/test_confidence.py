"""Confidence in words and sentences: what counts as right, the fit against shares that are known, files and command."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import translating
from conftest import error_of
from hypothesis import given
from hypothesis import strategies as st
from model_folders import write_model
from safetensors.torch import save_file
from translating import LINES, run

from vaswani_transformer import load_model
from vaswani_transformer.decoding import confidence
from vaswani_transformer.decoding.confidence import fit, read_calibration, reliability, right_words, scored_words
from vaswani_transformer.decoding.scoring import PairScore, score_tokens
from vaswani_transformer.evaluation.records import tensors_sha256

model, source, fails = translating.model, translating.source, translating.fails
WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=8)


def scored(probabilities):
    """An output of one-token words with these probabilities, and a sure end."""
    tokens = [f" w{number}" for number in range(len(probabilities))]
    return PairScore([*tokens, "</s>"], [*map(math.log, probabilities), 0.0])


@given(WORDS, WORDS)
def test_right_words_are_in_the_reference_in_this_order(output, reference):
    right = right_words(output, reference)
    rest = iter(reference)
    assert all(word in rest for word, is_right in zip(output, right, strict=True) if is_right)
    assert all(right_words(output, output))
    assert not any(right_words(output, ["z"] * len(reference)))


def test_one_wrong_word_among_others():
    assert right_words(["ein", "Mann", "läuft", "schnell", "weg"], ["ein", "Mann", "rennt", "schnell", "weg"]) == [
        1,
        1,
        0,
        1,
        1,
    ]
    assert right_words(["a", "b"], ["x", "a", "y", "b", "z"]).count(True) >= 1


def test_words_have_the_probability_of_all_their_tokens():
    score = PairScore(["Ein", " Hau", "s", ".", "</s>"], [-0.1, -0.2, -0.3, -0.4, -9.0])
    assert [(word.text, pytest.approx(word.log_probability)) for word in scored_words(score)] == [
        ("Ein", -0.1),
        ("Haus.", -0.9),
    ]


def test_a_token_of_several_words_counts_for_each():
    score = PairScore([" 我的", "电", "", "脑", "。", " x", "</s>"], [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -9.0])
    assert [(word.text, pytest.approx(word.log_probability)) for word in scored_words(score)] == [
        ("我", -0.1),
        ("的", -0.1),
        ("电", -0.5),  # in two tokens, of which the text is that of the first
        ("脑。", -0.9),
        ("x", -0.6),
    ]


def overconfident(pairs, seed):
    """Outputs whose words are right with the square of the probability that the model gives them."""
    generator = torch.Generator().manual_seed(seed)
    scores, references = [], []
    for _ in range(pairs):
        given = (0.1 + 0.89 * torch.rand(10, generator=generator)).tolist()
        right = torch.rand(10, generator=generator).tolist()
        scores.append(scored(given))
        words = (f"w{n}" if draw < p**2 else f"other{n}" for n, (p, draw) in enumerate(zip(given, right, strict=True)))
        references.append(" ".join(words))
    return scores, references


def test_a_fit_finds_how_often_words_are_right():
    calibration = fit(*overconfident(800, seed=0))
    assert calibration.before.error > 0.1
    assert calibration.after.error < 0.03
    scores, references = overconfident(800, seed=1)
    sure = [calibration.words(score) for score in scores]
    right = [
        right_words([word for word, _ in own], reference.split())
        for own, reference in zip(sure, references, strict=True)
    ]
    flat = torch.tensor([value for own in sure for _, value in own])
    fresh = reliability(flat, torch.tensor([float(value) for own in right for value in own]))
    assert fresh.error < 0.03
    # A surer token is a surer word, in the same sentence.
    values = [value for _, value in calibration.words(scored([0.2, 0.5, 0.9]))]
    assert values == sorted(values) and values[0] > 0 and values[-1] < 1


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
def test_reliability_counts_every_word_once(words):
    sure, right = (torch.tensor(column, dtype=torch.float64) for column in zip(*words, strict=True))
    found = reliability(sure, right)
    assert sum(found.words) == len(words)
    assert sum(share * number for share, number in zip(found.right, found.words, strict=True)) == pytest.approx(
        right.sum()
    )
    assert 0 <= found.error <= 1


def test_too_little_to_fit():
    assert "200 or more" in error_of(fit, *overconfident(3, seed=0))
    scores, _ = overconfident(100, seed=0)
    assert "some wrong" in error_of(fit, scores, ["w0 w1 w2 w3 w4 w5 w6 w7 w8 w9"] * 100)
    long, empty = scored([0.5] * 250), PairScore(["</s>"], [-0.1])  # nothing would be left for the fit of a part
    few = [long, *[empty] * 10], ["w0 w1", *[""] * 10]
    assert "250 words of 11 sentences" in error_of(fit, *few)


@pytest.fixture
def calibration(tmp_path):
    """Of the weights in `tmp_path`."""
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    return fit(*overconfident(100, seed=2), tensors_sha256(tmp_path))


def test_written_and_read_again(tmp_path, calibration):
    calibration.write(tmp_path)
    assert read_calibration(tmp_path) == calibration
    assert (tmp_path / "calibration.png").stat().st_size > 1000
    calibration.write(tmp_path)  # ours is replaced
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert "of other weights" in error_of(read_calibration, tmp_path)


def test_files_that_are_not_ours(tmp_path, calibration, source, fails):
    assert "vaswani calibrate" in error_of(read_calibration, tmp_path)
    path = tmp_path / confidence.CALIBRATION
    path.write_text('{"mine": 1}')
    assert "move it away" in error_of(calibration.write, tmp_path)
    assert path.read_text() == '{"mine": 1}'
    assert "no calibration" in error_of(read_calibration, tmp_path)
    (exported := tmp_path / "exported").mkdir()
    (exported / "export.json").write_text("{}")
    line = error_of(read_calibration, exported)  # which `vaswani calibrate` refuses
    assert "is an exported model" in line and "vaswani calibrate" not in line
    line = fails("calibrate", tmp_path, "--source", source, "--reference", source)  # before a model is looked for
    assert "move it away" in line


def test_damaged_files(tmp_path, calibration):
    calibration.write(tmp_path)
    path = tmp_path / confidence.CALIBRATION
    values = json.loads(path.read_text())
    ragged = values["after"] | {"words": []}
    for change in (
        {"weights": [1.0]}, {"weights": [1, "a", 2]}, {"weights": [1, 2, math.inf]}, {"sentences": "<b>"}, {"after": 3},
        {"after": ragged}, {"before": {"words": [1]}}, {"more": 1}, {"tensors_sha256": None}, {"format": 1},
    ):  # fmt: skip
        path.write_text(json.dumps(values | change))
        assert "vaswani calibrate" in error_of(read_calibration, tmp_path), change


def check_translations(folder, source, output, calibration):
    """Each translation with the calibrated confidence of its words and, in text, their mean."""
    command = "translate", folder, "--input", source, "--confidence", "--output"
    assert run(*command, output) == 0 and run(*command, f"{output}.json", "--format", "json") == 0
    rows = [json.loads(line)["hypotheses"][0] for line in Path(f"{output}.json").read_text().splitlines()]
    for line, row in zip(output.read_text().splitlines(), rows, strict=True):
        assert line.split("\t")[0] == f"{row['confidence']:.3f}"
    model, tokenizer = load_model(folder, "cpu")
    filled = [(text, row) for text, row in zip(LINES, rows, strict=True) if row["text"].strip()]
    scores = score_tokens(
        model, tokenizer, *([*side] for side in zip(*((t, r["text"]) for t, r in filled), strict=True))
    )
    for (_, row), score in zip(filled, scores, strict=True):
        assert " ".join(word for word, _ in row["words"]).split() == row["text"].split()
        expected = [sure for _, sure in calibration.words(score)]
        assert [sure for _, sure in row["words"]] == pytest.approx(expected, rel=1e-4)
        assert row["confidence"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    blank = rows[[line.strip() for line in LINES].index("")]
    assert (blank["words"], blank["confidence"]) == ([], 1.0)


@pytest.mark.parametrize("option", ["--confidence", "--alignments"])
def test_a_line_that_has_no_positions_is_named_behind_the_others(option, tmp_path, fails, capsys):
    folder = write_model(tmp_path / "model", position_encoding="learned")
    part = reliability(torch.tensor([0.5]), torch.tensor([1.0]))
    confidence.Calibration([1.0, 0.0, 0.0], tensors_sha256(folder), 1, part, part).write(folder)
    (tmp_path / "lines").write_text("a dog\n" * 3 + "a dog " * 60 + "\na dog\n")
    assert "line 4 has" in fails(
        "translate", folder, "--input", tmp_path / "lines", option, "--output", tmp_path / "out"
    )
    assert (tmp_path / "out").read_text().count("\n") == 3


def test_the_command(tmp_path, model, source, capsys, fails):
    """References that are the model's own translations in half of the lines."""
    folder, outputs = tmp_path / "model", tmp_path / "outputs"
    shutil.copytree(model, folder)
    assert run("translate", folder, "--input", source, "--output", outputs) == 0
    own = outputs.read_text().split("\n")[: len(LINES)]
    (tmp_path / "sources").write_text("\n".join(LINES * 2) + "\n")
    lines = [line if number % 2 else "something else" for number, line in enumerate(own * 2)]
    (tmp_path / "references").write_text("\n".join(lines) + "\n")
    assert "vaswani calibrate" in fails("translate", folder, "a sentence", "--confidence")
    files = "--source", tmp_path / "sources", "--reference", tmp_path / "references", "--max-new-tokens", "16"
    assert run("calibrate", folder, *files) == 0
    printed = capsys.readouterr().out
    assert "of them as in the references" in printed and "expected calibration error" in printed
    found = read_calibration(folder)
    assert (
        0.3 < sum(map(math.prod, zip(found.after.right, found.after.words, strict=True))) / sum(found.after.words) < 0.7
    )
    check_translations(folder, source, tmp_path / "sure", found)
    (tmp_path / "references").write_text("\n".join(["nothing"] * len(lines)) + "\n")
    assert "some right and some wrong" in fails("calibrate", folder, *files)
    assert read_calibration(folder) == found
