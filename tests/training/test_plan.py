"""`vaswani train --dry-run`: FLOPs against torch's counter, the paper's figures, mistakes as in training."""

import logging
import re
import shutil
import socket
import statistics
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from vaswani_transformer import TokenBatchSampler, VaswaniConfig, VaswaniForConditionalGeneration
from vaswani_transformer.cli.main import main
from vaswani_transformer.errors import UserError
from vaswani_transformer.hardware import DEVICES, UTILISATION_SOURCE, measure_device, parse_device
from vaswani_transformer.recipes.recipe import load_recipe, recipe_names
from vaswani_transformer.training.checkpoints import Checkpoint, steps_to_average, to_average
from vaswani_transformer.training.flops import model_flops, neighbours
from vaswani_transformer.training.plan import EXPECTED_FILL, PAPER_UTILISATION, describe_plan, make_plan

PAPER_RECIPES = ["wmt14-en-de-base", "wmt14-en-de-big", "wmt14-en-fr-base", "wmt14-en-fr-big"]


def counted_flops(config: VaswaniConfig, pairs: int, source_length: int, target_length: int, backward: bool) -> int:
    """What torch counts while a model of this configuration runs on unpadded pairs."""
    config._attn_implementation = "eager"
    model = VaswaniForConditionalGeneration(config).train()
    sources, targets = (torch.full((pairs, length), 3) for length in (source_length, target_length))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=sources, decoder_input_ids=targets).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("preset", VaswaniConfig.preset_names())
