"""Text in, text out, against the model called one sentence at a time."""

import copy
import io
import json
from functools import partial

import pytest
from accelerate import cpu_offload, disk_offload
from conftest import random_ids, tiny_model
from every_output import END, EVERY_PREFIX, LIMIT, VOCABULARY, every_output, peaked_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from vaswani_transformer import Ensemble, Translator, align, attend, score_pairs, train_tokenizer
from vaswani_transformer.data.synthetic import generate_corpus
from vaswani_transformer.data.words import title_case
from vaswani_transformer.decoding.file_translator import FileTranslator, record
from vaswani_transformer.decoding.glossary import Glossary
from vaswani_transformer.decoding.output import StreamOutput
from vaswani_transformer.decoding.scoring import score_ids
from vaswani_transformer.decoding.search import ForcedPrefixes
from vaswani_transformer.decoding.streaming import Window
from vaswani_transformer.decoding.translator import Piece
from vaswani_transformer.errors import UserError
from vaswani_transformer.model.search_vaswani import OpenSearch

PAIRS = generate_corpus(100, 10, 10).train


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer((side for pair in PAIRS for side in pair), vocab_size=400)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(seed=1, scale=2.0, vocab_size=len(tokenizer)).eval()


def test_translations_come_in_order_whatever_the_batches(model, tokenizer):
    sources = [source for source, _ in PAIRS[:15]]
    options = {"num_beams": 1, "max_new_tokens": 12}
    alone = [next(Translator(model, tokenizer, **options).translate([source])) for source in sources]
    for tokens, window in ((1, 1000), (64, 7), (4096, 1000)):
        assert list(Translator(model, tokenizer, tokens, **options).translate(iter(sources), window)) == alone


@pytest.mark.parametrize("way", [cpu_offload, disk_offload])
def test_a_model_whose_weights_are_offloaded_gives_what_it_gives_whole(model, tokenizer, tmp_path, way):
    sources, targets = zip(*PAIRS[:3], strict=True)
    offloaded = copy.deepcopy(model)
    way(offloaded, **({"offload_dir": tmp_path} if way is disk_offload else {}), execution_device="cpu")
    assert next(offloaded.parameters()).is_meta

    def everything(model):
        for beams in (1, 3):
            yield list(Translator(model, tokenizer, num_beams=beams, max_new_tokens=5).hypotheses(sources))
        yield score_pairs(Ensemble([model, model]), tokenizer, sources, targets)
        yield align(model, tokenizer, sources, targets), attend(model, tokenizer, "A dog.").decoder.tolist()

    assert list(everything(offloaded)) == list(everything(model))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6}], ids=str)
@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.slow), 40, 4096])
def test_sentences_that_join_others_are_translated_as_in_batches(model, tokenizer, tokens, options, monkeypatch):
    """As on a GPU, where it pays."""
    sources, joined = [source for source, _ in PAIRS[:16]], []
    sources[6] = " ".join(sources[:3])  # while it is there, few others may be
    translator = Translator(model, tokenizer, tokens, **options, max_extra_tokens=6)
    expected = list(translator.hypotheses(sources, 10))
    join = OpenSearch.join

    def noted(search, **inputs):
        running, sentences = search.running, join(search, **inputs)
        joined.append((running, len(sentences), search.cache.source[0][0].shape[2]))
        return sentences

    monkeypatch.setattr(OpenSearch, "join", noted)
    monkeypatch.setattr("vaswani_transformer.decoding.search._FASTER_IN_BATCHES", ())
    assert list(translator.hypotheses(sources, 10)) == expected
    assert sum(new for _, new, _ in joined) == 16
    assert all((running + new) * length <= max(tokens, length) for running, new, length in joined)
    assert any(running for running, _, _ in joined) == (tokens == 40)
    joined.clear()  # a prefix is a constraint, which batches are for
    assert next(translator.translate([("A dog.", "Ein")])).startswith("Ein") and not joined


