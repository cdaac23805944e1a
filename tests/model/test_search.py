"""Our own search against transformers' loops, and sentences that join and leave it against `generate()`."""

import copy
from functools import cache
from unittest.mock import patch

import pytest
import torch
import transformers
from conftest import padded_batch, random_ids, tiny_model
from every_output import END, EVERY_PREFIX, PAD, START, VOCABULARY, every_output, peaked_model, without_padding
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria, TextStreamer
from transformers_loop import transformers_loop

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.model.incremental_decoding_vaswani import IncrementalDecoder
from vaswani_transformer.model.layers_vaswani import CACHE
from vaswani_transformer.model.search_vaswani import ForwardSearch, Search, SearchSettings

VOCAB = 9
KINDS = {
    "plain": {},
    "three layers, widths of heads": {"decoder_layers": 3, "d_k": 5, "d_v": 7},
    "learned positions": {"position_encoding": "learned", "max_position_embeddings": 40},
    "beyond the table of sinusoids": {"max_position_embeddings": 4},
}


@cache
def model_of(kind: str, seed: int = 0, **changes) -> VaswaniForConditionalGeneration:
    """In double precision, so that no rounding decides between hypotheses."""
    return tiny_model(seed=seed, dtype=torch.float64, **{"vocab_size": VOCAB, "scale": 1.4, **KINDS[kind], **changes})


def ours(model, *args, **options):
    """What `generate()` gives, which has to be by our search."""
    with patch.object(Search, "step", autospec=True, side_effect=Search.step) as step:
        outputs = model.generate(*args, return_dict_in_generate=True, **options)
    assert step.called
    return outputs


def theirs(model, *args, **options):
    """The same by transformers' loops, with the scores."""
    with transformers_loop(), patch.object(Search, "step", None), patch.object(ForwardSearch, "run", None):
        return model.generate(*args, return_dict_in_generate=True, output_scores=True, **options)


def by_forward(model, *args, **options):
    """The same by our search whose steps are the model's `forward`, with the scores."""
    with patch.object(Search, "step", None):
        return model.generate(*args, return_dict_in_generate=True, output_scores=True, **options)


def assert_same(one, other) -> None:
    assert torch.equal(one.sequences, other.sequences)
    if "beam_indices" in other:
        torch.testing.assert_close(one.sequences_scores, other.sequences_scores, rtol=2e-6, atol=2e-6)
        assert torch.equal(one.beam_indices, other.beam_indices) and one.beam_indices.dtype == other.beam_indices.dtype


