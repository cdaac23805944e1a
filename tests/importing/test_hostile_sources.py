"""Sources of `vaswani import` that were made to take memory or time without end, or to be read as something else."""

import argparse
import json
import shutil
import struct
import zipfile
from pathlib import Path

import import_differences
import numpy as np
import pytest
import torch
import yaml
from conftest import TESTS, error_of
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from vaswani_transformer import VaswaniTokenizer, import_model
from vaswani_transformer.importing import fairseq, marian, refused, sentencepiece, subword_nmt
from vaswani_transformer.importing.checkpoints import read_checkpoint, read_pickle
from vaswani_transformer.importing.source import ImportOptions
from vaswani_transformer.model.sentencepiece_vaswani import CharacterMap
from vaswani_transformer.model.words_vaswani import SubwordText

MARIAN = TESTS / "fixtures" / "marian" / "relu-two"


@pytest.fixture
def marianmt(tmp_path) -> Path:
    return import_differences.marianmt(tmp_path / "source", torch.float32).source


# Pickles


def test_a_pickle_whose_tensors_have_more_numbers_than_it_has(tmp_path):
    for content in (torch.zeros(1).expand(10**6, 10**6), {"model": [({"a": torch.zeros(3).expand(9, 3)},)]}):
        torch.save(content, tmp_path / "model.pt")
        assert "tensors of more numbers than it has" in error_of(read_pickle, tmp_path / "model.pt", "save it again")
    matrix = torch.ones(4, 4)
    content = {"a": matrix, "b": matrix, "c": matrix[1:].T, "d": torch.ones(0), "e": [1, None]}
    content["e"].append(content["e"])
    torch.save(content, tmp_path / "model.pt")
    assert read_checkpoint(tmp_path / "model.pt", "save it again").keys() == content.keys()


def test_options_whose_text_has_no_end(tmp_path):
    bomb = ["x"]
    for _ in range(60):
        bomb = [bomb, bomb]
    args = argparse.Namespace(arch="transformer", encoder_normalize_before=bomb)
    torch.save({"args": args, "model": {"encoder.version": torch.ones(1)}}, tmp_path / "model.pt")
    assert "encoder_normalize_before=True" in error_of(fairseq.read, tmp_path / "model.pt", ImportOptions())


def test_the_number_of_heads_is_not_guessed(tmp_path):
    original = import_differences.fairseq(tmp_path, torch.float32)
    content = read_checkpoint(original.source, "", [argparse.Namespace])
    del content["args"].encoder_attention_heads, content["args"].decoder_attention_heads
    torch.save(content, original.source)
    assert "encoder_attention_heads" in error_of(import_model, original.source, tmp_path / "out")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damaged_archives_are_left_to_their_reader(tmp_path, method):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("model/data.pkl", b"copy_attn_force" * 100)
    if method == zipfile.ZIP_STORED:
        assert "an OpenNMT-py model" in error_of(refused.refuse, path)
        path.write_bytes(path.read_bytes().replace(b"copy", b"cope", 1))  # the check sum is another one
    refused.refuse(path)
    path.write_bytes(path.read_bytes().replace(b"PK\1\2", b"PK\1\3"))
    refused.refuse(path)


# Weights that are missing


@pytest.mark.parametrize("kind", ["marianmt", "fsmt"])
def test_a_missing_embedding_is_not_replaced_by_another(tmp_path, kind):
    if kind == "fsmt":
        pytest.importorskip("sacremoses")
        original = import_differences.fsmt(tmp_path / "source", torch.float32, tgt_vocab_size=61)
    else:
        changes = {"decoder_vocab_size": 61, "share_encoder_decoder_embeddings": False}
        original = import_differences.marianmt(tmp_path / "source", torch.float32, **changes)
    path = original.source / "model.safetensors"
    weights = load_file(path)
    del weights["model.encoder.embed_tokens.weight"]
    save_file(weights, path, {"format": "pt"})
    assert "model.encoder.embed_tokens.weight is missing" in error_of(import_model, original.source, tmp_path / "out")


# Values of a wrong kind


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"d_model": [1]}),
        ("config.json", {"activation_function": ["relu"]}),
        ("config.json", {"pad_token_id": None}),
        ("config.json", {"pad_token_id": 10**9}),
        ("config.json", {"encoder_layers": 10**9, "decoder_layers": 10**9}),
        ("generation_config.json", {"num_beams": [[]], "bad_words_ids": {"a": 1}}),
        ("tokenizer_config.json", {"eos_token": ["</s>"]}),
        ("tokenizer_config.json", {"source_lang": [[]], "target_lang": {}}),
        ("vocab.json", {"▁a": -1}),
        ("vocab.json", {"▁a": 10**9}),
        ("vocab.json", {"▁a": 3}),
    ],
    ids=str,
)
def test_values_of_a_folder_of_transformers(marianmt, tmp_path, file, values):
    path = marianmt / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    if file == "generation_config.json" or "source_lang" in values:  # noted on the card, or not known
        assert import_model(marianmt, tmp_path / "out").facts.toolkit
    else:
        error_of(import_model, marianmt, tmp_path / "out")
        assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").glob("[!.]*")]


