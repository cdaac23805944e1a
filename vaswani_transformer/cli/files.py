"""The files of the commands that decode: lines that are read, outputs that are written, resumed, shared by workers."""

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tqdm.auto import tqdm

from ..data.text_files import TextScan, decode_lines, read_lines, scan_text, with_lines_of
from ..decoding.output import ResumableOutput, StreamOutput
from ..distributed import is_launched
from ..errors import UserError
from ..evaluation.records import evaluation_record, model_sha256, search_settings
from ..files import written_whole
from ..hardware import MOST_WORKERS
from .options import Engine, Path_, flag, group, within

_STDOUT = (None, "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")  # opened again, a file behind it would be emptied
# A shell may have led them to a file, but it holds them open: there is no name to write beside.
_STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
_NO_SETTINGS = ("device", "ensemble")  # options that change no output, or stand for content


@group("output")
@dataclass
class Writing:
    """The file that results are written to."""

    output: Path_ | None = None
    """write to this file instead of standard output"""
    resume: bool = False
    """continue an --output that was interrupted"""
    window: Annotated[int, within(1, 10**7)] = 2000
    """lines that are sorted by length and written together"""

    has_workers = False


@group("output")
@dataclass
class Work(Writing):
    """The file that results are written to, and the workers that compute them."""

    workers: Annotated[int, within(1, MOST_WORKERS)] = 1
    """processes that work on parts of the files, each on its own GPU if any"""
    engine: Engine = "local"

    @property
    def has_workers(self) -> bool:
        """Return whether others than this process do the work."""
        return self.workers > 1 or self.engine != "local"


def is_file(name: str | None) -> bool:
    """Return whether this is on the disk, or could be if it is missing, and not a pipe or a device."""
    if name is None or str(Path(name).absolute()).startswith(_STREAMS):
        return False
    return Path(name).is_file() or Path(name).is_dir() or not Path(name).exists()


def check_files(read: Mapping[str, str | None], written: Mapping[str, str | None]) -> None:
    """Check the files that are written before hours are spent on their content.

    `UserError` names the option of a file that cannot be written, whose name promises another content, or that is read,
    too, or written twice (devices and pipes may be); it is raised in one of several processes, too.
    """
    if is_launched():
        raise UserError("this command is run once: leave out accelerate launch or torchrun, or unset WORLD_SIZE")
    paths = {name: Path(path) for name, path in {**read, **written}.items() if path is not None}
    for name in written.keys() & paths.keys():
        path, reason = paths[name], None
        folder = path.resolve().parent  # of what a link leads to
        if same := [flag(other) for other, file in paths.items() if other != name and are_same_file(path, file)]:
            reason = f"is the same file as {same[0]}"
        elif path.suffix == ".gz":
            reason = "would not be compressed"
        elif path.is_dir() or not (folder.is_dir() and os.access(path if path.exists() else folder, os.W_OK)):
            reason = "cannot be written"
        if reason:
            raise UserError(f"{flag(name)} {path} {reason}: give another file")


def are_same_file(path: Path, other: Path) -> bool:
    """Return whether two names are of one file, which may be missing."""
    if path.exists() and other.exists():
        return path.is_file() and path.samefile(other)
    return path.resolve() == other.resolve()


def check_work(read: Mapping[str, str | None], writing: Writing, **written: str | None) -> None:
    """Check the files as `check_files`, and that those of `--resume` and `--workers` can be read in parts."""
    first, *others = read.values()
    given = [writing.output, first, *(path for path in others if path is not None)]
    if (writing.resume or writing.has_workers) and not all(map(is_file, given)):
        options = " and ".join(f"{flag(name)} FILE" for name in read if name in ("input", "source", "target"))
        raise UserError(f"--resume and --workers are for files on the disk: give {options} and --output FILE")
    check_files(read, {"output": writing.output, **written})


def timed(doing: str, decode: Callable[..., Iterator[Any]], total: int) -> tuple[list, float]:
    """Return all that `decode` yields for sentences, with a progress bar meanwhile, and the seconds that it took."""
    started = time.monotonic()
    with tqdm(total=total, desc=doing, unit=" sentences", file=sys.stderr, smoothing=0) as bar:
        return list(decode(progress=bar)), time.monotonic() - started


def write_result(path: str | None, content: str | bytes) -> None:
    """Write a result, to standard output without a path: a file keeps its content until all of the new one is there."""
    data = content.encode() if isinstance(content, str) else content
    if path in _STDOUT:
        sys.stdout.buffer.write(data)
    elif not is_file(path):
        Path(path).write_bytes(data)
    else:
        target = Path(path).resolve()  # of what a link leads to
        with written_whole(target) as new:
            new.write_bytes(data)
            if target.exists():
                shutil.copymode(target, new)


