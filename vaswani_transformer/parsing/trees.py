"""Trees in Penn Treebank brackets: `parse_trees` reads them unchanged, `clean` prepares them for training and scoring.

A leaf is `(TAG word)`, any other bracket a label and its children. Words are kept as they are written, brackets in them
escaped: `-LRB-` for `(`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from ..data.text_files import has_undecoded
from ..errors import UserError, shortened

ROOT = "ROOT"
ROOT_LABELS = ("", "ROOT", "TOP", "S1")  # of brackets around the whole tree
TRACE = "-NONE-"  # the tag of a moved or omitted element, which is no word of the sentence
TREE_TOKENS = "tree_tokens"  # entry of a parser's `tokenizer_config.json`: all brackets and tags
MAX_DEPTH = 400  # nested brackets; a file with more is damaged, and Python's stack has room for recursion
_TOKEN = re.compile(r"[()]|[^() \t\r\n\f\v]+")
WORD = re.compile(r"[^ \t\r\n\f\v]+")


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
        return str(self) == str(other) if isinstance(other, Tree) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    def walk(self) -> Iterator[tuple["Tree", bool]]:
        """Yield itself, constituents and words from left to right, with False; constituents at their end with True."""
        yield self, False
        if self.word is None:
            for child in self.children:
                yield from child.walk()
            yield self, True

    def leaves(self) -> Iterator["Tree"]:
        """Yield its words from left to right, each with its tag."""
        return (node for node, _ in self.walk() if node.word is not None)

    def words(self) -> list[str]:
        """Return its words from left to right, escaped."""
        return [leaf.word for leaf in self.leaves()]

    def tags(self) -> list[str]:
        """Return the part-of-speech tag of each word."""
        return [leaf.label for leaf in self.leaves()]


def escape(word: str) -> str:
    """Return a word as it is written in trees: `-LRB-` and `-RRB-` for round brackets, which would end it."""
    return word.replace("(", "-LRB-").replace(")", "-RRB-")


def checked(sentences: Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Yield sentences; `UserError` for one that is no list of words, none empty or with ASCII white space or NUL."""
    for line, words in enumerate(sentences, 1):
        for number, word in enumerate(words, 1):
            is_word = isinstance(word, str) and not isinstance(words, str) and WORD.fullmatch(word)
            if not is_word or "\0" in word or has_undecoded(word):
                fix = "give a list of words of UTF-8 text without space or NUL"
                raise UserError(f"line {line}: word {number} is {word!r}: {fix}")
        yield words


def parse_trees(lines: Iterable[str], where: str) -> Iterator[Tree]:
    """Yield the trees in lines, as they are: with traces, functional tags and outer labels.

    A tree has one line or several, of which all but the first are indented. Blank lines are skipped. Raises `UserError`
    with `where` and the line for unbalanced or empty brackets and text outside of brackets.
    """
    stack: list[list[str | Tree]] = [[]]  # the parts so far of each open bracket, the first around all trees
    first = 1  # line of the last tree
    for number, line in enumerate(chain(lines, ["("]), 1):  # the bracket behind the last line shows what is open there
        problem = ""
        if line.startswith("("):  # the further lines of a tree are indented
            if len(stack) > 1:
                problem = f"{len(stack) - 1} bracket(s) not closed (all lines of a tree but the first must be indented)"
                raise UserError(f"{where}, line {first}: {problem}")
            first = number
        for token in _TOKEN.findall(line):
            if token == "(":
                stack.append([])
                problem = f"there are more than {MAX_DEPTH} brackets in each other" * (len(stack) > MAX_DEPTH + 1)
            elif len(stack) == 1 or "\0" in token:
                problem = f"{token!r} is out of place"
            elif token != ")":
                stack[-1].append(token)
            elif (tree := _tree(parts := stack.pop(), is_outermost=len(stack) == 1)) is None:
                bracket = f"({' '.join(map(str, parts))})"
                form = "neither a tag and a word nor a label and brackets (-LRB- is the word for one)"
                problem = f"{bracket!r} holds {form}"
            elif len(stack) == 1:
                yield tree
            else:
                stack[-1].append(tree)
            if problem:
                raise UserError(f"{where}, {shortened(f'line {number}: {problem}')}")


def _tree(parts: list["str | Tree"], is_outermost: bool) -> Tree | None:
    """Return the tree of what a bracket holds, or None; only the outermost bracket may be without a label."""
    label, inside = (parts[0], parts[1:]) if parts and isinstance(parts[0], str) else ("", parts)
    if label and len(inside) == 1 and isinstance(inside[0], str):
        return Tree(label, word=inside[0])
    is_constituent = inside and all(isinstance(part, Tree) for part in inside) and (label or is_outermost)
    return Tree(label, tuple(inside)) if is_constituent else None


def plain_label(label: str) -> str:
    """Return a label without functional tags and index: `NP` of `NP-SBJ-1` and `NP=2`; `-LRB-`, `ADVP|PRT` stay."""
    return label if label.startswith(("-", "=")) else re.split("[-=]", label, maxsplit=1)[0]


def clean(tree: Tree) -> Tree | None:
    """Return a tree in the form for training and scoring, with one outer bracket `ROOT`; None if it has no word.

    Removes traces and the constituents that are empty without them, functional tags and indices (`plain_label`), and
    outer brackets labelled `ROOT`, `TOP`, `S1` or nothing.
    """
    children = (tree,)
    while len(children) == 1 and children[0].word is None and children[0].label in ROOT_LABELS:
        children = children[0].children

    def cleaned(node: Tree) -> Tree | None:
        if node.word is not None:
            return None if node.label == TRACE else Tree(node.label, word=node.word)
        parts = tuple(filter(None, map(cleaned, node.children)))
        return Tree(plain_label(node.label), parts) if parts else None

    return cleaned(Tree(ROOT, children))
