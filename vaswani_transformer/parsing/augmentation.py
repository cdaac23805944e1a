"""More trees out of few: constituents change places with others of their kind, words with others of their tag.

After Shi, Livescu and Gimpel (2021), "Substructure Substitution: Structured Data Augmentation for NLP". Constituents
also come by themselves: in short sentences attention finds sooner which word of the sentence is which of the tree.
"""

import random
from collections.abc import Iterator, Sequence

from .trees import ROOT, Tree

CONSTITUENTS, WORDS = 0.1, 0.1  # share of each that is exchanged
PARTS, PART_WORDS = 0.25, range(3, 10)  # share of the constituents of so many words that become trees of their own


def _kind(node: Tree, parent: str) -> tuple:
    """What two nodes have in common that may stand for each other: labels, and about the number of words."""
    if node.word is not None:
        return (node.label,)
    return parent, node.label, sum(1 for _ in node.leaves()).bit_length()


def _nodes(tree: Tree) -> Iterator[tuple[Tree, str]]:
    for child in tree.children:
        yield child, tree.label
        yield from _nodes(child)


class Exchange:
    """Makes new trees of some trees.

    A constituent is exchanged for one with the same label under the same label, with a number of words of the same
    order (1, 2 to 3, 4 to 7, ...), a word for one with the same tag; both as often as they are in the trees.

    Args:
        trees: cleaned trees.
        seed: the same seed gives the same new trees.
        constituents: share of constituents that are exchanged, of those that are not within one already.
        words: the same of words.
    """

    def __init__(self, trees: Sequence[Tree], seed: int = 0, constituents: float = CONSTITUENTS, words: float = WORDS):
        self.trees, self.random = trees, random.Random(seed)
        self.constituents, self.words = constituents, words
        self.pools: dict[tuple, list[Tree]] = {}
        for tree in trees:
            for node, parent in _nodes(tree):
                self.pools.setdefault(_kind(node, parent), []).append(node)

    def _new(self, node: Tree, parent: str) -> Tree:
        if self.random.random() < (self.constituents if node.word is None else self.words):
            return self.random.choice(self.pools[_kind(node, parent)])
        return Tree(node.label, tuple(self._new(child, node.label) for child in node.children), node.word)

    def version(self) -> list[Tree]:
        """All trees once more, each with some exchanged."""
        return [Tree(tree.label, tuple(self._new(child, tree.label) for child in tree.children)) for tree in self.trees]

    def parts(self, trees: Sequence[Tree]) -> list[Tree]:
        """Some of the constituents of some trees as trees of their own, those of 3 to 9 words; no whole sentence."""
        inner = (node for tree in trees for top in tree.children for node, _ in _nodes(top) if node.word is None)
        short = (node for node in inner if sum(1 for _ in node.leaves()) in PART_WORDS)
        return [Tree(ROOT, (node,)) for node in short if self.random.random() < PARTS]
