"""Tags, placeholders and line breaks follow the words that they belong to; text from a model is text."""

import io
import re
import zipfile
from xml.etree import ElementTree

import document_files
import pytest
from document_files import INLINE, SENTENCES, backwards, body, in_place, louder, run, translated, turned, word_file
from hypothesis import assume, example, given
from hypothesis import strategies as st

from vaswani_transformer.documents.formats import translate_document

DELIMITERS = {"b": ("<b>", "</b>"), "i": ('<i class="x">', "</i>"), "a": ('<a href="/u?x=1&amp;y">', "</a>")}


def written(inline):
    """Words and spans in HTML."""
    if isinstance(inline, str):
        return inline
    first, last = DELIMITERS[inline[0]]
    return first + " ".join(map(written, inline[1])) + last


@pytest.mark.parametrize(("translate", "align"), [(louder, in_place), (backwards, turned)])
@given(sentence=SENTENCES)
def test_in_any_order_each_word_keeps_its_spans(translate, align, sentence):
    """The spans of each word, by XML's own parser, are what they were; nothing else is there."""

    def words(text):
        found = []

        def walk(node, spans):
            found.extend((word.lower(), spans) for word in (node.text or "").split())
            for child in node:
                walk(child, (*spans, child.tag))
                found.extend((word.lower(), spans) for word in (child.tail or "").split())

        walk(ElementTree.fromstring(text), ())
        return sorted(found)

    text = "<p>" + " ".join(map(written, sentence)) + "</p>"
    assert words(translated(text, "html", translate, align)) == words(text)


