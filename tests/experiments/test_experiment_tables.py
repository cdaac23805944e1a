"""Tables 2 to 4 at tiny scale: every row through the command, on made-up text and trees."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import error_of
from experimenting import TINY, experiment, write_gum, write_multi30k

from vaswani_transformer import UserError, VaswaniConfig
from vaswani_transformer.cli.main import main
from vaswani_transformer.experiments import positions, table3
from vaswani_transformer.experiments import translation as cells_module
from vaswani_transformer.experiments.base import Setup
from vaswani_transformer.experiments.paper_tables import TABLE3
from vaswani_transformer.experiments.table3 import Table3
from vaswani_transformer.experiments.translation import scaled_down, spread, training_log
from vaswani_transformer.parsing.evalb import BASELINES
from vaswani_transformer.recipes.recipe import Recipe


@pytest.fixture(scope="module")
def multi30k(tmp_path_factory, cache) -> Path:
    return write_multi30k(tmp_path_factory.mktemp("multi30k"))


# Table 3.


def test_every_row_of_table_3_keeps_its_ratios():
    base = VaswaniConfig.from_preset("base")
    small = scaled_down(Recipe(preset="base"))
    for row in TABLE3:
        config, scaled = VaswaniConfig.from_preset(row.preset), scaled_down(Recipe(preset=row.preset))
        for name in ("d_model", "d_ff", "d_k", "d_v", "num_heads", "encoder_layers", "decoder_layers"):
            assert scaled[name] / small[name] == pytest.approx(getattr(config, name) / getattr(base, name)), row
        assert (scaled["dropout"], scaled["position_encoding"]) == (config.dropout, config.position_encoding)


@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_recipes_of_table_3_are_the_papers_rows(scale):
    experiment = Table3()
    setup = Setup(scale=scale)
    cells = {cell.name: cell for cell in experiment.cells(setup)}
    assert len(cells) == 22 and [cell.group for cell in cells.values()].count("base") == 3
    recipes = {name: experiment.recipe(setup, experiment.training(setup, cell)) for name, cell in cells.items()}
    base = recipes["base"]
    assert (base.label_smoothing, base.adam_beta2, base.num_beams, base.length_penalty) == (0.1, 0.98, 4, 0.6)
    assert [recipes[f"d-smoothing-{value}"].label_smoothing for value in ("0.0", "0.2")] == [0.0, 0.2]
    assert [recipes[f"d-dropout-{value}"].dropout for value in ("0.0", "0.2")] == [0.0, 0.2]
    assert recipes["big"].max_steps == 3 * base.max_steps and recipes["big"].dropout == 0.3
    assert [recipes[name].seed for name in ("base", "base-seed-1", "base-seed-2")] == [0, 1, 2]
    assert {(recipe.average_checkpoints, recipe.keep_weights) for recipe in recipes.values()} == {(0, "last")}
    if scale == "paper":
        for row in TABLE3:
            assert recipes[row.preset.removeprefix("table3-")].preset == row.preset


@pytest.mark.slow
def test_table3_command_goes_on_where_it_was_cut_off(multi30k, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(table3, "SEEDS", 2)
    words = ["table3", "--data-dir", multi30k, "--output", tmp_path, "--only", "base", "--set", *TINY]
    score, trained = cells_module.score_translation_model, []
    train = cells_module.train

    def train_counted(recipe):
        trained.append(Path(recipe.output).name)
        return train(recipe)

    def cut_off(folder, *arguments):
        if folder.name == "base-seed-1":
            raise KeyboardInterrupt
        return score(folder, *arguments)

    monkeypatch.setattr(cells_module, "train", train_counted)
    monkeypatch.setattr(cells_module, "score_translation_model", cut_off)
    status, output, _ = experiment(capsys, *words)
    assert status == 130 and "run the same command again" in output
    assert trained == ["base", "base-seed-1"]  # the second is trained, and not yet scored
    monkeypatch.setattr(cells_module, "score_translation_model", score)
    status, output, _ = experiment(capsys, *words)
    assert status == 0 and trained == ["base", "base-seed-1"]
    assert "2 seeds of the base" in output and "| (A) h 1, d_k = d_v 512 |" in output
    folder = tmp_path / "table3/laptop"
    results = [json.loads((folder / name / "result.json").read_text()) for name in ("base", "base-seed-1")]
    assert [result["figures"]["steps"] for result in results] == [4, 4]
    assert results[0]["figures"]["perplexity"] != results[1]["figures"]["perplexity"]
    assert results[0]["paper"] == {"perplexity": 4.92, "bleu": 25.8, "millions": 65}
    assert results[0]["figures"]["parameters"] == sum(
        tensor.numel() for tensor in torch.nn.ParameterList(load_weights(folder / "base"))
    )
    assert len((folder / "base/translations.txt").read_text().splitlines()) == 10
    status, _, errors = experiment(capsys, *words[:5], "--only", "big", "--set", *TINY, "num_beams=2")
    assert status == 2 and "is of another recipe (num_beams 1 there and 2 here)" in errors


def test_a_cell_that_fails_stops_no_other(multi30k, tmp_path, capsys, caplog, monkeypatch):
    """In one process too."""

    def train(recipe):
        if recipe.seed == 0:
            raise UserError("no such thing")
        folder = Path(recipe.output)
        folder.mkdir(exist_ok=True)
        (folder / "training_log.jsonl").write_text('{"step": 4, "seconds": 1.0}\n')

    figures = {"perplexity": 2.0, "bleu": 1.0, "paper_bleu": 1.0, "bleu_signature": "s", "parameters": 5}
    monkeypatch.setattr(cells_module, "train", train)
    monkeypatch.setattr(cells_module, "score_translation_model", lambda *_: dict(figures))
    words = ["table3", "--data-dir", multi30k, "--output", tmp_path, "--set", *TINY, "--only"]
    status, _, errors = experiment(capsys, *words, "base")
    assert status == 2 and "1 of 3 cells failed (base), see above" in errors
    assert "base: failed: no such thing" in caplog.text
    found = sorted(path.parent.name for path in tmp_path.rglob("result.json"))
    assert found == ["base-seed-1", "base-seed-2"]
    status, _, errors = experiment(capsys, *words, "base", "d-dropout-0.0")
    assert "2 of 2 cells failed" in errors
    assert experiment(capsys, *words, "d-dropout-0.0")[2].endswith("error: no such thing\n")


def test_a_process_of_jobs_runs_its_cell_alone(multi30k, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Table3, "run", lambda *_: {})
    words = ["table3", "--data-dir", multi30k, "--output", tmp_path, "--set", *TINY]
    assert experiment(capsys, *words, "--one", "base")[0] == 0  # which is a group, too
    assert [path.name for path in (tmp_path / "table3/laptop").iterdir()] == ["base"]


def load_weights(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


def test_no_hours_are_told_for_what_is_only_measured(capsys, tmp_path):
    status, out, _ = experiment(capsys, "table1", "--scale", "paper", "--dry-run", "--output", tmp_path)
    assert status == 0 and "9 of 9 cells to run: hours are not known" in out
    _, out, _ = experiment(capsys, "table1", "--dry-run", "--output", tmp_path)
    assert "9 of 9 cells to run: 0.025 hours one after the other" in out


def test_dry_run_tells_what_is_missing_and_starts_nothing(tmp_path, capsys):
    words = ["table3", "--output", tmp_path, "--dry-run", "--device", "p100 x8"]
    status, output, _ = experiment(capsys, *words, "--scale", "paper", "--only", "base", "big")
    assert status == 0 and not list(tmp_path.iterdir())
    # Section 5.2: 0.4 s a step for 100,000 steps of base, 1 s for 300,000 of big.
    assert re.search(r"\| base \| missing \| 63,045,632 \| 100,000 \| \S+ \| 11.11 \|", output)
    assert re.search(r"\| big \| missing \| 214\d{6}|214,\d{3},\d{3} \| 300,000 \| \S+ \| 83.33 \|", output)
    assert "4 of 4 cells to run" in output
    # Not by the number of jobs, which share what this machine has; and on another machine by their number.
    if not torch.cuda.is_available():
        assert "one after the other, jobs share the cores" in experiment(
            capsys, "table3", "--output", tmp_path, "--dry-run", "--jobs", "2", "--only", "base")[1]  # fmt: skip
    output = experiment(capsys, *words, "--scale", "paper", "--only", "big", "--devices", "cuda:0", "cuda:1")[1]
    assert "83.33 hours one after the other, about 41.67 with 2 jobs" in output
    output = experiment(capsys, *words[:-2], "--scale", "paper", "--only", "big", "--devices", "cuda:0", "cuda:1")[1]
    assert "hours are for p100, base and big by the paper's step times" in output  # one GPU a cell
    assert "666.67 hours one after the other, about 333.33 with 2 jobs" in output
    output = experiment(capsys, "table1", "--output", tmp_path, "--dry-run", "--scale", "paper")[1]
    assert "hours are those of two CPU cores" in output and "FLOPs," not in output


def test_spread():
    assert spread([1.0, 2.0, 6.0]) == (3.0, 2.5)


# Table 2.


@pytest.fixture(scope="module")
def table2_folder(multi30k, tmp_path_factory):
    """A folder of experiments with Table 2's base row, made with a relative --output far from the data."""
    pytest.importorskip("sacremoses")
    folder = tmp_path_factory.mktemp("table2")
    words = ["table2", "--data-dir", str(multi30k), "--output", "experiments", "--only", "en-de-base", "--set", *TINY]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["experiment", *words]) == 0
    return folder / "experiments"


