"""Terms that a translation has to have: a glossary, followed by a beam search that counts what is still missing.

Hypotheses are kept apart by how many tokens of terms they lack, and each of these groups keeps its best (dynamic beam
allocation: Post and Vilar, 2018, "Fast Lexically Constrained Decoding with Dynamic Beam Allocation"). A hypothesis may
not end before it has all its terms, and where its limit leaves no more room than they need, nothing else may follow: so
a term is in every output, however many beams there are. One that has come to its full stop without them is given up,
so that they are in the sentence, not behind it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from ..data.text_files import read_lines
from ..data.words import LETTERS_OR_SIGN, is_inner, is_part, stands_alone
from ..errors import UserError

MOST_BEAMS = 16  # that a search takes by itself to keep hypotheses with different terms apart
_WORD_STARTS = ("\u0120", "\u2581")  # what tokens begin with that begin a word: of byte-level BPE, of SentencePiece
_SIGN = "，"  # before a term that has no space before it
_OPENING = ("(", "[", '"', "'", "„", "“", "«", "»")  # what a term may follow without a space
_CODE = re.compile(r"%\(\w+\)|(?<!\w)[%$#]?\{[^{}\s]*\}|</?\w[^<>]*>")  # placeholders and tags, which are no words
_OPENED = -1  # begins the forms that count behind one of these alone


class Glossary:
    """By sources of terms the forms of their targets, one of which the translation of a text with the source has.

    Sources count as whole words (`data/words.py`); one in lower case matches any case.
    """

    def __init__(self, terms: Mapping[str, Sequence[str]]):
        self.terms = {normalize("NFC", source): tuple(forms) for source, forms in terms.items()}
        # By first words the lengths of terms, the longest first: of overlapping terms it is the one that counts.
        lengths: dict[str, set[int]] = {}
        for source in self.terms:
            lengths.setdefault(LETTERS_OR_SIGN.search(source)[0].lower(), set()).add(len(source))
        self._lengths = {word: sorted(values, reverse=True) for word, values in lengths.items()}

    def of(self, text: str) -> dict[str, tuple[str, ...]]:
        """Return the terms that occur in a text, in their order there."""
        text, terms, end = " ".join(normalize("NFC", text).split()), {}, 0
        in_code = {place for code in _CODE.finditer(text) for place in range(code.start() + 1, code.end())}
        for word in LETTERS_OR_SIGN.finditer(text):
            start = word.start()
            for length in self._lengths.get(word[0].lower(), ()) if start >= end and start not in in_code else ():
                piece = text[start : start + length]
                source = piece if piece in self.terms else piece.lower()
                if source in self.terms and not is_part(text, start, start + len(piece)):
                    terms[source], end = self.terms[source], start + len(piece)
                    break
        return terms


def make_glossary(entries: Iterable[tuple[str, str, Sequence[str]]]) -> Glossary:
    """Return a glossary of entries: the name of each in messages, its source, the forms of its target.

    Without forms the source is not translated; further entries of a source add forms.

    Raises:
        UserError: for an empty term.
    """
    terms: dict[str, list[str]] = {}
    for name, source, targets in entries:
        source, *forms = (" ".join(text.split()) for text in (source, *(targets or [source])))
        if not (source and all(forms)):
            raise UserError(f"{name} has an empty term: give source and target, or a word alone")
        terms.setdefault(source, []).extend(forms)
    return Glossary(terms)


def read_glossary(path: str | Path) -> Glossary:
    """Return a glossary from a file of lines `source TAB target`; several forms of a target are separated by `|`.

    A line of one word or words, without a tab, is never translated. Blank lines do not count.

    Raises:
        UserError: for a file that cannot be read, and for a line with an empty term or too many columns, naming it.
    """
    if str(path).lower().endswith((".csv", ".jsonl", ".tbx", ".tmx", ".xlsx", ".xml")):
        raise UserError(f"{path} is no text file: give lines of source TAB target")

    def entries() -> Iterator[tuple[str, str, Sequence[str]]]:
        for number, line in enumerate(read_lines(Path(path)), start=1):
            source, *columns = line.split("\t")
            if len(columns) > 1:
                raise UserError(f"line {number} of {path} has {len(columns) + 1} columns: give source TAB target")
            if line.strip() and (number > 1 or line.strip().lower() != "source\ttarget"):  # a header, as of memories
                yield f"line {number} of {path}", source, columns[0].split("|") if columns else []

    return make_glossary(entries())


class Tokens(NamedTuple):
    """Properties of a vocabulary's tokens that matter for terms."""

    continuing: frozenset[int] = frozenset()  # those that go on with a word, where a token shows that
    signs: frozenset[int] = frozenset()  # those without a letter or a digit
    opening: frozenset[int] = frozenset()  # those that end in "(" and the like

    @classmethod
    def of(cls, tokenizer) -> "Tokens":
        """Return those of a tokenizer's target side."""
        from ..data.tokenization import side_of

        tokenizer, continuing, signs, opening = side_of(tokenizer, "target"), set(), set(), set()
        vocabulary = tokenizer.get_vocab()
        has_starts = any(token.startswith(_WORD_STARTS) for token in vocabulary)
        for token, number in vocabulary.items():
            # As byte-level BPE writes them, characters beyond ASCII do not look like themselves.
            text = token if token.isascii() else tokenizer.convert_tokens_to_string([token])
            text = token if "\ufffd" in text else text
            continues = not token.startswith(_WORD_STARTS) if has_starts else token.startswith("##")
            if not any(map(is_inner, text)):
                signs.add(number)
                if text.endswith(_OPENING):
                    opening.add(number)
            elif continues and is_inner((text := text.removeprefix("##"))[:1]) and not stands_alone(text):
                continuing.add(number)
        return cls(*map(frozenset, (continuing, signs, opening)))


