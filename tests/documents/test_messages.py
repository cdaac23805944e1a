"""Messages of programs: what is filled is valid whatever the model writes, by msgfmt and by counting."""

import random
import re
import shutil
import subprocess
from collections import Counter

import pytest
from catalogue_files import read
from hypothesis import given, settings
from hypothesis import strategies as st

from vaswani_transformer.catalogues.catalogue import Entry
from vaswani_transformer.catalogues.formats import open_catalogue, pairs
from vaswani_transformer.data.memory import Memory, read_memory
from vaswani_transformer.documents import messages
from vaswani_transformer.documents.formats import translate_parts
from vaswani_transformer.documents.messages import Messages

C = ["%s", "%d", "%5.2f", "%%", "%-10s", "%lu"]
WORDS = st.lists(st.sampled_from(["open", "file", "Error", "in", "line", "100", "(", ")"]), min_size=1, max_size=5)


def careless(seed=0):
    """A translator that loses words, doubles them and changes their order, placeholders among them."""
    draw = random.Random(seed)

    def translate(texts):
        for text in texts:
            words = text.split() * draw.choice((1, 1, 2)) + draw.choice(([], [], ["%"], ["%)"]))
            draw.shuffle(words)
            yield [" ".join(words[: draw.randint(1, len(words))]) for _ in range(2)]

    return translate


def filler(translate, memory=None):
    def place(documents):
        return translate_parts(documents, lambda texts: [each[0] for each in translate(texts)])

    return Messages(translate, place, lambda sources, targets: [0.5] * len(sources), "careless", memory)


def words_as_they_are(texts):
    return [[text] for text in texts]


@pytest.mark.parametrize(
    ("flags", "text", "expected"),
    [
        ("c-format", "%s: %-5.2f of %lu%% (%1$s, %*d, %<PRId64>)", "%s %-5.2f %lu %% %1$s %*d %<PRId64>"),
        ("gcc-internal-format", "%<goto%> can%'t be in %qD at %+E, %wd", "%< %> %qD %+E %wd"),
        ("python-format", "%(name)s has %d {items}", "%(name)s %d"),
        ("python-brace-format", "{name} {0!r:>10} {} 5 %s", "{name} {0!r:>10} {}"),
        ("kde-format", "<filename>%1</filename> is %2%", "<filename> %1 </filename> %2"),
        ("qt-format", "%n file(s) in %L1", "%n %L1"),
        ("kde-kuit-format", "%1 of %2", "%1 %2"),
        ("scheme-format", "~D of ~{~a~}, ~5,2f~~~%", "~D ~{ ~a ~} ~5,2f ~~ ~%"),
        ("object-pascal-format", "%0:s of %-8.2f, 5%%", "%0:s %-8.2f %%"),
        ("boost-format", "%1% of %|2$+5d|", "%1% %|2$+5d|"),
        ("no-c-format", "100% sure", ""),
        ("", "Hi {{name}}, $t(key), @:a.key &amp; ${x} %{count} %s", "{{name}} $t(key) @:a.key &amp; ${x} %{count} %s"),
        ("", "See <0>{{n}} <1/></0>, 3<5", "<0> {{n}} <1/> </0> <"),  # of react-i18next
        ("", "$(ARG1) to $name$ of %PRODUCTNAME: $1", "$(ARG1) $name$ %PRODUCTNAME $1"),  # LibreOffice, MediaWiki
        ("", "One value.|{{ n }} values.", "| {{ n }}"),  # Symfony's
        ("", "{user}'s, %s'in, https://a.de/hを, https://a.de/日本", "{user} %s https://a.de/h https://a.de/日本"),
        ("", "%#@files@ in %2$#@n_x@, 5#@a@", "%#@files@ %2$#@n_x@"),  # Apple's
        ("", "See @.lower:a.b <%= n %>, %1%2", "@.lower:a.b <%= n %> %1 %2"),  # of Vue, ERB, Qt
        ("", "Run `a b` <!-- c --> <code>git push</code> <b>", "`a b` <!-- c --> <code>git push</code> <b>"),
        ("c-format", "Move `%s' to `%s' or `%d`, <code>%i</code>", "%s %s %d <code> %i </code>"),  # GNU's quotation
        ("", "{n, plural, one {# file} other {#s}} in {place}", "{n, plural, one {# file} other {#s}} {place}"),
    ],
)  # fmt: skip
def test_placeholders_by_flags(flags, text, expected):
    found = [match[0] for match in messages.pattern_of(flags).finditer(text)]
    assert " ".join(found) == expected


