"""`vaswani prepare`: tokenise and filter all pairs once, in parallel, into shards that training maps into memory.

One process reads chunks of pairs, worker processes make one shard of each. A shard is written under a temporary name,
fsynced and renamed, so that the same command resumes an interrupted one; what it holds depends on the text, the
tokenizer and the limits, not on the number of workers.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from ..errors import UserError
from ..files import file_sha256, publish, remove_leftovers, unfinished, write_text, written_whole
from ..recipes.recipe import Recipe
from .filtering import KEPT, FilterCounts, check_limits, count_status, pair_status
from .parallel_text import PairSource, held_out_rows
from .prepared import (
    DATA_FIELDS,
    FORMAT,
    LIMIT_FIELDS,
    MANIFEST,
    TOKENIZER,
    TOKENIZER_FIELDS,
    TRAIN,
    UNFINISHED,
    VALIDATION,
    VERSION,
    open_prepared,
    read_manifest,
    shard_schema,
)
from .recipe_data import data_sources, new_tokenizer
from .tokenization import load_tokenizer, tokenizer_sha256

CHUNK = 50_000  # pairs that are read for one shard
_ENCODED_TOGETHER = 1000  # pairs whose encodings, which are large, are in memory at once
_OTHER = "give another --output, or --overwrite to start anew"
Pairs = list[tuple[str, str]]


def prepare(
    recipe: Recipe, folder: str | Path, workers: int | None = 1, progress: bool = True, overwrite: bool = False
) -> dict:
    """Tokenise and filter a recipe's data into a folder that training maps into memory; resumes after an interruption.

    Text is read as a stream, also from the Hub, `CHUNK` pairs at a time. Without validation data some pairs are held
    out, the same ones as in training without preparation.

    Args:
        recipe: data, tokenizer, limits and, for what is held out, seed.
        folder: the folder to make, or to resume in.
        workers: processes that tokenise; 1: this one does; None: one for each processor. Each of several imports the
            main script, so that a script has to call this below ``if __name__ == "__main__":``.
        progress: show a bar on standard error, on a terminal.
        overwrite: remove an earlier preparation first.

    Returns:
        The manifest; see `read_manifest`.

    Raises:
        UserError: for mistakes in the recipe or its data, and a folder that holds something else.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}: it must be 1 or more")
    check_limits(recipe.max_length, recipe.max_length_ratio)
    folder = Path(folder)
    _check_ours(folder)
    train, validation = data_sources(recipe)
    settings = _settings(recipe, train, validation)
    with _locked(folder):
        if overwrite:
            _remove_prepared(folder)
        if (folder / MANIFEST).exists():
            return _finished_manifest(folder, settings)
        _start_or_resume(folder, settings)
        return Preparation(recipe, folder, train, validation, workers or _processors(), progress).run(settings)


