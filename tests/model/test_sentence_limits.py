"""Each sentence on its own: its limit (Section 6.1), and a result that no other sentence of its batch touches."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from conftest import padded_batch, random_ids, tiny_model
from every_output import END, PAD
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

LENGTHS = (7, 2, 4)
SEARCHES = {
    "greedy": {"num_beams": 1},
    "beams": {"num_beams": 3, "length_penalty": 0.6},
    "n-best": {"num_beams": 3, "length_penalty": 0.6, "num_return_sequences": 3},
    "samples": {"num_beams": 1, "do_sample": True, "num_return_sequences": 2},
    "power": {"num_beams": 3, "length_penalty": 0.6, "length_normalization": "power"},
}


def generated(outputs: torch.Tensor) -> list[int]:
    """Tokens of each row behind the start token, padding left out."""
    return [int((row[1:] != PAD).sum()) for row in outputs]


class Endless(LogitsProcessor):
    """Forbids the end, and padding, which would be counted for it."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, [END, PAD]] = -torch.inf
        return scores


@pytest.mark.parametrize("search", SEARCHES)
class TestLimit:
    def run(self, search, *args, **options):
        options = {"logits_processor": [Endless()], "max_extra_tokens": 3, **SEARCHES[search], **options}
        lengths = generated(model_of(0).generate(*args, **options))
        copies = options.get("num_return_sequences", 1)
        assert all(len(set(lengths[start : start + copies])) == 1 for start in range(0, len(lengths), copies))
        return lengths[::copies]

    def test_is_the_sentences_own_length_and_some(self, search):
        input_ids, attention_mask = padded_batch(LENGTHS, vocab_size=9)
        assert self.run(search, input_ids, attention_mask=attention_mask) == [10, 5, 7]

    def test_counts_from_encoder_outputs_and_embeddings(self, search):
        model, (input_ids, attention_mask) = model_of(0), padded_batch(LENGTHS, vocab_size=9)
        states = model.get_encoder()(input_ids, attention_mask=attention_mask).last_hidden_state
        encoded = BaseModelOutput(last_hidden_state=states)
        assert self.run(search, encoder_outputs=encoded, attention_mask=attention_mask) == [10, 5, 7]
        embeddings = model.get_input_embeddings()(input_ids)
        assert self.run(search, inputs_embeds=embeddings, attention_mask=attention_mask) == [10, 5, 7]
        # Without a mask all of them are taken for the sentence.
        encoded = BaseModelOutput(last_hidden_state=states.clone())
        assert self.run(search, encoder_outputs=encoded) == [10, 10, 10]

    def test_forced_end_comes_at_each_sentences_own(self, search):
        model = tiny_model(vocab_size=9, position_encoding="learned", max_position_embeddings=9)
        input_ids, attention_mask = padded_batch(LENGTHS, vocab_size=9)
        limits = (8, 5, 7)  # the first by the positions
        options = {"logits_processor": [EndlessUntil(limits)], "max_extra_tokens": 3, "forced_eos_token_id": END}
        outputs = model.generate(input_ids, attention_mask=attention_mask, **options, **SEARCHES[search])
        copies = SEARCHES[search].get("num_return_sequences", 1)
        for row, output in enumerate(outputs.tolist()):
            assert output.index(END) == limits[row // copies]


class EndlessUntil(Endless):
    """Forbids the end but as the last token of each sentence; users' processors come after `forced_eos_token_id`."""

    def __init__(self, limits):
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids, scores):
        limits = self.limits.repeat_interleave(len(scores) // len(self.limits))
        return torch.where((input_ids.shape[1] < limits)[:, None], super().__call__(input_ids, scores), scores)


@cache
def model_of(seed: int):
    # Double precision, so that no rounding decides between hypotheses.
    return tiny_model(seed=seed, vocab_size=9, scale=1.4, dtype=torch.float64)


def without_trailing_padding(row: torch.Tensor) -> list[int]:
    tokens = row.tolist()
    while tokens[-1] == PAD:
        tokens.pop()
    return tokens


def search(model, input_ids, attention_mask, options):
    """For each sentence its outputs without padding, and their scores where there are any."""
    options = {"return_dict_in_generate": True, "max_extra_tokens": 3, **options}  # so few that outputs often reach it
    outputs = model.generate(input_ids, attention_mask=attention_mask, **options)
    rows = [without_trailing_padding(row) for row in outputs.sequences]
    scores = getattr(outputs, "sequences_scores", None)
    scores = [None] * len(rows) if scores is None else scores.tolist()
    copies = len(rows) // len(input_ids)
    return [(rows[start : start + copies], scores[start : start + copies]) for start in range(0, len(rows), copies)]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 3),
    lengths=st.lists(st.integers(1, 8), min_size=2, max_size=5),
    padding=st.integers(0, 4),
    num_beams=st.sampled_from([1, 2, 4]),
    alpha=st.sampled_from([-1.0, 0.0, 0.6, 2.0]),
    returned=st.integers(1, 4),
    early_stopping=st.sampled_from([False, True, "never"]),
    rule=st.sampled_from(["gnmt", "power"]),
    limit=st.sampled_from([{}, {"max_new_tokens": 6}]),
)
def test_a_sentence_gets_in_any_batch_what_it_gets_alone(
    seed, lengths, padding, num_beams, alpha, returned, early_stopping, rule, limit
):
    model = model_of(seed)
    options = {"num_beams": num_beams, **limit}
    if num_beams > 1:
        options |= {"length_penalty": alpha, "early_stopping": early_stopping, "length_normalization": rule}
        options["num_return_sequences"] = min(returned, num_beams)
    input_ids, attention_mask = padded_batch(tuple(lengths), seed=seed, vocab_size=9)
    alone = [search(model, input_ids[row : row + 1, :length], None, options)[0] for row, length in enumerate(lengths)]
    wider = torch.nn.functional.pad(input_ids, (0, padding), value=PAD)
    mask = torch.nn.functional.pad(attention_mask, (0, padding))
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    together = search(model, wider[order], mask[order], options)
    for place, row in enumerate(order):
        assert together[place][0] == alone[row][0]
        if num_beams > 1:
            assert together[place][1] == pytest.approx(alone[row][1], abs=1e-5)


