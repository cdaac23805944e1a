"""`vaswani clean`: the text of a recipe without the pairs that rules drop, with a report of what each has dropped.

Stages of tasks (`tasks`) follow each other: splits are counted, a sample gives the distribution of length ratios, the
pairs of each split are judged by what is in them (`cleaning_rules`), keys of those that are left are compared over all
of the text, and splits are written. Which pairs are kept depends on text and rules, not on who has done it.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError, shortened
from ..files import remove, remove_leftovers, written_whole
from ..hardware import check_workers
from ..json_and_yaml import read_json
from ..output_folder import OutputFolder, locked
from ..recipes.recipe import Recipe, check_paths
from .cleaning_report import draw_report, report_text
from .cleaning_rules import (
    DUPLICATE,
    KEPT,
    NAMES,
    NEAR_DUPLICATE,
    CleaningRules,
    Judge,
    LengthRatio,
    hashes,
    near_keys,
    pair_keys,
    plain,
    read_scores,
    repeats,
)
from .engines import LOCAL, check_engine
from .parallel_text import PairSource, held_out_rows
from .prepared import DATA_FIELDS, TRAIN, VALIDATION
from .recipe_data import data_sources
from .splits import in_pieces, places, text_splits, undecoded
from .tasks import (
    COUNT,
    FINISH,
    JUDGE,
    LEARN,
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
)
from .text_files import check_on_disk, file_stamp, home_path, read_lines

FORMAT, VERSION = "vaswani cleaned text", 1
MANIFEST, REPORT, PICTURE = "cleaning.json", "report.md", "report.png"
MATCH, SETTINGS = "match", "settings"
FILES = "files"  # the folder of what is written, until all is
PART = re.compile(f"({TRAIN}|{VALIDATION})-[0-9]{{5,}}[.]parquet")
KINDS = {"duplicate": DUPLICATE, "near": NEAR_DUPLICATE}  # the keys that are compared, and what they find
CHUNK = 50_000  # pairs in memory at once, and of a row group
SAMPLED = 100_000  # pairs whose lengths are looked at
BUCKET = 4_000_000  # keys that are compared at once, about
SHOWN = 5  # samples of each rule


def clean(
    recipe: Recipe,
    folder: str | Path,
    rules: CleaningRules | None = None,
    workers: int | None = None,
    progress: bool = True,
    overwrite: bool = False,
    engine: str = LOCAL,
    engine_options: Mapping[str, Any] | None = None,
) -> dict | None:
    """Write a recipe's training text without the pairs that rules drop; resumes after an interruption.

    The folder has the text in Parquet, that of validation as it is, and a report.

    Args:
        recipe: data, and the seed of samples.
        folder: the folder to make, or to resume in.
        rules: what is dropped.
        workers: as of `prepare`, and so are `progress`, `engine` and `engine_options`.
        overwrite: replace what an earlier cleaning has written there, once all is done.

    Returns:
        What was done: `counts`, pairs by the name of the rule that dropped them, `kept` first. None where Slurm has
        got the jobs.

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
    for name in (*rules.tests, *filter(None, [rules.scores])):
        check_on_disk(home_path(name))
    with locked(folder):
        folder = Path(folder).absolute()
        train, validation = data_sources(recipe)
        cleaning = Cleaning.of(recipe, folder, rules, train.downloaded(), validation)
        if (manifest := cleaning.start_or_resume(overwrite)) is not None:
            return manifest
        if not cleaning.run_stages(workers, progress, engine, engine_options or {}):
            return None
        cleaning.remove_intermediate()
        return read_json(folder / MANIFEST, OTHER)


