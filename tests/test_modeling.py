"""The model against torch.nn.Transformer, the paper's formulas and its own other paths."""

import json
import math

import pytest
import torch
from conftest import padded_batch, random_ids, tiny_config, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from references import naive_attention, sinusoids_by_formula, torch_transformer_logits
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniModel
from vaswani_transformer.layers_vaswani import dropout, sinusoidal_positions
from vaswani_transformer.modeling_vaswani import shift_right

IMPLEMENTATIONS = ["eager", "sdpa"]


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest expected value."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max())


def batch_of_three(seed: int = 0):
    """A padded source with its mask, and decoder inputs padded on the right (mask as well)."""
    input_ids, attention_mask = padded_batch((7, 4, 2), seed=seed)
    decoder_input_ids, decoder_mask = padded_batch((5, 6, 3), seed=seed + 100)
    decoder_input_ids[:, 0] = 0
    return input_ids, attention_mask, decoder_input_ids, decoder_mask


class TestAgainstTorch:
    @pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("attention_bias", [False, True])
    def test_logits_equal_torch_nn_transformer(self, attention_bias, attn_implementation):
        model = tiny_model(
            dtype=torch.float64,
            attn_implementation=attn_implementation,
            attention_bias=attention_bias,
            encoder_layers=2,
            decoder_layers=3,
        )
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        logits = model(input_ids, attention_mask, decoder_input_ids).logits
        expected = torch_transformer_logits(model, input_ids, attention_mask, decoder_input_ids)
        assert relative_difference(logits, expected) < 1e-6

    def test_untied_logits_equal_torch_nn_transformer(self):
        model = tiny_model(dtype=torch.float64, tie_word_embeddings=False)
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        logits = model(input_ids, attention_mask, decoder_input_ids).logits
        expected = torch_transformer_logits(model, input_ids, attention_mask, decoder_input_ids)
        assert relative_difference(logits, expected) < 1e-6

    def test_layer_norm_eps_is_used(self):
        model = tiny_model(dtype=torch.float64, layer_norm_eps=0.1)
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        logits = model(input_ids, attention_mask, decoder_input_ids).logits
        expected = torch_transformer_logits(model, input_ids, attention_mask, decoder_input_ids)
        assert relative_difference(logits, expected) < 1e-6

    @pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize(("d_k", "d_v"), [(5, 7), (9, 2)])
    def test_heads_of_any_width_equal_attention_in_loops(self, d_k, d_v, attn_implementation):
        model = tiny_model(dtype=torch.float64, attn_implementation=attn_implementation, d_k=d_k, d_v=d_v)
        module = model.model.encoder.layers[0].self_attn
        weights = [p.weight.detach() for p in (module.q_proj, module.k_proj, module.v_proj, module.out_proj)]
        assert [tuple(w.shape) for w in weights] == [(3 * d_k, 24), (3 * d_k, 24), (3 * d_v, 24), (24, 3 * d_v)]
        generator = torch.Generator().manual_seed(1)
        queries = torch.randn(4, 24, dtype=torch.float64, generator=generator)
        keys = torch.randn(6, 24, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            over_itself = module(keys[None])[0][0]
            over_another = module(queries[None], key_value_states=keys[None])[0][0]
        assert relative_difference(over_itself, naive_attention(keys, keys, *weights, num_heads=3)) < 1e-9
        assert relative_difference(over_another, naive_attention(queries, keys, *weights, num_heads=3)) < 1e-9

    def test_a_whole_decoder_layer_with_narrow_heads(self):
        model = tiny_model(dtype=torch.float64, d_k=5, d_v=7)
        layer = model.model.decoder.layers[0]
        states = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        source = torch.randn(3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        causal = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()

        def attention(module, queries, keys, is_allowed):
            weights = [p.weight.detach() for p in (module.q_proj, module.k_proj, module.v_proj, module.out_proj)]
            return naive_attention(queries, keys, *weights, num_heads=3, is_allowed=is_allowed)

        with torch.no_grad():
            actual = layer(states[None], causal, source[None])[0]
            attended = attention(layer.self_attn, states, states, lambda query, key: key <= query)
            expected = layer.self_attn_layer_norm(states + attended)
            attended = attention(layer.encoder_attn, expected, source, lambda query, key: True)
            expected = layer.encoder_attn_layer_norm(expected + attended)
            inner = torch.clamp(expected @ layer.fc1.weight.T + layer.fc1.bias, min=0)
            expected = layer.final_layer_norm(expected + inner @ layer.fc2.weight.T + layer.fc2.bias)
        assert relative_difference(actual, expected) < 1e-9


class TestAttentionImplementations:
    @pytest.mark.parametrize("changes", [{}, {"d_k": 5, "d_v": 7}, {"attention_bias": True}])
    def test_eager_equals_sdpa(self, changes):
        inputs = batch_of_three()
        eager, sdpa = (
            tiny_model(dtype=torch.float64, attn_implementation=name, **changes)(*inputs[:3]).logits
            for name in IMPLEMENTATIONS
        )
        assert relative_difference(eager, sdpa) < 1e-9

    @pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
    def test_a_later_target_token_changes_no_earlier_logits(self, attn_implementation):
        model = tiny_model(attn_implementation=attn_implementation)
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        before = model(input_ids, attention_mask, decoder_input_ids).logits
        for t in range(decoder_input_ids.shape[1]):
            changed = decoder_input_ids.clone()
            changed[:, t] = (changed[:, t] + 5) % 29
            after = model(input_ids, attention_mask, changed).logits
            torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-6)
            assert (after[:, t] - before[:, t]).abs().amax(dim=-1).min() > 1e-3

    @pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
    def test_every_source_token_reaches_every_logit(self, attn_implementation):
        model = tiny_model(attn_implementation=attn_implementation)
        input_ids, decoder_input_ids = random_ids(1, 5), random_ids(1, 4, seed=1)
        before = model(input_ids, decoder_input_ids=decoder_input_ids).logits
        for s in range(5):
            changed = input_ids.clone()
            changed[0, s] = 3 + (changed[0, s] - 2) % 26
            after = model(changed, decoder_input_ids=decoder_input_ids).logits
            assert (after - before).abs().amax(dim=-1).min() > 1e-5

    @pytest.mark.parametrize("with_decoder_mask", [False, True])
    @pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
    def test_a_padded_row_equals_the_row_alone(self, attn_implementation, with_decoder_mask):
        model = tiny_model(attn_implementation=attn_implementation)
        input_ids, attention_mask, decoder_input_ids, decoder_mask = batch_of_three()
        together = model(
            input_ids, attention_mask, decoder_input_ids, decoder_mask if with_decoder_mask else None
        ).logits
        for row in range(3):
            source_length, target_length = int(attention_mask[row].sum()), int(decoder_mask[row].sum())
            alone = model(
                input_ids[row : row + 1, :source_length],
                decoder_input_ids=decoder_input_ids[row : row + 1, :target_length],
            ).logits
            torch.testing.assert_close(together[row : row + 1, :target_length], alone, rtol=1e-4, atol=1e-5)

    def test_what_stands_in_the_padding_does_not_matter(self):
        model = tiny_model()
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        other = torch.where(attention_mask == 1, input_ids, 17)
        torch.testing.assert_close(
            model(other, attention_mask, decoder_input_ids).logits,
            model(input_ids, attention_mask, decoder_input_ids).logits,
        )


def tables(model) -> list[torch.Tensor]:
    return [model.model.encoder.embed_positions.table, model.model.decoder.embed_positions.table]


class TestSinusoids:
    FORMULA = torch.tensor(sinusoids_by_formula(32, 24), dtype=torch.float64)

    def test_function_equals_the_formula(self):
        expected = torch.tensor(sinusoids_by_formula(200, 10), dtype=torch.float64)
        torch.testing.assert_close(sinusoidal_positions(torch.arange(200), 10), expected, rtol=0, atol=1e-12)

    def test_function_takes_positions_of_any_shape_and_far_away(self):
        positions = torch.tensor([[3, 100_000], [0, 7]])
        actual = sinusoidal_positions(positions, 4)
        assert actual.shape == (2, 2, 4)
        assert actual[1, 0].tolist() == [0, 1, 0, 1]
        assert actual[0, 1].tolist() == pytest.approx(
            [math.sin(100_000), math.cos(100_000), math.sin(1000), math.cos(1000)], abs=1e-9
        )

    def test_table_of_a_new_model(self):
        for table in tables(VaswaniForConditionalGeneration(tiny_config())):
            torch.testing.assert_close(table.double(), self.FORMULA, rtol=0, atol=1e-7)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_table_after_loading(self, tmp_path, dtype):
        tiny_model().save_pretrained(tmp_path)
        loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
        for table in tables(loaded):
            assert table.dtype == dtype
            torch.testing.assert_close(table, self.FORMULA.to(dtype), rtol=1e-7, atol=1e-7)

    def test_table_after_loading_into_the_base_class(self, tmp_path):
        tiny_model().save_pretrained(tmp_path)
        loaded = VaswaniModel.from_pretrained(tmp_path)
        torch.testing.assert_close(loaded.encoder.embed_positions.table.double(), self.FORMULA, rtol=0, atol=1e-7)

    def test_table_after_conversion(self):
        for table in tables(tiny_model().to(torch.bfloat16)):
            assert table.dtype == torch.bfloat16
            # half a unit in the last of bfloat16's 8 significant bits, and float32's rounding before it
            torch.testing.assert_close(table.double(), self.FORMULA, rtol=2**-8 + 1e-6, atol=1e-7)

    def test_table_after_resizing(self):
        model = tiny_model()
        model.resize_token_embeddings(40)
        for table in tables(model):
            torch.testing.assert_close(table.double(), self.FORMULA, rtol=0, atol=1e-7)

    def test_table_is_in_no_state_dict_and_no_file(self, tmp_path):
        model = tiny_model()
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            names = set(file.keys()) | set(model.state_dict())
        assert not [name for name in names if "position" in name]

    def test_input_longer_than_the_table(self):
        short = tiny_model(dtype=torch.float64, max_position_embeddings=4)
        long = tiny_model(dtype=torch.float64, max_position_embeddings=64)
        input_ids, decoder_input_ids = random_ids(2, 40), random_ids(2, 35, seed=1)
        actual = short(input_ids, decoder_input_ids=decoder_input_ids).logits
        expected = torch_transformer_logits(short, input_ids, torch.ones_like(input_ids), decoder_input_ids)
        assert relative_difference(actual, expected) < 1e-6
        assert relative_difference(actual, long(input_ids, decoder_input_ids=decoder_input_ids).logits) < 1e-9

    def test_decoding_step_past_the_table(self):
        model = tiny_model(max_position_embeddings=4)
        input_ids, decoder_input_ids = random_ids(1, 3), random_ids(1, 9, seed=1)
        full = model(input_ids, decoder_input_ids=decoder_input_ids).logits
        torch.testing.assert_close(step_by_step(model, input_ids, None, decoder_input_ids), full, rtol=1e-4, atol=1e-5)


class TestLearnedPositions:
    def test_are_parameters_of_both_sides(self):
        model = tiny_model(position_encoding="learned")
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if "position" in n}
        assert shapes == {
            "model.encoder.embed_positions.weight": (32, 24),
            "model.decoder.embed_positions.weight": (32, 24),
        }

    def test_are_added_to_the_scaled_embeddings(self):
        model = tiny_model(dtype=torch.float64, position_encoding="learned", encoder_layers=0)
        input_ids = random_ids(2, 6)
        encoder = model.model.encoder
        expected = encoder.embed_tokens.weight[input_ids] * 24**0.5 + encoder.embed_positions.weight[:6]
        torch.testing.assert_close(encoder(input_ids).last_hidden_state, expected)

    @pytest.mark.parametrize("side", ["source", "target"])
    def test_longer_input_is_refused_in_one_line(self, side):
        model = tiny_model(position_encoding="learned")
        lengths = (33, 32) if side == "source" else (32, 33)
        with pytest.raises(ValueError, match=r"33 tokens .* 32 learned positions") as caught:
            model(random_ids(1, lengths[0]), decoder_input_ids=random_ids(1, lengths[1]))
        assert "\n" not in str(caught.value)
        assert model(random_ids(1, 32), decoder_input_ids=random_ids(1, 32)).logits.shape == (1, 32, 29)

    def test_cached_steps_count_towards_the_limit(self):
        model = tiny_model(position_encoding="learned", max_position_embeddings=4)
        with pytest.raises(ValueError, match="5 tokens"):
            step_by_step(model, random_ids(1, 3), None, random_ids(1, 5))


