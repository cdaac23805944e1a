"""Our own JSON interface, for what LibreTranslate's does not offer."""

import contextlib
import json
from collections.abc import AsyncIterator

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from ..data.words import words_of
from ..decoding.confidence import mean_confidence, word_confidences
from ..decoding.scoring import score_tokens
from ..decoding.translator import Hypothesis
from ..errors import UserError
from .engine import Engine
from .models import ServedModel
from .service import Service, SplitText, Translating, TranslationsRequest

router = APIRouter(tags=["translations"])


class Token(BaseModel):
    """A token of a translation, as text with the space before it."""

    text: str
    log_probability: float = Field(description="in nats, given the source and the tokens before it")


class Word(BaseModel):
    """A word of a translation."""

    text: str
    confidence: float = Field(description="its probability, from 0 to 1")


class Alternative(BaseModel):
    """A translation of a sentence."""

    text: str
    repeats: bool | None = Field(None, description="true where the model repeated its end until it was stopped")
    score: float | None = Field(None, description="what beam search ranks by")
    log_probability: float | None = Field(None, description="of all tokens, in nats")
    tokens: list[Token] | None = None
    alignment: list[tuple[int, int]] | None = Field(
        None, description="numbers, from 0, of a source word and a target word"
    )
    target_words: list[str] | None = Field(None, description="those that the alignment links")
    confidence: float | None = Field(None, description="the mean probability of its words, from 0 to 1")
    words: list[Word] | None = None


class SentenceAnswer(BaseModel):
    """A sentence with its translations."""

    source: str
    source_words: list[str] | None = Field(None, description="those that alignments link")
    before: str = Field(description="white space between the last translation and this one")
    translations: list[Alternative] = Field(description="best first")


class TextAnswer(BaseModel):
    """A text with its best translation, and its sentences."""

    text: str
    sentences: list[SentenceAnswer]


class TranslationsAnswer(BaseModel):
    """The translations of all texts of a request."""

    model: str = Field(description="its languages, as in en-de")
    precision: str = Field(description="what it computes in")
    source: str
    target: str
    translations: list[TextAnswer]


@router.post("/v1/translations", response_model_exclude_none=True)
async def translate(request: Request, body: TranslationsRequest) -> TranslationsAnswer:
    """Translate texts, with n-best lists, scores, alignments, prefixes, or as a stream.

    A stream has an event `sentence` with `text` (number of the text, from 0), `before`, `source` and `translations` for
    each sentence, and an event `end` with what follows the last sentence of each text, or `error`.
    """
    service: Service = request.app.state.service
    service.check_key(request.headers)
    if body.prefix is not None and (body.glossary or len(body.prefixes) != len(body.texts)):
        raise HTTPException(400, "Invalid request: prefix has one text for each text, and no glossary beside it")
    served = service.model_for(body.source, body.target)
    service.note(request, served, body.texts)
    async with service.translating(served, body) as work:
        if body.stream:  # all has been checked, so that the stream will not fail
            return StreamingResponse(_events(service, served, body), media_type="text/event-stream")
        answers = []
        for text, sentences in zip(work.texts, await work.all(), strict=True):
            details = [await _sentence(body, work, text, *numbered) for numbered in enumerate(sentences)]
            answers.append(TextAnswer(text=text.joined([ranked[0].text for ranked in sentences]), sentences=details))
        return TranslationsAnswer(
            model=served.name, precision=work.engine.precision, source=served.source, target=served.target,
            translations=answers,
        )  # fmt: skip


async def _sentence(
    body: TranslationsRequest, work: Translating, text: SplitText, number: int, ranked: list[Hypothesis]
) -> SentenceAnswer:
    """Return a sentence with its translations, and what the request asks about them."""
    names = ("text", "score", "log_probability") if body.scores else ("text",)
    details = [{name: getattr(each, name) for name in names} | {"repeats": each.repeats or None} for each in ranked]
    source, engine = text.sentences[number], work.engine
    if body.token_scores or body.alignments or body.confidence:
        more = await engine.call(_details, body, engine, source, [each.text for each in ranked])
        details = [known | others for known, others in zip(details, more, strict=True)]
    words = words_of(source) if body.alignments else None
    return SentenceAnswer(source=source, source_words=words, before=text.before(number), translations=details)


def _details(body: TranslationsRequest, engine: Engine, source: str, targets: list[str]) -> list[dict]:
    """Return what the model says of each translation of a sentence; for the engine's thread."""
    arguments = engine.model, engine.tokenizer, [source] * len(targets), targets
    details: list[dict] = [{} for _ in targets]
    if body.token_scores:
        for detail, score in zip(details, score_tokens(*arguments), strict=True):
            pairs = zip(score.tokens, score.log_probabilities, strict=True)
            detail["tokens"] = [{"text": text, "log_probability": value} for text, value in pairs]
    if body.confidence:
        for detail, words in zip(details, word_confidences(*arguments), strict=True):
            detail["confidence"] = mean_confidence(words)
            detail["words"] = [{"text": text, "confidence": value} for text, value in words]
    if body.alignments:
        from ..attention.alignments import align

        for detail, target, links in zip(details, targets, align(*arguments), strict=True):
            detail |= {"alignment": links, "target_words": words_of(target)}
    return details


async def _events(service: Service, served: ServedModel, body: TranslationsRequest) -> AsyncIterator[str]:
    try:
        async with service.translating(served, body) as work, contextlib.aclosing(work.sentences()) as sentences:
            async for text, number, ranked in sentences:
                answer = await _sentence(body, work, work.texts[text], number, ranked)
                yield _event("sentence", {"text": text, **answer.model_dump(exclude_none=True)})
            yield _event("end", {"after": [text.gaps[-1] for text in work.texts]})
    except (HTTPException, UserError) as error:
        yield _event("error", {"error": getattr(error, "detail", str(error))})


def _event(name: str, data: dict) -> str:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
