"""Trees for tests: Hypothesis strategies, the shared treebank, and options for parsers of seconds."""

import re

from hypothesis import strategies as st

from vaswani_transformer.parsing.linearization import delinearize, linearize
from vaswani_transformer.parsing.trees import ROOT, Tree, parse_trees

LABELS, TAGS = ["S", "NP", "VP", "ADVP", "PRT", "ADVP|PRT", "X"], ["NN", "DT", "PRP$", ",", ".", "''", "-LRB-", ":"]
WORDS = st.text(
    st.characters(exclude_categories=["Zs", "Zl", "Zp", "Cc", "Cs"], exclude_characters="()"), min_size=1, max_size=5
)
TINY = ["--vocab-size", "420", "--d-model", "16", "--d-ff", "32", "--num-heads", "2", "--encoder-layers", "1"]
TINY += ["--decoder-layers", "1", "--max-steps", "3", "--evaluate-every", "2", "--quiet"]
GUM = ["gum.train.trees.gz", "gum.dev.trees.gz"]


def tree_of(text: str) -> Tree:
    """The tree in a line of brackets."""
    return next(parse_trees(iter([text]), "text"))


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


def top_nodes(tokens, number_of_words: int) -> int:
    """How many constituents and words stand outermost in the tokens of a tree over so many words; 0 if they are none.

    Found by replacing constituents by words from the inside.
    """
    text = " ".join(token if token[0] in "()" else "word" for token in tokens)
    if text.split().count("word") != number_of_words:
        return 0
    while (shorter := re.sub(r"(?<!\S)\((\S+)( word)+ \)\1(?!\S)", "word", text)) != text:
        text = shorter
    return len(text.split()) if set(text.split()) == {"word"} else 0


def tree_pairs():
    """Two trees over the same words."""
    return st.builds(lambda tree, tokens: (tree, delinearize(tokens, tree.words())), clean_trees(), TOKENS) | st.builds(
        lambda tree, cut: (tree, delinearize(linearize(tree)[cut:], tree.words())), clean_trees(), st.integers(0, 8)
    )
