"""The commands on tiny data, and every kind of bad input: one clear line, a non-zero exit, nothing lost."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import TINY_RECIPE
from huggingface_hub.utils import are_progress_bars_disabled
from model_folders import write_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from vaswani_transformer.cli import translate
from vaswani_transformer.cli.main import _prepare_libraries, main
from vaswani_transformer.cli.train import _print_trained
from vaswani_transformer.loading import quiet_transformers
from vaswani_transformer.recipes.recipe import Recipe

TINY = TINY_RECIPE | {"max_steps": 6, "evaluate_every": 3, "validation_bleu": 10, "average_checkpoints": 2}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"data_dir": str(text)}))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory, recipe):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    assert main(["train", str(recipe), "--output", str(folder), "--quiet"]) == 0
    return folder


def test_training_leaves_a_complete_folder_that_stock_classes_load(model):
    assert {path.name for path in model.iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "training_log.jsonl", "learning_curve.png", "recipe.yaml",
    }  # fmt: skip
    log = [json.loads(line) for line in (model / "training_log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert all(entry["target_tokens"] > 0 and entry["source_tokens"] > 0 for entry in log if "loss" in entry)
    assert all({"eval_loss", "eval_perplexity", "eval_bleu"} <= entry.keys() for entry in log if "eval_loss" in entry)
    assert (model / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    loaded, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    assert loaded.config.vocab_size == len(tokenizer)
    assert loaded.generation_config.num_beams == 4 and loaded.generation_config.length_penalty == 0.6
    assert loaded.generation_config.max_extra_tokens == 50
    assert loaded.generation_config.max_length is None  # generating for validation has left no limit of its own


def test_tokenizer_command(text, tmp_path, monkeypatch, fails):
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = ["tokenizer", text / "train.en", text / "train.de", "--output=~/t", "--vocab-size", "300"]
    assert main([str(argument) for argument in arguments]) == 0
    assert len(AutoTokenizer.from_pretrained(tmp_path / "t")) == 300
    assert "--overwrite replaces what this command wrote there" in fails(*arguments)


def test_downloads_have_a_bar_in_a_terminal_alone(monkeypatch):
    for is_terminal in (True, False):
        monkeypatch.setattr(sys, "stderr", type("Stream", (io.StringIO,), {"isatty": lambda _, its=is_terminal: its})())
        _prepare_libraries()
        with quiet_transformers():
            pass
        assert are_progress_bars_disabled() is not is_terminal and not transformers_logging.is_progress_bar_enabled()


def test_the_printed_command_is_for_a_shell(capsys):
    result = SimpleNamespace(steps=1, seconds=1.0, kept="last", metrics={}, folder=Path("mes modèles"), verdict=[])
    _print_trained(result)
    assert capsys.readouterr().out.endswith("vaswani translate 'mes modèles' 'a sentence'\n")


def test_lists(capsys):
    assert main(["recipes"]) == 0 and "multi30k-en-de" in capsys.readouterr().out
    assert main(["recipes", "demo"]) == 0 and "train_source: train.en" in capsys.readouterr().out


@pytest.mark.parametrize(("output", "status"), [(">&-", 0), ("> /dev/full", 1)])
def test_an_output_that_takes_nothing(output, status):
    command = f"env -u PYTHONUNBUFFERED {sys.executable} -m vaswani_transformer recipes {output}"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count(b"\n")) == (status, status)


def test_help_documents_every_field(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert all("--" + field.name.replace("_", "-") in out for field in dataclasses.fields(Recipe))
    assert "--d-model INT" in out and "--output PATH" in out
    assert "an interrupted training." in out  # lines end where the terminal's do, not where the docstring's do


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["MODEL", "A.", "- B"], ["A.", "- B"]),
        (["MODEL", "--beams", "2", "A."], ["A."]),
        (["--beams", "2", "MODEL", "A."], ["A."]),
        (["MODEL", "A.", "--beams", "2", "- B", "C."], ["A.", "- B", "C."]),
        (["MODEL", "A.", "--beams", "2", "--", "-B", "C."], ["A.", "-B", "C."]),
        (["MODEL", "--beams", "2"], []),
        (["MODEL", "--input", "- b"], []),
    ],
)
def test_sentences_before_and_behind_options(words, sentences, monkeypatch):
    calls = []
    monkeypatch.setattr(translate, "_translate_lines", lambda *arguments: calls.append(arguments))
    assert main(["translate", *words]) == 0
    assert [call[:2] for call in calls] == [("MODEL", tuple(sentences))] and calls[0][2].files.input in (None, "- b")


def test_misspelt_options(fails):
    assert "Did you mean --beams?" in fails("translate", "MODEL", "A.", "--beems", "2", "B.")
    assert "--warmup-steps" in fails("train", "demo", "--warmup-step", "3")


def test_output_is_not_touched_before_the_input_is_known_to_be_there(model, tmp_path, fails):
    (tmp_path / "out").write_text("precious\n")
    fails("translate", model, "--input", tmp_path / "missing", "--output", tmp_path / "out")
    assert "is the same file as" in fails("translate", model, "--input", tmp_path / "out", "--output", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious\n"


@pytest.mark.parametrize(
    "mistake",
    [
        ["--train-source", "missing"],
        ["--vocab-size", "0"],
        ["--attention", "no_such"],
        ["--tokens-per-batch", "60", "--tokens-per-device", "60", "--max-length", "3"],
        ["--seed", str(2**32)],
    ],
    ids=lambda mistake: mistake[0],
)
def test_overwriting_with_a_mistake_keeps_the_old_model(recipe, model, tmp_path, fails, mistake):
    folder = tmp_path / "kept"
    shutil.copytree(model, folder)
    line = fails("train", recipe, "--output", folder, "--overwrite", "--quiet", *mistake)
    assert mistake[0] != "--attention" or "attention 'no_such'" in line
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert list((folder / "checkpoints").glob("checkpoint-*"))


@pytest.mark.slow
def test_tensorboard_shows_the_run_that_is_in_the_folder(recipe, tmp_path):
    """A resumed run keeps its events, one that replaces it shows its own alone, and other programs' events stay."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train = ["train", str(recipe), "--output", str(tmp_path / "run"), "--quiet", "--report-to", "tensorboard"]
    folder = tmp_path / "run" / "tensorboard"
    assert main([*train, "--max-steps", "3"]) == 0
    for _ in range(2):  # the second time only the selection of weights is left
        earlier = set(folder.iterdir())
        (tmp_path / "run" / "model.safetensors").unlink()  # as if cut off before the end
        assert main([*train, "--max-steps", "4"]) == 0
        assert earlier and earlier < set(folder.iterdir())
    earlier = set(folder.iterdir())
    (folder / "notes.txt").write_text("mine\n")
    (folder / "other").mkdir()
    (folder / "other" / "events.out.tfevents.1.mine").touch()
    assert main([*train, "--max-steps", "2", "--overwrite"]) == 0
    assert not earlier & set(folder.iterdir())
    accumulator = events.EventAccumulator(str(folder))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("train/loss")] == [1, 2]
    assert (folder / "notes.txt").is_file() and (folder / "other" / "events.out.tfevents.1.mine").is_file()


