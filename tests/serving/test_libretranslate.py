"""LibreTranslate's interface: its own tests' requests, those of its clients, and its errors."""

import json
import subprocess
import sys
from functools import partial
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import httpx
import pytest
import served
from served import LANGUAGES, SENTENCES, ask, running, translated
from starlette.exceptions import HTTPException

from vaswani_transformer.documents.formats import aligner, translate_document
from vaswani_transformer.serving.service import SplitText

folder, loaded, make, post = served.folder, served.loaded, served.make, served.post


def error_of(answer) -> str:
    status, body = answer
    assert status == 400 and list(body) == ["error"]
    return body["error"]


def test_a_text_a_list_and_a_form(post, loaded):
    first, second = translated(loaded, SENTENCES[:2])
    assert post("/translate", json={"q": SENTENCES[0], **LANGUAGES}) == (200, {"translatedText": first})
    for format in ("text", ""):
        form = {"q": SENTENCES[0], "format": format, **LANGUAGES}
        assert post("/translate", data=form) == (200, {"translatedText": first})
    parts = {"q": (None, SENTENCES[0]), "source": (None, "en"), "target": (None, "de")}
    assert post("/translate", files=parts) == (200, {"translatedText": first})
    assert post("/translate", params={"q": SENTENCES[0]}, data=LANGUAGES) == (200, {"translatedText": first})
    both, files = {"q": SENTENCES[:2], **LANGUAGES}, [("q", (None, text)) for text in SENTENCES[:2]]
    for request in ({"json": both | {"format": "text"}}, {"json": {"q": both["q"]}, "params": LANGUAGES},
                    {"data": both}, {"params": both}, {"files": files, "params": LANGUAGES},
                    {"params": {"q": both["q"][0]}, "data": both | {"q": both["q"][1]}}):  # fmt: skip
        assert post("/translate", **request) == (200, {"translatedText": [first, second]})
    assert error_of(post("/translate", data=both, params={"target": "fr"})).startswith("Invalid request: target")


def test_sentences_and_the_space_between_them(post, loaded):
    one, two, three = SENTENCES[:3]
    text = f"  {one}  {two}\n\n\t{three}\r\n"
    expected = translated(loaded, [one, two, three])
    answer = post("/translate", json={"q": text, **LANGUAGES})[1]
    assert answer == {"translatedText": "  {}  {}\n\n\t{}\r\n".format(*expected)}
    assert post("/translate", data={"q": "\r\n", **LANGUAGES})[1] == {"translatedText": "\n"}  # as browsers send lines
    # A model would invent something for what has no letters.
    text, expected = "♥ {} 7:15! {} (👩🏽‍🚀) ... \n{} 🇫🇷🎈?", translated(loaded, [one, two[:-1], three])
    answer = post("/translate", json={"q": text.format(one, two[:-1], three), **LANGUAGES})[1]
    assert answer == {"translatedText": text.format(*expected)}
    blank = ["", " ", "\n \n", "\u3000", "7", "…", "¡!", "3 × 4 = 12.", "1,5 %\n– 6 –", "🐈‍⬛", "☎ +49 30", "１２。"]
    blank += ["https://example.org/a?b=see%20me", "{name}: %d", "me@example.org"]
    assert post("/translate", json={"q": blank, **LANGUAGES}) == (200, {"translatedText": blank})
    skipped = SplitText("http://a.de/Hello. Hello", "en", lambda text, *_: [text])  # the first has no words
    assert skipped.joined(["Hallo"]) == "http://a.de/Hello. Hallo"
    known = SplitText(" Next → ", "en", lambda text, *_: [text], is_known=True)
    assert (known.coded(0), known.joined(["Weiter ⇒"])) == ("Next →", " Weiter ⇒ ")
    row = SplitText("Ann\t12\tBlue car", "en", lambda text, *_: [text])
    assert (row.sentences, row.joined(["Anna", "Blaues Auto"])) == (["Ann", "Blue car"], "Anna\t12\tBlaues Auto")
    japanese = SplitText("猫が寝る。犬が走る。", "ja", lambda text, *_: [text])
    assert [japanese.joined([text, text]) for text in ("Yes…", "好……")] == ["Yes… Yes…", "好……好……"]


