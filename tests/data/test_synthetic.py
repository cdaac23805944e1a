"""The synthetic corpus: German checked against hand-written sentences, and the held-out property."""

import os
import random
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from conftest import ROOT

from vaswani_transformer.data.synthetic import (
    ADJECTIVES,
    COMPOUND_FIRST,
    COMPOUND_HEADS,
    LENGTHS,
    NOUNS,
    TEST_SHARE,
    VERBS,
    Clause,
    Phrase,
    SyntheticCorpus,
    clause,
    compound,
    draw_sentence,
    generate_corpus,
    held_out_combinations,
    noun_phrase,
    number_words,
    prepositional_phrase,
    pronoun,
    sentence,
    third_person,
    write_corpus,
)
from vaswani_transformer.errors import UserError


def np(determiner, noun, case="nom", adjective=None, plural=False):
    head = noun.split()[-1]
    entry = compound(*noun.split()) if " " in noun else NOUNS[head]
    return noun_phrase(determiner, entry, case, ADJECTIVES[adjective] if adjective else None, plural)


def make(subject, verb, *objects, **choices):
    return Clause(subject, VERBS[verb], objects, **choices)


def said(parts, kind="main", front=""):
    built = sentence("{0}", "{0}", clause(kind, parts, front), end="?" if kind == "question" else ".")
    return built.en, built.de


TODAY, YESTERDAY, MONDAY = Phrase("today", "heute"), Phrase("yesterday", "gestern"), Phrase("on Monday", "am Montag")
MAN = np("the", "man")
DOG = np("the", "dog", "acc")


def in_garden():
    return prepositional_phrase("in", "in", np("the", "garden", "dat"))


@pytest.fixture(scope="module")
def corpus() -> SyntheticCorpus:
    return generate_corpus(4_000, 100, 200)


def tokens(text):
    return re.findall(r"[^\s.,?]+", text)


@pytest.mark.parametrize(
    ("phrase", "en", "de"),
    [
        (np("the", "man", "nom", "old"), "the old man", "der alte Mann"),
        (np("the", "man", "acc", "old"), "the old man", "den alten Mann"),
        (np("the", "man", "dat", "old"), "the old man", "dem alten Mann"),
        (np("the", "woman", "acc", "young"), "the young woman", "die junge Frau"),
        (np("the", "woman", "dat", "young"), "the young woman", "der jungen Frau"),
        (np("the", "child", "nom", "small"), "the small child", "das kleine Kind"),
        (np("the", "child", "dat", "small"), "the small child", "dem kleinen Kind"),
        (np("a", "man", "nom", "old"), "an old man", "ein alter Mann"),
        (np("a", "man", "acc", "old"), "an old man", "einen alten Mann"),
        (np("a", "man", "dat", "rich"), "a rich man", "einem reichen Mann"),
        (np("a", "woman", "nom", "tired"), "a tired woman", "eine müde Frau"),
        (np("a", "woman", "dat", "tired"), "a tired woman", "einer müden Frau"),
        (np("a", "house", "nom", "expensive"), "an expensive house", "ein teures Haus"),
        (np("a", "office", "acc", "dark"), "a dark office", "ein dunkles Büro"),
        (np("a", "egg", "acc"), "an egg", "ein Ei"),
        (np("my", "brother", "acc", "big"), "my big brother", "meinen großen Bruder"),
        (np("my", "sister", "nom", "big", plural=True), "my big sisters", "meine großen Schwestern"),
        (np("the", "dog", "nom", "black", plural=True), "the black dogs", "die schwarzen Hunde"),
        (np("the", "dog", "dat", "black", plural=True), "the black dogs", "den schwarzen Hunden"),
        (np("the", "car", "dat", plural=True), "the cars", "den Autos"),
        (np("the", "girl", "dat", plural=True), "the girls", "den Mädchen"),
        (np("3", "dog"), "three dogs", "drei Hunde"),
        (np("23", "mouse", "acc", "white"), "twenty-three white mice", "dreiundzwanzig weiße Mäuse"),
        (np("8", "doctor", "dat", "friendly"), "eight friendly doctors", "acht freundlichen Ärzten"),
        (np("the", "kitchen table", "acc"), "the kitchen table", "den Küchentisch"),
        (np("a", "birthday picture"), "a birthday picture", "ein Geburtstagsbild"),
        (np("a", "office chair", "acc", "new"), "a new office chair", "einen neuen Bürostuhl"),
        (np("a", "office lamp"), "an office lamp", "eine Bürolampe"),
        (np("4", "dog basket", "dat", "red"), "four red dog baskets", "vier roten Hundekörben"),
        (np("the", "station clock", "dat"), "the station clock", "der Bahnhofsuhr"),
        (np("5", "school book", "acc"), "five school books", "fünf Schulbücher"),
        (pronoun("she", "dat"), "her", "ihr"),
        (pronoun("they", "dat"), "them", "ihnen"),
        (in_garden(), "in the garden", "im Garten"),
        (prepositional_phrase("into", "in", np("the", "house", "acc", "big")), "into the big house", "ins große Haus"),
        (prepositional_phrase("into", "in", np("the", "forest", "acc")), "into the forest", "in den Wald"),
        (prepositional_phrase("in", "in", np("a", "city", "dat")), "in a city", "in einer Stadt"),
        (prepositional_phrase("with", "mit", pronoun("I", "dat")), "with me", "mit mir"),
        (prepositional_phrase("for", "für", np("the", "man", "acc")), "for the man", "für den Mann"),
    ],
)
def test_phrases(phrase, en, de):
    assert (phrase.en, phrase.de) == (en, de)


