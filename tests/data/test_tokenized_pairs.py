"""Tokenisation of pairs: ids and lengths, filters and their counts, the cache on disk."""

import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import datasets
import pytest
from conftest import error_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_files import PAIRS, in_memory, write_two
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from vaswani_transformer.data import tokenized_pairs
from vaswani_transformer.data.parallel_text import load_pairs
from vaswani_transformer.data.tokenized_pairs import FilterCounts, kept_rows, pair_lengths, tokenize_pairs


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make_tokenizer(merges=40):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "special_tokens": ["<pad>", "</s>"], "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + 2 + merges, **options)
    backend.train_from_iterator([text for pair in PAIRS for text in pair], trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


@pytest.fixture
def encoded(monkeypatch):
    """The texts that are encoded."""
    texts, encoder = [], tokenized_pairs.encoder

    def noted(tokenizer, side):
        encode = encoder(tokenizer, side)
        return lambda batch: texts.extend(batch) or encode(batch)

    monkeypatch.setattr(tokenized_pairs, "encoder", noted)
    return texts


def test_tokenised_pairs_have_int32_columns_lengths_with_the_end_token_and_a_file_on_disk(tokenizer):
    tokenized, counts = tokenize_pairs(in_memory([*PAIRS, ("", "leer")]), tokenizer)
    ids, length = datasets.List(datasets.Value("int32")), datasets.Value("int32")
    assert tokenized.features == {"input_ids": ids, "labels": ids, "source_length": length, "target_length": length}
    for row, (source, target) in zip(tokenized, PAIRS, strict=True):
        assert row["input_ids"] == tokenizer(source)["input_ids"] and row["labels"] == tokenizer(target)["input_ids"]
        assert row["input_ids"][-1] == row["labels"][-1] == tokenizer.eos_token_id
        assert (row["source_length"], row["target_length"]) == (len(row["input_ids"]), len(row["labels"]))
    assert (counts.read, counts.kept, counts.empty) == (4, 3, 1)
    assert Path(tokenized.cache_files[0]["filename"]).is_relative_to(datasets.config.HF_DATASETS_CACHE)


def test_counts_are_one_readable_line():
    counts = FilterCounts(29000, 28731, 12, 210, 47, max_length=256, max_length_ratio=3.0)
    text = "29,000 pairs read, 28,731 kept; dropped: 12 empty, 210 longer than 256 tokens"
    assert str(counts) == text + ", 47 with a length ratio above 3.0"
    assert str(FilterCounts(29000, 28731, 12, 210, 0, 256, None)) == text


def test_limits_are_inclusive_and_the_ratio_can_be_switched_off(tokenizer):
    texts = ["".join("ZQXJ"[i % 4] for i in range(n)) for n in range(10)]  # letters not in the training text: n tokens
    assert [len(ids) - 1 for ids in tokenizer(texts)["input_ids"]] == list(range(10))
    pairs = in_memory([(texts[a], texts[b]) for a, b in [(2, 6), (6, 2), (2, 7), (7, 2), (8, 8), (8, 9), (9, 8)]])
    tokenized, counts = tokenize_pairs(pairs, tokenizer, max_length=9, max_length_ratio=3)
    assert list(zip(tokenized["source_length"], tokenized["target_length"], strict=True)) == [(3, 7), (7, 3), (9, 9)]
    assert (counts.too_long, counts.ratio) == (2, 2)
    for off in (None, 0):
        assert tokenize_pairs(pairs, tokenizer, max_length=9, max_length_ratio=off)[1].kept == 5
    rest = in_memory([("", "a"), ("b", "b"), ("c", "c")])  # which follow each other
    assert kept_rows(tokenize_pairs(rest, tokenizer)[0]).tolist() == [1, 2]


def test_tokens_of_a_script_that_the_vocabulary_hardly_knows_are_no_length(tokenizer):
    english, kannada = "the black dog sees two cats", "ಕಪ್ಪು ನಾಯಿ ಎರಡು ಬೆಕ್ಕುಗಳನ್ನು ನೋಡುತ್ತದೆ"
    pairs = [(english, kannada), (kannada, english), (english, "黑狗看见两只猫"), ("\u1112\u1161\u11ab" * 9, english)]
    assert tokenize_pairs(in_memory(pairs), tokenizer)[1].ratio == 0
    long = [(kannada * 4, english), (english * 4, "dog"), ("黑" * 40, "黑狗两只" * 3)]
    assert tokenize_pairs(in_memory([*long, *pairs]), tokenizer, max_length=1000)[1].ratio == 3


def test_tags_a_match_and_space_around_a_text_are_no_part_of_it(tokenizer):
    texts = ["a dog", "<2fr> a dog", "<2fr> <BT> a dog", "a dog <TM> der kleine Hund und die Katze"]
    tokenized, counts = tokenize_pairs(in_memory([(f" {text}\t", " dog\u3000") for text in texts]), tokenizer)
    assert counts.kept == 4 and tokenized["input_ids"][:] == tokenizer(texts)["input_ids"]
    assert tokenized["labels"][0] == tokenizer("dog")["input_ids"]


TEXTS = st.one_of(
    st.sampled_from(["", " ", "\u2028", "\x0b", "a dog", "</s>", "two cats " * 3]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)


@settings(max_examples=40)
@given(
    pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=12),
    max_length=st.integers(2, 20),
    max_length_ratio=st.sampled_from([None, 0, 1.0, 1.5, 3]),
)
def test_filters_equal_a_plain_reference(tokenizer, pairs, max_length, max_length_ratio):
    kept = []
    for source, target in pairs:
        ids, labels = (tokenizer(text.strip())["input_ids"] for text in (source, target))
        if source.strip() and target.strip() and len(ids) <= max_length and len(labels) <= max_length:
            s, t = len(ids) - 1, len(labels) - 1
            a, b = (len(unicodedata.normalize("NFC", text.strip())) for text in (source, target))
            if not max_length_ratio or max(min(s / t, a / b), min(t / s, b / a)) <= max_length_ratio:
                kept.append((ids, labels))
    options = {"max_length": max_length, "max_length_ratio": max_length_ratio}
    if not kept:
        assert f"{len(pairs)} pairs read, 0 kept" in error_of(tokenize_pairs, in_memory(pairs), tokenizer, **options)
        return
    tokenized, counts = tokenize_pairs(in_memory(pairs), tokenizer, **options)
    assert list(zip(tokenized["input_ids"], tokenized["labels"], strict=True)) == kept
    assert counts.read == len(pairs) and counts.kept == len(kept) == len(tokenized)
    assert counts.kept + counts.empty + counts.too_long + counts.ratio == counts.read
    assert max(tokenized["source_length"][:] + tokenized["target_length"][:]) <= max_length


def test_lengths_of_filtered_sliced_and_plain_pairs(tokenizer):
    tokenized, _ = tokenize_pairs(in_memory([*PAIRS, ("", "leer"), *PAIRS, *PAIRS]), tokenizer)
    plain, _ = tokenize_pairs(in_memory(PAIRS), tokenizer)
    parts = tokenized.select(range(2, 6)), tokenized.select([5, 0, 3]), plain.select(range(1, 3))
    for some in (tokenized, plain, *parts):
        source, target = pair_lengths(some)
        assert source.tolist() == some["source_length"][:] and target.tolist() == some["target_length"][:]


def test_no_pairs_and_a_tokenizer_without_end_token_are_refused():
    plain = make_tokenizer(merges=5)
    plain.backend_tokenizer.post_processor = processors.ByteLevel()
    assert "end token" in error_of(tokenize_pairs, in_memory(PAIRS), plain)
    assert "0 pairs read" in error_of(tokenize_pairs, in_memory([]), plain)


def test_the_cache_serves_the_same_call_only(tmp_path, encoded):
    first = load_pairs(**write_two(tmp_path, "a dog\n\n", "ein Hund\nx\n"))
    tokenizer = make_tokenizer()
    expected, counts = tokenize_pairs(first, tokenizer)
    assert sorted(encoded) == sorted(["a dog", "", "ein Hund", "x"])
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)  # leaves its options in the backend
    again, counts_again = tokenize_pairs(first, tokenizer, description="Once more")
    assert len(encoded) == 4 and counts_again == counts and again[:] == expected[:]
    assert again._fingerprint == expected._fingerprint

    tokenize_pairs(first, tokenizer, max_length=100)
    tokenize_pairs(first, tokenizer, max_length_ratio=None)
    assert len(encoded) == 12, "other limits"
    tokenize_pairs(load_pairs(**write_two(tmp_path, "a cat\n\n", "ein Hund\nx\n")), tokenizer)
    assert len(encoded) == 16, "another file"
    tokenize_pairs(first, make_tokenizer(merges=3))
    assert len(encoded) == 20, "another tokenizer"


