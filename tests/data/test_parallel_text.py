"""Loading parallel text from every format, and its errors."""

import json
import os
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import error_of
from pair_files import GERMAN, PAIRS, REVERSED, SWAPPED, in_memory, rows, write, write_two

from vaswani_transformer.data.parallel_text import load_pairs

pytestmark = pytest.mark.usefixtures("cache")


# Two text files


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_two_text_files_give_their_lines_and_swapped_files_the_other_direction(tmp_path, suffix):
    files = write_two(tmp_path, *("\n".join(side) + "\n" for side in zip(*PAIRS, strict=True)), suffix)
    assert rows(load_pairs(**files)) == PAIRS
    assert rows(load_pairs(source=files["target"], target=files["source"])) == SWAPPED


def test_only_a_line_feed_ends_a_line_and_empty_lines_are_kept(tmp_path):
    byte_order_mark = "\ufeff"
    files = write_two(tmp_path, "a\u2028b\r\n\x0bc\x85d\n\nf\x1c\r\r\n", f"{byte_order_mark}1\n2\r3\n4\n5")
    assert rows(load_pairs(**files)) == [("a\u2028b", "1"), ("\x0bc\x85d", "2\r3"), ("", "4"), ("f\x1c\r", "5")]


def test_an_edited_file_is_not_served_from_the_cache(tmp_path):
    files = write_two(tmp_path, "one\n", "eins\n")
    assert rows(load_pairs(**files)) == [("one", "eins")]
    stat = files["source"].stat()
    write(files["source"], "two\n")  # the same size
    os.utime(files["source"], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    assert rows(load_pairs(**files)) == [("two", "eins")]


def test_an_unchanged_file_is_served_from_the_cache_under_any_form_of_its_name(tmp_path, monkeypatch):
    files = write_two(tmp_path, "one\n", "eins\n")
    monkeypatch.chdir(tmp_path)
    first, second = load_pairs(**files), load_pairs(source="a.en", target="a.de")
    assert first.cache_files == second.cache_files
    assert first._fingerprint == second._fingerprint


@pytest.mark.parametrize(("source", "target"), [(1200, 3), (3, 1200), (4, 5), (0, 1)])
def test_files_of_different_length_are_refused_with_both_names_and_counts(tmp_path, source, target):
    files = write_two(tmp_path, "a\n" * source, "b\n" * target, ".gz")
    message = error_of(load_pairs, **files)
    assert f"{files['source']} has {source:,} lines and {files['target']} has {target:,}" in message


def test_a_missing_text_file_is_named(tmp_path):
    files = write_two(tmp_path, "a\n", "b\n")
    for side in files:
        missing = tmp_path / f"no-{side}"
        assert f"{missing} cannot be read (No such file" in error_of(load_pairs, **(files | {side: missing}))


def test_invalid_utf8_is_reported_with_file_line_and_byte_offset(tmp_path):
    for suffix in ("", ".gz"):
        files = write_two(tmp_path, b"one\ntw\xff\n", "eins\nzwei\n", suffix)
        assert f"{files['source']}, line 2, byte offset 2 " in error_of(load_pairs, **files)


def test_truncated_damaged_and_false_gzip_files_are_refused(tmp_path):
    files = write_two(tmp_path, *("".join(f"{side} {i}\n" for i in range(2000)) for side in "ab"), ".gz")
    packed = files["target"].read_bytes()
    for content in (packed[:-9], packed[:-8] + bytes(8), packed[:10] + b"\xff" * 50, b"plain text\n"):
        files["target"].write_bytes(content)
        assert f"{files['target']} is not a whole gzip file" in error_of(load_pairs, **files)
    files["target"].write_bytes(packed[:-9])
    place = error_of(load_pairs, **files).partition("it ends after line ")[2]
    assert 0 < int(place.partition(")")[0]) <= 2000


@pytest.mark.parametrize("name", ["a.en", "a.de"])
def test_permission_denied_is_reported(tmp_path, monkeypatch, name):
    files, open_path = write_two(tmp_path, "a\n", "b\n"), Path.open

    def refuse(path, *arguments, **options):  # not chmod: the tests may run as root
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert f"{tmp_path / name} cannot be read (Permission denied)" in error_of(load_pairs, **files)


def test_a_folder_in_place_of_a_text_file_is_refused(tmp_path):
    assert "Is a directory" in error_of(load_pairs, source=tmp_path, target=write(tmp_path / "b", "b\n"))


# Arguments


@pytest.mark.parametrize("names", [(), ("source",), ("target",), ("source", "data"), ("source", "target", "data")])
def test_anything_but_one_training_set_is_refused(tmp_path, names):
    path = write(tmp_path / "a.tsv", "a\tb\n")
    assert "either both text files" in error_of(load_pairs, **dict.fromkeys(names, path))


def test_one_column_for_both_sides_is_refused(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\n")
    assert "both 'en'" in error_of(load_pairs, data=path, source_column="en", target_column="en")


def test_a_config_or_a_slice_of_a_file_is_refused(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\n")
    assert "config='de-en'" in error_of(load_pairs, data=path, config="de-en")
    assert "split='train[:10]'" in error_of(load_pairs, data=path, split="train[:10]")


@pytest.mark.parametrize("name", ["a.xlsx", "a.txt", "a", "a.gz"])
def test_a_file_of_unknown_format_is_refused(tmp_path, name):
    assert "or .parquet" in error_of(load_pairs, data=write(tmp_path / name, "a\tb\n"))


# Tables: TSV, CSV, JSON lines


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.TSV"])
@pytest.mark.parametrize("header", ["", "source\ttarget\n", "source\ttarget\tid\n"])
def test_tsv_needs_no_header_keeps_lone_quotes_and_can_be_reversed(tmp_path, name, header):
    path = write(tmp_path / name, header + "".join(f"{s}\t{t}\t7\r\n" for s, t in PAIRS))
    assert rows(load_pairs(data=path)) == PAIRS
    assert rows(load_pairs(data=path, **REVERSED)) == SWAPPED


def test_tsv_columns_are_found_by_the_header(tmp_path):
    path = write(tmp_path / "a.tsv", "id\tde\ten\n" + "".join(f"7\t{t}\t{s}\n" for s, t in PAIRS))
    assert rows(load_pairs(data=path, **GERMAN)) == PAIRS
    message = error_of(load_pairs, data=path, source_column="en", target_column="die")
    assert "no column 'die'" in message and "id, de, en" in message and "did you mean 'de'?" in message


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl", "a.tsv.gz", "a.parquet"])
def test_an_empty_file_is_refused(tmp_path, name):
    assert str(tmp_path / name) in error_of(load_pairs, data=write(tmp_path / name, ""))


def test_a_table_with_a_header_only_is_refused(tmp_path):
    for name, header in (("a.tsv", "source\ttarget\n"), ("a.csv", "source,target\n")):
        assert "empty" in error_of(load_pairs, data=write(tmp_path / name, header))


def test_a_tsv_row_with_too_few_fields_is_reported_with_its_line(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\nc\n")
    assert f"{path}, line 2: 1 field" in error_of(load_pairs, data=path)
    write(path, "source\tid\ttarget\na\t1\tb\nc\t2\n")
    assert f"{path}, line 3: 2 field" in error_of(load_pairs, data=path)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_csv_has_quoting_and_words_like_null_stay_text(tmp_path, name):
    path = write(tmp_path / name, 'id,source,target\n1,"one, ""two""","a\nb"\n\n2,NA,null\n3,,1.50\n')
    expected = [('one, "two"', "a\nb"), ("NA", "null"), ("", "1.50")]
    assert rows(load_pairs(data=path)) == expected
    assert rows(load_pairs(data=path, **REVERSED)) == [(t, s) for s, t in expected]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("source,target\na,b\nHello, you,c\n", "line 3: not valid CSV (not the 2 fields"),
        ("source,target\na\n", "line 2: not valid CSV (not the 2 fields"),
        ('source,target\na,b\n"c,d\ne,f\n', "not valid CSV (unexpected end"),
        ("source,goal\na,b\n", "no column 'target'; the columns are: source, goal"),
    ],
)
def test_csv_that_would_lose_text_is_refused(tmp_path, content, message):
    assert message in error_of(load_pairs, data=write(tmp_path / "a.csv", content))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("nested", [False, True])
def test_json_lines_have_flat_columns_or_a_translation_column(tmp_path, name, nested):
    objects = [{"id": 1, "en": s, "de": t} for s, t in PAIRS] + [{"en": "2019-01-01", "de": "\u2028"}]
    objects = [{"translation": row} for row in objects] if nested else objects
    content = "\n".join(json.dumps(row, ensure_ascii=False) for row in objects) + "\n\n"
    path = write(tmp_path / name, content)
    assert rows(load_pairs(data=path, **GERMAN)) == [*PAIRS, ("2019-01-01", "\u2028")]
    opposite = load_pairs(data=path, source_column="de", target_column="en")
    assert rows(opposite) == [*SWAPPED, ("\u2028", "2019-01-01")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"en": "a", "de": 5}', "line 2: 'de' holds 5, which is not a string"),
        ('{"en": null, "de": "b"}', "line 2: 'en' holds None, which is not a string"),
        ('{"en": "a", "de"', "line 2: not JSON lines"),
        ('["a", "b"]', "line 2: not JSON lines (list, not an object)"),
        ('{"en": "a", "translation": "b"}', "line 2: there is no column 'de'; the columns are: en, translation"),
        ('{"translation": {"en": "a", "fr": "b"}}', "line 2: there is no column 'de'; the columns are: en, fr"),
        ('{"en": "a", "de": "\\ud800"}', "surrogate"),
    ],
)
def test_json_lines_that_are_not_pairs_of_strings_are_refused(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", '{"en": "a", "de": "b"}\n' + line + "\n")
    assert message in error_of(load_pairs, data=path, **GERMAN)


# Parquet, folders, Hub


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_has_flat_columns_and_any_file_name(tmp_path, kind):
    path = tmp_path / "we[ir]d*.parquet"
    pq.write_table(pa.table([pa.array(side, kind) for side in zip(*PAIRS, strict=True)], ["source", "target"]), path)
    assert rows(load_pairs(data=path)) == PAIRS
    assert rows(load_pairs(data=path, **REVERSED)) == SWAPPED


def test_parquet_with_a_translation_column(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"translation": [{"en": s, "de": t} for s, t in PAIRS]}), path)
    assert rows(load_pairs(data=path, **GERMAN)) == PAIRS
    assert "the columns are: " in error_of(load_pairs, data=path)


