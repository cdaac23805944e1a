"""The frame of `vaswani import`: sources, outputs, options, the card; formats have files of their own."""

import json
import os

import pytest
import torch
from conftest import error_of, tiny_model
from hub_server import Fault, Refusal, Repository
from huggingface_hub import ModelCard, constants
from import_differences import marianmt
from model_folders import pickle_weights

from vaswani_transformer import load_model, train_tokenizer
from vaswani_transformer.cli.main import main
from vaswani_transformer.hub.model_card import is_sealed
from vaswani_transformer.importing import importing
from vaswani_transformer.importing.importing import import_model
from vaswani_transformer.importing.source import Facts, Imported

TEXT = ["Two small dogs run in the garden.", "Zwei kleine Hunde rennen im Garten."]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, vocab_size=300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(seed=4, vocab_size=len(tokenizer))


@pytest.fixture
def folder(tmp_path):
    """A source: a folder of `MarianMTModel` with pickled weights."""
    folder = marianmt(tmp_path / "source", torch.float32).source
    pickle_weights(folder)
    return folder


class Toolkit:
    """A format that knows files called model.toy."""

    NAME = "a toy"

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.generation = {"num_beams": 3}
        self.facts = Facts("Toykit", license="cc-by-4.0", languages=("fr", "en"), notes=("A note [of](x) it.",))

    def matches(self, source):
        return source.name == "model.toy"

    def read(self, source, positions=None):
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return Imported(self.model.config, weights, self.tokenizer, self.facts, self.generation)


@pytest.fixture
def toy(model, tokenizer, tmp_path, monkeypatch):
    """The format, as the only one, and a source of it."""
    toolkit = Toolkit(model, tokenizer)
    toolkit.source = tmp_path / "model.toy"
    toolkit.source.touch()
    monkeypatch.setattr(importing, "FORMATS", (toolkit,))
    return toolkit


def test_model_tokenizer_settings_and_card_are_written_and_pushed(toy, tmp_path, model, tokenizer, capsys):
    assert import_model(toy.source, tmp_path / "out")[:3] == (tmp_path / "out", "a toy", model.num_parameters())
    loaded, its_tokenizer = load_model(tmp_path / "out", "cpu")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert its_tokenizer(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert loaded.generation_config.num_beams == 3
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "cc-by-4.0" and card.data.language == ["fr", "en"] and is_sealed(card.content)
    assert "The weights were trained by Toykit and imported from model.toy by `vaswani import`." in card.text
    assert r"A note \[of\](x) it." in card.text and "It was trained to translate from fr to en." in card.text
    assert main(["push", str(tmp_path / "out"), "owner/name", "--dry-run"]) == 0
    pushed = capsys.readouterr().out
    for part in ("license: cc-by-4.0", "- fr\n- en\n", "trained by Toykit and imported from model.toy"):
        assert part in pushed


def test_search_settings_without_counterpart_are_named(toy, tmp_path):
    toy.generation = {"num_beams": 2, "word-penalty": 3.0, "allow-special": True}
    result = import_model(toy.source, tmp_path / "out")
    assert "have no counterpart here: allow-special, word-penalty." in result.facts.notes[-1]
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["num_beams"] == 2 and "word-penalty" not in settings
    toy.generation = {"guidance_scale": 3.0}
    assert "guidance, which this model does not have" in error_of(import_model, toy.source, tmp_path / "other")


def test_an_output_that_is_there(toy, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    assert "is not empty: give another folder (it holds something else)" in error_of(import_model, toy.source, output)
    assert "holds something else" in error_of(import_model, toy.source, output, overwrite=True)
    (output / "notes.txt").unlink()
    import_model(toy.source, output)
    (output / "notes.txt").write_text("mine")
    assert "is not empty" in error_of(import_model, toy.source, output)
    import_model(toy.source, output, overwrite=True)
    assert (output / "notes.txt").read_text() == "mine"


def test_options_that_do_not_apply(toy, tmp_path):
    line = error_of(import_model, toy.source, tmp_path / "out", vocabularies=[toy.source])
    assert line == "--vocabulary does not apply to a toy: leave it out"
    import_model(toy.source, tmp_path / "out", positions="marian")
    line = error_of(import_model, toy.source, tmp_path / "other", bpe_codes=tmp_path / "nowhere")
    assert line == "--bpe-codes does not apply to a toy: leave it out"


def test_nothing_is_there(folder, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # at which a reader would wait for ever
    assert "is not in a format" in error_of(import_model, tmp_path / "pipe", tmp_path / "out")
    (tmp_path / "pipe").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is not a regular file" in error_of(import_model, folder, tmp_path / "out")
    assert "nowhere (which does not exist" in error_of(import_model, tmp_path / "nowhere", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "described"),
    [
        ("config.json", '{"model_type": "m2m_100"}', "(a 'm2m_100' model of transformers) is not in a format"),
        ("config.json", '{"model_type": "fsmt"}', "of FSMT (facebook/wmt19-*) give fairseq's own checkpoint"),
        ("config.json", '{"model_type": ["bert"]}', "(a folder) is not in a format that can be imported. Known"),
        ("model.bin", "", "what was converted for CTranslate2 stays there"),
        ("config.json", "{", "config.json: "),
    ],
    ids=str,
)
def test_sources_that_are_refused(tmp_path, name, content, described):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / name).write_text(content)
    assert described in error_of(import_model, tmp_path / "source", tmp_path / "out")
    torch.save({"model": {}, "opt": {"copy_attn_force": True}}, tmp_path / "step_10.pt")
    assert "(a file) is not in a format" in error_of(import_model, tmp_path / "step_10.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_on_the_hub(hub, folder, tmp_path, monkeypatch):
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = ("tf_model.h5", "code.py", "onnx/config.json", "checkpoint-5/pytorch_model.bin")
    hub.repositories["owner/pickled"] = Repository()
    hub.repositories["owner/pickled"].commit("main", "files", files | dict.fromkeys(others, b"{}"))
    import_model("owner/pickled", tmp_path / "out")
    loaded, _ = load_model(tmp_path / "out", "cpu")
    weights = torch.load(folder / "pytorch_model.bin")
    assert torch.equal(loaded.state_dict()["lm_head.weight"], weights["model.shared.weight"])
    assert "imported from https\\://huggingface.co/owner/pickled" in (tmp_path / "out" / "README.md").read_text()
    # No code, and nothing of other programs.
    fetched = {path.rpartition("/resolve/")[2].partition("/")[2] for _, path, _ in hub.requests if "/resolve/" in path}
    assert fetched == {name for name in files if not name.endswith(".py")}
    # What is here already needs no connection.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    import_model("owner/pickled", tmp_path / "again")
    assert error_of(import_model, "owner/another", tmp_path / "other").startswith("owner/another: ")
    assert not (tmp_path / "other").exists()


def test_names_that_the_hub_does_not_know(hub, tmp_path):
    line = error_of(import_model, "owner/nothing", tmp_path / "out")
    assert line.startswith("owner/nothing: ") and "Not Found" in line
    hub.faults.append(Fault("GET", "/api/models", times=99, answer=Refusal(403, "no").answer))
    assert "owner/nothing: " in error_of(import_model, "owner/nothing", tmp_path / "out")
