"""Publishing that must not go through: mistakes of the user, faults of the Hub, scores that do not fit."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import hub_server
import pushing
import pytest
import yaml
from conftest import error_of, tiny_model
from hub_server import Fault, Refusal
from pushing import REPO
from safetensors.torch import load_file, save_file

from vaswani_transformer import publish

model, push, scores = pushing.model, pushing.push, pushing.scores


# What the user can fix: status 2, before anything is sent


def test_tokens_that_do_not_do(push, hub):
    assert "no token found" in push(status=2, token="").err and hub.requests == []
    assert "Invalid user token" in push("--token", "hf_with a gap", status=2).err
    assert "Invalid user token" in push(status=2, token="hf_wrong").err
    assert "You don't have the rights" in push(status=2, repo="other/tiny").err
    assert "You don't have the rights" in push(status=2, token="hf_reader").err
    assert not hub.repositories
    push("--token", "hf_writer", token="hf_wrong")
    assert "You don't have the rights" in push("--language", "fr", status=2, token="hf_reader").err
    assert len(hub.repositories[REPO].branches["main"]) == 2
    assert not any(b"hf_" in data for data in hub.bodies)


def test_the_token_is_not_shown_even_when_the_hub_says_it(push, hub):
    hub.faults.append(Fault("GET", "/api/whoami-v2", answer=Refusal(400, "what is this hf_writer?").answer))
    assert "what is this ***?" in push(status=2).err


def test_a_bad_card_is_refused_before_anything_is_made(push, hub):
    assert 'license\\" must be one of' in push(status=2, license="mine").err
    assert "language" in push("--language", "English", status=2).err
    assert {path for method, path, _ in hub.requests if method in ("POST", "PUT")} == {"/api/validate-yaml"}
    assert not hub.repositories


def test_a_model_of_another_kind_stays(push, hub):
    push()
    files = hub.repositories[REPO].find("main").files
    files["config.json"] = b'{"model_type": "gpt2"}'
    assert f"{REPO} holds a gpt2 model: give another name" in push(status=2).err and hub.files(REPO) == files


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"repo_id": "a/b/c"}, "Repo id must be in the form"),
        ({"repo_id": "just-a-name"}, "^just-a-name: give owner/name"),
        ({"repo_id": "tester/a--b"}, "Cannot have -- or .. in repo_id"),
        ({"evaluations": ["missing.json"]}, "missing.json: No such file"),
        ({"evaluations": "missing.json"}, "missing.json: No such file"),
    ],
)
def test_mistakes_in_arguments(model, mistake, message):
    assert re.search(message, error_of(publish, model, **{"repo_id": REPO, "dry_run": True, **mistake}))


def test_folders_that_are_no_finished_model(push, hub, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert "training there is not finished" in push(status=2, folder=tmp_path).err
    assert "there is no model folder" in push(status=2, folder=tmp_path / "none").err
    assert hub.requests == []


def test_a_repository_that_ignores_the_weights_is_named(push, hub):
    push()
    hub.repositories[REPO].find("main").files |= {".gitignore": b"config.json\n", "config.json": b"{}"}
    assert "did not accept config.json" in push("--language", "fr", status=2).err


# Failures of the Hub and of the way there: status 1, safe to repeat


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT", "/lfs/", times=99),
        Fault("POST", "/commit/"),
        Fault("POST", "/api/repos/create", answer=Refusal(500, "no").answer),
        Fault("POST", "/api/validate-yaml", answer=Refusal(503, "busy").answer),
        Fault("GET", "/api/whoami-v2"),
    ],
    ids=lambda fault: fault.path,
)
def test_a_push_that_broke_can_be_repeated(push, hub, model, fault):
    hub.faults.append(Fault(**vars(fault)))
    assert "push again, which is safe to repeat" in push(status=1).err
    assert REPO not in hub.repositories or len(hub.repositories[REPO].branches["main"]) == 1  # the empty one
    hub.faults.clear()
    push()
    assert hub.files(REPO)["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert len(hub.repositories[REPO].branches["main"]) == 2


def test_an_update_that_breaks_leaves_the_old_model_whole(push, hub, model, tmp_path):
    push()
    other = shutil.copytree(model, tmp_path / "other")
    weights = {name: -tensor for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    before = hub.files(REPO)
    hub.faults.append(Fault("PUT", "/lfs/", times=99))
    push(folder=other, status=1)
    assert hub.files(REPO) == before
    hub.faults.clear()
    push(folder=other)
    assert hub.files(REPO)["model.safetensors"] == (other / "model.safetensors").read_bytes()


def test_a_commit_whose_answer_was_lost_is_not_made_twice(push, hub):
    hub.faults.append(Fault("POST", "/commit/", lose_answer=True))
    push(status=1)
    assert "model.safetensors" in hub.files(REPO)
    assert "nothing was changed" in push().out
    assert len(hub.repositories[REPO].branches["main"]) == 2


def test_a_commit_of_someone_else_in_between_is_noticed(push, hub):
    push()
    hub.on_commit = lambda repository: repository.commit("main", "theirs", repository.find("main").files)
    assert "A commit has happened since" in push("--language", "fr", status=2).err
    hub.on_commit = None
    push("--language", "fr")


def test_an_answer_that_lacks_what_the_client_looks_for(push, hub, monkeypatch):
    monkeypatch.setattr(hub_server._Handler, "_json", lambda self, value: (200, b"{}", {}))
    assert "push again" in push(status=1).err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_in_mid_upload(forked, push, hub, model, number, tmp_path):
    stall = threading.Event()
    hub.faults.append(Fault("PUT", "/lfs/", times=99, stall=stall))
    pid = forked.start("push", model, REPO, "--license", "mit", TMPDIR=str(tmp_path))
    assert hub.reached.wait(60)
    started = time.monotonic()
    os.kill(pid, number)
    done = forked.wait()
    stall.set()
    assert done.status == 128 + number and time.monotonic() - started < 5
    assert done.err.startswith("interrupted: ") and len(done.err.splitlines()) == 1, done.err
    assert list(tmp_path.iterdir()) == []
    assert len(hub.repositories[REPO].branches["main"]) == 1
    hub.faults.clear()
    push()
    assert len(hub.repositories[REPO].branches["main"]) == 2


# Scores, from the command that measures to the Hub


def test_scores_travel_from_evaluate_to_the_hub(push, hub, scores):
    record = json.loads(scores.read_text())
    push("--evaluation", scores)
    card = hub.files(REPO)["README.md"].decode()
    [index] = yaml.safe_load(card.split("---\n")[1])["model-index"]
    [result] = index["results"]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    expected = {"sacrebleu": "bleu", "chrf": "chrf", "perplexity": "perplexity", "exact_match": "exact_match"}
    assert values == {metric: record[key] for metric, key in expected.items()}
    assert result["dataset"]["name"] == "test" and result["metrics"][0]["args"]["num_beams"] == 2
    assert "vaswani evaluate run --source test.en --reference test.de --beams 2" in card
    assert record["source_sha256"] in card and record["bleu_signature"].replace("|", "\\|") in card
    assert str(scores.parent) not in card


def test_scores_of_other_weights_are_refused(push, model, scores, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    tiny_model(seed=2, vocab_size=300).save_pretrained(other)
    assert "is of other weights" in push("--dry-run", "--evaluation", scores, folder=other, status=2).err


@pytest.mark.slow
def test_a_process_of_its_own_waits_between_its_attempts(hub, model):
    """As `test_a_push_that_broke_can_be_repeated`, with nothing in the client changed: about half a minute."""
    command = [sys.executable, "-m", "vaswani_transformer", "push", str(model), REPO, "--license", "mit"]

    def run(**changes):
        return subprocess.run(command, text=True, capture_output=True, env=os.environ | changes, timeout=200)

    done = run(HF_ENDPOINT="http://127.0.0.1:9")  # where nothing listens
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "the Hub failed" in done.stderr
    done = run(HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "HF_HUB_OFFLINE" in done.stderr
    hub.faults.append(Fault("PUT", "/lfs/", times=99))
    done = run()
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "push again" in done.stderr
    hub.faults.clear()
    assert run().returncode == 0 and "model.safetensors" in hub.files(REPO)
