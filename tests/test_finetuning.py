"""Fine-tuning with the tools that people have: stock Trainer, accelerate, PEFT, and the scripts that show them."""

import copy
import importlib.util
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import tiny_config, tiny_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LabelSmoother

import vaswani_transformer as vt
from vaswani_transformer.recipe import Recipe
from vaswani_transformer.synthetic import generate_corpus, write_corpus

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model and a tokenizer for the corpus below, as a user finds them."""
    pairs = generate_corpus(100, 10, 10).train
    tokenizer = vt.train_tokenizer([side for pair in pairs for side in pair], vocab_size=300)
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=128)
    vt.VaswaniForConditionalGeneration(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text")
    write_corpus(generate_corpus(100, 20, 20), path)
    return path


def tokenized(tokenizer, count: int) -> datasets.Dataset:
    """Pairs of all lengths, as a user would tokenise them."""
    columns = dict(
        zip(("source", "target"), zip(*generate_corpus(100, 10, 10).train[:count], strict=True), strict=True)
    )
    pairs = datasets.Dataset.from_dict(columns)
    return pairs.map(
        lambda pair: tokenizer(pair["source"], text_target=pair["target"]), remove_columns=pairs.column_names
    )


class Recorder(TrainerCallback):
    """Notes the gradient of each optimizer step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def stock_trainer(folder, output, count=64, model=None, compute_metrics=None, compute_loss_func=None, **settings):
    """transformers' own classes and nothing of ours."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder) if model is None else model
    options = {
        "max_steps": 3, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 8,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    pairs = tokenized(tokenizer, count)
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(output_dir=str(output), **{**options, **settings}),
        train_dataset=pairs,
        eval_dataset=pairs.select(range(min(count, 12))),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        compute_loss_func=compute_loss_func,
        callbacks=[Recorder()],
    )


def logged(trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def gradients(trainer) -> dict[str, torch.Tensor]:
    [recorder] = [one for one in trainer.callback_handler.callbacks if isinstance(one, Recorder)]
    return recorder.gradients[0]


def assert_same(one: dict, other: dict, tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        error = (one[name] - other[name]).abs().max() / one[name].abs().max()
        assert error <= tolerance, (name, float(error))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# The stock Trainer


def test_stock_trainer_learns_validates_and_saves(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def compute_metrics(prediction):
        texts = [
            tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        ]
        scores = vt.TranslationMetric().compute(predictions=texts[0], references=texts[1])
        return {"bleu": scores["bleu"], "exact": scores["exact_match"]}

    trainer = stock_trainer(
        folder, tmp_path, count=8, max_steps=120, predict_with_generate=True, compute_metrics=compute_metrics
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert logged(trainer)[-1] < 0.1 * logged(trainer)[0]
    assert before["eval_bleu"] < 5 and after["eval_bleu"] > 95  # learned by heart
    trainer.save_model(tmp_path / "new")
    model, loaded = vt.load_model(tmp_path / "new", device="cpu")
    source, target = generate_corpus(100, 10, 10).train[0]
    assert list(vt.Translator(model, loaded).translate([source])) == [target]


def test_predicting_with_generate_does_not_shorten_outputs_for_good(folder, tmp_path):
    """The Trainer writes transformers' default max_length of 20 tokens into the model's generation configuration."""
    lengths = []

    def compute_metrics(prediction):
        lengths.extend((prediction.predictions != -100).sum(axis=1).tolist())
        return {}

    model = tiny_model(vocab_size=len(AutoTokenizer.from_pretrained(folder)), max_position_embeddings=128)
    model.generation_config.update(eos_token_id=None, max_extra_tokens=30)  # never ends by itself
    trainer = stock_trainer(
        folder, tmp_path, count=12, model=model, compute_metrics=compute_metrics,
        predict_with_generate=True, per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.evaluate()
    assert len(lengths) == 12 and min(lengths) > 30
    assert model.generation_config.max_length == 20  # or this test is not needed any more
    trainer.save_model(tmp_path / "new")
    saved = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert "max_length" not in saved and saved["max_extra_tokens"] == 30
    ids = torch.randint(3, 300, (1, 7))
    for one in (model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new")):
        assert one.generate(ids).shape[1] == 1 + 7 + 30
        one.generation_config.max_length = 20  # a user's own, on the other hand, counts
        assert one.generate(ids).shape[1] == 20


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_eight_accumulated_batches_give_the_gradient_of_one_large_batch(folder, tmp_path, smoothing):
    options = {"max_steps": 1, "count": 8, "max_grad_norm": 0.0, "label_smoothing_factor": smoothing}
    whole = stock_trainer(folder, tmp_path, per_device_train_batch_size=8, **options)
    whole.train()
    dealt = stock_trainer(folder, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=8, **options)
    dealt.train()
    assert_same(gradients(whole), gradients(dealt), 1e-5)
    assert logged(whole) == pytest.approx(logged(dealt), rel=1e-5)
    # Both are the gradient of the sum over tokens by their number, which weighs long pairs more than short ones.
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    batch = whole.data_collator([dict(row) for row in whole.train_dataset])
    logits = model(**batch).logits.flatten(0, 1)
    loss = cross_entropy(logits, batch["labels"].flatten(), label_smoothing=smoothing)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert logged(whole) == pytest.approx([loss.item()], rel=1e-5)
    assert_same(expected, gradients(whole), 1e-5)


def test_bf16(folder, tmp_path):
    trainer = stock_trainer(folder, tmp_path, count=8, max_steps=15, bf16=True)
    trainer.train()
    losses = logged(trainer)
    assert losses[-1] < 0.9 * losses[0]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    exact = stock_trainer(folder, tmp_path, count=8, max_steps=1)
    exact.train()
    assert losses[0] != logged(exact)[0] and losses[0] == pytest.approx(logged(exact)[0], rel=0.02)


@pytest.mark.slow
def test_compiled_training_has_the_losses_of_the_plain_one(folder, tmp_path):
    # Eight pairs make one shape of batch: to compile takes longer than to train.
    plain, compiled = (stock_trainer(folder, tmp_path, count=8, torch_compile=value) for value in (False, True))
    plain.train()
    compiled.train()
    assert len(logged(plain)) == 3
    assert logged(compiled) == pytest.approx(logged(plain), rel=1e-4)
    compiled.save_model(tmp_path / "new")
    assert weights_of(tmp_path / "new").keys() == weights_of(folder).keys()


# Label smoothing: ours and the stock one, never both


def test_smoothing_of_both_trainers_is_the_same_number(folder, tmp_path):
    """(1 - eps) * nll + eps * mean over the whole vocabulary, averaged over the tokens that are not padding."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(folder), model=model)
    batch = collator([dict(row) for row in tokenized(collator.tokenizer, 8)])
    labels = batch["labels"]
    logits = model(**batch).logits.detach()
    assert (labels == -100).any()
    for count in (None, torch.tensor(1000)):
        ours = vt.label_smoothed_cross_entropy(logits, labels, 0.1, count)
        stock = LabelSmoother(0.1)({"logits": logits}, labels.clone(), num_items_in_batch=count)
        assert ours.item() == pytest.approx(stock.item(), rel=1e-6)
    # Of half-precision logits the stock one rounds each token's log-probability to that type; ours computes in float32.
    half = logits.bfloat16()
    exact = cross_entropy(half.float().flatten(0, 1), labels.flatten(), label_smoothing=0.1).item()
    ours = vt.label_smoothed_cross_entropy(half, labels, 0.1).item()
    stock = LabelSmoother(0.1)({"logits": half}, labels.clone()).item()
    assert ours == pytest.approx(exact, rel=1e-6) and 1e-5 < abs(stock / exact - 1) < 1e-2


