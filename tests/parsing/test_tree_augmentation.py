"""New trees out of given ones."""

from hypothesis import given
from hypothesis import strategies as st
from random_trees import clean_trees

from vaswani_transformer.parsing.augmentation import Exchange
from vaswani_transformer.parsing.trees import Tree

LISTS = st.lists(clean_trees(), min_size=1, max_size=6)


def same_outline(one: Tree, other: Tree) -> bool:
    """Whether children of the root have equal labels, and are words or not."""
    kinds = [[(child.label, child.word is None) for child in tree.children] for tree in (one, other)]
    return kinds[0] == kinds[1] and one.label == other.label


@given(LISTS, st.integers(0, 9))
def test_parts_come_from_the_trees_and_stand_where_their_kind_stands(trees, seed):
    versions = Exchange(trees, seed, shares=(0.5, 0.5)).version()
    assert all(same_outline(one, other) for one, other in zip(trees, versions, strict=True))
    assert {leaf for tree in versions for leaf in tree.leaves()} <= {leaf for tree in trees for leaf in tree.leaves()}

    def places(given: list[Tree]) -> set:
        nodes = [node for tree in given for node, is_end in tree.walk() if not is_end]
        return {(node.label, tuple(child.label for child in node.children)) for node in nodes}

    assert places(versions) <= places(trees)  # no rule of the grammar is new


@given(LISTS, st.integers(0, 9))
def test_seed_and_shares(trees, seed):
    assert Exchange(trees, seed).version() == Exchange(trees, seed).version()
    assert Exchange(trees, seed, shares=(0, 0)).version() == trees


def test_a_quarter_of_the_short_constituents_by_themselves():
    words = [[Tree("NN", word=f"{word}{at}") for at in range(11)] for word in "ab"]
    phrases = [Tree("NP", tuple(leaves[:size])) for leaves in words for size in range(1, 12)]
    tree = Tree("ROOT", (Tree("S", tuple(phrases)),))
    parts = Exchange([tree], seed=3).parts([tree] * 200)
    assert {len(part.words()) for part in parts} == set(range(3, 10))
    assert all(part.label == "ROOT" and len(part.children) == 1 and part.children[0] in phrases for part in parts)
    assert 0.22 < len(parts) / (200 * 14) < 0.28
    assert Exchange([tree], seed=3).parts([tree] * 200) == parts
