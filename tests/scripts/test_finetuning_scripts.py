"""The scripts that show fine-tuning: their mistakes, their loops, and whole runs of them."""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import finetuning
import pytest
import torch
from conftest import ROOT, error_of, free_port
from finetuning import assert_same
from torch.nn.functional import cross_entropy
from training_runs import log_of, weights_of
from transformers import AutoModelForSeq2SeqLM

import vaswani_transformer as vt
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.recipes.recipe import Recipe

folder, batch = finetuning.folder, finetuning.batch

SCRIPTS = ROOT / "scripts"


def files(text: Path, **others) -> list[str]:
    """Options that name the text, some of it replaced."""
    names = {f"--{split}-{side}": text / f"{split}.{language}" for split in ("train", "validation")
             for side, language in (("source", "en"), ("target", "de"))}  # fmt: skip
    return [str(part) for pair in {**names, **others}.items() for part in pair]


ALL = ["finetune_seq2seq_trainer", "finetune_accelerate"]
MISTAKES = {
    "no model": ({"model": "nowhere"}, {}, [], "tokenizer folder nowhere: No such file"),
    "no file": ({}, {"--train-source": "nowhere.en"}, [], r"nowhere\.en: No such file"),
    "lines": ({}, {"--train-target": "validation.de"}, [], "has more lines than .*, which has 20:"),
    "output": ({"output": "."}, {}, [], "is not empty: give another --output"),
    "too long": ({}, {}, ["--max-length", "3"], "no pair is left after filtering"),
    "no checkpoint": ({}, {}, ["--resume"], "no checkpoint in .* to resume from"),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_before_training(folder, text, tmp_path, monkeypatch, name, mistake):
    if mistake == "no checkpoint" and name == "finetune_accelerate":
        pytest.skip("does not resume")
    places, replaced, more, message = MISTAKES[mistake]
    monkeypatch.chdir(text)
    where = {"model": str(folder), "output": str(tmp_path / "new"), **places}
    arguments = [where["model"], "--output", where["output"], *files(text, **replaced), *more]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module = importlib.import_module(name)
    assert re.search(message, error_of(module.finetune, module.parse_options()))
    assert not (tmp_path / "new").exists()


REFUSED = {
    "--learning-rate": ["nan", "inf", "-1e-3", "0", "fast"], "--warmup-steps": ["-3", "1.5"],
    "--label-smoothing": ["2", "1", "-0.1", "nan"], "--batch-size": ["0", "-1"], "--steps": ["0", "many"],
    "--gradient-accumulation": ["0"], "--max-length": ["0"], "--evaluate-every": ["0"],
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_nonsense_is_refused_by_argparse(monkeypatch, capsys, name):
    module = importlib.import_module(name)
    for option, value in ((option, value) for option, values in REFUSED.items() for value in values):
        if option == "--evaluate-every" and name == "finetune_accelerate":
            continue  # it has none
        monkeypatch.setattr(sys, "argv", [name, "m", "--output", "o", *files(Path()), f"{option}={value}"])
        with pytest.raises(SystemExit) as caught:
            module.parse_options()
        [line] = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert caught.value.code == 2 and f"error: argument {option}: {value} is " in line
    least = ["--learning-rate", "1e-9", "--label-smoothing", "0", "--batch-size", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [name, "m", "--output", "o", *files(Path()), *least])
    options = module.parse_options()
    assert (options.learning_rate, options.label_smoothing, options.batch_size, options.steps) == (1e-9, 0, 1, 1)


@pytest.mark.parametrize("name", ALL)
def test_an_interrupted_script_says_so_in_one_line(folder, text, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, str(folder), "--output", str(tmp_path / "new"), *files(text)])
    monkeypatch.setattr(vt, "load_pairs", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    assert caught.value.code == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accelerate_loop_weighs_every_token_alike(folder, batch, smoothing):
    accelerate = pytest.importorskip("accelerate")
    module = importlib.import_module("finetune_accelerate")
    accelerator = accelerate.Accelerator(cpu=True)

    def gradients(parts):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, label_smoothing=smoothing).train()
        model = accelerator.prepare(model)
        batches = [{name: tensor[part].clone() for name, tensor in batch.items()} for part in parts]
        loss = module.training_step(accelerator, model, batches)
        return loss, {name: p.grad for name, p in model.named_parameters()}

    loss, whole = gradients([slice(0, 8)])
    parts_loss, parts = gradients([slice(0, 1), slice(1, 4), slice(4, 8)])
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    expected = cross_entropy(model(**batch).logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing)
    assert loss == pytest.approx(expected.item(), rel=1e-5) and parts_loss == pytest.approx(loss, rel=1e-5)
    assert_same(whole, parts, 1e-5)


@pytest.mark.parametrize("schedule", ["constant", "noam"])
def test_schedules_of_the_accelerate_loop_peak_at_the_learning_rate(monkeypatch, schedule):
    module = importlib.import_module("finetune_accelerate")
    options = ["m", "--output", "o", *files(Path()), "--schedule", schedule]
    monkeypatch.setattr(sys, "argv", ["it", *options, "--learning-rate", "0.01", "--warmup-steps", "5"])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = module.new_schedule(optimizer, module.parse_options(), d_model=64)
    rates = []
    for _ in range(20):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    later = [0.01] * 15 if schedule == "constant" else [0.01 * (5 / step) ** 0.5 for step in range(6, 21)]
    assert rates == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01, *later])