@dataclass(frozen=True)
class ShardWriter:
    """Turns chunks of text into shards; the part of a preparation that worker processes do.

    Args:
        folder: the prepared folder.
        tokenizer: `tokenizers.Tokenizer` as JSON.
        is_text_special: whether special tokens written out in a text are special.
        end_id: id of `</s>`, which the tokenizer appends.
        max_length: as for `tokenize_pairs`.
        max_length_ratio: as for `tokenize_pairs`.
        token_type: of ids, as in `shard_schema`.
        length_type: of lengths.
    """

    folder: Path
    tokenizer: str
    is_text_special: bool
    end_id: int
    max_length: int
    max_length_ratio: float | None
    token_type: str
    length_type: str

    def write(self, part: str, number: int, pairs: Pairs) -> None:
        """Write the shard of one chunk, and what `finished` finds when all of it is on disk.

        Raises:
            UserError: for a tokenizer that does not append `</s>`.
            OSError: from the disk; nothing of the shard is left.
        """
        backend = _load_backend(self.tokenizer, self.is_text_special)
        ids, marks = ([], []), []
        for start in range(0, len(pairs), _ENCODED_TOGETHER):
            some = list(zip(*pairs[start : start + _ENCODED_TOGETHER], strict=True))
            encoded = [[encoding.ids for encoding in backend.encode_batch_fast(side)] for side in some]
            if any(side[0][-1:] != [self.end_id] for side in encoded):
                raise UserError("the tokenizer does not append its end token to a text; use one with a </s> template")
            lengths = np.array([[len(row) for row in side] for side in encoded])
            status = pair_status(some, lengths, self.max_length, self.max_length_ratio)
            kept = np.flatnonzero(status == KEPT)
            for side, rows in zip(ids, encoded, strict=True):
                flat = chain.from_iterable(rows[row] for row in kept)
                side.append(np.fromiter(flat, self.token_type))
            # Of a dropped pair: 0 instead of the source's length, and why instead of the target's.
            marks.append(np.where(status == KEPT, lengths, [np.zeros_like(status), status]).astype(self.length_type))
        lengths = np.concatenate(marks, axis=1) if marks else np.zeros((2, 0), self.length_type)
        columns = []
        for side, rows in zip(lengths[:, lengths[0] > 0], ids, strict=True):
            offsets = np.concatenate([[0], np.cumsum(side, dtype=np.int64)]).astype(np.int32)
            values = np.concatenate(rows) if rows else np.zeros(0, self.token_type)
            columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)))
        self._store(part, number, columns, lengths)

    def _store(self, part: str, number: int, columns: list[pa.ListArray], lengths: np.ndarray) -> None:
        schema, sink = shard_schema(self.token_type), pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.record_batch(columns, schema=schema))
        content = sink.getvalue()
        path = shard_path(self.folder, part, number)
        digest = hashlib.sha256(content).hexdigest()
        facts = {"file": path.name, "rows": len(columns[0]), "bytes": content.size, "sha256": digest}
        with written_whole(path) as new, new.open("wb") as file:
            file.write(content)
        with written_whole(path.with_suffix(".part")) as new:
            new.write_bytes(json.dumps(facts).encode() + b"\n" + lengths.tobytes())

    def finished(self, part: str, number: int) -> dict | None:
        """Facts of a shard that was written to its end; None if it is still to be made."""
        path = shard_path(self.folder, part, number)
        try:
            facts = json.loads(path.with_suffix(".part").open("rb").readline())
            return facts if path.stat().st_size == facts["bytes"] else None
        except (OSError, ValueError, KeyError):
            return None

    def lengths(self, part: str, number: int) -> np.ndarray:
        """Lengths `(2, pairs read)` of a shard's chunk; of a dropped pair 0 and why."""
        content = shard_path(self.folder, part, number).with_suffix(".part").read_bytes()
        return np.frombuffer(content, self.length_type, offset=content.index(b"\n") + 1).reshape(2, -1)


def shard_path(folder: Path, part: str, number: int) -> Path:
    """Where the shard of a chunk lies."""
    return folder / f"{part}-{number:05d}.arrow"


@cache
def _load_backend(state: str, is_text_special: bool) -> Tokenizer:
    """A tokenizer from its JSON, without padding and truncation."""
    backend = Tokenizer.from_str(state)
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = not is_text_special
    return backend


