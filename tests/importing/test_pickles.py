"""Pickled weights to safetensors: the same bits, no code run, and one line for whatever does not convert."""

import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from vaswani_transformer import UserError
from vaswani_transformer.cli.main import main
from vaswani_transformer.importing import pickles as conversion
from vaswani_transformer.importing.pickles import convert_pickled_weights

FC1 = "model.encoder.layers.0.fc1.weight"
INDEX = "pytorch_model.bin.index.json"


class Canary:
    """Unpickling it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def folder(model, tmp_path):
    """A model folder with safetensors, as `save_pretrained` leaves it."""
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def pickle_weights(folder: Path, change=lambda weights: weights) -> dict[str, torch.Tensor]:
    """Replace the safetensors of a folder by `pytorch_model.bin`; returns what is in it."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights = change(dict(weights))
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


def one(change, name=FC1):
    """A change of one weight."""
    return lambda weights: {**weights, name: change(weights[name])}


def every(change):
    return lambda weights: {name: change(tensor) for name, tensor in weights.items()}


def listed(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fails_in_one_line(folder: Path, capsys) -> str:
    """The command's one line on a folder that it must leave as it was."""
    before = listed(folder)
    assert main(["convert", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ") and listed(folder) == before
    return error


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("every_name", [True, False])
def test_converted_weights_are_the_same(tmp_path, tied, every_name):
    model = tiny_model(seed=3, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    pickle_weights(tmp_path, lambda weights: model.state_dict() if every_name else weights)
    before = listed(tmp_path)
    assert convert_pickled_weights(tmp_path) == tmp_path / "model.safetensors"
    converted = load_file(tmp_path / "model.safetensors")
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], expected[name]) for name in expected)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it older versions of transformers load nothing
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).num_parameters() == model.num_parameters()
    assert listed(tmp_path) == before | {"model.safetensors"}


@pytest.mark.parametrize("name", ["lm_head.weight", "model.decoder.embed_tokens.weight"])
def test_the_tied_matrix_may_stand_under_any_of_its_names(folder, model, name):
    pickle_weights(folder, lambda weights: {**weights, name: weights.pop("model.shared.weight")})
    convert_pickled_weights(folder)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def half_first(weights):
    """The first weight in half precision, then one in each other dtype."""
    dtypes = [torch.float16, torch.float32, torch.float64, torch.bfloat16]
    return {name: weights[name].to(dtypes[index % 4]) for index, name in enumerate(weights)}


@pytest.mark.parametrize(
    "change",
    [
        half_first,
        every(torch.Tensor.double),
        one(lambda tensor: tensor.index_fill(0, torch.tensor([1]), torch.nan)),
        one(torch.nn.Parameter),
        one(lambda tensor: tensor.t().contiguous().t()),
        one(lambda tensor: tensor[:1].expand_as(tensor)),
        one(torch._neg_view),  # as imag() of a conjugate is; safetensors would write it without its sign
    ],
    ids=["mixed", "double", "NaN", "a parameter", "transposed", "expanded", "a negative view"],
)
def test_every_tensor_is_written_as_it_is(folder, change):
    weights = pickle_weights(folder, change)
    convert_pickled_weights(folder)
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, tensor in weights.items():
        assert converted[name].dtype == tensor.dtype
        assert torch.equal(converted[name].nan_to_num(7.0), tensor.nan_to_num(7.0))


def test_weights_that_share_memory(folder):
    def shared(weights):
        decoder = FC1.replace("encoder", "decoder")
        both = torch.cat([weights[FC1], weights[decoder]])
        half = len(weights[FC1])
        queries = "model.encoder.layers.0.self_attn.q_proj.weight"
        same = {queries: weights[queries], queries.replace("q_proj", "k_proj"): weights[queries]}
        return {**weights, FC1: both[:half], decoder: both[half:], **same}

    weights = pickle_weights(folder, shared)
    convert_pickled_weights(folder)
    converted = load_file(folder / "model.safetensors")
    assert all(torch.equal(converted[name], weights[name]) for name in weights)


