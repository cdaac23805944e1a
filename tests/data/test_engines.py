"""Tasks in processes of this machine and as jobs of a cluster: all are done, whatever becomes of some."""

import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import preparing
import pytest
import slurm_jobs
import stores
from conftest import ROOT, error_of
from preparing import digests, make, with_validation
from slurm_jobs import OPTIONS, do, jobs_of

from vaswani_transformer.data import engines
from vaswani_transformer.data.cleaning import clean
from vaswani_transformer.data.engines import run_tasks
from vaswani_transformer.errors import UserError
from vaswani_transformer.files import to_path

small_chunks = preparing.small_chunks
text = preparing.text
tokenizer_folder = preparing.tokenizer_folder
recipe = preparing.recipe
forked_workers = preparing.forked_workers
store = stores.store
slurm = slurm_jobs.slurm


def touch(folder, advance_by, number, advance):
    """A task that leaves a file; some fail."""
    if number % 5 == 3:
        raise UserError(f"piece {number} is damaged")
    (folder / str(number)).touch()
    advance(advance_by)


def die(number, advance):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def wait(folder, number, advance):
    """A task that lasts until it is told to end."""
    (folder / f"{os.getpid()}.started").touch()
    while True:
        time.sleep(0.01)
        advance(1)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", [1, 2])
def test_tasks_that_fail_do_not_stop_the_others(tmp_path, workers):
    task = functools.partial(touch, tmp_path, 10)
    message = error_of(run_tasks, task, 12, workers)
    assert message == "piece 3 is damaged; piece 8 is damaged"
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [0, 1, 2, 4, 5, 6, 7, 9, 10, 11]


def test_reasons_are_named_once_and_not_all_of_very_many(tmp_path):
    task = functools.partial(touch, tmp_path, 10)
    message = error_of(run_tasks, task, 60)
    assert message.endswith("piece 23 is damaged; and 7 more") and message.count("damaged") == 5


@pytest.mark.usefixtures("forked_workers")
def test_bytes_that_are_not_utf8_are_found_before_anything_is_written(recipe, text, tmp_path):
    shutil.copytree(text, tmp_path / "text")
    recipe = dataclasses.replace(recipe, data_dir=str(tmp_path / "text"))
    for name, line in (("part.0.en", 30), ("part.2.de", 40)):
        lines = (text / name).read_bytes().splitlines(keepends=True)
        lines[line - 1] = b"\xff" + lines[line - 1]
        (tmp_path / "text" / name).write_bytes(b"".join(lines))
    message = error_of(make, recipe, tmp_path / "there", workers=2)
    assert "part.0.en, line 30, byte offset 0" in message and "part.2.de, line 40, byte offset 0" in message
    assert not list((tmp_path / "there").glob("*.arrow"))
    for name in ("part.0.en", "part.2.de"):
        shutil.copy(text / name, tmp_path / "text")
    assert make(recipe, tmp_path / "there")["parts"] == make(recipe, tmp_path / "here")["parts"]


