"""`vaswani experiment`: cells that are made once, folders of other recipes, runs side by side; made-up cells."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from children import fork, wait, wait_for
from conftest import error_of

from vaswani_transformer import UserError
from vaswani_transformer.experiments.base import (
    Cell,
    Estimate,
    Experiment,
    Setup,
    check_settings,
    chosen_cells,
    describe_runs,
    read_results,
    run_cell,
    write_recipe,
    write_report,
)
from vaswani_transformer.experiments.launch import Job, device_environments, last_error, run_side_by_side


class Squares(Experiment):
    """Cells that write their recipe and square a number; `trouble` is raised in the cell of that name."""

    name, title = "squares", "numbers and their squares"

    def __init__(self, trouble: dict[str, BaseException] | None = None):
        self.trouble, self.ran = trouble or {}, []

    def cells(self, setup: Setup) -> list[Cell]:
        step = int(setup.changes.get("step", 1))
        return [
            Cell(name, f"number {name}", {"number": number * step, "place": None}, {"square": number**2}, group)
            for name, number, group in (("two", 2, "A"), ("three", 3, "A"), ("five", 5, "B"))
        ]

    def estimate(self, setup, cell, device):
        return Estimate()

    def run(self, setup, cell, folder):
        write_recipe(folder, cell)
        self.ran.append(cell.name)
        logging.getLogger("vaswani_transformer.test").info("at %s", cell.name)
        if cell.name in self.trouble:
            raise self.trouble[cell.name]
        return {"square": cell.settings["number"] ** 2}

    def report(self, setup, cells, results):
        return "".join(f"{name} {result['figures']['square']}\n" for name, result in results.items())

    def draw(self, figure, cells, results):
        figure.subplots().plot([result["figures"]["square"] for result in results.values()])


def run_all(experiment: Squares, setup: Setup) -> None:
    done = read_results(experiment, setup, experiment.cells(setup))
    for cell in experiment.cells(setup):
        if cell.name not in done:
            run_cell(experiment, setup, cell)


def test_a_second_call_does_only_what_is_missing(tmp_path):
    setup, first = Setup(output=tmp_path), Squares({"three": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        run_all(first, setup)
    assert first.ran == ["two", "three"]
    second = Squares()
    run_all(second, setup)
    assert second.ran == ["three", "five"]
    run_all(second, setup)
    assert second.ran == ["three", "five"]
    result = json.loads((tmp_path / "squares/laptop/three/result.json").read_text())
    assert (result["figures"], result["paper"], result["settings"]["number"]) == ({"square": 9}, {"square": 9}, 3)
    assert result["machine"]["threads"] >= 1 and "torch" in result["versions"]
    assert "squares three: finished" in (tmp_path / "squares/laptop/three/log.txt").read_text()


def test_run_cell_itself_does_not_repeat_a_finished_one(tmp_path):
    setup, experiment = Setup(output=tmp_path), Squares()
    cell = experiment.cells(setup)[0]
    assert run_cell(experiment, setup, cell) == run_cell(experiment, setup, cell)
    assert experiment.ran == ["two"]


def test_a_folder_of_another_recipe_is_refused_and_stays(tmp_path):
    experiment = Squares()
    run_all(experiment, Setup(output=tmp_path))
    other = Setup(output=tmp_path, changes={"step": "10"})
    message = error_of(run_cell, experiment, other, experiment.cells(other)[0])
    assert re.search(
        r"two is of another recipe \(number 2 there and 20 here\): give the --set that it was made with",
        message,
    )
    assert "another recipe" in error_of(read_results, experiment, other, experiment.cells(other))
    assert json.loads((tmp_path / "squares/laptop/two/result.json").read_text())["figures"] == {"square": 4}


def test_settings_that_are_newer_than_a_folder_do_not_make_it_another(tmp_path):
    cell = Cell("a", "a", {"old": 1})
    write_recipe(tmp_path, cell)
    check_settings(tmp_path, Cell("a", "a", {"old": 1, "new": 2}))
    many = Cell("a", "a", {"old": 2})
    assert "old 1 there and 2 here" in error_of(check_settings, tmp_path, many)
    (tmp_path / "recipe.yaml").write_text("a: [")
    assert "recipe.yaml is not valid YAML" in error_of(check_settings, tmp_path, cell)


def test_a_damaged_result_is_told_and_not_overwritten(tmp_path):
    experiment, setup = Squares(), Setup(output=tmp_path)
    run_all(experiment, setup)
    path = tmp_path / "squares/laptop/two/result.json"
    path.write_text("{")
    assert str(path) in error_of(read_results, experiment, setup, experiment.cells(setup))
    assert path.read_text() == "{"
    for text in ("[]", "{}", '{"figures": {}}', "\xff"):
        path.write_text(text, encoding="latin-1")
        assert str(path) in error_of(read_results, experiment, setup, experiment.cells(setup))


def test_a_result_whose_recipe_is_gone_still_knows_its_settings(tmp_path):
    experiment = Squares()
    run_all(experiment, Setup(output=tmp_path))
    for path in tmp_path.rglob("recipe.yaml"):
        path.unlink()
    other = Setup(output=tmp_path, changes={"step": "10"})
    assert "(number 2 there and 20 here)" in error_of(read_results, experiment, other, experiment.cells(other))


@pytest.mark.parametrize("name", [".cell.lock", ".lock"])
def test_two_processes_do_not_run_one_cell(tmp_path, name):
    """Nor one beside a training that the cell had started and that has outlived it."""
    experiment, setup = Squares(), Setup(output=tmp_path)
    folder = tmp_path / "squares/laptop/two"
    folder.mkdir(parents=True)
    code = f"import fcntl, time; f = open({str(folder / name)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    code += "; print(flush=True); time.sleep(60)"
    cell = experiment.cells(setup)[0]
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        assert f"another process is writing to {folder}" in error_of(run_cell, experiment, setup, cell)
    finally:
        holder.kill()
        holder.wait()
    run_cell(experiment, setup, cell)


def test_time_by_the_clock_and_of_processors():
    def result(seconds, minutes, worked, machine=None):
        where = {"processor": "x", "cores": 2, "threads": 1} | (machine or {})
        found = {"figures": {"minutes": minutes}, "seconds": seconds, "machine": where, "date": "2026-01-02"}
        return found | ({} if worked is None else {"processor_seconds": worked})

    told = describe_runs({"a": result(60, 0.5, 30), "b": result(120, 1.5, 90)})
    assert told == (
        "2 runs, 3.0 minutes in all by the clock (2.0 minutes of processor time); x, 2 cores, 1 thread; 2026-01-02."
    )
    for other in (result(120, 1.5, None), result(60, 4.0, 90)):  # unknown; of the last of several sessions alone
        assert "processor time" not in describe_runs({"a": result(60, 0.5, 30), "b": other})
    told = describe_runs({"a": result(60, 0.5, 30, {"processes": 4})})
    assert told.startswith("1 run, 1.0 minutes") and "1 thread, 4 processes a run;" in told


def test_rows_are_chosen_by_name_or_group(tmp_path):
    cells = Squares().cells(Setup())

    def names(*only):
        return [cell.name for cell in chosen_cells(cells, only)]

    assert names() == names("B", "a") == ["two", "three", "five"]
    assert names("five", "Two") == ["two", "five"]
    assert "there is no row 'thre' in this table: did you mean 'three'?" in error_of(names, "thre")
    assert "there are: two, three, five" in error_of(names, "zzzz")


def test_the_table_is_written_as_markdown_json_and_png(tmp_path):
    experiment, setup = Squares(), Setup(output=tmp_path)
    assert write_report(experiment, setup) == ""  # nothing is there yet
    for cell in experiment.cells(setup)[:2]:
        run_cell(experiment, setup, cell)
    assert write_report(experiment, setup) == "two 4\nthree 9\n"
    folder = tmp_path / "squares/laptop"
    assert (folder / "squares.md").read_text() == "two 4\nthree 9\n"
    changed = Setup(output=tmp_path, changes={"step": "1"})
    assert "Other settings than those of this scale: `step=1`." in write_report(experiment, changed)
    assert [entry["cell"] for entry in json.loads((folder / "squares.json").read_text())] == ["two", "three"]
    assert (folder / "squares.png").read_bytes().startswith(b"\x89PNG")


# Side by side.


def job(folder: Path, name: str, code: str) -> Job:
    return Job(name, [sys.executable, "-c", code], folder / name)


def test_jobs_run_side_by_side_each_with_its_environment(tmp_path):
    meet = (
        "import os, sys, time; from pathlib import Path; me, other = sys.argv[1:3] if len(sys.argv) > 2 else ('', '')\n"
        f"folder = Path({str(tmp_path)!r}); name = os.environ['PLACE']\n"
        "(folder / f'here{name}').touch()\n"
        "end = time.time() + 30\n"
        "while not (folder / f'here{1 - int(name)}').exists() and time.time() < end: time.sleep(0.02)\n"
        "sys.exit(time.time() >= end)"  # each waits for the other
    )
    jobs = [job(tmp_path, "a", meet), job(tmp_path, "b", meet)]
    assert run_side_by_side(jobs, [{"PLACE": "0"}, {"PLACE": "1"}]) == []


def test_a_job_that_fails_stops_no_other(tmp_path):
    fail = "import sys; print('error: no such file', file=sys.stderr); sys.exit(2)"
    jobs = [job(tmp_path, "bad", fail), *(job(tmp_path, name, "print(1)") for name in "ab")]
    failed = run_side_by_side(jobs, [{}])
    assert [job.name for job in failed] == ["bad"]
    assert last_error(tmp_path / "bad/log.txt") == "no such file"
    assert last_error(tmp_path / "none") == f"see {tmp_path / 'none'}"
    (tmp_path / "log").write_text("at first\nerror: no such line\na page of torchrun's\n\n")
    assert last_error(tmp_path / "log") == "no such line"
    (tmp_path / "log").write_text("at first\nat last\n\n")
    assert last_error(tmp_path / "log") == "at last"


def test_ctrl_c_reaches_each_job_once_and_waits_for_it(tmp_path):
    task = (
        "import signal, sys, time; from pathlib import Path\n"
        f"count = []; folder = Path({str(tmp_path)!r})\n"
        "signal.signal(signal.SIGINT, lambda *_: count.append(1))\n"
        "(folder / 'ready').touch()\n"
        "while not count: time.sleep(0.02)\n"
        "time.sleep(0.5); (folder / 'saved').write_text(str(len(count))); sys.exit(130)"
    )
    later = f"open({str(tmp_path / 'ran')!r}, 'w')"

    def run() -> None:
        os.setsid()  # a terminal sends Ctrl-C to all processes of a group
        try:
            run_side_by_side([job(tmp_path, "a", task), job(tmp_path, "later", later)], [{}])
        except KeyboardInterrupt:
            (tmp_path / "stopped").write_text(str((tmp_path / "saved").exists()))

    child = fork(run)
    wait_for((tmp_path / "ready").exists)
    os.killpg(child, signal.SIGINT)
    wait(child)
    assert (tmp_path / "stopped").read_text() == "True"
    assert (tmp_path / "saved").read_text() == "1"
    assert not (tmp_path / "ran").exists()


def test_a_job_is_no_member_of_the_terminals_group(tmp_path):
    alone = "import os, sys; sys.exit(os.getpgid(0) != os.getpid())"
    before = signal.getsignal(signal.SIGINT)
    assert run_side_by_side([job(tmp_path, "a", alone)], [{}]) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_reaches_a_job_that_was_just_being_started(tmp_path, monkeypatch):
    """The handler may come between the start of a process and the note of it."""
    started = subprocess.Popen

    def start(*arguments, **options):
        process = started(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    started_at = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side([job(tmp_path, "a", "import time; time.sleep(600)")], [{}])
    assert time.monotonic() - started_at < 60


def test_devices_and_cores_are_dealt_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    three = device_environments(["cuda:0", "cuda:1"], 3)
    assert [found["CUDA_VISIBLE_DEVICES"] for found in three] == ["0", "1", "0"]
    assert {found["OMP_NUM_THREADS"] for found in three} == {"2"}
    assert device_environments(["cpu"], 1) == [{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "8"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert device_environments(["cuda:1"], 1)[0]["CUDA_VISIBLE_DEVICES"] == "6"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert device_environments([], 2) == [{}, {}]
    assert "cuda:2 is not there: this machine has 2" in error_of(device_environments, ["cuda:2"], 1)


def test_jobs_of_several_processes_get_as_many_devices(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)

    def dealt(devices, jobs, processes):
        return [found.get("CUDA_VISIBLE_DEVICES") for found in device_environments(devices, jobs, processes)]

    eight = [f"cuda:{number}" for number in range(8)]
    assert dealt(eight, 2, 4) == dealt([], 2, 4) == ["0,1,2,3", "4,5,6,7"]
    assert dealt(["cuda:5", "cuda:1"], 1, 2) == ["5,1"]
    assert dealt(["cpu"], 2, 4) == ["", ""]
    for devices, processes, message in (
        (eight, 3, "--processes is 3: each takes a GPU of its own, give a multiple of 3 in --devices and not 8"),
        (["cuda:0", "cuda:0"], 2, "name different ones"), (["cpu", "cuda:0"], 2, "name different ones"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            device_environments(devices, 1, processes)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert dealt([], 2, 2) == [None, None]