def test_nan_in_a_tied_matrix_is_the_same_as_itself(folder, model):
    matrix = model.state_dict()["model.shared.weight"].clone()
    matrix[2] = torch.nan
    pickle_weights(folder, lambda weights: {**weights, "model.shared.weight": matrix, "lm_head.weight": matrix.clone()})
    convert_pickled_weights(folder)
    assert load_file(folder / "model.safetensors")["model.shared.weight"][2].isnan().all()


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


def test_sharded_pickles_are_converted(sharded, model):
    with pytest.raises(ValueError, match="pickle"):
        AutoModelForSeq2SeqLM.from_pretrained(sharded)
    assert main(["convert", str(sharded)]) == 0
    loaded = AutoModelForSeq2SeqLM.from_pretrained(sharded).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_a_weight_in_two_shards_is_refused(sharded, capsys):
    part = torch.load(sharded / "part-1.bin", weights_only=True)
    other = torch.load(sharded / "part-2.bin", weights_only=True)
    torch.save({**other, min(part): part[min(part)] + 1}, sharded / "part-2.bin")
    assert f"'{min(part)}' is in" in fails_in_one_line(sharded, capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "is damaged"),
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"weight_map": ["part-1.bin"]}', "not an index"),
        ('{"weight_map": {"a": 3, "b": "part-1.bin"}}', "not an index"),
        ('{"weight_map": {"a": 3}}', "names 3, and that is no file"),
        ('{"weight_map": {"a": ".."}}', "names '..', and that is no file"),
        ('{"weight_map": {"a": "../part.bin"}}', "names '../part.bin', and that is no file"),
        ('{"weight_map": {"a": "inner/part.bin"}}', "names 'inner/part.bin', and that is no file"),
        ('{"weight_map": {"a": "two\\nlines\\u0000"}}', "and that is no file"),
        (json.dumps({"weight_map": {"a": "x" * 5000}}), "and that is no file"),
        ('{"weight_map": {}}', "are empty"),
    ],
    ids=lambda text: text[:40],
)
def test_a_bad_index(sharded, capsys, text, message):
    (sharded / "inner").mkdir()
    for path in (sharded.parent / "part.bin", sharded / "inner" / "part.bin"):
        path.write_bytes((sharded / "part-1.bin").read_bytes())
    (sharded / INDEX).write_text(text)
    assert message in fails_in_one_line(sharded, capsys)


def test_converting_runs_no_code(folder, tmp_path, capsys):
    pickle_weights(folder, lambda _: {"lm_head.weight": Canary(str(tmp_path / "ran"))})
    assert "could run code" in fails_in_one_line(folder, capsys)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(str(tmp_path / "ran"))))
    assert "could run code" in fails_in_one_line(folder, capsys)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")  # torch calls nested tensors a prototype
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {**weights, "extra.weight": torch.ones(1)}, "do not fit its config.json, such as 'extra"),
        (lambda weights: {**weights, "extra\nweight": torch.ones(1)}, r"such as 'extra\nweight'"),
        (lambda weights: dict(list(weights.items())[1:]), "do not fit its config.json"),
        (one(lambda tensor: tensor[:-1]), f"{FC1} has the shape (39, 24) and config.json makes it (40, 24)"),
        (lambda weights: list(weights.values()), "not a table of weights"),
        (lambda weights: {**weights, 5: torch.ones(1)}, "not a table of weights"),
        (lambda weights: {"epoch": 3, "weights": weights}, "not a table of weights"),
        (lambda weights: {}, "are empty"),
        (
            lambda weights: {**weights, "lm_head.weight": weights["model.shared.weight"] + 1},
            "lm_head.weight in {folder} differs from the matrix that config.json ties it to",
        ),
        (
            lambda weights: {**weights, "lm_head.weight": weights["model.shared.weight"].double()},
            "lm_head.weight in {folder} differs from the matrix that config.json ties it to",
        ),
        (
            one(lambda tensor: torch.complex(tensor, tensor)),
            f"{FC1} in {{folder}} is a tensor of torch.complex64 (torch.strided, on cpu): weights must",
        ),
        (one(torch.Tensor.long), f"{FC1} in {{folder}} is a tensor of torch.int64"),
        (one(torch.Tensor.to_sparse), "(torch.sparse_coo, on cpu)"),
        (one(lambda tensor: torch.nested.nested_tensor(list(tensor))), "(nested, on cpu)"),
        (one(lambda tensor: tensor.to("meta")), "(torch.strided, on meta)"),
    ],
    ids=[
        *("one too many", "a name of two lines", "one missing", "other shape", "a list", "a number as name"),
        *("a checkpoint", "empty", "untied", "untied by dtype", "complex", "whole numbers", "sparse", "nested", "meta"),
    ],
)
def test_what_does_not_convert_is_said_in_one_line(folder, change, message, capsys):
    pickle_weights(folder, change)
    assert message.replace("{folder}", str(folder)) in fails_in_one_line(folder, capsys)


