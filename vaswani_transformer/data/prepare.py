"""`vaswani prepare`: tokenise and filter all pairs once, in parallel, into shards that training maps into memory.

One process reads chunks of pairs, workers make one shard of each. A shard is written under a temporary name, fsynced
and renamed, so that the same command goes on where an interrupted one was; what it holds depends on the text, the
tokenizer and the limits, not on the number of workers.
"""

import contextlib
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from tqdm import tqdm

from ..errors import UserError
from ..files import file_sha256, publish, remove_leftovers, unfinished, write_text, written_whole
from ..recipes.recipe import Recipe
from .filtering import EMPTY, KEPT, RATIO, TOO_LONG, check_limits, pair_status
from .parallel_text import held_out_rows
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

_ENCODED_TOGETHER = 1000  # pairs whose encodings, which are large, are in memory at once


@dataclass(frozen=True)
class ShardWriter:
    """Turns chunks of text into shards; what a worker process has.

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

    def backend(self) -> Tokenizer:
        """The tokenizer, without padding and truncation."""
        backend = Tokenizer.from_str(self.tokenizer)
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = not self.is_text_special
        return backend

    def write(self, backend: Tokenizer, part: str, number: int, texts: tuple[list[str], list[str]]) -> dict:
        """Write the shard of one chunk, and what `finished` finds when all of it is on disk.

        Raises:
            UserError: for a tokenizer that does not append `</s>`.
            OSError: from the disk; nothing of the shard is left.
        """
        ids, marks = ([], []), []
        for start in range(0, len(texts[0]), _ENCODED_TOGETHER):
            some = [side[start : start + _ENCODED_TOGETHER] for side in texts]
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
        return self._store(part, number, columns, lengths)

    def _store(self, part: str, number: int, columns: list[pa.ListArray], lengths: np.ndarray) -> dict:
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
        return facts

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


def _work(connection: multiprocessing.connection.Connection, writer: ShardWriter) -> None:
    """A worker's life: chunks in, facts or an error out, until nobody is at the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the reader ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    backend = writer.backend()
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = connection.recv()
            try:
                answer = writer.write(backend, *job)
            except Exception as error:
                answer = error
            del job
            connection.send(answer)


class Workers:
    """Processes that write shards, each with a chunk at most, started as they are needed."""

    def __init__(self, writer: ShardWriter, number: int):
        self.writer, self.number = writer, number
        methods = multiprocessing.get_all_start_methods()
        # Not fork: the tokenizer's and other libraries' threads do not survive it.
        self.context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            from multiprocessing import forkserver, resource_tracker  # not on Windows

            self.context.set_forkserver_preload([__name__])
            # Ctrl-C reaches all processes of a terminal, and the server would show where it was.
            resource_tracker.ensure_running()  # before, since it lifts the block itself
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self.processes, self.idle, self.busy = [], [], {}

    def run(self, jobs: Iterator[tuple]) -> Iterator[tuple[tuple, dict]]:
        """Part and number of each job's shard with its facts, in the order in which they are done."""
        for job in jobs:
            if not self.idle and len(self.processes) < self.number:
                self._start()
            elif not self.idle:
                yield from self._collect()
            connection = self.idle.pop()
            self.busy[connection] = job[:2]
            with contextlib.suppress(OSError):  # it has died: `_collect` says so
                connection.send(job)
        while self.busy:
            yield from self._collect()

    def _start(self) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_work, args=(theirs, self.writer), daemon=True)
        # Otherwise a script without `if __name__ == "__main__"` would be run once more by each worker.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
        theirs.close()  # so that its death ends the pipe
        self.processes.append((process, ours))
        self.idle.append(ours)

    def _collect(self) -> Iterator[tuple[tuple, dict]]:
        for connection in multiprocessing.connection.wait(list(self.busy)):
            try:
                answer = connection.recv()
            except (EOFError, OSError) as error:
                raise UserError(
                    "a worker process was killed (out of memory?): run the same command again, with fewer --workers"
                ) from error
            if isinstance(answer, Exception):
                raise answer
            yield self.busy.pop(connection), answer
            self.idle.append(connection)

    def close(self) -> None:
        """End the processes."""
        for process, connection in self.processes:
            connection.close()
            if connection in self.busy:
                process.terminate()
        for process, _ in self.processes:
            process.join()


