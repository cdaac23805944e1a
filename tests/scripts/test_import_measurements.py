"""The scripts that measure an imported model: options, statistics and tables on made-up numbers, no engine."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from sacrebleu import corpus_bleu
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))
import import_engines
import import_measurements
import import_speed
import import_tables
import train_marian

REFERENCES = ["Zwei Hunde spielen im Schnee.", "Ein Mann steht auf einer Leiter.", "Kinder laufen über die Straße."] * 4
CHANGED = ["Zwei Hunde spielen im Gras.", "Ein Mann sitzt auf einer Leiter.", "Kinder laufen über die Straße."] * 4


def test_what_is_missing_is_named(tmp_path, capsys):
    names = {name: str(tmp_path) for name in ("imported", "source", "reference", "output", "npz")}
    options = [word for name, value in names.items() for word in (f"--{name}", value)]
    with pytest.raises(SystemExit):
        import_measurements.parse_options([*options, "--vocabulary", str(tmp_path / "vocab.spm")])
    assert f"there is no {tmp_path / 'vocab.spm'}" in capsys.readouterr().err


def test_joins_are_of_whole_numbers_of_lines():
    assert import_engines.joined(list("abcdefg"), 3) == ["a b c", "d e f"]
    assert import_engines.joined(list("abc"), 1) == ["a", "b", "c"]


def test_training_text_has_every_pair_once_alone_and_once_joined():
    pairs = [(f"s{number}", f"t{number}") for number in range(50)]
    chosen = train_marian.with_joins(pairs)
    assert [pair for pair in chosen if pair in pairs] != pairs and {pair for pair in chosen if pair in pairs} == set(
        pairs
    )
    joined = [pair for pair in chosen if pair not in pairs]
    assert sorted(" ".join(source for source, _ in joined).split()) == sorted(source for source, _ in pairs)
    assert all(source.replace("s", "t") == target for source, target in chosen)
    assert {len(source.split()) for source, _ in joined} <= set(range(1, 7))


def test_marians_positions_differ_from_those_of_transformers_in_their_frequencies_alone():
    theirs = MarianSinusoidalPositionalEmbedding(50, 8).create_weight().numpy()
    ours = import_engines.marian_positions(50, 8)
    np.testing.assert_allclose(ours[:, [0, 4]], theirs[:, [0, 4]], atol=1e-6)  # of the first frequency, 1
    np.testing.assert_allclose(ours[:, 3], np.sin(np.arange(50) / 10_000), atol=1e-7)  # the last, in Marian
    np.testing.assert_allclose(theirs[:, 3], np.sin(np.arange(50) / 1_000), atol=1e-6)  # 10000^(-6/8)


def test_the_weights_of_an_npz_fill_marian_mt_model(tmp_path):
    options = (
        "enc-depth: 1\ndec-depth: 1\ntransformer-heads: 2\ntransformer-dim-ffn: 6\ntransformer-ffn-activation: swish\n"
    )
    generator = np.random.default_rng(0)
    arrays = {"Wemb": (5, 4), "decoder_ff_logit_out_b": (1, 5)}
    for name, _ in import_engines._layer_names({"enc-depth": 1, "dec-depth": 1}):
        inner = {"ffn_W1": (4, 6), "ffn_b1": (1, 6), "ffn_W2": (6, 4)}.get(name.split("_", 2)[2])
        arrays[name] = inner or ((4, 4) if name[-2] == "W" else (1, 4))
    arrays = {name: generator.normal(size=shape).astype(np.float32) for name, shape in arrays.items()}
    option_bytes = np.frombuffer(options.encode() + b"\0\0\0", np.int8)
    np.savez(tmp_path / "model.npz", **arrays, **{import_engines.OPTIONS: option_bytes})
    model = import_engines.marian_mt_model(tmp_path / "model.npz", pad_bias=-1e4)
    assert model.config.activation_function == "silu" and model.config.pad_token_id == 5
    assert model.final_logits_bias[0, 5] == -1e4
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight and not model.lm_head.weight[5].any()
    weight = model.model.decoder.layers[0].encoder_attn.k_proj.weight
    torch.testing.assert_close(weight, torch.tensor(arrays["decoder_l1_context_Wk"].T))


def test_scores_and_differences_are_sacrebleus():
    rows = import_measurements.compare({"Marian": REFERENCES, "ours": CHANGED}, "Marian", REFERENCES)
    assert rows["Marian"]["BLEU"]["score"] == pytest.approx(100) and rows["Marian"]["identical"] == 1
    expected = corpus_bleu(CHANGED, [REFERENCES]).score
    assert rows["ours"]["BLEU"]["score"] == pytest.approx(expected)
    assert rows["ours"]["identical"] == pytest.approx(1 / 3)
    change = import_measurements.difference(import_measurements.BLEU(), CHANGED, REFERENCES, REFERENCES)
    assert change["difference"] == pytest.approx(expected - 100)
    assert change["between"][0] <= change["difference"] <= change["between"][1] <= 0


def made_up_results() -> dict:
    """The form of measurements.json."""
    metric = {"score": 30.0, "interval": 1.5, "p": 0.04, "baseline": 31.0, "difference": -1.0, "between": [-2.0, 0.1]}
    same = metric | {"p": 0.001, "score": 31.0, "difference": 0.0, "between": [0.0, 0.0]}
    engines = {
        "Marian": {"identical": 1.0, "BLEU": same | {"p": None}, "chrF": same | {"p": None}},
        "ours": {"identical": 1.0, "BLEU": same, "chrF": same},
        "transformers": {"identical": 0.5, "BLEU": metric, "chrF": metric},
    }
    part = {"against Marian": engines, "positions": engines}
    scores = {"largest": 1.23e-5, "mean": 1e-6, "lower": 0.5, "nats_per_token": -2.0}
    place = {"from": 80, "below": 1000, "tokens": 1234, "mean": 0.01, "largest": 0.5, "signed": -0.002}
    return {
        "machine": {"processor": "a processor", "capability": "AVX2", "versions": {"torch": "2.13.0"}},
        "beams": 4,
        "sets": {"1": {"sources": 1000, "mean tokens": 15.2}},
        "beam 4": {"1": part},
        "beam 1": {"1": part},
        "by length": [{"from": 10, "below": 14, "sources": 40, "BLEU": dict.fromkeys(engines, 33.3)}],
        "scores": {"1": {"tokens": 100, "engines": dict.fromkeys(engines, scores)}},
        "by place": [place],
    }


def test_every_row_of_a_table_has_as_many_cells_as_its_head():
    page = import_tables.tables(made_up_results())
    assert page.startswith("a processor (AVX2); torch 2.13.0.\n\nsingle: 1,000 sources of 15.2 tokens on average.\n")
    for block in page.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1
    assert "| transformers | 30.00 ± 1.50, p 0.040 | 30.00 ± 1.50, p 0.040 | 50.0% |" in page
    assert "| ours | 31.00 ± 1.50 | 31.00 ± 1.50 | 100.0% |" in page  # nothing to test
    assert "-1.00 (-2.00 to +0.10), p 0.040" in page
    assert "| 10 to 13 | 40 | 33.30 | 33.30 | 33.30 |" in page
    assert "| 80 or more | 1,234 | 0.0100 | 0.50 | -0.00200 |" in page


def test_rates_are_shown_with_their_ratio_to_marian():
    rates = {"1": {"Marian, float32": 40.0, "ours, int8": 60.0}, "2": {"Marian, float32": 50.0, "ours, int8": 100.0}}
    assert import_speed.speed_table(rates).splitlines() == [
        "| sentences a second | 1 thread | 2 threads |",
        "|---|---:|---:|",
        "| Marian, float32 | 40.0 (1.00) | 50.0 (1.00) |",
        "| ours, int8 | 60.0 (1.50) | 100.0 (2.00) |",
    ]
    assert ("transformers", "int8") not in import_speed.contestants() and len(import_speed.contestants()) == 7


@pytest.mark.parametrize("script", ["import_measurements.py", "benchmarks/import_speed.py", "train_marian.py"])
@pytest.mark.slow
def test_scripts_explain_themselves(script):
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / script), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "usage" in done.stdout
