"""Work in copies of the test's own process, which has imported everything: starting Python anew takes seconds."""

import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.utils._http
import torch
from accelerate.state import AcceleratorState

from vaswani_transformer.cli.main import main


def fork(work: Callable) -> int:
    """Start `work` in a copy of this process; returns its id.

    The copy's exit status is the number that `work` returns, 0 for anything else, and 70 after an error.
    """
    child = os.fork()
    if child:
        return child
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell inherit it ignored
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads have stayed behind
    torch.set_num_threads(1)  # as have these
    AcceleratorState._reset_state(reset_partial_state=True)  # of trainings in this process
    # Retries come at once: their number is the client's, their waiting (23 s in all) is not what is tested.
    huggingface_hub.utils._http.time = SimpleNamespace(sleep=lambda seconds: None)
    status = 70
    try:
        result = work()
        status = result if isinstance(result, int) else 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait(child: int) -> int:
    """The exit status of a child, as a negative signal if one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass
class Done:
    """Exit status and output of a process that has ended."""

    status: int
    out: str
    err: str


class Children:
    """Runs commands and code in copies of this process, one after the other.

    Args:
        home: folder of the files `stdout` and `stderr`, to which they write.
    """

    def __init__(self, home: Path):
        self.home, self._running = home, 0

    def start(self, *words, work: Callable | None = None, **environment: str) -> int:
        """Start a `vaswani` command, or other work; returns its process id."""
        if self._running:  # of a test that failed before it waited
            os.kill(self._running, signal.SIGKILL)
            self.wait()

        def write_to_files():
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(self.home / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
            logging.root.handlers.clear()  # those of pytest
            for library in ("transformers", "datasets", "huggingface_hub"):
                logging.getLogger(library).handlers[:] = [logging.StreamHandler(sys.stderr)]
            os.environ.update(environment)
            tempfile.tempdir = None  # TMPDIR may be another one
            sys.argv = ["vaswani", *map(str, words)]
            try:
                return main(sys.argv[1:]) if work is None else work()
            finally:
                sys.stdout.flush()

        self._running = fork(write_to_files)
        return self._running

    def wait(self) -> Done:
        status, self._running = wait(self._running), 0
        return Done(status, *((self.home / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")))

    def vaswani(self, *words, **environment: str) -> Done:
        """Run a command to its end."""
        self.start(*words, **environment)
        return self.wait()

    def run(self, work: Callable, **environment: str) -> Done:
        self.start(work=work, **environment)
        return self.wait()


def run_in_child(words, folder: Path, before: Callable = lambda: None) -> tuple[int, str]:
    """Run a `vaswani` command in a copy of this process, and something before it.

    Returns its exit status, and what it has written to standard error, which goes to a file of the folder.
    """
    done = Children(folder).run(lambda: (before(), main([str(word) for word in words]))[1])
    return done.status, done.err


def run_on_two_processes(*words) -> str:
    """Run a `vaswani` command on two processes that train together; returns what it has printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    command = [*launch, "vaswani_transformer", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def limit_files(size: int) -> None:
    """As on a full disk: files of this process cannot grow beyond so many bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def limit_memory(size: int) -> None:
    """This process gets so many bytes of memory more at most."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def wait_for(condition: Callable, process: subprocess.Popen | None = None):
    """The value of a condition as soon as it is true, or the process that should make it true has ended."""
    until = time.monotonic() + 60
    while not (value := condition()) and (process is None or process.poll() is None):
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.001)
    return value