@pytest.mark.parametrize(
    ("pair", "en", "de"),
    [
        (said(make(MAN, "see", DOG)), "The man sees the dog.", "Der Mann sieht den Hund."),
        (said(make(pronoun("I"), "see", pronoun("you", "acc"))), "I see you.", "Ich sehe dich."),
        (said(make(pronoun("you"), "carry", np("a", "box", "acc"))), "You carry a box.", "Du trägst eine Kiste."),
        (said(make(pronoun("they"), "run")), "They run.", "Sie laufen."),
        (said(make(MAN, "see", DOG, time=TODAY)), "The man sees the dog today.", "Der Mann sieht heute den Hund."),
        (
            said(make(MAN, "see", DOG, time=TODAY), front="time"),
            "Today the man sees the dog.",
            "Heute sieht der Mann den Hund.",
        ),
        (
            said(make(MAN, "see", DOG, time=MONDAY, place=in_garden()), front="place"),
            "In the garden the man sees the dog on Monday.",
            "Im Garten sieht der Mann am Montag den Hund.",
        ),
        (
            said(make(MAN, "see", pronoun("she", "acc"), time=TODAY)),
            "The man sees her today.",
            "Der Mann sieht sie heute.",
        ),
        (
            said(make(MAN, "see", DOG, tense="want to")),
            "The man wants to see the dog.",
            "Der Mann will den Hund sehen.",
        ),
        (
            said(make(MAN, "see", DOG, tense="will"), "question"),
            "Will the man see the dog?",
            "Wird der Mann den Hund sehen?",
        ),
        (
            said(make(MAN, "see", DOG, tense="past", time=YESTERDAY)),
            "The man saw the dog yesterday.",
            "Der Mann hat gestern den Hund gesehen.",
        ),
        (
            said(make(np("the", "child", plural=True), "run", tense="perfect")),
            "The children have run.",
            "Die Kinder sind gelaufen.",
        ),
        (said(make(MAN, "see", DOG), "question"), "Does the man see the dog?", "Sieht der Mann den Hund?"),
        (
            said(make(pronoun("you"), "see", DOG, tense="past"), "question"),
            "Did you see the dog?",
            "Hast du den Hund gesehen?",
        ),
        (
            said(make(MAN, "invite", np("the", "woman", "acc"), time=TODAY)),
            "The man invites the woman today.",
            "Der Mann lädt heute die Frau ein.",
        ),
        (
            said(make(pronoun("we"), "call", np("a", "doctor", "acc"))),
            "We call a doctor.",
            "Wir rufen einen Arzt an.",
        ),
        (
            said(make(pronoun("I"), "call", pronoun("he", "acc"), tense="must")),
            "I must call him.",
            "Ich muss ihn anrufen.",
        ),
        (
            said(make(MAN, "open", np("the", "door", "acc"), tense="perfect")),
            "The man has opened the door.",
            "Der Mann hat die Tür aufgemacht.",
        ),
        (
            said(make(MAN, "give", np("the", "child", "dat"), np("the", "book", "acc"))),
            "The man gives the child the book.",
            "Der Mann gibt dem Kind das Buch.",
        ),
        (
            said(make(MAN, "give", pronoun("I", "dat"), np("a", "egg", "acc"), time=TODAY)),
            "The man gives me an egg today.",
            "Der Mann gibt mir heute ein Ei.",
        ),
        (
            said(make(np("the", "girl"), "help", np("my", "mother", "dat"))),
            "The girl helps my mother.",
            "Das Mädchen hilft meiner Mutter.",
        ),
        (
            said(make(np("a", "cat"), "follow", pronoun("we", "dat"), tense="past")),
            "A cat followed us.",
            "Eine Katze ist uns gefolgt.",
        ),
        (
            said(
                make(
                    MAN,
                    "lay",
                    np("the", "key", "acc"),
                    prepositional_phrase("on", "auf", np("the", "table", "acc")),
                )
            ),
            "The man lays the key on the table.",
            "Der Mann legt den Schlüssel auf den Tisch.",
        ),
        (
            said(
                make(
                    MAN,
                    "find",
                    np("the", "key", "acc"),
                    place=prepositional_phrase("on", "auf", np("the", "table", "dat")),
                )
            ),
            "The man finds the key on the table.",
            "Der Mann findet den Schlüssel auf dem Tisch.",
        ),
        (said(make(np("3", "dog"), "sleep")), "Three dogs sleep.", "Drei Hunde schlafen."),
        (
            said(make(np("the", "king"), "be", Phrase("tired", "müde")), "question"),
            "Is the king tired?",
            "Ist der König müde?",
        ),
        (said(make(pronoun("I"), "look_for", DOG)), "I look for the dog.", "Ich suche den Hund."),
        (said(make(MAN, "look_for", DOG)), "The man looks for the dog.", "Der Mann sucht den Hund."),
    ],
)
def test_clauses(pair, en, de):
    assert pair == (en, de)


