"""New trees out of given ones."""

from hypothesis import given
from hypothesis import strategies as st
from random_trees import clean_trees

from vaswani_transformer.tree_augmentation import Exchange
from vaswani_transformer.trees import Tree

LISTS = st.lists(clean_trees(), min_size=1, max_size=6)


def same_outline(one: Tree, other: Tree) -> bool:
    """Whether children of the root have equal labels, and are words or not."""
    kinds = [[(child.label, child.word is None) for child in tree.children] for tree in (one, other)]
    return kinds[0] == kinds[1] and one.label == other.label


@given(LISTS, st.integers(0, 9))
def test_parts_come_from_the_trees_and_stand_where_their_kind_stands(trees, seed):
    versions = Exchange(trees, seed, constituents=0.5, words=0.5).version()
    assert all(same_outline(one, other) for one, other in zip(trees, versions, strict=True))
    leaves = {leaf for tree in trees for leaf in tree.leaves()}
    assert {leaf for tree in versions for leaf in tree.leaves()} <= leaves

    def places(given: list[Tree]) -> set:
        nodes = [node for tree in given for node in tree.constituents()]
        return {(node.label, tuple(child.label for child in node.children)) for node in nodes}

    assert places(versions) <= places(trees)  # no rule of the grammar is new


@given(LISTS, st.integers(0, 9))
def test_seed_and_shares(trees, seed):
    assert Exchange(trees, seed).version() == Exchange(trees, seed).version()
    assert Exchange(trees, seed, constituents=0, words=0).version() == trees


def test_trees_do_change():
    words = [Tree("NN", word=word) for word in "abcdefgh"]
    trees = [Tree("ROOT", (Tree("S", (Tree("NP", (word,)), Tree("NP", (word, word)))),)) for word in words]
    exchange = Exchange(trees, constituents=0.3, words=0.3)
    first, second = exchange.version(), exchange.version()
    assert first != trees and first != second
    assert [len(tree.words()) for tree in first] == [3] * 8  # one word for one, two or three for two
