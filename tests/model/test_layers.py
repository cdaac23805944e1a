"""The parts of the model: what attention sees, positions by the formula, spread of initial weights, dropout."""

import math

import pytest
import torch
from conftest import padded_batch, random_ids, tiny_config, tiny_model
from passes import IMPLEMENTATIONS, batch_of_three, embedding_matrices
from references import sinusoids_by_formula

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.model.layers_vaswani import dropout


@pytest.mark.parametrize("with_decoder_mask", [False, True])
@pytest.mark.parametrize("attn_implementation", IMPLEMENTATIONS)
def test_a_padded_row_equals_the_row_alone(attn_implementation, with_decoder_mask):
    model = tiny_model(attn_implementation=attn_implementation)
    input_ids, attention_mask, decoder_input_ids, decoder_mask = batch_of_three()
    together = model(input_ids, attention_mask, decoder_input_ids, decoder_mask if with_decoder_mask else None).logits
    for row in range(3):
        source_length, target_length = int(attention_mask[row].sum()), int(decoder_mask[row].sum())
        source, target = input_ids[row : row + 1, :source_length], decoder_input_ids[row : row + 1, :target_length]
        alone = model(source, decoder_input_ids=target).logits
        torch.testing.assert_close(together[row : row + 1, :target_length], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_table_of_sinusoids_after_loading(tmp_path, dtype):
    tiny_model().save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    expected = torch.tensor(sinusoids_by_formula(32, 24), dtype=torch.float64).to(dtype)
    for stack in (loaded.model.encoder, loaded.model.decoder):
        torch.testing.assert_close(stack.embed_positions.table, expected, rtol=1e-7, atol=1e-7)  # of this dtype


@pytest.mark.parametrize("side", ["source", "target"])
def test_input_longer_than_learned_positions_is_refused_in_one_line(side):
    model = tiny_model(position_encoding="learned")
    lengths = (33, 32) if side == "source" else (32, 33)
    with pytest.raises(ValueError, match=r"33 tokens .* 32 learned positions") as caught:
        model(random_ids(1, lengths[0]), decoder_input_ids=random_ids(1, lengths[1]))
    assert "\n" not in str(caught.value)
    assert model(random_ids(1, 32), decoder_input_ids=random_ids(1, 32)).logits.shape == (1, 32, 29)


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
                assert weight[5].abs().max() == 0 and weight[4].abs().max() > 0

    # Columns of the matrix that the projection was a part of in the authors' code, by d_k 11, d_v 13 and 3 heads.
    @pytest.mark.parametrize(
        ("name", "joined"),
        [
            ("self_attn.q_proj", 105), ("self_attn.k_proj", 105), ("self_attn.v_proj", 105),
            ("encoder_attn.q_proj", None), ("encoder_attn.k_proj", 72), ("encoder_attn.v_proj", 72),
            ("self_attn.out_proj", None), ("fc1", None), ("fc2", None),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("kind", ["tensor2tensor", "xavier", "normal"])
    def test_matrices_are_uniform_as_xavier_has_it_or_normal(self, name, joined, kind):
        sizes = {"d_model": 60, "d_ff": 90, "num_heads": 3, "d_k": 11, "d_v": 13, "attention_bias": True}
        model = VaswaniForConditionalGeneration(tiny_config(**sizes, initialization=kind))
        weights = [m.weight.detach() for n, m in model.named_modules() if n.endswith(name)]
        assert weights
        for weight in weights:
            outputs, inputs = weight.shape
            bound = math.sqrt(6 / (inputs + (joined if joined and kind == "tensor2tensor" else outputs)))
            std = 0.02 if kind == "normal" else bound / 3**0.5
            assert float(weight.std()) == pytest.approx(std, rel=0.1)
            if kind != "normal":
                # Of n values none exceeds 0.98 of the bound with probability 0.98^n: under 1e-17 for the 1,980 here.
                assert 0.98 * bound < float(weight.abs().max()) <= bound

    def test_biases_are_zero_and_norms_are_identity(self):
        model = VaswaniForConditionalGeneration(tiny_config(attention_bias=True))
        for name, parameter in model.named_parameters():
            if "layer_norm.weight" in name:
                assert torch.equal(parameter, torch.ones(24)), name
            elif name.endswith("bias"):
                assert parameter.abs().max() == 0, name


class TestDropout:
    @pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.9, 0.999])
    def test_share_of_zeros_and_mean(self, p):
        n = 400_000
        torch.manual_seed(1)
        dropped = dropout(torch.ones(n), p, training=True)
        # Binomial: five standard errors, and the 1/65536 to which p is met.
        assert abs(float((dropped == 0).double().mean()) - p) < 5 * math.sqrt(p * (1 - p) / n) + 1 / 65_536
        # A kept value is 1/(1-p), so the mean's standard error is sqrt(p/(1-p)/n), whatever p was met to.
        assert abs(float(dropped.double().mean()) - 1) < 5 * math.sqrt(p / (1 - p) / n) + 1e-6

    def test_neighbours_drop_independently(self):
        # Four values share one random number, so each pair of the four is looked at: for independent values with
        # p = 1/2 the share that agrees is 1/2 with a standard error of 0.5 / sqrt(100,000).
        torch.manual_seed(2)
        kept = (dropout(torch.ones(100_000, 4), 0.5, training=True) > 0).float()
        for i in range(4):
            for j in range(i):
                assert abs(float((kept[:, i] == kept[:, j]).float().mean()) - 0.5) < 5 * 0.5 / math.sqrt(100_000)

    @pytest.mark.parametrize("p", [0.1, 0.5])
    def test_gradient_is_the_mask_times_the_scale(self, p):
        states = torch.rand(7, 9, dtype=torch.float64).add(1).requires_grad_()
        upstream = torch.randn(7, 9, dtype=torch.float64)
        torch.manual_seed(4)
        dropped = dropout(states, p, training=True)
        dropped.backward(upstream)
        torch.testing.assert_close(states.grad, upstream * (dropped / states).detach())

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


def test_a_source_of_padding_alone_is_no_nan_under_autocast():
    model = tiny_model(attn_implementation="eager").train()
    input_ids, attention_mask = padded_batch((5, 3))
    attention_mask[1] = 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=random_ids(2, 4)).loss
    assert loss.isfinite()
