"""The paper's figures against what its text says of them and against the models that its rows describe."""

import pytest

from vaswani_transformer import VaswaniConfig
from vaswani_transformer.experiments.base import TABLE2, TABLE3, TABLE4

OURS = {row.model: row for row in TABLE2 if row.model.startswith("Transformer")}
OTHERS = [row for row in TABLE2 if row.model not in OURS]
BLEU = {row.preset: row.bleu for row in TABLE3}
FIGURES = {row.preset: row for row in TABLE3}


def test_translation():
    base, big = OURS["Transformer (base model)"], OURS["Transformer (big)"]
    assert (big.bleu_de, big.bleu_fr) == (28.4, 41.8)  # abstract
    assert big.bleu_de > max(row.bleu_de or 0 for row in OTHERS) + 2.0  # 6.1: by more than 2.0, ensembles included
    assert base.bleu_de > max(row.bleu_de or 0 for row in OTHERS)  # 6.1: the base model too
    alone = [row for row in OTHERS if "Ensemble" not in row.model]
    assert big.bleu_fr > max(row.bleu_fr or 0 for row in alone)
    # 6.1: less than a quarter of the training cost of the best model before.
    assert big.flops_fr < max(alone, key=lambda row: row.bleu_fr or 0).flops_fr / 4


def test_training_cost_is_time_by_devices_by_speed():
    """5.2: 12 hours and 3.5 days on 8 P100; footnote 5: 9.5 TFLOPS each."""
    for name, hours in (("Transformer (base model)", 12), ("Transformer (big)", 84)):
        assert OURS[name].flops_de == OURS[name].flops_fr == pytest.approx(hours * 3600 * 8 * 9.5e12, rel=0.02)


def test_variations():
    heads = {row.preset: row.bleu for row in TABLE3 if row.group in ("A", "base")}
    assert max(heads.values()) - heads["table3-a-heads-1"] == pytest.approx(0.9)  # 6.2
    assert heads["table3-a-heads-32"] < max(heads.values())  # too many heads
    assert BLEU["table3-e-learned-positions"] == pytest.approx(BLEU["base"], abs=0.11)  # "nearly identical"
    for small, large in (
        ("table3-b-dk-16", "table3-b-dk-32"), ("table3-b-dk-32", "base"), ("table3-c-layers-2", "table3-c-layers-4"),
        ("table3-c-dmodel-256", "base"), ("base", "table3-c-dmodel-1024"), ("table3-c-dff-1024", "base"),
        ("base", "table3-c-dff-4096"), ("table3-d-dropout-0.0", "base"), ("base", "big"),
    ):  # fmt: skip
        assert BLEU[small] < BLEU[large] and FIGURES[small].perplexity > FIGURES[large].perplexity
    # 5.4: label smoothing hurts perplexity and helps BLEU.
    none, much = FIGURES["table3-d-smoothing-0.0"], FIGURES["table3-d-smoothing-0.2"]
    assert none.perplexity < FIGURES["base"].perplexity < much.perplexity and none.bleu < BLEU["base"]


@pytest.mark.parametrize("row", [row for row in TABLE3 if row.millions], ids=lambda row: row.preset)
def test_parameters_are_those_of_the_row(row):
    """With as many embeddings as the printed counts imply (`VaswaniConfig.from_preset`)."""
    counted = VaswaniConfig.from_preset(row.preset, vocab_size=41_100).num_parameters() / 1e6
    assert round(counted) == row.millions if row.preset != "big" else counted == pytest.approx(row.millions, rel=0.03)


def test_parsing():
    ours = {row.training: row.f1 for row in TABLE4 if row.model.startswith("Transformer")}
    assert ours == {"WSJ only, discriminative": 91.3, "semi-supervised": 92.7}
    others = [row for row in TABLE4 if not row.model.startswith("Transformer")]
    single = [row for row in others if row.training.startswith("WSJ")]  # 6.3: all but one are worse
    assert [row.model for row in single if row.f1 > ours["WSJ only, discriminative"]] == ["Dyer et al. (2016)"]
    assert all(row.f1 < ours["semi-supervised"] for row in others if row.training == "semi-supervised")
