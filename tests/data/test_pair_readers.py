"""Pairs in files of every format: what is read of them, and what is refused."""

import json
import lzma
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from datasets.table import InMemoryTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pair_files import GERMAN, PAIRS, REVERSED, SWAPPED, read, rows, write, write_two

from vaswani_transformer.data.pair_readers import read_pairs
from vaswani_transformer.data.parallel_text import load_pairs, pair_source

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


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(st.one_of(TEXT, AWKWARD), st.one_of(TEXT, AWKWARD)), min_size=1, max_size=5))
def test_any_text_comes_back(tmp_path, pairs):
    sides = list(zip(*pairs, strict=True))
    files = write_two(tmp_path, *("".join(line + "\n" for line in side) for side in sides), ".gz")
    assert list(read_pairs("text", [tuple(files.values())])) == pairs
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


@pytest.mark.parametrize(("source", "target"), [(1200, 3), (4, 5), (0, 1)])
def test_files_of_different_length_are_refused_with_both_names_and_the_smaller_count(tmp_path, source, target):
    files = write_two(tmp_path, "a\n" * source, "b\n" * target, ".gz").values()
    longer, shorter = files if source > target else reversed(files)
    message = read(**dict(zip(("source", "target"), files, strict=True)))
    assert f"{longer} has more lines than {shorter}, which has {min(source, target)}:" in message


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_invalid_utf8_is_reported_with_file_line_and_byte_offset(tmp_path, suffix):
    files = write_two(tmp_path, b"one\ntw\xff\n", "eins\nzwei\n", suffix)
    assert f"{files['source']}, line 2: byte offset 2 " in (message := read(**files))
    assert message.endswith("(invalid start byte): convert it first, as by iconv -f WINDOWS-1252 -t UTF-8")
    files = write_two(tmp_path, "one\n".encode("utf-16"), "eins\n", suffix)
    assert read(**files).endswith("convert it first, as by iconv -f UTF-16 -t UTF-8")
    files = write_two(tmp_path, lzma.compress(b"one\n"), "eins\n", suffix)
    assert read(**files) == f"{files['source']} is compressed: unpack it, or pack it by gzip as .gz"


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.TSV"])
@pytest.mark.parametrize("header", ["", "source\ttarget\n", "source\ttarget\tn\n", "SRC\tTrg\r\n", "nb\tnb-NO\n"])
def test_tsv_needs_no_header_keeps_lone_quotes_and_can_be_reversed(tmp_path, name, header):
    end = "\t7\r\n" if "target\tn" in header else "\r\n"
    path = write(tmp_path / name, header + "".join(f"{s}\t{t}{end}" for s, t in PAIRS))
    assert read(data=path) == PAIRS
    assert read(data=path, **REVERSED) == SWAPPED
    if "Trg" in header:
        assert read(data=write(tmp_path / "b.tsv", "n\ttgt\tsrc\n1\tHund\tdog\n")) == [("dog", "Hund")]
    assert read(data=write(tmp_path / "b.tsv", "No\tNo\nYes\tSì\n")) == [("No", "No"), ("Yes", "Sì")]  # not Norwegian


def test_tsv_columns_are_found_by_the_header(tmp_path):
    path = write(tmp_path / "a.tsv", "id\tde\ten\n" + "".join(f"7\t{t}\t{s}\n" for s, t in PAIRS))
    assert read(data=path, **GERMAN) == PAIRS
    assert "no column 'die'; the columns are: id, de, en" in read(data=path, source_column="en", target_column="die")
    numbered = write(tmp_path / "n.tsv", "a\tb\nc\td\te\n")  # a tab within a text
    assert "n.tsv, line 2: 3 field(s)" in read(data=numbered, source_column="1", target_column="2")
    path = write(tmp_path / "a.tsv", "target\tid\tsource\ttarget\na\tb\tc\td\n")
    assert f"{path}, line 1: several columns 'target'" in read(data=path)


