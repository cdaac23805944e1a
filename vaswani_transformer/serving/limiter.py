"""ASGI middleware: limits of requests, cancellation when a client leaves, metrics, the access log."""

import asyncio
import json
import logging
import re
import traceback
from collections.abc import Mapping
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..errors import is_panic
from .service import Limits, full

logger = logging.getLogger(__name__)

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Metrics that Prometheus reads; `paths` are those that are counted by themselves."""

    def __init__(self, models, paths: set[str]):
        self.registry, self.paths = CollectorRegistry(), paths
        options = {"registry": self.registry}
        self.requests = Counter("vaswani_requests", "Answered requests.", ["path", "status"], **options)
        self.seconds = Histogram("vaswani_request_seconds", "Time of requests.", ["path"], buckets=_SECONDS, **options)
        self.characters = Counter("vaswani_characters", "Characters of translated texts.", ["model"], **options)
        self.batches = Histogram(
            "vaswani_batch_sentences", "Sentences in each step of a search.", ["model"], buckets=_BATCHES, **options
        )
        self.under_way = 0
        for name, meaning, value in (
            ("vaswani_requests_under_way", "Requests that are being answered.", lambda: self.under_way),
            ("vaswani_sentences_pending", "Sentences that wait or are searched.", lambda: models.pending),
            ("vaswani_models_loaded", "Models in memory.", lambda: len(models.loaded)),
        ):
            Gauge(name, meaning, **options).set_function(value)


class RequestLimiter:
    """An ASGI application around another that reads the body of a request within limits, and ends what is too late.

    The other one may leave what is to be logged in `scope["state"]["notes"]`.
    """

    def __init__(self, app, limits: Limits, metrics: Metrics):
        self.app, self.limits, self.metrics = app, limits, metrics

    async def __call__(self, scope, receive, send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, is_stream = perf_counter(), 0, False

        async def noting(message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            await send(message)

        self.metrics.under_way += 1
        try:
            if self.metrics.under_way > self.limits.queue and scope["method"] == "POST":
                raise full()
            routed = {"path": scope.get("root_path", "") + self._route(scope), "state": scope.setdefault("state", {})}
            method = {"HEAD": "GET"}.get(scope["method"], scope["method"])  # the server itself leaves out the body
            await self._answer(scope | routed | {"method": method}, receive, noting)
        except ClientDisconnect:
            pass
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            if not isinstance(error, HTTPException):
                source = "".join(traceback.format_tb(error.__traceback__))
                logger.error(f"{type(error).__name__}\n{source}")  # its message may hold what a user sent
                error = HTTPException(500)
            if not status:
                await error_response(error.status_code, error.detail, error.headers)(scope, receive, noting)
            elif is_stream:
                told = json.dumps({"error": error.detail, "status": error.status_code})
                last = f"event: error\ndata: {told}\n\n".encode()
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self.metrics.under_way -= 1
            # 499: nginx's number for a client that has left
            path, status, seconds = self._route(scope), status or 499, perf_counter() - start
            path = path if path in self.metrics.paths else "other"
            self.metrics.requests.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(seconds)
            client = (scope.get("client") or ("-",))[0]
            notes = scope.get("state", {}).get("notes", {})
            rest = "".join(f" {name}={json.dumps(value, ensure_ascii=False)}" for name, value in notes.items())
            logger.info(f"{client} {scope['method']} {path} {status} {1000 * seconds:.0f} ms{rest}")

    async def _answer(self, scope, receive, send) -> None:
        """Let the application answer, as long as there is time and a client."""
        end = perf_counter() + self.limits.seconds
        late = f"took more than {self.limits.seconds:g} seconds"
        try:
            body = await asyncio.wait_for(self._read(scope, receive), self.limits.seconds)
        except TimeoutError:
            raise HTTPException(408, f"sending the request {late}") from None
        messages = [{"type": "http.request", "body": body}]

        async def replay() -> dict:
            return messages.pop() if messages else await asyncio.Future()

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = answering, leaving = [asyncio.ensure_future(call) for call in (self.app(scope, replay, send), leave())]
        try:
            await asyncio.wait(tasks, timeout=end - perf_counter(), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            elif not leaving.done():
                raise HTTPException(504, f"answering {late}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # what the answer holds is free then

    async def _read(self, scope, receive) -> bytes:
        request, body = Request(scope, receive), bytearray()
        announced = int(request.headers.get("content-length", 0))  # h11 refuses what is no number
        async for part in request.stream():
            body += part
            if max(len(body), announced) > self.limits.body:
                reason = f"the request has more than {self.limits.body} bytes"
                raise HTTPException(413, reason, {"Connection": "close"})
        return bytes(body)

    def _route(self, scope) -> str:
        """Return the path below the proxy's, which uvicorn adds and some proxies leave too, without a slash behind."""
        return re.sub(rf"^({re.escape(scope.get('root_path', ''))}){{0,2}}(?=/)", "", scope["path"]).rstrip("/") or "/"


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as LibreTranslate writes it; in ASCII, since a message may quote half a surrogate pair."""
    return Response(json.dumps({"error": message}), status, headers, "application/json")
