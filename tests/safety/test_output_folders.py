"""Folders that commands write: nothing of the user's is replaced or removed, and one process writes at a time."""

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from children import fork, limit_files, run_in_child, wait, wait_for
from conftest import TINY_RECIPE, error_of, tiny_recipe
from experimenting import TREES
from import_differences import marianmt
from model_folders import write_model

from vaswani_transformer import load_tokenizer, output_folder, train
from vaswani_transformer.cli.main import main
from vaswani_transformer.data.prepared import open_prepared
from vaswani_transformer.importing.importing import import_model
from vaswani_transformer.output_folder import LOCK, OWN, RECORD, OutputFolder, locked, locked_together
from vaswani_transformer.recipes.recipe import PATHS, load_recipe
from vaswani_transformer.training import run as training
from vaswani_transformer.training.run_folder import CURVE, LOG, MODEL_FILES, RECIPE, VERDICT

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module")
def recipe(text, tmp_path_factory):
    """A recipe file of seconds."""
    path = tmp_path_factory.mktemp("recipe") / "mine.yaml"
    values = TINY_RECIPE | {"data_dir": str(text), "max_steps": 2, "evaluate_every": 2, "average_checkpoints": 0}
    path.write_text("# mine\n" + yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", str(recipe), "--output", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [write_model(tmp_path_factory.mktemp("model") / f"{seed}", seed) for seed in (1, 2)]


def contents(folder: Path) -> dict:
    """All that lies in a folder: files with their bytes, links with where they lead."""

    def content(path: Path):
        return str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None

    return {path.relative_to(folder): content(path) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", [RECIPE, "notes.txt"])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_a_folder_without_our_mark_is_refused(recipe, models, text, tmp_path, fails, name, overwrite):
    (tmp_path / name).write_text("mine")
    commands = [["train", recipe], ["average", *models], ["tokenizer", text / "train.en"], ["clean", recipe]]
    for words in commands:
        fails(*words, "--output", tmp_path, *overwrite)
        assert contents(tmp_path) == {Path(name): b"mine"}


@pytest.mark.parametrize("name", ["config.json", "adapter/adapter_config.json", "checkpoints/recipe.yaml"])
def test_a_file_that_the_mark_does_not_list_is_not_replaced(recipe, tmp_path, fails, name):
    OutputFolder(tmp_path).note(["other"])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    line = fails("train", recipe, "--output", tmp_path, "--overwrite")
    assert f"{tmp_path / name} was not written by this program" in line
    assert contents(tmp_path) == before


def test_checkpoints_that_no_run_of_ours_wrote_are_refused(recipe, trained, tmp_path, fails):
    OutputFolder(tmp_path).note(["other"])
    shutil.copytree(trained / "checkpoints" / "checkpoint-2", tmp_path / "checkpoints" / "checkpoint-2")
    before = contents(tmp_path)
    assert "checkpoints was not made by a training" in fails("train", recipe, "--output", tmp_path, "--overwrite")
    assert contents(tmp_path) == before


def test_all_that_a_run_writes_is_known_beforehand(trained):
    """What is checked before the training is what is placed after it."""
    files = {path.name for path in trained.iterdir() if path.is_file()}
    assert files <= {RECIPE, LOG, CURVE, VERDICT, *MODEL_FILES, *OWN}


def test_overwriting_removes_what_is_ours_and_nothing_else(recipe, trained, tmp_path, fails):
    folder, elsewhere = shutil.copytree(trained, tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "checkpoint.json").write_text('{"step": 1, "files": {"data.txt": 4, "../data.txt": 4}}')
    (elsewhere / "data.txt").write_text("mine")
    (folder / "checkpoints" / "checkpoint-1").symlink_to(elsewhere)
    (folder / "checkpoints" / "notes").symlink_to(elsewhere)
    theirs = ["notes.txt", "checkpoints/notes.txt", "checkpoints/checkpoint-2/notes.txt", ".writing-novel.txt"]
    for name in theirs:
        (folder / name).write_text("mine")
    (folder / "checkpoints" / "checkpoint-2" / "more").symlink_to(elsewhere)
    outside, weights = contents(elsewhere), (folder / "model.safetensors").read_bytes()
    words = ["train", recipe, "--output", folder, "--seed", "7", "--quiet"]
    assert "already holds a model" in fails(*words)
    assert main([*map(str, words), "--overwrite"]) == 0
    assert contents(elsewhere) == outside and (folder / "model.safetensors").read_bytes() != weights
    kept = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes() == b"mine"]
    assert {path.name for path in kept} >= {"notes.txt", ".writing-novel.txt"} and len(kept) >= len(theirs)
    assert (folder / "checkpoints" / "notes").is_symlink()


def test_a_tokenizer_does_not_replace_a_model(models, text, tmp_path, fails):
    assert main(["average", *map(str, models), "--output", str(tmp_path / "model")]) == 0
    before = contents(tmp_path)
    words = ["tokenizer", text / "train.en", "--output", tmp_path / "model", "--overwrite"]
    assert "it holds something else" in fails(*words)
    assert contents(tmp_path) == before


def test_folders_within_an_output_are_replaced_but_for_files_of_others(tmp_path):
    for name in ("old", "new"):
        with output_folder.written_at_once(tmp_path, overwrite=True, last="last") as staging:
            (staging / "a" / "b").mkdir(parents=True)
            for path in ("last", f"a/b/{name}"):
                (staging / path).write_text(name)
        (tmp_path / "a" / "mine").write_text("mine")
    files = {path.name: path.read_text() for path in tmp_path.rglob("[!.]*") if path.is_file()}
    assert files == {"last": "new", "new": "new", "mine": "mine"}


def test_an_output_that_is_a_link_is_as_any_other(recipe, trained, models, tmp_path):
    for name in ("run", "prepared", "average"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    run = tmp_path / "run"
    shutil.copytree(trained, run, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training.TrainingRun, "_finish", Mock(side_effect=KeyboardInterrupt))
        train(load_recipe(str(recipe), {"output": str(run), "seed": 7, "overwrite": True}), progress=False)
    assert not (run / "model.safetensors").exists(), "old weights beside a new recipe"
    assert main(["train", str(recipe), "--output", str(run), "--seed", "7", "--quiet"]) == 0
    for words in (["prepare", str(recipe), "--quiet"], ["average", *map(str, models)]):
        output = tmp_path / ("prepared" if words[0] == "prepare" else "average")
        for overwrite in ([], ["--overwrite"]):
            assert main([*words, "--output", str(output), *overwrite]) == 0
    assert open_prepared(tmp_path / "prepared")


@pytest.mark.parametrize("moment", ["placing", "writing"])
def test_a_killed_command_can_be_repeated(models, tmp_path, moment):
    output = tmp_path / "out"
    words = ["average", *map(str, models), "--output", str(output)]
    overwrite = ["--overwrite"] if moment == "placing" else []
    assert not overwrite or main(words) == 0

    def kill(*_, **__):
        shutil.copytree(output, tmp_path / "left")  # what a death leaves: nothing is tidied up
        raise KeyboardInterrupt

    finish = output_folder.finish
    with pytest.MonkeyPatch.context() as patch:
        if moment == "placing":  # the weights come last
            patch.setattr(output_folder, "finish", lambda path: finish(path) if path.name[0] in "tcg" else kill())
        else:
            patch.setattr(OutputFolder, "claim", kill)
        main([*words, *overwrite])
    shutil.rmtree(output, ignore_errors=True)
    (tmp_path / "left").rename(output)
    assert (output / ".writing-files").exists() and (output / LOCK).exists()
    assert main([*words, *overwrite]) == 0
    assert not list(output.glob(".writing*"))
    assert load_tokenizer(output)


def test_a_mark_names_nothing_outside_its_folder(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for names in (["../mine.txt"], {"../mine.txt": [[4, "0" * 64]]}, [str(tmp_path / "mine.txt"), "a/../../mine.txt"]):
        (folder / RECORD).write_text(json.dumps({"files": names}))
        output = OutputFolder(folder)
        output.remove([*output.names, *names])
        assert (tmp_path / "mine.txt").exists() and not output.names
    for damage in ("", "[]", "{}", '{"files": 5}', '{"files": [3]}', "[" * 100_000):
        (folder / RECORD).write_text(damage)
        assert str(folder / RECORD) in error_of(OutputFolder, folder)


def test_what_b26e237_marked_is_ours(tmp_path):
    (tmp_path / RECORD).write_text('{"files": {"log": [null], "text/a": [[4, "abc"], [5, "def"]]}}')
    (tmp_path / "text").mkdir()
    for name in ("log", "text/a", "b"):
        (tmp_path / name).write_text("since then it was edited")
    output = OutputFolder(tmp_path)
    assert list(output.names) == ["log", "text/a"]
    output.write_text("log", "new")
    output.remove(["text/a", "b"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORD, "b", "log"]
    assert list(OutputFolder(tmp_path).names) == ["log", "text/a"]


def test_empty_paths_are_refused(text, models, fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["train", ""], ["train", "small", "--output", ""], ["translate", ""], ["demo", "--output", ""]):
        assert "is empty" in fails(*words)
    recipe = tiny_recipe(text, tmp_path / "run", max_steps=2)
    for name in PATHS:
        assert f"{name} is empty" in error_of(dataclasses.replace, recipe, **{name: ""})
    assert "is empty" in error_of(import_model, models[0], "")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def held(tmp_path):
    """A folder that another process writes, and the id of that process."""
    folder = tmp_path / "held"

    def hold():
        with locked(folder):
            (tmp_path / "ready").touch()
            time.sleep(60)

    child = fork(hold)
    wait_for((tmp_path / "ready").exists)
    yield folder, child
    os.kill(child, signal.SIGKILL)
    wait(child)


def test_every_command_leaves_a_folder_alone_that_another_writes(held, recipe, models, text, tmp_path, fails):
    folder, child = held
    (trees := tmp_path / "trees").write_text("\n".join(TREES))
    commands = [
        ["train", recipe], ["parse", "train", "--trees", trees, "--dev", trees], ["average", *models],
        ["tokenizer", text / "train.en"], ["prepare", recipe], ["distill", models[0], "--student", recipe], ["demo"],
    ]  # fmt: skip
    for words in commands:
        for more in [[]] if words[0] == "demo" else [[], ["--overwrite"]]:
            line = fails(*words, "--output", folder, *more)
            assert line.startswith(f"error: another process is writing to {folder}: wait")
    assert "another process is writing" in fails("export", models[0], "--format", "marian", "--output", folder)
    assert "another process is writing" in fails("import", models[0], "--output", folder)
    assert [path.name for path in folder.iterdir()] == [LOCK]
    os.kill(child, signal.SIGKILL)  # which frees the lock; the file that it leaves behind is taken over
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert main(["tokenizer", str(text / "train.en"), "--output", str(folder), "--vocab-size", "300"]) == 0
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["tokenizer.json", "tokenizer_config.json"]
    assert not (folder / LOCK).exists()


def test_only_the_first_of_several_processes_locks(held, tmp_path, monkeypatch):
    with locked(tmp_path / "run"), locked(tmp_path / "run"):  # and a body within a body
        pass
    assert not (tmp_path / "run").exists(), "nothing was written"
    monkeypatch.setenv("RANK", "1")
    with locked_together(held[0]):
        pass
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="another process"), locked_together(held[0]):
        pass


def test_outputs_that_are_no_folders(recipe, tmp_path, fails, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "there").mkdir()
    for name in ("file", "file/x"):
        assert f"cannot write to output folder {tmp_path / name}" in fails("train", recipe, "--output", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for command in ("train", "clean"):
        assert "bucket/x is a URL: give a folder" in fails(command, recipe, "--output", "s3://bucket/x")
    assert not Path("s3:").exists()
    before = sorted(path.name for path in tmp_path.iterdir())
    with locked(tmp_path / "link"):
        assert (tmp_path / "there" / LOCK).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_file_system_without_locks(models, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    (tmp_path / "in.txt").write_text("A dog.\n")
    words = ["--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt", "--max-new-tokens", "3"]
    assert main([str(word) for word in ["translate", models[0], *words]]) == 0
    assert main(["average", *map(str, models), "--output", str(tmp_path / "average")]) == 0
    assert any("has no locks" in record.message for record in caplog.records)
    assert not (tmp_path / "average" / LOCK).exists()


def test_files_of_windows(models, tmp_path, monkeypatch):
    """It opens no folder, flushes only what may be written, and removes nothing that is open."""
    sync, unlink = os.fsync, Path.unlink

    def fsync(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        sync(descriptor)

    def remove(path, **options):
        if path.name == LOCK:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, **options)

    monkeypatch.setattr("vaswani_transformer.files.WINDOWS", True)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "unlink", remove)
    for options in ((), ("--overwrite",)):
        assert main(["average", *map(str, models), "--output", str(tmp_path / "average"), *options]) == 0
        unlink(tmp_path / "average" / LOCK)  # as filelock does there


def test_two_processes_do_not_write_one_file_of_translations(models, tmp_path, fails):
    (tmp_path / "in.txt").write_text("A dog.\n")
    (tmp_path / "out.txt").write_text("theirs\n")
    words = ["translate", models[0], "--output", tmp_path / "out.txt", "--max-new-tokens", "3"]
    with (tmp_path / "out.txt").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process is writing" in fails(*words, "--input", tmp_path / "in.txt")
        assert (tmp_path / "out.txt").read_text() == "theirs\n"
    assert main([str(word) for word in [*words, "--input", tmp_path / "in.txt"]]) == 0


@pytest.mark.parametrize("size", [2000, 20_000])  # which the tokenizer exceeds, and the weights
def test_a_full_disk_is_one_line_and_leaves_nothing_torn(models, tmp_path, size):
    output, words = tmp_path / "out", ["average", *models]
    status, error = run_in_child([*words, "--output", output], tmp_path, lambda: limit_files(size))
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert status == 1 and len(lines) == 1 and "Traceback" not in error, error
    assert "free some space" in lines[0].lower()
    assert not list(output.glob("**/.writing*")) and not (output / "tokenizer.json").exists()
    assert run_in_child([*words, "--output", output], tmp_path)[0] == 0  # with the same words


def test_all_files_follow_the_umask(recipe, models, text, tmp_path):
    """safetensors writes files that nobody else may read."""
    commands = [
        ["train", recipe, "--quiet"], ["average", *models], ["tokenizer", text / "train.en", "--vocab-size", "300"],
        ["prepare", recipe, "--quiet"], ["import", marianmt(tmp_path / "marianmt", torch.float32).source],
    ]  # fmt: skip
    for words in commands:
        folder = tmp_path / f"by {words[0]}"
        status, error = run_in_child([*words, "--output", folder], tmp_path, lambda: os.umask(0o027))
        assert status == 0, error
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
        assert modes and set(modes.values()) == {0o640}, modes


def test_a_run_holds_paths_as_they_were_given(text, tmp_path, monkeypatch):
    """Given relative ones, no absolute one: a copied folder says nothing about the machine."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(text, "text")
    folder = train(tiny_recipe(Path("text"), Path("run"), max_steps=2, evaluate_every=2), progress=False).folder
    for path in folder.rglob("*"):
        assert not path.is_file() or str(tmp_path).encode() not in path.read_bytes(), path
