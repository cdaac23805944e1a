"""BLEU and chrF as sacreBLEU computes them, and perplexity, without a network."""

import math
import socket

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from vaswani_transformer import PerplexityMetric, TranslationMetric
from vaswani_transformer.evaluation.metrics import score_translations

PREDICTIONS = ["ein Hund läuft durch den Schnee .", "zwei Katzen schlafen", "Das ist gut!", ""]
REFERENCES = ["ein Hund rennt durch den Schnee .", "zwei Katzen schlafen", "Das ist sehr gut!", "nichts"]


@pytest.fixture
def metric(tmp_path):
    return TranslationMetric(cache_dir=str(tmp_path))


def test_the_metric_needs_no_network(monkeypatch, metric):
    def refuse(*_, **__):
        raise OSError("no network in this test")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    result = metric.compute(predictions=PREDICTIONS, references=REFERENCES)
    assert result == score_translations(PREDICTIONS, REFERENCES)
    assert result.keys() == {"bleu", "chrf", "exact_match", "bleu_signature", "chrf_signature"}
    assert 0 < result["bleu"] < 100 and 0 < result["chrf"] < 100 and result["exact_match"] == 25.0
    metric.add(prediction="a", reference="a")
    metric.add_batch(predictions=["b", "c"], references=["b", "d"])
    assert metric.compute() == score_translations(["a", "b", "c"], ["a", "b", "d"])


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.text("ab äß.,!C\n", max_size=20)] * 2), min_size=1, max_size=8))
def test_equals_sacrebleu(pairs):
    predictions, references = map(list, zip(*pairs, strict=True))
    result = score_translations(predictions, references)
    assert result["bleu"] == sacrebleu.corpus_bleu(predictions, [references]).score
    assert result["chrf"] == sacrebleu.corpus_chrf(predictions, [references]).score
    assert result["exact_match"] == pytest.approx(100 * sum(a == b for a, b in pairs) / len(pairs))


def test_signatures_say_how_scores_were_computed():
    result = score_translations(["Das ist gut(!)"], ["Das ist gut (!)"])
    for part in ("nrefs:1", "case:mixed", "eff:no", "tok:13a", "smooth:exp", f"version:{sacrebleu.__version__}"):
        assert part in result["bleu_signature"]
    for part in ("nrefs:1", "case:mixed", "nc:6", "nw:0", f"version:{sacrebleu.__version__}"):
        assert part in result["chrf_signature"]


@pytest.mark.parametrize(("predictions", "references"), [([], []), (["a"], []), (["a"], ["a", "b"])])
def test_numbers_of_sentences_that_differ_are_refused(metric, predictions, references):
    message = f"{len(predictions)} predictions and {len(references)} references"
    with pytest.raises(ValueError, match=message):
        score_translations(predictions, references)
    with pytest.raises(ValueError, match=r"."):
        metric.compute(predictions=predictions, references=references)
    with pytest.raises(ValueError, match=r"."):  # one reference a prediction
        metric.compute(predictions=["a"], references=[["a", "b"]])


def test_perplexity(tmp_path):
    metric = PerplexityMetric(cache_dir=str(tmp_path))
    perplexity = metric.compute(predictions=[2.0, 4.0], references=[1, 3])["perplexity"]
    assert perplexity == pytest.approx(math.exp(1.5))
    assert math.isfinite(metric.compute(predictions=[1e9], references=[1])["perplexity"])
    with pytest.raises(ZeroDivisionError):
        metric.compute(predictions=[0.0], references=[0])