@pytest.mark.parametrize("content", [b"hello world", b"", b"\x80", b"PK\x03\x04", b"\x80\x02}q\x00."[:-1]])
def test_a_file_that_is_no_pickle(folder, content, capsys):
    pickle_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(content)
    assert "is damaged or holds more than tensors" in fails_in_one_line(folder, capsys)


@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_convert_or_are_one_line(folder, capsys):
    """Damage at the start and the end, where the structure of the file is, of both of torch's formats."""
    weights = pickle_weights(folder)
    path, dice = folder / "pytorch_model.bin", random.Random(0)
    failed = 0
    for zipped in (True, False):
        torch.save(weights, path, _use_new_zipfile_serialization=zipped)
        whole = path.read_bytes()
        for _ in range(20):
            damaged = bytearray(whole)
            for _ in range(3):
                damaged[dice.randrange(4000) * dice.choice([1, -1])] = dice.randrange(256)
            path.write_bytes(damaged)
            if main(["convert", str(folder)]):
                error = capsys.readouterr().err
                assert error.count("\n") == 1 and error.startswith("error: ")
                failed += 1
            (folder / "model.safetensors").unlink(missing_ok=True)
    assert failed > 12


def test_nothing_to_convert(folder, tmp_path):
    with pytest.raises(UserError, match="already holds safetensors"):
        convert_pickled_weights(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="nothing to convert"):
        convert_pickled_weights(folder)
    with pytest.raises(UserError, match="no model folder"):
        convert_pickled_weights(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": "much"},
        {"model_type": ["vaswani"]},
        {"model_type": "unheard_of", "auto_map": {"AutoConfig": "planted.Config"}},
        5,
    ],
    ids=str,
)
def test_a_bad_configuration(folder, capsys, monkeypatch, tmp_path, changes):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the command asked a question"))
    (folder / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    pickle_weights(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes} if isinstance(changes, dict) else changes))
    expected = "models of type 'vaswani'" if "model_type" in str(changes) else "config.json"
    assert expected in fails_in_one_line(folder, capsys)
    assert not (tmp_path / "ran").exists()


def test_another_architecture(folder, capsys):
    pickle_weights(folder)
    (folder / "config.json").write_text('{"model_type": "bart"}')
    assert "holds a 'bart' model: this command takes models of type 'vaswani'" in fails_in_one_line(folder, capsys)


def test_a_link_in_the_folder_is_not_followed(folder, tmp_path):
    pickle_weights(folder)
    (tmp_path / "elsewhere").mkdir()
    (folder / ".converted").symlink_to(tmp_path / "elsewhere")
    before = listed(folder)
    convert_pickled_weights(folder)
    assert not listed(tmp_path / "elsewhere")
    assert listed(folder) == before | {"model.safetensors"}


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("full"), KeyboardInterrupt()]
)
def test_what_cannot_be_written_leaves_nothing(folder, monkeypatch, error):
    def write_half(weights, path, metadata):
        path.write_bytes(b"half")
        raise error

    pickle_weights(folder)
    before = listed(folder)
    monkeypatch.setattr(conversion, "save_file", write_half)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError):
        convert_pickled_weights(folder)
    assert listed(folder) == before
