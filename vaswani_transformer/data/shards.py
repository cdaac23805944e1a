"""Shards of prepared pairs as they are written: tokenised, filtered, with what a manifest says of them."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..files import file_sha256, is_local, together, written_whole
from .filtering import KEPT, FilterCounts, count_status, pair_status
from .prepared import index_name, shard_name
from .tokenization import SIDES, encoder, vocabulary_sizes

_READ_TOGETHER = 64  # shards whose lengths are in memory at once
_ENCODED_TOGETHER = 1000  # pairs whose encodings, which are large, are in memory at once
Pairs = list[tuple[str, str]]


class ShardWriter:
    """Tokenises and filters pairs into the shards of a folder."""

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int, max_length_ratio: float | None
    ):
        self.folder, self.max_length, self.max_length_ratio = folder, max_length, max_length_ratio
        self.token_type = "uint16" if max(vocabulary_sizes(tokenizer)) <= 2**16 else "int32"
        self.length_type = "uint16" if max_length < 2**16 else "int32"
        self._end_id = tokenizer.eos_token_id
        self._encoders = [encoder(tokenizer, side) for side in SIDES]

    def write(
        self,
        part: str,
        first: int,
        pairs: Iterable[tuple[str, str]],
        shard_pairs: int,
        note: Callable[[dict], Any],
        advance: Callable[[int], Any] = lambda pairs: None,
    ) -> None:
        """Write pairs into shards that are there together or not at all.

        Args:
            part: train or validation.
            first: number of the first shard.
            pairs: what to write.
            shard_pairs: pairs of a shard, before the filter.
            note: is given the facts, `shards` and `counts`, once all is on the disk and before anything has its name.
            advance: is told of pairs that are done.

        Raises:
            UserError: for a tokenizer that does not append `</s>`.
        """
        counts, shards, pairs = np.zeros(4, np.int64), [], iter(pairs)
        with contextlib.ExitStack() as stack:
            while chunk := list(islice(pairs, shard_pairs)):
                path = self.folder / shard_name(part, first + len(shards))
                new = stack.enter_context(written_whole(path))
                batch, own = self._tokenize(chunk, advance)
                counts += own
                with pa.OSFile(str(new), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                facts = {"rows": len(batch), "bytes": new.stat().st_size, "sha256": file_sha256(new)}
                shards.append({"file": path.name, **facts})
            note({"shards": shards, "counts": counts.tolist()})

    def _tokenize(self, pairs: Pairs, advance: Callable[[int], Any]) -> tuple[pa.RecordBatch, np.ndarray]:
        """The token ids of pairs that are kept, and how many pairs have each status."""
        counts, values, lengths = np.zeros(4, np.int64), [[], []], [[0], [0]]
        for start in range(0, len(pairs), _ENCODED_TOGETHER):
            texts = list(zip(*pairs[start : start + _ENCODED_TOGETHER], strict=True))
            encoded = [encode(side) for encode, side in zip(self._encoders, texts, strict=True)]
            if any(side[0][-1:] != [self._end_id] for side in encoded):
                raise UserError("the tokenizer does not append its end token to a text; use one with a </s> template")
            tokens = np.array([[len(row) for row in side] for side in encoded])
            status = pair_status(texts, tokens, self.max_length, self.max_length_ratio)
            counts += count_status(status)
            kept = np.flatnonzero(status == KEPT)
            for side in range(2):
                flat = chain.from_iterable(encoded[side][row] for row in kept)
                values[side].append(np.fromiter(flat, self.token_type))
                lengths[side].extend(tokens[side, kept].tolist())
            advance(len(texts[0]))
        columns = []
        for side in range(2):
            offsets = np.cumsum(lengths[side], dtype=np.int32)
            columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(values[side]))))
        return pa.record_batch(columns, ["input_ids", "labels"]), counts

    def _lengths(self, facts: dict) -> np.ndarray:
        """The tokens of the sources and targets of a shard, `(2, pairs)`."""
        path = self.folder / facts["file"]
        source = pa.memory_map(str(path)) if is_local(path) else pa.BufferReader(path.read_bytes())
        columns = pa.ipc.open_file(source).get_batch(0).columns
        return np.stack([column.value_lengths().to_numpy().astype(self.length_type) for column in columns])

    def write_index(
        self, part: str, shards: Sequence[dict], status: Sequence[int], note: Callable[[dict], Any]
    ) -> dict:
        """Write the lengths of all pairs of a part into one file; returns the part's entry in the manifest.

        Args:
            part: train or validation.
            shards: the facts of its shards, in order.
            status: how many pairs have each status.
            note: is given the facts of the index, as of `write`.

        Raises:
            UserError: if no pair is left.
        """
        counts = FilterCounts(int(sum(status)), *map(int, status), self.max_length, self.max_length_ratio)
        if not counts.kept:
            raise UserError(f"no {part} pair is left after filtering ({counts}); check the files or raise the limits")
        path, tokens = self.folder / index_name(part), np.zeros(2, np.int64)
        with written_whole(path) as new:
            with new.open("wb") as file, tempfile.TemporaryFile(dir=new.parent) as targets:
                # As `numpy.save`, but piece by piece; a memory map would end the process where the disk is full.
                header = {"descr": np.dtype(self.length_type).str, "fortran_order": False, "shape": (2, counts.kept)}
                np.lib.format.write_array_header_1_0(file, header)
                for start in range(0, len(shards), _READ_TOGETHER):
                    for lengths in together(self._lengths, shards[start : start + _READ_TOGETHER]):
                        file.write(lengths[0].tobytes())
                        targets.write(lengths[1].tobytes())
                        tokens += lengths.sum(1, dtype=np.int64)
                targets.seek(0)
                shutil.copyfileobj(targets, file)
            index = {"file": path.name, "bytes": new.stat().st_size, "sha256": file_sha256(new)}
            note({"shards": [index]})
        return {
            "pairs": counts.kept,
            "source_tokens": int(tokens[0]),
            "target_tokens": int(tokens[1]),
            "counts": asdict(counts),
            "index": index,
            "shards": list(shards),
        }
