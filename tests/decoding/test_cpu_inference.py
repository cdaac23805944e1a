"""Models prepared for inference on a CPU: the same translations, and the model as usable as before."""

import copy

import pytest
import torch
from conftest import padded_batch, tiny_model
from passes import OTHER_TOOLKITS
from torch import nn

from vaswani_transformer import UserError, VaswaniForConditionalGeneration, prepare_for_inference

UNTIED = {"tie_word_embeddings": False, "attention_bias": True}


def search(model, **options):
    ids, mask = padded_batch((7, 3, 9, 1))
    options = {"input_ids": ids, "attention_mask": mask, "max_extra_tokens": 12, **options}
    return model.generate(**options, return_dict_in_generate=True, output_scores=True)


@pytest.mark.parametrize("sizes", [{}, UNTIED, OTHER_TOOLKITS[-1]], ids=["tied", "untied", "another toolkit's"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_in_float32_the_search_is_the_same(options, sizes):
    model = tiny_model(scale=2.0, **sizes)
    expected = search(model, **options)
    found = search(prepare_for_inference(model), **options)
    assert torch.equal(found.sequences, expected.sequences)
    if options:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)


def test_weights_are_laid_out_by_columns_unless_they_are_embeddings():
    for model in (prepare_for_inference(tiny_model()), prepare_for_inference(tiny_model(**UNTIED))):
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and (name != "lm_head" or not model.config.tie_word_embeddings):
                assert module.weight.T.is_contiguous(), name
            if isinstance(module, nn.Embedding):
                assert module.weight.is_contiguous(), name


def test_in_bfloat16_the_first_distribution_is_near():
    model = tiny_model()
    expected = search(copy.deepcopy(model)).scores[0].softmax(-1)
    found = search(prepare_for_inference(model, "bfloat16"))
    assert model.dtype == torch.bfloat16
    assert 0 < (found.scores[0].softmax(-1) - expected).abs().max() < 0.05


def test_a_prepared_model_is_saved_as_before(tmp_path):
    model = tiny_model(scale=2.0, **UNTIED)
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    prepare_for_inference(model).save_pretrained(tmp_path)
    saved = VaswaniForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in expected.items())


def test_mistakes():
    with pytest.raises(UserError, match="precision is 'int8': it must be one of float32"):
        prepare_for_inference(tiny_model(), "int8")
    with pytest.raises(UserError, match="not on a CPU"):
        prepare_for_inference(tiny_model().to("meta"))
