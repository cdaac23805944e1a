"""Trees in Penn Treebank brackets: `read_trees` reads them unchanged, `clean` prepares them for training and scoring.

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
ROOT_LABELS = ("", "ROOT", "TOP", "S1")  # of brackets around the whole tree
TRACE = "-NONE-"  # the tag of a moved or omitted element, which is no word of the sentence
MAX_DEPTH = 400  # nested brackets; a file with more is damaged
_ESCAPES = {"(": "-LRB-", ")": "-RRB-", "{": "-LCB-", "}": "-RCB-", "[": "-LSB-", "]": "-RSB-"}
_UNESCAPES = {escape: sign for sign, escape in _ESCAPES.items()}
_TOKEN = re.compile(r"[()]|[^() \t\r\n\f\v]+")
_WORD = re.compile(r"[^ \t\r\n\f\v]+")
_ADVICE = "correct the tree, or leave such trees out with --skip-bad"


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
        """Itself, all constituents and all words in it, each before its children, from left to right."""
        waiting = [self]
        while waiting:  # no recursion here and above: trees may be nested deeper than Python's stack
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def leaves(self) -> Iterator["Tree"]:
        """Its words from left to right, each with its tag."""
        return (node for node in self.nodes() if node.word is not None)

    def words(self) -> list[str]:
        """Its words from left to right, escaped."""
        return [leaf.word for leaf in self.leaves()]

    def tags(self) -> list[str]:
        """The part-of-speech tag of each word."""
        return [leaf.label for leaf in self.leaves()]

    def constituents(self) -> Iterator["Tree"]:
        """Itself and all constituents in it, without words, in the order of `nodes`."""
        return (node for node in self.nodes() if node.word is None)


def escape(word: str) -> str:
    """A word as it is written in trees: `-LRB-` and `-RRB-` for round brackets, which would end it."""
    return word.replace("(", _ESCAPES["("]).replace(")", _ESCAPES[")"]) if "(" in word or ")" in word else word


def words_of(line: str) -> list[str]:
    """The words of a sentence, separated by ASCII white space, as in trees."""
    return _WORD.findall(line)


def check_words(words: Sequence[str], where: str) -> None:
    """Refuse what cannot be a word of a tree.

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
    r"""A word of a tree as it is written in text: `(` for `-LRB-`, `/` for `\/` and so on."""
    return _UNESCAPES.get(word) or word.replace("\\/", "/").replace("\\*", "*")


class _BadTree(Exception):
    """A mistake in a tree and the line where it shows."""

    def __init__(self, line: int, problem: str):
        super().__init__(problem)
        self.line = line


class _Builder:
    """Builds one tree from its tokens."""

    def __init__(self, line: int):
        self.line = line  # of its first bracket
        self.open: list[list] = []  # label (None until it is known), children, word
        self.done: Tree | None = None

    def add(self, token: str, line: int) -> None:
        """Add the next token; after the last one `done` is the tree."""
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
    lines: Iterator[str], where: str, skipped: list[str] | None = None, advice: str = _ADVICE
) -> Iterator[Tree]:
    """The trees in lines, as `read_trees`; `where` names the source in messages."""
    builder, skips = None, False  # skips: the rest of a bad tree

    def refuse(error: _BadTree, first_line: int) -> None:
        start = f" (the tree begins in line {first_line})" if first_line != error.line else ""
        message = f"{where}, line {error.line}: {error}{start}"
        if skipped is None:
            raise UserError(f"{message}; {advice}")
        skipped.append(message)

    for number, text in enumerate(lines, 1):
        if text.startswith("("):  # the further lines of a tree are indented
            if builder is not None:
                what = f"{len(builder.open)} bracket(s) not closed before line {number}"
                hint = "all lines of a tree but the first must be indented"
                refuse(_BadTree(builder.line, f"{what} ({hint})"), builder.line)
            builder, skips = None, False
        if skips:
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
                refuse(error, builder.line if builder else number)
                builder, skips = None, True
                break
            if builder.done is not None:
                yield builder.done
                builder = None
    if builder is not None:
        refuse(_BadTree(builder.line, f"{len(builder.open)} bracket(s) not closed at the end"), builder.line)


def read_trees(path: str | Path, skipped: list[str] | None = None, advice: str = _ADVICE) -> Iterator[Tree]:
    """The trees of a file, unchanged: with traces, functional tags and outer labels.

    A tree has one line or several, of which all but the first are indented. Blank lines are skipped.

    Args:
        path: UTF-8 text, plain or `.gz`.
        skipped: receives the message about each bad tree, which is left out; if None, a bad tree is an error.
        advice: end of the error message.

    Raises:
        UserError: for a file that cannot be read, and, with file and line, for unbalanced or empty brackets and text
            outside of brackets.
    """
    return parse_trees(read_lines(Path(path)), str(path), skipped, advice)


def plain_label(label: str) -> str:
    """A label without functional tags and index: `NP` of `NP-SBJ-1` and `NP=2`; `-LRB-`, `PRP$`, `ADVP|PRT` stay."""
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
    """A tree in the form for training and scoring, with one outer bracket `ROOT`.

    Removes traces and the constituents that are empty without them, functional tags and indices (`plain_label`), and
    outer brackets labelled `ROOT`, `TOP`, `S1` or nothing.

    Returns:
        the tree; None if it has no word.
    """
    children = (tree,)
    while len(children) == 1 and children[0].word is None and children[0].label in ROOT_LABELS:
        children = children[0].children
    return _cleaned(Tree(ROOT, children))
