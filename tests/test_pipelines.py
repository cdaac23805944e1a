"""The pipelines against a tokenizer, `generate()` and a decode by hand, on four architectures."""

import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import tiny_model
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pipelines.pt_utils import KeyDataset

import vaswani_transformer
from vaswani_transformer import (
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
    UserError,
    pipeline,
    pipeline_vaswani,
    train_tokenizer,
)
from vaswani_transformer.pipeline_vaswani import CUSTOM_PIPELINES, split_into_sentences

TEXTS = [
    "the small dog sees a red house",
    "two birds are playing",
    "my father reads an old book in the garden",
    "red",
]
LIMIT = 40  # positions of the models that have a table
IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
BART_LIKE = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": LIMIT,
    "forced_eos_token_id": None,
}
SHORT = {"max_new_tokens": 7}
TRANSLATION = "translation_text"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=270)


def randomized(model, scale: float = 3.0, seed: int = 0):
    """The model with random matrices so large that outputs depend on inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(scale * noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def build(name: str, vocab_size: int):
    if name == "vaswani":
        model = tiny_model(seed=5, scale=3.0, vocab_size=vocab_size, decoder_start_token_id=0)
    elif name == "marian":
        model = randomized(MarianMTModel(MarianConfig(vocab_size=vocab_size, **BART_LIKE, **IDS)))
    elif name == "bart":
        model = randomized(BartForConditionalGeneration(BartConfig(vocab_size=vocab_size, **BART_LIKE, **IDS)))
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        model = randomized(T5ForConditionalGeneration(T5Config(vocab_size=vocab_size, **sizes, **IDS)))
    if name == "vaswani":
        model.generation_config.num_beams = 4  # as `vaswani train` writes it
    else:
        model.generation_config = GenerationConfig(**IDS)
    return model


@pytest.fixture(scope="module", params=["vaswani", "marian", "t5", "bart"])
def model(request, tokenizer):
    return build(request.param, len(tokenizer))


@pytest.fixture(scope="module")
def marian(tokenizer):
    return build("marian", len(tokenizer))


@pytest.fixture(scope="module")
def marian_folder(marian, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("marian")
    marian.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_vaswani(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vaswani")
    build("vaswani", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def vaswani_folder(saved_vaswani, tmp_path):
    """A model folder of the test's own, to damage."""
    return Path(shutil.copytree(saved_vaswani, tmp_path / "vaswani"))


@pytest.fixture
def warned(caplog):
    """Messages that the pipelines logged as warnings."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records if record.name == pipeline_vaswani.__name__]


def by_hand(model, tokenizer, text: str, **options) -> list[str]:
    """What a user without pipelines writes, one text at a time; 4 beams are the pipelines' default."""
    inputs = tokenizer(text, return_tensors="pt")
    options = {"num_beams": 4, **SHORT, **options}
    return tokenizer.batch_decode(model.generate(**inputs, **options), skip_special_tokens=True)


def texts_by_hand(model, tokenizer, texts=TEXTS, **options) -> list[str]:
    return [by_hand(model, tokenizer, text, **options)[0] for text in texts]


def long_text(tokenizer, tokens: int) -> str:
    """A text of exactly so many tokens, the end token counted."""
    text = "q" * (tokens - 2)  # in none of the texts above, so one token each, after one for the space
    assert len(tokenizer(text)["input_ids"]) == tokens
    return text