@pytest.mark.parametrize(
    ("source", "target", "flags", "expected"),
    [
        ("%d of %s", "%s von %d", "c-format", "%2$s von %1$d"),
        ("%d of %s", "%s von %d", "python-format", ""),
        ("%1$d of %2$s", "%2$s von %1$d", "c-format", "%2$s von %1$d"),
        ("%1 of %2", "%2 von %1", "kde-format", "%2 von %1"),
        ("{a} of {b}", "{b} von {a}", "python-brace-format", "{b} von {a}"),
        ("%*d of %s", "%s von %*d", "c-format", ""),
        ("%s of %<PRIu32>", "%<PRIu32>: %s", "c-format", "%2$<PRIu32>: %1$s"),
        ("%d of %s", "%2$s von %1$d", "c-format", "%2$s von %1$d"),
        ("%d of %s", "%1$s von %2$d", "c-format", ""),
    ],
)
def test_arguments_in_another_order(source, target, flags, expected):
    assert messages.in_order(source, target, flags) == expected


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("&File", "datei", "&datei"),
        ("Re_move", "Verlassen", "_Verlassen"),
        ("E&xit", "Verlassen", "&Verlassen"),
        ("Color: ", "颜色", "颜色: "),
        ("C&olor: ", "颜色：", "颜色(&O)： "),
        ('<a target="_blank">Open</a>', '<a target="_blank">Ouvre</a>', '<a target="_blank">Ouvre</a>'),
        ("~Open...", "Öffnen...", "~Öffnen..."),
        ("&Save", "保存", "保存(&S)"),
        ("&Save", "احفظ", "&احفظ"),
        ("Is it?", "هل؟", "هل؟"),
        ("It is.", "ကောင်း\u104b", "ကောင်း\u104b"),
        ("It is.", "ดี", "ดี"),
        ("Is it?", "هل", "هل؟"),
        ("It is.", "完了しました", "完了しました。"),
        ("Name: %s", "Nom\xa0: %s", "Nom\xa0: %s"),
        ("  -r, --all   list it\n", "auf", "  -r, --all   auf\n"),
        ("y - " + "yes, " * 8 + "all\nn - " + "no " * 20, "a", "a\na "),
        ("&Open:", "開く:", "開く(&O):"),
        ("Set snake_case_name", "Setze snake_case_name", "Setze snake_case_name"),
        ("AT&T or Q&A, Drag&Drop", "AT&T or Q&A, Drag&Drop", "AT&T or Q&A, Drag&Drop"),
        ("  Wait %s...\n", "Warten %s", "  Warten %s...\n"),
        ("_Start/Stop:", "Start", "_Start:"),
        ("Done", "Fertig.", "Fertig"),
        ("Is it?", "Ja。", "Ja?"),
        ("  This is a long line of a help text, that\n  is on.\n", "abcd " * 9, "  " + "abcd " * 7 + "abcd\n  abcd.\n"),
        (f"{'usage ' * 11}X\n  or:  %s X\n", "a %s", "a\n  a %s\n"),  # no sentence
        ("This is a long line of a help text, that goes\non in others.\n", "abcd " * 10, "abcd " * 8 + "abcd\nabcd.\n"),
    ],
)  # fmt: skip
def test_edges_follow_the_source(source, target, expected):
    [filling] = filler(lambda texts: [[target]] * len(texts))([Entry("x", (source,), flags="c-format")])
    assert filling.targets == (expected,)


