"""The page's way from a `torch.nn.Transformer` to a model of ours: the same logits and outputs as torch's own model."""

import math
import re
import warnings

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from references import sinusoids_by_formula
from torch import nn

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration

PAD, BOS, EOS = 1, 2, 3
PAGE = (ROOT / "docs/how-to/import.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"## A `torch.nn.Transformer`.*?```python\n(.*?)```", PAGE, re.S)[1]


class Tutorial(nn.Module):
    """A model around `torch.nn.Transformer`, as tutorials write it."""

    def __init__(
        self, source_size=61, target_size=53, d_model=32, heads=4, d_ff=40, layers=(2, 2), learned=False, **settings
    ):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an odd number of heads
            self.transformer = nn.Transformer(d_model, heads, *layers, d_ff, 0.0, batch_first=True, **settings)
        self.src_tok_emb = nn.Embedding(source_size, d_model)
        self.tgt_tok_emb = nn.Embedding(target_size, d_model)
        self.generator = nn.Linear(d_model, target_size)
        if learned:
            self.positions = nn.Embedding(40, d_model)
        else:
            table = torch.tensor(sinusoids_by_formula(40, d_model), dtype=torch.float64)
            self.register_buffer("table", table, persistent=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.double()

    def embed(self, embedding, ids):
        table = self.positions.weight if hasattr(self, "positions") else self.table
        return embedding(ids) * math.sqrt(embedding.embedding_dim) + table[: ids.shape[1]]

    def forward(self, source, target):
        padding, length = source == PAD, target.shape[1]
        hidden = self.transformer(
            self.embed(self.src_tok_emb, source),
            self.embed(self.tgt_tok_emb, target),
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.generator(hidden)


@torch.no_grad()
def greedy(oracle, source, length) -> torch.Tensor:
    """The most probable tokens one by one, without a cache, padded after the end."""
    target = torch.full((len(source), 1), BOS)
    done = torch.zeros(len(source), dtype=torch.bool)
    for _ in range(length):
        token = oracle(source, target)[:, -1].argmax(-1).masked_fill(done, PAD)
        target, done = torch.cat([target, token[:, None]], dim=1), done | (token == EOS)
    return target


@torch.no_grad()
def check_same(oracle, model, length=8):
    """The same logits, as a share of the largest, with padding in the source, and the same greedy outputs."""
    oracle, model = oracle.train(), model.double().eval()  # in evaluation mode torch may take a path of other roundings
    source = torch.randint(4, oracle.src_tok_emb.num_embeddings, (3, 7))
    source[1, 4:], source[2, 6:] = PAD, PAD
    target = torch.randint(4, oracle.generator.out_features, (3, 5))
    expected, mask = oracle(source, target), source.ne(PAD).long()
    logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    expected = greedy(oracle, source, length)
    generated = model.generate(source, attention_mask=mask, num_beams=1, do_sample=False, max_new_tokens=length)
    assert generated.tolist() == expected[:, : generated.shape[1]].tolist()
    assert (expected[:, generated.shape[1] :] == PAD).all()


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The names that the page's example defines, run on a saved model; and that model."""
    folder = tmp_path_factory.mktemp("torch")
    oracle = Tutorial()
    torch.save(oracle.state_dict(), folder / "model.pt")
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(EXAMPLE, "docs/how-to/import.md", "exec"), names)
    return oracle, folder / "imported", names


def double_positions(config, weights) -> VaswaniForConditionalGeneration:
    """A model with sinusoids in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        model = VaswaniForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.load_state_dict(weights)
    return model


def test_the_page_makes_the_same_model(example):
    oracle, folder, _ = example
    model = VaswaniForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
    assert model.config.encoder_layers == 2
    check_same(oracle, double_positions(model.config, model.state_dict()))


@hypothesis_settings(max_examples=15, derandomize=True)
@given(
    heads=st.integers(1, 3),
    width=st.sampled_from([2, 4]),
    d_ff=st.integers(1, 20),
    layers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    activation=st.sampled_from(["relu", "gelu"]),
    bias=st.booleans(),
    learned=st.booleans(),
    layer_norm_eps=st.sampled_from([1e-5, 1e-3]),
)
def test_logits_and_greedy_outputs_are_torchs(example, heads, width, d_ff, layers, activation, bias, learned,
                                              layer_norm_eps):  # fmt: skip
    torch.manual_seed(0)
    oracle = Tutorial(
        13, 11, heads * width, heads, d_ff, layers, learned, activation=activation, bias=bias,
        layer_norm_eps=layer_norm_eps,
    )  # fmt: skip
    state = oracle.state_dict()
    weights = example[2]["renamed"](state) | {
        "model.encoder.embed_tokens.weight": state["src_tok_emb.weight"],
        "model.decoder.embed_tokens.weight": state["tgt_tok_emb.weight"],
        "lm_head.weight": state["generator.weight"],
        "lm_head.bias": state["generator.bias"],
    }
    if learned:
        weights |= {
            f"model.{stack}.embed_positions.weight": state["positions.weight"] for stack in ("encoder", "decoder")
        }
    if not bias:  # torch then has LayerNorm without bias too
        for name in list(weights):
            if name.endswith("norm.weight"):
                weights[name.replace("weight", "bias")] = torch.zeros(heads * width)
            elif ".fc" in name:
                weights[name.replace("weight", "bias")] = torch.zeros(len(weights[name]))
    config = VaswaniConfig(
        vocab_size=13, decoder_vocab_size=11, d_model=heads * width, d_ff=d_ff, num_heads=heads,
        encoder_layers=layers[0], decoder_layers=layers[1], attention_bias=bias, output_bias=True,
        add_final_layer_norm=True, layer_norm_eps=layer_norm_eps, activation_function=activation,
        position_encoding="learned" if learned else "sinusoidal", max_position_embeddings=40,
        share_encoder_decoder_embeddings=False, tie_word_embeddings=False,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=BOS,
    )  # fmt: skip
    check_same(oracle, double_positions(config, weights))
