"""Model folders with random weights, made without training, and one to damage."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file

from vaswani_transformer import VaswaniForConditionalGeneration, train_tokenizer
from vaswani_transformer.data.synthetic import generate_corpus

PAIRS = generate_corpus(120, 10, 10).train
TEXTS = ["a small sentence", "another small sentence of words", "words and more words"]


def write_model(folder: Path, seed: int = 2, **changes) -> Path:
    """A folder as `vaswani train` leaves it, whose nonsense differs from source to source and is made of whole letters.

    Random weights repeat a few tokens for ever, so that is forbidden; most outputs end at their limit, which is low.
    """
    tokenizer = train_tokenizer((side for pair in PAIRS for side in pair), vocab_size=400)
    model = tiny_model(seed=seed, scale=2.0, vocab_size=len(tokenizer), tie_word_embeddings=False, **changes)
    model.generation_config.update(num_beams=4, length_penalty=0.6, no_repeat_ngram_size=1, max_extra_tokens=12)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    letters = {token for token, text in enumerate(texts) if text.strip().isalpha()} | {tokenizer.eos_token_id}
    model.generation_config.suppress_tokens = sorted(set(range(len(tokenizer))) - letters)
    return save(folder, model, tokenizer)


def save(folder: Path, *parts) -> Path:
    """Save a model and its tokenizer in a folder."""
    for part in parts:
        part.save_pretrained(folder)
    return folder


def change(folder: Path, file: str = "tokenizer.json", **entries) -> None:
    """Give entries of a JSON file other values; a file that is not there gets these alone."""
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | entries))


def pickle_weights(folder: Path, change=lambda weights: weights) -> dict[str, torch.Tensor]:
    """Replace the safetensors of a folder by `pytorch_model.bin`; returns what is in it."""
    weights = change(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


def in_shards(folder: Path) -> Path:
    """Split the weights of a folder into files with an index; returns the index."""
    model = VaswaniForConditionalGeneration.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder / "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A complete small model folder; leave it as it is."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=270)
    return save(tmp_path_factory.mktemp("saved"), tiny_model(vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(saved, tmp_path / "model")