@pytest.mark.parametrize("header", ["", "key\tEnglish\tkey\tGerman\n"])
def test_of_more_than_two_columns_without_names_none_are_guessed(tmp_path, header):
    path = write(tmp_path / "a.tsv", header + "".join(f"17\t{s}\t18\t{t}\n" for s, t in PAIRS))
    message = read(data=path)
    columns = "key, English, key, German" if header else "17, a dog runs, 18, ein Hund läuft"
    assert f"{path}, line 1: no column 'source'; the columns are: {columns}; name two by --source-column" in message
    assert read(data=path, source_column="4", target_column="2") == SWAPPED
    assert "no column '5'; the columns are: 1, 2, 3, 4;" in read(data=path, source_column="2", target_column="5")
    path = write(tmp_path / "b.tsv", "a\tb\nc\td\te\n")
    assert f"{path}, line 2: 3 field(s), where the first has 2" in read(data=path)


def test_csv_has_quoting_and_words_like_null_stay_text(tmp_path):
    long = "x" * 200_000  # more than Python's own limit for a field
    path = write(tmp_path / "a.csv.gz", f'n,source,target\n1,"one, ""two""","a\nb"\n\n2,NA,null\n3,,1.50\n4,{long},a\n')
    expected = [('one, "two"', "a\nb"), ("NA", "null"), ("", "1.50"), (long, "a")]
    assert read(data=path) == expected
    assert read(data=path, **REVERSED) == [(t, s) for s, t in expected]