def almost(model, seed: int):
    """Return a model whose weights differ in the sixth digit."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    for weights in model.parameters():
        weights.data *= 1 + 1e-6 * torch.randn_like(weights)
    return model


@settings(max_examples=60)
@given(
    kind=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 2),
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    num_beams=st.sampled_from([1, 2, 3]),
    returned=st.integers(1, 3),
    rule=st.sampled_from(["gnmt", "power"]),
    alpha=st.sampled_from([-1.0, 0.0, 0.6, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    limit=st.sampled_from([{"max_extra_tokens": 3}, {"max_extra_tokens": 9}, {"max_new_tokens": 6}, {"max_length": 9}]),
    least=st.sampled_from([{}, {"min_new_tokens": 3}, {"min_length": 5}, {"min_new_tokens": 2, "min_length": 3}]),
    end=st.sampled_from([{}, {"eos_token_id": [END, 5]}, {"eos_token_id": 4}, {"forced_eos_token_id": END},
                         {"forced_eos_token_id": [7], "eos_token_id": [END, 7]}]),
    pad=st.sampled_from([{}, {"pad_token_id": 0}, {"pad_token_id": 6}, {"pad_token_id": END}]),
    forbidden=st.sampled_from([{}, {"suppress_tokens": [5, 8]}, {"bad_words_ids": [[1], [6]]}]),
    prefix=st.integers(1, 3),
)  # fmt: skip
def test_outputs_and_scores_are_those_of_transformers_loop(
    kind, seed, lengths, num_beams, returned, rule, alpha, early_stopping, limit, least, end, pad, forbidden, prefix
):
    options = {"num_beams": num_beams, **limit, **least, **end, **pad, **forbidden}
    if num_beams > 1:
        options |= {"length_penalty": alpha, "early_stopping": early_stopping, "length_normalization": rule}
        options["num_return_sequences"] = min(returned, num_beams)
    model = model_of(kind, seed)
    options["input_ids"], options["attention_mask"] = padded_batch(tuple(lengths), seed=seed, vocab_size=VOCAB)
    if prefix > 1:
        given = random_ids(len(lengths), prefix - 1, seed=seed + 5, vocab_size=VOCAB)
        options["decoder_input_ids"] = torch.nn.functional.pad(given, (1, 0), value=START)
    for seed in range(3):  # both add scores in single precision, where two hypotheses may tie
        expected, outputs = theirs(model, **options), ours(model, **options)
        if torch.equal(outputs.sequences, expected.sequences):
            break
        model = almost(model, seed)
    assert_same(outputs, expected)
    assert torch.equal(model.generate(**options), expected.sequences)  # where sentences leave the batch
    if num_beams > 1:
        assert_same(by_forward(model, **options), expected)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_without_an_end_token(num_beams):
    model = tiny_model(vocab_size=VOCAB, dtype=torch.float64, eos_token_id=None)
    model.generation_config.eos_token_id = None
    input_ids, attention_mask = padded_batch((5, 2, 3), vocab_size=VOCAB)
    options = {"num_beams": num_beams, "max_extra_tokens": 4, "attention_mask": attention_mask}
    assert_same(ours(model, input_ids, **options), theirs(model, input_ids, **options))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "eos_token_id": [2, 77]}], ids=str)
@pytest.mark.parametrize("sentences", [4, 20])  # attention has another way for many
def test_a_large_vocabulary(options, sentences):
    model = model_of("plain", vocab_size=3001, scale=2.0)
    input_ids, attention_mask = padded_batch(tuple(range(1, sentences + 1)), vocab_size=3001)
    options = {**options, "attention_mask": attention_mask, "max_extra_tokens": 5}
    assert_same(ours(model, input_ids, **options), theirs(model, input_ids, **options))


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.6, 2.0])
@pytest.mark.parametrize("rule", ["gnmt", "power"])
def test_unpruned_equals_exhaustive_search_within_each_sentences_limit(rule, alpha):
    model, lengths = peaked_model(3), (3, 1, 2)  # limits of 4, 2 and 3 tokens
    input_ids, attention_mask = padded_batch(lengths, seed=3, vocab_size=VOCABULARY)
    options = {"num_beams": EVERY_PREFIX, "num_return_sequences": 4, "early_stopping": "never", "max_extra_tokens": 1}
    options |= {"length_penalty": alpha, "length_normalization": rule, "attention_mask": attention_mask}
    outputs = ours(model, input_ids, **options)
    for row, length in enumerate(lengths):
        best = every_output(model, input_ids[row, :length], alpha, limit=length + 1, rule=rule)[:4]
        found = outputs.sequences[4 * row : 4 * row + 4]
        assert (found[:, length + 2 :] == PAD).all()
        found = found[:, : length + 2]
        assert [tuple(without_padding(output)[1:]) for output in found] == [output for _, output in best]
        scores = outputs.sequences_scores[4 * row : 4 * row + 4].tolist()
        assert scores == pytest.approx([score for score, _ in best], rel=1e-4)


def test_a_batch_takes_no_more_steps_than_its_slowest_sentence_and_few_rows_in_vain():
    model, rows = model_of("plain"), []
    lengths = tuple(range(1, 13))
    input_ids, attention_mask = padded_batch(lengths, vocab_size=VOCAB)
    step, options = Search.step, {"max_extra_tokens": 4, "num_beams": 2}

    def counted(search):
        done = step(search)
        rows.append(len(search.sentences))
        return done

    with patch.object(Search, "step", counted):
        model.generate(input_ids, attention_mask=attention_mask, **options)
        together, alone = rows.copy(), []
        for row, length in enumerate(lengths):
            rows.clear()
            model.generate(input_ids[row : row + 1, :length], **options)
            alone.append(len(rows))
    assert len(together) == max(alone) > min(alone)
    running = [sum(steps > step for steps in alone) for step in range(max(alone))]
    assert all(needed <= there < needed * 4 / 3 + 1 for needed, there in zip(running, together, strict=True))


class Nothing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class EvenRowsEndAtSix(StoppingCriteria):
    """Looks at tokens, at scores and at the rows."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] == 6) & (input_ids[:, 0] == START) & torch.tensor(input_ids.shape[1] > 3)


