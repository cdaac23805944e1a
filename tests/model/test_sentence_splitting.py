"""Texts split into sentences, alone and in pipelines."""

import sys

import pipeline_models
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pipeline_models import SHORT, TRANSLATION, by_hand, texts_by_hand

from vaswani_transformer import TranslationPipeline
from vaswani_transformer.model.sentence_splitting_vaswani import join_translations, sentence_parts, split_into_sentences

model, tokenizer = pipeline_models.model, pipeline_models.tokenizer


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("en", ["It rains.", "Does it?", "Yes!", "No."]),
        ("de_DE", ["Am 3. Oktober kam z. B. Frau Dr. Braun, d.h. heute.", "Ging sie um 12.30 Uhr?"]),
        ("ja_XX", ["今日は雨です。", "本当？", "はい！"]),
        ("en", ["A title without a full stop", "Then a paragraph that\nis wrapped."]),
        ("es", ["Wait... what?!", "Él dijo:", "¿Qué?"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_sentences(language, sentences):
    breaks = {"A title without a full stop", "Él dijo:"}
    space = "" if language == "ja_XX" else " "
    text = "".join(part + ("\n\n" if part in breaks else space) for part in sentences)
    assert split_into_sentences(text, language) == sentences


@given(
    st.text(alphabet=st.sampled_from("aBz 1.?!…。\n\r\t\x85\xa0\u2028\"”)'Dr-")), st.sampled_from(["en", "de", "zh"])
)
@example(" \n\n ", "en")
def test_nothing_but_white_space_is_lost(text, language):
    assert "".join(sentence_parts(text, language)) == text
    parts = split_into_sentences(text, language)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(part and part == part.strip() for part in parts)


def test_the_language_is_that_of_the_sources(model, tokenizer):
    text = "Am 3. Oktober kam er."
    whole = by_hand(model, tokenizer, text)[0]
    for task, options in (("translation_de_to_en", {}), ("translation", {"src_lang": "de_DE"})):
        translator = TranslationPipeline(model, tokenizer, device="cpu", task=task, **SHORT)
        assert translator(text, split_sentences=True, **options) == [{TRANSLATION: whole}]
    english = TranslationPipeline(model, tokenizer, device="cpu", **SHORT)(text, split_sentences=True)
    assert english == [{TRANSLATION: " ".join(texts_by_hand(model, tokenizer, ["Am 3.", "Oktober kam er."]))}]


def test_without_the_library_the_message_names_it(model, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencex", None)
    translator = TranslationPipeline(model, tokenizer, device="cpu", **SHORT)
    assert translator("Two birds. A dog!")
    with pytest.raises(ImportError, match="pip install sentencex"):
        translator("Two birds. A dog!", split_sentences=True)


def test_nothing_is_between_sentences_of_which_one_has_no_translation():
    assert join_translations(["", "a.", "", "b.", ""]) == "a. b."


def test_the_library_in_a_pipeline(model, tokenizer):
    translator = TranslationPipeline(model, tokenizer, device="cpu", split_sentences=True, **SHORT)
    expected = " ".join(texts_by_hand(model, tokenizer, ["Two birds.", "A dog!"]))
    assert translator("Two birds. A dog!") == [{TRANSLATION: expected}]
    whole = by_hand(model, tokenizer, "Two birds. A dog!")[0]
    assert translator("Two birds. A dog!", split_sentences=False) == [{TRANSLATION: whole}]
