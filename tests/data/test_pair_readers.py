"""Pairs in files of every format: what is read of them, and what is refused, loaded or streamed."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import error_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pair_files import GERMAN, PAIRS, REVERSED, SWAPPED, read, rows, write, write_two

from vaswani_transformer.data.pair_readers import read_pairs, with_pairs_only
from vaswani_transformer.data.parallel_text import load_pairs

pytestmark = pytest.mark.usefixtures("cache")


# Two text files


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_two_text_files_give_their_lines_and_swapped_files_the_other_direction(tmp_path, suffix):
    files = write_two(tmp_path, *("\n".join(side) + "\n" for side in zip(*PAIRS, strict=True)), suffix)
    assert read(**files) == PAIRS
    assert read(source=files["target"], target=files["source"]) == SWAPPED


def test_only_a_line_feed_ends_a_line_and_empty_lines_are_kept(tmp_path):
    byte_order_mark = "\ufeff"
    files = write_two(tmp_path, "a\u2028b\r\n\x0bc\x85d\n\nf\x1c\r\r\n", f"{byte_order_mark}1\n2\r3\n4\n5")
    assert read(**files) == [("a\u2028b", "1"), ("\x0bc\x85d", "2\r3"), ("", "4"), ("f\x1c\r", "5")]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\ufeff"), max_size=8)
AWKWARD = st.sampled_from(["\u2028", "\x85", "\x0b", "NA", "null", "1.50", '"', "a, b", " "])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(st.one_of(TEXT, AWKWARD), st.one_of(TEXT, AWKWARD)), min_size=1, max_size=5))
def test_any_text_comes_back_from_every_format_that_can_hold_it(tmp_path, pairs):
    sides = list(zip(*pairs, strict=True))
    files = write_two(tmp_path, *("".join(line + "\n" for line in side) for side in sides), ".gz")
    assert list(read_pairs("text", [tuple(files.values())])) == pairs
    lines = "".join(json.dumps({"source": s, "target": t}, ensure_ascii=False) + "\n" for s, t in pairs)
    assert list(read_pairs(".jsonl", [(write(tmp_path / "a.jsonl", lines),)])) == pairs
    quoted = [",".join('"' + text.replace('"', '""') + '"' for text in pair) for pair in (("source", "target"), *pairs)]
    assert list(read_pairs(".csv", [(write(tmp_path / "a.csv", "\n".join(quoted)),)])) == pairs
    pq.write_table(pa.table(sides, ["source", "target"]), tmp_path / "a.parquet")
    assert list(read_pairs(".parquet", [(tmp_path / "a.parquet",)])) == pairs
    if not any("\t" in text for pair in pairs for text in pair):
        table = "source\ttarget\n" + "".join("\t".join(pair) + "\n" for pair in pairs)
        assert list(read_pairs(".tsv", [(write(tmp_path / "a.tsv.gz", table),)])) == pairs


def test_an_edited_file_is_not_served_from_the_cache_and_an_unchanged_one_is_under_any_name(tmp_path, monkeypatch):
    files = write_two(tmp_path, "one\n", "eins\n")
    first = load_pairs(**files)
    monkeypatch.chdir(tmp_path)
    again = load_pairs(source="a.en", target="a.de")
    assert first.cache_files == again.cache_files and first._fingerprint == again._fingerprint
    stat = files["source"].stat()
    write(files["source"], "two\n")  # the same size
    os.utime(files["source"], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    assert rows(load_pairs(**files)) == [("two", "eins")]


@pytest.mark.parametrize(("source", "target"), [(1200, 3), (3, 1200), (4, 5), (0, 1)])
def test_files_of_different_length_are_refused_with_both_names_and_counts(tmp_path, source, target):
    files = write_two(tmp_path, "a\n" * source, "b\n" * target, ".gz")
    assert f"{files['source']} has {source:,} lines and {files['target']} has {target:,}" in read(**files)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_invalid_utf8_is_reported_with_file_line_and_byte_offset(tmp_path, suffix):
    files = write_two(tmp_path, b"one\ntw\xff\n", "eins\nzwei\n", suffix)
    assert f"{files['source']}, line 2, byte offset 2 " in read(**files)


def test_truncated_damaged_and_false_gzip_files_are_refused(tmp_path):
    files = write_two(tmp_path, *("".join(f"{side} {i}\n" for i in range(2000)) for side in "ab"), ".gz")
    packed = files["target"].read_bytes()
    for content in (packed[:-8] + bytes(8), packed[:10] + b"\xff" * 50, b"plain text\n", packed[:-9]):
        files["target"].write_bytes(content)
        message = read(**files)
        assert f"{files['target']} is not a whole gzip file" in message
    place = message.partition("it ends after line ")[2]
    assert 0 < int(place.partition(")")[0]) <= 2000


@pytest.mark.parametrize("name", ["a.en", "a.de"])
def test_permission_denied_a_missing_file_and_a_folder_are_reported(tmp_path, monkeypatch, name):
    files, open_path = write_two(tmp_path, "a\n", "b\n"), Path.open

    def refuse(path, *arguments, **options):  # not chmod: the tests may run as root
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return open_path(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert f"{tmp_path / name} cannot be read (Permission denied)" in read(**files)
    (tmp_path / name).unlink()
    assert f"{tmp_path / name} cannot be read (No such file" in read(**files)
    (tmp_path / name).mkdir()
    assert f"{tmp_path / name} cannot be read (Is a directory)" in read(**files)


# Tables


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.TSV"])
@pytest.mark.parametrize("header", ["", "source\ttarget\n", "source\ttarget\tid\n"])
def test_tsv_needs_no_header_keeps_lone_quotes_and_can_be_reversed(tmp_path, name, header):
    path = write(tmp_path / name, header + "".join(f"{s}\t{t}\t7\r\n" for s, t in PAIRS))
    assert read(data=path) == PAIRS
    assert read(data=path, **REVERSED) == SWAPPED


def test_tsv_columns_are_found_by_the_header(tmp_path):
    path = write(tmp_path / "a.tsv", "id\tde\ten\n" + "".join(f"7\t{t}\t{s}\n" for s, t in PAIRS))
    assert read(data=path, **GERMAN) == PAIRS
    message = read(data=path, source_column="en", target_column="die")
    assert "no column 'die'" in message and "id, de, en" in message and "did you mean 'de'?" in message


def test_csv_has_quoting_and_words_like_null_stay_text(tmp_path):
    path = write(tmp_path / "a.csv.gz", 'id,source,target\n1,"one, ""two""","a\nb"\n\n2,NA,null\n3,,1.50\n')
    expected = [('one, "two"', "a\nb"), ("NA", "null"), ("", "1.50")]
    assert read(data=path) == expected
    assert read(data=path, **REVERSED) == [(t, s) for s, t in expected]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "we[ir]d*.parquet"])