def test_alternatives(post, loaded):
    texts = [SENTENCES[0], " ".join(SENTENCES[1:3])]
    answer = post("/translate", json={"q": texts, "alternatives": 2, **LANGUAGES})[1]
    lists = list(served.Translator(*loaded, num_return_sequences=3).hypotheses(SENTENCES[:3]))
    first = [one.text for one in lists[0]]
    both = [f"{one.text} {two.text}" for one, two in zip(*lists[1:], strict=True)]
    assert answer["translatedText"] == [first[0], both[0]]
    assert answer["alternatives"] == [[one for one in own[1:] if one != own[0]] for own in (first, both)]
    answer = post("/translate", data={"q": texts[0], "alternatives": "2", **LANGUAGES})[1]
    assert answer["alternatives"] == first[1:]
    assert "alternatives" not in post("/translate", json={"q": texts[0], "alternatives": 0, **LANGUAGES})[1]


def test_languages_and_settings(make, folder):
    app = make(f"en-de={folder}", f"en-pt-BR={folder}", f"xx_yy-en={folder}", f"fra-hsb={folder}")
    own = {"en": ("English", ["de", "pt-BR"]), "xx-yy": ("Xx-Yy", ["en"])}
    own |= {"de": ("German", []), "pt-BR": ("Portuguese", []), "fra": ("French", ["hsb"]), "hsb": ("Upper Sorbian", [])}
    listed = ask(app, "GET", "/languages")[1]
    assert {one["code"]: (one["name"], one["targets"]) for one in listed} == own
    assert ask(app, "GET", "/health") == (200, {"status": "ok"})
    settings = ask(app, "GET", "/frontend/settings")[1]
    assert settings["charLimit"] == 50_000 and settings["keyRequired"] is False
    assert settings["language"]["target"] == {"code": "de", "name": "German"}
    assert list(settings["details"]) == ["en-de", "en-pt-BR", "xx-yy-en", "fra-hsb"]
    assert settings["details"]["en-de"] == {"alignments": True, "confidence": True}
    assert ask(app, "POST", "/translate", json={"q": "A dog.", "source": "EN", "target": "PT-br"})[0] == 200


def test_codes_of_languages_stand_for_what_they_imply(make, folder):
    names = ("zh", "zh-TW", "nb", "sr-Latn", "he", "pt-BR", "de")
    service = make(*(f"en-{name}={folder}" for name in names), f"zh_Hant-en={folder}").state.service
    asked = {"zh-Hans": "zh", "zh_CN": "zh", "zho_Hans": "zh", "zh-Hant": "zh-TW", "zh-HK": "zh-TW", "zh_tw": "zh-TW",
             "no": "nb", "sr": "sr-Latn", "iw": "he", "pt": "pt-BR", "pt_PT": "pt-BR", "deu": "de"}  # fmt: skip
    assert {code: service.model_for("EN_gb", code).target for code in asked} == asked
    assert service.model_for("zh", "en-US") == service.model_for("zh-TW", "en") == service.model_for("auto", "eng")
    for source, target in (("en", "sr-Cyrl"), ("zh-Hans", "en"), ("en", "fr"), ("en", "z h"), ("\ud800", "en")):
        with pytest.raises(HTTPException, match="400"):
            service.model_for(source, target)


def test_a_text_in_the_target_language_stays(make, folder, loaded):
    for source, target, format in (("de", "de", "text"), ("EN", "en_GB", "html")):
        request = {"q": ["Two dogs. <b>7", " A\r\ncat"], "source": source, "target": target, "format": format}
        assert ask(make(), "POST", "/translate", json=request) == (200, {"translatedText": request["q"]})
    assert ask(make(), "POST", "/translate", json=request | {"source": "fr", "target": "fr"})[0] == 400
    request = {"q": SENTENCES[0], "source": "en", "target": "en"}
    own = ask(make(f"en-en={folder}"), "POST", "/translate", json=request)[1]
    assert own == {"translatedText": translated(loaded, SENTENCES[:1])[0]}


