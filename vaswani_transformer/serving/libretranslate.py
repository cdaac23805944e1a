"""LibreTranslate's interface, as far as its clients need it."""

import asyncio
import json
from typing import Any
from urllib.parse import parse_qsl

from babel import Locale
from fastapi import APIRouter, HTTPException, Request

from ..documents.document import Translation
from ..documents.formats import aligner
from ..documents.web_page import read_web_page
from .models import ModelPlace
from .service import Service, Wish, texts_of

_ALTERNATIVES = 10  # at most
_ALIGNED = 16  # sentences at once, between which others have their turn; more take as long each on a CPU

router = APIRouter(tags=["LibreTranslate"])


def _language_name(code: str) -> str:
    """Return a language's name in English; the code where it is not known."""
    return Locale("en").languages.get(code.lower().partition("-")[0], code.title())


@router.get("/languages")
async def languages(request: Request) -> list[dict[str, Any]]:
    """The languages, and for each those that it can be translated to."""
    places = request.app.state.service.models.places
    codes = dict.fromkeys(code for place in places for code in (place.source, place.target))
    return [
        {
            "code": code,
            "name": _language_name(code),
            "targets": [place.target for place in places if place.source == code],
        }
        for code in codes
    ]


@router.get("/health")
async def health() -> dict[str, str]:
    """Whether the server answers."""
    return {"status": "ok"}


@router.get("/frontend/settings")
async def settings(request: Request) -> dict[str, Any]:
    """What a page for this server has to know."""
    service: Service = request.app.state.service
    sides = {side: getattr(first, side) for first in service.models.places[:1] for side in ("source", "target")}
    return {
        "charLimit": service.limits.characters,
        "frontendTimeout": 500,
        "apiKeys": service.needs_key,
        "keyRequired": service.needs_key,
        "suggestions": False,
        "filesTranslation": False,
        "supportedFilesFormat": [],
        # Not LibreTranslate's, for the page:
        "parser": service.models.parser is not None,
        "details": {place.name: place.details for place in service.models.places},
        "language": {side: {"code": code, "name": _language_name(code)} for side, code in sides.items()},
    }


_FIELDS = {
    "q": {"description": "a text, or in JSON a list of texts", "example": "Two dogs are playing."},
    "source": {"type": "string", "description": "code of its language, or auto", "example": "en"},
    "target": {"type": "string", "description": "code of the language to translate to", "example": "de"},
    "format": {"type": "string", "enum": ["text", "html"], "default": "text"},
    "alternatives": {"type": "integer", "description": "how many other translations", "default": 0},
    "api_key": {"type": "string"},
}
_SCHEMA = {"type": "object", "required": ["q", "source", "target"], "properties": _FIELDS}
_KINDS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")


@router.post("/translate", openapi_extra={"requestBody": {"content": {kind: {"schema": _SCHEMA} for kind in _KINDS}}})
async def translate(request: Request) -> dict[str, Any]:
    """Translate a text, or each text of a list."""
    service: Service = request.app.state.service
    fields = await _fields(request, service.limits.body)
    service.check_key(request.headers, fields.get("api_key"))
    for name in ("q", "source", "target"):
        if not fields.get(name):
            raise HTTPException(400, f"Invalid request: missing {name} parameter")
    for name in ("source", "target"):
        if not isinstance(fields[name], str):
            raise HTTPException(400, f"Invalid request: {name} parameter is not a text")
    texts, alternatives = texts_of(fields["q"], "q"), _alternatives(fields)
    service.check(texts)
    place = service.place(fields["source"], fields["target"])
    if (kind := fields.get("format") or "text") not in ("text", "html"):
        raise HTTPException(400, f"{kind!s:.20} format is not supported")
    service.note(request, place, texts)
    if kind == "html":  # whose other translations there are none of in LibreTranslate either
        translated = [[page] for page in await _translate_pages(service, place, texts)]
    else:
        async with service.translating(place, Wish(texts, nbest=alternatives + 1)) as work:
            found = await work.all()
        translated = [_distinct(text, own) for text, own in zip(work.texts, found, strict=True)]
    others = [own[1:] for own in translated]
    is_list = isinstance(fields["q"], list)
    answer: dict[str, Any] = {"translatedText": [own[0] for own in translated] if is_list else translated[0][0]}
    if fields["source"].lower() == "auto":
        detected = {"confidence": 0.0, "language": place.source}  # it was not detected: there is no other
        answer["detectedLanguage"] = [detected] * len(texts) if is_list else detected
    if alternatives:
        answer["alternatives"] = others if is_list else others[0]
    return answer


async def _translate_pages(service: Service, place: ModelPlace, texts: list[str]) -> list[str]:
    """Web pages, or parts of them, translated with all tags where they belong."""
    work = await asyncio.to_thread(lambda: Translation([read_web_page(text) for text in texts], place.source))
    async with service.translating(place, Wish(work.sentences, split=False)) as translating:
        found, engine = await translating.all(), translating.engine
        pairs = zip(translating.texts, found, strict=True)
        sources, targets = work.take([text.joined([own[0].text for own in parts]) for text, parts in pairs])
        align, links = aligner(engine.model, engine.tokenizer), []
        for start in range(0, len(sources), _ALIGNED):
            part = slice(start, start + _ALIGNED)
            links += await engine.call(align, sources[part], targets[part])
    return await asyncio.to_thread(work.written, links)


def _distinct(text, sentences: list[list]) -> list[str]:
    """The translations of a text, best first, from those of its sentences: the best ones, the second ones, and so on.

    Where a sentence has fewer than others, its best one stands in.
    """
    number = max(map(len, sentences), default=1)
    ranked = [[own[rank if rank < len(own) else 0].text for own in sentences] for rank in range(number)]
    return list(dict.fromkeys(text.joined(own) for own in ranked))


def _alternatives(fields: dict[str, Any]) -> int:
    try:
        number = max(0, int(fields.get("alternatives") or 0))
    except (TypeError, ValueError, OverflowError) as error:
        raise HTTPException(400, "Invalid request: alternatives parameter is not a number") from error
    if number > _ALTERNATIVES:
        raise HTTPException(400, f"Invalid request: alternatives parameter must be <= {_ALTERNATIVES}")
    return number


async def _fields(request: Request, limit: int) -> dict[str, Any]:
    """The parameters of a request, from JSON or a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        body = (await request.body()).decode()
        if kind == "application/json" or kind.endswith("+json"):
            fields = json.loads(body)
            if not isinstance(fields, dict):
                raise ValueError("no table")
            return fields
        if kind == "multipart/form-data":
            fields = dict(await request.form(max_part_size=limit))
        else:
            fields = dict(parse_qsl(body, keep_blank_values=True, errors="strict", max_num_fields=100))
    except UnicodeDecodeError as error:
        raise HTTPException(400, "Invalid request: the text is not valid UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"Invalid {'JSON' if 'json' in kind else 'form'} format") from error
    return {name: value.replace("\r\n", "\n") for name, value in fields.items() if isinstance(value, str)}
