"""A deterministic English-German corpus from a small grammar, with held-out combinations of known words.

The German side is fully determined by the English side: gender, case, number, verb position, separable prefixes,
compounds and number words all follow from the source sentence. Every test sentence contains a combination (adjective
with noun, verb with object noun, compound, or number word) that no training or validation sentence contains, while
each single word of it is a word of the training set; only a held-out compound or number is itself a new word there,
made of parts that training shows in other compounds and numbers.
"""

import random
import re
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import yaml

from ..errors import UserError

WORDS = SimpleNamespace(**yaml.safe_load((resources.files(__package__) / "lexicon.yaml").read_text("utf-8")))

# Rows of `lexicon.yaml`, which describes them. An adjective's `de` is its predicate form, its `stem` takes endings.
# `takes` of an adjective or verb are the kinds of noun, or the nouns by their English words, that go with it.
Noun = namedtuple("Noun", "en en_plural de gender de_plural kind")
Adjective = namedtuple("Adjective", "en de stem takes")
Verb = namedtuple("Verb", "en infinitive forms participle takes options", defaults=("", ""))

NOUNS = {row.split()[0]: Noun(*row.split(), kind) for kind, rows in WORDS.nouns.items() for row in rows}
ADJECTIVES = {row.split()[0]: Adjective(*row.split(), to) for to, rows in WORDS.adjectives.items() for row in rows}
VERBS = {row[0].split()[0]: Verb(*row) for row in WORDS.verbs}
Combination = tuple[str, str, str]  # kind ("adjective", "verb", "compound" or "number"), first part, second part


@dataclass(frozen=True)
class SyntheticCorpus:
    """The three splits, each a list of (English, German) sentence pairs."""

    train: list[tuple[str, str]]
    validation: list[tuple[str, str]]
    test: list[tuple[str, str]]


class Phrase(NamedTuple):
    """A piece of text in both languages, with the person and number that its verb agrees with."""

    en: str
    de: str
    agreement: str = "3sg"
    is_pronoun: bool = False


@dataclass(frozen=True)
class Clause:
    """The choices for one clause; `tense` is "present", "past", "perfect" or the English name of a modal verb."""

    subject: Phrase
    verb: Verb
    objects: Sequence[Phrase] = ()
    tense: str = "present"
    place: Phrase | None = None
    time: Phrase | None = None


HELD_OUT_SHARE = {"adjective": 0.12, "verb": 0.12, "compound": 0.15, "number": 0.15}
TEST_SHARE = {"adjective": 0.4, "verb": 0.35, "compound": 0.125, "number": 0.125}
TENSES = ("present", "present", "past", "perfect", *WORDS.modals)  # as often as they are listed
LENGTHS = range(3, 17)  # words of the English sentence
PATIENCE = 10_000  # draws in a row without a usable sentence after which a split counts as impossible


def number_words(number: int) -> tuple[str, str]:
    """Return the English and German words for a number from 2 to 99."""
    en, de = WORDS.english_numbers.split(), WORDS.german_numbers.split()
    tens, unit = divmod(number, 10)
    if number < 20 or unit == 0:
        index = number if number < 20 else 18 + tens
        return en[index], de[index]
    return f"{en[18 + tens]}-{en[unit]}", f"{de[unit]}und{de[18 + tens]}"


def compound(first: str, head: str) -> Noun:
    """Return the compound noun of an English first part and an English head, which gives it gender, plural and kind."""
    noun, link = NOUNS[head], WORDS.compound_first[first]
    de, de_plural = link + noun.de.lower(), link + noun.de_plural.lower()
    return noun._replace(en=f"{first} {noun.en}", en_plural=f"{first} {noun.en_plural}", de=de, de_plural=de_plural)


def noun_phrase(
    determiner: str, noun: Noun, case: str = "nom", adjective: Adjective | None = None, plural: bool = False
) -> Phrase:
    """Return a noun phrase in `case` ("nom", "acc", "dat"); `determiner` is "the", "a", "my" or a number in digits."""
    plural = plural or determiner.isdigit()
    column = 3 if plural else "mfn".index(noun.gender)
    en_words = [adjective.en] if adjective else []
    en_words.append(noun.en_plural if plural else noun.en)
    if determiner.isdigit():
        (en_determiner, de_determiner), endings = number_words(int(determiner)), WORDS.strong
    elif determiner == "the":
        en_determiner, de_determiner, endings = "the", WORDS.definite[case].split()[column], WORDS.weak
    else:
        en_determiner = "an" if determiner == "a" and en_words[0][0] in "aeiou" else determiner
        de_determiner = {"a": "ein", "my": "mein"}[determiner] + WORDS.indefinite[case].split()[column].strip("-")
        endings = WORDS.mixed
    de_words = [de_determiner]
    if adjective:
        de_words.append(adjective.stem + endings[case].split()[column])
    # A dative plural takes an n unless the plural ends in n or s.
    dative_n = "n" if case == "dat" and noun.de_plural[-1] not in "ns" else ""
    de_words.append(noun.de_plural + dative_n if plural else noun.de)
    return Phrase(" ".join([en_determiner, *en_words]), " ".join(de_words), "3pl" if plural else "3sg")


