"""Model cards: what the front matter says is what was given, and what is not known is not said."""

import dataclasses
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, tiny_config
from huggingface_hub import ModelCard

from vaswani_transformer import VaswaniConfig, load_recipe
from vaswani_transformer.hub import card_facts, model_card
from vaswani_transformer.hub.card_facts import METRICS, CardFacts, datasets_of, languages_of, results_of_record
from vaswani_transformer.hub.model_card import is_sealed, may_be_replaced, render_card, training_rows

SCORES = {
    "bleu": 27.123456789,
    "bleu_signature": "nrefs:1|case:mixed|eff:no",
    "chrf": 55.5,
    "chrf_signature": "nrefs:1|nc:6",
    "perplexity": 4.803,
    "paper_bleu": 26.5,
    "exact_match": 12.5,
    "sentences": 1000,
    "test_set": "newstest: 2014 – full",  # a colon, which YAML has to quote
    "source_file": "newstest2014.en",
    "source_sha256": "ab" * 32,
    "generation": {"num_beams": 4, "length_penalty": 0.6, "max_extra_tokens": 50},
    "versions": {"torch": "2.13.0", "sacrebleu": "2.6.0"},
    "date": "2026-05-04",
    "command": "vaswani evaluate run --source newstest2014.en --reference newstest2014.de",
}
GENERATION = {"num_beams": 4, "length_penalty": 0.6, "max_extra_tokens": 50, "do_sample": False}


def results_of(*records: dict) -> list:
    return [result for record in records for result in results_of_record(record, "scores.json")]


def facts(**changes) -> CardFacts:
    values = {"repo_id": "owner/a-model", "config": tiny_config(), "parameters": 1_234_567, "generation": GENERATION}
    return CardFacts(**{**values, **changes})


def full_facts(**changes) -> CardFacts:
    recipe = dataclasses.asdict(load_recipe("multi30k-en-de", {"data_dir": "/home/someone/secret"}))
    values = {"recipe": recipe | {"optimizer steps": 200}, "results": results_of(SCORES), "languages": ["en", "de"]}
    return facts(**{**values, "license": "mit", "datasets": ["owner/texts"], **changes})


@pytest.mark.parametrize("preset", ["base", "parsing"])
@pytest.mark.parametrize("make", [facts, full_facts])
def test_every_template_gives_a_card_that_the_hub_client_reads_back(preset, make):
    given = make(config=VaswaniConfig.from_preset(preset))
    card = render_card(given)
    data = ModelCard(card).data
    assert data.library_name == "transformers" and "vaswani" in data.tags
    assert data.language == (list(given.languages) or None) and data.license == given.license
    assert data.datasets == (list(given.datasets) or None)
    assert data.pipeline_tag == (None if preset == "parsing" else "translation")
    assert "None" not in card and "{{" not in card and "{%" not in card and "\n\n\n" not in card
    assert card.count("```") % 2 == 0 and is_sealed(card) and card.startswith("---\n")
    assert all(len(line.split("|")) == 4 for line in re.findall(r"^\|.*\|$", card.replace(r"\|", ""), re.MULTILINE))
    expected = ["How to use", "Intended use and limits", "Model", "Training", "Evaluation", "Decoding", "Citation"]
    unknown = set() if make is full_facts else {"Training", "Evaluation"}
    headings = re.findall(r"^## (.*)$", card, re.MULTILINE)
    assert headings == [heading for heading in expected if heading not in unknown]


def test_the_model_index_holds_the_scores_exactly_and_how_they_were_obtained():
    second = {"test_set": "other", "bleu": 1, "generation": {"num_beams": 1}}
    data = ModelCard(render_card(full_facts(results=results_of(SCORES, second)))).data
    results = [result for result in data.eval_results if result.dataset_name == SCORES["test_set"]]
    scores = [key for key in METRICS if key in SCORES]
    expected = {METRICS[key][0]: SCORES[key] for key in scores}
    assert {result.metric_type: result.metric_value for result in results} == expected
    assert len(data.eval_results) == len(scores) + 1 and data.model_name == "a-model"
    assert {result.task_type for result in data.eval_results} == {"translation"}
    how = ("sentences", "source_file", "bleu_signature", "chrf_signature", "date", "command")
    how = {name: SCORES[name] for name in how} | SCORES["generation"] | SCORES["versions"]
    assert all(result.metric_args == how and result.dataset_revision == SCORES["source_sha256"] for result in results)
    assert data.metrics == ["sacrebleu", "chrf", "perplexity", "bleu", "exact_match"]


