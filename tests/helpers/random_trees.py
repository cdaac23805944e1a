"""Hypothesis strategies for trees, and the trees of the shared data."""

from pathlib import Path

from hypothesis import strategies as st

from vaswani_transformer.parsing.linearization import linearize, repair
from vaswani_transformer.parsing.trees import ROOT, Tree

LABELS, TAGS = ["S", "NP", "VP", "ADVP", "PRT", "ADVP|PRT", "X"], ["NN", "DT", "PRP$", ",", ".", "''", "-LRB-", ":"]
WORDS = st.text(
    st.characters(exclude_categories=["Zs", "Zl", "Zp", "Cc", "Cs"], exclude_characters="()"), min_size=1, max_size=5
)
GUM = ["gum.train.trees.gz", "gum.dev.trees.gz"]


def leaves(words=WORDS):
    return st.builds(lambda tag, word: Tree(tag, word=word), st.sampled_from(TAGS), words)


def constituents(words=WORDS):
    children = st.recursive(
        leaves(words),
        lambda node: st.builds(Tree, st.sampled_from(LABELS), st.lists(node, min_size=1, max_size=4).map(tuple)),
        max_leaves=12,
    )
    return st.builds(Tree, st.sampled_from(LABELS), st.lists(children, min_size=1, max_size=4).map(tuple))


def clean_trees(words=WORDS):
    """Trees as `clean` leaves them: any number of constituents and words under one root."""
    parts = st.lists(st.one_of(leaves(words), constituents(words)), min_size=1, max_size=3)
    return parts.map(lambda children: Tree(ROOT, tuple(children)))


TOKENS = st.lists(st.sampled_from([*("(" + label for label in LABELS), *(")" + label for label in LABELS), *TAGS]))


def tree_pairs():
    """Two trees over the same words."""
    return st.builds(lambda tree, tokens: (tree, repair(tokens, tree.words())), clean_trees(), TOKENS) | st.builds(
        lambda tree, cut: (tree, repair(linearize(tree)[cut:], tree.words())), clean_trees(), st.integers(0, 8)
    )


def treebank(folder: Path, name: str) -> Path:
    return folder / "trees" / name
