"""Confidence: the probability of each word of a translation, and the mean of them."""

import json
import math

import pytest
import translating
from model_folders import write_model
from translating import LINES, run

from vaswani_transformer import load_model, score_tokens
from vaswani_transformer.decoding.scoring import PairScore, mean_confidence, word_probabilities

model, source, fails = translating.model, translating.source, translating.fails


def test_words_have_the_probability_of_all_their_tokens():
    score = PairScore(["Ein", " Hau", "s", ".", "</s>"], [-0.1, -0.2, -0.3, -0.4, -9.0])
    assert word_probabilities(score) == [
        ("Ein", pytest.approx(math.exp(-0.1))),
        ("Haus.", pytest.approx(math.exp(-0.9))),
    ]
    assert mean_confidence(word_probabilities(score)) == pytest.approx((math.exp(-0.1) + math.exp(-0.9)) / 2)
    assert mean_confidence([]) == 1


def test_a_token_of_several_words_counts_for_each():
    score = PairScore([" 我的", "电", "", "脑", "。", " x", "</s>"], [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -9.0])
    assert [(word, pytest.approx(math.log(probability))) for word, probability in word_probabilities(score)] == [
        ("我", -0.1),
        ("的", -0.1),
        ("电", -0.5),  # in two tokens, of which the text is that of the first
        ("脑。", -0.9),
        ("x", -0.6),
    ]


def test_the_command(model, source, tmp_path):
    """Each translation with the probabilities of its words and, in text, their mean."""
    command = "translate", model, "--input", source, "--confidence", "--output"
    assert run(*command, tmp_path / "text") == 0 and run(*command, tmp_path / "json", "--format", "json") == 0
    rows = [json.loads(line)["hypotheses"][0] for line in (tmp_path / "json").read_text().splitlines()]
    for line, row in zip((tmp_path / "text").read_text().splitlines(), rows, strict=True):
        assert line.split("\t")[0] == f"{row['confidence']:.3f}"
    filled = [(text, row) for text, row in zip(LINES, rows, strict=True) if row["text"].strip()]
    sources, outputs = [text for text, _ in filled], [row["text"] for _, row in filled]
    for (_, row), score in zip(filled, score_tokens(*load_model(model, "cpu"), sources, outputs), strict=True):
        assert " ".join(word for word, _ in row["words"]).split() == row["text"].split()
        expected = [probability for _, probability in word_probabilities(score)]
        assert [probability for _, probability in row["words"]] == pytest.approx(expected, rel=1e-4)
        assert row["confidence"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    blank = rows[[line.strip() for line in LINES].index("")]
    assert (blank["words"], blank["confidence"]) == ([], 1.0)


@pytest.mark.parametrize("option", ["--confidence", "--alignments"])
def test_a_line_that_has_no_positions_is_named_behind_the_others(option, tmp_path, fails):
    folder = write_model(tmp_path / "model", position_encoding="learned")
    (tmp_path / "lines").write_text("a dog\n" * 3 + "a dog " * 60 + "\na dog\n")
    files = "--input", tmp_path / "lines", "--output", tmp_path / "out"
    assert "line 4 has" in fails("translate", folder, *files, option)
    assert (tmp_path / "out").read_text().count("\n") == 3