class TestCalls:
    @pytest.fixture(scope="class")
    def expected(self, model, tokenizer):
        texts = texts_by_hand(model, tokenizer)
        assert len(set(texts)) > 2  # outputs that depend on their inputs
        return texts

    @pytest.fixture(scope="class")
    def translator(self, model, tokenizer):
        return pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", **SHORT)

    def test_a_string_gives_a_list_of_one_dict(self, translator, expected):
        assert translator(TEXTS[0]) == [{TRANSLATION: expected[0]}]

    @pytest.mark.parametrize("batch_size", [None, 1, 4])
    def test_a_list_gives_a_list_of_dicts_whatever_the_batches(self, translator, expected, batch_size):
        assert translator(TEXTS, batch_size=batch_size) == [{TRANSLATION: text} for text in expected]

    @pytest.mark.parametrize("kind", [tuple, iter, Dataset, KeyDataset])
    def test_other_collections(self, translator, expected, kind):
        dataset = Dataset.from_dict({"en": TEXTS})
        column = {tuple: tuple(TEXTS), iter: iter(TEXTS), Dataset: dataset["en"], KeyDataset: KeyDataset(dataset, "en")}
        results = list(translator(column[kind], batch_size=2))
        if kind in (iter, KeyDataset):  # streams give what each string alone gives
            assert results == [[{TRANSLATION: text}] for text in expected]
        else:
            assert results == [{TRANSLATION: text} for text in expected]

    def test_alternatives_nest(self, model, tokenizer, translator):
        expected = [by_hand(model, tokenizer, text, num_return_sequences=3) for text in TEXTS]
        nested = [[{TRANSLATION: text} for text in alternatives] for alternatives in expected]
        assert translator(TEXTS, num_return_sequences=3, batch_size=2) == nested
        assert translator(TEXTS[0], num_return_sequences=3) == nested[0]

    def test_token_ids(self, model, tokenizer, translator):
        inputs = tokenizer(TEXTS[0], return_tensors="pt")
        ids = model.generate(**inputs, num_beams=4, **SHORT)[0]
        (record,) = translator(TEXTS[0], return_tensors=True)
        assert list(record) == ["translation_token_ids"]
        assert record["translation_token_ids"].tolist() == ids.tolist()
        (record,) = translator(TEXTS[0], return_tensors=True, return_text=True)
        assert set(record) == {"translation_token_ids", TRANSLATION}

    def test_options_of_generate_in_call_over_constructor(self, model, tokenizer):
        options = {"num_beams": 2, "max_new_tokens": 5}
        translator = TranslationPipeline(model, tokenizer, device="cpu", **options)
        assert translator(TEXTS) == [{TRANSLATION: t} for t in texts_by_hand(model, tokenizer, **options)]
        options |= {"num_beams": 1, "max_new_tokens": 3}
        assert translator(TEXTS, **options) == [{TRANSLATION: t} for t in texts_by_hand(model, tokenizer, **options)]

    def test_max_length_counts_where_no_new_tokens_are_asked_for(self, model, tokenizer):
        translator = TranslationPipeline(model, tokenizer, device="cpu")
        (record,) = translator(TEXTS[0], max_length=6, return_tensors=True)
        assert len(record["translation_token_ids"]) <= 6

    def test_a_generation_config_is_used_as_it_stands(self, model, tokenizer):
        own = GenerationConfig(max_new_tokens=6, num_beams=3)
        expected = model.generate(**tokenizer(TEXTS[0], return_tensors="pt"), generation_config=own)
        translator = TranslationPipeline(model, tokenizer, device="cpu")
        (record,) = translator(TEXTS[0], generation_config=own, return_tensors=True)
        assert record["translation_token_ids"].tolist() == expected[0].tolist()

    def test_a_blank_text_stays_blank_and_disturbs_no_other(self, translator, expected):
        results = translator(["", TEXTS[0], " \n", TEXTS[1]], batch_size=4)
        assert [result[TRANSLATION] for result in results] == ["", expected[0], "", expected[1]]
        assert translator("", num_return_sequences=2) == [{TRANSLATION: ""}] * 2
        assert list(translator(iter(["", ""]), batch_size=2)) == [[{TRANSLATION: ""}]] * 2

    @pytest.mark.parametrize(
        ("task", "pipeline_class", "key"),
        [
            ("text2text-generation", Text2TextGenerationPipeline, "generated_text"),
            ("summarization", SummarizationPipeline, "summary_text"),
            ("translation_en_to_de", TranslationPipeline, TRANSLATION),
            (None, Text2TextGenerationPipeline, "generated_text"),
        ],
    )
    def test_tasks(self, model, tokenizer, expected, task, pipeline_class, key):
        pipe = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
        if task is None and hasattr(model.config, "custom_pipelines"):  # another test has saved the model
            pytest.skip("the model names a task")
        assert type(pipe) is pipeline_class
        assert pipe(TEXTS, **SHORT) == [{key: text} for text in expected]

    def test_sentences_are_joined(self, model, tokenizer, translator):
        rows = ["two birds. red birds! the dog?", "a house.", ""]
        parts = [["two birds.", "red birds!", "the dog?"], ["a house."], []]
        # Small letters do not begin a sentence for the built-in rule.
        splitter = dict(zip(rows, parts, strict=True)).get
        alternatives = [[by_hand(model, tokenizer, part, num_return_sequences=2) for part in row] for row in parts]
        expected = [[" ".join(part[k] for part in row) for k in range(2)] for row in alternatives]
        for batch_size in (None, 1, 2):
            results = translator(rows, split_sentences=splitter, num_return_sequences=2, batch_size=batch_size)
            assert results == [[{TRANSLATION: text} for text in texts] for texts in expected]
        assert translator(rows[0], split_sentences=splitter) == [{TRANSLATION: expected[0][0]}]
        streamed = list(translator(iter(rows), split_sentences=splitter, batch_size=2))
        assert streamed == [[{TRANSLATION: texts[0]}] for texts in expected]


