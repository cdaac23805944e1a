"""Tables 2 to 4 at tiny scale: every row through the command, on made-up text and trees."""

import json
from pathlib import Path

import pytest
from conftest import error_of
from experimenting import TINY, experiment, write_gum, write_multi30k

from vaswani_transformer import VaswaniConfig
from vaswani_transformer.cli.main import main
from vaswani_transformer.experiments import translation
from vaswani_transformer.experiments.base import TABLE3, Setup
from vaswani_transformer.experiments.translation import Table2, Table3, laptop_changes, trained
from vaswani_transformer.training.checkpoints import Checkpoint, to_average


@pytest.fixture(scope="module")
def multi30k(tmp_path_factory) -> Path:
    return write_multi30k(tmp_path_factory.mktemp("multi30k"))


def test_every_row_of_table_3_keeps_its_ratios():
    base, small = VaswaniConfig.from_preset("base"), laptop_changes("base", "de")
    for row in TABLE3:
        config, scaled = VaswaniConfig.from_preset(row.preset), laptop_changes(row.preset, "de")
        for name in ("d_model", "d_ff", "d_k", "d_v", "num_heads", "encoder_layers", "decoder_layers"):
            assert scaled[name] / small[name] == pytest.approx(getattr(config, name) / getattr(base, name)), row
        assert (scaled["dropout"], scaled["position_encoding"]) == (config.dropout, config.position_encoding)


def test_on_a_laptop_table_2_averages_the_end_of_training():
    for recipe in (cell.recipe for cell in Table2().cells(Setup())):
        written = [Checkpoint(Path(f"checkpoint-{step}")) for step in range(40, recipe.max_steps + 1, 40)]
        averaged = to_average(written, recipe.average_checkpoints, recipe.save_every, recipe.max_steps)
        assert len(averaged) == recipe.average_checkpoints and averaged[0].step > 0.8 * recipe.max_steps


@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_recipes_of_table_3_are_the_papers_rows(scale):
    cells = {cell.name: cell for cell in Table3().cells(Setup(scale=scale))}
    assert len(cells) == 22 and [cell.group for cell in cells.values()].count("base") == 3
    recipes = {name: cell.recipe for name, cell in cells.items()}
    base = recipes["base"]
    assert (base.label_smoothing, base.adam_beta2, base.num_beams, base.length_penalty) == (0.1, 0.98, 4, 0.6)
    assert [recipes[f"d-smoothing-{value}"].label_smoothing for value in ("0.0", "0.2")] == [0.0, 0.2]
    assert [recipes[f"d-dropout-{value}"].dropout for value in ("0.0", "0.2")] == [0.0, 0.2]
    assert recipes["big"].max_steps == 3 * base.max_steps and recipes["big"].dropout == 0.3
    assert [recipes[name].seed for name in ("base", "base-seed-1", "base-seed-2")] == [0, 1, 2]
    others = [cell.recipe.seed for cell in Table3().cells(Setup(scale=scale, changes={"seed": "7"}))]
    assert others[:3] == [7, 8, 9] and set(others[3:]) == {7}
    assert {(recipe.average_checkpoints, recipe.keep_weights) for recipe in recipes.values()} == {(0, "last")}
    if scale == "paper":
        for row in TABLE3:
            assert recipes[row.preset.removeprefix("table3-")].preset == row.preset


