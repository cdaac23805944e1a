"""Trees in Penn Treebank brackets: `read_trees` takes a file as it is, `clean` makes of a tree what is parsed.

A leaf is `(TAG word)`, any other bracket a label and its children. Words are kept as they are written, brackets in them
escaped: `-LRB-` for `(`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.text_files import has_undecoded, read_lines
from ..errors import UserError

ROOT = "ROOT"
ROOT_LABELS = ("", "ROOT", "TOP", "S1")  # of brackets around the tree that say nothing
TRACE = "-NONE-"  # the tag of what was moved or left out: no word of the sentence
MAX_DEPTH = 400  # brackets within each other; what is deeper is a damaged file
_ESCAPES = {"(": "-LRB-", ")": "-RRB-", "{": "-LCB-", "}": "-RCB-", "[": "-LSB-", "]": "-RSB-"}
_UNESCAPES = {escape: sign for sign, escape in _ESCAPES.items()}
_TOKEN = re.compile(r"[()]|[^() \t\r\n\f\v]+")
_WORD = re.compile(r"[^ \t\r\n\f\v]+")
_SKIP = "mend the tree, or leave such trees out with --skip-bad"


@dataclass(frozen=True)
class Tree:
    """A constituent, or a word with its part of speech.

    Args:
        label: of the constituent, or the word's tag.
        children: from left to right; none for a word.
        word: as it is written in the file; None for a constituent.
    """

    label: str
    children: tuple["Tree", ...] = ()
    word: str | None = None

    def __str__(self) -> str:
        """The brackets on one line; a word's round brackets are escaped."""
        parts: list[str] = []
        waiting: list[Tree | str] = [self]
        while waiting:
            part = waiting.pop()
            if isinstance(part, str):
                parts.append(part)
            elif part.word is not None:
                parts.append(f"({part.label} {escape(part.word)})")
            else:
                parts.append(f"({part.label} ")
                waiting.append(")")
                for place, child in enumerate(reversed(part.children)):
                    waiting += [" ", child] if place else [child]
        return "".join(parts)

    def __eq__(self, other: object) -> bool:
        """Whether the other is a tree with the same labels, words and brackets."""
        return self._outline() == other._outline() if isinstance(other, Tree) else NotImplemented

    def __hash__(self) -> int:
        """Equal for equal trees."""
        return hash(tuple(self._outline()))

    def _outline(self) -> list[tuple[str, int, str | None]]:
        return [(node.label, len(node.children), node.word) for node in self.nodes()]

    def nodes(self) -> Iterator["Tree"]:
        """Itself, all constituents and all words in it, from the top down and from left to right."""
        waiting = [self]
        while waiting:  # no recursion here and above: trees may be deeper than Python's stack
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def leaves(self) -> Iterator["Tree"]:
        """Its words from left to right, each with its tag."""
        return (node for node in self.nodes() if node.word is not None)

    def words(self) -> list[str]:
        """What its leaves say."""
        return [leaf.word for leaf in self.leaves()]

    def tags(self) -> list[str]:
        """The parts of speech of its words."""
        return [leaf.label for leaf in self.leaves()]

    def constituents(self) -> Iterator["Tree"]:
        """Itself and all constituents in it, in the order of `nodes`; words are none."""
        return (node for node in self.nodes() if node.word is None)


def escape(word: str) -> str:
    """A word as trees have it: round brackets, which would end it, are spelt out; a bracket alone is `-LRB-`."""
    return word.replace("(", _ESCAPES["("]).replace(")", _ESCAPES[")"]) if "(" in word or ")" in word else word


def words_of(line: str) -> list[str]:
    """The words of a sentence in which they are separated by the white space of ASCII, as they are in trees."""
    return _WORD.findall(line)


def check_words(words: Sequence[str], where: str) -> None:
    """Refuse what no word of a tree can be.

    Raises:
        UserError: for a string in place of a list of words, and for a word that is empty, or holds white space of
            ASCII, a NUL character or half of a surrogate pair, with its place.
    """
    if isinstance(words, str):
        raise UserError(f"{where} is a string: give the list of its words, such as {words_of(words)[:3]}")
    for place, word in enumerate(words, 1):
        if not _WORD.fullmatch(word):
            raise UserError(f"{where}: word {place} is {word!r}: it must have a letter or sign, and no space in it")
        if "\0" in word:
            raise UserError(f"{where}: word {place} is {word!r} and holds a NUL character: take it out")
        if has_undecoded(word):
            raise UserError(f"{where}: word {place} is not valid UTF-8: convert it first")


def unescape(word: str) -> str:
    r"""A word of a tree as text has it: `-LRB-` and its kin as the signs that they stand for, `\/` as `/` and so on."""
    return _UNESCAPES.get(word) or word.replace("\\/", "/").replace("\\*", "*")


class _BadTree(Exception):
    """What is wrong with a tree; the line is the one where that shows."""

    def __init__(self, line: int, problem: str):
        super().__init__(problem)
        self.line = line


