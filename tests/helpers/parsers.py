"""Tiny parsers, trained by `vaswani parse train` on a made-up treebank.

Fixtures for test files with `pytest_plugins = ["parsers"]`, trained once for all of them.
"""

import pytest
from random_trees import TINY

from vaswani_transformer.cli.main import main

NOUNS, VERBS, PLACES = ("dog", "cat", "house", "(", "U\u2009S"), ("sees", "likes", "finds"), ("here", "there")


@pytest.fixture(scope="session")
def trees(tmp_path_factory):
    """Files of 60 and of 8 trees, with traces and functions."""
    folder, lines = tmp_path_factory.mktemp("trees"), []
    for number in range(68):
        noun, other = (NOUNS[(number + by) % len(NOUNS)].replace("(", "-LRB-") for by in (0, 1))
        adverb = f"(ADVP-LOC (RB {PLACES[number % 2]}))" if number % 3 else "(ADVP (-NONE- *T*-1))"
        verb = f"(VP (VBZ {VERBS[number % 3]}) (NP (DT a) (NN {other})) {adverb})"
        lines.append(f"(ROOT (S (NP-SBJ-1 (DT the) (NN {noun})) {verb} (. .)))")
    (folder / "train.trees").write_text("\n".join(lines[:60]) + "\n")
    (folder / "dev.trees").write_text("\n".join(lines[60:]) + "\n")
    return folder


def train(trees, folder, *options):
    command = ["parse", "train", "--trees", trees / "train.trees", "--dev", trees / "dev.trees", "--output", folder]
    assert main([*map(str, command), *TINY, *options]) == 0
    return folder


@pytest.fixture(scope="session")
def model(trees, tmp_path_factory):
    """A parser that has learned next to nothing."""
    return train(trees, tmp_path_factory.mktemp("model") / "run", "--no-words", "--augment", "1", "--num-beams", "3")


@pytest.fixture(scope="session")
def wordy_model(trees, tmp_path_factory):
    """Another, which writes words too, and whose tags are all `XX`."""
    return train(trees, tmp_path_factory.mktemp("wordy_model") / "run", "--no-tags", "--vocab-size", "500")


@pytest.fixture
def run(capsys):
    """Runs a command; returns what it printed, on standard output and error."""

    def call(*words, status: int = 0) -> tuple[str, str]:
        assert main(["parse", *map(str, words)]) == status
        return capsys.readouterr()

    return call
