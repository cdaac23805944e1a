"""`vaswani prepare`: tokenise and filter all pairs once, into shards that training maps into memory.

The text is cut into splits (`splits`). Stages of tasks (`tasks`) follow each other: splits are counted, a sample is
drawn for a new tokenizer, splits are tokenised into shards. What is in the shards depends on the text, the tokenizer
and the limits, not on who has made them.
"""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..files import file_sha256, is_inner, remove_files, remove_leftovers, set_aside, write_text
from ..hardware import check_workers
from ..json_and_yaml import read_json
from ..output_folder import OutputFolder, locked
from ..recipes.recipe import Recipe, check_paths
from .engines import LOCAL, SLURM, run_on_cluster, run_tasks
from .filtering import check_limits
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
    index_name,
    open_prepared,
    read_manifest,
    shard_name,
)
from .recipe_data import data_sources, sample_rows, tokenizer_of_sample
from .shards import ShardWriter
from .splits import places, text_splits
from .tasks import (
    COUNT,
    FINISH,
    LEARN,
    LOGS,
    OTHER,
    PARTS,
    PLAN,
    SAMPLE,
    SPLIT,
    TASKS,
    WRITE,
    Tasks,
    as_json,
    task_notes,
    useful_workers,
    write_json,
)
from .tokenization import load_tokenizer, tokenizer_sha256

CHUNK = 50_000  # pairs of a shard, before the filter
# Pairs from which on a training prepares its text first. Below, as of most corpora but those of WMT, one process
# tokenises them within minutes, and no second copy is left in the run's folder.
LARGE = 2_000_000
HELD_OUT, INDEX = "held_out", "index"  # what else is noted
_SHOWN = {COUNT: "counting pairs", SAMPLE: "drawing a sample", WRITE: "tokenising"}
logger = logging.getLogger(__name__)


