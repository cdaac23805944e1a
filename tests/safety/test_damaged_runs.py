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
from safetensors.torch import load_file, save_file

from vaswani_transformer import train
from vaswani_transformer.cli.main import main
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.errors import UserError
from vaswani_transformer.training.averaging import average_models
from vaswani_transformer.training.callbacks import read_training_log
from vaswani_transformer.training.checkpoints import checkpoint_folders, checkpoint_to_resume, crc32, read_checkpoint

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
    """As an earlier version, or somebody who sends a run, may write a manifest: with sizes, and no sums that differ."""
    path = folder / "checkpoint.json"
    record = json.loads(path.read_text())
    record.pop("crc32", None)
    record["files"] = {name: (folder / name).stat().st_size for name in record["files"]}
    path.write_text(json.dumps(record))


DEEP = "[" * 10**5


@pytest.mark.parametrize("text", ["", DEEP, '{"a": 1, "a": 2}', "\xff"], ids=lambda text: text[:20])
@pytest.mark.parametrize("name", ["checkpoints/contents.json", "checkpoints/recipe.yaml"])
def test_damaged_files_of_a_run(run, resume, name, text):
    (run / name).write_text(text, encoding="latin-1")
    refused(resume, run, name)


@pytest.mark.parametrize("text", ["", "\xff"], ids=["empty", "no UTF-8"])
def test_the_recipe_for_reading_may_be_damaged(run, resume, text):
    (run / "recipe.yaml").write_text(text, encoding="latin-1")
    assert resume()[0] == 0
    assert (run / "recipe.yaml.1").read_text(encoding="latin-1") == text
    assert yaml.safe_load((run / "recipe.yaml").read_text())["max_steps"] == 5


@pytest.mark.parametrize("name", ["checkpoints/contents.json", "checkpoints/recipe.yaml"])
def test_pipes_of_a_run(run, resume, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    try:
        refused(resume, run, "regular file")
    finally:
        (run / name).unlink()


def test_a_run_without_hashes_of_its_data_is_resumed(run, resume):
    (run / "checkpoints/contents.json").unlink()
    assert resume()[0] == 0


MANIFESTS = [
    "", "{", "5", DEEP, "{}", '{"files": [], "written_for": [], "step": 4}',
    '{"files": {"../../recipe.yaml": 5}, "written_for": [], "step": 4}',
    '{"files": {"/dev/zero": 0}, "written_for": [], "step": 4}',
    '{"files": {"model.safetensors": -1}, "written_for": [], "step": 4}',
    '{"files": {}, "written_for": [[]], "step": 4}', '{"files": {}, "written_for": [], "step": 5}',
    '{"files": {}, "files": {}, "written_for": [], "step": 4}',
]  # fmt: skip


@pytest.mark.parametrize("text", MANIFESTS, ids=range(len(MANIFESTS)))
def test_damaged_manifests_are_passed_over_and_never_a_reason_to_start_anew(run, text, caplog):
    checkpoints = run / "checkpoints"
    (run / LAST / "checkpoint.json").write_text(text)
    assert read_checkpoint(run / LAST) is None
    assert checkpoint_to_resume(checkpoints) == run / EARLIER
    assert "not resumed from checkpoint-4" in caplog.text
    (run / EARLIER / "checkpoint.json").write_text(text.replace("4}", "2}"))
    with pytest.raises(UserError, match=r"no checkpoint can be resumed from; the last: .*checkpoint-4"):
        checkpoint_to_resume(checkpoints)
    assert checkpoint_to_resume(checkpoints, required=False) is None  # with --overwrite


def state(changes) -> str:
    return json.dumps({"global_step": 4, "log_history": [], **changes})


STATES = [
    "", "{", "[]", DEEP, "{}", state({"global_step": "4"}), state({"global_step": 3}), state({"max_steps": None}),
    state({"log_history": {}}), state({"log_history": [1]}), state({"log_history": [{"step": "x"}]}),
    state({"stateful_callbacks": []}), state({"best_global_step": "x"}), state({"best_metric": []}),
    state({"epoch": "x"}), state({"total_flos": {}}), state({"surprise": 1}), '{"global_step": 4, "global_step": 4}',
]  # fmt: skip


@pytest.mark.parametrize("text", STATES, ids=range(len(STATES)))
def test_damaged_states_of_the_trainer(run, text, caplog):
    (run / LAST / "trainer_state.json").write_text(text)
    without_sums(run / LAST)
    assert checkpoint_to_resume(run / "checkpoints") == run / EARLIER
    assert "trainer_state.json" in caplog.text or "checkpoint-4" in caplog.text


@pytest.mark.parametrize("stored", [{"attributes": 3}, {"attributes": {"earlier_seconds": "x", "meter": 0}}])
@pytest.mark.parametrize("name", ["TrainingLogCallback", "VaswaniTrainer"])
def test_damaged_states_of_callbacks(run, resume, name, stored):
    path = run / LAST / "trainer_state.json"
    values = json.loads(path.read_text())
    values["stateful_callbacks"][name] = stored
    path.write_text(json.dumps(values))
    without_sums(run / LAST)
    refused(resume, run, "state")


PICKLES = ["optimizer.pt", "scheduler.pt", "rng_state.pth"]


def random_bytes(path, canary):
    path.write_bytes(os.urandom(1000))


def plant_pickle(path, canary):
    path.write_bytes(pickle.dumps(Canary(str(canary))))


def plant_in_torch_file(path, canary):
    torch.save({"state": Canary(str(canary)), "cpu": torch.zeros(2)}, path)


def other_values(path, canary):
    torch.save({"param_groups": [], "state": [3], "python": "x", "last_epoch": {}}, path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, plant_in_torch_file) for name in PICKLES),
        *(("optimizer.pt", damage) for damage in (random_bytes, plant_pickle, other_values)),
        ("rng_state.pth", other_values),
    ],
)
def test_damaged_and_planted_pickles(run, resume, name, damage, tmp_path):
    damage(run / LAST / name, tmp_path / "ran")
    without_sums(run / LAST)
    refused(resume, run, name, "checkpoint-4", "move its folder away")
    assert not (tmp_path / "ran").exists()


