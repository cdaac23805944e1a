"""The model learns: copying random sequences, which only a decoder that reads the encoder can do."""

import pytest
import torch
from conftest import tiny_config

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.training.schedule import noam_scheduler

SYMBOLS, LENGTH, END = 10, 6, 2


def sequences(count: int, generator: torch.Generator) -> torch.Tensor:
    """`(count, LENGTH + 1)`: random symbols from 3 on, then the end token."""
    symbols = torch.randint(3, 3 + SYMBOLS, (count, LENGTH), generator=generator)
    return torch.cat((symbols, torch.full((count, 1), END)), dim=1)


@pytest.fixture(scope="module")
def copier() -> VaswaniForConditionalGeneration:
    """Trained on the copy task with the paper's schedule, scaled to a few hundred steps."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    config = tiny_config(vocab_size=3 + SYMBOLS, dropout=0.0, **sizes)
    model = VaswaniForConditionalGeneration(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = noam_scheduler(optimizer, config.d_model, warmup_steps=100, scale=0.5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(350):
        batch = sequences(64, generator)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return model.eval()


@pytest.fixture(scope="module")
def fresh() -> torch.Tensor:
    """Sequences from another generator; of 10^6 possible ones the copier has seen at most 2%."""
    return sequences(200, torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("padding", "search"), [(0, {}), (3, {"num_beams": 4, "length_penalty": 0.6})])
def test_copies_fresh_sequences(copier, fresh, padding, search):
    padded = torch.cat((fresh, torch.full((len(fresh), padding), 1)), dim=1)
    outputs = copier.generate(padded, attention_mask=(padded != 1).long(), **search)[:, 1:]
    assert (outputs[:, : LENGTH + 1] == fresh).all(dim=1).double().mean() > 0.95


def test_what_it_writes_comes_from_the_source(copier, fresh):
    """Given the right prefix and another source, the next symbol is right no more often than by chance."""
    with torch.no_grad():
        right, wrong = (
            copier(source, labels=fresh).logits[:, :LENGTH].argmax(dim=-1) == fresh[:, :LENGTH]
            for source in (fresh, fresh.roll(1, dims=0))
        )
    assert right.double().mean() > 0.95
    # 1,200 symbols, each right by chance with probability 1/10: 0.1 with a standard error of 0.009.
    assert wrong.double().mean() < 0.1 + 5 * 0.009