CONSTRAINTS = {
    "a processor": {"logits_processor": [Nothing()]},
    "criteria": {"stopping_criteria": [EvenRowsEndAtSix()], "max_new_tokens": 12},
    "a criterion that ends everything": {"stopping_criteria": [MaxLengthCriteria(4)]},
    "settings that make processors": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "forced_bos_token_id": 4},
    "of the source": {"encoder_no_repeat_ngram_size": 1},
    "phrases": {"bad_words_ids": [[4, 5], [6]], "sequence_bias": [[[3], 2.0]]},
    "a forced end": {"forced_eos_token_id": END, "renormalize_logits": True},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda row, ids: [3 + row % 2, 5, END] if len(ids) < 4 else [END]},
    "an end beyond the vocabulary": {"eos_token_id": 100},
    "scores and logits": {"output_logits": True},
    "attentions": {"output_attentions": True, "output_hidden_states": True},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("rule", ["gnmt", "power"])
@pytest.mark.parametrize("options", CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_processors_criteria_and_outputs_of_steps_are_as_in_transformers_loop(options, rule):
    model = model_of("plain")
    model.set_attn_implementation("eager" if "output_attentions" in options else "sdpa")
    input_ids, attention_mask = padded_batch((6, 2, 4), vocab_size=VOCAB)
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6, "max_extra_tokens": 4, **options}
    options |= {"input_ids": input_ids, "attention_mask": attention_mask, "length_normalization": rule}
    one, other = by_forward(model, **options), theirs(model, **options)
    assert_same(one, other)
    assert one.keys() == other.keys()
    torch.testing.assert_close(one.scores[0], other.scores[0])
    steps = model.compute_transition_scores(one.sequences, one.scores, one.beam_indices)
    of_other = other.sequences, other.scores, other.beam_indices
    torch.testing.assert_close(steps, model.compute_transition_scores(*of_other))
    for name in ("decoder_attentions", "cross_attentions", "decoder_hidden_states", "encoder_attentions"):
        if name in other:
            shapes = [[[part.shape for part in step] for step in each[name]] for each in (one, other)]
            assert shapes[0] == shapes[1]


