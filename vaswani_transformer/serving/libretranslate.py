"""LibreTranslate's interface, as far as its clients need it."""

import asyncio
import json
import math
from typing import Any, Literal
from urllib.parse import parse_qsl

from babel import Locale
from babel.core import get_global
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from ..catalogues.formats import ENDINGS as CATALOGUES
from ..documents.document import Translation
from ..documents.formats import ENDINGS as DOCUMENTS
from ..documents.formats import aligner
from ..documents.web_page import read_web_page
from ..errors import items_of
from ..exported import is_exported
from ..model.language_codes_vaswani import typed_code
from .models import ServedModel, language_distance
from .service import Service, Texts, TranslationsRequest

_ALTERNATIVES = 10  # at most
_SURE = 0.9  # of a text that stays, since it is in the target language
_ALIGNED = 16  # sentences at once, between which others have their turn; more take as long each on a CPU


class _Json(JSONResponse):
    media_type = "application/json; charset=utf-8"  # OmegaT reads Latin-1 where no charset is named


router = APIRouter(tags=["LibreTranslate"], default_response_class=_Json)


def _language_name(code: str) -> str:
    """Return a language's name in English; the code where it is not known."""
    names, language = Locale("en").languages, code.lower().partition("-")[0]
    # CLDR names a language by its shortest code: eng is en.
    return names.get(language) or names.get(get_global("language_aliases").get(language), code.title())


@router.get("/languages")
async def languages(request: Request) -> list[dict[str, Any]]:
    """Return the languages, and for each those that it can be translated to."""
    served = request.app.state.service.models.served
    codes = dict.fromkeys(code for model in served for code in (model.source, model.target))
    targets = {code: [model.target for model in served if model.source == code] for code in codes}
    return [{"code": code, "name": _language_name(code), "targets": own} for code, own in targets.items()]


@router.get("/health")
async def health() -> dict[str, str]:
    """Return that the server answers."""
    return {"status": "ok"}


@router.get("/frontend/settings")
async def settings(request: Request) -> dict[str, Any]:
    """Return what a page for this server has to know."""
    service: Service = request.app.state.service
    served = service.models.served
    sides = {side: getattr(first, side) for first in served[:1] for side in ("source", "target")}
    return {
        "charLimit": service.limits.characters,
        "frontendTimeout": 500,
        "apiKeys": bool(service.keys),
        "keyRequired": bool(service.keys),
        "suggestions": False,
        "filesTranslation": True,
        "supportedFilesFormat": [*DOCUMENTS, *CATALOGUES],
        # Not LibreTranslate's, for the page:
        "details": {each.name: {"alignments": not is_exported(each.folder), "confidence": True} for each in served},
        "language": {side: {"code": code, "name": _language_name(code)} for side, code in sides.items()},
    }


class TextFields(BaseModel):
    """The parameters of a request about texts, from JSON or a form."""

    q: Texts = Field(description="a text, or in JSON a list of texts")
    api_key: Any = None


class TranslateFields(TextFields):
    """The parameters of a translation."""

    source: str = Field(description="code of its language, or auto", examples=["en"])
    target: str = Field(description="code of the language to translate to", examples=["de"])
    format: Literal["text", "html"] = "text"
    alternatives: int = Field(0, ge=0, le=_ALTERNATIVES, description="how many other translations")


_STRICT = {"keep_blank_values": True, "errors": "strict", "max_num_fields": 1000}
_KINDS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
_BODY = {"content": {kind: {"schema": TranslateFields.model_json_schema()} for kind in _KINDS}}


@router.post("/detect")
async def detect(request: Request) -> list[dict[str, Any]]:
    """Return the languages that are served, the likeliest of the text first, with percents."""
    service: Service = request.app.state.service
    fields = TextFields.model_validate(await fields_of(request, service.limits.body))
    service.check_key(request.headers, fields.api_key)
    service.check(texts := items_of(fields.q))
    return [{"confidence": round(100 * share, 1), "language": code} for code, share in service.detect(texts).items()]


