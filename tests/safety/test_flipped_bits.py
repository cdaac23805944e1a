"""One flipped bit in a checkpoint or in prepared data is noticed by the training that would read it, at its start."""

import dataclasses
import shutil

import pytest
import yaml
from conftest import tiny_recipe
from training_runs import is_complete

from vaswani_transformer import train
from vaswani_transformer.cli.main import main
from vaswani_transformer.data.prepare import prepare
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.errors import UserError
from vaswani_transformer.training.averaging import average_models, last_checkpoints
from vaswani_transformer.training.checkpoints import (
    check_contents,
    checkpoint_to_resume,
    read_checkpoints,
)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.fixture(scope="module")
def recipe(cache, tmp_path_factory):
    place = tmp_path_factory.mktemp("recipe")
    write_corpus(generate_corpus(60, 20, 20), place)
    return tiny_recipe(place, max_steps=6, evaluate_every=2, average_checkpoints=2, keep_weights="average")


@pytest.fixture(scope="module")
def original(recipe, tmp_path_factory):
    """A run that ended after its last checkpoint and before it chose its weights."""
    folder = tmp_path_factory.mktemp("original") / "run"
    train(dataclasses.replace(recipe, output=str(folder)), progress=False)
    (folder / "model.safetensors").rename(folder.parent / "undisturbed.safetensors")
    return folder


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


def resume(recipe, run, *options) -> int:
    path = run.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(dataclasses.asdict(dataclasses.replace(recipe, output=str(run)))))
    return main(["train", str(path), "--quiet", *options])


FILES = ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_bit_of_a_checkpoint(run, name, caplog):
    last = run / "checkpoints" / "checkpoint-6"
    flip_a_bit(last / name)
    assert is_complete(last)  # its size is right
    with pytest.raises(UserError, match=f"checkpoint-6/{name} has changed since it was written"):
        check_contents(last)
    assert checkpoint_to_resume(run / "checkpoints").name == "checkpoint-4"
    assert f"not resumed from checkpoint-6: {last / name}" in caplog.text


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
def test_a_run_is_resumed_from_the_checkpoint_before_and_ends_as_undisturbed(recipe, original, run, name, caplog):
    flip_a_bit(run / "checkpoints" / "checkpoint-6" / name)
    assert resume(recipe, run) == 0
    assert "resuming from step 4" in caplog.text and f"{name} has changed" in caplog.text
    undisturbed = original.parent / "undisturbed.safetensors"
    assert (run / "model.safetensors").read_bytes() == undisturbed.read_bytes()


def test_without_a_whole_checkpoint_nothing_is_removed(recipe, run, capsys):
    checkpoints = run / "checkpoints"
    for checkpoint in read_checkpoints(checkpoints):
        flip_a_bit(checkpoint.path / "optimizer.pt")
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    assert resume(recipe, run) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "no checkpoint can be resumed from" in line and "checkpoint-6/optimizer.pt has changed" in line
    assert all(path.read_bytes() == content for path, content in before.items())
    assert resume(recipe, run, "--overwrite") == 0


def test_weights_that_changed_are_neither_selected_nor_averaged(recipe, run, caplog, tmp_path):
    flip_a_bit(run / "checkpoints" / "checkpoint-4" / "model.safetensors")
    with pytest.raises(UserError, match=r"checkpoint-4/model\.safetensors has changed"):
        average_models(last_checkpoints(run, 2), tmp_path / "average")
    assert not (tmp_path / "average").exists()
    assert resume(recipe, run) == 0
    assert "not considered: " in caplog.text and "checkpoint-4/model.safetensors has changed" in caplog.text
    flip_a_bit(run / "checkpoints" / "checkpoint-6" / "optimizer.pt")  # which no average has
    average_models([run / "checkpoints" / f"checkpoint-{step}" for step in (2, 6)], tmp_path / "average")


@pytest.fixture(scope="module")
def prepared(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "p"
    prepare(recipe, folder, workers=1, progress=False)
    return folder


@pytest.mark.parametrize("name", ["train-00000.arrow", "validation.lengths.npy"])
def test_a_bit_of_prepared_data(recipe, prepared, tmp_path, name, capsys):
    copy = shutil.copytree(prepared, tmp_path / "p")
    flip_a_bit(copy / name)
    run = tmp_path / "run"
    assert resume(recipe, run, "--prepared", str(copy)) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert str(copy / name) in line
    assert not (run / "recipe.yaml").exists() and not (run / "model.safetensors").exists()
