"""A deterministic English-German corpus from a small grammar, with held-out combinations of known words.

The German side is fully determined by the English side: gender, case, number words and the place of the verb. Every
test sentence holds a combination (adjective with noun, verb with object, or number) that no other split has, of words
that training has; only a held-out number is itself a new word, made of parts that training shows in other numbers.
"""

import random
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from ..errors import UserError
from ..json_and_yaml import read_yaml

WORDS = SimpleNamespace(**read_yaml(Path(__file__).with_name("lexicon.yaml")))
UNITS, TENS = ([row.split("/") for row in rows] for rows in (WORDS.units, WORDS.tens))
NUMBERS = 5 * UNITS[1:] + [[f"{tens[0]}-{unit[0]}", f"{unit[1]}und{tens[1]}"] for tens in TENS for unit in UNITS]
KINDS, HELD_OUT = ("adjective", "verb", "number"), 0.12  # of combinations, and the share that is held out
LONGEST, PATIENCE = 16, 10_000  # English words of a sentence; draws in a row without one after which there is none
# Clauses in English and German; in the second the time comes first, the third follows a main clause.
ORDERS = {
    "main": ("{subject} {verb} {object} {place} {time}", "{subject} {finite} {time} {object} {place} {final}"),
    "fronted": ("{time} {subject} {verb} {object} {place}", "{time} {finite} {subject} {object} {place} {final}"),
    "subordinate": ("{subject} {verb} {object} {place} {time}", "{subject} {time} {object} {place} {final} {finite}"),
}


class Draft:
    """A sentence that is drawn at random: `text` in both languages, and the `combinations` of words in it."""

    def __init__(self, rng: random.Random):
        self._random, self._nouns = rng.random, []  # `random` alone: Python keeps it the same in every version
        self.combinations: set[tuple[str, str, str]] = set()  # one of `KINDS`, and two words
        en, de = self._clause(self._pick(["main", "fronted"]))
        if self._random() < 0.3:
            joined, second = self._pick(WORDS.conjunctions).split("/"), self._clause("subordinate")
            en, de = f"{en} {joined[0]} {second[0]}", f"{de}, {joined[1]} {second[1]}"
        self.text = f"{en[0].upper()}{en[1:]}.", f"{de[0].upper()}{de[1:]}."

    def _pick(self, items: list):
        return items[int(self._random() * len(items))]

    def _noun_phrase(self, kinds: list[str], case: str) -> tuple[list[str], bool]:
        """Draw a noun phrase with a noun that is new in the sentence; returns it, and whether it is a plural."""
        kind = self._pick(kinds)
        noun = self._pick([noun for noun in WORDS.nouns[kind] if noun not in self._nouns])
        self._nouns.append(noun)
        en, en_plural, de, gender, de_plural = noun.split()
        if plural := case != "dat" and self._random() < 0.2:
            (en_first, de_first), ending, en, de = self._pick(NUMBERS), "e", en_plural, de_plural
            self.combinations |= {("number", en_first, de_first)} if "-" in en_first else set()
        else:
            en_first = self._pick(["the", "the", "a", "my"])
            de_first, ending = WORDS.determiners[en_first][case]["mfn".index(gender)].split()
        if self._random() < 0.35:
            adjective, stem = self._pick(WORDS.adjectives[kind]).split()
            self.combinations.add(("adjective", adjective, noun.split()[0]))
            en, de = f"{adjective} {en}", f"{stem}{ending} {de}"
        en_first = "an" if en_first == "a" and en[0] in "aeiou" else en_first
        return [f"{en_first} {en}", f"{de_first} {de}"], plural

    def _clause(self, order: str) -> list[str]:
        """Draw a clause of one of the `ORDERS`."""
        subject, plural = self._noun_phrase(["person", "person", "animal"], "nom")
        en_forms, de_forms, kinds = (column.split() for column in self._pick(WORDS.verbs))
        (thing, _), tense, place = self._noun_phrase(kinds, "acc"), self._pick(WORDS.tenses), ("", "")
        self.combinations.add(("verb", en_forms[1], self._nouns[-1].split()[0]))
        if self._random() < 0.3:
            en, de, where = *self._pick(WORDS.prepositions).split("/"), self._noun_phrase(["place"], "dat")[0]
            place = f"{en} {where[0]}", f"{de} {where[1]}".replace("in dem ", "im ")
        has_time = order == "fronted" or self._random() < 0.25
        time = self._pick(WORDS.times).split("/") if has_time else ("", "")
        verb = {"verb": tense[plural].format(*en_forms), "final": tense[4].format(*de_forms)}
        verb["finite"] = tense[2 + plural].format(*de_forms)
        sides = zip(ORDERS[order], subject, thing, place, time, strict=True)
        filled = (text.format(subject=a, object=b, place=c, time=d, **verb) for text, a, b, c, d in sides)
        return [re.sub(" +", " ", text).strip() for text in filled]


@cache
def is_held_out(combination: tuple[str, str, str], seed: int = 0) -> bool:
    """Return whether only the test set of this seed contains a combination."""
    return random.Random(f"{seed} {combination}").random() < HELD_OUT


def generate_corpus(
    train_size: int = 24_000, validation_size: int = 500, test_size: int = 500, seed: int = 0
) -> SimpleNamespace:
    """Generate (English, German) pairs for `train`, `validation` and `test`, no sentence twice; the same for one seed.

    Every validation and test word occurs in training, held-out numbers excepted; the test set holds as many sentences
    of each kind of combination. Raises `UserError` for sizes that the grammar cannot supply.
    """
    rng, splits, known, misses = random.Random(seed), ([], [], []), set(), 0  # `known` are sentences and their words
    for split, size in zip(splits, (train_size, validation_size, test_size), strict=True):
        while len(split) < size:
            drawn = Draft(rng)
            new = {combination for combination in drawn.combinations if is_held_out(combination, seed)}
            wanted = {KINDS[len(split) % len(KINDS)]} if split is splits[2] else set()
            words = set(re.findall(r"[^\s.,]+", " ".join(drawn.text).lower()))
            numbers = {word for kind, *pair in new if kind == "number" for word in pair}
            usable = {kind for kind, *_ in new} == wanted and known.isdisjoint(drawn.text)
            usable &= (split is splits[0] or words - known <= numbers) and drawn.text[0].count(" ") < LONGEST
            misses = 0 if usable else misses + 1
            if usable:
                split.append(drawn.text)
                known.update(words, drawn.text)
            if misses > PATIENCE:
                raise UserError(f"{train_size} training pairs do not have the words for so many: raise train_size")
    return SimpleNamespace(train=splits[0], validation=splits[1], test=splits[2])


def write_corpus(corpus: SimpleNamespace, folder: str | Path) -> None:
    """Write "train.en", "train.de", "validation.en" and so on in UTF-8, one sentence a line."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, pairs in vars(corpus).items():
        for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            Path(folder, f"{split}.{language}").write_text("".join(line + "\n" for line in lines), "utf-8", newline="")