class TestStreams:
    @pytest.mark.parametrize("split_sentences", [False, True])
    def test_an_endless_generator_is_read_as_results_are_taken(self, marian, tokenizer, split_sentences):
        read = []

        def texts():
            while True:
                read.append(len(read))
                yield "Two birds. Red." if split_sentences else TEXTS[len(read) % len(TEXTS)]

        translator = TranslationPipeline(marian, tokenizer, device="cpu", batch_size=2, **SHORT)
        results = iter(translator(texts(), split_sentences=split_sentences))
        next(results)
        assert len(read) <= 3  # a batch, and the one that transformers peeks at
        for _ in range(4):
            next(results)
        assert len(read) <= 8

    def test_a_dataset_is_read_as_results_are_taken(self, marian, tokenizer):
        class Counting(torch.utils.data.Dataset):
            read = 0

            def __len__(self):
                return 100

            def __getitem__(self, index):
                type(self).read += 1
                return "Two birds. Red."

        translator = TranslationPipeline(marian, tokenizer, device="cpu", **SHORT)
        for split_sentences in (False, True):
            Counting.read = 0
            assert TRANSLATION in next(iter(translator(Counting(), batch_size=2, split_sentences=split_sentences)))[0]
            assert Counting.read <= 3

    def test_worker_processes(self, marian, tokenizer):
        translator = TranslationPipeline(marian, tokenizer, device="cpu", **SHORT)
        dataset = KeyDataset([{"en": text} for text in TEXTS], "en")
        results = [result[0][TRANSLATION] for result in translator(dataset, num_workers=2, batch_size=2)]
        assert results == texts_by_hand(marian, tokenizer)

    @pytest.mark.parametrize(
        "empty", [[], (), iter([]), KeyDataset([], "en")], ids=["list", "tuple", "iter", "dataset"]
    )
    def test_nothing_in_nothing_out(self, marian, tokenizer, empty):
        translator = TranslationPipeline(marian, tokenizer, device="cpu")
        assert list(translator(empty)) == []
        assert list(translator(empty, split_sentences=True)) == []


class TestLength:
    """What is too long: for a table of positions, for the tokenizer, for neither."""

    @pytest.fixture(scope="class")
    def learned(self, tokenizer):
        return tiny_model(seed=5, vocab_size=len(tokenizer), position_encoding="learned", max_position_embeddings=LIMIT)

    @pytest.fixture(params=["marian", "bart", "learned"])
    def limited(self, request, tokenizer, learned):
        model = learned if request.param == "learned" else build(request.param, len(tokenizer))
        return TranslationPipeline(model, tokenizer, device="cpu", max_new_tokens=3)

    def test_the_last_position_can_be_used(self, limited, tokenizer, warned):
        for truncation in (False, True):
            assert limited(long_text(tokenizer, LIMIT), truncation=truncation)
        assert not warned()

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("kind", [list, iter, KeyDataset])
    def test_beyond_it_is_one_line_that_names_the_row(self, limited, tokenizer, batch_size, kind):
        texts = ["red", "", "red", "red", long_text(tokenizer, LIMIT + 1)]
        inputs = KeyDataset([{"en": text} for text in texts], "en") if kind is KeyDataset else kind(texts)
        with pytest.raises(
            ValueError, match=r"row 4 has 41 tokens and the model has 40 positions.*split_sent"
        ) as error:
            list(limited(inputs, batch_size=batch_size))
        assert "\n" not in str(error.value)

    def test_a_worker_process_names_the_row_too(self, marian, tokenizer):
        translator = TranslationPipeline(marian, tokenizer, device="cpu", max_new_tokens=3)
        dataset = KeyDataset([{"en": "red"}, {"en": "red"}, {"en": long_text(tokenizer, 50)}], "en")
        with pytest.raises(ValueError, match="row 2 has 50 tokens"):
            list(translator(dataset, num_workers=2))

    @pytest.mark.parametrize("kind", [list, iter, KeyDataset])
    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("truncation", [True, "longest_first"])
    def test_a_cut_is_a_warning_that_names_the_row(self, limited, tokenizer, warned, kind, batch_size, truncation):
        texts = ["red", long_text(tokenizer, 50), "red", long_text(tokenizer, 60)]
        inputs = KeyDataset([{"en": text} for text in texts], "en") if kind is KeyDataset else kind(texts)
        results = list(limited(inputs, batch_size=batch_size, truncation=truncation))
        assert len(results) == 4
        first, second = warned()
        assert first.startswith("row 1 ") and "40 of its 50 tokens" in first
        assert second.startswith("row 3 ") and "40 of its 60 tokens" in second

    def test_cut_is_what_the_tokenizer_cuts(self, marian, tokenizer):
        text = long_text(tokenizer, 50)
        inputs = tokenizer(text, truncation=True, max_length=LIMIT, return_tensors="pt")
        expected = tokenizer.decode(marian.generate(**inputs, num_beams=4, **SHORT)[0], skip_special_tokens=True)
        translator = TranslationPipeline(marian, tokenizer, device="cpu", **SHORT)
        assert translator(text, truncation=True) == [{TRANSLATION: expected}]

    @pytest.mark.parametrize("name", ["t5", "vaswani"])
    def test_models_without_a_table_take_any_length(self, tokenizer, warned, name):
        model = build(name, len(tokenizer))
        translator = TranslationPipeline(model, tokenizer, device="cpu", max_new_tokens=3)
        text = long_text(tokenizer, 100)
        assert translator(text) == translator(text, truncation=True)
        assert translator(text)[0][TRANSLATION] == by_hand(model, tokenizer, text, max_new_tokens=3)[0]
        assert not warned()

    def test_the_tokenizers_own_limit_bounds_what_is_kept(self, tokenizer, warned, tmp_path):
        tokenizer.save_pretrained(tmp_path)
        limited = AutoTokenizer.from_pretrained(tmp_path, model_max_length=10)
        translator = TranslationPipeline(build("t5", len(tokenizer)), limited, device="cpu", max_new_tokens=3)
        translator(["red", long_text(tokenizer, 12)], truncation=True)
        assert warned() == ["row 1 was cut: 10 of its 12 tokens are kept (truncation=True)"]

    def test_sentences_are_named_too(self, marian, tokenizer, warned):
        translator = TranslationPipeline(marian, tokenizer, device="cpu", split_sentences=True, max_new_tokens=3)
        text = f"A dog. Two birds. Q{long_text(tokenizer, 60)}. Red."
        with pytest.raises(ValueError, match=r"^row 1, sentence 2 has 6\d tokens"):
            translator(["A dog. Red.", text])
        translator(["A dog. Red.", text], truncation=True)
        assert [message.partition(" was")[0] for message in warned()] == ["row 1, sentence 2"]

    def test_the_default_length_of_outputs_stays_within_the_table(self, marian, tokenizer):
        translator = TranslationPipeline(marian, tokenizer, device="cpu")
        (record,) = translator(TEXTS[0], return_tensors=True, eos_token_id=[260])
        assert len(record["translation_token_ids"]) <= LIMIT