def test_flops_are_those_that_torch_counts(preset):
    full = VaswaniConfig.from_preset(preset)
    small = {name: max(2, getattr(full, name) // 16) for name in ("d_model", "d_ff", "d_k", "d_v")}
    config = VaswaniConfig.from_preset(preset, **small, vocab_size=37, max_position_embeddings=16)
    counted = counted_flops(config, pairs=3, source_length=7, target_length=11, backward=True)
    assert model_flops(config, [7] * 3, [11] * 3) == counted


@pytest.mark.parametrize(
    "changes",
    [{"d_k": 5, "d_v": 9}, {"attention_bias": True}, {"tie_word_embeddings": False}, {"encoder_layers": 0}],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_flops_of_other_models(changes, training):
    config = tiny_config(**changes)
    counted = counted_flops(config, pairs=2, source_length=9, target_length=4, backward=training)
    assert model_flops(config, [9, 9], [4, 4], training=training) == counted


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=8))
def test_flops_of_pairs_add_up(pairs):
    config = tiny_config()
    each = [model_flops(config, source, target) for source, target in pairs]
    assert model_flops(config, *np.array(pairs).T) == pytest.approx(sum(each), rel=1e-12)


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


def test_flops_of_restricted_attention_by_hand():
    # Of 5 positions with one neighbour to either side: 2 + 3 + 3 + 3 + 2 = 13 pairs, of 2 all 4.
    assert [neighbours(np.array([n]), 2)[0] for n in (5, 2, 1)] == [13, 4, 1]
    long = neighbours(np.array([10_000, 20_000]), 64)
    assert long[1] / long[0] == pytest.approx(2, rel=0.01)  # O(r n), Table 1


def test_flops_refuse_unequal_sides():
    with pytest.raises(ValueError, match="2 source lengths for 3"):
        model_flops(tiny_config(), [1, 2], [1, 2, 3])


def test_a_step_costs_about_six_flops_a_parameter_and_token():
    """Kaplan et al.'s rule of thumb, which leaves out attention's share: an estimate of another kind."""
    plan = make_plan(load_recipe("wmt14-en-de-big"))
    tokens = plan.epoch.pairs_per_step * (plan.epoch.source_length + plan.epoch.target_length) / 2
    assert plan.step_flops == pytest.approx(6 * sum(plan.parameters.values()) * tokens, rel=0.1)


@pytest.mark.parametrize(
    ("recipe", "hours", "printed", "steps"),
    [("wmt14-en-de-base", 12, 3.3e18, 100_000), ("wmt14-en-de-big", 3.5 * 24, 2.3e19, 300_000)],
)
def test_the_papers_hours_and_flops_come_out(recipe, hours, printed, steps):
    """Section 5.2 and Table 2: 12 hours and 3.3e18, 3.5 days and 2.3e19, on 8 P100."""
    plan = make_plan(load_recipe(recipe), "p100 x8")
    assert plan.seconds / 3600 == pytest.approx(hours, rel=0.08)
    text = describe_plan(plan)
    from_step_times, as_printed = re.search(r"sustained = (\S+) FLOPs.*?TFLOPS = (\S+) \(Table 2", text, re.S).groups()
    assert float(from_step_times) == pytest.approx(printed, rel=0.1)
    assert float(as_printed) == pytest.approx(printed, rel=0.02)
    assert f"{steps:,} steps x" in text
    assert f"(Table 2: {printed:.1e})".replace("e+", "e") in text
    utilisation = plan.step_flops * steps / (plan.seconds * 8 * 9.5e12)
    assert f"{utilisation:.0%} of 9.5" in text
    explained = describe_plan(make_plan(load_recipe(recipe), "a100"))  # where the default is from
    assert f"{utilisation:.0%}" in explained


@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_dry_runs_of_the_papers_recipes(name, tmp_path, monkeypatch, capsys):
    """No data, no network, nothing written, a screenful of text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a plan needs no network"))
    usage = shutil.disk_usage(".")  # a machine that has less room says so, with the folder's name in the line
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**12))
    begin = time.perf_counter()
    assert main(["train", name, "--dry-run", "--device", "p100 x8"]) == 0
    assert time.perf_counter() - begin < 20
    assert not list(tmp_path.iterdir())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    parts = "shared embedding", "epochs in all", "disk needed", "over 8 processes: 1 part each", "the paper's step time"
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("name", sorted({*recipe_names()} - {"finetune"}))  # which needs a model to start from
@pytest.mark.parametrize("device", [None, "h100", "RTX 4090 x2", "t4 x3"])
def test_any_recipe_on_any_device(name, device):
    plan = make_plan(load_recipe(name), device)
    assert sum(plan.parameters.values()) == plan.config.num_parameters()
    assert all(len(line) <= 200 for line in describe_plan(plan).splitlines())


def test_hours_on_a_device_are_flops_over_peak_and_utilisation():
    recipe = load_recipe("wmt14-en-de-big")
    plan = make_plan(recipe, "8x A100", utilisation=0.25)
    assert plan.precision == "bf16"
    assert plan.seconds == pytest.approx(plan.flops / (8 * 312e12 * 0.25))
    assert make_plan(recipe, "v100 x8").precision == "fp32"  # as `precision: auto` trains there
    with_fp16 = make_plan(load_recipe("wmt14-en-de-big", {"precision": "fp16"}), "v100 x8", utilisation=0.25)
    assert with_fp16.seconds == pytest.approx(plan.seconds * 312 / 125)
    assert make_plan(recipe).seconds is None
    assert "--device NAME estimates the time" in describe_plan(make_plan(recipe))


@pytest.mark.parametrize(
    ("rate", "count", "peak", "share"), [(32_942, 1, 125, 34), (82_059, 1, 312, 34), (551_599, 8, 312, 28)]
)
def test_quoted_utilisations_follow_from_the_quoted_rates(rate, count, peak, share):
    plan = make_plan(load_recipe("wmt14-en-de-big"))
    per_token = plan.step_flops / (plan.epoch.pairs_per_step * plan.epoch.target_length)
    assert 100 * rate * per_token / (count * peak * 1e12) == pytest.approx(share, abs=0.6)
    text = " ".join(UTILISATION_SOURCE)
    assert f"{rate:,}" in text
    assert f"{share}%" in text


@pytest.mark.parametrize("count", [1, 4, 8])
def test_other_numbers_of_the_papers_gpus_scale_its_time(count):
    plan = make_plan(load_recipe("wmt14-en-de-base"), f"p100 x{count}")
    assert plan.seconds == pytest.approx(100_000 * 0.4 * 8 / count)


def test_the_papers_time_is_for_its_model_and_batch_alone():
    smaller = make_plan(load_recipe("wmt14-en-de-base", {"tokens_per_batch": 12_500}), "p100 x8")
    other = make_plan(load_recipe("wmt14-en-de-base", {"encoder_layers": 5}), "p100 x8")
    for plan in (smaller, other):
        assert plan.paper_model is None
        assert "Section 5.2" not in describe_plan(plan)
        assert plan.seconds == pytest.approx(plan.flops / (8 * 9.5e12 * PAPER_UTILISATION))


def test_other_sizes_are_reckoned_at_what_the_papers_base_model_reached():
    base = make_plan(load_recipe("wmt14-en-de-base"), "p100 x8")
    assert base.step_flops / (0.4 * 8 * 9.5e12) == pytest.approx(PAPER_UTILISATION, abs=5e-4)
    heads = make_plan(load_recipe("wmt14-en-de-base", {"num_heads": 4, "d_k": 128, "d_v": 128}), "p100 x8")
    assert heads.paper_model is None and heads.seconds == pytest.approx(base.seconds, rel=2e-3)


@pytest.mark.parametrize(
    ("size", "every", "seconds", "last"),
    [("base", 1500, 0.4, "5, of steps 94,500, 96,000, 97,500, 99,000, 100,000: the last 5.5% of 100,000 steps"),
     ("big", 600, 1.0, "20, of steps 288,600, 289,200, ..., 299,400, 300,000: the last 3.8% of 300,000 steps")],
)  # fmt: skip
@pytest.mark.parametrize("target", ["de", "fr"])
def test_the_papers_average_is_that_of_its_machine_on_every_machine(size, every, seconds, last, target):
    """Section 6.1's 10 minutes at the step times of Section 5.2."""
    name = f"wmt14-en-{target}-{size}"
    assert load_recipe(name).average_every == every == 600 / seconds
    for device in (None, "p100 x8", "h100 x8"):
        text = describe_plan(make_plan(load_recipe(name), device))
        assert f"averaged: {last}\n" in text
        assert "FEWER" not in text and "TOO FAR BACK" not in text


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 300))
def test_planned_averages_are_those_that_selection_takes(count, every, end):
    steps = [step for step in range(1, end + 1) if step % every == 0 or step == end]
    checkpoints = [Checkpoint(Path(f"checkpoint-{step}")) for step in steps]
    taken = to_average(checkpoints, count, False, every, end)
    assert steps_to_average(count, every, end) == [one.step for one in taken]