@torch.no_grad()
def step_by_step(model, input_ids, attention_mask, decoder_input_ids, cache=None, steps=None):
    """Logits of one decoder token after another, or of the chunks in `steps`, through a cache."""
    encoder_outputs = model.model.encoder(input_ids, attention_mask=attention_mask)
    logits, start = [], 0
    for length in steps or [1] * decoder_input_ids.shape[1]:
        outputs = model(
            attention_mask=attention_mask,
            encoder_outputs=encoder_outputs,
            decoder_input_ids=decoder_input_ids[:, start : start + length],
            past_key_values=cache,
            use_cache=True,
        )
        cache, start = outputs.past_key_values, start + length
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1)


class TestCache:
    @pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"encoder_layers": 1, "decoder_layers": 3},
            {"encoder_layers": 3, "decoder_layers": 1},
            {"d_k": 5, "d_v": 7},
        ],
    )
    def test_steps_equal_the_full_forward(self, changes, attn_implementation):
        model = tiny_model(attn_implementation=attn_implementation, **changes)
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        full = model(input_ids, attention_mask, decoder_input_ids).logits
        steps = step_by_step(model, input_ids, attention_mask, decoder_input_ids)
        torch.testing.assert_close(steps, full, rtol=1e-4, atol=1e-5)

    def test_chunks_equal_the_full_forward(self):
        model = tiny_model()
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        full = model(input_ids, attention_mask, decoder_input_ids).logits
        steps = step_by_step(model, input_ids, attention_mask, decoder_input_ids, steps=[2, 1, 3])
        torch.testing.assert_close(steps, full, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("changes", [{}, {"encoder_layers": 1, "decoder_layers": 3}, {"d_k": 5, "d_v": 7}])
    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_caches_made_by_the_caller(self, kind, changes):
        model = tiny_model(**changes)
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        config = model.config.get_text_config(decoder=True)
        if kind == "dynamic":
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        else:
            cache = EncoderDecoderCache(
                StaticCache(config=config, max_cache_len=9),
                StaticCache(config=config, max_cache_len=input_ids.shape[1]),
            )
        full = model(input_ids, attention_mask, decoder_input_ids).logits
        steps = step_by_step(model, input_ids, attention_mask, decoder_input_ids, cache)
        torch.testing.assert_close(steps, full, rtol=1e-4, atol=1e-5)

    def test_source_is_projected_once(self):
        model = tiny_model()
        calls = []
        for layer in model.model.decoder.layers:
            layer.encoder_attn.k_proj.register_forward_hook(lambda *args: calls.append(1))
        step_by_step(model, random_ids(1, 5), None, random_ids(1, 6))
        assert len(calls) == len(model.model.decoder.layers)

    def test_is_kept_by_default_and_not_when_refused_or_when_training(self):
        model = tiny_model()
        ids = random_ids(1, 4)
        assert model(ids, decoder_input_ids=ids).past_key_values.get_seq_length() == 4
        assert model(ids, decoder_input_ids=ids, use_cache=False).past_key_values is None
        assert model(ids, labels=ids).past_key_values is None


def embedding_matrices(model) -> list[torch.Tensor]:
    return [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight]


def assert_tied(model):
    first, *others = embedding_matrices(model)
    assert all(other is first for other in others)
    assert model.model.shared.weight is first


class TestTying:
    def test_one_matrix_from_the_start(self):
        assert_tied(VaswaniForConditionalGeneration(tiny_config()))

    def test_stored_once_and_still_tied_after_loading(self, tmp_path):
        model = tiny_model()
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            assert [name for name in file.keys() if file.get_slice(name).get_shape() == [29, 24]] == [  # noqa: SIM118
                "model.shared.weight"
            ]
        loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
        assert_tied(loaded)
        inputs = batch_of_three()[:3]
        torch.testing.assert_close(loaded(*inputs).logits, model(*inputs).logits, rtol=0, atol=0)

    @pytest.mark.parametrize("size", [40, 20])
    def test_still_tied_after_resizing(self, size, tmp_path):
        model = tiny_model()
        before = model.model.shared.weight.detach().clone()
        model.resize_token_embeddings(size)
        assert_tied(model)
        kept = min(size, 29)
        assert torch.equal(model.lm_head.weight[:kept], before[:kept])
        assert model.config.vocab_size == size
        ids = random_ids(1, 3, vocab_size=20)
        logits = model(ids, decoder_input_ids=ids).logits
        assert logits.shape == (1, 3, size)
        model.save_pretrained(tmp_path)
        loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
        assert_tied(loaded)
        torch.testing.assert_close(loaded(ids, decoder_input_ids=ids).logits, logits, rtol=0, atol=0)

    def test_still_tied_after_load_state_dict(self):
        models = [tiny_model(seed=seed) for seed in (1, 2)]
        states = [model.state_dict() for model in models]
        average = {name: (states[0][name] + states[1][name]) / 2 for name in states[0]}
        models[0].load_state_dict(average)
        assert_tied(models[0])
        assert torch.equal(models[0].lm_head.weight, average["model.shared.weight"])

    def test_new_input_embeddings_serve_both_sides(self):
        model = tiny_model()
        new = nn.Embedding(29, 24)
        model.set_input_embeddings(new)
        assert model.get_input_embeddings() is model.model.decoder.embed_tokens is model.model.shared is new

    def test_still_tied_after_conversion(self):
        assert_tied(tiny_model().to(torch.bfloat16))

    def test_a_step_of_training_moves_all_three_together(self):
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(random_ids(2, 4), labels=random_ids(2, 5)).loss.backward()
        optimizer.step()
        assert_tied(model)

    def test_base_model_is_tied_after_loading(self, tmp_path):
        tiny_model().save_pretrained(tmp_path)
        loaded = VaswaniModel.from_pretrained(tmp_path)
        assert loaded.encoder.embed_tokens.weight is loaded.decoder.embed_tokens.weight is loaded.shared.weight


class TestUntied:
    def test_three_matrices_are_saved_and_loaded(self, tmp_path):
        model = tiny_model(tie_word_embeddings=False)
        assert len({weight.data_ptr() for weight in embedding_matrices(model)}) == 3
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            stored = {name for name in file.keys() if file.get_slice(name).get_shape() == [29, 24]}  # noqa: SIM118
        assert stored == {
            "model.encoder.embed_tokens.weight",
            "model.decoder.embed_tokens.weight",
            "lm_head.weight",
        }
        loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
        for actual, expected in zip(embedding_matrices(loaded), embedding_matrices(model), strict=True):
            assert torch.equal(actual, expected)
        assert len({weight.data_ptr() for weight in embedding_matrices(loaded)}) == 3

    @pytest.mark.parametrize("size", [40, 20])
    def test_all_three_are_resized(self, size, tmp_path):
        model = tiny_model(tie_word_embeddings=False)
        before = [weight.detach().clone() for weight in embedding_matrices(model)]
        model.resize_token_embeddings(size)
        kept = min(size, 29)
        for actual, old in zip(embedding_matrices(model), before, strict=True):
            assert actual.shape == (size, 24)
            assert torch.equal(actual[:kept], old[:kept])
        model.save_pretrained(tmp_path)
        loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
        ids = random_ids(1, 3, vocab_size=20)
        torch.testing.assert_close(
            loaded(ids, decoder_input_ids=ids).logits, model(ids, decoder_input_ids=ids).logits, rtol=0, atol=0
        )

    def test_base_model_resizes_both_sides(self):
        model = VaswaniModel(tiny_config(tie_word_embeddings=False))
        model.resize_token_embeddings(40)
        sizes = (model.encoder.embed_tokens.num_embeddings, model.decoder.embed_tokens.num_embeddings)
        assert sizes == (40, 40)


class TestAutoClasses:
    def test_load_our_folder(self, tmp_path):
        model = tiny_model()
        model.save_pretrained(tmp_path)
        inputs = batch_of_three()[:3]
        assert isinstance(AutoConfig.from_pretrained(tmp_path), VaswaniConfig)
        whole, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
        assert isinstance(whole, VaswaniForConditionalGeneration)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        torch.testing.assert_close(whole(*inputs).logits, model(*inputs).logits)
        base = AutoModel.from_pretrained(tmp_path)
        assert isinstance(base, VaswaniModel)
        torch.testing.assert_close(base(*inputs).last_hidden_state, model.model(*inputs).last_hidden_state)

    def test_file_of_the_base_class_loads_into_the_whole_model(self, tmp_path):
        model = tiny_model()
        model.model.save_pretrained(tmp_path)
        inputs = batch_of_three()[:3]
        loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
        torch.testing.assert_close(loaded(*inputs).logits, model(*inputs).logits)

    def test_shards(self, tmp_path):
        model = tiny_model()
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1
        inputs = batch_of_three()[:3]
        loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
        torch.testing.assert_close(loaded(*inputs).logits, model(*inputs).logits, rtol=0, atol=0)


class TestLoss:
    LABELS = torch.tensor([[5, 9, 2, -100, -100], [7, 8, 28, 4, 2]])

    def test_shift_right_puts_the_start_first_and_padding_for_ignored(self):
        assert shift_right(self.LABELS, 1, 0).tolist() == [[0, 5, 9, 2, 1], [0, 7, 8, 28, 4]]

    def test_labels_make_the_decoder_inputs(self):
        model = tiny_model()
        source = random_ids(2, 4)
        from_labels = model(source, labels=self.LABELS)
        shifted = torch.tensor([[0, 5, 9, 2, 1], [0, 7, 8, 28, 4]])
        torch.testing.assert_close(from_labels.logits, model(source, decoder_input_ids=shifted).logits)

    def test_given_decoder_inputs_win_over_labels(self):
        model = tiny_model()
        source, given = random_ids(2, 4), random_ids(2, 5, seed=3)
        both = model(source, decoder_input_ids=given, labels=self.LABELS).logits
        torch.testing.assert_close(both, model(source, decoder_input_ids=given).logits)

    def test_is_torchs_cross_entropy_over_the_labels_that_count(self):
        outputs = tiny_model()(random_ids(2, 4), labels=self.LABELS)
        expected = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), self.LABELS, ignore_index=-100)
        torch.testing.assert_close(outputs.loss, expected)

    @pytest.mark.parametrize("count", [11, torch.tensor(11)])
    def test_num_items_in_batch_divides_the_sum(self, count):
        model = tiny_model()
        source = random_ids(2, 4)
        mean = model(source, labels=self.LABELS).loss
        torch.testing.assert_close(model(source, labels=self.LABELS, num_items_in_batch=count).loss, mean * 8 / 11)

    def test_parts_of_a_batch_add_up(self):
        model = tiny_model()
        source = random_ids(2, 4)
        whole = model(source, labels=self.LABELS, num_items_in_batch=8).loss
        parts = [model(source[i : i + 1], labels=self.LABELS[i : i + 1], num_items_in_batch=8).loss for i in range(2)]
        torch.testing.assert_close(sum(parts), whole)

    def test_of_a_bfloat16_model_is_a_float32_sum(self):
        assert tiny_model().to(torch.bfloat16)(random_ids(2, 4), labels=self.LABELS).loss.dtype == torch.float32


