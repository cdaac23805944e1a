"""`vaswani serve` as a process: its first line, its answers, its end."""

import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import served
from children import wait_for
from conftest import ROOT, free_port
from served import SENTENCES, listen, translated

from vaswani_transformer import export_model, load_model

folder = served.folder


def started(forked, *options) -> tuple[int, str]:
    """The process id and the address of a server."""
    out = forked.home / "stdout"
    out.unlink(missing_ok=True)
    process = forked.start("serve", *options, "--port", "0")
    wait_for(lambda: out.exists() and "http" in out.read_text())
    line = out.read_text()
    assert line.startswith("serving en-de at http://127.0.0.1:") and line.endswith("\n")
    return process, line.split()[-1]


def post(address: str, path: str, **body) -> dict:
    return httpx.post(f"{address}{path}", json=body, timeout=60).raise_for_status().json()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_finishes_what_runs_and_ends(forked, folder, number):
    process, address = started(forked, f"en-de={folder}", "--precision", "float32")
    expected = translated(load_model(folder, "cpu"), SENTENCES)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(post, address, "/translate", q=SENTENCES * 4, source="en", target="de")
        while "\nvaswani_requests_under_way 2.0\n" not in httpx.get(f"{address}/metrics", timeout=60).text:
            assert not long.done()
        os.kill(process, number)
        assert long.result() == {"translatedText": expected * 4}
    done = forked.wait()
    assert done.status == 0
    assert "POST /translate 200" in done.err and SENTENCES[0] not in done.err and "Traceback" not in done.err


def test_keys_from_a_file(forked, folder, tmp_path):
    (tmp_path / "keys").write_text("\ufeff# Night shift: first of May\r\nfirst\r\n\r\n  # old\r\n open sesame, #2 \r\n")
    process, address = started(forked, f"en-de={folder}", "--api-keys", tmp_path / "keys")
    body = {"q": SENTENCES[0], "source": "en", "target": "de"}
    assert post(address, "/translate", **body, api_key="open sesame, #2")["translatedText"]
    for wrong in ("third", "sesame,", "#", "# old", "May"):
        with pytest.raises(httpx.HTTPStatusError, match="403"):
            post(address, "/translate", **body, api_key=wrong)
    os.kill(process, signal.SIGTERM)
    assert forked.wait().status == 0


def test_mistakes_are_one_line(fails, folder, tmp_path, monkeypatch):
    model, keys = f"en-de={folder}", tmp_path / "keys"
    assert "there is no model folder" in fails("serve", tmp_path / "none")
    assert "the languages of" in fails("serve", folder)
    assert "No such file" in fails("serve", model, "--api-keys", keys)
    keys.write_text(" \n# none yet\n")
    assert "holds no key" in fails("serve", model, "--api-keys", keys)
    keys.write_bytes(b"\xff")
    assert "can't decode" in fails("serve", model, "--api-keys", keys)
    with listen("127.0.0.1", 0) as socket:
        port = socket.getsockname()[1]
        line = fails("serve", model, "--port", port)
        assert "Address already in use" in line and str(port) in line
    assert "--host. It is empty" in fails("serve", model, "--host", "")  # the socket would listen at all addresses
    for host in ("192.0.2.1", "ü" * 70):
        assert host in fails("serve", model, "--host", host)
    monkeypatch.setattr("socket.AF_INET6", 99)  # which the kernel does not know either
    assert "--host ::1 --port 5000: Address family not supported" in fails("serve", model, "--host", "::1")
    monkeypatch.setitem(sys.modules, "vaswani_transformer.serving.app", None)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "vaswani_transformer.serving.app")
    assert "serving (pip install 'vaswani_transformer[serve]'): import of fastapi" in fails("serve", model)


def test_the_image_is_built_of_all_that_the_package_needs():
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["package-dir"].values()
    assert {"pyproject.toml", project["project"]["readme"], "vaswani_transformer", *folders} <= admitted


@pytest.mark.slow
def test_the_steps_of_the_dockerfile_make_a_small_server(folder, tmp_path):
    text = (ROOT / "scripts" / "docker" / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    steps = re.search(r"^RUN (.*)", text, re.MULTILINE)[1].replace("python3.11", f"python3.{sys.version_info.minor}")
    steps = steps.replace("/source", str(ROOT)).replace("/app", f"{tmp_path}/app")
    subprocess.run(["bash", "-ec", f"shopt -s expand_aliases; alias python={sys.executable}\n{steps}"], check=True)
    assert sum(path.lstat().st_size for path in (tmp_path / "app").rglob("*")) < 300e6
    exported, port = export_model(folder, tmp_path / "exported").folder, free_port()
    command = [tmp_path / "app" / "bin" / "vaswani", "serve", f"en-de={exported}", "--port", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, env={}) as server:
        wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), server)
        answer = post(f"http://127.0.0.1:{port}", "/translate", q=SENTENCES[0], source="en", target="de")
        languages = post(f"http://127.0.0.1:{port}", "/detect", q=SENTENCES[0])
        server.terminate()
    assert answer["translatedText"] and languages[0]["language"] == "en"
