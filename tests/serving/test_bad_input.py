"""What strangers send: each gets a line in return, and the others go on."""

import asyncio
import contextlib
import json
import logging
import resource
import socket
import time

import httpx
import lxml.html
import pytest
import served
from children import wait_for
from served import LANGUAGES, SENTENCES, Limits, all_at_once, ask, client_of, load_in_double, running, translated

from vaswani_transformer.documents.formats import translate_document
from vaswani_transformer.serving.server import _Protocol

folder, loaded, make, post = served.folder, served.loaded, served.make, served.post

JSON, FORM = {"content-type": "application/json"}, {"content-type": "application/x-www-form-urlencoded"}
PATHS = ("/translate", "/v1/translations")


def body_of(path: str, text: str, **more) -> dict:
    return {"q" if path == "/translate" else "text": text, **LANGUAGES, **more}


def is_error(answer, status: int = 400) -> bool:
    return answer[0] == status and list(answer[1]) == ["error"] and "\n" not in answer[1]["error"]


def test_an_answer_is_sent_at_once(make, monkeypatch):
    delays, received = [], _Protocol.data_received

    def noting(self, data):
        delays.append(not self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        received(self, data)

    monkeypatch.setattr(_Protocol, "data_received", noting)
    with running(make()) as (host, port):
        httpx.get(f"http://{host}:{port}/languages")
    assert delays and not any(delays)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[1]", b'"q"', b"[" * 100_000, b'{"q": ' + b"9" * 10_000 + b"}", b"\xff\xfe{\0}\0", b"\0"],
)
def test_a_body_that_is_no_json(post, path, body):
    assert is_error(post(path, content=body, headers=JSON))


@pytest.mark.parametrize("path", PATHS)
def test_text_that_is_no_unicode(post, path):
    good = json.dumps(body_of(path, "A dog")).encode()
    assert is_error(post(path, content=good.replace(b"dog", b"d\xf6g"), headers=JSON))
    assert is_error(post(path, content=good.replace(b"dog", b"d\\ud800g"), headers=JSON))
    assert is_error(post(path, content=good.replace(b"en", b"\\udfff"), headers=JSON))
    assert post(path, content=good.replace(b"dog", b"dog \\ud83d\\ude00 \\u0000."), headers=JSON)[0] == 200


def test_forms_that_are_no_unicode(post):
    for body in (b"q=d\xf6g&source=en&target=de", b"q=d%F6g&source=en&target=de"):
        assert is_error(post("/translate", content=body, headers=FORM))
    for body in (b"--x\r\n", b"--x\r\nContent-Disposition: form-data; name=q\r\n\r\nd\xf6g\r\n--x--\r\n", b"nothing"):
        assert is_error(post("/translate", content=body, headers={"content-type": "multipart/form-data; boundary=x"}))
    assert is_error(post("/translate", content=b"q", headers={"content-type": "multipart/form-data"}))
    assert is_error(post("/translate", content=b"&".join([b"q=1"] * 1000), headers=FORM))
    assert is_error(post("/translate", files={"q": ("name", b"dog"), "source": (None, "en"), "target": (None, "de")}))


@pytest.mark.parametrize("path", PATHS)
def test_ten_megabytes(post, path):
    text = "A dog. " * 1_500_000
    assert is_error(post(path, json=body_of(path, text)), 413)

    async def chunks():
        for _ in range(1_500):
            yield b" " * 7_000
        raise AssertionError("all of it was read")

    assert is_error(post(path, content=chunks(), headers=JSON), 413)
    assert is_error(post(path, json=body_of(path, text[:60_000])))  # within the body's limit