class TestInputErrors:
    @pytest.mark.parametrize("bad", [29, 1000, -1])
    @pytest.mark.parametrize("side", ["input_ids", "decoder_input_ids"])
    def test_a_token_id_outside_the_vocabulary(self, side, bad):
        ids = {"input_ids": random_ids(2, 4), "decoder_input_ids": random_ids(2, 3)}
        ids[side][1, 2] = bad
        with pytest.raises(ValueError, match=rf"^{side} .*(?<![-\d]){bad}\b.*\b29\b") as caught:
            tiny_model()(**ids)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("position", [1, 3])
    def test_a_label_outside_the_vocabulary(self, position):
        labels = random_ids(2, 4)
        labels[0, position] = 31
        with pytest.raises(ValueError, match=r"31\b.*\b29\b"):
            tiny_model()(random_ids(2, 4), labels=labels)

    def test_neither_or_both_of_ids_and_embeddings(self):
        model = tiny_model()
        ids = random_ids(1, 3)
        embeds = torch.zeros(1, 3, 24)
        with pytest.raises(ValueError, match="input_ids or inputs_embeds; neither"):
            model(decoder_input_ids=ids)
        with pytest.raises(ValueError, match="input_ids or inputs_embeds; both"):
            model(ids, decoder_input_ids=ids, inputs_embeds=embeds)
        with pytest.raises(ValueError, match="decoder_input_ids or decoder_inputs_embeds; neither"):
            model(ids)
        with pytest.raises(ValueError, match="decoder_input_ids or decoder_inputs_embeds; both"):
            model(ids, decoder_input_ids=ids, decoder_inputs_embeds=embeds)


