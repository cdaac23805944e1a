"""Text and pairs that are hostile or mistaken: one line, a status, little memory, and nothing written is lost."""

import gzip
import json
import os
import socket
import struct
import tempfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import error_of
from model_folders import write_model
from pair_files import read, write, write_two

from vaswani_transformer.data import text_files
from vaswani_transformer.data.parallel_text import load_pairs
from vaswani_transformer.data.text_files import LONGEST_LINE, has_undecoded, read_lines, scan_text
from vaswani_transformer.hardware import MOST_WORKERS, check_workers

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def commands(forked):
    """Commands in processes of 6 GB of address space at most."""
    return forked.having(memory=6 << 30, HF_HUB_OFFLINE="1")


def refusal(done) -> str:
    """The one line of a command that refused what it was given."""
    lines = [line for line in done.err.replace("\r", "\n").splitlines() if "sentences" not in line and line.strip()]
    assert done.status == 2 and len(lines) == 1 and lines[0].startswith("error: "), (done.status, done.err[-2000:])
    return lines[0]


# Long lines


def long_line(folder, name, before=b""):
    """A file of a line of 8 MB, where `name` says so in little space."""
    path = folder / name
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(before)
        for _ in range(8):
            file.write(b"hello 00" * (1 << 17))
    return path


@pytest.mark.parametrize(("name", "how"), [("long.gz", "split"), ("long.txt", "refuse")])
def test_a_line_without_end_is_refused_before_it_is_in_memory(commands, model, tmp_path, name, how):
    path = long_line(tmp_path, name, b"a dog\n")
    done = commands.vaswani("translate", model, "--input", path, "--long-lines", how)
    assert f"{path}, line 2: more than {LONGEST_LINE:,} characters" in refusal(done) and done.out == ""


@pytest.mark.parametrize("reader", [["score"], ["evaluate"], ["tokenizer"], ["prepare"]], ids=str)
def test_every_command_refuses_it_with_its_place(commands, model, tmp_path, reader):
    path, out = long_line(tmp_path, "long.gz"), tmp_path / "out"
    words = {
        "score": ["score", model, "--source", path, "--target", path],
        "evaluate": ["evaluate", model, "--source", path, "--reference", path],
        "tokenizer": ["tokenizer", path, "--output", out],
        "prepare": ["prepare", "small", "--train-source", path, "--train-target", path, "--output", out],
    }[reader[0]]
    assert f"{path}, line 1: more than" in refusal(commands.vaswani(*words))


def test_lines_of_a_pipe_before_a_long_one_stay(commands, model, tmp_path):
    """Through `os.pipe` in the forked process, whose standard input is not the test's."""
    code = f"""
import os, sys, threading
from vaswani_transformer.cli.main import main
end, start = os.pipe()
os.dup2(end, 0)
def fill():
    with os.fdopen(start, "wb") as stream:
        stream.write(b"a dog\\ntwo cats\\n" + b"x" * 6_000_000)
threading.Thread(target=fill, daemon=True).start()
status = main(["translate", {str(model)!r}, "--window", "2"])
sys.stdout.flush(); sys.stderr.flush()
os._exit(status)
"""
    done = commands.python(code)
    assert "standard input, line 3: more than" in refusal(done)
    assert done.out.count("\n") == 2 and all(done.out.splitlines())


@pytest.mark.parametrize("letter", ["a", "ä", "€", "😀"])
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
    assert f"{path}, row 2: 'source' has 1,000,001 characters" in read(data=path)


# Files that are not what they should be


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"a\nb\n")[:-6], gzip.compress(b"a\n") + b"rest", b"a\nb\n", b""],
    ids=["cut off", "with a rest", "text", "empty"],
)
def test_a_damaged_gz_is_refused_and_an_empty_file_has_no_line(tmp_path, content):
    path = tmp_path / "a.gz"
    path.write_bytes(content)
    if content:
        assert "is not a whole gzip file" in error_of(list, read_lines(path))
    else:
        assert list(read_lines(path)) == []


def test_members_of_a_gz_follow_each_other(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"c\n") + bytes(20))
    assert list(read_lines(path)) == ["a", "bc"]


def _fifo(path):
    os.mkfifo(path)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("make", [_fifo, _socket])
@pytest.mark.parametrize("side", ["source", "target"])
def test_training_text_is_a_file_since_it_is_read_twice(tmp_path, monkeypatch, make, side):
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    files = write_two(tmp_path, "a\n", "b\n")
    files[side].unlink()
    make(files[side].name)
    assert f"{files[side]} is a pipe or a device" in read(**files)  # and does not wait for a writer


