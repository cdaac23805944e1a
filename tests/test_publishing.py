"""Publishing to the Hub and loading from it: the real client, a small Hub on loopback, faults on the way."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import hub_server
import pytest
import yaml
from conftest import tiny_model
from hub_client import HubClient
from hub_server import Fault, HubServer
from huggingface_hub import ModelCard

from vaswani_transformer import publish, train_tokenizer
from vaswani_transformer.cli import main
from vaswani_transformer.earlier_card import is_sealed
from vaswani_transformer.errors import UserError
from vaswani_transformer.synthetic import generate_corpus

REPO = "tester/tiny"
TEXT = [side for pair in generate_corpus(100, 10, 10).train for side in pair]


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    with HubServer() as hub:
        client = HubClient(hub.endpoint, tmp_path_factory.mktemp("client"))
        yield hub, client
        client.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory, services):
    """A folder as a finished training run leaves it."""
    folder = tmp_path_factory.mktemp("model") / "run"
    tokenizer = train_tokenizer(TEXT, vocab_size=300)
    tiny_model(seed=1, scale=2.0, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"source_column": "en", "target_column": "de"}))
    (folder / "training_log.jsonl").write_text('{"step": 5, "seconds": 1.0, "loss": 2.0}\n')
    return folder


@pytest.fixture
def hub(services):
    services[0].reset()
    return services[0]


@pytest.fixture
def client(services):
    return services[1]


@pytest.fixture
def push(client, hub, model):
    """Pushes; a push that must fail has to do so in one line, without the token, and leave no copy behind."""

    def run(*options, status=0, folder=model, repo=REPO, license="mit", **environment):
        words = ["push", folder, repo, *(["--license", license] if license else []), *options]
        done = client.vaswani(*words, **environment)
        assert done.status == status, done.err
        assert "hf_" not in done.out + done.err and "Traceback" not in done.err
        if status:
            assert len(done.err.splitlines()) == 1 and done.err.startswith("error: "), done.err
        return done

    return run


def weights_of(hub, revision="main", repo=REPO):
    return {name for name in hub.files(repo, revision) if "safetensors" in name}


def written(hub):
    """Requests that change something."""
    return [path for method, path, _ in hub.requests if method in ("POST", "PUT") and "validate-yaml" not in path]


def test_a_pushed_model_comes_back_equal(push, client, hub, model, tmp_path):
    done = push()
    assert f"pushed to {hub.endpoint}/{REPO}, branch main" in done.out and done.err == ""
    files = hub.files(REPO)
    assert files.keys() >= {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert not files.keys() & {"recipe.yaml", "training_log.jsonl"}
    assert files["model.safetensors"] == (model / "model.safetensors").read_bytes()
    code = f"""