def test_test_sets_of_like_names_stay_apart():
    sets = [SCORES | {"test_set": name} for name in ("Test", "test", "test-2")]
    sets.append(SCORES | {"test_set": "test", "source_sha256": "cd" * 32})  # another file of the same name
    greedy = SCORES | {"generation": {"num_beams": 1}, "bleu": 26.0}
    greedy["stress"] = {"upper": {"chrf_kept": 90.5, "returned": 100.0, "runs_on": 2, "copies": 0, "empty": None}}
    card = render_card(full_facts(results=results_of(*sets, SCORES, greedy)))
    data = ModelCard(card).data
    assert len({result.unique_identifier for result in data.eval_results}) == 5 and card.count("\n### ") == 6
    assert all(f"| upper: {row} |" in card for row in ("chrf_kept | 90.50", "runs_on | 2", "returned | 100.00"))
    own = [result for result in data.eval_results if result.dataset_name == SCORES["test_set"]]
    bleu = {one.metric_args["num_beams"]: one.metric_value for one in own if one.metric_type == "sacrebleu"}
    assert bleu == {4: SCORES["bleu"], 1: 26.0}


def test_figures_of_the_card_come_from_the_facts():
    """Every number in the tables is in the facts; those of the text are the paper's, the same on every card."""
    given = full_facts(config=tiny_config(dropout=0.3))
    recipe, rows = given.recipe, dict(training_rows(given))
    expected = {"train_source": "train.en.gz", "optimizer steps": "200", "dropout": "0.3", "seed": "0"}
    expected |= {"warmup_steps": f"{recipe['warmup_steps']:,}", "adam_epsilon": f"{recipe['adam_epsilon']:g}"}
    assert rows.items() >= expected.items()
    card = render_card(given)
    for label, value in rows.items():
        assert f"| {label} | {value} |" in card
    assert "| parameters | 1,234,567 |" in card and "| vocab_size | 29 |" in card and "secret" not in card


def test_absent_facts_leave_no_row():
    assert training_rows(facts()) == []
    rows = dict(training_rows(facts(recipe={"warmup_steps": 10})))
    assert rows == {"warmup_steps": "10"} | {f"{kind}dropout": "0" for kind in ("", "attention_", "activation_")}
    card = render_card(facts(recipe={"warmup_steps": 10}, generation={}))
    assert "Training dropped" not in card and "generation_config.json" not in card
    assert "No licence was given" in card and "It was trained to" not in card


def test_data_of_other_forms():
    hub = {"train_data": "wmt14", "data_config": "de-en", "validation_data": "owner/news.en-de"}
    assert dict(training_rows(facts(recipe=hub))).items() >= hub.items()
    for name, known, shown in (("/me/a.tsv", [], "a.tsv"), ("me/a", [], "a"), ("me/a", ["me/a"], "me/a")):
        assert dict(training_rows(facts(recipe={"train_data": name}, datasets=known)))["train_data"] == shown
    assert datasets_of(hub) == ["wmt14"] and datasets_of({"train_data": "corpora/mine"}) == []


@pytest.mark.parametrize(
    ("recipe", "languages"),
    [
        ({"source_column": "en", "target_column": "de"}, ["en", "de"]),
        ({"source_column": "source", "target_column": "target"}, []),
        ({"source_column": "src", "target_column": "tgt", "train_source": "a.fr.gz", "train_target": "a.en.gz"},
         ["fr", "en"]),
        ({"source_column": "en", "target_column": "de", "train_source": "a.fr", "train_target": "a.it"}, ["fr", "it"]),
        ({"source_column": "de", "target_column": "fr_text"}, []),
        ({"train_source": "a.txt", "train_target": "b.txt"}, []),
        ({"train_source": "source.en", "train_target": "other.en"}, []),
        ({"train_source": "a/distilled.eng", "train_target": "a/distilled.pt-BR"}, ["eng", "pt-BR"]),
        ({"train_source": "back_translated.source", "train_target": "back_translated.de"}, ["", "de"]),
        ({}, []),
    ],
)  # fmt: skip
def test_languages_only_where_the_recipe_names_them(recipe, languages):
    assert languages_of(recipe) == languages


