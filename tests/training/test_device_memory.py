"""How many tokens a device takes at once, by a device whose memory is counted here."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_trainer import BATCH_TOKENS, make_model, make_pairs, make_trainer, weights_of

from vaswani_transformer.training import device_memory
from vaswani_transformer.training.device_memory import TRIAL_TOKENS, tokens_that_fit

FIXED, PER_POSITION, FREE = 20_000, 1000, 200_000  # bytes


class FakeMeter:
    """A device on which a batch takes so many bytes for each position of its longer side."""

    def __init__(self, device):
        self.steps = 0

    def free(self):
        return FREE

    def peak_of(self, step):
        positions, look_up = [], torch.nn.functional.embedding

        def counted(ids, *args, **kwargs):
            positions.append(ids.numel())
            return look_up(ids, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "embedding", counted)
            step()
        self.steps += 1
        used = FIXED + PER_POSITION * max(positions)
        return used if used <= FREE else math.inf


def fits(tokens, free):
    """Whether a batch of so many tokens, half of it more for padding, fits beside the weights' averages."""
    weights = sum(weight.nbytes for weight in make_model().parameters())
    return FIXED + PER_POSITION * 1.5 * tokens <= 0.85 * free - 2 * weights


@given(st.floats(0, 1e9), st.floats(1, 1e6), st.floats(1e8, 1e11), st.integers(300, 100_000), st.booleans())
def test_what_is_chosen_fits_and_little_more_would(fixed, per_token, limit, most, runs_out):
    tried = []

    def peak_of(tokens):
        tried.append(tokens)
        peak = fixed + per_token * tokens
        return math.inf if runs_out and peak > 1.01 * limit else peak

    chosen = tokens_that_fit(peak_of, limit, most, 256)
    assert 256 <= chosen <= most
    if chosen > 256:
        assert fixed + per_token * chosen <= limit * (1 + 1e-9)
    if chosen < most and min(tried) >= TRIAL_TOKENS and max(tried) > 2 * TRIAL_TOKENS:
        assert fixed + per_token * (chosen + 2) > 0.79 * (limit - fixed) + fixed
    if chosen == most > 2 * TRIAL_TOKENS:
        assert len(tried) == 3


def test_a_prediction_that_is_too_large_is_corrected():
    """Memory that grows faster than the small steps showed."""
    chosen = tokens_that_fit(lambda tokens: tokens + max(0, tokens - 10_000), 20_000, 25_000, 256)
    assert 0.79 * 15_000 < chosen <= 15_000


@pytest.fixture
def device(monkeypatch):
    """A device of `FREE` bytes in place of the CPU."""
    monkeypatch.setattr(device_memory, "MemoryMeter", FakeMeter)
    monkeypatch.setattr(device_memory, "TRIAL_TOKENS", 16)


@pytest.mark.parametrize("padding_free", [False, True])
def test_trial_steps_leave_nothing_behind(tmp_path, device, padding_free):
    settings = {"tokens_per_batch": 300, "padding_free": padding_free}
    model = make_model(dropout=0.3).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    make_trainer(tmp_path, model=make_model(), tokens_per_device=100, **settings)  # which seeds
    state = torch.get_rng_state()
    trainer = make_trainer(tmp_path, make_pairs(300), model, tokens_per_device=None, **settings)
    assert torch.equal(torch.get_rng_state(), state)
    assert 30 < trainer.tokens_per_device < 150
    assert trainer.micro_batches == math.ceil(300 / trainer.tokens_per_device)
    assert not trainer.model.training and all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    trainer.train()
    given = make_trainer(
        tmp_path, make_pairs(300), make_model(dropout=0.3), tokens_per_device=trainer.tokens_per_device, **settings
    )
    given.train()
    assert given.batches == trainer.batches
    assert all(torch.equal(weight, weights_of(trainer)[name]) for name, weight in weights_of(given).items())
    assert given.tokens_seen.tolist() == trainer.tokens_seen.tolist()


def test_padded_batches_are_tried_with_their_padding(tmp_path, device):
    trainer = make_trainer(tmp_path, make_pairs(300), tokens_per_device=None, tokens_per_batch=300)
    assert fits(trainer.tokens_per_device - 8, FREE) and not fits(1.3 * trainer.tokens_per_device, FREE)


def test_no_more_than_the_batch(tmp_path, device, caplog):
    with caplog.at_level("INFO", logger="vaswani_transformer"):
        trainer = make_trainer(tmp_path, tokens_per_device=None, tokens_per_batch=BATCH_TOKENS // 2)
    assert trainer.tokens_per_device == BATCH_TOKENS // 2 and trainer.micro_batches == 1
    assert [line for line in caplog.messages if line.startswith("a device takes 64 tokens at once, its whole share")]


def test_a_cpu_takes_4096(tmp_path):
    assert make_trainer(tmp_path, tokens_per_device=None).tokens_per_device == BATCH_TOKENS
    pairs = make_pairs(2000)
    trainer = make_trainer(tmp_path, pairs, tokens_per_device=None, tokens_per_batch=5000)
    assert trainer.tokens_per_device == 4096 and trainer.micro_batches == 2