class TestOtherPaths:
    def test_embeddings_in_place_of_ids(self):
        model = tiny_model()
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        table = model.get_input_embeddings().weight
        by_embeds = model(
            attention_mask=attention_mask,
            inputs_embeds=table[input_ids],
            decoder_inputs_embeds=table[decoder_input_ids],
        )
        torch.testing.assert_close(by_embeds.logits, model(input_ids, attention_mask, decoder_input_ids).logits)

    @pytest.mark.parametrize("as_tuple", [False, True])
    def test_encoder_outputs_in_place_of_a_source(self, as_tuple):
        model = tiny_model()
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        encoded = model.model.encoder(input_ids, attention_mask=attention_mask)
        outputs = model(
            attention_mask=attention_mask,
            encoder_outputs=(encoded.last_hidden_state,) if as_tuple else encoded,
            decoder_input_ids=decoder_input_ids,
        )
        torch.testing.assert_close(outputs.logits, model(input_ids, attention_mask, decoder_input_ids).logits)

    def test_a_tuple_in_place_of_named_outputs(self):
        model = tiny_model()
        inputs = batch_of_three()[:3]
        loss, logits = model(*inputs, labels=inputs[2], return_dict=False)[:2]
        named = model(*inputs, labels=inputs[2])
        torch.testing.assert_close((loss, logits), (named.loss, named.logits))

    def test_attentions_and_hidden_states(self):
        model = tiny_model(attn_implementation="eager", encoder_layers=2, decoder_layers=3)
        input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
        outputs = model(input_ids, attention_mask, decoder_input_ids, output_attentions=True, output_hidden_states=True)
        shapes = {
            "encoder_attentions": [(3, 3, 7, 7)] * 2,
            "decoder_attentions": [(3, 3, 6, 6)] * 3,
            "cross_attentions": [(3, 3, 6, 7)] * 3,
            "encoder_hidden_states": [(3, 7, 24)] * 3,
            "decoder_hidden_states": [(3, 6, 24)] * 4,
        }
        assert {name: [tuple(t.shape) for t in getattr(outputs, name)] for name in shapes} == shapes
        for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
            for weights in getattr(outputs, name):
                torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
        for weights in outputs.decoder_attentions:
            assert weights.triu(1).abs().max() == 0
        is_padding = attention_mask[:, None, None, :] == 0
        for weights in (*outputs.encoder_attentions, *outputs.cross_attentions):
            assert weights.masked_select(is_padding).abs().max() == 0
        torch.testing.assert_close(outputs.encoder_hidden_states[-1], outputs.encoder_last_hidden_state)
        torch.testing.assert_close(model.lm_head(outputs.decoder_hidden_states[-1]), outputs.logits)

    def test_nothing_is_recorded_unasked(self):
        outputs = tiny_model(attn_implementation="eager")(*batch_of_three()[:3])
        assert outputs.encoder_attentions is None
        assert outputs.decoder_hidden_states is None

    def test_dummy_inputs_run(self):
        model = tiny_model()
        assert model(**model.dummy_inputs).logits.shape[-1] == 29

    def test_compiles_without_graph_breaks(self):
        model = tiny_model()
        inputs = batch_of_three()[:3]
        expected = model(*inputs, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs, use_cache=False).logits, expected)

    def test_a_training_step_compiles_without_graph_breaks(self):
        model = tiny_model(dropout=0.1).train()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        compiled(random_ids(2, 5), labels=random_ids(2, 4)).loss.backward()
        assert model.lm_head.weight.grad.abs().sum() > 0


