"""The page for people: its three files, and the attention page of a sentence."""

import asyncio
from importlib import resources
from typing import Annotated

from fastapi import APIRouter, Form, HTTPException, Request
from fastapi.responses import HTMLResponse, Response

from .engine import Engine
from .service import Service

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_MOST_TOKENS = 200  # of a sentence in an attention page, whose size grows with their square
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
    return Response((resources.files(__package__) / name).read_bytes(), headers=_headers(_OWN), media_type=kind)


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
    """A page that shows what every head of the model looks at in a sentence and its translation."""
    service: Service = request.app.state.service
    service.check_key(request.headers, api_key)
    service.check([text, translation])
    served = service.model_for(source, target)
    service.note(request, served, [text])
    async with service.attending:
        async with service.models.engine(served, "attention") as engine:
            weights = await engine.call(_weights, engine, text, translation)
        from ..attention.page import attention_page

        page = await asyncio.to_thread(attention_page, weights, ["encoder-decoder", "encoder", "decoder"])
    return HTMLResponse(page, headers=_headers(_ATTENTION))


def _weights(engine: Engine, text: str, translation: str):
    from ..attention.weights import attend, token_ids

    for side, sentence in (("source", text), ("target", translation)):
        if (tokens := len(token_ids(engine.model, engine.tokenizer, side, sentence))) > _MOST_TOKENS:
            raise HTTPException(400, f"the {side} has {tokens} tokens, too many to show, at most {_MOST_TOKENS}")
    return attend(engine.model, engine.tokenizer, text, translation)
