"""What transformers and accelerate offer for every model and their tests (`make conformance`) do not run on a CPU."""

import io

import pytest
import torch
from conftest import padded_batch, random_ids, tiny_model
from passes import OTHER_TOOLKITS
from transformers import AutoModelForSeq2SeqLM

from vaswani_transformer import VaswaniForConditionalGeneration

VARIANTS = [
    {},
    {"position_encoding": "learned"},
    {"tie_word_embeddings": False},
    {"position_encoding": "learned", "tie_word_embeddings": False, "attention_bias": True},
    {"share_encoder_decoder_embeddings": False, "output_bias": True},
    OTHER_TOOLKITS[-1],
]


def inputs_with_padding(target_length: int = 6) -> dict[str, torch.Tensor]:
    """Three sources of 7, 4 and 2 tokens, padded on the right, and targets of one length without padding."""
    input_ids, attention_mask = padded_batch((7, 4, 2))
    targets = random_ids(3, target_length, seed=1)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": targets}


def tokens_generated(model, **options) -> torch.Tensor:
    """What `generate` finds, checked to be more than a few tokens."""
    input_ids, attention_mask = padded_batch((7, 4, 2))
    tokens = model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=8, **options)
    assert tokens.shape[1] > 4
    return tokens


def test_a_static_cache_may_be_larger_than_the_table_of_learned_positions():
    options = {"cache_implementation": "static", "max_cache_len": 100}
    model = tiny_model(position_encoding="learned", scale=2.0)
    assert torch.equal(tokens_generated(model, **options), tokens_generated(model))


def test_flash_attention_is_refused():
    model = tiny_model()
    model.config._attn_implementation = "kernels-community/flash-attn2"
    with pytest.raises(ValueError, match="cannot be flash attention"):
        model(**inputs_with_padding())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("changes", [{"d_k": 5, "d_v": 7}, {"d_k": 7, "d_v": 5}, {"attention_window": 4}], ids=str)
def test_flex_attention_equals_eager(changes):
    inputs = inputs_with_padding()
    expected = tiny_model(attn_implementation="eager", **changes)(**inputs).logits
    # Its kernels take a minute to compile; what they compute can be had without.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = tiny_model(attn_implementation="flex_attention", **changes)(**inputs).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("changes", [VARIANTS[1], {"attention_window": 3}], ids=str)
def test_the_whole_model_by_the_traced_exporter_takes_any_sizes(changes):
    runtime, file, names = pytest.importorskip("onnxruntime"), io.BytesIO(), list(inputs_with_padding())
    axes = {name: {0: "batch", 1: f"length of {name}"} for name in names}
    inputs = {**inputs_with_padding(), "use_cache": False}
    torch.onnx.export(tiny_model(**changes), kwargs=inputs, f=file, dynamo=False, input_names=names, dynamic_axes=axes)
    session = runtime.InferenceSession(file.getvalue())
    for lengths, target in (((6, 2, 9, 1), 7), ((1,), 1)):
        inputs = dict(zip(names, (*padded_batch(lengths), random_ids(len(lengths), target)), strict=True))
        [logits, *_] = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        expected = tiny_model(**changes)(**inputs).logits
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_encoder_and_decoder_are_saved_and_loaded_alone(changes, tmp_path):
    model = tiny_model(**changes)
    inputs = inputs_with_padding()
    targets = inputs.pop("decoder_input_ids")
    encoder, decoder = model.get_encoder(), model.get_decoder()
    encoder.save_pretrained(tmp_path / "encoder")
    decoder.save_pretrained(tmp_path / "decoder")
    decoder_again = type(decoder).from_pretrained(tmp_path / "decoder")
    states = type(encoder).from_pretrained(tmp_path / "encoder")(**inputs).last_hidden_state
    torch.testing.assert_close(states, encoder(**inputs).last_hidden_state, rtol=0, atol=0)
    outputs = decoder_again(targets, encoder_hidden_states=states, encoder_attention_mask=inputs["attention_mask"])
    expected = model.model(**inputs, decoder_input_ids=targets).last_hidden_state
    torch.testing.assert_close(outputs.last_hidden_state, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "share"), [*((changes, 0.4) for changes in VARIANTS), ({}, 0.01), ({}, 0.7)], ids=str
)
def test_what_exceeds_the_memory_is_offloaded_to_disk(changes, share, tmp_path):
    model, inputs = tiny_model(**changes), inputs_with_padding()
    model.save_pretrained(tmp_path / "model")
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    options = {"device_map": "auto", "max_memory": {"cpu": int(share * size)}, "offload_folder": tmp_path / "offload"}
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "model", **options)
    assert "disk" in loaded.hf_device_map.values()
    assert any(parameter.is_meta for parameter in loaded.parameters())
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)
    for num_beams in (1, 3):
        assert torch.equal(*(tokens_generated(each, num_beams=num_beams) for each in (loaded, model)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("changes", VARIANTS[:2], ids=str)
def test_loaded_in_half_precision(changes, dtype, tmp_path):
    model = tiny_model(**changes)
    model.save_pretrained(tmp_path)
    half = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    logits = half(**inputs_with_padding()).logits
    assert logits.dtype == dtype
    # 8 (bfloat16) or 11 bits a number, over about twenty operations in a row on values around 1.
    tolerance = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(logits.float(), model(**inputs_with_padding()).logits, rtol=tolerance, atol=tolerance)
    tokens_generated(half, num_beams=2)