class TestGradients:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"attention_bias": True, "tie_word_embeddings": False, "position_encoding": "learned"},
            {"d_k": 5, "d_v": 7},
        ],
    )
    @pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
    def test_reach_every_parameter(self, attn_implementation, changes):
        model = tiny_model(attn_implementation=attn_implementation, **changes).train()
        input_ids, attention_mask, labels, _ = batch_of_three()
        model(input_ids, attention_mask, labels=labels).loss.backward()
        for name, parameter in model.named_parameters():
            if name.endswith("k_proj.bias"):
                continue  # adds the same to all scores of a query, which softmax takes out again
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name

    @pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpointing_gives_the_same(self, use_reentrant):
        input_ids, attention_mask, labels, _ = batch_of_three()
        gradients = []
        for checkpointing in (False, True):
            model = tiny_model(dropout=0.1, attention_dropout=0.1, activation_dropout=0.1).train()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
                assert model.is_gradient_checkpointing
            torch.manual_seed(3)
            model(input_ids, attention_mask, labels=labels).loss.backward()
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        torch.testing.assert_close(gradients[1], gradients[0])


class TestInitialisation:
    def test_embeddings_have_variance_of_one_over_width(self):
        model = VaswaniForConditionalGeneration(tiny_config(vocab_size=2000, d_model=60, tie_word_embeddings=False))
        for weight in embedding_matrices(model):
            # The sample variance of n normal values has a relative standard error of sqrt(2 / n): 0.4% here.
            assert float(weight.detach().var()) == pytest.approx(1 / 60, rel=0.03)
            assert abs(float(weight.detach().mean())) < 5 * (1 / 60 / weight.numel()) ** 0.5

    def test_row_of_the_padding_token_is_zero(self):
        for tied in (True, False):
            model = VaswaniForConditionalGeneration(tiny_config(tie_word_embeddings=tied, pad_token_id=5))
            for weight in embedding_matrices(model)[:2]:
                assert weight[5].abs().max() == 0
                assert weight[4].abs().max() > 0

    @pytest.mark.parametrize("name", ["q_proj", "v_proj", "out_proj", "fc1", "fc2"])
    def test_matrices_are_xavier_uniform(self, name):
        model = VaswaniForConditionalGeneration(tiny_config(d_model=60, d_ff=90, d_k=11, d_v=13, attention_bias=True))
        weights = [m.weight for n, m in model.named_modules() if n.endswith(name)]
        assert len(weights) == (4 if name.startswith("fc") else 6)
        for weight in weights:
            bound = math.sqrt(6 / sum(weight.shape))
            largest = float(weight.detach().abs().max())
            # Of n values none exceeds 0.98 of the bound with probability 0.98^n: under 1e-17 for the 1,980 here.
            assert 0.98 * bound < largest <= bound
            assert float(weight.detach().var()) == pytest.approx(bound**2 / 3, rel=0.2)

    def test_biases_are_zero_and_norms_are_identity(self):
        model = VaswaniForConditionalGeneration(tiny_config(attention_bias=True))
        for name, parameter in model.named_parameters():
            if "layer_norm.weight" in name:
                assert torch.equal(parameter, torch.ones(24)), name
            elif name.endswith("bias"):
                assert parameter.abs().max() == 0, name

    def test_depends_on_torchs_seed_only(self):
        states = []
        for _ in range(2):
            torch.manual_seed(11)
            states.append(VaswaniForConditionalGeneration(tiny_config()).state_dict())
        torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)

    def test_embedded_tokens_have_unit_variance(self):
        model = VaswaniForConditionalGeneration(tiny_config(d_model=60, vocab_size=2000, encoder_layers=0)).eval()
        ids = random_ids(20, 30, vocab_size=2000)
        states = model.model.encoder(ids).last_hidden_state
        positions = torch.tensor(sinusoids_by_formula(30, 60))
        assert float((states - positions).detach().var()) == pytest.approx(
            1, rel=0.05
        )  # 36,000 values: 0.75% standard error


