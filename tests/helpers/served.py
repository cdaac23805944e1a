"""What the tests of the server share: an application with a small model, clients, and what they must get."""

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from exporting_models import PAIRS, small_tokenizer
from model_folders import save

from vaswani_transformer import Translator, load_model

try:
    import httpx
    import python_multipart  # noqa: F401

    from vaswani_transformer.serving.app import make_app
    from vaswani_transformer.serving.engine import Engine
    from vaswani_transformer.serving.models import find_models
    from vaswani_transformer.serving.server import listen, make_server
    from vaswani_transformer.serving.service import Limits  # noqa: F401 - for the tests
except ModuleNotFoundError as error:
    reason = f"serving needs {error.name}: pip install 'vaswani_transformer[serve,test]'"
    pytest.skip(reason, allow_module_level=True)

LANGUAGES = {"source": "en", "target": "de"}
SENTENCES = sorted({source for source, _ in PAIRS}, key=lambda source: (len(source), source))[:40]  # the shortest


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of a model with random weights, whose nonsense is whole letters and differs from source to source."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), small_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 100, "seed": 1, "scale": 3.0}
    model = tiny_model(**sizes, tie_word_embeddings=False, output_bias=True)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    with torch.no_grad():
        model.lm_head.bias[[token for token, text in enumerate(texts) if not text.strip().isalpha()]] = -100.0
        model.lm_head.bias[tokenizer.eos_token_id] = 2.0
    model.generation_config.update(num_beams=4, length_penalty=0.6, max_extra_tokens=5)
    save(folder, model, tokenizer)
    lines = translated(load_in_double(folder), SENTENCES)
    assert len(set(lines)) > 15 and len({len(line) for line in lines}) > 6
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    """Model and tokenizer, in double precision: no order of sums decides between two hypotheses."""
    return load_in_double(folder)


def load_in_double(folder: Path):
    model, tokenizer = load_model(folder, "cpu")
    return model.double(), tokenizer


@pytest.fixture
def engine(loaded):
    engine = Engine(*loaded, tokens_per_batch=400)
    yield engine
    engine.close()


@pytest.fixture
def make(folder):
    """Makes applications with this model, and with others by name."""
    apps = []

    def call(*names, load=load_in_double, **options):
        apps.append(make_app(find_models(names or [f"en-de={folder}"]), load, **options))
        return apps[-1]

    yield call
    for app in apps:
        asyncio.run(app.state.service.models.close())


@pytest.fixture
def post(make):
    """Posts to a new application: `post(path, json=...)` gives status and answer."""
    app = make()
    return lambda path, **request: ask(app, "POST", path, **request)


def client_of(app) -> httpx.AsyncClient:
    """A client in the same process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server", timeout=60)


def request(app, method: str, path: str, **content) -> httpx.Response:

    async def call():
        async with client_of(app) as client:
            return await client.request(method, path, **content)

    return asyncio.run(call())


def all_at_once(app, path: str, bodies: list[dict], **options) -> list[httpx.Response]:
    """The responses to requests that are posted together."""

    async def call():
        async with client_of(app) as client:
            return await asyncio.gather(*(client.post(path, json=body, **options) for body in bodies))

    return asyncio.run(call())


def ask(app, method: str, path: str, **content):
    """The status and the answer of one request, from JSON."""
    response = request(app, method, path, **content)
    return response.status_code, response.json()


def translated(loaded, sentences, **options) -> list[str]:
    """What the model alone translates sentences to."""
    return list(Translator(*loaded, **options).translate(sentences))


@contextlib.contextmanager
def running(app, root_path: str = ""):
    """The address of a server in a thread."""
    socket, server = listen("127.0.0.1", 0), make_server(app, 60, root_path)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        yield socket.getsockname()
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()
