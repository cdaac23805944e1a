"""Text in splits: together, in order, the pairs of the whole text, each pair once, whatever the size of a split."""

import gzip
import hashlib
import json
import pickle
from itertools import chain

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import error_of
from hypothesis import given, settings
from hypothesis import strategies as st

from vaswani_transformer.data import splits as splitting
from vaswani_transformer.data import tasks
from vaswani_transformer.data.parallel_text import pair_source
from vaswani_transformer.data.prepare import Preparation
from vaswani_transformer.data.splits import FileSplit, LineSplit, PieceSplit, RowSplit, in_pieces, places, text_splits
from vaswani_transformer.recipes.recipe import Recipe

texts = st.text(st.sampled_from("aб \t\r\u2028\x85"), max_size=9).map(lambda text: text.rstrip("\r"))


@pytest.fixture(autouse=True)
def small(cache, monkeypatch):
    """Splits of a few bytes or rows, places known every other line, read in pieces of some bytes."""
    monkeypatch.setattr(splitting, "SPLIT_BYTES", 7)
    monkeypatch.setattr(splitting, "SPLIT_ROWS", 5)
    monkeypatch.setattr(splitting, "_MARKED", 2)
    monkeypatch.setattr(splitting, "_READ", 4)


def pairs_of_splits(source) -> list[list[tuple[str, str]]]:
    """The pairs of each split; what tasks hand on is pickled or JSON, as between machines."""
    splits = pickle.loads(pickle.dumps(text_splits(source)))
    counts = json.loads(json.dumps([split.count() for split in splits]))
    found = places(splits, counts)
    pairs = [list(split.pairs(place)) for split, place in zip(splits, found, strict=True)]
    assert [len(own) for own in pairs] == [place.pairs for place in found]
    return pairs


def joined(parts: list[list[tuple[str, str]]]) -> list[tuple[str, str]]:
    return list(chain.from_iterable(parts))