class TestDropout:
    @pytest.mark.parametrize(("p", "training"), [(0.3, False), (0.0, True), (0, True), (0.0, False)])
    def test_is_the_identity_when_there_is_nothing_to_drop(self, p, training):
        states = torch.randn(3, 5)
        assert torch.equal(dropout(states, p, training), states)

    @pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.9, 0.999])
    def test_share_of_zeros_and_mean(self, p):
        n = 400_000
        torch.manual_seed(1)
        dropped = dropout(torch.ones(n), p, training=True)
        zeros = float((dropped == 0).double().mean())
        # Binomial: five standard errors, and the 1/65536 to which p is met.
        assert abs(zeros - p) < 5 * math.sqrt(p * (1 - p) / n) + 1 / 65_536
        # A kept value is 1/(1-p), so the mean's standard error is sqrt(p/(1-p)/n), whatever p was met to.
        assert abs(float(dropped.double().mean()) - 1) < 5 * math.sqrt(p / (1 - p) / n) + 1e-6

    def test_scale_is_that_of_the_share_kept(self):
        torch.manual_seed(1)
        dropped = dropout(torch.full((1000,), 3.0), 0.25, training=True)
        assert set(dropped.tolist()) == {0.0, 4.0}  # a quarter is a whole number of 65,536ths

    def test_neighbours_drop_independently(self):
        # Four values share one random number, so each pair of the four is looked at: for independent values with
        # p = 1/2 the share that agrees is 1/2 with a standard error of 0.5 / sqrt(100,000).
        torch.manual_seed(2)
        kept = (dropout(torch.ones(100_000, 4), 0.5, training=True) > 0).float()
        for i in range(4):
            for j in range(i):
                agreeing = float((kept[:, i] == kept[:, j]).float().mean())
                assert abs(agreeing - 0.5) < 5 * 0.5 / math.sqrt(100_000)

    @given(shape=st.lists(st.integers(0, 7), max_size=4), p=st.floats(0.01, 0.99), seed=st.integers(0, 2**32))
    @settings(max_examples=60, deadline=None)
    def test_any_shape_and_the_same_again_from_the_same_seed(self, shape, p, seed):
        states = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
        results = []
        for _ in range(2):
            torch.manual_seed(seed)
            results.append(dropout(states, p, training=True))
        assert results[0].shape == states.shape
        assert torch.equal(results[0], results[1])
        ratios = results[0] / states
        kept = ratios[ratios != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)), rtol=1 / 65_536 / (1 - p), atol=0)

    def test_next_call_drops_others(self):
        torch.manual_seed(1)
        first, second = (dropout(torch.ones(200), 0.5, training=True) for _ in range(2))
        assert not torch.equal(first, second)

    def test_views_that_are_not_contiguous(self):
        torch.manual_seed(1)
        states = torch.arange(1.0, 31.0).reshape(5, 6).T
        dropped = dropout(states, 0.5, training=True)
        assert torch.equal(dropped[dropped != 0], 2 * states[dropped != 0])

    @pytest.mark.parametrize("p", [0.1, 0.5])
    def test_gradient_is_the_mask_times_the_scale(self, p):
        states = torch.rand(7, 9, dtype=torch.float64).add(1).requires_grad_()
        upstream = torch.randn(7, 9, dtype=torch.float64)
        torch.manual_seed(4)
        dropped = dropout(states, p, training=True)
        dropped.backward(upstream)
        torch.testing.assert_close(states.grad, upstream * (dropped / states).detach())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_keeps_the_type(self, dtype):
        torch.manual_seed(1)
        dropped = dropout(torch.ones(1000, dtype=dtype), 0.1, training=True)
        assert dropped.dtype == dtype
        kept = dropped[dropped != 0].double()
        assert 800 < len(kept) < 970
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.9), rtol=2**-8, atol=0)

    def test_model_drops_in_training_only(self):
        model = tiny_model(dropout=0.5)
        inputs = batch_of_three()[:3]
        torch.testing.assert_close(model(*inputs).logits, tiny_model().eval()(*inputs).logits, rtol=0, atol=0)
        model.train()
        torch.manual_seed(5)
        first = model(*inputs).logits
        assert not torch.equal(first, model(*inputs).logits)
        torch.manual_seed(5)
        assert torch.equal(first, model(*inputs).logits)

    @pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("field", ["dropout", "attention_dropout", "activation_dropout"])
    def test_each_rate_has_an_effect(self, field, attn_implementation):
        inputs = batch_of_three()[:3]
        model = tiny_model(attn_implementation=attn_implementation, **{field: 0.5})
        expected = model(*inputs).logits
        assert not torch.allclose(model.train()(*inputs).logits, expected, atol=1e-3)
