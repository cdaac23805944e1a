"""Steps of the decoder in `generate()`: the same search as with the layers' own forward, whatever is asked of it."""

import copy
import inspect
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from conftest import padded_batch, random_ids, tiny_model
from passes import OTHER_TOOLKITS
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

from vaswani_transformer.model import incremental_decoding_vaswani as decoding_vaswani
from vaswani_transformer.model import modeling_vaswani
from vaswani_transformer.model.incremental_decoding_vaswani import DecodingCache, IncrementalDecoder
from vaswani_transformer.model.linear_vaswani import Projection, has_hooks, has_own_methods

SOURCES = (7, 3, 9, 1)
SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "n-best": {"num_beams": 5, "num_return_sequences": 3},
    "one beam, three samples": {"do_sample": True, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "more room than at first": {"num_beams": 3, "min_new_tokens": 70, "max_new_tokens": 70},
    "no length normalisation": {"num_beams": 4, "length_penalty": 0.0},
    "prefix, greedy": {"decoder_input_ids": random_ids(4, 40, seed=4)},
    "prefix": {"num_beams": 3, "decoder_input_ids": random_ids(4, 5, seed=3)},
}
MODELS = {
    "plain": {},
    "widths of heads": {"d_k": 5, "d_v": 11},
    "untied, learned positions, biases": {
        "tie_word_embeddings": False, "position_encoding": "learned", "attention_bias": True,
        "max_position_embeddings": 80,
    },
    "beyond the table of sinusoids": {"max_position_embeddings": 8},
    "another toolkit's": {**OTHER_TOOLKITS[-1], "max_position_embeddings": 8, "position_offset": 2},
}  # fmt: skip


def search(model, steps=True, **options):
    """A search with all its scores, by steps or by the layers' own forward."""
    ids, mask = padded_batch(SOURCES)
    torch.manual_seed(0)
    options = {"input_ids": ids, "attention_mask": mask, "max_extra_tokens": 12, **options}
    is_allowed = modeling_vaswani.can_decode_incrementally if steps else lambda *_: False
    with patch.object(modeling_vaswani, "can_decode_incrementally", is_allowed):
        return model.generate(**options, return_dict_in_generate=True, output_scores=True)


# All searches with two models, and three with the others.
PAIRED = [(kind, name) for kind in ("plain", "another toolkit's") for name in SEARCHES]
PAIRED += [(kind, name) for kind in list(MODELS)[1:4] for name in ("beams", "sampled beams", "prefix, greedy")]


@pytest.mark.parametrize(("kind", "name"), PAIRED)
def test_the_search_is_the_one_without_steps(kind, name):
    model, options = tiny_model(dtype=torch.float64, scale=2.0, **MODELS[kind]), SEARCHES[name]
    one, other = search(model, **options), search(model, steps=False, **options)
    assert isinstance(one.past_key_values, DecodingCache) and not isinstance(other.past_key_values, DecodingCache)
    assert torch.equal(one.sequences, other.sequences)
    torch.testing.assert_close(one.scores, other.scores, rtol=1e-5, atol=1e-5)  # transformers takes float32 of logits
    if "num_beams" in options:
        torch.testing.assert_close(one.sequences_scores, other.sequences_scores, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["beams", "n-best", "sampled beams", "more room than at first", "prefix"])
