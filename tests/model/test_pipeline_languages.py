"""Pipelines: languages by name for multilingual models, and long texts split into sentences."""

import pipeline_models
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_models import BART_LIKE, IDS, SHORT, TEXTS, TRANSLATION, by_hand, randomized, texts_by_hand
from transformers import GenerationConfig, MBartConfig, MBartForConditionalGeneration, MBartTokenizer

from vaswani_transformer import TranslationPipeline, pipeline
from vaswani_transformer.model.sentence_splitting_vaswani import split_into_sentences

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
        ("languages", "message"),
        [
            ({}, "give src_lang"),
            ({"src_lang": "en_XX"}, "give tgt_lang"),
            ({"src_lang": "en_XX", "tgt_lang": "xx"}, "tokenizer has no language 'xx'"),
            ({"src_lang": "xx", "tgt_lang": "en_XX"}, "tokenizer has no language 'xx'"),
        ],
    )
    def test_what_is_missing_or_unknown_is_named(self, parts, languages, message):
        with pytest.raises(ValueError, match=message):
            TranslationPipeline(*parts, device="cpu")("red", **languages)

    def test_models_of_one_direction_ignore_them(self, marian, tokenizer):
        translator = TranslationPipeline(marian, tokenizer, device="cpu", **SHORT)
        assert translator("red", src_lang="en", tgt_lang="de") == translator("red")


class TestSplitting:
    @pytest.mark.parametrize(
        "sentences",
        [
            ["It rains.", "Does it?", "Yes!", "Well…", "No."],
            ["Mr. Smith paid 3.50 to Dr. J. R. Jones, etc. and left.", "He saw No. 5 and Fig. 2."],
            ["Am 3. Oktober kam z. B. Frau Dr. Braun, d.h. heute.", "Ging sie um 12.30 Uhr?"],
            ['"Really?" he said.', "“Yes.”", "(They left.)", "'It was 1990.'", "Then came 1991."],
            ["He said no.", "So it was."],
            ["今日は雨です。", "本当？", "はい！"],
            ["A title without a full stop", "Then a paragraph that\nis wrapped."],
            ["Wait... what?!", "Él dijo:", "¿Qué?"],
            ["Visit example.com or v2.5 of it."],
        ],
        ids=lambda sentences: sentences[0],
    )
    def test_sentences(self, sentences):
        asian = sentences[0][-1] == "。"
        breaks = {"A title without a full stop", "Él dijo:"}
        text = "".join(part + ("\n\n" if part in breaks else "" if asian else " ") for part in sentences)
        assert split_into_sentences(text) == sentences

    def test_blank(self):
        assert split_into_sentences(" \n\n ") == []

    @given(st.text(alphabet=st.sampled_from("aBz 1.?!…。\n\t\"”)'Dr-")))
    def test_nothing_but_white_space_is_lost(self, text):
        parts = split_into_sentences(text)
        assert "".join("".join(parts).split()) == "".join(text.split())
        assert all(part and part == part.strip() for part in parts)

    def test_the_built_in_rule_in_a_pipeline(self, marian, tokenizer):
        translator = TranslationPipeline(marian, tokenizer, device="cpu", split_sentences=True, **SHORT)
        expected = " ".join(texts_by_hand(marian, tokenizer, ["Two birds.", "A dog!"]))
        assert translator("Two birds. A dog!") == [{TRANSLATION: expected}]
        whole = by_hand(marian, tokenizer, "Two birds. A dog!")[0]
        assert translator("Two birds. A dog!", split_sentences=False) == [{TRANSLATION: whole}]

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"split_sentences": "yes"}, TypeError, "split_sentences is 'yes': give True, False or a function"),
            ({"split_sentences": str.strip}, TypeError, "gave a str for row 0"),
            ({"split_sentences": lambda text: [text, None]}, TypeError, "row 0, sentence 1 is of type NoneType"),
            ({"split_sentences": True, "return_tensors": True}, ValueError, "split_sentences joins texts"),
        ],
        ids=["no function", "a string", "a None", "tensors"],
    )
    def test_what_cannot_be(self, marian, tokenizer, options, error, message):
        with pytest.raises(error, match=message):
            TranslationPipeline(marian, tokenizer, device="cpu", max_new_tokens=3)("red", **options)
