"""Prepared pairs as training reads them: the same training as on the text, and damage that is reported before it."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import preparing
import pyarrow as pa
import pytest
from conftest import error_of
from preparing import make, new_recipe
from safetensors.torch import load_file

from vaswani_transformer import train, train_tokenizer
from vaswani_transformer.data.prepared import check_recipe_matches, open_prepared, verify_prepared
from vaswani_transformer.errors import UserError

small_chunks = preparing.small_chunks
text = preparing.text
tokenizer_folder = preparing.tokenizer_folder
recipe = preparing.recipe


@pytest.fixture(scope="module")
def prepared_once(text, tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "p"
    make(new_recipe(text, tokenizer_folder), folder)
    return folder


@pytest.fixture
def prepared_copy(prepared_once, tmp_path):
    return Path(shutil.copytree(prepared_once, tmp_path / "copy"))


# Training


def test_training_on_prepared_pairs_and_on_text_gives_the_same_weights(recipe, tmp_path):
    recipe = dataclasses.replace(
        recipe, max_steps=4, warmup_steps=2, evaluate_every=2, log_every=1, validation_bleu=0, average_checkpoints=0
    )
    make(recipe, tmp_path / "p")
    from_text = train(dataclasses.replace(recipe, output=str(tmp_path / "a")), progress=False)
    again = dataclasses.replace(recipe, output=str(tmp_path / "b"), prepared=str(tmp_path / "p"))
    mapped = train(dataclasses.replace(again, data_dir=None, train_source=None, train_target=None), progress=False)
    one, other = (load_file(result.folder / "model.safetensors") for result in (from_text, mapped))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_a_run_is_resumed_with_the_same_prepared_pairs_elsewhere_and_with_no_others(recipe, tmp_path):
    recipe = dataclasses.replace(
        recipe, max_steps=2, warmup_steps=2, evaluate_every=2, validation_bleu=0, average_checkpoints=0
    )
    make(recipe, tmp_path / "p")
    recipe = dataclasses.replace(recipe, prepared=str(tmp_path / "p"), output=str(tmp_path / "run"))
    result = train(recipe, progress=False)
    (result.folder / "model.safetensors").unlink()  # as if it had been interrupted
    (tmp_path / "p").rename(tmp_path / "moved")
    recipe = dataclasses.replace(recipe, prepared=str(tmp_path / "moved"), max_steps=4)
    make(dataclasses.replace(recipe, train_source="part.[01].en", train_target="part.[01].de"), tmp_path / "other")
    others = dataclasses.replace(recipe, prepared=str(tmp_path / "other"))
    assert "train_source is" in error_of(train, others, progress=False)
    lengths = np.load(tmp_path / "other" / "train.lengths.npy")
    assert lengths.shape[1] < open_prepared(tmp_path / "moved").train.lengths.shape[1]
    manifest = tmp_path / "other" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("part.[01]", "part.*"))
    assert "training data" in error_of(train, others, progress=False)
    assert train(recipe, progress=False).steps == 4


# What is refused while reading


def damage_missing(folder):
    (folder / "train-00002.arrow").unlink()
    return "train-00002.arrow is missing"


def damage_truncated(folder):
    path = folder / "train-00003.arrow"
    path.write_bytes(path.read_bytes()[:-10])
    return "train-00003.arrow has "


def replace_shard(folder, table):
    """Put another table in place of a shard, of the size that the manifest says."""
    with pa.ipc.new_file(str(folder / "train-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    size = (folder / "train-00001.arrow").stat().st_size
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["parts"]["train"]["shards"][1]["bytes"] = size
    path.write_text(json.dumps(manifest), encoding="utf-8")


def damage_schema(folder):
    ids = pa.array([[1, 2]], pa.list_(pa.int64()))
    replace_shard(folder, pa.table({"input_ids": ids, "labels": ids}))
    return "train-00001.arrow has the columns input_ids: list<item: int64>"


def damage_rows(folder):
    ids = pa.array([[1, 2]], pa.list_(pa.uint16()))
    replace_shard(folder, pa.table({"input_ids": ids, "labels": ids}))
    return "train-00001.arrow has 1 rows, not "


def damage_content(folder):
    path = folder / "train-00000.arrow"
    path.write_bytes(bytes(path.stat().st_size))
    return "train-00000.arrow is not an Arrow file"


def damage_index_content(folder):
    lengths = np.load(folder / "train.lengths.npy")
    lengths[1, 3] = 0
    np.save(folder / "train.lengths.npy", lengths)
    return "train.lengths.npy counts "


def damage_index_type(folder):
    lengths = np.load(folder / "train.lengths.npy")
    np.save(folder / "train.lengths.npy", lengths.view(np.int16))
    return "train.lengths.npy holds int16"


def damage_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    return "manifest.json is damaged"


def damage_version(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"version": 1', '"version": 7', 1), encoding="utf-8")
    return "has format version 7"


def damage_no_manifest(folder):
    (folder / "manifest.json").unlink()
    return "holds no manifest.json"


def damage_tokenizer(folder):
    train_tokenizer(["another text", "andere"], vocab_size=300).save_pretrained(folder / "tokenizer")
    return "tokenizer is not the tokenizer that the pairs were prepared with"


def damage_no_tokenizer(folder):
    (folder / "tokenizer" / "tokenizer.json").unlink()
    return "tokenizer.json missing"


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_refused_before_training_and_named(prepared_copy, damage):
    open_prepared(prepared_copy)
    expected = damage(prepared_copy)
    assert f"{expected}" in error_of(open_prepared, prepared_copy)


def keys_within(value, place=()):
    """Where the entries of nested dicts and lists are."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield (*place, key)
        if isinstance(value[key], (dict, list)):
            yield from keys_within(value[key], (*place, key))


