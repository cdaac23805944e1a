"""BLEU and chrF as sacreBLEU computes them, and perplexity, without a network."""

import math
import re
import shlex
import socket
import subprocess
import sys
from unittest.mock import Mock

import pytest
import sacrebleu
from conftest import error_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vaswani_transformer import TranslationMetric, perplexity
from vaswani_transformer.evaluation import metrics
from vaswani_transformer.evaluation.metrics import check_outputs, score_translations

PREDICTIONS = ["ein Hund läuft durch den Schnee .", "zwei Katzen schlafen", "Das ist gut!", ""]
REFERENCES = ["ein Hund rennt durch den Schnee .", "zwei Katzen schlafen", "Das ist sehr gut!", "nichts"]


@pytest.fixture
def metric(tmp_path):
    return TranslationMetric(cache_dir=str(tmp_path))


def test_the_metric_needs_no_network(monkeypatch, metric):
    refuse = Mock(side_effect=OSError("no network in this test"))
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
@example([("a ", " a"), ("a b", "ab")])
@given(st.lists(st.tuples(*[st.text("ab äß.,!C\n", max_size=20)] * 2), min_size=1, max_size=8))
def test_equals_sacrebleu(pairs):
    predictions, references = map(list, zip(*pairs, strict=True))
    result = score_translations(predictions, references)
    assert result["bleu"] == sacrebleu.corpus_bleu(predictions, [references]).score
    assert result["chrf"] == sacrebleu.corpus_chrf(predictions, [references]).score
    same = [a.strip() == b.strip() for a, b in pairs if any(map(str.strip, (a, b)))]
    assert result["exact_match"] == pytest.approx(100 * sum(same) / max(1, len(same)))


