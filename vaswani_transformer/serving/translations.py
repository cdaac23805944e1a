"""Our own JSON interface, for what LibreTranslate's does not offer."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import StreamingResponse

from ..data.words import words_of
from ..decoding.scoring import mean_confidence, score_tokens, word_confidences
from ..decoding.translator import Hypothesis
from ..errors import UserError, items_of
from .engine import Engine
from .models import ServedModel
from .service import Service, SplitText, Translating, TranslationsRequest

router = APIRouter(tags=["translations"])


@router.post("/v1/translations")
async def translate(request: Request, body: TranslationsRequest) -> dict[str, Any]:
    """Translate texts, with n-best lists, scores, alignments, prefixes, or as a stream.

    The answer has `model` (its languages, as in `en-de`), `precision` (of its computation), `source`, `target` and
    `translations`: for each text its best translation, `text`, and its `sentences`. Each of these has its `source`, the
    `code` before it, such as `>>deu<<`, if there is one, `before` (what is between the last translation and this one:
    white space, numbers, signs) and `translations`, best first, which have `text`, `repeats` (true where the model
    repeated its end until it was stopped), and as asked for:

    - `scores`: `score`, which beam search ranks by, and `log_probability`, of all tokens, in nats
    - `token_scores`: `tokens`, each with `text` and `log_probability`, in nats, given the source and those before it
    - `alignments`: `alignment`, pairs of numbers, from 0, of a word of the sentence's `source_words` and one of the
      `target_words`
    - `confidence`: `confidence`, the mean probability of its words, from 0 to 1, `words`, each with `text` and its
      own `confidence`, and `target_words`

    A stream has an event `sentence` with these fields and `text` (number of the text, from 0) for each sentence, and an
    event `end` with what follows the last sentence of each text, `after`, or `error`.
    """
    service: Service = request.app.state.service
    service.check_key(request.headers)
    texts = items_of(body.text)
    if body.prefix is not None and (body.glossary or len(body.prefixes) != len(texts)):
        raise HTTPException(400, "Invalid request: prefix has one text for each text, and no glossary beside it")
    served = service.model_for(body.source, body.target)
    service.note(request, served, texts)
    async with service.translating(served, body) as work:
        if body.stream:  # all has been checked, so that the stream will not fail
            headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}  # nginx passes each event on at once
            return StreamingResponse(_events(service, served, body), media_type="text/event-stream", headers=headers)
        answers = []
        for text, sentences in zip(work.texts, await work.all(), strict=True):
            best = [ranked[0].text for ranked in sentences]
            numbered = enumerate(zip(["", *best], sentences, strict=False))
            details = [await _sentence(body, work, text, number, *ranked) for number, ranked in numbered]
            answers.append({"text": text.joined(best), "sentences": details})
        answer = {"model": served.name, "precision": work.engine.precision}
        return answer | {"source": served.source, "target": served.target, "translations": answers}


async def _sentence(
    body: TranslationsRequest, work: Translating, text: SplitText, number: int, last: str, ranked: list[Hypothesis]
) -> dict[str, Any]:
    """Return a sentence behind a translation with its own ones, and what the request asks about them."""
    names = ("text", "score", "log_probability") if body.scores else ("text",)
    details = [{key: getattr(one, key) for key in names} | ({"repeats": True} if one.repeats else {}) for one in ranked]
    sentence = {"source": text.sentences[number], "before": text.before(number, last), "translations": details}
    if code := text.coded(number).removesuffix(sentence["source"]):
        sentence["code"] = code.strip()
    if body.alignments:
        sentence["source_words"] = words_of(sentence["source"])
    if body.token_scores or body.alignments or body.confidence:
        await work.engine.call(_add_details, body, work.engine, text.coded(number), details)
    return sentence


def _add_details(body: TranslationsRequest, engine: Engine, source: str, details: list[dict[str, Any]]) -> None:
    """Add to each translation of a sentence what the model says of it; for the engine's thread."""
    targets = [detail["text"] for detail in details]
    arguments = engine.model, engine.tokenizer, [source] * len(targets), targets
    if body.token_scores:
        for detail, score in zip(details, score_tokens(*arguments), strict=True):
            pairs = zip(score.tokens, score.log_probabilities, strict=True)
            detail["tokens"] = [{"text": text, "log_probability": value} for text, value in pairs]
    if body.confidence:
        for detail, words in zip(details, word_confidences(*arguments), strict=True):
            detail["confidence"] = mean_confidence(words)
            detail["words"] = [{"text": text, "confidence": value} for text, value in words]
            detail["target_words"] = words_of(detail["text"])
    if body.alignments:
        from ..attention.alignments import align

        for detail, target, links in zip(details, targets, align(*arguments), strict=True):
            detail |= {"alignment": links, "target_words": words_of(target)}


async def _events(service: Service, served: ServedModel, body: TranslationsRequest) -> AsyncIterator[str]:
    try:
        async with service.translating(served, body) as work, contextlib.aclosing(work.sentences()) as sentences:
            last = ""
            async for text, number, ranked in sentences:
                answer = await _sentence(body, work, work.texts[text], number, last, ranked)
                last = ranked[0].text
                yield _event("sentence", {"text": text, **answer})
            yield _event("end", {"after": [text.gaps[-1] for text in work.texts]})
    except (HTTPException, UserError) as error:
        yield _event("error", {"error": getattr(error, "detail", str(error))})


def _event(name: str, data: dict) -> str:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
