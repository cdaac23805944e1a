"""XLIFF and Qt Linguist's `.ts`: only what is filled changes, and lxml reads what is meant."""

from xml.sax.saxutils import escape

import pytest
from catalogue_files import FEW, SOME_TEXTS, check_parts, echo, filled, read
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from vaswani_transformer.catalogues.formats import pairs

INLINE = (
    "<g id='1' ctype=\"x-a>b\">{}</g>", '{}<x id="2"/>', '<ph id="1">&lt;br/></ph>{}', '<my:odd a="b">{}</my:odd>',
    "<!-- <source> -->{}", "<mrk mtype='term' mid='1'>{}</mrk>", "{}",
)  # fmt: skip
HEAD = {
    "1.2": "<?xml version='1.0'?>\n<!-- <trans-unit id='x'><source>no</source></trans-unit> -->\n<xliff version='1.2' "
    "xmlns='urn:oasis:names:tc:xliff:document:1.2' xmlns:my='urn:my'><file original='a&amp;b'><body>",
    "2.0": "<xliff version='2.0' xmlns='urn:oasis:names:tc:xliff:document:2.0' xmlns:my='urn:my'><file id='f'>",
    "ts": "<!DOCTYPE TS>\n<TS version='2.1' language='ru_RU' xmlns:my='urn:my'><context><name>A&amp;B</name>",
}
END = {"1.2": "</body></file></xliff>", "2.0": "</file></xliff>\n", "ts": "</context></TS>"}
STATES = {
    "1.2": {"untranslated": "", "fuzzy": " state='needs-adaptation'", "translated": " state='final'"},
    "2.0": {"untranslated": "", "fuzzy": " state='initial'", "translated": " state='final'"},
    "ts": {"untranslated": " type='unfinished'", "fuzzy": " type='unfinished'", "translated": ""},
}


@st.composite
def xml_files(draw):
    """A kind of file, and its parts, each with whether it is to be filled."""
    kind, newline = draw(st.sampled_from(list(HEAD))), draw(st.sampled_from(["\n", "\r\n"]))
    parts = [(False, draw(st.sampled_from(["", "\ufeff"])) + HEAD[kind])]
    for number in range(draw(st.integers(0, 5))):
        state = draw(st.sampled_from(["untranslated", "fuzzy", "translated", "kept"]))
        source, target = (draw(st.sampled_from(INLINE)).format(escape(draw(SOME_TEXTS))) for _ in range(2))
        source = draw(st.sampled_from([source, "<![CDATA[a < b]]>" + source]))
        of_state = STATES[kind].get(state, "")
        targets = {"untranslated": "", "kept": draw(st.sampled_from(["", "<target>x</target>"]))}
        written = targets.get(state, f"<target{of_state if kind == '1.2' else ''}>{target}</target>")
        keep = " translate='no'" if state == "kept" else ""
        if kind == "1.2":
            text = f"<trans-unit id='{number}'{keep}>{{0}}<source>{source}</source>{{0}}{written}</trans-unit>"
        elif kind == "2.0":
            text = f"<unit id='{number}'{keep}>{{0}}<notes><note>n</note></notes><segment{of_state}>{{0}}"
            text += f"<source>{source}</source>{written}</segment></unit>"
        else:
            of_state = " type='vanished'" if state == "kept" else of_state
            text = f"<message>{{0}}<source>{number}{source}</source>{{0}}<translation{of_state}>"
            text += f"{target * (state in ('fuzzy', 'translated'))}</translation></message>"
        space = draw(st.sampled_from(["", newline, newline + "  "]))
        parts += [(False, space), (state in ("untranslated", "fuzzy"), text.replace("{0}", space))]
    return kind, [*parts, (False, END[kind])]


@FEW
@given(xml_files(), SOME_TEXTS)
def test_all_but_the_filled_entries_stays_and_filling_again_changes_nothing(tmp_path_factory, file, text):
    path = tmp_path_factory.mktemp("xml") / {"ts": "a.ts"}.get(file[0], "a.xlf")
    check_parts(path, file[1], text)
    tree, tag = etree.fromstring(path.read_bytes()), "translation" if path.suffix == ".ts" else "target"
    ours = [element for element in tree.iter("{*}" + tag) if {"needs-translation", "unfinished"} & {*element.values()}]
    ours += [segment.find("{*}target") for segment in tree.iter("{*}segment") if segment.get("state") == "initial"]
    assert len(ours) == sum(is_filled for is_filled, _ in file[1])
    for target in ours:  # lxml reads the text, and the source's elements in the same order
        source = next(target.itersiblings("{*}source", preceding=True))
        kept = [(inner.tag, dict(inner.attrib)) for inner in source.iter() if inner is not source]
        assert [(inner.tag, dict(inner.attrib)) for inner in target.iter() if inner is not target] == kept
        assert target.text == text


