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
TREE_TOKENS = "tree_tokens"  # entry of a parser's `tokenizer_config.json`: all brackets and tags
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
        """Return the brackets on one line; a word's round brackets are escaped."""
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
        """Yield itself, constituents and words from left to right, with False; constituents at their end with True."""
        waiting = [(self, False)]
        while waiting:  # no recursion: trees may be nested deeper than Python's stack
            node, is_end = waiting.pop()
            yield node, is_end
            if not is_end and node.word is None:
                waiting.append((node, True))
                waiting.extend((child, False) for child in reversed(node.children))

    def nodes(self) -> Iterator["Tree"]:
        """Yield itself, all constituents and all words in it, each before its children, from left to right."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def leaves(self) -> Iterator["Tree"]:
        """Yield its words from left to right, each with its tag."""
        return (node for node in self.nodes() if node.word is not None)

    def words(self) -> list[str]:
        """Return its words from left to right, escaped."""
        return [leaf.word for leaf in self.leaves()]

    def tags(self) -> list[str]:
        """Return the part-of-speech tag of each word."""
        return [leaf.label for leaf in self.leaves()]

    def constituents(self) -> Iterator["Tree"]:
        """Yield itself and all constituents in it, without words, in the order of `nodes`."""
        return (node for node in self.nodes() if node.word is None)


def escape(word: str) -> str:
    """Return a word as it is written in trees: `-LRB-` and `-RRB-` for round brackets, which would end it."""
    return word.replace("(", _ESCAPES["("]).replace(")", _ESCAPES[")"]) if "(" in word or ")" in word else word


def words_of(line: str) -> list[str]:
    """Return the words of a sentence, separated by ASCII white space, as in trees."""
    return _WORD.findall(line)


def check_words(words: Sequence[str], where: str) -> None:
    """Raise a `UserError` for a word that is empty or holds ASCII white space, NUL or an undecoded byte."""
    for number, word in enumerate(words, 1):
        if isinstance(words, str) or not _WORD.fullmatch(word) or "\0" in word or has_undecoded(word):
            raise UserError(
                f"{where}: word {number} is {word!r}: give a list of words of UTF-8 text without space or NUL"
            )


def unescape(word: str) -> str:
    r"""Return a word of a tree as it is written in text: `(` for `-LRB-`, `/` for `\/` and so on."""
    return _UNESCAPES.get(word) or word.replace("\\/", "/").replace("\\*", "*")


def _add(stack: list[list], token: str) -> Tree | None:
    """Add the next token to a tree's open brackets, each `[label or None, children, word]`; the tree at its end.

    Raises:
        ValueError: for a token that has no place there.
    """
    label, children, word = stack[-1] if stack else (None, [], None)
    if token == "(":
        fits = len(stack) < MAX_DEPTH and word is None and (label is not None or len(stack) < 2)
    elif token == ")":
        fits = bool(children) or word is not None
    else:
        fits = bool(stack) and "\0" not in token and word is None and not children
    if not fits:
        under = f" under {label!r}" if label is not None else ""
        raise ValueError(
            f"{token!r} is out of place{under}: a bracket holds a tag and a word, or a label and brackets, at most"
            f" {MAX_DEPTH} deep; a round bracket as a word is -LRB- or -RRB-"
        )
    if token == "(":
        if stack:
            stack[-1][0] = label or ""
        stack.append([None, [], None])
    elif token == ")":
        tree = Tree(label, tuple(children), word)
        stack.pop()
        if not stack:
            return tree
        stack[-1][1].append(tree)
    else:
        stack[-1][0 if label is None else 2] = token
    return None


def parse_trees(
    lines: Iterator[str], where: str, skipped: list[str] | None = None, advice: str = _ADVICE
) -> Iterator[Tree]:
    """Yield the trees in lines, as `read_trees`; `where` names the source in messages."""
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
    """Yield the trees of a file, unchanged: with traces, functional tags and outer labels.

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
    """Return a label without functional tags and index: `NP` of `NP-SBJ-1` and `NP=2`; `-LRB-`, `ADVP|PRT` stay."""
    return label if label.startswith(("-", "=")) else re.split("[-=]", label, maxsplit=1)[0]


def clean(tree: Tree) -> Tree | None:
    """Return a tree in the form for training and scoring, with one outer bracket `ROOT`.

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