@pytest.mark.parametrize(
    ("text", "forwards", "reverse"),
    [
        ("See <b>this</b> dog.", "SEE <b>THIS</b> DOG.", "DOG. <b>THIS</b> SEE"),
        ("a <b>big dog</b> runs", "A <b>BIG DOG</b> RUNS", "RUNS <b>DOG BIG</b> A"),
        ("a (<i>red</i>) dog", "A (<i>RED</i>) DOG", "DOG (<i>RED</i>) A"),
        ("un<b>believ</b>able!", "<b>UNBELIEVABLE</b>!", "<b>UNBELIEVABLE</b>!"),
        ("<a href=u><img src=x></a> A dog", "<a href=u><img src=x></a> A DOG", "<a href=u><img src=x></a> DOG A"),
        ("the <img src=x>dog runs", "THE <img src=x>DOG RUNS", "RUNS <img src=x>DOG THE"),
        ("go<a id=x></a> on <!-- c --> it", "GO<a id=x></a> ON <!-- c --> IT", "IT ON <!-- c --> GO<a id=x></a>"),
        ("Dear {name}, you have %d dogs.", "DEAR {name}, YOU HAVE %d DOGS.", "DOGS. HAVE %d YOU DEAR {name},"),
        ("So, {name}, see %s!", "SO, {name}, SEE %s!", "SEE %s! SO, {name},"),
        ("<a href=u>big dogs.</a>", "<a href=u>BIG DOGS.</a>", "<a href=u>DOGS. BIG</a>"),
        ("a <a href=u>big dog</a>.", "A <a href=u>BIG DOG</a>.", "<a href=u>DOG. BIG</a> A"),
        ("Dear {a}{b}, %s%d dogs", "DEAR {a}{b}, %s%d DOGS", "DOGS DEAR {a}{b}, %s%d"),
        ("{{x}}: https://a.b/c?d, or a@b.cd!",) + 2 * ("{{x}}: https://a.b/c?d, OR a@b.cd!",),
        ("Use <code>f(x)</code>, then stop", "USE <code>f(x)</code>, THEN STOP", "STOP THEN USE <code>f(x)</code>,"),
        ("no <b>end <i>here</b> x</i>", "NO <b>END <i>HERE</b> X</i>", "NO <b>END <i>HERE</b> X</i>"),
        ("a &lt;b&gt; &amp;amp; c", "A &lt;B&gt; &amp;AMP; C", "C &amp;AMP; &lt;B&gt; A"),
        ("<b>One dog. Two</b> cats.", "<b>ONE DOG. TWO</b> CATS.", "<b>DOG. ONE </b>CATS. <b>TWO</b>"),
        ("<q translate=no>A dog</q> runs on", "<q translate=no>A dog</q> RUNS ON", "<q translate=no>A dog</q> ON RUNS"),
        ("big <img>dog<wbr>s 🎉 {x}", "BIG <img>DOGS<wbr> 🎉 {x}", "<img>DOGS<wbr> BIG 🎉 {x}"),
        ("cat<sup><a href=u>[7]</a></sup> runs.<sup>8</sup>", "CAT<sup><a href=u>[7]</a></sup> RUNS.<sup>8</sup>",
         "RUNS. CAT<sup><a href=u>[7]</a></sup><sup>8</sup>"),
        ("of <time>May</time> 20<sup>th</sup> a", "OF <time>MAY</time> 20TH A", "A 20TH <time>MAY</time> OF"),
        ("milk, juice, H<sub>2</sub>O.", "MILK, JUICE, H<sub>2</sub>O.", "JUICE, MILK, H<sub>2</sub>O."),
        ("<script>'<!-- x'</script><p>a", "<script>'<!-- x'</script><p>A", "<script>'<!-- x'</script><p>A"),
        ("a CO<sub>2</sub>-rich sky", "A CO<sub>2</sub>-rich SKY", "SKY A CO<sub>2</sub>-rich"),
        ("a <b>big {na</b>me}, ({x}) dog", "A <b>BIG {na</b>me}, ({x}) DOG", "DOG <b>BIG {na</b>me}, ({x}) A"),
        ("on %(x)d%% of %1$s %lu", "ON %(x)d%% OF %1$s %lu", "OF ON %(x)d%% %1$s %lu"),
        ("A <b0>big dog</b0><g1/> runs", "A <b0>BIG DOG</b0><g1/> RUNS", "RUNS <b0>DOG<g1/> BIG</b0> A"),
        ("done (<a href=u>#12</a>).", "DONE (<a href=u>#12</a>).", "DONE (<a href=u>#12</a>)."),
        ("ask @node/x a <button>Do</button>", "ASK @node/x A <button>DO</button>", "A ASK @node/x <button>DO</button>"),
    ],
)  # fmt: skip
def test_where_markup_goes(text, forwards, reverse):
    assert translated(text, "html") == forwards
    assert translated(text, "html", backwards, turned) == reverse


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("<b><a>Shop</a><a>My cart</a></b>", ["Shop", "My cart"]),
        ("<p><a>Shop</a> · <a>My cart</a><p><a>A</a> or <a>b</a>", ["Shop", "My cart", "A or b"]),
        ("<b>Colour</b><span>Red</span> <b>re</b><i>do</i>", ["Colour", "Red redo"]),
        ("one<img>two<wbr>s<!-- c -->", ["one twos"]),
        ("in&shy;ter\u200bnal \ufeffcat", ["internal cat"]),
        ('<html xmlns="http://www.w3.org/1999/xhtml"><script/><p>A dog <a id="b"/>runs.', ["A dog runs."]),
        (
            "Ask @ann or #cats on 1️⃣ b.org/x? http://c.de/d_(e) :tada: ${x}%{y} {n, plural, one {# x} other {y}} %5.1f",
            ["Ask or on?"],
        ),
        ("It is.<sup>[1]</sup><sup>[2]</sup> A", ["It is.", "A"]),
        ("彼は<ruby>漢<rp>(</rp><rt>かん<rp>)</rp></ruby>だ", ["彼は漢だ"]),
        ("<label><input> A dog</label> <label><input> A cat</label>", ["A dog", "A cat"]),
        ("12 — 5 → 🎉", []),
        ('The <i class="material-icons">home</i> here<p class="x-material-icons">\\cite{a} it', ["The here", "it"]),
        ("The .NET kit. Use torch.nn.Layer! No.Way", ["The .NET kit.", "Use torch.nn.Layer!", "No.Way"]),
        ("好!狗跑. A.b", ["好!", "狗跑.", "A.b"]),
        ("<a>A</a> b.org/x <a>B</a><p><a>नदी</a><a>में</a> है<p>नदी<b>[1]</b> घर{x}की", ["A", "B", "नदी", "में है", "नदी"]),
    ],
)
def test_what_a_model_sees(text, sentences):
    seen = []
    translated(text, "html", lambda part: seen.extend(part) or part)
    assert seen == sentences


