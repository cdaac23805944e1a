"""The Space that a push writes beside a model: its files, what stays in it, and that it runs as Spaces run it."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pushing
import pytest
import yaml
from conftest import ROOT
from hub_server import SPACE_TEXT, Fault
from pushing import REPO

from vaswani_transformer import __version__
from vaswani_transformer.hub.existing_card import is_sealed

services = pushing.services
model = pushing.model
hub = pushing.hub
client = pushing.client
push = pushing.push

SPACE = f"spaces/{REPO}"
NAMES = ["README.md", "app.py", "requirements.txt", "Dockerfile"]


def texts(hub) -> dict[str, str]:
    return {name: hub.files(SPACE)[name].decode() for name in NAMES}


def arguments_of(client, app: str) -> list:
    """What `snapshot_download` and the command get when `app.py` runs, and its exit status."""
    code = f"""
import json, huggingface_hub, vaswani_transformer.cli.main as command
asked = []
huggingface_hub.snapshot_download = lambda name, **options: asked.append([name, options]) or "FOLDER"
command.main = lambda words: asked.append(words) or 0
try:
    exec({app!r})
except SystemExit as end:
    print(json.dumps([*asked, end.code]))
"""
    return json.loads(client.python(code).out)


def test_the_files_of_a_space(push, client, hub):
    done = push("--space", "--revision", "größer")
    assert f"pushed to {hub.endpoint}/{SPACE}:" in done.out and done.err == ""
    files = texts(hub)
    assert set(hub.files(SPACE)) == {*NAMES, ".gitattributes"}
    assert is_sealed(files["README.md"]) and SPACE_TEXT not in files["README.md"]
    metadata = yaml.safe_load(files["README.md"].split("---\n")[1])
    expected = {"title": "tiny", "sdk": "docker", "app_port": 7860, "models": [REPO], "license": "mit"}
    assert metadata.items() >= expected.items()
    assert metadata["short_description"] == "Translates English to German" and len(metadata["emoji"]) == 1
    assert f"\nvaswani_transformer[serve]=={__version__}\n" in files["requirements.txt"]
    assert "--extra-index-url https://download.pytorch.org/whl/cpu\n" in files["requirements.txt"]
    fetched, words, status = arguments_of(client, files["app.py"])
    assert fetched == [REPO, {"revision": "größer"}] and status == 0
    assert words == ["serve", "en-de=FOLDER", "--host", "0.0.0.0", "--port", "7860"]


def test_the_dry_run_shows_what_is_pushed(push, hub):
    dry = push("--space", "--dry-run", token="")
    assert hub.requests == []
    push("--space")
    for name, text in texts(hub).items():
        assert f"\n==> Space, {name} <==\n{text}" in dry.out
        assert re.search(rf"^ *{len(text.encode()):,}  {re.escape(name)}$", dry.out, re.MULTILINE)


def test_the_same_again_makes_no_commit_and_news_do(push, hub):
    push("--space")
    before = texts(hub)
    assert push("--space").out.count("nothing was changed") == 2
    assert len(hub.repositories[SPACE].branches["main"]) == 2
    push("--space", "--language", "de", "--language", "nl")
    after = texts(hub)
    assert {name for name in NAMES if before[name] != after[name]} == {"README.md", "app.py"}
    assert "de-nl" in after["app.py"] and "German to Dutch" in after["README.md"]


def test_files_that_someone_wrote_or_edited_stay(push, hub):
    push("--space")
    theirs = {name: data + b"# more\n" for name, data in hub.files(SPACE).items() if name in NAMES[:3]}
    theirs |= {"Dockerfile": b"FROM scratch\n", "notes.txt": b"mine"}
    hub.repositories[SPACE].find("main").files.update(theirs)
    languages = ("--language", "fr", "--language", "en")
    done = push("--space", *languages)
    assert f"in the Space someone else wrote or edited {', '.join(NAMES)}, so they stay" in done.err
    assert hub.files(SPACE).items() >= theirs.items() and done.out.count("not ours  ") == 4
    del hub.repositories[SPACE].find("main").files["app.py"]
    assert "app.py" not in push("--space", *languages).err and "fr-en" in texts(hub)["app.py"]
    assert push("--space", *languages, "--overwrite-card").err == ""
    assert all(texts(hub)[name].encode() != theirs[name] for name in NAMES)
    assert hub.files(SPACE)["notes.txt"] == b"mine"


def test_a_space_that_broke_can_be_repeated(push, hub):
    hub.faults.append(Fault("POST", "/api/spaces/.*/commit/", status=502))
    assert "push again" in push("--space", status=1).err
    assert hub.files(REPO)["model.safetensors"] and SPACE_TEXT in hub.files(SPACE)["README.md"].decode()
    hub.faults.clear()
    push("--space")
    assert is_sealed(texts(hub)["README.md"])


def test_a_space_is_private_if_its_model_is(push, hub):
    push("--space", "--private")
    assert hub.repositories[REPO].private and hub.repositories[SPACE].private
    hub.reset()
    push("--space")
    assert not hub.repositories[SPACE].private


def test_the_languages_have_to_be_known_and_a_parser_has_none(push, client, hub, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "copy")
    (folder / "recipe.yaml").unlink()
    assert "known are en: give --language twice" in push("--space", "--language", "en", folder=folder, status=2).err
    assert not hub.repositories
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    trees = {"tree_tokens": [token[1:] for token in vocabulary if token.startswith("Ġ") and len(token) > 1][:3]}
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | trees))
    push("--space", folder=folder)
    _, words, _ = arguments_of(client, texts(hub)["app.py"])
    assert words[:2] == ["serve", "FOLDER"] and "Draws the trees" in texts(hub)["README.md"]
    assert json.loads(hub.files(REPO)["tokenizer_config.json"]).items() >= trees.items()


@pytest.mark.slow
def test_it_runs_as_spaces_run_it(push, hub, tmp_path):
    """The Dockerfile's own commands, in a clean environment, with a wheel of this checkout, the model from the Hub."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 7860)) == 0:
            pytest.skip("port 7860, which Spaces use, is taken here")
    push("--space")
    folder, environment = tmp_path / "app", tmp_path / "venv"
    folder.mkdir()
    for name, text in texts(hub).items():
        (folder / name).write_text(text)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "pip", "wheel", "-q", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_TOKEN")}
    variables |= {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "HF_HOME": str(tmp_path / "hf")}
    wheels = f"{os.environ.get('PIP_FIND_LINKS', '')} {tmp_path}"
    variables |= {"PIP_FIND_LINKS": wheels, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    variables |= {"PIP_RETRIES": "0"}  # an index that cannot be reached from here is asked for each package
    variables |= {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1"}
    lines = (folder / "Dockerfile").read_text().splitlines()
    (install,) = (line.removeprefix("RUN ") for line in lines if line.startswith("RUN pip "))
    done = subprocess.run(shlex.split(install), cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (command,) = (json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD "))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
    try:
        while "serving en-de at http://0.0.0.0:7860" not in (tmp_path / "log").read_text():
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.2)
        assert b"page.js" in answer("/") and b"fetch(" in answer("/page.js")
        done = json.loads(answer("/translate", q="The dog sees a cat.", source="en", target="de"))
        assert isinstance(done["translatedText"], str)
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def answer(path: str, **body) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:7860{path}", json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()
