"""Where parallel text may be: many files, folders, saved datasets, the Hub; splits, and rows held out of them."""

import json
from dataclasses import replace
from unittest.mock import Mock

import datasets
import pytest
from conftest import error_of
from pair_files import GERMAN, PAIRS, SWAPPED, in_memory, read, rows, write

from vaswani_transformer.data.parallel_text import held_out_rows, load_pairs, pair_source, random_rows
from vaswani_transformer.data.recipe_data import data_sources, load_training_pairs
from vaswani_transformer.output_folder import OutputFolder
from vaswani_transformer.recipes.recipe import Recipe

# Arguments


@pytest.mark.parametrize("names", [(), ("source",), ("target",), ("source", "data"), ("source", "target", "data")])
def test_anything_but_one_training_set_is_refused(tmp_path, names):
    path = write(tmp_path / "a.tsv", "a\tb\n")
    fix = "give either both text files (source, target) or data"
    assert error_of(load_pairs, **dict.fromkeys(names, path)) == f"given: {', '.join(names) or 'nothing'}; {fix}"


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize(("side", "missing"), [("source", "target"), ("target", "source")])
def test_one_side_without_the_other_is_named(tmp_path, part, side, missing):
    pairs = str(write(tmp_path / "a.tsv", "a\tb\n"))
    recipe = Recipe(**{f"{part}_{side}": "lines.txt"}, train_data=None if part == "train" else pairs)
    fix = f"give both {part}_source and {part}_target, or {part}_data"
    assert error_of(data_sources, recipe) == f"{part}_{missing} is missing: {fix}"
    both = replace(recipe, train_data=pairs, validation_data=pairs)
    assert error_of(data_sources, both).startswith(f"given: {side}, data; give either")


