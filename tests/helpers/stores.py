"""An object store on this machine, with the methods of S3, for tests of text and folders that lie in one."""

import http.server
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from vaswani_transformer.files import to_path


@pytest.fixture(scope="module")
def store():
    """The URL of a new bucket; other processes of a test reach it too."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # or a line a request
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "us", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        forget()
        bucket = f"corpora-{secrets.token_hex(4)}"  # all servers of a process have the same buckets
        to_path(f"s3://{bucket}").fs.mkdir(bucket)
        yield f"s3://{bucket}"
    forget()
    server.stop()


def forget() -> None:
    """Let new paths connect anew, by the environment as it is then."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def web_server(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A web server that answers every request by a function; yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            answer(self)

        do_HEAD = do_PUT = do_POST = do_GET

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def refuse(status: int) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    """Answers with this status and nothing else."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer
