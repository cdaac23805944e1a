"""`vaswani prepare`: tokenise and filter all pairs once, in parallel, into shards that training maps into memory.

The main thread reads chunks of pairs, others make one shard of each. A shard is written under a temporary name, fsynced
and renamed, so that the same command resumes an interrupted one; what it holds depends on the text, the tokenizer and
the limits, not on the number of workers.
"""

import contextlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..files import (
    file_sha256,
    is_inner,
    remove_files,
    remove_leftovers,
    set_aside,
    write_text,
    written_whole,
)
from ..hardware import MOST_WORKERS, check_workers
from ..json_and_yaml import read_json
from ..output_folder import OutputFolder, locked
from ..recipes.recipe import Recipe, check_paths
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
)
from .recipe_data import data_sources, new_tokenizer
from .tokenization import SIDES, encoder, load_tokenizer, tokenizer_sha256, vocabulary_sizes

CHUNK = 50_000  # pairs that are read for one shard
# Pairs from which on a training prepares its text first. Below, as of most corpora but those of WMT, one process
# tokenises them within minutes, and no second copy is left in the run's folder.
LARGE = 2_000_000
logger = logging.getLogger(__name__)
_ENCODED_TOGETHER = 1000  # pairs whose encodings, which are large, are in memory at once
_OTHER = "give another --output, or --overwrite to start anew"
Pairs = list[tuple[str, str]]


def prepare(
    recipe: Recipe,
    folder: str | Path,
    workers: int | None = None,
    progress: bool = True,
    overwrite: bool | None = False,
    sources: tuple[PairSource, PairSource | None] | None = None,
) -> dict:
    """Tokenise and filter a recipe's data into a folder that training maps into memory; resumes after an interruption.

    Text is read as a stream, also from the Hub, `CHUNK` pairs at a time. Without validation data some pairs are held
    out, the same ones as in training without preparation.

    Args:
        recipe: data, tokenizer, limits and, for what is held out and a new tokenizer's sample of the text, seed.
        folder: the folder to make, or to resume in.
        workers: threads that tokenise, each a chunk of its own; None: one for each processor.
        progress: show a bar on standard error, on a terminal.
        overwrite: remove an earlier preparation first; None: only one that cannot be resumed or used with this recipe.
        sources: training and validation text, if they are not to be found by the recipe; see `data_sources`.

    Returns:
        The manifest; see `read_manifest`.

    Raises:
        UserError: for mistakes in the recipe or its data, and a folder that holds something else.
    """
    workers = _processors() if workers is None else workers
    check_workers("workers", workers)
    check_limits(recipe.max_length, recipe.max_length_ratio)
    check_paths(recipe)
    with locked(folder):
        folder = Path(folder)
        output = _check_ours(folder)
        train, validation = sources or data_sources(recipe)
        settings = _settings(recipe, train, validation)
        if overwrite or (overwrite is None and not _is_usable(folder, settings)):
            _remove_prepared(output)
        if (folder / MANIFEST).exists():
            return _finished_manifest(folder, settings)
        _start_or_resume(folder, settings)
        number, held_out, validation_pairs = None, set(), []
        if validation is None:
            number = _count(folder, train)
            held_out.update(held_out_rows(number, recipe.validation_size, recipe.seed).tolist())
        tokenizer = _saved_tokenizer(recipe, output, train, held_out)
        writer = ShardWriter(folder, tokenizer, recipe.max_length, recipe.max_length_ratio, workers, progress)
        chunks = _train_chunks(train, held_out, validation_pairs, number)
        parts = {TRAIN: writer.write_part(TRAIN, chunks, number and number - len(held_out))}
        pairs = iter(validation_pairs) if validation is None else validation.stream()
        parts[VALIDATION] = writer.write_part(VALIDATION, _chunks(pairs))
        manifest = {
            **settings,
            "files": {path: size for path, (size, _) in settings["files"].items()},
            "tokenizer": {"sha256": tokenizer_sha256(tokenizer), "entries": len(tokenizer)},
            "token_type": writer.token_type,
            "length_type": writer.length_type,
            "parts": parts,
        }
        output.write_text(MANIFEST, _as_json(manifest))
        _remove_intermediate(folder)
        return manifest


def prepare_if_large(recipe: Recipe, folder: Path, progress: bool = True) -> Path | None:
    """Prepare the text of a training that is about to start, in its folder, if it is `LARGE` or more; else None.

    An interrupted preparation is resumed and a finished one used; of other settings, or of text that has changed since,
    it is refused or, by the recipe's `overwrite`, made anew. Data on the Hub is fetched first, as it is for training.

    Raises:
        UserError: as `prepare`.
    """
    train, validation = data_sources(recipe)
    train = train.downloaded()
    if (pairs := train.estimate()) < LARGE:
        return None
    what = f"about {pairs:,} training pairs are prepared in {folder}, once"
    logger.info("%s; other runs may share them: --prepared %s", what, folder)
    sources = train, validation and validation.downloaded()
    prepare(recipe, folder, progress=progress, overwrite=None if recipe.overwrite else False, sources=sources)
    return folder


def _processors() -> int:
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(number, MOST_WORKERS)


class ShardWriter:
    """Makes the shards and the index of a part that a prepared folder still lacks."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        max_length_ratio: float | None,
        workers: int = 1,
        progress: bool = False,
    ):
        self.folder, self.workers, self.progress = folder, workers, progress
        self.max_length, self.max_length_ratio = max_length, max_length_ratio
        self.token_type = "uint16" if max(vocabulary_sizes(tokenizer)) <= 2**16 else "int32"
        self.length_type = "uint16" if max_length < 2**16 else "int32"
        self._end_id, self._stopped = tokenizer.eos_token_id, threading.Event()
        self._encoders = [encoder(tokenizer, side) for side in SIDES]

    def write_part(self, part: str, chunks: Iterable[Pairs], total: int | None = None) -> dict:
        """Write the shards of all chunks that have none yet, and the index; returns the manifest's entry.

        Raises:
            UserError: for a tokenizer that does not append `</s>`, and if no pair is left.
            OSError: from the disk; of each shard all is there or nothing.
        """
        disable = None if self.progress else True  # None: shown on a terminal only
        bar = tqdm(desc=f"preparing {part} pairs", total=total, unit=" pairs", unit_scale=True, disable=disable)
        paths, pending = [], deque()

        def collect() -> None:
            future, pairs = pending.popleft()
            future.result()
            bar.update(pairs)

        with bar, ThreadPoolExecutor(self.workers) as executor:
            try:
                for number, chunk in enumerate(chunks):
                    paths.append(self.folder / f"{part}-{number:05d}.arrow")
                    facts = _finished(paths[-1])
                    if facts is None or file_sha256(paths[-1]) != facts["sha256"]:
                        pending.append((executor.submit(self._write, paths[-1], chunk), len(chunk)))
                    else:
                        bar.update(len(chunk))
                    if len(pending) > self.workers:
                        collect()
                while pending:
                    collect()
            except BaseException:  # Ctrl-C too
                self._stopped.set()
                raise
        return self._write_index(part, [_finished(path) for path in paths])

    def _write(self, path: Path, pairs: Pairs) -> None:
        """Tokenise and filter a chunk into its shard."""
        counts, values, lengths = np.zeros(4, np.int64), [[], []], [[0], [0]]
        for start in range(0, len(pairs), _ENCODED_TOGETHER):
            if self._stopped.is_set():
                return
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
        columns = []
        for side in range(2):
            offsets = np.cumsum(lengths[side], dtype=np.int32)
            ids = np.concatenate([np.zeros(0, self.token_type), *values[side]])
            columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids)))
        store_shard(path, columns, counts.tolist())

    def _write_index(self, part: str, shards: list[dict]) -> dict:
        """Write the lengths of all pairs that were kept into one file; returns the part's entry in the manifest."""
        status = np.zeros(4, np.int64)
        for facts in shards:
            status += facts.pop("counts")
        counts = FilterCounts(int(status.sum()), *status.tolist(), self.max_length, self.max_length_ratio)
        if not counts.kept:
            raise UserError(f"no {part} pair is left after filtering ({counts}); check the files or raise the limits")
        path, tokens = self.folder / f"{part}.lengths.npy", []
        with _stored(path) as new, new.open("wb") as file:
            # As `numpy.save`, but piece by piece; a memory map would end the process where the disk is full.
            header = {"descr": np.dtype(self.length_type).str, "fortran_order": False, "shape": (2, counts.kept)}
            np.lib.format.write_array_header_1_0(file, header)
            for side in range(2):
                tokens.append(0)
                for facts in shards:
                    batch = pa.ipc.open_file(pa.memory_map(str(self.folder / facts["file"]))).get_batch(0)
                    lengths = batch.columns[side].value_lengths().to_numpy()
                    file.write(lengths.astype(self.length_type).tobytes())
                    tokens[side] += int(lengths.sum(dtype=np.int64))
        return {
            "pairs": counts.kept,
            "source_tokens": tokens[0],
            "target_tokens": tokens[1],
            "counts": asdict(counts),
            "index": {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)},
            "shards": shards,
        }