def test_accelerators_differ_within_a_menu_but_not_between_plural_forms():
    entries = [Entry(str(number), ("&File", "&Files"), context="menu", counts=(1, 2)) for number in range(4)]
    fillings = filler(lambda texts: [["Datei"]] * len(texts))(entries)
    assert len({re.search("&(.)", filling.targets[0])[1].lower() for filling in fillings}) == 4
    assert all(filling.targets[0] == filling.targets[1] for filling in fillings)


def test_a_memory_gives_back_the_catalogue_that_it_was_made_of(tmp_path):
    rule = "nplurals=4; plural=(n%100==1 ? 1 : n%100==2 ? 2 : n%100==3 || n%100==4 ? 3 : 0)"  # Slovenian's
    parts = [f'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\nPlural-Forms: {rule};\\n"\n',
             'msgid "%d _hour"\nmsgid_plural "%d _hours"\nmsgstr[0] "%d _ur"\nmsgstr[1] "%d _ura"\n'
             'msgstr[2] "%d _uri"\nmsgstr[3] "%d _ure"\n',
             'msgid "One line.\\nAnother  line:\\n"\nmsgstr "Ena vrstica.\\nDruga\xa0 vrstica\\n"\n',
             '#, c-format\nmsgid "%s of %s, <file>"\nmsgstr "%2$s: %1$s, <dat>"\n',
             'msgid "&Remove"\nmsgstr "Od&strani"\n', 'msgid "&Save"\nmsgstr "保存(&B)"\n',
             'msgid "\'"\nmsgstr "«"\n']  # fmt: skip
    (tmp_path / "a.po").write_text("\n".join(parts), encoding="utf-8")
    lacking = re.sub(r'(msgstr(?:\[\d\])?) "[^C].*"', r'\1 ""', "\n".join(parts))
    (tmp_path / "b.po").write_text(lacking, encoding="utf-8")
    known = list(read(tmp_path / "a.po"))[1:]
    made = filler(words_as_they_are, read_memory([str(tmp_path / "a.po")]))(list(read(tmp_path / "b.po"))[1:])
    assert [filling.targets for filling in made] == [entry.targets for entry in known]
    assert list(pairs(tmp_path / "a.po"))[:2] == [("%d hour", "%d ura"), ("%d hours", "%d ur")]


def test_inline_elements_nest_and_are_shown_as_the_file_has_them():
    seen, first, last = [], "\U0010f000", "\U0010f001"
    swapped = ['Jetzt </g>hier<g id="1"> klicken']
    wrong = lambda texts: seen.extend(texts) or [swapped if "<" in text else ["Hier klicken"] for text in texts]  # noqa: E731
    entry = Entry("x", (f"Click {first}here{last} now",), codes=('<g id="1">', "</g>"))
    [filling] = filler(wrong)([entry])
    assert seen[0] == 'Click <g id="1">here</g> now'
    assert re.sub(f"[^{first}{last}]", "", filling.targets[0]) == first + last
    [filling] = filler(wrong, Memory([(seen[0], '<g id="1">Hier</g>')]))([entry])
    assert filling.targets == (f"{first}Hier{last}",)


def test_arguments_of_one_line_of_several_are_not_numbered_and_javas_apostrophes_do_not_quote():
    reorder = filler(lambda texts: [["%s: %d" if "%d" in text else text] for text in texts])
    [filling] = reorder([Entry("x", ("Error %d in %s\nat %s",), flags="c-format")])
    assert "$" not in "".join(filling.targets)
    seen, note = [], lambda texts: seen.extend(texts) or [["d'ouvrir l''{0}"]] * len(texts)
    [filling] = filler(note)([Entry("x", ("open ''{0}''",), flags="java-format")])
    assert filling.targets == ("d''ouvrir l''{0}",) and seen == ["open '{0}'"]
    filler(note)([Entry("x", ("%n file of %1", "%n files of %1"), counts=(1, 5))])
    assert seen[1:3] == ["1 file of %1", "5 files of %1"]
    entry, memory = (
        Entry("x", ("Delete {0}?",), flags="java-format"),
        Memory([("Delete {0}?", "Supprimer l'élément {0}")]),
    )
    [filling] = filler(words_as_they_are, memory)([entry])
    assert filling.targets == ("Supprimer l''élément {0}",)
    [filling] = filler(lambda texts: [["Le livre de l'{name}"]])([Entry("x", ("The book of {name}",))])
    assert filling.targets == ("Le livre de l’{name}",)  # or ICU would quote the brace
    memory = Memory([("The book of {name}", "Le livre de l'{name}")])
    [filling] = filler(words_as_they_are, memory)([Entry("x", ("The book of {name}",))])
    assert filling.targets == ("Le livre de l'{name}",)


