"""What users do with `generate()`: n-best lists, prefixes, sampling, constraints, drafts by a small model, streams."""

import math
from itertools import pairwise

import pytest
import torch
from conftest import padded_batch, random_ids, tiny_model
from every_output import END, START, VOCABULARY, every_output, peaked_model, without_padding
from references import exhaustive_search

WITH_SCORES = {"output_scores": True, "return_dict_in_generate": True}


@torch.no_grad()
def log_probability(model, source: torch.Tensor, output: list[int], given: int = 1) -> float:
    """log P of the tokens of `output` behind the first `given`, by one pass without a cache."""
    target = torch.tensor([output])
    log_probs = model(source[None], decoder_input_ids=target[:, :-1], use_cache=False).logits.log_softmax(dim=-1)
    return float(log_probs[0].gather(1, target[0, 1:, None])[given - 1 :].sum())


def gnmt(total: float, length: int, alpha: float) -> float:
    return total / ((5 + length) / 6) ** alpha


@pytest.mark.parametrize("decoder_vocab_size", [31, 27])
def test_with_two_vocabularies_the_steps_of_the_best_hypothesis_add_up(decoder_vocab_size):
    model = tiny_model(scale=1.5, decoder_vocab_size=decoder_vocab_size)
    input_ids, attention_mask = padded_batch((6, 3))
    options = {"num_beams": 3, "length_penalty": 0.0, **WITH_SCORES}
    outputs = model.generate(input_ids, attention_mask=attention_mask, **options)
    steps = model.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices)
    for sentence, length in enumerate((6, 3)):
        tokens = without_padding(outputs.sequences[sentence, : 1 + length + 50])
        total = log_probability(model, input_ids[sentence, :length], tokens)
        assert float(steps[sentence].sum()) == pytest.approx(total, rel=1e-4)
        assert float(outputs.sequences_scores[sentence]) == pytest.approx(total, rel=1e-4)


class TestConstraints:
    @pytest.mark.parametrize(
        ("options", "is_allowed"),
        [
            ({"suppress_tokens": [3]}, lambda output: 3 not in output),
            ({"bad_words_ids": [[4, 5]]}, lambda output: (4, 5) not in pairwise(output)),
            ({"forced_bos_token_id": 4}, lambda output: output[0] == 4),
            ({"min_new_tokens": 3}, lambda output: END not in output[:2]),
            ({"no_repeat_ngram_size": 1}, lambda output: len({START, *output}) == 1 + len(output)),
            (
                {"prefix_allowed_tokens_fn": lambda sentence, tokens: [END] if len(tokens) > 2 else [3, 5, END]},
                lambda output: set(output[:2]) <= {3, 5, END} and set(output[2:]) <= {END},
            ),
        ],
    )
    def test_the_best_of_what_is_allowed_is_found(self, options, is_allowed):
        limit = 3
        for seed in (0, 1):
            model, source = peaked_model(seed), random_ids(4, seed=seed, vocab_size=VOCABULARY)
            known = {output: score for score, output in every_output(model, source, 0.0, limit=limit)}

            def score(output, known=known):
                total = known[tuple(output)] if is_allowed(output) else -math.inf
                if "forced_bos_token_id" in options:  # forced tokens cost nothing in transformers
                    total -= log_probability(model, source, [START, output[0]])  # noqa: B023
                return gnmt(total, len(output), 0.6)

            best_score, best = exhaustive_search(score, VOCABULARY, END, limit)[0]
            outputs = model.generate(
                source[None], num_beams=36, length_penalty=0.6, max_new_tokens=limit, **options, **WITH_SCORES
            )
            assert tuple(without_padding(outputs.sequences[0, : limit + 1])[1:]) == best
            assert float(outputs.sequences_scores[0]) == pytest.approx(best_score, rel=1e-4)


ASSISTANTS = {
    "itself": None,
    "smaller": {"seed": 5, "encoder_layers": 1, "decoder_layers": 1, "d_model": 12, "d_ff": 16},
    "random": {"seed": 6},
    "learned positions": {"seed": 8, "position_encoding": "learned", "max_position_embeddings": 80},
}


class TestAssistedDecoding:
    """Speculative decoding: a small model drafts, the model itself decides."""

    @pytest.fixture(scope="class")
    def model(self):
        model = tiny_model(seed=2, scale=1.5, dtype=torch.float64)
        # Beams as `vaswani train` writes them.
        model.generation_config.update(num_beams=4, length_penalty=0.6, max_extra_tokens=12)
        return model

    def assistant(self, model, name):
        changes = ASSISTANTS[name]
        if changes is None:
            return model
        assistant = tiny_model(scale=1.5, dtype=torch.float64, **changes)
        assistant.generation_config.update(num_beams=4, length_penalty=0.6, max_extra_tokens=12)
        return assistant

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"max_new_tokens": 7},
            {"suppress_tokens": [END], "max_extra_tokens": 9},
            {"min_new_tokens": 12},
            {"decoder_input_ids": torch.tensor([[START, 7, 5]])},
            {"repetition_penalty": 1.5},
        ],
    )
    def test_greedy_output_is_identical_under_any_options(self, model, options):
        expected = model.generate(random_ids(1, 3), num_beams=1, **options)
        for name in ASSISTANTS:
            assisted = {**options, "assistant_model": self.assistant(model, name)}
            assert torch.equal(model.generate(random_ids(1, 3), num_beams=1, **assisted), expected)

    def test_needs_fewer_passes_of_the_large_model(self):
        source, passes = random_ids(1, 6), []
        options = {"num_beams": 1, "suppress_tokens": [END], "max_new_tokens": 24, "no_repeat_ngram_size": 1}
        model, twin = (tiny_model(position_encoding="learned", max_position_embeddings=80) for _ in range(2))
        for one in (model, twin):  # what comes next depends on the place
            with torch.no_grad():
                one.model.decoder.embed_positions.weight.mul_(6)
        model.model.decoder.register_forward_hook(lambda *args: passes.append(1))
        output = model.generate(source, **options)
        assert len(passes) == 24 == len(output.unique()) - 1
        passes.clear()
        twin.generation_config.update(num_assistant_tokens=5, assistant_confidence_threshold=0.0)
        assert torch.equal(model.generate(source, assistant_model=twin, **options), output)
        assert len(passes) == 4  # of a twin all five drafted tokens are right, and a sixth is the model's own
