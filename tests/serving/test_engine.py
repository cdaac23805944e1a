"""Sentences of many requests in one model: each gets what it would alone, long requests make room for short ones."""

import asyncio
import contextlib
import random

import pytest
import served
from served import SENTENCES, Engine, translated

from vaswani_transformer import Translator
from vaswani_transformer.decoding.glossary import Glossary

folder, loaded, engine = served.folder, served.loaded, served.engine

SETTINGS = [
    {},
    {"num_beams": 1},
    {"num_beams": 2, "length_penalty": 1.5},
    {"num_beams": 5, "num_return_sequences": 3},
    {"max_new_tokens": 4},
    *({"length_penalty": number / 10} for number in range(6)),  # more than there are searches at once
]


async def all_of(engine, sentences, scores=False, glossary=None, **settings) -> list:
    """The hypotheses of sentences, in their order."""
    pieces = engine.tokenize([(sentence, "") for sentence in sentences], glossary)
    results = [None] * len(pieces)
    async for number, hypotheses in engine.translate(pieces, tuple(sorted(settings.items())), scores):
        assert results[number] is None
        results[number] = hypotheses
    return results


def test_each_of_many_requests_gets_what_it_would_alone(engine, loaded):
    assert engine.translator.is_repaired
    drawn = random.Random(0)
    sources = SENTENCES[:20]
    requests = [
        (drawn.sample(sources, drawn.choice([1, 1, 1, 2, 6])), drawn.choice(SETTINGS), drawn.random() < 0.2)
        for _ in range(40)
    ]

    async def ask(sentences, settings, scores):
        await asyncio.sleep(0.5 * drawn.random())  # they come at any time
        return await all_of(engine, sentences, scores, **settings)

    async def run():
        return await asyncio.gather(*(ask(*request) for request in requests))

    answers = asyncio.run(run())
    assert engine.pending == 0
    for settings in SETTINGS:
        expected = dict(zip(sources, Translator(*loaded, scores=True, **settings).hypotheses(sources), strict=True))
        for (sentences, own, scores), answer in zip(requests, answers, strict=True):
            if own is settings:
                for sentence, hypotheses in zip(sentences, answer, strict=True):
                    known = expected[sentence]
                    assert [one.text for one in hypotheses] == [one.text for one in known]
                    if scores:
                        assert [one.score for one in hypotheses] == pytest.approx([one.score for one in known])


@pytest.mark.parametrize("settings", [{"no_repeat_ngram_size": 2}, {"num_beams": 1, "repetition_penalty": 1.2}])
def test_settings_that_only_generate_follows(engine, loaded, settings):
    answers = asyncio.run(all_of(engine, SENTENCES[:20], **settings))
    assert [own[0].text for own in answers] == translated(loaded, SENTENCES[:20], **settings)


def test_a_short_request_does_not_wait_for_a_long_one(engine):
    async def run():
        before = 0

        async def long():
            nonlocal before
            pieces = engine.tokenize([(sentence, "") for sentence in SENTENCES * 3])
            async for _ in engine.translate(pieces):
                before += 1
            return len(pieces)

        task = asyncio.create_task(long())
        while not before:
            await asyncio.sleep(0.001)
        start = before
        await all_of(engine, SENTENCES[:1])
        between = before - start
        return between, await task

    between, number = asyncio.run(run())
    assert between < number / 3


def test_no_kind_of_options_waits_for_ever(engine, monkeypatch):
    """As many kinds as there are searches are asked for without a pause, and one more."""
    monkeypatch.setattr("vaswani_transformer.serving.engine._SEARCHES", 2)

    async def run():
        is_done, rounds = False, 0

        async def keep_asking(number):
            nonlocal rounds
            while not is_done and rounds < 400:
                rounds += 1
                await all_of(engine, SENTENCES[number::8], num_beams=number % 2 + 1)

        asking = [asyncio.create_task(keep_asking(number)) for number in range(8)]
        while rounds < 20:
            await asyncio.sleep(0.001)
        await all_of(engine, SENTENCES[:3], num_beams=5)
        is_done, between = True, rounds
        await asyncio.gather(*asking)
        return between

    assert asyncio.run(run()) < 200


def test_sentences_with_terms_get_what_they_get_alone(engine, loaded):
    words = sorted({word for sentence in SENTENCES for word in sentence.lower().strip(".").split()})
    glossaries = [
        Glossary({word: (f"{word} {word}", word[::-1]) for word in words[number :: number + 2]}) for number in range(3)
    ]
    requests = [
        (SENTENCES[start : start + 4], glossary, settings)
        for start, glossary in zip((0, 5, 10), glossaries, strict=True)
        for settings in ({"num_beams": 1}, {"num_beams": 6, "num_return_sequences": 3})
    ]

    async def run():
        return await asyncio.gather(*(all_of(engine, texts, True, terms, **own) for texts, terms, own in requests))

    answers, number = asyncio.run(run()), 0
    for (sentences, glossary, settings), answer in zip(requests, answers, strict=True):
        alone = Translator(*loaded, glossary=glossary, scores=True, **settings).hypotheses(sentences)
        for sentence, own, expected in zip(sentences, answer, alone, strict=True):
            assert [one.text for one in own] == [one.text for one in expected]
            assert [one.score for one in own] == pytest.approx([one.score for one in expected])
            number += len(glossary.of(sentence))
            assert all(any(form in own[0].text for form in forms) for forms in glossary.of(sentence).values())
    assert number > 25


def test_who_leaves_makes_room_and_disturbs_nobody(engine, loaded):
    async def run():
        pieces = engine.tokenize([(sentence, "") for sentence in SENTENCES * 3])
        for _ in range(3):
            others = asyncio.create_task(all_of(engine, SENTENCES[:30]))
            async with contextlib.aclosing(engine.translate(pieces)) as found:
                await anext(found)
            assert [own[0].text for own in await others] == expected
        assert engine.pending == 0
        await engine.call(lambda: None)  # after this the last request is forgotten
        return [group.is_busy for group in engine._groups.values()]

    expected = translated(loaded, SENTENCES[:30])
    assert not any(asyncio.run(run()))


def test_an_error_reaches_those_who_wait_and_no_others(engine, loaded):
    async def run():
        good = asyncio.create_task(all_of(engine, SENTENCES[:10]))
        bad = [asyncio.create_task(all_of(engine, SENTENCES[:number], num_beams=0)) for number in (10, 1)]
        for task in bad:
            with pytest.raises(ValueError, match="num_beams"):
                await task
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda: 1 / 0)
        return await good

    assert [own[0].text for own in asyncio.run(run())] == translated(loaded, SENTENCES[:10])
    assert engine.pending == 0


def test_tokens_in_a_search_are_limited(loaded):
    sizes = []
    engine = Engine(*loaded, tokens_per_batch=200, note_batch=sizes.append)
    asyncio.run(all_of(engine, SENTENCES))
    shortest = min(len(piece.ids) for piece in engine.tokenize([(sentence, "") for sentence in SENTENCES]))
    engine.close()
    assert 1 < max(sizes) <= 200 // shortest


def test_a_sentence_without_end_is_divided(engine):
    text = " ".join(SENTENCES * 30).replace(".", "")
    parts = engine.divide(text, "en")
    assert len(parts) > 1 and " ".join(parts) == " ".join(text.split())
    assert max(len(piece.ids) for piece in engine.tokenize([(part, "") for part in parts])) <= 500
    assert engine.divide("A dog.", "en") == ["A dog."]
