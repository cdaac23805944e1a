"""Runs and prepared data with a flipped bit, or a damaged, planted or odd file: noticed, and nothing is removed."""

import dataclasses
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from canaries import Canary
from conftest import error_of, tiny_recipe
from training_runs import complete_checkpoints

from vaswani_transformer import train
from vaswani_transformer.cli.main import main
from vaswani_transformer.data.prepare import prepare
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.errors import UserError
from vaswani_transformer.recipes.recipe import load_recipe
from vaswani_transformer.training.averaging import average_models, last_checkpoints
from vaswani_transformer.training.callbacks import read_training_log
from vaswani_transformer.training.checkpoints import check_contents, checkpoint_folders, checkpoint_to_resume

DEEP = "[" * 10**5


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    text = tmp_path_factory.mktemp("text")
    write_corpus(generate_corpus(60, 20, 20), text)
    return tiny_recipe(text, max_steps=6, evaluate_every=2, average_checkpoints=2, keep_weights="average")


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


@pytest.fixture
def resume(recipe, tmp_path, capsys):
    """Resumes the run by the command; returns its exit status and the line of its error."""

    def call(*options) -> tuple[int, str]:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(dataclasses.asdict(recipe) | {"output": str(tmp_path / "run")}))
        capsys.readouterr()
        status = main(["train", str(path), "--quiet", *map(str, options)])
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert len(lines) == (status == 2) and "Traceback" not in error and len("".join(lines)) < 1000
        return status, "".join(lines)

    return call