def test_one_column_for_both_sides_is_refused_and_a_file_has_slices(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\nc\td\n")
    assert rows(load_pairs(data=path, config="de-en", split="train[1:]")) == [("c", "d")]
    assert "Unknown split" in error_of(load_pairs, data=path, split="dev[:10]")
    assert "en is both source and target" in error_of(load_pairs, data=path, source_column="en", target_column="en")
    assert f"{path} is both source and target" in error_of(load_pairs, source=path, target=path)
    other = write(tmp_path / "a.de", "a\nb\n")
    for sides in ({"source": path, "target": other}, {"source": other, "target": path}):
        assert f"{path} holds pairs, not lines" in error_of(load_pairs, **sides)
    marked = write(tmp_path / "a.sgm", "<seg>a</seg>\n")  # WMT's
    assert f"{marked} holds pairs, not lines" in error_of(load_pairs, source=marked, target=other)
    marked.unlink()
    assert "a.tsv holds pairs, not lines: give text" in error_of(pair_source, tmp_path, tmp_path, one_text=True)
    path.unlink()
    assert rows(pair_source(tmp_path, tmp_path, one_text=True).load()) == [("a", "a"), ("b", "b")]


@pytest.mark.parametrize("name", ["a.xlsx", "a.txt", "a", "a.gz"])
def test_a_file_of_unknown_format_is_refused(tmp_path, name):
    assert ".po, .xlf or .ts, or text" in error_of(load_pairs, data=write(tmp_path / name, "a\tb\n"))


@pytest.mark.parametrize(
    "name", ["corpus.tsv", "corpus.parquet", "./corpus", "~/no-corpus", "~nobody-of-this-name/a.tsv", "a/b/c", "/no/c"]
)
def test_a_name_that_can_only_be_a_file_is_missing_without_asking_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    assert "No such file or directory" in error_of(load_pairs, data=name)


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


@pytest.mark.parametrize("name", ["plain", "pairs [2024] {a,b}", "wh?t*", "[!x]]"])
@pytest.mark.parametrize("kind", ["txt", "parquet", "tsv", "jsonl.gz"])
def test_shards_are_read_in_the_order_of_their_names(tmp_path, kind, name):
    (tmp_path / name).mkdir()
    arguments = write_shards(tmp_path / name, kind, PARTS)
    expected = [pair for part in PARTS for pair in part]
    assert read(**arguments) == expected
    assert len(pair_source(**arguments).files) == (6 if kind == "txt" else 3)
    if kind != "txt":
        assert read(**arguments | {"data": tmp_path / name}) == expected


def test_shards_that_do_not_pair_match_or_agree_are_refused(tmp_path):
    arguments = write_shards(tmp_path, "txt", PARTS)
    (tmp_path / "part.1.de.gz").unlink()
    message = error_of(load_pairs, **arguments)
    assert "part.*.en.gz matches 3 files and " in message and "part.*.de.gz 2: every file" in message
    (tmp_path / "part.0.en.gz").unlink()  # as many on both sides, and other ones
    assert "of the same name but for its language" in error_of(load_pairs, **arguments)
    missing = error_of(load_pairs, source=tmp_path / "b.*.en", target=tmp_path / "b.*.de")
    assert f"{tmp_path / 'b.*.en'}: No such file" in missing
    for name in ("c.en", "c.e.en", "c.de", "c.e.de"):  # of which the names sort otherwise
        write(tmp_path / name, name[:-3] + "\n")
    assert read(source=tmp_path / "c*.en", target=tmp_path / "c*.de") == [("c", "c"), ("c.e", "c.e")]
    (tmp_path / "s" / "t").mkdir(parents=True)
    for name in ("s/c.en", "s/t/c.x.en", "s/c.de", "s/t/c.x.de"):
        write(tmp_path / name, name[:-3] + "\n")
    texts = [(text, text) for text in ("c", "c.e", "s/c", "s/t/c.x")]  # ** is any number of folders, or none
    assert sorted(read(source=tmp_path / "**/c*.en", target=tmp_path / "**/c*.de")) == texts
    assert len(pair_source(source=tmp_path / "s", target=tmp_path / "s", one_text=True).files) == 2 * 4
    write(tmp_path / "x.tsv", "a\tb\n")
    write(tmp_path / "x.csv", "source,target\na,b\n")
    assert ".csv and .tsv" in error_of(load_pairs, data=tmp_path / "x.*")


def test_a_damaged_shard_is_named_with_its_line_or_row(tmp_path):
    arguments = write_shards(tmp_path, "txt", PARTS)
    write(tmp_path / "part.2.de.gz", "vier\n")
    assert f"part.2.en.gz has more lines than {tmp_path / 'part.2.de.gz'}, which has 1:" in read(**arguments)
    arguments = write_shards(tmp_path, "tsv", PARTS)
    write(tmp_path / "part.2.tsv", "four\tvier\nfive\n")
    assert f"{tmp_path / 'part.2.tsv'}, line 2: 1 field" in read(**arguments)
    write(tmp_path / "part.2.tsv", "")
    assert f"{tmp_path / 'part.2.tsv'}: empty" in read(**arguments)


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        "source\ttarget\nnull\tNA\n\"never closed\tx\ny\tz\"\n",
        "source,target\nnull,NA\n,b\n",
        '{"source": "a", "target": "b"}\n',
        b"a\tb\nc\t\xff\n",
    ],
)  # fmt: skip
def test_a_file_in_a_folder_is_read_as_if_it_were_named(tmp_path, name, content):
    """The same pairs, or the same complaint."""
    (tmp_path / "folder").mkdir()
    path = write(tmp_path / "folder" / name, content)
    expected = read(data=path)
    if isinstance(expected, str) and name == "a.jsonl":
        expected = expected.replace(f"{path}: ", f"{path.parent}: ")
    assert read(data=tmp_path / "folder") == expected


