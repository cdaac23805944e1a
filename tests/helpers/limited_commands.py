"""A command in a forked process with limits on memory, time and files, less privileged, or whose input changes."""

import ctypes
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

MEMORY, FILE_BYTES = 2 << 30, 64 << 20
SECONDS = 30  # of the processor
PATIENCE = int(os.environ.get("HOSTILE_PATIENCE", "60"))  # seconds by the clock, which goes on while others compute
#: What may be done to a file between two looks at it.
CHANGES: dict[str, Callable[[Path], object]] = {
    "truncate": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "remove": lambda path: path.unlink(),
    "garbage": lambda path: path.write_bytes(b"\xff\x00{[" * 100),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


def run(words: list[str], folder: str, privileged: bool = True, change: tuple[str, str, int] | None = None) -> None:
    """Run a command in a folder and exit with its status; a process that hangs prints where.

    Args:
        words: the command.
        folder: its working folder.
        privileged: False takes the right of root to read and write every file.
        change: the path of a file, what is done to it, one of `CHANGES`, and at which look at it.
    """
    from vaswani_transformer.cli.main import main

    os.chdir(folder)
    if change is not None:
        _change_at_a_look(Path(folder) / change[0], *change[1:])
    if not privileged:
        drop_the_rights_of_root()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {resource.RLIMIT_AS: pages * resource.getpagesize() + MEMORY, resource.RLIMIT_FSIZE: FILE_BYTES}
    limits |= {resource.RLIMIT_CPU: SECONDS, resource.RLIMIT_CORE: 0}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    sys.argv = ["vaswani", *words]
    status = main(words)
    faulthandler.cancel_dump_traceback_later()
    raise SystemExit(status)


def drop_the_rights_of_root() -> None:
    """Make this process obey permissions, as those of other users do; the libraries stay readable.

    The user stays root, since the interpreter may lie where others cannot read, but without capabilities.
    """
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


def _change_at_a_look(path: Path, change: str, at: int) -> None:
    """Change the file when its state has been asked for, or just before it is opened, for the `at`-th time."""
    looks, stat, path = 0, os.stat, os.path.realpath(path)

    def look(name) -> None:
        nonlocal looks
        if isinstance(name, str | os.PathLike) and os.path.abspath(name) == path:  # noqa: PTH100
            looks += 1
            if looks == at:
                CHANGES[change](Path(path))

    def stat_and_look(name, *arguments, **options):
        result = stat(name, *arguments, **options)
        look(name)
        return result

    os.stat = stat_and_look
    sys.addaudithook(lambda event, details: look(details[0]) if event == "open" else None)
