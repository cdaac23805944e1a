"""Text in many files: shards and folders, loaded or streamed, damage in one of them, rows held out."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import error_of
from pair_files import GERMAN, PAIRS, in_memory, rows, write

from vaswani_transformer.data.parallel_text import PairSource, held_out_rows, load_pairs

pytestmark = pytest.mark.usefixtures("cache")


def write_shards(folder, kind, parts):
    """The pairs of each part in a file of its own; what names all of them, and their columns."""
    for number, part in enumerate(parts):
        path = folder / f"part.{number}.{kind}"
        if kind == "txt":
            for side, texts in zip(("en", "de"), zip(*part, strict=True), strict=True):
                write(folder / f"part.{number}.{side}.gz", "".join(text + "\n" for text in texts))
        elif kind == "parquet":
            in_memory(part, ("en", "de")).to_parquet(path)
        elif kind == "tsv":
            write(path, "".join(f"{source}\t{target}\n" for source, target in part))
        else:
            write(path, "".join(json.dumps({"translation": {"en": s, "de": t}}) + "\n" for s, t in part))
    if kind == "txt":
        return {"source": folder / "part.*.en.gz", "target": folder / "part.*.de.gz"}
    return {"data": folder / f"part.*.{kind}", **(GERMAN if kind != "tsv" else {})}


PARTS = [PAIRS[:2], PAIRS[2:], [("four", "vier"), ("five", "fünf")]]


@pytest.mark.parametrize("kind", ["txt", "parquet", "tsv", "jsonl.gz"])
def test_shards_are_read_in_the_order_of_their_names_loaded_or_streamed(tmp_path, kind):
    arguments = write_shards(tmp_path, kind, PARTS)
    expected = [pair for part in PARTS for pair in part]
    assert rows(load_pairs(**arguments)) == expected
    source = PairSource(**arguments)
    assert list(source.stream()) == expected and source.count() == len(expected)
    assert len(source.files()) == (6 if kind == "txt" else 3)


def test_a_stream_gives_what_is_loaded_from_any_source(tmp_path, monkeypatch):
    features = datasets.Features({"translation": datasets.Translation(["en", "de"])})
    nested = datasets.Dataset.from_list([{"translation": {"en": s, "de": t}} for s, t in PAIRS], features=features)
    nested.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": nested}).save_to_disk(tmp_path / "splits")
    nested.to_parquet(tmp_path / "nested.parquet")
    (tmp_path / "folder").mkdir()
    for number in range(2):
        in_memory(PAIRS, ("en", "de")).to_parquet(tmp_path / f"folder/train-{number}.parquet")
    load_dataset = datasets.load_dataset
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, *rest, **options: load_dataset(name.replace("owner/", ""), **options)
    )
    cases = [
        (PAIRS, {"data": tmp_path / "saved"}),
        (PAIRS, {"data": tmp_path / "splits"}),
        (PAIRS, {"data": tmp_path / "nested.parquet"}),
        (PAIRS + PAIRS, {"data": tmp_path / "folder"}),
        ((PAIRS + PAIRS)[2:5], {"data": tmp_path / "folder", "split": "train[2:5]"}),
        ((PAIRS + PAIRS)[4:], {"data": tmp_path / "folder", "split": "train[4:]"}),
        (PAIRS + PAIRS, {"data": "owner/folder"}),  # what `datasets` does with a name on the Hub
    ]
    for expected, arguments in cases:
        source = PairSource(**arguments, **GERMAN)
        assert rows(source.load()) == expected and list(source.stream()) == expected
        assert source.count() == len(expected)
    assert "cannot be streamed" in error_of(
        list, PairSource(data=tmp_path / "folder", split="train[:50%]", **GERMAN).stream()
    )


def test_a_stream_holds_little_of_a_file_in_memory(tmp_path):
    """Row groups of a Parquet file and lines of a text come and go."""
    pq.write_table(
        pa.table({name: ["x" * 1000] * 40_000 for name in ("source", "target")}), tmp_path / "a.parquet",
        row_group_size=2000, use_dictionary=False, compression="none",
    )  # fmt: skip
    before, most = pa.total_allocated_bytes(), 0
    for _ in PairSource(data=tmp_path / "a.parquet").stream():
        most = max(most, pa.total_allocated_bytes())
    assert most - before < 20_000_000, "of 80 MB"


def test_shards_that_do_not_pair_match_or_agree_are_refused(tmp_path):
    arguments = write_shards(tmp_path, "txt", PARTS)
    (tmp_path / "part.1.de.gz").unlink()
    message = error_of(load_pairs, **arguments)
    assert "part.*.en.gz matches 3 files and " in message and "part.*.de.gz matches 2 files" in message
    assert f"no file matches {tmp_path / 'b.*.en'}" in error_of(
        load_pairs, source=tmp_path / "b.*.en", target=tmp_path / "b.*.de"
    )
    write(tmp_path / "x.tsv", "a\tb\n")
    write(tmp_path / "x.csv", "source,target\na,b\n")
    assert "several formats" in error_of(load_pairs, data=tmp_path / "x.*")


def test_shards_without_a_partner_are_refused_and_others_paired_in_order(tmp_path):
    """As many on both sides, so that in order what follows the gap would be paired wrongly."""
    arguments = write_shards(tmp_path, "txt", PARTS)
    (tmp_path / "part.0.de.gz").unlink()
    (tmp_path / "part.2.en.gz").unlink()
    assert f"{tmp_path / 'part.1.en.gz'}" not in error_of(load_pairs, **arguments)
    assert f"{tmp_path / 'part.0.en.gz'} has no partner among" in error_of(load_pairs, **arguments)
    for side, names in (("en", ("a", "b")), ("de", ("x", "y"))):
        for name in names:
            write(tmp_path / f"{name}.{side}", f"{name}\n")
    assert rows(load_pairs(source=tmp_path / "*.en", target=tmp_path / "*.de")) == [("a", "x"), ("b", "y")]


def test_a_folder_of_several_formats_is_refused(tmp_path):
    in_memory(PAIRS).to_parquet(tmp_path / "a.parquet")
    in_memory(PAIRS).to_json(tmp_path / "b.jsonl")
    source = PairSource(data=tmp_path)
    for message in (error_of(source.load), error_of(list, source.stream())):
        assert "several formats" in message and "a.parquet" in message and "b.jsonl" in message
    (tmp_path / "b.jsonl").rename(tmp_path / ".b.jsonl")
    assert rows(source.load()) == list(source.stream()) == PAIRS


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.csv"])
def test_a_folder_is_read_as_its_files_are(tmp_path, name):
    separator = "," if "csv" in name else "\t"
    lines = [("source", "target"), ("null", "NA"), ("b c", "d")]
    lines += [] if "csv" in name else [('"never closed', "x"), ("y", 'z"'), ('" e', 'f "g" h')]
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / name, "".join(separator.join(line) + "\n" for line in lines))
    [one, *_] = sources = PairSource(data=tmp_path / "folder" / name), PairSource(data=tmp_path / "folder")
    for source in sources:
        assert rows(source.load()) == list(source.stream()) == lines[1:], source
    assert one.kind != sources[1].kind


def test_a_damaged_shard_is_named_with_its_line_or_row(tmp_path):
    def both(part, arguments):
        messages = [error_of(load_pairs, **arguments), error_of(list, PairSource(**arguments).stream())]
        assert all(part in message for message in messages), messages

    arguments = write_shards(tmp_path, "txt", PARTS)
    write(tmp_path / "part.2.de.gz", "vier\n")
    both(f"{tmp_path / 'part.2.en.gz'} has 2 lines and {tmp_path / 'part.2.de.gz'} has 1", arguments)
    arguments = write_shards(tmp_path, "parquet", PARTS)
    pq.write_table(pa.table({"en": ["a", "b", None], "de": ["a", "b", "c"]}), tmp_path / "part.1.parquet")
    both(f"{tmp_path / 'part.1.parquet'}: column 'en' is null, not a string, in row 3", arguments)
    pq.write_table(pa.table({"en": [1], "de": ["a"]}), tmp_path / "part.1.parquet")
    both(f"{tmp_path / 'part.1.parquet'}: column 'en' is ", arguments)
    pq.write_table(pa.table({"en": ["a"], "fr": ["a"]}), tmp_path / "part.1.parquet")
    both(f"{tmp_path / 'part.1.parquet'}: there is no column 'de'; the columns are: en, fr", arguments)
    content = (tmp_path / "part.2.parquet").read_bytes()
    (tmp_path / "part.1.parquet").write_bytes(content[:-20])
    both(f"{tmp_path / 'part.1.parquet'} could not be loaded", arguments)
    pq.write_table(
        pa.table({"en": pa.array([], pa.string()), "de": pa.array([], pa.string())}), tmp_path / "part.1.parquet"
    )
    both(f"{tmp_path / 'part.1.parquet'}: empty, no rows", arguments)
    (tmp_path / "part.1.parquet").write_bytes(content)
    arguments = write_shards(tmp_path, "tsv", PARTS)
    write(tmp_path / "part.2.tsv", "four\tvier\nfive\n")
    both(f"{tmp_path / 'part.2.tsv'}, line 2: 1 field", arguments)
    write(tmp_path / "part.2.tsv", "")
    both(f"{tmp_path / 'part.2.tsv'}: empty", arguments)


def test_held_out_rows_are_distinct_and_the_same_for_a_seed():
    for number, size in ((5, 4), (1000, 17), (36_000_000, 1000)):
        held_out = held_out_rows(number, size, seed=3)
        assert len(set(held_out.tolist())) == size and held_out.min() >= 0 and held_out.max() < number
        assert (held_out == held_out_rows(number, size, seed=3)).all() and (held_out[1:] > held_out[:-1]).all()
    assert held_out_rows(1000, 17, 3).tolist() != held_out_rows(1000, 17, 4).tolist()
    counts = [sum(row in held_out_rows(4, 2, seed) for seed in range(400)) for row in range(4)]
    assert all(130 < count < 270 for count in counts), "every row as often"