PAGES = [
    "<script>A dog.</script><style>A dog. {}</style><b onclick='A dog. \">x'>A dog.</b><img src=x onerror=alert(1)>",
    "<p>A dog <b>and <i>a cat</b> run</i> <a href='javascript:x'>here. <textarea>A dog. </b> <script>",
    "<title>A dog. </title> A&nbsp;dog &lt;b&gt; &amp;lt;script&gt; &#60;i&#62; &#x110000; &unknown; & co, &am",
    "A dog\0 runs.<p><b\0>A dog</b> \0<\0b> a < b > c <3 <! <!-- A dog. --!> <!-> </ b> <?php A dog. ?> ]]>",
    "<svg><script>A dog.</script><a xlink:href=x>A dog</a></svg><math><mtext>A dog.</mtext></math> A dog.",
    "<p>A dog. <!-- <b>A dog.",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'></noscript> A dog.",
    '<a title="A dog. \' <b>">A dog</a x=1><br/ >A dog<select><option>A dog.</select> <plaintext> A dog. </plaintext>',
]
EVIL = "Hund <script>x</script> \"onclick=x ' --> &lt;b&gt; </b> <a b"


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_as_safe_as_they_were(page):
    """Elements and attributes that a parser finds are those that were there, whatever the model writes."""

    def elements(page):
        tree = lxml.html.document_fromstring(page.replace("\0", "\ufffd"))  # as browsers read it
        return {(str(element.tag), *map(tuple, element.items())) for element in tree.iter()}

    after = translate_document(page.encode(), "html", lambda sentences: [EVIL] * len(sentences)).decode()
    assert "Hund" in after and "<script>x" not in after and elements(after) == elements(page)
    for kept in ("<script>A dog.</script>", "<style>A dog. {}</style>", "<textarea>A dog. </b> <script>"):
        assert (kept in after) == (kept in page)


def test_a_full_queue_refuses_and_comes_back(make, loaded):
    app = make(limits=Limits(queue=20))
    answers = all_at_once(app, "/translate", [{"q": [one] * 5, **LANGUAGES} for one in SENTENCES[:12]])
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        is_refused = answer.status_code == 503
        assert answer.headers.get("retry-after") == ("1" if is_refused else None)
        assert list(answer.json()) == ["error" if is_refused else "translatedText"]
    # More than the queue has, but there is nothing else.
    last = ask(app, "POST", "/translate", json={"q": SENTENCES, **LANGUAGES})
    assert last == (200, {"translatedText": translated(loaded, SENTENCES)})


def test_too_many_requests_at_once_are_refused_before_they_are_read(make):
    async def run():
        async def slowly():
            await asyncio.sleep(10)
            yield b""

        async with client_of(make(limits=Limits(queue=2, seconds=0.2))) as client:
            answers = await asyncio.gather(*(client.post("/translate", content=slowly()) for _ in range(3)))
            last = await client.post("/translate", content=b"{", headers=JSON)
            return sorted(answer.status_code for answer in answers), last.status_code

    assert asyncio.run(run()) == ([408, 408, 503], 400)


def test_an_answer_that_takes_too_long(make):
    def load(folder):
        time.sleep(0.5)
        return load_in_double(folder)

    app = make(load=load, limits=Limits(seconds=0.2))

    async def run():
        async with client_of(app) as client:
            first = await client.post("/translate", json={"q": "A.", **LANGUAGES})
            while (await client.post("/translate", json={"q": "A.", **LANGUAGES})).status_code != 200:
                pass  # the model is loaded meanwhile
            return first.status_code, first.json()["error"]

    assert asyncio.run(run()) == (504, "answering took more than 0.2 seconds")
    assert app.state.service.models.pending == 0


def test_a_mistake_of_ours_is_reported_without_the_text(make, monkeypatch, caplog):
    def fail(self, texts):
        raise RuntimeError(f"failed on {texts}")

    monkeypatch.setattr("vaswani_transformer.serving.service.Service.check", fail)
    with caplog.at_level(logging.INFO, "vaswani_transformer"):
        answer = ask(make(), "POST", "/translate", json={"q": "My secret.", **LANGUAGES})
    assert answer == (500, {"error": "Internal Server Error"})
    assert "RuntimeError" in caplog.text and "test_bad_input" in caplog.text and "secret" not in caplog.text