def test_empty_lines_stay_empty_and_each_line_gives_one_line(model, tokenizer):
    lines = ["", "A dog.", "  ", "\u2028", "A cat."]
    out = list(Translator(model, tokenizer, num_beams=1, max_new_tokens=8).translate(lines))
    assert len(out) == 5 and out[0] == out[2] == out[3] == ""
    assert all("\n" not in line for line in out)


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("seed", [0, 3])
def test_with_a_prefix_the_best_output_that_begins_with_it_is_found(seed, alpha):
    """Of all outputs over six tokens; its score is of the whole output."""
    model, ids = peaked_model(seed), random_ids(4, seed=seed, vocab_size=VOCABULARY)
    prefixes = [[4], [5, 3], [], [3, 0, 4]]
    found = model.generate(
        ids.expand(len(prefixes), -1), num_beams=EVERY_PREFIX, max_new_tokens=LIMIT, length_penalty=alpha,
        logits_processor=LogitsProcessorList([ForcedPrefixes(prefixes)]), return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    outputs = every_output(model, ids[None], alpha)
    for prefix, row, score in zip(prefixes, found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        best, wanted = next(pair for pair in outputs if list(pair[1][: len(prefix)]) == prefix)
        assert tuple(row[1 : len(wanted) + 1]) == wanted and score == pytest.approx(best, abs=1e-4)
        assert set(row[len(wanted) + 1 :]) <= {END, model.config.pad_token_id}


def test_capitals_are_translated_as_small_letters_and_a_repeated_sentence_once(model, tokenizer):
    translator = Translator(model, tokenizer, split_long=True, max_new_tokens=12, glossary=Glossary({"CAT": ["CAT"]}))
    words = ["The dog sees a dog. it is old", "The dog.", "A", "It is. It is", "the dog sees", "dog dog", "a dog a dog"]
    words.append("a b c d a b c d")
    whole, dog, one, unfinished, unmarked, *few = translator.translate(words)
    translator.split_long = False
    assert [*translator.translate(words[-3:])] == few  # as one line: there are such words, also letter by letter
    translator.split_long = True
    changed = {"THE DOG SEES A DOG. IT IS OLD": whole.upper(), "The Dog Sees A Dog. It Is Old": title_case(whole)}
    changed |= {"The dog. The dog. The dog.": f"{dog} {dog} {dog}", "A": one}
    changed |= {"THE DOG. THE DOG.": f"{dog} {dog}".upper(), "It is. It is": unfinished}
    changed |= {" ".join(["the dog sees"] * 3): " ".join([unmarked] * 3)}
    assert list(translator.translate(list(changed))) == list(changed.values())
    as_they_are = {"THE CAT": "", "THE DOG.": "Der", "The Dog Sees A Dog. It Is": ""}  # a term, a prefix, seven words
    as_they_are |= {"里里 THE": "", "里 THE": "", "里 里 里 里 里 里 里 The": ""}  # a name in a script without capitals
    for piece, ids in zip(translator.prepare(Window(0, 1, [*as_they_are.items()])).pieces, as_they_are, strict=True):
        assert piece.ids == tokenizer(ids).input_ids and piece.write("a") == "a"
    assert Translator(model, tokenizer).prepare(Window(0, 1, ["ა " * 8 + "Dog"])).pieces[0].write("a b") == "a b"
    lines = ["The Dog-Dog Sees A DoG (IT) Is Old", "<2fr> THE DOG SEES"]  # tags stay
    piece, tagged = translator.prepare(Window(0, 1, lines)).pieces
    assert piece.ids == tokenizer("The dog-dog sees a DoG (IT) is old").input_ids
    assert tagged.ids == tokenizer("<2fr> The dog sees").input_ids and tagged.write("<2de> der") == "<2de> DER"
    assert tagged.write("ώς á") == "ΩΣ Á" and tagged.write("ახალი") == "ახალი"
    shouted = Translator(model, tokenizer, glossary=Glossary({"Dog": ["Hund"]})).prepare(Window(0, 1, ["DOG SEES."]))
    assert shouted.pieces[0].terms is None  # a term in other letters
    turkish = Translator(model, tokenizer, source_language="tr").prepare(Window(0, 1, ["THE DOG SEES."])).pieces[0]
    assert turkish.ids == tokenizer("THE DOG SEES.").input_ids and tagged.write("ilk ışık") == "İLK IŞIK"
    upper = train_tokenizer((side.upper() for pair in PAIRS for side in pair), vocab_size=400)
    [piece] = Translator(model, upper).prepare(Window(0, 1, ["THE DOG."])).pieces
    assert piece.ids == upper("THE DOG.").input_ids and piece.write("a") == "a"


@pytest.mark.parametrize(("source", "garbled", "expected"), [
    ("28112 DOGS", "281212 Hunde", "28112 HUNDE"), ("2 of 411", "2 von 41, 41", "2 von 411, 411"),
    ("Dogs 📌🧽", "Hunde \ufffd🧽", "Hunde 📌🧽"), ("411 and 412", "41 und 42", "41 und 42"),
    ("1,000 m, 10000 m", "1.000 m, 10.000 m", "1.000 m, 10.000 m"), ("1000", "1 000", "1 000"),
    ("100 feet", "30 Meter", "30 Meter"), ("24 ☺", "Hunde", "Hunde"), ("12:34", "12.34", "12.34"),
    ("250 * x ** 5", "1250 * x ** 4", "1250 * x ** 4"),  # a derivative
    ("10 dozen", "120", "120"),
    ("35000", "3만 5000", "3만 5000"), ("3万5000", "35000", "35000"),
    ("5000 €", "500 €", "5000 €"), ("35 billion", "350億", "350億"), ("3500亿", "350 billion", "350 billion"),
    ("350 thousand", "35 หมื่น", "35 หมื่น"), ("Because 😀", "क्\u200dयोंकि", "क्\u200dयोंकि"),
])  # fmt: skip
def test_one_garbled_number_or_row_of_emoji_is_the_sources(model, tokenizer, source, garbled, expected):
    translator = Translator(model, tokenizer)
    assert not translator.is_repaired
    translator.is_repaired = True
    [piece] = translator.prepare(Window(0, 1, [source])).pieces
    assert piece.write(garbled) == expected
    translator.is_repaired = False  # as for sums
    assert piece.write("1234") == "1234" and piece.write(garbled.lower()).lower() == garbled.lower()


def test_long_sources_are_refused_or_split(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), position_encoding="learned", max_position_embeddings=16).eval()
    sources = ["A dog.", "The dog sees a cat. The cat sees a dog. It is old.", "A cat."]
    options = {"num_beams": 1, "max_new_tokens": 6}
    for most, limit in ((None, 16), (8, 8)):
        refusing = Translator(model, tokenizer, max_source_tokens=most, **options).hypotheses(sources)
        next(refusing)
        with pytest.raises(UserError, match=rf"line 2 has .* tokens and at most {limit} are taken"):
            next(refusing)
    splitting = Translator(model, tokenizer, split_long=True, scores=True, **options)
    first, whole, last = (line[0] for line in splitting.hypotheses(sources))
    parts = [line[0] for line in splitting.hypotheses(["The dog sees a cat.", "The cat sees a dog.", "It is old."])]
    assert whole.text == " ".join(part.text for part in parts)
    assert whole.tokens == sum(part.tokens for part in parts)
    assert whole.log_probability == pytest.approx(sum(part.log_probability for part in parts), rel=1e-4)
    assert [first.text, last.text] == list(splitting.translate([sources[0], sources[2]]))
    *_, part = splitting.prepare(Window(0, 1, ["The dog sees 100 cats. Ten percent of them are old."])).pieces
    assert part.write("10 % davon sind alt.") == "10 % davon sind alt."  # whatever other parts have


@pytest.mark.parametrize("forced", [None, 2])
def test_an_output_whose_end_is_forced_at_its_limit_is_cut_too(model, tokenizer, forced):
    """As in Marian models of transformers."""
    model = copy.deepcopy(model)
    model.generation_config.update(forced_eos_token_id=forced, max_length=10)
    end, piece = model.generation_config.eos_token_id, Piece(0, [3])
    translator, circle = Translator(model, tokenizer), [5, 6] * 4 + [end]
    assert translator._without_repetition(circle, piece) == ([5, 6] if forced else circle)
    whole = [3, 4, 5, 6, 5, 6, 5, 6, end]
    assert [translator._without_repetition(ids, piece) for ids in (whole, circle[2:])] == [whole, circle[2:]]


@given(
    start=st.lists(st.integers(3, 6), max_size=6),
    circle=st.lists(st.integers(3, 6), min_size=1, max_size=5),
    rounds=st.integers(1, 7),
    ends=st.booleans(),
)
def test_what_is_cut_had_gone_round_four_times(model, tokenizer, start, circle, rounds, ends):
    """One round stays, and nothing else is lost; an output with an end is never cut."""
    ids = start + rounds * circle + [model.generation_config.eos_token_id] * ends
    kept = Translator(model, tokenizer)._without_repetition(ids, Piece(0, [3]))
    assert kept == ids[: len(kept)] and (not ends or kept == ids)
    if len(kept) < len(ids):
        periods = [period for period in range(1, len(kept) + 1) if 4 * period <= len(ids)]
        assert any(len(kept) >= p and ids[-4 * p :] == 4 * ids[-p:] and ids[len(kept) - p : -p] == ids[len(kept) :]
                   for p in periods)  # fmt: skip
    elif not ends:
        assert rounds < 4


def test_endless_repetition_is_cut_and_said(model, tokenizer, caplog):
    options = {"num_beams": 1, "max_new_tokens": 30}
    translator, text = Translator(model, tokenizer, **options), "The dog sleeps."
    generated = model.generate(**tokenizer(text, return_tensors="pt"), **options)[0, 1:].tolist()
    whole = tokenizer.decode(generated, True)
    [[found]] = translator.hypotheses([text])
    assert found.repeats and found.score is None and len(found.text) < len(whole) / 2 and whole.startswith(found.text)
    ids = [generated[: found.tokens]]  # no end, which was not written
    assert tokenizer.decode(ids[0], True) == found.text
    [[scored]] = Translator(model, tokenizer, scores=True, length_penalty=0.5, **options).hypotheses([text])
    [logs] = score_ids(model, tokenizer([text])["input_ids"], ids)
    assert found.tokens == scored.tokens == len(logs) < 10 and scored.log_probability == pytest.approx(sum(logs))
    assert scored.score == pytest.approx(sum(logs) / ((5 + len(logs)) / 6) ** 0.5)
    written = io.StringIO()
    FileTranslator(translator, partial(record, as_json=True)).run(["", text], StreamOutput(written), progress=False)
    hypotheses = [json.loads(line)["hypotheses"][0] for line in written.getvalue().splitlines()]
    assert [hypothesis.get("repeats") for hypothesis in hypotheses] == [None, True]
    assert "endless repetition, which was cut off: 2" in caplog.text
