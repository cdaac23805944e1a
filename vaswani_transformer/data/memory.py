"""A translation memory: exact and near matches of sources among earlier translations, in flat arrays.

The target of a near match is shown to a model that was trained so, as `SOURCE <TM> TARGET` (neural fuzzy repair: Bulté
and Tezcan, 2019, ACL P19-1175; Xu et al., 2020, ACL 2020.acl-main.144).
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, floor
from unicodedata import normalize

import numpy as np

from ..errors import reading
from ..model.language_codes_vaswani import typed_code
from .text_files import home_path
from .words import LETTERS_OR_SIGN

LEAST = 0.5  # similarity of a match
_MOST_ROWS, _MOST_COMPARED = 20_000, 300  # about so many are looked up by the rarest words; those that share most
Match = tuple[float, str, str]  # similarity: 1 less the edit distance by the longer text's words; source; target
_TINY = 1e-6  # above errors of rounding, rapidfuzz's too


def _normalized(text: str) -> str:
    return " ".join(normalize("NFC", text).split())


def _words(text: str) -> list[str]:
    """Return words, each with the language's code before the text: one of another language has none in common."""
    code, text = typed_code(text)
    return [code.strip() + word for word in LETTERS_OR_SIGN.findall(text)]


class Memory:
    """Pairs of texts, of which none is blank, in about 400 bytes each; of those with one source the latest counts.

    `contexts` has the targets of catalogues' sources by their contexts, blank for those without one.
    """

    TAG = "<TM>"  # between a source and the target of its match

    def __init__(self, pairs: Iterable[tuple[str, str]], contexts: dict[str, dict[str, str]] | None = None):
        vocabulary: dict[str, int] = {}  # words, in the order of their first use
        hashes, words, lengths, ends, self.text = array("q"), array("i"), array("i"), array("q", [0]), bytearray()
        for source, target in filter(all, ((_normalized(source), target.strip()) for source, target in pairs)):
            found = _words(source)
            words.extend([vocabulary.setdefault(word, len(vocabulary)) for word in found])
            lengths.append(len(found))
            hashes.append(hash(source))
            self.text += f"{source}\n{target}".encode()
            ends.append(len(self.text))
        self._contexts = contexts or {}  # which the pairs may have filled
        self._known = set().union(*self._contexts.values())
        self._ends = np.asarray(ends)
        self._hashes, last = np.unique(np.asarray(hashes)[::-1], return_index=True)  # with 64 bits each of one source
        self._of_hash = len(hashes) - 1 - last
        # Rows are entries by their length in words: those of about the length of a source follow each other.
        latest, lengths = np.sort(self._of_hash), np.asarray(lengths)
        self._entries = latest[np.argsort(lengths[latest], kind="stable")]
        self._lengths = lengths[self._entries]
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)])
        moves = np.cumsum(lengths)[self._entries] - self._starts[1:]
        words = np.asarray(words)[np.arange(self._starts[-1]) + np.repeat(moves, self._lengths)]
        ranks = np.argsort(np.argsort(-np.bincount(words, minlength=len(vocabulary)), kind="stable"))
        self._ranks = dict(zip(vocabulary, ranks.tolist(), strict=True))  # 0 is the most frequent word
        self._words = _as_text(ranks[words])
        # Each row is found by as many of its rarest words as `_rarest` says.
        number, size = max(1, len(self._lengths)), max(1, len(ranks))
        keys = np.repeat(np.arange(len(self._lengths)) * size, self._lengths) + (size - 1 - ranks[words])
        keys.sort()  # by rows, the rarest word first
        ends = self._starts[:-1] + _rarest(self._lengths, LEAST)
        keys = keys[np.arange(len(keys)) < np.repeat(ends, self._lengths)]
        keys = (size - 1 - keys % size) * number + keys // size
        keys.sort()  # by words
        keys = keys[np.diff(keys, prepend=-1) > 0]  # a row may have a word twice
        self._rows = (keys % number).astype(np.int32)
        self._first = np.searchsorted(keys, np.arange(size + 1) * number)  # of each word

    def _entry(self, number: np.integer) -> list[str]:
        return self.text[self._ends[number] : self._ends[number + 1]].decode().split("\n", 1)

    def exact(self, source: str, context: str | None = None) -> str | None:
        """Return the target of a source, but for white space and forms of characters; None for one that is new.

        With a context that the memory has, an entry of a catalogue counts in the same one only.
        """
        source = _normalized(source)
        if context in self._known and source in self._contexts:
            return self._contexts[source].get(context)
        place = np.searchsorted(self._hashes, hash(source))
        same, target = self._entry(self._of_hash[place]) if place < len(self._hashes) else ("", None)
        return target if same == source else None

    def near(self, sources: Iterable[str], least=LEAST, number=1, others=False) -> Iterator[list[Match]]:
        """Yield for each source its nearest entries, best first, of equally near ones the latest first.

        There are at most `number` of them, of the similarity `least` (`LEAST` or more). With `others` those of the same
        words are left out: in training no pair is its own match. Where hundreds share rare words with a source, a
        nearer one may be missed.
        """
        with reading("near matches (pip install 'vaswani_transformer[memory]')"):
            from rapidfuzz.distance.Levenshtein import normalized_similarity
            from rapidfuzz.process import extract
        shared = np.zeros(len(self._lengths), np.uint8)
        for source in sources:
            words = np.array([self._ranks.get(one, len(self._ranks)) for one in _words(_normalized(source))], np.int32)
            text, rows = _as_text(words), self._candidates(words, least, shared)
            ends = zip(self._starts[rows].tolist(), self._starts[rows + 1].tolist(), strict=True)
            choices = [self._words[start:end] for start, end in ends]
            best = extract(text, choices, scorer=normalized_similarity, limit=None, score_cutoff=least - _TINY)
            best = [(similarity, rows[place]) for _, similarity, place in best if similarity < 1 or not others]
            yield [(similarity, *self._entry(self._entries[row])) for similarity, row in best[:number]]

    def _candidates(self, words: np.ndarray, least: float, shared: np.ndarray) -> np.ndarray:
        """Return the rows that may be as near to these words, the latest first; `shared` is zero for each row."""
        length, found, room = len(words), [np.zeros(0, np.int32)], _MOST_ROWS
        rarest, before = np.unique(-np.sort(-words)[: _rarest(length, least)], return_index=True)
        for word, lacking in zip(rarest[::-1][:255].tolist(), before[::-1].tolist(), strict=False):
            if word < len(self._ranks) and room > 0:
                rows = self._rows[self._first[word] : self._first[word + 1]]
                # Those that have this word first have none of the words before it.
                lengths = ceil(least * length - _TINY), floor((length - lacking) / least + _TINY) + 1
                start, end = rows.searchsorted(self._lengths.searchsorted(np.array(lengths, np.int32)).astype(np.int32))
                room -= end - start
                counts = shared[rows[start:end]]
                found.append(rows[start:end][counts == 0])
                shared[rows[start:end]] = counts + 1
        rows = np.concatenate(found)
        shares = 255 * shared[rows].astype(np.int32) // np.maximum(self._lengths[rows], length)
        shared[rows] = 0
        best = rows[np.argsort(shares.astype(np.uint8), kind="stable")[-_MOST_COMPARED:]]
        return best[np.argsort(-self._entries[best])]