def test_the_log_has_no_texts(make, caplog):
    app = make()
    with caplog.at_level(logging.INFO, "vaswani_transformer"):
        ask(app, "POST", "/translate", json={"q": "My secret\n. ", **LANGUAGES})
        ask(app, "POST", "/translate", json={"q": "My secret.", "source": "en", "target": "secret"})
        ask(app, "GET", "/secret%0A?q=secret")
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("limiter")]
    assert any("POST /translate 200" in line and 'model="en-de" characters=12' in line for line in lines)
    assert any("GET other 404" in line for line in lines)
    assert "secret" not in caplog.text and not any("\n" in line for line in lines)


def raw(address, data: bytes, half_close: bool = False) -> bytes:
    """What a server answers to bytes."""
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        parts = []
        with contextlib.suppress(ConnectionResetError):  # after an answer to what was not read to its end
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


def request(text: str, length: int | None = None) -> bytes:
    body = json.dumps({"q": text, **LANGUAGES}).encode()
    head = "POST /translate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


def test_connections_of_all_kinds(make, loaded):
    expected = translated(loaded, SENTENCES[:1])[0].encode()
    with running(make(limits=Limits(seconds=2), load=lambda folder: loaded)) as address:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # of files; both ends are in this process
        open_ones = [socket.create_connection(address) for _ in range(min(1000, most // 3))]
        for number, connection in enumerate(open_ones):
            connection.sendall([b"", b"POST /trans", request(SENTENCES[0])[:-5], b"\x16\x03\x01"][number % 4])
        assert expected in raw(address, request(SENTENCES[0]))
        assert raw(address, request(SENTENCES[0]), half_close=True) == b""  # as who has left
        assert b"408" in raw(address, request("A dog.", length=10_000))
        assert b"413" in raw(address, request("A dog.", length=10**12))
        assert b"400" in raw(address, b"GET nothing\r\n\r\n")
        assert b"400" in raw(address, b"\xff\xfe\r\n\r\n")
        assert b"40" in raw(address, b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n")
        for connection in open_ones:
            connection.close()
        assert expected in raw(address, request(SENTENCES[0]))


def is_closed(connection) -> bool:
    """Whether a server closes a connection when another letter comes, or has closed it."""
    try:
        connection.sendall(b"x")
        return connection.recv(65536) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("answers", [0, 2])
def test_headers_that_never_end(make, loaded, monkeypatch, answers):
    """The first one of a connection, and one behind an answer, which comes letter by letter."""
    monkeypatch.setattr("vaswani_transformer.serving.server._SECONDS_FOR_HEADERS", 1)
    expected = translated(loaded, SENTENCES[:1])[0].encode()
    with running(make(load=lambda folder: loaded)) as address, socket.create_connection(address, 30) as connection:
        for _ in range(answers):
            connection.sendall(request(SENTENCES[0]).replace(b"Connection: close\r\n", b""))
            received = b""
            while expected not in received:
                received += connection.recv(65536)
        connection.settimeout(0.1)  # thirty seconds in all; uvicorn's own limit counts from the last letter
        assert any(is_closed(connection) for _ in range(300))


def test_a_client_that_leaves_frees_its_place(make):
    app = make()
    models = app.state.service.models
    with running(app) as address:
        raw(address, request("A."))
        with socket.create_connection(address) as connection:
            connection.sendall(request("\n".join(SENTENCES * 20)))
            wait_for(lambda: models.pending)
            assert models.pending > 500
        deadline = time.monotonic() + 10
        while models.pending and time.monotonic() < deadline:
            time.sleep(0.005)
        (engine,) = models.loaded.values()
        assert models.pending == 0
        wait_for(lambda: not any(group.is_busy for group in engine._groups.values()))
        assert b"200 OK" in raw(address, request("A."))
