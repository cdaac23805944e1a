"""Loading parallel text from every format, its errors, and tokenisation with filters and a cache."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from vaswani_transformer.data import FilterCounts, PairSource, held_out_rows, load_pairs, pair_lengths, tokenize_pairs
from vaswani_transformer.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
MULTI30K = ROOT.parent / "shared/data/multi30k"
PAIRS = [("a dog runs", "ein Hund läuft"), ("two cats", "zwei Katzen"), ('he said "no', "er sagte „nein'")]
SWAPPED = [(target, source) for source, target in PAIRS]
REVERSED = {"source_column": "target", "target_column": "source"}
GERMAN = {"source_column": "en", "target_column": "de"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Keep the user's cache untouched."""
    folder = tmp_path_factory.mktemp("datasets-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        yield folder


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make_tokenizer(merges=40):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "special_tokens": ["<pad>", "</s>"], "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + 2 + merges, **options)
    backend.train_from_iterator([text for pair in PAIRS for text in pair], trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


class CountingTokenizer:
    """Stands in for a tokenizer and counts the texts that it tokenises."""

    def __init__(self, tokenizer):
        self.tokenizer, self.texts = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, texts):
        self.texts += len(texts)
        return self.tokenizer(texts)


def write(path, content):
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_two(folder, source, target, suffix=""):
    return {
        "source": write(folder / f"a.en{suffix}", source),
        "target": write(folder / f"a.de{suffix}", target),
    }


def rows(dataset):
    assert dataset.features == {"source": datasets.Value("string"), "target": datasets.Value("string")}
    assert dataset.column_names == ["source", "target"]
    assert dataset.cache_files, "not memory-mapped"
    return list(zip(dataset["source"], dataset["target"], strict=True))


def in_memory(pairs, names=("source", "target")):
    return datasets.Dataset.from_dict({name: [pair[side] for pair in pairs] for side, name in enumerate(names)})


def error_of(function, *arguments, **options):
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


# Shards and streams


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


# Tokenisation


def test_tokenised_pairs_have_int32_columns_lengths_with_the_end_token_and_a_file_on_disk(tokenizer, cache):
    tokenized, counts = tokenize_pairs(in_memory([*PAIRS, ("", "leer")]), tokenizer)
    ids, length = datasets.List(datasets.Value("int32")), datasets.Value("int32")
    assert tokenized.features == {"input_ids": ids, "labels": ids, "source_length": length, "target_length": length}
    for row, (source, target) in zip(tokenized, PAIRS, strict=True):
        assert row["input_ids"] == tokenizer(source)["input_ids"] and row["labels"] == tokenizer(target)["input_ids"]
        assert row["input_ids"][-1] == row["labels"][-1] == tokenizer.eos_token_id
        assert (row["source_length"], row["target_length"]) == (len(row["input_ids"]), len(row["labels"]))
    assert (counts.read, counts.kept, counts.empty) == (4, 3, 1)
    assert Path(tokenized.cache_files[0]["filename"]).is_relative_to(cache)


def test_counts_are_one_readable_line():
    counts = FilterCounts(29000, 28731, 12, 210, 47, max_length=256, max_length_ratio=3.0)
    text = "29,000 pairs read, 28,731 kept; dropped: 12 empty, 210 longer than 256 tokens"
    assert str(counts) == text + ", 47 with a length ratio above 3.0"
    assert str(FilterCounts(29000, 28731, 12, 210, 0, 256, None)) == text


def test_limits_are_inclusive_and_the_ratio_can_be_switched_off(tokenizer):
    texts = ["".join("ZQXJ"[i % 4] for i in range(n)) for n in range(10)]  # letters not in the training text: n tokens
    assert [len(ids) - 1 for ids in tokenizer(texts)["input_ids"]] == list(range(10))
    pairs = in_memory([(texts[a], texts[b]) for a, b in [(2, 6), (6, 2), (2, 7), (7, 2), (8, 8), (8, 9), (9, 8)]])
    tokenized, counts = tokenize_pairs(pairs, tokenizer, max_length=9, max_length_ratio=3)
    assert list(zip(tokenized["source_length"], tokenized["target_length"], strict=True)) == [(3, 7), (7, 3), (9, 9)]
    assert (counts.too_long, counts.ratio) == (2, 2)
    for off in (None, 0):
        assert tokenize_pairs(pairs, tokenizer, max_length=9, max_length_ratio=off)[1].kept == 5


TEXTS = st.one_of(
    st.sampled_from(["", " ", "\u2028", "\x0b", "a dog", "</s>", "two cats " * 3]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=12),
    max_length=st.integers(2, 20),
    max_length_ratio=st.sampled_from([None, 0, 1.0, 1.5, 3]),
)
def test_filters_equal_a_plain_reference(tokenizer, pairs, max_length, max_length_ratio):
    kept = []
    for source, target in pairs:
        ids, labels = tokenizer(source)["input_ids"], tokenizer(target)["input_ids"]
        if source.strip() and target.strip() and len(ids) <= max_length and len(labels) <= max_length:
            s, t = len(ids) - 1, len(labels) - 1
            if not max_length_ratio or max(s / t, t / s) <= max_length_ratio:
                kept.append((ids, labels))
    options = {"max_length": max_length, "max_length_ratio": max_length_ratio}
    if not kept:
        assert f"{len(pairs)} pairs read, 0 kept" in error_of(tokenize_pairs, in_memory(pairs), tokenizer, **options)
        return
    tokenized, counts = tokenize_pairs(in_memory(pairs), tokenizer, **options)
    assert list(zip(tokenized["input_ids"], tokenized["labels"], strict=True)) == kept
    assert counts.read == len(pairs) and counts.kept == len(kept) == len(tokenized)
    assert counts.kept + counts.empty + counts.too_long + counts.ratio == counts.read
    assert max(tokenized["source_length"][:] + tokenized["target_length"][:]) <= max_length


def test_lengths_of_filtered_sliced_and_plain_pairs(tokenizer):
    pairs = in_memory([*PAIRS, ("", "leer"), *PAIRS, *PAIRS])
    tokenized, _ = tokenize_pairs(pairs, tokenizer)
    plain, _ = tokenize_pairs(in_memory(PAIRS), tokenizer)
    for some in (
        tokenized,
        tokenized.select(range(2, 6)),
        tokenized.select([5, 0, 3]),
        plain,
        plain.select(range(1, 3)),
    ):
        source, target = pair_lengths(some)
        assert source.tolist() == some["source_length"][:] and target.tolist() == some["target_length"][:]


def test_nothing_left_is_refused_with_the_counts(tokenizer):
    pairs = in_memory([("", "a"), ("a", " "), ("a" * 99, "b" * 99)])
    message = error_of(tokenize_pairs, pairs, tokenizer, max_length=5)
    assert "3 pairs read, 0 kept; dropped: 2 empty, 1 longer than 5 tokens" in message


@pytest.mark.parametrize("options", [{"max_length": 1}, {"max_length_ratio": 0.5}, {"max_length_ratio": float("nan")}])
def test_impossible_limits_are_refused(tokenizer, options):
    assert next(iter(options)) in error_of(tokenize_pairs, in_memory(PAIRS), tokenizer, **options)


def test_no_pairs_and_a_tokenizer_without_end_token_are_refused():
    plain = make_tokenizer(merges=5)
    plain.backend_tokenizer.post_processor = processors.ByteLevel()
    assert "end token" in error_of(tokenize_pairs, in_memory(PAIRS), plain)
    assert "no pairs" in error_of(tokenize_pairs, in_memory([]), plain)


# The cache of the token ids


def test_the_cache_serves_the_same_call_only(tmp_path):
    first = load_pairs(**write_two(tmp_path, "a dog\n\n", "ein Hund\nx\n"))
    counting = CountingTokenizer(make_tokenizer())
    expected, counts = tokenize_pairs(first, counting)
    assert counting.texts == 4
    counting.tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)  # leaves its options in the backend
    again, counts_again = tokenize_pairs(first, counting, description="Once more")
    assert counting.texts == 4 and counts_again == counts and again[:] == expected[:]
    assert again._fingerprint == expected._fingerprint

    tokenize_pairs(first, counting, max_length=100)
    tokenize_pairs(first, counting, max_length_ratio=None)
    assert counting.texts == 12, "other limits"
    tokenize_pairs(load_pairs(**write_two(tmp_path, "a cat\n\n", "ein Hund\nx\n")), counting)
    assert counting.texts == 16, "another file"
    other = CountingTokenizer(make_tokenizer(merges=3))
    tokenize_pairs(first, other)
    assert other.texts == 4, "another tokenizer"