@dataclass
class Preparation:
    """Makes what a prepared folder still lacks; `prepare` does the rest.

    Args:
        recipe: data, tokenizer, limits and seed.
        folder: the folder, which holds an unfinished preparation with the same settings, or a new one.
        train: training text.
        validation: validation text; None to hold training pairs out.
        workers: processes that tokenise; 1: this one does.
        progress: show a bar on a terminal.
    """

    recipe: Recipe
    folder: Path
    train: PairSource
    validation: PairSource | None
    workers: int
    progress: bool

    def run(self, settings: dict) -> dict:
        """Write tokenizer, shards and indices, and last the manifest, which is returned."""
        number, held_out, validation_pairs = None, set(), []
        if self.validation is None:
            number = self._count()
            held_out.update(held_out_rows(number, self.recipe.validation_size, self.recipe.seed).tolist())
        tokenizer = self._tokenizer(held_out)
        writer = ShardWriter(
            self.folder,
            tokenizer.backend_tokenizer.to_str(),
            not tokenizer.split_special_tokens,
            tokenizer.eos_token_id,
            self.recipe.max_length,
            self.recipe.max_length_ratio,
            token_type="uint16" if len(tokenizer) <= 2**16 else "int32",
            length_type="uint16" if self.recipe.max_length < 2**16 else "int32",
        )
        train_chunks = self._train_chunks(held_out, validation_pairs, number)
        parts = {TRAIN: self._write_part(writer, TRAIN, train_chunks, number and number - len(held_out))}
        pairs = iter(validation_pairs) if self.validation is None else self.validation.stream()
        parts[VALIDATION] = self._write_part(writer, VALIDATION, _chunks(pairs))
        manifest = {
            **settings,
            "files": {path: size for path, (size, _) in settings["files"].items()},
            "tokenizer": {"sha256": tokenizer_sha256(tokenizer), "entries": len(tokenizer)},
            "token_type": writer.token_type,
            "length_type": writer.length_type,
            "parts": parts,
        }
        _write_json(self.folder / MANIFEST, manifest)
        _remove_intermediate(self.folder)
        return manifest

    def _count(self) -> int:
        """Number of training pairs: the first pass over the text, whose result is kept for a resumption."""
        path = self.folder / UNFINISHED
        settings = json.loads(path.read_text(encoding="utf-8"))
        if "pairs" not in settings:
            settings["pairs"] = self.train.count()
            _write_json(path, settings)
        return settings["pairs"]

    def _tokenizer(self, held_out: set[int]) -> PreTrainedTokenizerFast:
        """The tokenizer in the folder; copied there before, or trained on the first pairs that are not held out."""
        folder = self.folder / TOKENIZER
        if not folder.exists():
            if self.recipe.tokenizer is not None:
                tokenizer = load_tokenizer(self.recipe.tokenizer)
            else:
                pairs = (pair for number, pair in enumerate(self.train.stream()) if number not in held_out)
                tokenizer = new_tokenizer(self.recipe, pairs)
            tokenizer.save_pretrained(unfinished(folder))
            publish(unfinished(folder), folder)
        return load_tokenizer(folder)

    def _train_chunks(self, held_out: set[int], validation_pairs: Pairs, number: int | None) -> Iterator[Pairs]:
        """Chunks of the training text without what is held out, which is added to `validation_pairs`.

        Raises:
            UserError: if there are other than `number` pairs.
        """
        start = 0
        for chunk in _chunks(self.train.stream()):
            validation_pairs += [pair for row, pair in enumerate(chunk, start) if row in held_out]
            yield [pair for row, pair in enumerate(chunk, start) if row not in held_out]
            start += len(chunk)
        if number not in (None, start):
            raise UserError(f"{start:,} training pairs were read, not the {number:,} counted before: {_OTHER}")

    def _write_part(self, writer: ShardWriter, part: str, chunks: Iterable[Pairs], total: int | None = None) -> dict:
        """Write the shards of all chunks that have none yet, and the index; returns the manifest's entry."""
        disable = None if self.progress else True  # None: shown on a terminal only
        bar = tqdm(desc=f"preparing {part} pairs", total=total, unit=" pairs", unit_scale=True, disable=disable)
        number, pending = 0, {}

        def collect() -> None:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                future.result()
                bar.update(pending.pop(future))

        with bar, _worker_processes(self.workers) as submit:
            for number, chunk in enumerate(chunks, 1):
                if writer.finished(part, number - 1) is None:
                    pending[submit(writer.write, part, number - 1, chunk)] = len(chunk)
                else:
                    bar.update(len(chunk))
                if len(pending) > self.workers:
                    collect()
            while pending:
                collect()
        return _write_index(writer, part, [writer.finished(part, place) for place in range(number)])