class TestSearch:
    """Whose settings of the search count."""

    def test_the_models_own_generation_configuration_wins(self, tokenizer):
        model = build("vaswani", len(tokenizer))
        outputs = []
        for settings in ({"num_beams": None}, {"num_beams": 2, "length_penalty": 0.6, "max_extra_tokens": 4}):
            for name, value in settings.items():
                setattr(model.generation_config, name, value)
            outputs.append(model.generate(**tokenizer(TEXTS[0], return_tensors="pt"))[0].tolist())
            (record,) = TranslationPipeline(model, tokenizer, device="cpu")(TEXTS[0], return_tensors=True)
            assert record["translation_token_ids"].tolist() == outputs[-1]
        assert len(outputs[1]) <= len(tokenizer(TEXTS[0])["input_ids"]) + 5 < len(outputs[0])

    def test_outputs_of_the_papers_model_are_bounded_by_their_source(self, tokenizer):
        model = build("vaswani", len(tokenizer))
        never = {"eos_token_id": [len(tokenizer) - 1], "bad_words_ids": [[len(tokenizer) - 1], [2]]}
        (record,) = TranslationPipeline(model, tokenizer, device="cpu")("red", return_tensors=True, **never)
        assert len(record["translation_token_ids"]) == 1 + len(tokenizer("red")["input_ids"]) + 50

    def test_settings_of_another_model_win_too(self, tokenizer):
        model = build("marian", len(tokenizer))
        model.generation_config = GenerationConfig(num_beams=1, max_length=7, **IDS)
        expected = model.generate(**tokenizer(TEXTS[0], return_tensors="pt"))[0].tolist()
        translator = TranslationPipeline(model, tokenizer, device="cpu")
        (record,) = translator(TEXTS[0], return_tensors=True)
        assert record["translation_token_ids"].tolist() == expected and len(expected) <= 7

    def test_a_task_has_its_prefix_and_settings(self, tokenizer, warned, caplog):
        model = build("t5", len(tokenizer))
        params = {"translation_en_to_fr": {"prefix": "the red ", "num_beams": 2, "max_length": 5}}
        model.config.task_specific_params = {"summarization": {"prefix": "my "}, **params}
        texts = ["the red " + text for text in TEXTS]
        expected = texts_by_hand(model, tokenizer, texts, num_beams=2, max_new_tokens=None, max_length=5)
        for task in ("translation_en_to_fr", "translation"):
            translator = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
            assert [result[TRANSLATION] for result in translator(TEXTS)] == expected
        assert "translation_en_to_fr" in warned()[0] and len(warned()) == 1
        assert model.config.task_specific_params["translation_en_to_fr"] == params["translation_en_to_fr"]
        transformers.logging.enable_propagation()
        try:
            longer = translator(TEXTS, max_new_tokens=8, num_beams=1)
        finally:
            transformers.logging.disable_propagation()
        assert "Both `max_new_tokens`" not in caplog.text  # the task's max_length gives way
        expected = texts_by_hand(model, tokenizer, texts, num_beams=1, max_new_tokens=8)
        assert [result[TRANSLATION] for result in longer] == expected

    def test_stop_sequence(self, marian, tokenizer, warned):
        encoded = {letter: tokenizer.encode(letter, add_special_tokens=False) for letter in "abcdefghijklmnop"}
        letter, (token,) = next(item for item in encoded.items() if len(item[1]) == 1)
        # The model is made to write this token again and again.
        options = {"sequence_bias": {(token,): 100.0}, "return_tensors": True, **SHORT}
        translator = TranslationPipeline(marian, tokenizer, device="cpu", num_beams=1)
        ids = translator("red", **options)[0]["translation_token_ids"].tolist()
        assert ids == [IDS["decoder_start_token_id"]] + [token] * SHORT["max_new_tokens"]
        ids = translator("red", stop_sequence=letter, **options)[0]["translation_token_ids"].tolist()
        assert ids == [IDS["decoder_start_token_id"], token]
        assert not warned()
        translator("red", stop_sequence="red house", **options)
        assert "stops at the first of them" in warned()[0]

    def test_dropout_of_a_model_from_training_is_off_and_back_on(self, tokenizer):
        model = tiny_model(seed=5, scale=3.0, vocab_size=len(tokenizer), dropout=0.5)
        expected = texts_by_hand(model, tokenizer)
        model.train()
        model.model.encoder.eval()
        translator = TranslationPipeline(model, tokenizer, device="cpu", num_beams=4, **SHORT)
        assert [result[TRANSLATION] for result in translator(TEXTS)] == expected
        assert model.training and model.model.decoder.training and not model.model.encoder.training


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
            ({"src_lang": "en_XX", "tgt_lang": "xx"}, "'xx' is none"),
            ({"src_lang": "xx", "tgt_lang": "en_XX"}, "'xx' is none"),
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


