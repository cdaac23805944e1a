"""The command that serves models to other programs: `vaswani serve`."""

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from .command import add_command
from .options import add_model_options, check_options


def add_serve(commands) -> None:
    """Add `vaswani serve`."""
    parser = add_command(
        commands,
        "serve",
        _serve,
        "translate for other programs, over HTTP",
        "Translate for other programs, over HTTP: LibreTranslate's interface, and /v1/translations, which is documented"
        " at /docs.",
    )
    how = "model folder, also one exported to CTranslate2; with languages that it does not note itself, as en-de=MODEL"
    parser.add_argument("models", metavar="MODEL", nargs="+", help=how)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    parser.add_argument("--port", metavar="N", type=int, default=5000, help="port (default: 5000)")
    limits = parser.add_argument_group("limits")
    how = "models in memory at once (default: those whose files fit half of it)"
    limits.add_argument("--max-models", metavar="N", type=int, help=how)
    how = "characters of a request (default: 50,000)"
    limits.add_argument("--max-characters", metavar="N", type=int, default=50_000, help=how)
    how = "sentences under way at once; beyond it requests are refused with status 503 (default: 10,000)"
    limits.add_argument("--queue", metavar="N", type=int, default=10_000, help=how)
    how = "seconds that a request may take (default: 60)"
    limits.add_argument("--timeout", metavar="X", type=float, default=60.0, help=how)
    users = parser.add_argument_group("users")
    how = "a key on each line, one of which a request needs (default: none is needed)"
    users.add_argument("--api-keys", metavar="FILE", help=how)
    users.add_argument("--log-text", action="store_true", help="write the texts of requests into the log")
    add_model_options(parser, ensemble=False)


def _serve(arguments: argparse.Namespace) -> int:
    check_options(arguments)
    keys = _read_keys(arguments.api_keys)
    try:
        from ..serving.app import make_app
        from ..serving.server import listen, make_server
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs {error.name}: pip install 'vaswani_transformer[serve]'") from error
    from ..export.engine import load_for_decoding
    from ..serving.models import find_models
    from ..serving.service import Limits

    places = find_models(arguments.models)

    def load(folder: Path, needs: Sequence[str] = ()):
        return load_for_decoding(folder, arguments.device, arguments.precision, needs=needs)

    app = make_app(
        places,
        load,
        limits=Limits(arguments.max_characters, arguments.queue, arguments.timeout),
        most_models=arguments.max_models,
        tokens_per_batch=arguments.tokens_per_batch,
        keys=keys,
        log_text=arguments.log_text,
    )
    socket, server = listen(arguments.host, arguments.port), make_server(app, arguments.timeout)
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    print(f"serving {', '.join(place.name for place in places)} at http://{host}:{socket.getsockname()[1]}", flush=True)
    # uvicorn passes a signal on when all is done, and then nothing is left to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    server.run(sockets=[socket])
    return 0


def _read_keys(name: str | None) -> list[str]:
    if name is None:
        return []
    try:
        keys = Path(name).read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise UserError(f"--api-keys {name} is not valid UTF-8: convert it first") from error
    if not keys:
        raise UserError(f"--api-keys {name} holds no key: write one on each line, or leave the option out")
    return keys