def store_shard(path: Path, columns: list[pa.ListArray], counts: list[int]) -> None:
    """Write a shard and its facts, which `_finished` reads; `counts` are those of `count_status`."""
    batch, sink = pa.record_batch(columns, ["input_ids", "labels"]), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with _stored(path, rows=len(batch), counts=counts) as new:
        new.write_bytes(sink.getvalue())


@contextlib.contextmanager
def _stored(path: Path, **facts) -> Iterator[Path]:
    """Name to write a file under, which gets its own in the end; before that its facts are written beside it.

    So a file without facts is not ours.
    """
    note = path.with_suffix(".part")
    if path.exists() and not note.exists():
        raise UserError(f"{path} was not written by this preparation: move it, or give another --output")
    with written_whole(path) as new:
        yield new
        _write_json(note, {"file": path.name, "bytes": new.stat().st_size, "sha256": file_sha256(new), **facts})


def _finished(path: Path) -> dict | None:
    """Facts of a shard that was written to its end; None if it is still to be made."""
    try:
        facts = read_json(path.with_suffix(".part"), "remove it")
        kinds = {"file": str, "rows": int, "bytes": int, "sha256": str, "counts": list}
        whole = all(isinstance(facts.get(name), kind) for name, kind in kinds.items()) and len(facts["counts"]) == 4
        return facts if whole and path.is_file() and path.stat().st_size == facts["bytes"] else None
    except (OSError, UserError):
        return None


def _chunks(pairs: Iterator[tuple[str, str]]) -> Iterator[Pairs]:
    while chunk := list(islice(pairs, CHUNK)):
        yield chunk


def _train_chunks(
    train: PairSource, held_out: set[int], validation_pairs: Pairs, number: int | None
) -> Iterator[Pairs]:
    """Chunks of the training text, of `number` pairs, without what is held out: that is added to `validation_pairs`."""
    start = 0
    for chunk in _chunks(train.stream()):
        validation_pairs += [pair for row, pair in enumerate(chunk, start) if row in held_out]
        yield [pair for row, pair in enumerate(chunk, start) if row not in held_out]
        start += len(chunk)
    if number not in (None, start):
        raise UserError(f"{start:,} training pairs were read, not the {number:,} counted before: {_OTHER}")


def _count(folder: Path, train: PairSource) -> int:
    """Number of training pairs: the first pass over the text, whose result is kept for a resumption."""
    settings = read_json(folder / UNFINISHED, _OTHER)
    if not isinstance(settings.get("pairs"), int):
        settings["pairs"] = train.count()
        _write_json(folder / UNFINISHED, settings)
    return settings["pairs"]


