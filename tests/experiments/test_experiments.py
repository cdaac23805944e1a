"""The runner of experiments, on made-up cells: what is finished is not run again, folders of other recipes."""

import fcntl
import json

import pytest
import yaml
from conftest import error_of

from vaswani_transformer import UserError
from vaswani_transformer.experiments import base
from vaswani_transformer.experiments.base import Cell, Experiment, Setup, read_results, run_cell, run_experiment
from vaswani_transformer.output_folder import OutputFolder


class Squares(Experiment):
    """Cells that square a number; `trouble` is raised in the cell of that name."""

    name = "squares"

    def __init__(self, trouble: dict[str, BaseException] | None = None):
        self.trouble, self.ran = trouble or {}, []

    def cells(self, setup: Setup) -> list[Cell]:
        step = int(setup.changes.get("step", 1))
        return [
            Cell(name, f"number {name}", {"number": number * step, "place": None}, {"square": number**2}, group)
            for name, number, group in (("two", 2, "A"), ("three", 3, "A"), ("five", 5, "B"))
        ]

    def check(self, setup, cells):
        pass

    def train(self, setup, cell, folder):
        folder.mkdir(exist_ok=True)
        OutputFolder(folder).write_text("recipe.yaml", yaml.safe_dump(cell.settings))

    def measure(self, setup, cell, folder):
        self.ran.append(cell.name)
        if cell.name in self.trouble:
            raise self.trouble[cell.name]
        return {"square": cell.settings["number"] ** 2}

    def report(self, setup, cells, results):
        return "\n".join(f"{name} {result['figures']['square']}" for name, result in results.items())


def test_a_second_call_does_only_what_is_missing(tmp_path):
    setup, first, second = Setup(output=tmp_path), Squares({"three": KeyboardInterrupt()}), Squares()
    with pytest.raises(KeyboardInterrupt):
        run_experiment(first, setup)
    assert first.ran == ["two", "three"]
    assert run_experiment(second, setup, dry_run=True).count("missing") == 2
    assert run_experiment(second, setup, report=True).startswith("two 4\n\nFinished runs: 1,") and not second.ran
    table = run_experiment(second, setup)
    assert table.startswith("two 4\nthree 9\nfive 25\n\nFinished runs: 3,")
    assert run_experiment(second, setup) == table and second.ran == ["three", "five"]
    folder = tmp_path / "squares/laptop"
    result = json.loads((folder / "three/result.json").read_text())
    assert (result["figures"], result["paper"], result["settings"]["number"]) == ({"square": 9}, {"square": 9}, 3)
    assert result["machine"]["threads"] >= 1 and "torch" in result["versions"]
    run_cell(second, setup, second.cells(setup)[1])
    assert second.ran == ["three", "five"] and json.loads((folder / "three/result.json").read_text()) == result
    assert (folder / "squares.md").read_text() == table + "\n"
    changed = Setup(output=tmp_path, changes={"step": "1"})
    assert "Other settings than those of this scale: `step=1`." in run_experiment(second, changed)


def test_a_cell_that_fails_stops_no_other(tmp_path, caplog):
    experiment, setup = Squares({"two": UserError("no such thing")}), Setup(output=tmp_path)
    assert "1 of 3 cells failed (two), see above" in error_of(run_experiment, experiment, setup)
    assert "two: failed: no such thing" in caplog.text
    assert list(read_results(experiment, setup, experiment.cells(setup))) == ["three", "five"]


def test_a_folder_of_another_recipe_is_refused_and_stays(tmp_path):
    experiment, setup, other = Squares(), Setup(output=tmp_path), Setup(output=tmp_path, changes={"step": "10"})
    run_experiment(experiment, setup)
    message = "two is of another recipe (number 2 there and 20 here): give the --set that it was made with"
    assert message in error_of(run_experiment, experiment, other)
    assert message in error_of(run_cell, experiment, other, experiment.cells(other)[0])
    assert json.loads((tmp_path / "squares/laptop/two/result.json").read_text())["figures"] == {"square": 4}
    path = tmp_path / "squares/laptop/two/recipe.yaml"
    path.write_text("number: 2\n")  # of a version without the other setting
    assert "two" in read_results(experiment, setup, experiment.cells(setup))
    path.write_text("a: [")
    assert "recipe.yaml: " in error_of(read_results, experiment, setup, experiment.cells(setup))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"figures": {}}', "\xff"])
def test_a_damaged_result_is_reported_and_not_overwritten(tmp_path, text):
    experiment, setup = Squares(), Setup(output=tmp_path)
    run_experiment(experiment, setup)
    path = tmp_path / "squares/laptop/two/result.json"
    path.write_text(text, encoding="latin-1")
    assert str(path.parent.parent) in error_of(run_experiment, experiment, setup)
    assert path.read_text(encoding="latin-1") == text


def test_two_processes_do_not_run_one_cell(tmp_path):
    experiment, setup = Squares(), Setup(output=tmp_path)
    folder = tmp_path / "squares/laptop"
    folder.mkdir(parents=True)
    cell = experiment.cells(setup)[0]
    with (folder / ".two.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert f"another process is writing to {folder}" in error_of(run_cell, experiment, setup, cell)
    run_cell(experiment, setup, cell)


def test_other_processes_of_a_launcher_only_train(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(Squares, "train", lambda self, setup, cell, folder: trained.append(cell.name))
    monkeypatch.setenv("RANK", "1")
    experiment, setup = Squares(), Setup(output=tmp_path)
    assert run_experiment(experiment, setup) == "" and not experiment.ran and not list(tmp_path.iterdir())
    assert trained == ["two", "three", "five"]


def test_rows_are_chosen_by_name_or_group():
    def names(*only):
        return [cell.name for cell in base.chosen_cells(Squares().cells(Setup()), only)]

    assert names() == names("B", "a") == ["two", "three", "five"]
    assert names("five", "Two") == ["two", "five"]
    assert "there is no row 'thre' in this table: there are two, A, three, five, B" in error_of(names, "thre")