def test_dropping_what_no_beam_looks_at_changes_nothing(name):
    model, dropped = tiny_model(dtype=torch.float64, scale=2.0), []
    options = {"max_extra_tokens": 50, **SEARCHES[name]}
    drop = DecodingCache._drop_unseen

    def counted(cache):
        before = cache.filled
        drop(cache)
        dropped.append(before - cache.filled)

    with patch.object(decoding_vaswani, "_ROOM", 2), patch.object(DecodingCache, "_drop_unseen", counted):
        one = search(model, **options)
    other = search(model, steps=False, **options)
    assert sum(dropped) > 0 and torch.equal(one.sequences, other.sequences)
    torch.testing.assert_close(one.sequences_scores, other.sequences_scores, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_beams_that_go_on_from_one_share_its_past():
    """Whatever the length, buffers hold that past once, and what has come since."""
    model, beams = tiny_model(), 5
    decoder = IncrementalDecoder(model)
    cache = DecodingCache(decoder, beams)
    decoder.read_source(torch.randn(2, 3, model.config.d_model), None, cache)
    for _ in range(300):
        decoder.step(torch.full((2 * beams, 1), 5), cache)
        cache.reorder_cache(torch.tensor([3] * beams + [beams + 1] * beams))
    assert cache.length == 300 and cache.filled <= 300 + 100 * beams and cache.room < 300 * beams
    cache._drop_unseen()
    assert cache.filled == 300
    with pytest.raises(ValueError, match="no beams to reorder"):
        DecodingCache(decoder, 1).reorder_cache(torch.tensor([1, 0]))


class Doubled(nn.Linear):
    """Another class of linear layer, as adapters and quantised layers are."""

    def forward(self, states):
        return 2 * super().forward(states)


def test_another_class_of_linear_layer_is_called():
    model = tiny_model(scale=2.0)
    plain = search(model, num_beams=3).sequences
    for layer in model.model.decoder.layers:
        for parent, name in ((layer, "fc2"), (layer.self_attn, "v_proj"), (layer.encoder_attn, "q_proj")):
            old = getattr(parent, name)
            new = Doubled(old.in_features, old.out_features, bias=old.bias is not None)
            new.load_state_dict(old.state_dict())
            setattr(parent, name, new)
    one, other = search(model, num_beams=3), search(model, steps=False, num_beams=3)
    assert isinstance(one.past_key_values, DecodingCache)
    assert torch.equal(one.sequences, other.sequences)
    assert one.sequences.shape != plain.shape or not torch.equal(one.sequences, plain)


def hook_all(model):
    model.handle = nn.modules.module.register_module_forward_hook(lambda *_: None)


def derive(name: str):
    """A change of one module's class to one derived from it."""

    def change(model):
        module = model.get_submodule(name)
        module.__class__ = type("Derived", (type(module),), {})

    return change


def replace_method(model):
    layer = model.model.decoder.layers[0]
    layer.feed_forward = layer.feed_forward


OWN_FORWARD = {
    "another kind of normalisation": (derive("model.decoder.layers.1.final_layer_norm"), {}),
    "subclass of the decoder": (derive("model.decoder"), {}),
    "subclass of the model inside": (derive("model"), {}),
    "method of the object": (replace_method, {}),
    "hook": (lambda model: model.model.decoder.layers[0].fc1.register_forward_hook(lambda *_: None), {}),
    "hook on all modules": (hook_all, {}),
    "forward of the object": (lambda model: setattr(model, "forward", model.forward), {}),
    "subclass of a layer": (derive("model.decoder.layers.0"), {}),
    "subclass of an attention": (derive("model.decoder.layers.0.self_attn"), {}),
    "training": (lambda model: model.train(), {}),
    "weights of attention": (lambda model: model.set_attn_implementation("eager"), {"output_attentions": True}),
    "hidden states": (None, {"output_hidden_states": True}),
    "a cache of one's own": (None, {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}),
    "static cache": (None, {"cache_implementation": "static", "max_new_tokens": 5}),
    "no cache": (None, {"use_cache": False}),
    "mask of a prefix": (
        None,
        {"decoder_input_ids": random_ids(4, 3), "decoder_attention_mask": padded_batch((1, 3, 2, 3))[1].flip(1)},
    ),
}


@pytest.mark.parametrize(("change", "options"), OWN_FORWARD.values(), ids=OWN_FORWARD)
def test_the_layers_own_forward_where_steps_would_miss_something(change, options):
    model = tiny_model()
    change(model) if change else None
    try:
        assert not isinstance(search(model, **options).past_key_values, DecodingCache)
    finally:
        if hasattr(model, "handle"):
            model.handle.remove()


@pytest.mark.parametrize(("kind", "name"), decoding_vaswani._METHODS)
def test_a_method_that_somebody_has_given_the_class_is_run(kind, name, monkeypatch):
    own, calls = getattr(kind, name), []
    monkeypatch.setattr(kind, name, lambda *inputs, **options: calls.append(0) or own(*inputs, **options))
    assert not isinstance(search(tiny_model()).past_key_values, DecodingCache) and len(calls) > 4


@torch.no_grad()
def test_steps_go_on_after_somebody_has_looked_into_the_layers():
    model = tiny_model(attn_implementation="eager")
    ids, _ = padded_batch(SOURCES)
    seen = model(input_ids=ids, decoder_input_ids=ids, output_attentions=True, output_hidden_states=True)
    assert seen.decoder_attentions and isinstance(search(model).past_key_values, DecodingCache)
    asked = search(model, output_hidden_states=True)
    assert asked.decoder_hidden_states and not isinstance(asked.past_key_values, DecodingCache)


def test_what_accelerate_wraps_for_mixed_precision_searches_as_before_it():
    expected = search(model := tiny_model(), num_beams=2).sequences
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model).eval()
    assert "_original_forward" in vars(model) and torch.equal(search(model, num_beams=2).sequences, expected)
    assert not has_own_methods(model) and not has_hooks(model)


