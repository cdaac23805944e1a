"""Work in copies of the test's own process, which has imported everything: starting Python anew takes seconds."""

import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from vaswani_transformer.cli.main import main


def fork(work: Callable) -> int:
    """Start `work` in a copy of this process; returns its id.

    The copy's exit status is the number that `work` returns, 0 for anything else, and 70 after an error.
    """
    child = os.fork()
    if child:
        return child
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads have stayed behind
    torch.set_num_threads(1)  # as have these
    status = 70
    try:
        result = work()
        status = result if isinstance(result, int) else 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def wait(child: int) -> int:
    """The exit status of a child, as a negative signal if one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_in_child(words, folder: Path, before: Callable = lambda: None) -> tuple[int, str]:
    """Run a `vaswani` command in a copy of this process.

    Returns its exit status, and what it has written to standard error, which goes to a file of the folder.
    """

    def work():
        for number in (1, 2):
            os.dup2(os.open(folder / f"std{number}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        before()
        status = main([str(word) for word in words])
        sys.stderr.flush()
        return status

    return wait(fork(work)), (folder / "std2").read_text()


def limit_files(size: int) -> None:
    """As on a full disk: files of this process cannot grow beyond so many bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def wait_for(is_done: Callable, process: subprocess.Popen | None = None) -> None:
    """Wait until something is done, or the process that should do it has ended; a minute at most."""
    until = time.monotonic() + 60
    while not is_done() and (process is None or process.poll() is None):
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.001)