def test_pairs_from_a_pipe_are_refused_and_not_waited_for(tmp_path):
    _fifo(tmp_path / "pipe")
    assert "is a pipe or a device" in read(data=tmp_path / "pipe")


def test_attention_does_not_read_a_pipe_twice(commands, model, tmp_path):
    _fifo(tmp_path / "pipe")
    done = commands.vaswani("attention", model, "--report", tmp_path / "pipe", "--output", tmp_path / "out")
    assert "is a pipe or a device" in refusal(done) and not (tmp_path / "out").exists()


def test_a_file_that_must_not_be_read(commands):
    folder = tempfile.TemporaryDirectory()  # not in pytest's, which only its user may enter
    files = write_two(Path(folder.name), "a\n", "b\n")
    for path, mode in ((Path(folder.name), 0o755), (files["source"], 0o644), (files["target"], 0)):
        path.chmod(mode)
    code = f"""
import os
if os.geteuid() == 0:
    os.seteuid(65534)
from vaswani_transformer.data.parallel_text import pair_source
from vaswani_transformer.errors import UserError
try:
    pair_source(source={str(files["source"])!r}, target={str(files["target"])!r})
except UserError as error:
    print(error)
"""
    done = commands.python(code)
    folder.cleanup()
    assert done.out == f"{files['target']} cannot be read (Permission denied); check name and access\n", done.err


# Files that change


def change(path, how):
    if how == "grows":
        with path.open("a") as file:
            file.write("one more\n")
    elif how == "shrinks":
        os.truncate(path, 4)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["grows", "shrinks"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, how):
    path = write(tmp_path / "a", "".join(f"line {number}\n" for number in range(100_000)))
    lines = read_lines(path)
    assert next(lines) == "line 0"
    change(path, how)
    assert f"{path} has changed while it was read" in error_of(list, lines)


def test_a_file_that_vanishes_is_read_to_its_end_where_it_is_open(tmp_path):
    path = write(tmp_path / "a", "1\n2\n")
    lines = read_lines(path)
    assert next(lines) == "1"
    path.unlink()
    assert list(lines) == ["2"]


