"""The verdict on a finished training, and the forecast of what more text would bring."""

import itertools
import json
import re
import shutil
import signal
from unicodedata import normalize

import datasets
import pytest
import yaml
from children import run_on_two_processes
from conftest import TINY_RECIPE
from hypothesis import given
from hypothesis import strategies as st
from pair_files import in_memory
from tokenizers import Tokenizer, models
from training_runs import stop_after_step
from transformers import PreTrainedTokenizerFast

from vaswani_transformer import load_recipe, train_tokenizer
from vaswani_transformer.cli.main import main
from vaswani_transformer.data.words import words_of
from vaswani_transformer.training import forecast, settings, verdict
from vaswani_transformer.training import run as training
from vaswani_transformer.training.forecast import gain_of_doubling

pytestmark = pytest.mark.usefixtures("without_pictures")
points = st.floats(0, 100)


@given(points, st.floats(0.1, 50), st.integers(8, 10**6))
def test_on_a_power_law_the_forecast_is_exact(limit, factor, pairs):
    quarter, half, whole, double = (limit - factor * (share * pairs) ** (-1 / 3) for share in (0.25, 0.5, 1, 2))
    assert gain_of_doubling(quarter, half, whole) == pytest.approx(double - whole, rel=1e-3)


@given(points, points, points)
def test_a_forecast_is_no_loss_and_less_where_a_quarter_does_as_well(quarter, half, whole):
    assert 0 <= gain_of_doubling(quarter + 1, half, whole) <= gain_of_doubling(quarter, half, whole) <= 100 - whole


def test_the_verdict_on_a_text_counts_what_is_likely_wrong():
    texts = [
        in_memory([("a b ", "c d"), ("a b", "c d"), ("a b", "d"), ("<2fr>e", "e"), ("", "")]),
        in_memory([("a b", "x"), ("a b", "c"), ("a", "ç a"), ("e b", "cd")]),
    ]
    ours = train_tokenizer(itertools.chain(*(text[side] for text in texts for side in ("source", "target"))))
    assert verdict.of_text("5 pairs read", *texts, ours) == [
        "training text: 5 pairs read",
        "of the pairs read 20.0% repeat another, 20.0% have two equal sides",
        "of 4 validation sources 2 are in the training text word for word (warning: new text will score lower)",
        "of the characters to validate on 11.76% are unknown (warning: train on text that has them)",  # x and ç of 17
    ]
    composed, apart = (in_memory([(normalize(form, "l'été"), "x")]) for form in ("NFC", "NFD"))
    forms = (apart, composed), (composed, composed), (composed, apart)
    found = [verdict.of_text("", *sides, ours)[2:] for sides in forms]
    assert found == found[1:2] * 3 and "1 are in the training text" in found[1][0]
    words = Tokenizer(models.WordLevel({**dict.fromkeys("ab cdx", 0), "<unk>": 1}, unk_token="<unk>"))
    words = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    lines = verdict.of_text("", texts[0].select([3, 4, 4, 4]), texts[1].select([3]), words)
    assert lines[1].startswith("of the pairs read 50.0% repeat another, 25.0% have two equal sides (warning: ")
    assert lines[2:] == [
        "of 1 validation sources 0 are in the training text word for word",
        "of the characters to validate on 100.00% are unknown (warning: train on text that has them)",
    ]


@pytest.mark.parametrize(("bleu", "chrf", "is_nothing"), [(1.5, 18.8, True), (0.0, 75.0, False), (99.8, 18.4, False)])
def test_the_verdict_on_scores_has_their_intervals(bleu, chrf, is_nothing):
    """Where targets are single words BLEU is 0, however many are right."""
    [line] = verdict.of_scores({"eval_bleu": bleu, "eval_bleu_error": 0.5, "eval_chrf": chrf, "eval_chrf_error": 1.0})
    low, high = max(0, bleu - 0.98), min(100, bleu + 0.98)
    bleu, chrf = f"BLEU {bleu:.1f} (95% interval: {low:.1f} to {high:.1f})", f"chrF {chrf:.1f} (95% interval: "
    assert line.startswith(f"validation: {bleu}, {chrf}")
    assert ("warning: the model has learned nothing" in line) == is_nothing
    assert verdict.of_scores({"eval_loss": 1.0}) == []
    alone = {"eval_bleu": 73.49, "eval_bleu_error": 0.0, "eval_chrf": 80.0, "eval_chrf_error": 0.0}
    assert verdict.of_scores(alone) == ["validation: BLEU 73.5, chrF 80.0"]  # of one sentence


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, text):
    """Some of the text, every eighth pair of which is too long, with three pairs to validate on of five held out."""
    folder = tmp_path_factory.mktemp("recipe")
    for side in ("en", "de"):
        lines = (text / f"train.{side}").read_text().splitlines()[:48]
        lines = [line * 8 if number % 8 == 7 else line for number, line in enumerate(lines)]
        (folder / f"train.{side}").write_text("".join(line + "\n" for line in lines))
    values = {name: value for name, value in TINY_RECIPE.items() if not name.startswith("validation")}
    values |= {"data_dir": str(folder), "validation_size": 5, "validation_bleu": 3, "max_extra_tokens": 2}
    values |= {"max_steps": 2, "evaluate_every": 2, "precision": "fp32", "dropout": 0.0}
    values |= {"vocab_size": "auto", "augmentation": "auto", "label_smoothing": "auto"}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    return folder / "tiny.yaml"


