"""Text and pairs that are hostile or mistaken: one line, a status, little memory, and nothing written is lost."""

import gzip
import json
import os
import struct

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import translating
from children import limit_memory, run_in_child
from conftest import error_of
from pair_files import read, write, write_two

from vaswani_transformer.cli import options
from vaswani_transformer.cli.main import main
from vaswani_transformer.data import text_files
from vaswani_transformer.data.text_files import LONGEST_LINE, has_undecoded, read_lines
from vaswani_transformer.hardware import MOST_WORKERS

model = translating.model


@pytest.fixture
def refused(tmp_path):
    """Runs a command in a process with little memory; returns the one line by which it refuses what it was given."""

    def run(*words, before=lambda: None) -> str:
        status, error = run_in_child(words, tmp_path, lambda: (limit_memory(2 << 30), before()))
        lines = [line for line in error.replace("\r", "\n").splitlines() if "/s]" not in line and line.strip()]
        assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), (status, error[-2000:])
        return lines[0]

    return run


def long_line(folder, name, before=b""):
    """A file of a line of 8 MB, where `name` says so in little space."""
    path = folder / name
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(before)
        for _ in range(8):
            file.write(b"hello 00" * (1 << 17))
    return path


@pytest.mark.parametrize(("name", "how"), [("long.gz", "split"), ("long.txt", "refuse")])
def test_a_line_without_end_is_refused_before_it_is_in_memory(refused, model, tmp_path, name, how):
    path = long_line(tmp_path, name, b"a dog\n")
    line = refused("translate", model, "--input", path, "--long-lines", how)
    assert f"{path}, line 2: more than {LONGEST_LINE:,} characters" in line and not (tmp_path / "stdout").read_text()


@pytest.mark.parametrize("letter", ["a", "😀"])
def test_the_limit_counts_characters_and_not_bytes(tmp_path, monkeypatch, letter):
    monkeypatch.setattr(text_files, "LONGEST_LINE", 10)
    monkeypatch.setattr(text_files, "_MOST_BYTES", 46)
    path = write(tmp_path / "a", "\ufeff" + letter * 10 + "\r\n" + letter * 9 + "\n")
    assert list(read_lines(path)) == [letter * 10, letter * 9]
    for count in (11, 12, 13, 50, 1000):
        write(path, "ok\n" + letter * count + "\nok\n")
        assert f"{path}, line 2: more than 10 characters" in error_of(list, read_lines(path))


def test_a_long_field_of_a_table_is_refused_with_its_row(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"source": ["a", "x" * (LONGEST_LINE + 1)], "target": ["b", "c"]}), path)
    assert f"{path}: 'source' has a text of 1,000,001 characters" in read(data=path)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"a\nb\n")[:-6], gzip.compress(b"a\n") + b"rest", b"a\nb\n", b""],
    ids=["cut off", "with a rest", "text", "empty"],
)
def test_a_damaged_gz_is_refused_and_an_empty_file_has_no_line(tmp_path, content):
    path = tmp_path / "a.gz"
    path.write_bytes(content)
    if content:
        assert str(path) in error_of(list, read_lines(path))
    else:
        assert list(read_lines(path)) == []


def test_pairs_from_a_pipe_are_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe or a device" in read(data=tmp_path / "pipe")
    files = write_two(tmp_path, "a\n", "b\n")
    assert "is a pipe or a device" in read(**{**files, "target": tmp_path / "pipe"})


CHANGES = {
    "grows": lambda path: write(path, path.read_text() + "one more\n"),
    "shrinks": lambda path: os.truncate(path, 4),
    "vanishes": os.unlink,
}


@pytest.mark.parametrize("how", ["grows", "shrinks"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, how):
    path = write(tmp_path / "a", "".join(f"line {number}\n" for number in range(100_000)))
    lines = read_lines(path)
    assert next(lines) == "line 0"
    CHANGES[how](path)
    assert f"{path} has changed while it was read" in error_of(list, lines)


@pytest.mark.parametrize("how", ["grows", "vanishes"])
def test_translate_notices_a_change_after_it_has_counted_the_lines(refused, model, tmp_path, how):
    path, output = write(tmp_path / "a", "a dog\ntwo cats\n"), tmp_path / "out"
    load = options.Computing.load

    def change_before_loading():
        options.Computing.load = lambda *given, **more: (CHANGES[how](path), load(*given, **more))[1]

    problem = ": No such file" if how == "vanishes" else " has changed while it was read"
    line = refused("translate", model, "--input", path, "--output", output, before=change_before_loading)
    assert f"{path}{problem}" in line


def test_a_pair_of_surrogates_in_json_is_a_letter(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps({"source": "😀", "target": "b"}) + "\n")
    assert "\\ud83d" in path.read_text() and read(data=path) == [("😀", "b")]
    assert has_undecoded("a\ud83d") and not has_undecoded("😀\0\x7f\xa0")


def test_offsets_beyond_the_text_are_refused(tmp_path):
    """In a damaged folder of `datasets`: pyarrow would read strings outside of the file, and crash."""
    pairs = {"source": ["sources"] * 3, "target": ["a", "b", "c"]}
    datasets.Dataset.from_dict(pairs).save_to_disk(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.arrow")
    content = path.read_bytes()
    damaged = content.replace(struct.pack("<4i", 0, 7, 14, 21), struct.pack("<4i", 0, 7, 2**31 - 1, 21))
    assert damaged != content
    path.write_bytes(damaged)
    assert "saved: Column 0" in read(data=tmp_path / "saved")


@pytest.mark.parametrize("number", [-1, MOST_WORKERS + 1])
@pytest.mark.parametrize("words", ["train small --data-workers", "translate m --input a --output o --workers"])
def test_an_option_asks_for_no_more_processes_than_a_machine_has(tmp_path, monkeypatch, capsys, words, number):
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), str(number)]) == 2
    error = capsys.readouterr().err
    assert str(number) in error and error.count("\n") == 1
    assert f"to {MOST_WORKERS}" in error or f"Must be {'>= 1' if number < 0 else f'<= {MOST_WORKERS}'}" in error
