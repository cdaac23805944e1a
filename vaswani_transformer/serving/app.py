"""The web application: models, interfaces, the page for people, errors."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from .. import __version__
from ..errors import UserError
from ..hub.card_facts import longest_source
from . import files, libretranslate, translations
from .engine import Engine
from .limiter import Metrics, RequestLimiter, error_response
from .models import Models, ServedModel
from .service import Limits, Service

_DESCRIPTION = """\
`/v1/translations` gives n-best lists, scores, word alignments and streams; the others are LibreTranslate's interface.
Errors are `{"error": "..."}`: 400 a wrong request, 403 a wrong key, 408 and 504 too slow, 413 too large, 503 too much
to do (`Retry-After` has seconds), or a model that cannot be loaded."""
_PAGE = {"/": ("page.html", "html"), "/page.css": ("page.css", "css"), "/page.js": ("page.js", "javascript")}
_OWN = "script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; form-action 'self'"
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; base-uri 'none'; {_OWN}",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_app(
    served: Sequence[ServedModel],
    load: Callable[[Path], tuple[Any, Any]],
    *,
    limits: Limits = Limits(),  # noqa: B008 (nothing changes it)
    most_models: int | None = None,
    tokens_per_batch: int = 2048,
    keys: Collection[str] = (),
    memory: Any = None,
) -> FastAPI:
    """Return the application, which an ASGI server runs once.

    `load` gives the model and the tokenizer of a folder; a translation needs one of the API `keys`, if there are any;
    `most_models` is as in `Models`, the others as of `Engine`.
    """

    def start(model: ServedModel) -> Engine:
        more = {"needs": [model.needs]} if model.needs else {}
        loaded, observe = load(model.folder, **more), metrics.batches.labels(model.name).observe
        engine = Engine(*loaded, tokens_per_batch, observe, memory, longest_source(model.folder))
        engine.translator.source_language = model.source
        return engine

    models = Models(served, start, most_models)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        await models.close()

    app = FastAPI(title="vaswani serve", version=__version__, description=_DESCRIPTION, lifespan=lifespan)
    app.state.service, app.state.files = Service(models, limits, keys, memory), {}
    paths = {"/metrics", "/docs", "/openapi.json", *_PAGE}
    for part in (libretranslate, files, translations):
        app.include_router(part.router)
        paths |= {route.path for route in part.router.routes}
    app.add_api_route("/metrics", _metrics, include_in_schema=False)
    for path in _PAGE:
        app.add_api_route(path, _page, include_in_schema=False)
    app.state.metrics = metrics = Metrics(models, paths)
    for kind in (UserError, ValidationError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(RequestLimiter, limits=limits, metrics=metrics)
    names, methods = ["Authorization", "Content-Type"], ["GET", "HEAD", "POST"]
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=methods, allow_headers=names)
    return app


async def _metrics(request: Request) -> Response:
    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _page(request: Request) -> Response:
    name, kind = _PAGE[request.scope["route"].path]
    return Response(Path(__file__).with_name(name).read_bytes(), headers=_HEADERS, media_type=f"text/{kind}")


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return error_response(error.status_code, error.detail, error.headers)
    message = str(error)
    if isinstance(error, RequestValidationError | ValidationError):  # the first mistake, without what was sent
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{field + ': ' if field else ''}{first['msg']}"
    return error_response(400, f"Invalid request: {message}")