AGAIN = """
import sys
from vaswani_transformer.data import tokenized_pairs
from vaswani_transformer import load_pairs, load_tokenizer, tokenize_pairs

tokenized_pairs.pair_encoder = lambda *limits: None  # nothing can be encoded
files = dict(zip(("source", "target"), sys.argv[2:]))
for arguments in (files, {"data": sys.argv[4]}):
    tokenized, counts = tokenize_pairs(load_pairs(**arguments), load_tokenizer(sys.argv[1]))
    print(tokenized._fingerprint, counts, tokenized[:])
"""


@pytest.mark.slow
def test_a_new_process_reuses_the_pairs_and_the_token_ids(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    files = write_two(tmp_path, "a dog\n\n", "ein Hund\nx\n")
    in_memory(PAIRS).save_to_disk(saved := tmp_path / "saved")
    expected = []
    for arguments in (files, {"data": saved}):
        tokenized, counts = tokenize_pairs(load_pairs(**arguments), tokenizer)
        expected.append(f"{tokenized._fingerprint} {counts} {tokenized[:]}")
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")}
    command = [sys.executable, "-c", AGAIN, tmp_path / "tokenizer", *files.values(), saved]
    done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True)
    assert done.stdout.splitlines() == expected, done.stderr
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")} == before


def test_a_folder_from_save_to_disk_stays_untouched(tmp_path, tokenizer):
    in_memory(PAIRS).save_to_disk(tmp_path / "saved")
    before = sorted(tmp_path.rglob("*"))
    tokenize_pairs(load_pairs(data=tmp_path / "saved"), tokenizer)
    assert sorted(tmp_path.rglob("*")) == before
