"""`/v1/translations` against the package's own functions: n-best lists, scores, alignments, prefixes, streams."""

import asyncio
import json
import shutil

import pytest
import served
from served import SENTENCES, Limits, Translator, ask, request, translated

from vaswani_transformer import align, score_tokens
from vaswani_transformer.decoding.glossary import Glossary
from vaswani_transformer.decoding.scoring import mean_confidence, word_confidences
from vaswani_transformer.serving import translations

folder, loaded, make, post = served.folder, served.loaded, served.make, served.post

TEXT = f"{SENTENCES[0]}  {SENTENCES[1]}\n{SENTENCES[2]} "


def test_n_best_lists_with_scores_tokens_and_alignments(post, loaded):
    wanted = {"nbest": 3, "beams": 5, "scores": True, "token_scores": True, "alignments": True}
    status, answer = post("/v1/translations", json={"text": TEXT, "source": "en", "target": "de", **wanted})
    assert status == 200
    (only,) = answer.pop("translations")
    assert answer == {"model": "en-de", "precision": "float64", "source": "en", "target": "de"}
    expected = list(Translator(*loaded, scores=True, num_beams=5, num_return_sequences=3).hypotheses(SENTENCES[:3]))
    assert only["text"] == "{}  {}\n{} ".format(*(own[0].text for own in expected))
    assert [one["source"] for one in only["sentences"]] == SENTENCES[:3]
    assert [one["before"] for one in only["sentences"]] == ["", "  ", "\n"]
    for source, sentence, hypotheses in zip(SENTENCES, only["sentences"], expected, strict=False):
        targets = [one.text for one in hypotheses]
        known = sentence["translations"]
        assert [one["text"] for one in known] == targets
        for name in ("score", "log_probability"):
            assert [one[name] for one in known] == pytest.approx([getattr(one, name) for one in hypotheses])
        assert [[tuple(link) for link in one["alignment"]] for one in known] == align(*loaded, [source] * 3, targets)
        assert sentence["source_words"] == source.split()
        assert [one["target_words"] for one in known] == [target.split() for target in targets]
        for one, score in zip(known, score_tokens(*loaded, [source] * 3, targets), strict=True):
            assert [token["text"] for token in one["tokens"]] == score.tokens
            assert [token["log_probability"] for token in one["tokens"]] == pytest.approx(score.log_probabilities)


def test_what_is_not_asked_for_is_not_answered(post, loaded):
    found = zip(SENTENCES, Translator(*loaded).hypotheses(SENTENCES), strict=True)
    source, expected = next((source, own[0].text) for source, own in found if not own[0].repeats)
    answer = post("/v1/translations", json={"text": [source, ""], "target": "de"})[1]
    sentence = {"source": source, "before": "", "translations": [{"text": expected}]}
    assert answer["translations"] == [{"text": expected, "sentences": [sentence]}, {"text": "", "sentences": []}]


def test_options_of_the_search(post, loaded):
    settings = {"beams": 2, "length_penalty": 2.0, "max_new_tokens": 6}
    answer = post("/v1/translations", json={"text": SENTENCES[:4], "target": "de", **settings})[1]
    names = {"num_beams": 2, "length_penalty": 2.0, "max_new_tokens": 6}
    assert [one["text"] for one in answer["translations"]] == translated(loaded, SENTENCES[:4], **names)


def test_prefixes(post, loaded):
    texts, prefixes = [" ".join(SENTENCES[:2]), SENTENCES[2]], ["Ein", ""]
    answer = post("/v1/translations", json={"text": texts, "target": "de", "prefix": prefixes})[1]
    expected = translated(loaded, [(SENTENCES[0], "Ein"), SENTENCES[1], SENTENCES[2]])
    assert [one["text"] for one in answer["translations"]] == [" ".join(expected[:2]), expected[2]]
    status, answer = post("/v1/translations", json={"text": texts, "target": "de", "prefix": "Ein"})
    assert status == 400 and "prefix has one text for each text" in answer["error"]
    status, answer = post("/v1/translations", json={"text": "A dog.", "target": "de", "prefix": "Ein Hund " * 30})
    assert status == 400 and "leaves no room" in answer["error"]
    # The limit is that of the request.
    wanted = {"text": "A dog.", "target": "de", "prefix": "Ein Hund " * 3, "max_new_tokens": 4}
    assert "leaves no room in an output of at most 4" in post("/v1/translations", json=wanted)[1]["error"]
    wanted |= {"prefix": ("Ein Hund " * 30).strip(), "max_new_tokens": 400}
    assert post("/v1/translations", json=wanted)[1]["translations"][0]["text"].startswith(wanted["prefix"])


