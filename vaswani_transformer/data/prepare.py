"""`vaswani prepare`: tokenise and filter all pairs once, into shards that training maps into memory.

The text is cut into splits (`splits`). Stages of tasks (`tasks`) follow each other: splits are counted, a sample is
drawn for a new tokenizer, splits are tokenised into shards. What is in the shards depends on the text, the tokenizer
and the limits, not on who has made them.
"""

import functools
import hashlib
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..files import check_path, is_local, is_there, to_path, together, written_whole
from ..hardware import check_workers
from ..output_folder import OutputFolder, locked
from ..recipes.recipe import Recipe, check_paths
from .engines import LOCAL, check_engine
from .filtering import check_limits
from .parallel_text import PairSource, held_out_rows
from .preparation_folder import (
    check_ours,
    finished_manifest,
    is_usable,
    remove_intermediate,
    remove_prepared,
    settings_of,
    start_or_resume,
)
from .prepared import (
    MANIFEST,
    TOKENIZER,
    VALIDATION,
    index_name,
    load_prepared_tokenizer,
    read_manifest,
    shard_name,
)
from .recipe_data import data_sources, sample_rows, tokenizer_of_sample
from .shards import ShardWriter
from .splits import in_pieces, keep_pairs, kept_pairs, places, text_splits
from .tasks import (
    COUNT,
    FINISH,
    LEARN,
    PARTS,
    PLAN,
    SAMPLE,
    SPLIT,
    TASKS,
    WRITE,
    Tasks,
    as_json,
    write_json,
)
from .text_files import file_stamp, store_errors
from .tokenization import load_tokenizer, tokenizer_sha256

CHUNK = 50_000  # pairs of a shard, before the filter
# Pairs from which on a training prepares its text first. Below, as of most corpora but those of WMT, one process
# tokenises them within minutes, and no second copy is left in the run's folder.
LARGE = 2_000_000
HELD_OUT, INDEX = "held_out", "index"  # what else is noted
logger = logging.getLogger(__name__)


def prepare(
    recipe: Recipe,
    folder: str | Path,
    workers: int | None = None,
    progress: bool = True,
    overwrite: bool = False,
    sources: tuple[PairSource, PairSource | None] | None = None,
    engine: str = LOCAL,
    engine_options: Mapping[str, Any] | None = None,
) -> dict | None:
    """Tokenise and filter a recipe's data into a folder that training maps into memory; resumes after an interruption.

    Without validation data some pairs are held out, the same ones as in training without preparation.

    Args:
        recipe: data, tokenizer, limits and, for what is held out and a new tokenizer's sample of the text, seed.
        folder: the folder to make, or to resume in; also a URL such as `s3://bucket/folder`, where nothing is locked
            and nothing of an earlier preparation is removed.
        workers: processes, each of which does a task at a time; None: one for each processor, fewer for a short text.
            Where there are several, a script needs `if __name__ == "__main__":`, since they import it.
        progress: show a bar on standard error, on a terminal.
        overwrite: remove an earlier preparation first.
        sources: training and validation text, if they are not to be found by the recipe; see `data_sources`.
        engine: who does it: `local`, or `slurm` or `ray` through datatrove; text and folder are then on a shared disk
            or in a store.
        engine_options: of datatrove's executor, such as `partition` and `time` for Slurm.

    Returns:
        The manifest; see `read_manifest`. None where Slurm has got the jobs that will write it.

    Raises:
        UserError: for mistakes in the recipe or its data, and a folder that holds something else. Splits that
            cannot be read are named, up to five, when all others are done.
    """
    check_engine(engine)
    if workers is not None:
        check_workers("workers", workers)
    check_limits(recipe.max_length, recipe.max_length_ratio)
    check_paths(recipe)
    check_path(folder, "output")
    folder = to_path(folder)
    with locked(folder) if is_local(folder) else store_errors(folder):
        output = check_ours(folder)
        train, validation = sources or data_sources(recipe)
        settings = settings_of(recipe, train, validation)
        if overwrite:
            remove_prepared(folder, output)
        if (folder / MANIFEST).exists():
            return finished_manifest(folder, settings)
        start_or_resume(folder, settings)
        preparation = Preparation.of(recipe, folder.absolute(), train, validation, settings)
        if not preparation.run_stages(workers, progress, engine, engine_options or {}):
            return None
        remove_intermediate(folder)
        return read_manifest(folder)