def contents(folder: Path) -> dict[Path, bytes | None]:
    """The files of a folder, and what is in those of checkpoints."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() if path.parent.name.startswith("checkpoint-") else None for path in files}


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"checkpoint-{step}"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"])
def test_a_bit_of_a_checkpoint(run, name, caplog):
    last = checkpoint(run, 6)
    flip_a_bit(last / name)
    assert last in complete_checkpoints(last.parent)  # its size is right
    assert f"checkpoint-6/{name} has changed since it was written" in error_of(check_contents, last)
    assert checkpoint_to_resume(run / "checkpoints") == checkpoint(run, 4)
    assert f"not resumed from checkpoint-6: {last / name}" in caplog.text


def half_copy(path: Path) -> None:
    os.truncate(path, 1000)


@pytest.mark.parametrize(("damage", "reason"), [(flip_a_bit, "has changed"), (half_copy, "is not as written")])
def test_a_run_is_resumed_from_the_checkpoint_before_and_ends_as_undisturbed(
    original, run, resume, damage, reason, caplog
):
    damage(checkpoint(run, 6) / "optimizer.pt")
    assert resume()[0] == 0
    assert "resuming from step 4" in caplog.text and f"optimizer.pt {reason}" in caplog.text
    undisturbed = original.parent / "undisturbed.safetensors"
    assert (run / "model.safetensors").read_bytes() == undisturbed.read_bytes()


def test_without_a_whole_checkpoint_nothing_is_removed(run, resume):
    for step in (2, 4, 6):
        flip_a_bit(checkpoint(run, step) / "optimizer.pt")
    before = contents(run / "checkpoints")
    status, line = resume()
    assert status == 2 and "no checkpoint can be resumed from" in line
    assert "checkpoint-6/optimizer.pt has changed" in line
    assert before.items() <= contents(run / "checkpoints").items()
    assert resume("--overwrite")[0] == 0


def test_weights_that_changed_are_neither_selected_nor_averaged(run, resume, caplog, tmp_path):
    flip_a_bit(checkpoint(run, 4) / "model.safetensors")
    line = error_of(average_models, last_checkpoints(run, 2), tmp_path / "average")
    assert "checkpoint-4/model.safetensors has changed" in line and not (tmp_path / "average").exists()
    assert resume()[0] == 0
    assert "not considered: " in caplog.text and "checkpoint-4/model.safetensors has changed" in caplog.text
    flip_a_bit(checkpoint(run, 6) / "optimizer.pt")  # which no average has
    average_models([checkpoint(run, 2), checkpoint(run, 6)], tmp_path / "average")


@pytest.mark.parametrize("name", ["train-00000.arrow", "validation.lengths.npy"])
def test_a_bit_of_prepared_data(recipe, resume, tmp_path, name):
    prepare(recipe, tmp_path / "prepared", workers=1, progress=False)
    flip_a_bit(tmp_path / "prepared" / name)
    status, line = resume("--prepared", tmp_path / "prepared")
    assert status == 2 and str(tmp_path / "prepared" / name) in line
    assert not (tmp_path / "run" / "recipe.yaml").exists() and not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["checkpoints/contents.json", "checkpoints/recipe.yaml", ".vaswani_files.json"])
def test_damaged_files_of_a_run(run, resume, name):
    (run / name).write_text(DEEP)
    before = contents(run)
    status, line = resume()
    assert status == 2 and name in line
    assert before.items() <= contents(run).items()


MANIFESTS = [
    "", DEEP, '{"files": {"model.safetensors": -1}, "written_for": [], "crc32": {}, "step": 4}',
    '{"files": {}, "files": {}, "written_for": [], "crc32": {}, "step": 4}', None,
]  # fmt: skip


@pytest.mark.parametrize("text", MANIFESTS, ids=range(len(MANIFESTS)))
def test_damaged_manifests_are_passed_over_and_never_a_reason_to_start_again(run, text, caplog):
    checkpoints = run / "checkpoints"
    for step in (6, 4, 2):
        (checkpoint(run, step) / "checkpoint.json").unlink()
        if text is not None:
            (checkpoint(run, step) / "checkpoint.json").write_text(text.replace("4}", f"{step}}}"))
        assert checkpoint(run, step) not in complete_checkpoints(checkpoint(run, step).parent)
        if step > 2:
            assert checkpoint_to_resume(checkpoints) == checkpoint(run, step - 2)
            assert f"not resumed from checkpoint-{step}" in caplog.text
    with pytest.raises(UserError, match=r"no checkpoint can be resumed from; the last: .*checkpoint-6"):
        checkpoint_to_resume(checkpoints)
    assert checkpoint_to_resume(checkpoints, required=False) is None  # with --overwrite


def plant_pickle(path, canary):
    path.write_bytes(pickle.dumps(Canary(str(canary))))


def plant_in_torch_file(path, canary):
    torch.save({"state": Canary(str(canary)), "cpu": torch.zeros(2)}, path)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("damage", [plant_in_torch_file, plant_pickle])
def test_planted_pickles_do_not_run(run, name, damage, tmp_path):
    last = checkpoint(run, 6)
    damage(last / name, tmp_path / "ran")
    # As somebody who sends a run may write a manifest: with sizes, and no sums that differ.
    record = json.loads((last / "checkpoint.json").read_text())
    record |= {"crc32": {}, "files": {name: (last / name).stat().st_size for name in record["files"]}}
    (last / "checkpoint.json").write_text(json.dumps(record))
    before = contents(run / "checkpoints")
    with pytest.raises((pickle.UnpicklingError, UserError)):
        train(load_recipe(str(run / "recipe.yaml"), {"output": str(run), "max_steps": 7}), progress=False)
    assert not (tmp_path / "ran").exists() and before.items() <= contents(run / "checkpoints").items()


def test_names_that_are_no_checkpoints(run, tmp_path):
    checkpoints = run / "checkpoints"
    for name in ("checkpoint-²", "checkpoint-" + "9" * 30, "checkpoint-", "checkpoint-05"):
        (checkpoints / name).mkdir()
    (checkpoints / "checkpoint-8").write_text("a file")
    (checkpoints / "checkpoint-9").symlink_to(tmp_path / "nowhere")
    (checkpoints / "checkpoint-10").symlink_to(checkpoint(run, 4))
    (checkpoints / "checkpoint-11").symlink_to("checkpoint-11")
    assert [path.name for path in checkpoint_folders(checkpoints)] == [f"checkpoint-{step}" for step in (2, 4, 6, 10)]
    assert checkpoint_to_resume(checkpoints) == checkpoint(run, 6)


def test_a_damaged_line_of_the_log_is_dropped_and_a_torn_last_one_is_not_mentioned(run, resume, caplog):
    log = run / "training_log.jsonl"
    lines = log.read_bytes().splitlines()[:4]
    wanted = [json.loads(line) for line in lines]
    lines[1:1] = [b"\xff\x00", DEEP.encode(), b'{"step": 1}', b"5", b'{"step": "x", "seconds": []}', b""]
    log.write_bytes(b"\n".join(lines) + b"\n" + b'{"step": 5, "lo')
    assert read_training_log(log) == wanted
    messages = [record.getMessage() for record in caplog.records]
    assert [f"line {number} of" in message for number, message in zip(range(2, 8), messages, strict=True)] == [True] * 6
    assert resume()[0] == 0
