"""Parallel text from files, folders and the Hub, loaded as a memory-mapped dataset.

`pair_source` finds what is named; `pair_readers` reads text, TSV, CSV, TMX and catalogues, `datasets` all else.
"""

import glob
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UserError, reading
from ..files import is_local, to_path
from ..output_folder import RECORD
from .pair_readers import CATALOGUES, DEFAULT_COLUMNS, PAIR_FEATURES, READERS, PairsBuilder, column_position
from .text_files import LONGEST_LINE, check_on_disk, file_stamp, home_path

# The languages that a catalogue names, without regions: source, target.
_LANGUAGES = (
    re.compile(rb"""(?:"X-Source-Language: *|source-?language=["']|srcLang=["'])([a-z]{2,3})(?![a-z])"""),
    re.compile(rb"""(?:"Language: *|(?:target-|\s)language=["']|trgLang=["'])([a-z]{2,3})(?![a-z])"""),
)
_HELD_OUT = re.compile(r"(?i)(^|[-._ ]|news)(dev(test)?|test(ing)?|val(id(ation)?)?|eval(uation)?)(set)?[\W_\d]")
CACHE_VERSION = 6  # part of every cache key: raise it when the meaning of the cached rows changes
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # of `datasets`, by suffix
FORMATS = (".tsv", ".csv", ".tmx", *CATALOGUES, *_BUILDERS)


