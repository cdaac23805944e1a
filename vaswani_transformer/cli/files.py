"""The files of the commands that decode: checked before a model is loaded, read as lines, resumed, given to workers."""

import argparse
import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any

from ..data.text_files import TextScan, decode_lines, read_lines
from ..data.workers import LOCAL
from ..decoding.ensemble import COMBINATIONS
from ..decoding.output import ResumableOutput, StreamOutput
from ..distributed import is_launched
from ..errors import UserError
from ..evaluation.records import model_sha256
from ..files import file_sha256, is_url, written_whole
from ..hardware import check_workers

# Arguments that change no line of the output, and those whose content counts and not their name.
_FREE = {"model", "ensemble", "sentences", "input", "output", "prefix", "glossary", "resume", "device", "long_lines"}
_FREE |= {"source", "target", "json", "workers", "engine"}
_FREE |= {"run", "parser"}  # of the parser itself
RESUME = "the same command with --resume continues where this ended"

# A shell may have led them to a file, but it holds them open: there is no name to write beside.
_STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


def option_flag(name: str) -> str:
    """The option that an attribute of the arguments comes from, `--nbest` for `nbest`."""
    return "--" + name.replace("_", "-")


def is_file(name: str | None) -> bool:
    """Whether this is a file on the disk, or could be one that is missing, and not a pipe or a device."""
    if name is None or str(Path(name).absolute()).startswith(_STREAMS):
        return False
    return Path(name).is_file() or not Path(name).exists()


def check_files(arguments: argparse.Namespace, read: Sequence[str], written: Sequence[str]) -> None:
    """Check the files of these options before a model is loaded for them.

    Raises:
        UserError: naming the option: for a URL, a folder in a file's place, a file to write whose folder is missing, or
            a file that would be written twice, or both read and written (devices and pipes may be).
        PermissionError: for a file that may not be written.
    """
    paths: dict[str, Path] = {}
    for name in (*read, *written):
        value = getattr(arguments, name)
        if value is None:
            continue
        if is_url(value):
            raise UserError(f"{option_flag(name)} is {value}: give a file on the disk, and copy it from or to there")
        path = paths[name] = Path(value)
        if path.is_dir():
            raise UserError(f"{option_flag(name)} is {value}, a folder: give a file")
        folder = path.resolve().parent  # of what a link leads to
        if name in written and not folder.is_dir():
            fix = "is a file, not a folder: give another file" if folder.exists() else "is not there: make it first"
            raise UserError(f"{option_flag(name)} is {value}, and the folder {path.parent} {fix}")
        if name in written and path.suffix == ".gz":
            raise UserError(f"{option_flag(name)} is {value}, and what is written is not packed: leave out .gz")
        if name in written and not os.access(path if path.exists() else folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), value)
    for other, name in combinations(paths, 2):
        if name in written and are_same_file(paths[name], paths[other]):
            flags = option_flag(name), option_flag(other)
            raise UserError(f"{' and '.join(flags)} are the same file, {paths[name]}: give another {flags[0]}")


def are_same_file(path: Path, other: Path) -> bool:
    """Whether two names are of one file, which need not be there."""
    if path.exists() and other.exists():
        return path.is_file() and path.samefile(other)
    return path.resolve() == other.resolve()


