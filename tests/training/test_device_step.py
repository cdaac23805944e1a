"""A training step on a device that is worked for ahead of time: nothing but the log may wait for it."""

import itertools

import pytest
from test_trainer import make_model, make_pairs
from waiting import META, WaitingOperations, complete

from vaswani_transformer.training.callbacks import StopAndSaveCallback, TrainingLogCallback, TrainingProgressCallback
from vaswani_transformer.training.trainer import VaswaniTrainer, VaswaniTrainingArguments

LOGGED, STEPS = 3, 5


class MetaArguments(VaswaniTrainingArguments):
    """Settings of a training on the meta device."""

    device = META


class CountingTrainer(VaswaniTrainer):
    """Notes the waiting operations of each step, from its batches to those of the next."""

    def get_batch_samples(self, *args):
        self.by_step.append(list(self.waiting.found))
        self.waiting.found.clear()
        return super().get_batch_samples(*args)


@pytest.mark.parametrize(
    "settings", [{}, {"max_grad_norm": 1.0, "fused_loss": False}, {"bf16": True, "padding_free": True}], ids=str
)
def test_no_step_waits_for_the_device_but_one_that_is_logged(tmp_path, monkeypatch, settings):
    """In a training of two parts a step."""
    waiting = WaitingOperations()
    complete(monkeypatch, waiting)
    arguments = MetaArguments(
        output_dir=str(tmp_path), tokens_per_batch=128, tokens_per_device=64, max_steps=STEPS, logging_steps=LOGGED,
        save_strategy="no", remove_unused_columns=False, report_to="none", disable_tqdm=True, use_cpu=True,
        optim="adamw_torch_fused", **settings,
    )  # fmt: skip
    model = make_model(dropout=0.1)
    model.set_attn_implementation("sdpa")
    log = TrainingLogCallback(tmp_path / "log.jsonl")
    callbacks = [log, StopAndSaveCallback(log, max_minutes=60), TrainingProgressCallback(log)]
    trainer = CountingTrainer(model=model, args=arguments, train_dataset=make_pairs(60), callbacks=callbacks)
    trainer.accelerator.device_placement = False
    trainer.by_step, trainer.waiting = [], waiting
    assert next(trainer.model.parameters()).device == META
    with waiting:
        trainer.train()
    assert trainer.state.global_step == STEPS
    by_step = [*trainer.by_step[1:], waiting.found]
    quiet = by_step[: LOGGED - 1] + by_step[LOGGED:-1]  # the last one ends the training, which sums losses up
    assert list(itertools.chain(*quiet)) == []
    assert any("_local_scalar_dense" in line and ".py:" in line for line in by_step[LOGGED - 1])
