"""`vaswani prepare`: tokenise and filter all pairs once, into shards that training maps into memory.

`datasets` has the text as a memory-mapped table. Each shard is made of a fixed number of its rows by whichever worker
comes to it, whole or not at all, and one that is there is not made again: so any number of workers writes the same
files, and the same command resumes.
"""

import functools
import json
import logging
import re
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from ..errors import UserError, reading
from ..files import file_sha256, is_local, remove_leftovers, to_path, write_text, written_whole
from ..json_and_yaml import read_json
from ..output_folder import OutputFolder, locked
from ..recipes.recipe import Recipe
from . import prepared
from .parallel_text import PairSource, held_out_rows
from .prepared import INDEX, MANIFEST, PARTS, SHARD, TOKENIZER, TRAIN, UNFINISHED, VALIDATION
from .recipe_data import data_sources, load_training_pairs, recipe_tokenizer
from .text_files import check_on_disk, file_stamp
from .tokenization import load_tokenizer, tokenizer_sha256, vocabulary_sizes
from .tokenized_pairs import KEPT, FilterCounts, pair_encoder
from .workers import LOCAL, default_workers, run_tasks

CHUNK = 50_000  # pairs of a shard, before the filter
_ENCODED_TOGETHER = 1000  # pairs whose encodings, which are large, are in memory at once
_WORTH_A_WORKER = 150_000  # pairs, in whose time a worker starts
# Training prepares its text first from this many pairs on. Below, as with most corpora but those of WMT, one process
# tokenises them within minutes, and no second copy is left in the run's folder.
LARGE = 2_000_000
_OURS = re.compile(rf"({'|'.join(PARTS)})(-\d{{5,}}\.arrow|\.lengths\.npy)|{TOKENIZER}/.+|{MANIFEST}|{UNFINISHED}")
_OTHER = "or give another --output, or --overwrite to start again"
logger = logging.getLogger(__name__)


