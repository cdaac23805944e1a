"""`vaswani translate --format`: documents translated by a model, and what is refused."""

import io
import json
import re
import sys
import zipfile
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import translating
from document_files import body, translated, word_file
from document_files import run as run_of
from model_folders import write_model
from translating import run

from vaswani_transformer import Translator, UserError, align, load_model
from vaswani_transformer.decoding.translator import Hypothesis
from vaswani_transformer.documents.formats import FORMATS, aligner, translate_document

model = translating.model

HTML = "<h1>Two dogs</h1>\n<p>The red bird sleeps. Every <b>small cat</b> sees\n it.</p><script>A dog.</script>\n"


@pytest.fixture(scope="module")
def translator(model):
    return Translator(*load_model(model, "cpu"))


def test_a_page_and_a_word_file(model, translator, tmp_path, monkeypatch, capsysbinary):
    (tmp_path / "in.html").write_text(HTML)
    command = ["translate", model, "--device", "cpu", "--format", "html"]
    assert run(*command, "--input", tmp_path / "in.html", "--output", tmp_path / "out.html") == 0
    result = (tmp_path / "out.html").read_text()
    sentences = ["Two dogs", "The red bird sleeps.", "Every small cat sees it."]
    first, second, third = translator.translate(sentences)
    start, end = f"<h1>{first}</h1>\n<p>{second} ", "</p><script>A dog.</script>\n"
    assert result.startswith(start) and result.endswith(end)
    marked = result[len(start) : -len(end)]
    assert re.sub("</?b>", "", marked) == third
    (links,) = align(translator.model, translator.tokenizer, sentences[2:], [third])
    bold = {target for source, target in links if source in (1, 2)}
    if bold:
        words = [word for span in re.findall("<b>(.*?)</b>", marked) for word in span.split()]
        assert words == [third.split()[target] for target in sorted(bold)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(HTML.encode())))
    assert run(*command) == 0
    assert capsysbinary.readouterr().out.decode() == result
    (tmp_path / "in.docx").write_bytes(word_file(f"<w:p>{run_of('Two dogs')}</w:p>"))
    command = ["translate", model, "--device", "cpu", "--input", tmp_path / "in.docx"]
    assert run(*command, "--output", tmp_path / "out.docx") == 0
    assert body((tmp_path / "out.docx").read_bytes()) == f"<w:p>{run_of(*translator.translate(['Two dogs']))}</w:p>"