@router.post("/translate", openapi_extra={"requestBody": _BODY})
async def translate(request: Request) -> dict[str, Any]:
    """Translate a text, or each text of a list."""
    service: Service = request.app.state.service
    fields = TranslateFields.model_validate(await fields_of(request, service.limits.body))
    service.check_key(request.headers, fields.api_key)
    service.check(texts := items_of(fields.q))
    source = fields.source
    if is_auto := source.lower() == "auto":
        shares = service.detect(texts, fields.target)
        known = [code for code in shares if shares[code] > _SURE or language_distance(code, fields.target) == math.inf]
        source = next(iter(known), source)
    served = service.model_for(source, fields.target, may_stay=True)
    source = served.source if served else source
    service.note(request, served, texts)
    if served is None:
        translated = [[text] for text in texts]
    elif fields.format == "html":  # LibreTranslate has no other translations of them either
        translated = [[page] for page in await _translate_pages(service, served, texts)]
    else:
        job = TranslationsRequest(text=texts, target=served.target, nbest=fields.alternatives + 1)
        async with service.translating(served, job) as work:
            hypotheses = await work.all()
        translated = [distinct(text, parts) for text, parts in zip(work.texts, hypotheses, strict=True)]
    answer: dict[str, Any] = {"translatedText": [versions[0] for versions in translated]}
    if is_auto:
        answer["detectedLanguage"] = [{"confidence": round(100 * shares[source], 1), "language": source}] * len(texts)
    if fields.alternatives:
        answer["alternatives"] = [versions[1:] for versions in translated]
    return answer if isinstance(fields.q, list) else {name: values[0] for name, values in answer.items()}


async def _translate_pages(service: Service, served: ServedModel, texts: list[str]) -> list[str]:
    """Return web pages, or parts of them, translated with all tags where they belong."""
    codes, texts = zip(*map(typed_code, texts), strict=True)
    work = await asyncio.to_thread(lambda: Translation(list(map(read_web_page, texts)), served.source, codes))
    job = TranslationsRequest.model_construct(text=work.sentences, split_sentences=False)  # maybe none
    async with service.translating(served, job) as translating:
        ranked, engine = await translating.all(), translating.engine
        pairs = zip(translating.texts, ranked, strict=True)
        sources, targets = work.take([text.joined([best[0].text for best in parts]) for text, parts in pairs])
        align, links = aligner(engine.model, engine.tokenizer, engine.codes(served.target).coded), []
        for start in range(0, len(sources), _ALIGNED):
            part = slice(start, start + _ALIGNED)
            links += await engine.call(align, sources[part], targets[part])
    return await asyncio.to_thread(work.written, links)


def distinct(text, sentences: list[list]) -> list[str]:
    """Return the translations of a text, best first: of the best ones of its sentences, the second ones, and so on.

    A sentence that has fewer than others gives its best one again.
    """
    number = max(map(len, sentences), default=1)
    versions = [[each[rank if rank < len(each) else 0].text for each in sentences] for rank in range(number)]
    return list(dict.fromkeys(map(text.joined, versions)))


async def fields_of(request: Request, limit: int) -> dict[str, Any]:
    """Return the parameters in a request's address, form and JSON that are not empty; lists of those given twice."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        body = b"" if kind == "multipart/form-data" else (await request.body()).decode()
        form, sent = parse_qsl(request.scope["query_string"].decode(), **_STRICT), {}
        if kind == "application/json" or kind.endswith("+json"):
            sent = dict(json.loads(body))
        elif kind == "multipart/form-data":
            form += (await request.form(max_part_size=limit)).multi_items()
        else:
            form += parse_qsl(body, **_STRICT)
    except (ValueError, TypeError, RecursionError) as error:
        raise HTTPException(400, f"Invalid {'JSON' if 'json' in kind else 'form'} format, or not UTF-8") from error
    fields = {}
    for name, value in form:  # in which browsers send lines as here
        fields.setdefault(name, []).append(value.replace("\r\n", "\n") if isinstance(value, str) else value)
    for name, value in sent.items():
        fields.setdefault(name, []).append(value)
    return {key: values if values[1:] else values[0] for key, values in fields.items() if values not in ([""], [None])}