@pytest.mark.parametrize(
    ("conjunctions", "first", "second", "en", "de"),
    [
        (
            ("{0} because {1}", "{0}, weil {1}"),
            clause("main", make(np("the", "woman"), "laugh")),
            clause("subordinate", make(MAN, "see", DOG, time=TODAY)),
            "The woman laughs because the man sees the dog today.",
            "Die Frau lacht, weil der Mann heute den Hund sieht.",
        ),
        (
            ("{0} because {1}", "{0}, weil {1}"),
            clause("main", make(np("the", "woman"), "laugh")),
            clause("subordinate", make(np("the", "child"), "be", Phrase("tired", "müde"))),
            "The woman laughs because the child is tired.",
            "Die Frau lacht, weil das Kind müde ist.",
        ),
        (
            ("{0} that {1}", "{0}, dass {1}"),
            clause("main", make(pronoun("you"), "know")),
            clause("subordinate", make(MAN, "call", pronoun("she", "acc"))),
            "You know that the man calls her.",
            "Du weißt, dass der Mann sie anruft.",
        ),
        (
            ("{0} that {1}", "{0}, dass {1}"),
            clause("main", make(np("my", "father"), "say")),
            clause("subordinate", make(pronoun("he"), "invite", pronoun("they", "acc"), tense="want to")),
            "My father says that he wants to invite them.",
            "Mein Vater sagt, dass er sie einladen will.",
        ),
        (
            ("{0} that {1}", "{0}, dass {1}"),
            clause("main", make(pronoun("they"), "believe")),
            clause("subordinate", make(np("the", "pig"), "stay", tense="past", place=in_garden())),
            "They believe that the pig stayed in the garden.",
            "Sie glauben, dass das Schwein im Garten geblieben ist.",
        ),
        (
            ("if {0}, {1}", "wenn {0}, {1}"),
            clause("subordinate", make(MAN, "see", DOG)),
            clause("inverted", make(np("the", "woman"), "wake", pronoun("I", "acc"))),
            "If the man sees the dog, the woman wakes me.",
            "Wenn der Mann den Hund sieht, weckt die Frau mich auf.",
        ),
    ],
)
def test_joined_clauses(conjunctions, first, second, en, de):
    built = sentence(*conjunctions, first, second)
    assert (built.en, built.de) == (en, de)