OTHERS = {
    "a processor": {"logits_processor": [Nothing()]},
    "a criterion": {"stopping_criteria": [MaxTimeCriteria(100)]},
    "samples": {"do_sample": True},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "scores of steps": {"output_scores": True, "return_dict_in_generate": True},
    "no cache": {"use_cache": False},
    "an end beyond the vocabulary": {"eos_token_id": 100},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_whatever_else_is_asked_for_no_sentence_joins(options):
    with patch.object(Search, "step", None):
        model_of("plain").generate(random_ids(2, 4, vocab_size=VOCAB), max_new_tokens=3, **options)
        assert model_of("plain").open_search(max_new_tokens=3, **options) is None


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_processor_of_ones_own_that_counts_otherwise(num_beams):
    model, source = model_of("plain"), random_ids(2, 4, vocab_size=VOCAB)
    ends = list(range(2, VOCAB))  # so that they are likely
    least = transformers.MinNewTokensLengthLogitsProcessor(prompt_length_to_skip=1, min_new_tokens=5, eos_token_id=ends)
    options = {"num_beams": num_beams, "max_new_tokens": 9, "eos_token_id": ends, "logits_processor": [least]}
    options["decoder_input_ids"] = torch.tensor([[START, 3, 4, 5, 6]] * 2)
    assert_same(ours(model, source, **options), theirs(model, source, **options))


@pytest.mark.parametrize("options", [{}, {"early_stopping": True}, {"num_return_sequences": 2}])
def test_a_function_sees_no_token_that_it_has_not_allowed(options):
    """Also not of a sentence that is done while others go on."""
    model, (source, mask) = model_of("plain"), padded_batch((8, 3), vocab_size=VOCAB)
    states = []

    def even_then_odd(sentence: int, output: torch.Tensor) -> list[int]:
        tokens = output[1:].tolist()
        states.append([token % 2 for token in tokens] == [place % 2 for place in range(len(tokens))])
        return list(range(4 - len(tokens) % 2, VOCAB, 2))  # never the end: each has its own limit

    more = {"attention_mask": mask, "num_beams": 3, "max_extra_tokens": 2, "prefix_allowed_tokens_fn": even_then_odd}
    assert model.generate(source, **more, **options).shape[1] > 6
    assert len(states) > 9 and all(states)


def test_a_loop_of_ones_own_gets_a_cache_of_transformers():
    model, source = model_of("plain"), random_ids(2, 4, vocab_size=VOCAB)
    seen = lambda model, input_ids, **inputs: type(inputs[CACHE])  # noqa: E731
    assert model.generate(source, custom_generate=seen) is transformers.EncoderDecoderCache
    mine = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    same = lambda model, input_ids, **inputs: inputs[CACHE] is mine  # noqa: E731
    assert model.generate(source, custom_generate=same, **{CACHE: mine})
    static = lambda model, input_ids, **inputs: type(inputs[CACHE].self_attention_cache)  # noqa: E731
    config = transformers.GenerationConfig(cache_implementation="static", max_new_tokens=3)
    assert model.generate(source, custom_generate=static, generation_config=config) is transformers.StaticCache


def test_sampled_beams_of_a_sentence_that_is_done_do_no_harm_where_it_may_only_end():
    model, (source, mask) = model_of("plain", scale=0.2), padded_batch((18, 2), vocab_size=VOCAB)
    options = {"num_beams": 2, "do_sample": True, "top_k": 0, "early_stopping": True, "forced_eos_token_id": 2}
    for seed in range(300):
        torch.manual_seed(seed)
        model.generate(source, attention_mask=mask, max_extra_tokens=8, **options)


def test_streamers_and_assistants_are_transformers_loops(capsys):
    class Tokenizer:
        def decode(self, ids, **_):
            return " ".join(map(str, ids))

    model, source = model_of("plain"), random_ids(1, 4, vocab_size=VOCAB)
    expected = model.generate(source, max_new_tokens=6)
    with patch.object(Search, "step", None):
        for more in ({"streamer": TextStreamer(Tokenizer())}, {"assistant_model": model_of("plain", 1)}):
            assert torch.equal(model.generate(source, max_new_tokens=6, **more), expected)
            assert model.open_search(**more) is None
    assert capsys.readouterr().out


@pytest.mark.parametrize("num_beams", [1, 2])
def test_methods_of_ones_own_are_called(num_beams):
    model, source = tiny_model(vocab_size=VOCAB), random_ids(2, 4, vocab_size=VOCAB)

    def forward(self, *args, **kwargs):
        outputs = VaswaniForConditionalGeneration.forward(self, *args, **kwargs)
        outputs.logits = outputs.logits * 0 + torch.nn.functional.one_hot(torch.tensor(5), VOCAB)
        return outputs

    twin = type("Derived", (type(model),), {"forward": forward})(model.config).eval()
    twin.load_state_dict(model.state_dict())
    found = twin.generate(source, num_beams=num_beams, max_new_tokens=4)
    assert found[:, 1:].tolist() == [[5] * 4] * 2
    with patch.object(Search, "step", None):
        model._update_model_kwargs_for_generation = model._update_model_kwargs_for_generation
        model.generate(source, num_beams=num_beams, max_new_tokens=4)


JOINING = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 0.6, "num_return_sequences": 2},
    "power": {"num_beams": 2, "length_normalization": "power", "early_stopping": "never", "length_penalty": 2.0},
    "least and forced": {"num_beams": 2, "min_new_tokens": 3, "forced_eos_token_id": END},
}


