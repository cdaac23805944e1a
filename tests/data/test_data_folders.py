"""What of data is looked at before it is read, and folders, which are read as if their files were named."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import error_of
from pair_files import GERMAN, PAIRS, in_memory, rows, write

from vaswani_transformer.data.parallel_text import PairSource, load_pairs
from vaswani_transformer.data.recipe_data import data_sources
from vaswani_transformer.errors import UserError
from vaswani_transformer.recipes.recipe import Recipe

pytestmark = pytest.mark.usefixtures("cache")

WRONG_SCHEMAS = [
    ({"en": ["a"], "fr": ["b"]}, "there is no column 'de'; the columns are: en, fr"),
    ({"en": ["a"], "de": [7]}, "column 'de' is int64, not text"),
    ({"en": pa.array([None], pa.null()), "de": ["b"]}, "column 'en' is null, not text"),
    ({"translation": [{"en": "a", "fr": "b"}]}, "there is no column 'de'; the columns are: en, fr"),
    ({"translation": [{"en": "a", "de": [1]}]}, "column 'de' is list<"),
    ({"translation": ["a b"]}, "there is no column 'en'; the columns are: translation"),
]


@pytest.mark.parametrize(("columns", "message"), WRONG_SCHEMAS)
@pytest.mark.parametrize("form", ["pattern", "folder", "splits"])
def test_the_schemas_of_all_parquet_files_are_looked_at_before_the_first_pair(
    tmp_path, monkeypatch, columns, message, form
):
    for number in range(3):
        in_memory(PAIRS, ("en", "de")).to_parquet(tmp_path / f"train-{number}.parquet")
    wrong = tmp_path / "train-3.parquet"
    if form == "splits":  # a folder whose validation part is wrong
        wrong = tmp_path / "validation-0.parquet"
    pq.write_table(pa.table(columns), wrong)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("began to read"))
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("began to read"))
    if form == "splits":
        recipe = Recipe(train_data=str(tmp_path), validation_split="validation", **GERMAN)
        assert error_of(data_sources, recipe).startswith(f"{wrong}: {message}")
        return
    source = PairSource(data=tmp_path / "*.parquet" if form == "pattern" else tmp_path, **GERMAN)
    for function in (source.load, source.check, lambda: next(source.stream())):
        assert error_of(function).startswith(f"{wrong}: {message}")
    if form == "folder":
        recipe = Recipe(train_data=str(tmp_path), validation_size=1, **GERMAN)
        assert error_of(data_sources, recipe).startswith(f"{wrong}: {message}")


def test_a_truncated_or_empty_parquet_file_is_found_before_the_first_pair(tmp_path):
    for number in range(3):
        in_memory(PAIRS).to_parquet(tmp_path / f"{number}.parquet")
    last = tmp_path / "2.parquet"
    whole = last.read_bytes()
    for form in (tmp_path, tmp_path / "*.parquet"):
        last.write_bytes(whole[:-7])
        assert f"{last} could not be loaded" in error_of(next, PairSource(data=form).stream())
        in_memory(PAIRS).select([]).to_parquet(last)
        assert f"{last}: empty, no rows" in error_of(next, PairSource(data=form).stream())
        last.write_bytes(whole)


def test_a_saved_dataset_is_looked_at_before_the_first_pair(tmp_path):
    in_memory(PAIRS, ("en", "fr")).save_to_disk(tmp_path / "saved")
    write(tmp_path / "a.tsv", "a\tb\n")
    recipe = Recipe(train_data=str(tmp_path / "a.tsv"), validation_data=str(tmp_path / "saved"))
    assert f"{tmp_path / 'saved'}: there is no column 'source'" in error_of(data_sources, recipe)


def test_columns_that_are_not_asked_for_may_differ_between_the_files_of_a_folder(tmp_path):
    pq.write_table(pa.table({"en": ["a"], "de": ["b"], "id": [1]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"id": ["x"], "de": ["d"], "en": ["c"], "score": [0.5]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"translation": [{"de": "f", "en": "e", "fr": "g"}]}), tmp_path / "2.parquet")
    source = PairSource(data=tmp_path, **GERMAN)
    assert rows(source.load()) == list(source.stream()) == [("a", "b"), ("c", "d"), ("e", "f")]
    assert source.count() == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "source\ttarget\na\tb\nc\n"),
        ("a.tsv", "source\tid\ttarget\na\t1\tb\nc\t2\n"),
        ("a.tsv.gz", "a\tb\nc\td\n\n"),
        ("a.tsv", "a\tb\n" + "c\td\te\n"),  # more than are needed
        ("a.tsv", "1\t2\n3\t4\n"),
        ("a.csv", "source,target\na,b\nc\n"),
        ("a.csv", "source,target\na,b\nc,d,e\n"),
        ("a.csv", "source,target\n1,2.50\n"),
        ("a.jsonl", '{"source": "a", "target": "b"}\n{"source": "c"}\n'),
        ("a.jsonl.gz", '{"source": "2019-01-01", "target": "b"}\n'),
        ("a.tsv", "source\ttarget\n"),
        ("a.tsv", ""),
        ("a.tsv", b"a\tb\nc\t\xff\n"),
    ],
)
def test_a_file_in_a_folder_is_judged_as_if_it_were_named(tmp_path, name, content):
    """The same pairs, or the same complaint with file and line."""

    def outcome(function):
        try:
            return function()
        except UserError as error:
            return str(error)

    (tmp_path / "folder").mkdir()
    path = write(tmp_path / "folder" / name, content)
    expected = outcome(lambda: rows(load_pairs(data=path)))
    folder = PairSource(data=tmp_path / "folder")
    assert outcome(lambda: rows(folder.load())) == outcome(lambda: list(folder.stream())) == expected
    if isinstance(expected, str):
        assert str(path) in expected


def test_splits_and_slices_of_a_folder_of_text(tmp_path):
    lines = [(f"s{number}", f"t{number}") for number in range(10)]
    for name, some in (("train-0", lines[:6]), ("train-1", lines[6:]), ("test", lines[:1])):
        write(tmp_path / f"{name}.tsv", "".join(f"{source}\t{target}\n" for source, target in some))
    cases = {"train": lines, "test": lines[:1], "train[2:8]": lines[2:8], "train[7:]": lines[7:]}
    for split, expected in cases.items():
        source = PairSource(data=tmp_path, split=split)
        assert rows(source.load()) == list(source.stream()) == expected, split
        assert source.count() == len(expected)
    cases = {"train[:50%]": lines[:5], "train[-3:]": lines[-3:], "test+train[4:6]+train[9:9]": lines[:1] + lines[4:6]}
    for split, expected in cases.items():
        assert rows(load_pairs(data=tmp_path, split=split)) == expected, split
        assert "cannot be streamed" in error_of(next, PairSource(data=tmp_path, split=split).stream())
    for split in ("train[10:]", "train[5:5]"):
        assert "empty, no rows" in error_of(load_pairs, data=tmp_path, split=split)
        assert "empty, no rows" in error_of(next, PairSource(data=tmp_path, split=split).stream())
    for split in ("dev", "train+dev[:3]"):
        message = error_of(load_pairs, data=tmp_path, split=split)
        assert "has no split 'dev'; choose one of: " in message and "test" in message and "train" in message


def test_a_file_in_a_folder_that_would_be_read_another_way_is_refused(tmp_path):
    write(tmp_path / "a.tsv", "a\tb\n")
    write(tmp_path / "notes.txt", "not data\n")
    assert rows(load_pairs(data=tmp_path)) == [("a", "b")]
    other = write(tmp_path / "b.tsv.xz", "")
    assert f"{other} is neither .tsv nor .tsv.gz" in error_of(load_pairs, data=tmp_path)


def test_a_home_folder_that_nobody_has_is_a_missing_file(tmp_path):
    assert "cannot be read (No such file" in error_of(load_pairs, data="~nobody-of-this-name/a.tsv")
