"""What stands before the interfaces: limits, the end of requests whose client has left, metrics, the access log."""

import json
import logging
import traceback
from collections.abc import Mapping
from time import perf_counter

import anyio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.responses import Response

from .models import RefusedError
from .service import Limits, full

logger = logging.getLogger(__name__)

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """What Prometheus reads."""

    def __init__(self, models, paths: set[str]):
        self.registry, self.paths = CollectorRegistry(), paths
        options = {"registry": self.registry}
        self.requests = Counter("vaswani_requests", "Answered requests.", ["path", "status"], **options)
        self.seconds = Histogram(
            "vaswani_request_seconds", "Time of answered requests.", ["path"], buckets=_SECONDS, **options
        )
        self.characters = Counter("vaswani_characters", "Characters of translated texts.", ["model"], **options)
        self.batches = Histogram(
            "vaswani_batch_sentences", "Sentences in each step of a search.", ["model"], buckets=_BATCHES, **options
        )
        self.under_way = Gauge("vaswani_requests_under_way", "Requests that are being answered.", **options)
        pending = Gauge("vaswani_sentences_pending", "Sentences that wait or are searched.", **options)
        pending.set_function(lambda: models.pending)
        loaded = Gauge("vaswani_models_loaded", "Models in memory.", **options)
        loaded.set_function(lambda: len(models.loaded))

    def note_batch(self, model: str, size: int) -> None:
        """Count the sentences of a step."""
        self.batches.labels(model).observe(size)

    def note(self, path: str, status: int, seconds: float) -> None:
        """Count a request that has been answered."""
        path = path if path in self.paths else "other"
        self.requests.labels(path, status).inc()
        self.seconds.labels(path).observe(seconds)


class Guard:
    """An ASGI application around another.

    It reads the body of a request within the limits, and ends the request when its client has left or its time is
    over.

    Args:
        app: the other one; it can put what is to be logged into `scope["state"]["notes"]`.
        limits: for each request.
        metrics: counts them.
        log_text: whether the log may hold what users sent.
    """

    def __init__(self, app, limits: Limits, metrics: Metrics, log_text: bool = False):
        self.app, self.limits, self.metrics, self.log_text = app, limits, metrics, log_text
        self._under_way = 0

    async def __call__(self, scope, receive, send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, notes, is_stream = perf_counter(), 0, {}, False
        scope.setdefault("state", {})["notes"] = notes

        async def noting(message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            await send(message)

        self._under_way += 1
        self.metrics.under_way.set(self._under_way)
        try:
            if self._under_way > self.limits.queue and scope["method"] == "POST":
                raise full()
            await self._answer(scope, receive, noting)
        except RefusedError as error:
            if not status:
                await error_response(error.status, str(error), error.headers)(scope, receive, noting)
            elif is_stream:
                last = f"event: error\ndata: {json.dumps({'error': str(error)})}\n\n".encode()
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except Exception as error:
            self._log_failure(error)
            if not status:
                await error_response(500, "Internal Server Error")(scope, receive, noting)
        finally:
            self._under_way -= 1
            self.metrics.under_way.set(self._under_way)
            seconds = perf_counter() - start
            self.metrics.note(scope["path"], status or 499, seconds)  # 499: nginx's number for a client that has left
            self._log(scope, status or 499, seconds, notes)

    async def _answer(self, scope, receive, send) -> None:
        """Let the application answer, as long as there is time and a client."""
        body, failure = None, None
        with anyio.move_on_after(self.limits.seconds) as timer:
            body = await self._read(scope, receive)
            async with anyio.create_task_group() as tasks:

                async def leave() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()

                messages = [{"type": "http.request", "body": body}]

                async def replay() -> dict:
                    if messages:
                        return messages.pop()
                    await anyio.sleep_forever()

                tasks.start_soon(leave)
                try:
                    await self.app(scope, replay, send)
                except Exception as error:
                    failure = error
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if timer.cancelled_caught:
            what = "sending the request" if body is None else "answering"
            raise RefusedError(408 if body is None else 504, f"{what} took more than {self.limits.seconds:g} seconds")

    async def _read(self, scope, receive) -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        parts, size = [], int(length) if length.isdigit() else 0
        is_more, limit = size <= self.limits.body, self.limits.body
        size = 0 if is_more else size
        while is_more and size <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RefusedError(400, "the client has left")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            is_more = message.get("more_body", False)
        if size > limit:
            raise RefusedError(413, f"the request has more than {limit} bytes", {"Connection": "close"})
        return b"".join(parts)

    def _log(self, scope, status: int, seconds: float, notes: dict) -> None:
        client = (scope.get("client") or ("-",))[0]
        shown = {name: value for name, value in notes.items() if name != "texts" or self.log_text}
        rest = "".join(f" {name}={json.dumps(value, ensure_ascii=False)}" for name, value in shown.items())
        path = scope["path"] if scope["path"] in self.metrics.paths else "(other)"
        logger.info(f"{client} {scope['method']} {path} {status} {1000 * seconds:.0f} ms{rest}")

    def _log_failure(self, error: Exception) -> None:
        """Log where an error came from; what it says may hold what a user sent."""
        places = "".join(traceback.format_tb(error.__traceback__))
        logger.error(f"{type(error).__name__}{f': {error}' if self.log_text else ''}\n{places}")


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as LibreTranslate writes it; in ASCII, since a message may quote half a surrogate pair."""
    return Response(json.dumps({"error": message}), status, headers, "application/json")