def test_parquet_that_is_not_pairs_of_strings_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"source": ["a", "b", None], "target": ["a", "b", "c"], "id": [1, 2, 3]}), path)
    assert "'source' is null, not a string, in row 3" in error_of(load_pairs, data=path)
    assert "'id' is int64, not text" in error_of(load_pairs, data=path, source_column="id")
    pq.write_table(pa.table({"source": pa.array([], pa.string()), "target": pa.array([], pa.string())}), path)
    assert str(path) in error_of(load_pairs, data=path)
    assert f"{path} could not be loaded" in error_of(load_pairs, data=write(path, "no parquet"))


def test_folders_saved_by_datasets_give_the_split(tmp_path):
    features = datasets.Features({"translation": datasets.Translation(["en", "de"])})
    nested = datasets.Dataset.from_list([{"translation": {"en": s, "de": t}} for s, t in PAIRS], features=features)
    nested.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": nested, "valid": nested.select([1])}).save_to_disk(tmp_path / "many")
    assert rows(load_pairs(data=tmp_path / "one", **GERMAN)) == PAIRS
    assert rows(load_pairs(data=tmp_path / "many", split="valid", **GERMAN)) == PAIRS[1:2]
    message = error_of(load_pairs, data=tmp_path / "many", split="test", **GERMAN)
    assert "no split 'test'" in message and "train, valid" in message


