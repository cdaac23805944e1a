"""Averages of checkpoints: exact in float64, and errors for what is not of one model."""

import json
import os
from pathlib import Path

import pytest
import torch
import translating
from conftest import TINY_SIZES, error_of
from hypothesis import given
from hypothesis import strategies as st
from model_folders import save
from safetensors.torch import save_file
from training_runs import equal, weights_of
from transformers import AutoModelForSeq2SeqLM

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration
from vaswani_transformer.data.tokenization import train_tokenizer
from vaswani_transformer.hub.card_facts import known_languages
from vaswani_transformer.recipes.recipe import Recipe, load_recipe
from vaswani_transformer.training.averaging import average_checkpoints, average_models, last_checkpoints
from vaswani_transformer.training.checkpoints import Checkpoint, averaged_from, step_of, to_average, write_manifest


def write_all(folder, checkpoints):
    folders = [folder / f"checkpoint-{index}" for index in range(len(checkpoints))]
    for path, weights in zip(folders, checkpoints, strict=True):
        path.mkdir()
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return folders


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 20), (torch.bfloat16, 5), (torch.float16, 1)])
def test_is_the_mean_of_float64_rounded_once(tmp_path, dtype, number):
    generator = torch.Generator().manual_seed(number)
    checkpoints = [{"w": (torch.randn(7, 5, generator=generator) * 3).to(dtype)} for _ in range(number)]
    folders = write_all(tmp_path, checkpoints)
    averaged = average_checkpoints(folders if number > 1 else str(folders[0]))["w"]
    exact = sum(weights["w"].double() for weights in checkpoints) / number
    assert averaged.dtype == dtype and torch.equal(averaged, exact.to(dtype))


def test_other_names_and_shapes(tmp_path):
    """Shapes that torch would broadcast, too."""
    weights = [{"w": torch.ones(2, 3)}, {"w": torch.ones(1, 3)}, {"w": torch.ones(2, 3), "b": torch.ones(1)}]
    folders = write_all(tmp_path, weights)
    message = error_of(average_checkpoints, folders[:2])
    assert "w has the shapes [1, 3] and [2, 3]" in message and str(folders[1]) in message
    for pair in (folders[::2], folders[:0:-1]):
        assert f"{pair[1]} and {pair[0]} are not of one model: b has the shapes" in error_of(average_checkpoints, pair)


