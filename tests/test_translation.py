"""Text in, text out, and the scores of pairs, against the model called one sentence at a time."""

import pytest
import torch
from conftest import tiny_model

from vaswani_transformer import PerplexityMetric, Translator, encoder_decoder_attention, score_pairs, train_tokenizer
from vaswani_transformer.errors import UserError
from vaswani_transformer.synthetic import generate_corpus

PAIRS = generate_corpus(100, 10, 10).train


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer((side for pair in PAIRS for side in pair), vocab_size=400)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(seed=1, scale=2.0, vocab_size=len(tokenizer)).eval()


def test_scores_equal_the_loss_of_each_pair_alone(model, tokenizer):
    sources, targets = map(list, zip(*PAIRS[:25], strict=True))
    losses, counts = score_pairs(model, tokenizer, sources, targets, tokens_per_batch=60)
    for source, target, loss, count in zip(sources, targets, losses, counts, strict=True):
        labels = tokenizer(target, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = model(**tokenizer(source, return_tensors="pt"), labels=labels).loss
        assert count == labels.shape[1]
        assert loss / count == pytest.approx(float(expected), rel=1e-4)
    perplexity = PerplexityMetric().compute(predictions=losses, references=counts)["perplexity"]
    assert perplexity == pytest.approx(float(torch.tensor(losses).sum().div(sum(counts)).exp()), rel=1e-5)


def test_scores_of_nothing(model, tokenizer):
    assert score_pairs(model, tokenizer, [], []) == ([], [])
    with pytest.raises(ValueError, match="no tokens"):
        PerplexityMetric().compute(predictions=[], references=[])


def test_a_target_without_positions_is_named(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), position_encoding="learned", max_position_embeddings=20).eval()
    with pytest.raises(UserError, match=r"line 2 has .* tokens and the model has learned 20 positions"):
        score_pairs(model, tokenizer, ["One.", "Two."], ["Eins.", "Zwei " * 30])


def test_translations_come_in_order_whatever_the_batches(model, tokenizer):
    sources = [source for source, _ in PAIRS[:30]]
    options = {"num_beams": 1, "max_new_tokens": 12}
    alone = [next(Translator(model, tokenizer, **options).translate([source])) for source in sources]
    for tokens, window in ((1, 1000), (64, 7), (4096, 1000)):
        assert list(Translator(model, tokenizer, tokens, **options).translate(iter(sources), window)) == alone


def test_empty_lines_stay_empty_and_each_line_gives_one_line(model, tokenizer):
    lines = ["", "A dog.", "  ", "\u2028", "A cat."]
    out = list(Translator(model, tokenizer, num_beams=1, max_new_tokens=8).translate(lines))
    assert len(out) == 5 and out[0] == out[2] == out[3] == ""
    assert all("\n" not in line for line in out)


def test_attention_of_a_pair_sums_to_one_over_the_source(model, tokenizer):
    implementation = model.config._attn_implementation
    weights, source, target = encoder_decoder_attention(model, tokenizer, *PAIRS[0])
    assert weights.shape == (model.config.num_heads, len(target), len(source))
    assert weights.sum(axis=-1) == pytest.approx(1.0, rel=1e-5)
    assert source[-1] == target[-1] == "</s>"
    assert "".join(source[:-1]) == PAIRS[0][0].replace(" ", "")
    assert model.config._attn_implementation == implementation
    _, _, written = encoder_decoder_attention(model, tokenizer, PAIRS[0][0])  # the model's own translation
    assert written[-1] == "</s>"