def test_splits_and_slices_of_a_folder(tmp_path):
    lines = [(f"s{number}", f"t{number}") for number in range(10)]
    for name, some in (("train-0", lines[:6]), ("train-1", lines[6:]), ("test-eval", lines[:1])):
        write(tmp_path / f"{name}.tsv", "".join(f"{source}\t{target}\n" for source, target in some))
    cases = {"train": lines, "test": lines[:1], "train[2:8]": lines[2:8], "train[7:]": lines[7:]}
    cases |= {"train[:50%]": lines[:5], "train[-3:]": lines[-3:]}
    cases |= {"test+train[4:6]+train[9:9]": lines[:1] + lines[4:6], "train+test": lines + lines[:1]}
    for split, expected in cases.items():
        assert read(data=tmp_path, split=split) == expected, split
    for split in ("train[10:]", "train[5:5]", "dev", "train+dev[:3]"):
        message = read(data=tmp_path, split=split)
        assert isinstance(message, str) and str(tmp_path) in message
    for name in (".hidden.tsv", "notes.txt"):
        write(tmp_path / name, "a\tb\n")
    assert read(data=tmp_path) == lines
    write(tmp_path / "legal.tsv", "a\tb\n")  # which `datasets` would leave out
    assert "legal.tsv would be left out or trained on, since splits are named train, " in read(data=tmp_path)
    assert len(read(data=tmp_path / "[a-z]*.tsv")) == 12
    (new := tmp_path / "new").mkdir()
    assert all(write(new / name, "a\tb\n") for name in ("Train.tsv", "Test.tsv"))
    assert "Test.tsv would be left out or trained on" in read(data=new)
    (other := tmp_path / "other").mkdir()
    assert all(write(other / name, "a\tb\n") for name in ("train.tsv", "big.csv"))
    assert "big.csv would be left out or trained on" in read(data=other)


def test_what_this_program_wrote_within_a_folder_is_not_its_text(tmp_path):
    write(tmp_path / "corpus.tsv", "a\tb\n")
    (cleaned := tmp_path / "cleaned").mkdir()
    OutputFolder(cleaned).note(["train.parquet"])
    in_memory(SWAPPED).to_parquet(cleaned / "train.parquet")
    assert "train.parquet would be trained on, which this program wrote" in read(data=tmp_path)
    assert rows(load_pairs(data=cleaned)) == SWAPPED


def test_a_folder_is_read_again_after_an_edit(tmp_path):
    for pairs in (PAIRS, SWAPPED):
        in_memory(pairs).to_parquet(tmp_path / "train.parquet")
        assert rows(load_pairs(data=tmp_path)) == pairs
    write(tmp_path / "notes.txt", "Which files are read is what counts.")
    assert pair_source(data=tmp_path).files == (tmp_path / "train.parquet",)


def test_a_folder_of_several_formats_or_none_is_refused(tmp_path):
    assert "doesn't contain any data files" in read(data=tmp_path)
    write(tmp_path / "notes.txt", "not data\n")
    write(tmp_path / "a.tsv", "a\tb\n")
    other = write(tmp_path / "b.jsonl", "")
    message = read(data=tmp_path)
    assert "several formats" in message and ".jsonl, .tsv" in message
    other = other.rename(tmp_path / "b.tsv.bz2")
    assert f"{other} is compressed" in read(data=tmp_path)
    other = other.rename(tmp_path / "newstest2014.tsv")
    assert f"{other} would be left out or trained on" in read(data=tmp_path)
    other.rename(tmp_path / ".b.jsonl")
    assert read(data=tmp_path) == [("a", "b")]