@pytest.fixture(scope="module")
def style(tmp_path_factory) -> Path:
    """Text whose German has a style of its own: no capitals, and exclamation marks."""
    path = tmp_path_factory.mktemp("style")
    write_corpus(generate_corpus(2000, 41, 40), path)  # of an odd number each of two processes takes another share
    for file in path.glob("*.de"):
        file.write_text(file.read_text(encoding="utf-8").lower().replace(".\n", "!\n"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A small model trained for half a minute on the same text in its ordinary style."""
    path = tmp_path_factory.mktemp("trained")
    write_corpus(generate_corpus(2000, 40, 40), path)
    recipe = Recipe(
        data_dir=str(path), train_source="train.en", train_target="train.de",
        validation_source="validation.en", validation_target="validation.de", output=str(path / "model"),
        vocab_size=600, d_model=64, d_ff=256, num_heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0,
        tokens_per_batch=2000, tokens_per_device=2000, max_length=100, max_steps=450, warmup_steps=100,
        evaluate_every=450, validation_bleu=0, average_checkpoints=0, keep_checkpoints=1, num_beams=1,
    )  # fmt: skip
    return vt.train(recipe, progress=False).folder


def run(command: list, status: int = 0) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    options = {"env": environment, "text": True, "capture_output": True, "timeout": 600}
    done = subprocess.run([sys.executable, *map(str, command)], **options)
    assert done.returncode == status, done.stderr[-3000:]
    return done


def before_and_after(text: str, name: str) -> tuple[float, float]:
    [found] = re.findall(rf"validation {name} ([0-9.]+) before, ([0-9.]+) after", text)
    return float(found[0]), float(found[1])


@pytest.mark.slow
def test_trainer_script_improves_the_model_and_resumes(trained, style, tmp_path):
    command = [SCRIPTS / "finetune_seq2seq_trainer.py", trained, *files(style), "--batch-size", 16]
    command += ["--warmup-steps", 10, "--gradient-accumulation", 2, "--learning-rate", 3e-3, "--evaluate-every", 40]
    straight = run([*command, "--output", tmp_path / "straight", "--steps", 80])
    before, after = before_and_after(straight.stdout, "BLEU")
    assert after > before + 10
    before, after = before_and_after(straight.stdout, "loss")
    assert after < 0.6 * before
    run([*command, "--output", tmp_path / "resumed", "--steps", 40])
    again = run([*command, "--output", tmp_path / "resumed", "--steps", 80], status=2)
    assert again.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in again.stderr
    resumed = run([*command, "--output", tmp_path / "resumed", "--steps", 80, "--resume"])
    assert before_and_after(resumed.stdout, "loss") == pytest.approx((before, after), abs=1e-4)
    one, other = (weights_of(tmp_path / name) for name in ("straight", "resumed"))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    translated = run(["-m", "vaswani_transformer", "translate", tmp_path / "straight", "They should laugh."])
    assert translated.stdout.strip() and translated.stdout == translated.stdout.lower()
    assert json.loads((tmp_path / "straight" / "config.json").read_text())["use_cache"] is True


@pytest.mark.slow
def test_accelerate_script_on_two_processes_takes_the_steps_of_one(trained, style, tmp_path):
    options = [SCRIPTS / "finetune_accelerate.py", trained, *files(style), "--steps", 70, "--warmup-steps", 10]
    options += ["--learning-rate", 2e-3, "--batch-size", 20]  # 2000 pairs: the second epoch begins with step 51
    one = run([*options, "--output", tmp_path / "one", "--gradient-accumulation", 2])
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port()]
    two = run([*launch, *options, "--output", tmp_path / "two"])
    logs = [log_of(tmp_path / name) for name in ("one", "two")]
    losses = [[entry["loss"] for entry in log] for log in logs]
    assert len(losses[0]) == 70 and losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][:10] == pytest.approx(losses[0][:10], rel=1e-5)
    assert [entry["learning_rate"] for entry in logs[0]] == [entry["learning_rate"] for entry in logs[1]]
    for done in (one, two):
        before, after = before_and_after(done.stdout, "BLEU")
        assert after > before + 10
    assert before_and_after(two.stdout, "loss") == pytest.approx(before_and_after(one.stdout, "loss"), rel=1e-3)
    model, _ = vt.load_model(tmp_path / "two", device="cpu")
    assert model.lm_head.weight is model.get_input_embeddings().weight