@settings(deadline=None)
@given(st.lists(texts, min_size=1), st.data(), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_lines_of_two_files(tmp_path_factory, sources, data, end, has_last_end, has_mark):
    folder = tmp_path_factory.mktemp("text")
    targets = data.draw(st.lists(st.text("xyz ", max_size=30), min_size=len(sources), max_size=len(sources)))
    for name, side in (("a.en", sources), ("a.de", targets)):
        text = end.join(side) + (end if has_last_end or not side[-1] else "")
        (folder / name).write_bytes(("\ufeff" * has_mark + text).encode())
    source = pair_source(folder / "a.en", folder / "a.de")
    found = pairs_of_splits(source)
    assert joined(found) == list(source.stream()) == list(zip(sources, targets, strict=True))
    assert len(found) == max(1, -(-(folder / "a.en").stat().st_size // 7))


def test_several_files_and_compressed_ones(tmp_path):
    for number in range(3):
        for side in ("en", "de"):
            text = "".join(f"{side} {number} {row}\n" for row in range(4 + number))
            (tmp_path / f"plain.{number}.{side}").write_text(text)
            (tmp_path / f"packed.{number}.{side}.gz").write_bytes(gzip.compress(text.encode()))
    plain = pair_source(tmp_path / "plain.*.en", tmp_path / "plain.*.de")
    packed = pair_source(tmp_path / "packed.*.en.gz", tmp_path / "packed.*.de.gz")
    assert joined(pairs_of_splits(plain)) == joined(pairs_of_splits(packed)) == list(plain.stream())
    assert {type(split) for split in text_splits(plain)} == {LineSplit}
    assert [type(split) for split in text_splits(packed)] == [FileSplit] * 3


@pytest.mark.parametrize("suffix", ["gz", "tsv", "jsonl"])
def test_large_files_that_cannot_be_cut_are_read_once_and_then_in_pieces(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(splitting, "COPIED_PAIRS", 3)
    pairs = [(f"Zeile {row}\u2028" + "x" * (row % 5), f"line \\ {row}") for row in range(23)]
    if suffix == "gz":
        for side, name in enumerate(("a.en.gz", "a.de.gz")):
            (tmp_path / name).write_bytes(gzip.compress("".join(pair[side] + "\n" for pair in pairs).encode()))
        source = pair_source(tmp_path / "a.en.gz", tmp_path / "a.de.gz")
    else:
        rows = (
            "\t".join(pair) if suffix == "tsv" else json.dumps({"source": pair[0], "target": pair[1]}) for pair in pairs
        )
        (tmp_path / f"a.{suffix}").write_text("".join(row + "\n" for row in rows))
        source = pair_source(data=tmp_path / f"a.{suffix}")
    splits = pickle.loads(pickle.dumps(in_pieces(text_splits(source), tmp_path / "copies", 7)))
    assert {type(split) for split in splits} == {PieceSplit} and len(splits) > 23 * (suffix == "jsonl")
    counts = json.loads(json.dumps([split.count() for split in splits]))
    for facts in counts[0]["files"]:
        content = (tmp_path / facts["file"]).read_bytes()
        assert [len(content), hashlib.sha256(content).hexdigest()] == [facts["bytes"], facts["sha256"]]
    monkeypatch.setattr(splitting, "SPLIT_BYTES", 10**6)
    assert in_pieces(text_splits(source), tmp_path) == text_splits(source)
    for path in source.files:
        path.unlink()
    found = [list(split.pairs(place)) for split, place in zip(splits, places(splits, counts), strict=True)]
    assert joined([[tuple(pair) for pair in own] for own in found]) == pairs
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_row_groups_and_tables(tmp_path):
    rows = [(f"source {row}", f"target {row}") for row in range(23)]
    table = pa.table({"source": [row[0] for row in rows], "more": list(range(23)), "target": [row[1] for row in rows]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    nested = [{"translation": {"source": source, "target": target}} for source, target in rows]
    pq.write_table(pa.Table.from_pylist(nested), tmp_path / "b.parquet", row_group_size=30)
    (tmp_path / "c.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows))
    for name, sizes in (("a.parquet", [6, 6, 6, 5]), ("b.parquet", [23]), ("c.tsv", [23])):
        found = pairs_of_splits(pair_source(data=tmp_path / name))
        assert joined(found) == rows and [len(own) for own in found] == sizes


def test_rows_of_a_saved_dataset(tmp_path, monkeypatch):
    rows = [(f"source {row}", f"target {row}") for row in range(12)]
    columns = {"source": [row[0] for row in rows], "target": [row[1] for row in rows]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    source = pair_source(data=tmp_path / "saved")
    found = pairs_of_splits(source)
    assert joined(found) == rows and [len(own) for own in found] == [5, 5, 2]
    assert {type(split) for split in text_splits(source)} == {RowSplit}
    monkeypatch.setattr(tasks, "own_processors", lambda: range(8))
    assert Preparation.of(Recipe(), tmp_path, source, source, {"files": {}}).useful_workers() == 6


def test_sides_of_different_lengths_and_empty_ones(tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\nthree\nfour")
    (tmp_path / "a.de").write_text("eins\nzwei\ndrei\n")
    assert "a.en has 4 lines and" in error_of(pairs_of_splits, pair_source(tmp_path / "a.en", tmp_path / "a.de"))
    for side in ("en", "de"):
        (tmp_path / f"b.{side}").write_text("")
    assert "empty, no pair" in error_of(pairs_of_splits, pair_source(tmp_path / "b.en", tmp_path / "b.de"))


def test_mistakes_are_named_with_their_line_or_row(tmp_path):
    (tmp_path / "a.en").write_bytes(b"one\n" * 9 + b"\xff\n" + b"one\n" * 9)
    (tmp_path / "a.de").write_text("eins\n" * 19)
    assert "a.en, line 10, byte offset 0" in error_of(
        pairs_of_splits, pair_source(tmp_path / "a.en", tmp_path / "a.de")
    )
    table = pa.table({"source": ["s"] * 12, "target": [*(["t"] * 10), None, "t"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert "a.parquet, row 11: 'target' is null" in error_of(pairs_of_splits, pair_source(data=tmp_path / "a.parquet"))
