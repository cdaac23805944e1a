"""Models whose source and target have vocabularies of their own, through everything that a tokenizer goes through.

What each side must give comes from tokenizers of one side.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import error_of, tiny_model, tiny_recipe
from import_differences import sentencepiece_model
from model_folders import save
from pair_files import in_memory
from transformers import AutoTokenizer

from vaswani_transformer import VaswaniTokenizer, load_model, load_tokenizer, train_tokenizer
from vaswani_transformer.attention.alignments import align
from vaswani_transformer.attention.weights import attend
from vaswani_transformer.data.prepare import prepare
from vaswani_transformer.data.prepared import open_prepared
from vaswani_transformer.data.synthetic import generate_corpus
from vaswani_transformer.data.tokenization import check_tokenizer_matches, tokenizer_sha256, vocabulary_sizes
from vaswani_transformer.data.tokenized_pairs import tokenize_pairs
from vaswani_transformer.decoding.glossary import Glossary
from vaswani_transformer.decoding.scoring import score_pairs
from vaswani_transformer.decoding.streaming import Window
from vaswani_transformer.decoding.translator import Translator
from vaswani_transformer.recipes.recipe import Recipe
from vaswani_transformer.training.initial_model import new_model
from vaswani_transformer.training.settings import trial_seconds

MODELS, VOCABULARIES = ("source.spm", "target.spm"), ("vocab.json", "target_vocab.json")
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
PAIRS = generate_corpus(200, 20, 20).train
SOURCES, TARGETS = (list(side) for side in zip(*PAIRS[:8], strict=True))


class World(NamedTuple):
    folder: Path  # of a model and its tokenizer
    source: Any  # tokenizers of one side
    target: Any


def fast(folder: Path, sizes=((0, 290), (1, 310))) -> tuple[VaswaniTokenizer, Any, Any]:
    sides = [train_tokenizer([pair[side] for pair in PAIRS], vocab_size=size) for side, size in sizes]
    backends = {"tokenizer_object": sides[0].backend_tokenizer, "target_tokenizer_object": sides[1].backend_tokenizer}
    return VaswaniTokenizer(**backends, **SPECIAL), *sides


def marian(folder: Path) -> tuple[Any, Any, Any]:
    """transformers' class for each side, with letters as tokens."""
    pytest.importorskip("sentencepiece")
    from transformers import MarianTokenizer

    folder.mkdir()
    for texts, model, vocabulary in zip((SOURCES, TARGETS), MODELS, VOCABULARIES, strict=True):
        pieces = ["▁", *sorted({letter for text in texts for letter in text} - {" "})]
        (folder / model).write_bytes(sentencepiece_model(pieces))
        ids = {piece: number for number, piece in enumerate(["</s>", "<unk>", "<pad>", *pieces])}
        (folder / vocabulary).write_text(json.dumps(ids))
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    files = [str(folder / name) for name in (*MODELS[::-1], *VOCABULARIES[::-1])]
    target = MarianTokenizer(*files[:3], target_vocab_file=files[3], separate_vocabs=True)
    return load_tokenizer(folder), MarianTokenizer.from_pretrained(folder), target


@pytest.mark.parametrize("target", [0, 1])
def test_two_vocabularies_of_one_size_share_no_matrix(tmp_path, target):
    tokenizer = fast(tmp_path, ((0, 290), (target, 290)))[0]
    assert new_model(replace(Recipe(), encoder_layers=1), tokenizer).config.shares_embeddings is (target == 0)


