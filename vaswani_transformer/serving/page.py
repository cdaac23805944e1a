"""The page for people: its three files, and trees (Section 6.3)."""

from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Body, HTTPException, Request
from fastapi.responses import Response

from ..parsing.trees import words_of
from .engine import Engine
from .service import Service, Texts, texts_of

_FILES = {"/": ("page.html", "html"), "/page.css": ("page.css", "css"), "/page.js": ("page.js", "javascript")}
_SENTENCES = "a sentence, words and punctuation marks separated by spaces, or several"
_OWN = "script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; form-action 'self'"
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; base-uri 'none'; {_OWN}",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(tags=["page"])


async def _file(request: Request) -> Response:
    name, kind = _FILES[request.scope["route"].path]
    content = (resources.files(__package__) / name).read_bytes()
    return Response(content, headers=_HEADERS, media_type=f"text/{kind}")


for _path in _FILES:
    router.add_api_route(_path, _file, include_in_schema=False)


@router.post("/v1/parses")
async def parse(request: Request, text: Annotated[Texts, Body(embed=True, description=_SENTENCES)]) -> dict[str, Any]:
    """Parse sentences with the parser that is served.

    The answer has `parses`: for each sentence its `words` and its `tree` in brackets, as `vaswani parse predict` writes
    it; null for no words.
    """
    service: Service = request.app.state.service
    service.check_key(request.headers)
    texts, served = texts_of(text), service.models.parser
    service.check(texts)
    if served is None:
        raise HTTPException(400, "no parser is served: give the server the folder of `vaswani parse train`")
    service.note(request, served, texts)
    async with service.models.engine(served, "parses") as engine:
        return {"parses": [await engine.call(_parse, engine, words_of(text)) for text in texts]}


def _parse(engine: Engine, words: list[str]) -> dict[str, Any]:
    (parsed,) = engine.parser.parse([words])
    return {"words": words, "tree": parsed.tree and str(parsed.tree)}
