"""Models prepared for inference on a CPU: the same translations in float32, near ones in fewer bits."""

import copy
import pickle
from unittest.mock import patch

import pytest
import torch
import translating
from conftest import padded_batch, tiny_model
from model_folders import PAIRS
from passes import OTHER_TOOLKITS
from torch import nn
from translating import run

from vaswani_transformer import Translator, load_model
from vaswani_transformer.decoding import cpu_inference as inference
from vaswani_transformer.decoding.cpu_inference import Int8Linear, PackedLinear, has_onednn, prepare_for_inference
from vaswani_transformer.errors import UserError
from vaswani_transformer.model.incremental_decoding_vaswani import DecodingCache

folder = translating.model
needs_onednn = pytest.mark.skipif(not has_onednn(torch.float32), reason="this torch has no oneDNN operator")


def search(model, **options):
    ids, mask = padded_batch((7, 3, 9, 1))
    options = {"input_ids": ids, "attention_mask": mask, "max_extra_tokens": 12, **options}
    return model.generate(**options, return_dict_in_generate=True, output_scores=True)


@needs_onednn
@pytest.mark.parametrize(
    "sizes",
    [{}, {"tie_word_embeddings": False, "attention_bias": True}, OTHER_TOOLKITS[-1]],
    ids=["tied", "untied", "another toolkit's"],
)
@pytest.mark.parametrize("options", [{}, {"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_in_float32_the_search_is_the_same(options, sizes):
    model = tiny_model(scale=2.0, **sizes)
    expected = search(model, **options)
    found = search(prepare_for_inference(model), **options)
    assert isinstance(model.lm_head, PackedLinear) and isinstance(found.past_key_values, DecodingCache)
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    assert torch.equal(found.sequences, expected.sequences)
    if "num_beams" in options:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_queries_keys_and_values_in_one_product():
    """Widths that differ, with biases; the separate layers are still there for everything but steps."""
    options = {"num_beams": 2, "min_new_tokens": 6, "max_new_tokens": 6}
    model = tiny_model(scale=2.0, d_k=5, d_v=11, attention_bias=True)
    expected = search(model, **options)
    prepare_for_inference(model)
    attention = model.model.decoder.layers[0].self_attn
    assert attention.qkv_proj.out_features == model.config.num_heads * (5 + 5 + 11)
    found = search(model, **options)
    assert torch.equal(found.sequences, expected.sequences)
    whole = search(model, **options, use_cache=False)
    assert torch.equal(whole.sequences, expected.sequences)


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.05), ("int8", 0.08)])
def test_in_fewer_bits_the_first_distribution_is_near(precision, tolerance):
    model = tiny_model()
    expected = search(copy.deepcopy(model)).scores[0].softmax(-1)
    found = search(prepare_for_inference(model, precision)).scores[0].softmax(-1)
    assert 0 < (found - expected).abs().max() < tolerance


def test_products_in_int8_err_as_8_bits_do():
    """Inputs and weights are both rounded to about 1/127 of their largest: errors add up as those of a random walk."""
    torch.manual_seed(0)
    module, states = nn.Linear(512, 64), torch.randn(6, 512)
    exact = module(states).detach()
    quantized = Int8Linear(module)
    for found, expected in ((quantized(states), exact), (quantized.relu(states), exact.relu())):
        assert 1e-4 < (found - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("kind", [pytest.param(PackedLinear, marks=needs_onednn), Int8Linear])
def test_of_any_shape(kind):
    module, states = nn.Linear(24, 40, bias=False), torch.randn(2, 3, 24)
    with torch.no_grad():
        found = kind(module)(states)
    torch.testing.assert_close(found, module(states).detach(), rtol=0.1, atol=0.1)


def test_adapters_are_merged_first():
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"])).eval()
    with pytest.raises(UserError, match="merge_and_unload"):
        prepare_for_inference(model)
    merged = prepare_for_inference(model.merge_and_unload())
    assert search(merged).sequences.shape[0] == 4


def test_steps_with_adapters_beside_the_normalisation():
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = peft.get_peft_model(tiny_model(), peft.LNTuningConfig(target_modules=["final_layer_norm"])).eval()
    assert not isinstance(search(model).past_key_values, DecodingCache)


def test_without_the_operator_the_model_stays_as_it_is():
    model = tiny_model()
    with patch.object(inference, "has_onednn", lambda _: False):
        assert type(prepare_for_inference(model, "bfloat16").lm_head) is nn.Linear
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=needs_onednn), "int8"])
def test_it_can_do_nothing_else(precision, tmp_path):
    model = prepare_for_inference(tiny_model(), precision)
    with pytest.raises(UserError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UserError, match="cannot be copied or pickled"):
            copied(model)
    assert search(model.to("cpu").float()).sequences.shape[0] == 4


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=needs_onednn), "int8"])
@pytest.mark.parametrize("where", [torch.bfloat16, torch.float64, "meta"], ids=str)
def test_it_stays_where_it_is(where, precision):
    with pytest.raises(UserError, match="cannot be moved or converted"):
        prepare_for_inference(tiny_model(), precision).to(where)


def test_commands_prepare_a_model_on_a_cpu(folder, capsys):
    sentences = [source for source, _ in PAIRS[:4]]
    model, tokenizer = load_model(folder, "cpu")
    expected = list(Translator(model, tokenizer).translate(sentences))
    for precision in (None, "float32", "bfloat16", "int8"):
        assert run("translate", folder, *sentences, *(["--precision", precision] if precision else [])) == 0
        translations = capsys.readouterr().out.splitlines()
        assert len(translations) == 4 and all(translations)
        assert translations == expected or precision in ("bfloat16", "int8")


def test_an_ensemble_in_int8(folder, capsys):
    assert run("translate", folder, "Ein Hund.", "--ensemble", folder, "--precision", "int8") == 0
    assert capsys.readouterr().out.strip()


def twice():
    return prepare_for_inference(tiny_model(), "int8")


@pytest.mark.parametrize(
    ("make", "precision", "message"),
    [
        (tiny_model, "int4", "precision is 'int4': it must be one of float32, bfloat16, int8"),
        (lambda: tiny_model().train(), None, "call model.eval"),
        (lambda: tiny_model().to("meta"), None, "the model is on meta"),
        (twice, "float32", "load it again"),
    ],
    ids=["precision", "training", "device", "twice"],
)
def test_mistakes_end_in_one_line(make, precision, message):
    with pytest.raises(UserError, match=message) as error:
        prepare_for_inference(make(), precision)
    assert "\n" not in str(error.value)
