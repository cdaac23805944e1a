"""A random model, its tokenizer and tokenised pairs, for the tests of fine-tuning."""

from pathlib import Path

import datasets
import pytest
import torch
from conftest import tiny_config
from model_folders import save
from pair_files import in_memory
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

import vaswani_transformer as vt
from vaswani_transformer.data.synthetic import generate_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model and a tokenizer for a generated corpus, as a user finds them."""
    pairs = generate_corpus(100, 10, 10).train
    tokenizer = vt.train_tokenizer([side for pair in pairs for side in pair], vocab_size=300)
    torch.manual_seed(0)
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=128)
    return save(tmp_path_factory.mktemp("model"), vt.VaswaniForConditionalGeneration(config), tokenizer)


def tokenized(tokenizer, count: int) -> datasets.Dataset:
    """Pairs of all lengths, as a user would tokenise them."""
    pairs = in_memory(generate_corpus(100, 10, 10).train[:count])
    return pairs.map(lambda row: tokenizer(row["source"], text_target=row["target"]), remove_columns=pairs.column_names)


@pytest.fixture(scope="module")
def batch(folder) -> dict:
    """Eight pairs as a user collates them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    collator = DataCollatorForSeq2Seq(tokenizer, model=AutoModelForSeq2SeqLM.from_pretrained(folder))
    return dict(collator([dict(row) for row in tokenized(tokenizer, 8)]))


def assert_same(one: dict, other: dict, tolerance: float) -> None:
    """Each tensor differs by at most this share of its largest value."""
    assert one.keys() == other.keys()
    for name in one:
        error = (one[name] - other[name]).abs().max() / one[name].abs().max()
        assert error <= tolerance, (name, float(error))