def test_a_forecast_is_of_nested_parts_and_the_same_validation_however_often_it_is_resumed(
    recipe, tmp_path, monkeypatch, capsys, fails
):
    references, compare = [], training.compare_systems

    def recorded(systems, texts, bleu):
        references.append(sorted(texts))
        return compare(systems, texts, bleu)

    command = ["train", str(recipe), "--forecast", "--quiet", "--output"]
    words = [len(words_of(recipe.with_name(f"train.{side}").read_text())) for side in ("en", "de")]
    monkeypatch.setattr(settings, "LITTLE_TEXT", 0.8 * sum(words))  # half of it is less
    monkeypatch.setattr(forecast, "has_learned_nothing", lambda metrics: False)
    with monkeypatch.context() as patch:
        patch.setattr(training, "compare_systems", recorded)
        assert main([*command, str(tmp_path / "straight")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(references) == 2 * 3 and references == references[:1] * 6 and len(references[0]) == 3
    stop_after_step(1, monkeypatch)
    out = tmp_path / "out"
    assert [main([*command, str(out)]) for _ in range(4)] == [128 + signal.SIGTERM] * 3 + [0]
    first, again = (json.loads((folder / "verdict.json").read_text()) for folder in (tmp_path / "straight", out))
    assert first["verdict"] == again["verdict"] and set(shown) > set(first["verdict"])
    gain = r"twice the pairs would bring about \+\S+ chrF, give or take 2\.5 \(chrF with a quarter of them .*\)"
    assert re.fullmatch(f"forecast: {gain}", first["verdict"][-1])
    assert main([*command, f"{out}/"]) == 0  # nothing is left to do
    assert json.loads((out / "verdict.json").read_text()) == again
    with monkeypatch.context() as patch:
        patch.setattr(forecast, "has_learned_nothing", verdict.has_learned_nothing)
        shutil.rmtree(tmp_path / "straight" / "forecast")
        assert main([*command, str(tmp_path / "straight")]) == 0 and not (tmp_path / "straight" / "forecast").exists()
    assert "forecast: none, since a model has learned nothing: give more minutes" in capsys.readouterr().out

    recipes = [load_recipe(str(out / folder / "recipe.yaml")) for folder in ("", "forecast/quarter", "forecast/half")]
    assert [(each.augmentation, each.label_smoothing) for each in recipes] == [("default", 0.1)] * 3
    files = (out / "forecast" / f"{name}.parquet" for name in ("quarter", "half"))
    parts = [list(datasets.Dataset.from_parquet(str(path))) for path in files]
    assert list(map(len, parts)) == [10, 21] and all(pair in parts[1] for pair in parts[0])
    sides = [recipe.with_name(f"train.{side}").read_text().splitlines() for side in ("en", "de")]
    assert {(pair["source"], pair["target"]) for pair in parts[1]} < set(zip(*sides, strict=True))
    assert not {pair["target"] for pair in parts[1]} & set(references[0])
    for side in ("en", "de"):
        with recipe.with_name(f"train.{side}").open("a") as file:
            file.writelines(f"{word} {word} {word}\n" for word in "abcdefghijkl")
    assert "already holds a model" in fails(*command, out)
    assert [main([*command, str(out), "--overwrite"]) for _ in range(4)] == [128 + signal.SIGTERM] * 3 + [0]
    assert len(datasets.Dataset.from_parquet(str(out / "forecast" / "half.parquet"))) == 27
    shutil.rmtree(out / "checkpoints")  # by which the text is compared
    line = fails(*command, out)
    assert "already holds a model: give another --output, or --overwrite" in line
    assert line.endswith(f"vaswani train --from {out} with another --output trains it further")


def test_what_no_forecast_is_made_of(recipe, tmp_path, fails):
    few = tmp_path / "few.tsv"
    few.write_text("".join(f"{n}\t{n}\n" for n in range(39)))
    command = ["train", recipe, "--forecast", "--output", tmp_path / "out"]
    for words, message in {
        ("--train-source", "none", "--train-target", "none", "--train-data", few): "a forecast takes from 40 to ",
        ("--validation-bleu", 0): "and a validation_bleu above 0: leave --forecast out",
        ("--prepared", few): "--forecast and --prepared cannot be combined",
        ("--target-text", few): "--forecast and --target-text cannot be combined",
    }.items():
        assert message in fails(*command, *words)
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_give_the_verdict_of_one(recipe, tmp_path):
    words = ["train", str(recipe), "--forecast", "--quiet", "--output"]
    assert main([*words, str(tmp_path / "one")]) == 0
    shown = run_on_two_processes(*words, tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "verdict.json").read_text())["verdict"] for name in ("one", "two"))
    assert one == two and shown.count(two[0]) == 1