@pytest.mark.parametrize("root_path", ["", "mt/", "/translate"])
def test_head_and_get_also_below_the_path_of_a_proxy(make, root_path):
    """Some proxies take their path off, some leave it, and a slash at the end leads nowhere else."""
    app, outside = make(), f"/{root_path}".replace("//", "/").rstrip("/")
    with running(app, root_path) as (host, port), httpx.Client(base_url=f"http://{host}:{port}") as client:
        for before in {"", outside}:
            for path in ("/health", "/languages/", "/frontend/settings", "/docs", "/openapi.json", "/page.js"):
                got, head = client.get(f"{before}{path}"), client.head(f"{before}{path}")
                assert (got.status_code, head.status_code, head.content) == (200, 200, b"") and got.content
                assert head.headers["content-length"] == got.headers["content-length"]
            assert client.head(f"{before}/metrics").status_code == client.head(f"{before}/").status_code == 200
            assert f"'{outside}/openapi.json'" in client.get(f"{before}/docs/").text
            assert client.head(f"{before}/v1/translations").status_code == 405
            assert client.post(f"{before}/translate", json={"q": "A.", **LANGUAGES}).status_code == 200
        assert 'path="/translate",status="200"} ' in client.get("/metrics").text
        asked = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}  # by pages of other sites
        before = client.options("/translate", headers=asked | {"Access-Control-Request-Headers": "Content-Type"})
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize(
    ("served", "text", "found"),
    [
        (["nb-en"], "Hunden løper gjennom skogen og leker med barna hver dag.", "nb"),  # which the detector calls no
        (["fil-en"], "Magandang umaga sa inyong lahat, kumusta na kayo ngayon?", "fil"),  # tl
        (["ny-en"], "Ine ndikupita ku msika lero kukagula chakudya.", "ny"),  # unknown to it
        (["de-en"], "El perro corre por el bosque y juega con los niños.", "de"),  # which nothing here is
        (["es-en"], "<b class='title'>Mira</b> esto: https://en.wikipedia.org/wiki/History_of_the_United_States", "es"),
        (["zh-en"], "详情请访问https://example.com/path了解更多信息，谢谢大家的支持。", "zh"),
        (["en-pt-BR", "en-pt-PT"], "O cachorro corre pela floresta e brinca com as crianças todos os dias.", "pt-BR"),
    ],
)
def test_only_what_is_clearly_in_the_target_language_stays(make, folder, loaded, served, text, found):
    body = {"q": text, "source": "auto", "target": "pt-BR" if found == "pt-BR" else "en"}
    answer = ask(make(*(f"{name}={folder}" for name in served)), "POST", "/translate", json=body)[1]
    assert answer["translatedText"] == (text if found == "pt-BR" else translated(loaded, [text])[0])
    assert answer["detectedLanguage"]["language"] == found