@pytest.mark.slow
def test_the_home_folder_in_a_recipe_file(text, tmp_path, monkeypatch):
    """Training and preparing find the same files, and nothing is made in a folder called ~."""
    home, here = tmp_path / "home", tmp_path / "here"
    shutil.copytree(text, home / "text")
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    settings = TINY | {"max_steps": 1, "evaluate_every": 1, "data_dir": "~/text", "output": "~/run"}
    (here / "a.yaml").write_text(yaml.safe_dump(settings))
    files = {name: f"~/text/{TINY[name]}" for name in TINY if name.endswith(("_source", "_target"))}
    (here / "b.yaml").write_text(yaml.safe_dump(settings | files | {"data_dir": None}))
    assert main(["train", "b.yaml", "--quiet", "--output=~/second"]) == 0
    assert main(["train", "a.yaml", "--quiet"]) == 0
    assert (home / "run" / "model.safetensors").is_file()
    prepare = ["prepare", "a.yaml", "--output", str(home / "prepared"), "--workers", "1", "--quiet"]
    assert main([*prepare, "--tokenizer=~/run"]) == 0
    assert main(["train", "a.yaml", "--quiet", "--prepared", "~/prepared", "--output=~/third"]) == 0
    assert (home / "third" / "model.safetensors").is_file()
    assert sorted(path.name for path in here.iterdir()) == ["a.yaml", "b.yaml"]


def test_evaluate_refuses_what_it_cannot_evaluate_before_it_translates(model, tmp_path, fails):
    (tmp_path / "blank").write_text("\n \n")
    (tmp_path / "one").write_text("A dog.\n")
    assert "blank" in fails("evaluate", model, "--source", tmp_path / "blank", "--reference", tmp_path / "blank")
    (tmp_path / "long").write_text("Ein Hund " * 100 + "\n")
    learned = write_model(tmp_path / "learned", position_encoding="learned", max_position_embeddings=60)
    line = fails("evaluate", learned, "--source", tmp_path / "one", "--reference", tmp_path / "long")
    assert "line 1" in line and "at most 60" in line


def test_an_interrupted_command_ends_in_one_line(forked, tmp_path):
    os.mkfifo(tmp_path / "text")
    pid = forked.start("tokenizer", tmp_path / "text", "--output", tmp_path / "out")
    with (tmp_path / "text").open("w"):  # the command reads it and waits for lines
        os.kill(pid, signal.SIGINT)
        done = forked.wait()
    assert (done.status, done.out, done.err) == (130, "", "interrupted\n")
