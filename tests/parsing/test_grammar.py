"""Constrained decoding: what may follow, checked by exhaustion and at random; outputs of models with random weights."""

from itertools import product

import pytest
import torch
from conftest import padded_batch, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from random_trees import LABELS, TAGS, constituents, top_nodes
from transformers import LogitsProcessorList

from vaswani_transformer.parsing.grammar import BracketGrammar, BracketProcessor
from vaswani_transformer.parsing.linearization import linearize, with_words, without_words

START, END = 0, 2
SMALL = {"(S": 7, ")S": 3, "(NP": 11, ")NP": 5, "NN": 20, "DT": 4}  # ids in no order


def grammar_of(ids: dict[str, int]) -> tuple[BracketGrammar, dict[int, str]]:
    return BracketGrammar(ids, END), {number: token for token, number in ids.items()} | {END: "</s>"}


def unwritten(*counts: int) -> list[list[list[int]]]:
    """Sentences of so many words, which are not part of the output."""
    return [[[] for _ in range(count)] for count in counts]


def may_follow(processor: BracketProcessor, names: dict[int, str], rows: list[list[str]]) -> list[set[str]]:
    numbers = {token: number for number, token in names.items()}
    allowed, forced = processor.allowed(torch.tensor([[START, *(numbers[token] for token in row)] for row in rows]))
    found = [{names[int(number)] for number in processor.grammar.ids[row]} for row in allowed]
    for row, number in zip(found, forced.tolist(), strict=True):
        assert (number >= 0) == (not row)  # one or the other
        row |= {names[number]} if number >= 0 else set()
    return found


def trees_by_exhaustion(tokens: list[str], words: int, limit: int, max_open_run: int) -> set[tuple[str, ...]]:
    """All sequences that are one constituent over the words, or one word, found by trying all there are."""
    found = set()
    for length in range(1, limit):
        for row in product(tokens, repeat=length):
            runs = "".join("o" if token[0] == "(" else "." for token in row).split(".")
            if top_nodes(row, words) == 1 and max(map(len, runs)) <= max_open_run:
                found.add(row)
    return found


@pytest.mark.parametrize(
    ("words", "limit", "run"), [(1, 8, 12), (2, 8, 12), (3, 8, 12), (2, 8, 1), (1, 8, 2), (2, 5, 12), (1, 2, 12)]
)
def test_exactly_the_trees_can_be_written(words, limit, run):
    tokens = ["(S", ")S", "NN"]
    grammar, names = grammar_of({token: SMALL[token] for token in tokens})
    processor = BracketProcessor(grammar, unwritten(words), [limit])
    processor.max_open_run = run
    written, waiting = set(), [()]
    while waiting:
        row = waiting.pop()
        for token in may_follow(processor, names, [list(row)])[0]:
            if token == "</s>":
                written.add(row)
            else:
                waiting.append((*row, token))
    assert written == trees_by_exhaustion(tokens, words, limit, run)


PIECES = ["w0", "w1", "w2"]  # tokens that words are made of
SPELLINGS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3)


def grammar_with_words() -> tuple[BracketGrammar, dict[int, str], dict[str, int]]:
    """With ids of `PIECES` too, one below and two above those of the brackets and tags."""
    tokens = [*("(" + label for label in LABELS), *(")" + label for label in LABELS), *(tag + ")" for tag in TAGS)]
    grammar, names = grammar_of({token: 3 + 2 * at for at, token in enumerate(tokens)})
    pieces = dict(zip(PIECES, (4, 1 + max(names), 900), strict=True))
    return grammar, names | {number: piece for piece, number in pieces.items()}, pieces