def test_the_language_is_that_of_the_model(model, tmp_path, monkeypatch):
    """In German a date's number ends no sentence."""
    (tmp_path / "in").write_text("Am 3. Oktober.")
    sentences = []

    def hypotheses(translator, texts, *rest, **options):
        sentences[:] = texts
        return [[Hypothesis(text)] for text in texts]

    monkeypatch.setattr(Translator, "hypotheses", hypotheses)
    command = ["--device", "cpu", "--format", "paragraphs", "--input", tmp_path / "in"]
    for options, expected in (([], ["Am 3.", "Oktober."]), (["--source-language", "de"], ["Am 3. Oktober."])):
        assert run("translate", model, *command, *options, "--output", tmp_path / "out") == 0
        assert sentences == expected
    (imported := tmp_path / "imported").mkdir()
    for path in model.iterdir():
        (imported / path.name).symlink_to(path)
    facts = {"toolkit": "Marian", "source": "x", "notes": [], "languages": ["de", "en"]}
    (imported / "import.json").write_text(json.dumps(facts))
    assert run("translate", imported, *command, "--output", tmp_path / "out") == 0
    assert sentences == ["Am 3. Oktober."]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["A dog."], "--format html and --SENTENCE cannot be combined"),
        (["--nbest", "2"], "and --nbest cannot be combined"),
        (["--input", "PAGE", "--output", "out", "--resume"], "and --resume cannot be combined"),
        (["--input", "MISSING"], "MISSING: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_lines_are_refused(tmp_path, monkeypatch, fails, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "PAGE").write_text(HTML)
    assert message in fails("translate", "MODEL", "--format", "html", *options)


def archive(*names, content=b"<a"):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as entries:
        for name in names:
            entries.writestr(name, content)
    return data.getvalue()


@pytest.mark.parametrize(
    ("format", "data", "message"),
    [
        ("html", b"<p>\nW\xf6rter", "line 2 is not valid UTF-8"),
        ("srt", b"A dog.\n", "no line such as 00:00:01,000"),
        ("docx", b"", "not a Word file"),
        ("docx", b"<p>A dog.</p>", "not a Word file"),
        ("docx", word_file("<w:p/>")[:-80], "not a Word file"),
        ("docx", archive("content.xml"), "no item named 'word/document.xml'"),
        ("docx", archive("word/document.xml"), "word/document.xml of the file is damaged"),
        ("docx", archive("xl/a", "_rels/.rels", content=b'<a><b Type="/officeDocument" Target="xl/a"/></a>'), "item"),
        ("docx", archive("word/document.xml", content="<a>ü</a>".encode("latin-1")), "is damaged"),
        ("docx", archive("word/document.xml", content=b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'), "document type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_document_is_refused_before_a_model_is_loaded(tmp_path, fails, format, data, message):
    (tmp_path / "in").write_bytes(data)
    assert message in fails("translate", "MODEL", "--format", format, "--input", tmp_path / "in")


@pytest.mark.parametrize("format", FORMATS[:-3])
def test_nothing_to_translate_needs_no_model_and_markdown_its_library(tmp_path, monkeypatch, format):
    for text in (b"", b"\n \n"):
        if not (format in ("srt", "vtt") and text):
            (tmp_path / "in").write_bytes(text)
            files = ["--input", tmp_path / "in", "--output", tmp_path / "out"]
            assert run("translate", "MODEL", "--format", format, *files) == 0
            assert (tmp_path / "out").read_bytes() == text
    monkeypatch.setitem(sys.modules, "pyromark", None)
    with pytest.raises(UserError, match="pip install") if format == "markdown" else nullcontext():
        translate_document(b"WEBVTT\n\n00:01.0 --> 00:02.0\nA dog.", format, list)


def test_texts_without_full_stops_are_cut():
    """As a sentence the model would get all of them at once."""
    longest = []
    for text in ("word " * 2000, "x" * 5000, "<b>" * 3000 + "deep " * 3000):
        assert translated(text, "html", lambda part: longest.extend(map(len, part)) or part) == text
    assert max(longest) == 2000


@pytest.mark.timeout(60)  # with each of these in quadratic time it is over for minutes
def test_markup_that_is_made_to_be_slow():
    parts = ("<a ", "<![CDATA[", "<b>", "</b>x ", "<b><i>x</b></i>", "{", "a@", "<p translate=no>", "<img>")
    for text in (*(part * 5_000 for part in parts), "<!--x>" * 200_000):
        assert translated(text, "html", list) == text
    assert translated("{/* a */}" * 50 + " b", "markdown").endswith(" B")
    deep = "<b>x " * 10_000 + "</b>" * 10_000
    assert translated(deep, "html") == deep.replace("x", "X")


def test_words_that_cannot_be_aligned_are_taken_in_order(tmp_path):
    model, tokenizer = load_model(write_model(tmp_path / "short", position_encoding="learned"), "cpu")
    sources, targets = ["Two dogs", "A", "a " * 40], ["zwei Hunde", "B C", "b " * 40]
    links = aligner(model, tokenizer)(sources, targets)
    assert links[:2] == align(model, tokenizer, sources[:2], targets[:2])
    assert links[2] == [(number, number) for number in range(40)]
    assert aligner(model, SimpleNamespace(is_fast=False))(["a b"], ["x y"]) == [[(0, 0), (1, 1)]]
    assert aligner(object(), tokenizer)(["a"], ["x y"]) == [[(0, 0), (0, 1)]]