class TestMistakes:
    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            (None, "the input is of type NoneType"),
            (3, "the input is of type int"),
            ({"en": "red"}, "the input is of type dict"),
            (b"red", "the input is of type bytes"),
            (["red", None], "row 1 is of type NoneType: a pipeline takes strings"),
            (["red", ["red"]], "row 1 is of type list"),
            (iter(["red", 7]), "row 1 is of type int"),
            (Dataset.from_dict({"en": ["red"]}), r"row 0 is of type dict.*KeyDataset\(dataset, column\)"),
        ],
        ids=["None", "int", "dict", "bytes", "None in a list", "list in a list", "int in a stream", "dataset of dicts"],
    )
    def test_input_that_is_no_text(self, marian, tokenizer, inputs, message):
        with pytest.raises(TypeError, match=message) as error:
            list(TranslationPipeline(marian, tokenizer, device="cpu", max_new_tokens=3)(inputs))
        assert "\n" not in str(error.value)

    def test_nothing_to_return(self, marian, tokenizer):
        with pytest.raises(ValueError, match="nothing is left to return"):
            TranslationPipeline(marian, tokenizer, device="cpu", max_new_tokens=3)("red", return_text=False)

    def test_options_that_nobody_knows(self, marian, tokenizer):
        with pytest.raises(ValueError, match="beem_size"):
            TranslationPipeline(marian, tokenizer, device="cpu")("red", beem_size=3)

    def test_an_unknown_truncation_is_refused_whatever_the_length(self, marian, tokenizer):
        for truncation in ("x", 5, "only_second"):  # there is no second text
            with pytest.raises(ValueError, match=f"truncation is {truncation!r}: give True, False or one of"):
                TranslationPipeline(marian, tokenizer, device="cpu", truncation=truncation)
            with pytest.raises(ValueError, match=f"truncation is {truncation!r}: give True, False or one of"):
                TranslationPipeline(marian, tokenizer, device="cpu")("red", truncation=truncation)

    def test_models_that_do_not_fit(self, marian, tokenizer):
        with pytest.raises(ValueError, match=r"got a GPT2LMHeadModel: it takes encoder-decoder"):
            TranslationPipeline(tiny_gpt2(len(tokenizer)), tokenizer)
        with pytest.raises(ValueError, match=r"got a MarianModel: it takes encoder-decoder"):
            TranslationPipeline(marian.model, tokenizer)
        with pytest.raises(ValueError, match="got no tokenizer"):
            TranslationPipeline(marian)