def our_trainer(folder, output, pairs, **settings):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    options = {
        "max_steps": 1, "tokens_per_batch": 100_000, "tokens_per_device": 100_000, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    lengths = {"source_length": "input_ids", "target_length": "labels"}
    pairs = pairs.map(lambda row: {name: len(row[column]) for name, column in lengths.items()})
    return vt.VaswaniTrainer(
        model=model,
        args=vt.VaswaniTrainingArguments(output_dir=str(output), **{**options, **settings}),
        train_dataset=pairs,
        eval_dataset=pairs.select_columns(["input_ids", "labels"]),
        callbacks=[Recorder()],
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothing_is_applied_once_in_every_way_to_ask_for_it(folder, tmp_path, smoothing):
    options = {"max_steps": 1, "count": 8, "max_grad_norm": 0.0, "label_smoothing_factor": smoothing}
    stock = stock_trainer(folder, tmp_path, **options)

    def ours(outputs, labels, num_items_in_batch=None):
        return vt.label_smoothed_cross_entropy(outputs["logits"], labels, smoothing, num_items_in_batch)

    both = stock_trainer(folder, tmp_path, compute_loss_func=ours, **options)  # the Trainer leaves out its own
    vaswani = our_trainer(folder, tmp_path, stock.train_dataset, label_smoothing_factor=smoothing)
    trainers = (stock, both, vaswani)
    for trainer in trainers:
        trainer.train()
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).train()
    batch = stock.data_collator([dict(row) for row in stock.train_dataset])
    outputs = model(**batch)
    labels = batch["labels"].flatten()
    once = cross_entropy(outputs.logits.flatten(0, 1), labels, label_smoothing=smoothing).item()
    assert [logged(trainer)[0] for trainer in trainers] == pytest.approx([once] * 3, rel=1e-5)
    assert_same(gradients(stock), gradients(both), 1e-5)
    assert_same(gradients(stock), gradients(vaswani), 1e-5)
    # The model's own loss, from which nothing of this could come, is plain, in training too.
    assert outputs.loss.item() == pytest.approx(cross_entropy(outputs.logits.flatten(0, 1), labels).item(), rel=1e-6)


def test_validation_loss_is_smoothed_by_the_stock_trainer_and_plain_in_ours(folder, tmp_path):
    stock = stock_trainer(folder, tmp_path, count=8, label_smoothing_factor=0.1)
    ours = our_trainer(folder, tmp_path, stock.train_dataset, label_smoothing_factor=0.1)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    batch = stock.data_collator([dict(row) for row in stock.train_dataset])
    logits, labels = model(**batch).logits.flatten(0, 1), batch["labels"].flatten()
    assert stock.evaluate()["eval_loss"] == pytest.approx(
        cross_entropy(logits, labels, label_smoothing=0.1).item(), rel=1e-5
    )
    assert ours.evaluate()["eval_loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)


def test_a_second_loss_or_other_settings_are_refused(folder, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"compute_loss_func was given .* label_smoothing_factor"):
        vt.VaswaniTrainer(model=model, compute_loss_func=lambda *_, **__: None)
    with pytest.raises(ValueError, match="args are Seq2SeqTrainingArguments: give VaswaniTrainer a Vaswani"):
        vt.VaswaniTrainer(model=model, args=Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True))


# PEFT


@pytest.fixture(scope="module")
def adapted(folder, tmp_path_factory):
    """A LoRA model trained for a few steps, and the folder of its adapters."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = AutoModelForSeq2SeqLM.from_pretrained(folder)
    settings = peft.LoraConfig(task_type=peft.TaskType.SEQ_2_SEQ_LM, r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(base, settings)
    path = tmp_path_factory.mktemp("lora")
    trainer = stock_trainer(
        folder, path, model=model, count=8, max_steps=60, learning_rate=0.03, label_smoothing_factor=0.1
    )
    trainer.train()
    model.eval().save_pretrained(path / "adapter")
    return model, path / "adapter", logged(trainer)


@pytest.fixture(scope="module")
def batch(folder) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    collator = DataCollatorForSeq2Seq(tokenizer, model=AutoModelForSeq2SeqLM.from_pretrained(folder))
    return dict(collator([dict(row) for row in tokenized(tokenizer, 8)]))


def logits_of(model, batch) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


def beams_of(model, batch) -> torch.Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model.eval().generate(**inputs, num_beams=4, length_penalty=0.6)


def test_adapters_learn_and_leave_the_base_model_alone(adapted, folder, batch):
    model, _, losses = adapted
    assert losses[-1] < 0.9 * losses[0]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 6 and all(re.search(r"\.(q|v)_proj\.lora_[AB]\.", name) for name in trained)
    before = weights_of(folder)
    after = {name.replace(".base_layer", ""): p for name, p in model.get_base_model().state_dict().items()}
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    base = logits_of(AutoModelForSeq2SeqLM.from_pretrained(folder), batch)
    assert (logits_of(model, batch) - base).abs().max() > 0.1
    with model.disable_adapter():
        torch.testing.assert_close(logits_of(model, batch), base, rtol=0, atol=1e-6)


def load_as_peft_model(folder, adapter):
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(folder), adapter)


def load_as_auto_peft_model(folder, adapter):
    from peft import AutoPeftModelForSeq2SeqLM

    return AutoPeftModelForSeq2SeqLM.from_pretrained(adapter)


def load_into_our_model(folder, adapter):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    model.load_adapter(adapter)
    return model


def load_as_model(folder, adapter):
    return AutoModelForSeq2SeqLM.from_pretrained(adapter)


@pytest.mark.parametrize("load", [load_as_peft_model, load_as_auto_peft_model, load_into_our_model, load_as_model])
@pytest.mark.filterwarnings("ignore:Unable to fetch remote file")  # PEFT looks for a tokenizer beside the adapters
def test_saved_adapters_come_back_in_every_way(adapted, folder, batch, load, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, adapter, _ = adapted
    loaded = load(folder, adapter)
    torch.testing.assert_close(logits_of(loaded, batch), logits_of(model, batch), rtol=0, atol=1e-6)
    assert torch.equal(beams_of(loaded, batch), beams_of(model, batch))


def test_merged_model_is_an_ordinary_one(adapted, folder, batch, tmp_path, recwarn):
    model, adapter, _ = adapted
    exact = load_as_peft_model(folder, adapter).double()
    torch.testing.assert_close(
        logits_of(copy.deepcopy(exact).merge_and_unload(), batch), logits_of(exact, batch), rtol=0, atol=1e-9
    )
    merged = load_as_peft_model(folder, adapter).merge_and_unload()
    assert type(merged) is vt.VaswaniForConditionalGeneration
    merged.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert weights_of(tmp_path).keys() == weights_of(folder).keys()
    loaded, _ = vt.load_model(tmp_path, device="cpu")
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert torch.equal(logits_of(loaded, batch), logits_of(merged, batch))
    expected = logits_of(model, batch)  # float32 rounds the sum of two matrices
    torch.testing.assert_close(logits_of(loaded, batch), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert torch.equal(beams_of(loaded, batch), beams_of(model, batch))
    assert not [str(one.message) for one in recwarn if "tie" in str(one.message)]


def test_adapters_on_all_linear_layers_and_norms_merge(folder, batch, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        task_type="SEQ_2_SEQ_LM", target_modules="all-linear", modules_to_save=["layer_norm"], init_lora_weights=False
    )
    model = peft.get_peft_model(AutoModelForSeq2SeqLM.from_pretrained(folder), settings)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "layer_norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    expected = logits_of(model, batch)
    model.save_pretrained(tmp_path / "adapter")
    merged = load_as_peft_model(folder, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    logits = logits_of(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged"), batch)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_our_trainer_trains_adapters(folder, tmp_path):
    peft = pytest.importorskip("peft")
    trainer = our_trainer(folder, tmp_path, tokenized(AutoTokenizer.from_pretrained(folder), 8))
    settings = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q_proj", "v_proj"])
    arguments = copy.copy(trainer.args)
    arguments.max_steps, arguments.warmup_steps = 20, 20
    adapted = vt.VaswaniTrainer(
        model=peft.get_peft_model(trainer.model, settings), args=arguments, train_dataset=trainer.train_dataset
    )
    adapted.train()
    assert logged(adapted)[-1] < logged(adapted)[0]


# The scripts


def script(name: str):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files(text: Path, **others) -> list[str]:
    """Options that name the text, some of it replaced."""
    names = {f"--{split}-{side}": text / f"{split}.{language}" for split in ("train", "validation")
             for side, language in (("source", "en"), ("target", "de"))}  # fmt: skip
    return [str(part) for pair in {**names, **others}.items() for part in pair]


ALL = ["finetune_seq2seq_trainer", "finetune_accelerate", "finetune_lora"]
MISTAKES = {
    "no model": ({"model": "nowhere"}, {}, [], "'nowhere' does not exist"),
    "no file": ({}, {"--train-source": "nowhere.en"}, [], r"nowhere\.en cannot be read"),
    "lines": ({}, {"--train-target": "validation.de"}, [], "has 100 lines and .* has 20"),
    "output": ({"output": "."}, {}, [], "is not empty: give another --output"),
    "too long": ({}, {}, ["--max-length", "3"], "no pair is left after filtering"),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_before_training(folder, text, tmp_path, monkeypatch, name, mistake):
    if name == "finetune_lora":
        pytest.importorskip("peft")
    places, replaced, more, message = MISTAKES[mistake]
    monkeypatch.chdir(text)
    where = {"model": str(folder), "output": str(tmp_path / "new"), **places}
    arguments = [where["model"], "--output", where["output"], *files(text, **replaced), *more]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module = script(name)
    with pytest.raises(vt.UserError, match=message) as caught:
        module.finetune(module.parse_options())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


REFUSED = {
    "--learning-rate": ["nan", "inf", "-1e-3", "0", "fast"],
    "--warmup-steps": ["-3", "1.5"],
    "--label-smoothing": ["2", "1", "-0.1", "nan"],
    "--gradient-accumulation": ["0"],
    "--batch-size": ["0", "-1"],
    "--steps": ["0", "many"],
    "--max-length": ["0"],
    "--evaluate-every": ["0"],
    "--rank": ["0"],
    "--alpha": ["0", "-16"],
    "--targets": ["lm_head", "shared", "embed_tokens", "model.decoder.embed_tokens"],
}
ONLY_LORA = ("--rank", "--alpha", "--targets")
NOT_LORA = ("--warmup-steps", "--label-smoothing", "--gradient-accumulation")


def has_option(name: str, option: str) -> bool:
    if option == "--evaluate-every":
        return name == "finetune_seq2seq_trainer"
    return option not in (NOT_LORA if name == "finetune_lora" else ONLY_LORA)


@pytest.mark.parametrize("name", ALL)
def test_nonsense_is_refused_by_argparse(monkeypatch, capsys, name):
    if name == "finetune_lora":
        pytest.importorskip("peft")
    module = script(name)
    for option, values in REFUSED.items():
        for value in values if has_option(name, option) else []:
            monkeypatch.setattr(sys, "argv", [name, "m", "--output", "o", *files(Path()), f"{option}={value}"])
            with pytest.raises(SystemExit) as caught:
                module.parse_options()
            [line] = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
            assert caught.value.code == 2 and f"error: argument {option}: {value} is " in line


@pytest.mark.parametrize("name", ["finetune_seq2seq_trainer", "finetune_accelerate"])
def test_the_least_values_are_accepted(monkeypatch, name):
    options = ["--learning-rate", "1e-9", "--label-smoothing", "0", "--batch-size", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [name, "m", "--output", "o", *files(Path()), *options])
    given = script(name).parse_options()
    assert (given.learning_rate, given.label_smoothing, given.batch_size, given.steps) == (1e-9, 0, 1, 1)


@pytest.mark.parametrize("name", ALL)
def test_an_interrupted_script_says_so_in_one_line(folder, text, tmp_path, monkeypatch, capsys, name):
    if name == "finetune_lora":
        pytest.importorskip("peft")
    monkeypatch.setattr(sys, "argv", [name, str(folder), "--output", str(tmp_path / "new"), *files(text)])

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(vt, "load_pairs", interrupted)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    assert caught.value.code == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.fixture
def precision(monkeypatch):
    """Takes back what the Trainer says of the precision to the whole process."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["lm_head"]])
@pytest.mark.usefixtures("precision")
@pytest.mark.filterwarnings("ignore")  # PEFT warns of tied matrices
def test_lora_script_keeps_a_merged_model_only_if_it_is_the_trained_one(folder, text, tmp_path, monkeypatch, targets):
    pytest.importorskip("peft")
    module, output = script("finetune_lora"), tmp_path / "new"
    more = ["--steps", "3", "--learning-rate", "0.1", "--bf16", "--batch-size", "8"]
    monkeypatch.setattr(sys, "argv", ["it", str(folder), "--output", str(output), *files(text), *more])
    options = module.parse_options()
    options.targets = targets  # past the check of the command line
    if targets == ["lm_head"]:
        with pytest.raises(vt.UserError, match=r"merged model: logits differ by .* do not use it"):
            module.finetune(options)
        assert [path.name for path in output.iterdir()] == ["adapter"]
    else:
        module.finetune(options)
        assert sorted(path.name for path in output.iterdir()) == ["adapter", "merged"]
        vt.load_model(output / "merged", device="cpu")


def test_nothing_to_resume_from(folder, text, tmp_path, monkeypatch):
    module = script("finetune_seq2seq_trainer")
    monkeypatch.setattr(sys, "argv", ["it", str(folder), "--output", str(tmp_path / "new"), *files(text), "--resume"])
    with pytest.raises(vt.UserError, match=r"no checkpoint in .* to resume from"):
        module.finetune(module.parse_options())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accelerate_loop_weighs_every_token_alike(folder, batch, smoothing):
    accelerate = pytest.importorskip("accelerate")
    module = script("finetune_accelerate")
    accelerator = accelerate.Accelerator(cpu=True)

    def gradients(parts):
        model = accelerator.prepare(AutoModelForSeq2SeqLM.from_pretrained(folder))
        batches = [{name: tensor[part].clone() for name, tensor in batch.items()} for part in parts]
        loss = module.training_step(accelerator, model, batches, smoothing)
        return loss, {name: p.grad for name, p in model.named_parameters()}

    loss, whole = gradients([slice(0, 8)])
    parts_loss, parts = gradients([slice(0, 1), slice(1, 4), slice(4, 8)])
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    expected = cross_entropy(model(**batch).logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing)
    assert loss == pytest.approx(expected.item(), rel=1e-5) and parts_loss == pytest.approx(loss, rel=1e-5)
    assert_same(whole, parts, 1e-5)


@pytest.mark.parametrize("schedule", ["constant", "noam"])
def test_schedules_of_the_accelerate_loop_peak_at_the_learning_rate(monkeypatch, schedule):
    module = script("finetune_accelerate")
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


# The scripts as commands: minutes, so only with `make slow`


@pytest.fixture(scope="module")
def style(tmp_path_factory) -> Path:
    """Text whose German has a style of its own: no capitals, and exclamation marks."""
    path = tmp_path_factory.mktemp("style")
    for file in write_corpus(generate_corpus(2000, 40, 40), path).values():
        if file.suffix == ".de":
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


def run(command: list, cache: Path, status: int = 0) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, text=True, capture_output=True, timeout=600
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done


def before_and_after(text: str, name: str) -> tuple[float, float]:
    [found] = re.findall(rf"validation {name} ([0-9.]+) before, ([0-9.]+) after", text)
    return float(found[0]), float(found[1])


@pytest.mark.slow
def test_trainer_script_improves_the_model_and_resumes(trained, style, tmp_path):
    command = [
        SCRIPTS / "finetune_seq2seq_trainer.py",
        trained,
        *files(style),
        "--batch-size",
        16,
        "--warmup-steps",
        10,
    ]
    command += ["--gradient-accumulation", 2, "--learning-rate", 3e-3, "--evaluate-every", 40]
    straight = run([*command, "--output", tmp_path / "straight", "--steps", 80], tmp_path)
    before, after = before_and_after(straight.stdout, "BLEU")
    assert after > before + 10
    before, after = before_and_after(straight.stdout, "loss")
    assert after < 0.6 * before
    run([*command, "--output", tmp_path / "resumed", "--steps", 40], tmp_path)
    again = run([*command, "--output", tmp_path / "resumed", "--steps", 80], tmp_path, status=2)
    assert again.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in again.stderr
    resumed = run([*command, "--output", tmp_path / "resumed", "--steps", 80, "--resume"], tmp_path)
    assert before_and_after(resumed.stdout, "loss") == pytest.approx((before, after), abs=1e-4)
    one, other = (weights_of(tmp_path / name) for name in ("straight", "resumed"))
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)
    translated = run(["-m", "vaswani_transformer", "translate", tmp_path / "straight", "They should laugh."], tmp_path)
    assert translated.stdout.strip() and translated.stdout == translated.stdout.lower()
    config = json.loads((tmp_path / "straight" / "config.json").read_text())
    assert config["use_cache"] is True