@pytest.mark.parametrize("is_written", [False, True])  # whether words are part of the output
@given(constituents(st.just("w")), st.data())
def test_every_tree_can_be_written(is_written, tree, data):
    grammar, names, pieces = grammar_with_words()
    spelled = [data.draw(SPELLINGS) if is_written else [] for _ in tree.words()]
    tokens = " ".join(with_words(linearize(tree), list(map(" ".join, spelled)))).split()
    processor = BracketProcessor(grammar, [[[pieces[one] for one in word] for word in spelled]], [len(tokens) + 1])
    for at, token in enumerate([*tokens, "</s>"]):  # to the last token
        follows = may_follow(processor, names, [tokens[:at]])[0]
        assert follows == {token} if token in PIECES else token in follows and not follows & set(PIECES)


@pytest.mark.parametrize("is_written", [False, True])
@given(st.lists(SPELLINGS, min_size=1, max_size=6), st.integers(0, 14), st.integers(1, 4), st.randoms())
def test_any_way_ends_in_a_tree_over_the_words(is_written, spelled, spare, run, random):
    """Of the tokens that are allowed, one picked by chance at each step."""
    grammar, names, pieces = grammar_with_words()
    spelled = spelled if is_written else [[] for _ in spelled]
    least = sum(map(len, spelled)) + len(spelled)
    processor = BracketProcessor(grammar, [[[pieces[one] for one in word] for word in spelled]], [least + 1 + spare])
    processor.max_open_run = run
    row: list[str] = []
    while row[-1:] != ["</s>"]:
        row.append(random.choice(sorted(may_follow(processor, names, [row])[0])))
    row.pop()
    assert len(row) <= least + spare
    plain = without_words(row)
    assert row == " ".join(with_words(plain, list(map(" ".join, spelled)))).split()
    assert top_nodes(plain, len(spelled)) == 1 or (spare < 2 and top_nodes(plain, len(spelled)))


def test_rows_of_a_batch_do_not_see_each_other():
    grammar, names = grammar_of(SMALL)
    rows = [["(S", "NN"], ["(NP", "DT"], ["(S", "(NP"], ["NN", "NN"]]
    words, limits = [2, 3], [9, 4]
    together = may_follow(BracketProcessor(grammar, unwritten(*words), limits), names, rows)  # two beams of each
    for at, (row, found) in enumerate(zip(rows, together, strict=True)):
        alone = BracketProcessor(grammar, unwritten(words[at // 2]), [limits[at // 2]])
        assert may_follow(alone, names, [row]) == [found]


@pytest.mark.parametrize("beams", [1, 2, 21])
@pytest.mark.parametrize("seed", range(4))
def test_models_with_random_weights_write_trees(seed, beams):
    grammar, names = grammar_of(SMALL)
    lengths = (7, 1, 4, 2)
    source, mask = padded_batch(lengths, seed)
    words = [1 + (seed + at) % length for at, length in enumerate(lengths)]
    limits = [count + 1 + (seed * at) % 12 for at, count in enumerate(words)]
    model = tiny_model(seed, scale=2.5)
    options = {"num_beams": beams, "max_new_tokens": max(limits), "length_penalty": 0.3}
    processors = LogitsProcessorList([BracketProcessor(grammar, unwritten(*words), limits)])
    outputs = model.generate(source, attention_mask=mask, logits_processor=processors, **options)
    for row, count, limit in zip(outputs.tolist(), words, limits, strict=True):
        tokens = row[1 : row.index(END) + 1]
        assert len(tokens) <= limit
        assert top_nodes([names[token] for token in tokens[:-1]], count)


def test_a_word_is_written_whatever_the_scores_say():
    grammar, _ = grammar_of({"(S": 3, ")S": 4, "NN)": 5})
    processor = BracketProcessor(grammar, [[[6, 7], [8]], [[9]]], [9, 9])
    scores = torch.arange(20.0).expand(4, 20).contiguous()  # two beams of each sentence
    scores[:, 7] = -torch.inf
    outputs = torch.tensor([[START, 6], [START, 6], [START, 9], [START, 9]])
    kept = processor(outputs, scores)
    assert [row.isfinite().nonzero().flatten().tolist() for row in kept] == [[7], [7], [3, 5], [3, 5]]
    assert kept[0, 7] == 0 and kept[2].equal(torch.where(kept[2].isfinite(), scores[2], -torch.inf))
