"""The parser's commands on a small treebank, from trees to scores."""

import json
import re

import pytest
from conftest import error_of
from random_trees import GUM, tree_of

from vaswani_transformer import load_model, load_recipe
from vaswani_transformer.evaluation.records import read_evaluation
from vaswani_transformer.hub.model_card import METRICS
from vaswani_transformer.hub.push import publish
from vaswani_transformer.parsing.linearization import delinearize, linearize, without_words
from vaswani_transformer.parsing.parser import Parser, TextForm, load_trees, parsing_recipe
from vaswani_transformer.parsing.tokenizer import sentence_text, train_parser_tokenizer, tree_token_ids

pytest_plugins = ["parsers"]


def test_training_leaves_text_and_a_model_that_says_how_it_decodes(model):
    words = (model / "text" / "dev.words").read_text().splitlines()
    brackets = (model / "text" / "dev.brackets").read_text().splitlines()
    assert words[0] == "the dog sees a cat ." and brackets[0] == "(S (NP DT NN )NP (VP VBZ (NP DT NN )NP )VP . )S"
    sides = ((model / "text" / f"train.{side}").read_text().splitlines() for side in ("words", "brackets"))
    train_words, train_brackets = sides
    assert train_words[0] == "the dog sees a cat ." and "sees a dog" in train_words[120:]
    assert len(train_words) == len(train_brackets) > 120  # each once as it is, once changed, and some of their parts
    settings = json.loads((model / "generation_config.json").read_text())
    assert settings["num_beams"] == 3 and settings["length_penalty"] == 0.3 and settings["max_extra_tokens"] == 300


def test_words_in_the_trees(wordy_model):
    files = [wordy_model / "text" / f"dev.{side}" for side in ("words", "brackets")]
    words, brackets = (path.read_text().splitlines() for path in files)
    assert words[0] == "the dog sees a cat ."
    assert brackets[0] == "the (S (NP XX) dog XX) sees )NP (VP XX) a (NP XX) cat XX) . )NP )VP XX) )S"


@pytest.mark.parametrize(("beams", "kind"), [(1, "model"), (21, "model"), (5, "wordy_model")])
def test_every_output_is_one_tree_over_its_words(request, run, tmp_path, beams, kind):
    model = request.getfixturevalue(kind)
    odd = "nobody ( has ) #7 <seen> (S these )S words: </s> NN"
    lines = ["the dog sees a cat .", "", odd, "Yes", "  the   dog  ", "ö " * 40]
    (tmp_path / "in").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ("--beams", beams, "--tokens-per-batch", 100, "--max-new-tokens", 170)
    command = ("predict", model, "--input", tmp_path / "in", *options)
    run(*command, "--output", tmp_path / "out")
    written = (tmp_path / "out").read_text(encoding="utf-8").split("\n")
    assert len(written) == len(lines) + 1 and written[1] == ""
    for line, text in zip(lines, written, strict=False):
        if text:
            assert tree_of(text).words() == [word.replace("(", "-LRB-").replace(")", "-RRB-") for word in line.split()]
            assert text.startswith("(ROOT (")
    assert run(*command).out.split("\n") == written


def test_without_constraints_outputs_are_repaired_and_counted(model, run):
    out, err = run("predict", model, "the dog", "a cat", "--no-constrained", "--max-new-tokens", 20)
    assert [tree_of(line).words() for line in out.splitlines()] == [["the", "dog"], ["a", "cat"]]
    assert re.search(r"repaired outputs that were not trees over their words: \d", err)


@pytest.mark.parametrize("kind", ["model", "wordy_model"])
def test_the_same_trees_in_any_company(request, kind):
    loaded, tokenizer = load_model(request.getfixturevalue(kind))
    sentences = [["the", "dog"], ["a", "cat", "sees", "the", "dog", "here", "."], ["no"], ["a"] * 30]
    together = list(Parser(loaded, tokenizer, num_beams=4).parse(sentences))
    alone = [next(Parser(loaded, tokenizer, num_beams=4).parse([words])) for words in sentences]
    assert together == alone and all(parse.well_formed for parse in together)


