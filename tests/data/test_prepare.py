"""`vaswani prepare`: it writes what training makes of the text itself, however it is made or interrupted."""

import dataclasses
import os
import shutil
import signal

import numpy as np
import preparing
import pytest
from children import fork, limit_files, wait, wait_for
from conftest import TINY_SIZES, error_of
from preparing import CHUNK, digests, make, noted_writes, with_validation

from vaswani_transformer import train_tokenizer
from vaswani_transformer.cli.main import main
from vaswani_transformer.data import prepare as preparation
from vaswani_transformer.data import recipe_data
from vaswani_transformer.data.prepared import PreparedPairs, open_prepared
from vaswani_transformer.data.recipe_data import load_training_pairs
from vaswani_transformer.data.tokenized_pairs import tokenize_pairs
from vaswani_transformer.recipes.recipe import Recipe

small_chunks = preparing.small_chunks
text = preparing.text
tokenizer_folder = preparing.tokenizer_folder
recipe = preparing.recipe
forked_workers = preparing.forked_workers
ShardWriter = preparation._ShardWriter


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_prepared_pairs_equal_those_of_training_from_text_pair_by_pair(recipe, tmp_path, held_out, trained):
    recipe = recipe if held_out else with_validation(recipe)
    recipe = dataclasses.replace(recipe, tokenizer=None) if trained else recipe
    manifest = make(recipe, tmp_path / "p")
    prepared = open_prepared(tmp_path / "p")
    text = load_training_pairs(recipe)
    if trained:
        lines = (side for pair in zip(text[0]["source"], text[0]["target"], strict=True) for side in pair)
        assert prepared.tokenizer.get_vocab() == train_tokenizer(lines, vocab_size=400).get_vocab()
    limits = {"max_length": recipe.max_length, "max_length_ratio": recipe.max_length_ratio}
    for part, pairs in (("train", text[0]), ("validation", text[1])):
        expected, counts = tokenize_pairs(pairs, prepared.tokenizer, **limits)
        assert prepared.counts(part) == counts
        mapped: PreparedPairs = getattr(prepared, part)
        assert len(mapped) == len(expected) == manifest["parts"][part]["pairs"]
        for row, wanted in zip(map(mapped.__getitem__, range(len(mapped))), expected, strict=True):
            assert row["input_ids"].tolist() == wanted["input_ids"] and row["labels"].tolist() == wanted["labels"]
        columns = expected.with_format("numpy")
        for side, lengths in zip(("source", "target"), mapped.lengths, strict=True):
            assert lengths.tolist() == columns[f"{side}_length"][:].tolist()
            assert manifest["parts"][part][f"{side}_tokens"] == lengths.sum()
        assert mapped.as_dataset()[:] == expected[:]
        assert mapped.as_dataset(np.array([1, 0]))[:] == expected.select([1, 0])[:]
    assert prepared.counts("train").too_long and prepared.counts("train").ratio and prepared.counts("train").empty == 2


def test_a_vocabulary_and_lengths_beyond_16_bits_have_room(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "vocabulary_sizes", lambda tokenizer: (2**16 + 1, 400))
    (long := tmp_path / "long").mkdir()
    for side in ("en", "de"):
        (long / f"part.0.{side}").write_text("b\n" + "Q " * 34_000 + "\n" + "b\n" * 30, encoding="utf-8")
    recipe = dataclasses.replace(recipe, max_length=70_000, max_length_ratio=0, data_dir=str(long), validation_size=1)
    make(recipe, tmp_path / "p")
    train = open_prepared(tmp_path / "p").train
    assert train.lengths.dtype == "int32" == train[0]["labels"].dtype
    assert train.lengths.max() > 2**16