@pytest.fixture(scope="module", params=[fast, marian], ids=["fast", "marian"])
def world(request, tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("world")
    tokenizer, source, target = request.param(folder / "tokenizer")
    sizes = vocabulary_sizes(tokenizer)
    assert sizes == (len(source), len(target)) and sizes[0] != sizes[1]
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad", "eos")}
    model = tiny_model(
        vocab_size=sizes[0], decoder_vocab_size=sizes[1], decoder_start_token_id=2, max_position_embeddings=128, **ids
    )
    return World(save(folder / "model", model, tokenizer), source, target)


def ids_of(tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts)["input_ids"]


def test_loaded(world, tmp_path):
    model, tokenizer = load_model(world.folder, device="cpu")
    assert ids_of(tokenizer, SOURCES) == ids_of(world.source, SOURCES)
    assert tokenizer(text_target=TARGETS)["input_ids"] == ids_of(world.target, TARGETS)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_sha256(load_tokenizer(tmp_path)) == tokenizer_sha256(tokenizer)
    assert type(AutoTokenizer.from_pretrained(tmp_path)).__name__ == type(tokenizer).__name__
    model.config.decoder_vocab_size -= 1
    assert "vocabulary size of the target" in error_of(check_tokenizer_matches, tokenizer, model.config)


@pytest.mark.usefixtures("whole_outputs")
def test_translated(world):
    model, tokenizer = load_model(world.folder, device="cpu")
    texts = list(Translator(model, tokenizer, num_beams=2, max_new_tokens=8).translate(SOURCES))
    for text, source in zip(texts, SOURCES, strict=True):
        output = model.generate(torch.tensor(ids_of(world.source, [source])), num_beams=2, max_new_tokens=8)
        reference = world.target if tokenizer.is_fast else tokenizer
        assert text == reference.decode(output[0], skip_special_tokens=True).strip()


def test_terms_are_those_of_the_parts_of_a_line(world):
    line = " ".join(SOURCES[:3])
    words = {source.split()[1]: TARGETS[0].split()[:1] for source in SOURCES[:3]}
    translator = Translator(*load_model(world.folder, "cpu"), glossary=Glossary(words), split_long=True)
    translator.max_source_tokens = max(map(len, ids_of(world.source, SOURCES[:3])))
    pieces = translator.prepare(Window(0, 1, [line])).pieces
    assert len(pieces) == 3 and all(piece.terms for piece in pieces)


def test_scored(world):
    model, tokenizer = load_model(world.folder, device="cpu")
    losses, counts = score_pairs(model, tokenizer, SOURCES, TARGETS)
    for source, target, loss, count in zip(SOURCES, TARGETS, losses, counts, strict=True):
        sides = (world.source, [source]), (world.target, [target])
        source_ids, target_ids = (torch.tensor(ids_of(*side)) for side in sides)
        with torch.no_grad():
            expected = model(input_ids=source_ids, labels=target_ids, return_dict=True).logits.log_softmax(-1)
        assert count == target_ids.shape[1]
        assert loss == pytest.approx(-float(expected.gather(-1, target_ids[..., None]).sum()), rel=1e-4)


def test_attention_and_words(world):
    model, tokenizer = load_model(world.folder, device="cpu")
    weights = attend(model, tokenizer, SOURCES[0], TARGETS[0])
    assert len(weights.source_tokens) == len(ids_of(world.source, SOURCES[:1])[0])
    assert len(weights.target_tokens) == len(ids_of(world.target, TARGETS[:1])[0])
    if tokenizer.is_fast:
        links = align(model, tokenizer, SOURCES, TARGETS)
        words = [{target for _, target in of_pair} for of_pair in links]
        assert words == [set(range(len(text.split()))) for text in TARGETS]
        shown = "".join(weights.source_tokens[:-1]).replace("·", "").replace("␣", "")
        assert shown == "".join(SOURCES[0].split())
    else:
        message = "MarianTokenizer does not say which word"
        assert message in error_of(align, model, tokenizer, SOURCES, TARGETS)


def test_pairs_tokenized_and_prepared(world, tmp_path):
    tokenizer = load_tokenizer(world.folder)
    expected = [ids_of(world.source, SOURCES), ids_of(world.target, TARGETS)]
    rows, _ = tokenize_pairs(in_memory(list(zip(SOURCES, TARGETS, strict=True))), tokenizer)
    assert [rows["input_ids"][:], rows["labels"][:]] == expected
    for name, lines in (("a.en", SOURCES), ("a.de", TARGETS)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    names = {"train_source": "a.en", "train_target": "a.de", "validation_source": "a.en", "validation_target": "a.de"}
    prepare(Recipe(data_dir=str(tmp_path), tokenizer=str(world.folder), **names), tmp_path / "p", workers=1)
    rows = open_prepared(tmp_path / "p").train.as_dataset()
    assert [rows["input_ids"][:], rows["labels"][:]] == expected
    sizes = {"d_model": 8, "d_ff": 8, "num_heads": 1, "encoder_layers": 1, "decoder_layers": 1}
    # With room for the ids of either side.
    assert trial_seconds(Recipe(tokens_per_batch=4096, **sizes), rows, tokenizer, 1) > 0


def test_exported_to_ctranslate2(world, tmp_path):
    pytest.importorskip("ctranslate2")
    from vaswani_transformer import export_model
    from vaswani_transformer.export.engine import load_exported

    assert export_model(world.folder, tmp_path / "exported").difference < 1e-4
    assert (tmp_path / "exported" / "target_vocabulary.json").is_file()
    model, tokenizer = load_exported(tmp_path / "exported", "cpu")
    options = {"num_beams": 2, "max_new_tokens": 8}
    translations = list(Translator(model, tokenizer, **options).translate(SOURCES))
    assert translations == list(Translator(*load_model(world.folder, device="cpu"), **options).translate(SOURCES))


def test_averaged_and_published(world, tmp_path, caplog):
    from vaswani_transformer import average_models, publish

    average_models([world.folder, world.folder], tmp_path / "average")
    assert tokenizer_sha256(load_tokenizer(tmp_path / "average")) == tokenizer_sha256(load_tokenizer(world.folder))
    published = publish(world.folder, "someone/model", license="mit", dry_run=True)
    assert {path.name for path in world.folder.iterdir()} <= published.files.keys()
    assert "not published" not in caplog.text


def test_trained(world, tmp_path, text):
    """The tokenizer comes along into the run folder."""
    from vaswani_transformer import train

    recipe = tiny_recipe(text, tmp_path / "run", tokenizer=str(world.folder), max_steps=2, evaluate_every=2)
    if load_tokenizer(world.folder).bos_token_id is None:
        pytest.skip("has no beginning")
    train(recipe, progress=False)
    model, tokenizer = load_model(tmp_path / "run", device="cpu")
    assert tokenizer_sha256(tokenizer) == tokenizer_sha256(load_tokenizer(world.folder))
    assert (model.config.vocab_size, model.config.target_vocab_size) == (len(world.source), len(world.target))
    assert np.isfinite(score_pairs(model, tokenizer, SOURCES, TARGETS)[0]).all()