@pytest.mark.slow
def test_table3_command_goes_on_where_it_was_cut_off(multi30k, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(translation, "SEEDS", 2)
    words = ["table3", "--data-dir", multi30k, "--output", tmp_path, "--only", "base", "--set", *TINY]
    score, trained = translation.score_model, []
    train = translation.train

    def train_counted(recipe):
        trained.append(Path(recipe.output).name)
        return train(recipe)

    def cut_off(folder, *arguments):
        if folder.name == "base-seed-1":
            raise KeyboardInterrupt
        return score(folder, *arguments)

    monkeypatch.setattr(translation, "train", train_counted)
    monkeypatch.setattr(translation, "score_model", cut_off)
    status, output, _ = experiment(capsys, *words)
    assert status == 130 and "run the same command again" in output
    assert trained == ["base", "base-seed-1"]  # the second is trained, and not yet scored
    monkeypatch.setattr(translation, "score_model", score)
    status, output, _ = experiment(capsys, *words)
    assert status == 0 and trained == ["base", "base-seed-1"]
    assert "2 seeds of the base" in output and "| (A) h 1, d_k = d_v 512 |" in output
    folder = tmp_path / "table3/laptop"
    results = [json.loads((folder / name / "result.json").read_text()) for name in ("base", "base-seed-1")]
    assert results[0]["figures"]["perplexity"] != results[1]["figures"]["perplexity"]
    assert results[0]["paper"] == {"perplexity": 4.92, "bleu": 25.8, "millions": 65}
    assert len((folder / "base/translations.txt").read_text().splitlines()) == 10


def test_dry_run_lists_what_is_missing_and_starts_nothing(tmp_path, capsys):
    words = ["table3", "--output", tmp_path, "--dry-run", "--scale", "paper", "--only", "base", "big"]
    status, output, _ = experiment(capsys, *words)
    assert status == 0 and not list(tmp_path.iterdir())
    assert "| base | missing | 100,000 |" in output
    assert output.count("missing") == 4


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
    assert figures["flops_by_time"] == pytest.approx(60 * figures["minutes"] * figures["sustained_tflops"] * 1e12)


def test_table4_command(tmp_path, capsys):
    data = write_gum(tmp_path / "trees")
    changes = [word for word in TINY if not word.startswith("vocab")] + ["max_length=60", "vocab_size=700"]
    words = ["table4", "--data-dir", data, "--output", tmp_path, "--only", "transformer", "--set", *changes]
    status, output, errors = experiment(capsys, *words)
    assert status == 0, errors
    assert "| Transformer (4 layers) | WSJ only, discriminative | 91.3 |" in output
    figures = json.loads((tmp_path / "table4/laptop/transformer/result.json").read_text())["figures"]
    assert figures["well_formed"] == 100.0 > figures["free_well_formed"]  # untrained, left free
    assert 0 <= figures["bracket_f1"] <= 100
    assert experiment(capsys, *words)[1] == output
    (data / "gum.train.trees").unlink()
    assert experiment(capsys, *words)[0] == 0  # they are finished and need no data
    status, _, errors = experiment(capsys, "table4", "--data-dir", data, "--output", tmp_path / "other")
    assert status == 2 and f"{data}/gum.train.trees.gz: No such file" in errors


def test_a_trained_cell_without_its_log(tmp_path):
    for text in (None, "", "{torn"):
        if text is not None:
            (tmp_path / "training_log.jsonl").write_text(text)
        assert "training_log.jsonl: " in error_of(trained, tmp_path)


@pytest.mark.parametrize(
    "words, message",
    [
        (["tabel3"], 'Did you mean "table3"?'),
        (["table3", "--only", "c-dmodel-2048"], "there are base, base-seed-1"),
        (["table3"], "train.en.gz: No such file"),
        (["table3", "--set", "max_stepz=3"], "did you mean 'max_steps'?"),
        (["table3", "--set", "max_steps=auto"], "max_steps is auto, which `vaswani train` alone chooses"),
        (["table3", "--set", "output=there"], "--set 'output=there' is not a setting of a cell"),
        (["table4", "--data-dir", "."], "gum.train.trees.gz: No such file"),
    ],
)
def test_mistakes_end_in_one_line(words, message, tmp_path, capsys):
    status, _, errors = experiment(capsys, words[0], "--output", tmp_path, *words[1:])
    assert status == 2 and message in errors and errors.count("\n") == 1
    assert not list(tmp_path.iterdir())
