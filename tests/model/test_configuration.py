"""The configuration: the paper's numbers, the rules between fields, and parameter counts against Table 3."""

import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration
from vaswani_transformer.experiments.base import TABLE3

# What the columns of Table 3 hold for the base model; the other rows differ where their labels say it.
BASE = {"N": 6, "d_model": 512, "d_ff": 2048, "h": 8, "d_k": 64, "d_v": 64, "P_drop": 0.1}
BASE["label smoothing"] = 0  # recipes set it
LABELS = {row.preset: row.label for row in TABLE3} | {
    "big": "d_model 1024, d_ff 4096, h 16, P_drop 0.3",
    "big-en-fr": "d_model 1024, d_ff 4096, h 16",  # Section 6.1: P_drop 0.1 for French
    "parsing": "N 4, d_model 1024, d_k = d_v 128, P_drop 0.2",
}


def parameters_by_equations(config: VaswaniConfig) -> int:
    """Counted from Sections 3.1 to 3.5: no attention biases, biases in Equation 2, one shared embedding matrix."""
    d, h = config.d_model, config.num_heads
    attention = d * h * config.d_k + d * h * config.d_k + d * h * config.d_v + h * config.d_v * d
    feed_forward = d * config.d_ff + config.d_ff + config.d_ff * d + d
    norm = d + d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    positions = 2 * config.max_position_embeddings * d if config.position_encoding == "learned" else 0
    layers = config.encoder_layers * encoder_layer + config.decoder_layers * decoder_layer
    return config.vocab_size * d + layers + positions


class TestDefaults:
    def test_are_the_base_model(self):
        assert VaswaniConfig().to_diff_dict() == VaswaniConfig.from_preset("base").to_diff_dict()

    def test_generic_names_of_transformers_read_the_papers_fields(self):
        config = VaswaniConfig(d_model=48, d_ff=80, num_heads=4, d_k=6, encoder_layers=3, decoder_layers=5)
        assert config.hidden_size == 48
        assert config.intermediate_size == config.encoder_ffn_dim == config.decoder_ffn_dim == 80
        assert config.num_attention_heads == config.encoder_attention_heads == config.decoder_attention_heads == 4
        assert config.num_hidden_layers == 3 and config.head_dim == 6


def test_head_widths_follow_sizes():
    config = VaswaniConfig(d_model=96, num_heads=6)
    assert (config.d_k, config.d_v) == (16, 16)
    with pytest.raises(Exception, match=r"d_model 512 .*num_heads 7.*d_v"):
        VaswaniConfig(num_heads=7, d_k=64)
    assert VaswaniConfig(num_heads=7, d_k=64, d_v=65).d_v == 65
    smaller = VaswaniConfig.from_dict(VaswaniConfig(d_v=65).to_dict(), hidden_size=256)
    assert (smaller.d_model, smaller.d_k, smaller.d_v) == (256, 32, 65)
    assert VaswaniConfig.from_dict(config.to_dict(), num_heads=7, d_k=9, d_v=9).d_k == 9


class TestValidation:
    @pytest.mark.parametrize("value", [-0.1, 1, 1.0, 1.5, float("nan")])
    @pytest.mark.parametrize("field", ["dropout", "attention_dropout", "activation_dropout", "label_smoothing"])
    def test_dropout_must_be_a_probability_below_one(self, field, value):
        with pytest.raises(StrictDataclassError, match=rf"{field} is {value}"):
            VaswaniConfig(**{field: value})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"activation_function": "tanh"}, "activation_function.*relu.*gelu.*silu.*tanh"),
            ({"position_offset": -1}, "position_offset is -1"),
            ({"decoder_vocab_size": 0}, "decoder_vocab_size is 0"),
            ({"vocab_size": 5, "decoder_vocab_size": 6, "pad_token_id": 5}, "pad_token_id is 5.*vocabulary size 5"),
            (
                {"vocab_size": 50, "decoder_vocab_size": 60, "share_encoder_decoder_embeddings": True},
                "share_encoder_decoder_embeddings is True.*False.*50 and 60",
            ),
        ],
        ids=str,
    )
    def test_what_other_toolkits_have_is_checked(self, changes, message):
        with pytest.raises(StrictDataclassError, match=message):
            VaswaniConfig(**changes)

    def test_values_set_later_are_checked_on_saving(self, tmp_path):
        config = VaswaniConfig()
        config.d_ff = 0
        with pytest.raises(StrictDataclassError, match="d_ff is 0"):
            config.save_pretrained(tmp_path)


class TestPresets:
    @pytest.mark.parametrize("name", VaswaniConfig.preset_names())
    def test_parameters_match_the_equations(self, name):
        config = VaswaniConfig.from_preset(name)
        with torch.device("meta"):
            model = VaswaniForConditionalGeneration(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters_by_equations(config)

    @pytest.mark.parametrize("name", LABELS)
    def test_cells_of_table_3(self, name):
        config, expected = VaswaniConfig.from_preset(name), dict(BASE)
        for columns, value in re.findall(r"(\w[\w= ]*) ([\d.]+)", LABELS[name]):
            expected |= dict.fromkeys(columns.split(" = "), float(value))
        cells = config.encoder_layers, config.d_model, config.d_ff, config.num_heads, config.d_k, config.d_v
        assert dict(zip(BASE, (*cells, config.dropout, config.label_smoothing), strict=True)) == expected
        assert config.encoder_layers == config.decoder_layers