def test_a_folder_of_data_files_gives_splits_and_slices_and_is_read_again_after_an_edit(tmp_path):
    in_memory(PAIRS, ("en", "de")).to_parquet(tmp_path / "train.parquet")
    in_memory(PAIRS[:1], ("en", "de")).to_parquet(tmp_path / "validation.parquet")
    assert rows(load_pairs(data=tmp_path, **GERMAN)) == PAIRS
    assert rows(load_pairs(data=tmp_path, split="train[1:2]", **GERMAN)) == PAIRS[1:2]
    assert rows(load_pairs(data=tmp_path, split="validation", **GERMAN)) == PAIRS[:1]
    assert "has no split 'test'" in error_of(load_pairs, data=tmp_path, split="test", **GERMAN)
    in_memory(SWAPPED, ("en", "de")).to_parquet(tmp_path / "train.parquet")
    assert rows(load_pairs(data=tmp_path, **GERMAN)) == SWAPPED


def test_an_empty_folder_is_refused(tmp_path):
    assert f"{tmp_path} could not be loaded" in error_of(load_pairs, data=tmp_path)


def test_a_hub_name_reaches_load_dataset_with_config_and_split(tmp_path, monkeypatch):
    folder, calls, load_dataset = tmp_path / "hub", [], datasets.load_dataset
    folder.mkdir()
    nested = datasets.Features({"translation": datasets.Translation(["de", "en"])})
    examples = [{"translation": {"de": t, "en": s}} for s, t in PAIRS]
    datasets.Dataset.from_list(examples, features=nested).to_parquet(folder / "validation.parquet")

    def fake(name, config=None, *, split):
        calls.append((name, config, split))
        return load_dataset(str(folder), split=split)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert rows(load_pairs(data="wmt14", config="de-en", split="validation", **GERMAN)) == PAIRS
    columns = {"source_column": "de", "target_column": "en"}
    assert rows(load_pairs(data="owner/wmt14", split="validation", **columns)) == SWAPPED
    assert calls == [("wmt14", "de-en", "validation"), ("owner/wmt14", None, "validation")]


def test_a_hub_dataset_out_of_reach_is_one_line(monkeypatch):
    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach 'wmt14' on the Hub\n(LocalEntryNotFoundError)" + " and so on" * 100)

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = error_of(load_pairs, data="wmt14", config="de-en")
    assert "Hub dataset 'wmt14' (there is no such file or folder here)" in message
    assert "Couldn't reach 'wmt14' on the Hub (LocalEntryNotFoundError)" in message and len(message) < 400


@pytest.mark.parametrize("name", ["corpus.tsv", "corpus.parquet", "./corpus", "~/no-corpus", "a/b/c", "/no/corpus"])
def test_a_name_that_can_only_be_a_file_is_missing_without_asking_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    assert "cannot be read (No such file or directory)" in error_of(load_pairs, data=name)
