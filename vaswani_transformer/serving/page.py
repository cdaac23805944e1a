"""The page for people: its three files, the attention page of a sentence, and trees (Section 6.3)."""

from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Body, Form, HTTPException, Request
from fastapi.responses import HTMLResponse, Response

from ..parsing.trees import words_of
from .engine import Engine
from .service import Service, Texts, texts_of

_FILES = {"/": ("page.html", "html"), "/page.css": ("page.css", "css"), "/page.js": ("page.js", "javascript")}
_SENTENCES = "a sentence, words and punctuation marks separated by spaces, or several"
_OWN = "script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; form-action 'self'"
# Its script is in the page itself, which gets no access to ours.
_ATTENTION = "sandbox allow-scripts; script-src 'unsafe-inline'; style-src 'unsafe-inline'"

router = APIRouter(tags=["page"])


def _headers(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": f"default-src 'none'; base-uri 'none'; {policy}",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


async def _file(request: Request) -> Response:
    name, kind = _FILES[request.scope["route"].path]
    content = (resources.files(__package__) / name).read_bytes()
    return Response(content, headers=_headers(_OWN), media_type=f"text/{kind}")


for _path in _FILES:
    router.add_api_route(_path, _file, include_in_schema=False)


@router.post("/v1/attention", response_class=HTMLResponse)
async def attention(
    request: Request,
    source: Annotated[str, Form(description="code of the language")],
    target: Annotated[str, Form()],
    text: Annotated[str, Form(description="a sentence")],
    translation: Annotated[str, Form(description="its translation")],
    api_key: Annotated[str, Form()] = "",
) -> Response:
    """Return a page that shows what every head of the model looks at in a sentence and its translation."""
    service: Service = request.app.state.service
    service.check_key(request.headers, api_key)
    service.check([text, translation])
    served = service.model_for(source, target)
    service.note(request, served, [text])
    async with service.models.engine(served, "attention") as engine:
        page = await engine.call(_attention_page, engine, engine.codes(served.target).coded(text), translation)
    return HTMLResponse(page, headers=_headers(_ATTENTION))


def _attention_page(engine: Engine, text: str, translation: str) -> str:
    """Return the page; in the engine's thread, so that there is never more than one of them, which take much memory."""
    from ..attention.page import attention_page
    from ..attention.weights import attend

    weights = attend(engine.model, engine.tokenizer, text, translation)
    return attention_page(weights, ["encoder-decoder", "encoder", "decoder"])


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
