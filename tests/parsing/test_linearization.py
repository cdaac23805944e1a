"""Trees to tokens and back."""

import re

from hypothesis import given
from hypothesis import strategies as st
from random_trees import TOKENS, clean_trees, top_nodes, tree_of

from vaswani_transformer.parsing.linearization import delinearize, linearize, with_words, without_words


def test_the_examples_of_the_docstrings():
    tree = tree_of("(ROOT (S (NP (PRP We)) (VP (VBP agree)) (. .)))")
    tokens = linearize(tree)
    assert " ".join(tokens) == "(S (NP PRP )NP (VP VBP )VP . )S"
    assert " ".join(linearize(tree, tags=False)) == "(S (NP XX )NP (VP XX )VP XX )S"
    found = with_words(tokens, tree.words())
    assert " ".join(found) == "We (S (NP PRP) agree )NP (VP VBP) . )VP .) )S"
    assert without_words(found) == tokens


@given(clean_trees(), st.booleans())
def test_words_come_in_and_go_out(tree, tags):
    tokens, words = linearize(tree, tags), tree.words()
    found = with_words(tokens, words)
    assert without_words(found) == tokens and len(found) == len(tokens) + len(words)
    assert [token for token in found if not set("()") & set(token)] == words


@given(clean_trees())
def test_the_way_back_gives_the_same_tree(tree):
    words = tree.words()
    assert delinearize(linearize(tree), words) == tree
    assert str(delinearize(linearize(tree, tags=False), words)) == re.sub(r"\(\S+ (?!\()", "(XX ", str(tree))


@given(TOKENS, st.lists(st.sampled_from("abc"), min_size=1))
def test_anything_can_be_made_a_tree_over_the_words(tokens, words):
    tree = delinearize(tokens, words)
    assert tree.words() == words and delinearize(linearize(tree), words) == tree
    assert (linearize(tree) == tokens) == bool(top_nodes(tokens, len(words)))
    assert top_nodes(linearize(tree), len(words)) == len(tree.children)


def test_how_malformed_outputs_are_repaired():
    for tokens, brackets in (
        ("(S (NP DT", "(ROOT (S (NP (DT a) (XX b))))"),
        ("(S (NP DT )S NN", "(ROOT (S (NP (DT a))) (NN b))"),
        (")VP (S (NP )NP DT NN NN )S )S", "(ROOT (S (DT a) (NN b)))"),
        ("", "(ROOT (XX a) (XX b))"),
    ):
        assert str(delinearize(tokens.split(), ["a", "b"])) == brackets
