"""Search: inputs of all kinds, outputs of every length, limits (Section 6.1); `test_search` has the references."""

import logging
import warnings

import pytest
import torch
from conftest import padded_batch, random_ids, tiny_model
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging as transformers_logging

from vaswani_transformer.model.search_vaswani import length_normalization


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.6, 2 / 3, 2.0])
def test_length_normalization(alpha):
    for length in (0, 1, 7, 43, 100):  # of no token at all, 1 by the rule of transformers
        assert length_normalization(length, alpha, "gnmt") == pytest.approx(((5 + length) / 6) ** alpha, rel=1e-12)
        assert length_normalization(length, alpha, "power") == pytest.approx((length or 1) ** alpha, rel=1e-12)


def test_greedy_from_encoder_outputs_or_embeddings():
    model = tiny_model()
    input_ids, attention_mask = padded_batch((6, 3))
    expected = model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=9)
    encoded = model.get_encoder()(input_ids, attention_mask=attention_mask)
    encoded = BaseModelOutput(last_hidden_state=encoded.last_hidden_state)
    for source in ({"encoder_outputs": encoded}, {"inputs_embeds": model.get_input_embeddings()(input_ids)}):
        actual = model.generate(**source, attention_mask=attention_mask, max_new_tokens=9)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 4}])
def test_lengths_beyond_the_table_of_sinusoids_give_no_warning(options, caplog):
    transformers_logging.enable_propagation()
    try:
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
            warnings.simplefilter("error")
            for kind in ("sinusoidal", "sinusoidal-halves"):
                model = tiny_model(position_encoding=kind, max_position_embeddings=5, eos_token_id=None)
                model.generate(random_ids(1, 4), **options)
    finally:
        transformers_logging.disable_propagation()
    assert caplog.text == ""


@pytest.mark.parametrize("own", [None, 20, 30])  # 20 is the default of transformers
def test_a_limit_stays_what_the_user_made_it_when_the_trainer_fills_in_defaults(own):
    model = tiny_model(max_position_embeddings=128)
    model.generation_config.max_length, model.generation_config.eos_token_id = own, None
    for _ in range(2):
        assert model.generate(random_ids(1, 5)).shape[1] == (own or 1 + 5 + 50)
        # What Seq2SeqTrainer does with predict_with_generate.
        defaults = model.generation_config._get_default_generation_params()
        model.generation_config.update(**defaults, defaults_only=True, allow_custom_entries=True)