def test_numbers():
    sample = {
        2: ("two", "zwei"), 7: ("seven", "sieben"), 11: ("eleven", "elf"), 12: ("twelve", "zwölf"),
        13: ("thirteen", "dreizehn"), 16: ("sixteen", "sechzehn"), 17: ("seventeen", "siebzehn"),
        19: ("nineteen", "neunzehn"), 20: ("twenty", "zwanzig"), 21: ("twenty-one", "einundzwanzig"),
        30: ("thirty", "dreißig"), 36: ("thirty-six", "sechsunddreißig"), 40: ("forty", "vierzig"),
        57: ("fifty-seven", "siebenundfünfzig"), 60: ("sixty", "sechzig"), 64: ("sixty-four", "vierundsechzig"),
        70: ("seventy", "siebzig"), 78: ("seventy-eight", "achtundsiebzig"), 82: ("eighty-two", "zweiundachtzig"),
        95: ("ninety-five", "fünfundneunzig"), 99: ("ninety-nine", "neunundneunzig"),
    }  # fmt: skip
    assert {number: number_words(number) for number in sample} == sample
    words = [number_words(number) for number in range(2, 100)]
    assert len({en for en, _ in words}) == len({de for _, de in words}) == 98


def test_third_person():
    given = {"see": "sees", "carry": "carries", "buy": "buys", "wash": "washes", "look for": "looks for"}
    assert {base: third_person(base) for base in given} == given


def test_lexicon_is_unambiguous():
    english = [form for noun in NOUNS.values() for form in (noun.en, noun.en_plural)]
    assert len(set(english)) == len(english)
    for verb in VERBS.values():  # a past like its base would leave the tense open after "I" and "they"
        base, past, _ = verb.en.split()
        assert base != past


def test_every_english_sentence_has_one_german_sentence():
    rng, german = random.Random(7), {}
    for _ in range(10_000):
        drawn = draw_sentence(rng)
        assert german.setdefault(drawn.en, drawn.de) == drawn.de


def test_sizes_lengths_and_no_overlap(corpus):
    assert [len(split) for split in vars(corpus).values()] == [4_000, 100, 200]
    pairs = corpus.train + corpus.validation + corpus.test
    assert len({en for en, _ in pairs}) == len({de for _, de in pairs}) == len(pairs)
    for en, de in pairs:
        assert len(en.split()) in LENGTHS
        assert en[0].isupper() and de[0].isupper() and en[-1] == de[-1] and en[-1] in ".?"


def test_same_seed_same_corpus():
    assert generate_corpus(300, 10, 10, seed=3) == generate_corpus(300, 10, 10, seed=3)
    assert generate_corpus(300, 10, 10, seed=3) != generate_corpus(300, 10, 10, seed=4)


def test_corpus_does_not_depend_on_the_hash_seed():
    # A bare package in place of the real one: its other modules take seconds to import and have no part in this.
    code = (
        "import sys, types; package = types.ModuleType('vaswani_transformer'); "
        "package.__path__ = ['vaswani_transformer']; sys.modules[package.__name__] = package; "
        "from vaswani_transformer.data.synthetic import generate_corpus; print(ascii(generate_corpus(200, 10, 10)))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": hash_seed}, cwd=ROOT,
            capture_output=True, check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]  # fmt: skip
    assert outputs[0] == outputs[1] != b""


def verb_forms():
    forms = {}
    for name, verb in VERBS.items():
        first_words = [form.split("_")[0] for form in verb.en.split()]
        forms |= dict.fromkeys([*first_words, third_person(first_words[0])], name)
    return forms


VERB_FORMS = verb_forms()
NUMBER_PAIRS = {number_words(10 * a + b)[0]: (str(a), str(b)) for a in range(2, 10) for b in range(1, 10)}
BEFORE_NOUN = {"the", "a", "an", "my", *ADJECTIVES, *(number_words(number)[0] for number in range(2, 100))}


def combinations_in(en, de):
    """The combinations of a pair, found in its text and not by the generator; no objects after a recipient."""
    plurals = {noun.en_plural: noun.en for noun in NOUNS.values()}
    words = [plurals.get(word, word) for word in tokens(en.lower())]
    found = {("number", *NUMBER_PAIRS[word]) for word in words if word in NUMBER_PAIRS}
    for left, right in pairwise(words):
        if left in COMPOUND_FIRST and right in COMPOUND_HEADS:
            found.add(("compound", left, right))
    for index, word in enumerate(words):
        verb = VERB_FORMS.get(word)
        if verb and VERBS[verb].takes and "to" not in VERBS[verb].options.split():
            rest = words[index + 1 + (verb == "look_for") :]
            while len(rest) > 1 and (rest[0] in BEFORE_NOUN or ("compound", rest[0], rest[1]) in found):
                rest = rest[1:]
            if rest and rest[0] in NOUNS:
                found.add(("verb", verb, rest[0]))
        if word in ADJECTIVES:
            head = index + 1
            while head + 1 < len(words) and ("compound", words[head], words[head + 1]) in found:
                head += 1
            if head < len(words) and words[head] in NOUNS:
                found.add(("adjective", word, words[head]))
            if words[index - 1] in ("is", "are"):
                found.add(("adjective", word, words[index - 2]))
            if words[index - 1] in NOUNS:  # "Is the lamp black?"
                found.add(("adjective", word, words[index - 1]))
    return found


