"""Trees in Penn Treebank brackets: `read_trees` reads them unchanged, `clean` prepares them for training and scoring.

A leaf is `(TAG word)`, any other bracket a label and its children. Words are kept as they are written, brackets in them
escaped: `-LRB-` for `(`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.text_files import has_undecoded, read_lines
from ..errors import UserError, shortened

ROOT = "ROOT"
ROOT_LABELS = ("", "ROOT", "TOP", "S1")  # of brackets around the whole tree
TRACE = "-NONE-"  # the tag of a moved or omitted element, which is no word of the sentence
MAX_DEPTH = 400  # nested brackets; a file with more is damaged
_ESCAPES = {"(": "-LRB-", ")": "-RRB-", "{": "-LCB-", "}": "-RCB-", "[": "-LSB-", "]": "-RSB-"}
_UNESCAPES = {escape: sign for sign, escape in _ESCAPES.items()}
_TOKEN = re.compile(r"[()]|[^() \t\r\n\f\v]+")
_WORD = re.compile(r"[^ \t\r\n\f\v]+")
_ADVICE = "correct the tree, or leave such trees out with --skip-bad"


@dataclass(frozen=True, eq=False)
class Tree:
    """A constituent, or a word with its part of speech."""

    label: str  # of the constituent, or the word's tag
    children: tuple["Tree", ...] = ()  # from left to right; none for a word
    word: str | None = None  # as it is written in the file; None for a constituent

    def __str__(self) -> str:
        """The brackets on one line; a word's round brackets are escaped."""
        parts = []
        for node, is_end in self.walk():
            inside = "" if node.word is None else f" {escape(node.word)})"
            parts.append(")" if is_end else f" ({node.label}{inside}")
        return "".join(parts)[1:]

    def __eq__(self, other: object) -> bool:
        return self._outline() == other._outline() if isinstance(other, Tree) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._outline()))

    def _outline(self) -> list[tuple[str, int, str | None]]:
        return [(node.label, len(node.children), node.word) for node in self.nodes()]

    def walk(self) -> Iterator[tuple["Tree", bool]]:
        """Itself, all constituents and all words in it from left to right, with False; constituents end with True."""
        waiting = [(self, False)]
        while waiting:  # no recursion: trees may be nested deeper than Python's stack
            node, is_end = waiting.pop()
            yield node, is_end
            if not is_end and node.word is None:
                waiting.append((node, True))
                waiting.extend((child, False) for child in reversed(node.children))

    def nodes(self) -> Iterator["Tree"]:
        """Itself, all constituents and all words in it, each before its children, from left to right."""
        waiting = [self]
        while waiting:
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
    """Raise a `UserError` for a word that is empty or holds ASCII white space, NUL or an undecoded byte."""
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


def _add(stack: list[list], token: str) -> Tree | None:
    """Add the next token to a tree's open brackets, each `[label or None, children, word]`; the tree at its end."""
    if token == "(":
        if stack:
            label, _, word = stack[-1]
            if word is not None:
                raise ValueError(f"the word {word!r} and a bracket stand side by side under {label!r}")
            if label is None and len(stack) > 1:
                raise ValueError("a bracket within the tree has no label")
            stack[-1][0] = label or ""
        stack.append([None, [], None])
        if len(stack) > MAX_DEPTH:
            raise ValueError(f"brackets are nested deeper than {MAX_DEPTH}")
        return None
    if not stack:
        raise ValueError("a closing bracket too many" if token == ")" else f"{token!r} outside of any bracket")
    if token == ")":
        label, children, word = stack.pop()
        if not children and word is None:
            hint = "; a round bracket as a word is -LRB- or -RRB-" if label in (None, "-LRB-", "-RRB-") else ""
            raise ValueError(f"the bracket {label or ''!r} is empty: neither a word nor a bracket in it{hint}")
        tree = Tree(label, tuple(children), word)
        if not stack:
            return tree
        stack[-1][1].append(tree)
        return None
    label, children, word = stack[-1]
    if label is None:
        stack[-1][0] = token
    elif children or word is not None:
        before = "a bracket" if children else f"the word {word!r}"
        raise ValueError(f"{before} and the word {token!r} stand side by side under {label!r}")
    else:
        stack[-1][2] = token
    return None


def parse_trees(
    lines: Iterator[str], where: str, skipped: list[str] | None = None, advice: str = _ADVICE
) -> Iterator[Tree]:
    """The trees in lines, as `read_trees`; `where` names the source in messages."""
    stack: list[list] = []  # open brackets
    first, skips = 0, False  # line of the tree's first bracket; whether the rest of a bad tree follows

    def refuse(line: int, problem: object) -> None:
        start = f" (the tree begins in line {first})" if first not in (0, line) else ""
        message = f"{where}, line {line}: {shortened(str(problem))}{start}"
        if skipped is None:
            raise UserError(f"{message}; {advice}")
        skipped.append(message)

    for number, text in enumerate(lines, 1):
        if text.startswith("("):  # the further lines of a tree are indented
            if stack:
                hint = "all lines of a tree but the first must be indented"
                refuse(first, f"{len(stack)} bracket(s) not closed before line {number} ({hint})")
            stack, first, skips = [], 0, False
        for token in () if skips else _TOKEN.findall(text):
            first = first or number
            try:
                if "\0" in token:
                    raise ValueError(f"{token!r} holds a NUL character, so the file is damaged")
                tree = _add(stack, token)
            except ValueError as error:
                refuse(number, error)
                stack, skips = [], True
                break
            if tree is not None:
                yield tree
                first = 0
    if stack:
        refuse(first, f"{len(stack)} bracket(s) not closed at the end")


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
    stack: list[list[Tree]] = [[]]  # the cleaned children of each open constituent
    for node, is_end in Tree(ROOT, children).walk():
        if node.word is not None:
            stack[-1] += [Tree(plain_label(node.label), word=node.word)] if node.label != TRACE else []
        elif not is_end:
            stack.append([])
        elif cleaned := stack.pop():
            stack[-1].append(Tree(plain_label(node.label), tuple(cleaned)))
    return stack[0][0] if stack[0] else None