@dataclass(frozen=True)
class Preparation(Tasks):
    """The tasks of a preparation."""

    shard_pairs: int

    @staticmethod
    def of(
        recipe: Recipe, folder: Path, train: PairSource, validation: PairSource | None, settings: dict
    ) -> "Preparation":
        """The preparation of these texts."""
        splits = in_pieces(text_splits(train), folder / TASKS)
        others = [] if validation is None else in_pieces(text_splits(validation), folder / TASKS, len(splits))
        return Preparation(recipe, folder, (*splits, *others), len(splits), settings, CHUNK)

    @property
    def stages(self) -> list[str]:
        """The stages, in their order."""
        return [COUNT, PLAN, *([] if self.recipe.tokenizer_folder else [SAMPLE, LEARN]), WRITE, FINISH]

    def tasks(self, stage: str) -> int:
        """The number of a stage's tasks."""
        return {COUNT: len(self.splits), SAMPLE: self.train_splits, WRITE: len(self.splits)}.get(stage, 1)

    def _pairs_path(self, name: str, number: int) -> Path:
        return self._path(name, number).with_suffix(".jsonl")

    # The stages

    def _plan(self, number: int, advance: Callable[[int], Any]) -> None:
        """Find the pairs of all splits; choose what is held out and, for a new tokenizer, what it is trained on."""
        parts = [self.splits[: self.train_splits], self.splits[self.train_splits :]]
        train, validation = (
            places(splits, list(self._results(COUNT, part))) for part, splits in zip(PARTS, parts, strict=True)
        )
        recipe, total = self.recipe, sum(place.pairs for place in train)
        held_out = sampled = np.zeros(0, np.int64)
        if not validation:
            held_out = held_out_rows(total, recipe.validation_size, recipe.seed)
        if recipe.tokenizer_folder is None:
            rows = sample_rows(total - len(held_out), recipe.seed)
            sampled = rows + np.searchsorted(held_out - np.arange(len(held_out)), rows, "right")
        else:
            self._save_tokenizer(load_tokenizer(recipe.tokenizer_folder))
        noted = []
        for own in (train, validation):
            row = shard = 0
            for place in own:
                chosen = {"held_out": held_out, "sampled": sampled} if own is train else {}
                chosen = {
                    name: (rows[slice(*np.searchsorted(rows, [row, row + place.pairs]))] - row).tolist()
                    for name, rows in chosen.items()
                }
                noted.append({"place": asdict(place), "shard": shard, **chosen})
                row, shard = row + place.pairs, shard + -(-place.pairs // self.shard_pairs)
        together(lambda number: self._note(SPLIT, noted[number], number), range(len(noted)))
        self._note(PLAN, {})

    def _sample(self, number: int, advance: Callable[[int], Any]) -> None:
        """Read what the tokenizer is trained on."""
        plan = self._result(SPLIT, number)
        rows = set(plan["sampled"])
        pairs = [pair for row, pair in self._pairs(number, plan) if row in rows] if rows else []
        self._note(SAMPLE, {"files": [keep_pairs(self._pairs_path(SAMPLE, number), pairs)]}, number)

    def _learn(self, number: int, advance: Callable[[int], Any]) -> None:
        """Train the tokenizer."""
        number = sum(len(plan["sampled"]) for plan in self._results(SPLIT))
        pairs = chain.from_iterable(kept_pairs(self._pairs_path(SAMPLE, n)) for n in range(self.train_splits))
        self._save_tokenizer(tokenizer_of_sample(self.recipe, pairs, number))
        self._note(LEARN, {})

    def _save_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if is_local(self.folder):
            output = OutputFolder(self.folder)
            with output.staging() as staging:
                tokenizer.save_pretrained(staging / TOKENIZER)
                output.place(staging / TOKENIZER, within=TOKENIZER)
            return
        with tempfile.TemporaryDirectory() as staging:
            tokenizer.save_pretrained(staging)
            files = {f"{TOKENIZER}/{path.name}": path.read_bytes() for path in Path(staging).iterdir()}
        self._check_free(self._path(TOKENIZER), list(files))
        self._note(TOKENIZER, {name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
        for name, content in files.items():
            with written_whole(self.folder / name) as new:
                new.write_bytes(content)

    def _write(self, number: int, advance: Callable[[int], Any]) -> None:
        """Write the shards of a split."""
        part, plan = PARTS[number >= self.train_splits], self._result(SPLIT, number)
        rows, held_out = set(plan.get("held_out", ())), []
        pairs = (pair for row, pair in self._pairs(number, plan) if row not in rows or held_out.append(pair))
        shards = -(-plan["place"]["pairs"] // self.shard_pairs)
        self._check_free(self._path(WRITE, number), [shard_name(part, plan["shard"] + n) for n in range(shards)])

        def note(facts: dict) -> None:
            kept = keep_pairs(self._pairs_path(HELD_OUT, number), held_out)
            self._note(WRITE, {**facts, "files": [kept]}, number)

        self._writer.write(part, plan["shard"], pairs, self.shard_pairs, note, advance)

    def _finish(self, number: int, advance: Callable[[int], Any]) -> None:
        """Write the validation pairs that were held out, the index of each part, and the manifest."""
        writer, parts = self._writer, {}
        for part in PARTS:
            results = list(self._results(WRITE, part))
            if part == VALIDATION and not results:
                paths = [self._pairs_path(HELD_OUT, number) for number in range(self.train_splits)]
                held_out = list(chain.from_iterable(together(lambda path: list(kept_pairs(path)), paths)))
                self._check_free(self._path(HELD_OUT), [shard_name(part, 0)])
                writer.write(part, 0, held_out, len(held_out), functools.partial(self._note, HELD_OUT))
                results = [self._result(HELD_OUT)]
            shards = [facts for result in results for facts in result["shards"]]
            counts = np.sum([result["counts"] for result in results], 0).tolist()
            note = f"{part}_{INDEX}"
            self._check_free(self._path(note), [index_name(part)])
            parts[part] = writer.write_index(part, shards, counts, functools.partial(self._note, note))
        tokenizer = load_prepared_tokenizer(self.folder)
        manifest = {
            **self.settings,
            "files": {path: size for path, (size, _) in self.settings["files"].items()},
            "tokenizer": {"sha256": tokenizer_sha256(tokenizer), "entries": len(tokenizer)},
            "token_type": writer.token_type,
            "length_type": writer.length_type,
            "parts": parts,
        }
        if is_local(self.folder):
            OutputFolder(self.folder).write_text(MANIFEST, as_json(manifest))
        else:
            write_json(self.folder / MANIFEST, manifest)

    def _check_free(self, note: Path, names: list[str]) -> None:
        """Refuse to replace a file of which there is no note: this preparation has not written it."""
        for name in names if not note.exists() else ():
            if is_there(self.folder / name):
                raise UserError(
                    f"{self.folder / name} was not written by this preparation: move it, or give another --output"
                )

    @property
    def _writer(self) -> ShardWriter:
        path = self.folder / TOKENIZER
        stamp = path.stat().st_mtime_ns if is_local(path) else file_stamp(self._path(TOKENIZER))
        return _writer(self.folder, stamp, self.recipe.max_length, self.recipe.max_length_ratio)


@functools.lru_cache(1)  # a process that does many tasks loads the tokenizer once
def _writer(folder: Path, stamp: Any, max_length: int, max_length_ratio: float | None) -> ShardWriter:
    return ShardWriter(folder, load_prepared_tokenizer(folder), max_length, max_length_ratio)


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
    with locked(folder):
        outdated = recipe.overwrite and not is_usable(folder, settings_of(recipe, *sources))
        prepare(recipe, folder, progress=progress, overwrite=outdated, sources=sources)
    return folder