def test_a_run_that_ended_early_averages_nothing_far_back():
    recipe = load_recipe("wmt14-en-de-big")
    written = [Checkpoint(Path(f"checkpoint-{step}")) for step in (*range(6000, 150_000, 6000), 150_000)]
    averaged = to_average(written, recipe.average_checkpoints, False, recipe.average_every, 150_000)
    assert [one.step for one in averaged] == [144_000, 150_000]  # within the last 20 times 600 steps


def test_an_average_by_the_clock_that_is_not_of_the_end_is_warned_of():
    minutes = {"checkpoint_minutes": 10}
    big = load_recipe("wmt14-en-de-big", minutes)
    papers = describe_plan(make_plan(big, "p100 x8"))
    assert "every 10 minutes: 500 in all" in papers and "20, of about steps 288,600" in papers
    assert "FEWER" not in papers and "TOO FAR" not in papers
    fast = make_plan(big, "h100 x8")
    count = int(fast.seconds // 600) + 1  # and the last step's
    text = describe_plan(fast)
    assert count < 20 and f"averaged: {count}, of about" in text
    assert "FEWER than 20, an average wants weights of the end: set checkpoint_minutes 0" in text
    base = make_plan(load_recipe("wmt14-en-de-base", minutes), "p100 x64")
    text = describe_plan(base)
    back = 4 * 600 / base.seconds  # to the first of the last five
    assert back > 0.25 and "averaged: 5" in text and "TOO FAR BACK" in text and "FEWER" not in text
    assert "averaged: those of the clock" in describe_plan(make_plan(load_recipe("wmt14-en-de-base", minutes)))
    assert "averaged:" not in describe_plan(make_plan(load_recipe("small", {"average_checkpoints": 0})))
    far = load_recipe("small", {"evaluate_every": 5000})
    assert "FEWER than 5, an average wants weights of the end: set an average_every" in describe_plan(make_plan(far))


@settings(max_examples=25)
@given(st.integers(300, 30_000), st.integers(300, 30_000), st.integers(1, 16))
def test_a_step_is_dealt_out_evenly_and_in_as_few_parts_as_fit(tokens, per_device, processes):
    overrides = {"tokens_per_batch": tokens, "tokens_per_device": per_device}
    parts = make_plan(load_recipe("wmt14-en-de-base", overrides), processes=processes).micro_batches
    assert parts % processes == 0
    assert tokens / parts <= per_device
    assert parts == processes or tokens / (parts - processes) > per_device


def test_processes_are_those_of_the_launch_or_of_the_device(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    main(["train", "wmt14-en-de-base", "--dry-run"])
    assert "split over 4 processes: 2 parts each, accumulated" in capsys.readouterr().out
    main(["train", "wmt14-en-de-base", "--dry-run", "--device", "a100"])
    assert "a100 x4" in capsys.readouterr().out
    main(["train", "wmt14-en-de-base", "--dry-run", "--device", "a100 x2"])
    assert "split over 2 processes: 1 part each" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "3")
    assert main(["train", "wmt14-en-de-base", "--dry-run"]) == 0
    assert not capsys.readouterr().out


def test_expected_batches_are_near_those_of_data_with_such_lengths():
    random = np.random.default_rng(0)
    sources = np.exp(random.normal(np.log(29.5) - 0.18, 0.6, 200_000)).round().clip(2, 256).astype(np.int64)
    targets = (sources * np.exp(random.normal(0, 0.2, 200_000)) * 1.02).round().clip(2, 256).astype(np.int64)
    batches = len(TokenBatchSampler(sources, targets, 25_000))
    overrides = {"expected_source_length": sources.mean(), "expected_target_length": targets.mean()}
    epoch = make_plan(load_recipe("wmt14-en-de-base", {**overrides, "expected_pairs": len(sources)})).epoch
    assert epoch.steps == pytest.approx(batches, rel=0.04)
    assert not epoch.exact
    assert max(sources.mean(), targets.mean()) * epoch.pairs_per_step == pytest.approx(EXPECTED_FILL * 25_000)


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
    assert sorted(tmp_path.iterdir()) == before
    assert "~" not in text
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
    for line in ("pairs of", "padding not counted", "steps an epoch", "in all:"):
        texts = [next(x for x in text.splitlines() if line in x) for text in (from_text, from_shards)]
        assert texts[0] == texts[1]
        assert "~" not in texts[1]


def test_missing_files_are_said_and_the_rest_is_planned(corpus, tmp_path, capsys):
    (tmp_path / "train.de").unlink()
    assert main(["train", "small", *corpus, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "train.de not found: training would stop at that" in text
    assert "number of epochs unknown" in text


def test_data_too_large_to_read_is_looked_at_and_found_as_training_finds_it(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vaswani_transformer.training.plan.LARGEST_READ", 1)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["--train-source=~/tra*.en", "--train-target=~/tra*.de"]
    assert main(["train", "small", *corpus, *names, "--dry-run"]) == 0
    assert "are too much to read for a plan" in capsys.readouterr().out
    pq.write_table(pa.table({"source": ["a"], "goal": ["b"]}), tmp_path / "a.parquet")
    data = ["--train-source=none", "--train-target=none", "--train-data=~/a.parquet"]
    assert main(["train", "small", *corpus, *data, "--dry-run"]) == 2
    assert f"{tmp_path / 'a.parquet'}: there is no column 'target'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mistake",
    [
        ["--d-model=15"],
        ["--attention=nonsense"],
        ["--precision=fp16"],
        ["--report-to=nonsense"],
        ["--tokenizer=nowhere"],
        ["--train-target=none"],
        ["--train-data=pairs.tsv"],
        ["--data-dir=nowhere"],
        ["--validation-size=1000"],
        ["--tokens-per-batch=100", "--tokens-per-device=40"],
        ["--no-such-field=1"],
        ["--vocab-size=90"],
        ["--prepared=nowhere"],
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


def test_another_device_is_not_asked_of_this_machine():
    recipe = load_recipe("wmt14-en-de-base", {"precision": "fp16", "attention": "flash_attention_2"})
    assert make_plan(recipe, "h100").precision == "fp16"
    with pytest.raises(UserError, match="'bf16', which a P100 does not compute in: use fp32"):
        make_plan(load_recipe("wmt14-en-de-base", {"precision": "bf16"}), "p100")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("p100 x8", ("p100", 8)),
        ("P100x8", ("p100", 8)),
        ("8x A100", ("a100", 8)),
        ("8 × a100", ("a100", 8)),
        ("NVIDIA GeForce RTX 4090", ("rtx4090", None)),
        ("rtx-4090 x 2", ("rtx4090", 2)),
        ("H100 PCIe", ("h100pcie", None)),
        ("here", ("here", None)),
    ],
)
def test_ways_to_name_a_device(text, parsed):
    assert parse_device(text) == parsed


@pytest.mark.parametrize(
    "text", ["p1000", "", "x8", "8", "p100 x0", "2x a100 x3", "a100 x-1", "p100 p100", "\n", "a100 x" + "9" * 5000]
)
def test_unknown_devices(text):
    with pytest.raises(UserError, match=r"is not known: give one of k80, .*h200.* or here") as caught:
        parse_device(text)
    assert len(str(caught.value).splitlines()) == 1


def test_options_of_a_plan_are_refused_without_it_and_out_of_range(capsys):
    assert main(["train", "small", "--device", "p100"]) == 2
    assert "--device is for --dry-run" in capsys.readouterr().err
    assert main(["train", "small", "--dry-run", "--utilisation", "1.5"]) == 2
    assert "--utilisation is 1.5: it must be above 0 and at most 1" in capsys.readouterr().err
    assert main(["train", "small", "--dry-run", "--device", "abacus"]) == 2
    assert "'abacus' is not known" in capsys.readouterr().err


def test_this_machine_is_measured():
    measured = measure_device("fp32", seconds=0.2).fp32 * 1e12
    left = torch.randn(512, 512)
    rates = []
    for _ in range(20):
        begin = time.perf_counter()
        left @ left
        rates.append(2 * 512**3 / (time.perf_counter() - begin))
    assert 0.1 < measured / statistics.median(rates) < 10  # other programs may run beside
    plan = make_plan(load_recipe("small"), "here")
    assert plan.seconds > 0
    assert "measured on this" in describe_plan(plan)


def test_peaks_grow_with_less_precision():
    for name, device in DEVICES.items():
        assert 0 < device.fp32 < 1000, name
        for half in (device.fp16, device.bf16):
            assert half == 0 or device.fp32 < half < 3000, name
        assert device.bf16 in (0, device.fp16), name


def test_parameters_by_part_are_those_of_the_model():
    plan = make_plan(load_recipe("small"))
    model = VaswaniForConditionalGeneration(plan.config)
    assert plan.parameters == {
        "shared embedding": model.model.shared.weight.numel(),
        "encoder": sum(p.numel() for p in model.model.encoder.layers.parameters()),
        "decoder": sum(p.numel() for p in model.model.decoder.layers.parameters()),
    }
    assert sum(plan.parameters.values()) == sum(parameter.numel() for parameter in model.parameters())
