"""The folder of an exported model given where a model is needed: what it is, and what can be done with it."""

import shutil

import exporting_models
import pytest
from conftest import error_of
from model_folders import change

from vaswani_transformer import export_model, load_ensemble, load_model, pipeline, publish
from vaswani_transformer.export.engine import load_exported
from vaswani_transformer.importing.importing import import_model

model = exporting_models.small_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    """A model exported to CTranslate2."""
    pytest.importorskip("ctranslate2")
    return export_model(model, tmp_path_factory.mktemp("exported") / "x").folder


@pytest.fixture(scope="module", params=["ctranslate2", "onnx"])
def exported(request, tmp_path_factory, whole):
    """Format and folder; what is in the graphs of an ONNX export plays no part here, and takes long to make."""
    folder = shutil.copytree(whole, tmp_path_factory.mktemp(request.param) / "x")
    if request.param == "onnx":
        change(folder, "export.json", format="onnx")
        for name in ("model.bin", "config.json", "shared_vocabulary.json"):
            (folder / name).unlink()
        (folder / "onnx").mkdir()
        (folder / "onnx" / "encoder_model.onnx").touch()
    return request.param, folder


CALLS = {
    "load_model": lambda model, exported, new: load_model(exported),
    "load_ensemble": lambda model, exported, new: load_ensemble([model, exported]),
    "export_model": lambda model, exported, new: export_model(exported, new),
    "publish": lambda model, exported, new: publish(exported, "owner/name", dry_run=True),
    "pipeline": lambda model, exported, new: pipeline("translation", model=exported),
    "pipeline without a task": lambda model, exported, new: pipeline(model=str(exported)),
    "import_model": lambda model, exported, new: import_model(exported, new),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_says_what_it_is(tmp_path, model, exported, call):
    _, folder = exported
    line = error_of(call, model, folder, tmp_path / "new")
    assert line.startswith(f"{folder} holds an exported model: give the")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("export.json", {"format": "onnx"}),
        ("export.json", {"positions": "many"}),
        ("export.json", {"vocab_size": 7}),
        ("config.json", {"unk_token": []}),
        ("generation_config.json", {"num_beams": 10**9}),
        ("generation_config.json", {"no_repeat_ngram_size": 3}),
        ("generation_config.json", {"forced_eos_token_id": 7}),
        ("generation_config.json", {"suppress_tokens": [10**6]}),
    ],
    ids=str,
)
def test_an_edited_one_is_refused_in_one_line(whole, tmp_path, name, values):
    folder = shutil.copytree(whole, tmp_path / "x")
    change(folder, name, **values)
    assert str(folder) in error_of(load_exported, folder, "cpu")
