"""`vaswani train --dry-run`: FLOPs against torch's counter, epochs as training counts them, mistakes as in training."""

import logging
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from vaswani_transformer import TokenBatchSampler, VaswaniConfig, VaswaniForConditionalGeneration
from vaswani_transformer.cli.main import main
from vaswani_transformer.recipes.recipe import Recipe, load_recipe
from vaswani_transformer.training.checkpoints import Checkpoint, averaged_from, to_average
from vaswani_transformer.training.plan import EXPECTED_FILL, describe_plan, make_plan, model_flops


def small(preset: str) -> VaswaniConfig:
    """A preset with a sixteenth of its widths."""
    full = VaswaniConfig.from_preset(preset)
    sizes = {name: max(2, getattr(full, name) // 16) for name in ("d_model", "d_ff", "d_k", "d_v")}
    return VaswaniConfig.from_preset(preset, **sizes, vocab_size=37, max_position_embeddings=16)


OTHERS = ({"d_k": 5, "d_v": 9}, {"attention_bias": True}, {"tie_word_embeddings": False}, {"encoder_layers": 0})
CONFIGS = {name: small(name) for name in VaswaniConfig.preset_names()}
CONFIGS |= {str(changes): tiny_config(**changes) for changes in OTHERS}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("training", [True, False])
def test_flops_are_those_that_torch_counts(name, training):
    """While the model runs on unpadded pairs, 7 tokens to 11 or 9 to 4."""
    config = CONFIGS[name]
    config._attn_implementation = "eager"
    model = VaswaniForConditionalGeneration(config).train()
    for lengths in ((7, 11), (9, 4)):
        sources, targets = (torch.full((3, length), 3) for length in lengths)
        with FlopCounterMode(display=False) as counter:
            logits = model(input_ids=sources, decoder_input_ids=targets).logits
            if training:
                logits.sum().backward()
        sides = [[length] * 3 for length in lengths]
        assert model_flops(config, *sides, training=training) == counter.get_total_flops()


@pytest.mark.parametrize("window", [1, 4, 7, 500])
def test_flops_of_restricted_attention_count_neighbours(window):
    """Against the pairs of positions, one by one: 2 FLOPs for each number that they multiply, in queries and values."""
    config = tiny_config(attention_window=window)
    full = tiny_config()

    def hidden(length):
        return sum(abs(i - j) > window // 2 for i in range(length) for j in range(length))

    sources, targets = [9, 1, 30], [4, 12, 3]
    saved = config.encoder_layers * sum(map(hidden, sources)) + config.decoder_layers * sum(map(hidden, targets))
    each = 2 * config.num_heads * (config.d_k + config.d_v)
    expected = model_flops(full, sources, targets, training=False) - saved * each
    assert model_flops(config, sources, targets, training=False) == expected
    assert window == 500 or expected < model_flops(full, sources, targets, training=False)


def plan_of(name: str, **changes):
    return make_plan(load_recipe(name, changes), trial=False)


@pytest.mark.parametrize("name", ["small", "parser", "wmt14-en-fr-big"])
def test_a_recipe_without_data_network_or_writing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a plan needs no network"))
    plan = plan_of(name)
    assert plan.parameters == plan.config.num_parameters() and plan.bytes == 16 * plan.parameters
    lines = describe_plan(plan).splitlines()
    assert len(lines) <= 12 and max(len(line) for line in lines if str(tmp_path) not in line) <= 120
    assert not list(tmp_path.iterdir())


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 300))
def test_planned_averages_are_those_that_selection_takes(count, every, end):
    steps = [step for step in range(1, end + 1) if step % every == 0 or step == end]
    checkpoints = [Checkpoint(Path(f"checkpoint-{step}")) for step in steps]
    taken = to_average(checkpoints, count, False, every, end)
    assert averaged_from(Recipe(average_checkpoints=count, average_every=every, max_steps=end)) == taken[0].step


def test_a_run_that_ended_early_averages_nothing_far_back():
    recipe = load_recipe("wmt14-en-de-big")
    written = [Checkpoint(Path(f"checkpoint-{step}")) for step in (*range(6000, 150_000, 6000), 150_000)]
    averaged = to_average(written, recipe.average_checkpoints, False, recipe.average_every, 150_000)
    assert [one.step for one in averaged] == [144_000, 150_000]  # within the last 20 times 600 steps


@settings(max_examples=8)
@given(st.integers(300, 30_000), st.integers(300, 30_000), st.integers(1, 16))
def test_a_step_is_dealt_out_evenly_and_in_as_few_parts_as_fit(tokens, per_device, processes):
    overrides = {"tokens_per_batch": tokens, "tokens_per_device": per_device}
    parts = make_plan(load_recipe("wmt14-en-de-base", overrides), processes, trial=False).micro_batches
    assert parts % processes == 0
    assert tokens / parts <= per_device
    assert parts == processes or tokens / (parts - processes) > per_device


def test_processes_are_those_of_the_launch(monkeypatch, capsys, corpus):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "small", *corpus, "--dry-run"]) == 0
    assert "in 1 parts on each of 2 processes" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "small", *corpus, "--dry-run"]) == 0
    assert not capsys.readouterr().out


