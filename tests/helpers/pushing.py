"""A model and the command that pushes it, for the tests of publishing."""

import pytest
import yaml
from conftest import tiny_model
from model_folders import save

from vaswani_transformer import publish, train_tokenizer
from vaswani_transformer.cli.main import main
from vaswani_transformer.data.synthetic import generate_corpus

REPO = "tester/tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder as a finished training run leaves it."""
    folder = tmp_path_factory.mktemp("model") / "run"
    tokenizer = train_tokenizer([side for pair in generate_corpus(100, 10, 10).train for side in pair], vocab_size=300)
    save(folder, tiny_model(seed=1, scale=2.0, vocab_size=len(tokenizer)), tokenizer)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"source_column": "en", "target_column": "de"}))
    (folder / "training_log.jsonl").write_text('{"step": 5, "seconds": 1.0, "loss": 2.0}\n')
    publish(folder, REPO, dry_run=True)  # imports what otherwise each copy of this process would
    return folder


@pytest.fixture
def push(forked, hub, model):
    """Pushes with the command; a push that fails has to do so in one line that does not show the token."""

    def run(*options, status=0, folder=model, repo=REPO, license="mit", token="hf_writer"):
        words = ["push", folder, repo, *(["--license", license] if license else []), *options]
        done = forked.vaswani(*words, HF_TOKEN=token)
        assert done.status == status, done.err
        assert "hf_" not in done.out + done.err and "Traceback" not in done.err
        if status:
            assert len(done.err.splitlines()) == 1 and done.err.startswith("error: "), done.err
        return done

    return run


@pytest.fixture(scope="module")
def scores(model, tmp_path_factory):
    """Scores of the model as `vaswani evaluate --json` writes them."""
    folder = tmp_path_factory.mktemp("scores")
    for side, line in (("en", "The dog sees a cat."), ("de", "Der Hund sieht eine Katze.")):
        (folder / f"test.{side}").write_text(f"{line}\n" * 3)
    command = ["evaluate", str(model), "--source", str(folder / "test.en"), "--reference", str(folder / "test.de")]
    assert main([*command, "--beams", "2", "--json", str(folder / "scores.json")]) == 0
    return folder / "scores.json"
