"""A script that forks `vaswani translate` many times, kills it and resumes it.

It is one process, so that what the commands import is imported once; it leaves what it saw in `seen.json`.
"""

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from translating import LINES, OPTIONS, run

from vaswani_transformer.decoding.output import notes_path
from vaswani_transformer.decoding.translator import Translator

DISK = 690  # bytes of a full one


def fork(arguments, log: Path, before=None) -> int:
    """A command in a process of its own; its number."""
    child = os.fork()
    if child:
        return child
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell inherit it ignored
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    if before is not None:
        before()
    status = 1
    try:
        status = run(*arguments)
    finally:
        sys.stderr.flush()
        os._exit(status)


def status_of(child: int) -> int | None:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for_lines(path: Path, child: int, lines: int) -> bool:
    """Whether a file has so many lines before its writer ends."""
    until = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        if os.waitpid(child, os.WNOHANG) != (0, 0) or time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def slowly() -> None:
    """Every window takes a moment longer, so that there is time to kill."""
    translate = Translator.translate_prepared

    def wait(self, prepared, progress=None):
        time.sleep(0.03)
        return translate(self, prepared, progress)

    Translator.translate_prepared = wait


def kill_again_and_again(command, output: Path, log: Path, targets, torn: bool = False) -> list[int]:
    """Kill at random moments, later each time, and resume; the lines that were there each time."""
    chance, lines = random.Random(0), []
    for target in targets:
        child = fork([*command, "--output", output, "--resume"], log, slowly)
        if not wait_for_lines(output, child, target):
            break
        time.sleep(chance.random() * 0.06)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines.append(output.read_bytes().count(b"\n") if output.exists() else 0)
        if torn and output.exists() and notes_path(output).exists():  # as a kill while writing would leave it
            with output.open("ab") as file:
                file.write("Ein h\u00e4lf".encode()[:-2])
    assert status_of(fork([*command, "--output", output, "--resume"], log)) == 0, log.read_text()
    return lines


def fork_all(folder: Path, model: str, source: str) -> None:
    """What the tests look at."""
    torch.set_num_threads(1)
    seen, log = {}, folder / "log"
    command = ["translate", model, "--input", source, *OPTIONS]
    assert run(*command, "--output", folder / "first") == 0  # so that the forked ones have all imported
    seen["killed"] = kill_again_and_again(command, folder / "killed", log, (0, 30, 80), torn=True)
    sample = ["translate", model, "--input", source, "--window", "7", "--max-new-tokens", "8", "--sample"]
    child = fork([*sample, "--output", folder / "sample"], log, slowly)
    assert wait_for_lines(folder / "sample", child, 10)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    seed = str(json.loads(notes_path(folder / "sample").read_text())["--seed"])
    seen["killed sample"] = kill_again_and_again(sample, folder / "sample", log, (50,))
    assert run(*sample, "--seed", seed, "--output", folder / "whole sample") == 0

    for name, stop in (("interrupted", signal.SIGINT), ("full", None)):
        output, own_log = folder / name, folder / f"{name}.log"

        def limit():
            slowly()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (DISK, resource.RLIM_INFINITY))

        child = fork([*command, "--output", output], own_log, slowly if stop else limit)
        if stop:
            assert wait_for_lines(output, child, 30)
            os.kill(child, stop)
        seen[name] = {"status": status_of(child), "text": output.read_text(), "error": own_log.read_text()}
        assert status_of(fork([*command, "--output", output, "--resume"], log)) == 0, log.read_text()

    piped, own_log = folder / "piped", folder / "piped.log"
    (folder / "in").write_bytes(b"\n".join(line.encode() for line in LINES[:10]) + b"\n\xff\nA dog.\n")

    def redirect():
        for path, flags, number in ((folder / "in", os.O_RDONLY, 0), (piped, os.O_WRONLY | os.O_CREAT, 1)):
            os.dup2(os.open(path, flags, 0o644), number)

    child = fork(["translate", model, *OPTIONS], own_log, redirect)
    seen["standard input"] = {"status": status_of(child), "text": piped.read_text(), "error": own_log.read_text()}
    (folder / "seen.json").write_text(json.dumps(seen))