@pytest.mark.parametrize("wrong", [None, "x", [1]], ids=["left out", "text", "list"])
def test_a_manifest_edited_by_hand_is_refused_or_harmless(recipe, prepared_copy, wrong):
    path = prepared_copy / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    refused = set()
    for *way, last in keys_within(manifest):
        edited = json.loads(json.dumps(manifest))
        inner = edited
        for key in way:
            inner = inner[key]
        if wrong is None:
            del inner[last]
        else:
            inner[last] = wrong
        path.write_text(json.dumps(edited), encoding="utf-8")
        try:
            prepared = verify_prepared(prepared_copy)
            check_recipe_matches(prepared, recipe)
            assert prepared.counts("train") and len(prepared.train)
        except UserError as error:
            assert "\n" not in str(error)
            refused.add(last)
    assert {"format", "version", "tokenizer", "parts", "shards", "rows", "bytes", "sha256", "token_type"} <= refused


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    assert "does not exist: make it with `vaswani prepare`" in error_of(open_prepared, tmp_path / "nowhere")


def change_bytes(path, values, old, new):
    """Replace one number of an Arrow column, found by the bytes of the whole column, in the file."""
    content = path.read_bytes()
    assert content.count(values.tobytes()) == 1
    place = content.index(values.tobytes()) + values.itemsize * old
    path.write_bytes(content[:place] + np.array(new, values.dtype).tobytes() + content[place + values.itemsize :])


def test_a_row_that_has_changed_is_named_when_it_is_read_and_by_the_check(prepared_copy):
    pairs = open_prepared(prepared_copy).train
    offsets = pairs._open(1)[0]
    change_bytes(prepared_copy / "train-00001.arrow", offsets, 8, offsets[8] + 1)
    damaged = open_prepared(prepared_copy).train
    start = pairs.facts["shards"][0]["rows"]
    damaged.__getitems__(list(range(start)))
    for row in (7, 8):  # where row 7 ends, row 8 starts
        assert f"train-00001.arrow, row {row}: " in error_of(damaged.__getitems__, [start + row])
    assert "train-00001.arrow, row 7: the content has changed" in error_of(verify_prepared, prepared_copy)


def test_the_check_finds_changed_tokens_and_names_the_row_of_one_outside_the_vocabulary(prepared_copy):
    verify_prepared(prepared_copy)
    values = open_prepared(prepared_copy).train._open(2)[3]
    offsets = open_prepared(prepared_copy).train._open(2)[2]
    change_bytes(prepared_copy / "train-00002.arrow", values, int(offsets[5]) + 1, values[offsets[5] + 1] ^ 1)
    assert "train-00002.arrow: the content has changed" in error_of(verify_prepared, prepared_copy)
    values = open_prepared(prepared_copy).train._open(2)[3]
    change_bytes(prepared_copy / "train-00002.arrow", values, int(offsets[5]), 65_000)
    assert "train-00002.arrow, row 5: the content has changed" in error_of(verify_prepared, prepared_copy)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"max_length": 50}, ["max_length is 50, prepared with 60"]),
        ({"max_length_ratio": 2.0}, ["max_length_ratio is 2.0, prepared with 3.0"]),
        ({"train_source": "part.*.de", "train_target": "part.*.en"}, ["train_source is", "train_target is"]),
        ({"validation_size": 14}, ["validation_size is 14"]),
        ({"source_column": "en"}, ["source_column is 'en', prepared with 'source'"]),
    ],
)
def test_a_recipe_that_would_make_other_pairs_is_refused(recipe, prepared_once, changes, names):
    prepared = open_prepared(prepared_once)
    check_recipe_matches(prepared, recipe)
    message = error_of(check_recipe_matches, prepared, dataclasses.replace(recipe, **changes))
    assert all(name in message for name in names) and str(prepared_once) in message


def test_a_recipe_may_leave_out_the_data_have_it_elsewhere_and_another_seed(recipe, prepared_once):
    prepared = open_prepared(prepared_once)
    without = {"train_source": None, "train_target": None, "tokenizer": None, "vocab_size": 37_000}
    for changes in (without, {"data_dir": "/somewhere/else"}, {"seed": 9}):
        check_recipe_matches(prepared, dataclasses.replace(recipe, **changes))


def test_another_tokenizer_is_refused(recipe, prepared_once, tmp_path):
    train_tokenizer(["another text"], vocab_size=300).save_pretrained(tmp_path / "t")
    prepared = open_prepared(prepared_once)
    message = error_of(check_recipe_matches, prepared, dataclasses.replace(recipe, tokenizer=str(tmp_path / "t")))
    assert f"tokenizer {tmp_path / 't'} is not the one" in message


def test_another_size_of_vocabulary_than_was_trained_is_refused(recipe, tmp_path):
    recipe = dataclasses.replace(recipe, tokenizer=None)
    make(recipe, tmp_path / "p")
    message = error_of(check_recipe_matches, open_prepared(tmp_path / "p"), dataclasses.replace(recipe, vocab_size=500))
    assert "vocab_size is 500, prepared with 400" in message