def test_calls_and_threads_know_nothing_of_each_other():
    model = tiny_model(seed=1, scale=1.4)
    input_ids, attention_mask = padded_batch((8, 3, 1, 5))
    calls = [
        {"num_beams": 4, "length_penalty": 0.6, "max_extra_tokens": 2},
        {"num_beams": 4, "length_penalty": 2.0, "max_extra_tokens": 9, "num_return_sequences": 2},
        {"num_beams": 3, "length_penalty": 1.0, "length_normalization": "power", "max_new_tokens": 7},
        {"num_beams": 1, "max_extra_tokens": 5},
    ]
    model.generate(input_ids, attention_mask=attention_mask)
    settings_before, attributes = model.generation_config.to_dict(), set(vars(model))
    expected = [model.generate(input_ids, attention_mask=attention_mask, **call).tolist() for call in calls]
    assert len({str(outputs) for outputs in expected}) == len(calls)

    def work(call):
        return [model.generate(input_ids, attention_mask=attention_mask, **call).tolist() for _ in range(3)]

    with ThreadPoolExecutor(len(calls)) as pool:
        assert list(pool.map(work, calls)) == [[outputs] * 3 for outputs in expected]
    assert model.generation_config.to_dict() == settings_before and set(vars(model)) == attributes


@pytest.mark.parametrize("beams", [1, 2])
def test_a_padding_id_of_0_fills_what_was_cut(beams):
    """transformers takes 0 for no padding token and fills with the end token, as if the model had ended."""
    ids = torch.tensor([[5, 2, 0, 0, 0, 0], [5, 6, 7, 8, 9, 2]])
    options = {"num_beams": beams, "max_extra_tokens": 2, "suppress_tokens": [2]}
    found = tiny_model(pad_token_id=0, bos_token_id=1).generate(ids, attention_mask=ids.ne(0).long(), **options)
    assert found.shape[1] == 9 and not (found == 2).any()
    assert (found[0, 5:] == 0).all() and (found[0, 1:5] != 0).any()


@pytest.mark.parametrize("others", [0, 5])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_source_of_nothing_but_padding_gives_a_token(beams, others):
    """Its limit is one, not none, and the others' are their own."""
    ids, mask = padded_batch((3, 5))
    mask[0] = 0
    mask[1, others:] = 0
    options = {"num_beams": beams, "max_extra_tokens": 0, "logits_processor": [Endless()]}
    assert generated(tiny_model().generate(ids, attention_mask=mask, **options)) == [1, max(others, 1)]


@pytest.mark.parametrize("lengths", [(3,), (3, 9), (9, 3, 7)], ids=str)
def test_a_minimum_beyond_any_sentences_own_limit_is_warned_of(lengths, recwarn):
    ids, mask = padded_batch(lengths)
    options = {"attention_mask": mask, "max_extra_tokens": 2, "num_beams": 2}
    tiny_model().generate(ids, min_new_tokens=5, **options)  # the limit of the shortest
    assert not recwarn.list
    tiny_model().generate(ids, min_new_tokens=6, **options)
    assert any("`min_new_tokens` (6)" in str(warning.message) for warning in recwarn)


def test_without_a_mask_an_end_token_that_is_the_padding_too_is_not_taken_for_padding():
    model = tiny_model(scale=2.0, pad_token_id=END)
    ids = random_ids(2, 6)
    ids[:, -1] = ids[0, 2] = END
    options = {"num_beams": 2, "return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 5}
    found = model.generate(ids, **options)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
