"""LibreTranslate's translation of files, by the requests of its clients."""

import asyncio
import io
import json
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import served
from served import LANGUAGES, SENTENCES, ask, client_of, running

from vaswani_transformer.data.memory import Memory
from vaswani_transformer.decoding.translator import Translator
from vaswani_transformer.documents.formats import aligner, translate_document
from vaswani_transformer.serving.service import Limits

folder, loaded, make = served.folder, served.loaded, served.make

PO = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n#, c-format\nmsgid "{} %s"\nmsgstr ""\n'


def test_a_document_and_a_catalogue(make, loaded):
    page = f"<p>{SENTENCES[0]}</p>\n<pre>x</pre>".encode()
    with running(make()) as (host, port), httpx.Client(base_url=f"http://{host}:{port}", timeout=60) as client:
        for name, data in (("a page #1?.HTML", page), ("de.po", PO.format(SENTENCES[1]).encode())):
            answer = client.post("/translate_file", data=LANGUAGES, files={"file": (name, data)})
            assert answer.status_code == 200, answer.text
            url = answer.json()["translatedFileUrl"]
            got = client.get(url)
            assert not set(url) & set(" #?")
            assert got.status_code == 200 and "filename*=UTF-8''" in got.headers["content-disposition"]
            if name == "de.po":
                assert "#, fuzzy, c-format" in got.text and got.text.count("%s") == 2
            else:
                translate = lambda texts: list(Translator(*loaded).translate(texts))  # noqa: E731
                assert got.content == translate_document(page, "html", translate, aligner(*loaded))
        assert client.get("/download_file/x/de.po").status_code == 404


def test_an_entry_of_a_catalogue_is_looked_up_in_its_context(make):
    pairs, contexts = [("Open", "Öffnen"), ("Open", "Offen")], {"Open": {"menu": "Öffnen", "state": "Offen"}}
    app = make(memory=Memory(pairs, contexts))
    data = PO.format("A") + "".join(f'\nmsgctxt "{each}"\nmsgid "Open"\nmsgstr ""\n' for each in contexts["Open"])
    ask(app, "POST", "/translate_file", data=LANGUAGES, files={"file": ("de.po", data.encode())})
    [(_, result)] = app.state.files.values()
    assert re.findall('msgstr "(.+)"', result.decode())[-2:] == ["Öffnen", "Offen"]


def test_a_file_may_have_more_characters_than_a_request_and_its_language_at_its_root(make):
    app, text = make(limits=Limits(characters=60)), "\n".join(SENTENCES[:6])
    assert len(text) > 100
    for name, data in (("a.txt", text), (".po", ""), ("en.JSON", '{"en": {"a": "' + SENTENCES[0] + '"}}')):
        status, answer = ask(app, "POST", "/translate_file", data=LANGUAGES, files={"file": (name, data.encode())})
        assert status == 200, answer
    [(_, result)] = list(app.state.files.values())[2:]
    assert list(json.loads(result)) == ["de"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [("a.exe", b"", "to be one of .txt"), ("a.docx", b"\xff", "not a Word"), ("a.markdown", b"\xff", "valid UTF-8"),
     ("a.po", b"\xff\xfe\0", "request: the file: 'utf-16"), ("a.json", b"{", "request: the file: ")],
)  # fmt: skip
def test_what_is_no_file_of_a_format(make, name, data, message):
    status, answer = ask(make(), "POST", "/translate_file", data=LANGUAGES, files={"file": (name, data)})
    assert status == 400 and message in answer["error"]
    assert ask(make(), "POST", "/translate_file", data=LANGUAGES)[0] == 400
    answer = ask(make(), "POST", "/translate_file", data={}, files={"file": ("a.txt", data)})[1]
    assert answer["error"] == "Invalid request: target: Field required"


def test_files_take_no_thread_from_their_sentences(make):
    """Or as many files as there are threads would wait for each other without end."""

    async def call(app) -> list[int]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        files = {"file": ("a.txt", SENTENCES[0].encode())}
        async with client_of(app) as client:
            posts = (client.post("/translate_file", data=LANGUAGES, files=files) for _ in range(3))
            return [answer.status_code for answer in await asyncio.wait_for(asyncio.gather(*posts), 30)]

    assert asyncio.run(call(make())) == [200] * 3


def test_an_office_file_that_is_small_only_while_it_is_packed(make):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b"<a>" + b"<b/>" * 1_000_000 + b"</a>")
    files = {"file": ("a.docx", packed.getvalue())}
    status, answer = ask(make(), "POST", "/translate_file", data=LANGUAGES, files=files)
    assert status == 413 and "has 4000007 bytes unpacked" in answer["error"]