def test_confidence(make, folder, loaded):
    app, wanted = make(f"en-de={folder}"), {"text": TEXT, "target": "de", "nbest": 2, "confidence": True}
    assert ask(app, "GET", "/frontend/settings")[1]["details"] == {"en-de": {"alignments": True, "confidence": True}}
    status, answer = ask(app, "POST", "/v1/translations", json=wanted)
    assert status == 200
    sentences = answer["translations"][0]["sentences"]
    found = [(sentence["source"], one) for sentence in sentences for one in sentence["translations"]]
    sources, texts = [source for source, _ in found], [one["text"] for _, one in found]
    expected = word_confidences(*loaded, sources, texts)
    assert len(found) == 6 and any(expected)
    for (_, one), words in zip(found, expected, strict=True):
        assert [word["text"] for word in one["words"]] == one["text"].split()
        assert [word["confidence"] for word in one["words"]] == pytest.approx([value for _, value in words])
        assert one["confidence"] == pytest.approx(mean_confidence(words))
    events = [event for name, event in events_of(app, wanted) if name == "sentence"]
    assert [event["translations"] for event in events] == [one["translations"] for one in sentences]
    assert "words" not in ask(app, "POST", "/v1/translations", json=wanted | {"confidence": False})[1]


def test_glossaries(make, loaded):
    words = list(dict.fromkeys(sentence.split()[1].strip(".") for sentence in SENTENCES[:3]))
    forms = [["Zwei Hunde"], ["Katze", "eine Katze"], []][: len(words)]
    terms = [{"source": word, "target": targets} for word, targets in zip(words, forms, strict=True)]
    terms[0]["target"] = "Zwei Hunde"
    glossary = Glossary({word: targets or [word] for word, targets in zip(words, forms, strict=True)})
    wanted = {"text": TEXT, "target": "de", "glossary": terms}
    (answer,) = ask(make(), "POST", "/v1/translations", json=wanted)[1]["translations"]
    texts = [sentence["translations"][0]["text"] for sentence in answer["sentences"]]
    assert texts == translated(loaded, SENTENCES[:3], glossary=glossary)
    assert "Zwei Hunde" in texts[0]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"glossary": [{"source": "dog", "target": ["Hund", " "]}]}, "entry 1 of the glossary has an empty term: give"),
        ({"glossary": [{"source": "dog", "target": ["Hund"] * 500}]}, "tokens in all forms, at most 128 are taken"),
        ({"glossary": [{"source": "dog", "target": "Hund" * 20_000}]}, "exceeds text limit (50000)"),
        ({"glossary": [{"source": "dog", "target": "\ud800"}]}, "surrogates not allowed"),
        ({"glossary": [{"source": "dog", "targets": "Hund"}]}, ": glossary.0.targets: Extra inputs are not permitted"),
        ({"text": 3}, ": text.str: Input should be a valid string"),
        ({"beams": 33}, ": beams: Input should be less than or equal to 32"),
        ({"length_penalty": float("nan")}, ": length_penalty: "),
        ({"temperature": 1}, ": temperature: Extra inputs are not permitted"),
    ],
)
def test_what_is_wrong_is_named(post, wrong, reason):
    body = json.dumps({"text": "A dog.", "target": "de"} | wrong).encode()
    status, answer = post("/v1/translations", content=body, headers={"content-type": "application/json"})
    assert status == 400 and answer["error"].startswith("Invalid request: ") and reason in answer["error"]
    assert "\n" not in answer["error"]


def test_a_glossary_with_what_it_cannot_be_combined_with(make):
    wanted = {"text": SENTENCES[0], "target": "de", "glossary": [{"source": SENTENCES[0].split()[0], "target": "x"}]}
    status, answer = ask(make(), "POST", "/v1/translations", json=wanted | {"prefix": "Ein"})
    assert (status, "no glossary beside it" in answer["error"]) == (400, True)

    def load(path):  # a setting that only transformers' loop follows
        model, tokenizer = served.load_in_double(path)
        model.generation_config.no_repeat_ngram_size = 2
        return model, tokenizer

    status, answer = ask(make(load=load), "POST", "/v1/translations", json=wanted)
    assert status == 400 and "a glossary is for a beam search of one model: leave it out" in answer["error"]


