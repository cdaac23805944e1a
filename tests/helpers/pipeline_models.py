"""A small model, its tokenizer and what a user without pipelines writes, for the tests of pipelines."""

import pytest
from conftest import tiny_model

from vaswani_transformer import train_tokenizer

TEXTS = ["the small dog sees a red house", "two birds are playing", "my father reads an old book in the garden", "red"]
SHORT = {"max_new_tokens": 7}
TRANSLATION = "translation_text"


def build(vocab_size: int, **changes):
    """A model whose outputs depend on its inputs, with the beams that `vaswani train` writes."""
    model = tiny_model(seed=5, scale=3.0, vocab_size=vocab_size, decoder_start_token_id=0, **changes)
    model.generation_config.num_beams = 4
    return model


def by_hand(model, tokenizer, text: str, **options) -> list[str]:
    """What a user without pipelines writes, one text at a time."""
    inputs = tokenizer(text, return_tensors="pt")
    return tokenizer.batch_decode(model.generate(**inputs, **{**SHORT, **options}), skip_special_tokens=True)


def texts_by_hand(model, tokenizer, texts=TEXTS, **options) -> list[str]:
    return [by_hand(model, tokenizer, text, **options)[0] for text in texts]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=270)


@pytest.fixture(scope="module")
def model(tokenizer):
    return build(len(tokenizer))
