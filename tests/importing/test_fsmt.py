"""Folders of FSMTForConditionalGeneration: compared with transformers' own class, which computes in float32 only."""

import shutil
import sys

import pytest
import torch
from import_differences import SEARCHES, compare, fsmt, main
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from vaswani_transformer import import_model

pytest.importorskip("sacremoses", reason="FSMTTokenizer needs it")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder as transformers writes it."""
    return fsmt(tmp_path_factory.mktemp("original") / "source", torch.float32).source


@pytest.fixture
def folder(original, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(original, tmp_path / "source")


@pytest.mark.parametrize(
    ("changes", "searches"),
    [
        ({}, SEARCHES),
        ({"tgt_vocab_size": 61, "activation_function": "gelu", "d_model": 20}, {}),
        ({"scale_embedding": False, "decoder_layers": 1}, {}),
    ],
    ids=str,
)
def test_logits_and_searches_are_those_of_the_original(changes, searches, tmp_path):
    result = compare(fsmt(tmp_path / "source", torch.float32, **changes), tmp_path / "out", 8, searches)
    assert result["difference"] < 1e-5 < 1 < result["largest"]
    assert {name: result[name] for name in searches} == dict.fromkeys(searches, 8)


def test_the_configuration(folder, tmp_path):
    facts = import_model(folder, tmp_path / "out").facts
    assert (facts.toolkit, facts.languages) == ("fairseq", ("de", "en"))
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    config = model.config
    assert (config.position_encoding, config.position_offset) == ("sinusoidal-tensor2tensor", 2)
    assert (config.vocab_size, config.target_vocab_size, config.decoder_start_token_id) == (61, 53, 2)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert model.model.encoder.embed_tokens.weight is not model.model.decoder.embed_tokens.weight


def test_an_older_folder_without_the_projection(folder, tmp_path):
    import_model(folder, tmp_path / "expected")
    weights = load_file(folder / "model.safetensors")
    del weights["model.decoder.output_projection.weight"]
    weights["model.encoder.embed_positions.weight"] = torch.zeros(4, 32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    import_model(folder, tmp_path / "out")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "out"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_table_of_differences(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["import_differences.py", "--only", "fsmt", "--sentences", "3"])
    main()
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.count("|") == row.count("|") and row.endswith("| 3 of 3 | 3 of 3 |")
