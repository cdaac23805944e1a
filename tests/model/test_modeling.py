"""The model against torch.nn.Transformer, the paper's formulas and its own other paths."""

import passes
import pytest
import torch
from conftest import random_ids, tiny_model
from passes import IMPLEMENTATIONS, OTHER_TOOLKITS, batch_of_three, embedding_matrices, relative_difference
from references import naive_attention, torch_transformer_logits
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM


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
        expected = torch_transformer_logits(model, input_ids, attention_mask, decoder_input_ids)
        assert relative_difference(model(input_ids, attention_mask, decoder_input_ids).logits, expected) < 1e-6

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
            causal = module(keys[None], attention_mask=torch.full((1, 1, 6, 6), -torch.inf).double().triu(1))[0][0]
        expected = naive_attention(keys, keys, *weights, num_heads=3, is_allowed=lambda query, key: key <= query)
        assert relative_difference(causal, expected) < 1e-9
        assert relative_difference(over_itself, naive_attention(keys, keys, *weights, num_heads=3)) < 1e-9
        assert relative_difference(over_another, naive_attention(queries, keys, *weights, num_heads=3)) < 1e-9


@pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"encoder_layers": 1, "decoder_layers": 3},
        {"encoder_layers": 3, "decoder_layers": 1},
        {"d_k": 5, "d_v": 7},
        {"max_position_embeddings": 4},
    ],
)
def test_steps_equal_the_full_forward(changes, attn_implementation):
    model = tiny_model(attn_implementation=attn_implementation, **changes)
    input_ids, attention_mask, decoder_input_ids, _ = batch_of_three()
    steps = passes.step_by_step(model, input_ids, attention_mask, decoder_input_ids)
    torch.testing.assert_close(steps, model(input_ids, attention_mask, decoder_input_ids).logits, rtol=1e-4, atol=1e-5)


SOURCE, TARGET, OUTPUT = "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"


class TestTying:
    def test_what_merging_unsets_is_saved_as_it_is(self, tmp_path):
        """PEFT sets `tie_word_embeddings` to false where one of the matrices is another one."""
        model = tiny_model()
        model.lm_head.weight, model.config.tie_word_embeddings = torch.nn.Parameter(2 * model.lm_head.weight), False
        model.generation_config.length_penalty = 0.6  # of beams, which transformers would not save without
        model.save_pretrained(tmp_path)
        matrices = zip(*map(embedding_matrices, (model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path))), strict=True)
        assert all(map(torch.equal, *zip(*matrices, strict=True))) and model.generation_config.length_penalty == 0.6

    @pytest.mark.parametrize(
        ("changes", "stored"),
        [
            ({}, {"model.shared"}),
            ({"tie_word_embeddings": False}, {SOURCE, TARGET, OUTPUT}),
            ({"share_encoder_decoder_embeddings": False}, {SOURCE, TARGET}),
            ({"decoder_vocab_size": 31}, {SOURCE, TARGET}),
            ({"tie_word_embeddings": False, "share_encoder_decoder_embeddings": True}, {"model.shared", OUTPUT}),
        ],
    )
    @pytest.mark.parametrize("size", [None, 40, 20])
    def test_matrices_are_resized_stored_once_and_tied_after_loading(self, changes, stored, size, tmp_path):
        if size is not None and "decoder_vocab_size" in changes:
            pytest.skip("two vocabularies are not resized")
        model = tiny_model(**changes)
        before = [weight.detach().clone() for weight in embedding_matrices(model)]
        model.resize_token_embeddings(size) if size else None
        model.save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        names = {name for name in weights if "embed_" in name or name.split(".")[-2] in ("shared", "lm_head")}
        assert names == {f"{name}.weight" for name in stored}
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        for each in (model, loaded):
            matrices = embedding_matrices(each)
            assert len({id(matrix) for matrix in matrices}) == len(stored)
            for matrix, old in zip(matrices, before, strict=True):
                kept = min(size or len(old), len(old))
                assert len(matrix) == (size or len(old)) and torch.equal(matrix[:kept], old[:kept])
        ids = random_ids(1, 3, vocab_size=20)
        logits = [each(ids, decoder_input_ids=ids).logits for each in (loaded, model)]
        torch.testing.assert_close(*logits, rtol=0, atol=0)

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


def test_labels_make_the_decoder_inputs():
    model = tiny_model()
    source = random_ids(2, 4)
    labels = torch.tensor([[5, 9, 2, -100, -100], [7, 8, 28, 4, 2]])
    shifted = torch.tensor([[0, 5, 9, 2, 1], [0, 7, 8, 28, 4]])
    torch.testing.assert_close(model(source, labels=labels).logits, model(source, decoder_input_ids=shifted).logits)


def test_attentions_and_hidden_states():
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
    for weights in (*outputs.encoder_attentions, *outputs.cross_attentions):
        assert weights.masked_select(attention_mask[:, None, None, :] == 0).abs().max() == 0
    torch.testing.assert_close(outputs.encoder_hidden_states[-1], outputs.encoder_last_hidden_state)
    torch.testing.assert_close(model.lm_head(outputs.decoder_hidden_states[-1]), outputs.logits)


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention_bias": True, "tie_word_embeddings": False, "position_encoding": "learned"}, {"d_k": 5, "d_v": 7}],
)
@pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
def test_gradients_reach_every_parameter(attn_implementation, changes):
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
def test_gradient_checkpointing_gives_the_same(use_reentrant):
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