@pytest.mark.slow
def test_trainer_script_compiled_and_in_bf16(trained, style, tmp_path):
    command = [SCRIPTS / "finetune_seq2seq_trainer.py", trained, *files(style), "--output", tmp_path / "new"]
    command += ["--steps", 40, "--warmup-steps", 10, "--learning-rate", 2e-3, "--evaluate-every", 40]
    done = run([*command, "--batch-size", 16, "--bf16", "--torch-compile"], tmp_path)
    before, after = before_and_after(done.stdout, "loss")
    assert after < 0.8 * before
    assert weights_of(tmp_path / "new").keys() == weights_of(trained).keys()


@pytest.mark.slow
def test_accelerate_script_on_two_processes_takes_the_steps_of_one(trained, style, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [SCRIPTS / "finetune_accelerate.py", trained, *files(style), "--steps", 70, "--warmup-steps", 10]
    options += ["--learning-rate", 2e-3, "--batch-size", 20]  # 2000 pairs: the second epoch begins with step 51
    one = run([*options, "--output", tmp_path / "one", "--gradient-accumulation", 2], tmp_path)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", port]
    two = run([*launch, *options, "--output", tmp_path / "two"], tmp_path)
    logs = [
        [json.loads(line) for line in (tmp_path / name / "training_log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
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


@pytest.mark.slow
def test_accelerate_script_in_bf16_with_the_schedule_of_the_paper(trained, style, tmp_path):
    command = [SCRIPTS / "finetune_accelerate.py", trained, *files(style), "--output", tmp_path / "new", "--bf16"]
    command += ["--schedule", "noam", "--steps", 40, "--warmup-steps", 10, "--learning-rate", 2e-3]
    before, after = before_and_after(run([*command, "--batch-size", 16], tmp_path).stdout, "loss")
    assert after < 0.8 * before
    assert {tensor.dtype for tensor in weights_of(tmp_path / "new").values()} == {torch.float32}


@pytest.mark.slow
def test_lora_script(trained, style, tmp_path):
    pytest.importorskip("peft")
    weights = (trained / "model.safetensors").read_bytes()
    command = [SCRIPTS / "finetune_lora.py", trained, *files(style), "--output", tmp_path / "new"]
    command += ["--steps", 100, "--batch-size", 16, "--learning-rate", 5e-3]
    text = run(command, tmp_path).stdout
    before, after = (float(loss) for loss in re.findall(r"validation loss ([0-9.]+)", text))
    assert after < 0.8 * before
    reloaded, merged = (float(number) for number in re.findall(r"logits differ by ([0-9.e+-]+)", text))
    assert reloaded <= 1e-6 and merged <= 1e-5
    assert (trained / "model.safetensors").read_bytes() == weights
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["adapter", "merged"]
    size = (tmp_path / "new" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert size < 0.1 * len(weights)
    pairs = vt.load_pairs(source=style / "validation.en", target=style / "validation.de")
    model, tokenizer = vt.load_model(tmp_path / "new" / "merged", device="cpu")
    losses, counts = vt.score_pairs(model, tokenizer, list(pairs["source"]), list(pairs["target"]))
    assert sum(losses) / sum(counts) == pytest.approx(after, abs=1e-3)