@pytest.mark.parametrize(
    "options",
    [
        {"type": ["transformer"]},
        {"transformer-ffn-activation": {}},
        {"dim-vocabs": [10**12, 10**12]},
        {"enc-depth": 10**12},
        {"dim-emb": "x" * 100_000},
        {"transformer-heads": 0},
        {"vocabs": [["a"], {}]},
    ],
    ids=str,
)
def test_options_of_marian(tmp_path, options):
    path = shutil.copytree(MARIAN, tmp_path / "model") / "model.npz"
    if "vocabs" in options:
        path.with_name("model.npz.decoder.yml").write_text(yaml.safe_dump(options))
    with np.load(path) as archive:
        arrays = dict(archive)
    values = yaml.safe_load(arrays[marian.CONFIG].tobytes().rstrip(b"\0")) | options
    np.savez(path, **arrays | {marian.CONFIG: np.frombuffer(yaml.safe_dump(values).encode(), dtype=np.int8)})
    assert str(path) in error_of(import_model, path, tmp_path / "out") or "vocabs" in options


def test_search_settings_of_marian_beyond_floats(tmp_path):
    folder = shutil.copytree(MARIAN, tmp_path / "model")
    settings = folder / "model.npz.decoder.yml"
    settings.write_text(settings.read_text() + f"\nnormalize: {10**400}\n")
    assert "model" in error_of(import_model, folder, tmp_path / "out")


def test_long_options_of_marian(tmp_path):
    np.savez(tmp_path / "model.npz", **{marian.CONFIG: np.full(1 << 22, ord("a"), dtype=np.int8)})
    assert "it has more than 262,144 bytes" in error_of(marian.read, tmp_path / "model.npz", ImportOptions())


def test_arrays_of_marian_of_other_dimensions(tmp_path, recwarn):
    path = shutil.copytree(MARIAN, tmp_path / "model") / "model.npz"
    with np.load(path) as archive:
        arrays = dict(archive)
    for shape in ((), (2, 2, 2)):
        np.savez(path, **arrays | {"encoder_l1_ffn_W1": np.zeros(shape, dtype=np.float32)})
        assert f"layers.0.fc1.weight has the shape {shape}" in error_of(import_model, path, tmp_path / "out")
    assert not [warning for warning in recwarn if "T" in str(warning.message) and "dim" in str(warning.message)]


# Tokenizers


def field(number: int, content: bytes) -> bytes:
    """A field of a message of protocol buffers."""
    size, length = len(content), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def model_with(pieces=("▁a",), characters: bytes = b"") -> bytes:
    entries = b"".join(
        field(1, field(1, piece.encode()) + b"\x15" + struct.pack("<f", -1)) for piece in ("<unk>", "</s>", *pieces)
    )
    return entries + field(3, field(2, characters))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 5_000_000,  # a number of five million bytes
        model_with(["a" * 1_000_000]),
        field(1, field(1, b"a") + b"\x15" + struct.pack("<f", float("nan"))),
        b"none",
    ],
    ids=["a long number", "a long piece", "a score that is none", "another kind"],
)
def test_sentencepiece_models(content):
    line = error_of(sentencepiece.backend, content)
    assert "is no SentencePiece model (" in line and "(6)" not in line


def table(units: list[int]) -> bytes:
    return struct.pack(f"<{1 + len(units)}I", 4 * len(units), *units) + b"x\0"


# Every unit leads to every other: paths without an end.
CIRCLES = table([label | sentencepiece.HAS_VALUE for label in range(256)] * 4)


@pytest.mark.parametrize("characters", [CIRCLES, table([]), table([1 << 10] * 9), b"\4\0\0"])
def test_tables_of_characters(characters):
    with pytest.raises((ValueError, sentencepiece.Unsupported)):
        sentencepiece.backend(model_with(characters=characters))
        raise ValueError("a table without an entry is harmless")


def test_a_damaged_table_of_a_saved_tokenizer_raises_nothing():
    generator = np.random.default_rng(0)
    for _ in range(200):
        units = generator.integers(0, 1 << 32, 64, dtype=np.uint32) & 0x800007FF
        rewrite = CharacterMap(units.nbytes.to_bytes(4, "little") + units.tobytes() + generator.bytes(30))
        rewrite(generator.bytes(40).decode("latin-1"))


def test_merges_without_end(tmp_path):
    (tmp_path / "codes").write_text("a b\n" * 1_000_002)
    ids = {"<s>": 0, "</s>": 1, "<unk>": 2}
    line = error_of(subword_nmt.backend, tmp_path / "codes", ids, special_tokens=list(ids), end="</s>", unknown="<unk>")
    assert "more than 1,000,000 lines" in line


def test_merges_with_nothing():
    text = SubwordText.__new__(SubwordText)
    vocabulary = {"": 0, "ab": 9, "a": 1, "\U000f0000</w>": 10}
    backend = Tokenizer(models.BPE(vocabulary, [("", "ab")], unk_token="a"))
    text.__init__(backend)
    assert text._cut("ab") == [text._unknown]


@pytest.mark.parametrize("known", [5, [5], ["5", 5], [0, 5], [5, 5, 5], {"a": 1}], ids=str)
def test_known_tokens_of_a_saved_tokenizer(known):
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, "a"))
    with pytest.raises(ValueError, match="known_tokens"):
        VaswaniTokenizer(tokenizer_object=backend, eos_token="</s>", unk_token="a", known_tokens=known)


def test_known_tokens_need_an_unknown_token_that_is_known():
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, "a"))
    for unknown in (None, "<unk>"):
        with pytest.raises(ValueError, match="unk_token"):
            VaswaniTokenizer(tokenizer_object=backend, eos_token="</s>", unk_token=unknown, known_tokens=[2, 2])