def test_languages_are_detected_among_those_that_are_served(make, folder, loaded):
    app = make(f"en-de={folder}", f"fr-de={folder}", f"de-en={folder}")
    texts = {"en": SENTENCES[0], "fr": "Deux chiens jouent dans la neige devant la maison."}
    for code, text in texts.items():
        status, found = ask(app, "POST", "/detect", data={"q": text})
        assert status == 200 and found[0]["language"] == code and found[0]["confidence"] > 80
        assert {each["language"] for each in found} == {"en", "de", "fr"}
        answer = ask(app, "POST", "/translate", json={"q": [text] * 2, "source": "auto", "target": "de"})[1]
        assert answer["translatedText"] == translated(loaded, [text] * 2)
        assert [each["language"] for each in answer["detectedLanguage"]] == [code] * 2
    german = "Zwei Hunde spielen im Schnee vor dem Haus."
    answer = ask(app, "POST", "/translate", data={"q": german, "source": "auto", "target": "de"})[1]
    assert answer["translatedText"] == german and answer["detectedLanguage"]["language"] == "de"
    for text in ("Chat", "12", ""):  # too little to let it stay
        status, answer = ask(app, "POST", "/translate", json={"q": [text], "source": "auto", "target": "de"})
        assert answer["detectedLanguage"][0]["language"] in ("en", "fr")
    body = {"q": texts["en"], "source": "auto", "target": "en"}
    answer = ask(make(f"en_US-en_GB={folder}"), "POST", "/translate", json=body)[1]
    assert answer["detectedLanguage"]["language"] == "en-US"
    for wrong in ({"q": 5}, {"q": ["A.", 3]}, {"q": []}, {}):
        assert error_of(ask(app, "POST", "/detect", json=wrong)).startswith("Invalid request: q")
    for target in ("zz", "auto"):
        line = error_of(ask(app, "POST", "/translate", json={"q": "A.", "source": "auto", "target": target}))
        assert line == f"auto to {target} is not supported: there are en-de, fr-de, de-en"


def test_errors_have_its_form_and_its_words(post):
    def error(**fields):
        return error_of(post("/translate", json={"q": "A dog.", **LANGUAGES, **fields}))

    for name in ("q", "source", "target"):
        assert error(**{name: None}) == error(**{name: ""}) == f"Invalid request: {name}: Field required"
        assert error(**{name: {"a": 1}}).startswith(f"Invalid request: {name}")
    assert error(target="zz") == "en to zz is not supported: there are en-de"
    assert error(source="de", target="en") == "de to en is not supported: there are en-de"
    for wrong in ({"format": "rtf"}, {"alternatives": "x"}, {"alternatives": 11}, {"q": ["A.", 3]}, {"q": []}):
        assert error(**wrong).startswith(f"Invalid request: {next(iter(wrong))}")
    assert error(q=["x" * 25_000, "x" * 25_001]) == "Invalid request: request (50001) exceeds text limit (50000)"
    assert error_of(post("/translate", data=LANGUAGES)) == "Invalid request: q: Field required"


def test_pages_of_html(post, loaded):
    """As the package translates documents; alternatives are empty, as LibreTranslate's are."""
    texts = [f"<p>{SENTENCES[0]} {SENTENCES[1]}</p><script>{SENTENCES[0]}</script>", "<b>A dog</b> and a <i>cat</i>."]
    align, translate = aligner(*loaded), partial(translated, loaded)
    expected = [translate_document(text.encode(), "html", translate, align).decode() for text in texts]
    request = {"q": texts, "format": "html", "alternatives": 2, **LANGUAGES}
    assert post("/translate", json=request) == (200, {"translatedText": expected, "alternatives": [[], []]})
    assert "<b>" in expected[1] and expected[0].endswith(texts[0][-20:])
    request = {"q": texts[1], "format": "html", **LANGUAGES}
    assert post("/translate", data=request) == (200, {"translatedText": expected[1]})


def test_its_clients(make, loaded):
    name, key = "libretranslatepy", "secret"
    libretranslatepy = pytest.importorskip(name, reason=f"needs {name}: pip install 'vaswani_transformer[test]'")
    with running(make(keys=[key])) as (host, port):
        address, expected = f"http://{host}:{port}", translated(loaded, SENTENCES[:1])[0]
        client = libretranslatepy.LibreTranslateAPI(address, api_key=key)
        assert client.translate(SENTENCES[0], "en", "de") == expected
        assert [one["code"] for one in client.languages()] == ["en", "de"]
        assert client.detect(SENTENCES[0])[0]["language"] == "en"
        # OmegaT's plugin (omegat-libre-translate 0.2.0), which knows no keys, and reads an answer as this does.
        body = urlencode({"q": f"<b0>{SENTENCES[0]}</b0><t1/> – 3 & 4 €", **LANGUAGES}).encode()
        asked = Request(f"{address}/translate?format=html&api_key={key}", body, {"Accept": "text/html, */*; q=0.2"})
        with urlopen(asked) as answer:
            text = json.loads(answer.read().decode(answer.headers.get_content_charset("iso-8859-1")))["translatedText"]
        assert text == f"<b0>{expected}</b0><t1/> – 3 & 4 €"


