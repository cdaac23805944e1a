"""BLEU and chrF as sacreBLEU has them, without a network."""

import json
import os
import subprocess
import sys

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from vaswani_transformer.evaluation.metrics import TranslationMetric, score_translations

PREDICTIONS = ["ein Hund läuft durch den Schnee .", "zwei Katzen schlafen", "Das ist gut!", ""]
REFERENCES = ["ein Hund rennt durch den Schnee .", "zwei Katzen schlafen", "Das ist sehr gut!", "nichts"]

OFFLINE = """
import json, socket, sys

def refuse(*args, **kwargs):
    raise OSError("no network in this test")

socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
from vaswani_transformer.evaluation.metrics import TranslationMetric
metric = TranslationMetric()
first = metric.compute(**json.load(sys.stdin))
metric.add(prediction="a", reference="a")
metric.add_batch(predictions=["b", "c"], references=["b", "d"])
print(json.dumps([first, metric.compute()]))
"""


def test_without_a_network(tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("HF_HUB_OFFLINE", None)  # it must not even try
    given_texts = json.dumps({"predictions": PREDICTIONS, "references": REFERENCES})
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], input=given_texts, capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    whole, added = json.loads(done.stdout)
    assert whole == score_translations(PREDICTIONS, REFERENCES)
    assert added == score_translations(["a", "b", "c"], ["a", "b", "d"])


def metric(folder):
    return TranslationMetric(cache_dir=str(folder))


def test_equals_sacrebleu(tmp_path):
    result = metric(tmp_path).compute(predictions=PREDICTIONS, references=REFERENCES)
    bleu = sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES])
    chrf = sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES])
    assert result["bleu"] == bleu.score
    assert result["chrf"] == chrf.score
    assert 0 < result["bleu"] < 100
    assert 0 < result["chrf"] < 100
    assert result["exact_match"] == 25.0
    assert result.keys() == {"bleu", "chrf", "exact_match", "bleu_signature", "chrf_signature"}
    assert score_translations(PREDICTIONS, REFERENCES) == result


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.text("ab äß.,!C\n", max_size=20)] * 2), min_size=1, max_size=8))
def test_equals_sacrebleu_on_anything(pairs):
    predictions, references = map(list, zip(*pairs, strict=True))
    result = score_translations(predictions, references)
    assert result["bleu"] == sacrebleu.corpus_bleu(predictions, [references]).score
    assert result["chrf"] == sacrebleu.corpus_chrf(predictions, [references]).score
    assert result["exact_match"] == pytest.approx(100 * sum(a == b for a, b in pairs) / len(pairs))


def test_perfect_and_hopeless():
    perfect = score_translations(REFERENCES[:3], REFERENCES[:3])
    assert perfect["bleu"] == pytest.approx(100)
    assert perfect["chrf"] == pytest.approx(100)
    assert perfect["exact_match"] == 100
    hopeless = score_translations(["xxx yyy"], ["ein Hund läuft hier"])
    assert hopeless["bleu"] < 15
    assert hopeless["exact_match"] == 0


def test_case_counts():
    """Cased, as the paper's figures are not but today's are."""
    sentence = "Ein Hund läuft durch den Schnee"
    assert score_translations([sentence.lower()], [sentence])["bleu"] < 90


def test_signatures_say_how_it_was_computed(tmp_path):
    result = metric(tmp_path).compute(predictions=["a"], references=["a"])
    for part in ("nrefs:1", "case:mixed", "eff:no", "tok:13a", "smooth:exp", f"version:{sacrebleu.__version__}"):
        assert part in result["bleu_signature"]
    for part in ("nrefs:1", "case:mixed", "nc:6", "nw:0", f"version:{sacrebleu.__version__}"):
        assert part in result["chrf_signature"]


def test_other_tokenisation():
    predictions, references = ["Das ist gut(!)"], ["Das ist gut (!)"]
    result = score_translations(predictions, references, tokenize="char")
    assert result["bleu"] == sacrebleu.corpus_bleu(predictions, [references], tokenize="char").score
    assert "tok:char" in result["bleu_signature"]


@pytest.mark.parametrize(
    ("predictions", "references"), [([], []), (["a"], []), ([], ["a"]), (["a", "b"], ["a"]), (["a"], ["a", "b"])]
)
def test_errors(tmp_path, predictions, references):
    message = f"{len(predictions)} predictions and {len(references)} references"
    with pytest.raises(ValueError, match=message):
        score_translations(predictions, references)
    with pytest.raises(ValueError, match=r"."):
        metric(tmp_path).compute(predictions=predictions, references=references)


def test_wrong_types_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"."):
        metric(tmp_path).compute(predictions=["a"], references=[["a", "b"]])