def _saved_tokenizer(
    recipe: Recipe, output: OutputFolder, train: PairSource, held_out: set[int]
) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder; copied there before, or trained on a sample of the pairs that are not held out."""
    folder = output.path / TOKENIZER
    if not folder.exists():
        if recipe.tokenizer_folder is not None:
            tokenizer = load_tokenizer(recipe.tokenizer_folder)
        else:
            tokenizer = new_tokenizer(recipe, (pair for row, pair in enumerate(train.stream()) if row not in held_out))
        with output.staging() as staging:
            tokenizer.save_pretrained(staging / TOKENIZER)
            output.publish(staging / TOKENIZER, TOKENIZER)
    return load_tokenizer(folder)


# What a folder holds already


def _as_json(value: dict) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _write_json(path: Path, value: dict) -> None:
    write_text(path, _as_json(value))


def _settings(recipe: Recipe, train: PairSource, validation: PairSource | None) -> dict:
    """What decides the content: a preparation is resumed with the same only."""
    fields = {name: getattr(recipe, name) for name in (*LIMIT_FIELDS, *DATA_FIELDS)}
    fields |= {name: None if recipe.tokenizer_folder else getattr(recipe, name) for name in TOKENIZER_FIELDS}
    files = list(train.files)
    if validation is None or recipe.tokenizer_folder is None:
        fields["seed"] = recipe.seed  # chooses what is held out, and the tokenizer's sample
    if validation is not None:
        del fields["validation_size"]
        files += validation.files
    stats = {str(path): path.stat() for path in files}
    return {
        "format": FORMAT,
        "version": VERSION,
        "recipe": fields,
        "tokenizer": recipe.tokenizer_folder and tokenizer_sha256(load_tokenizer(recipe.tokenizer_folder)),
        "files": {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()},
    }


def _is_usable(folder: Path, settings: dict) -> bool:
    """Whether what is prepared there, if anything, is of these settings, and whole if it is finished."""
    try:
        if (folder / MANIFEST).exists():
            _finished_manifest(folder, settings)
        else:
            _check_unfinished(folder, settings)
        return True
    except UserError:
        return False


def _finished_manifest(folder: Path, settings: dict) -> dict:
    """The manifest of a finished preparation, which must have these settings and all its shards."""
    manifest = read_manifest(folder)
    files = {path: size for path, (size, _) in settings["files"].items()}
    tokenizer = manifest["tokenizer"]["sha256"] if settings["tokenizer"] else None
    _check_same(folder, settings | {"files": files}, manifest | {"tokenizer": tokenizer})
    open_prepared(folder)
    _remove_intermediate(folder)
    return manifest


def _start_or_resume(folder: Path, settings: dict) -> None:
    """Note the settings in a new folder, or compare them with those of the preparation that is resumed."""
    earlier = _check_unfinished(folder, settings)
    if not (folder / TOKENIZER).exists() and {**earlier, **settings} != earlier:
        _write_json(folder / UNFINISHED, settings)  # nothing is made yet, so that a wrong setting may be corrected
    remove_leftovers(folder)


def _check_unfinished(folder: Path, settings: dict) -> dict:
    """The settings in the folder; if a preparation has begun there they must be these."""
    path = folder / UNFINISHED
    earlier = read_json(path, _OTHER) if path.exists() else {}
    if (folder / TOKENIZER).exists():
        _check_same(folder, settings, earlier)
    return earlier


def _remove_intermediate(folder: Path) -> None:
    """Remove what only an unfinished preparation needs."""
    for path in (*_facts_files(folder), folder / UNFINISHED):
        path.unlink(missing_ok=True)


def _facts_files(folder: Path) -> list[Path]:
    return [*folder.glob("*-?????.part"), *folder.glob("*.lengths.part")]


def _check_same(folder: Path, settings: dict, earlier: dict) -> None:
    """Refuse a folder that was started with other settings or from other files."""
    earlier = {"recipe": {}, "files": {}, "tokenizer": None} | earlier
    if not all(isinstance(earlier[name], dict) for name in ("recipe", "files")):
        raise UserError(f"{folder} holds what no preparation has written: {_OTHER}")
    if [earlier.get(name) for name in ("format", "version")] != [FORMAT, VERSION]:
        raise UserError(f"{folder} was prepared by another version: {_OTHER}")
    # An earlier version did not note the seed of a tokenizer: it took the first pairs.
    changed = _differing(settings["recipe"], {"seed": settings["recipe"].get("seed")} | earlier["recipe"])
    changed += ["tokenizer"] if settings["tokenizer"] != earlier["tokenizer"] else []
    if changed:
        raise UserError(
            f"{folder} was prepared with other settings ({', '.join(changed)}): give the same ones, {_OTHER}"
        )
    changed = _differing(settings["files"], earlier["files"])
    if changed:
        raise UserError(f"{changed[0]} is not as it was when the preparation of {folder} started: {_OTHER}")


def _differing(one: dict, other: dict) -> list[str]:
    return sorted(name for name in one | other if one.get(name) != other.get(name))


def _check_ours(folder: Path) -> OutputFolder:
    """Refuse a folder with something else in it, and no preparation: nothing there is touched."""
    output = OutputFolder(folder)
    notes = _read_json(folder / MANIFEST) or _read_json(folder / UNFINISHED)
    if notes.get("format") != FORMAT and any(folder.glob("[!.]*")):
        raise UserError(f"{folder} is not empty and holds no preparation: give another --output")
    if notes and not output.names():  # of an earlier version
        output.adopt([MANIFEST, *(f"{TOKENIZER}/{path.name}" for path in (folder / TOKENIZER).glob("*.json"))])
    return output


def _read_json(path: Path) -> dict:
    with contextlib.suppress(OSError, UserError):
        return read_json(path, "remove it")
    return {}


def _remove_prepared(output: OutputFolder) -> None:
    """Remove what a preparation has made and nothing else; cut off, it leaves an unfinished preparation.

    What has been changed, or is damaged, is set aside.

    Raises:
        UserError: for a file that was never ours in the place of one of ours; nothing is removed then.
    """
    folder = output.path
    notes = _read_json(folder / MANIFEST) or _read_json(folder / UNFINISHED)
    try:
        written = [facts for part in notes.get("parts", {}).values() for facts in (part["index"], *part["shards"])]
        written += filter(None, map(_read_json, _facts_files(folder)))
        made = {Path(facts["file"]).name: (facts["bytes"], facts["sha256"]) for facts in written}
        made = {name: facts for name, facts in made.items() if is_inner(name)}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the manifest in {folder} is damaged: remove the folder, or give another --output") from error
    tokenizer = output.names(f"{TOKENIZER}/")
    output.check([MANIFEST, *tokenizer])
    for name, facts in made.items():
        path = folder / name
        is_same = path.is_file() and (path.stat().st_size, file_sha256(path)) == facts
        if os.path.lexists(path) and (path.is_symlink() or not is_same):
            logger.warning("%s was changed since it was prepared: kept as %s", path, set_aside(path).name)
    if output.is_ours(MANIFEST):
        (folder / MANIFEST).replace(folder / UNFINISHED)
    elif (folder / MANIFEST).exists():
        _write_json(folder / UNFINISHED, notes)
        output.make_way([MANIFEST])
    remove_files(folder, made)
    output.remove(tokenizer)
    set_aside(folder / TOKENIZER)  # with what others have put there
    for path in _facts_files(folder):
        path.unlink()
    for name in (MANIFEST, UNFINISHED, TOKENIZER, *(f"{part}" for part in (TRAIN, VALIDATION))):
        remove_leftovers(folder, name)
    (folder / UNFINISHED).unlink(missing_ok=True)
