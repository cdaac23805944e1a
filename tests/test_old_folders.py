"""Folders that commit b26e237 wrote are read, resumed and run as by it.

`fixtures/written_by_b26e237.tar.xz` holds a generated corpus, a run that a signal stopped at step 8 of 12, log and
weights of the same run undisturbed, a finished model with the log-probabilities of five pairs, prepared pairs, and an
export to CTranslate2.
"""

import json
import tarfile

import pytest
import torch
from conftest import TESTS
from safetensors.torch import load_file

from vaswani_transformer import load_model, score_pairs
from vaswani_transformer.cli.main import main
from vaswani_transformer.training.callbacks import read_training_log


@pytest.fixture
def old(tmp_path, monkeypatch):
    with tarfile.open(TESTS / "fixtures" / "written_by_b26e237.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_scores_as_then(old):
    expected = json.loads((old / "scores.json").read_text(encoding="utf-8"))
    scores, _ = score_pairs(*load_model("model"), expected["sources"], expected["targets"])
    assert scores == pytest.approx(expected["scores"], rel=1e-5)


def test_a_stopped_run_is_resumed(old):
    assert main(["train", "stopped/recipe.yaml", "--output", "stopped", "--quiet"]) == 0
    entries = {entry["step"]: entry for entry in read_training_log("stopped/training_log.jsonl") if "loss" in entry}
    undisturbed = {entry["step"]: entry for entry in read_training_log("undisturbed.jsonl") if "loss" in entry}
    assert sorted(entries) == sorted(undisturbed) == list(range(1, 13))
    for step, entry in entries.items():
        assert entry["loss"] == pytest.approx(undisturbed[step]["loss"], rel=1e-4)
        assert entry["learning_rate"] == pytest.approx(undisturbed[step]["learning_rate"], rel=1e-9)
    weights, expected = (load_file(name) for name in ("stopped/model.safetensors", "undisturbed.safetensors"))
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_prepared_pairs_are_trained_on(old):
    data = ("train_", "validation_s", "validation_t", "validation_d", "prepared", "data_dir")
    lines = (old / "stopped/recipe.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    (old / "prepared.yaml").write_text("".join(line for line in lines if not line.startswith(data)))
    assert main(["train", "prepared.yaml", "--prepared", "prepared", "--output", "again", "--quiet"]) == 0
    losses = [entry["loss"] for entry in read_training_log("again/training_log.jsonl") if "loss" in entry]
    undisturbed = [entry["loss"] for entry in read_training_log("undisturbed.jsonl") if "loss" in entry]
    assert losses[0] == pytest.approx(undisturbed[0], rel=1e-4)


def test_an_exported_model_translates(old, capsys):
    pytest.importorskip("ctranslate2")
    assert main(["translate", "exported", "Should my doctor carry my letter?"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