@dataclass(frozen=True)
class PairSource:
    """Parallel text that is named and not yet read."""

    where: str  # its files, folder or dataset, as messages name it
    kind: str  # "text", a suffix of `FORMATS`, "saved" by `save_to_disk`, or else a name for `load_dataset`
    split: str  # also a slice such as "train[:1000]"
    columns: tuple[str, str]
    shards: Mapping[str, Sequence[tuple[Path, ...]]] = field(default_factory=dict)  # by split: files, or pairs of them
    config: str | None = None
    files: tuple[Path, ...] = ()  # all that may have a part in it; none of the Hub
    languages: Sequence[str] = ()  # source and target, as catalogues name them, or blank

    def load(self) -> datasets.Dataset:
        """Return the pairs as a memory-mapped dataset; see `load_pairs`.

        Raises:
            UserError: for text that is missing, damaged, empty, or not pairs of strings.
        """
        with reading(self.where):
            if self.kind in READERS:
                return _pairs_only(self._read(), DEFAULT_COLUMNS, self.where)
            if self.kind == "saved":
                dataset = datasets.load_from_disk(self.where)
                splits = dataset if isinstance(dataset, Mapping) else {self.split.partition("[")[0]: dataset}
                parts = [splits[self.split]] if self.split in splits else []
                if not parts:  # a slice, or a sum of some
                    sizes = {name: len(split) for name, split in splits.items()}
                    parts = datasets.ReadInstruction.from_spec(self.split).to_absolute(sizes)
                    parts = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
                dataset = datasets.concatenate_datasets(parts).with_format(None)
            elif self.kind in _BUILDERS:
                files = {split: [glob.escape(str(file)) for (file,) in each] for split, each in self.shards.items()}
                dataset = datasets.load_dataset(_BUILDERS[self.kind], data_files=files, split=self.split)
            else:
                dataset = datasets.load_dataset(self.kind, self.config, split=self.split)
            return _pairs_only(dataset, self.columns, self.where)

    def _read(self) -> datasets.Dataset:
        names = {split: [list(map(str, shard)) for shard in shards] for split, shards in self.shards.items()}
        key = [CACHE_VERSION, self.kind, names, self.columns, list(map(file_stamp, self.files))]
        key = sha256(json.dumps(key).encode()).hexdigest()[:16]
        builder = PairsBuilder(hash=key, kind=self.kind, shards=names, columns=self.columns)
        builder.download_and_prepare()
        return builder.as_dataset(self.split)

    def stream(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs one after the other, in order; they are loaded before the first."""
        return pairs_of(self.load())


def check_lines(fix: str, *names: str) -> None:
    """Refuse tables, by their names, where lines are to be read; `.ts` is Tsonga too."""
    if tables := [name for name in names if suffix(name) in {*FORMATS, ".sgm", ".xml"} - {".ts"}]:
        raise UserError(f"{tables[0]} holds pairs, not lines: give {fix}")


def _pairs_only(dataset: datasets.Dataset, columns: tuple[str, str], where: str) -> datasets.Dataset:
    """Return the two columns, also from within `translation`, as strings; nothing is copied unless the type differs."""
    if not set(columns) <= set(dataset.column_names) and "translation" in dataset.column_names:
        dataset = (nested := dataset.select_columns(["translation"])).flatten()
        is_nested = isinstance(next(iter(nested[:1]["translation"]), None), Mapping)
        if is_nested and dataset.column_names == nested.column_names:  # as rows have different keys
            pick = lambda row: {name: (row["translation"] or {}).get(name) or "" for name in columns}  # noqa: E731
            key = sha256(f"{nested._fingerprint}-{columns}".encode()).hexdigest()[:16]
            dataset = nested.map(pick, remove_columns=nested.column_names, cache_file_name=cache_file(key))
        dataset = dataset.rename_columns({name: name.removeprefix("translation.") for name in dataset.column_names})
    if not len(dataset):
        raise UserError(f"{where}: empty, no rows; give a dataset or split with at least one pair")
    for column in columns:
        column_position(column, dataset.column_names, where)
        kind, values, problem = dataset.features[column], dataset.data.column(column), None
        pa.table({column: values}).validate(full=True)  # else text that is not UTF-8 is found late, by a crash at worst
        if pa.types.is_string_view(values.type):
            values = values.cast(pa.large_string())  # whose lengths pyarrow can compute
        if getattr(kind, "dtype", None) not in ("string", "large_string", "string_view"):
            shown = {"Json": "of several kinds"}.get(type(kind).__name__, getattr(kind, "dtype", kind))
            problem = f"is {shown}, not text"
        elif values.null_count:
            problem = f"is null in row {values.is_null().index(True).as_py() + 1}"
        elif (longest := pc.max(pc.utf8_length(values)).as_py() or 0) > LONGEST_LINE:
            problem = f"has a text of {longest:,} characters, at most {LONGEST_LINE:,}"
        if problem:
            raise UserError(f"{where}: {column!r} {problem}")
    dataset = dataset.select_columns(list(columns)).rename_columns(dict(zip(columns, DEFAULT_COLUMNS, strict=True)))
    if dataset.features == PAIR_FEATURES:
        return dataset
    return dataset.cast(PAIR_FEATURES, cache_file_name=cache_file(f"{dataset._fingerprint}-strings"))


def cache_file(key: str) -> str:
    """Return the file of what is cached under a key: not beside the input, where it would be by default."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "vaswani_transformer"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / f"{key}.arrow")


def pairs_of(dataset: datasets.Dataset) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a loaded dataset, in order."""
    for batch in dataset.iter(batch_size=1000):
        yield from zip(batch["source"], batch["target"], strict=True)


def pair_source(
    source: str | Path | None = None,
    target: str | Path | None = None,
    data: str | Path | None = None,
    config: str | None = None,
    split: str = "train",
    source_column: str = "source",
    target_column: str = "target",
    one_text: bool = False,
) -> PairSource:
    """Find what these arguments name, which are those of `load_pairs`, without reading the text.

    `one_text`: both sides may be the same, also a folder, of text that is going to be translated.

    Raises:
        UserError: wrong arguments, files that are missing, of unknown or several formats, a source file without target.
    """
    columns = source_column, target_column
    if (data is None) == (source is None) or (source is None) != (target is None):
        names = [name for name, value in (("source", source), ("target", target), ("data", data)) if value is not None]
        raise UserError(f"given: {', '.join(names) or 'nothing'}; give either both text files (source, target) or data")
    sides = columns if data is not None else [home_path(name).absolute() for name in (source, target)]
    if sides[0] == sides[1] and not one_text:
        raise UserError(f"{sides[0]} is both source and target: name two columns, or two files")
    paths = find_shards(source if data is None else data)
    if data is not None and is_local(paths[0]):
        if paths[0].is_dir():
            return _folder_source(paths[0], config, split, columns)
        is_path = Path(name := str(data)).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
        # A name on the Hub is `dataset` or `owner/dataset`; anything else that is not here is a missing file.
        if not (is_path or paths[0].exists() or suffix(name) in (*FORMATS, ".txt")):
            where = f"Hub dataset {str(data)!r} (there is no such file or folder here)"
            return PairSource(where, str(data), split, columns, config=config)
    split = split if "[" in split else "train"  # a file has one split, and slices of it
    if data is None:
        if sides[0] == sides[1]:  # of a folder all files
            with reading(paths[0]):
                if paths[0].is_dir():
                    next(path for path in paths[0].rglob("[!.]*") if path.is_file())  # or it is reported as empty
                    source = target = paths[0] / "**/*"
        shards = _paired_shards(source, target)
        check_lines("text" if one_text else "two texts, or one table as data", *map(str, chain(*shards)))
        return _of_files(str(paths[0]), "text", columns, {"train": shards}, split)
    kind, *others = sorted({suffix(path.name) for path in paths})
    if others or kind not in FORMATS:
        check_on_disk(paths[0])  # a missing file is reported as such
        problem = f"is of the format {' and '.join([kind or 'none', *others])}"
        fix = "give .tsv, .csv, .json(l), .parquet, .tmx, .po, .xlf or .ts, or text as source and target"
        raise UserError(f"{data} {problem}: {fix}")
    return _of_files(str(paths[0]), kind, columns, {"train": [(path,) for path in paths]}, split)


def _of_files(where: str, kind: str, columns: tuple[str, str], shards: dict, split: str) -> PairSource:
    """Return the source of files that can be opened."""
    files = tuple(path for each in shards.values() for shard in each for path in shard)
    for path in files:
        check_on_disk(path)
    sides = [{}, {}]
    for path in files if kind in CATALOGUES else ():
        with reading(path), path.open("rb") as file:
            head = file.read(1 << 16)
        for named, pattern in zip(sides, _LANGUAGES, strict=True):
            named |= {match[1].decode(): path for match in [pattern.search(head)] if match}
    if len(sides[1]) > 1:  # which a model would mix
        names = " and ".join(f"{path} is in {code}" for code, path in sides[1].items())
        raise UserError(f"{names:.300}: give the catalogues of one language")
    languages = [next(iter(named)) if len(named) == 1 else "" for named in sides] if any(sides) else []
    languages = languages[:: -1 if columns[0] == DEFAULT_COLUMNS[1] else 1]
    return PairSource(where, kind, split, columns, shards, files=files, languages=languages)


def _folder_source(folder: Path, config: str | None, split: str, columns: tuple[str, str]) -> PairSource:
    """Find a folder from `save_to_disk`, or of files that are read as if named, or one that `load_dataset` reads."""
    files, card = tuple(sorted(path for path in folder.rglob("*") if path.is_file())), folder / "README.md"
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return PairSource(str(folder), "saved", split, columns, files=files)
    if config is None and not (card.is_file() and "\nconfigs:" in card.read_text("utf-8", "replace")):
        with reading(folder):
            patterns = datasets.data_files.get_data_patterns(base := glob.escape(str(folder)))
            named = datasets.data_files.DataFilesDict.from_patterns(patterns, base_path=base)
        ours = {str(key): [path for path in dict.fromkeys(named[key]) if suffix(path) in FORMATS] for key in named}
        shards = {name: [(Path(path),) for path in paths] for name, paths in ours.items() if paths}
        kinds = sorted({suffix(path.name) for paths in shards.values() for (path,) in paths})
        taken = {path for paths in shards.values() for (path,) in paths}
        trained = [path for (path,) in shards.get("train", ()) if _HELD_OUT.search(path.name)]
        own = [path for path in files if not any(part[0] in "._" for part in path.relative_to(folder).parts)]
        outputs = {path.parent for path in files if path.name == RECORD} - {folder}
        written = [path for path in taken if not outputs.isdisjoint(path.parents)]
        if written and any(suffix(path.name) in FORMATS and outputs.isdisjoint(path.parents) for path in own):
            raise UserError(f"{min(written)} would be trained on, which this program wrote: name files by a pattern")
        trained *= len(trained) < len(shards.get("train", ()))  # all of them: nothing is mixed
        tables = {*kinds, ".tsv", ".csv", ".jsonl", ".parquet", ".tmx"}
        left = trained + [path for path in own if suffix(path.name) in tables and path not in taken]
        packed = [path for path in own if path.suffix.lower() in (".bz2", ".xz", ".zst", ".zip")]
        packed = [path for path in packed if path.with_suffix("") not in own]
        if packed := [path for path in packed if suffix(path.stem) in (tables if kinds else {".tsv"})]:
            raise UserError(f"{packed[0]} is compressed: unpack it, or pack it by gzip as .gz")
        if len(kinds) > 1 or left:  # `datasets` would take those of one format, and those that it knows a split of
            splits = "splits are named train, validation and test, in lower case: rename it, or name files by a pattern"
            several = f"{folder} holds files of several formats ({', '.join(kinds)}); name those of one"
            raise UserError(several if len(kinds) > 1 else f"{left[0]} would be left out or trained on, since {splits}")
        if kinds:
            return _of_files(str(folder), kinds[0], columns, shards, split)
    if glob.has_magic(str(folder)):
        raise UserError(f"{folder}: rename it, since `datasets` would take *, ? and [ in its name for a pattern")
    return PairSource(str(folder), str(folder), split, columns, config=config, files=files)


def suffix(name: str) -> str:
    """Return the suffix of a file's name, that of compression left out."""
    return Path(name.lower().removesuffix(".gz")).suffix


def find_shards(name: str | Path) -> list[Path]:
    """Return the file of this name, or else the files that match it as a pattern (``*``, ``?``, ``[...]``), sorted.

    Of a pattern that no file matches it is the pattern, which is missing as a file is.
    """
    path = home_path(name).absolute()
    with reading(path):
        if not glob.has_magic(str(name)) or path.exists():
            return [path]
        if is_local(path):
            there = next(parent for parent in path.parents if parent.exists())  # whose name is no pattern
            pattern = Path(glob.escape(str(there)), path.relative_to(there))
            names = glob.glob(str(pattern), recursive=True)  # noqa: PTH207
            matches = [match for match in map(Path, names) if match.is_file()]
        else:
            listed = path.fs.glob(path.path, detail=True)
            matches = [to_path(path.fs.unstrip_protocol(name)) for name in listed if listed[name]["type"] == "file"]
    return sorted(matches, key=lambda match: match.parts) or [path]


def _paired_shards(source: str | Path, target: str | Path) -> list[tuple[Path, Path]]:
    """Return source and target file of each shard, in the order of their names.

    Where wildcards stand for the same text on both sides, a file without a partner is refused, even if another one is
    missing on the other side; where they stand for other text throughout, only the order counts.
    """
    names = source, target
    sides = [sorted(find_shards(name), key=partial(_wildcard_text, name)) for name in names]
    texts = [{_wildcard_text(name, path) for path in side} for name, side in zip(names, sides, strict=True)]
    if len(sides[0]) != len(sides[1]) or (texts[0] & texts[1] and texts[0] != texts[1]):
        counts = f"{source} matches {len(sides[0])} files and {target} {len(sides[1])}"
        raise UserError(f"{counts}: every file of sources needs one of targets, of the same name but for its language")
    return list(zip(*sides, strict=True))


def _wildcard_text(pattern: str | Path, path: Path) -> tuple[str, ...]:
    """Return what the wildcards of a pattern stand for in a path; nothing where its name has them itself."""
    rule = re.escape(str(home_path(pattern).absolute())).replace(r"\*\*/", "((?:.*/)?)").replace(r"\*\*", "(.*)")
    rule = re.sub(r"\\\[.*?\\\]|\\\?", "([^/])", rule.replace(r"\*", "([^/]*)"))
    match = re.fullmatch(rule, str(path))
    return match.groups() if match else ()


def load_pairs(
    *,
    source: str | Path | None = None,
    target: str | Path | None = None,
    data: str | Path | None = None,
    config: str | None = None,
    split: str = "train",
    source_column: str = "source",
    target_column: str = "target",
) -> datasets.Dataset:
    """Load parallel text as a memory-mapped dataset with the string columns ``source`` and ``target``.

    Give `source` and `target`, or `data`, each a name, a pattern such as ``a.*.en.gz`` or a URL such as
    ``s3://bucket/a.*.en.gz``, of what fsspec reaches; swap the files or the columns for the other direction. Files that
    match are read in the order of their names, and those of `source` and `target` are paired in that order. The result
    is cached below ``HF_DATASETS_CACHE``, and an edited file is read again.

    Args:
        source: UTF-8 text file, plain or ``.gz``. Only a line feed ends a line; empty lines stay as empty strings.
        target: the translations, line for line.
        data: a ``.tsv``, ``.csv``, ``.json(l)`` or ``.tmx`` file, plain or ``.gz``, a ``.parquet`` file, a folder (from
            ``save_to_disk``, or of data files) or a dataset on the Hub. TSV has no quoting, and its first row is a
            header only if it holds both column names or two languages; else its columns are named by their numbers,
            and two are source and target. CSV has both. Of a catalogue (``.po``, ``.xlf``, ``.ts``) these are the
            names of what is translated.
        config: configuration of the Hub dataset or folder, such as ``"de-en"``.
        split: split of the Hub dataset or folder, also a slice such as ``"train[:1000]"``. A file has "train" alone.
        source_column: column with the source text, its key within a ``translation`` column, or its language in a TMX
            file, such as ``"en"`` (which there stands for ``en-US`` too).
        target_column: the same for the target text.

    Raises:
        UserError: wrong arguments, or a file, column, value or Hub dataset that is missing or not as it should be.
    """
    return pair_source(source, target, data, config, split, source_column, target_column).load()


def held_out_rows(number: int, size: int | str, seed: int) -> np.ndarray:
    """Return which of `number` pairs are held out: `size` rows at random, sorted; `auto`: a tenth, at most 1,000."""
    size = max(1, min(1000, number // 10)) if size == "auto" else size
    if not 0 < size < number:
        fix = "give validation data" + ", or another validation_size" * (number > 1)
        raise UserError(f"cannot hold validation_size {size} pairs out of {number} training pairs: {fix}")
    return random_rows(number, size, seed)


def random_rows(number: int, size: int, seed: int | Sequence[int]) -> np.ndarray:
    """Return `size` of `number` rows at random, sorted; all of them where there are no more."""
    if size >= number:
        return np.arange(number)
    return np.sort(np.random.default_rng(seed).choice(number, size, replace=False, shuffle=False))
