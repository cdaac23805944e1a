"""Formats with one language: texts translated in place, or what the source language's file has added to another."""

import json
import re

import pytest
import yaml
from catalogue_files import FEW, SOME_TEXTS, check_damage, echo, filled, nothing, read
from conftest import error_of
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree
from test_xml_files import QT, XLIFF_1, XLIFF_2

from vaswani_transformer.catalogues.formats import ENDINGS, FORMATS, open_catalogue
from vaswani_transformer.errors import UserError

KEYS = st.text("abcdé._ \"'#:{}", min_size=1, max_size=4).map("Q".__add__)  # no language
NO_SYMBOLS = SOME_TEXTS.filter(lambda text: text[0] != ":")  # of Ruby, which are kept
VALUES = NO_SYMBOLS | st.sampled_from([1, True, None, "", [], {}]) | st.lists(NO_SYMBOLS | st.just(2), max_size=2)
TREES = st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES)), min_size=2)
STYLES = {"json": (None, 2, "\t"), "yaml": (False, None, True)}


def dumped(tree, ending, style):
    if ending == "json":
        return json.dumps(tree, indent=style, ensure_ascii=style is None)
    return yaml.safe_dump(tree, default_flow_style=style, allow_unicode=style is not True, width=40)


def loaded(data, ending):
    return json.loads(data) if ending == "json" else yaml.safe_load(data)


def upper(entries):
    """Fill entries with their sources between signs."""
    return [fill._replace(targets=tuple(f"<{text}>" for text in fill.targets)) for fill in echo(entries)]


def translated(value):
    if isinstance(value, dict):
        return {key: translated(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [translated(inner) for inner in value]
    return f"<{value}>" if isinstance(value, str) and value else value


def is_within(text, longer):
    rest = iter(longer)
    return all(character in rest for character in text)


@FEW
@given(TREES, st.sampled_from(["json", "yaml"]), st.integers(0, 2))
def test_texts_of_trees_are_translated_in_their_places(tmp_path_factory, tree, ending, style):
    path = tmp_path_factory.mktemp("tree") / f"a.{ending}"
    path.write_text(dumped(tree, ending, STYLES[ending][style]), encoding="utf-8")
    assert filled(path, nothing) == path.read_bytes()
    assert loaded(filled(path, upper), ending) == translated(tree)


def merged(target, source):
    """What a target's tree is with the texts that only the source's has."""
    target = dict(target)
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key, {}), dict):
            inner = merged(target.get(key, {}), value)
            target |= {key: inner} if inner or key in target else {}
        elif key not in target and value and isinstance(value, str):
            target[key] = translated(value)
    return target


@FEW
@given(TREES, st.data(), st.sampled_from(["json", "yaml"]), st.integers(0, 2))
def test_what_a_tree_lacks_is_added_behind_what_it_has(tmp_path_factory, tree, data, ending, style):
    without_lists = lambda inner: {k: v for k, v in inner.items() if not isinstance(v, list)}  # noqa: E731
    tree = json.loads(json.dumps(tree), object_hook=without_lists)
    part = {}
    for key, value in tree.items():
        kept = {k: f"{k}!" for k in value if data.draw(st.booleans())} if isinstance(value, dict) else "there"
        part |= {key: kept} if data.draw(st.booleans()) else {}
    folder = tmp_path_factory.mktemp("tree")
    (source := folder / f"en.{ending}").write_text(dumped(tree, ending, None), encoding="utf-8")
    (target := folder / f"de.{ending}").write_text(dumped(part, ending, STYLES[ending][style]), encoding="utf-8")
    result = filled(target, upper, source=source)
    assert loaded(result, ending) == merged(part, tree)
    assert is_within(target.read_text("utf-8"), result.decode())