@pytest.mark.usefixtures("forked_workers")
def test_any_number_of_workers_gives_the_same_files(recipe, tmp_path):
    for workers in (1, 3):
        make(recipe, tmp_path / str(workers), workers=workers)
    assert digests(tmp_path / "1") == digests(tmp_path / "3")
    assert len(list((tmp_path / "1").glob("train-*.arrow"))) == 6 == -(-210 // CHUNK)


def pieces_of_words(tokenizer, text: str) -> list[int]:
    return [len(tokenizer(word)["input_ids"]) - 1 for word in text.split()]


@pytest.mark.parametrize("held_out", [True, False])
def test_a_tokenizer_has_pieces_of_all_of_a_text_larger_than_its_sample(tmp_path, monkeypatch, held_out):
    """Two corpora one after the other, as in WMT; the same sample of both in memory and prepared."""
    monkeypatch.setattr(recipe_data, "TOKENIZER_PAIRS", 60)
    halves = ["tomorrow yesterday morning", "понедельник воскресенье четверг"]
    lines = [line for half in halves for line in [half] * 300]
    for name in ("a.en", "a.de", "validation.en", "validation.de"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    fields = {"train_source": "a.en", "train_target": "a.de", "vocab_size": 400, "validation_size": 9}
    recipe = Recipe(data_dir=str(tmp_path), **fields)
    recipe = recipe if held_out else with_validation(recipe)
    tokenizers = [recipe_data.recipe_tokenizer(recipe, load_training_pairs(recipe)[0])]
    make(recipe, tmp_path / "p")
    tokenizers.append(open_prepared(tmp_path / "p").tokenizer)
    assert tokenizers[0].backend_tokenizer.to_str() == tokenizers[1].backend_tokenizer.to_str()
    for half in halves:
        assert pieces_of_words(tokenizers[0], half) == [1, 1, 1]
    assert min(pieces_of_words(train_tokenizer(lines[:120], vocab_size=400), halves[1])) > 10  # by the first pairs


def test_whole_shards_are_not_made_again(recipe, tmp_path, monkeypatch):
    names = [f"train-{number:05d}.arrow" for number in range(6)] + ["validation-00000.arrow"]
    make(recipe, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        noted_writes(patch, stop_at=2)
        make(recipe, tmp_path / "p")
    assert "manifest.json: No such" in error_of(open_prepared, tmp_path / "p")
    written = noted_writes(monkeypatch)
    assert "(max_length)" in error_of(make, dataclasses.replace(recipe, max_length=50), tmp_path / "p")
    make(recipe, tmp_path / "p")
    assert written == names[2:] and digests(tmp_path / "p") == digests(tmp_path / "whole")
    make(recipe, tmp_path / "p")
    assert written == names[2:]
    make(recipe, tmp_path / "p", overwrite=True)
    assert written == names[2:] + names


@pytest.mark.slow
def test_a_preparation_killed_resumes_to_the_same_bytes(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "CHUNK", 2)
    make(recipe, tmp_path / "whole")
    for shards in (1, 20, 50):
        child = fork(lambda: make(recipe, tmp_path / "p"))
        wait_for(lambda count=shards: len(list((tmp_path / "p").glob("train-*.arrow"))) >= count)
        os.kill(child, signal.SIGKILL)
        assert wait(child) == -signal.SIGKILL and not (tmp_path / "p" / "manifest.json").exists()
    make(recipe, tmp_path / "p")
    assert digests(tmp_path / "p") == digests(tmp_path / "whole")


def test_a_disk_that_fills_leaves_whole_shards_and_nothing_else(recipe, tmp_path):
    """Files above a size cannot be written in the child, as on a full disk."""
    make(recipe, tmp_path / "whole")
    folder, write = tmp_path / "p", ShardWriter._write
    limit = max(path.stat().st_size for path in (tmp_path / "whole").glob("train-*.arrow")) - 1

    def write_on_a_small_disk(*arguments):
        limit_files(limit)
        write(*arguments)

    def work():
        ShardWriter._write = write_on_a_small_disk
        try:
            make(recipe, folder)
        except OSError:
            return 77

    assert wait(fork(work)) == 77
    assert not list(folder.glob(".writing-*")) and not (folder / "manifest.json").exists()
    make(recipe, folder)
    assert digests(folder) == digests(tmp_path / "whole")


def test_a_folder_of_other_settings_or_other_text_is_refused(recipe, text, tmp_path):
    make(recipe, tmp_path / "p")
    for changes, name in (({"max_length": 50}, "max_length"), ({"seed": 4}, "seed"), ({"validation_size": 9}, "size")):
        message = error_of(make, dataclasses.replace(recipe, **changes), tmp_path / "p")
        assert name in message and "--overwrite" in message
    copy = shutil.copytree(text, tmp_path / "text")
    moved = dataclasses.replace(recipe, data_dir=str(copy))
    make(moved, tmp_path / "q")
    for side in ("en", "de"):
        with (copy / f"part.1.{side}").open("a") as file:
            file.write("more\n")
    assert str(copy / "part.1.de") in error_of(make, moved, tmp_path / "q")
    make(moved, tmp_path / "q", overwrite=True)
    (copy / "part.1.de").write_text((copy / "part.1.de").read_text().swapcase())  # of the same size
    assert str(copy / "part.1.de") in error_of(make, moved, tmp_path / "q")


def test_a_folder_with_something_else_in_it_is_left_alone(recipe, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    assert "is not empty and holds no preparation" in error_of(make, recipe, tmp_path)
    (tmp_path / "thesis.txt").rename(tmp_path / "train-00000.arrow")
    error_of(make, recipe, tmp_path, overwrite=True)
    (tmp_path / "tokenizer").mkdir()
    tokenizer = (tmp_path / "train-00000.arrow").rename(tmp_path / "tokenizer" / "tokenizer.json")
    assert "tokenizer.json was not written by this program" in error_of(make, recipe, tmp_path)
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {tokenizer: "mine"}


def test_a_start_over_removes_what_was_written_and_nothing_else(recipe, tmp_path):
    make(recipe, tmp_path / "p")
    whole, own = digests(tmp_path / "p"), tmp_path / "p" / "tokenizer" / "notes.txt"
    error_of(make, dataclasses.replace(recipe, validation_size=10**6), tmp_path / "p", overwrite=True)
    assert digests(tmp_path / "p") == whole
    own.write_text("mine")
    first = dataclasses.replace(recipe, train_source="part.0.en", train_target="part.0.de")
    make(first, tmp_path / "p", overwrite=True)
    assert not (tmp_path / "p" / "train-00002.arrow").exists() and own.read_text() == "mine"
    own.unlink()
    make(recipe, tmp_path / "p", overwrite=True)
    assert digests(tmp_path / "p") == whole


def test_nothing_left_and_nonsense_are_refused(recipe, tmp_path):
    cut = dataclasses.replace(recipe, max_length=2)
    assert "train data: no pair is left after filtering (195 pairs read, 0 kept" in error_of(make, cut, tmp_path / "p")
    (tmp_path / "blank").write_text("\n\n")
    (tmp_path / "empty").write_text("\n\n")
    blank = {"validation_source": str(tmp_path / "blank"), "validation_target": str(tmp_path / "empty")}
    blank = dataclasses.replace(recipe, **blank)
    assert "validation data: no pair is left after filtering (2 pairs" in error_of(make, blank, tmp_path / "q")
    many = dataclasses.replace(recipe, validation_size=210)
    assert "cannot hold validation_size 210" in error_of(make, many, tmp_path / "r")
    assert "there is no text to train on" in error_of(make, Recipe(), tmp_path / "s")


def test_the_command_prepares_checks_and_trains(text, tmp_path, capsys, fails):
    recipe = tmp_path / "r.yaml"
    lines = [f"data_dir: {text}", "train_source: part.*.en", "train_target: part.*.de", "validation_size: 15"]
    lines += [f"{name}: {value}" for name, value in TINY_SIZES.items()]
    lines += ["max_steps: 2", "evaluate_every: 2", "validation_bleu: 0", "max_length: 60", "average_checkpoints: 0"]
    recipe.write_text("\n".join(lines), encoding="utf-8")
    folder = str(tmp_path / "p")
    assert main(["prepare", str(recipe), "--output", folder, "--workers", "1"]) == 0
    assert "training: 195 pairs read, 19" in capsys.readouterr().out
    train_it = ["train", str(recipe), "--prepared", folder, "--output", str(tmp_path / "m"), "--quiet"]
    assert "max_length is 50, prepared with 60" in fails(*train_it, "--max-length", "50")
    assert not (tmp_path / "m" / "model.safetensors").exists()
    assert main(train_it) == 0
    assert (tmp_path / "m" / "model.safetensors").exists()
    (tmp_path / "p" / "train-00001.arrow").unlink()
    assert f"error: {tmp_path / 'p' / 'train-00001.arrow'}: No such file" in fails(*train_it, "--overwrite")
    assert "--output" in fails("prepare", recipe)