def test_held_out_combinations_are_only_in_test(corpus):
    held = held_out_combinations(0)
    for pair in corpus.train + corpus.validation:
        assert not combinations_in(*pair) & held, pair
    missing = [pair for pair in corpus.test if not combinations_in(*pair) & held]
    # Where the text shows none, it must be a verb with a recipient and an object.
    assert len(missing) < TEST_SHARE["verb"] * len(corpus.test)
    verbs = {(verb, noun) for kind, verb, noun in held if kind == "verb" and "to" in VERBS[verb].options.split()}
    plurals = {noun.en_plural: noun.en for noun in NOUNS.values()}
    for en, _ in missing:
        words = [plurals.get(word, word) for word in tokens(en)]
        assert any((VERB_FORMS.get(verb), noun) in verbs for verb in words for noun in words), en


def test_verb_object_pair_names_the_object_and_not_the_phrase_after_it():
    table = prepositional_phrase("on", "auf", np("the", "table", "acc"))
    laid = clause("main", make(MAN, "lay", np("the", "key", "acc"), table))
    given = clause("main", make(MAN, "give", np("the", "child", "dat"), np("the", "book", "acc")))
    assert laid.combinations == {("verb", "lay", "key")}
    assert given.combinations == {("verb", "give", "book")}


def test_every_part_of_a_held_out_compound_or_number_is_in_training(corpus):
    seen = set().union(*(combinations_in(*pair) for pair in corpus.train))
    for kind, first, second in held_out_combinations(0):
        if kind in ("compound", "number"):
            assert any(other[:2] == (kind, first) for other in seen)
            assert any((other[0], other[2]) == (kind, second) for other in seen)


def test_every_other_word_is_in_training(corpus):
    known = {word for pair in corpus.train for text in pair for word in tokens(text)}
    held = held_out_combinations(0)
    assert not {w for pair in corpus.validation for text in pair for w in tokens(text)} - known
    new = [pair for pair in corpus.test if {w for text in pair for w in tokens(text)} - known]
    assert 0 < len(new) <= len(corpus.test) / 3
    for en, de in new:
        built = combinations_in(en, de) & held
        assert {kind for kind, _, _ in built} <= {"compound", "number"} and built
        allowed = set()
        for kind, first, second in built:
            if kind == "number":
                allowed |= set(number_words(10 * int(first) + int(second)))
            else:
                noun = compound(first, second)
                allowed |= {noun.de.lower(), noun.de_plural.lower(), noun.de_plural.lower() + "n"}
        assert {w.lower() for text in (en, de) for w in tokens(text) if w not in known} <= allowed


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (True, 1, 1), (10.5, 1, 1), (10**9, 1, 1), (5, 5, 5)]
)
def test_impossible_sizes(sizes):
    with pytest.raises(UserError) as caught:
        generate_corpus(*sizes)
    assert "\n" not in str(caught.value)
    assert "size" in str(caught.value)


def test_write_corpus(tmp_path):
    corpus = generate_corpus(200, 10, 10)
    paths = write_corpus(corpus, tmp_path / "new" / "folder")
    assert list(paths) == ["train.en", "train.de", "validation.en", "validation.de", "test.en", "test.de"]
    for split, pairs in vars(corpus).items():
        en, de = (paths[f"{split}.{lang}"].read_text(encoding="utf-8") for lang in ("en", "de"))
        assert en.endswith("\n") and "\r" not in en
        assert list(zip(en.splitlines(), de.splitlines(), strict=True)) == pairs


def test_write_corpus_refuses_a_file(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(UserError, match="taken"):
        write_corpus(SyntheticCorpus([], [], []), tmp_path / "taken")
