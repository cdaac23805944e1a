"""Folders of transformers with pickled weights: vaswani import."""

import pickle
from pathlib import Path

import pytest
import torch
from canaries import Canary
from import_differences import marianmt
from model_folders import pickle_weights
from safetensors.torch import load_file

from vaswani_transformer.cli.main import main
from vaswani_transformer.importing.importing import import_model

FC1 = "model.encoder.layers.0.fc1.weight"


@pytest.fixture
def folder(tmp_path):
    """A folder of `MarianMTModel` with safetensors, as `save_pretrained` leaves it."""
    return marianmt(tmp_path / "model", torch.float32).source


def one(change, name=FC1):
    """A change of one weight."""
    return lambda weights: {**weights, name: change(weights[name])}


def fails_in_one_line(folder: Path, capsys) -> str:
    """The command's one line on a folder that it must leave as it was."""
    before, output = {*folder.iterdir()}, folder.parent / "output"
    assert main(["import", str(folder), "--output", str(output)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[1].startswith("error: ") and {*folder.iterdir()} == before and not output.exists()
    return lines[1]


def half_first(weights):
    """The first weight in half precision, then one in each other dtype."""
    dtypes = [torch.float16, torch.float32, torch.float64, torch.bfloat16]
    return {name: weights[name].to(dtypes[index % 4]) for index, name in enumerate(weights)}


@pytest.mark.parametrize(
    "change",
    [
        half_first,
        lambda weights: {name: tensor.double() for name, tensor in weights.items()},
        one(torch.nn.Parameter),
        one(lambda tensor: tensor.t().contiguous().t()),
        one(lambda tensor: tensor[:1].expand_as(tensor)),
        one(torch._neg_view),  # as imag() of a conjugate is; safetensors would write it without its sign
    ],
    ids=["mixed", "double", "a parameter", "transposed", "expanded", "a negative view"],
)
def test_every_tensor_is_written_as_it_is(folder, change, tmp_path):
    weights = pickle_weights(folder, change)
    import_model(folder, tmp_path / "output")
    written = load_file(tmp_path / "output" / "model.safetensors")
    for name in weights.keys() - {"final_logits_bias"}:
        assert written[name].dtype == weights[name].dtype
        assert torch.equal(written[name], weights[name])


def test_importing_runs_no_code(folder, tmp_path, capsys):
    pickle_weights(folder, lambda _: {"lm_head.weight": Canary(str(tmp_path / "ran"))})
    assert "could run code" in fails_in_one_line(folder, capsys)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(str(tmp_path / "ran"))))
    assert "could run code" in fails_in_one_line(folder, capsys)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")  # torch calls nested tensors a prototype
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: {**weights, "extra.weight": torch.ones(1), "extra\nbias": torch.ones(1)},
            'Unexpected key(s) in state_dict: "extra.weight", "extra bias"',
        ),
        (
            lambda weights: {name: tensor for name, tensor in weights.items() if ".0.fc1" not in name},
            ", ".join(f'"model.{s}.layers.0.fc1.{n}"' for s in ("encoder", "decoder") for n in ("weight", "bias")),
        ),
        (one(lambda tensor: tensor[:-1]), f"size mismatch for {FC1}"),
        (one(lambda tensor: tensor / 0), f"{FC1} of the original has numbers that are infinite or NaN"),
        (lambda weights: {"epoch": 3, "weights": weights}, "no table of weights"),
        (lambda weights: {}, "no table of weights"),
        (one(lambda tensor: torch.complex(tensor, tensor)), ""),
        (one(torch.Tensor.long), ""),
        (one(torch.Tensor.to_sparse), ""),
        (one(lambda tensor: torch.nested.nested_tensor(list(tensor))), ""),
        (one(lambda tensor: tensor.to("meta")), ""),
    ],
)
def test_what_cannot_be_imported_is_one_line(folder, change, message, capsys):
    pickle_weights(folder, change)
    assert message in fails_in_one_line(folder, capsys)
