"""The command that serves models to other programs: `vaswani serve`."""

import signal
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..errors import UserError, reading
from .options import NOT_EMPTY, REQUIRED, SEVERAL, Computing, Path_, exclude, within

_LIMITS, _USERS = Parameter(group="limits"), Parameter(group="users")


def serve(
    *models: Annotated[Path_, REQUIRED],
    host: Annotated[str, NOT_EMPTY] = "127.0.0.1",
    port: Annotated[int, within(0, 65_535)] = 5000,
    memory: Annotated[tuple[Path_, ...], SEVERAL] = (),
    max_models: Annotated[int | None, within(1, 10**6), _LIMITS] = None,
    max_characters: Annotated[int, within(1, 10**8), _LIMITS] = 50_000,
    queue: Annotated[int, within(1, 10**8), _LIMITS] = 10_000,
    timeout: Annotated[float, within(0.1, 10**6), _LIMITS] = 60.0,
    api_keys: Annotated[Path_ | None, _USERS] = None,
    root_path: Annotated[str, _USERS] = "",
    computing: Computing = Computing(),  # noqa: B008 (of cyclopts)
) -> None:
    """Translate for other programs, over HTTP.

    LibreTranslate's interface, and /v1/translations, which is documented at /docs.

    Args:
        models: model folders, also exported to CTranslate2; en-de=MODEL where a model does not note its languages
        host: address to listen at (by default this machine only)
        port: port
        memory: files of earlier translations (TMX, TSV, ...), as for `vaswani translate`, for a server of one model
        max_models: models in memory at once (default: as many as fit, with files of a quarter of the RAM at most)
        max_characters: characters of a request
        queue: sentences and requests under way at once; further ones are refused with status 503
        timeout: seconds that a request may take
        api_keys: a key on each line (`#`: a comment), one of which a request needs (default: none is needed)
        root_path: path at which a proxy shows the server, as /translate
    """
    with reading(api_keys):
        lines = [] if api_keys is None else Path(api_keys).read_text("utf-8-sig").split("\n")
    keys = [key for key in map(str.strip, lines) if key and key[0] != "#"]
    if lines and not keys:  # a server that nobody can use, or that everybody could
        raise UserError(f"--api-keys {api_keys} holds no key: write one on each line, or leave the option out")
    with reading("serving (pip install 'vaswani_transformer[serve]')"):
        from ..serving.app import make_app
        from ..serving.server import listen, make_server
    from ..data.memory import read_memory
    from ..export.engine import load_for_decoding
    from ..serving.models import find_models
    from ..serving.service import Limits

    places = find_models(list(models))
    exclude("several models", len(places) > 1, {"memory": memory})
    with reading("--memory (pip install vaswani_transformer with its dependencies)"):  # which images may lack
        known = read_memory(memory, (places[0].source, places[0].target)) if memory else None
    app = make_app(
        places,
        partial(load_for_decoding, device=computing.device, precision=computing.precision),
        limits=Limits(max_characters, queue, timeout),
        most_models=max_models,
        tokens_per_batch=computing.tokens_per_batch,
        keys=keys,
        memory=known,
    )
    socket, server = listen(host, port), make_server(app, timeout, root_path)
    name = f"[{host}]" if ":" in host else host
    # uvicorn passes a signal on when all is done, and then nothing is left to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    print(f"serving {', '.join(place.name for place in places)} at http://{name}:{socket.getsockname()[1]}", flush=True)
    server.run(sockets=[socket])