def term_forms(tokenizer, targets: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each form of a term's target, also without a space before it.

    A form that begins with `_OPENED`, which is no token, counts behind an opening sign alone.

    Raises:
        UserError: for a form that the vocabulary cannot write.
    """

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(text_target=texts, add_special_tokens=False)["input_ids"]

    forms = encode(list(targets))
    for text, form in zip(targets, forms, strict=True):
        if not form or tokenizer.unk_token_id in form:
            raise UserError(f"the model's vocabulary cannot write {text!r:.100} of the glossary: leave it out")
    signs = [_SIGN if stands_alone(text) else "(" for text in targets]
    for sign in dict.fromkeys(signs):
        first, *behind = encode([sign, *(sign + text for text, own in zip(targets, signs, strict=True) if own == sign)])
        joined = [ids[len(first) :] for ids in behind if ids[: len(first)] == first]
        forms += [[_OPENED, *ids] if sign == "(" else ids for ids in joined if ids and ids not in forms]
    return forms


class Progress(NamedTuple):
    """The terms that a hypothesis has, and those that it has begun."""

    met: frozenset[int] = frozenset()  # terms that it has
    ending: frozenset[int] = frozenset()  # those that it has if its last word goes no further
    begun: frozenset[tuple[int, int, int]] = frozenset()  # term, form, tokens of it that the hypothesis ends with


class Terms:
    """The forms of the terms that one translation has to have, in token ids.

    Args:
        forms: for each term its forms, none of them empty.
        tokens: what tokens mean: before those that continue a word a form has not come to its end.
    """

    def __init__(self, forms: Sequence[Sequence[Sequence[int]]], tokens: Tokens = Tokens()):  # noqa: B008
        self.forms = [[tuple(ids) for ids in variants] for variants in forms]
        self.tokens = tokens
        self._all = frozenset(range(len(self.forms)))
        self._shortest = [min(len(ids) for ids in variants if ids[0] != _OPENED) for variants in self.forms]
        self._firsts: dict[int, list[tuple[int, int]]] = {}  # the forms that a token begins
        for term, variants in enumerate(self.forms):
            for form, ids in enumerate(variants):
                self._firsts.setdefault(ids[0], []).append((term, form))

    def after(self, progress: Progress, token: int) -> Progress:
        """Return the progress of a hypothesis with one more token."""
        met = progress.met if token in self.tokens.continuing else progress.met | progress.ending
        begun = {
            (term, form, done + 1)
            for term, form, done in progress.begun
            if term not in met and self.forms[term][form][done] == token
        }
        starts = (token, _OPENED) if token in self.tokens.opening else (token,)
        begun |= {(term, form, 1) for start in starts for term, form in self._firsts.get(start, ()) if term not in met}
        ending = frozenset(term for term, form, done in begun if done == len(self.forms[term][form]))
        begun = frozenset(entry for entry in begun if entry[2] < len(self.forms[entry[0]][entry[1]]))
        return Progress(met, ending, begun)

    def has_begun(self, progress: Progress) -> bool:
        """Return whether a hypothesis ends with some of a term, a sign before it aside."""
        return any(done > 1 or self.forms[term][form][0] != _OPENED for term, form, done in progress.begun)

    def lacks(self, progress: Progress) -> int:
        """Return the least number of tokens that make a hypothesis whole."""
        lacking = {term: self._shortest[term] for term in self._all - progress.met - progress.ending}
        for term, form, done in progress.begun:
            if term in lacking:
                lacking[term] = min(lacking[term], len(self.forms[term][form]) - done)
        return sum(lacking.values())

    def wanted(self, progress: Progress) -> set[int]:
        """Return the tokens that bring a hypothesis on."""
        missing = self._all - progress.met - progress.ending
        following = {self.forms[term][form][done] for term, form, done in progress.begun if term in missing}
        return following | {ids[0] for term in missing for ids in self.forms[term]} - {_OPENED}


def beams_for(terms: Terms, num_beams: int) -> int:
    """Return the beams of a search for these terms, if `num_beams` are asked for: one for each group, within reason."""
    return max(num_beams, min(MOST_BEAMS, terms.lacks(Progress()) + 2))
