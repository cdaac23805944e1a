"""Labelled bracket scores by the rules of evalb (Sekine and Collins), with its parameters `COLLINS.prm`.

- The outer bracket (`ROOT`, `TOP`, `S1` or none) does not count, nor does `TOP` anywhere.
- Of a label only what is before functional tags and indices counts (`NP` of `NP-SBJ-1`); tags are compared whole.
- Words tagged as punctuation, `, : `` '' .`, and traces are taken out of the sentence before spans are counted. Which
  ones is for the gold tags to say, in both trees: with the predicted tags, one wrong tag would make the sentences
  unequal, which evalb reports as an error and leaves out of the scores.
- A bracket without any word left does not count.
- `ADVP` and `PRT` are one label.
- Brackets of the same label and span, as in unary chains, count as often as they are there.
- Tags are compared on the words that are left; "40" stands for sentences of at most 40 words, punctuation counted.
- A sentence of which no word is left is passed over: it is no exact match and no sentence.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import datasets
import evaluate

from ..errors import UserError
from .trees import ROOT_LABELS, TRACE, Tree, clean, parse_trees, plain_label

PUNCTUATION = frozenset([",", ":", "``", "''", ".", TRACE])
UNCOUNTED = PUNCTUATION | {"TOP"}  # labels of brackets that count nowhere
EQUAL_LABELS = {"PRT": "ADVP"}
SHORT = 40  # words


@dataclass
class BracketCounts:
    """What the scores of some sentences are made of; counts of several are added with `+`."""

    gold: int = 0
    predicted: int = 0
    matched: int = 0
    words: int = 0
    tags_right: int = 0
    sentences: int = 0  # of which a word is left
    exact: int = 0  # sentences in which all brackets match

    def __add__(self, other: "BracketCounts") -> "BracketCounts":
        return BracketCounts(*(here + there for here, there in zip(astuple(self), astuple(other), strict=True)))

    def scores(self) -> dict[str, float]:
        """Percentages: bracket_precision, bracket_recall, bracket_f1, exact_match, pos_accuracy; 0 of nothing is 0."""

        def percent(part: int, whole: int) -> float:
            return 100 * part / whole if whole else 0.0

        return {
            "bracket_precision": percent(self.matched, self.predicted),
            "bracket_recall": percent(self.matched, self.gold),
            "bracket_f1": percent(2 * self.matched, self.gold + self.predicted),
            "exact_match": percent(self.exact, self.sentences),
            "pos_accuracy": percent(self.tags_right, self.words),
        }


def brackets(tree: Tree, punctuation: Sequence[bool]) -> Counter:
    """How often there is each `(label, start, end)`, in words that are no punctuation, `end` excluded.

    Args:
        tree: over all words.
        punctuation: for each word whether it is taken out.
    """
    found: Counter = Counter()
    left = [0]  # words that are left of those before each place
    for is_out in punctuation:
        left.append(left[-1] + (not is_out))

    def walk(node: Tree, start: int, outermost: bool) -> int:
        end = start
        for child in node.children:
            end = end + 1 if child.word is not None else walk(child, end, outermost and len(node.children) == 1)
        label = plain_label(node.label)
        says_nothing = label in UNCOUNTED or (outermost and label in ROOT_LABELS)
        if left[start] < left[end] and not says_nothing:
            found[EQUAL_LABELS.get(label, label), left[start], left[end]] += 1
        return end

    if tree.word is None:
        walk(tree, 0, True)
    return found


def count_brackets(gold: Tree, predicted: Tree, where: str = "the tree") -> BracketCounts:
    """Compare one predicted tree with the gold one.

    Args:
        gold: the right tree, cleaned.
        predicted: a tree over the same words.
        where: names the pair in the error.

    Raises:
        UserError: for trees over different words.
    """
    gold_words, words = gold.words(), predicted.words()
    if gold_words != words:
        pairs = zip(gold_words, words, strict=False)
        place = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(gold_words), len(words)))
        one, other = (repr(side[place]) if place < len(side) else "no word" for side in (gold_words, words))
        raise UserError(
            f"{where}: the words do not match (word {place + 1} is {one} in the gold tree and {other} in the predicted"
            " one): both must be trees of the same sentence, in the same order"
        )
    gold_tags = gold.tags()
    out = [tag in PUNCTUATION for tag in gold_tags]
    one, other = brackets(gold, out), brackets(predicted, out)
    matched = (one & other).total()
    kept = [pair for pair in zip(gold_tags, predicted.tags(), strict=True) if pair[0] not in PUNCTUATION]
    return BracketCounts(
        gold=one.total(),
        predicted=other.total(),
        matched=matched,
        words=len(kept),
        tags_right=sum(gold_tag == tag for gold_tag, tag in kept),
        sentences=int(bool(kept)),
        exact=int(bool(kept) and one == other),
    )


def score_trees(gold: Iterable[Tree], predicted: Iterable[Tree], where: str = "sentence") -> dict[str, float]:
    """Scores of predicted trees.

    Args:
        gold: cleaned trees.
        predicted: as many, over the same words.
        where: names a pair in errors, before its number.

    Returns:
        the scores of `BracketCounts.scores`, the same with the ending `_40` for sentences of at most 40 words, and
        `sentences`, `sentences_40`: how many they are of.

    Raises:
        UserError: for trees over different words, more of one kind, or none.
    """
    gold, predicted = list(gold), list(predicted)
    if len(gold) != len(predicted) or not gold:
        raise UserError(
            f"{len(gold):,} gold trees and {len(predicted):,} predicted ones: give as many of both, above 0"
        )
    everything, short = BracketCounts(), BracketCounts()
    for number, (one, other) in enumerate(zip(gold, predicted, strict=True), 1):
        counts = count_brackets(one, other, f"{where} {number:,}")
        everything += counts
        if sum(tag != TRACE for tag in one.tags()) <= SHORT:
            short += counts
    scores = everything.scores() | {"sentences": everything.sentences}
    return scores | {f"{name}_40": value for name, value in (short.scores() | {"sentences": short.sentences}).items()}


class BracketMetric(evaluate.Metric):
    """Labelled bracket scores as an `evaluate.Metric` that needs no network; see `score_trees`.

    `BracketMetric().compute(predictions=[...], references=[...])` takes one tree in brackets a sentence on each side,
    cleaned (`trees.clean`) before they are compared.

    Raises:
        UserError: from `compute`, for what is no tree or has no word, and as `score_trees`.
    """

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Labelled bracket precision, recall and F1 by the rules of evalb.",
            citation="Satoshi Sekine and Michael Collins. 1997. Evalb.",
            inputs_description="predictions and references: one tree in brackets each a sentence.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions, references):
        sides = (("references", references), ("predictions", predictions))
        trees = [[_one_tree(line, f"{name}[{at}]") for at, line in enumerate(lines)] for name, lines in sides]
        return score_trees(*trees)


def _one_tree(text: str, where: str) -> Tree:
    trees = list(parse_trees(iter([re.sub("[\r\n]", " ", text)]), where, mend="mend it"))
    if len(trees) != 1:
        raise UserError(f"{where}: {len(trees)} trees: give one")
    tree = clean(trees[0])
    if tree is None:
        raise UserError(f"{where}: the tree has no word: leave the sentence out on both sides")
    return tree


SCORE_NAMES = tuple(BracketCounts().scores())
