"""A run that is resumed with a damaged, planted or odd file: one line that names it, exit status 2, nothing removed."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from canaries import Canary
from conftest import tiny_recipe
from training_runs import is_complete

from vaswani_transformer import train
from vaswani_transformer.cli.main import main
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.errors import UserError
from vaswani_transformer.recipes.recipe import load_recipe
from vaswani_transformer.training.averaging import average_models
from vaswani_transformer.training.callbacks import read_training_log
from vaswani_transformer.training.checkpoints import checkpoint_folders, checkpoint_to_resume, crc32

LAST, EARLIER = "checkpoints/checkpoint-4", "checkpoints/checkpoint-2"


@pytest.fixture(scope="module")
def original(cache, tmp_path_factory):
    """A run that ended after its last checkpoint and before it chose its weights, its recipe beside it."""
    place = tmp_path_factory.mktemp("original")
    write_corpus(generate_corpus(60, 20, 20), place / "text")
    recipe = tiny_recipe(
        place / "text", place / "run", max_steps=4, evaluate_every=2, average_checkpoints=2, precision="fp32"
    )
    result = train(recipe, progress=False)
    (result.folder / "model.safetensors").unlink()
    return result.folder


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run", symlinks=True)


@pytest.fixture
def resume(run, capsys):
    """Resumes `run` by the command, to one step more; returns exit status and standard error."""

    def resume(*options, steps=5):
        path = run.parent / "recipe.yaml"
        path.write_text(yaml.safe_dump({**recipe, "output": str(run), "max_steps": steps}))
        status = main(["train", str(path), "--quiet", *options])
        return status, capsys.readouterr().err

    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    return resume


def everything(folder: Path) -> dict:
    """What lies in a folder, and its content in checkpoints."""
    paths = {path.relative_to(folder): path for path in folder.rglob("*")}
    return {name: path.is_file() and "checkpoint-" in str(name) and crc32(path) for name, path in paths.items()}


def refused(resume, run, *words, options=()):
    before = everything(run)
    status, error = resume(*options)
    [line] = [line for line in error.splitlines() if line.startswith("error: ")]
    assert status == 2 and "Traceback" not in error and len(line) < 1000
    assert all(word in line for word in words), line
    assert before.items() <= everything(run).items()


def without_sums(folder: Path) -> None:
    """As somebody who sends a run may write a manifest: with sizes, and no sums that differ."""
    path = folder / "checkpoint.json"
    record = json.loads(path.read_text())
    record["crc32"] = {}
    record["files"] = {name: (folder / name).stat().st_size for name in record["files"]}
    path.write_text(json.dumps(record))


DEEP = "[" * 10**5


@pytest.mark.parametrize("text", ["", DEEP], ids=lambda text: text[:20])
@pytest.mark.parametrize("name", ["checkpoints/contents.json", "checkpoints/recipe.yaml", ".vaswani_files.json"])
def test_damaged_files_of_a_run(run, resume, name, text):
    (run / name).write_text(text, encoding="latin-1")
    refused(resume, run, name)


MANIFESTS = [
    "", DEEP, '{"files": {"model.safetensors": -1}, "written_for": [], "crc32": {}, "step": 4}',
    '{"files": {}, "files": {}, "written_for": [], "crc32": {}, "step": 4}', None,
]  # fmt: skip


@pytest.mark.parametrize("text", MANIFESTS, ids=range(len(MANIFESTS)))
def test_damaged_manifests_are_passed_over_and_never_a_reason_to_start_again(run, text, caplog):
    checkpoints = run / "checkpoints"
    for folder in (LAST, EARLIER):
        (run / folder / "checkpoint.json").unlink()
        if text is not None:
            (run / folder / "checkpoint.json").write_text(text.replace("4}", f"{folder[-1]}}}"))
        assert not is_complete(run / folder)
        if folder == LAST:
            assert checkpoint_to_resume(checkpoints) == run / EARLIER
            assert "not resumed from checkpoint-4" in caplog.text
    with pytest.raises(UserError, match=r"no checkpoint can be resumed from; the last: .*checkpoint-4"):
        checkpoint_to_resume(checkpoints)
    assert checkpoint_to_resume(checkpoints, required=False) is None  # with --overwrite


PICKLES = ["optimizer.pt", "scheduler.pt", "rng_state.pth"]


def plant_pickle(path, canary):
    path.write_bytes(pickle.dumps(Canary(str(canary))))


def plant_in_torch_file(path, canary):
    torch.save({"state": Canary(str(canary)), "cpu": torch.zeros(2)}, path)


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("damage", [plant_in_torch_file, plant_pickle])
def test_planted_pickles_do_not_run(run, name, damage, tmp_path):
    damage(run / LAST / name, tmp_path / "ran")
    without_sums(run / LAST)
    before = everything(run)
    with pytest.raises((pickle.UnpicklingError, UserError)):
        train(load_recipe(str(run / "recipe.yaml"), {"output": str(run), "max_steps": 5}), progress=False)
    assert not (tmp_path / "ran").exists() and before.items() <= everything(run).items()


def test_names_that_are_no_checkpoints(run, tmp_path):
    checkpoints = run / "checkpoints"
    for name in ("checkpoint-²", "checkpoint-" + "9" * 30, "checkpoint-", "checkpoint-05"):
        (checkpoints / name).mkdir()
    (checkpoints / "checkpoint-8").write_text("a file")
    (checkpoints / "checkpoint-9").symlink_to(tmp_path / "nowhere")
    (checkpoints / "checkpoint-10").symlink_to(checkpoints / "checkpoint-4")
    (checkpoints / "checkpoint-11").symlink_to("checkpoint-11")
    assert [path.name for path in checkpoint_folders(checkpoints)] == ["checkpoint-2", "checkpoint-4", "checkpoint-10"]
    assert checkpoint_to_resume(checkpoints) == run / LAST


def test_a_damaged_line_of_the_log_is_left_out_and_a_torn_last_one_is_not_mentioned(run, resume, caplog):
    log = run / "training_log.jsonl"
    lines = log.read_bytes().splitlines()[:4]
    wanted = [json.loads(line) for line in lines]
    lines[1:1] = [b"\xff\x00", DEEP.encode(), b'{"step": 1}', b"5", b'{"step": "x", "seconds": []}', b""]
    log.write_bytes(b"\n".join(lines) + b"\n" + b'{"step": 5, "lo')
    assert read_training_log(log) == wanted
    messages = [record.getMessage() for record in caplog.records]
    assert [f"line {number} of" in message for number, message in zip(range(2, 8), messages, strict=True)] == [True] * 6
    assert resume()[0] == 0


def test_averaging_looks_at_the_files_too(run, tmp_path):
    for name in ("../../x.safetensors", 3):
        (run / LAST / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        (run / LAST / "model.safetensors").unlink(missing_ok=True)
        with pytest.raises(UserError, match="checkpoint-4"):
            average_models([run / EARLIER, run / LAST], tmp_path / "average")
    os.mkfifo(run / LAST / "model.safetensors")
    with pytest.raises(UserError, match="checkpoint-4"):
        average_models([run / EARLIER, run / LAST], tmp_path / "average")
    assert not (tmp_path / "average").exists()
