"""BLEU as the paper computed it: a plain count beside it, hand-worked cases, Moses' tokens, German compounds."""

import importlib.util
import json
import math
import sys
from collections import Counter
from unittest.mock import patch

import pytest
from conftest import error_of
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folders import write_model

from vaswani_transformer.cli.main import main
from vaswani_transformer.evaluation import metrics
from vaswani_transformer.evaluation.metrics import paper_bleu, paper_tokens, split_compounds


def multi_bleu(translations: list[str], references: list[str]) -> float:
    with patch.object(metrics, "moses_tokenizer", lambda language: str):  # of tokens
        return paper_bleu(translations, references, "fr")


def plain_multi_bleu(translations: list[str], references: list[str]) -> float:
    """What multi-bleu.perl does, in a plain loop."""
    right, total, lengths = [0] * 4, [0] * 4, [0, 0]
    for translation, reference in zip(translations, references, strict=True):
        ours, theirs = translation.split(), reference.split()
        lengths[0] += len(ours)
        lengths[1] += len(theirs)
        for n in range(1, 5):
            grams, wanted = (Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1)) for row in (ours, theirs))
            right[n - 1] += sum(min(count, wanted[gram]) for gram, count in grams.items())
            total[n - 1] += sum(grams.values())
    if not all(right):
        return 0.0
    precision = math.exp(sum(math.log(a / b) for a, b in zip(right, total, strict=True)) / 4)
    return 100 * precision * (1.0 if lengths[0] >= lengths[1] else math.exp(1 - lengths[1] / lengths[0]))


TOKENS = ("a", "b", "c", "A", "##AT##-##AT##", "&quot;", ",")
SENTENCE = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=12).map(" ".join)


@settings(max_examples=100)
@given(st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=6))
def test_equals_a_plain_count(pairs):
    translations, references = map(list, zip(*pairs, strict=True))
    longer = [" ".join(pair) for pair in pairs]  # which have all n-grams of either side
    for sides in ((translations, references), (references, longer), (longer, references)):
        assert multi_bleu(*sides) == pytest.approx(plain_multi_bleu(*sides))


def test_compounds_are_split_at_hyphens_between_signs():
    assert split_compounds("rich-text format") == "rich ##AT##-##AT## text format"
    assert split_compounds("Science-Fiction-Film") == "Science ##AT##-##AT## Fiction ##AT##-##AT## Film"
    assert split_compounds("50%-Marke x--y") == "50% ##AT##-##AT## Marke x ##AT##-##AT## -y"
    assert split_compounds("a-b-c") == "a ##AT##-##AT## b-c"  # the b belongs to the first match
    assert split_compounds("- ein - Strich -") == "- ein - Strich -"


def test_moses_tokens():
    pytest.importorskip("sacremoses")
    [german] = paper_tokens(["Der 16-jährige Hans sagte: „Ja, z.B. Dr. Oetker.“"], "de")
    assert german == "Der 16 ##AT##-##AT## jährige Hans sagte : „ Ja , z.B. Dr. Oetker . “"
    [french] = paper_tokens(['L\'homme dit "oui" & rit, vingt-deux fois.'], "fr")
    assert french == "L&apos; homme dit &quot; oui &quot; &amp; rit , vingt-deux fois ."


def test_splitting_compounds_is_worth_points_where_there_are_some():
    pytest.importorskip("sacremoses")
    references = ["Der Science-Fiction-Film war gestern gut ."] * 3
    translations = ["Der Science-Fiction-Roman war gestern gut ."] * 3
    # The second of 6 tokens is wrong, or the sixth of 10: words, pairs, threes and fours that are right.
    assert multi_bleu(translations, references) == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert paper_bleu(translations, references, "de") == pytest.approx(100 * (9 / 10 * 7 / 9 * 5 / 8 * 3 / 7) ** 0.25)
    assert paper_bleu(references, references, "de") == pytest.approx(100.0)


def test_evaluate_prints_it_beside_sacrebleus(tmp_path, capsys):
    pytest.importorskip("sacremoses")
    folder = write_model(tmp_path / "model")
    for name in ("in.en", "in.de"):
        (tmp_path / name).write_text("A dog sleeps.\nThe house is small.\n")
    output, scores = tmp_path / "out.de", tmp_path / "scores.json"
    words = ["evaluate", str(folder), "--source", str(tmp_path / "in.en"), "--max-new-tokens", "8"]
    assert main([*words, "--reference", str(tmp_path / "in.de"), "--output", str(output)]) == 0
    assert "as in the paper" not in capsys.readouterr().out
    # The model's own output as the reference is right in every flavour.
    words += ["--reference", str(output), "--paper-bleu", "de", "--json", str(scores)]
    assert main(words) == 0
    assert "BLEU 100.00  (tokenised, as in the paper)" in capsys.readouterr().out
    assert json.loads(scores.read_text())["paper_bleu"] == pytest.approx(100.0)


def test_mistakes_are_reported(monkeypatch):
    if importlib.util.find_spec("sacremoses"):
        for language in ("german", "DE"):
            line = error_of(paper_tokens, ["a"], language)
            assert f"knows no language '{language}': give one of as, " in line and ", de, " in line
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    assert "pip install 'vaswani_transformer[moses]'" in error_of(paper_tokens, ["a"], "de")
