"""Damaged exports and results of experiments: what is wrong is named before anything is computed."""

import json

import pytest
from conftest import error_of
from exporting_models import save_model, small_tokenizer

from vaswani_transformer.experiments.base import Setup, read_results, run_cell, write_report
from vaswani_transformer.experiments.table4 import Table4
from vaswani_transformer.export.engine import load_exported
from vaswani_transformer.export.exporting import export_model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model exported to CTranslate2."""
    pytest.importorskip("ctranslate2")
    folder = tmp_path_factory.mktemp("exported")
    return export_model(save_model(folder / "model", small_tokenizer()), folder / "exported").folder


@pytest.fixture
def edit(exported):
    """Changes a JSON file of the export; it is as before after the test."""
    before = {}

    def change(name, **values):
        path = exported / name
        before[path] = path.read_text()
        path.write_text(json.dumps(json.loads(before[path]) | values))

    yield change
    for path, text in before.items():
        path.write_text(text)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("export.json", {"format": "onnx"}),
        ("export.json", {"positions": "many"}),
        ("export.json", {"vocab_size": 7}),
        ("config.json", {"unk_token": []}),
        ("generation_config.json", {"num_beams": 10**9}),
        ("generation_config.json", {"suppress_tokens": [10**6]}),
    ],
    ids=str,
)
def test_an_edited_export_is_refused_in_one_line(exported, edit, name, values):
    edit(name, **values)
    assert str(exported) in error_of(load_exported, exported, "cpu")


class Baselines(Table4):
    """Cells that are done at once."""

    def measure(self, setup, cell, folder):
        """Figures as of `score_trees`."""
        return {"bracket_f1": 50.0}


@pytest.mark.parametrize("figures", [{"bracket_f1": []}, {"bracket_f1": "high"}, {"bracket_f1": {}}], ids=str)
def test_results_that_make_no_table_are_one_line(tmp_path, figures):
    experiment, setup = Baselines(), Setup(output=tmp_path)
    cell = experiment.cells(setup)[0]
    run_cell(experiment, setup, cell)
    write_report(experiment, setup, [cell])
    path = next(tmp_path.rglob("result.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"figures": figures}))
    message = error_of(write_report, experiment, setup, [cell])
    assert message.startswith(str(path.parent.parent)) and "\n" not in message
    path.unlink()
    path.mkdir()
    assert "result.json: " in error_of(read_results, experiment, setup, [cell])