def test_evaluation_of_a_model(model, trees, run, tmp_path):
    command = ["evaluate", model, "--trees", trees / "dev.trees", "--beams", 2]
    out, _ = run(*command, "--json", tmp_path / "scores.json", "--output", tmp_path / "out.trees")
    record = read_evaluation(tmp_path / "scores.json")
    assert record["well_formed"] == 100 and record["sentences"] == 8 and record["test_set"] == "dev"
    assert record["generation"]["constrained"] is True and record["generation"]["num_beams"] == 2
    assert record["command"] == "vaswani parse evaluate run --trees dev.trees --beams 2"
    assert {"bracket_f1", "bracket_precision", "bracket_recall", "exact_match"} <= METRICS.keys() & record.keys()
    assert dict(re.findall(r"^([\w-]+) +([\d.]+)", out, re.MULTILINE))["run"] == f"{record['bracket_f1']:.2f}"
    # The predicted file scored by itself has the same scores.
    again = tmp_path / "again.json"
    run("evaluate", "--predicted", tmp_path / "out.trees", "--trees", trees / "dev.trees", "--json", again)
    scores = json.loads(again.read_text())
    assert {name: value for name, value in scores.items() if name != "test_set"}.items() <= record.items()
    card = publish(model, "owner/parser", evaluations=[tmp_path / "scores.json"], dry_run=True).card
    assert "constituency parser" in card and f"{record['bracket_f1']:.2f}" in card


def test_each_bracket_and_tag_is_one_token(trees):
    read = load_trees(trees / "train.trees")
    tokens = sorted({token for tree in read for token in linearize(tree)})
    tokenizer = train_parser_tokenizer([sentence_text(tree.words()) for tree in read], tokens, 420)
    ids = tree_token_ids(tokenizer)
    umlaut = train_parser_tokenizer(["Haus"], ["(SÄ", ")SÄ"], 300)
    assert umlaut("(SÄ )SÄ").input_ids[:2] == [*tree_token_ids(umlaut).values()]
    for tree in read:
        assert tokenizer(" ".join(linearize(tree)))["input_ids"] == [ids[token] for token in linearize(tree)] + [2]
    for words in (["a"], ["NN", "(S", "U\u2009S", "</s>", "日本", ")"], ["-LRB-"] * 3):
        encoded = tokenizer(sentence_text(words))["input_ids"]
        assert sum(token.startswith("Ġ") for token in tokenizer.convert_ids_to_tokens(encoded)) == len(words)
        assert not set(encoded) & {ids["(S"], ids[")S"]}
        assert tokenizer.decode(encoded, skip_special_tokens=True) == sentence_text(words)


def test_a_translation_model_is_no_parser(model):
    loaded, tokenizer = load_model(model)
    del tokenizer.init_kwargs["tree_tokens"]
    assert "not a parser" in error_of(Parser, loaded, tokenizer)


def test_recipes(tmp_path):
    paper = load_recipe("parser")
    assert (paper.num_beams, paper.length_penalty, paper.max_extra_tokens, paper.vocab_size) == (21, 0.3, 300, 16_000)
    assert paper.preset == "parsing"
    recipe = load_recipe("parser-small", {"output": str(tmp_path), "train_source": "a"})
    assert "train_source is 'a'" in error_of(parsing_recipe, recipe, [], [], TextForm())


@pytest.mark.parametrize("name", GUM)
def test_gum_survives_text_and_tokens(shared_data, name):
    """What the model would write for each tree, through the tokenizer and back."""
    read, form = load_trees(shared_data / "trees" / name), TextForm(words=True)
    read = read[:: max(1, len(read) // 150)]
    tokenizer = train_parser_tokenizer([sentence_text(tree.words()) for tree in read], form.vocabulary(read), 1500)
    for tree in read:
        ids = tokenizer(" ".join(form.tokens(tree)))["input_ids"]
        written = tokenizer.decode(ids, skip_special_tokens=True).split()
        assert written == form.tokens(tree)
        assert delinearize(without_words(written), tree.words()) == tree
