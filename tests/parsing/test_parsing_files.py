"""Files of sentences and of trees with the parser's commands: what is written when, and what is left alone."""

import shutil

import pytest
from conftest import error_of
from random_trees import TINY

from vaswani_transformer import load_model
from vaswani_transformer.decoding import search
from vaswani_transformer.decoding.translator import Hypothesis
from vaswani_transformer.output_folder import OutputFolder
from vaswani_transformer.parsing.parser import Parser, load_trees
from vaswani_transformer.training.run import TrainingResult

pytest_plugins = ["parsers"]


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def training(trees, folder, *options):
    """The words of the command that made `model`, with these options instead."""
    given = ["--trees", trees / "train.trees", "--dev", trees / "dev.trees", "--num-beams", "3", "--augment", "1"]
    return "train", "--output", folder, *TINY, "--no-words", *given, *options


@pytest.mark.parametrize("change", [["--words"], ["--no-tags"], ["--augment", "2"], ["--vocab-size", "450"]])
def test_a_refused_training_changes_nothing(model, trees, run, tmp_path, change):
    folder = shutil.copytree(model, tmp_path / "run")
    before = contents(folder)
    assert "already holds a model" in run(*training(trees, folder, *change), status=2).err
    assert contents(folder) == before


def test_a_text_of_the_users_is_refused_and_a_missing_one_is_made_again(trees, run, tmp_path, monkeypatch):
    result = TrainingResult(tmp_path / "nowhere", 0, 0.0, {}, 0)  # of a training that does not begin
    monkeypatch.setattr("vaswani_transformer.training.run.train", lambda *_, **options: result)
    (tmp_path / "run" / "text").mkdir(parents=True)
    (tmp_path / "run" / "text" / "train.words").write_bytes(b"\xff\xfe")
    err = run(*training(trees, tmp_path / "run"), status=2).err
    assert "is not empty and was not written by this program" in err and err.count("\n") == 1
    shutil.rmtree(tmp_path / "run")
    run(*training(trees, tmp_path / "run"))
    assert (tmp_path / "run" / "text" / "train.words").read_text().startswith("the dog sees a cat .\n")


@pytest.mark.parametrize("field", ["train_data: mine.tsv", "augmentation: default"])
def test_what_is_for_pairs_of_text_is_refused(trees, run, tmp_path, field):
    (tmp_path / "mine.yaml").write_text(field)
    _, *options = training(trees, tmp_path / "run")
    err = run("train", tmp_path / "mine.yaml", *options, status=2).err
    assert "a parser is trained on --trees, leave it out" in err and not (tmp_path / "run").exists()


def test_an_interrupted_training_goes_on_with_the_same_trees_only(model, trees, run, tmp_path):
    folder = shutil.copytree(model, tmp_path / "run")
    recipe = (folder / "recipe.yaml").read_text()
    for path in folder.glob("model*.safetensors"):  # what is left is a training that has not ended
        path.unlink()
    for name in ("recipe.yaml", "checkpoints/recipe.yaml"):  # as if it had been trained here
        (folder / name).unlink()
        OutputFolder(folder).write_text(name, recipe.replace(str(model), str(folder)))
    checkpoints, text = contents(folder / "checkpoints"), contents(folder / "text")
    for options in (["--trees", trees / "dev.trees"], ["--words"], ["--words", "--overwrite"]):
        err = run(*training(trees, folder, *options), status=2).err
        assert "changed since the training" in err and "--overwrite" not in err and err.count("\n") == 1
        assert contents(folder / "checkpoints") == checkpoints
    run(*training(trees, folder))
    assert (folder / "model.safetensors").is_file() and contents(folder / "text") == text


