"""The files of the commands that decode: checked before a model is loaded, read as lines, resumed, given to workers."""

import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ..data.text_files import TextScan, decode_lines, read_lines
from ..decoding.output import ResumableOutput, StreamOutput
from ..distributed import is_launched
from ..errors import UserError
from ..evaluation.records import model_sha256
from ..files import written_whole
from ..hardware import check_workers
from .options import Together, flag

RESUME = "the same command with --resume continues where this ended"
# A shell may have led them to a file, but it holds them open: there is no name to write beside.
_STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


def is_file(name: str | None) -> bool:
    """Return whether this is a file on the disk, or could be one that is missing, and not a pipe or a device."""
    if name is None or str(Path(name).absolute()).startswith(_STREAMS):
        return False
    return Path(name).is_file() or not Path(name).exists()


def check_files(read: Mapping[str, str | None], written: Mapping[str, str | None]) -> None:
    """Check the files of these options before a model is loaded for them.

    Raises:
        UserError: naming the option, for a folder, a file that cannot be written, or one that would be read and
            written, or written twice (devices and pipes may be).
    """
    paths = {name: Path(path) for name, path in {**read, **written}.items() if path is not None}
    for name, path in paths.items():
        folder, reason = path.resolve().parent, None  # of what a link leads to
        if path.is_dir():
            reason = "is a folder: give a file"
        elif name in written and not (folder.is_dir() and os.access(path if path.exists() else folder, os.W_OK)):
            reason = f"cannot be written: {'no permission' if folder.is_dir() else f'there is no folder {folder}'}"
        elif name in written and path.suffix == ".gz":
            reason = "is written as it is, not packed: leave out .gz"
        elif name in written:
            same = [flag(other) for other, file in paths.items() if other != name and are_same_file(path, file)]
            reason = f"is the same file as {same[0]}: give another one" if same else None
        if reason:
            raise UserError(f"{flag(name)} {path} {reason}")


def are_same_file(path: Path, other: Path) -> bool:
    """Return whether two names are of one file, which may be missing."""
    if path.exists() and other.exists():
        return path.is_file() and path.samefile(other)
    return path.resolve() == other.resolve()


def write_result(path: str | Path, content: str | bytes) -> None:
    """Write a file, through links and with the permissions of an earlier one, or to a device or a pipe."""
    path, data = Path(path), content.encode() if isinstance(content, str) else content
    if path.exists() and not (path.is_file() and os.access(path.resolve().parent, os.W_OK)):
        path.write_bytes(data)  # a file in a folder that takes no others cannot be replaced
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    with written_whole(path.resolve()) as new:
        new.write_bytes(data)
    if mode is not None:
        path.chmod(mode)


