"""What users do with `generate()`: scores of steps with two vocabularies, drafts by a small model."""

import pytest
import torch
from conftest import padded_batch, random_ids, tiny_model
from every_output import END, START, without_padding


@torch.no_grad()
def log_probability(model, source: torch.Tensor, output: list[int], given: int = 1) -> float:
    """log P of the tokens of `output` behind the first `given`, by one pass without a cache."""
    target = torch.tensor([output])
    log_probs = model(source[None], decoder_input_ids=target[:, :-1], use_cache=False).logits.log_softmax(dim=-1)
    return float(log_probs[0].gather(1, target[0, 1:, None])[given - 1 :].sum())


@pytest.mark.parametrize("decoder_vocab_size", [31, 27])
def test_with_two_vocabularies_the_steps_of_the_best_hypothesis_add_up(decoder_vocab_size):
    model = tiny_model(scale=1.5, decoder_vocab_size=decoder_vocab_size)
    input_ids, attention_mask = padded_batch((6, 3))
    options = {"num_beams": 3, "length_penalty": 0.0, "output_scores": True, "return_dict_in_generate": True}
    outputs = model.generate(input_ids, attention_mask=attention_mask, **options)
    steps = model.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices)
    for sentence, length in enumerate((6, 3)):
        tokens = without_padding(outputs.sequences[sentence, : 1 + length + 50])
        total = log_probability(model, input_ids[sentence, :length], tokens)
        assert float(steps[sentence].sum()) == pytest.approx(total, rel=1e-4)
        assert float(outputs.sequences_scores[sentence]) == pytest.approx(total, rel=1e-4)


def test_the_shortest_output_is_what_the_user_says():
    model = tiny_model(eos_token_id=END)
    model.generation_config.min_new_tokens = 1  # as each trained model has it
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.eye(model.config.vocab_size)[END] * 99)
    assert model.generate(random_ids(1, 3)).shape[1] == 3
    assert model.generate(random_ids(1, 3), min_length=6).shape[1] == 7


def test_outputs_keep_no_copy_of_the_weights():
    outputs = tiny_model().generate(random_ids(1, 3), return_dict_in_generate=True, max_new_tokens=2)
    assert outputs.past_key_values.decoder.lm_head._packed is None


ASSISTANTS = {
    "itself": {"seed": 2},
    "smaller": {"seed": 5, "encoder_layers": 1, "decoder_layers": 1, "d_model": 12, "d_ff": 16},
    "random": {"seed": 6},
    "learned positions": {"seed": 8, "position_encoding": "learned", "max_position_embeddings": 80},
}


def model_of(name: str):
    """One of these, with beams as `vaswani train` writes them."""
    model = tiny_model(scale=1.5, dtype=torch.float64, **ASSISTANTS[name])
    model.generation_config.update(num_beams=4, length_penalty=0.6, max_extra_tokens=12)
    return model


@pytest.mark.parametrize(
    ("options", "assistants"),
    [
        ({}, ASSISTANTS),
        ({"max_new_tokens": 7}, ["smaller"]),
        ({"suppress_tokens": [END], "max_extra_tokens": 9}, ["smaller", "learned positions"]),
        ({"min_new_tokens": 12}, ["random"]),
        ({"decoder_input_ids": torch.tensor([[START, 7, 5]])}, ["smaller"]),
        ({"repetition_penalty": 1.5}, ["random"]),
    ],
)
def test_greedy_output_is_identical_with_an_assistant(options, assistants):
    """Speculative decoding: a small model drafts, the model itself decides."""
    model = model_of("itself")
    expected = model.generate(random_ids(1, 3), num_beams=1, **options)
    for name in assistants:
        assistant = model if name == "itself" else model_of(name)
        assisted = model.generate(random_ids(1, 3), num_beams=1, assistant_model=assistant, **options)
        assert torch.equal(assisted, expected)