import json, pathlib, torch, vaswani_transformer
from huggingface_hub import snapshot_download
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
for name, out in (({REPO!r}, "hub"), ({str(model)!r}, "local")):
    options = dict(cache_dir={str(tmp_path / "cache")!r})
    model, tokenizer = (auto.from_pretrained(name, **options) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    inputs = tokenizer(["The dog sees a cat.", "Yes."], return_tensors="pt", padding=True)
    scores = model(**inputs, decoder_input_ids=torch.zeros(2, 3, dtype=torch.long)).logits
    print(json.dumps([model.generate(**inputs).tolist(), scores.tolist(), model.generation_config.to_dict()]))
folder = pathlib.Path(snapshot_download({REPO!r}, cache_dir={str(tmp_path / "snapshot")!r}))
print(folder)
"""
    loaded = client.python(code, token=None)
    assert loaded.status == 0, loaded.err
    from_hub, local, folder = loaded.out.splitlines()
    assert from_hub == local and json.loads(from_hub)[2]["num_beams"] == json.loads(local)[2]["num_beams"]
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == files
    assert any(method == "GET" and path.endswith("model.safetensors") for method, path, _ in hub.requests)


def test_the_card_on_the_hub_is_the_one_of_the_dry_run(push, hub):
    dry = push("--dry-run")
    assert hub.requests == []
    push()
    card = hub.files(REPO)["README.md"].decode()
    assert dry.out.endswith("\n" + card) and is_sealed(card)
    assert "license: mit" in card and "- en\n- de" in card
    for name, data in hub.files(REPO).items():
        assert name == ".gitattributes" or re.search(rf"^ *{len(data):,}  {re.escape(name)}$", dry.out, re.MULTILINE)


def test_a_dry_run_needs_no_token(push, hub):
    push("--dry-run", token=None)
    assert hub.requests == []


def test_pushing_the_same_again_makes_no_commit(push, hub):
    push()
    history = list(hub.repositories[REPO].branches["main"])
    assert "nothing was changed" in push().out
    assert hub.repositories[REPO].branches["main"] == history
    assert sum(method == "PUT" for method, _, _ in hub.requests) == 1


def test_weights_in_several_files_take_the_place_of_one_and_back(push, client, hub, tmp_path):
    push()
    hub.repositories[REPO].find("main").files["onnx/model.safetensors"] = b"of someone else"
    hub.repositories[REPO].find("main").files["model.fp16.safetensors"] = b"of someone else"
    done = push("--max-shard-size", "20KB")
    shards = weights_of(hub) - {"onnx/model.safetensors", "model.fp16.safetensors"}
    assert "model.safetensors" not in shards and "model.safetensors.index.json" in shards and len(shards) > 3
    assert len(weights_of(hub)) == len(shards) + 2
    assert re.search(r"^ +removed  model.safetensors$", done.out, re.MULTILINE)
    code = f"""
import vaswani_transformer
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained({REPO!r}, cache_dir={str(tmp_path / "cache")!r})
model.save_pretrained({str(tmp_path / "back")!r})
"""
    loaded = client.python(code)
    assert loaded.status == 0, loaded.err
    push()
    assert weights_of(hub) == {"model.safetensors", "onnx/model.safetensors", "model.fp16.safetensors"}
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == hub.files(REPO)["model.safetensors"]


def test_the_methods_of_transformers_push_too(client, hub, model, tmp_path):
    code = f"""
import vaswani_transformer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, tokenizer = (auto.from_pretrained({str(model)!r}) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
model.push_to_hub({REPO!r})
tokenizer.push_to_hub({REPO!r})
again = AutoModelForSeq2SeqLM.from_pretrained({REPO!r}, cache_dir={str(tmp_path)!r})
ids = AutoTokenizer.from_pretrained({REPO!r}, cache_dir={str(tmp_path)!r})(["The dog."], return_tensors="pt")
assert again.generate(**ids).tolist() == model.generate(**ids).tolist()
"""
    done = client.python(code)
    assert done.status == 0, done.err
    assert hub.files(REPO)["model.safetensors"] == (model / "model.safetensors").read_bytes()
    card = hub.files(REPO)["README.md"].decode()
    assert is_sealed(card) and "| parameters |" in card and "trained from en to de" in card


def test_the_method_of_transformers_keeps_a_card_of_someone_elses(client, hub, model):
    push_model = f"""
import vaswani_transformer
from huggingface_hub import HfApi
from transformers import AutoModelForSeq2SeqLM
AutoModelForSeq2SeqLM.from_pretrained({str(model)!r}).push_to_hub({REPO!r})
"""
    assert client.python(push_model).status == 0
    upload = f"HfApi().upload_file(path_or_fileobj=b'# My own words', path_in_repo='README.md', repo_id={REPO!r})"
    assert client.python(f"from huggingface_hub import HfApi\n{upload}").status == 0
    assert client.python(push_model).status == 0
    assert b"My own words" in hub.files(REPO)["README.md"] and not is_sealed(hub.files(REPO)["README.md"].decode())


PUSH_MODEL = """
import torch, vaswani_transformer
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained({folder!r})
{change}
model.push_to_hub({repo!r})
"""


@pytest.mark.parametrize("change", ["model.half()", "model.model.shared.weight.data[5, 0] += 1e-3"])
def test_changed_weights_are_not_said_to_come_from_the_run_they_started_from(client, hub, model, change):
    assert client.python(PUSH_MODEL.format(folder=str(model), repo=REPO, change="")).status == 0
    card = hub.files(REPO)["README.md"].decode()
    assert "## Training" in card and "| optimizer steps | 5 |" in card
    hub.reset()
    assert client.python(PUSH_MODEL.format(folder=str(model), repo=REPO, change=change)).status == 0
    card = hub.files(REPO)["README.md"].decode()
    assert is_sealed(card) and "## Training" not in card and "trained from" not in card


def test_the_method_of_transformers_keeps_what_the_command_wrote(client, push, hub, model, scores):
    push("--evaluation", scores, "--dataset", "wmt14")
    card = hub.files(REPO)["README.md"]
    assert client.python(PUSH_MODEL.format(folder=str(model), repo=REPO, change="")).status == 0
    assert hub.files(REPO)["README.md"] == card
    done = client.python(PUSH_MODEL.format(folder=str(model), repo=REPO, change="model.half()"))
    assert done.status == 0 and "scores on the card on the Hub are of other weights" in done.err
    data = ModelCard(hub.files(REPO)["README.md"].decode()).data
    assert data.license == "mit" and data.language == ["en", "de"] and data.datasets == ["wmt14"]
    assert data.eval_results is None


def test_a_push_without_the_options_keeps_what_they_said(push, hub, scores, model, tmp_path):
    push("--evaluation", scores, "--dataset", "wmt14", "--language", "fr")
    card = hub.files(REPO)["README.md"]
    done = push(license=None)
    assert hub.files(REPO)["README.md"] == card
    assert done.err == ("kept from the card on the Hub: license mit; languages fr; datasets wmt14; scores on test\n")
    push("--max-shard-size", "20KB", license=None)  # the same tensors in other files
    assert hub.files(REPO)["README.md"] == card
    push("--language", "nl", license="apache-2.0")
    data = ModelCard(hub.files(REPO)["README.md"].decode()).data
    assert data.license == "apache-2.0" and data.language == ["nl"] and len(data.eval_results) == 4
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tiny_model(seed=2, vocab_size=300).save_pretrained(other)
    done = push(license=None, folder=other)
    data = ModelCard(hub.files(REPO)["README.md"].decode()).data
    assert data.license == "apache-2.0" and data.language == ["en", "de"] and data.eval_results is None
    assert "of other weights and left out" in done.err and "scores on" not in done.err.splitlines()[-1]


def test_the_default_card_of_transformers_makes_way_unless_someone_edited_it(client, push, hub, model):
    stub = f"""
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained({str(model)!r}).push_to_hub({REPO!r})
"""
    assert client.python(stub).status == 0
    card = hub.files(REPO)["README.md"]
    assert b"Model Card for Model ID" in card
    assert push().err == "" and is_sealed(hub.files(REPO)["README.md"].decode())
    edited = card.replace(b"## Uses", b"I use it at home.\n\n## Uses")
    assert edited != card
    hub.repositories[REPO].find("main").files["README.md"] = edited
    assert "written or edited by someone else" in push().err and hub.files(REPO)["README.md"] == edited


def test_a_terminal_sees_the_upload_move(client, hub, model):
    code = f"""
import fcntl, os, pty, struct, sys, termios, threading
from vaswani_transformer.cli import main
terminal, end = pty.openpty()
fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
seen = bytearray()
def read():
    while b"the end" not in seen:
        seen.extend(os.read(terminal, 4096))
reader = threading.Thread(target=read)
reader.start()
os.dup2(end, 2)
sys.stderr = os.fdopen(2, "w", closefd=False)
status = main(["push", {str(model)!r}, {REPO!r}])
sys.stderr.write("the end")
sys.stderr.flush()
reader.join()
print(seen.decode())
sys.stderr = None
sys.exit(status)
"""
    done = client.python(code)
    assert done.status == 0 and "model.safetensors: 100%" in done.out, done.out


def test_private_repositories_branches_and_messages(push, hub):
    push("--private", "--message", "the first")
    assert hub.repositories[REPO].private and hub.repositories[REPO].find("main").message == "the first"
    push("--revision", "small-shards", "--max-shard-size", "20KB")
    assert weights_of(hub) == {"model.safetensors"} and len(weights_of(hub, "small-shards")) > 3
    push("--private")
    hub.repositories[REPO].private = False
    assert "is there and public" in push("--private", status=2).err


# Cards of others


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


def test_our_own_card_is_brought_up_to_date(push, hub):
    push()
    head = hub.repositories[REPO].find("main")
    head.files["README.md"] = head.files["README.md"].replace(b"\n", b"\r\n")  # as a checkout on Windows has it
    assert push("--language", "fr").err == "" and b"- fr\n" in hub.files(REPO)["README.md"]


def test_without_a_licence_the_card_says_so(push, hub):
    assert "no licence was given" in push(license=None).err
    assert "No licence was given" in hub.files(REPO)["README.md"].decode()


# What the user can mend: status 2, before anything is sent


def test_tokens_that_do_not_do(push, hub):
    assert "there is no token" in push(status=2, token=None).err and hub.requests == []
    assert "copy it anew" in push("--token", "hf_with a gap", status=2).err and hub.requests == []
    assert "does not accept the token" in push(status=2, token="hf_wrong").err
    assert "no right to write to other/tiny" in push(status=2, repo="other/tiny").err
    assert "no right to write" in push(status=2, token="hf_reader").err
    assert not hub.repositories
    push("--token", "hf_writer", token="hf_wrong")
    assert "no right to write" in push("--language", "fr", status=2, token="hf_reader").err
    assert len(hub.repositories[REPO].branches["main"]) == 2
    assert not any(b"hf_" in data for data in hub.bodies)


def test_the_token_is_not_shown_even_when_the_hub_says_it(push, hub):
    hub.faults.append(Fault("GET", "/api/whoami-v2", status=400, message="what is this hf_writer?"))
    assert "what is this ***?" in push(status=2).err


def test_a_bad_card_is_refused_before_anything_is_made(push, hub, tmp_path):
    assert '"license" must be one of' in push(status=2, license="mine").err
    assert "no licence identifier" in push(status=2, license="My own licence").err
    assert "no language code" in push("--language", "English", status=2).err
    assert "no dataset name" in push("--dataset", "a dataset", status=2).err
    (tmp_path / "bad.md").write_text("---\nlicense: mine\n---\n# {{ name }}\n")
    assert '"license" must be one of' in push("--card", tmp_path / "bad.md", status=2).err
    assert written(hub) == [] and not hub.repositories


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"repo_id": "a/b/c"}, "no repository name"),
        ({"repo_id": "just-a-name"}, "give owner/name"),
        ({"repo_id": "tester/a--b"}, "no repository name"),
        ({"max_shard_size": "5"}, "max_shard_size is '5'"),
        ({"max_shard_size": "0GB"}, "max_shard_size is '0GB'"),
        ({"max_shard_size": "half a GB"}, "max_shard_size"),
        ({"max_shard_size": "5GiB"}, "max_shard_size is '5GiB'"),
        ({"max_shard_size": "1e999GB"}, "max_shard_size"),
        *(
            ({"revision": name}, "no branch name")
            for name in (
                "",
                " ",
                "a b",
                "a..b",
                "-x",
                "main/",
                "/a",
                "a//b",
                ".a",
                "a/.b",
                "a.lock",
                "a.",
                "@",
                "a~1",
                "a\n",
            )
        ),
        ({"message": ""}, "message is empty"),
        ({"card": "no-such-card"}, "cannot read card template no-such-card"),
        ({"evaluations": ["missing.json"]}, "cannot read evaluation file"),
        ({"evaluations": "missing.json"}, "cannot read evaluation file missing.json"),
    ],
)
def test_mistakes_in_arguments(model, mistake, message):
    with pytest.raises(UserError, match=message) as caught:
        publish(model, **{"repo_id": REPO, "dry_run": True, **mistake})
    assert "\n" not in str(caught.value)


def test_branch_names_that_git_takes(model):
    for name in ("main", "small-shards", "refs/pr/1", "v1.0", "a@b", "größer"):
        assert publish(model, REPO, revision=name, dry_run=True, license="mit").revision == name


def test_one_name_may_be_given_alone(model, scores):
    alone = publish(model, REPO, languages="en", datasets="wmt14", evaluations=str(scores), dry_run=True).card
    assert alone == publish(model, REPO, languages=["en"], datasets=["wmt14"], evaluations=[scores], dry_run=True).card
    assert publish(model, REPO, evaluations=scores, dry_run=True, max_shard_size="0.5GB").card.count("### test") == 1


def test_folders_that_are_no_finished_model(push, hub, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert "training there is not finished" in push(status=2, folder=tmp_path).err
    assert "there is no model folder" in push(status=2, folder=tmp_path / "none").err
    assert hub.requests == []


def test_a_repository_that_ignores_the_weights_is_named(push, hub):
    push()
    hub.repositories[REPO].find("main").files |= {".gitignore": b"config.json\n", "config.json": b"{}"}
    assert "has not taken config.json" in push("--language", "fr", status=2).err


# Failures of the Hub and of the way there: status 1, safe to repeat


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT", "/lfs/", times=99, after_bytes=1000),
        Fault("PUT", "/lfs/", times=99, status=500),
        Fault("POST", "objects/batch", times=99, status=503),
        Fault("POST", "/commit/", after_bytes=1000),
        Fault("POST", "/commit/", status=502),
        Fault("POST", "/api/repos/create", status=500),
        Fault("GET", "/api/whoami-v2"),
    ],
    ids=lambda fault: f"{fault.path}-{fault.status or 'cut'}",
)
def test_a_push_that_broke_can_be_repeated(push, hub, model, fault):
    hub.faults.append(Fault(**vars(fault)))
    line = push(status=1).err
    assert "push again, which is safe to repeat" in line
    assert REPO not in hub.repositories or len(hub.repositories[REPO].branches["main"]) == 1  # the empty one
    hub.faults.clear()
    push()
    assert hub.files(REPO)["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert len(hub.repositories[REPO].branches["main"]) == 2


def test_a_short_interruption_is_overcome_without_the_user(push, hub):
    hub.faults.append(Fault("PUT", "/lfs/", times=2, after_bytes=1000))
    assert push().err == "" and "model.safetensors" in hub.files(REPO)


def test_an_update_that_breaks_leaves_the_old_model_whole(push, hub):
    push()
    before = hub.files(REPO)
    hub.faults.append(Fault("PUT", "/lfs/", times=99, after_bytes=1000))
    push("--max-shard-size", "20KB", status=1)
    assert hub.files(REPO) == before
    hub.faults.clear()
    push("--max-shard-size", "20KB")
    index = json.loads(hub.files(REPO)["model.safetensors.index.json"])
    assert set(index["weight_map"].values()) | {"model.safetensors.index.json"} == weights_of(hub)


def test_a_commit_whose_answer_was_lost_is_not_made_twice(push, hub):
    hub.faults.append(Fault("POST", "/commit/", lose_answer=True))
    push(status=1)
    assert "model.safetensors" in hub.files(REPO)
    assert "nothing was changed" in push().out
    assert len(hub.repositories[REPO].branches["main"]) == 2


def test_a_commit_of_someone_else_in_between_is_noticed(push, hub):
    push()
    hub.on_commit = lambda repository: repository.commit("main", "theirs", repository.find("main").files)
    assert "changed by someone else meanwhile" in push("--language", "fr", status=2).err
    hub.on_commit = None
    push("--language", "fr")


def test_a_server_that_is_no_hub(push, hub):
    hub.faults.append(Fault("GET", "/api/whoami-v2", status=200))
    assert "push again" in push(status=1).err


def test_an_answer_that_lacks_what_the_client_looks_for(push, hub, monkeypatch):
    monkeypatch.setattr(hub_server._Handler, "_json", lambda self, value, status=200: (status, b"{}", {}))
    assert "push again" in push(status=1).err


def test_storage_that_the_client_prefers_but_cannot_reach(client, hub, model):
    code = f"""
import sys, huggingface_hub.constants
huggingface_hub.constants.HF_HUB_DISABLE_XET = False
from vaswani_transformer.cli import main
sys.exit(main(["push", {str(model)!r}, {REPO!r}, "--license", "mit"]))
"""
    done = client.python(code)
    assert done.status in (1, 2) and len(done.err.splitlines()) == 1 and done.err.startswith("error: "), done.err
    assert any("xet-write-token" in path for _, path, _ in hub.requests)
    assert len(hub.repositories[REPO].branches["main"]) == 1


@pytest.mark.parametrize(("shards", "number"), [(False, signal.SIGINT), (True, signal.SIGINT), (True, signal.SIGTERM)])
def test_stopping_in_mid_upload(client, push, hub, model, shards, number, tmp_path):
    stall = threading.Event()
    hub.faults.append(Fault("PUT", "/lfs/", times=99, after_bytes=1000, stall=stall))
    options = ["--license", "mit", *(["--max-shard-size", "20KB"] if shards else [])]
    pid = client.start(command=["push", model, REPO, *options], TMPDIR=str(tmp_path))
    assert hub.reached.wait(60)
    started = time.monotonic()
    os.kill(pid, number)
    done = client.wait()
    stall.set()
    assert done.status == 128 + number and time.monotonic() - started < 5
    assert done.err.startswith("interrupted: ") and len(done.err.splitlines()) == 1, done.err
    assert list(tmp_path.iterdir()) == []
    assert len(hub.repositories[REPO].branches["main"]) == 1
    hub.faults.clear()
    push(*options)
    assert len(hub.repositories[REPO].branches["main"]) == 2


# Scores, from the command that measures to the Hub


@pytest.fixture(scope="module")
def scores(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    for side, line in (("en", "The dog sees a cat."), ("de", "Der Hund sieht eine Katze.")):
        (folder / f"test.{side}").write_text(f"{line}\n" * 3)
    command = ["evaluate", str(model), "--source", str(folder / "test.en"), "--reference", str(folder / "test.de")]
    assert main([*command, "--beams", "2", "--json", str(folder / "scores.json")]) == 0
    return folder / "scores.json"


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
    assert record["source_sha256"] in card and record["bleu_signature"] in card
    assert str(scores.parent) not in card


def test_scores_of_other_weights_are_refused(push, model, scores, tmp_path):
    other = tmp_path / "other"
    tiny_model(seed=2, vocab_size=300).save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((model / name).read_bytes())
    assert "evaluation of other weights" in push("--dry-run", "--evaluation", scores, folder=other, status=2).err


def test_the_same_scores_twice_are_refused(push, scores, tmp_path):
    shutil.copy(scores, tmp_path / "again.json")
    line = push("--dry-run", "--evaluation", scores, "--evaluation", tmp_path / "again.json", status=2).err
    assert "evaluate the same test set in the same way" in line


@pytest.fixture
def evaluate(model, scores, tmp_path):
    """Evaluates on files of its own; returns the exit status."""
    for name in ("test.en", "test.de"):
        shutil.copy(scores.parent / name, tmp_path)

    def run(*options, folder=model):
        command = ["evaluate", folder, "--source", tmp_path / "test.en", "--reference", tmp_path / "test.de", *options]
        return main([str(word) for word in command])

    return run


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--output", "test.de"], "--output and --reference"),
        (["--output", "link"], "--output and --source"),
        (["--json", "test.en"], "--json and --source"),
        (["--output", "new", "--json", "new"], "--json and --output"),
        (["--output", "new", "--json", "folder/../new"], "--json and --output"),
    ],
)
def test_evaluate_writes_over_nothing_that_it_reads(evaluate, tmp_path, capsys, options, names):
    (tmp_path / "link").symlink_to(tmp_path / "test.en")
    (tmp_path / "folder").mkdir()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    options = [word if word.startswith("--") else tmp_path / word for word in options]
    assert evaluate(*options) == 2
    error = capsys.readouterr().err
    assert f"{names} are the same file" in error and len(error.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_evaluate_may_write_to_devices_and_through_links(evaluate, tmp_path):
    (tmp_path / "out").write_text("earlier\n")
    (tmp_path / "out").chmod(0o640)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert evaluate("--output", os.devnull, "--json", os.devnull) == 0
    assert Path(os.devnull).is_char_device()
    assert evaluate("--output", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "out").read_text().count("\n") == 3
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


def test_an_interrupted_evaluation_leaves_the_earlier_files(evaluate, tmp_path, monkeypatch):
    for name in ("scores.json", "out"):
        (tmp_path / name).write_text("earlier\n")
    before = sorted(tmp_path.iterdir())

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("vaswani_transformer.translation.Translator.translate", interrupt)
    assert evaluate("--json", tmp_path / "scores.json", "--output", tmp_path / "out") == 130
    assert sorted(tmp_path.iterdir()) == before
    assert {(tmp_path / name).read_text() for name in ("scores.json", "out")} == {"earlier\n"}
    monkeypatch.undo()
    assert evaluate("--json", tmp_path / "scores.json", "--output", tmp_path / "out") == 0
    assert sorted(tmp_path.iterdir()) == before and json.loads((tmp_path / "scores.json").read_text())["sentences"] == 3


def test_a_sampled_search_is_recorded_as_one(evaluate, model, tmp_path):
    folder = tmp_path / "sampled"
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": True, "temperature": 0.7, "num_beams": 4}))
    assert evaluate("--beams", "1", "--json", tmp_path / "scores.json", folder=folder) == 0
    generation = json.loads((tmp_path / "scores.json").read_text())["generation"]
    expected = {"num_beams": 1, "do_sample": True, "temperature": 0.7, "max_extra_tokens": 50}
    assert expected.items() <= generation.items() and not any(name.endswith("_id") for name in generation)
    card = publish(folder, REPO, evaluations=[tmp_path / "scores.json"], dry_run=True).card
    assert "| `do_sample` | True |" in card and "`temperature` 0.7" in card and "transformers_version" not in card


@pytest.mark.slow
def test_a_process_of_its_own_waits_between_its_attempts(hub, model, tmp_path):
    """As `test_a_push_that_broke_can_be_repeated`, with nothing in the client changed: about half a minute."""
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "vaswani_transformer", "push", str(model), REPO, "--license", "mit"]

    def run(**changes):
        return subprocess.run(
            command, text=True, capture_output=True, env=environment | {"HF_TOKEN": "hf_writer"} | changes, timeout=200
        )

    done = run(HF_ENDPOINT="http://127.0.0.1:9")  # where nothing listens
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "the connection to the Hub" in done.stderr
    done = run(HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and done.stderr == "error: HF_HUB_OFFLINE is set, so nothing can be pushed: unset it\n"
    hub.faults.append(Fault("PUT", "/lfs/", times=99, after_bytes=1000))
    done = run()
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "push again" in done.stderr
    hub.faults.clear()
    assert run().returncode == 0 and "model.safetensors" in hub.files(REPO)


@pytest.mark.slow
def test_the_code_on_the_card_runs(push, hub, tmp_path):
    """What the card tells its reader to type: with the package, and without it in a process that cannot import it."""
    push()
    blocks = re.findall(r"```python\n(.*?)```", hub.files(REPO)["README.md"].decode(), re.DOTALL)
    without = [block for block in blocks if "trust_remote_code" in block]
    assert len(blocks) == 3 and len(without) == 2 and "import vaswani_transformer" in blocks[0]
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    hidden = "import sys; sys.modules['vaswani_transformer'] = None\n"
    for code in (blocks[0], hidden + "\n".join(without)):
        done = subprocess.run(
            [sys.executable, "-c", code], text=True, capture_output=True, env=environment, timeout=200
        )
        assert done.returncode == 0 and done.stdout, done.stderr
    assert "translation_text" in done.stdout