def _rarest(length: int | np.ndarray, least: float) -> np.ndarray:
    """Return how many of the rarest words of so many have to have one in common with those of a near text.

    Two texts of this similarity share so many of the words of the longer one (prefix filtering: Chaudhuri et al., 2006,
    A Primitive Operator for Similarity Joins in Data Cleaning).
    """
    return length - np.ceil(least * length - _TINY).astype(int) + 1


def _as_text(words: np.ndarray) -> str:
    """Return a character for each word, which `rapidfuzz` compares fastest; of over 1,114,112 words some share one."""
    return (words % 0x110000).astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def read_memory(paths: Iterable[str], languages: Sequence[str] = ()) -> Memory:
    """Return the memory of files of pairs; `languages` are those of source and target, which a TMX file goes by."""
    from ..catalogues.formats import open_catalogue, pairs_of
    from .pair_readers import CATALOGUES
    from .parallel_text import pair_source, suffix

    contexts: dict[str, dict[str, str]] = {}

    def pairs() -> Iterator[tuple[str, str]]:
        for path in (home_path(each).absolute() for each in paths):  # names of files, for which no Hub is asked
            columns = ("source_column", "target_column") if suffix(path.name) == ".tmx" else ()
            text = pair_source(data=path, **dict(zip(columns, languages, strict=False)))
            yield from text.stream()
            for file in text.files:  # the path may be a folder or a pattern
                for entry in open_catalogue(file).entries() if suffix(file.name) in CATALOGUES else ():
                    for source, target in pairs_of(entry, all_forms=True) if entry.state == "translated" else ():
                        contexts.setdefault(_normalized(source), {})[entry.context] = target

    return Memory(pairs(), contexts)