def _write_index(writer: ShardWriter, part: str, shards: list[dict]) -> dict:
    """Write the lengths of all pairs that were kept into one file; returns the part's entry in the manifest."""
    status, pairs = np.zeros(4, np.int64), sum(facts["rows"] for facts in shards)
    for number in range(len(shards)):
        lengths = writer.lengths(part, number)
        status += count_status(np.where(lengths[0] > 0, KEPT, lengths[1]))
    counts = FilterCounts(int(status.sum()), *status.tolist(), writer.max_length, writer.max_length_ratio)
    if not pairs:
        raise UserError(f"no {part} pair is left after filtering ({counts}); check the files or raise the limits")
    path = writer.folder / f"{part}.lengths.npy"
    with written_whole(path) as new:
        index = np.lib.format.open_memmap(new, "w+", writer.length_type, (2, pairs))
        start = 0
        for number, facts in enumerate(shards):
            lengths = writer.lengths(part, number)
            index[:, start : start + facts["rows"]] = lengths[:, lengths[0] > 0]
            start += facts["rows"]
        tokens = [int(side.sum(dtype=np.int64)) for side in index]
        index.flush()
        del index
    return {
        "pairs": pairs,
        "source_tokens": tokens[0],
        "target_tokens": tokens[1],
        "counts": asdict(counts),
        "index": {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)},
        "shards": shards,
    }


def _chunks(pairs: Iterator[tuple[str, str]]) -> Iterator[Pairs]:
    while chunk := list(islice(pairs, CHUNK)):
        yield chunk


# Worker processes


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _worker_processes(number: int) -> Iterator[Callable[..., Future]]:
    """A function that runs another one in one of so many processes; for 1 at once in this one.

    When the body ends, or this process, the processes end without finishing what they do.

    Raises:
        UserError: if one of them dies.
    """
    if number == 1:
        yield _run_here
        return
    # Not fork: the tokenizer's and other libraries' threads do not survive it.
    has_server = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
    context = multiprocessing.get_context("forkserver" if has_server else "spawn")
    theirs, ours = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(number, context, _start_worker, (theirs,))
    try:
        if has_server:
            _start_server(context)
        first = context.Process(target=os.getpid)
        first.start()
        first.join()
        if first.exitcode:
            raise UserError(
                "worker processes import the main script: call prepare() there below `if __name__ == '__main__':`"
            )
        yield executor.submit
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed (out of memory?): run the same command again, with fewer --workers"
        ) from error
    finally:
        ours.close()
        executor.shutdown(cancel_futures=True)


def _start_server(context: multiprocessing.context.ForkServerContext) -> None:
    """Start the process from which workers are forked: PyTorch and others are imported once, and lie in memory once."""
    from multiprocessing import forkserver

    context.set_forkserver_preload([__name__])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: a terminal sends Ctrl-C to all processes
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _run_here(function: Callable, *arguments: Any) -> Future:
    future = Future()
    future.set_result(function(*arguments))
    return future


