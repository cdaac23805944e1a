"""Publishing to the Hub and loading from it: the real client and a small Hub on loopback."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pushing
import pytest
import torch
from huggingface_hub import ModelCard, snapshot_download
from model_folders import change
from pushing import REPO
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vaswani_transformer.exported import FACTS
from vaswani_transformer.hub.model_card import is_sealed
from vaswani_transformer.hub.push import publish_site

model, push, scores = pushing.model, pushing.push, pushing.scores

AUTO = AutoModelForSeq2SeqLM, AutoTokenizer


def test_a_pushed_model_comes_back_equal(push, forked, hub, model, tmp_path):
    done = push()
    assert f"pushed to {hub.endpoint}/{REPO}, branch main" in done.out and done.err == ""
    files = hub.files(REPO)
    assert files.keys() >= {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert not files.keys() & {"recipe.yaml", "training_log.jsonl"}
    assert files["model.safetensors"] == (model / "model.safetensors").read_bytes()

    def load_both():
        results = []
        for name in (REPO, model):
            loaded, tokenizer = (auto.from_pretrained(name, cache_dir=tmp_path / "cache") for auto in AUTO)
            inputs = tokenizer(["The dog sees a cat.", "Yes."], return_tensors="pt", padding=True)
            scores = loaded(**inputs, decoder_input_ids=torch.zeros(2, 3, dtype=torch.long)).logits
            search = loaded.generation_config.to_dict()
            results.append([loaded.generate(**inputs).tolist(), scores.tolist(), search])
        assert results[0] == results[1]
        snapshot = Path(snapshot_download(REPO, cache_dir=tmp_path / "snapshot"))
        assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == files

    loaded = forked.run(load_both, HF_TOKEN="")
    assert loaded.status == 0, loaded.err
    assert any(method == "GET" and path.endswith("model.safetensors") for method, path, _ in hub.requests)


@pytest.mark.parametrize(
    "moses", [None, {"languages": ["en", "pt_BR"], "aggressive_dash_splits": True, "escape": False}]
)
def test_the_settings_of_imported_tokenizers_and_parsers_come_along(push, hub, model, tmp_path, moses):
    """Without them the published model would cut texts in another way."""
    folder = shutil.copytree(model, tmp_path / "imported")
    settings = {"known_tokens": [300, 290], "split_special_tokens": True, "source_lang": "en", "target_lang": "pt_BR"}
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    settings["tree_tokens"] = [token[1:] for token in vocabulary if token.startswith("Ġ") and len(token) > 1][:3]
    change(folder, "tokenizer_config.json", **settings, moses=moses)
    assert push(folder=folder).err == ""
    published = json.loads(hub.files(REPO)["tokenizer_config.json"])
    assert published.items() >= {**settings, "moses": moses}.items()
    change(folder, "tokenizer_config.json", moses={"languages": ["en", "/home/me"]})
    assert "moses of tokenizer_config.json" in push(folder=folder).err


def test_the_card_on_the_hub_is_the_one_of_the_dry_run(push, hub):
    assert "no licence was given" in push("--dry-run", token="", license=None).err
    dry = push("--dry-run", token="")
    assert hub.requests == []
    push()
    card = hub.files(REPO)["README.md"].decode()
    assert dry.out.endswith("\n" + card) and is_sealed(card)
    assert "license: mit" in card and "- en\n- de" in card
    for name, data in hub.files(REPO).items():
        assert name == ".gitattributes" or re.search(rf"^ *{len(data):,}  {re.escape(name)}$", dry.out, re.MULTILINE)


def test_pushing_the_same_again_makes_no_commit(push, hub):
    push()
    history = list(hub.repositories[REPO].branches["main"])
    assert "nothing was changed" in push().out
    assert hub.repositories[REPO].branches["main"] == history
    assert sum(method == "PUT" for method, _, _ in hub.requests) == 1


def test_weights_in_several_files_and_a_tokenizer_of_another_kind_make_way(push, hub):
    push()
    ours, files = hub.files(REPO).keys(), hub.repositories[REPO].find("main").files
    others = {"onnx/model.safetensors", "model.fp16.safetensors", "notes.json"}
    earlier = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    earlier |= {"target_tokenizer.json"}
    for name in others | earlier:  # the first of someone else, the second of a push of an earlier version
        files[name] = b"x"
    done = push("--language", "fr")
    assert hub.files(REPO).keys() == ours | others
    assert set(re.findall(r"^ +removed  (.*)$", done.out, re.MULTILINE)) == earlier


def test_the_methods_of_transformers_push_too(forked, hub, model, tmp_path):
    def push_both():
        loaded, tokenizer = (auto.from_pretrained(model) for auto in AUTO)
        loaded.push_to_hub(REPO)
        tokenizer.push_to_hub(REPO)
        again, its_tokenizer = (auto.from_pretrained(REPO, cache_dir=tmp_path) for auto in AUTO)
        ids = its_tokenizer(["The dog."], return_tensors="pt")
        assert again.generate(**ids).tolist() == loaded.generate(**ids).tolist()

    done = forked.run(push_both)
    assert done.status == 0, done.err
    assert hub.files(REPO)["model.safetensors"] == (model / "model.safetensors").read_bytes()
    card = hub.files(REPO)["README.md"].decode()
    assert is_sealed(card) and "| parameters |" in card and "translate from en to de" in card


@pytest.fixture
def push_model(forked, model):
    """Pushes with the method of transformers."""

    def run(change=lambda loaded: None):
        def push_changed():
            loaded = AutoModelForSeq2SeqLM.from_pretrained(model)
            change(loaded)
            loaded.push_to_hub(REPO)

        done = forked.run(push_changed)
        assert done.status == 0, done.err
        return done

    return run


def test_the_method_of_transformers_keeps_a_card_of_someone_else(push_model, hub):
    push_model()
    hub.repositories[REPO].commit("main", "theirs", hub.files(REPO) | {"README.md": b"# My own words"})
    push_model()
    assert b"My own words" in hub.files(REPO)["README.md"] and not is_sealed(hub.files(REPO)["README.md"].decode())


@pytest.mark.parametrize("change", [torch.nn.Module.half, lambda m: m.model.shared.weight.data[5, 0].add_(1e-3)])
def test_changed_weights_are_not_said_to_come_from_the_run_they_started_from(push_model, hub, change):
    push_model()
    card = hub.files(REPO)["README.md"].decode()
    assert "## Training" in card and "| optimizer steps | 5 |" in card
    hub.reset()
    push_model(change)
    card = hub.files(REPO)["README.md"].decode()
    assert is_sealed(card) and "## Training" not in card and "translate from" not in card


def test_a_push_without_the_options_keeps_what_they_said_but_no_scores(push_model, push, hub, scores, model, tmp_path):
    """Without their file nobody knows whether scores are of the weights that go up."""
    folder = shutil.copytree(model, tmp_path / "copy")
    (folder / "recipe.yaml").unlink()  # which names the languages
    for again in (lambda: push(license=None, folder=folder), push_model):
        push("--evaluation", scores, "--dataset", "wmt14", "--language", "fr", folder=folder)
        assert len(ModelCard(hub.files(REPO)["README.md"].decode()).data.eval_results) == 4
        assert "the scores on the card on the Hub were left out" in again().err
        data = ModelCard(hub.files(REPO)["README.md"].decode()).data
        assert data.license == "mit" and data.datasets == ["wmt14"] and data.eval_results is None
        assert data.language == (["en", "de"] if again is push_model else ["fr"])  # the run's, where it is known


def test_the_default_card_of_transformers_makes_way(forked, push, hub, model):
    assert forked.run(lambda: AutoTokenizer.from_pretrained(model).push_to_hub(REPO)).status == 0
    assert b"Model Card for Model ID" in hub.files(REPO)["README.md"]
    assert push().err == "" and is_sealed(hub.files(REPO)["README.md"].decode())


def test_private_repositories_and_branches(push, hub):
    push("--private")
    assert hub.repositories[REPO].private
    push("--revision", "french", "--language", "fr")
    assert b"- fr" in hub.files(REPO, "french")["README.md"] and b"- fr" not in hub.files(REPO)["README.md"]
    assert "nothing was changed" in push("--revision", "french", "--language", "fr").out
    push("--private")
    hub.repositories[REPO].private = False
    assert "exists and is public" in push("--private", status=2).err


@pytest.mark.parametrize("edit", [lambda card: "# Mine\n", lambda card: card.replace("## Model\n", "## The model\n")])
def test_a_card_that_someone_wrote_or_edited_stays(push, hub, edit):
    push()
    head = hub.repositories[REPO].find("main")
    own = edit(head.files["README.md"].decode()).encode()
    assert own != head.files["README.md"]
    head.files["README.md"] = own
    done = push("--language", "fr")
    assert "written or edited by someone else" in done.err and hub.files(REPO)["README.md"] == own
    done = push("--language", "fr", "--overwrite-card")
    assert done.err == "" and b"- fr\n" in hub.files(REPO)["README.md"]


def test_the_settings_of_a_space_that_someone_edited_stay(hub):
    def write(site, text="Translate"):
        site.mkdir()
        for name in ("README.md", FACTS, "index.html"):
            (site / name).write_text(text)

    publish_site(write, "tester/page", token="hf_writer")
    hub.repositories["spaces/tester/page"].find("main").files["README.md"] = b"Mine"
    publish_site(partial(write, text="More"), "tester/page", token="hf_writer")
    files = hub.files("spaces/tester/page")
    assert (files["README.md"], files["index.html"]) == (b"Mine", b"More")


@pytest.mark.slow
def test_the_code_on_the_card_runs(push, hub, tmp_path):
    """What the card tells its reader to type: with the package, and without it in a process that cannot import it."""
    push()
    blocks = re.findall(r"```python\n(.*?)```", hub.files(REPO)["README.md"].decode(), re.DOTALL)
    without = [block for block in blocks if "trust_remote_code" in block]
    assert len(blocks) == 3 and len(without) == 2 and "import vaswani_transformer" in blocks[0]
    environment = os.environ | {"HF_HOME": str(tmp_path)}
    hidden = "import sys; sys.modules['vaswani_transformer'] = None\n"
    for code in (blocks[0], hidden + "\n".join(without)):
        ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env=environment, timeout=200)
        assert ran.returncode == 0 and ran.stdout, ran.stderr
    assert "translation_text" in ran.stdout
