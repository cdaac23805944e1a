"""Ctrl-C while a command starts or ends: the package's imports take seconds, before there is anything to catch it.

The package imports this module first, and `begin` is called with that; in any other program it does nothing.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

COMMAND = "vaswani"  # the script that pip makes
EXIT_INTERRUPTED = 130


def is_command(words: list[str] | None = None) -> bool:
    """Whether this process was started as our command, and is neither another program nor a process made by one.

    Args:
        words: the command line of the interpreter; `sys.orig_argv` if none.
    """
    words = iter((sys.orig_argv if words is None else words)[1:])
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif word == "-m":
            return next(words, "") in (__package__, f"{__package__}.cli.main")
        elif word == "-c" or not word.startswith("-"):
            return Path(word).stem == COMMAND
    return False


def _leave(number: int, frame: object) -> None:
    """End at once and in one line: an exception could be lost, or come out as another, in a library's own imports."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def begin() -> None:
    """Let Ctrl-C end our command in one line, until `end`; that of other programs, and one that is ignored, stays."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, _leave)


def end() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def close() -> None:
    """Let Ctrl-C end our command without a word: all is said, and the interpreter takes a second to leave."""
    if is_command() and signal.getsignal(signal.SIGINT) in (_leave, signal.default_int_handler):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # gone, closed or never there
            sys.stdout.flush()  # a signal would lose what waits
        signal.signal(signal.SIGINT, signal.SIG_DFL)


begin()