def test_folders_saved_by_datasets_give_the_split(tmp_path):
    features = datasets.Features({"translation": datasets.Translation(["en", "de"])})
    nested = datasets.Dataset.from_list([{"translation": {"en": s, "de": t}} for s, t in PAIRS], features=features)
    nested.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": nested, "valid": nested.select([1])}).save_to_disk(tmp_path / "many")
    assert read(data=tmp_path / "one", **GERMAN) == PAIRS
    assert read(data=tmp_path / "many", split="valid", **GERMAN) == PAIRS[1:2]
    for split, expected in (("train[1:]", PAIRS[1:]), ("train[:1]+train[-1:]", PAIRS[:1] + PAIRS[-1:])):
        assert [read(data=tmp_path / name, split=split, **GERMAN) for name in ("one", "many")] == [expected] * 2
    assert read(data=tmp_path / "many", split="valid+train[:1]", **GERMAN) == PAIRS[1:2] + PAIRS[:1]
    assert "one of ['train', 'valid']" in read(data=tmp_path / "many", split="test", **GERMAN)
    assert data_sources(Recipe(train_data=str(tmp_path / "one"), validation_split="valid"))[1] is None


def test_translations_may_be_into_several_languages(tmp_path):
    rows = [{"translation": {"en": "a", "de": "b"}}, {"translation": {"fr": "x", "de": "d", "en": "c"}}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert read(data=path, **GERMAN) == [("a", "b"), ("c", "d")]


def test_a_file_has_no_configuration_and_no_split_to_validate_on(tmp_path):
    write(tmp_path / "a.tsv", "a\tb\n" * 9)
    fields = {"data_config": "de-en", "data_dir": str(tmp_path)}
    recipe = Recipe(train_data="wmt14", validation_data="a.tsv", **fields)
    assert list(data_sources(recipe)[1].stream()) == [("a", "b")] * 9
    for split, numbers in (("validation", [7, 2]), ("train[5:]", [9, 4])):
        recipe = Recipe(train_data="a.tsv", validation_split=split, validation_size=2, **fields)
        assert list(map(len, load_training_pairs(recipe))) == numbers


def test_a_hub_name_reaches_load_dataset_with_config_and_split(tmp_path, monkeypatch):
    folder, calls, load_dataset = tmp_path / "hub", [], datasets.load_dataset
    folder.mkdir()
    nested = datasets.Features({"translation": datasets.Translation(["de", "en"])})
    examples = [{"translation": {"de": t, "en": s}} for s, t in PAIRS]
    datasets.Dataset.from_list(examples, features=nested).to_parquet(folder / "validation.parquet")

    def fake(name, config=None, **options):
        calls.append((name, config, options))
        return load_dataset(str(folder), **options)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert read(data="wmt14", config="de-en", split="validation", **GERMAN) == PAIRS
    assert set(map(str, calls)) == {str(("wmt14", "de-en", {"split": "validation"}))}
    columns = {"source_column": "de", "target_column": "en"}
    assert read(data="owner/wmt14", split="validation[1:3]", **columns) == SWAPPED[1:3]
    source = pair_source(data="owner/wmt14", split="validation[:50%]", **columns)
    assert rows(source.load()) == SWAPPED[:2] and list(source.stream()) == SWAPPED[:2]


def test_a_hub_dataset_out_of_reach_is_one_line(monkeypatch):
    error = ConnectionError("Couldn't reach 'wmt14' on the Hub\n(LocalEntryNotFoundError)" + " and so on" * 100)
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=error))
    message = read(data="wmt14", config="de-en")
    assert "Hub dataset 'wmt14' (there is no such file or folder here)" in message
    assert "Couldn't reach 'wmt14' on the Hub (LocalEntryNotFoundError)" in message and len(message) < 600


def test_held_out_rows_are_distinct_and_the_same_for_a_seed():
    for number, size in ((5, 4), (1000, 17), (36_000_000, 1000)):
        held_out = held_out_rows(number, size, seed=3)
        assert len(set(held_out.tolist())) == size and held_out.min() >= 0 and held_out.max() < number
        assert (held_out == held_out_rows(number, size, seed=3)).all() and (held_out[1:] > held_out[:-1]).all()
    assert held_out_rows(1000, 17, 3).tolist() != held_out_rows(1000, 17, 4).tolist()
    assert random_rows(10, 10, [1, 1]).tolist() == random_rows(10, 11, 2).tolist() == list(range(10))