def write_json(path: str | None, values: Mapping[str, Any]) -> None:
    """Write scores as JSON, if a file was named for them."""
    if path is not None:
        write_result(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def record_of(model: str, source: str, reference: str, translator, options: Mapping[str, Any], *more: Any) -> dict:
    """Return how scores were obtained; `more` is as in `evaluation_record`."""
    generation = search_settings(translator.model.generation_config) | translator.generate_options
    options = {flag(name): value for name, value in options.items()}
    return evaluation_record(model, source, reference, generation, options, *more)


def scan_files(read: Mapping[str, str | None], *others: str | None) -> dict[str, TextScan]:
    """Read through the files of these options, which must have equally many lines.

    There is no scan where the first or any of `others`, on which the output depends, is read once: pipes, a terminal.
    """
    paths = {name: path for name, path in read.items() if path is not None}
    others = [path for path in (*paths.values(), *others) if path is not None]
    if not (next(iter(read.values())) and all(map(is_file, others))):
        return {}
    scans = {name: scan_text(Path(path)) for name, path in paths.items()}
    if len({scan.lines for scan in scans.values()}) > 1:
        counts = " and ".join(f"{paths[name]} has {scan.lines:,} lines" for name, scan in scans.items())
        raise UserError(f"{counts}: line n of one must belong to line n of the other")
    return scans


def settings_of(model: str, *options: Any, **more: Any) -> dict[str, Any]:
    """Return what an output depends on, by option: the models' content, and what dataclasses of options hold."""
    values = {name: value for each in options for name, value in vars(each).items()} | more
    settings = {"MODEL": model_sha256(model)}
    if values.get("ensemble"):
        settings["--ensemble"] = " ".join(map(model_sha256, values["ensemble"]))
    changes_nothing = {*_NO_SETTINGS} | ({"tokens_per_batch"} if not values.get("sample") else set())
    return settings | {flag(name): value for name, value in values.items() if name not in changes_nothing}


@contextlib.contextmanager
def open_output(
    writing: Writing, scans: Mapping[str, TextScan], settings: Callable[[], Mapping], lines_per_record: int = 1
) -> Iterator[StreamOutput | ResumableOutput]:
    """Open the output of a command; where Ctrl-C ends the body, print how to resume.

    It is a file that can be resumed if the input was scanned and so can be read again; the `settings` that it depends
    on are asked for then. Else it is a stream.
    """
    if writing.output in _STDOUT:
        output = StreamOutput(sys.stdout)
    elif not (is_file(writing.output) and scans):
        output = StreamOutput(Path(writing.output))
    else:
        values = {flag(name): scan.sha256 for name, scan in scans.items()} | settings()
        output = ResumableOutput(Path(writing.output), values, lines_per_record, writing.resume or writing.has_workers)
    with contextlib.closing(output):
        try:
            yield output
        except KeyboardInterrupt:
            if output.unfinished is not None:
                print(f"{output.unfinished} is unfinished: the same command with --resume continues", file=sys.stderr)
            raise


def do_lines(
    worker: Any,
    output: StreamOutput | ResumableOutput,
    writing: Writing,
    read: Mapping[str, str | None],
    scans: Mapping[str, TextScan],
    sentences: tuple[str, ...] = (),
    make: Callable[[], Any] | None = None,
) -> None:
    """Have a worker write the output of sentences, or of lines of files (the first None: standard input).

    Where other processes do the work, each of them calls `make` for its worker.
    """
    stamps = {name: scan.stamp for name, scan in scans.items()}
    if writing.has_workers:
        from ..decoding.parts import write_in_parts

        files = tuple((Path(read[name]).absolute(), stamp) for name, stamp in stamps.items())
        make = partial(_make_in, Path.cwd(), make)
        write_in_parts(output, worker.doing, make, files, writing.window, writing.workers, writing.engine)
        output.finish()
        return
    (name, first), *others = read.items()
    if interactive := not sentences and first is None and sys.stdin.isatty():
        print(f"{worker.doing} standard input, one sentence a line; Ctrl-D ends it", file=sys.stderr)
        worker.window = 1
    if sentences:
        lines = iter(sentences)
    else:
        lines = _standard_input() if first is None else read_lines(Path(first), stamp=stamps.get(name))
    for other, path in others:
        if path is not None:
            lines = with_lines_of(lines, first or "standard input", Path(path), stamp=stamps.get(other))
    total = scans[name].lines if scans else len(sentences) or None
    worker.run(lines, output, total, progress=not interactive and total != 1)
    output.finish()


def _standard_input() -> Iterator[str]:
    stream = sys.stdin.buffer
    with contextlib.suppress(OSError, ValueError):  # something else stands in for it
        # A thread that waits for input would keep Python from closing the stream of `sys`.
        stream = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    return decode_lines(stream, "standard input")


def _make_in(folder: Path, make: Callable[[], Any]) -> Any:
    with contextlib.suppress(OSError):  # a machine of a cluster may not have it
        os.chdir(folder)
    return make()
