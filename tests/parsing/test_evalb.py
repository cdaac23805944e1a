"""Labelled bracket scores: hand-worked cases of evalb's rules, and an independent count."""

import re
from collections import Counter

import pytest
from conftest import error_of
from hypothesis import given
from random_trees import tree_of, tree_pairs

from vaswani_transformer.parsing.evalb import count_brackets, score_trees

CASES = {  # gold, predicted, brackets in gold, in predicted, matched
    "the root does not count, whatever its name": ("(TOP (S (NN a)))", "( (S (NN a)))", 1, 1, 1),
    "several outer brackets": ("(ROOT (S1 (S (NN a))))", "( (ROOT (S (NN a))))", 1, 1, 1),
    "no root at all": ("(S (NN a))", "(ROOT (S (NN a)))", 1, 1, 1),
    "punctuation inside": (
        "(ROOT (S (NP (NN a) (, ,)) (`` ``) (VP (VB b)) ('' '')))",
        "(ROOT (S (NP (NN a)) (, ,) (VP (`` ``) (VB b) ('' ''))))", 3, 3, 3),
    "ADVP and PRT are equal": ("(ROOT (VP (VB a) (PRT (RP b))))", "(ROOT (VP (VB a) (ADVP (RB b))))", 2, 2, 2),
    "the order of a chain does not": ("(ROOT (S (VP (VB a))))", "(ROOT (VP (S (VB a))))", 2, 2, 2),
    "duplicates count as often as they are there": (
        "(ROOT (NP (NP (NN a))))", "(ROOT (NP (NP (NP (NN a)))))", 2, 3, 2),
    "a duplicate matches once": ("(ROOT (NP (NN a)))", "(ROOT (NP (NP (NN a))))", 1, 2, 1),
    "functional tags and indices do not count": (
        "(ROOT (S-1 (NP-SBJ=2 (NN a)) (VP (VB b))))", "(ROOT (S (NP (NN a)) (VP-X (VB b))))", 3, 3, 3),
    "TOP counts nowhere": ("(ROOT (S (TOP (NN a)) (NN b)))", "(ROOT (S (NN a) (NP (NN b))))", 1, 2, 1),
    "S1 and ROOT count within": ("(ROOT (S (S1 (NN a)) (NN b)))", "(ROOT (S (ROOT (NN a)) (NN b)))", 2, 2, 1),
    "a bracket called as punctuation": ("(ROOT (S (: (NN a)) (NN b)))", "(ROOT (S (NN a) (. (NN b))))", 1, 1, 1),
    "ADVP|PRT is another label": ("(ROOT (VP (VB a) (ADVP|PRT (RP b))))", "(ROOT (VP (VB a) (PRT (RP b))))", 2, 2, 1),
    "a word alone": ("(ROOT (UH yes))", "(ROOT (NP (NN yes)))", 0, 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_brackets_are_counted_as_evalb_counts_them(case):
    gold, predicted, *numbers = CASES[case]
    counts = count_brackets(tree_of(gold), tree_of(predicted))
    assert [counts["gold"], counts["predicted"], counts["matched"]] == numbers
    assert counts["exact"] == (numbers[0] == numbers[1] == numbers[2])


def counted_otherwise(gold: str, predicted: str) -> tuple[int, int, int]:
    """The three numbers from the brackets' text, by sets of places instead of spans."""
    out: set[int] = set()

    def spans(text: str, is_gold: bool) -> Counter:
        stack, found, place = [], [], 0
        for opened, word in re.findall(r"\(([^\s()]*)|([^\s()]+)\)|\)", text):
            if opened:
                stack.append((opened, set()))
                continue
            if word:
                if is_gold and stack[-1][0] in (",", ":", "``", "''", "."):
                    out.add(place)
                for _, places in stack:
                    places.add(place)
                place += 1
                stack.pop()
            else:
                found.append(stack.pop())
        assert not stack and found.pop()[0] == "ROOT"
        names = [("ADVP" if label == "PRT" else label, frozenset(places - out)) for label, places in found]
        return Counter(name for name in names if name[1])

    one = spans(gold, True)
    other = spans(predicted, False)
    return sum(one.values()), sum(other.values()), sum(min(one[name], other[name]) for name in one)


@given(tree_pairs())
def test_counts_agree_with_an_independent_count(pair):
    counts = count_brackets(*pair)
    assert (counts["gold"], counts["predicted"], counts["matched"]) == counted_otherwise(*map(str, pair))


@given(tree_pairs())
def test_properties_of_the_scores(pair):
    gold, predicted = pair
    there, back = score_trees([gold], [predicted]), score_trees([gold], [gold])
    assert 0 <= there["bracket_f1"] <= 100
    if count_brackets(gold, gold)["gold"]:
        assert back["bracket_f1"] == back["bracket_precision"] == back["bracket_recall"] == back["exact_match"] == 100
    low, high = sorted((there["bracket_precision"], there["bracket_recall"]))
    assert low - 1e-9 <= there["bracket_f1"] <= high + 1e-9 or there["bracket_f1"] == 0


def test_scores_of_a_corpus_are_of_its_sums_and_of_short_sentences_apart():
    short = "(ROOT (S (NP (NN a)) (VP (VB b) (. .))))"
    long_gold = f"(ROOT (S {' '.join(['(NN w)'] * 40)} (. .)))"  # 41 words with the full stop
    long_predicted = f"(ROOT (S (NP {' '.join(['(NN w)'] * 39)}) (VB w) (. .)))"
    scores = score_trees(map(tree_of, [short, long_gold]), map(tree_of, [short, long_predicted]))
    assert scores["sentences"] == 2 and scores["sentences_40"] == 1
    assert scores["bracket_precision"] == 100 * 4 / 5 and scores["bracket_recall"] == 100
    assert scores["bracket_f1"] == pytest.approx(2 * 80 * 100 / 180)
    assert scores["exact_match"] == 50 and scores["exact_match_40"] == 100 == scores["bracket_f1_40"]
    assert scores["pos_accuracy"] == pytest.approx(100 * 41 / 42)  # 2 + 40 words that are no punctuation, one wrong
    for with_40 in (f"(ROOT (S {'(NN w) ' * 39} (. .)))", f"(ROOT (S {'(NN w) ' * 40} (-NONE- *)))"):
        assert score_trees([tree_of(with_40)], [tree_of(with_40)])["sentences_40"] == 1  # a trace is no word


@pytest.mark.parametrize("tag", ["?", "!", "$", "#", "HYPH", "-LRB-", "SYM", "LS", "XX", ";"])
def test_words_with_other_tags_stay(tag):
    tree = tree_of(f"(ROOT (S (NP (NN a)) ({tag} x)))")
    assert count_brackets(tree, tree)["words"] == 2
    assert count_brackets(tree, tree_of("(ROOT (S (NP (NN a) (NN x))))"))["matched"] == 1


def test_a_sentence_of_punctuation_is_passed_over():
    dots, word = "(ROOT (X (: ...) (. .)))", "(ROOT (S (NN a)))"
    assert score_trees([tree_of(dots)], [tree_of(dots)])["sentences"] == 0
    scores = score_trees(map(tree_of, [dots, word]), map(tree_of, ["(ROOT (NP (: ...)) (. .))", "(ROOT (NP (NN a)))"]))
    assert scores["sentences"] == scores["sentences_40"] == 1 and scores["exact_match"] == 0


def test_tags_are_compared_whole_and_punctuation_is_not():
    gold = "(ROOT (S (NN a) (NNP-HL b) (VB c) (. .) (, ,)))"
    predicted = "(ROOT (S (NN a) (NNP b) (NN c) (. .) (NN ,)))"
    assert score_trees([tree_of(gold)], [tree_of(predicted)])["pos_accuracy"] == pytest.approx(100 / 3)


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        ("(ROOT (S (NN a) (NN c)))", "sentence 1: the words do not match (word 2 is 'b' in the gold tree and 'c'"),
        ("(ROOT (S (NN a)))", "word 2 is 'b' in the gold tree and no word"),
        ("(ROOT (S (NN a) (NN b) (NN b)))", "word 3 is no word in the gold tree and 'b'"),
    ],
)
def test_words_that_do_not_match(predicted, message):
    assert message in error_of(score_trees, [tree_of("(ROOT (S (NN a) (NN b)))")], [tree_of(predicted)])


def test_numbers_of_trees_that_differ():
    lines = ["(ROOT (S (NP (NN a)) (VP (VB b))))", "(ROOT (NP (NN c)))"]
    assert "2 gold trees and 1 predicted" in error_of(score_trees, map(tree_of, lines), map(tree_of, lines[:1]))
