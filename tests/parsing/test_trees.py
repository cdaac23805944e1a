"""Trees in brackets: read as they are, cleaned, written."""

import gzip
import re

import pytest
from conftest import error_of
from hypothesis import given
from hypothesis import strategies as st
from random_trees import clean_trees, constituents

from vaswani_transformer import Tree, UserError
from vaswani_transformer.data.text_files import read_lines
from vaswani_transformer.parsing.augmentation import Exchange
from vaswani_transformer.parsing.evalb import count_brackets
from vaswani_transformer.parsing.linearization import delinearize, linearize
from vaswani_transformer.parsing.trees import MAX_DEPTH, clean, escape, parse_trees, plain_label


def read(text: str) -> list[Tree]:
    return list(parse_trees(iter(text.split("\n")), "file"))


@given(st.lists(constituents() | clean_trees()))
def test_what_is_written_is_read_again(trees):
    assert read("\n".join(map(str, trees))) == trees


@given(constituents())
def test_white_space_between_brackets_means_nothing(tree):
    assert read(str(tree).replace("(", " ( ").replace(")", "\t\r\n ) ").strip().replace("\n(", "\n (")) == [tree]


def test_a_tree_of_several_lines_and_two_on_one(tmp_path):
    text = "\n( (S\n    (NP-SBJ-1 (PRP We))\n    (VP (VBP agree))) )\n\n(ROOT (UH Yes)) (NP=2 (NN x))\n"
    plain, packed = tmp_path / "a.mrg", tmp_path / "a.mrg.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    subject, verb = Tree("NP-SBJ-1", (Tree("PRP", word="We"),)), Tree("VP", (Tree("VBP", word="agree"),))
    others = [Tree("ROOT", (Tree("UH", word="Yes"),)), Tree("NP=2", (Tree("NN", word="x"),))]
    expected = [Tree("", (Tree("S", (subject, verb)),)), *others]
    assert list(parse_trees(read_lines(plain), "")) == expected == list(parse_trees(read_lines(packed), ""))


BAD = [  # text, line, words of the message
    ("(S (NN a))\n(S (NP (NN a))\n(S (NN b))", 2, "1 bracket(s) not closed"),
    ("(S (NP (DT the)", 1, "2 bracket(s) not closed"),
    ("(S\n(NP (NN a))", 1, "all lines of a tree but the first must be indented"),
    ("(S (NN a)))", 1, "')' is out of place"),
    ("(S (NN a))\nrubbish", 2, "'rubbish' is out of place"),
    ("()", 1, "'()' holds neither a tag and a word nor a label and brackets"),
    ("(S (NN a) (NP ))", 1, "'(NP)' holds neither"),
    ("(S\n  (NN two words))", 2, "'(NN two words)' holds neither"),
    ("(S (NN a) dog)", 1, "'(S (NN a) dog)' holds neither"),
    ("(S ( (NN a)))", 1, "'((NN a))' holds neither"),
    ("(S " * 500, 1, "more than 400 brackets in each other"),
    ("(S (-LRB- ())", 1, "-LRB- is the word for one"),
    ("(S (NN a\0b))", 1, "'a\\x00b' is out of place"),
]


@pytest.mark.parametrize(("text", "line", "problem"), BAD)
def test_bad_trees_are_told_with_file_line_and_problem(text, line, problem):
    message = error_of(read, text)
    assert message.startswith(f"file, line {line}: ") and problem in message


@given(st.lists(st.sampled_from(["(", ")", " ", "\n", "\n  ", "S", "a", "\0", "(S", "(NN a)", "-LRB-"])).map("".join))
def test_any_text_is_trees_or_a_mistake_that_is_told(text):
    try:
        left = read(text)
    except UserError as error:
        assert 1 <= int(re.match(r"file, line (\d+): ", str(error))[1]) <= text.count("\n") + 1
        return
    assert "".join(text.split()) == "".join("".join(map(str, left)).split())
    assert read("\n".join(map(str, left))) == left


def test_the_deepest_trees_are_read_and_worked_on():
    depth = MAX_DEPTH - 2
    text = "(ROOT " + "(S (DT b) " * depth + "(NN a)" + ")" * depth + ")"
    tree, again = read(text + "\n" + text)
    assert str(tree) == text and tree == again and hash(tree) == hash(again) and clean(tree) == tree
    assert tree != read(text.replace("NN", "NNS"))[0] and tree != text
    assert len(tree.words()) == depth + 1 and sum(not end for _, end in tree.walk()) == 2 * (depth + 1)
    assert count_brackets(tree, again)["matched"] == depth
    assert delinearize(linearize(tree), tree.words()) == tree
    deeper = delinearize(["(S"] * 5 + linearize(tree), tree.words())
    assert deeper.words() == tree.words() and read(str(deeper)) == [deeper]
    assert Exchange([tree], shares=(0, 0.1)).version() == [tree] and Exchange([tree], seed=4).parts([tree])


def test_a_line_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.trees"
    path.write_bytes(b"(S (NN a))\n(S (NN \xff))\n")
    assert "line 2" in error_of(list, parse_trees(read_lines(path), str(path)))


@pytest.mark.parametrize(
    ("label", "plain"),
    [
        ("NP-SBJ-1", "NP"), ("NP=2", "NP"), ("NP-SBJ=2", "NP"), ("NP", "NP"), ("PRP$", "PRP$"), ("-LRB-", "-LRB-"),
        ("-RRB-", "-RRB-"), ("-LCB-", "-LCB-"), ("ADVP|PRT", "ADVP|PRT"), ("WHNP-12", "WHNP"), (":", ":"), ("``", "``"),
        ("-NONE-", "-NONE-"), ("PRT|ADVP-CLR", "PRT|ADVP"), ("=", "="), ("-", "-"),
    ],
)  # fmt: skip
def test_functions_and_indices_are_no_part_of_a_label(label, plain):
    assert plain_label(label) == plain


@pytest.mark.parametrize("outer", ["( {})", "(ROOT {})", "(TOP {})", "(S1 {})", "( (TOP {}))", "{}"])
def test_cleaning_leaves_one_root(outer):
    dirty = (
        "(S (NP-SBJ-1 (-NONE- *T*-2)) (NP=3 (NP-TMP (-NONE- *)) (PRP it)) (VP-2 (VBZ-X is) (-LRB- -LRB-) (SBAR "
        "(-NONE- 0) (S (-NONE- *T*)))))"
    )
    assert str(clean(read(outer.format(dirty))[0])) == "(ROOT (S (NP (PRP it)) (VP (VBZ-X is) (-LRB- -LRB-))))"
    assert str(clean(read("(TOP (NP (NN a)) (. .))")[0])) == "(ROOT (NP (NN a)) (. .))"  # which has several children


@given(clean_trees())
def test_cleaning_twice_changes_no_more(tree):
    once = clean(tree)
    assert clean(once) == once and once.words() == tree.words()


def test_round_brackets_in_words():
    assert [escape(word) for word in ("(", ")", ":-)", "a", "[")] == ["-LRB-", "-RRB-", ":--RRB-", "a", "["]
    assert str(Tree("S", (Tree("-LRB-", word="("), Tree("NN", word="a(b")))) == "(S (-LRB- -LRB-) (NN a-LRB-b))"