@pytest.fixture
def sentences(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("".join(f"the dog sees {'a ' * number}cat .\n" for number in range(10)))
    return path


def test_nothing_is_lost_by_a_mistake_in_the_input(model, run, tmp_path):
    output, nul = tmp_path / "out.trees", tmp_path / "nul.txt"
    output.write_text("earlier\n")
    assert "No such file" in run("predict", model, "--input", tmp_path / "no", "--output", output, status=2).err
    assert output.read_text() == "earlier\n"
    nul.write_text("the dog\na \0 b\n")
    assert "line 2: word 2" in run("predict", model, "--input", nul, "--output", output, status=2).err
    assert output.read_text().count("\n") == 1  # what came before is there


@pytest.mark.parametrize(("kind", "limit"), [("model", 10), ("wordy_model", 25)])
def test_a_sentence_too_long_for_its_tree_is_named_after_those_before(request, run, sentences, tmp_path, kind, limit):
    model, output = request.getfixturevalue(kind), tmp_path / "out"
    err = run("predict", model, "--input", sentences, "--output", output, "--max-new-tokens", limit, status=2).err
    written = output.read_text().splitlines()
    assert f"line {len(written) + 1}: a tree over {len(written) + 5} words takes at least" in err
    assert 0 < len(written) < 10 and err.splitlines()[-1].startswith("error: ")
    parses = Parser(*load_model(model), max_new_tokens=limit).parse([["a"], ["a"] * 30, ["a"]])
    assert next(parses).tree.words() == ["a"]
    assert error_of(next, parses).startswith("line 2: a tree over 30 words")


def test_an_interrupted_output_is_gone_on_with(model, run, sentences, tmp_path, monkeypatch):
    whole, output = tmp_path / "whole", tmp_path / "out"
    command = ("predict", model, "--input", sentences, "--window", 3)
    run(*command, "--output", whole)
    assert len(whole.read_text().splitlines()) == 10
    with monkeypatch.context() as patch:
        given = iter([True, True])
        generate = search.generate

        def stopping(translator, pieces):
            if next(given, None) is None:
                raise KeyboardInterrupt
            return generate(translator, pieces)

        patch.setattr(search, "generate", stopping)
        assert "--resume" in run(*command, "--output", output, status=130).err
    assert len(output.read_text().splitlines()) == 6
    run(*command, "--output", output, "--resume")
    assert output.read_text() == whole.read_text()


def test_mistakes_end_in_one_line(model, run):
    message, err = "line 1: word 2 is", run("predict", model, "a \0 b", status=2).err
    assert message in err and err.startswith("error: ") and err.count("\n") == 1
    assert run("predict", model, "a b", "--no-constrained", "--precision", "int8", status=0).out  # in float32


def test_words_end_where_those_of_trees_do(model, run, tmp_path):
    """White space that is not ASCII's is part of a word, for the parser as for readers of trees."""
    run("predict", model, "10\u00a0000\t dogs\u2009here\u2028now .", "--output", tmp_path / "out")
    assert load_trees(tmp_path / "out")[0].words() == ["10\u00a0000", "dogs\u2009here\u2028now", "."]
    both = "evaluate", "--predicted", tmp_path / "out", "--trees", tmp_path / "out"
    assert run(*both).out.count("100.00") >= 4 and "--beams cannot be" in run(*both, "--beams", 2, status=2).err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("the dog", "give a list of words"),
        (["a", ""], "word 2 is ''"),
        (["New York"], "word 1 is 'New York'"),
        (["a\udcff"], "word 1 is"),
    ],
)
def test_what_no_word_can_be(model, words, message):
    parses = Parser(*load_model(model)).parse([["fine"], words])
    assert next(parses).tree.words() == ["fine"]
    line = error_of(next, parses)
    assert line.startswith("line 2") and message in line


def test_words_of_decomposed_characters_are_those_that_the_tokenizer_composes(wordy_model):
    words = ["cafe\N{COMBINING ACUTE ACCENT}", "x"]
    parse = next(Parser(*load_model(wordy_model)).parse([words]))
    assert parse.well_formed and parse.tree.words() == words


def test_trees_over_other_words_are_not_well_formed(wordy_model):
    """The model writes words too: what it writes has to be the sentence's, each in its place."""
    read = Parser(*load_model(wordy_model)).read
    right = "the (NP XX) dog XX) )NP"
    assert read(["the", "dog"], Hypothesis(right)).well_formed
    for wrong in ("the (NP XX) cat XX) )NP", "(NP XX) XX) )NP", "the dog (NP XX) XX) )NP", right + " dog"):
        parse = read(["the", "dog"], Hypothesis(wrong))
        assert not parse.well_formed and parse.tree == read(["the", "dog"], Hypothesis(right)).tree