def test_endless_repetition_is_cut_and_says_so(make):
    def load(path):
        model, tokenizer = served.load_in_double(path)
        token = tokenizer(text_target=" no", add_special_tokens=False)["input_ids"][0]
        model.lm_head.bias.data[:] = -100.0
        model.lm_head.bias.data[token] = 100.0
        return model, tokenizer

    app = make(load=load)
    answer = ask(app, "POST", "/v1/translations", json={"text": SENTENCES[0], "target": "de"})[1]
    ((found,),) = [one["translations"] for one in answer["translations"][0]["sentences"]]
    assert found["repeats"] is True and len(found["text"]) <= 3
    request = {"q": SENTENCES[0], "source": "en", "target": "de"}
    assert ask(app, "POST", "/translate", json=request)[1] == {"translatedText": found["text"]}


def events_of(app, wanted) -> list[tuple[str, dict]]:
    response = request(app, "POST", "/v1/translations", json=wanted | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"  # or nginx collects the events
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    assert all(first.startswith("event: ") and second.startswith("data: ") for first, second in blocks)
    return [(first[7:], json.loads(second[6:])) for first, second in blocks]


def test_sentences_longer_than_any_in_training_are_divided(folder, make, tmp_path):
    sentence = " ".join(SENTENCES[:4]).replace(".", "")
    for most in (9, 200):
        copy = shutil.copytree(folder, tmp_path / str(most))
        (copy / "recipe.yaml").write_text(f"max_length: {most}\n")
        app, body = make(f"en-de={copy}"), {"text": sentence, "source": "en", "target": "de"}
        [answer] = ask(app, "POST", "/v1/translations", json=body)[1]["translations"]
        sources = [each["source"] for each in answer["sentences"]]
        assert " ".join(sources) == sentence and (len(sources) > 1) == (most == 9)
        [answer] = ask(app, "POST", "/v1/translations", json=body | {"prefix": ["a"]})[1]["translations"]
        assert [each["source"] for each in answer["sentences"]] == [sentence]  # the prefix is of all of it


def test_a_stream_has_the_sentences_in_order(make):
    app, wanted = make(), {"text": [TEXT, "", " \n", " ".join(SENTENCES)], "target": "de", "nbest": 2, "scores": True}
    whole = ask(app, "POST", "/v1/translations", json=wanted)[1]["translations"]
    *events, (last, end) = events_of(app, wanted)
    assert last == "end" and [name for name, _ in events] == ["sentence"] * len(events)
    numbers = [event.pop("text") for _, event in events]
    assert numbers == [0] * 3 + [3] * len(SENTENCES)
    assert [event for _, event in events] == [sentence for text in whole for sentence in text["sentences"]]
    for number, text in enumerate(whole):
        own = [event for (_, event), place in zip(events, numbers, strict=True) if place == number]
        pieces = [event["before"] + event["translations"][0]["text"] for event in own]
        assert "".join(pieces) + end["after"][number] == text["text"]


def test_a_stream_that_takes_too_long_says_so(make, loaded, monkeypatch):
    sentence, calls = translations._sentence, []

    async def slow(*arguments):
        calls.append(arguments)
        await asyncio.sleep(60 * (len(calls) > 1))
        return await sentence(*arguments)

    monkeypatch.setattr(translations, "_sentence", slow)
    app = make(limits=Limits(seconds=2), load=lambda folder: loaded)
    (name, _), last = events_of(app, {"text": " ".join(SENTENCES[:2]), "target": "de"})
    assert (name, last) == ("sentence", ("error", {"error": "answering took more than 2 seconds", "status": 504}))


def test_a_stream_that_is_refused_is_an_ordinary_error(post):
    status, answer = post("/v1/translations", json={"text": "A dog.", "target": "zz", "stream": True})
    assert (status, answer) == (400, {"error": "auto to zz is not supported: there are en-de"})


def test_it_is_documented(make):
    schema = ask(make(), "GET", "/openapi.json")[1]
    assert {"/translate", "/languages", "/v1/translations"} <= set(schema["paths"])
    fields = schema["components"]["schemas"]["TranslationsRequest"]["properties"]
    assert all("description" in field for field in fields.values())