def test_table2_command(table2_folder):
    folder = table2_folder / "table2/laptop"
    assert "| GNMT + RL | 24.6 | 39.92 | 2.3e+19 | 1.4e+20 |" in (folder / "table2.md").read_text()
    figures = json.loads((folder / "en-de-base/result.json").read_text())["figures"]
    assert {"bleu", "paper_bleu", "bleu_signature"} <= figures.keys() and figures["sentences"] == 12
    assert figures["flops_by_time"] > figures["flops_counted"] > 0  # nothing multiplies faster than the peak
    peak = figures["sustained_tflops"] * 1e12
    assert figures["flops_by_time"] == pytest.approx(60 * figures["minutes"] * peak, abs=0.4 * peak)  # rounded minutes


# Table 4.


def test_table4_command(tmp_path, capsys, cache):
    data = write_gum(tmp_path / "trees")
    changes = [word for word in TINY if not word.startswith("vocab")] + ["max_length=60", "vocab_size=700"]
    words = ["table4", "--data-dir", data, "--output", tmp_path, "--set", *changes]
    words += ["--only", *BASELINES, "transformer"]
    status, output, errors = experiment(capsys, *words)
    assert status == 0, errors
    assert "| Transformer (4 layers) | WSJ only, discriminative | 91.3 |" in output
    figures = json.loads((tmp_path / "table4/laptop/transformer/result.json").read_text())["figures"]
    assert figures["well_formed"] == 100.0 > figures["free_well_formed"]  # untrained, left free
    assert 0 <= figures["bracket_f1"] <= 100
    assert re.search(r"\| Transformer, words in the trees \| on \| 100.0 \|", output)
    baseline = json.loads((tmp_path / "table4/laptop/right-branching/result.json").read_text())["figures"]
    assert baseline["bracket_f1"] > 0
    assert experiment(capsys, *words)[1] == output
    (data / "gum.train.trees").unlink()
    assert experiment(capsys, *words)[0] == 0  # they are finished and need no data
    status, _, errors = experiment(capsys, "table4", "--data-dir", data, "--output", tmp_path / "other")
    assert status == 2 and "has no gum.train.trees.gz" in errors