@pytest.mark.parametrize("sentences", [60, 29, 1])
def test_a_comparison_is_that_of_sacrebleus_command(tmp_path, sentences):
    """Of few sentences, and of systems that differ in few, nothing is said to be shown, however small p is."""
    references = [f"der Hund Nummer {n} sieht heute {n * n} kleine Katzen im Garten {n + 7}" for n in range(sentences)]
    words = [list(enumerate(line.split(), n)) for n, line in enumerate(references)]
    fewer, more = ([" ".join(word for m, word in line if m % every) for line in words] for every in (3, 7))
    texts = {"a": fewer, "b": more, "c": fewer, "d": fewer[:2] + more[2:3] + fewer[3:]}
    for name, lines in {"reference": references, **texts}.items():
        (tmp_path / name).write_text("\n".join(lines))
    words = [sys.executable, *shlex.split("-m sacrebleu reference -i a b c d -m bleu chrf --paired-bs -w 4")]
    # Not as JSON, which fails over numpy's numbers.
    printed = subprocess.run([*words, "-f", "text"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    scores = metrics.compare_systems(list(texts.items()), references, metrics.bleu_metric(references))
    cells = [(row[name], *row[f"{name}_interval"]) for row in scores["systems"] for name in ("bleu", "chrf")]
    expected = re.findall(r"([\d.]+) \(([\d.]+) ± ([\d.]+)\)", printed)
    for (score, low, high), numbers in zip(cells, expected, strict=True):
        assert (score, (low + high) / 2, (high - low) / 2) == pytest.approx(tuple(map(float, numbers)), abs=1e-4)
    ps = [row[f"{name}_p"] for row in scores["systems"][1:] for name in ("bleu", "chrf")]
    for place, (p, shown) in enumerate(zip(ps, re.findall(r"\(p = ([\d.]+)\)", printed), strict=True)):
        assert p == (pytest.approx(float(shown), abs=1e-4) if sentences == 60 and place < 2 else None)
    assert all(scores[f"{name}_signature"] in printed for name in ("bleu", "chrf"))
    better = [" is better than a: " in verdict for verdict in scores["verdicts"]]
    assert better == [sentences == 60, False, False] * 2 and "c shows no difference on this" in scores["verdicts"][1]
    assert ["p = " in verdict for verdict in scores["verdicts"]] == [sentences == 60, False, False] * 2


def test_a_checkers_numbers_are_averaged_and_its_fractions_summed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "json.py").write_text("raise SystemExit")  # no module of Python's own is replaced
    (tmp_path / "checks_of_mine.py").write_text(
        "import json\n"
        "def all_of(s, o, r):\n    return {'equal': o == r, 'long': len(o), 'errors': (o != r, len(r.split()))}\n"
        "def one(s, o, r):\n    return o if r == 'a' else float(s) / (r != 'c')\n"
        "def two(s, o):\n    return 1\n"
    )
    texts = [("1", "a b c", "a b c"), ("2", "a", "b"), ("3", "", "c d"), ("", "", "")]
    assert check_outputs("checks_of_mine:all_of", texts) == pytest.approx({"equal": 1 / 3, "long": 2, "errors": 2 / 6})
    assert check_outputs("checks_of_mine:one", [("4", "", "b"), ("7", "", "d")]) == {"one": 5.5}
    refused = {
        "nowhere:one": "No module named", "checks_of_mine:nothing": "has no attribute 'nothing'",
        "checks_of_mine:two": "too many positional arguments", "checks_of_mine:one": "line 1: could not convert string",
    }  # fmt: skip
    for name, reason in refused.items():
        error = error_of(check_outputs, name, [("1", "x", "a")])
        assert re.match(rf"--checker {name}( \(MODULE:FUNCTION .*\): .*|, ){reason}", error)
    for reference, reason in (("b", "NaN"), ("c", "division by zero")):
        assert re.search(f"line 1: .*{reason}", error_of(check_outputs, "checks_of_mine:one", [("nan", "", reference)]))


# Sentences, the name of sacreBLEU's tokenizer for them, and that with MeCab.
WRITTEN = {
    "Chinese": (["我们在 GNOME 桌面上安装软件包管理器。", "她看了《カタカナ》这本书，也推荐给朋友。"], "zh", "zh"),
    "Japanese": (["GNOME デスクトップ環境のためのライブラリ", "彼は東京大学の学生です。"], "char", "ja-mecab"),
    "Korean": (["GNOME 데스크톱 환경을 위한 라이브러리입니다."], "char", "ko-mecab"),
    "Thai": (["ไลบรารีสำหรับเดสก์ท็อป GNOME และโปรแกรมอื่น"], "char", "char"),
    "Khmer": (["ខ្ញុំស្រឡាញ់ភាសាខ្មែរ"], "char", "char"), "Lao": (["ຂ້ອຍຮັກພາສາລາວ"], "char", "char"),
    "Burmese": (["ကျွန်တော်မြန်မာစာကိုချစ်တယ်"], "char", "char"), "Tibetan": (["ང་བོད་ཡིག་ལ་དགའ།"], "char", "char"),
    "Hindi": (["मुझे यह पुस्तकालय बहुत अच्छा लगता है।"], "13a", "13a"),
    "German that quotes": (["Der Titel 東京物語 heißt auf Deutsch anders als im Original."], "13a", "13a"),
    "nothing": (["", "123 456"], "13a", "13a"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_the_tokenizer_is_that_of_the_references_writing(name):
    """Good translations, a word of which is missing, do not score 0, and as sacreBLEU itself scores them."""
    references, *tokenizers = WRITTEN[name]
    predictions = [text[:5] + text[7:] for text in references]
    result = score_translations(predictions, references)
    [used] = [part[4:] for part in result["bleu_signature"].split("|") if part.startswith("tok:")]
    assert any(used.startswith(each) for each in tokenizers)
    name_of_used = tokenizers[used != tokenizers[0]]
    assert result["bleu"] == sacrebleu.corpus_bleu(predictions, [references], tokenize=name_of_used).score
    assert result["bleu"] > 30 or name == "nothing"


LANGUAGES = {"ja": "char", "jpn_Jpan": "char", "zh-Hant": "zh", "ko": "char", "my": "char", None: "zh", "de": "zh"}


@pytest.mark.parametrize(("language", "expected"), LANGUAGES.items())
def test_a_language_that_is_known_decides_first(language, expected, monkeypatch):
    """Of Chinese characters alone nobody knows whether they are Japanese; one that 13a is for may be a mistake."""

    def without_mecab(tokenize, **_):
        if tokenize.endswith("-mecab"):
            raise RuntimeError("Please install the required dependencies")
        return tokenize

    monkeypatch.setattr(metrics, "BLEU", without_mecab)
    assert metrics.bleu_metric(["東京大学", "日本経済新聞"], language=language) == expected
    assert metrics.bleu_metric(["東京大学"], "intl", language) == "intl"
    assert "BLEU's tokenizer ja-mecab: Please install" in error_of(metrics.bleu_metric, [], "ja-mecab")


def test_a_string_is_one_text_and_what_is_no_text_is_refused(metric):
    prediction, reference = "Das ist ein sehr gutes Haus", "Das ist ein sehr schönes Haus"
    assert metric.compute(predictions=prediction, references=reference) == score_translations([prediction], [reference])
    assert "reference 2 is None, not text" in error_of(metric.compute, predictions=["a", "b"], references=["a", None])
    with pytest.raises(ValueError, match=r"."):
        metric.compute(predictions="abc", references=["a", "b", "c"])


@pytest.mark.parametrize(("predictions", "references"), [([], []), (["a"], []), (["a"], ["a", "b"])])
def test_numbers_of_sentences_that_differ_are_refused(metric, predictions, references):
    with pytest.raises(ValueError, match=f"{len(predictions)} predictions and {len(references)} references"):
        score_translations(predictions, references)
    with pytest.raises(ValueError, match=r"."):
        metric.compute(predictions=predictions, references=references)
    with pytest.raises(ValueError, match=r"."):  # one reference a prediction
        metric.compute(predictions=["a"], references=[["a", "b"]])


def test_perplexity():
    assert perplexity([2.0, 4.0], [1, 3]) == pytest.approx(math.exp(1.5))
    assert math.isfinite(perplexity([1e9], [1]))
    with pytest.raises(ZeroDivisionError):
        perplexity([0.0], [0])
