"""Settings that `auto` leaves to the text and the time."""

import random
import re
from dataclasses import fields, replace

import finetuning
import numpy as np
import pytest
import torch
from conftest import error_of
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import equation_3
from training_runs import stop_after
from translating import run

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration, hardware, load_recipe, prepare
from vaswani_transformer.data.batching import TokenBatchSampler
from vaswani_transformer.data.prepared import check_recipe_matches, open_prepared
from vaswani_transformer.json_and_yaml import read_yaml
from vaswani_transformer.recipes.recipe import AUTO, CHOSEN, Recipe
from vaswani_transformer.training import settings as rules
from vaswani_transformer.training.run_folder import changed_settings
from vaswani_transformer.training.settings import ROWS, choose_settings, micro_batches_of, vocabulary_size

SMALL = {"d_model": 16, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
SMALL |= {"validation_bleu": 0, "best_by": "loss"}
folder = finetuning.folder


def write_pairs(path, pairs):
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return path


def words(number, seed=0):
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(number))


@pytest.fixture
def data(tmp_path):
    """A file of 400 pairs of 6 words."""
    return write_pairs(tmp_path / "pairs.tsv", [(words(6, n), words(6, -n - 1)) for n in range(400)])


def chosen(data, output, **changes) -> Recipe:
    return choose_settings(load_recipe("auto", {"train_data": str(data), "output": str(output), **changes}))


@given(st.lists(st.floats(1, 1e9), min_size=2, max_size=2), st.floats(1, 100))
def test_more_text_has_no_smaller_a_vocabulary_nor_model(sizes, length):
    less, more = sorted(sizes)
    assert 500 <= vocabulary_size(less, length) <= vocabulary_size(more, length) <= 37_000
    assert vocabulary_size(less, length) <= vocabulary_size(less, 1)
    rows = [next(row for row in ROWS if size <= row.words) for size in (less, more)]
    for name in ("d_model", "d_ff", "encoder_layers", "tokens_per_batch"):
        assert getattr(rows[0], name) <= getattr(rows[1], name)


def test_short_lines_have_an_entry_for_each_eight_words(data, tmp_path):
    assert chosen(data, tmp_path / "out").vocab_size == 2 * 400 * 6 / 8
    longer = write_pairs(tmp_path / "longer.tsv", [(words(12, n), words(12, -n - 1)) for n in range(200)])
    assert chosen(longer, tmp_path / "out").vocab_size == 500


def test_a_text_of_sentences_is_changed_in_training_and_no_other(data, tmp_path):
    assert chosen(data, tmp_path / "out").augmentation is None
    for end, kind in (("?", "default"), (" ไม่", "default"), (";", None)):  # a program's line
        pairs = [(words(6, number) + ".", words(6) + end) for number in range(60)]
        assert chosen(write_pairs(tmp_path / "sentences.tsv", pairs), tmp_path / "out").augmentation == kind


def test_every_open_field_is_chosen_and_no_other(data, tmp_path, monkeypatch):
    recipe, given = chosen(data, tmp_path / "out"), load_recipe("auto", {"train_data": str(data)})
    for field in fields(Recipe):
        if field.name != "output":
            value, was = (getattr(each, field.name) for each in (recipe, given))
            is_chosen = value is None if field.name == "augmentation" else type(value) in (int, float)
            assert (value != AUTO and is_chosen) if field.name in CHOSEN else value == was
    assert recipe.decline_steps < recipe.max_steps and recipe.validation_size == 40
    kept = {"d_model": 48, "vocab_size": 700, "max_steps": 900, "warmup_steps": 7, "dropout": 0.25}
    assert chosen(data, tmp_path / "out", d_model=300).num_heads == 4  # the preset's 8 do not divide it
    recipe = chosen(data, tmp_path / "out", **kept)
    assert {name: getattr(recipe, name) for name in kept} == kept
    assert recipe.label_smoothing == rules.SMOOTHING
    monkeypatch.setattr(rules, "LITTLE_TEXT", 400 * 12 - 1)
    assert chosen(data, tmp_path / "out").label_smoothing == 0.1  # the paper's, from so many words on
    assert equation_3(7, 48, 7, recipe.learning_rate_scale) == pytest.approx(ROWS[0].rate, rel=0.01)


