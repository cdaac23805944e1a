"""BPE-dropout: what is drawn, by the library's own as a reference, and by hand."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from conftest import error_of
from hypothesis import given
from hypothesis import strategies as st
from pair_files import PAIRS, in_memory
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vaswani_transformer.data.bpe_dropout import SEGMENTATIONS, BpeDropout
from vaswani_transformer.data.prepare import prepare
from vaswani_transformer.data.tokenization import train_tokenizer
from vaswani_transformer.data.tokenized_pairs import tokenize_pairs
from vaswani_transformer.errors import UserError
from vaswani_transformer.model.tokenization_vaswani import VaswaniTokenizer
from vaswani_transformer.recipes.recipe import load_recipe
from vaswani_transformer.training.plan import make_plan

TEXTS = ["the weather of yesterday, whether or not it is there", "das Wetter von gestern, ob es da ist", "</s> Ünïcode"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3, vocab_size=320)


def drawn(tokenizer, dropout, texts=TEXTS, seed=0):
    return BpeDropout(tokenizer, dropout, seed)(tokenizer(texts).encodings)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), dropout=st.floats(0, 0.99))
def test_every_segmentation_is_of_the_same_text(tokenizer, text, dropout):
    found = drawn(tokenizer, dropout, [text])
    assert len(found) == SEGMENTATIONS
    assert all(tokenizer.decode(ids, skip_special_tokens=True) == text for ids in found)
    assert all(ids[-1] == tokenizer.eos_token_id for ids in found)


def test_without_dropout_it_is_the_tokenizers_own_and_with_nearly_all_it_is_bytes(tokenizer):
    assert drawn(tokenizer, 0.0) == tokenizer(TEXTS)["input_ids"] * SEGMENTATIONS
    length = 1 + len(TEXTS[0]) + 1  # a space before it, </s> behind
    assert {len(ids) for ids in drawn(tokenizer, 1 - 1e-12, TEXTS[:1])} == {length}


def test_the_library_draws_with_the_same_probabilities(tokenizer):
    word, number = "Ġweather", 20_000
    ours, draw = BpeDropout(tokenizer, 0.3), random.Random(1)
    found = Counter(ours.segment(word, 0.3, draw) for _ in range(number))
    backend = tokenizer.backend_tokenizer
    backend = type(backend).from_str(backend.to_str())
    backend.model.dropout = 0.3
    expected = Counter(tuple(backend.encode("weather", add_special_tokens=False).ids) for _ in range(number))
    assert len(expected) > 9
    for segmentation, count in (found | expected).items():
        share = count / number
        assert abs(found[segmentation] - expected[segmentation]) / number < 6 * (2 * share / number) ** 0.5 + 1e-4


def test_a_seed_and_a_word_determine_what_is_drawn_whatever_stands_beside(tokenizer):
    once, again, other = (drawn(tokenizer, 0.2, seed=seed) for seed in (0, 0, 1))
    assert once == again != other
    assert drawn(tokenizer, 0.2, TEXTS[::-1])[0] == once[2]
    assert len({tuple(ids) for ids in once[:: len(TEXTS)]}) > SEGMENTATIONS / 2


@pytest.mark.usefixtures("cache")
def test_pairs_have_every_segmentation_and_their_own_lengths(tokenizer):
    pairs = in_memory([*PAIRS, ("", "empty")])
    tokenized, counts = tokenize_pairs(pairs, tokenizer, max_length_ratio=None, bpe_dropout=0.2, seed=3)
    assert (counts.kept, counts.empty, len(tokenized)) == (32 * len(PAIRS), 32, 32 * len(PAIRS))
    texts = [tokenizer.batch_decode(tokenized[name][:], skip_special_tokens=True) for name in ("input_ids", "labels")]
    assert Counter(zip(*texts, strict=True)) == Counter(PAIRS * SEGMENTATIONS)
    assert tokenized["source_length"][:] == [len(ids) for ids in tokenized["input_ids"]]
    plain, _ = tokenize_pairs(pairs, tokenizer, max_length_ratio=None)
    other, _ = tokenize_pairs(pairs, tokenizer, max_length_ratio=None, bpe_dropout=0.2, seed=4)
    again, _ = tokenize_pairs(pairs, tokenizer, max_length_ratio=None, bpe_dropout=0.2, seed=3)
    assert len(plain) == len(PAIRS) and other[:] != tokenized[:] == again[:]


def byte_fallback():
    backend = Tokenizer(models.BPE({"<0xC3>": 0, "<0xA4>": 1, "a": 2, "</s>": 3}, [], byte_fallback=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"), "aäa"


def unknown():
    backend = Tokenizer(models.BPE({"<": 0, "u": 1, "n": 2, "k": 3, ">": 4, "<unk>": 5}, [], unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), "unäk"


def added():
    other = train_tokenizer(TEXTS, vocab_size=300)
    other.add_tokens(["weather"])
    return PreTrainedTokenizerFast(tokenizer_object=other.backend_tokenizer, eos_token="</s>"), "the weather"


def whole_words():
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "abb": 2}, [], ignore_merges=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend), "abb"


@pytest.mark.parametrize("kind", [byte_fallback, unknown, added, whole_words])
def test_what_merges_do_not_make_stays_as_it_is(kind):
    other, text = kind()
    ids = other(text)["input_ids"]
    assert drawn(other, 0.0, [text]) == [ids] * SEGMENTATIONS
    special = set(ids) if kind is not added else {other.convert_tokens_to_ids("weather")}
    assert all(special <= set(found) for found in drawn(other, 0.9, [text]))


def test_a_word_of_a_whole_line_takes_no_time(tokenizer):
    line = "Wetter" * 2000
    assert drawn(tokenizer, 0.1, [line]) == tokenizer([line])["input_ids"] * SEGMENTATIONS  # by merges an hour


@pytest.mark.usefixtures("cache")
def test_a_plan_counts_segmentations_as_pairs(tmp_path):
    recipe = load_recipe("small", {"bpe_dropout": 0.1, "expected_pairs": 7, "max_length_ratio": 0})
    assert make_plan(recipe).epoch.pairs == 7 * SEGMENTATIONS
    for name in ("a", "b"):
        (tmp_path / name).write_text("\n".join(TEXTS * 10) + "\n")
    text = {"data_dir": str(tmp_path), "train_source": "a", "train_target": "b", "validation_size": 5}
    assert make_plan(replace(recipe, **text, vocab_size=300)).epoch.pairs == 25 * SEGMENTATIONS


def test_other_tokenizers_prepared_data_and_wrong_shares_are_refused(tokenizer, tmp_path):
    pieces = train_tokenizer(TEXTS, kind="wordpiece", vocab_size=600)
    assert "byte-pair encoding" in error_of(BpeDropout, pieces, 0.1)
    two = VaswaniTokenizer(tokenizer_object=tokenizer.backend_tokenizer, known_tokens=(9, 9), unk_token="<unk>")
    assert "the same for source and target" in error_of(BpeDropout, two, 0.1)
    marked = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"))
    )
    assert "marks of their own" in error_of(BpeDropout, marked, 0.1)
    for share in (-0.1, 1.0, float("nan")):
        assert "below 1" in error_of(BpeDropout, tokenizer, share)
    assert "leave it out" in error_of(prepare, load_recipe("small", {"bpe_dropout": 0.1}), tmp_path / "prepared")
    for options, expected in (
        ({"bpe_dropout": 1.0}, "below 1"),
        ({"bpe_dropout": 0.1, "tokenizer_kind": "wordpiece"}, "set tokenizer_kind to bpe"),
        ({"bpe_dropout": 0.1, "prepared": "folder"}, "prepared data has none"),
    ):
        with pytest.raises(UserError, match=expected):
            load_recipe("small", options)
    load_recipe("small", {"bpe_dropout": 0.1, "tokenizer_kind": "wordpiece", "tokenizer": "folder"})
