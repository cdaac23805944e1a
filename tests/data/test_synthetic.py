"""The synthetic corpus: German checked against translations by hand, and the held-out property."""

import hashlib
import re

import pytest
from conftest import error_of

from vaswani_transformer.data.synthetic import NUMBERS, WORDS, generate_corpus, is_held_out

BY_HAND = """
The pig will eat an apple.
Das Schwein wird einen Apfel essen.
A cow wants to ask my woman.
Eine Kuh will meine Frau fragen.
My cow has called my dog in the dark house.
Meine Kuh hat meinen Hund im dunklen Haus gerufen.
In summer the small bird sees an apple in front of an old city.
Im Sommer sieht der kleine Vogel einen Apfel vor einer alten Stadt.
Forty-six young doctors have shown two pictures.
Sechsundvierzig junge Ärzte haben zwei Bilder gezeigt.
On Friday seventy-one big horses have sold three dogs.
Am Freitag haben einundsiebzig große Pferde drei Hunde verkauft.
Three dogs want to visit my school because seventy-seven pigs can paint my flower.
Drei Hunde wollen meine Schule besuchen, weil siebenundsiebzig Schweine meine Blume malen können.
My dog will see seventy-three dark cities if the horse can hear my father on Monday.
Mein Hund wird dreiundsiebzig dunkle Städte sehen, wenn das Pferd am Montag meinen Vater hören kann.
"""


@pytest.fixture(scope="module")
def corpus():
    return generate_corpus(2_000, 60, 120)


def test_german_is_that_of_a_translator(corpus):
    lines = BY_HAND.strip().splitlines()
    assert set(zip(lines[::2], lines[1::2], strict=True)) <= set(corpus.train)


def test_sizes_and_no_overlap(corpus):
    assert [len(split) for split in vars(corpus).values()] == [2_000, 60, 120]
    pairs = corpus.train + corpus.validation + corpus.test
    assert len({en for en, _ in pairs}) == len({de for _, de in pairs}) == len(pairs)
    for en, de in pairs:
        assert en[0].isupper() and de[0].isupper() and en[-1] == de[-1] == "."
    assert "raise train_size" in error_of(generate_corpus, 1, 1, 1)


def test_a_seed_gives_the_same_corpus_in_every_process_and_version():
    """The demo's figures are those of these sentences."""
    for seed, expected in ((3, "4d6059238492dd78"), (4, "97079ed2b0589c4b")):
        pairs = repr(list(vars(generate_corpus(300, 10, 10, seed)).values()))
        assert hashlib.sha256(pairs.encode()).hexdigest()[:16] == expected


def wordings() -> dict[str, tuple[str, str, str]]:
    """English patterns by which each combination shows, with the combination."""
    nouns = [row.split()[:2] for rows in WORDS.nouns.values() for row in rows]
    adjectives = {row.split()[0] for rows in WORDS.adjectives.values() for row in rows}
    patterns = {number: ("number", number, german) for number, german in NUMBERS if "-" in number}
    for noun, plural in nouns:
        patterns |= {f"{word} ({noun}|{plural})": ("adjective", word, noun) for word in adjectives}
        for forms, _, _ in WORDS.verbs:  # a determiner and perhaps an adjective stand between the two
            pattern = f"({'|'.join(forms.split())}) [a-z-]+ ([a-z]+ )?({noun}|{plural})"
            patterns[pattern] = "verb", forms.split()[1], noun
    return patterns


def test_held_out_combinations_are_in_each_test_sentence_and_nowhere_else(corpus):
    held = "|".join(text for text, combination in wordings().items() if is_held_out(combination))
    held = re.compile(rf"\b({held})\b")
    assert not [pair for pair in corpus.train + corpus.validation if held.search(pair[0].lower())]
    assert all(held.search(en.lower()) for en, _ in corpus.test)


def test_only_a_held_out_number_is_new_in_the_test_set(corpus):
    known = set(re.findall(r"[^\s.,]+", " ".join(sum(corpus.train, ())).lower()))
    new = set(re.findall(r"[^\s.,]+", " ".join(sum(corpus.test, ())).lower())) - known
    assert new and new <= {word for number in NUMBERS if is_held_out(("number", *number)) for word in number}
