"""The process that serves: sockets, and the end."""

import contextlib
import errno
import socket

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import UserError

_SECONDS_FOR_HEADERS = 10
_SECONDS_TO_FINISH = 5  # beyond the time that a request may take


class _Protocol(H11Protocol):
    """Closes connections on which the header of a request, the first or a later one, does not come to its end.

    uvicorn itself limits only the time in which nothing of a later one comes.
    """

    _timer = None  # runs while a header is awaited

    def connection_made(self, transport) -> None:
        # The header and the body of an answer are two packets, of which the second would wait 40 ms for the client's
        # acknowledgement of the first. asyncio sees to that only for sockets that were made with a protocol number.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
        elif self._timer is None:
            self._timer = self.loop.call_later(_SECONDS_FOR_HEADERS, self.transport.close)


def make_server(app, seconds: float) -> uvicorn.Server:
    """The server of an application; a request may take so many seconds, also of those under way when it is to end."""
    config = uvicorn.Config(
        app, http=_Protocol, ws="none", lifespan="on", log_config=None, access_log=False, log_level="error",
        server_header=False,
        timeout_graceful_shutdown=int(seconds) + _SECONDS_TO_FINISH,
    )  # fmt: skip
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket for `uvicorn.Server.run`; port 0 takes any that is free.

    Raises:
        UserError: for an address that cannot be listened at.
    """
    _allow_many_connections()
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is in use: give another --port") from error
        raise UserError(
            f"cannot listen at {host}, port {port} ({error.strerror}): give another --host or --port"
        ) from error


def _allow_many_connections() -> None:
    """Let the process open as many files as the system allows it, where there is such a limit."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
