"""What the commands that decode refuse before they load a model, and how what they show is laid out."""

import io
import json
import re
import sys

import pytest
import torch
import translating
from conftest import error_of
from model_folders import change, write_model
from translating import OPTIONS, run

from vaswani_transformer import load_model
from vaswani_transformer.hardware import choose_device

model, source = translating.model, translating.source


@pytest.mark.parametrize("name", ["mps", "no such device", "cpu:x"])
def test_a_device_that_is_not_there(name):
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    assert error_of(choose_device, name).startswith(f"device {name!r}: ")


def files_of(folder):
    for name in ("a.en", "a.de"):
        (folder / name).write_text("A dog.\n")
    (folder / "folder").mkdir()
    return folder / "a.en", folder / "a.de"


COMMANDS = {
    "translate": lambda en, de: ["--input", en, "--prefix", de],
    "score": lambda en, de: ["--source", en, "--target", de],
    "evaluate": lambda en, de: ["--source", en, "--reference", de],
}
READ = [("translate", "--input"), ("translate", "--prefix"), ("score", "--source"), ("score", "--target")]
READ += [("evaluate", "--source"), ("evaluate", "--reference")]
WRITTEN = [("translate", "--output"), ("score", "--output"), ("score", "--json"), ("evaluate", "--output")]
WRITTEN += [("evaluate", "--json")]


@pytest.mark.parametrize(("command", "option"), READ)
def test_a_folder_is_no_file(tmp_path, fails, command, option):
    words = [command, "MODEL", *COMMANDS[command](*files_of(tmp_path))]
    (before, after) = words[: (place := words.index(option) + 1)], words[place + 1 :]
    assert fails(*before, tmp_path / "folder", *after) == f"error: {tmp_path}/folder: Is a directory"
    assert f'Invalid value "" for {option}' in fails(*before, "", *after)


@pytest.mark.parametrize(("command", "option"), WRITTEN)
def test_a_file_to_write_needs_a_folder(tmp_path, fails, command, option):
    words = [command, "MODEL", *COMMANDS[command](*files_of(tmp_path))]
    for name in ("none/x", "a.en/x", "folder"):
        assert f"{option} {tmp_path}/{name} cannot be written" in fails(*words, option, tmp_path / name)
    assert "would not be compressed" in fails(*words, option, tmp_path / "out.gz")
    (tmp_path / "link").symlink_to(tmp_path / "a.en")
    for name in ("a.en", "link"):
        assert "is the same file as" in fails(*words, option, tmp_path / name)
    if option == "--json":
        line = fails(*words, "--output", tmp_path / "new", option, tmp_path / "folder" / ".." / "new")
        assert "--json" in line and "--output" in line and "is the same file as" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.de", "a.en", "folder", "link"]


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "MODEL", "--port", "65536"],
        ["serve", "MODEL", "--timeout", "nan"],
        ["serve", "MODEL", "--queue", "0"],
        ["translate", "MODEL", "--beams", "0"],
        ["translate", "MODEL", "--window", "10000001"],
        ["translate", "MODEL", "--sample", "--temperature", "inf"],
        ["translate", "MODEL", "--length-penalty", "nan"],
        ["average", "FOLDER", "--output", "x", "--last", "0"],
        ["score", "MODEL", "--source", "a", "--target", "b", "--tokens-per-batch", "0"],
    ],
)
def test_a_number_beyond_its_range_is_refused(fails, words):
    line = fails(*words)
    assert words[-2] in line and words[-1] in line and f"(see `vaswani {words[0]} --help`)" in line


def test_a_model_is_all_that_translate_requires(model, fails):
    assert "MODEL is missing (see `vaswani translate --help`)" in fails("translate")
    assert "--reference is missing (see" in fails("evaluate", model, "--source", "a")
    assert "--source requires an argument (see" in fails("evaluate", model, "--source")
    words = ["--ensemble", model, "Two dogs.", "--device", "cpu"]  # the sentence is taken for one more of the ensemble
    assert fails("translate", model, *words) == "error: there is no model folder Two dogs."
    assert "o/m (of the Hub: hf download o/m --local-dir DIR)" in fails("translate", "o/m", "Two dogs.")


def test_a_files_name_as_sentence_is_translated_with_a_hint(model, source, capsys):
    assert run("translate", model, source, *OPTIONS, "--device", "cpu") == 0
    hint, (out, errors) = f"this is a file's name: --input {source} translates the file", capsys.readouterr()
    assert hint in errors and len(out.splitlines()) == 1


def test_a_bar_leaves_the_lines_of_the_output_whole(model, source, tmp_path, monkeypatch):
    """As on a terminal, where both come to the same place: only what follows the last return to the margin is seen."""
    command = ["translate", model, "--input", source, *OPTIONS, "--device", "cpu"]
    terminal = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        assert run(*command) == 0
    lines = [line.split("\r")[-1] for line in terminal.getvalue().split("\n")]
    assert run(*command, "--output", tmp_path / "out") == 0
    expected = (tmp_path / "out").read_text().split("\n")[:-1]
    assert lines[: len(expected)] == expected
    assert re.search(r"[\d.]+ sentences/s\]", lines[len(expected)])


def test_evaluate_reads_its_files_itself(model, tmp_path, capsys, fails, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    english, german = files_of(tmp_path)
    german.write_text("Ein Hund.\nZwei.\n")
    words = ["evaluate", model, "--source", english, "--reference", german, "--device", "cpu"]
    assert f"{german} has more lines than {english}, which has 1:" in fails(*words)
    german.write_text("Ein Hund.\n")
    assert run(*words, "--beams", "2", "--max-new-tokens", "8", "--json", tmp_path / "scores") == 0
    printed = capsys.readouterr()
    assert "split" not in printed.err and not (tmp_path / "cache").exists()
    assert all(word in printed.out for word in ("BLEU", "tok:13a", "chrF", "perplexity"))
    record = json.loads((tmp_path / "scores").read_text())
    assert record["command"].endswith("--source a.en --reference a.de --beams 2 --max-new-tokens 8")
    (tmp_path / "a.tsv").write_text("en\tde\nA dog.\tEin Hund.\n")
    words = ["evaluate", model, "--source", tmp_path / "a.tsv", "--reference", tmp_path / "a.tsv", "--device", "cpu"]
    options = ["--source-column", "en", "--target-column", "de", "--tokens-per-batch", "99"]
    assert run(*words, "--max-new-tokens", "8", *options, "--json", tmp_path / "scores") == 0
    record = json.loads((tmp_path / "scores").read_text())
    assert record["command"].endswith(f"--source a.tsv --reference a.tsv --max-new-tokens 8 {' '.join(options)}")


def test_settings_that_training_once_left_limit_nothing(tmp_path):
    """`Seq2SeqTrainer` filled every field: 20 tokens then bounded prefixes, and stood in records of evaluations."""
    from transformers import GenerationConfig

    folder = write_model(tmp_path / "model")
    own = json.loads((folder / "generation_config.json").read_text())
    defaults = GenerationConfig()._get_default_generation_params()
    defaults = {name: value for name, value in defaults.items() if value is not None}
    change(folder, "generation_config.json", **defaults | own)
    assert json.loads((folder / "generation_config.json").read_text())["max_length"] == 20
    loaded, _ = load_model(folder, "cpu")
    assert loaded.generation_config.max_length is None and loaded.generation_config.num_beams == 4