def tiny_gpt2(vocab_size: int):
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_embd=8, n_layer=1, n_head=1, n_positions=LIMIT))


class TestFactory:
    def test_folders_with_the_tokenizer_in_them(self, marian, tokenizer, marian_folder):
        expected = [{TRANSLATION: text} for text in texts_by_hand(marian, tokenizer)]
        assert pipeline("translation", model=marian_folder, device="cpu")(TEXTS, **SHORT) == expected
        loaded = AutoModelForSeq2SeqLM.from_pretrained(marian_folder)
        assert pipeline("translation", loaded, device=-1)(TEXTS, **SHORT) == expected
        assert pipeline("translation", loaded, tokenizer=str(marian_folder))(TEXTS, **SHORT) == expected

    def test_models_of_this_package_need_no_trust(self, tokenizer, tmp_path):
        model = build("vaswani", len(tokenizer))
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        expected = [{TRANSLATION: text} for text in texts_by_hand(model, tokenizer)]
        for trust in (None, False):
            translator = pipeline("translation", model=tmp_path, device="cpu", trust_remote_code=trust)
            assert type(translator.model) is vaswani_transformer.VaswaniForConditionalGeneration
            assert translator(TEXTS, **SHORT) == expected

    @pytest.mark.parametrize("dtype", ["float16", torch.bfloat16])
    def test_dtype(self, tokenizer, marian_folder, dtype):
        translator = pipeline("translation", model=marian_folder, device="cpu", dtype=dtype)
        wanted = torch.float16 if dtype == "float16" else dtype
        assert translator.model.dtype == translator.dtype == wanted
        model = AutoModelForSeq2SeqLM.from_pretrained(marian_folder, dtype=wanted)
        assert translator(TEXTS[0], **SHORT)[0][TRANSLATION] == by_hand(model, tokenizer, TEXTS[0])[0]
        assert pipeline("translation", model=marian_folder, torch_dtype=wanted).dtype == wanted

    def test_device(self, marian_folder):
        translator = pipeline("translation", model=marian_folder, device=torch.device("cpu"))
        assert translator.device == translator.model.device == torch.device("cpu")
        for number in (-1, 0, None):  # without an accelerator the CPU, as in transformers
            assert pipeline("translation", model=marian_folder, device=number).device == translator.model.device or (
                torch.accelerator.is_available()
            )

    def test_device_map(self, marian_folder):
        translator = pipeline("translation", model=marian_folder, device_map="cpu")
        assert translator.device.type == "cpu" and translator("red", **SHORT)

    def test_a_class_of_ones_own(self, marian_folder):
        class Shouting(TranslationPipeline):
            def postprocess(self, *args, **options):
                return [{TRANSLATION: record[TRANSLATION] + "!"} for record in super().postprocess(*args, **options)]

        (result,) = pipeline("translation", model=marian_folder, pipeline_class=Shouting)("red", **SHORT)
        assert result[TRANSLATION].endswith("!")

    def test_other_tasks_are_transformers_own(self, tokenizer):
        generator = pipeline("text-generation", model=tiny_gpt2(len(tokenizer)), tokenizer=tokenizer, device="cpu")
        assert type(generator) is transformers.TextGenerationPipeline
        with pytest.raises(KeyError, match="no-such-task"):
            pipeline("no-such-task", model=tiny_gpt2(len(tokenizer)), tokenizer=tokenizer)

    def test_mistakes_end_in_one_line(self, tokenizer, marian, marian_folder, tmp_path):
        tiny_gpt2(len(tokenizer)).save_pretrained(tmp_path / "gpt2")
        tokenizer.save_pretrained(tmp_path / "gpt2")
        marian.save_pretrained(tmp_path / "bare")
        shutil.copytree(marian_folder, tmp_path / "no weights")
        (tmp_path / "no weights" / "model.safetensors").unlink()
        cases = [
            ({}, "no model was given for translation"),
            ({"model": tmp_path / "gpt2"}, r"is a 'gpt2' model: translation takes encoder-decoder models"),
            ({"model": tmp_path / "bare"}, "cannot load a tokenizer from .*give tokenizer="),
            ({"model": tmp_path / "no weights"}, "cannot load the model .*no weights"),
            ({"model": str(tmp_path / "nothing")}, "cannot load the configuration of model .*nothing"),
            ({"model": marian}, "this MarianMTModel came without the name of a tokenizer"),
        ]
        for options, message in cases:
            with pytest.raises(UserError, match=message) as error:
                pipeline("translation", **options)
            assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dropout": "much"}, "the configuration of .*dropout"),
            ({"dropout": 1.5}, "the configuration of .*dropout is 1.5"),
            ({"auto_map": 5}, "the configuration of "),
            ({"model_type": ["vaswani"]}, "the configuration of "),
            (5, "the configuration of "),
            ("[" * 100_000, "the configuration of "),
            ({"dtype": 5}, "the model "),
            ({"attn_implementation": "no_such"}, "the model .*no_such"),
            ({"quantization_config": {"quant_method": "gptq"}}, "the model "),
        ],
        ids=lambda value: str(value)[:30],
    )
    @pytest.mark.parametrize("task", ["translation", None])
    def test_damaged_configurations(self, vaswani_folder, changes, message, task):
        path = vaswani_folder / "config.json"
        if isinstance(changes, dict):
            changes = {**json.loads(path.read_text()), **changes}
        path.write_text(changes if isinstance(changes, str) else json.dumps(changes))
        with pytest.raises(UserError, match=f"^cannot load {message}") as error:
            pipeline(task, model=vaswani_folder)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("settings", [5, {"translation": 5}, [{}]])
    def test_damaged_settings_of_tasks(self, vaswani_folder, settings):
        path = vaswani_folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "task_specific_params": settings}))
        with pytest.raises(UserError, match="task_specific_params"):
            pipeline("translation", model=vaswani_folder)

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("generation_config.json", "[]"),
            ("model.safetensors.index.json", "{}"),
            ("model.safetensors.index.json", "["),
            ("model.safetensors", "half"),
            ("tokenizer.json", "5"),
        ],
    )
    def test_damaged_files(self, vaswani_folder, file, content):
        if file == "model.safetensors.index.json":
            (vaswani_folder / "model.safetensors").unlink()
        (vaswani_folder / file).write_text(content)
        with pytest.raises(UserError, match=r"^cannot load (the model|a tokenizer)") as error:
            pipeline("translation", model=vaswani_folder)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("custom", [5, ["translation"], {"translation": 5}])
    def test_an_odd_entry_of_pipelines_is_no_mistake_of_the_user(self, vaswani_folder, custom):
        path = vaswani_folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "custom_pipelines": custom}))
        assert isinstance(pipeline(model=vaswani_folder), Text2TextGenerationPipeline)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"device": "nowhere"}, "cannot use device 'nowhere'"),
            ({"device": "xpu:63"}, "cannot use device 'xpu:63'"),
            ({"device": torch.device("cuda", 63)}, "cannot use device"),
            ({"device": [0]}, r"cannot use device \[0\]"),
            ({"device": "cpu", "device_map": "cpu"}, "device is 'cpu' and device_map is 'cpu': give one of the two"),
            ({"device": -1, "model_kwargs": {"device_map": "cpu"}}, "device is -1 and device_map is 'cpu'"),
            ({"device_map": "nowhere"}, "cannot load the model"),
            ({"dtype": "float99"}, "cannot load the model"),
            ({"model_kwargs": {"attn_implementation": "no_such"}}, "cannot load the model"),
            ({"framework": "tf"}, "framework is 'tf': transformers 5 has PyTorch only"),
            ({"truncation": "x"}, "truncation is 'x': give True, False or one of do_not_truncate, longest_first"),
            ({"truncation": 5}, "truncation is 5"),
            ({"config": 5}, "config is of type int: give a configuration or its name"),
            ({"tokenizer": 5}, "tokenizer is of type int: give a tokenizer or its name"),
            ({"tokenizer": ("name",)}, "tokenizer is a tuple: it must be a name and a dict"),
            (
                {"tokenizer": ("nothing/here", {"local_files_only": True})},
                "cannot load a tokenizer from 'nothing/here'",
            ),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_options_that_cannot_be(self, marian_folder, options, message):
        with pytest.raises(UserError, match=message) as error:
            pipeline("translation", model=marian_folder, **options)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("changes", [{"framework": "pt"}, {"framework": None}, {"truncation": "only_first"}])
    def test_options_of_old(self, marian, tokenizer, marian_folder, changes):
        expected = [{TRANSLATION: text} for text in texts_by_hand(marian, tokenizer)]
        assert pipeline("translation", model=marian_folder, **changes)(TEXTS, **SHORT) == expected
        generator = pipeline("text-generation", tiny_gpt2(len(tokenizer)), tokenizer=tokenizer, framework="pt")
        assert generator("red", max_new_tokens=2)

    def test_a_tokenizer_with_options(self, marian, tokenizer, marian_folder):
        named = (str(marian_folder), {"model_max_length": 4})
        translator = pipeline("translation", marian, tokenizer=named, truncation=True)
        assert translator.tokenizer.model_max_length == 4 and named[1] == {"model_max_length": 4}
        cut = tokenizer.decode(
            tokenizer(TEXTS[0], truncation=True, max_length=4)["input_ids"], skip_special_tokens=True
        )
        assert translator(TEXTS[0], **SHORT)[0][TRANSLATION] == by_hand(marian, tokenizer, cut)[0]

    @pytest.mark.parametrize(
        ("file", "task"),
        [
            ("config.json", "translation"),
            ("config.json", None),
            ("config.json", "text-generation"),
            ("tokenizer_config.json", "translation"),
            ("tokenizer_config.json", None),
        ],
    )
    def test_no_code_runs_and_nobody_is_asked(self, vaswani_folder, tmp_path, monkeypatch, file, task):
        asked = []
        monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
        (vaswani_folder / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        settings = json.loads((vaswani_folder / file).read_text())
        if file == "config.json":
            settings |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "planted.C"}}
        else:
            settings |= {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": [None, "planted.C"]}}
        (vaswani_folder / file).write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=r"trust_remote_code=True"):
            pipeline(task, model=vaswani_folder, device="cpu")
        assert not asked and not (tmp_path / "ran").exists()

    def test_transformers_is_left_as_it_is(self, marian_folder):
        assert not set(transformers.pipelines.PIPELINE_REGISTRY.supported_tasks) & {"translation", "summarization"}
        with pytest.raises(KeyError, match="removed"):
            transformers.pipeline("translation", model=str(marian_folder))


