"""Prepared pairs as training reads them: the same training as on the text, and damage that is reported before it."""

import dataclasses
import logging
import shutil
from pathlib import Path

import preparing
import pytest
import torch
from conftest import error_of
from preparing import make, new_recipe, noted_writes
from torch import distributed
from training_runs import equal, kill_before_selection, log_of, weights_of

from vaswani_transformer import train, train_tokenizer
from vaswani_transformer.data import prepare as preparation
from vaswani_transformer.data.prepare import prepare_if_large
from vaswani_transformer.data.prepared import check_recipe_matches, open_prepared
from vaswani_transformer.distributed import Processes
from vaswani_transformer.training import run

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


def test_a_run_is_resumed_with_the_same_prepared_pairs_elsewhere_and_with_no_others(recipe, tmp_path):
    settings = {"max_steps": 2, "warmup_steps": 2, "evaluate_every": 2, "validation_bleu": 0, "average_checkpoints": 0}
    recipe = dataclasses.replace(recipe, **settings)
    make(recipe, tmp_path / "p")
    recipe = dataclasses.replace(recipe, prepared=str(tmp_path / "p"), output=str(tmp_path / "run"))
    result = train(recipe, progress=False)
    assert result.languages == ["en", "de"]
    (result.folder / "model.safetensors").unlink()  # as if it had been interrupted
    (tmp_path / "p").rename(tmp_path / "moved")
    recipe = dataclasses.replace(recipe, prepared=str(tmp_path / "moved"), max_steps=4)
    make(dataclasses.replace(recipe, train_source="part.[01].en", train_target="part.[01].de"), tmp_path / "other")
    others = dataclasses.replace(recipe, prepared=str(tmp_path / "other"))
    assert "the training data and the validation data changed" in error_of(train, others, progress=False)
    assert train(recipe, progress=False).steps == 4


# Large text, which a training prepares by itself


@pytest.fixture
def large(recipe, tmp_path, monkeypatch):
    """A short training whose text counts as large."""
    monkeypatch.setattr(preparation, "LARGE", 10)
    return dataclasses.replace(
        recipe, tokenizer=None, max_steps=4, warmup_steps=2, evaluate_every=2, log_every=1, validation_bleu=0,
        average_checkpoints=0, output=str(tmp_path / "run"),
    )  # fmt: skip


def trained(recipe) -> dict[str, torch.Tensor]:
    """The weights that a training leaves."""
    return weights_of(train(recipe, progress=False).folder)


def shards_of(recipe) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in Path(recipe.output).glob("prepared/*.arrow")}


def test_large_text_is_prepared_first_and_trained_on_alike(large, tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger="vaswani_transformer"):
        prepared = trained(large)
    own = Path(large.output) / "prepared"
    assert f"training pairs are prepared in {own}, once; other runs may share them: --prepared {own}" in caplog.text
    monkeypatch.setattr(preparation, "LARGE", 10**6)
    plain = dataclasses.replace(large, output=str(tmp_path / "plain"))
    assert equal(trained(plain), prepared)
    assert not (Path(plain.output) / "prepared").exists()
    keys = ("loss", "eval_loss", "source_tokens", "target_tokens")
    logs = [[{key: entry.get(key) for key in keys} for entry in log_of(Path(each.output))] for each in (large, plain)]
    assert logs[0] == logs[1] and len(logs[0]) >= 6


def test_a_training_stopped_while_it_prepares_or_trains_is_resumed(large, tmp_path, monkeypatch):
    straight = trained(dataclasses.replace(large, output=str(tmp_path / "straight")))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        written = noted_writes(patch, stop_at=2)
        train(large, progress=False)
    first = {name: shards_of(large)[name] for name in written}
    large = dataclasses.replace(large, overwrite=True)  # resumes what is the same, as a run does
    kill_before_selection(dataclasses.replace(large, max_steps=2))
    shards = shards_of(large)
    assert shards.items() > first.items()
    for forbidden in ("prepare", "data_sources"):
        monkeypatch.setattr(preparation, forbidden, lambda *_: pytest.fail("the text is read again"))
    assert equal(trained(large), straight) and shards_of(large) == shards


def test_what_was_prepared_for_an_interrupted_training_may_go(large, tmp_path):
    straight = trained(dataclasses.replace(large, output=str(tmp_path / "straight")))
    large = dataclasses.replace(large, overwrite=True)
    kill_before_selection(dataclasses.replace(large, max_steps=2))
    shutil.rmtree(Path(large.output) / "prepared")
    assert equal(trained(large), straight)


def test_of_several_processes_the_first_prepares(large, monkeypatch):
    folder, store = Path(large.output) / "prepared", distributed.HashStore()
    prepare_if_large(large, folder, progress=False)
    Processes(0, store).share("prepared", lambda: folder)
    monkeypatch.setattr(run, "prepare_if_large", lambda *_: pytest.fail("prepared twice"))
    pairs, _ = run.TrainingRun(large, progress=False)._load_data(Processes(1, store), resumed=False)
    assert len(pairs) == len(open_prepared(folder).train)


def test_data_prepared_otherwise_is_made_anew_if_asked(large):
    own = Path(large.output) / "prepared"

    def prepare(**changes):
        prepare_if_large(dataclasses.replace(large, **changes), own, progress=False)
        return shards_of(large)

    shards = prepare()
    assert prepare() == prepare(overwrite=True) == shards
    assert "prepared with other settings or files (max_length)" in error_of(prepare, max_length=50)
    again = prepare(max_length=50, overwrite=True)
    assert again != shards and open_prepared(own).manifest["recipe"]["max_length"] == 50
    (own / "train-00001.arrow").write_bytes(b"cut off")
    assert "(max_length)" in error_of(prepare)
    assert prepare(max_length=50, overwrite=True).keys() == again.keys()


def test_a_folder_of_another_version_is_refused(prepared_copy):
    manifest = prepared_copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 7', 1))
    assert "version 7" in error_of(open_prepared, prepared_copy)


def test_another_tokenizer_in_the_folder_is_refused(prepared_copy):
    train_tokenizer(["another text", "andere"], vocab_size=300).save_pretrained(prepared_copy / "tokenizer")
    assert "tokenizer is not the tokenizer that the pairs were prepared with" in error_of(open_prepared, prepared_copy)


def test_the_check_finds_what_has_changed_and_reading_what_is_no_arrow_file(prepared_copy):
    open_prepared(prepared_copy).verify()
    path = prepared_copy / "train-00001.arrow"
    path.write_bytes(bytes(path.stat().st_size))
    assert f"{path}: the content has changed" in error_of(open_prepared(prepared_copy).verify)
    pairs = open_prepared(prepared_copy).train
    assert error_of(pairs.__getitem__, pairs.starts[1]).startswith(f"{path}: ")


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
    turned = dataclasses.replace(recipe, **without, source_column="de", target_column="en")
    assert "source_column is 'de', prepared with" in error_of(check_recipe_matches, prepared, turned)
    more = dataclasses.replace(recipe, **without, validation_size=14)
    assert "validation_size is 14, prepared with" in error_of(check_recipe_matches, prepared, more)


def test_another_tokenizer_is_refused(recipe, prepared_once, tmp_path):
    train_tokenizer(["another text"], vocab_size=300).save_pretrained(tmp_path / "t")
    prepared = open_prepared(prepared_once)
    message = error_of(check_recipe_matches, prepared, dataclasses.replace(recipe, tokenizer=str(tmp_path / "t")))
    assert f"tokenizer is {tmp_path / 't'}, prepared with another" in message