def test_csv_of_a_spreadsheet_whose_decimal_mark_is_the_comma(tmp_path):
    path = write(tmp_path / "a.csv", '\n"no, id";source;target\n1;"a; b, c";1,5\n')
    assert read(data=path) == [("a; b, c", "1,5")]
    path = write(tmp_path / "b.csv", "source,target;notes,target\na,b,c\n")
    assert read(data=path) == [("a", "c")]


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
    assert "no column 'source'; the columns are: " in read(data=path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, "", "") for name in ("a.tsv", "a.csv", "a.jsonl", "a.tsv.gz", "a.parquet")),
        ("a.parquet", "no parquet", ""),
        ("a.csv", "en,de\n", "empty"),
        ("a.jsonl", "", "a.jsonl: empty"),
        ("a.tsv", "\nen\tde\n\na\n", "a.tsv, line 4: 1 field(s)"),
        ("a.tsv", "en\tid\tde\na\t1\tb\nc\t2\n", "a.tsv, line 3: 2 field"),
        ("a.tsv", "en\tde\na\tb\tc\n", "a.tsv, line 2: 3 field(s), where the first has 2"),
        ("a.csv", "en,de\na,b\nHello, you,c\n", "a.csv, row 3: 3 field(s), where the first has 2"),
        ("a.jsonl", '{"en": "a", "de": 5}', "'de' is int64, not text"),
        ("a.jsonl", '{"en": "a", "de": ["b"]}', "'de' is List(Value('string')), not text"),
        ("a.csv", "en,de,de\na,b,c\n", "several columns 'de'"),
        ("a.csv", 'en,de\na,b\n"c,d\ne,f\n', "a.csv, line 4: unexpected end of data"),
        ("a.csv", "en,goal\na,b\n", "no column 'de'; the columns are: en, goal"),
        ("a.jsonl", '{"en": "a", "de": "b"}\n{"en": "a", "de": 5}', "'de' is of several kinds, not text"),
        ("a.jsonl", '{"en": "a", "de": "b"}\n{"en": null, "de": "b"}', "'en' is null in row 2"),
        ("a.jsonl", '\n{"en": "a", "de"', "JSON parse error"),
        ("a.jsonl", '{"en": "a", "de": "b", "en": "c"}', "specified twice"),
        ("a.jsonl", '{"en": "a", "de": "\\ud800"}', ""),
        ("a.jsonl", '{"translation": {"en": "a", "fr": "b"}}', "no column 'de'; the columns are: en"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_pairs_of_strings_is_refused(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    answer = read(data=path, **GERMAN)
    assert isinstance(answer, str) and message in answer and str(path) in answer


@pytest.mark.parametrize("type", ["string", "large_string", "string_view", "dictionary", "dictionary of large_string"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_strings_of_every_type_of_arrow_are_text(tmp_path, type, nested, kind):
    sides = [pa.array(side, type.split()[-1].replace("dictionary", "string")) for side in zip(*PAIRS, strict=True)]
    sides = [side.dictionary_encode() if type.startswith("dictionary") else side for side in sides]
    table = pa.table(sides, ["en", "de"])
    table = pa.table({"translation": table.to_struct_array(), "id": [1, 2, 3]}) if nested else table
    path = tmp_path / f"a.{kind}"
    pq.write_table(table, path) if kind == "parquet" else Dataset(InMemoryTable(table)).save_to_disk(path)
    files = list(tmp_path.rglob("*"))
    assert read(data=path, **GERMAN) == PAIRS
    assert list(tmp_path.rglob("*")) == files  # nothing is written beside them


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_strings_that_are_not_utf8_are_refused(tmp_path, kind):
    bad = pa.array([b"a", b"\xff\xfe", b"c"], pa.binary()).view(pa.string())
    table = pa.table({"source": bad, "target": ["a", "b", "c"]})
    path = tmp_path / f"a.{kind}"
    pq.write_table(table, path) if kind == "parquet" else Dataset(InMemoryTable(table)).save_to_disk(path)
    message = read(data=path)
    assert str(path) in message and "UTF8" in message


def test_catalogues_are_read_in_either_direction_and_line_breaks_are_spaces(tmp_path, caplog):
    for name, (source, target) in zip("abc", PAIRS, strict=True):
        quoted = (text.replace('"', r"\"").replace(" ", r"\n", 1) for text in (source, target))
        write(tmp_path / f"{name}.po", 'msgid "{}"\nmsgstr "{}"\n\nmsgid "open"\nmsgstr ""\n'.format(*quoted))
    assert read(data=tmp_path / "*.po") == read(data=tmp_path) == PAIRS
    assert read(data=tmp_path / "*.po", **REVERSED) == SWAPPED
    assert "no column 'en'; the columns are: source, target" in read(data=tmp_path / "a.po", **GERMAN)
    caplog.clear()
    path = write(tmp_path / "d.po", 'msgid "a"\nmsgstr "b\n\nmsgid "c"\nmsgstr "d"\n\nmsgid "e\nmsgstr "f"\n')
    assert read(data=path) == [("c", "d")]
    assert caplog.messages == [f"{path}: 2 parts are left out, the first in line 1: neither an entry nor a comment"]
    assert "empty, no pair" in read(data=write(tmp_path / "d.po", 'msgid "a"\nmsgstr ""\n'))
    write(tmp_path / "e.po", 'msgid "a"\nmsgstr "b"\n')  # one of several may be
    assert read(data=tmp_path / "[de].po") == [("a", "b")]


def test_catalogues_of_several_languages_are_not_mixed(tmp_path):
    po = 'msgid ""\nmsgstr ""\n"Language: {}\\n"\n\nmsgid "Language: all"\nmsgstr "Text {}"\n'
    for number, language in enumerate(("de", "de_AT", "fr")):
        write(tmp_path / f"{number}.po", po.format(language, number))
    assert [target for _, target in read(data=tmp_path / "[01].po")] == ["Text 0", "Text 1"]
    message = read(data=tmp_path / "*.po")
    assert "1.po is in de and " in message and "2.po is in fr: give the catalogues of one language" in message
    for name, language in (("a.ts", '<TS sourcelanguage="en" language="it_IT">'), ("b.ts", '<TS language="es">')):
        write(tmp_path / name, f"<?xml version='1.0'?>{language}</TS>")
    assert "a.ts is in it and " in read(data=tmp_path / "*.ts")
    names = [" ".join(pair_source(data=tmp_path / name).languages) for name in ("a.ts", "b.ts", "[01].po")]
    assert [*names, pair_source(data=tmp_path / "a.ts", **REVERSED).languages[0]] == ["en it", " es", " de", "it"]
    assert "none of the endings" in read(data=write(tmp_path / "d.po.gz", 'msgid "a"\nmsgstr "b"\n'))
