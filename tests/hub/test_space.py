"""The Space that a push writes beside a model: its files, what stays in it, and that it runs as Spaces run it."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request

import pushing
import pytest
import yaml
from conftest import ROOT
from hub_server import card_errors
from huggingface_hub import HfApi
from pushing import REPO

from vaswani_transformer import VaswaniConfig, __version__
from vaswani_transformer.hub.card_facts import CardFacts
from vaswani_transformer.hub.space import push_space, space_files

model = pushing.model
push = pushing.push

SPACE = f"spaces/{REPO}"
NAMES = ["README.md", "Dockerfile"]


def texts(hub) -> dict[str, str]:
    return {name: hub.files(SPACE)[name].decode() for name in NAMES}


def files_of(*languages: str, revision: str = "main") -> dict[str, str]:
    facts = CardFacts(REPO, VaswaniConfig(), 0, languages=languages, license="mit")
    return space_files(facts, revision, is_parser=False)


@pytest.fixture
def write(hub):
    """Puts files of a Space of this model into the Hub."""
    api = HfApi()
    api.create_repo(REPO)

    def call(*languages: str, overwrite: bool = False):
        return push_space(api, REPO, files_of(*languages), overwrite)

    return call


def test_the_files_of_a_space():
    files = files_of("en", "de", revision="größer")
    assert list(files) == NAMES and not card_errors(files["README.md"])
    metadata = yaml.safe_load(files["README.md"].split("---\n")[1])
    expected = {"title": "tiny", "sdk": "docker", "app_port": 7860, "models": [REPO], "license": "mit"}
    assert metadata.items() >= expected.items()
    assert metadata["short_description"] == "Translates English to German" and len(metadata["emoji"]) == 1
    lines = files["Dockerfile"].splitlines()
    assert shlex.split(lines[-2])[-1] == f"vaswani_transformer[serve]=={__version__}"
    fetch, serve = (shlex.split(words) for words in json.loads(lines[-1].removeprefix("CMD "))[-1].split(" && "))
    assert fetch == ["hf", "download", REPO, "--revision", "größer", "--local-dir", "model"]
    assert serve == ["exec", "vaswani", "serve", "en-de=model", "--host", "0.0.0.0", "--port", "7860"]


def test_a_space_that_is_there_stays(write, hub, caplog):
    assert write("en", "de").changed
    hub.repositories[SPACE].find("main").files["README.md"] += b"# more\n"
    before = hub.files(SPACE)
    assert not write("fr", "en").changed and hub.files(SPACE) == before
    assert "the Space of this name is there already, so it stays: --overwrite-card" in caplog.text
    assert write("fr", "en", overwrite=True).changed and texts(hub) == files_of("fr", "en")


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
    variables["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"
    wheels = f"{os.environ.get('PIP_FIND_LINKS', '')} {tmp_path}"
    variables |= {"PIP_FIND_LINKS": wheels, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    variables |= {"PIP_RETRIES": "0"}  # an index that cannot be reached from here is asked for each package
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
