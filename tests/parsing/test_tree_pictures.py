"""Trees drawn as text and as SVG."""

import xml.etree.ElementTree as ET
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trees import clean_trees, tree_of

from vaswani_transformer.parsing.pictures import text_width, tree_svg, tree_text
from vaswani_transformer.parsing.trees import Tree, unescape

SVG = "{http://www.w3.org/2000/svg}"
SENTENCE = "(ROOT (S (NP (PRP We)) (VP (VBP saw) (NP (DT the) (NN dog)) (PRN (-LRB- -LRB-) (UH yes) (-RRB- -RRB-)))))"


def test_as_text():
    assert tree_text(tree_of(SENTENCE)).splitlines() == [
        "ROOT",
        "└─ S",
        "   ├─ NP",
        "   │  └─ PRP We",
        "   └─ VP",
        "      ├─ VBP saw",
        "      ├─ NP",
        "      │  ├─ DT the",
        "      │  └─ NN dog",
        "      └─ PRN",
        "         ├─ -LRB- (",
        "         ├─ UH yes",
        "         └─ -RRB- )",
    ]


def texts(tree: Tree) -> tuple[ET.Element, list[tuple[str, str, float, float]]]:
    root = ET.fromstring(tree_svg(tree))
    return root, [(e.get("class"), e.text, float(e.get("x")), float(e.get("y"))) for e in root.iter(f"{SVG}text")]


@given(clean_trees(st.text(st.characters(exclude_characters="() \t\r\n", exclude_categories=["Cs"]), min_size=1)))
def test_any_tree_is_a_picture_with_all_its_words_inside(tree):
    root, shown = texts(tree)
    width, height = float(root.get("width")), float(root.get("height"))
    words = [text for kind, text, _, _ in shown if kind == "word"]
    assert len(words) == len(tree.words())
    for word, text in zip(tree.words(), words, strict=True):
        assert text == unescape(word) or not word.isprintable()
    nodes = len(list(tree.nodes()))
    assert sum(kind == "label" for kind, *_ in shown) == nodes - len(words)
    assert all(0 < x < width and 0 < y < height for _, _, x, y in shown)
    assert sum(line.get("class") == "branch" for line in root.iter(f"{SVG}line")) == nodes - 1


@pytest.mark.parametrize("words", [3, 12, 60])
def test_words_are_in_a_row_and_nothing_overlaps(words):
    tree = Tree("NN", word="w0")
    for number in range(1, words):
        tree = Tree(("S", "WHADVP")[number % 2], (Tree("PRP$", word=f"word{number}"), tree))
    _, shown = texts(Tree("ROOT", (tree,)))
    row = [(x, y) for kind, _, x, y in shown if kind == "word"]
    assert sorted(row) == row and len(row) == words and len({y for _, y in row}) == 1
    for (_, one, x1, y1), (_, other, x2, y2) in combinations([text for text in shown if text[0] != "label"], 2):
        assert abs(x1 - x2) >= (text_width(one) + text_width(other)) / 2 or abs(y1 - y2) >= 13