class TestOnTheHub:
    """A folder that brings the pipeline along, in the hands of `transformers.pipeline`."""

    @pytest.fixture(autouse=True)
    def code_cache(self, tmp_path, monkeypatch):
        """Code from folders is copied to, and imported from, a place of the test's own."""
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "code"))
        monkeypatch.syspath_prepend(str(tmp_path / "code"))
        yield
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    def test_any_model_can_carry_it(self, marian, tokenizer, marian_folder, tmp_path):
        folder, trace = tmp_path / "carrier", tmp_path / "trace"
        shutil.copytree(marian_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "custom_pipelines": CUSTOM_PIPELINES}))
        code = Path(pipeline_vaswani.__file__).read_text(encoding="utf-8")
        (folder / "pipeline_vaswani.py").write_text(
            code + f"\nimport pathlib\npathlib.Path({str(trace)!r}).touch()\n", encoding="utf-8"
        )
        for options in ({}, {"task": "translation"}, {"task": "translation", "trust_remote_code": False}):
            with pytest.raises(ValueError, match="trust_remote_code=True"):
                transformers.pipeline(model=str(folder), **options)
        assert not trace.exists()
        expected = [{TRANSLATION: text} for text in texts_by_hand(marian, tokenizer)]
        for task in ("translation", None):
            translator = transformers.pipeline(task, model=str(folder), trust_remote_code=True, device="cpu")
            assert type(translator).__module__.startswith("transformers_modules.")
            assert translator(TEXTS, **SHORT) == expected
        assert trace.exists()
        trace.unlink()
        ours = pipeline(model=folder, device="cpu")  # takes the task from the folder and the code from the package
        assert type(ours) is TranslationPipeline and not trace.exists()

    def test_save_pretrained_of_a_pipeline_brings_it_along(self, tokenizer, tmp_path):
        model = build("marian", len(tokenizer))
        expected = [{TRANSLATION: text} for text in texts_by_hand(model, tokenizer)]
        translator = TranslationPipeline(model, tokenizer, device="cpu")
        for name in ("first", "second"):  # the second time from code that came with a folder
            translator.save_pretrained(tmp_path / name)
            assert json.loads((tmp_path / name / "config.json").read_text())["custom_pipelines"] == CUSTOM_PIPELINES
            folder = str(tmp_path / name)
            translator = transformers.pipeline("translation", model=folder, trust_remote_code=True, device="cpu")
            assert translator(TEXTS, **SHORT) == expected

    def test_the_entry_is_as_transformers_reads_it(self):
        assert json.loads(json.dumps(CUSTOM_PIPELINES)) == CUSTOM_PIPELINES
        for entry in CUSTOM_PIPELINES.values():
            module, name = entry["impl"].split(".")
            assert Path(pipeline_vaswani.__file__).stem == module and hasattr(pipeline_vaswani, name)
            assert all(hasattr(transformers, auto_class) for auto_class in entry["pt"])
