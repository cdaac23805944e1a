"""What transformers and accelerate offer for every model, where their own common tests do not run it on a CPU.

`make conformance` runs the common tests themselves.
"""

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from conftest import padded_batch, random_ids, tiny_model
from passes import OTHER_TOOLKITS
from transformers import AttentionInterface, AutoModelForSeq2SeqLM
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from vaswani_transformer import VaswaniForConditionalGeneration

HEADS = [{}, {"d_k": 5, "d_v": 7}, {"d_k": 7, "d_v": 5}]
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


# Flash attention as its documentation says: one head width for all three inputs; causal masks aligned to the last query
# and the last key; `cu_seqlens` cut rows of tokens of all sentences, laid one after the other, into sentences.


def flash_reference(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """`flash_attn_func` in plain torch: all of `(batch_size, length, num_heads, head_width)`."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "flash attention takes one head width"
    assert q.shape[0] == k.shape[0] == v.shape[0] and k.shape == v.shape and q.shape[2] == k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)


def flash_varlen_reference(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    """`flash_attn_varlen_func` in plain torch: all of `(tokens, num_heads, head_width)`."""
    assert q.dim() == k.dim() == v.dim() == 3 and len(cu_seqlens_q) == len(cu_seqlens_k)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0
    assert (cu_seqlens_q[-1], cu_seqlens_k[-1]) == (len(q), len(k)) and len(k) == len(v)
    assert (cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max()) == (max_seqlen_q, max_seqlen_k)
    parts = []
    for row in range(len(cu_seqlens_q) - 1):
        queries = slice(cu_seqlens_q[row], cu_seqlens_q[row + 1])
        keys = slice(cu_seqlens_k[row], cu_seqlens_k[row + 1])
        parts.append(flash_reference(q[None, queries], k[None, keys], v[None, keys], 0.0, softmax_scale, causal)[0])
    return torch.cat(parts)


@pytest.fixture
def flash(monkeypatch):
    """The name of an implementation that is transformers' own flash attention around the functions above.

    There is no public way to give it other kernels, so the places where it keeps those that it has loaded are filled.
    """
    name = "flash_reference"
    AttentionInterface.register(name, flash_attention_forward)
    AttentionMaskInterface.register(name, flash_attention_mask)
    loaded = {
        "_loaded_implementation": name,
        "_flash_fn": flash_reference,
        "_flash_varlen_fn": flash_varlen_reference,
        "_flash_with_kvcache_fn": None,
        "_pad_fn": flash_utils._pad_input,
        "_unpad_fn": flash_utils._unpad_input,
        "_process_flash_kwargs_fn": flash_utils._lazy_define_process_function(flash_varlen_reference),
    }
    for place, value in loaded.items():
        monkeypatch.setattr(flash_utils, place, value)
    return name


class TestFlashAttention:
    # Target lengths equal to, above and below the source's: transformers' flash attention treats each differently.
    @pytest.mark.parametrize("target_length", [1, 5, 7, 9])
    @pytest.mark.parametrize("changes", HEADS, ids=str)
    def test_equals_eager(self, flash, changes, target_length):
        inputs = inputs_with_padding(target_length)
        outputs = [tiny_model(attn_implementation=name, **changes)(**inputs) for name in ("eager", flash)]
        torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-4, atol=1e-5)
        kept = inputs["attention_mask"].bool()
        encoded = [output.encoder_last_hidden_state[kept] for output in outputs]
        torch.testing.assert_close(encoded[1], encoded[0], rtol=1e-4, atol=1e-5)

    def test_equals_eager_with_a_padded_target_and_without_any_mask(self, flash):
        inputs = inputs_with_padding(6)
        mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 3 + [0] * 3])
        eager, ours = (tiny_model(attn_implementation=name) for name in ("eager", flash))
        outputs = [model(**inputs, decoder_attention_mask=mask).logits[mask.bool()] for model in (eager, ours)]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
        del inputs["attention_mask"]
        torch.testing.assert_close(ours(**inputs).logits, eager(**inputs).logits, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "cache_implementation": "static"}])
    @pytest.mark.parametrize("changes", HEADS, ids=str)
    def test_generates_the_same(self, flash, changes, options):
        eager, ours = (tiny_model(attn_implementation=name, **changes) for name in ("eager", flash))
        expected = tokens_generated(eager, num_beams=options.get("num_beams", 1))
        assert torch.equal(tokens_generated(ours, **options), expected)

    @pytest.mark.parametrize("changes", HEADS, ids=str)
    def test_gradients_are_the_same(self, flash, changes):
        gradients = []
        for name in ("eager", flash):
            model = tiny_model(attn_implementation=name, **changes)
            inputs = inputs_with_padding(5)
            model(**inputs, labels=inputs["decoder_input_ids"]).loss.backward()
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-6)


class TestFlexAttention:
    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
    @pytest.mark.parametrize("changes", HEADS, ids=str)
    def test_equals_eager(self, changes):
        inputs = inputs_with_padding()
        expected = tiny_model(attn_implementation="eager", **changes)(**inputs).logits
        # Its kernels take a minute to compile; what they compute can be had without.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits = tiny_model(attn_implementation="flex_attention", **changes)(**inputs).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


class TestPartsAlone:
    @pytest.mark.parametrize("changes", VARIANTS, ids=str)
    def test_encoder_and_decoder_are_saved_and_loaded_alone(self, changes, tmp_path):
        model = tiny_model(**changes)
        inputs = inputs_with_padding()
        targets = inputs.pop("decoder_input_ids")
        encoder, decoder = model.get_encoder(), model.get_decoder()
        encoder.save_pretrained(tmp_path / "encoder")
        decoder.save_pretrained(tmp_path / "decoder")
        encoder_again = type(encoder).from_pretrained(tmp_path / "encoder")
        decoder_again = type(decoder).from_pretrained(tmp_path / "decoder")
        states = encoder_again(**inputs).last_hidden_state
        torch.testing.assert_close(states, encoder(**inputs).last_hidden_state, rtol=0, atol=0)
        outputs = decoder_again(targets, encoder_hidden_states=states, encoder_attention_mask=inputs["attention_mask"])
        expected = model.model(**inputs, decoder_input_ids=targets).last_hidden_state
        torch.testing.assert_close(outputs.last_hidden_state, expected, rtol=0, atol=0)


class TestDeviceMap:
    @pytest.fixture(params=VARIANTS, ids=str)
    def saved(self, request, tmp_path):
        model = tiny_model(**request.param)
        model.save_pretrained(tmp_path / "model")
        return model, tmp_path

    def check(self, model, expected):
        inputs = inputs_with_padding()
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits, rtol=0, atol=0)
        for num_beams in (1, 3):
            tokens = tokens_generated(expected, num_beams=num_beams)
            assert torch.equal(tokens_generated(model, num_beams=num_beams), tokens)

    def test_auto(self, saved):
        model, folder = saved
        self.check(AutoModelForSeq2SeqLM.from_pretrained(folder / "model", device_map="auto"), model)

    @pytest.mark.parametrize("share", [0.4, 0.7])
    def test_what_exceeds_the_memory_is_offloaded_to_disk(self, saved, share):
        model, folder = saved
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        loaded = VaswaniForConditionalGeneration.from_pretrained(
            folder / "model",
            device_map="auto",
            max_memory={"cpu": int(share * size)},
            offload_folder=folder / "offload",
        )
        assert "disk" in loaded.hf_device_map.values()
        assert any(parameter.is_meta for parameter in loaded.parameters())
        self.check(loaded, model)


class TestTypes:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("changes", VARIANTS[:2], ids=str)
    def test_loaded_in_half_precision(self, changes, dtype, tmp_path):
        model = tiny_model(**changes)
        model.save_pretrained(tmp_path)
        half = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype)
        assert {parameter.dtype for parameter in half.parameters()} == {dtype}
        logits = half(**inputs_with_padding()).logits
        assert logits.dtype == dtype
        # 8 (bfloat16) or 11 bits a number, over about twenty operations in a row on values around 1.
        tolerance = 40 * torch.finfo(dtype).eps
        expected = model(**inputs_with_padding()).logits
        torch.testing.assert_close(logits.float(), expected, rtol=tolerance, atol=tolerance)
        tokens_generated(half, num_beams=2)
