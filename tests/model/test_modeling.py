"""The model against torch.nn.Transformer, the paper's formulas and its own other paths."""

import json

import pytest
import torch
from conftest import random_ids, tiny_model
from passes import (
    IMPLEMENTATIONS,
    OTHER_TOOLKITS,
    batch_of_three,
    embedding_matrices,
    relative_difference,
    step_by_step,
)
from references import naive_attention, torch_transformer_logits
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniModel
from vaswani_transformer.model.modeling_vaswani import shift_right


class TestAgainstTorch:
    @pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize(
        "changes",
        [{}, {"attention_bias": True}, {"tie_word_embeddings": False}, {"layer_norm_eps": 0.1}, *OTHER_TOOLKITS],
        ids=str,
    )
    def test_logits_equal_torch_nn_transformer(self, changes, attn_implementation):
        sizes = {"encoder_layers": 2, "decoder_layers": 3, **changes}
        model = tiny_model(dtype=torch.float64, attn_implementation=attn_implementation, **sizes)
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


def assert_tied(model):
    first, *others = embedding_matrices(model)
    assert all(other is first for other in others)
    assert model.model.shared.weight is first


class TestTying:
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


class TestTargetTied:
    """Target embeddings and output projection are one matrix, the source's another."""

    @pytest.mark.parametrize(
        "changes", [{"share_encoder_decoder_embeddings": False}, {"decoder_vocab_size": 31}], ids=str
    )
    def test_two_matrices_are_saved_and_loaded(self, changes, tmp_path):
        model = tiny_model(**changes)
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            stored = [name for name in file.keys() if "embed_tokens" in name or "lm_head" in name]  # noqa: SIM118
        assert sorted(stored) == ["model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"]
        for loaded in (model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
            source, target, output = embedding_matrices(loaded)
            assert target is output and source is not target
            ids = random_ids(1, 3)
            torch.testing.assert_close(
                loaded(ids, decoder_input_ids=ids).logits, model(ids, decoder_input_ids=ids).logits
            )

    def test_source_and_target_share_one_and_the_output_has_its_own(self, tmp_path):
        model = tiny_model(tie_word_embeddings=False, share_encoder_decoder_embeddings=True)
        model.resize_token_embeddings(41)
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            stored = [name for name in file.keys() if file.get_slice(name).get_shape() == [41, 24]]  # noqa: SIM118
        assert sorted(stored) == ["lm_head.weight", "model.shared.weight"]
        for loaded in (model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
            source, target, output = embedding_matrices(loaded)
            assert source is target is loaded.model.shared.weight and output is not target
            assert source.shape == output.shape == (41, 24)
            ids = random_ids(1, 3)
            assert torch.equal(loaded(ids, decoder_input_ids=ids).logits, model(ids, decoder_input_ids=ids).logits)

    def test_two_vocabularies_are_not_resized(self):
        model = tiny_model(decoder_vocab_size=31)
        for options in ({"new_num_tokens": 40}, {"pad_to_multiple_of": 8}):
            with pytest.raises(ValueError, match="two vocabularies, of 29 and 31 entries"):
                model.resize_token_embeddings(**options)

    @pytest.mark.parametrize(
        "changes", [*OTHER_TOOLKITS, {"tie_word_embeddings": False, "decoder_vocab_size": 31}], ids=str
    )
    def test_parameters_are_counted(self, changes):
        model = tiny_model(**changes)
        assert model.config.num_parameters() == model.num_parameters()


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


class TestInputErrors:
    @pytest.mark.parametrize("bad", [29, 1000, -1])
    @pytest.mark.parametrize("side", ["input_ids", "decoder_input_ids"])
    def test_a_token_id_outside_the_vocabulary(self, side, bad):
        ids = {"input_ids": random_ids(2, 4), "decoder_input_ids": random_ids(2, 3)}
        ids[side][1, 2] = bad
        with pytest.raises(ValueError, match=rf"^{side} .*(?<![-\d]){bad}\b.*\b29\b") as caught:
            tiny_model()(**ids)
        assert "\n" not in str(caught.value)


class TestOtherPaths:
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

    def test_compiles_without_graph_breaks(self):
        model = tiny_model()
        inputs = batch_of_three()[:3]
        expected = model(*inputs, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs, use_cache=False).logits, expected)


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