def test_planted_pickles_that_nothing_reads(run, resume, tmp_path):
    for name in ("training_args.bin", "scaler.pt", "pytorch_model.bin", "rng_state_0.pth.bin"):
        plant_in_torch_file(run / LAST / name, tmp_path / "ran")
    without_sums(run / LAST)
    resume()
    assert not (tmp_path / "ran").exists()


def other_shape(weights):
    return {name: torch.zeros(3) for name in weights}


def without_one(weights):
    return {name: weight for name, weight in weights.items() if name != max(weights)}


def one_more(weights):
    return {**weights, "model.surprise": torch.zeros(1)}


@pytest.mark.parametrize(
    ("change", "word"),
    [(other_shape, "size mismatch"), (without_one, "missing"), (one_more, "unexpected"), (None, "weights of")],
)
def test_other_weights_than_the_models(run, resume, change, word):
    path = run / LAST / "model.safetensors"
    if change is None:
        path.write_bytes(os.urandom(3000))
    else:
        save_file(change(load_file(path)), path, metadata={"format": "pt"})
    without_sums(run / LAST)
    refused(resume, run, "weights", "checkpoint", word)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer(run, resume, name):
    (run / "checkpoints/tokenizer" / name).write_text(DEEP)
    refused(resume, run, "tokenizer")


def test_names_that_are_no_checkpoints(run, tmp_path):
    checkpoints = run / "checkpoints"
    for name in (
        "checkpoint-²",
        "checkpoint-٣",
        "checkpoint-" + "9" * 30,
        "checkpoint-",
        "checkpoint-05",
        "checkpoint-x",
    ):
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


def test_a_log_of_gigabytes_is_not_read(run, resume):
    os.truncate(run / "training_log.jsonl", 1 << 40)
    try:
        refused(resume, run, "training_log.jsonl")
    finally:
        (run / "training_log.jsonl").unlink()