@pytest.mark.parametrize("how", ["grows", "shrinks", "vanishes"])
def test_translate_notices_a_change_after_it_has_counted_the_lines(commands, model, tmp_path, how):
    path, output = write(tmp_path / "a", "a dog\ntwo cats\n"), tmp_path / "out"
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from pathlib import Path
import vaswani_transformer.cli.translate as translate
from test_text_inputs import change
from vaswani_transformer.cli.main import main
load = translate.load_for_decoding
translate.load_for_decoding = lambda arguments: change(Path({str(path)!r}), {how!r}) or load(arguments)
sys.exit(main(["translate", {str(model)!r}, "--input", {str(path)!r}, "--output", {str(output)!r}]))
"""
    problem = "cannot be read" if how == "vanishes" else "has changed while it was read"
    assert f"{path} {problem}" in refusal(commands.python(code))


# Tables


@pytest.mark.parametrize(
    ("name", "header"),
    [("a.tsv", "source\ttarget\tsource"), ("a.csv", "source,target,source"), ("a.tsv", "target\tid\tsource\ttarget")],
)
def test_a_column_that_is_there_twice_is_refused_with_its_line(tmp_path, name, header):
    sign, column = ("\t" if "tsv" in name else ","), max(header.replace(",", "\t").split("\t"), key=header.count)
    row = sign.join("abcd"[: header.count(sign) + 1])
    path = write(tmp_path / name, f"{header}\n{row}\n")
    assert f"{path}, line 1: there are several columns {column!r}" in read(data=path)


def test_other_columns_may_share_a_name(tmp_path):
    path = write(tmp_path / "a.csv", ",,source,target\n1,2,a,b\n")
    assert read(data=path) == [("a", "b")]


def test_a_parquet_column_that_is_there_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], ["source", "target", "source"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "there are several columns 'source'" in read(data=tmp_path / "a.parquet")


GOOD = '{"source": "a", "target": "b"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"source": "a", "target": "b", "source": "c"}', "'source' is there twice"),
        ('{"translation": {"source": "a", "target": "b", "target": "c"}}', "'target' is there twice"),
        ('{"source": "a", "target": "\\ud800"}', "'target' holds half of a surrogate pair"),
        ('{"source": "a", "target": "b", "id": ' + "9" * 5000 + "}", "not JSON lines"),
        ('{"source": "a", "target": ' + "[" * 200_000, "not JSON lines"),
        ('{"source": NaN, "target": "b"}', "'source' holds nan"),
        ("5", "not JSON lines (int, not an object)"),
    ],
    ids=lambda value: value[:40],
)
def test_json_that_is_not_pairs_is_refused_with_its_line(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", GOOD + line + "\n")
    answer = read(data=path)
    assert f"{path}, line 2: " in answer and message in answer and len(answer) < 1000


def test_a_pair_of_surrogates_in_json_is_a_letter(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps({"source": "😀", "target": "b"}) + "\n")
    assert "\\ud83d" in path.read_text() and read(data=path) == [("😀", "b")]
    assert has_undecoded("a\ud83d") and not has_undecoded("😀\0\x7f\xa0")


@pytest.fixture(scope="module")
def not_utf8():
    """A table of three rows, the second of which is damaged."""
    bad = pa.array([b"a", b"\xff\xfe", b"c"], pa.binary()).view(pa.string())
    return pa.table({"source": bad, "target": ["a", "b", "c"]})


@pytest.mark.parametrize("before", [0, 2500])
def test_strings_that_are_not_utf8_are_refused_with_their_row(tmp_path, not_utf8, before):
    good = pa.table({"source": ["a"] * before, "target": ["b"] * before}, not_utf8.schema)
    table = pa.concat_tables([good, not_utf8])
    pq.write_table(table, tmp_path / "a.parquet")
    assert f"a.parquet, row {before + 2}: damaged, or not valid UTF-8" in read(data=tmp_path / "a.parquet")
    datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(tmp_path / "saved")
    assert f"saved, row {before + 2}: damaged, or not valid UTF-8" in read(data=tmp_path / "saved")


def test_offsets_beyond_the_text_are_refused_with_their_row(tmp_path):
    """In a damaged folder of `datasets`: pyarrow would read strings outside of the file, and crash."""
    pairs = {"source": ["sources"] * 3, "target": ["a", "b", "c"]}
    datasets.Dataset.from_dict(pairs).save_to_disk(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.arrow")
    content = path.read_bytes()
    damaged = content.replace(struct.pack("<4i", 0, 7, 14, 21), struct.pack("<4i", 0, 7, 2**31 - 1, 21))
    assert damaged != content
    path.write_bytes(damaged)
    assert "saved, row 2: damaged" in read(data=tmp_path / "saved")


def test_a_table_of_very_many_columns_is_refused_in_seconds(tmp_path):
    path = write(tmp_path / "a.tsv", "\t".join(f"c{n}" for n in range(100_000)) + "\n")
    message = error_of(load_pairs, data=path, source_column="x", target_column="y")
    assert "no column 'x'" in message and len(message) < 1000


@pytest.mark.parametrize("name", ["none*.parquet", "no?.en"])
def test_a_pattern_that_matches_nothing(tmp_path, name):
    assert "no file matches" in read(data=tmp_path / name)


def test_a_scan_remembers_what_it_read(tmp_path):
    path = write(tmp_path / "a.gz", "1\n2\n")
    scan = scan_text(path)
    assert scan.lines == 2 and list(read_lines(path, stamp=scan.stamp)) == ["1", "2"]
    write(path, "1\n2\n3\n")
    assert "has changed" in error_of(list, read_lines(path, stamp=scan.stamp))


def test_alignments_with_huge_numbers_are_refused_with_their_line(tmp_path):
    from vaswani_transformer.attention.heads import read_links

    path = write(tmp_path / "a", "0-0\n0-" + "9" * 5000 + "\n")
    assert f"{path}, line 2: " in error_of(list, read_links(path))


# Numbers of processes and threads; nothing is started: a machine that lacks the check would be flooded


@pytest.mark.parametrize("number", [-1, MOST_WORKERS + 1, 100_000])
@pytest.mark.parametrize(
    "words",
    [
        "train small --data-workers",
        "parse train --trees t --dev d --output o --data-workers",
        "prepare small --train-source a --train-target b --output o --workers",
        "translate m --input a --output o --workers",
    ],
)
def test_an_option_asks_for_no_more_processes_than_a_machine_has(tmp_path, monkeypatch, capsys, words, number):
    from vaswani_transformer.cli.main import main
    from vaswani_transformer.data import prepare
    from vaswani_transformer.training import run

    def never(*arguments, **options):
        raise AssertionError("it was about to start")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.TrainingRun, "_run", never)
    monkeypatch.setattr(prepare, "data_sources", never)
    assert main([*words.split(), str(number)]) == 2
    error = capsys.readouterr().err
    assert str(number) in error and f"to {MOST_WORKERS}" in error and error.count("\n") == 1


def test_threads_of_an_exported_model_have_the_same_bound():
    check_workers("threads", 0, least=0)
    assert f"from 0 to {MOST_WORKERS}" in error_of(check_workers, "threads", 100_000, least=0)