def pronoun(subject: str, case: str = "nom") -> Phrase:
    """Return a personal pronoun, named by its English subject form, in `case`."""
    en_object, agreement, *forms = WORDS.pronouns[subject].split()
    en, de = subject if case == "nom" else en_object, forms[("nom", "acc", "dat").index(case)]
    return Phrase(en, de, agreement, is_pronoun=True)


def prepositional_phrase(en: str, de: str, phrase: Phrase) -> Phrase:
    """Return a preposition with a noun phrase already in its case; "in dem" and "in das" contract to "im" and "ins"."""
    return Phrase(f"{en} {phrase.en}", re.sub("^in das ", "ins ", re.sub("^in dem ", "im ", f"{de} {phrase.de}")))


def third_person(base: str) -> str:
    """Return the English third person singular of the present tense."""
    word, space, particle = base.partition(" ")
    return re.sub("(?<=[^aeiou])y$", "ie", re.sub("(?<=[sc]h)$", "e", word)) + "s" + space + particle


def english_verb(verb: Verb, tense: str, agreement: str) -> tuple[str, str, str]:
    """Return the verb of a statement, then the auxiliary and the remainder that enclose the subject in a question."""
    base, past, participle = (form.replace("_", " ") for form in verb.en.split())
    if base == "be":
        form = {"1sg": "am", "3sg": "is"}.get(agreement, "are")
        return form, form, ""
    singular = agreement == "3sg"
    do, have, want = ("does", "has", "wants to") if singular else ("do", "have", "want to")
    return {
        "present": (third_person(base) if singular else base, do, base),
        "past": (past, "did", base),
        "perfect": (f"{have} {participle}", have, participle),
        "want to": (f"{want} {base}", do, f"want to {base}"),
    }.get(tense, (f"{tense} {base}", tense, base))


def german_verb(verb: Verb, tense: str, agreement: str) -> tuple[str, str]:
    """Return the finite verb and the end of a main clause: prefix, participle, infinitive or nothing."""
    index = WORDS.agreement.index(agreement)
    *prefixes, stem = verb.infinitive.split("|")
    prefix = "".join(prefixes)
    if tense == "present":
        plural = "sind" if verb.infinitive == "sein" else stem
        return [*verb.forms.split(), plural, plural][index], prefix
    # Spoken German tells a single past event in the perfect, so both English past tenses become it.
    if tense in ("past", "perfect"):
        return WORDS.auxiliaries["sein" if "sein" in verb.options else "haben"].split()[index], verb.participle
    return WORDS.auxiliaries[tense].split()[index], prefix + stem


def clause(kind: str, parts: Clause, front: Phrase | None = None) -> Phrase:
    """Return the words of a clause in the order of `kind`: "main", "question", "inverted" or "subordinate".

    `front` is the time or the place of a main clause that starts with it. "inverted" is the order of a main clause that
    follows a subordinate clause; English then keeps the order of a statement.
    """
    subject, fronted = parts.subject, front or Phrase("", "")
    rest = [phrase for phrase in (*parts.objects, parts.place, parts.time) if phrase not in (None, front)]
    statement, auxiliary, remainder = english_verb(parts.verb, parts.tense, subject.agreement)
    verb_words = [auxiliary, subject.en, remainder] if kind == "question" else [subject.en, statement]
    en = [fronted.en, *verb_words, *(phrase.en for phrase in rest)]

    finite, final = german_verb(parts.verb, parts.tense, subject.agreement)
    # Unstressed pronouns come first in the middle field, then the time, then noun objects and the place.
    middle = [p.de for p in sorted(rest, key=lambda p: 0 if p.is_pronoun else 1 if p is parts.time else 2)]
    if kind == "subordinate":
        de = [subject.de, *middle, final + finite if parts.tense == "present" else f"{final} {finite}"]
    elif kind == "main" and not front:
        de = [subject.de, finite, *middle, final]
    else:
        de = [fronted.de, finite, subject.de, *middle, final]
    return Phrase(" ".join(filter(None, en)), " ".join(filter(None, de)))


def sentence(en: str, de: str, *clauses: Phrase, end: str = ".") -> tuple[str, str]:
    """Return a sentence of templates such as "{0} because {1}", one slot a clause, with capital and final mark."""
    en, de = en.format(*(c.en for c in clauses)) + end, de.format(*(c.de for c in clauses)) + end
    return en[0].upper() + en[1:], de[0].upper() + de[1:]


