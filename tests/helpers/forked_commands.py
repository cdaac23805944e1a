"""Commands and code as processes of their own: forks of one process that has imported everything once.

A fork takes milliseconds, a new process seconds: one process serves all tests. Tests of the Hub need this too because
`huggingface_hub` reads HF_ENDPOINT when it is imported, so that the client of a test's own process cannot be used.
"""

import contextlib
import copy
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Done:
    """Exit status and output of a process that has ended."""

    status: int
    out: str
    err: str


class ForkedCommands:
    """Runs commands and code one after the other; close it in the end.

    Args:
        home: folder for HF_HOME and output.
        environment: variables that are there at the imports.
    """

    def __init__(self, home: Path, **environment: str):
        self.home, self.more, self.memory, self._running = home, {}, 0, []
        names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE")
        names = (*names, "HF_DATASETS_CACHE")
        environment = {name: value for name, value in os.environ.items() if name not in names} | environment
        environment |= {"HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            text=True,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(home / "serving").open("w"),
        )
        self._ready = []

    def having(self, memory: int = 0, **environment: str) -> "ForkedCommands":
        """The same with further variables, and at most so many bytes of address space if not 0."""
        other = copy.copy(self)
        other.more, other.memory = {**self.more, **environment}, memory
        return other

    def start(self, *, command=None, code: str | None = None, **environment: str) -> int:
        """Start a `vaswani` command or Python code; returns its process id."""
        if not self._ready:  # only now: it imports while the test prepares
            line = self.process.stdout.readline()
            assert line == "ready\n", (self.home / "serving").read_text(encoding="utf-8")[-2000:]
            self._ready.append(True)
        if self._running:  # of a test that failed before it waited
            os.kill(self._running[0], signal.SIGKILL)
            self.wait()
        request = {"command": command and [str(word) for word in command], "code": code, "memory": self.memory}
        request |= {"environment": self.more | environment, "home": str(self.home)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        self._running.append(int(self.process.stdout.readline()))
        return self._running[0]

    def wait(self) -> Done:
        """Wait for the process that was started."""
        status = int(self.process.stdout.readline())
        self._running.clear()
        return Done(status, *((self.home / name).read_text(encoding="utf-8") for name in ("out", "err")))

    def vaswani(self, *command, **options) -> Done:
        """Run a command to its end."""
        self.start(command=command, **options)
        return self.wait()

    def python(self, code: str, **options) -> Done:
        """Run Python code to its end."""
        self.start(code=code, **options)
        return self.wait()

    def close(self) -> None:
        """End it."""
        self.process.stdin.close()
        self.process.wait(timeout=30)


def _child(request: dict) -> int:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(request["home"]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", encoding="utf-8"), os.fdopen(2, "w", encoding="utf-8")
    os.environ.update(request["environment"])
    if request["environment"].get("HF_HUB_OFFLINE"):
        import datasets
        import huggingface_hub

        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True  # read at their import
    if request["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], resource.getrlimit(resource.RLIMIT_AS)[1]))
    tempfile.tempdir = None  # TMPDIR may be another one
    try:
        if request["code"] is not None:
            exec(request["code"], {"__name__": "__main__"})
            return 0
        from vaswani_transformer.cli.main import main

        sys.argv = ["vaswani", *request["command"]]
        return main()
    except SystemExit as exit_:
        return exit_.code
    except BaseException:
        traceback.print_exc()
        return 70


#: Imported once, besides what every command imports: what some commands import when they run.
MODULES = [
    "attention.heads", "data.prepare", "decoding.streaming", "parsing.parser", "experiments.table4",
    "evaluation.metrics", "training.averaging", "export.exporting", "export.ctranslate2_model", "serving.app",
]  # fmt: skip


def _serve() -> None:
    import importlib
    import types

    import datasets  # noqa: F401
    import huggingface_hub.utils._http
    import hypothesis  # noqa: F401 (warns if it is imported later)
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: F401

    import vaswani_transformer.cli.main
    import vaswani_transformer.hub.push
    import vaswani_transformer.training.run  # noqa: F401
    from vaswani_transformer import VaswaniConfig, VaswaniModel

    for module in MODULES:
        with contextlib.suppress(ImportError):  # those of an extra
            importlib.import_module(f"vaswani_transformer.{module}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # the first load fills caches of transformers
        VaswaniModel(VaswaniConfig(vocab_size=8, d_model=8, d_ff=8, num_heads=1)).save_pretrained(folder)
        VaswaniModel.from_pretrained(folder)
    # Retries come at once: their number is the client's, their waiting (23 s in all) is not what is tested.
    huggingface_hub.utils._http.time = types.SimpleNamespace(sleep=lambda seconds: None)
    os.fsync = lambda descriptor: None  # as in the tests themselves
    gc.collect()
    gc.freeze()  # as in conftest.py
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = _child(json.loads(line))
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit(status)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()
    os._exit(0)  # taking everything down takes seconds


if __name__ == "__main__":
    _serve()