def test_the_rate_is_for_a_presets_width_and_a_batch_has_pairs_for_all_processes(data, tmp_path, monkeypatch):
    recipe = chosen(data, tmp_path / "out", preset="table3-c-dmodel-256")
    highest = equation_3(recipe.warmup_steps, 256, recipe.warmup_steps, recipe.learning_rate_scale)
    assert highest == pytest.approx(ROWS[1].rate, rel=0.01) and ROWS[1].d_model == 256 != ROWS[0].d_model
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert chosen(data, tmp_path / "out").tokens_per_batch == 8 * 4 * 200


@pytest.mark.parametrize("minutes", [1, 2])
def test_the_steps_fit_into_the_minutes(data, tmp_path, monkeypatch, minutes):
    monkeypatch.setattr(rules, "trial_seconds", lambda *_: 0.5)
    recipe = chosen(data, tmp_path / "out", max_minutes=minutes)
    assert recipe.max_steps == round(rules.SPARE_STEPS * rules.TRAINED * 60 * minutes / 0.5)
    assert recipe.warmup_steps == round(0.4 * recipe.max_steps / rules.SPARE_STEPS)  # more than a fifth: there are few
    assert recipe.warmup_steps + recipe.decline_steps < recipe.max_steps
    of_both = chosen(data, tmp_path / "out", max_minutes=minutes, max_steps=10**6)  # the lower limit counts
    assert (of_both.warmup_steps, of_both.d_model) == (recipe.warmup_steps, recipe.d_model)
    later = chosen(data, tmp_path / "out", max_minutes=2 * minutes)
    assert recipe.validation_bleu == 100 and later.validation_bleu == max(100, 50 * minutes)
    monkeypatch.setattr(rules, "trial_seconds", lambda *_: 60.0)
    message = error_of(chosen, data, tmp_path / "out", max_minutes=minutes)
    times = float(re.search(r"give (\S+) times the minutes", message)[1])
    assert chosen(data, tmp_path / "out", max_minutes=minutes * times).max_steps > 50


def test_a_text_smaller_than_a_batch_has_steps_enough_to_learn_from(tmp_path):
    few = write_pairs(tmp_path / "few.tsv", [("a b", "c d"), ("e f", "g h")])
    assert chosen(few, tmp_path / "out").max_steps == rules.FEW_STEPS


def test_the_trial_computes_what_the_training_does(data, tmp_path, monkeypatch):
    seen, forward = [], VaswaniForConditionalGeneration.forward
    kind = lambda model: model.config._attn_implementation  # noqa: E731
    noting = lambda self, **inputs: (seen.append(kind(self)), forward(self, **inputs))[1]  # noqa: E731
    monkeypatch.setattr(VaswaniForConditionalGeneration, "forward", noting)
    for changes in ({}, {"attention": "eager"}, {"attention": "sdpa"}):
        chosen(data, tmp_path / "out", max_minutes=1, **changes, **SMALL)
    kinds = ["eager", "sdpa"]
    assert list(dict.fromkeys(seen)) == (kinds if (hardware.accelerator() is None) else kinds[::-1])
    made = []
    monkeypatch.setattr(rules, "TokenBatchSampler", lambda *a: (made.append(a), TokenBatchSampler(*a))[1])
    for changes in ({}, {"augmentation": "repeat:1"}):
        chosen(data, tmp_path / "out", max_minutes=1, **changes, **SMALL)
    source, target, *_, changed_lengths = made[1]
    assert made[0][-1] is None and (changed_lengths is not None) == (hardware.accelerator() is None)
    if changed_lengths:  # all but the end is there twice, unless that is longer than any pair
        lengths = np.stack([source, target])
        twice = np.where((2 * lengths - 1).max(axis=0) <= lengths.max(), 2 * lengths - 1, lengths)
        assert (changed_lengths(0) == twice).all() and not (lengths == twice).all()


def test_a_small_text_is_enough_to_finetune_on_and_prepared_as_before(data, folder, tmp_path, capsys):
    given = {"from_model": str(folder), "train_data": str(data), "output": str(tmp_path / "out")}
    sizes = {"validation_size": 40, "validation_bleu": 500}
    assert choose_settings(load_recipe("finetune", given)) == load_recipe("finetune", given | sizes)
    command = ["prepare", "finetune", "--from", folder, "--train-data", data, "--output", tmp_path / "prepared"]
    assert run(*command) == 0 and len(open_prepared(tmp_path / "prepared").validation) == 40
    given |= {"train_data": None, "prepared": str(tmp_path / "prepared")}
    check_recipe_matches(open_prepared(given["prepared"]), choose_settings(load_recipe("finetune", given)))
    assert "no model folder MODEL" in error_of(choose_settings, load_recipe("finetune", {"train_data": str(data)}))


