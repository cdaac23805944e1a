"""Numbered tasks in processes of this machine: results in order, one line for what fails, no process left behind."""

import functools
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import preparing
import pytest
from children import wait_for
from conftest import error_of

from vaswani_transformer.data.workers import default_workers, run_tasks
from vaswani_transformer.errors import UserError

forked_workers = preparing.forked_workers


def make_task(folder):
    """A task that leaves a file; some fail."""

    def task(number):
        if number == 13:
            raise UserError("piece 13 is damaged")
        (folder / str(number)).touch()
        return number**2, os.getpid()

    return task


def die():
    return lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == 1 else number


def wait(folder):
    def task(number):
        (folder / f"{os.getpid()}.started").touch()
        time.sleep(60)

    return task


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(("workers", "system"), [(1, "posix"), (3, "posix"), (3, "Windows")])
def test_results_come_in_the_order_of_the_numbers(tmp_path, workers, system, monkeypatch):
    if system == "Windows":  # where signals cannot be blocked
        monkeypatch.setattr("vaswani_transformer.data.workers.signal", SimpleNamespace(SIGINT=signal.SIGINT))
    numbers = [7, 3, 11, 5]
    results = list(run_tasks(functools.partial(make_task, tmp_path), numbers, workers))
    assert [square for square, _ in results] == [number**2 for number in numbers]
    assert {path.name for path in tmp_path.iterdir()} == set(map(str, numbers))
    assert (os.getpid() in {process for _, process in results}) == (workers == 1)
    assert list(run_tasks(die, [], workers)) == []


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_that_fails_ends_all(tmp_path, workers):
    before = multiprocessing.active_children()
    message = error_of(list, run_tasks(functools.partial(make_task, tmp_path), [1, 13, 2], workers))
    assert message == "piece 13 is damaged"
    wait_for(lambda: multiprocessing.active_children() == before)  # the executor's thread notices their end by itself


@pytest.mark.usefixtures("forked_workers")
def test_a_killed_process_ends_in_one_line():
    assert "a worker process was killed" in error_of(list, run_tasks(die, range(4), 2))


def test_an_engine_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.data", None)
    assert "pip install 'vaswani_transformer[cluster]'" in error_of(list, run_tasks(die, [], 1, "ray"))
    assert default_workers(0) == default_workers(1) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_no_process_outlives_its_parent(tmp_path, number):
    task = functools.partial(wait, tmp_path)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    parent = multiprocessing.get_context("fork").Process(target=list, args=(run_tasks(task, range(2), 2),))
    parent.start()
    while len(started := list(tmp_path.glob("*.started"))) < 2:
        assert parent.is_alive()
        time.sleep(0.01)
    os.kill(parent.pid, number)
    parent.join(30)
    wait_for(lambda: not any(Path(f"/proc/{path.stem}").exists() for path in started))
