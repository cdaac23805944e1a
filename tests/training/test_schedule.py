"""Equation 3 as a number, and as what a stock Trainer really uses; `test_finetuning_scripts` has it as a scheduler."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_trainer import make_model, make_pairs
from torch.optim import SGD
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerState, TrainingArguments

from vaswani_transformer import VaswaniConfig
from vaswani_transformer.data.batching import PairCollator
from vaswani_transformer.training.schedule import NoamSchedulerCallback, noam_learning_rate

WARMUP = 5


def equation_3(step, d_model=16, warmup=WARMUP, scale=1.0):
    """Typed anew from the paper, with roots in place of powers."""
    return scale / math.sqrt(d_model) * min(1 / math.sqrt(step), step / (warmup * math.sqrt(warmup)))


@pytest.mark.parametrize(("d_model", "warmup", "scale"), [(1, 1, 2.0), (512, 4000, 1.0), (1024, 16_000, 0.3)])
def test_formula(d_model, warmup, scale):
    for step in [*range(1, 300), warmup - 1 or 1, warmup, warmup + 1, 10_000, 100_000, 300_000, 10**9]:
        expected = equation_3(step, d_model, warmup, scale)
        assert noam_learning_rate(step, d_model, warmup, scale) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(("steps", "declining"), [(4, 4), (20, 8)])
def test_the_rate_declines_to_zero_at_most_over_all_of_the_training(steps, declining):
    callback, optimizer = NoamSchedulerCallback(16, WARMUP, decline_steps=steps), SGD([torch.zeros(1)])
    callback.on_train_begin(None, TrainerState(max_steps=8), None)
    for step in range(8):
        state = TrainerState(global_step=step, max_steps=8)
        callback.on_pre_optimizer_step(TrainingArguments(max_steps=8), state, None, optimizer)
        expected = equation_3(step + 1) * min(1, (8 - step) / declining)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9)


def test_a_second_training_has_its_own_width_and_warmup():
    callback, optimizer = NoamSchedulerCallback(warmup_steps=0.5), SGD([torch.zeros(1)])
    for width, steps in ((16, 2), (64, 20)):
        config, state = VaswaniConfig(d_model=width), TrainerState(max_steps=steps)
        callback.on_train_begin(None, state, None, model=SimpleNamespace(config=config))
        callback.on_pre_optimizer_step(TrainingArguments(max_steps=steps), state, None, optimizer)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(equation_3(1, width, steps / 2), rel=1e-9)


class RecordingTrainer(Seq2SeqTrainer):
    """A stock trainer that notes the rates of all groups whenever its optimizer is about to use them."""

    def create_optimizer(self, *args, **kwargs):
        optimizer, self.used = super().create_optimizer(*args, **kwargs), []
        rates_of = lambda groups: [float(group["lr"]) for group in groups]  # noqa: E731
        optimizer.register_step_pre_hook(lambda *_: self.used.append(rates_of(optimizer.param_groups)))
        return optimizer


@pytest.mark.parametrize(
    ("accumulation", "scheduler", "warmup"), [(1, "linear", WARMUP), (3, "cosine_with_restarts", WARMUP / 12 - 1e-3)]
)
def test_stock_trainer_uses_and_logs_the_rate_of_each_step(tmp_path, accumulation, scheduler, warmup):
    settings = {
        "max_steps": 12, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "learning_rate": 0.123,
        "gradient_accumulation_steps": accumulation, "lr_scheduler_type": scheduler,
    }  # fmt: skip
    trainer = RecordingTrainer(
        model=make_model(),  # d_model 16
        args=Seq2SeqTrainingArguments(output_dir=str(tmp_path), **settings),
        train_dataset=make_pairs(22),
        data_collator=PairCollator(1),
        callbacks=[NoamSchedulerCallback(warmup_steps=warmup, scale=0.7)],
    )
    trainer.train()
    expected = [pytest.approx(equation_3(step, scale=0.7), rel=1e-12) for step in range(1, 13)]
    assert {len(rates) for rates in trainer.used} == {2}
    assert [rates[0] for rates in trainer.used] == expected
    assert all(len(set(rates)) == 1 for rates in trainer.used)
    logged = {entry["step"]: entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry}
    assert logged == {step: trainer.used[step - 1][0] for step in range(1, 13)}