class _Builder:
    """Makes one tree of its tokens."""

    def __init__(self, line: int):
        self.line = line  # where it begins
        self.open: list[list] = []  # label (None until it is known), children, word
        self.done: Tree | None = None

    def add(self, token: str, line: int) -> None:
        """Take one token of the tree; `done` is the tree when that was its last."""
        if token == "(":
            if self.open:
                label, _, word = self.open[-1]
                if word is not None:
                    raise _BadTree(line, f"the word {word!r} and a bracket stand side by side under {label!r}")
                if label is None and len(self.open) > 1:
                    raise _BadTree(line, "a bracket within the tree has no label")
                self.open[-1][0] = label or ""
            self.open.append([None, [], None])
            if len(self.open) > MAX_DEPTH:
                raise _BadTree(line, f"brackets are nested deeper than {MAX_DEPTH}")
        elif token == ")":
            label, children, word = self.open.pop()
            if not children and word is None:
                hint = "; a round bracket as a word is -LRB- or -RRB-" if label in (None, "-LRB-", "-RRB-") else ""
                raise _BadTree(line, f"the bracket {label or ''!r} is empty: neither a word nor a bracket in it{hint}")
            tree = Tree(label, tuple(children), word)
            if self.open:
                self.open[-1][1].append(tree)
            else:
                self.done = tree
        else:
            label, children, word = self.open[-1]
            if label is None:
                self.open[-1][0] = token
            elif children or word is not None:
                before = "a bracket" if children else f"the word {word!r}"
                raise _BadTree(line, f"{before} and the word {token!r} stand side by side under {label!r}")
            else:
                self.open[-1][2] = token


def parse_trees(
    lines: Iterator[str], where: str, skipped: list[str] | None = None, mend: str = _SKIP
) -> Iterator[Tree]:
    """Trees of lines; as `read_trees`, with `where` in place of the file's name."""
    builder, bad = None, False  # bad: passing over what is left of a tree

    def found(error: _BadTree, begin: int) -> None:
        begun = f" (the tree begins in line {begin})" if begin != error.line else ""
        message = f"{where}, line {error.line}: {error}{begun}"
        if skipped is None:
            raise UserError(f"{message}; {mend}")
        skipped.append(message)

    for number, text in enumerate(lines, 1):
        if text.startswith("("):  # lines that go on with a tree are indented
            if builder is not None:
                what = f"{len(builder.open)} bracket(s) not closed before line {number}"
                hint = "lines that go on with a tree must be indented"
                found(_BadTree(builder.line, f"{what} ({hint})"), builder.line)
            builder, bad = None, False
        if bad:
            continue
        for token in _TOKEN.findall(text):
            try:
                if "\0" in token:
                    raise _BadTree(number, f"{token!r} holds a NUL character, so the file is damaged")
                if builder is None:
                    if token != "(":
                        what = "a closing bracket too many" if token == ")" else f"{token!r} outside of any bracket"
                        raise _BadTree(number, what)
                    builder = _Builder(number)
                builder.add(token, number)
            except _BadTree as error:
                found(error, builder.line if builder else number)
                builder, bad = None, True
                break
            if builder.done is not None:
                yield builder.done
                builder = None
    if builder is not None:
        found(_BadTree(builder.line, f"{len(builder.open)} bracket(s) not closed at the end"), builder.line)


def read_trees(path: str | Path, skipped: list[str] | None = None, mend: str = _SKIP) -> Iterator[Tree]:
    """The trees of a file as they are written: traces, functional tags and outer labels stay.

    A tree has one line or several, of which all but the first are indented. Blank lines are passed over.

    Args:
        path: UTF-8 text, plain or `.gz`.
        skipped: what is wrong with each bad tree goes in here, and the tree is left out; without it that is an error.
        mend: what the error advises.

    Raises:
        UserError: for a file that cannot be read, brackets that do not match, an empty tree or bracket, text outside of
            brackets, with file, line and what is wrong.
    """
    return parse_trees(read_lines(Path(path)), str(path), skipped, mend)


def plain_label(label: str) -> str:
    """A label without function and index: `NP` of `NP-SBJ-1` and `NP=2`; `-LRB-`, `PRP$`, `ADVP|PRT` stay."""
    return label if label.startswith(("-", "=")) else re.split("[-=]", label, maxsplit=1)[0]


def _cleaned(tree: Tree) -> Tree | None:
    stack: list[tuple[Tree, Iterator[Tree], list[Tree]]] = [(tree, iter(tree.children), [])]
    while True:
        node, children, kept = stack[-1]
        child = next(children, None)
        if child is None:
            stack.pop()
            done = Tree(plain_label(node.label), tuple(kept)) if kept else None
            if not stack:
                return done
            if done is not None:
                stack[-1][2].append(done)
        elif child.word is None:
            stack.append((child, iter(child.children), []))
        elif child.label != TRACE:
            kept.append(Tree(plain_label(child.label), word=child.word))


def clean(tree: Tree) -> Tree | None:
    """A tree as parsers are trained and scored on it, with one outer bracket `ROOT`.

    Traces go, and constituents that are empty without them; so do functional tags and indices (`plain_label`), and
    outer brackets that are called `ROOT`, `TOP`, `S1` or nothing.

    Returns:
        the tree; None where it has no word.
    """
    children = (tree,)
    while len(children) == 1 and children[0].word is None and children[0].label in ROOT_LABELS:
        children = children[0].children
    return _cleaned(Tree(ROOT, children))
