"""`vaswani clean`: the text of a recipe without the pairs that rules drop, with a report of what each has dropped.

A sample gives the distribution of length ratios, parts of the text are judged by what is in each pair
(`cleaning_rules`), copies are found over the whole text in memory, and parts are written. Which pairs are kept depends
on text and rules, not on the workers; a part that is judged is not judged again.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq

from ..errors import UserError, shortened
from ..files import write_text, written_whole
from ..json_and_yaml import read_json
from ..model.language_codes_vaswani import typed_code
from ..output_folder import RECIPE, OutputFolder, locked
from ..recipes.recipe import Recipe, languages_of
from . import cleaning_rules
from .cleaning_options import CleaningRules
from .cleaning_rules import ENOUGH, KEPT, NAMES, OTHERS, Judge, LengthRatio, check_rules, key_of, plain
from .pair_readers import BROKEN, READERS
from .parallel_text import CACHE_VERSION, check_lines, pairs_of, random_rows
from .prepared import DATA_FIELDS
from .recipe_data import data_sources
from .text_files import check_on_disk, file_stamp, home_path, read_lines
from .workers import LOCAL, default_workers, run_tasks

MANIFEST, REPORT = "cleaning.json", "report.md"
TASKS, _JUDGED = ".tasks", "judged-{:05d}.npy"  # the folder of parts that are judged, and one of them
PART = 250_000  # pairs of a part
SAMPLED = 100_000  # pairs whose lengths are looked at
SHOWN = 5  # pairs of each rule that the report shows


def clean(
    recipe: Recipe,
    folder: str | Path,
    rules: CleaningRules,
    workers: int | None = None,
    progress: bool = True,
    overwrite: bool = False,
    engine: str = LOCAL,
) -> dict:
    """Write a recipe's training text without the pairs that rules drop; resumes after an interruption.

    The folder has the text in Parquet, that of validation as it is, and a report. Returns what was done, among it
    `counts`, pairs by the name of the rule that dropped them, `kept` first.

    Args:
        recipe: data, and the seed of samples.
        folder: the folder to make, or to resume in.
        workers: as in `run_tasks`, and so is `engine`; by default one per CPU.
        overwrite: replace what an earlier cleaning has written there, once all is done.

    Raises:
        UserError: for mistakes in recipe, data or rules, a folder that holds something else, and if no pair is left.
    """
    check_rules(rules)
    if not progress:
        datasets.disable_progress_bars()
    tests = [home_path(name) for name in rules.test]
    for path in tests:
        check_on_disk(path)
        check_lines("text files", str(path))
    with locked(folder):
        output = OutputFolder(folder)
        output.check_ours()
        if output.names and (MANIFEST not in output.names or (overwrite and RECIPE in output.names)):
            raise UserError(f"{folder} holds something else than cleaned text: give another --output")
        train, validation = data_sources(recipe)
        files = [*train.files, *(validation.files if validation else ()), *tests]
        settings = {"recipe": {name: getattr(recipe, name) for name in (*DATA_FIELDS, "seed")}, "rules": asdict(rules)}
        own = [recipe.source_column, recipe.target_column]  # if no languages are known, which others then know by these
        known = rules.languages, languages_of(vars(recipe)), train.languages
        columns = next((list(names) for names in known if len({*filter(None, names or ())}) == 2), own)
        settings |= {"part": PART, "files": {str(path): file_stamp(path) for path in files}}
        settings = json.loads(json.dumps(settings))
        if os.path.lexists(output.path / MANIFEST) and not overwrite:
            manifest = read_json(output.path / MANIFEST)
            parts = [output.path / name for name in manifest["parts"]]
            if manifest.get("settings") != settings or not all(part.is_file() for part in parts):
                problem = "was cleaned with other settings or of other text, or lacks a part"
                raise UserError(f"{output.path} {problem}: give another --output, or --overwrite")
            shutil.rmtree(output.path / TASKS, ignore_errors=True)  # of a run that was killed after its last file
            return {"columns": own} | manifest  # which earlier versions did not note
        train = replace(train, kind=train.kind + BROKEN) if train.kind + BROKEN in READERS else train
        if train.files and validation is not None and validation.files == train.files:  # slices of one
            validation = replace(validation, kind=train.kind)
        text, validation = train.load(), validation and validation.load()
        output.note()
        tasks = output.path / TASKS / hashlib.sha256(json.dumps([CACHE_VERSION, settings]).encode()).hexdigest()[:16]
        tasks.mkdir(parents=True, exist_ok=True)
        parts = range(-(-len(text) // PART))
        judge = _judge(text, validation, rules, recipe.seed)
        make, workers = partial(partial, _judge_part, tasks, text, judge), workers or default_workers(len(parts))
        list(run_tasks(make, parts, workers, engine, "judging" if progress else None))
        status, firsts = _match(tasks, text, rules, parts)
        counts = dict(zip(NAMES, np.bincount(status, minlength=len(NAMES)).tolist(), strict=True))
        counts = {name: pairs for name, pairs in counts.items() if pairs or name == NAMES[KEPT]}
        if not counts[NAMES[KEPT]]:
            raise UserError(f"no pair is left after cleaning ({counts}): look at the text, or change the rules")
        with output.placing(last=MANIFEST, stale=output.names) as staging:
            for number in parts:
                rows = np.array(range(len(text))[number * PART : (number + 1) * PART])
                _write(text.select(rows[status[rows] == KEPT]), staging / f"train-{number:05d}.parquet", columns)
            if validation is not None:
                _write(validation, staging / "validation-00000.parquet", columns)
            names = sorted(path.name for path in staging.iterdir())
            write_text(staging / REPORT, _report(counts, _samples(text, status, firsts, judge, recipe.seed)))
            manifest = {"counts": counts, "length_ratio": {code: asdict(ratio) for code, ratio in judge.ratios.items()}}
            manifest |= {"columns": columns, "parts": names, "settings": settings}
            write_text(staging / MANIFEST, json.dumps(manifest, indent=1))
        shutil.rmtree(output.path / TASKS)
        return manifest


def _judge(text: datasets.Dataset, validation: datasets.Dataset | None, rules: CleaningRules, seed: int) -> Judge:
    """Return the rules on a pair, with the lines that the text must not hold, its length ratios and words."""
    lines = chain.from_iterable(pairs_of(validation)) if validation else ()
    lines = chain(lines, *(read_lines(home_path(name)) for name in rules.test))
    tests = frozenset(key_of(line) for line in (typed_code(plain(line))[1].casefold() for line in lines) if line)
    if not (rules.length_ratio or rules.languages):
        return Judge(rules, tests=tests)
    # Of a sample, as far as the rules before keep it.
    pairs = pairs_of(text.select(random_rows(len(text), SAMPLED, seed)))
    before = Judge(replace(rules, length_ratio=0, languages=None))
    sample = list(dict.fromkeys(sides for status, _, sides in map(before.judge, pairs) if status == KEPT))
    codes, groups = [typed_code(source)[0] for source, _ in sample], {}
    characters = np.array([list(map(len, sides)) for sides in sample], np.int64).reshape(-1, 2)
    if rules.length_ratio:
        groups = {code: np.array(codes) == code for code, pairs in Counter(codes).items() if pairs >= ENOUGH}
        groups[OTHERS] = np.ones(len(codes), bool)
    ratios = {code: LengthRatio.of(characters[chosen]) for code, chosen in groups.items()}
    own = cleaning_rules.own_words(sample, rules.languages) if rules.languages else Judge.own
    return Judge(rules, ratios, tests, own)


def _judge_part(tasks: Path, text: datasets.Dataset, judge: Judge, number: int) -> None:
    """Judge a part, unless that is done, and write the status and a key of each pair."""
    path, rows = tasks / _JUDGED.format(number), range(len(text))[number * PART : (number + 1) * PART]
    if path.is_file():
        return
    table = np.zeros(len(rows), [("status", np.uint8), ("key", np.uint64)])
    for index, pair in enumerate(pairs_of(text.select(rows))):
        status, _, sides = judge.judge(pair)
        table[index] = status, key_of("\n".join(sides))
    with written_whole(path) as new, new.open("wb") as file:
        np.save(file, table)


def _match(tasks: Path, text: datasets.Dataset, rules: CleaningRules, parts: range) -> tuple[np.ndarray, np.ndarray]:
    """Find copies; return the status of all pairs, `(pairs,)`, and the row each is a copy of, or its own."""
    table = np.concatenate([np.load(tasks / _JUDGED.format(number)) for number in parts])
    status, firsts = table["status"].copy(), np.arange(len(table))
    if not rules.keep_duplicates:
        kept = np.flatnonzero(status == KEPT)
        _, first, group = np.unique(table["key"][kept], return_index=True, return_inverse=True)
        first = kept[first[group]]
        status[kept[first < kept]] = cleaning_rules.DUPLICATE
        firsts[kept] = first
    if rules.near_duplicates is not None:
        kept = np.flatnonzero(status == KEPT)
        texts = (tuple(map(plain, pair)) for pair in pairs_of(text.select(kept)))
        pairs = zip(kept.tolist(), texts, strict=True)
        for row, first in cleaning_rules.near_duplicates(pairs, rules.near_duplicates, rules.near_side):
            status[row], firsts[row] = cleaning_rules.NEAR_DUPLICATE, first
    return status, firsts


def _write(text: datasets.Dataset, path: Path, columns: list[str]) -> None:
    """Write pairs, unless there is none: a file without rows would be refused."""
    if len(text):
        table = text.with_format("arrow")[:].rename_columns(columns)
        pq.write_table(table.replace_schema_metadata(), path, compression="zstd")


def _samples(text: datasets.Dataset, status: np.ndarray, firsts: np.ndarray, judge: Judge, seed: int) -> dict:
    """Return by rule some of the pairs that it has dropped, in words; `status` and `firsts` are of `_match`."""
    samples, random = {}, np.random.default_rng(seed)
    for rule in range(KEPT + 1, len(NAMES)):
        rows = np.flatnonzero(status == rule)
        for row in np.sort(random.choice(rows, min(SHOWN, len(rows)), replace=False)).tolist():
            pair = text[row]["source"], text[row]["target"]
            reason = f"as pair {firsts[row] + 1:,}" if firsts[row] != row else judge.judge(pair)[1]
            lines = f"pair {row + 1:,}{reason and ': '}{reason}", *map(_shown, pair)
            samples.setdefault(NAMES[rule], []).append("\n".join(f"    {line}" for line in lines))
    return samples


def _shown(text: str) -> str:
    """Return a text on one line, shortened, without what a terminal would obey."""
    line = " ".join(shortened(text).split())
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)


def _report(counts: dict[str, int], samples: dict[str, list[str]]) -> str:
    """Return the report in Markdown: counts by the rules in their order, and samples of what each has dropped."""
    total, kept = sum(counts.values()), counts[NAMES[KEPT]]
    lines = [
        "# Cleaned text", "",
        f"{total:,} pairs read, {kept:,} ({kept / total:.2%}) kept. A pair is dropped by the first rule that fits;"
        f" {MANIFEST} has the rules.", "",
        "| rule | dropped | share |", "| --- | ---: | ---: |",
        *(f"| {name} | {counts[name]:,} | {counts[name] / total:.3%} |" for name in samples),
    ]  # fmt: skip
    for name, texts in samples.items():
        lines += ["", f"## Dropped: {name}", "", "\n    \n".join(texts)]
    return "\n".join(lines) + "\n"