def write_json(path: str | None, values: Mapping[str, Any]) -> None:
    """Write scores as JSON, if a file was named for them."""
    if path is not None:
        write_result(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def record_of(model: str, source: str, reference: str, translator, options: Mapping[str, Any], *more: Any) -> dict:
    """Return how scores were obtained; `more` is as of `evaluation_record`."""
    from ..evaluation.records import evaluation_record, search_settings
    from ..exported import is_exported

    generation = search_settings(translator.model.generation_config) | translator.generate_options
    options = {flag(name): value for name, value in options.items()}
    record = evaluation_record(model, source, reference, generation, options, *more)
    if is_exported(model):
        facts = translator.model.facts
        record["exported"] = {"format": facts.format, "quantization": facts.quantization}
    return record


def input_lines(path: str | None, scan: TextScan | None = None) -> Iterator[str]:
    """Yield lines of a file, which must be as it was scanned, or of standard input for None, without their ends."""
    if path is not None:
        return read_lines(Path(path), stamp=scan and scan.stamp)
    stream = sys.stdin.buffer
    with contextlib.suppress(OSError, ValueError):  # something else stands in for it
        # A thread that waits for input would keep Python from closing the stream of `sys`.
        stream = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    return decode_lines(stream, "standard input")


def read_first(lines: Iterator[Any]) -> Iterator[Any]:
    """Return the same items, the first of which is read now: a mistake in it is raised before anything is written."""
    return chain(list(islice(lines, 1)), lines)


def is_interactive(sentences: tuple[str, ...], input: str | None, doing: str) -> bool:
    """Return whether sentences are typed on a terminal one by one; if so, print how to end."""
    typed = not sentences and input is None and sys.stdin.isatty()
    if typed:
        print(f"{doing} standard input, one sentence a line; Ctrl-D ends it", file=sys.stderr)
    return typed


@contextlib.contextmanager
def closing_output(output: StreamOutput | ResumableOutput) -> Iterator[StreamOutput | ResumableOutput]:
    """Close an output after the body; where Ctrl-C ends that, print how to resume."""
    with contextlib.closing(output):
        try:
            yield output
        except KeyboardInterrupt:
            if output.unfinished is not None:
                print(f"{output.unfinished} is unfinished: {RESUME}", file=sys.stderr)
            raise


def scan_files(files: Mapping[str, str | None]) -> dict[str, TextScan]:
    """Read through the files of these options, which must have equally many lines; pipes, which are read once, not."""
    from ..data.text_files import scan_text

    scans = {flag(name): scan_text(Path(path)) for name, path in files.items() if path is not None and is_file(path)}
    if len({scan.lines for scan in scans.values()}) > 1:
        counts = " and ".join(f"{files[name[2:]]} has {scan.lines:,} lines" for name, scan in scans.items())
        raise UserError(f"{counts}: line n of one must belong to line n of the other")
    return scans


def open_output(
    path: str | None,
    resume: bool,
    scans: Mapping[str, TextScan],
    settings: Mapping[str, Any],
    lines_per_record: int = 1,
    drawn: dict[str, Any] | None = None,
) -> StreamOutput | ResumableOutput:
    """Return the output of a command: a file that can be resumed if the input is a file too, else a stream.

    `scans` are those of the files that are read, by their option; `settings` are all others that the output depends on.
    """
    if path is None:
        return StreamOutput(sys.stdout)
    if not (is_file(path) and scans):
        return StreamOutput(Path(path))
    sums = {option: scan.sha256 for option, scan in scans.items()}
    return ResumableOutput(Path(path), sums | dict(settings), lines_per_record, resume, drawn)


def settings_of(model: str, computing: Together, *options: Any, **more: Any) -> dict[str, Any]:
    """Return what an output depends on, by option: the models' content, and dataclasses of options."""
    settings: dict[str, Any] = {"MODEL": model_sha256(model)}
    if computing.ensemble:
        settings["--ensemble"] = " ".join(map(model_sha256, computing.ensemble))
    values = {"precision": computing.precision, "tokens_per_batch": computing.tokens_per_batch}
    values |= {"combine": computing.combine or "probabilities"}
    for each in options:
        values |= asdict(each)
    return settings | {flag(name): value for name, value in (values | more).items()}


def has_workers(workers: int, engine: str) -> bool:
    """Return whether others than this process are to do the work."""
    return workers > 1 or engine != "local"


def check_work(read: Mapping[str, str | None], output: str | None, resume: bool, workers: int, engine: str) -> None:
    """Refuse workers that cannot be, and anything but files where they work, or where an output is resumed.

    The first of the files that are read has to be given.
    """
    check_workers("--workers", workers)
    if is_launched():
        raise UserError("this command starts its processes itself: leave out accelerate launch or torchrun")
    names = list(read.values())
    are_files = is_file(output) and is_file(names[0]) and all(is_file(name) for name in names if name is not None)
    if (resume or has_workers(workers, engine)) and not are_files:
        options = " and ".join(f"{flag(name)} FILE" for name in read if name in ("input", "source", "target"))
        raise UserError(f"--resume and --workers are for files on the disk: give {options} and --output FILE")


def is_in_parts(output: str | None, resume: bool, workers: int, engine: str) -> bool:
    """Return whether parts are to be written by workers, or were and are to be finished."""
    from ..decoding.parts import parts_folder

    return has_workers(workers, engine) or (resume and parts_folder(Path(output)).is_dir())


def anywhere(path: str) -> str:
    """Return a path as a worker finds it whose current folder is another."""
    return str(Path(path).absolute())


def write_parts(
    output: ResumableOutput,
    doing: str,
    make: Callable[[], Any],
    files: Mapping[str, str],
    scans: Mapping[str, TextScan],
    window: int,
    workers: int,
    engine: str,
    lines_per_record: int = 1,
) -> None:
    """Have workers write an output, as `write_in_parts`."""
    from ..decoding.parts import write_in_parts

    stamps = tuple((Path(files[option[2:]]).absolute(), scan.stamp) for option, scan in scans.items())
    write_in_parts(output, doing, make, stamps, window, lines_per_record, workers, engine)