def test_finetuning_is_timed_with_the_model_that_it_starts_from(data, folder, tmp_path, monkeypatch):
    size, sizes = VaswaniConfig.from_pretrained(folder).d_model, []
    noting = lambda config: (sizes.append(config.d_model), VaswaniForConditionalGeneration(config))[1]  # noqa: E731
    monkeypatch.setattr(rules, "VaswaniForConditionalGeneration", noting)
    given = {"from_model": str(folder), "train_data": str(data), "output": str(tmp_path / "out"), "max_minutes": 60}
    recipe = choose_settings(load_recipe("finetune", given | {"max_steps": AUTO, "learning_rate_scale": AUTO}))
    highest = equation_3(recipe.warmup_steps, size, recipe.warmup_steps, recipe.learning_rate_scale)
    assert sizes == [size] and highest == pytest.approx(ROWS[0].rate, rel=0.01)


def test_few_times_through_the_text_make_a_smaller_model(tmp_path, monkeypatch):
    data = write_pairs(tmp_path / "more.tsv", [(words(30, n), words(30, -n - 1)) for n in range(2000)])
    widths, sizes, trained, train_one = [], [], {}, rules.recipe_tokenizer
    one = lambda *about: trained["one"] if trained else trained.setdefault("one", train_one(*about))  # noqa: E731
    monkeypatch.setattr(rules, "recipe_tokenizer", one)  # of the same text each time
    for seconds in (1e-9, 0.02, 0.1):
        monkeypatch.setattr(rules, "trial_seconds", lambda *_, seconds=seconds: seconds)
        recipe = chosen(data, tmp_path / "out", max_minutes=1, augmentation="default")
        widths.append((recipe.d_model, recipe.dropout, recipe.max_steps > 1140, recipe.augmentation_start))
        sizes.append(recipe.vocab_size)
    assert widths == [(256, 0.3, True, 0), (256, 0.1, True, 1710), (128, 0.1, False, 342)]  # 60% of those that fit
    assert sizes == [vocabulary_size(read, 30) for read in (120_000, 120_000, 120_000 * 5.2 / 6)]  # of what is read
    assert chosen(data, tmp_path / "out", max_minutes=1).augmentation_start == 0  # nothing is changed
    given = {"d_model": 64, "num_heads": 2}
    assert chosen(data, tmp_path / "out", max_minutes=1, **given).d_model == 64
    given |= {"dropout": 0.1, "max_steps": 10**6, "warmup_steps": 9, "evaluate_every": 9, "augmentation": "default"}
    assert chosen(data, tmp_path / "out", max_minutes=1, **given).augmentation_start == 342  # it needs the trial, too
    monkeypatch.setattr(rules, "ROWS", [row._replace(words=row.words / 10) for row in ROWS])
    assert chosen(data, tmp_path / "out", max_minutes=1).d_model == 128  # two rows less, where steps are few, too
    monkeypatch.setattr(rules, "trial_seconds", lambda *_: 0.5)
    assert chosen(data, tmp_path / "out", max_minutes=1).vocab_size == vocabulary_size(120_000 * 1.04 / 6, 30)
    assert chosen(data, tmp_path / "out", max_minutes=1, vocab_size=1600).vocab_size == 1600


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("one", "eins")], "cannot hold validation_size 1 pairs out of 1"),
        ([("", " ")] * 100, "odd.tsv: empty"),
        ([("a word", "ein Wort")] * 100, None),
        ([("1 2", "3 4"), ("?", "!")] * 60, None),
        ([("今天天气很好" * 3, "今日は天気がいい" * 3)] * 60, None),
        ([(f"the same {n}", f"the same {n}") for n in range(100)], None),
    ],
    ids=["one pair", "blank", "all the same", "no letters", "no spaces", "one language"],
)
def test_odd_text_is_trained_or_refused_in_one_line(tmp_path, capsys, pairs, message):
    data, out = write_pairs(tmp_path / "odd.tsv", pairs), tmp_path / "out"
    sizes = (f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items())
    status = run("train", "--train-data", data, "--output", out, "--max-steps", 2, *sizes)
    errors = capsys.readouterr().err
    if message:
        assert status == 2 and message in errors and not out.exists()
    else:
        assert status == 0 and read_yaml(out / "recipe.yaml")["max_steps"] == 2, errors
        VaswaniForConditionalGeneration.from_pretrained(out)