def test_a_trained_cell_without_its_log(tmp_path):
    for text in (None, "", "{torn"):
        if text is not None:
            (tmp_path / "training_log.jsonl").write_text(text)
        assert "no training_log.jsonl: remove that folder" in error_of(training_log, tmp_path)


# What the heads look at; positions.


def test_attention_command_takes_the_model_of_table_2(multi30k, table2_folder, capsys, monkeypatch):
    monkeypatch.setattr(cells_module, "train", None)  # it is trained already
    words = ["attention", "--data-dir", multi30k, "--output", table2_folder, "--set", *TINY]
    assert "| heads | missing |  |  |  | 0.00 |" in experiment(capsys, *words, "--dry-run")[1]
    status, output, errors = experiment(capsys, *words)
    assert status == 0, errors
    assert "# What the heads do" in output
    folder = table2_folder / "attention/laptop"
    figures = json.loads((folder / "heads/result.json").read_text())["figures"]
    assert {kind: sum(counts.values()) for kind, counts in figures["roles"].items()} == {
        "encoder": 2, "decoder": 2, "encoder-decoder": 2}  # fmt: skip
    assert "<html" in (folder / "heads/sentence-1.html").read_text()
    assert (folder / "attention.png").is_file() and (folder / "heads/sentence-1-encoder.png").is_file()
    assert experiment(capsys, *words)[1] == output