XLIFF_1 = """<?xml version='1.0' encoding='ISO-8859-1'?>
<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2" xmlns:my="urn:my">
<file source-language="en" target-language='de' original="a&amp;b.txt"><header><note>trans-unit</note></header><body>
<group id="g"><trans-unit id="1" approved="yes"><source>One <g id="1">two</g> &lt;b&gt; <x id="2"/></source><target
 state="translated"><mrk mid="0" mtype="seg"><x id="2"/>Eins</mrk> <g id="1">zwei</g> \xe9</target></trans-unit>
  <trans-unit id="2" resname="R" approved="yes"
     maxwidth = '10'><source>Save <ph id="1">&lt;br/></ph> <my:odd a="b>c">it</my:odd></source><target/><note>dev</note>
     <alt-trans><source>Save</source><target>Sichern</target></alt-trans></trans-unit>
  <trans-unit id="3"><source><![CDATA[a < b]]></source>
  <seg-source><mrk mtype="seg">a</mrk></seg-source><target><g><mrk mid='0' mtype='seg'/></g></target></trans-unit>
</group></body></file></xliff>
"""
XLIFF_2 = """<xliff xmlns="urn:oasis:names:tc:xliff:document:2.0" version="2.0" srcLang="en" trgLang="de"><file id="f">
  <unit id="u" name="N">
    <segment id="1"><source>One.</source><target>Eins.</target></segment>
    <ignorable><source> </source></ignorable>
    <segment id="2" state="initial"><source>Two <pc id="1">three</pc>.</source></segment>
  </unit></file></xliff>
"""
QT = """<!DOCTYPE TS><TS version="2.1" language="ru_RU"><context><name>Main&amp;Window</name>
    <message numerus="yes">
        <source>%n file(s)</source>
        <translation type="unfinished"><numerusform></numerusform><numerusform/><numerusform/></translation>
    </message>
    <message>
        <source>Bell<byte value="x7"/></source>
        <comment>verb</comment>
        <translatorcomment>mine</translatorcomment>
        <translation type="unfinished">x</translation>
    </message>
    <message numerus="yes"><source>%n</source><translation type="unfinished"></translation></message>
    <message><source>Open</source><translation>Открыть</translation></message>
</context></TS>
"""


def test_xliff_1_keeps_what_it_does_not_know_and_marks_what_it_fills(tmp_path):
    (path := tmp_path / "a.xlf").write_text(XLIFF_1, encoding="latin-1")
    first, second, third = read(path)
    assert [first.state, second.state, third.state] == ["translated", "untranslated", "untranslated"]
    assert (second.id, second.line, second.context, second.notes) == ("a&b.txt\x042", 6, "R", "dev")
    assert second.codes == ('<ph id="1">&lt;br/></ph>', '<my:odd a="b>c">', "</my:odd>")
    assert third.sources == ("a < b",)
    (codes := tmp_path / "b.xlf").write_text(XLIFF_1.replace("<g><mrk", "<ph/><g><mrk"), encoding="latin-1")
    assert [entry.state for entry in read(codes)][2] == "translated"
    (review := tmp_path / "c.xlf").write_text(
        "<xliff version='1.2'><file><trans-unit id='1'><source>a</source>"
        "<target state='needs-review-l10n'>b</target></trans-unit></file></xliff>"
    )
    assert [entry.state for entry in read(review)] == ["kept"] and not [*pairs(review)]
    target = '<x id="2"/>Eins <g id="1">zwei</g> é'
    assert list(pairs(path)) == [('One <g id="1">two</g> <b> <x id="2"/>', target)]
    result = filled(path, lambda entries: echo(entries, "ж")).decode("latin-1")
    note = "<note>vaswani: machine translation by test, confidence 0.50</note>"
    mark = 'state="needs-translation" state-qualifier="mt-suggestion"'
    assert f'<target {mark}>&#1078;<ph id="1">&lt;br/></ph><my:odd a="b>c"></my:odd></target>{note}<note>dev' in result
    assert f"</seg-source><target {mark}>&#1078;</target>{note}</trans-unit>" in result
    assert result.count("approved") == 1
    plural = "<trans-unit id='1'><source>PLURAL</source></trans-unit>"
    cases = plural.replace("PLURAL", '{N, plural, =0 {<x id="J"/>} other {<x id="I"/>}}')  # of Angular
    path.write_text(f"<xliff version='1.2'><file>{cases}</file><file translate='no'>{plural}</file></xliff>")
    own = lambda entries: [fill._replace(targets=("a \U0010f001 \U0010f001",)) for fill in echo(entries)]  # noqa: E731
    assert filled(path, own).count(b'>a <x id="I"/> <x id="I"/></target>') == 1