def prepare(
    recipe: Recipe,
    folder: str | Path,
    workers: int | None = None,
    progress: bool = True,
    overwrite: bool | None = False,
    sources: tuple[PairSource, PairSource | None] | None = None,
    engine: str = LOCAL,
    engine_options: Mapping[str, Any] | None = None,
) -> dict | None:
    """Tokenise and filter a recipe's data into a folder that training maps into memory; resumes after an interruption.

    Without validation data some pairs are held out, the same ones as in training without preparation.

    Args:
        recipe: data, tokenizer, limits and, for what is held out and a new tokenizer's sample of the text, seed.
        folder: the folder to make, or to resume in.
        workers: processes, each of which does a task at a time; None: one for each processor, fewer for a short text.
            Where there are several, a script needs `if __name__ == "__main__":`, since they import it.
        progress: show a bar on standard error, on a terminal.
        overwrite: remove an earlier preparation first; None: only one that cannot be resumed or used with this recipe.
        sources: training and validation text, if they are not to be found by the recipe; see `data_sources`.
        engine: who does it: `local`, or `slurm` or `ray` through datatrove; text and folder are on a shared disk then.
        engine_options: of datatrove's executor, such as `partition` and `time` for Slurm.

    Returns:
        The manifest; see `read_manifest`. None where Slurm has got the jobs that will write it.

    Raises:
        UserError: for mistakes in the recipe or its data, and a folder that holds something else. Of splits that cannot
            be read the first is named, when all others are done.
    """
    if workers is not None:
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
        preparation = Preparation.of(recipe, folder.absolute(), train, validation, settings)
        stages = [
            (name, functools.partial(preparation.run, name), preparation.tasks(name)) for name in preparation.stages
        ]
        if engine != LOCAL:
            run_on_cluster(engine, stages, folder.absolute() / TASKS / LOGS, engine_options or {})
            if engine == SLURM:
                return None
        for name, task, number in stages:
            run_tasks(task, number, workers or useful_workers(settings["files"]), _SHOWN.get(name), progress)
        _remove_intermediate(folder)
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
        splits = text_splits(train)
        others = [] if validation is None else text_splits(validation)
        return Preparation(recipe, folder, (*splits, *others), len(splits), settings, CHUNK)

    @property
    def stages(self) -> list[str]:
        """The stages, in their order."""
        return [COUNT, PLAN, *([] if self.recipe.tokenizer_folder else [SAMPLE, LEARN]), WRITE, FINISH]

    def tasks(self, stage: str) -> int:
        """The number of a stage's tasks."""
        return {COUNT: len(self.splits), SAMPLE: self.train_splits, WRITE: len(self.splits)}.get(stage, 1)

    def _note_pairs(self, name: str, pairs: Sequence[tuple[str, str]], number: int) -> dict:
        """Keep pairs for a later task; returns the facts of the file."""
        path = self._path(name, number).with_suffix(".jsonl")
        write_text(path, "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs))
        return self._facts(path)

    def _noted_pairs(self, name: str, number: int) -> Iterator[tuple[str, str]]:
        with self._path(name, number).with_suffix(".jsonl").open(encoding="utf-8", newline="\n") as file:
            yield from map(json.loads, file)

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
        for first, own in ((0, train), (self.train_splits, validation)):
            row = shard = 0
            for number, place in enumerate(own, first):
                chosen = {"held_out": held_out, "sampled": sampled} if own is train else {}
                chosen = {
                    name: (rows[slice(*np.searchsorted(rows, [row, row + place.pairs]))] - row).tolist()
                    for name, rows in chosen.items()
                }
                self._note(SPLIT, {"place": asdict(place), "shard": shard, **chosen}, number)
                row, shard = row + place.pairs, shard + -(-place.pairs // self.shard_pairs)
        self._note(PLAN, {})

    def _sample(self, number: int, advance: Callable[[int], Any]) -> None:
        """Read what the tokenizer is trained on."""
        plan = self._result(SPLIT, number)
        rows = set(plan["sampled"])
        pairs = [pair for row, pair in self._pairs(number, plan) if row in rows] if rows else []
        self._note(SAMPLE, {"files": [self._note_pairs(SAMPLE, pairs, number)]}, number)

    def _learn(self, number: int, advance: Callable[[int], Any]) -> None:
        """Train the tokenizer."""
        number = sum(len(self._result(SPLIT, number)["sampled"]) for number in range(self.train_splits))
        pairs = chain.from_iterable(self._noted_pairs(SAMPLE, split) for split in range(self.train_splits))
        self._save_tokenizer(tokenizer_of_sample(self.recipe, pairs, number))
        self._note(LEARN, {})

    def _save_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        output = OutputFolder(self.folder)
        with output.staging() as staging:
            tokenizer.save_pretrained(staging / TOKENIZER)
            output.publish(staging / TOKENIZER, TOKENIZER)

    def _write(self, number: int, advance: Callable[[int], Any]) -> None:
        """Write the shards of a split."""
        part, plan = PARTS[number >= self.train_splits], self._result(SPLIT, number)
        rows, held_out = set(plan.get("held_out", ())), []
        pairs = (pair for row, pair in self._pairs(number, plan) if row not in rows or held_out.append(pair))
        shards = -(-plan["place"]["pairs"] // self.shard_pairs)
        self._check_free(self._path(WRITE, number), [shard_name(part, plan["shard"] + n) for n in range(shards)])

        def note(facts: dict) -> None:
            self._note(WRITE, {**facts, "files": [self._note_pairs(HELD_OUT, held_out, number)]}, number)

        self._writer.write(part, plan["shard"], pairs, self.shard_pairs, note, advance)

    def _finish(self, number: int, advance: Callable[[int], Any]) -> None:
        """Write the validation pairs that were held out, the index of each part, and the manifest."""
        writer, parts = self._writer, {}
        for part in PARTS:
            results = list(self._results(WRITE, part))
            if part == VALIDATION and not results:
                held_out = list(chain.from_iterable(self._noted_pairs(HELD_OUT, n) for n in range(self.train_splits)))
                self._check_free(self._path(HELD_OUT), [shard_name(part, 0)])
                writer.write(part, 0, held_out, len(held_out), functools.partial(self._note, HELD_OUT))
                results = [self._result(HELD_OUT)]
            shards = [facts for result in results for facts in result["shards"]]
            counts = np.sum([result["counts"] for result in results], 0).tolist()
            note = f"{part}_{INDEX}"
            self._check_free(self._path(note), [index_name(part)])
            parts[part] = writer.write_index(part, shards, counts, functools.partial(self._note, note))
        tokenizer = load_tokenizer(self.folder / TOKENIZER)
        manifest = {
            **self.settings,
            "files": {path: size for path, (size, _) in self.settings["files"].items()},
            "tokenizer": {"sha256": tokenizer_sha256(tokenizer), "entries": len(tokenizer)},
            "token_type": writer.token_type,
            "length_type": writer.length_type,
            "parts": parts,
        }
        OutputFolder(self.folder).write_text(MANIFEST, as_json(manifest))

    def _check_free(self, note: Path, names: list[str]) -> None:
        """Refuse to replace a file of which there is no note: this preparation has not written it."""
        for name in names if not note.exists() else ():
            if os.path.lexists(self.folder / name):
                raise UserError(
                    f"{self.folder / name} was not written by this preparation: move it, or give another --output"
                )

    @property
    def _writer(self) -> ShardWriter:
        path = self.folder / TOKENIZER
        return _writer(self.folder, path.stat().st_mtime_ns, self.recipe.max_length, self.recipe.max_length_ratio)


@functools.lru_cache(1)  # a process that does many tasks loads the tokenizer once
def _writer(folder: Path, stamp: int, max_length: int, max_length_ratio: float | None) -> ShardWriter:
    return ShardWriter(folder, load_tokenizer(folder / TOKENIZER), max_length, max_length_ratio)


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


# What a folder holds already


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
    if settings != _check_unfinished(folder, settings):
        _remove_intermediate(folder)  # nothing else is made yet, so that a wrong setting may be corrected
        write_json(folder / UNFINISHED, settings)
    for path in (folder, folder / TASKS):
        remove_leftovers(path)


def _check_unfinished(folder: Path, settings: dict) -> dict:
    """The settings in the folder; if a preparation has begun there they must be these."""
    path = folder / UNFINISHED
    earlier = read_json(path, OTHER) if path.exists() else {}
    if (folder / TOKENIZER).exists():
        _check_same(folder, settings, earlier)
    return earlier


def _remove_intermediate(folder: Path) -> None:
    """Remove what only an unfinished preparation needs."""
    for path in task_notes(folder):
        path.unlink()
    with contextlib.suppress(OSError):  # something else is there, or nothing
        (folder / TASKS).rmdir()
    (folder / UNFINISHED).unlink(missing_ok=True)


def _check_same(folder: Path, settings: dict, earlier: dict) -> None:
    """Refuse a folder that was started with other settings or from other files."""
    earlier = {"recipe": {}, "files": {}, "tokenizer": None} | earlier
    if not all(isinstance(earlier[name], dict) for name in ("recipe", "files")):
        raise UserError(f"{folder} holds what no preparation has written: {OTHER}")
    if [earlier.get(name) for name in ("format", "version")] != [FORMAT, VERSION]:
        raise UserError(f"{folder} was prepared by another version: {OTHER}")
    # An earlier version did not note the seed of a tokenizer: it took the first pairs.
    changed = _differing(settings["recipe"], {"seed": settings["recipe"].get("seed")} | earlier["recipe"])
    changed += ["tokenizer"] if settings["tokenizer"] != earlier["tokenizer"] else []
    if changed:
        raise UserError(
            f"{folder} was prepared with other settings ({', '.join(changed)}): give the same ones, {OTHER}"
        )
    changed = _differing(settings["files"], earlier["files"])
    if changed:
        raise UserError(f"{changed[0]} is not as it was when the preparation of {folder} started: {OTHER}")


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
        written += [
            facts for path in task_notes(folder) for facts in (_read_json(path).get("result") or {}).get("shards", ())
        ]
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
        write_json(folder / UNFINISHED, notes)
        output.make_way([MANIFEST])
    remove_files(folder, made)
    output.remove(tokenizer)
    set_aside(folder / TOKENIZER)  # with what others have put there
    for name in (MANIFEST, UNFINISHED, TOKENIZER, *(f"{part}" for part in (TRAIN, VALIDATION))):
        remove_leftovers(folder, name)
    _remove_intermediate(folder)
