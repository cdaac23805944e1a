"""The pipelines against a tokenizer, `generate()` and a decode by hand."""

import pipeline_models
import pytest
from datasets import Dataset
from pipeline_models import SHORT, TEXTS, TRANSLATION, build, by_hand, texts_by_hand
from transformers.pipelines.pt_utils import KeyDataset

from vaswani_transformer import TranslationPipeline, pipeline
from vaswani_transformer.model import pipeline_vaswani

model, tokenizer = pipeline_models.model, pipeline_models.tokenizer
LIMIT = 40  # positions of the model that has a table


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

    def test_alternatives_nest(self, model, tokenizer, translator):
        expected = [by_hand(model, tokenizer, text, num_return_sequences=3) for text in TEXTS]
        nested = [[{TRANSLATION: text} for text in alternatives] for alternatives in expected]
        assert translator(TEXTS, num_return_sequences=3, batch_size=2) == nested
        assert translator(TEXTS[0], num_return_sequences=3) == nested[0]

    def test_a_blank_text_stays_blank_and_disturbs_no_other(self, translator, expected):
        results = translator(["", TEXTS[0], " \n", TEXTS[1]], batch_size=4)
        assert [result[TRANSLATION] for result in results] == ["", expected[0], "", expected[1]]
        assert translator("", num_return_sequences=2) == [{TRANSLATION: ""}] * 2
        assert list(translator(iter(["", ""]), batch_size=2)) == [[{TRANSLATION: ""}]] * 2

    @pytest.mark.parametrize(
        ("task", "key"),
        [("text2text-generation", "generated_text"), ("translation_en_to_de", TRANSLATION), (None, TRANSLATION)],
    )
    def test_tasks(self, model, tokenizer, expected, task, key):
        pipe = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
        assert pipe(TEXTS, **SHORT) == [{key: text} for text in expected]

    def test_sentences_are_joined(self, model, tokenizer, translator):
        rows = ["two birds. red birds! the dog?", "a house.", ""]
        parts = [["two birds.", "red birds!", "the dog?"], ["a house."], []]
        # Small letters do not begin a sentence for sentencex.
        splitter = dict(zip(rows, parts, strict=True)).get
        alternatives = [[by_hand(model, tokenizer, part, num_return_sequences=2) for part in row] for row in parts]
        expected = [[" ".join(part[k] for part in row) for k in range(2)] for row in alternatives]
        for batch_size in (None, 1, 2):
            results = translator(rows, split_sentences=splitter, num_return_sequences=2, batch_size=batch_size)
            assert results == [[{TRANSLATION: text} for text in texts] for texts in expected]
        assert translator(rows[0], split_sentences=splitter) == [{TRANSLATION: expected[0][0]}]
        streamed = list(translator(iter(rows), split_sentences=splitter, batch_size=2))
        assert streamed == [[{TRANSLATION: texts[0]}] for texts in expected]


@pytest.mark.parametrize("split_sentences", [False, True])
def test_an_endless_generator_is_read_as_results_are_taken(model, tokenizer, split_sentences):
    read = []

    def texts():
        while True:
            read.append(len(read))
            yield "Two birds. Red." if split_sentences else TEXTS[len(read) % len(TEXTS)]

    translator = TranslationPipeline(model, tokenizer, device="cpu", batch_size=2, **SHORT)
    results = iter(translator(texts(), split_sentences=split_sentences))
    next(results)
    assert len(read) <= 3  # a batch, and the one that transformers peeks at
    for _ in range(4):
        next(results)
    assert len(read) <= 8


@pytest.fixture(scope="module")
def limited(tokenizer):
    model = build(len(tokenizer), position_encoding="learned", max_position_embeddings=LIMIT)
    return TranslationPipeline(model, tokenizer, device="cpu", max_new_tokens=3)


@pytest.mark.parametrize(("kind", "batch_size"), [(list, 1), (iter, 3), (KeyDataset, 3)])
def test_beyond_a_table_of_positions_is_one_line(limited, tokenizer, batch_size, kind, caplog):
    texts = ["red", "q" * (LIMIT + 8), "red"]  # q is in none of TEXTS: a token each, besides the space and the end
    assert len(tokenizer(texts[1])["input_ids"]) == LIMIT + 10

    def inputs():
        return KeyDataset([{"en": text} for text in texts], "en") if kind is KeyDataset else kind(texts)

    with pytest.raises(ValueError, match=r"a text has 50 tokens and the model 40 positions.*split_sent"):
        list(limited(inputs(), batch_size=batch_size))
    assert len(list(limited(inputs(), batch_size=batch_size, truncation=True))) == 3
    warned = [record.getMessage() for record in caplog.records if record.name == pipeline_vaswani.__name__]
    assert warned == ["a text was cut: 40 of its 50 tokens are kept (truncation=True)"]


def test_the_models_own_generation_configuration_wins(tokenizer):
    model = build(len(tokenizer))
    outputs = []
    for settings in ({"num_beams": None}, {"num_beams": 2, "length_penalty": 0.6, "max_extra_tokens": 4}):
        for name, value in settings.items():
            setattr(model.generation_config, name, value)
        outputs.append(model.generate(**tokenizer(TEXTS[0], return_tensors="pt"))[0].tolist())
        (record,) = TranslationPipeline(model, tokenizer, device="cpu")(TEXTS[0], clean_up_tokenization_spaces=True)
        assert record[TRANSLATION] == tokenizer.decode(outputs[-1], skip_special_tokens=True)
    assert len(outputs[1]) <= len(tokenizer(TEXTS[0])["input_ids"]) + 5 < len(outputs[0])


def test_dropout_of_a_model_from_training_is_off_and_back_on(tokenizer):
    model = build(len(tokenizer), dropout=0.5)
    expected = texts_by_hand(model, tokenizer)
    model.train()
    model.model.encoder.eval()
    translator = TranslationPipeline(model, tokenizer, device="cpu", **SHORT)
    assert [result[TRANSLATION] for result in translator(TEXTS)] == expected
    assert model.training and model.model.decoder.training and not model.model.encoder.training


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "NoneType"),
        ({"en": "red"}, r"strings, not dict; for a dataset of dicts give KeyDataset\(dataset, column\)"),
        (["red", None], "a pipeline takes strings, not NoneType"),
        (iter(["red", 7]), "a pipeline takes strings, not int"),
        (Dataset.from_dict({"en": ["red"]}), "a pipeline takes strings, not dict"),
    ],
    ids=["None", "dict", "None in a list", "int in a stream", "dataset of dicts"],
)
def test_input_that_is_no_text(model, tokenizer, inputs, message):
    with pytest.raises(TypeError, match=message):
        list(TranslationPipeline(model, tokenizer, device="cpu", max_new_tokens=3)(inputs))
