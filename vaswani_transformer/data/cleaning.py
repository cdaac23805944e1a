"""`vaswani clean`: the text of a recipe without the pairs that rules drop, with a report of what each has dropped.

A sample gives the distribution of length ratios, parts of the text are judged by what is in each pair
(`cleaning_rules`), copies are found over the whole text in memory, and parts are written. Which pairs are kept depends
on text and rules, not on the workers; a part that is there is not done again.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError, shortened
from ..files import write_text, written_whole
from ..hardware import check_workers
from ..json_and_yaml import read_json
from ..output_folder import OutputFolder, locked
from ..recipes.recipe import Recipe, check_paths
from .cleaning_report import SHOWN, report_text
from .cleaning_rules import (
    DUPLICATE,
    KEPT,
    NAMES,
    NEAR_DUPLICATE,
    CleaningRules,
    Judge,
    LengthRatio,
    key_of,
    near_duplicates,
    plain,
    read_scores,
)
from .parallel_text import held_out_rows, pairs_of
from .prepared import DATA_FIELDS
from .recipe_data import data_sources
from .text_files import check_on_disk, file_stamp, home_path, read_lines
from .workers import LOCAL, check_engine, default_workers, run_tasks

MANIFEST, REPORT = "cleaning.json", "report.md"
TASKS, SETTINGS = ".tasks", "settings.json"  # the folder of parts that are judged, and the settings they are of
PART = 250_000  # pairs of a part
SAMPLED = 100_000  # pairs whose lengths are looked at


def clean(
    recipe: Recipe,
    folder: str | Path,
    rules: CleaningRules | None = None,
    workers: int | None = None,
    progress: bool = True,
    overwrite: bool = False,
    engine: str = LOCAL,
) -> dict:
    """Write a recipe's training text without the pairs that rules drop; resumes after an interruption.

    The folder has the text in Parquet, that of validation as it is, and a report.

    Args:
        recipe: data, and the seed of samples.
        folder: the folder to make, or to resume in.
        rules: what is dropped.
        workers: as of `run_tasks`, and so is `engine`; by default one per CPU.
        progress: show a bar.
        overwrite: replace what an earlier cleaning has written there, once all is done.

    Returns:
        What was done: `counts`, pairs by the name of the rule that dropped them, `kept` first.

    Raises:
        UserError: for mistakes in the recipe, its data or the rules, a folder that holds something else, and if no pair
            is left.
    """
    rules = rules or CleaningRules()
    check_engine(engine)
    if workers is not None:
        check_workers("workers", workers)
    rules.check()
    check_paths(recipe)
    others = [home_path(name) for name in (*rules.tests, *filter(None, [rules.scores]))]
    for path in others:
        check_on_disk(path)
    with locked(folder):
        output = OutputFolder(folder)
        output.check_ours()
        if output.names() and MANIFEST not in output:
            raise UserError(f"{folder} holds no cleaned text: give another --output")
        train, validation = data_sources(recipe)
        files = [*train.files, *(validation.files if validation else ()), *others]
        settings = {"recipe": {name: getattr(recipe, name) for name in (*DATA_FIELDS, "seed")}, "rules": asdict(rules)}
        settings = json.loads(
            json.dumps(settings | {"part": PART, "files": {str(path): file_stamp(path) for path in files}})
        )
        if MANIFEST in output and not overwrite:
            return _finished(output.path, settings)
        text = train.undecoded().load()
        cleaning = Cleaning(output.path / TASKS, text, validation and validation.load(), recipe, rules)
        output.note()
        cleaning.start(settings)
        numbers = range(-(-len(text) // PART))
        run = partial(run_tasks, workers=workers or default_workers(len(numbers)), engine=engine)
        ratio = cleaning.learn()
        judged = run(partial(cleaning.judging, ratio), numbers, shown="judging" if progress else None)
        samples = cleaning.match(list(chain.from_iterable(judged)), len(numbers))
        with output.staging() as staging:
            run(partial(cleaning.writing, staging), numbers, shown="writing" if progress else None)
            manifest = cleaning.finish(staging, ratio, samples, settings)
            output.place(staging, MANIFEST, stale=output.names())
        shutil.rmtree(output.path / TASKS)
        return manifest


def _finished(folder: Path, settings: dict) -> dict:
    manifest = read_json(folder / MANIFEST, "clean the text again with --overwrite")
    if manifest.get("settings") != settings or not all((folder / name).is_file() for name in manifest["parts"]):
        raise UserError(
            f"{folder} was cleaned with other settings or of other text, or lacks a part: give another --output, or"
            " --overwrite"
        )
    return manifest


@dataclass(frozen=True)
class Cleaning:
    """The steps of a cleaning; a worker has a copy."""

    folder: Path  # of what only an unfinished cleaning needs
    text: datasets.Dataset
    validation: datasets.Dataset | None
    recipe: Recipe
    rules: CleaningRules

    def start(self, settings: dict) -> None:
        """Make the folder; parts that were judged with other settings are removed."""
        if not (self.folder / SETTINGS).is_file() or read_json(self.folder / SETTINGS, "remove it") != settings:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            write_text(self.folder / SETTINGS, json.dumps(settings))

    def learn(self) -> LengthRatio | None:
        """Return the distribution of length ratios, if a rule is on it; write tests and scores as files."""
        total, rules, ratio, scores = len(self.text), self.rules, None, np.zeros(0)
        if rules.length_ratio:
            rows = range(total) if total <= SAMPLED else held_out_rows(total, SAMPLED, self.recipe.seed)
            before = Judge(CleaningRules(rules.max_characters, rules.max_words, 0, rules.keep_identical))
            judged = (before.judge(0, pair) for pair in pairs_of(self.text.select(rows)))
            characters = [list(map(len, text)) for status, _, text in judged if status == KEPT]
            ratio = LengthRatio.of(np.array(characters, np.int64).reshape(-1, 2))
        validation = chain.from_iterable(pairs_of(self.validation)) if self.validation else ()
        lines = chain(validation, *(read_lines(home_path(name)) for name in rules.tests))
        tests = {key_of(text) for line in lines if (text := plain(line).casefold())}
        np.save(self.folder / "tests.npy", np.array(sorted(tests), np.uint64))
        if rules.scores is not None:
            path = home_path(rules.scores)
            scores = np.fromiter(read_scores(path, rules.score_key), np.float64)
            if len(scores) != total:
                problem = f"{path} has {len(scores):,} lines and the text {total:,} pairs"
                raise UserError(f"{problem}: line n must be of pair n")
        np.save(self.folder / "scores.npy", scores)
        return ratio

    def _rows(self, number: int) -> range:
        """Return the rows of a part."""
        return range(number * PART, min((number + 1) * PART, len(self.text)))

    def _sample(self, status: int, row: int, pair: tuple[str, str], reason: str) -> list:
        """Return a dropped pair for the report: rule, a number by which few are chosen, row, both sides, reason."""
        return [NAMES[status], key_of(f"{self.recipe.seed} {row}"), row, *map(shortened, pair), reason]

    def judging(self, ratio: LengthRatio | None) -> Callable[[int], list]:
        """Return the task that judges a part, writes the status and a key of each pair, and returns samples."""
        tests, scores = (np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in ("tests", "scores"))

        def task(number: int) -> list:
            path, rows = self.folder / f"judged-{number:05d}.json", self._rows(number)
            if path.is_file():
                return read_json(path, "remove it")["samples"]
            judge = Judge(self.rules, ratio, tests, scores if self.rules.scores else None)
            table, samples = np.zeros(len(rows), [("status", np.uint8), ("key", np.uint64)]), []
            for row, pair in zip(rows, pairs_of(self.text.select(rows)), strict=True):
                status, reason, text = judge.judge(row, pair)
                table[row - rows.start] = status, key_of("\n".join(text))
                if status != KEPT:
                    samples.append(self._sample(status, row, pair, reason))
                    samples = _fewest(samples) if len(samples) > 1000 else samples
            with written_whole(path.with_suffix(".npy")) as new, new.open("wb") as file:
                np.save(file, table)
            write_text(path, json.dumps({"samples": _fewest(samples)}))
            return _fewest(samples)

        return task

    def match(self, samples: list, parts: int) -> list:
        """Find copies and near copies of earlier pairs, write the status of all, and return samples of them too."""
        tables = [np.load(self.folder / f"judged-{number:05d}.npy") for number in range(parts)]
        status, keys = (np.concatenate([table[name] for table in tables]) for name in ("status", "key"))
        firsts: dict[int, int] = {}
        if not self.rules.keep_duplicates:
            kept = np.flatnonzero(status == KEPT)
            _, first, group = np.unique(keys[kept], return_index=True, return_inverse=True)
            first = kept[first[group]]
            status[kept[first < kept]] = DUPLICATE
            firsts = dict(zip(kept[first < kept].tolist(), first[first < kept].tolist(), strict=True))
        if self.rules.near_duplicates is not None:
            kept = np.flatnonzero(status == KEPT)
            texts = (tuple(map(plain, pair)) for pair in pairs_of(self.text.select(kept)))
            pairs = zip(kept.tolist(), texts, strict=True)
            for row, first in near_duplicates(pairs, self.rules.near_duplicates, self.rules.near_side):
                status[row], firsts[row] = NEAR_DUPLICATE, first
        np.save(self.folder / "status.npy", status)
        chosen = _fewest([[NAMES[status[row]], key_of(f"{self.recipe.seed} {row}"), row] for row in firsts])
        for _, _, row in chosen:
            pair = self.text[row]["source"], self.text[row]["target"]
            samples.append(self._sample(status[row], row, pair, f"as pair {firsts[row] + 1:,}"))
        return _fewest(samples)

    def writing(self, staging: Path) -> Callable[[int], None]:
        """Return the task that writes the pairs of a part that are kept."""
        status = np.load(self.folder / "status.npy", mmap_mode="r")

        def task(number: int) -> None:
            rows = self._rows(number)
            is_kept = status[rows.start : rows.stop] == KEPT
            if is_kept.any():  # a file without rows would be refused
                self._write(self.text.select(rows), staging / f"train-{number:05d}.parquet", is_kept)

        return task

    def _write(self, text: datasets.Dataset, path: Path, is_kept: np.ndarray) -> None:
        table = text.with_format("arrow")[:].filter(pa.array(is_kept))
        table = table.rename_columns([self.recipe.source_column, self.recipe.target_column])
        with written_whole(path) as new:
            pq.write_table(table.replace_schema_metadata(), new, compression="zstd")

    def finish(self, staging: Path, ratio: LengthRatio | None, samples: list, settings: dict) -> dict:
        """Write the validation text, the report and the manifest."""
        counts = np.bincount(np.load(self.folder / "status.npy"), minlength=len(NAMES)).tolist()
        named = {name: pairs for name, pairs in zip(NAMES, counts, strict=True) if pairs or name == NAMES[KEPT]}
        if not counts[KEPT]:
            raise UserError(f"no pair is left after cleaning ({named}): look at the text, or change the rules")
        if self.validation is not None:
            self._write(self.validation, staging / "validation-00000.parquet", np.ones(len(self.validation), bool))
        parts = sorted(path.name for path in staging.iterdir())
        has_tests = bool(self.rules.tests) or self.validation is not None
        report = report_text(self.rules, counts, samples, ratio, has_tests)
        write_text(staging / REPORT, report)
        manifest = {"counts": named, "length_ratio": ratio and asdict(ratio), "parts": parts, "settings": settings}
        write_text(staging / MANIFEST, json.dumps(manifest, indent=1))
        return manifest


def _fewest(samples: list[list]) -> list[list]:
    """Return a few samples of each rule, those with the least numbers, whoever has looked at them."""
    by_rule: dict[str, list] = {}
    for sample in sorted(samples):
        by_rule.setdefault(sample[0], []).append(sample)
    return [sample for ordered in by_rule.values() for sample in ordered[:SHOWN]]
