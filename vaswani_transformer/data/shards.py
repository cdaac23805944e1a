"""Shards of prepared pairs: how one is made from a chunk of text, and processes that make them."""

import contextlib
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from ..errors import UserError
from ..files import written_whole
from .filtering import KEPT, pair_status
from .prepared import shard_schema

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