def test_keys(make):
    app = make(keys=["first", "second", "clé", "voilà"])
    body = {"q": "A dog.", **LANGUAGES}
    assert ask(app, "POST", "/translate", json=body | {"api_key": "second"})[0] == 200
    for key in ("third", "firs", "first2", 7, ["first"], "\ud800"):
        wrong = ask(app, "POST", "/translate", content=json.dumps(body | {"api_key": key}).encode(),
                    headers={"content-type": "application/json"})  # fmt: skip
        assert wrong == (403, {"error": "Invalid API key"})
    for header in ("bearer first", "BEARER  second ", b"Bearer cl\xc3\xa9", b"Bearer voil\xc3\xa0"):
        assert ask(app, "POST", "/translate", json=body, headers={"Authorization": header})[0] == 200
    assert error_of(ask(app, "POST", "/translate", json=body)) == "Please contact the server operator to get an API key"
    wanted = {"text": "A dog.", "target": "de"}
    assert ask(app, "POST", "/v1/translations", json=wanted)[0] == 400
    assert ask(app, "POST", "/v1/translations", json=wanted, headers={"Authorization": "Bearer second"})[0] == 200
    assert ask(app, "GET", "/frontend/settings")[1]["keyRequired"] is True


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    pytest.importorskip("ctranslate2", reason="needs CTranslate2: pip install 'vaswani_transformer[ctranslate2]'")
    from vaswani_transformer import export_model

    export_model(folder, exported := tmp_path_factory.mktemp("export") / "exported")
    return exported


def test_an_exported_model(make, exported):
    from exporting_models import exported_translator

    from vaswani_transformer.export.engine import load_exported

    app = make(f"en-de={exported}", load=lambda folder: load_exported(folder, "cpu"))
    answer = ask(app, "POST", "/translate", json={"q": SENTENCES[:9], **LANGUAGES})[1]
    assert answer["translatedText"] == list(exported_translator(exported).translate(SENTENCES[:9]))
    wanted = {"text": SENTENCES[0], "target": "de"}
    answer = ask(app, "POST", "/v1/translations", json=wanted | {"nbest": 2, "scores": True, "confidence": True})[1]
    assert answer["precision"] == "float32" and len(answer["translations"][0]["sentences"][0]["translations"]) == 2
    for what in ({"alignments": True}, {"prefix": "Ein"}):
        line = error_of(ask(app, "POST", "/v1/translations", json=wanted | what))
        assert "exported model" in line and ": leave " in line


def test_an_exported_model_is_served_without_torch(exported):
    code = f"""
import asyncio, sys
import httpx, psutil
from vaswani_transformer.export.engine import load_for_decoding
from vaswani_transformer.serving.app import make_app
from vaswani_transformer.serving.models import find_models

async def ask():
    load = lambda folder, needs=(): load_for_decoding(folder, "cpu", "auto", needs=needs)
    app = make_app(find_models(["en-de={exported}"]), load)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        for format in ("text", "html"):
            body = dict(q="<b>A</b> dog.", source="en", target="de", format=format)
            (await client.post("/translate", json=body)).raise_for_status()
        body = dict(text="A dog.", target="de", scores=True, confidence=True, token_scores=True)
        (await client.post("/v1/translations", json=body)).raise_for_status()
        for path in ("/languages", "/frontend/settings", "/metrics", "/"):
            (await client.get(path)).raise_for_status()
    await app.state.service.models.close()

asyncio.run(ask())
print(*sorted({{"torch", "transformers", "datasets"}} & set(sys.modules)))
print(psutil.Process().memory_info().rss)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=100)
    imported, size = done.stdout.splitlines()
    assert imported == "" and int(size) < 200e6
