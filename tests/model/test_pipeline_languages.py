"""Pipelines: languages by name for multilingual models, and long texts split into sentences."""

import sys

import pipeline_models
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_models import BART_LIKE, IDS, SHORT, TEXTS, TRANSLATION, by_hand, randomized, texts_by_hand
from transformers import GenerationConfig, MBartConfig, MBartForConditionalGeneration, MBartTokenizer

from vaswani_transformer import TranslationPipeline, pipeline
from vaswani_transformer.model.sentence_splitting_vaswani import sentence_parts, split_into_sentences

tokenizer = pipeline_models.tokenizer
marian = pipeline_models.marian


class TestLanguages:
    @pytest.fixture(scope="class")
    def parts(self):
        from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES

        specials = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz", *FAIRSEQ_LANGUAGE_CODES]
        tokenizer = MBartTokenizer(vocab=[(piece, -1.0) for piece in [*specials, "<mask>"]])
        sizes = {**BART_LIKE, "max_position_embeddings": 60}
        config = MBartConfig(vocab_size=len(tokenizer), **sizes, **{**IDS, "decoder_start_token_id": 2})
        model = randomized(MBartForConditionalGeneration(config))
        model.generation_config = GenerationConfig(**{**IDS, "decoder_start_token_id": 2})
        return model, tokenizer

    def reference(self, parts, source: str, target: str) -> list[str]:
        model, tokenizer = parts
        tokenizer.src_lang = source
        first = tokenizer.convert_tokens_to_ids(target)
        return texts_by_hand(model, tokenizer, forced_bos_token_id=first)

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_by_call_constructor_and_task(self, parts, batch_size):
        german, french = self.reference(parts, "en_XX", "de_DE"), self.reference(parts, "en_XX", "fr_XX")
        assert german != french
        common = {"device": "cpu", "batch_size": batch_size, **SHORT}
        translator = TranslationPipeline(*parts, **common)
        by_call = translator(TEXTS, src_lang="en_XX", tgt_lang="de_DE")
        assert [result[TRANSLATION] for result in by_call] == german
        translator = TranslationPipeline(*parts, src_lang="en_XX", tgt_lang="fr_XX", **common)
        assert [result[TRANSLATION] for result in translator(TEXTS)] == french
        assert [result[TRANSLATION] for result in translator(TEXTS, tgt_lang="de_DE")] == german
        translator = pipeline("translation_en_XX_to_fr_XX", model=parts[0], tokenizer=parts[1], **common)
        assert [result[TRANSLATION] for result in translator(TEXTS)] == french
        assert [result[TRANSLATION] for result in translator(TEXTS, tgt_lang="de_DE")] == german

    @pytest.mark.parametrize(
        ("languages", "message"), [({}, "give src_lang"), ({"src_lang": "en_XX"}, "give tgt_lang")]
    )
    def test_what_is_missing_or_unknown_is_named(self, parts, languages, message):
        with pytest.raises(ValueError, match=message):
            TranslationPipeline(*parts, device="cpu")("red", **languages)


class TestSplitting:
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
    def test_sentences(self, language, sentences):
        breaks = {"A title without a full stop", "Él dijo:"}
        asian = language == "ja_XX"
        text = "".join(part + ("\n\n" if part in breaks else "" if asian else " ") for part in sentences)
        assert split_into_sentences(text, language) == sentences

    def test_blank(self):
        assert split_into_sentences(" \n\n ") == []

    @given(
        st.text(alphabet=st.sampled_from("aBz 1.?!…。\n\r\t\x85\xa0\u2028\"”)'Dr-")),
        st.sampled_from(["en", "de", "zh"]),
    )
    def test_nothing_but_white_space_is_lost(self, text, language):
        assert "".join(sentence_parts(text, language)) == text
        parts = split_into_sentences(text, language)
        assert "".join("".join(parts).split()) == "".join(text.split())
        assert all(part and part == part.strip() for part in parts)

    def test_the_language_is_that_of_the_sources(self, marian, tokenizer):
        text = "Am 3. Oktober kam er."
        whole = by_hand(marian, tokenizer, text)[0]
        for task, options in (("translation_de_to_en", {}), ("translation", {"src_lang": "de_DE"})):
            translator = TranslationPipeline(marian, tokenizer, device="cpu", task=task, **SHORT)
            assert translator(text, split_sentences=True, **options) == [{TRANSLATION: whole}]
        english = TranslationPipeline(marian, tokenizer, device="cpu", **SHORT)(text, split_sentences=True)
        assert english == [{TRANSLATION: " ".join(texts_by_hand(marian, tokenizer, ["Am 3.", "Oktober kam er."]))}]

    def test_without_the_library_the_message_names_it(self, marian, tokenizer, monkeypatch):
        monkeypatch.setitem(sys.modules, "sentencex", None)
        translator = TranslationPipeline(marian, tokenizer, device="cpu", **SHORT)
        assert translator("Two birds. A dog!")
        with pytest.raises(ImportError, match="pip install sentencex"):
            translator("Two birds. A dog!", split_sentences=True)

    def test_the_library_in_a_pipeline(self, marian, tokenizer):
        translator = TranslationPipeline(marian, tokenizer, device="cpu", split_sentences=True, **SHORT)
        expected = " ".join(texts_by_hand(marian, tokenizer, ["Two birds.", "A dog!"]))
        assert translator("Two birds. A dog!") == [{TRANSLATION: expected}]
        whole = by_hand(marian, tokenizer, "Two birds. A dog!")[0]
        assert translator("Two birds. A dog!", split_sentences=False) == [{TRANSLATION: whole}]