def _start_worker(connection: Connection) -> None:
    """Make a new worker process ignore Ctrl-C and end as soon as nobody holds the other end of the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def end() -> None:
        connection.poll(None)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


# What a folder holds already


def _write_json(path: Path, value: dict) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _settings(recipe: Recipe, train: PairSource, validation: PairSource | None) -> dict:
    """What decides the content: a preparation is resumed with the same only."""
    fields = {name: getattr(recipe, name) for name in (*LIMIT_FIELDS, *DATA_FIELDS)}
    fields |= {name: None if recipe.tokenizer else getattr(recipe, name) for name in TOKENIZER_FIELDS}
    files = list(train.files)
    if validation is None:
        fields["seed"] = recipe.seed
    else:
        del fields["validation_size"]
        files += validation.files
    stats = {str(path): path.stat() for path in files}
    return {
        "format": FORMAT,
        "version": VERSION,
        "recipe": fields,
        "tokenizer": tokenizer_sha256(load_tokenizer(recipe.tokenizer)) if recipe.tokenizer else None,
        "files": {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()},
    }


def _finished_manifest(folder: Path, settings: dict) -> dict:
    """The manifest of a finished preparation with these settings.

    Raises:
        UserError: for other settings or files, another tokenizer, or a shard that is missing or damaged.
    """
    manifest, tokenizer = read_manifest(folder), settings["tokenizer"]
    files = {path: size for path, (size, _) in settings["files"].items()}
    _check_same(folder, {**settings, "files": files}, {**manifest, "tokenizer": tokenizer})
    if tokenizer not in (None, manifest["tokenizer"]["sha256"]):
        raise UserError(f"{folder} was prepared with another tokenizer: {_OTHER}")
    open_prepared(folder)
    _remove_intermediate(folder)
    return manifest


def _start_or_resume(folder: Path, settings: dict) -> None:
    """Note the settings in a new folder, or compare them with those of the preparation that is resumed.

    Raises:
        UserError: for other settings or files.
    """
    path, earlier = folder / UNFINISHED, {}
    if path.exists():
        try:
            earlier = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is not from a preparation ({error}): {_OTHER}") from error
    if (folder / TOKENIZER).exists():
        _check_same(folder, settings, earlier)
    elif {**earlier, **settings} != earlier:  # nothing is made yet, so that a wrong setting may be corrected
        _write_json(path, settings)
    remove_leftovers(folder)


def _remove_intermediate(folder: Path) -> None:
    """Remove what only an unfinished preparation needs."""
    for path in (*folder.glob("*.part"), folder / UNFINISHED):
        path.unlink(missing_ok=True)


def _check_same(folder: Path, settings: dict, earlier: dict) -> None:
    """Refuse a folder that was started with other settings or from other files."""
    earlier = {"recipe": {}, "files": {}, "tokenizer": None} | earlier
    if [earlier.get(name) for name in ("format", "version")] != [FORMAT, VERSION]:
        raise UserError(f"{folder} was prepared by another version: {_OTHER}")
    fields = settings["recipe"] | earlier["recipe"]
    changed = sorted(name for name in fields if settings["recipe"].get(name) != earlier["recipe"].get(name))
    changed += ["tokenizer"] if settings["tokenizer"] != earlier["tokenizer"] else []
    if changed:
        raise UserError(
            f"{folder} was prepared with other settings ({', '.join(changed)}): give the same ones, {_OTHER}"
        )
    files = settings["files"] | earlier["files"]
    changed = sorted(path for path in files if settings["files"].get(path) != earlier["files"].get(path))
    if changed:
        raise UserError(f"{changed[0]} is not as it was when the preparation of {folder} started: {_OTHER}")


def _check_ours(folder: Path) -> None:
    """Refuse a folder with something else in it: nothing there is touched, with `overwrite` neither."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output {folder} is a file: give a folder")
    names = {path.name for path in folder.glob("*")}  # none where there is no folder
    is_ours = UNFINISHED in names or {MANIFEST, f"{TRAIN}.lengths.npy"} <= names
    if not is_ours and any(not name.startswith(".") for name in names):
        raise UserError(f"{folder} is not empty and holds no preparation: give another --output")


def _remove_prepared(folder: Path) -> None:
    """Remove what a preparation has made and nothing else; cut off, it leaves an unfinished preparation."""
    if (folder / MANIFEST).exists():
        (folder / MANIFEST).replace(folder / UNFINISHED)
    for pattern in ("*-?????.arrow", "*-?????.part", "*.lengths.npy"):
        for path in folder.glob(pattern):
            path.unlink()
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    remove_leftovers(folder)
    (folder / UNFINISHED).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let no second process prepare the same folder; the system frees the lock of a process that is killed."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise UserError(f"another process is preparing {folder}: wait for it, or give another --output") from error
    except OSError as error:
        raise UserError(f"cannot write to output folder {folder}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()
