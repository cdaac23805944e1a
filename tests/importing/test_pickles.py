"""Folders of this package with pickled weights: vaswani import."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from canaries import Canary
from conftest import tiny_model
from model_folders import pickle_weights
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from vaswani_transformer.cli.main import main
from vaswani_transformer.importing.importing import import_model

FC1 = "model.encoder.layers.0.fc1.weight"
INDEX = "pytorch_model.bin.index.json"


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def folder(model, tmp_path):
    """A model folder with safetensors, as `save_pretrained` leaves it."""
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def one(change, name=FC1):
    """A change of one weight."""
    return lambda weights: {**weights, name: change(weights[name])}


def every(change):
    return lambda weights: {name: change(tensor) for name, tensor in weights.items()}


def listed(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fails_in_one_line(folder: Path, capsys) -> str:
    """The command's one line on a folder that it must leave as it was."""
    before, output = listed(folder), folder.parent / "output"
    assert main(["import", str(folder), "--output", str(output)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[1].startswith("error: ") and listed(folder) == before and not output.exists()
    return lines[1]


@pytest.fixture
def converted(folder, tmp_path):
    """A call that imports the folder, and gives the weights that were written."""

    def run():
        import_model(folder, tmp_path / "output", overwrite=True)
        return load_file(tmp_path / "output" / "model.safetensors")

    return run


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("every_name", [True, False])
def test_imported_weights_are_the_same(tmp_path, tied, every_name):
    folder, output = tmp_path / "pickled", tmp_path / "output"
    model = tiny_model(seed=3, tie_word_embeddings=tied)
    model.generation_config.num_beams = 3
    model.save_pretrained(folder)
    expected = load_file(folder / "model.safetensors")
    pickle_weights(folder, lambda weights: model.state_dict() if every_name else weights)
    before = listed(folder)
    assert import_model(folder, output)[:2] == (output, "a folder of this package")  # pickled or not
    written = load_file(output / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    with safe_open(output / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it older versions of transformers load nothing
    loaded = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert loaded.num_parameters() == model.num_parameters() and loaded.generation_config.num_beams == 3
    assert listed(folder) == before


def test_what_is_known_of_a_model_is_kept(folder, converted, tmp_path):
    pickle_weights(folder)
    known = {"toolkit": "Marian", "source": "a/b", "license": "cc-by-4.0", "languages": ["fr", "de"], "notes": ["so"]}
    (folder / "import.json").write_text(json.dumps(known))
    converted()
    assert json.loads((tmp_path / "output" / "import.json").read_text()) == known


def half_first(weights):
    """The first weight in half precision, then one in each other dtype."""
    dtypes = [torch.float16, torch.float32, torch.float64, torch.bfloat16]
    return {name: weights[name].to(dtypes[index % 4]) for index, name in enumerate(weights)}


@pytest.mark.parametrize(
    "change",
    [
        half_first,
        every(torch.Tensor.double),
        one(torch.nn.Parameter),
        one(lambda tensor: tensor.t().contiguous().t()),
        one(lambda tensor: tensor[:1].expand_as(tensor)),
        one(torch._neg_view),  # as imag() of a conjugate is; safetensors would write it without its sign
    ],
    ids=["mixed", "double", "a parameter", "transposed", "expanded", "a negative view"],
)
def test_every_tensor_is_written_as_it_is(folder, change, converted):
    weights = pickle_weights(folder, change)
    written = converted()
    assert written.keys() == weights.keys()
    for name, tensor in weights.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor)


@pytest.fixture
def sharded(folder):
    """Two pickles and their index; the weights are in `weights`."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"part-1.bin": names[:5], "part-2.bin": names[5:]}
    for part, keys in parts.items():
        torch.save({key: weights[key] for key in keys}, folder / part)
    index = {"weight_map": {key: part for part, keys in parts.items() for key in keys}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_sharded_pickles_are_imported(sharded, model, tmp_path):
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForSeq2SeqLM.from_pretrained(sharded)
    assert main(["import", str(sharded), "--output", str(tmp_path / "output")]) == 0
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "output").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["../secret.bin", "inner/secret.bin", "two\nlines", 3])
def test_an_index_that_leads_out_of_the_folder(sharded, capsys, name):
    (sharded / "inner").mkdir()
    for path in (sharded.parent / "secret.bin", sharded / "inner" / "secret.bin"):
        path.write_bytes((sharded / "part-1.bin").read_bytes())
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    fails_in_one_line(sharded, capsys)


def test_importing_runs_no_code(folder, tmp_path, capsys):
    pickle_weights(folder, lambda _: {"lm_head.weight": Canary(str(tmp_path / "ran"))})
    assert "could run code" in fails_in_one_line(folder, capsys)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(str(tmp_path / "ran"))))
    assert "could run code" in fails_in_one_line(folder, capsys)
    assert not (tmp_path / "ran").exists()


WRONG_KINDS = [
    lambda tensor: torch.complex(tensor, tensor),
    torch.Tensor.long,
    torch.Tensor.to_sparse,
    lambda tensor: torch.nested.nested_tensor(list(tensor)),
    lambda tensor: tensor.to("meta"),
]


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
        (
            lambda weights: {**weights, "lm_head.weight": weights["model.shared.weight"] + 1},
            "lm_head.weight differs from model.shared.weight, to which",
        ),
        *((one(change), "") for change in WRONG_KINDS),
    ],
)
def test_what_cannot_be_imported_is_one_line(folder, change, message, capsys):
    pickle_weights(folder, change)
    assert message in fails_in_one_line(folder, capsys)
