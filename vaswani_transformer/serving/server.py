"""The process that serves: its socket, and what uvicorn does not limit."""

import contextlib
import socket

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import reading

_SECONDS_FOR_HEADERS = 10
_TO_FINISH = 5  # beyond the time that a request may take


class _Protocol(H11Protocol):
    """Close connections on which the header of a request, the first or a later one, does not come to its end.

    uvicorn 0.54 itself limits only the time in which nothing of a later one comes.
    """

    _timer = None  # runs while a header is awaited

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        awaits_header = self.conn.their_state is h11.IDLE
        if self._timer is not None and not awaits_header:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and awaits_header:
            self._timer = self.loop.call_later(_SECONDS_FOR_HEADERS, self.transport.close)


def make_server(app, seconds: float, root: str = "") -> uvicorn.Server:
    """Return the server of an application; when it is to end, requests under way get `seconds`, as any request does."""
    return uvicorn.Server(uvicorn.Config(
        app, http=_Protocol, root_path=f"/{root.strip('/')}".rstrip("/"), ws="none", lifespan="on", log_config=None,
        access_log=False, log_level="error", server_header=False, timeout_graceful_shutdown=int(seconds) + _TO_FINISH,
        timeout_keep_alive=95,  # longer than proxies keep their connections
    ))  # fmt: skip


def listen(host: str, port: int) -> socket.socket:
    """Return a socket for `uvicorn.Server.run`, for port 0 any that is free; `UserError` if it cannot listen there."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # as many connections as the system allows
    family = socket.AF_INET6 if (is_v6 := ":" in host) else socket.AF_INET
    with reading(f"cannot listen at --host {host} --port {port}"):
        dualstack = is_v6 and socket.has_dualstack_ipv6()
        listening = socket.create_server((host, port), family=family, dualstack_ipv6=dualstack)
    # Header and body of an answer are two packets; the second would wait 40 ms for the client's acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