def test_an_interrupted_run_keeps_what_was_chosen(data, tmp_path, monkeypatch):
    out, times = tmp_path / "out", iter([0.5, 0.25])
    recipe = load_recipe("auto", {"train_data": str(data), "output": str(out), "max_minutes": 1, **SMALL})
    recipe = replace(recipe, evaluate_every=2, log_every=1)
    monkeypatch.setattr(rules, "trial_seconds", lambda *_: next(times))
    stop_after(3, recipe)
    written = read_yaml(out / "recipe.yaml")
    assert written["max_steps"] == 228
    assert choose_settings(recipe) == replace(recipe, **{name: written[name] for name in CHOSEN})
    kept = out / "checkpoints" / "recipe.yaml"
    kept.write_text(kept.read_text().replace("augmentation_start: 0\n", ""))  # as an older version wrote it
    assert choose_settings(recipe).augmentation_start == 0
    assert choose_settings(replace(recipe, max_minutes=0.5)).max_steps == 228  # the clock ends it
    longer = choose_settings(replace(recipe, max_minutes=3))
    assert longer.max_steps == 3 * 228 and longer.decline_steps == 3 * written["decline_steps"]
    for same in (longer, load_recipe(str(out / "recipe.yaml"))):
        assert not changed_settings(same, out / "checkpoints" / "recipe.yaml")
    other = replace(recipe, max_length=19)  # another run, which is chosen for anew
    assert "max_length: 19, was 200" in error_of(choose_settings, other)
    assert choose_settings(replace(other, overwrite=True)).max_steps == 456
    times = iter([1.0] * 9)  # other minutes start again with `overwrite`
    assert choose_settings(replace(recipe, overwrite=True, max_minutes=2)).max_steps < 2 * 228


@pytest.mark.parametrize("changes", [{}, {"augmentation": "default"}, {"validation_data": "pairs.tsv"}])
def test_prepared_data_is_trained_on_as_it_was_prepared(data, tmp_path, changes):
    fields = {"train_data": data.name, "data_dir": str(tmp_path), "vocab_size": 300, "validation_size": 11}
    prepare(load_recipe("small", fields | {"max_length": 200} | changes), tmp_path / "prepared", progress=False)
    recipe = choose_settings(load_recipe("auto", {"prepared": f"{tmp_path}/prepared", "output": f"{tmp_path}/out"}))
    check_recipe_matches(open_prepared(recipe.prepared), recipe)
    assert recipe.validation_size == (1000 if "validation_data" in changes else 11)


def test_other_commands_choose_nothing(data, tmp_path, fails):
    for words in (("prepare", "auto"), ("distill", tmp_path / "teacher", "--student", "auto")):
        line = fails(*words, "--train-data", data, "--output", tmp_path / "out")
        assert "is auto, which `vaswani train` alone chooses" in line


def test_a_trial_takes_smaller_parts_of_a_batch_where_memory_ends(data, tmp_path, monkeypatch, fails):
    memory = 1000

    def seconds(recipe, *_):
        if recipe.tokens_per_device > memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return 0.5

    monkeypatch.setattr(rules, "trial_seconds", seconds)
    recipe = chosen(data, tmp_path / "out", max_minutes=1)
    assert recipe.max_steps == round(rules.SPARE_STEPS * rules.TRAINED * 60 / 0.5)
    assert recipe.tokens_per_device == AUTO  # training finds out itself, beside what it needs
    memory = 0  # another program has it
    line = fails("train", "--train-data", data, "--max-minutes", 1, "--output", tmp_path / "out", status=1)
    assert line.startswith("error: out of memory")


@given(st.integers(300, 30_000), st.integers(300, 30_000), st.integers(1, 16))
def test_a_step_is_dealt_out_evenly_and_in_as_few_parts_as_fit(tokens, per_device, processes):
    parts = micro_batches_of(Recipe(tokens_per_batch=tokens, tokens_per_device=per_device), processes)
    assert parts % processes == 0 and tokens / parts <= per_device
    assert parts == processes or tokens / (parts - processes) > per_device


def test_of_a_mac_the_memory_is_not_known_and_no_process_is_forked(monkeypatch):
    for module in (rules, hardware):
        monkeypatch.setattr(module, "accelerator", lambda: torch.device("mps"))
    assert micro_batches_of(Recipe(tokens_per_batch=25_000), 1) == 7  # of 4,096 tokens, as in training
    assert hardware.default_num_workers() == 0
