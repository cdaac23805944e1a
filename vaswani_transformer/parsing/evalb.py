"""Labelled bracketing scores by the rules of evalb (Sekine and Collins), with its parameters `COLLINS.prm`.

- The outer bracket (`ROOT`, `TOP`, `S1` or none) does not count, nor does `TOP` anywhere.
- Functional tags and indices are cut off labels (`NP` of `NP-SBJ-1`); part-of-speech tags are compared whole.
- Words tagged as punctuation, `, : `` '' .`, and traces are removed before spans are counted. The gold tags decide
  which ones, in both trees: with the predicted tags, one wrong tag would make the lengths differ, which evalb reports
  as an error and leaves out of the scores.
- A bracket without any word left does not count.
- `ADVP` and `PRT` are one label.
- Brackets of the same label and span, as in unary chains, count as often as they occur.
- Tags are compared on the remaining words; "40" stands for sentences of at most 40 words, punctuation included.
- A sentence without a remaining word is skipped: it counts neither as a sentence nor as an exact match.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest

from ..errors import UserError
from .trees import ROOT_LABELS, TRACE, Tree, plain_label

PUNCTUATION = frozenset([",", ":", "``", "''", ".", TRACE])
UNCOUNTED = PUNCTUATION | {"TOP"}  # labels of brackets that count nowhere
SHORT = 40  # words


def _as_percentages(counts: Counter) -> dict[str, float]:
    """Return the scores of summed counts of `count_brackets`; 0 of nothing is 0."""
    shares = {
        "bracket_precision": (counts["matched"], counts["predicted"]),
        "bracket_recall": (counts["matched"], counts["gold"]),
        "bracket_f1": (2 * counts["matched"], counts["gold"] + counts["predicted"]),
        "exact_match": (counts["exact"], counts["sentences"]),
        "pos_accuracy": (counts["tags_right"], counts["words"]),
    }
    scores = {name: 100 * part / whole if whole else 0.0 for name, (part, whole) in shares.items()}
    return scores | {"sentences": counts["sentences"]}


def _brackets(tree: Tree, punctuation: Sequence[bool]) -> Counter:
    """Count how often each `(label, start, end)` occurs, counted in words that are not punctuation, `end` excluded."""
    counts: Counter = Counter()
    offsets = [0, *accumulate(not is_removed for is_removed in punctuation)]  # remaining words before each word

    def count(node: Tree, start: int, is_outer: bool) -> int:
        """Count the brackets of a node whose first word has the index `start`; returns that of the next word."""
        if node.word is not None:
            return start + 1
        end = start
        for child in node.children:
            end = count(child, end, is_outer and len(node.children) == 1)
        label = plain_label(node.label)
        is_counted = label not in UNCOUNTED and not (is_outer and label in ROOT_LABELS)
        if is_counted and offsets[start] < offsets[end]:
            counts["ADVP" if label == "PRT" else label, offsets[start], offsets[end]] += 1
        return end

    count(tree, 0, is_outer=True)
    return counts


def count_brackets(gold: Tree, predicted: Tree, where: str = "the tree") -> Counter:
    """Compare one predicted tree with the gold one, which is cleaned; `UserError`, with `where`, for different words.

    Returns:
        numbers of brackets: `gold`, `predicted`, `matched`; `words` that are not punctuation and their `tags_right`;
        `sentences`: 1 with such a word, and `exact`: 1 if all its brackets match.
    """
    for number, words in enumerate(zip_longest(gold.words(), predicted.words()), 1):
        if words[0] != words[1]:
            gold_word, word = ("no word" if word is None else repr(word) for word in words)
            problem = f"word {number} is {gold_word} in the gold tree and {word} in the predicted one"
            fix = "both must be trees of the same sentence, in the same order"
            raise UserError(f"{where}: the words do not match ({problem}): {fix}")
    gold_tags = gold.tags()
    punctuation = [tag in PUNCTUATION for tag in gold_tags]
    gold_brackets, predicted_brackets = _brackets(gold, punctuation), _brackets(predicted, punctuation)
    tags = [pair for pair in zip(gold_tags, predicted.tags(), strict=True) if pair[0] not in PUNCTUATION]
    return Counter(
        gold=gold_brackets.total(),
        predicted=predicted_brackets.total(),
        matched=(gold_brackets & predicted_brackets).total(),
        words=len(tags),
        tags_right=sum(gold_tag == tag for gold_tag, tag in tags),
        sentences=int(bool(tags)),
        exact=int(bool(tags) and gold_brackets == predicted_brackets),
    )


def score_trees(gold: Iterable[Tree], predicted: Iterable[Tree]) -> dict[str, float]:
    """Return scores of predicted trees, by as many cleaned gold ones over the same words.

    Returns:
        percentages `bracket_precision`, `bracket_recall`, `bracket_f1`, `exact_match` and `pos_accuracy`, and the
        number of `sentences`; the same with the ending `_40` for sentences of at most 40 words.

    Raises:
        UserError: for trees over different words, different numbers of trees, or none.
    """
    gold, predicted = list(gold), list(predicted)
    if len(gold) != len(predicted) or not gold:
        numbers = f"{len(gold):,} gold trees and {len(predicted):,} predicted ones"
        raise UserError(f"{numbers}: give as many of both, above 0")
    total, short = Counter(), Counter()
    for number, (gold_tree, tree) in enumerate(zip(gold, predicted, strict=True), 1):
        counts = count_brackets(gold_tree, tree, f"sentence {number:,}")
        total += counts
        if sum(tag != TRACE for tag in gold_tree.tags()) <= SHORT:
            short += counts
    return _as_percentages(total) | {f"{name}_40": value for name, value in _as_percentages(short).items()}