def test_plural_forms_are_those_of_the_language_and_a_language_above_all_keys_changes(tmp_path):
    (path := tmp_path / "devise.en.yml").write_text(
        'en:  # top\n  errors:\n    one: 1 error\n    other: "%{count} errors"\n  order:\n    - :year\n    - Two days\n'
        "  text: |\n    Two\n      lines\n  # end\n  anchor: &a Shared\n  alias: *a\n"
        "  map: &m\n    a: b\n  other:\n    <<: *m\n"
    )
    assert filled(path, language="ru-FR").count(b"many: ") == 1  # a region without rules of its own
    result = filled(path, language="ru").decode()
    form = '"%{count} errors"'
    assert loaded(result, "yaml")["ru"]["errors"] == {
        "one": "%{count} errors", "few": "%{count} errors", "many": "%{count} errors", "other": "%{count} errors"
    }  # fmt: skip
    assert f"    # vaswani: machine translation by test, confidence 0.50\n    other: {form}\n" in result
    assert "ru:  # top" in result and "anchor: &a Shared\n  alias: *a\n" in result and "  # end\n" in result
    assert loaded(result, "yaml")["ru"]["other"] == {"a": "b"}
    assert '  text: "Two\\n  lines\\n"\n' in result and "    - :year\n    # vaswani" in result
    app = '{\n\t"app" : {"n_one": "{{count}} file", "n_other": "{{count}} files"}\n, "p_ordinal_other": "{{n}}th"}'
    (path := tmp_path / "app.json").write_text(app)
    forms = {f"n_{name}": "{{count}} files" for name in ("one", "few", "many", "other")}
    assert json.loads(filled(path, upper, language="ru"))["p_ordinal_other"] == "{{n}}th"
    path.write_text(app := app.replace('}\n, "p_ordinal_other": "{{n}}th"', "}"))
    assert json.loads(filled(path, language="ru")) == {"app": forms}
    words = {
        "gender": {"male": "He", "other": "They"},
        "reason_spam": "Spam",
        "reason_other": "Another",
        "other": "All",
    }
    words |= {"answer_one": "First", "answer_two": "Second", "answer_other": "Else"}
    (tmp_path / "words.json").write_text(json.dumps(words))
    expected = json.loads(re.sub(r'(: ")([A-Z]\w+)', r"\1<\2>", json.dumps(words)))  # a plural has `one` or a number
    assert json.loads(filled(tmp_path / "words.json", upper, language="de")) == expected
    (target := tmp_path / "app-ja.json").write_text("{}\n")
    path.write_text(path.read_text()[:-1] + ', "l": ["a", "b"], "m": ["a", {"b": ["c"]}, "d"]}')
    assert json.loads(filled(path, upper))["m"] == ["<a>", {"b": ["<c>"]}, "<d>"]
    result = b'{\n  "app": {\n    "n_other": "{{count}} files"\n  },\n  "l": ["a", "b"]\n}\n'
    assert filled(target, source=path, language="ja") == result
    assert [entry.state for entry in read(target, source=path)] == ["refused"] * 3 + ["untranslated"] * 2  # m; app, l
    target.write_text('{"l": ["x", "", ""], "m": ["y", "z", "w"], "n": [""]}')  # longer, as long, of no entry
    assert json.loads(filled(target, upper, source=path))["l"] == ["x", "<b>", ""]


ANDROID = """\ufeff<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE resources [
  <!ENTITY app "My <b>App</b>">
]>
<!-- <string name="commented">Not me</string> -->
<resources xmlns:xliff="urn:oasis:names:tc:xliff:document:1.2">
    <string name="plain">Hello</string><string name='single' >It\\'s "quoted   spaces"   and \\n lines</string>
    <string name="wrapped">Two
        lines of\u00a0text \\u00e9\\@</string>
    <string name="html">Click <b>here</b> or <a href="https://x.y/?a=1&amp;b=2">there</a> &amp; go</string>
    <string name="cdata"><![CDATA[<b>Bold</b> & "more"]]></string>
    <string name="entity">&app; costs %1$d&#160;€</string>
    <string name="xl">Hello <xliff:g id="name" example="Ann">%1$s</xliff:g>!</string>
    <string name="fixed" translatable="false">https://x</string>
    <plurals name="files">
        <item quantity="one">%d file</item>
        <item quantity="other">%d files</item>
    </plurals>
    <string-array name="days"><item>Monday</item><item>Tuesday</item></string-array>
    <integer name="n">3</integer>
</resources>
"""