def test_a_decoder_that_was_kept_does_not_serve_weights_that_are_trained():
    (model := tiny_model()).keep_decoder()
    before = search(model).sequences
    for weight in model.requires_grad_(True).parameters():
        weight.data.neg_()
    expected = search(copy.deepcopy(model), steps=False).sequences
    assert torch.equal(search(model).sequences, expected) and not torch.equal(before, expected)


def test_with_gradients_the_layers_own_forward():
    """As in learning from sampled outputs, which takes off the `no_grad` around `generate()`."""
    model = tiny_model()
    ids, mask = padded_batch(SOURCES)
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    output = inspect.unwrap(GenerationMixin.generate)(model, ids, attention_mask=mask, **options)
    assert not isinstance(output.past_key_values, DecodingCache)
    torch.stack(output.logits).sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@torch.no_grad()
@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # until transformers 5.23, and since
def test_a_cache_of_generate_goes_on_in_the_whole_model_and_nowhere_else(name):
    model = tiny_model(scale=2.0)
    ids, mask = padded_batch(SOURCES)
    found = search(model, min_new_tokens=3, max_new_tokens=3)
    cache = {name: found.past_key_values}
    step = model(attention_mask=mask, decoder_input_ids=found.sequences[:, -1:], **cache)
    whole = model(input_ids=ids, attention_mask=mask, decoder_input_ids=found.sequences)
    torch.testing.assert_close(step.logits[:, -1], whole.logits[:, -1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="give the decoder a DynamicCache"):
        model.model(input_ids=ids, decoder_input_ids=ids, **cache)
    with pytest.raises(TypeError, match="only defined for dynamic cache"):  # which would select nothing
        found.past_key_values.batch_select_indices(torch.tensor([0]))


@pytest.mark.parametrize("beams", [1, 3])
def test_a_prefix_that_is_to_be_read_in_chunks_is_read_at_once(beams):
    model, options = tiny_model(scale=2.0), SEARCHES["prefix"] | {"num_beams": beams}
    assert torch.equal(search(model, **options, prefill_chunk_size=2).sequences, search(model, **options).sequences)


def test_weights_that_change_between_two_searches():
    model = tiny_model(scale=2.0)
    search(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.3)
    assert torch.equal(search(model).sequences, search(model, steps=False).sequences)
    model.load_state_dict(tiny_model(seed=5, scale=2.0).state_dict(), assign=True)
    model.tie_weights()
    assert torch.equal(search(model).sequences, search(model, steps=False).sequences)


def test_several_tokens_at_once_and_some_taken_back():
    """As assisted decoding has it: a longer prefix, part of which is refused, and another one in its place."""
    model, (ids, mask) = tiny_model(dtype=torch.float64), padded_batch(SOURCES)
    first, second = random_ids(4, 6, seed=1), random_ids(4, 3, seed=2)
    with torch.no_grad():
        encoded = model.model.encoder(ids, mask)
        cache = DecodingCache(IncrementalDecoder(model))
        inputs = {"encoder_outputs": encoded, "attention_mask": mask, "past_key_values": cache}
        model(**inputs, decoder_input_ids=first)
        cache.crop(0)
        cache.crop(-2)
        found = model(**inputs, decoder_input_ids=second).logits
        assert cache.get_seq_length() == 7
        whole = torch.cat((first[:, :4], second), dim=1)
        expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=whole).logits[:, -3:]
        cache.crop(-2)
        assert cache.get_seq_length() == 5
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("width", [20, 64, 200])
@pytest.mark.parametrize("rows", [0, 1, 2, 64, 65])
@torch.no_grad()
def test_products_of_few_rows(rows, width, bias):
    module, states = nn.Linear(24, width, bias=bias), torch.randn(rows, 24)
    torch.testing.assert_close(Projection(module)(states), module(states), rtol=1e-5, atol=1e-5)
    half = module.to(torch.bfloat16)
    assert torch.equal(Projection(half)(states.bfloat16()), half(states.bfloat16()))