@pytest.mark.parametrize(
    ("source", "target", "is_valid"),
    [
        ("add <file>...", "<文件>...", True), ("<b>a</b>", "<i>a</i>", False), ("a<br>", "a<hr>", False),
        ("a <%- b %>", "a <%- c %>", False), ("(a @:b.c)", "(@:b.c a)", True),
    ],
)  # fmt: skip
def test_names_in_angle_brackets_are_no_tags(source, target, is_valid):
    assert (messages.problem(source, target) == "") is is_valid


def test_addresses_stay_whatever_the_format():
    source = "%s: see “https://a.org/wiki/B_(c)”."
    assert not messages.problem(source, "„https://a.org/wiki/B_(c)“: siehe %s.", "python-format")
    assert messages.problem(source, "%s: siehe https://a.org/wiki/B_(c.", "python-format").startswith("https")


def kinds(text):
    """The conversions of a text, whatever their numbers and widths."""
    return Counter(re.findall(r"%(?:\d\$)?[\d.l-]*([sdfu%])", text))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WORDS, st.lists(st.sampled_from(C), max_size=3)), min_size=1, max_size=4), st.integers(0, 99))
def test_what_is_filled_is_valid_by_msgfmt(tmp_path_factory, parts, seed):
    folder, mixed = tmp_path_factory.mktemp("po"), random.Random(seed)
    sources = []
    for words, more in parts:
        words = words + more
        mixed.shuffle(words)
        sources.append(" ".join(words))
    header = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    entries = "".join(f'#, c-format\nmsgid "{source}"\nmsgstr ""\n\n' for source in dict.fromkeys(sources))
    (folder / "a.po").write_text(header + entries, encoding="utf-8")
    made = []

    def answer(entries):
        made.extend(zip(entries, fillings := filler(careless(seed))(entries), strict=True))
        return fillings

    result = open_catalogue(folder / "a.po").fill(answer)
    for entry, filling in made:
        if not filling.reason:
            assert kinds(filling.targets[0]) == kinds(entry.sources[0])
    if shutil.which("msgfmt"):
        (folder / "b.po").write_bytes(result)
        command = ["msgfmt", "--check-format", "--use-fuzzy", "-o", "/dev/null", folder / "b.po"]
        run = subprocess.run(command, capture_output=True, text=True)
        assert not run.returncode, run.stderr


def test_placeholders_that_a_model_makes_up_are_left_out_and_what_has_no_words_says_so():
    entries = [
        Entry("x", (text,), flags="c-format")
        for text in ("Error in %s", "%d: %s", "my_sep", "Your names", "http://a.org/%s")
    ]
    filling, *wordless = filler(lambda texts: [["Fehler %d in %s %s"] for _ in texts])(entries)
    assert {each.reason for each in wordless} == {"it has no words"}
    assert filling.targets and filling.targets[0].count("%s") == 1 and "%d" not in filling.targets[0]


@pytest.mark.parametrize(
    ("source", "flags", "written", "expected"),
    [
        ("%d of %s", "python-format", "%s von %d", ["%d", "%s"]),
        ("<b>a</b> of <i>b</i>", "", "<b>x", ["<b>", "<i>", "</i>", "</b>"]),  # and no other sign of a tag
        ("<0>a</0> of b", "", "<0>x von y</0", ["<0>", "</0>"]),
    ],
)
def test_what_no_candidate_keeps_is_placed(source, flags, written, expected):
    [filling] = filler(lambda texts: [[written] for _ in texts])([Entry("x", (source,), flags=flags)])
    assert [match[0] for match in messages.pattern_of(flags).finditer(filling.targets[0])] == expected