@dataclass(frozen=True)
class Cleaning(Tasks):
    """The tasks of a cleaning."""

    rules: CleaningRules
    buckets: int  # parts into which keys are divided

    @staticmethod
    def of(
        recipe: Recipe, folder: Path, rules: CleaningRules, train: PairSource, validation: PairSource | None
    ) -> "Cleaning":
        """The cleaning of these texts."""
        splits = in_pieces([*map(undecoded, text_splits(train))], folder / TASKS)
        others = [] if validation is None else in_pieces(text_splits(validation), folder / TASKS, len(splits))
        buckets = 1 + train.estimate() // BUCKET
        if rules.near_duplicates is not None:
            buckets *= 1 + near_keys([("", "")], rules.near_duplicates, rules.near_side).shape[1]
        files = [*train.files, *(() if validation is None else validation.files)]
        files += [home_path(name) for name in (*rules.tests, *filter(None, [rules.scores]))]
        settings = {
            "format": FORMAT,
            "version": VERSION,
            "rules": {
                name: list(value) if isinstance(value, tuple) else value for name, value in asdict(rules).items()
            },
            "recipe": {name: getattr(recipe, name) for name in (*DATA_FIELDS, "seed")},
            "files": {str(path): list(file_stamp(path)) for path in files},
        }
        return Cleaning(recipe, folder, (*splits, *others), len(splits), settings, rules, buckets)

    @property
    def stages(self) -> list[str]:
        """The stages, in their order."""
        return [COUNT, PLAN, SAMPLE, LEARN, JUDGE, MATCH, WRITE, FINISH]

    def tasks(self, stage: str) -> int:
        """The number of a stage's tasks."""
        own = {COUNT: len(self.splits), WRITE: len(self.splits), MATCH: self.buckets}
        return {**own, SAMPLE: self.train_splits, JUDGE: self.train_splits}.get(stage, 1)

    def files_of(self, stage: str, number: int) -> Sequence[Path]:
        """The files of the text, or of test texts and scores, that a task reads."""
        if stage == LEARN:
            others = [path for split in self.splits[self.train_splits :] for path in split.files]
            return [*others, *map(home_path, self.rules.tests), *map(home_path, filter(None, [self.rules.scores]))]
        return self.splits[number].files if stage in (COUNT, SAMPLE, JUDGE, WRITE) else ()

    # The folder

    def start_or_resume(self, overwrite: bool) -> dict | None:
        """Note the settings in a new folder; what is done there if it is finished, with the same settings.

        Raises:
            UserError: for a folder that holds something else, or has other settings unless it is to be overwritten.
        """
        output, manifest, begun = OutputFolder(self.folder), {}, {}
        with contextlib.suppress(OSError, UserError):
            manifest = read_json(self.folder / MANIFEST, OTHER)
        with contextlib.suppress(OSError, UserError):
            begun = self._result(SETTINGS)
        if FORMAT not in (manifest.get("format"), begun.get("format")) and any(self.folder.glob("[!.]*")):
            raise UserError(f"{self.folder} is not empty and holds no cleaned text: give another --output")
        if manifest and not overwrite:
            return self._finished(manifest)
        if begun != self.settings:
            if any((self.folder / TASKS).glob(f"{JUDGE}-*.json")) and not overwrite:
                raise UserError(f"a cleaning with other settings or text was begun in {self.folder}: {OTHER}")
            self.remove_intermediate()
        output.check([MANIFEST, REPORT, PICTURE, *map(self._part, range(len(self.splits)))])
        self._note(SETTINGS, self.settings)
        (self.folder / TASKS / FILES).mkdir(exist_ok=True)
        return None

    def _finished(self, manifest: dict) -> dict:
        """The manifest of a finished cleaning, which must have these settings and all its files."""
        settings = self._public_settings()
        if {name: manifest.get(name) for name in settings} != settings:
            raise UserError(f"{self.folder} was cleaned with other settings or of other text: {OTHER}")
        for name in manifest.get("parts") or ():
            if not (self.folder / name).is_file():
                raise UserError(f"{self.folder / name} is missing: {OTHER}")
        self.remove_intermediate()
        return manifest

    def _public_settings(self) -> dict:
        files = {path: size for path, (size, _) in self.settings["files"].items()}
        return {**self.settings, "files": files}

    def remove_intermediate(self) -> None:
        """Remove what only an unfinished cleaning needs."""
        tasks = self.folder / TASKS
        for path in (*task_notes(self.folder), *tasks.glob("[a-z]*-?????*.bin")):
            path.unlink()
        remove(tasks / FILES)
        for path in self.written_folders:
            remove_leftovers(path)
        with contextlib.suppress(OSError):  # something else is there, or nothing
            tasks.rmdir()

    @property
    def written_folders(self) -> tuple[Path, ...]:
        """Where tasks write."""
        return (*super().written_folders, self.folder / TASKS / FILES)

    def _part(self, number: int) -> str:
        """The name of the file of a split's pairs."""
        first = 0 if number < self.train_splits else self.train_splits
        return f"{PARTS[number >= self.train_splits]}-{number - first:05d}.parquet"

    def _array(self, name: str, number: int = 0) -> Path:
        return self._path(name, number).with_suffix(".bin")

    def _read(self, path: Path, kind: type = np.uint64) -> np.ndarray:
        """Numbers on the disk."""
        return np.memmap(path, kind, "r") if path.stat().st_size else np.zeros(0, kind)

    # The stages

    def _plan(self, number: int, advance: Callable[[int], Any]) -> None:
        """Find the pairs of all splits, and choose those whose lengths are looked at."""
        parts = [self.splits[: self.train_splits], self.splits[self.train_splits :]]
        found = [places(splits, list(self._results(COUNT, part))) for part, splits in zip(PARTS, parts, strict=True)]
        total, row = sum(place.pairs for place in found[0]), 0
        sampled = np.arange(total) if total <= SAMPLED else held_out_rows(total, SAMPLED, self.recipe.seed)
        for number, place in enumerate(chain(*found)):
            rows = sampled[slice(*np.searchsorted(sampled, [row, row + place.pairs]))] - row
            self._note(SPLIT, {"place": asdict(place), "row": row, "sampled": rows.tolist()}, number)
            row += place.pairs
        self._note(PLAN, {"pairs": total})

    def _sample(self, number: int, advance: Callable[[int], Any]) -> None:
        """Look at the lengths of sampled pairs, without those that the rules before drop."""
        plan, characters = self._result(SPLIT, number), []
        rows = set(plan["sampled"]) if self.rules.length_ratio else ()
        pairs = [pair for row, pair in self._pairs(number, plan) if row in rows] if rows else []
        status, _, texts = Judge(self.rules_before_ratio).judge(pairs)
        characters = [list(map(len, texts[index])) for index in np.flatnonzero(status == KEPT)]
        self._note(SAMPLE, {"characters": characters}, number)

    @property
    def rules_before_ratio(self) -> CleaningRules:
        """The rules without those that need more than the pair."""
        return CleaningRules(self.rules.max_characters, self.rules.max_words, 0, self.rules.keep_identical)

    def _learn(self, number: int, advance: Callable[[int], Any]) -> None:
        """Find the distribution of length ratios; note the hashes of test texts, and scores as numbers."""
        facts, range_ = [], [0.0, 1.0]
        characters = list(chain.from_iterable(result["characters"] for result in self._results(SAMPLE)))
        ratio = asdict(LengthRatio.of(np.array(characters, np.int64).reshape(-1, 2)))
        if self.has_tests:
            validation = (
                pair
                for number in range(self.train_splits, len(self.splits))
                for _, pair in self._pairs(number, self._result(SPLIT, number))
            )
            lines = chain(*(read_lines(home_path(name)) for name in self.rules.tests), chain.from_iterable(validation))
            found = [
                np.unique(hashes(text for line in block if (text := plain(line).casefold())))
                for block in iter(lambda: list(islice(lines, CHUNK)), [])
            ]
            facts.append(
                self._write_array(self._array("tests"), [np.unique(np.concatenate([np.zeros(0, np.uint64), *found]))])
            )
        if self.rules.scores is not None:
            facts.append(self._write_array(self._array("scores"), self._scores(range_)))
        self._note(LEARN, {"ratio": ratio, "score_range": range_, "files": facts})

    @property
    def has_tests(self) -> bool:
        """Whether there is text that must not be in the training text."""
        return bool(self.rules.tests) or len(self.splits) > self.train_splits

    def _scores(self, range_: list[float]) -> Iterator[np.ndarray]:
        """The scores of all pairs, of which there must be as many; `range_` becomes their range."""
        path, total = home_path(self.rules.scores), self._result(PLAN)["pairs"]
        scores, lines, low, high = read_scores(path, self.rules.score_key), 0, np.inf, -np.inf
        while len(block := np.fromiter(islice(scores, CHUNK), np.float64)):
            finite = block[np.isfinite(block)]
            low, high = min(low, finite.min(initial=np.inf)), max(high, finite.max(initial=-np.inf))
            lines += len(block)
            yield block
        if lines != total:
            raise UserError(f"{path} has {lines:,} lines and the text {total:,} pairs: line n must be of pair n")
        if low < high:
            range_[:] = float(low), float(high)

    def _write_array(self, path: Path, blocks: Iterator[np.ndarray] | Sequence[np.ndarray]) -> dict:
        with written_whole(path) as new, new.open("wb") as file:
            for block in blocks:
                file.write(block.tobytes())
        return self._facts(path)

    def _chunks(self, number: int, plan: dict) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        """The pairs of a split, and the row in it of the first of each list of them."""
        pairs, first = (pair for _, pair in self._pairs(number, plan)), 0
        while chunk := list(islice(pairs, CHUNK)):
            yield first, chunk
            first += len(chunk)

    def _judge(self, number: int, advance: Callable[[int], Any]) -> None:
        """Judge the pairs of a split, and note the keys by which those that are left may be duplicates."""
        plan, learned = self._result(SPLIT, number), self._result(LEARN)
        rules, samples = self.rules, Samples(self.recipe.seed)
        judge = Judge(
            rules,
            LengthRatio(**learned["ratio"]) if rules.length_ratio else None,
            self._read(self._array("tests")) if self.has_tests else None,
            None if rules.scores is None else self._read(self._array("scores"), np.float64),
            tuple(learned["score_range"]),
        )
        keys_of = {} if rules.keep_duplicates else {"duplicate": pair_keys}
        if rules.near_duplicates is not None:
            keys_of["near"] = functools.partial(near_keys, similarity=rules.near_duplicates, side=rules.near_side)
        paths, runs = {name: self._array(name, number) for name in (JUDGE, *keys_of)}, {}
        counts = np.zeros(len(NAMES), np.int64)
        with contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context(stack.enter_context(written_whole(path)).open("wb"))
                for name, path in paths.items()
            }
            for first, pairs in self._chunks(number, plan):
                row = plan["row"] + first
                status, reasons, texts = judge.judge(pairs, row)
                files[JUDGE].write(status.tobytes())
                counts += np.bincount(status, minlength=len(NAMES))
                for index, reason in reasons.items():
                    samples.add(int(status[index]), row + index, pairs[index], reason)
                left = np.flatnonzero(status == KEPT)
                for name, keys in keys_of.items() if len(left) else ():
                    found = keys([texts[index] for index in left])
                    rows = np.repeat((left + row).astype(np.uint64), found.shape[1])
                    order = np.argsort(found.ravel(), kind="stable")
                    files[name].write(found.ravel()[order].tobytes() + rows[order].tobytes())
                    runs.setdefault(name, []).append(len(rows))
                advance(len(pairs))
        self._note(
            JUDGE,
            {
                "counts": counts.tolist(),
                "samples": samples.found,
                "histograms": {name: values.tolist() for name, values in judge.histograms.items()},
                "runs": runs,
                "files": [self._facts(path) for path in paths.values()],
            },
            number,
        )

    def _match(self, number: int, advance: Callable[[int], Any]) -> None:
        """Find rows with a key that an earlier row has, among the keys between two limits."""
        low, high = (limit * 2**64 // self.buckets for limit in (number, number + 1))
        facts = []
        for name in KINDS:
            parts = [run[:, slice(*_between(run[0], low, high - 1))] for run in self._runs(name)]
            keys, rows = np.concatenate([np.zeros((2, 0), np.uint64), *parts], 1)
            facts.append(self._write_array(self._array(f"{name}_rows", number), [repeats(keys, rows)]))
        self._note(MATCH, {"files": facts}, number)

    def _runs(self, name: str) -> Iterator[np.ndarray]:
        """Keys and their rows, `(2, number)`, sorted by key, of the pairs of all splits in order."""
        for number, judged in enumerate(self._results(JUDGE)):
            if lengths := judged["runs"].get(name):
                for run in np.split(self._read(self._array(name, number)), 2 * np.cumsum(lengths)[:-1]):
                    yield run.reshape(2, -1)

    def _write(self, number: int, advance: Callable[[int], Any]) -> None:
        """Write the pairs of a split that are kept."""
        plan, samples = self._result(SPLIT, number), Samples(self.recipe.seed)
        status, firsts = np.full(plan["place"]["pairs"], KEPT, np.uint8), {}
        if number < self.train_splits:
            status = np.array(self._read(self._array(JUDGE, number), np.uint8))
            for rule, index, first in self._repeats(plan):
                if status[index] == KEPT:
                    status[index], firsts[index] = rule, first
        path, facts = self.folder / TASKS / FILES / self._part(number), []
        schema = pa.schema([(name, pa.string()) for name in (self.recipe.source_column, self.recipe.target_column)])
        with contextlib.ExitStack() as stack:
            writer = None
            for first, pairs in self._chunks(number, plan):
                kept = np.flatnonzero(status[first : first + len(pairs)] == KEPT)
                if len(kept):
                    if writer is None:  # a file without rows would be refused
                        new = stack.enter_context(written_whole(path))
                        writer = stack.enter_context(pq.ParquetWriter(new, schema, compression="zstd"))
                    columns = zip(*(pairs[index] for index in kept), strict=True)
                    writer.write_table(pa.table([pa.array(side, pa.string()) for side in columns], schema))
                for index in sorted(firsts.keys() & set(range(first, first + len(pairs)))):
                    reason = f"as pair {firsts[index] + 1:,}"
                    samples.add(int(status[index]), plan["row"] + index, pairs[index - first], reason)
                advance(len(pairs))
        facts = [] if writer is None else [self._facts(path)]
        counts = np.bincount(status, minlength=len(NAMES)).tolist()
        self._note(WRITE, {"counts": counts, "samples": samples.found, "files": facts}, number)

    def _repeats(self, plan: dict) -> Iterator[tuple[int, int, int]]:
        """Rule, row in its split and row of the first like it in the text, of the pairs of a split with such a one."""
        limits = plan["row"], plan["row"] + plan["place"]["pairs"] - 1
        for name, rule in KINDS.items():
            found = []
            for bucket in range(self.buckets):
                rows = self._read(self._array(f"{name}_rows", bucket)).reshape(2, -1)
                found.append(rows[:, slice(*_between(rows[0], *limits))])
            rows = np.concatenate(found, 1)
            for row, first in zip(*rows[:, np.lexsort(rows[::-1])].tolist(), strict=True):
                yield rule, row - plan["row"], first

    def _finish(self, number: int, advance: Callable[[int], Any]) -> None:
        """Write the report, and give all files their names."""
        written, judged = list(self._results(WRITE)), list(self._results(JUDGE))
        others = list(self._results(WRITE, VALIDATION))
        counts = np.sum([result["counts"] for result in written], 0).tolist()
        named = {name: pairs for name, pairs in zip(NAMES, counts, strict=True) if pairs or name == NAMES[KEPT]}
        if not counts[KEPT]:
            raise UserError(f"no pair is left after cleaning ({named}): look at the text, or change the rules")
        staging, output = self.folder / TASKS / FILES, OutputFolder(self.folder)
        samples = Samples(self.recipe.seed)
        for result in (*judged, *written):
            samples.merge(result["samples"])
        histograms: dict[str, Any] = {}
        for result in judged:
            for name, values in result["histograms"].items():
                histograms[name] = histograms.get(name, 0) + np.array(values)
        learned = self._result(LEARN)
        remove_leftovers(staging)
        has_picture = draw_report(staging / PICTURE, self.rules, histograms, learned["score_range"])
        report = report_text(
            self.rules, counts, samples.found, learned["ratio"], self.has_tests, PICTURE if has_picture else None
        )
        (staging / REPORT).write_text(report, encoding="utf-8")
        manifest = {
            **self._public_settings(),
            "counts": named,
            "length_ratio": learned["ratio"] if self.rules.length_ratio else None,
            "parts": {
                Path(facts["file"]).name: facts["sha256"] for part in (*written, *others) for facts in part["files"]
            },
        }
        (staging / MANIFEST).write_text(as_json(manifest), encoding="utf-8")
        output.place(staging, MANIFEST, [MANIFEST, *filter(PART.fullmatch, output.names())])


class Samples:
    """A few dropped pairs of each rule: those whose row has the least hashes, whoever has looked at them."""

    def __init__(self, seed: int):
        self.seed, self.found = seed, {}

    def add(self, rule: int, row: int, pair: tuple[str, str], reason: str) -> None:
        """A pair that a rule has dropped."""
        chance = blake2b(f"{self.seed} {row}".encode(), digest_size=8).hexdigest()
        own = self.found.get(NAMES[rule], [])
        if len(own) < SHOWN or chance < own[-1][0]:
            self.merge({NAMES[rule]: [[chance, row, *(shortened(side) for side in pair), reason]]})

    def merge(self, found: Mapping[str, list]) -> None:
        """Those of another split."""
        for name, samples in found.items():
            self.found[name] = sorted(self.found.get(name, []) + samples)[:SHOWN]


def _between(values: np.ndarray, low: int, high: int) -> tuple[int, int]:
    """Where, among sorted numbers, those from `low` to `high` begin and end."""
    return int(np.searchsorted(values, np.uint64(low))), int(np.searchsorted(values, np.uint64(high), "right"))