@pytest.mark.parametrize("nested", [False, True])
def test_json_lines_and_parquet_have_flat_columns_or_a_translation_column(tmp_path, name, nested):
    objects = [{"id": 1, "en": s, "de": t} for s, t in PAIRS] + [{"id": 2, "en": "2019-01-01", "de": "\u2028"}]
    objects = [{"translation": row} for row in objects] if nested else objects
    path = tmp_path / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(objects), path)
    else:
        write(path, "\n".join(json.dumps(row, ensure_ascii=False) for row in objects) + "\n\n")
    assert read(data=path, **GERMAN) == [*PAIRS, ("2019-01-01", "\u2028")]
    assert read(data=path, source_column="de", target_column="en") == [*SWAPPED, ("\u2028", "2019-01-01")]
    assert "no column 'source'; the columns are: " in read(data=path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, "", "empty") for name in ("a.tsv", "a.csv", "a.jsonl", "a.tsv.gz")),
        ("a.parquet", "", "a.parquet could not be loaded"),
        ("a.parquet", "no parquet", "a.parquet could not be loaded"),
        ("a.tsv", "en\tde\n", "empty"),
        ("a.csv", "en,de\n", "empty"),
        ("a.tsv", "en\tde\nc\n", "a.tsv, line 2: 1 field"),
        ("a.tsv", "en\tid\tde\na\t1\tb\nc\t2\n", "a.tsv, line 3: 2 field"),
        ("a.csv", "en,de\na,b\nHello, you,c\n", "line 3: not valid CSV (not the 2 fields"),
        ("a.csv", "en,de\na\n", "line 2: not valid CSV (not the 2 fields"),
        ("a.csv", 'en,de\na,b\n"c,d\ne,f\n', "not valid CSV (unexpected end"),
        ("a.csv", "en,goal\na,b\n", "no column 'de'; the columns are: en, goal"),
        ("a.jsonl", '\n{"en": "a", "de": 5}', "line 2: 'de' holds 5, which is not a string"),
        ("a.jsonl", '\n{"en": null, "de": "b"}', "line 2: 'en' is null"),
        ("a.jsonl", '\n{"en": "a", "de"', "line 2: not JSON lines"),
        ("a.jsonl", '\n["a", "b"]', "line 2: not JSON lines (list, not an object)"),
        ("a.jsonl", '\n{"en": "a", "translation": "b"}', "line 2: there is no column 'de'; the columns are: en, trans"),
        ("a.jsonl", '{"translation": {"en": "a", "fr": "b"}}', "line 1: there is no column 'de'; the columns are: en"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_pairs_of_strings_is_refused_with_its_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    answer = read(data=path, **GERMAN)
    assert message in answer and str(path) in answer


def test_half_a_surrogate_pair_cannot_be_stored(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"source": "a", "target": "\\ud800"}\n')
    assert "surrogate" in error_of(load_pairs, data=tmp_path / "a.jsonl")


def test_parquet_may_hold_large_strings_and_no_nulls(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([pa.array(side, pa.large_string()) for side in zip(*PAIRS, strict=True)], ["a", "b"]), path)
    assert read(data=path, source_column="a", target_column="b") == PAIRS
    pq.write_table(pa.table({"source": ["a", "b", None], "target": ["a", "b", "c"], "id": [1, 2, 3]}), path)
    assert f"{path}, row 3: 'source' is null; fill or remove the row" in read(data=path)
    assert "'id' is int64, not text" in read(data=path, source_column="id")


def test_a_parquet_file_is_streamed_with_little_of_it_in_memory(tmp_path):
    pq.write_table(
        pa.table({name: ["x" * 1000] * 40_000 for name in ("source", "target")}), tmp_path / "a.parquet",
        row_group_size=2000, use_dictionary=False, compression="none",
    )  # fmt: skip
    before, most = pa.total_allocated_bytes(), 0
    for _ in read_pairs(".parquet", [(tmp_path / "a.parquet",)]):
        most = max(most, pa.total_allocated_bytes())
    assert most - before < 20_000_000, "of 80 MB"


def test_columns_beside_the_pairs_are_not_converted():
    times = pa.array([2**62, 1], pa.timestamp("s"))  # beyond the years of Python's datetime
    table = pa.table({"en": ["a", "b"], "de": ["c", "d"], "when": times})
    assert with_pairs_only(table, ("en", "de")).to_pylist() == [{"en": "a", "de": "c"}, {"en": "b", "de": "d"}]
    nested = pa.table({"translation": [{"en": "a", "de": "c"}], "when": times[:1]})
    assert with_pairs_only(nested, ("en", "de")).schema.names == ["translation"]
    assert with_pairs_only(table, ("en", "fr")).schema.names == ["en", "de", "when"]  # for the message that lists them
