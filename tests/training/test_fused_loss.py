"""Training with the loss that is fused with the projection, against training with the loss of whole logits."""

import pytest
import torch
from test_trainer import BATCH_TOKENS, logged, make_model, make_trainer, weights_of

from vaswani_transformer.model import modeling_vaswani
from vaswani_transformer.model.loss_vaswani import projected_cross_entropy


def train(tmp_path, wrap=None, **settings):
    """Weights and losses after some steps of a tiny model."""
    model = make_model()
    if wrap:
        wrap(model)
    # With the paper's epsilon Adam makes steps of rounding where gradients are near 0.
    options = {"max_steps": 6, "warmup_steps": 20, "adam_epsilon": 1e-3, **settings}
    trainer = make_trainer(tmp_path, model=model, **options)
    trainer.train()
    return weights_of(trainer), logged(trainer, "loss"), trainer


@pytest.fixture(scope="module")
def unfused(tmp_path_factory):
    return train(tmp_path_factory.mktemp("unfused"), fused_loss=False)


def assert_same(one, other):
    assert one[1] == pytest.approx(other[1], rel=1e-5)
    for name, value in one[0].items():
        torch.testing.assert_close(value, other[0][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_trains_as_with_whole_logits(tmp_path, monkeypatch, unfused, parts):
    calls = []
    counted = lambda *a: calls.append(a) or projected_cross_entropy(*a)  # noqa: E731
    monkeypatch.setattr(modeling_vaswani, "projected_cross_entropy", counted)
    assert_same(train(tmp_path, tokens_per_device=BATCH_TOKENS // parts), unfused)
    assert len(calls) == 6 * parts


@pytest.mark.parametrize("whole", [False, True])
def test_somebody_who_listens_hears_logits(tmp_path, unfused, whole):
    heard = []

    def listen(model):
        if whole:
            model.register_forward_hook(lambda module, inputs, output: heard.append(output.logits.shape))
        else:
            model.lm_head.register_forward_hook(lambda module, inputs, output: heard.append(output.shape))

    assert_same(train(tmp_path, wrap=listen), unfused)
    assert all(shape[-1] == 30 for shape in heard)


def test_evaluation_and_return_outputs_have_logits(tmp_path):
    _, _, trainer = train(tmp_path, max_steps=1)
    batch = {"input_ids": torch.randint(4, 30, (2, 5)), "labels": torch.randint(4, 30, (2, 7))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for training in (True, False):
        trainer.model.train(training)
        _, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
        assert outputs["logits"].shape == (2, 7, 30)