def write_result(path: Path, content: str | bytes) -> None:
    """Write a file, through links and with the permissions of an earlier one, or to a device or a pipe."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not (path.is_file() and os.access(path.resolve().parent, os.W_OK)):
        path.write_bytes(data)  # a file in a folder that takes no others cannot be replaced
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    with written_whole(path.resolve()) as new:
        new.write_bytes(data)
    if mode is not None:
        path.chmod(mode)


def input_lines(path: str | None, scan: TextScan | None = None) -> Iterator[str]:
    """Lines of a file, which must be as it was scanned, or of standard input for None, without their ends."""
    if path is not None:
        return read_lines(Path(path), stamp=scan and scan.stamp)
    stream = sys.stdin.buffer
    with contextlib.suppress(OSError, ValueError):  # something else stands in for it
        # A thread that waits for input would keep Python from closing the stream of `sys`.
        stream = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    return decode_lines(stream, "standard input")


def read_first(lines: Iterator[Any]) -> Iterator[Any]:
    """The same items, the first of which is read now: a mistake in it is raised before anything is written."""
    return chain(list(islice(lines, 1)), lines)


def is_interactive(arguments: argparse.Namespace, doing: str) -> bool:
    """Whether sentences are typed on a terminal one by one; if so, print how to end."""
    typed = not arguments.sentences and arguments.input is None and sys.stdin.isatty()
    if typed:
        print(f"{doing} standard input, one sentence a line; Ctrl-D ends it", file=sys.stderr)
    return typed


@contextlib.contextmanager
def report_unfinished(output: StreamOutput | ResumableOutput | None) -> Iterator[None]:
    """Where Ctrl-C ends the body, print how to resume the output."""
    try:
        yield
    except KeyboardInterrupt:
        if output is not None and output.unfinished is not None:
            print(f"{output.unfinished} is unfinished: {RESUME}", file=sys.stderr)
        raise


def open_output(
    arguments: argparse.Namespace,
    scans: Mapping[str, TextScan],
    window: int,
    lines_per_record: int = 1,
    drawn: dict[str, Any] | None = None,
) -> StreamOutput | ResumableOutput:
    """The output of a command: a file that can be resumed if the input is a file too, else a stream.

    `scans` are those of the files that are read, by their option; the rest is as of `ResumableOutput`, whose settings
    are all that the output depends on, by the option that it comes from.
    """
    if arguments.output is None:
        return StreamOutput(sys.stdout)
    path = Path(arguments.output)
    others = [getattr(arguments, name, None) for name in ("prefix", "glossary")]
    are_files = all(is_file(name) for name in others if name is not None)
    if not (is_file(arguments.output) and scans.keys() & {"--input", "--source"} and are_files):
        return StreamOutput(path)
    settings = {option: scan.sha256 for option, scan in scans.items()}
    settings["MODEL"] = model_sha256(arguments.model)
    if arguments.ensemble:
        settings["--ensemble"] = " ".join(map(model_sha256, arguments.ensemble))
    if getattr(arguments, "glossary", None):
        settings["--glossary"] = file_sha256(arguments.glossary)
    values = {name: value for name, value in vars(arguments).items() if name not in _FREE}
    values |= {"window": window, "combine": arguments.combine or COMBINATIONS[0]}
    if values.get("pictures") is not None:
        values["pictures"] = str(Path(values["pictures"]).resolve())  # the same folder however it is spelled
    settings |= {option_flag(name): value for name, value in values.items()}
    return ResumableOutput(path, settings, lines_per_record, arguments.resume, drawn)


def has_workers(arguments: argparse.Namespace) -> bool:
    """Whether others than this process are to do the work."""
    return arguments.workers > 1 or arguments.engine != LOCAL


def check_work(arguments: argparse.Namespace, command: str, read: Sequence[str]) -> None:
    """Refuse workers that cannot be, and anything but files where they work, or where an output is resumed.

    Args:
        arguments: those of the command.
        command: its name.
        read: the options of what is read; the first has to be given.
    """
    check_workers("--workers", arguments.workers)
    if is_launched():
        raise UserError(
            f"{command} starts its processes itself: leave out accelerate launch or torchrun, and give --workers N"
        )
    names = [getattr(arguments, name) for name in read]
    are_read = is_file(names[0]) and all(is_file(name) for name in names if name is not None)
    files = " and ".join(f"{option_flag(name)} FILE" for name in read if name in ("input", "source", "target"))
    if arguments.resume and not is_file(arguments.output):
        raise UserError("--resume continues a file: give its --output, a file on the disk")
    if arguments.resume and not are_read:
        raise UserError(f"--resume reads the input more than once: give {files}, on the disk")
    if has_workers(arguments) and not (are_read and is_file(arguments.output)):
        raise UserError(f"--workers and --engine are for files on the disk: give {files} and --output FILE")


def is_in_parts(arguments: argparse.Namespace) -> bool:
    """Whether parts are to be written by workers, or were and are to be finished."""
    from ..decoding.parts import parts_folder

    return has_workers(arguments) or (arguments.resume and parts_folder(Path(arguments.output)).is_dir())


def found_anywhere(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments as workers take them, on other machines too: without the parser, with the whole paths of models."""
    values = {name: value for name, value in vars(arguments).items() if name not in ("run", "parser")}
    for name in ("model", "glossary"):
        if values.get(name):
            values[name] = str(Path(values[name]).absolute())
    return argparse.Namespace(**values | {"ensemble": [str(Path(name).absolute()) for name in arguments.ensemble]})


def write_parts(
    arguments: argparse.Namespace,
    output: ResumableOutput,
    kind: type,
    make: Callable[[], Any],
    scans: Mapping[str, TextScan],
    window: int,
    lines_per_record: int = 1,
) -> None:
    """Have workers write an output, as `write_in_parts`."""
    from ..decoding.parts import write_in_parts

    files = tuple((Path(getattr(arguments, option[2:])).absolute(), scan.stamp) for option, scan in scans.items())
    write_in_parts(output, kind, make, files, window, lines_per_record, arguments.workers, arguments.engine)


def check_model(folder: str, sha256: str | None) -> None:
    """Refuse a model that is not the one that an output was begun with, if that is given."""
    if sha256 is not None and sha256 != model_sha256(folder):
        raise UserError(f"{folder} has changed since this was begun: put back the model, or start anew")