def test_expected_batches_are_near_those_of_data_with_such_lengths():
    random = np.random.default_rng(0)
    sources = np.exp(random.normal(np.log(29.5) - 0.18, 0.6, 200_000)).round().clip(2, 256).astype(np.int64)
    targets = (sources * np.exp(random.normal(0, 0.2, 200_000)) * 1.02).round().clip(2, 256).astype(np.int64)
    batches = len(TokenBatchSampler(sources, targets, 25_000))
    lengths = {"expected_source_length": sources.mean(), "expected_target_length": targets.mean()}
    plan = plan_of("wmt14-en-de-base", **lengths, expected_pairs=len(sources))
    assert plan.steps_per_epoch == pytest.approx(batches, rel=0.04)
    assert plan.origin.endswith("the recipe's estimates")
    assert max(sources.mean(), targets.mean()) * plan.pairs_per_step == pytest.approx(EXPECTED_FILL * 25_000)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Options of a tiny training on files of 300 short pairs, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    words = [f"{a}{b}" for a in "bdgklmnp" for b in ("a", "e", "i", "ola", "ust")]
    lines = [" ".join(random.choice(words, random.integers(2, 12))) for _ in range(300)]
    for name in ("train.en", "train.de"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    sizes = {"d_model": 16, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 280}
    batches = {"tokens_per_batch": 500, "tokens_per_device": 250, "max_length": 40, "validation_size": 20}
    others = {"max_steps": 2, "evaluate_every": 2, "validation_bleu": 0, "best_by": "loss", "precision": "fp32"}
    others["length_penalty"] = 0.6
    options = {"train_source": "train.en", "train_target": "train.de", **sizes, **batches, **others}
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def test_data_that_is_here_is_counted_as_training_counts_it(corpus, tmp_path, caplog, capsys):
    before = sorted(tmp_path.iterdir())
    assert main(["train", "small", *corpus, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert 0 < float(re.search(r"2 steps x (\S+) s by a trial here", text)[1]) < 20
    assert sorted(tmp_path.iterdir()) == before
    assert "pairs read" in text and "estimates" not in text
    pairs, steps = (re.search(pattern, text)[1] for pattern in (r"([\d,]+) pairs of", r"([\d,]+) steps an epoch"))
    with caplog.at_level(logging.INFO, logger="vaswani_transformer"):
        assert main(["train", "small", *corpus, "--quiet"]) == 0
    assert f"{pairs} pairs in {steps} batches an epoch" in caplog.text


def test_prepared_data_is_counted_without_reading_it(corpus, tmp_path, capsys):
    main(["train", "small", *corpus, "--dry-run"])
    from_text = capsys.readouterr().out
    data = [option for option in corpus if re.match("--(train|vocab|max-length|validation-size)", option)]
    assert main(["prepare", "small", *data, "--output", "prepared", "--workers", "1"]) == 0
    for name in ("train.en", "train.de"):
        (tmp_path / name).unlink()
    capsys.readouterr()
    assert main(["train", "small", *corpus, "--prepared", "prepared", "--dry-run"]) == 0
    from_shards = capsys.readouterr().out
    for line in ("pairs of", "padding not counted", "steps an epoch", "FLOPs a step"):
        texts = [next(x for x in text.splitlines() if line in x) for text in (from_text, from_shards)]
        assert texts[0].rpartition(": ")[2] == texts[1].rpartition(": ")[2]


def test_data_too_large_to_read_is_found_as_training_finds_it(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vaswani_transformer.training.plan.LARGEST_READ", 1)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["--train-source=~/tra*.en", "--train-target=~/tra*.de"]
    assert main(["train", "small", *corpus, *names, "--dry-run"]) == 0
    assert "are too much to read" in capsys.readouterr().out


@pytest.mark.parametrize(
    "mistake",
    [
        ["--d-model=15"],
        ["--precision=fp16"],
        ["--tokenizer=nowhere"],
        ["--tokens-per-batch=100", "--tokens-per-device=40"],
        ["--train-source=nowhere"],
    ],
    ids=str,
)
def test_mistakes_end_as_in_training(corpus, mistake, tmp_path, capsys):
    results = []
    for extra in ([], ["--dry-run"]):
        try:
            status = main(["train", "small", *corpus, *mistake, "--quiet", *extra])
        except SystemExit as stop:
            status = stop.code
        results.append((status, capsys.readouterr().err.splitlines()[-1]))
    assert results[0] == results[1]
    assert results[0][0] == 2
    assert results[0][1].startswith("error: ")
    if torch.cuda.is_available() and mistake == ["--precision=fp16"]:
        pytest.skip("fp16 trains here")
