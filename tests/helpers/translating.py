"""Commands that are run or must fail, and a model, a file to translate and its translations."""

import shutil

import pytest
from model_folders import PAIRS, change, write_model

from vaswani_transformer.cli.main import main
from vaswani_transformer.decoding import parts
from vaswani_transformer.errors import UserError

LINES = [source for source, _ in PAIRS] + ["", "   ", "A dog.\tTwo.", "Ein Hund \u2028 bellt."]
OPTIONS = ["--max-new-tokens", "8", "--beams", "2", "--window", "7"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def papers_model(repetition_free, tmp_path_factory):
    """The folder of a model whose search is the paper's, for files that call `model` above `repetition_free`."""
    folder = shutil.copytree(repetition_free, tmp_path_factory.mktemp("plain") / "model")
    change(folder, "generation_config.json", no_repeat_ngram_size=None)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The file of these lines."""
    path = tmp_path_factory.mktemp("source") / "in.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.fixture(scope="module")
def expected(model, source, tmp_path_factory):
    """The translations, made in one go."""
    path = tmp_path_factory.mktemp("expected") / "out"
    assert run("translate", model, "--input", source, "--output", path, *OPTIONS) == 0
    return path.read_bytes()


def run(*arguments) -> int:
    """The exit status of a command."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        return exit_.code


@pytest.fixture
def here(monkeypatch):
    """Workers do their tasks in this process, the last first; after as many as a number in the list, one is killed."""
    limit = []

    def run_tasks(make, numbers, workers, engine, shown):
        task = make()
        results = [task(number) for number in reversed(numbers)]
        for done in range(len(numbers)):
            if done in limit:
                raise UserError("a worker process was killed")
            yield results.pop()

    monkeypatch.setattr(parts, "run_tasks", run_tasks)
    return limit
