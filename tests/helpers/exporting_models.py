"""What the tests of exported models share: model folders of a small real vocabulary."""

import functools
import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_config, tiny_model
from model_folders import save
from sentencepiece_models import trained

from vaswani_transformer import (
    PairCollator,
    Translator,
    VaswaniForConditionalGeneration,
    load_exported,
    train_tokenizer,
)
from vaswani_transformer.data.synthetic import generate_corpus
from vaswani_transformer.data.tokenization import vocabulary_sizes
from vaswani_transformer.export.engine import int8_folder
from vaswani_transformer.exported import is_exported
from vaswani_transformer.importing.marianmt import marian_tokenizer
from vaswani_transformer.importing.sentencepiece import read_model

PAIRS = generate_corpus(400, 10, 10).train
SOURCES = [source for source, _ in PAIRS[:12]] + ["A dog.", "Ünïcödé €."]


@functools.cache
def small_tokenizer():
    """285 tokens: most words are several."""
    return train_tokenizer((side for pair in PAIRS[:100] for side in pair), vocab_size=285)


def imported_tokenizer(folder, vocabularies=1):
    """Of a MarianMT model: two SentencePiece models, and a vocabulary, which lacks a piece that the first makes."""
    pieces, special = [], ["<unk>", "<pad>", "</s>"]
    for name, texts in zip(("source", "target"), zip(*PAIRS, strict=True), strict=True):
        path = trained(folder, texts, name, vocab_size=150, character_coverage=1.0).rename(folder / f"{name}.spm")
        pieces.append([piece.piece for piece in read_model(path).pieces[3:]])
    names = ("vocab.json", "target_vocab.json")[:vocabularies]
    for name, tokens in zip(names, pieces if vocabularies == 2 else [pieces[0] + pieces[1]], strict=True):
        tokens = dict.fromkeys(special + tokens)
        (folder / name).write_text(json.dumps({piece: n for n, piece in enumerate(tokens) if piece != "▁want"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": vocabularies == 2}))
    return marian_tokenizer(folder)


def save_model(folder: Path, tokenizer, max_extra_tokens: int = 5, **changes) -> Path:
    """A model folder with random weights; distributions are peaked, so that greedy search hardly ever ties."""
    model = tiny_model(**{"vocab_size": len(tokenizer), "max_position_embeddings": 100, "scale": 2.0, **changes})
    return _save(model, folder, tokenizer, max_extra_tokens)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    """The folder of one with this vocabulary: `folder = exporting_models.small_model`."""
    return save_model(tmp_path_factory.mktemp("model") / "model", small_tokenizer())


def save_trained_model(folder: Path, tokenizer, steps: int = 80, **changes) -> Path:
    """A model folder with weights that have learned a little: outputs end, and beams disagree about where.

    Trained in float64, so that the weights hardly depend on the processor.
    """
    torch.manual_seed(0)
    sizes = {"d_model": 48, "d_ff": 96, "d_k": 12, "d_v": 12, "max_position_embeddings": 100, **changes}
    source, target = vocabulary_sizes(tokenizer)
    sizes |= {} if source == target else {"decoder_vocab_size": target}
    config = tiny_config(vocab_size=source, **sizes)
    model = VaswaniForConditionalGeneration(config).train().double()
    collator = PairCollator(model.config.pad_token_id)
    examples = [tokenizer(one, text_target=two) for one, two in PAIRS]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    for step in range(steps):
        model(**collator(examples[step * 16 % len(examples) :][:16])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return _save(model.float().eval(), folder, tokenizer, max_extra_tokens=20)


def _save(model, folder: Path, tokenizer, max_extra_tokens: int) -> Path:
    model.generation_config.update(num_beams=4, length_penalty=0.6, max_extra_tokens=max_extra_tokens)
    return save(folder, model, tokenizer)


def exported_translator(folder, device="cpu", compute_type="default", threads=0, patience=None, **options):
    """A translator of an exported model; one that is not is converted to int8."""
    folder = folder if is_exported(folder) else int8_folder(folder)
    return Translator(*load_exported(folder, device, compute_type, threads=threads, patience=patience), **options)
