"""More training trees: constituents are exchanged for others of their kind, words for others with their tag.

After Shi, Livescu and Gimpel (2021), "Substructure Substitution: Structured Data Augmentation for NLP". Some short
constituents are added by themselves, too: in short sentences attention learns sooner which word belongs to which.
"""

import random
from collections.abc import Iterator, Sequence

from .trees import ROOT, Tree

SHARES = 0.1, 0.1  # of constituents, and of words, that are exchanged
PARTS, PART_WORDS = 0.25, range(3, 10)  # share of the constituents of so many words that become trees of their own


def _kind(node: Tree, parent: str) -> tuple:
    """Return what nodes share that may be exchanged: a tag, or label, parent and about the number of words."""
    return (node.label,) if node.word is not None else (parent, node.label, len(node.words()).bit_length())


def _with_parents(tree: Tree) -> Iterator[tuple[Tree, str]]:
    """Yield all nodes below the outermost, each before its children, each with its parent's label."""
    for child in tree.children:
        yield child, tree.label
        yield from _with_parents(child)


class Exchange:
    """Makes new trees of cleaned ones, with a share of constituents (outside of exchanged ones) and words exchanged.

    A constituent is exchanged for one with the same label under the same label, with a number of words of the same
    order (1, 2 to 3, 4 to 7, ...), a word for one with the same tag; frequent ones are drawn more often.
    """

    def __init__(self, trees: Sequence[Tree], seed: int = 0, shares: tuple[float, float] = SHARES):
        self.trees, self.random, self.shares = trees, random.Random(seed), shares
        self.pools: dict[tuple, list[Tree]] = {}
        for tree in trees:
            for node, parent in _with_parents(tree):
                self.pools.setdefault(_kind(node, parent), []).append(node)

    def version(self) -> list[Tree]:
        """Return all trees once more, each with some parts exchanged."""
        return [self._exchanged(tree) for tree in self.trees]

    def _exchanged(self, node: Tree) -> Tree:
        children = []
        for child in node.children:
            if self.random.random() < self.shares[child.word is not None]:
                children.append(self.random.choice(self.pools[_kind(child, node.label)]))
            else:
                children.append(self._exchanged(child))
        return Tree(node.label, tuple(children), node.word)

    def parts(self, trees: Sequence[Tree]) -> list[Tree]:
        """Return some constituents of 3 to 9 words as trees of their own; none of them a whole sentence."""
        inner = (node for tree in trees for top in tree.children for node, _ in _with_parents(top))
        short = (node for node in inner if node.word is None and len(node.words()) in PART_WORDS)
        return [Tree(ROOT, (node,)) for node in short if self.random.random() < PARTS]