def test_xliff_2_fills_the_segments_of_a_unit_that_lack(tmp_path):
    (path := tmp_path / "a.xlf").write_text(XLIFF_2)
    (entry,) = read(path)
    assert (entry.state, entry.context, entry.sources[0], entry.targets) == ("untranslated", "N", "One.", ("Eins.", ""))
    result = filled(path).decode()
    state, two = 'state="initial" subState="vaswani:mt"', 'Two <pc id="1">three</pc>.'
    two = f"{state}><source>{two}</source><target>{two}"
    assert "<source>One.</source><target>Eins.</target></segment>" in result and two in result
    assert result.index("<unit id") < result.index("<notes><note>vaswani: ") < result.index("<segment")
    path.write_text(XLIFF_2.replace("<segment", "<notes/><segment", 1))
    assert etree.fromstring(filled(path)).findtext(".//{*}note").startswith("vaswani: ")
    kept = '<mrk id="m" translate="no">Gnu <b/>x</mrk>'
    path.write_text(XLIFF_2.replace("three", f'{kept}<mrk id="n" type="term">three</mrk>'))
    assert next(read(path)).codes == ('<pc id="1">', kept, '<mrk id="n" type="term">', "</mrk>", "</pc>")


def test_what_a_group_protects_is_kept(tmp_path):
    unit, free = (f"<trans-unit id='a'{t}><source>Two dogs</source></trans-unit>" for t in ("", " translate='yes'"))
    yes, no = (f'<group translate="{answer}">' for answer in ("yes", "no"))
    groups = f"{no}{unit}<group>{unit}{yes}{unit}</group></group><!--</group>--><group/>{unit}{free}</group>{unit}"
    version = 'version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2"'
    file = f'<file original="a" source-language="en" target-language="de"><body>{groups}</body></file>'
    (path := tmp_path / "a.xlf").write_text(f"<xliff {version}>{file}{file}</xliff>")
    states = [entry.state for entry in read(path)]
    assert states == 2 * ["kept", "kept", "untranslated", "kept", "untranslated", "untranslated"]


def test_qt_fills_the_forms_that_lupdate_wrote_and_keeps_translators_comments(tmp_path):
    (path := tmp_path / "a.ts").write_text(QT, encoding="utf-8")
    plural, bell, without, done = read(path)
    assert [plural.state, bell.state, without.state, done.state] == ["untranslated", "fuzzy", "kept", "translated"]
    assert (plural.counts, plural.id) == ((21, 2, 5), "Main&Window\x04%n file(s)")
    assert bell.id == "Main&Window\x04Bell\U0010f000\x04verb"
    result = filled(path).decode()
    assert result.count("<numerusform>%n file(s)</numerusform>") == 3
    note = "vaswani: machine translation by test, confidence 0.50"
    assert f"<translatorcomment>mine\n{note}</translatorcomment>" in result
    assert '<translation type="unfinished">Bell<byte value="x7"/></translation>' in result
    assert list(pairs(path)) == [("Open", "Открыть")]
    path.write_text(QT.replace("<numerusform/>", "<numerusform>мой &amp;</numerusform>", 1), encoding="utf-8")
    assert filled(path).decode().count("<numerusform>мой &amp;</numerusform>") == 1
    for language, counts in (("cs", (1, 2, 5)), ("lv_LV", (21, 2, 0))):  # without fractions, and in Qt's order
        path.write_text(QT.replace("ru_RU", language), encoding="utf-8")
        assert next(read(path)).counts == counts


@pytest.mark.timeout(60)  # were each to look for its end it would be minutes
def test_what_looks_like_marks_in_comments_and_data_is_none(tmp_path):
    mark = '<mrk mtype="seg">'
    texts = f"<![CDATA[{mark}x</mrk>]]>", f"{mark}A <!-- {mark} --> <mrk mtype='term'>b</mrk></mrk>", "c"
    units = "".join(f"<trans-unit id='{n}'><source>{text}</source></trans-unit>" for n, text in enumerate(texts))
    (path := tmp_path / "a.xlf").write_text(f"<xliff version='1.2'><file>{units}</file></xliff>")
    assert [entry.sources[0] for entry in read(path)][::2] == [f"{mark}x</mrk>", "c"]
    written = filled(path).decode()
    assert written.count("</mrk>") == 4 and f">A <!-- {mark} --> <mrk mtype='term'>b</mrk></target>" in written
    path.write_text(path.read_text().replace("c<", f"<![CDATA[{mark * 20_000}]]><"))
    assert list(read(path))[2].sources == (mark * 20_000,)