@settings(max_examples=30)
@given(
    kind=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 1),
    options=st.sampled_from(list(JOINING.values())),
    limit=st.sampled_from([{"max_extra_tokens": 4}, {"max_new_tokens": 7}]),
    room=st.sampled_from([2, 32]),
    cohorts=st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(1, 6), min_size=1, max_size=4)), min_size=1, max_size=6
    ),
)
def test_sentences_that_join_at_any_step_get_what_generate_gives(kind, seed, options, limit, room, cohorts):
    model, options = model_of(kind, seed), {**options, **limit}
    search, joined, expected, finished = model.open_search(**options), [], [], []
    with patch("vaswani_transformer.model.incremental_decoding_vaswani._ROOM", room):
        for number, (steps, lengths) in enumerate(cohorts):
            input_ids, attention_mask = padded_batch(tuple(lengths), seed=seed + number, vocab_size=VOCAB)
            joined += search.join(input_ids, attention_mask)
            expected.append(ours(model, input_ids, attention_mask=attention_mask, **options))
            for _ in range(steps if search.running else 0):
                finished += search.step() if search.running else []
        while search.running:
            finished += search.step()
    assert {id(sentence) for sentence in finished} == {id(sentence) for sentence in joined}
    assert len(finished) == len(joined) and search.running == 0
    found = [output for sentence in joined for output in sentence.outputs()]
    rows = [row for outputs in expected for row in outputs.sequences.tolist()]
    for output, row in zip(found, rows, strict=True):
        assert [START, *output.tokens, *[PAD] * (len(row) - 1 - len(output.tokens))] == row
    if "num_beams" in options:
        scores = torch.cat([outputs.sequences_scores for outputs in expected]).tolist()
        assert [output.score for output in found] == pytest.approx(scores, abs=2e-6)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("given_up", [[0], [1, 3], [0, 1, 2, 4], [0, 1, 2, 3, 4]])
def test_sentences_that_are_given_up_do_not_change_the_others(num_beams, given_up):
    model, options = model_of("plain"), {"num_beams": num_beams, "max_new_tokens": 9}
    input_ids, attention_mask = padded_batch((6, 2, 4, 5, 3), vocab_size=VOCAB)
    search = model.open_search(**options)
    sentences = search.join(input_ids, attention_mask)
    finished = search.step()
    search.give_up([sentences[place] for place in given_up])
    assert search.running == len({id(one) for one in sentences if not one.is_done})
    others = search.join(input_ids, attention_mask)  # in the places that are free
    while search.running:
        finished += search.step()
    kept = [one for place, one in enumerate(sentences) if place not in given_up] + others
    assert {id(one) for one in kept} <= {id(one) for one in finished}
    places = [place for place in range(5) if place not in given_up] + [*range(5)]
    for place, sentence in zip(places, kept, strict=True):
        expected = ours(model, input_ids[place : place + 1, : attention_mask[place].sum()], **options)
        assert [START, *sentence.outputs()[0].tokens] == expected.sequences[0].tolist()


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_sentence_whose_numbers_overflow_spoils_none_that_takes_its_place(num_beams, leaves):
    model = tiny_model(dtype=torch.float64, scale=2.0)
    settings = SearchSettings(num_beams=num_beams, num_return_sequences=1, end_ids=frozenset({2}), length_penalty=0.6)
    states, starts = torch.randn(4, 5, model.config.d_model, dtype=torch.float64), torch.full((1, 1), 3)

    def added(search, number, value=1.0):
        return search.add(value * states[number : number + 1], None, [6], starts)

    alone = Search(IncrementalDecoder(model), settings)
    expected = added(alone, 3)[0]
    while alone.running:
        alone.step()
    search = Search(IncrementalDecoder(model), settings)
    added(search, 0)
    search.step()
    broken = added(search, 1, torch.inf)
    search.step()
    search.give_up(broken)
    if leaves:
        search._leave(1)
    sentence = added(search, 3)[0]
    while search.running:
        search.step()
    assert [one.tokens for one in sentence.outputs()] == [one.tokens for one in expected.outputs()]