def test_of_paths_and_urls_the_name_alone_is_shown():
    for path, name in {
        "/data/train.en": "train.en",
        "C:\\Users\\me\\train.en": "train.en",
        "data/": "data",
        "https://bucket.example/private/train.en?Signature=a/b#c": "train.en",
        "s3://bucket/train.en": "train.en",
        "what?.en": "what?.en",
    }.items():
        assert card_facts.file_name(path) == name


def test_the_template_follows_the_model():
    def is_parser(config, **recipe):
        return "A constituency parser" in render_card(facts(config=config, recipe=recipe))

    preset = VaswaniConfig.from_preset
    assert not any(is_parser(preset(name)) for name in ("base", "big", "table3-c-layers-2"))
    assert is_parser(preset("parsing", vocab_size=100)) and is_parser(tiny_config(), preset="parsing")
    assert is_parser(tiny_config(), train_target="/runs/p/text/train.brackets")


def test_learned_positions_are_a_limit():
    config = tiny_config(position_encoding="learned", max_position_embeddings=32)
    assert "an input of more than 32 tokens, and ends outputs" in render_card(facts(config=config))
    assert "an input of more" not in render_card(facts())


def test_the_seal_breaks_when_the_card_is_edited():
    card = render_card(full_facts())
    assert is_sealed(card) and is_sealed(card.replace("\n", "\r\n")) and is_sealed(card + "\n")
    assert not is_sealed(card.replace("license: mit", "license: gpl-3.0"))
    assert not is_sealed(card + "And more.\n") and not is_sealed("# Another\n") and not is_sealed("")


def test_the_next_card_keeps_what_is_not_known_otherwise_and_no_scores(caplog, tmp_path):
    card = render_card(full_facts())
    assert str(ModelCard(card)) == card  # what transformers does to it before it is pushed again
    for text in (card, card.replace("\n", "\r\n")):
        again = model_card.carry_over(facts(), text)
        assert (again.license, again.languages, again.datasets) == ("mit", ["en", "de"], ["owner/texts"])
        assert not again.results and "the scores on the card on the Hub were left out" in caplog.text
        caplog.clear()
    known = facts(license="apache-2.0", languages=["fr", "nl"], datasets=["owner/more"], results=results_of(SCORES))
    (tmp_path / "README.md").write_text(render_card(known), encoding="utf-8")
    assert card_facts.known_languages(tmp_path) == ["fr", "nl"]
    (tmp_path / "started_from.json").write_text('{"languages": ["pt", "fr"]}')
    assert card_facts.known_languages(tmp_path) == ["pt", "fr"]
    (tmp_path / "import.json").write_text('{"toolkit": "Marian", "source": "a", "languages": ["en", "fr"]}')
    assert card_facts.known_languages(tmp_path) == ["en", "fr"]
    (tmp_path / "recipe.yaml").write_text("train_source: a.en\ntrain_target: a.br\n")  # it was trained further
    assert card_facts.known_languages(tmp_path) == ["en", "br"]
    assert model_card.carry_over(known, card) == known and not caplog.text
    assert model_card.carry_over(facts(), card + "Mine.") == facts() and not may_be_replaced(card + "Mine.")


def test_only_what_is_a_recipe_is_read_from_a_run_folder(tmp_path):
    log, recipe = tmp_path / "training_log.jsonl", tmp_path / "recipe.yaml"
    log.write_text('{"step": 1, "seconds": 3, "loss": 2}\n{"st')
    assert card_facts.read_run(tmp_path) == {}  # a log alone is another program's
    for text, expected in (
        ("a: [", {}),
        ("just text", {}),
        ("seed: 3\nmax_length: many\n", {}),
        ("seed: 3\nmy_note: [1]\nadam_epsilon: 1e-9\n", {"seed": 3, "adam_epsilon": 1e-9}),
    ):
        recipe.write_text(text)
        assert card_facts.read_run(tmp_path) == (expected | {"optimizer steps": 1} if expected else {})


def test_a_wheel_holds_the_templates(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    for name in ("vaswani_transformer", "model_cards"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=120, check=True)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {path.name for path in (ROOT / "model_cards").iterdir()} - {"README.md"}
    assert {f"vaswani_transformer/model_cards/{name}" for name in templates} <= names and len(templates) == 3
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "vaswani_transformer").rglob("*.py")} <= names
    assert "vaswani_transformer/recipes/small.yaml" in names


def test_norwegian_is_a_language():
    assert card_facts.metadata("---\nlanguage: [no, de]\n---\n")["languages"] == ["no", "de"]
    assert card_facts.metadata("---\nlanguage: no\n---\n")["languages"] == ["no"]
