"""Fine-tuning with the tools that people have: the stock Trainer, and its label smoothing."""

import finetuning
import numpy as np
import pytest
import torch
import transformers
from finetuning import assert_same, tokenized
from test_trainer import logged
from torch.nn.functional import cross_entropy
from training_runs import weights_of
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, TrainerCallback

import vaswani_transformer as vt
from vaswani_transformer.data.synthetic import generate_corpus

folder = finetuning.folder


class Recorder(TrainerCallback):
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
    return transformers.Seq2SeqTrainer(
        model=model,
        args=transformers.Seq2SeqTrainingArguments(output_dir=str(output), **{**options, **settings}),
        train_dataset=pairs,
        eval_dataset=pairs.select(range(min(count, 12))),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        compute_loss_func=compute_loss_func,
        callbacks=[Recorder()],
    )


def gradients(trainer) -> dict[str, torch.Tensor]:
    [recorder] = [one for one in trainer.callback_handler.callbacks if isinstance(one, Recorder)]
    return recorder.gradients[0]


def test_stock_trainer_learns_validates_and_saves(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def compute_metrics(prediction):
        texts = [
            tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        ]
        scores = vt.TranslationMetric().compute(predictions=texts[0], references=texts[1])
        return {"bleu": scores["bleu"], "exact": scores["exact_match"]}

    generating = {"predict_with_generate": True, "compute_metrics": compute_metrics}
    trainer = stock_trainer(folder, tmp_path, count=8, max_steps=120, **generating)
    trainer.train()
    assert logged(trainer)[-1] < 0.1 * logged(trainer)[0]
    assert trainer.evaluate()["eval_bleu"] > 95  # learned by heart
    trainer.save_model(tmp_path / "new")
    model, loaded = vt.load_model(tmp_path / "new", device="cpu")
    source, target = generate_corpus(100, 10, 10).train[0]
    assert list(vt.Translator(model, loaded).translate([source])) == [target]


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
    loss = cross_entropy(model(**batch).logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing)
    loss.backward()
    assert logged(whole) == pytest.approx([loss.item()], rel=1e-5)
    assert_same({name: p.grad for name, p in model.named_parameters()}, gradients(whole), 1e-5)


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


def test_smoothing_is_applied_once_in_every_way_to_ask_for_it(folder, tmp_path):
    """`config.label_smoothing` smooths training and leaves validation plain; the Trainer's own switch replaces it."""

    def ours(outputs, labels, num_items_in_batch=None):  # in place of which the Trainer leaves out its own
        return vt.label_smoothed_cross_entropy(outputs["logits"], labels, 0.4, num_items_in_batch)

    losses, evaluations = [], []
    for own, stocks, function in ((0.1, 0.0, None), (0.1, 0.4, None), (0.0, 0.4, None), (0.0, 0.4, ours)):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, label_smoothing=own)
        options = {"max_steps": 1, "label_smoothing_factor": stocks, "compute_loss_func": function}
        trainer = stock_trainer(folder, tmp_path, count=8, model=model, **options)
        evaluations.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        losses += logged(trainer)
    batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    logits = AutoModelForSeq2SeqLM.from_pretrained(folder)(**batch).logits.flatten(0, 1)
    plain, own, stocks = (
        cross_entropy(logits, batch["labels"].flatten(), label_smoothing=epsilon).item() for epsilon in (0, 0.1, 0.4)
    )
    assert losses == pytest.approx([own, stocks, stocks, stocks], rel=1e-5)
    assert evaluations == pytest.approx([plain, stocks, stocks, stocks], rel=1e-5)