def test_android_texts_are_what_the_phone_shows(tmp_path):
    (path := tmp_path / "strings.xml").write_text(ANDROID, encoding="utf-8")
    entries = {entry.id.split()[1]: entry for entry in read(path, language="ru")}
    assert entries["single"].sources == ("It's quoted   spaces and \n lines",) and entries["single"].line == 7
    assert entries["wrapped"].sources == ("Two lines of\xa0text é@",)
    assert entries["cdata"].sources == ("<b>Bold</b> & more",)
    assert entries["fixed"].state == "kept" and len(entries["files"].counts) == 4
    assert entries["xl"].codes == ('<xliff:g id="name" example="Ann">%1$s</xliff:g>',)
    result = filled(path, lambda entries: echo(entries, '@ l\'"x"\n  <y>'), language="ru")
    tree = etree.fromstring(result, etree.XMLParser(resolve_entities=False))
    assert tree.find("string[@name='plain']").text == r"\@ l\'\"x\"\n  <y>".join(['"', '"'])
    assert len(tree.findall("plurals/item")) == 4 and len(tree.findall("string-array/item")) == 2
    swapped = [fill._replace(targets=tuple(text[::-1] for text in fill.targets)) for fill in echo(read(path))]
    etree.fromstring(filled(path, lambda entries: swapped[: len(entries)]), etree.XMLParser(resolve_entities=False))
    (target := tmp_path / "de" / "strings.xml").parent.mkdir()
    texts = '<string name="plain">Hallo</string>\n  <string name="old">x</string>'
    texts += '<string-array name="days"><item>Montag</item></string-array>'
    target.write_text(f"<resources>\n  {texts}\n</resources>\n")
    added = etree.fromstring(filled(target, source=path, language="de"))
    assert [child.get("name") for child in added if child.tag != etree.Comment] == [
        "plain", "old", "days", "single", "wrapped", "html", "cdata", "files"
    ]  # fmt: skip
    assert added.xpath("string-array/item/text()") == ["Montag", "Tuesday"]
    result = filled(target, source=path, language="de")
    assert result.startswith(target.read_bytes().partition(b"<string-array")[0])  # it declares no &app; and xliff:


STRINGS = """/* A "comment" with = ; */
"key" = "Hello \\"you\\"\\n%@";
// line comment "a" = "b";
word = "unquoted key";
"multi" = "line one
line two"  ; "same line"="x"; "uni" = "\\U00e9"; "emp"="";"""
PROPERTIES = """# comment
plain=Hello
  spaced : value with trailing \ncont = first \\
       second
esc\\ key\\:x = caf\\u00e9 \\t tab
empty=
novalue
uni = \\ud83d\\ude00 smile\narg = {0}\n"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be"])
def test_apples_strings(tmp_path, encoding):
    (path := tmp_path / "a.strings").write_text("\ufeff" * (encoding == "utf-16-be") + STRINGS, encoding=encoding)
    texts = {"key": 'Hello "you"\n%@', "word": "unquoted key", "multi": "line one\nline two", "same line": "x"}
    texts["uni"] = "é"
    assert {entry.id: entry.sources[0] for entry in read(path) if entry.state == "untranslated"} == texts
    assert [entry.line for entry in read(path)] == [2, 4, 5, 6, 6, 6]
    assert filled(path, nothing) == path.read_bytes()
    result = filled(path).decode(encoding)
    assert '// line comment "a" = "b";\n/* vaswani: machine' in result and '"key" = "Hello \\"you\\"\\n%@";' in result
    (target := tmp_path / "b.strings").write_text('"word" = "Wort";')
    target.write_bytes(filled(target, source=path))
    assert target.read_text().startswith('"word" = "Wort";\n/* ')
    assert {entry.id: entry.targets[0] for entry in read(target, source=path)} == texts | {"word": "Wort"}


def test_javas_properties_in_ascii_latin_1_and_utf_8(tmp_path):
    (path := tmp_path / "a.properties").write_text(PROPERTIES)
    texts = {"plain": "Hello", "spaced": "value with trailing ", "cont": "first second"}
    texts |= {"esc key:x": "café \t tab", "uni": "😀 smile", "arg": "{0}"}
    assert {entry.id: entry.sources[0] for entry in read(path) if entry.state == "untranslated"} == texts
    assert [entry.line for entry in read(path)] == [2, 3, 4, 6, 7, 8, 9, 10]
    assert [entry.flags for entry in read(path)][-2:] == ["", "java-format"]  # with an argument of MessageFormat
    assert filled(path).isascii() and b"\\ud83d\\ude00 smile" in filled(path)
    for encoding, expected in (("latin-1", b"x\xa0y=\xdf\n# vaswani"), ("utf-8", "x\xa0y=ß\n# vaswani".encode())):
        (target := tmp_path / "b.properties").write_text("x\xa0y=ß", encoding=encoding)
        target.write_bytes(filled(target, source=path))
        assert target.read_bytes().startswith(expected)
        result = {entry.id: entry.targets[0] for entry in read(target, source=path) if entry.state == "translated"}
        assert result == texts and next(read(target)).id == "x\xa0y"


@pytest.mark.parametrize(
    ("name", "text"), [("strings.xml", ANDROID), ("a.strings", STRINGS), ("a.properties", PROPERTIES)]
    + [("a.xlf", XLIFF_1), ("b.xlf", XLIFF_2), ("a.ts", QT)]
    + [(f"a.{ending}", dumped({"a": {"b": "x y", "n": 1}, "l": ["a", "b"]}, ending, 2)) for ending in ("json", "yaml")]
)  # fmt: skip
def test_damage_is_refused_by_entry_or_on_one_line(tmp_path, name, text):
    (path := tmp_path / name).write_text(text, encoding="latin-1" if "8859" in text else "utf-8")
    if open_catalogue(path).is_xml:
        assert filled(path, lambda entries: echo(entries, "\x08")) == filled(path, nothing)  # which no XML has
    check_damage(path, 30)


@pytest.mark.parametrize("ending", ["json", "yaml", "yml", "strings", "properties", "po", "xlf"])
def test_empty_files_and_other_files(tmp_path, ending):
    (path := tmp_path / f"a.{ending}").write_bytes(b"")
    texts = {"json": '{"a": "b"}', "strings": '"a" = "b";'}
    (source := tmp_path / f"b.{ending}").write_text(texts.get(ending, "a: b\n"))
    try:
        path.write_bytes(filled(path, source=None if ending in ("po", "xlf") else source))
        assert [entry.sources for entry in read(path)] == [("b",)] * (ending != "po")
    except UserError as error:
        assert ending in ("json", "xlf") and str(error).startswith(f"{path}: ")
    assert set(ENDINGS.values()) == set(FORMATS)
    assert "a.xml: its name has none of the endings .po, " in error_of(open_catalogue, tmp_path / "a.xml")
    assert "none.po: No such file" in error_of(open_catalogue, tmp_path / "none.po")
    (path := tmp_path / "deep.yaml").write_text("a: " + "[" * 300 + "]" * 300)  # the recursion would end the process
    assert "deep.yaml: more than 200 maps or lists are in each other" in error_of(list, read(path))


def test_yaml_keys_that_are_no_strings(tmp_path):
    """To Ruby `no:` is false and `404:` a number; with quotation marks a key would be another one."""
    text = 'en:\n  yes: "Yes"\n  no: "No"\n  404: Lost\n  "no": A word\n  deep:\n    on: Going\n'
    tree = {True: "Yes", False: "No", 404: "Lost", "no": "A word", "deep": {True: "Going"}}
    (source := tmp_path / "en.yml").write_text(text, encoding="utf-8")
    assert loaded(filled(source, upper), "yaml") == {"en": translated(tree)}
    (marked := tmp_path / "b.yml").write_text(text, encoding="utf-8-sig")
    assert filled(marked, upper) == b"\xef\xbb\xbf" + filled(source, upper)
    (target := tmp_path / "de.yml").write_text("de:\n  yes: Ja\n  other: Da\n", encoding="utf-8")
    assert loaded(filled(target, upper, source=source), "yaml")["de"] == translated(tree) | {True: "Ja", "other": "Da"}


@pytest.mark.parametrize("prefix", ["", "key_"])
def test_a_text_for_zero_is_one_of_its_own_where_the_language_has_no_such_plural(tmp_path, prefix):
    texts = {"zero": "No files", "one": "One file", "other": "{{count}} files"}
    (path := tmp_path / "a.json").write_text(json.dumps({"n": {prefix + form: text for form, text in texts.items()}}))
    upper_texts = {prefix + form: f"<{text}>" for form, text in texts.items()}
    assert json.loads(filled(path, upper, language="de")) == {"n": upper_texts}
    (target := tmp_path / "de.json").write_text("{}")
    assert json.loads(filled(target, upper, source=path, language="de")) == {"n": upper_texts}
    target.write_text(json.dumps({"n": {f"{prefix}other": "Mine", f"{prefix}one": ""}}))
    mine = json.loads(filled(target, upper, source=path, language="de"))["n"]
    assert mine == upper_texts | {f"{prefix}other": "Mine"}
    forms = dict.fromkeys(("zero", "one", "two", "few", "many", "other"), texts["other"]) | {"one": texts["one"]}
    assert json.loads(filled(path, language="ar"))["n"] == {prefix + form: text for form, text in forms.items()}


def test_metadata_of_json_is_kept_but_for_the_language(tmp_path):
    tree = {"@@locale": "en", "@@context": "Main page", "$schema": "./a.json", "@metadata": {"authors": ["Ann Other"]}}
    tree |= {"files": "My files", "@files": {"description": "A title", "placeholders": {"n": {"type": "int"}}}}
    tree |= {"@you": "You there", "in": {"@in": {"a": "Inner text"}}}
    (path := tmp_path / "app_en.arb").write_text(json.dumps(tree))
    made = {"files": "<My files>", "@you": "<You there>", "in": {"@in": {"a": "<Inner text>"}}}
    assert json.loads(filled(path, upper, language="de")) == tree | made | {"@@locale": "de"}
    (target := tmp_path / "app_de.arb").write_text('{"@@locale": "de"}')
    assert json.loads(filled(target, upper, source=path, language="de")) == {"@@locale": "de"} | made


def test_android_references_and_spaces_in_quotation_marks(tmp_path):
    strings = '<string name="a">@string/b</string><string name="c"> "  and\\u0020" </string>'
    array = '<string-array name="d"><item>?attr/e</item><item>\\@home</item></string-array>'
    (path := tmp_path / "strings.xml").write_text(f"<resources>{strings}{array}</resources>")
    first, second, third = read(path)
    assert first.codes == ("@string/b",) and second.sources == ("  and ",)
    texts = etree.fromstring(filled(path)).xpath("//string/text() | //item/text()")
    assert texts == ["@string/b", '"  and "', "?attr/e", "\\@home"]
    items = '<!-- a --><item quantity="one" b="c">One</item> <item quantity="other">All</item>'
    array = f'<string-array name="l">{items}</string-array>'
    path.write_text(f'<resources><plurals name="n">{items}</plurals>{array}</resources>')
    result = filled(path, upper, language="de").decode()
    assert result.count('<!-- a --><item quantity="one" b="c">&lt;One&gt;</item> <item') == 2
    assert len(third.sources[0]) == 1 and third.sources[1] == "@home"
    mine = '<plurals name="n">\n  <item quantity="other">%d файла</item> <!-- b --><item quantity="one"/>\n</plurals>'
    (target := tmp_path / "ru" / "strings.xml").parent.mkdir()
    target.write_text(f"<resources>\n{mine}\n</resources>", encoding="utf-8")
    result = filled(target, upper, source=path, language="ru").decode()
    assert '<item quantity="other">%d файла</item> <!-- b --><item quantity="one">&lt;All&gt;</item>\n' in result
    items = etree.fromstring(result.encode()).findall("plurals/item")
    assert [item.get("quantity") for item in items] == ["other", "one", "few", "many"]
    path.write_text('<resources><string name="m" formatted="false">%s %s x</string></resources>')
    assert b'<string name="m" formatted="false">' in filled(target, source=path, language="ru")


def test_what_yaml_lacks_is_added_in_block_style_with_comments(tmp_path):
    texts = 'a: One\n  b:\n    "no": Two\n    c:\n      d: [x, y]\n  e:\n    one: "%{n} f"\n    other: "%{n} g"'
    (source := tmp_path / "en.yml").write_text(f"en:\n  {texts}\n")
    (target := tmp_path / "de.yml").write_text("de:\n  a: Eins  # mine\n")
    result = re.sub(r"\n *# vaswani: machine.*", "#", filled(target, source=source, language="ja").decode())
    texts = '  b:#\n    "no": "Two"\n    c:#\n      d: ["x", "y"]\n  e:#\n    other: "%{n} g"\n'
    assert result == f"de:\n  a: Eins  # mine\n{texts}"


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("de.yml", "de:\n  a: ~\n  b:\n  c:  # mine\n    - ~\n    - y\n  d: {one: , other: null}\n"),
        ("de.yml", "de:\r\n"),
        ("de.yml", "de: ~ # mine"),
        ("de.yml", "de: {}"),
        ("de.yml", "de: {a: , b: null}"),
        ("a.de.json", '{"a": null, "b": null, "d": {"one": null, "other": null}}'),
    ],
)
def test_what_is_null_in_the_place_of_a_text_or_a_map_is_filled(tmp_path, name, target):
    texts = {"a": "One", "b": {"x": "Two"}, "c": [None, "y"], "d": {"one": "a dog", "other": "dogs"}}
    source = tmp_path / ("en.json" if "json" in name else "en.yml")
    source.write_text(json.dumps(texts if "json" in name else {"en": texts}))
    (path := tmp_path / name).write_text(target)
    result = filled(path, source=source, language="de").decode()
    assert ("# vaswani: machine" in result) == (not target.startswith(("de: {", "{"))), "in block style"
    result = yaml.safe_load(result)
    result = result if "json" in name else result.pop("de")
    assert {**result, "c": result.get("c", texts["c"])} == texts


@pytest.mark.parametrize("target", ["de: {a, b: mine}\n", "de:\n  ? a\n  ? b\n", "de: !!set {a, b}\n"])
def test_keys_without_a_colon_stay(tmp_path, target):
    (source := tmp_path / "en.yml").write_text("en:\n  a: One\n  b: Two\n")
    (path := tmp_path / "de.yml").write_text(target)
    assert filled(path, source=source, language="de").decode() == target


@pytest.mark.parametrize("target", ["a: {x: Eins}\nb: Zwei\nc: [Drei]\n", "---\n", "---"])
def test_new_texts_have_room_or_are_refused(tmp_path, target):
    (source := tmp_path / "en.yml").write_text("a: One\nb: {x: Two, y: {z: Three}}\nc: Four\nd: ['', Five]\n")
    (path := tmp_path / "de.yml").write_text(target)
    catalogue = open_catalogue(path, source=source, language="deu")
    new = (entry for entry in catalogue.entries() if not entry.place)
    taken = [entry.id for entry in new if catalogue.takes(entry, *echo([entry]))]
    assert taken == ["d\4[]"] if "Eins" in target else len(taken) == 5
    result = yaml.safe_load(catalogue.fill(echo))
    assert result["d"] == ["", "Five"] and (catalogue.language, len(result)) == ("de", 4)
    path.write_bytes(catalogue.fill(echo))
    path.write_text(path.read_text().replace('"Five"', '"Five", Six').replace('c: "Four"', "c: []"))
    assert all(entry.state != "untranslated" for entry in read(path, source=source) if entry.place)