CHUNK = 50_000  # pairs that are read for one shard


class Preparation:
    """A recipe's data on its way into a prepared folder; `prepare` does it all."""

    def __init__(self, recipe: Recipe, folder: str | Path, workers: int, progress: bool):
        check_limits(recipe.max_length, recipe.max_length_ratio)
        self.recipe, self.folder, self.workers, self.progress = recipe, Path(folder), workers, progress
        self.train, self.validation = data_sources(recipe)
        self.held_out = np.zeros(0, np.int64)
        self.kept_back: tuple[list[str], list[str]] = ([], [])

    def settings(self) -> dict:
        """What decides the content: a preparation is resumed with the same only."""
        recipe = self.recipe
        fields = {name: getattr(recipe, name) for name in (*LIMIT_FIELDS, *DATA_FIELDS)}
        fields |= {name: None if recipe.tokenizer else getattr(recipe, name) for name in TOKENIZER_FIELDS}
        if self.validation is None:
            fields["seed"] = recipe.seed
        else:
            del fields["validation_size"]
        given = tokenizer_sha256(load_tokenizer(recipe.tokenizer)) if recipe.tokenizer else None
        sources = [source for source in (self.train, self.validation) if source is not None]
        files = {str(path): path.stat() for source in sources for path in source.files}
        stamps = {path: [stat.st_size, stat.st_mtime_ns] for path, stat in files.items()}
        return {"format": FORMAT, "version": VERSION, "recipe": fields, "tokenizer": given, "files": stamps}

    def claim(self, overwrite: bool) -> dict | None:
        """Take the folder, or go on in it; returns the manifest if all is done already.

        Raises:
            UserError: for a folder that holds something else, or pairs of other settings.
        """
        settings, folder = self.settings(), self.folder
        folder.mkdir(parents=True, exist_ok=True)
        if overwrite:
            _remove_prepared(folder)
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            files = {path: size for path, (size, _) in settings["files"].items()}
            _check_same(folder, {**settings, "files": files}, {**manifest, "tokenizer": settings["tokenizer"]})
            given = settings["tokenizer"]
            if given is not None and given != manifest["tokenizer"]["sha256"]:
                raise UserError(f"{folder} was prepared with another tokenizer: {_OTHER}")
            open_prepared(folder)
            self._clean()
            return manifest
        path, earlier = folder / UNFINISHED, {}
        if path.exists():
            try:
                earlier = dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise UserError(f"{path} is not ours ({error}): {_OTHER}") from error
        if (folder / TOKENIZER).exists():
            _check_same(folder, settings, earlier)
        elif {**earlier, **settings} != earlier:  # nothing is made yet: a mistake in what was given may be mended
            write_text(path, _as_json(settings))
        remove_leftovers(folder)
        return None

    def _clean(self) -> None:
        """Remove what only an unfinished preparation needs."""
        for path in (*self.folder.glob("*.part"), self.folder / UNFINISHED):
            path.unlink(missing_ok=True)

    def run(self) -> dict:
        """Make everything that is not there yet; returns the manifest."""
        if self.validation is None:
            self.held_out = self._choose_held_out()
        tokenizer = self._tokenizer()
        self.writer = ShardWriter(
            self.folder,
            tokenizer.backend_tokenizer.to_str(),
            not tokenizer.split_special_tokens,
            tokenizer.eos_token_id,
            self.recipe.max_length,
            self.recipe.max_length_ratio,
            token_type="uint16" if len(tokenizer) <= 2**16 else "int32",
            length_type="uint16" if self.recipe.max_length < 2**16 else "int32",
        )
        parts = {TRAIN: self._make_shards(TRAIN, self._train_chunks())}
        if self.validation is None:
            sides = zip(*self.kept_back, strict=True)
            parts[VALIDATION] = self._make_shards(VALIDATION, _chunks(sides))
        else:
            parts[VALIDATION] = self._make_shards(VALIDATION, _chunks(self.validation.stream()))
        settings = self.settings()
        manifest = {
            **settings,
            "files": {path: size for path, (size, _) in settings["files"].items()},
            "tokenizer": {"sha256": tokenizer_sha256(tokenizer), "entries": len(tokenizer)},
            "token_type": self.writer.token_type,
            "length_type": self.writer.length_type,
            "parts": {part: self._finish_part(part, shards) for part, shards in parts.items()},
        }
        write_text(self.folder / MANIFEST, _as_json(manifest))
        self._clean()
        return manifest

    def _choose_held_out(self) -> np.ndarray:
        """Numbers of the pairs that are held out; counting them is the first pass over the text."""
        path = self.folder / UNFINISHED
        settings = json.loads(path.read_text(encoding="utf-8"))
        if "pairs" not in settings:
            settings["pairs"] = self.train.count()
            write_text(path, _as_json(settings))
        self.pairs = settings["pairs"]
        return held_out_rows(self.pairs, self.recipe.validation_size, self.recipe.seed)

    def _tokenizer(self):
        """The tokenizer in the folder; put there first if need be, given or trained on the first pairs."""
        folder = self.folder / TOKENIZER
        if not folder.exists():
            if self.recipe.tokenizer is not None:
                tokenizer = load_tokenizer(self.recipe.tokenizer)
            else:
                pairs = (pair for number, pair in enumerate(self.train.stream()) if not self._is_held_out(number))
                tokenizer = new_tokenizer(self.recipe, pairs)
            tokenizer.save_pretrained(unfinished(folder))
            publish(unfinished(folder), folder)
        return load_tokenizer(folder)

    def _is_held_out(self, number: int) -> bool:
        place = np.searchsorted(self.held_out, number)
        return place < len(self.held_out) and self.held_out[place] == number

    def _train_chunks(self) -> Iterator[tuple[list[str], list[str]]]:
        """Chunks of the training text without what is held out, which is kept back."""
        start = 0
        for chunk in _chunks(self.train.stream()):
            stop = start + len(chunk[0])
            rows = self.held_out[np.searchsorted(self.held_out, start) : np.searchsorted(self.held_out, stop)] - start
            for row in rows:
                for side, texts in zip(self.kept_back, chunk, strict=True):
                    side.append(texts[row])
            for row in rows[::-1]:
                for texts in chunk:
                    del texts[row]
            start = stop
            yield chunk
        if self.validation is None and start != self.pairs:
            raise UserError(f"{start:,} training pairs were read, not the {self.pairs:,} counted before: {_OTHER}")

    def _make_shards(self, part: str, chunks: Iterator[tuple[list[str], list[str]]]) -> list[dict]:
        """Facts of the shards of all chunks, in order; those that are there are not made again."""
        shards: dict[int, dict] = {}
        is_shown = None if self.progress else True  # None: on a terminal
        counted = self.pairs - len(self.held_out) if part == TRAIN and self.validation is None else None
        bar = tqdm(desc=f"preparing {part} pairs", total=counted, unit=" pairs", unit_scale=True, disable=is_shown)
        sizes: dict[int, int] = {}

        def jobs() -> Iterator[tuple]:
            for number, chunk in enumerate(chunks):
                sizes[number] = len(chunk[0])
                facts = self.writer.finished(part, number)
                if facts is None:
                    yield part, number, chunk
                else:
                    shards[number] = facts
                    bar.update(sizes.pop(number))

        workers = Workers(self.writer, self.workers) if self.workers > 1 else None
        try:
            for (_, number), facts in workers.run(jobs()) if workers else self._run_here(jobs()):
                shards[number] = facts
                bar.update(sizes.pop(number))
        finally:
            bar.close()
            if workers is not None:
                workers.close()
        return [shards[number] for number in sorted(shards)]

    def _run_here(self, jobs: Iterator[tuple]) -> Iterator[tuple[tuple, dict]]:
        backend = self.writer.backend()
        for job in jobs:
            yield job[:2], self.writer.write(backend, *job)

    def _finish_part(self, part: str, shards: list[dict]) -> dict:
        """Write the index of a part from what its shards left; returns its entry in the manifest."""
        pairs = sum(facts["rows"] for facts in shards)
        status = np.zeros(4, np.int64)
        tokens = np.zeros(2, np.int64)
        path = self.folder / f"{part}.lengths.npy"
        with written_whole(path) as new:
            if pairs:
                index = np.lib.format.open_memmap(new, "w+", self.writer.length_type, (2, pairs))
            start = 0
            for number in range(len(shards)):
                lengths = self.writer.lengths(part, number)
                is_kept = lengths[0] > 0
                status[KEPT] += is_kept.sum()
                for code in (EMPTY, TOO_LONG, RATIO):
                    status[code] += np.count_nonzero(lengths[1, ~is_kept] == code)
                if pairs:
                    kept = lengths[:, is_kept]
                    index[:, start : start + kept.shape[1]] = kept
                    start += kept.shape[1]
                    tokens += kept.sum(axis=1, dtype=np.int64)
            dropped = {"empty": int(status[EMPTY]), "too_long": int(status[TOO_LONG]), "ratio": int(status[RATIO])}
            read = int(status.sum())
            if not pairs:
                what = "{read:,} read, {empty:,} empty, {too_long:,} too long, {ratio:,} unequal"
                what = what.format(read=read, **dropped)
                raise UserError(f"no {part} pair is left after filtering ({what}); check the files or raise the limits")
            index.flush()
            del index
        limits = {"max_length": self.recipe.max_length, "max_length_ratio": self.recipe.max_length_ratio}
        return {
            "pairs": pairs,
            "source_tokens": int(tokens[0]),
            "target_tokens": int(tokens[1]),
            "counts": {"read": read, "kept": pairs} | dropped | limits,
            "index": {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)},
            "shards": shards,
        }