def make_model(seed, **changes):
    torch.manual_seed(seed)
    sizes = TINY_SIZES | {"vocab_size": 264, "dropout": 0.0}
    return VaswaniForConditionalGeneration(VaswaniConfig(**sizes, **changes)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a b c d e"], vocab_size=264)


@pytest.fixture
def models(tmp_path, tokenizer):
    return [save(tmp_path / f"model-{seed}", make_model(seed), tokenizer) for seed in range(3)]


def test_a_model_folder_is_written(models, tmp_path):
    output = average_models(models, tmp_path / "new" / "average")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert equal(weights_of(output), average_checkpoints(models))
    embeddings = loaded.model.encoder.embed_tokens, loaded.model.decoder.embed_tokens
    assert len({layer.weight.data_ptr() for layer in (loaded.lm_head, *embeddings)}) == 1  # they are tied
    assert loaded.generation_config.num_beams == make_model(0).generation_config.num_beams
    assert sorted(path.name for path in output.glob("[!.]*")) == sorted(path.name for path in models[0].iterdir())
    assert not list(output.parent.glob(".*"))


def test_where_a_model_is_from_is_kept(models, run, tmp_path):
    (models[0] / "import.json").write_text("{}")
    assert (average_models(models, tmp_path / "average") / "import.json").read_text() == "{}"
    (run / "import.json").write_text("[]")
    (run / "distillation.json").write_text("[]")
    (run / "recipe.yaml").write_text("train_source: a.en\ntrain_target: a.de\n")
    (run / "generation_config.json").write_text('{"length_penalty": 1.4}')  # chosen behind all checkpoints
    for overwrite in (False, True):
        average_models(last_checkpoints(run, 2), tmp_path / "of a run", overwrite)
    for name in ("import.json", "distillation.json", "recipe.yaml", "generation_config.json"):
        assert (tmp_path / "of a run" / name).read_bytes() == (run / name).read_bytes()
    assert known_languages(tmp_path / "of a run") == known_languages(run) == ["en", "de"]
    (run / "verdict.json").write_text('{"languages": ["en", "da"]}')  # of a catalogue's training
    (run / "recipe.yaml").write_text("train_data: a.po\n")
    average_models(last_checkpoints(run, 2), tmp_path / "of a run", True)
    assert known_languages(tmp_path / "of a run") == known_languages(run) == ["en", "da"]


def refused(folders, output, *parts):
    message = error_of(average_models, folders, output)
    for part in parts:
        assert part in message
    assert not output.exists()


def test_other_models_and_vocabularies_are_refused(models, tmp_path, tokenizer):
    output = tmp_path / "out"
    wide = save(tmp_path / "wide", make_model(0, max_position_embeddings=99), tokenizer)
    refused([*models, wide], output, str(wide), str(models[0]), "differ in max_position_embeddings")
    train_tokenizer(["some other text"], vocab_size=264).save_pretrained(wide)
    refused([models[0], wide], output, "differ in max_position_embeddings, the tokenizer")
    refused([models[0], tmp_path / "nowhere"], output, "nowhere")
    os.truncate(models[2] / "model.safetensors", 1000)
    refused([models[0], models[2]], output, str(models[2]), "header")


@pytest.fixture
def run(tmp_path, tokenizer):
    """A training's folder without a training: checkpoints with other weights each, and their validations."""
    losses = {10: 2.0, 20: 3.0, 30: 5.0, 40: 4.0}
    history = [{"step": step, "eval_loss": loss, "eval_bleu": -loss} for step, loss in losses.items()]
    for step in (20, 27, 30, 40):
        checkpoint = save(tmp_path / "run" / "checkpoints" / f"checkpoint-{step}", make_model(step), tokenizer)
        state = {"global_step": step, "log_history": history, "save_steps": 10}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        write_manifest(checkpoint, step, {"validation"} if step in losses else {"stop"})
    return tmp_path / "run"


def test_last_checkpoints_of_a_run(run, tmp_path):
    assert list(map(step_of, last_checkpoints(run, 3))) == [20, 30, 40]  # 27 was written for a signal
    assert "holds 3 checkpoints (steps 20, 30, 40), fewer than 4" in error_of(last_checkpoints, run, 4)
    assert "holds 0 checkpoints" in error_of(last_checkpoints, tmp_path, 1)


def test_the_command(run, tmp_path, capsys):
    assert translating.run("average", run, "--last", 2, "--output", tmp_path / "last") == 0
    out = capsys.readouterr().out
    assert "averaged 2 checkpoints: steps 30, 40" in out and str(tmp_path / "last") in out
    folders = [run / "checkpoints" / f"checkpoint-{step}" for step in (30, 40)]
    assert translating.run("average", *folders, "--output", tmp_path / "named") == 0
    assert equal(weights_of(tmp_path / "last"), weights_of(tmp_path / "named"))


def test_by_default_as_many_as_the_recipe_says(run, tmp_path, capsys):
    (run / "checkpoints" / "recipe.yaml").write_text("average_checkpoints: 3\n")
    assert translating.run("average", run, "--output", tmp_path / "out") == 0
    assert "averaged 3 checkpoints" in capsys.readouterr().out


def test_mistakes_end_in_one_line(run, tmp_path, fails):
    checkpoint, again = run / "checkpoints" / "checkpoint-20", f"{run}/./checkpoints/checkpoint-20"
    for message, words in (
        ("holds 3 checkpoints (steps 20, 30, 40), fewer than 5", [run]),
        ("two or more", [checkpoint]),
        ("output folder of one training", [run, run, "--last", "2"]),
        ("each once", [checkpoint, again]),
    ):
        assert message in fails("average", *words, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 300))
def test_averages_are_those_that_selection_takes(count, every, end):
    steps = [step for step in range(1, end + 1) if step % every == 0 or step == end]
    taken = to_average([Checkpoint(Path(f"checkpoint-{step}")) for step in steps], count, every, end)
    assert averaged_from(Recipe(average_checkpoints=count, average_every=every), end) == taken[0].step


def test_a_run_that_ended_early_averages_nothing_far_back():
    recipe = load_recipe("wmt14-en-de-big")
    written = [Checkpoint(Path(f"checkpoint-{step}")) for step in (*range(6000, 150_000, 6000), 150_000)]
    averaged = to_average(written, recipe.average_checkpoints, recipe.average_every, 150_000)
    assert [one.step for one in averaged] == [144_000, 150_000]  # within the last 20 times 600 steps
