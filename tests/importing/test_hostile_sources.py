"""Sources of `vaswani import` that were made to take memory or time without end, or to be read as something else."""

import argparse
import math
import zipfile

import import_differences
import numpy as np
import pytest
import torch
from conftest import error_of
from safetensors.torch import load_file, save_file
from transformers.utils.sentencepiece_model_pb2_new import ModelProto

from vaswani_transformer import import_model
from vaswani_transformer.importing import fairseq, sentencepiece
from vaswani_transformer.importing.source import read_pickle, tensors_of
from vaswani_transformer.model.sentencepiece_vaswani import CharacterMap


def test_a_pickle_whose_tensors_have_more_numbers_than_it_has(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(1).expand(10**6, 10**6)}, path)
    assert "holds no table of weights" in error_of(tensors_of, read_pickle(path), path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", bytes(10**6))
    assert "is compressed" in error_of(read_pickle, path)


def test_options_whose_text_has_no_end(tmp_path):
    bomb = ["x"]
    for _ in range(60):
        bomb = [bomb, bomb]
    args = argparse.Namespace(arch="transformer", encoder_normalize_before=bomb)
    torch.save({"args": args, "model": {"encoder.version": torch.ones(1)}}, tmp_path / "model.pt")
    assert "encoder_normalize_before=True" in error_of(fairseq.read, tmp_path / "model.pt")


def test_a_missing_embedding_is_not_replaced_by_another(tmp_path):
    changes = {"decoder_vocab_size": 61, "share_encoder_decoder_embeddings": False}
    source = import_differences.marianmt(tmp_path / "source", torch.float32, **changes).source
    weights = load_file(source / "model.safetensors")
    del weights["model.encoder.embed_tokens.weight"]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    assert "there is no entry 'model.encoder.embed_tokens.weight'" in error_of(import_model, source, tmp_path / "out")


def model_with(piece: str = "▁a", score: float = -1) -> bytes:
    model = ModelProto()
    for name in ("<unk>", "</s>", piece):
        model.pieces.add(piece=name, score=score)
    return model.SerializeToString()


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 5_000_000, model_with("a" * 1_000_000), model_with(score=math.nan), b"none"],
    ids=["a long number", "a long piece", "a score that is none", "another kind"],
)
def test_sentencepiece_models(tmp_path, content):
    (tmp_path / "a.spm").write_bytes(content)
    assert "a.spm" in error_of(sentencepiece.backend, tmp_path / "a.spm")


def test_a_damaged_table_of_a_saved_tokenizer_raises_nothing():
    generator = np.random.default_rng(0)
    for _ in range(200):
        units = generator.integers(0, 1 << 32, 64, dtype=np.uint32) & 0x800007FF
        rewrite = CharacterMap(units.nbytes.to_bytes(4, "little") + units.tobytes() + generator.bytes(30))
        rewrite(generator.bytes(40).decode("latin-1"))