def _as_json(value: dict) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


_OTHER = "give another --output, or --overwrite to start anew"


def _chunks(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    pairs = iter(pairs)
    while chunk := list(islice(pairs, CHUNK)):
        yield tuple(map(list, zip(*chunk, strict=True)))


def _check_same(folder: Path, settings: dict, earlier: dict) -> None:
    """Refuse to go on in a folder that was begun with other settings or from other files."""
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
        raise UserError(f"{changed[0]} is not as it was when the preparation of {folder} began: {_OTHER}")


def _check_ours(folder: Path) -> None:
    """Refuse a folder with something else in it: nothing there is touched, with `overwrite` neither."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output {folder} is a file: give a folder")
    names = {path.name for path in folder.iterdir()}
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
    """Let no second process prepare the same folder; the kernel frees the lock of a killed one."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write to output folder {folder}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process is preparing {folder}: wait for it, or give another --output") from error
        yield


def prepare(
    recipe: Recipe, folder: str | Path, workers: int | None = None, progress: bool = True, overwrite: bool = False
) -> dict:
    """Tokenise and filter a recipe's data into a folder that training maps into memory; goes on after an interruption.

    Text is read as a stream, also from the Hub, and at most `workers` + 2 chunks of `CHUNK` pairs are in memory.
    Without validation data some pairs are held out, the same ones as in training without preparation.

    Args:
        recipe: data, tokenizer, limits and, for what is held out, seed.
        folder: the folder to make, or to go on in.
        workers: processes that tokenise; 1: this one does; None: one for each processor.
        progress: show a bar on standard error, on a terminal.
        overwrite: remove an earlier preparation first.

    Returns:
        The manifest; see `read_manifest`.

    Raises:
        UserError: for mistakes in the recipe or its data, and a folder that holds something else.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}: it must be 1 or more")
    folder = Path(folder)
    if folder.exists():
        _check_ours(folder)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    preparation = Preparation(recipe, folder, workers or processors, progress)
    with _locked(folder):
        return preparation.claim(overwrite) or preparation.run()
