"""Weights that are not finite, of another type, or outside their folder are refused, and comparisons see NaN."""

import json
import shutil
import struct

import model_folders
import pytest
import torch
from conftest import error_of, tiny_recipe
from model_folders import in_shards
from safetensors.torch import load_file, save_file
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForSeq2SeqLM

from vaswani_transformer import Ensemble, load_model, score_pairs, score_tokens
from vaswani_transformer.model.checkpoint_vaswani import is_finite
from vaswani_transformer.training.averaging import average_models

saved, folder = model_folders.saved, model_folders.folder
WEIGHT = "model.decoder.layers.1.fc1.weight"
BAD = [float("nan"), float("inf"), -float("inf")]


def change_weights(folder, change, name=WEIGHT):
    weights = load_file(folder / "model.safetensors")
    weights[name] = change(weights[name].clone())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_finite(dtype):
    largest = torch.finfo(dtype).max
    for size in (0, 1, 7, 5000):
        tensor = torch.full((size,), largest, dtype=dtype)  # the sum is infinite and the numbers are not
        assert is_finite(tensor) and is_finite(-tensor)
        for bad in BAD if size else ():
            for place in (0, size // 2, size - 1):
                broken = tensor.clone()
                broken[place] = bad
                assert not is_finite(broken)
    both = torch.zeros(100, dtype=dtype)
    both[3], both[50] = float("inf"), -float("inf")
    assert not is_finite(both)
    assert is_finite(TwoTensor(both, both))  # as quantised weights, which may have no sum


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_no_command_takes_weights_that_are_not_finite(folder, saved, tmp_path, fails, bad):
    change_weights(folder, lambda tensor: tensor.masked_fill(tensor == tensor.max(), bad))
    text, output = tmp_path / "text", tmp_path / "output"
    text.write_text("words\n")
    for command in (
        ["translate", folder, "words"],
        ["translate", saved, "words", "--ensemble", folder],
        ["evaluate", folder, "--source", text, "--reference", text, "--json", output],
        ["score", folder, "--source", text, "--target", text],
        ["attention", folder, "words", "--output", output],
        ["export", folder, "--output", output],
        ["average", folder, saved, "--output", output],
        ["push", folder, "me/model", "--dry-run"],
    ):
        assert WEIGHT in fails(*command), command
        assert not output.exists()
    with pytest.raises(ValueError, match=WEIGHT):
        AutoModelForSeq2SeqLM.from_pretrained(folder)  # as fine-tuning starts


def test_scores_that_are_not_finite_are_refused(saved):
    model, tokenizer = load_model(saved, "cpu")
    with torch.no_grad():
        model.model.decoder.layers[1].fc2.bias.fill_(float("nan"))
    for broken in (model, Ensemble([model])):
        assert "infinite or NaN" in error_of(score_pairs, broken, tokenizer, ["words"], ["words"])
        message = error_of(score_tokens, broken, tokenizer, ["words"], ["words"], numbers=[2003])
        assert message.startswith("line 2003: a log-probability is infinite")


def test_a_model_whose_activations_overflow_is_not_exported(folder, tmp_path):
    pytest.importorskip("ctranslate2")
    from vaswani_transformer import export_model

    for name in ("fc1", "fc2"):
        change_weights(folder, lambda tensor: tensor * 1e30, f"model.decoder.layers.1.{name}.weight")
    assert "differ from the model's by nan" in error_of(export_model, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_average_that_overflows_is_not_written(folder, tmp_path):
    # The sum of two is beyond float64.
    change_weights(folder, lambda tensor: tensor.double().masked_fill(tensor == tensor.max(), 1.7e308))
    other = shutil.copytree(folder, tmp_path / "other")
    assert WEIGHT in error_of(average_models, [folder, other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_training_that_ends_with_broken_weights_writes_no_model(text, tmp_path, monkeypatch):
    from vaswani_transformer.training import run

    select_weights = run.select_weights

    def select_broken(trainer, *others):
        chosen = select_weights(trainer, *others)
        with torch.no_grad():
            trainer.model.model.encoder.layers[0].fc1.weight[0, 0] = float("nan")
        return chosen

    monkeypatch.setattr(run, "select_weights", select_broken)
    recipe = tiny_recipe(text, tmp_path / "run", max_steps=2, evaluate_every=2, average_checkpoints=0)
    assert "model.encoder.layers.0.fc1.weight" in error_of(run.train, recipe, progress=False)
    assert not (tmp_path / "run" / "model.safetensors").exists() and (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_weights_of_other_types_are_refused_by_name(folder, fails, dtype):
    change_weights(folder, lambda tensor: tensor.to(dtype))
    assert WEIGHT in fails("translate", folder, "words")
    with pytest.raises(ValueError, match=WEIGHT):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


@pytest.mark.parametrize("where", ["../other.safetensors", "absolute", "..", 5])
def test_an_index_leads_nowhere_else(folder, fails, where):
    index = in_shards(folder)
    content = json.loads(index.read_text())
    file = next(iter(content["weight_map"].values()))
    other = folder.parent / "other.safetensors"
    shutil.copyfile(folder / file, other)
    where = str(other) if where == "absolute" else where
    for weight, shard_name in content["weight_map"].items():
        content["weight_map"][weight] = where if shard_name == file else shard_name
    index.write_text(json.dumps(content))
    assert "index" in fails("translate", folder, "words")
    with pytest.raises((ValueError, TypeError, OSError)):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


@pytest.mark.parametrize("content", ["truncated", b'{"a": "' + b"x" * 10**8 + b'"}', b'{"a":' * 10**5], ids=range(3))
def test_damaged_weights_and_hostile_headers_are_one_line(folder, fails, content):
    path = folder / "model.safetensors"
    if content == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(12))
    assert "model.safetensors is damaged or not complete" in fails("translate", folder, "words")