def test_a_folder_from_save_to_disk_stays_untouched(tmp_path, tokenizer):
    in_memory(PAIRS).save_to_disk(tmp_path / "saved")
    before = sorted(tmp_path.rglob("*"))
    tokenize_pairs(load_pairs(data=tmp_path / "saved"), tokenizer)
    assert sorted(tmp_path.rglob("*")) == before


SECOND_PROCESS = """
import json, sys, types
package = types.ModuleType("vaswani_transformer")  # stands in for __init__.py, which takes seconds to import PyTorch
package.__path__ = [sys.argv.pop(1)]
sys.modules[package.__name__] = package
from transformers import PreTrainedTokenizerFast
from vaswani_transformer.data import load_pairs, tokenize_pairs

def refuse(*arguments, **options):
    raise SystemExit("tokenised again")

tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
PreTrainedTokenizerFast.__call__ = refuse
for arguments in sys.argv[2:]:
    tokenized, counts = tokenize_pairs(load_pairs(**json.loads(arguments)), tokenizer)
    print(json.dumps([str(counts), tokenized._fingerprint, tokenized[:]]))
"""


def test_a_new_process_reuses_the_pairs_and_the_token_ids(tmp_path, tokenizer, cache):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "folder").mkdir()
    in_memory(PAIRS).to_parquet(tmp_path / "folder/train.parquet")
    in_memory(PAIRS).save_to_disk(tmp_path / "saved")
    nested = "".join(json.dumps({"translation": {"en": s, "de": t}}) + "\n" for s, t in PAIRS)
    calls = [
        {name: str(path) for name, path in write_two(tmp_path, "a dog\n\n", "ein Hund\nx\n").items()},
        {"data": str(write(tmp_path / "a.jsonl", nested)), **GERMAN},
        {"data": str(tmp_path / "folder/train.parquet"), **REVERSED},
        {"data": str(tmp_path / "folder")},
        {"data": str(tmp_path / "saved")},
    ]
    expected = []
    for call in calls:
        tokenized, counts = tokenize_pairs(load_pairs(**call), tokenizer)
        expected.append([str(counts), tokenized._fingerprint, tokenized[:]])
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")}
    command = [sys.executable, "-c", SECOND_PROCESS, str(ROOT / "vaswani_transformer"), str(tmp_path / "tokenizer")]
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache), "PYTHONHASHSEED": "7"}
    done = subprocess.run([*command, *map(json.dumps, calls)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")} == files


@pytest.mark.skipif(not (MULTI30K / "train.en.gz").exists(), reason=f"no Multi30k data in {MULTI30K}")
def test_multi30k_loads_whole_and_in_order(tokenizer):
    pairs = load_pairs(source=MULTI30K / "train.en.gz", target=MULTI30K / "train.de.gz")
    assert len(pairs) == 29000 and pairs.cache_files
    for side, language in (("source", "en"), ("target", "de")):
        with gzip.open(MULTI30K / f"train.{language}.gz") as stream:
            lines = stream.read().decode().split("\n")
        assert pairs[side][:] == lines[:-1]
    tokenized, counts = tokenize_pairs(pairs.select(range(2000)), tokenizer, max_length=60)
    assert counts.read == 2000 and counts.kept == len(tokenized) and counts.too_long > 0
