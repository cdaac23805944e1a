"""`/v1/translations` against the package's own functions: n-best lists, scores, alignments, prefixes, streams."""

import asyncio
import json

import pytest
import served
from served import SENTENCES, Translator, ask, client_of, translated

from vaswani_transformer import align, score_tokens

folder, loaded, make, post = served.folder, served.loaded, served.make, served.post

TEXT = f"{SENTENCES[0]}  {SENTENCES[1]}\n{SENTENCES[2]} "


def test_n_best_lists_with_scores_tokens_and_alignments(post, loaded):
    wanted = {"nbest": 3, "beams": 5, "scores": True, "token_scores": True, "alignments": True}
    status, answer = post("/v1/translations", json={"text": TEXT, "source": "en", "target": "de", **wanted})
    assert status == 200
    (only,) = answer.pop("translations")
    assert answer == {"model": "en-de", "precision": "float64", "source": "en", "target": "de"}
    translator = Translator(*loaded, scores=True, num_beams=5, num_return_sequences=3)
    expected = list(translator.hypotheses(SENTENCES[:3]))
    assert only["text"] == "{}  {}\n{} ".format(*(own[0].text for own in expected))
    assert [one["source"] for one in only["sentences"]] == SENTENCES[:3]
    assert [one["before"] for one in only["sentences"]] == ["", "  ", "\n"]
    for source, sentence, hypotheses in zip(SENTENCES, only["sentences"], expected, strict=False):
        targets = [one.text for one in hypotheses]
        known = sentence["translations"]
        assert [one["text"] for one in known] == targets
        for name in ("score", "log_probability"):
            assert [one[name] for one in known] == pytest.approx([getattr(one, name) for one in hypotheses])
        links = align(*loaded, [source] * 3, targets)
        assert [[tuple(link) for link in one["alignment"]] for one in known] == links
        for one, score in zip(known, score_tokens(*loaded, [source] * 3, targets), strict=True):
            assert [token["text"] for token in one["tokens"]] == score.tokens
            assert [token["log_probability"] for token in one["tokens"]] == pytest.approx(score.log_probabilities)


def test_what_is_not_asked_for_is_not_answered(post, loaded):
    answer = post("/v1/translations", json={"text": [SENTENCES[0], ""], "target": "de"})[1]
    (expected,) = translated(loaded, SENTENCES[:1])
    sentence = {"source": SENTENCES[0], "before": "", "translations": [{"text": expected}]}
    assert answer["translations"] == [{"text": expected, "sentences": [sentence]}, {"text": "", "sentences": []}]


def test_options_of_the_search(post, loaded):
    settings = {"beams": 2, "length_penalty": 2.0, "max_new_tokens": 6}
    answer = post("/v1/translations", json={"text": SENTENCES[:4], "target": "de", **settings})[1]
    names = {"num_beams": 2, "length_penalty": 2.0, "max_new_tokens": 6}
    assert [one["text"] for one in answer["translations"]] == translated(loaded, SENTENCES[:4], **names)


def test_lines_as_they_are(post, loaded):
    line = " ".join(SENTENCES[:2])
    answer = post("/v1/translations", json={"text": line, "target": "de", "split_sentences": False})[1]
    assert answer["translations"][0]["text"] == translated(loaded, [line])[0]


def test_prefixes(post, loaded):
    texts, prefixes = [" ".join(SENTENCES[:2]), SENTENCES[2]], ["Ein", ""]
    answer = post("/v1/translations", json={"text": texts, "target": "de", "prefix": prefixes})[1]
    expected = translated(loaded, [(SENTENCES[0], "Ein"), SENTENCES[1], SENTENCES[2]])
    assert [one["text"] for one in answer["translations"]] == [" ".join(expected[:2]), expected[2]]
    status, answer = post("/v1/translations", json={"text": texts, "target": "de", "prefix": "Ein"})
    assert (status, answer["error"]) == (400, "Invalid request: 2 texts and 1 prefixes")
    status, answer = post("/v1/translations", json={"text": "A dog.", "target": "de", "prefix": "Ein Hund " * 30})
    assert status == 400 and "leaves no room" in answer["error"]


def events_of(app, wanted) -> list[tuple[str, dict]]:
    async def run():
        async with client_of(app) as client:
            response = await client.post("/v1/translations", json=wanted | {"stream": True})
            assert response.headers["content-type"].startswith("text/event-stream")
            return response.text

    blocks = [block.split("\n") for block in asyncio.run(run()).strip().split("\n\n")]
    assert all(first.startswith("event: ") and second.startswith("data: ") for first, second in blocks)
    return [(first[7:], json.loads(second[6:])) for first, second in blocks]


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


def test_a_stream_that_is_refused_is_an_ordinary_error(post):
    status, answer = post("/v1/translations", json={"text": "A dog.", "target": "zz", "stream": True})
    assert (status, answer) == (400, {"error": "zz is not supported"})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"text": 3}, "text.str: Input should be a valid string"),
        ({"text": []}, "text parameter is not a text or a list of texts"),
        ({"beams": 33}, "beams: Input should be less than or equal to 32"),
        ({"nbest": 0}, "nbest: Input should be greater than or equal to 1"),
        ({"length_penalty": float("nan")}, "length_penalty: "),
        ({"max_new_tokens": 1001}, "max_new_tokens: Input should be less than or equal to 1000"),
        ({"temperature": 1}, "temperature: Extra inputs are not permitted"),
        ({"target": None}, "target: Input should be a valid string"),
    ],
)
def test_wrong_fields_are_named(post, wrong, reason):
    body = json.dumps({"text": "A dog.", "target": "de"} | wrong).encode()
    status, answer = post("/v1/translations", content=body, headers={"content-type": "application/json"})
    assert status == 400 and answer["error"].startswith(f"Invalid request: {reason}")


def test_it_is_documented(make):
    app = make()
    schema = ask(app, "GET", "/openapi.json")[1]
    assert {"/translate", "/languages", "/v1/translations"} <= set(schema["paths"])
    fields = schema["components"]["schemas"]["TranslationsRequest"]["properties"]
    assert all("description" in field for field in fields.values())

    async def page():
        async with client_of(app) as client:
            return (await client.get("/docs")).status_code

    assert asyncio.run(page()) == 200