def test_training_pairs_leave_accelerators_out(tmp_path):
    lines = [("&File", "&Datei"), ("_Save A_s", "Speichern"), ("Search & Find", "&Suche"), ("~Open", "~Öffnen")]
    lines += [("_Undo", "Ann_uler"), ("_Run", "运行(_R)"), ("It is _so_.", "So ist _es_.")]
    text = "".join(f'msgid "{source}"\nmsgstr "{target}"\n\n' for source, target in lines)
    (tmp_path / "a.po").write_text(text, encoding="utf-8")
    expected = [("File", "Datei"), *lines[1:3], ("Open", "Öffnen"), ("Undo", "Annuler"), ("Run", "运行"), lines[-1]]
    assert list(pairs(tmp_path / "a.po")) == expected


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        (
            "You have {n, plural, one {# new message} other {# new messages}} here.", "ru",
            "{n, plural, one {You have # new messages here.} few {You have # new messages here.} "
            "many {You have # new messages here.} other {You have # new messages here.}}",
        ),
        (
            "{count, plural, =0{No items} one{{name} has one item} other{{name} has {count} items}}", "de",
            "{count, plural, =0 {No items} one {{name} has one item} other {{name} has {count} items}}",
        ),
        (
            "{g, select, one {He} other {They}} sent {n, plural, offset:1 one {a photo} other {# photos}}.", "ja",
            "{g, select, one {{n, plural, offset:1 other {He sent # photos.}}} "
            "other {{n, plural, offset:1 other {They sent # photos.}}}}",
        ),
        (
            "{a, plural, one {a} other {{a} cats}} and {b, plural, one {b} other {{b} dogs}} here", "de",
            "{a, plural, one {{b, plural, one {a and b here} other {a and {b} dogs here}}} "
            "other {{b, plural, one {{a} cats and b here} other {{a} cats and {b} dogs here}}}}",
        ),
        (" ".join(f"{{{n}, plural, one {{cat}} other {{{{{n}}} dogs}}}}" for n in "abcd"), "ar", None),
        ("Copy {n, plural, one {d'{x}} other {d'{x}s}}", "de", None),  # quoted, for ICU
        ("The {n, selectordinal, one {#st} other {#th}} place", "de", None),
        ("Issue #5: {n, plural, one {# file} other {# files}}", "de", None),
        ("{a, plural, one {# file} other {# files}}, {b, plural, one {# dog} other {# dogs}}", "de", None),
    ],
)  # fmt: skip
def test_the_cases_of_icu_are_messages_of_their_own(text, language, expected):
    messages = filler(lambda texts: words_as_they_are([text.replace("1 cats", "1 cat") for text in texts]))
    messages.language = language
    [filling] = messages([Entry("a", (text,))])
    assert filling.targets == (expected or text,) or (not expected and filling.reason == "it has no words")


def test_plural_forms_are_translated_with_their_numbers():
    """Of ICU in Russian: 21, 2 and 5, and 2 for fractions; an apostrophe does not quote."""
    shown = []

    def translate(texts):
        shown.extend(texts)
        return [[text.replace("of {", "d'{").replace("file", "Datei")] for text in texts]

    messages = filler(translate)
    [filling] = messages([Entry("x", ("%d file", "%d files"), flags="c-format", counts=(1, 5))])
    assert filling.targets == ("%d Datei", "%d Dateis") and set(shown) == {"1 file", "5 files"}
    [filling] = messages([Entry("x", ("{name} likes it", "{name} likes {n} file"), counts=(1, 5))])
    assert filling.targets == ("{name} likes it", "{name} likes {n} Datei") and "1 likes it" not in shown
    shown.clear()
    messages.language = "ru"
    texts = "{n, plural, one {One} other {# files}}", "{g, select, other {of {x}}}"
    [plural, choice] = messages([Entry("a", (text,)) for text in texts])
    assert {text.split()[0] for text in shown if text[0].isdigit()} == {"21", "2", "5"}
    assert plural.targets[0].count("{# Dateis}") == 4 and choice.targets == ("{g, select, other {d’{x}}}",)