@pytest.mark.parametrize(
    ("text", "translation", "links", "expected"),
    [
        # Attention often links no target word with a source word, and a link must not be lost for that.
        ("Click <a href=u>here</a> <b>now</b>.", "Jetzt bitte klicken.", [(0, 0), (0, 1), (2, 2)],
         "Jetzt <a href=u>bitte</a> <b>klicken</b>."),
        ("Click <b>now</b>.", " ", [], "Click <b>now</b>."),
        ("Cat <em>(red)</em>", "eine rote Katze", [(0, 0)], "eine <em>rote</em> Katze"),  # of a part that no word has
        ("<b>dog</b>+<a href=u>cat</a>.", "Hund und Katze.", [(0, 0)], "<b><a href=u>Hund</a> und Katze</b>."),
        ("我的<b>狗</b>跑了。", "My dog ran.", [(0, 0), (2, 1), (3, 2)], "My <b>dog</b> ran."),
        ("My <b>dog</b> ran.", "我的狗跑了。", [(0, 0), (0, 1), (1, 2), (2, 3), (2, 4)], "我的<b>狗</b>跑了。"),
        ("A <i>big</i> <img src=x>dog", "一只大 狗", [(0, 0), (0, 1), (1, 2), (2, 3)], "一只<i>大</i> <img src=x>狗"),
        ("<b>犬</b>と<i>猫</i>", "「犬」と（猫）", [(0, 0), (1, 1), (2, 2)], "<b>「犬」</b>と<i>（猫）</i>"),
        ("<b>A <q>b c</q></b>, d", "X, y, Z", [(1, 0), (3, 1), (2, 2)], "<b><q>X,</q></b> y, <b>Z</b>"),
        ("See the <b>river</b>, now", "नदी, देखो", [(2, 0), (0, 1)], "<b>नदी</b>, देखो"),
        ("<b>A</b> <a>x <i>dog. Cats</i></a>", "Y", [(0, 0)], "<b><i>Y</i></b><a><i> Y</i></a>"),
        # What is linked with no word stays apart from the first, and what precedes the full stop before it.
        ("The {x} file <u>is</u> a/b.", "Опция включена.", [(1, 0)], "{x} Опция <u>включена</u>."),
        ("A red or {x} hat.<sup>[1]</sup>", "Roter Hut.", [(1, 0), (2, 1)], "Roter Hut {x}.<sup>[1]</sup>"),
        # The space that goes between two sentences of Chinese was the only part of a span that had its place.
        ("<b>big</b><b id=x>dog. </b>Yes.", "狗", [(0, 0)], "<b>狗</b><b id=x></b>狗"),
    ],
)  # fmt: skip
def test_spans_of_an_alignment(text, translation, links, expected):
    translate = lambda sentences: [translation for _ in sentences]  # noqa: E731
    assert translated(text, "html", translate, lambda pairs, _: [links for _ in pairs]) == expected


def test_without_alignments_words_are_in_order():
    assert translated("a <b>big</b> dog", "html", louder, None) == "A <b>BIG</b> DOG"
    assert translated("a <b>big</b> dog", "html", lambda _: ["一大狗"], None) == "一<b>大</b>狗"
    # Signs that have to be beside a space or punctuation, or they would be text.
    links = lambda pairs, _: [[(int(place > 1), place) for place in range(6)] for _ in pairs]  # noqa: E731
    assert translated("**Note:** this", "markdown", lambda _: ["注意：这很重要"], links) == "**注意：** 这很重要"
    for text in ("foo _bar_ `x` _baz_.", 'He said *"yes"* now', "see **(a)** b", "see [_link_](u)"):
        assert translated(text, "markdown", louder) == text.upper().replace("`X`", "`x`").replace("(U)", "(u)")
    assert translated("_Open_ this", "markdown", lambda _: ["打开菜单"], links) == "_打开_ 菜单"
    # What a model writes beside markup is no reference in Markdown.
    assert translated("*A* dog", "markdown", lambda _: ["A &lt; &#39;"], None) == "*A &#38;lt;* &#38;#39;"