@cache  # the tables never change
def allowed(takes: str) -> tuple[Noun, ...]:
    """Return the nouns whose kind or English word is in `takes`."""
    return tuple(noun for noun in NOUNS.values() if {noun.kind, noun.en} & set(takes.split()))


class Draft:
    """A sentence that is drawn at random: `en` and `de`.

    `nouns` are the English head nouns in it; `combinations` its combinations, each with the words in lower case that
    exist through it alone, those of a compound or a number.
    """

    def __init__(self, rng: random.Random):
        self._random = rng.random  # this alone: Python promises to keep it the same in every version
        self.nouns: list[str] = []
        self.combinations: dict[Combination, set[str]] = {}
        self.en, self.de = self._sentence()

    def _pick(self, items: Sequence) -> Any:
        return items[int(self._random() * len(items))]

    def _noun_phrase(self, takes: str, case: str, singular: bool = False) -> Phrase:
        """Draw a noun phrase with a noun from `takes`."""
        noun, chance = self._pick(allowed(takes)), self._random()
        adjective, first = None, None
        if self._random() < 0.35:
            adjective = self._pick([entry for entry in ADJECTIVES.values() if noun in allowed(entry.takes)])
            self.combinations["adjective", adjective.en, noun.en] = set()
        self.nouns.append(noun.en)
        if noun.en in WORDS.compound_heads and self._random() < 0.45:
            first = self._pick(list(WORDS.compound_first))
            noun = compound(first, noun.en)
        if singular or chance < 0.7:
            phrase = noun_phrase(self._pick(("the", "the", "the", "a", "a", "my")), noun, case, adjective)
        elif chance < 0.84 or noun.kind == "place":
            phrase = noun_phrase(self._pick(("the", "the", "my")), noun, case, adjective, plural=True)
        else:
            number = 2 + int(self._random() * 98)
            phrase = noun_phrase(str(number), noun, case, adjective)
            if number > 20 and number % 10:
                self.combinations["number", str(number // 10), str(number % 10)] = set(number_words(number))
        if first:
            self.combinations["compound", first, self.nouns[-1]] = {phrase.de.split()[-1].lower()}
        return phrase

    def _person(self, case: str, takes: str = "person", avoid: Phrase | None = None) -> Phrase:
        """Draw a noun phrase or pronoun; a pronoun of the first or second person is never also that of `avoid`."""
        if self._random() < 0.7:
            return self._noun_phrase(takes, case)
        taken = avoid.agreement[0] if avoid and avoid.agreement[0] != "3" else None
        return pronoun(self._pick([en for en, row in WORDS.pronouns.items() if row.split()[1][0] != taken]), case)

    def _place(self, table: dict[str, tuple[str, str]], en: str, case: str) -> Phrase:
        """Draw a phrase of place or direction with the English preposition `en` of `table`."""
        return prepositional_phrase(en, table[en][0], self._noun_phrase(table[en][1], case, singular=True))

    def _clause(self, tenses: Sequence[str] = TENSES) -> Clause:
        """Draw the choices for a clause in one of the tenses."""
        tense = self._pick(tenses)
        if tense == "present" and self._random() < 0.2:
            adjective = self._pick(list(ADJECTIVES.values()))
            subject = self._noun_phrase(adjective.takes, "nom")
            self.combinations["adjective", adjective.en, self.nouns[-1]] = set()
            return Clause(subject, VERBS["be"], [Phrase(adjective.en, adjective.de)])
        verb = self._pick([verb for name, verb in VERBS.items() if name not in ("be", *WORDS.matrix_verbs)])
        options = verb.options.split()
        subject = self._person("nom", "person animal" if "animal" in options else "person")
        objects, place = [], None
        if "to" in options:
            objects.append(self._person("dat", avoid=subject))
        if verb.takes:
            personal = "person" in verb.takes.split() and self._random() < 0.4
            case = "dat" if "dat" in options else "acc"
            objects.append(self._person(case, avoid=subject) if personal else self._noun_phrase(verb.takes, case))
            if not objects[-1].is_pronoun:
                self.combinations["verb", verb.en.split()[0], self.nouns[-1]] = set()
        elif "with" in options and self._random() < 0.5:
            objects.append(prepositional_phrase("with", "mit", self._person("dat", avoid=subject)))
        if goals := [option for option in options if option in WORDS.goals]:
            objects.append(self._place(WORDS.goals, goals[0], "acc"))
        elif "for" in options and self._random() < 0.4:
            objects.append(prepositional_phrase("for", "für", self._person("acc", avoid=subject)))
        elif "place" in options or self._random() < 0.3:
            place = self._place(WORDS.places, self._pick(("in", "in", *WORDS.places)), "dat")
        wanted = "modal" if tense in WORDS.modals else tense
        rows = [row for tenses, rows in WORDS.times.items() if wanted in tenses.split() for row in rows]
        time = Phrase(*self._pick(rows).split("/")) if self._random() < 0.35 else None
        return Clause(subject, verb, objects, tense, place, time)

    def _sentence(self) -> tuple[str, str]:
        """Draw a sentence of any type and length."""
        kind = self._random()
        if kind < 0.6:
            parts = self._clause()
            fronts = [phrase for phrase in (parts.time, parts.place) if phrase] if self._random() < 0.6 else []
            return sentence("{0}", "{0}", clause("main", parts, self._pick(fronts) if fronts else None))
        if kind < 0.7:
            return sentence("{0}", "{0}", clause("question", self._clause()), end="?")
        if kind < 0.8:
            main, sub = clause("main", self._clause()), clause("subordinate", self._clause())
            return sentence("{0} because {1}", "{0}, weil {1}", main, sub)
        if kind < 0.9:
            main = clause("main", Clause(self._person("nom"), VERBS[self._pick(WORDS.matrix_verbs)]))
            return sentence("{0} that {1}", "{0}, dass {1}", main, clause("subordinate", self._clause()))
        sub, parts = clause("subordinate", self._clause(("present",))), self._clause(("present", "will", "can"))
        if kind < 0.95:
            return sentence("{0} if {1}", "{0}, wenn {1}", clause("main", parts), sub)
        return sentence("if {0}, {1}", "wenn {0}, {1}", sub, clause("inverted", parts))


def held_out_combinations(seed: int = 0) -> frozenset[Combination]:
    """Return the combinations that only the test set of this seed contains."""
    rng = random.Random(seed)
    pairs = {
        "adjective": [(a.en, noun.en) for a in ADJECTIVES.values() for noun in allowed(a.takes)],
        "verb": [(name, noun.en) for name, verb in VERBS.items() for noun in allowed(verb.takes)],
        "compound": [(first, head) for first in WORDS.compound_first for head in WORDS.compound_heads],
        "number": [(str(tens), str(unit)) for tens in range(2, 10) for unit in range(1, 10)],
    }
    held = []
    for kind, candidates in pairs.items():
        shuffled = sorted(candidates, key=lambda _: rng.random())
        held += [(kind, *pair) for pair in shuffled[: round(HELD_OUT_SHARE[kind] * len(shuffled))]]
    return frozenset(held)


def generate_corpus(
    train_size: int = 24_000, validation_size: int = 500, test_size: int = 500, seed: int = 0
) -> SyntheticCorpus:
    """Generate sentence pairs, no sentence of either language twice; the same seed gives the same corpus.

    Every validation and test word occurs in training, held-out compounds and numbers excepted. Raises `UserError` for
    sizes that the grammar cannot supply.
    """
    rng, held = random.Random(seed), held_out_combinations(seed)
    seen, known = set(), set()

    def fill(name: str, size: int, kinds: set[str]) -> list[tuple[str, str]]:
        pairs, misses = [], 0
        while len(pairs) < size and misses <= PATIENCE:
            drawn = Draft(rng)
            new, words = drawn.combinations.keys() & held, set(re.findall(r"[^\s.,?]+", f"{drawn.en} {drawn.de}"))
            usable = {kind for kind, _, _ in new} == kinds and seen.isdisjoint((drawn.en, drawn.de))
            usable &= len(drawn.en.split()) in LENGTHS and len(set(drawn.nouns)) == len(drawn.nouns)
            if usable and name != "train_size":
                built = set().union(*(drawn.combinations[combination] for combination in new))
                usable = all(word.lower() in built for word in words - known)
            misses = 0 if usable else misses + 1
            if usable:
                seen.update((drawn.en, drawn.de))
                pairs.append((drawn.en, drawn.de))
                known.update(words if name == "train_size" else ())
        if len(pairs) < size:
            rule = f"{train_size} training pairs do not supply the words for so many new sentences"
            raise UserError(f"{name}={size}: {rule}; raise train_size or lower {name}")
        return pairs

    train = fill("train_size", train_size, set())
    validation = fill("validation_size", validation_size, set())
    test, reached = [], 0.0
    for kind, share in TEST_SHARE.items():
        reached += share
        test += fill("test_size", round(reached * test_size) - len(test), {kind})
    return SyntheticCorpus(train, validation, test)


def write_corpus(corpus: SyntheticCorpus, folder: str | Path) -> None:
    """Write "train.en", "train.de", "validation.en" and so on in UTF-8, one sentence a line."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in vars(corpus).items():
        for column, language in enumerate(("en", "de")):
            lines = "".join(pair[column] + "\n" for pair in pairs)
            (folder / f"{split}.{language}").write_bytes(lines.encode("utf-8"))