def test_positions_command(tmp_path, capsys, monkeypatch):
    small = {"d_model": 16, "d_ff": 16, "layers": 1, "steps": 2, "batch": 4, "examples": 4}
    monkeypatch.setattr(positions, "STUDIES", (positions.LengthStudy(trained=6, tested=(3, 8), **small),))
    words = ["positions", "--output", tmp_path]
    status, output, errors = experiment(capsys, *words, "--only", "copy-learned-1")
    assert status == 0, errors
    assert re.search(r"\| copy \| learned \| 1 \| [\d.]+% \|", output) and "| 8 (longer) | 4 |  |  |" in output
    status, output, errors = experiment(capsys, *words)
    folder = tmp_path / "positions/laptop"
    assert {path.parent.name for path in folder.glob("*/result.json")} == {
        f"copy-{encoding}-{seed}" for encoding in ("sinusoidal", "learned") for seed in (0, 1)}  # fmt: skip
    entries = [
        json.loads((folder / f"copy-learned-{seed}/result.json").read_text())["figures"]["lengths"][1]
        for seed in (0, 1)
    ]
    accuracies = [entry["token_accuracy"] for entry in entries]
    cell = f"{sum(accuracies) / 2:.1f} ({accuracies[0]:.0f}, {accuracies[1]:.0f})"
    row = next(line for line in output.splitlines() if line.startswith("| 8 (longer) | 4 |"))
    assert row.strip("| ").split(" | ")[4] == cell
    assert (folder / "positions.png").is_file() and "4 runs" in output
    assert experiment(capsys, *words)[1] == output
    assert "leave --set out" in experiment(capsys, *words, "--set", "steps=3")[2]


# Mistakes.


@pytest.mark.parametrize(
    "words, message",
    [
        (["tabel3"], "there is no experiment 'tabel3': did you mean 'table3'?"),
        (["table3", "--only", "c-dmodel-2048"], "did you mean 'c-dmodel-1024'?"),
        (["table3"], "give --data-dir, the folder with train.en.gz, train.de.gz"),
        (["table3", "--data-dir", "/nowhere"], "--data-dir /nowhere is not a folder"),
        (["table3", "--set", "max_stepz=3"], "did you mean 'max_steps'?"),
        (["table3", "--set", "output=there"], "--set output is not for an experiment: give --output"),
        (["table3", "--set", "max_steps=many"], "max_steps is 'many'"),
        (["table3", "--device", "p100"], "--device goes with --dry-run"),
        (["table3", "--dry-run", "--jobs", "0"], "--jobs is 0: it must be from 1 to 256"),
        (["table3", "--report", "--jobs", "-1"], "--jobs is -1"),
        (["table1", "--dry-run", "--jobs", "2"], "--jobs is 2: table1 measures time"),
        (["table3", "--dry-run", "--devices", "cuda:64"], "cuda:64 is not there"),
        (["table1", "--output", __file__], "is a file: give a folder"),
        (["table1", "--output", f"{__file__}/there"], f"is within the file {__file__}: give a folder"),
        (["table4"], "give --data-dir, the folder with gum.train.trees.gz, gum.dev.trees.gz (or as plain text"),
        (
            ["table4", "--data-dir", "."],
            "has no gum.train.trees.gz, gum.dev.trees.gz (or as plain text, without .gz): give",
        ),
        (["table1", "--output", ""], "--output is empty"),
        (["table3", "--dry-run", "--devices", "gpu", "--device", "p100"], "--devices 'gpu' is not known"),
        (["table3", "--only", "Z"], "big; groups A, B, C, D, E"),
    ],
)
def test_mistakes_end_in_one_line(words, message, tmp_path, capsys):
    status, _, errors = experiment(capsys, words[0], "--output", tmp_path, *words[1:])
    assert status == 2 and message in errors and errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_cells_side_by_side_are_those_of_one_after_the_other(multi30k, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = []
    for name, options in (("one", []), ("two", ["--jobs", "2"])):
        words = ["table3", "--data-dir", multi30k, "--output", tmp_path / name, "--only", "base", "--set", *TINY]
        assert experiment(capsys, *words, *options)[0] == 0
        files = sorted((tmp_path / name).glob("table3/laptop/*/result.json"))
        results.append({file.parent.name: json.loads(file.read_text())["figures"] for file in files})
    assert results[0].keys() == results[1].keys() and len(results[0]) == 3
    for name, figures in results[0].items():
        assert results[1][name]["perplexity"] == pytest.approx(figures["perplexity"], rel=1e-3)
        assert results[1][name]["bleu"] == pytest.approx(figures["bleu"], abs=1e-2)