MARKDOWN = """---
title: Not text
---
# «A **big** dog» #

> «soft *line*
> break» `f(x)` «and» \\*«signs»

- «one [link»](/u "t") «here»
- [x] «two [ref]»[ref] «and» ![not this](i.png)

| «a» \\| «b» | *«c»* |
|---|---|

    code here

[ref]: /dog "Not this"
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1. \\*a dog\\*\n", "1. \\*A DOG\\*\n"),
        ("> \\# a dog\n> \\*runs", "> \\# A DOG \\*RUNS"),
        ("- [ ] \\[a] dog", "- [ ] \\[A\\] DOG"),
        ("# \\\\a <b>dog</b>", "# \\\\A <b>DOG</b>"),
        ("Run **`make`** or **see `it` now**", "RUN **`make`** OR **SEE `it` NOW**"),
        ("Read [it][] and [it].\n\n[it]: /u", "READ [IT][it] AND [IT][it].\n\n[it]: /u"),
        ("> [!TIP]\n> a dog", "> [!TIP]\n> A DOG"),
        ("> [!tip]- A title\n> a dog\n\n[TOC]\n\n[TOC] b\n", "> [!tip]- A title\n> A DOG\n\n[TOC]\n\n\\[TOC\\] B\n"),
        (":::note[A title]\na `Link` or `Strong` dog\n:::", ":::note[A title]\nA `Link` OR `Strong` DOG\n:::"),
        ("::: tip A long, long title\na\n\n[![a](b)](c) d", "::: tip A long, long title\nA\n\n[![a](b)](c) D"),
        ("+++\na = 'b'\n+++\n\n# a {#b .c}", "+++\na = 'b'\n+++\n\n# A {#b .c}"),
        ("<A\nb='a'\nc={[ {d: 'a'}, ]}\n>\na", "<A\nb='a'\nc={[ {d: 'a'}, ]}\n>\nA"),
        ("a <i s={{a: 'b'}}>b</i>\n\n{/* a\nb */}", "A <i s={{a: 'b'}}>B</i>\n\n{/* a\nb */}"),
        ("A$2 or A$3, $x$", "A&#36;2 OR A&#36;3, $x$"),
        ('??? tip "a dog"\n    runs\n    on\n\n::: x\na\n:::', '??? tip "A DOG"\n    RUNS ON\n\n::: x\nA\n:::'),
        ("???+ tip\n\n    a\n\n    - b\n\n        c\n\nd", "???+ tip\n\n    A\n\n    - B\n\n        C\n\nD"),
        ("[a](b){ .c .d } \\ref{a}\n\n*[HTML]: a", "[A](b){ .c .d } \\ref{a}\n\n*[HTML]: a"),
        ("cat\n: a dog\n\n{/* a b */}", "CAT\n: A DOG\n\n{/* a b */}"),
        ("import A from 'a'\nimport b\n\na\nimport 'a'", "import A from 'a'\nimport b\n\nA IMPORT 'A'"),
        (":tada: a dog\n\n- :+1: it\n\n\\: a\n", ":tada: A DOG\n\n- :+1: IT\n\n\\: A\n"),
        ("a\n\n:lock: b\n\n:::tip[A title]\nc\n:::\n", "A\n\n:lock: B\n\n:::tip[A title]\nC\n:::\n"),
        ("Apple\n:a fruit\n:a firm and `a \x1b b` \x1b", "APPLE\n:A FRUIT\n:A FIRM AND `a \x1b b` \x1b"),
        ("H~2~O or x^2^ ~a~", "H~2~O OR X^2^ ~A~"),
        ("a\n\n---\n## b\nc\n\n---\nd: e\nf: *g*\n---\n\n# h", "A\n\n---\n## B\nC\n\n---\nd: e\nf: *g*\n---\n\n# H"),
        (">>fr<<\n---\na: b\n---\n\nc", "---\na: b\n---\n\n\\>>FR&#60;&#60; C"),  # of all of the text
        ("---\na: b\n---\n>>fr<< c", "---\na: b\n---\n\\>>FR&#60;&#60; C"),
        (
            '{{< b c="/x" >}}Go now{{< /b >}}\n\n{% raw %}*x*{% y %}',
            '{{< b c="/x" >}}GO NOW{{< /b >}}\n\n{% raw %}*x*{% y %}',
        ),
        (text := f'{{/* a {{b}} *c* */}}\n\n{{{{< b "{300 * "$x_{i}$ *d* "}" >}}}}', text),
        ("[a]({{ b.c }}/d) {{ e }}", "[A]({{ b.c }}/d) {{ e }}"),
        ("<var>x *y*</var> or <q translate=no>b</q> *c*", "<var>x *y*</var> OR <q translate=no>b</q> *C*"),
    ],
)
def test_signs_that_have_lost_their_meaning_in_markdown(text, expected):
    assert translated(text, "markdown") == expected


def test_markdown():
    assert len(translated(text := "=" * 4000 + " a! " + "=" * 4000, "markdown")) == len(text)  # in linear time
    for page in (
        "---\na: b\n---\n<p><%= a.b %> C %1%2",
        '<a b="<%= c "d" %>" <%\nif e %>f<% end %>>C</a> <%= g "<b>",\n"i" %>',
    ):
        assert translated(page.replace("C", "c"), "html") == page
    text, loud = re.sub("[«»]", "", MARKDOWN), re.sub("«(.*?)»", lambda match: match[1].upper(), MARKDOWN, flags=re.S)
    assert translated(text, "markdown") == loud.replace("\n> BREAK", " BREAK")
    turned_around = translated(text, "markdown", backwards, turned)
    assert '> \\*SIGNS AND BREAK `f(x)` *LINE* SOFT\n\n- HERE [LINK](/u "t") ONE\n' in turned_around


@given(
    st.text(st.sampled_from("a1 #>-+*=_`[]()!<>|~\\.&;:$"), min_size=1),
    st.sampled_from(["# b", "- b", "b", "> b", "1. b"]),
)
@example("1 #", "# b")
def test_what_a_model_writes_is_no_markdown(text, source):
    """Read as Markdown again it is the same text in the same elements."""
    import pyromark

    def events(markdown):
        found = pyromark.events(markdown, options=pyromark.Options.ENABLE_GFM | pyromark.Options.ENABLE_TABLES)
        texts = [event["Text"] for event in found if isinstance(event, dict) and "Text" in event]
        return [event for event in found if not (isinstance(event, dict) and "Text" in event)], "".join(texts)

    assume(text.strip())
    result = translated(source, "markdown", lambda sentences: [text for _ in sentences])
    assert events(result) == (events(source)[0], " ".join(text.split()))


def test_subtitles():
    text = (
        "1\r\n00:00:01,000 --> 00:00:02,000\r\n<i>A big\r\ndog runs.</i>\r\n\r\n"
        "2\r\n0:00:03.0 --> 0:00:04.0\r\n- Yes.\r\n- {\\an8}No way.\r\n"
    )
    dashes = text + "\n3\n00:00:05,0 --> 00:00:06,0\n{\\an8}<i>- Who is\nit?</i>\n<I>-- Me.</I>\n"
    cue = "1\n00:00:01,0 --> 00:00:02,0\n{\\i1}%s{\\i0}\n%s<rt>x</rt>%s\n"
    assert translated(cue % ("it is.", "dog", " runs"), "srt", backwards, turned) == cue % ("IS. IT", "RUNS DOG", "")
    kept = translated(dashes, "srt", lambda sentences: [f"*{sentence}*" for sentence in sentences], None)
    assert kept.endswith("\n{\\an8}<i>- *Who is\nit?*</i>\n<I>-- *Me.*</I>\n")
    assert translated(text, "srt") == re.sub(r"A big|dog runs|Yes|No way", lambda match: match[0].upper(), text)
    assert "<i>RUNS. DOG\r\nBIG A</i>" in translated(text, "srt", backwards, turned)
    two = "1\n00:00:01,000 --> 00:00:02,000\n>> {}\n&gt;&gt; {}\n"  # speakers
    assert translated(two.format("a dog", "it runs"), "srt", backwards, turned) == two.format("DOG A", "RUNS IT")
    one_word = translated(text, "srt", lambda sentences: ["Wort" for _ in sentences], None)
    assert "\r\n<i>Wort</i>\r\n\r\n2" in one_word  # an empty line would end the subtitle
    cue = "intro\n01.5 {}\n00:01.000 --> 00:04.000 align:start\n<v Ann>{} &amp; <i.x>{}</i>\n<00:02.000>{}\n\n"
    text = "WEBVTT - a title\n\nNOTE a\nnote\n\n" + cue
    result = translated(text.format("x", "hi", "dogs", "run"), "srt")
    assert result == translated(text.format("x", "hi", "dogs", "run"), "vtt") == text.format("x", "HI", "DOGS", "RUN")
    first = "WEBVTT\n\n00:01.000 --> 00:02.000\n \n{}\n"  # as of YouTube, where the line with a space is of the cue
    assert translated(first.format("a dog"), "vtt") == first.format("A DOG")
    voices = first.format("<v A>a b</v>\n<v B>c</v>")
    assert translated(voices, "vtt", backwards, turned) == voices.replace("a b", "B A").replace("c<", "C<")
    assert translated("WEBVTT\n\nNOTE a\n", "vtt") == "WEBVTT\n\nNOTE a\n"  # of a silent film


@pytest.mark.parametrize(
    ("named", "script", "written"),
    [("iso-8859-1", "", b"&#252;"), ("UTF-8", "", "ü".encode()), ("latin1", "'é'", "ü".encode())],
)
def test_a_page_that_may_be_in_another_encoding_than_utf_8_stays_in_it(named, script, written):
    page = f'<html><head><meta charset="{named}"><script>{script}</script></head><p>%s</p></html>'.encode()
    result = translate_document(page % b"A dog", "html", lambda _: ["ü"])
    assert result == page % written


@pytest.mark.parametrize("format", ["paragraphs", "html", "markdown"])
def test_sentences_are_joined_as_their_language_does(format):
    """Chinese and Japanese have no spaces between them, whatever the source has; others do."""
    for source in ("<b>猫が</b>寝る。犬が走る。", "A <b>cat</b> sleeps. A dog runs."):
        source = source if format == "html" else re.sub("<.*?>", "", source)
        for target, expected in (("Yes.", "Yes. Yes."), ("好。", "好。好。"), ("네.", "네. 네.")):
            result = translated(source, format, lambda sentences, target=target: [target] * len(sentences), None)
            assert re.sub("<.*?>", "", result) == expected


def test_paragraphs():
    text = "\ufeffOne dog.  Two.\n\n\tThree {x}\u2028four\r\n"
    asked = []
    result = translated(text, "paragraphs", lambda sentences: asked.extend(sentences) or louder(sentences))
    assert result == text.upper().replace("{X}", "{x}")
    assert asked == ["One dog.", "Two.", "Three", "four"]


def test_runs_links_figures_and_references_of_word_files():
    xml = f"<w:p>{run('A ')}{run('big', True)}{run(' dog')}</w:p>"
    result = translate_document(word_file(xml), "docx", backwards, turned)
    assert body(result) == f"<w:p>{run('DOG ')}{run('BIG ', True)}{run('A')}</w:p>"
    link = f'<w:hyperlink r="x">{run("here", True)}</w:hyperlink>'
    data = word_file(f"<w:p>{run('Click ')}{link}{run(' now.')}</w:p>")
    result = translate_document(data, "docx", lambda _: ["Jetzt klicken."], lambda *pairs: [[(0, 0), (2, 1)]])
    assert body(result) == f"<w:p>{run('Jetzt ')}{link.replace('here', 'klicken')}{run('.')}</w:p>"
    linked = run("it", True).replace("</w:rPr>", "<w:hlinkClick/></w:rPr>")  # as on slides
    slide = f"<w:p>{run('Read ')}{linked}{run(' now')}</w:p>"
    result = translate_document(word_file(slide), "docx", lambda _: ["Jetzt lies"], lambda *pairs: [[(0, 1), (2, 0)]])
    assert body(result) == f"<w:p>{run('Jetzt ')}{linked.replace('it', 'lies')}</w:p>"
    low = '<w:r><w:rPr><w:vertAlign w:val="subscript"/></w:rPr><w:t>2</w:t></w:r>'
    data = word_file(f"<w:p>{run('the H')}{low}{run('O of 20')}{run('25')}{low}{run(' sees')}</w:p>")
    seen = []
    result = translate_document(data, "docx", lambda part: seen.extend(part) or louder(part), None)
    assert seen == ["the of 2025 sees"] and body(result).count(low) == 2 and f"H</w:t></w:r>{low}" in body(result)


def test_the_main_part_of_a_word_file_is_the_one_that_its_relations_name():
    kind = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    relations = f'<Relationships><Relationship Type="{kind}" Target="/word/document2.xml"/></Relationships>'
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("_rels/.rels", relations)
        archive.writestr("word/document2.xml", f'<w:x xmlns:w="{document_files.WORD}">{run("A dog")}</w:x>')
    result = document_files.parts(translate_document(data.getvalue(), "docx", louder))
    assert "A DOG" in result["word/document2.xml"].decode()
    inner = "<w:tab/><w:t>Research &amp; more\nis big.</w:t><w:br/><w:t>&#66;oth.</w:t>"
    result = translate_document(word_file(f"<w:p><w:r>{inner}</w:r></w:p>"), "docx", louder)
    assert "".join(re.sub("<[^>]*>", " ", body(result)).split()) == "RESEARCH&amp;MOREISBIG.BOTH."


@pytest.mark.parametrize(
    "text",
    [
        "<p TRANSLATE>keep<p>THIS</p><p>AND</p>",
        "<div><p TRANSLATE>keep <b>this</div>THIS",
        "<ul><li TRANSLATE>keep<ul><li>and this</ul><li>THIS</ul><p>AND</p>",
        "<ul><li TRANSLATE>keep <p>this</ul>THIS",
        "<dl><dt TRANSLATE>keep<dd>THIS</dl>",
        "<table><tr><td TRANSLATE>keep<table><tr><td>this</table><td>THIS<tr><td>AND</table>",
        "<table><tr TRANSLATE><td>keep<td>this<tr><td>THIS</table>",
        "<p TRANSLATE>keep <i>this<br>and</b> that</p> THIS",
        "<div TRANSLATE>keep<p>this<div>and</div>this</div>THIS",
        "<b>A <p TRANSLATE>keep</b> this</p>THIS",
    ],
)
def test_what_is_not_translated_ends_where_browsers_end_it(text):
    page = text.replace("TRANSLATE", 'translate="no"')
    assert translated(page.replace("THIS", "this").replace("AND", "and"), "html") == page


@given(st.lists(st.one_of(INLINE.map(written), st.sampled_from(["<br>", "<p>", "."])), max_size=9))
def test_what_a_model_writes_is_no_markup(parts):
    """However its translations look, tags and attributes are those that were there."""
    evil = "<script>x</script> \"onclick=x ' --> &lt;b&gt; <a b"
    tags = lambda text: set(re.findall(r"<[^>]*>", text))  # noqa: E731
    text = " ".join(parts)
    aligned = lambda sources, targets: [[(0, 0)] for _ in sources]  # noqa: E731
    result = translated(text, "html", lambda sentences: [evil for _ in sentences], aligned)
    assert tags(result) <= tags(text)