def prepare(
    recipe: Recipe,
    folder: str | Path,
    workers: int | None = None,
    progress: bool = True,
    overwrite: bool = False,
    engine: str = LOCAL,
) -> dict:
    """Tokenise and filter a recipe's data into a folder that training maps into memory; resumes after an interruption.

    Without validation data the same pairs are held out as in training without preparation. Returns the manifest.

    Args:
        recipe: data, tokenizer, limits and, for what is held out and a new tokenizer's sample of the text, seed.
        folder: the folder to make, or to resume in; also a URL such as `s3://bucket/folder`, where nothing is locked
            and nothing of an earlier preparation is removed.
        workers: as in `run_tasks`; None: one per CPU, fewer for a short text.
        engine: `local`, or `ray` for a cluster whose machines share a disk: the folder and `HF_DATASETS_CACHE`, in
            which `datasets` has the text, are there.

    Raises:
        UserError: for mistakes in the recipe or its data, and a folder that holds something else.
    """
    folder = to_path(folder)
    if not progress:
        datasets.disable_progress_bars()
    with locked(folder) if is_local(folder) else reading(folder):
        train, validation = data_sources(recipe)
        settings = _settings(recipe, train, validation)
        if overwrite and not is_local(folder) and any(folder.glob("*")):
            raise UserError(f"{folder} is not on this machine, where nothing is removed: remove it yourself first")
        if not overwrite and (manifest := _earlier(folder, settings)) is not None:
            return manifest
        text, held_out = train.load(), np.zeros(0, np.int64)
        if validation is None:
            held_out = held_out_rows(len(text), recipe.validation_size, recipe.seed)
        texts = {TRAIN: text, VALIDATION: validation.load() if validation else text.select(held_out)}
        if recipe.fuzzy_matches:
            texts, held_out = dict(zip(PARTS, load_training_pairs(recipe), strict=True)), held_out[:0]
        if overwrite and is_local(folder):  # what the folder's mark lists
            OutputFolder(folder).remove(filter(_OURS.fullmatch, OutputFolder(folder).names))
            _earlier(folder, settings)  # refuses what is not ours
        if is_local(folder):
            remove_leftovers(folder)
        shards = [SHARD.format(part, number) for part in texts for number in range(-(-len(texts[part]) // CHUNK))]
        if not (folder / UNFINISHED).exists():
            _start(folder, recipe, settings, texts[TRAIN], held_out, shards)
        make = functools.partial(_ShardWriter, folder.absolute(), texts, held_out, settings["recipe"], CHUNK)
        workers = workers or default_workers(len(text) // _WORTH_A_WORKER)
        results = list(run_tasks(make, range(len(shards)), workers, engine, "preparing" if progress else None))
        return _finish(folder, settings, results)


def _settings(recipe: Recipe, train: PairSource, validation: PairSource | None) -> dict:
    """Return what decides the content: a preparation is resumed with the same only."""
    fields = {name: getattr(recipe, name) for name in (*prepared.LIMIT_FIELDS, *prepared.DATA_FIELDS)}
    fields |= {name: None if recipe.tokenizer_folder else getattr(recipe, name) for name in prepared.TOKENIZER_FIELDS}
    fields |= {"fuzzy_matches": True} if recipe.fuzzy_matches else {}  # which earlier preparations do not name
    files = list(train.files)
    if validation is None or recipe.tokenizer_folder is None:
        fields["seed"] = recipe.seed  # chooses what is held out, and the tokenizer's sample
    if validation is not None:
        del fields["validation_size"]
        files += validation.files
    return {
        "format": prepared.FORMAT,
        "version": prepared.VERSION,
        "recipe": fields,
        "tokenizer": recipe.tokenizer_folder and tokenizer_sha256(load_tokenizer(recipe.tokenizer_folder)),
        "files": {str(path): list(file_stamp(path)) for path in files},
    }


def _earlier(folder: Path, settings: dict) -> dict | None:
    """Return the manifest of a finished preparation with these settings, if any; `UserError` if it has others."""
    notes = next((folder / name for name in (MANIFEST, UNFINISHED) if (folder / name).exists()), None)
    if notes is None:
        if {path.name for path in folder.glob("[!.]*")} - {TOKENIZER}:
            raise UserError(f"{folder} is not empty and holds no preparation: give another --output")
        return None
    earlier = read_json(notes)
    is_finished = notes.name == MANIFEST
    with reading(notes):
        before, now = ({**values["recipe"], **values["files"]} for values in (earlier, settings))
        before["tokenizer"], now["tokenizer"] = earlier["tokenizer"], settings["tokenizer"]
        sizes = {path for path, stamp in earlier["files"].items() if isinstance(stamp, int)}  # of earlier versions
        now |= {path: stamp[0] for path, stamp in settings["files"].items() if path in sizes}
        if is_finished:
            before["tokenizer"] = earlier["tokenizer"]["sha256"] if settings["tokenizer"] else None
        changed = sorted(name for name in before | now if before.get(name) != now.get(name))
        if changed or (earlier["format"], earlier["version"]) != (prepared.FORMAT, prepared.VERSION):
            what = ", ".join(changed) or "another version"
            raise UserError(f"{folder} was prepared with other settings or files ({what}): give the same, {_OTHER}")
    return earlier if is_finished and prepared.open_prepared(folder) else None


def _start(
    folder: Path, recipe: Recipe, settings: dict, text: datasets.Dataset, held_out: np.ndarray, shards: list[str]
) -> None:
    """Write the tokenizer, and last the settings, by which the preparation is resumed."""
    with tempfile.TemporaryDirectory() as staging:
        recipe_tokenizer(recipe, text, held_out).save_pretrained(staging)
        files = {f"{TOKENIZER}/{path.name}": path for path in Path(staging).iterdir()}
        if is_local(folder):
            OutputFolder(folder).claim(*files, *shards, *map(INDEX.format, PARTS), UNFINISHED, MANIFEST)
            (folder / TOKENIZER).mkdir(exist_ok=True)
        for name, path in files.items():
            with written_whole(folder / name) as new:
                shutil.copyfile(path, new)
    write_text(folder / UNFINISHED, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")


class _ShardWriter:
    """Writes shards by their number: those of the training text, then those to validate on."""

    def __init__(
        self, folder: Path, texts: dict[str, datasets.Dataset], held_out: np.ndarray, limits: dict, shard_pairs: int
    ):
        tokenizer = prepared.load_prepared_tokenizer(folder)
        self.folder, self.texts, self.held_out, self.shard_pairs = folder, texts, held_out, shard_pairs
        self._encode = pair_encoder(tokenizer, limits["max_length"], limits["max_length_ratio"])
        self._ids = pa.list_(pa.uint16() if max(vocabulary_sizes(tokenizer)) <= 2**16 else pa.int32())
        self._length_type = np.uint16 if limits["max_length"] < 2**16 else np.int32

    def __call__(self, number: int) -> dict[str, Any]:
        """Write a shard unless it is there; returns its part, facts, pairs of each status and lengths `(2, pairs)`."""
        part, train_shards = TRAIN, -(-len(self.texts[TRAIN]) // self.shard_pairs)
        if number >= train_shards:
            part, number = VALIDATION, number - train_shards
        path = self.folder / SHARD.format(part, number)
        if not path.exists():
            self._write(path, part, number * self.shard_pairs)
        check_on_disk(path)  # a pipe would be waited for
        with reading(path):
            source = pa.memory_map(str(path)) if is_local(path) else pa.BufferReader(path.read_bytes())
            batch = pa.ipc.open_file(source).get_batch(0)
            facts = {"file": path.name, "rows": len(batch), "bytes": source.size(), "sha256": file_sha256(path)}
            status = json.loads(batch.schema.metadata[b"status"])
            lengths = [column.value_lengths().to_numpy().astype(self._length_type) for column in batch.columns]
        return {"part": part, "facts": facts, "status": status, "lengths": np.stack(lengths)}

    def _write(self, path: Path, part: str, first: int) -> None:
        text, columns, counts = self.texts[part], ([], []), np.zeros(4, np.int64)
        rows = np.arange(first, min(first + self.shard_pairs, len(text)))
        if part == TRAIN:
            rows = np.setdiff1d(rows, self.held_out, assume_unique=True)
        for start in range(0, len(rows), _ENCODED_TOGETHER):
            encoded = self._encode(text[rows[start : start + _ENCODED_TOGETHER]])
            counts += np.bincount(encoded["status"], minlength=len(counts))
            kept = np.flatnonzero(encoded["status"] == KEPT)
            for column, name in zip(columns, ("input_ids", "labels"), strict=True):
                column.append(pa.array([encoded[name][row] for row in kept], self._ids))
        columns = [pa.chunked_array(column, self._ids).combine_chunks() for column in columns]
        schema = pa.schema([("input_ids", self._ids), ("labels", self._ids)], {"status": json.dumps(counts.tolist())})
        with written_whole(path) as new, pa.OSFile(str(new), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _write_index(folder: Path, part: str, shards: list[dict[str, Any]], limits: dict) -> dict:
    """Write the lengths of all pairs of a part into one file; return the part's entry in the manifest."""
    status = np.sum([shard["status"] for shard in shards], 0)
    counts = FilterCounts.of(f"{part} data", status, limits["max_length"], limits["max_length_ratio"])
    lengths, path = np.concatenate([shard["lengths"] for shard in shards], 1), folder / INDEX.format(part)
    with written_whole(path) as new, new.open("wb") as file:
        np.save(file, lengths)
    tokens = lengths.sum(1, dtype=np.int64).tolist()
    return {
        "pairs": counts.kept,
        "source_tokens": tokens[0],
        "target_tokens": tokens[1],
        "counts": asdict(counts),
        "index": {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)},
        "shards": [shard["facts"] for shard in shards],
    }


def _finish(folder: Path, settings: dict, results: list[dict[str, Any]]) -> dict:
    """Write the index of each part and, last, the manifest."""
    limits, tokenizer = settings["recipe"], prepared.load_prepared_tokenizer(folder)
    parts = {part: [result for result in results if result["part"] == part] for part in PARTS}
    manifest = {
        **settings,
        "tokenizer": {"sha256": tokenizer_sha256(tokenizer), "entries": len(tokenizer)},
        "parts": {part: _write_index(folder, part, shards, limits) for part, shards in parts.items()},
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    (folder / UNFINISHED).unlink()
    return manifest


def prepare_if_large(recipe: Recipe, folder: Path, progress: bool = True) -> Path | None:
    """Prepare the text of a training that is about to start, in its folder, if it is `LARGE` or more; else None.

    An interrupted preparation is resumed and a finished one used; one of other settings, or of text that has changed
    since, is refused or, by the recipe's `overwrite`, made again.
    """
    sources = data_sources(recipe)
    if (pairs := len(sources[0].load())) < LARGE:
        return None
    done = f"{pairs:,} training pairs are prepared in {folder}, once"
    logger.info("%s; other runs may share them: --prepared %s", done, folder)
    overwrite = False
    if recipe.overwrite:
        try:
            _earlier(folder, _settings(recipe, *sources))
        except UserError:
            overwrite = True
    prepare(recipe, folder, progress=progress, overwrite=overwrite)
    return folder