@pytest.mark.slow
def test_a_killed_process_ends_in_one_line():
    assert "a worker process was killed" in error_of(run_tasks, die, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_no_process_outlives_its_parent(tmp_path, number):
    task = functools.partial(wait, tmp_path)
    parent = multiprocessing.get_context("fork").Process(target=run_tasks, args=(task, 2, 2))
    parent.start()
    while len(started := list(tmp_path.glob("*.started"))) < 2:
        assert parent.is_alive()
        time.sleep(0.01)
    os.kill(parent.pid, number)
    parent.join(60)
    until = time.monotonic() + 30
    for path in started:
        while Path(f"/proc/{path.stem}").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert not Path(f"/proc/{path.stem}").exists()


@pytest.mark.slow
def test_an_interruption_while_processes_start_is_theirs_alone_who_wait(tmp_path):
    (tmp_path / "script.py").write_text(
        "import signal, time\n"
        "from vaswani_transformer.data.engines import run_tasks\n"
        "def task(number, advance):\n"
        "    pass\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what runs in the background ignores it
        "    run_tasks(task, 2, 2)\n"
        "print('starting', flush=True)\n"
        "time.sleep(1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "starting\n"  # by a process of the pool, before it does anything
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    error = process.communicate(timeout=60)[1]
    assert error.count("Traceback") == 1 and "SpawnProcess" not in error, error


# Slurm


@pytest.mark.parametrize("trained", [True, False])
def test_jobs_in_any_order_and_done_twice_make_the_same_files(recipe, tmp_path, slurm, trained):
    recipe = dataclasses.replace(recipe, tokenizer=None) if trained else recipe
    make(recipe, tmp_path / "here")
    assert make(recipe, tmp_path / "there", engine="slurm", engine_options=OPTIONS) is None
    chance, jobs = random.Random(2), jobs_of(slurm)
    assert [tasks for _, tasks in jobs] == ([3, 1, 3, 1, 3, 1] if trained else [3, 1, 3, 1])
    waits = (tmp_path / "bin" / "sbatch.log").read_text()
    assert waits.count("--dependency=afterok:") == len(jobs) - 1
    for executor, tasks in jobs:
        assert not (tmp_path / "there" / "manifest.json").exists()
        order = [*range(tasks), chance.randrange(tasks)]
        chance.shuffle(order)
        for task in order:
            do(executor, task)
    assert make(recipe, tmp_path / "there", engine="slurm", engine_options=OPTIONS) == make(recipe, tmp_path / "there")
    there = {name: digest for name, digest in digests(tmp_path / "there").items() if not name.startswith(".tasks")}
    assert there == digests(tmp_path / "here")


@pytest.mark.slow
def test_jobs_that_share_only_a_store_make_the_same_files(recipe, text, store, tmp_path, slurm, monkeypatch):
    for path in text.iterdir():
        (to_path(store) / "text" / path.name).write_bytes(path.read_bytes())
    recipe = dataclasses.replace(recipe, data_dir=f"{store}/text")
    make(recipe, tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    there = f"{store}/there"
    assert make(recipe, there, engine="slurm", engine_options=OPTIONS) is None
    for executor, tasks in jobs_of(slurm):
        assert executor.startswith(there)
        for task in (*reversed(range(tasks)), 0):
            do(executor, task)
    assert make(recipe, there) == make(recipe, tmp_path / "here")
    for name, digest in digests(tmp_path / "here").items():
        assert hashlib.sha256((to_path(there) / name).read_bytes()).hexdigest() == digest


def test_jobs_clean_as_one_machine_does(recipe, tmp_path, slurm):
    recipe = with_validation(recipe)
    manifest = clean(recipe, tmp_path / "here", workers=1, progress=False)
    there = functools.partial(clean, recipe, tmp_path / "there", engine="slurm", engine_options=OPTIONS)
    assert there() is None
    for executor, tasks in jobs_of(slurm):
        for task in random.Random(1).sample(range(tasks), tasks):
            do(executor, task)
    assert there() == manifest
    found = {name: digest for name, digest in digests(tmp_path / "there").items() if not name.startswith(".tasks")}
    assert found == digests(tmp_path / "here")


def test_what_has_failed_is_submitted_again_alone(recipe, tmp_path, slurm):
    make(recipe, tmp_path / "there", engine="slurm", engine_options=OPTIONS)
    for executor, tasks in jobs_of(slurm)[:2]:
        for task in range(tasks):
            do(executor, task)
    executor, tasks = jobs_of(slurm)[2]
    for task in (0, 2):
        do(executor, task)
    before = len(jobs_of(slurm))
    next((tmp_path / "there").glob("train-*.arrow")).unlink()  # of a task that is marked as done
    (living := tmp_path / "there" / ".writing-train-00003.arrow.7").touch()  # of a job that is still at work
    make(recipe, tmp_path / "there", engine="slurm", engine_options=OPTIONS)
    assert [tasks for _, tasks in jobs_of(slurm)[before:]] == [2, 1]
    assert living.exists()
    for executor, tasks in jobs_of(slurm)[before:]:
        for task in range(tasks):
            do(executor, task)
    make(recipe, tmp_path / "here")
    there = {name: digest for name, digest in digests(tmp_path / "there").items() if not name.startswith((".", "prep"))}
    assert there == digests(tmp_path / "here")


@pytest.mark.parametrize("what", [make, functools.partial(clean, workers=1, progress=False)], ids=["prepare", "clean"])
def test_what_is_made_anew_is_submitted_anew(recipe, tmp_path, slurm, what):
    """What datatrove has marked as done it would leave out, whether it is still there or not."""

    def submitted(**options) -> list[int]:
        before = len(jobs_of(slurm))
        assert what(recipe, tmp_path / "there", engine="slurm", engine_options=OPTIONS, **options) is None
        new = jobs_of(slurm)[before:]
        for executor, tasks in new:
            for task in range(tasks):
                do(executor, task)
        return [tasks for _, tasks in new]

    recipe = with_validation(recipe)
    first = submitted()
    recipe = dataclasses.replace(recipe, seed=4, max_length=30)
    assert submitted(overwrite=True) == first
    assert what(recipe, tmp_path / "there") == what(recipe, tmp_path / "here")


def test_a_machine_with_another_version_is_refused(recipe, tmp_path, slurm, monkeypatch):
    make(recipe, tmp_path / "p", engine="slurm", engine_options=OPTIONS)
    monkeypatch.setattr(engines, "__version__", "0.0")
    assert "has version 0.0" in error_of(do, jobs_of(slurm)[0][0], 0)


@pytest.mark.parametrize("what", [make, functools.partial(clean, workers=1, progress=False)], ids=["prepare", "clean"])
def test_what_failed_in_a_job_is_named_by_the_same_command(recipe, text, tmp_path, slurm, caplog, what):
    recipe = with_validation(recipe)
    submit = functools.partial(what, recipe, tmp_path / "p", engine="slurm", engine_options=OPTIONS)
    submit()
    executor, _ = jobs_of(slurm)[0]
    path = text / "part.1.en"
    before = path.stat()
    path.touch()
    assert "part.1.en is not as it was" in error_of(do, executor, 1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    caplog.clear()
    submit()
    assert "part.1.en is not as it was" in caplog.text
    caplog.clear()
    submit()
    assert not caplog.records


def test_jobs_that_are_refused(recipe, tmp_path, slurm, capfd):
    sbatch = slurm.parent / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    message = error_of(make, recipe, tmp_path / "p", engine="slurm", engine_options=OPTIONS)
    assert "sbatch refused the jobs (status 1" in message and "invalid partition" in capfd.readouterr().err


def test_options_and_programs_that_are_missing(recipe, tmp_path, slurm, monkeypatch):
    message = error_of(make, recipe, tmp_path / "p", engine="slurm", engine_options={"partition": "cpu"})
    assert "time" in message and message.count("\n") == 0
    message = error_of(make, recipe, tmp_path / "p", engine="slurm", engine_options={**OPTIONS, "colour": 1})
    assert "colour" in message
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no command sbatch" in error_of(make, recipe, tmp_path / "p", engine="slurm", engine_options=OPTIONS)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "engine ray needs ray" in error_of(make, recipe, tmp_path / "q", engine="ray")
    assert "engine ray needs ray" in error_of(clean, with_validation(recipe), tmp_path / "q", engine="ray")
    assert "give one of local, slurm, ray" in error_of(make, recipe, tmp_path / "q", engine="Ray")
    assert not (tmp_path / "q").exists()


@pytest.mark.slow
def test_what_fails_on_ray_is_named(recipe, text, tmp_path):
    """A mistake in the text, and a machine with another version of the package, which here all tasks find."""
    pytest.importorskip("ray")
    (tmp_path / "text").mkdir()
    for side in ("en", "de"):
        (tmp_path / "text" / f"part.0.{side}").write_bytes(b"a line\n" * 9 + b"\xff\n" * (side == "de") + b"b\n" * 5)
    recipe = dataclasses.replace(recipe, data_dir=str(tmp_path / "text"))
    (tmp_path / "recipe.json").write_text(json.dumps({**vars(recipe), "output": None}))
    for change, reason in (("", "part.0.de, line 10"), ("engines.__version__ = '0'; ", "begun with 0: install that")):
        code = f"{change}prepare.prepare(recipe, Path('there'), progress=False, engine='ray', engine_options=options)"
        process = subprocess.run(
            [sys.executable, "-c", RAY_IMPORTS + code, tmp_path / "recipe.json"],
            cwd=tmp_path, timeout=200, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert reason in process.stderr.splitlines()[-1], process.stderr[-2000:]


RAY_IMPORTS = """
import json, sys
from pathlib import Path
from vaswani_transformer.data import engines, prepare
from vaswani_transformer.recipes.recipe import Recipe

recipe, options = Recipe(**json.loads(Path(sys.argv[1]).read_text())), {"workers": 1, "mem_per_cpu_gb": 1}
"""

# What a user's script does, but that the cluster is of three nodes on this machine, of which one is killed.
RAY_DRIVER = """
import json, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from vaswani_transformer.data import prepare
from vaswani_transformer.recipes.recipe import Recipe

recipe, folder = Recipe(**json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.wait_for_nodes()
ray.init(address=cluster.address)

def kill():
    while not list(folder.glob(".tasks/count-*")):
        time.sleep(0.1)
    cluster.remove_node(nodes[1], allow_graceful=False)
    print("killed", flush=True)

thread = threading.Thread(target=kill)
thread.start()
prepare.CHUNK = 40
prepare.prepare(recipe, folder, progress=False, engine="ray", engine_options={"workers": 3, "mem_per_cpu_gb": 1})
thread.join()
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_ray_makes_the_same_files_with_several_nodes_of_which_one_is_killed(recipe, tmp_path):
    pytest.importorskip("ray")
    make(recipe, tmp_path / "here")
    (tmp_path / "recipe.json").write_text(json.dumps({**vars(recipe), "output": None}))
    command = [sys.executable, "-c", RAY_DRIVER, tmp_path / "recipe.json", tmp_path / "there"]
    process = subprocess.run(command, check=True, cwd=ROOT, timeout=500, capture_output=True, text=True)
    assert "killed" in process.stdout
    there = {name: digest for name, digest in digests(tmp_path / "there").items() if not name.startswith(".")}
    assert there == digests(tmp_path / "here")
