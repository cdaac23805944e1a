"""BLEU and chrF as sacreBLEU computes them, and perplexity, without a network."""

import math
import socket

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from vaswani_transformer import PerplexityMetric, TranslationMetric, UserError
from vaswani_transformer.evaluation import metrics
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
    with pytest.raises(UserError, match="BLEU's tokenizer ja-mecab: Please install"):
        metrics.bleu_metric([], "ja-mecab")


def test_a_string_is_one_text_and_what_is_no_text_is_refused(metric):
    prediction, reference = "Das ist ein sehr gutes Haus", "Das ist ein sehr schönes Haus"
    expected = score_translations([prediction], [reference])
    assert metric.compute(predictions=prediction, references=reference) == expected
    with pytest.raises(UserError, match="reference 2 is None, not text"):
        metric.compute(predictions=["a", "b"], references=["a", None])
    with pytest.raises(ValueError, match=r"."):
        metric.compute(predictions="abc", references=["a", "b", "c"])


@pytest.mark.parametrize(("predictions", "references"), [([], []), (["a"], []), (["a"], ["a", "b"])])
def test_numbers_of_sentences_that_differ_are_refused(metric, predictions, references):
    message = f"{len(predictions)} predictions and {len(references)} references"
    for score in (score_translations, metrics.multi_bleu):
        with pytest.raises(ValueError, match=message):
            score(predictions, references)
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
