"""How many tokens a device takes at once, by a device whose memory is counted here."""

import math
from functools import partial

import pytest
import torch
from test_trainer import BATCH_TOKENS, make_model, make_pairs, make_trainer, trained, weights_of
from training_runs import equal

from vaswani_transformer.training import device_memory

POSITIONS = 150  # of the longer side of a batch: more do not fit on the device


def step_where_positions_are_limited(trainer, tokens, step=device_memory._step, limit=POSITIONS):
    """A trial step that runs out of memory where a batch is larger than the device."""
    embedding = torch.nn.functional.embedding

    def counted(ids, *args, **kwargs):
        if ids.numel() > limit:
            raise torch.OutOfMemoryError("the device is out of memory.")
        return embedding(ids, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "embedding", counted)
        step(trainer, tokens)


@pytest.fixture
def device(monkeypatch):
    """A device that holds batches of `POSITIONS`, in place of the CPU."""
    monkeypatch.setattr(device_memory, "free_memory", lambda device: 1000)
    monkeypatch.setattr(device_memory, "_step", step_where_positions_are_limited)


@pytest.mark.parametrize("padding_free", [False, True])
def test_trial_steps_leave_nothing_behind(tmp_path, device, padding_free):
    settings = {"tokens_per_batch": 300, "padding_free": padding_free}
    model = make_model(dropout=0.3).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    make_trainer(tmp_path, model=make_model(), tokens_per_device=100, **settings)  # which seeds
    state = torch.get_rng_state()
    trainer = make_trainer(tmp_path, make_pairs(300), model, tokens_per_device=None, **settings)
    assert torch.equal(torch.get_rng_state(), state)
    assert 60 < trainer.tokens_per_device <= POSITIONS
    assert trainer.micro_batches == math.ceil(300 / trainer.tokens_per_device)
    assert not trainer.model.training and all(parameter.grad is None for parameter in model.parameters())
    assert equal(model.state_dict(), before)
    trainer.train()
    settings["tokens_per_device"] = trainer.tokens_per_device
    other = trained(tmp_path, make_pairs(300), make_model(dropout=0.3), **settings)
    assert other.batches == trainer.batches
    assert equal(weights_of(other), weights_of(trainer))


def test_padded_batches_are_tried_with_their_padding_beside_adams_averages(tmp_path, device, monkeypatch):
    reserved, empty = [], torch.empty
    noting = lambda *size, **options: reserved.append((size, options)) or empty(*size, **options)  # noqa: E731
    monkeypatch.setattr(torch, "empty", noting)
    trainer = make_trainer(tmp_path, make_pairs(300), tokens_per_device=None, tokens_per_batch=300)
    assert 1.5 * trainer.tokens_per_device <= POSITIONS < 1.5 * 1.3 * trainer.tokens_per_device
    weights = sum(weight.nbytes for weight in make_model().parameters())
    assert [size[0] for size, options in reserved if options.get("dtype") == torch.uint8] == [2 * weights + 150]


def test_no_more_than_the_batch_and_no_less_than_the_longest_sentence(tmp_path, device, caplog, monkeypatch):
    with caplog.at_level("INFO", logger="vaswani_transformer"):
        trainer = make_trainer(tmp_path, tokens_per_device=None, tokens_per_batch=BATCH_TOKENS // 2)
    assert trainer.tokens_per_device == BATCH_TOKENS // 2 and trainer.micro_batches == 1
    assert [line for line in caplog.messages if line.startswith("a device takes 64 tokens at once, its whole share")]
    monkeypatch.setattr(device_memory, "_step", partial(step_where_positions_are_limited, limit=1))
    trainer = make_trainer(tmp_path, tokens_per_device=None, tokens_per_batch=BATCH_TOKENS // 2)
    assert trainer.tokens_per_device == trainer.longest_sentence


def test_a_cpu_takes_4096(tmp_path):
    assert make_trainer(tmp_path, tokens_per_device=None).tokens_per_device == BATCH_TOKENS
    trainer = make_trainer(tmp_path, make_pairs(2000), tokens_per_device=None, tokens_per_batch=5000)
    assert trainer.tokens_per_device == 4096 and trainer.micro_batches == 2
