"""Lines in and records out for the commands that decode, and how they go on with what a killed one has written."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..data.text_files import TextScan, decode_lines, read_lines
from ..decoding.ensemble import COMBINATIONS
from ..decoding.output import ResumableOutput, StreamOutput
from ..evaluation.records import model_sha256

RESUME = "the same command with --resume goes on behind the last line that was written"

# A shell may have led them to a file, but it holds them open: there is no name to write beside.
_STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


def is_file(name: str | None) -> bool:
    """Whether this is a file on the disk, or could be one that is missing, and not a pipe or a device."""
    if name is None or str(Path(name).absolute()).startswith(_STREAMS):
        return False
    return Path(name).is_file() or not Path(name).exists()


def input_lines(path: str | None) -> Iterator[str]:
    """Lines of a file or of standard input, without their ends."""
    if path is not None:
        return read_lines(Path(path))
    stream = sys.stdin.buffer
    with contextlib.suppress(OSError, ValueError):  # something else stands in for it
        # A thread that waits for input would keep Python from closing the stream of `sys`.
        stream = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    return decode_lines(stream, "standard input")


def is_interactive(arguments: argparse.Namespace, doing: str) -> bool:
    """Whether sentences are typed on a terminal one by one, which is said there."""
    typed = not arguments.sentences and arguments.input is None and sys.stdin.isatty()
    if typed:
        print(f"{doing} standard input, one sentence a line; Ctrl-D ends it", file=sys.stderr)
    return typed


@contextlib.contextmanager
def told_unfinished(output: StreamOutput | ResumableOutput | None) -> Iterator[None]:
    """Where Ctrl-C ends the body, say how the output is gone on with."""
    try:
        yield
    except KeyboardInterrupt:
        if output is not None and output.unfinished is not None:
            print(f"{output.unfinished} is unfinished: {RESUME}", file=sys.stderr)
        raise


def open_output(
    arguments: argparse.Namespace,
    surveys: Mapping[str, TextScan],
    window: int,
    lines_per_record: int = 1,
    drawn: dict[str, Any] | None = None,
) -> StreamOutput | ResumableOutput:
    """Where `--output` leads to: a file that can be gone on with where a file is read, else a stream.

    Args:
        arguments: of the command, `input`, `output` and `resume` among them.
        surveys: of the files that are read, by their option.
        window: lines that are written together.
        lines_per_record: lines that are written for a line of the input.
        drawn: settings that were chosen at random, and are taken over when an output is gone on with.

    Raises:
        UserError: as `ResumableOutput`.
    """
    if arguments.output is None:
        return StreamOutput(sys.stdout)
    path = Path(arguments.output)
    if not (is_file(arguments.output) and "--input" in surveys):
        return StreamOutput(path)
    settings = _settings(arguments, surveys, window)
    return ResumableOutput(path, settings, lines_per_record, arguments.resume, drawn)


# What changes no line of the output, and what is settled by its content.
_FREE = {"model", "ensemble", "sentences", "input", "output", "prefix", "resume", "device", "long_lines"}
_FREE |= {"run", "parser"}  # of the parser itself


def _settings(arguments: argparse.Namespace, surveys: Mapping[str, TextScan], window: int) -> dict[str, Any]:
    """All that the output depends on, by the option that it comes from."""
    settings = {option: surveyed.sha256 for option, surveyed in surveys.items()}
    settings["MODEL"] = model_sha256(arguments.model)
    if arguments.ensemble:
        settings["--ensemble"] = " ".join(map(model_sha256, arguments.ensemble))
    given = {name: value for name, value in vars(arguments).items() if name not in _FREE}
    given["window"] = window
    if given.get("pictures") is not None:
        given["pictures"] = str(Path(given["pictures"]).resolve())  # the same folder however it is spelled
    given["combine"] = arguments.combine or COMBINATIONS[0]
    return settings | {"--" + name.replace("_", "-"): value for name, value in given.items()}
