"""`vaswani translate --workers`: whoever translates the parts, and in whatever order, the output is one process's."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import translating
from conftest import ROOT
from model_folders import PAIRS
from preparing import digests
from test_file_translator_interrupted import lines_of
from translating import LINES, OPTIONS, run

from vaswani_transformer.data import prepare as preparation
from vaswani_transformer.decoding import parts
from vaswani_transformer.decoding.output import notes_path

model = repetition_free = translating.model
papers_model, expected, here = translating.papers_model, translating.expected, translating.here
TEXT = LINES[-40:]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "in.txt"
    path.write_text("\n".join(TEXT) + "\n")
    return path


WAYS = {
    "scores, n-best": ["--beams", "4", "--nbest", "3", "--scores"],
    "json, alignments": ["--beams", "2", "--nbest", "2", "--format", "json", "--alignments", "--ensemble", "MODEL"],
    "prefixes": ["--beams", "2", "--prefix", "PREFIX"],
    "glossary": ["--beams", "2", "--glossary", "GLOSSARY"],
    "sample": ["--sample", "--seed", "5"],
}


@pytest.mark.parametrize("way", WAYS)
def test_workers_in_any_order_write_what_one_process_writes(papers_model, tmp_path, monkeypatch, here, way):
    lines = TEXT[-22:]
    (tmp_path / "in").write_text("\n".join(lines))
    (tmp_path / "PREFIX").write_text("".join(f"{target.split()[0]}\n" for _, target in PAIRS[: len(lines)]))
    (tmp_path / "GLOSSARY").write_text("dog\tHund\nman\tMann\n")
    (tmp_path / "MODEL").symlink_to(papers_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "MOST_TASKS", 5)  # of several windows, and the last one of fewer
    command = ["translate", "MODEL", "--input", "in", "--max-new-tokens", "8", "--window", "3", *WAYS[way]]
    assert run(*command, "--output", "one") == 0
    assert run(*command, "--output", "parts", "--workers", "2") == 0
    assert Path("parts").read_bytes() == Path("one").read_bytes() != b""
    assert not notes_path(Path("parts")).exists()


def test_an_empty_file(model, tmp_path, here):
    (tmp_path / "in").touch()
    files = "--input", tmp_path / "in", "--output", tmp_path / "out"
    assert run("translate", model, *files, *OPTIONS, "--workers", "2") == 0
    assert (tmp_path / "out").read_bytes() == b"" and len(list(tmp_path.iterdir())) == 2


ON_RAY = """
import os, sys, threading, time
import ray
from ray.cluster_utils import Cluster
from vaswani_transformer.cli.main import main
from vaswani_transformer.data import prepare

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
ray.init(address=cluster.address)
folder, commands = sys.argv[1], [arguments.split("\\t") for arguments in sys.argv[2:]]

def kill():
    while not os.path.exists(f"{folder}/train-00000.arrow"):
        time.sleep(0.01)
    cluster.remove_node(nodes[1], allow_graceful=False)

threading.Thread(target=kill).start()
prepare.CHUNK = 9
status = max(main(command) for command in commands)
ray.shutdown()
cluster.shutdown()
sys.exit(status)
"""


@pytest.mark.slow
def test_ray_writes_what_workers_of_this_machine_write(model, source, expected, tmp_path, monkeypatch):
    """A cluster of three nodes, all on this machine, one of which is killed while it prepares."""
    pytest.importorskip("ray")
    monkeypatch.setattr(preparation, "CHUNK", 9)
    (tmp_path / "target").write_bytes(source.read_bytes())
    recipe = f"train_source: {source}\ntrain_target: {tmp_path}/target\nvalidation_size: 7\nvocab_size: 300\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    prepare = ["prepare", tmp_path / "recipe.yaml", "--workers", "2", "--output"]
    assert run(*prepare[:-2], "1", "--output", tmp_path / "here") == 0
    translate = ["translate", model, "--input", source, "--output", tmp_path / "out", *OPTIONS, "--workers", "2"]
    commands = ["\t".join(map(str, [*words, "--engine", "ray"])) for words in ([*prepare, tmp_path / "p"], translate)]
    subprocess.run([sys.executable, "-c", ON_RAY, tmp_path / "p", *commands], check=True, cwd=ROOT, timeout=500)
    assert digests(tmp_path / "p") == digests(tmp_path / "here") and len(digests(tmp_path / "p")) > 8
    assert (tmp_path / "out").read_bytes() == expected


def test_workers_and_one_process_resume_each_other(model, source, expected, tmp_path, fails, here):
    command = ["translate", model, "--input", source, *OPTIONS, "--output"]
    for number, workers in (("one", ["--resume"]), ("five", ["--workers", "5"])):
        here.append(2)
        assert "was killed" in fails(*command, tmp_path / number, "--workers", "3")
        assert expected.startswith((tmp_path / number).read_bytes()) and lines_of(tmp_path / number) == 14
        with (tmp_path / number).open("a") as file:  # as it is where one process was cut off
            file.write("another line\nhalf a li")
        here.clear()
        assert run(*command, tmp_path / number, *workers) == 0
        written, lines = (text.split(b"\n") for text in ((tmp_path / number).read_bytes(), expected))
        assert written.pop(14) == b"another line" and written == lines[:14] + lines[15:]


def test_a_mistake_in_a_line_is_named_and_what_is_done_stays(model, tmp_path, fails, here, caplog):
    bad, output = tmp_path / "bad", tmp_path / "out"
    long = ["sees a dog " * 60 + "and", "sees a cat " * 60 + "and"]
    bad.write_text("A dog.\n" * 9 + f"{long[0]}\n" + "A dog.\n" * 20 + f"{long[1]}\nA dog.\n")
    command = ["translate", model, "--input", bad, *OPTIONS, "--max-source-tokens", "50", "--output"]
    assert fails(*command, output, "--workers", "2", "--long-lines", "refuse").startswith("error: line 31 has")
    # One process stops there, also where further windows would follow.
    assert "line 10" in fails(*command, tmp_path / "one", "--long-lines", "refuse")
    assert (tmp_path / "one").read_text().count("\n") == 9
    assert run(*command, output, "--workers", "2") == 0
    assert "2 lines were longer than the model can take, and translated in parts: 10, 31" in caplog.text
    assert run(*command, tmp_path / "one", "--resume") == 0
    assert output.read_bytes() == (tmp_path / "one").read_bytes()


def test_a_text_that_changes_meanwhile(model, source, tmp_path, fails, here, monkeypatch):
    text, output = tmp_path / "in", tmp_path / "out"
    text.write_bytes(source.read_bytes())
    run_tasks = parts.run_tasks

    def changed(*arguments):
        text.write_bytes(source.read_bytes() + b"A dog.\n")
        return run_tasks(*arguments)

    monkeypatch.setattr(parts, "run_tasks", changed)
    command = ["translate", model, "--input", text, "--output", output, *OPTIONS, "--workers", "2"]
    assert "in has changed while it was read" in fails(*command)
    assert "--input was " in fails(*command)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "driver"])
def test_killed_it_resumes_to_the_same_bytes(model, source, tmp_path, victim):
    """Processes of their own, one of which is killed twice."""
    psutil = pytest.importorskip("psutil")
    many, output = tmp_path / "in", tmp_path / "out"
    many.write_text(source.read_text() * 12)
    command = ["translate", model, "--input", many, "--output", output, *OPTIONS, "--workers", "2"]
    command = [sys.executable, "-m", "vaswani_transformer", *map(str, command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(2):
        before = lines_of(output)
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log)
        while lines_of(output) <= before:  # the first results of this run, whose workers live then
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        workers = [one for one in psutil.Process(process.pid).children() if "spawn_main" in " ".join(one.cmdline())]
        assert len(workers) == 2
        os.kill(workers[0].pid if victim == "worker" else process.pid, signal.SIGKILL)
        assert process.wait(60) == (2 if victim == "worker" else -signal.SIGKILL)
        assert victim == "driver" or "was killed" in (tmp_path / "log").read_text()
        assert not psutil.wait_procs(workers, 30)[1]
    assert subprocess.run(command, cwd=ROOT, env=environment, timeout=300).returncode == 0
    one = ["translate", model, "--input", many, "--output", tmp_path / "one", *OPTIONS]
    assert run(*one) == 0
    assert output.read_bytes() == (tmp_path / "one").read_bytes()


def test_what_does_not_combine_is_one_line(model, source, tmp_path, fails, monkeypatch):
    out = ["--output", tmp_path / "out"]
    files = "--resume and --workers are for files on the disk: give --input FILE and --output FILE"
    for message, words in (
        (files, ["A dog.", *out, "--workers", "2"]),
        (files, ["--input", source, "--output", "/dev/null", "--engine", "ray"]),
        (files, ["--input", source, "--prefix", "/dev/stdin", *out, "--workers", "2"]),
        ("--format html and --workers", ["--format", "html", "--input", source, *out, "--workers", "2"]),
        ('Invalid value "0" for --workers', ["--input", source, *out, "--workers", "0"]),
        ("there is no model folder", ["--input", source, *out, "--workers", "2", "--ensemble", tmp_path / "none"]),
    ):
        assert message in fails("translate", model, *words)
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr("vaswani_transformer.cli.files.is_launched", lambda: True)
    assert "this command is run once" in fails("translate", model, "A dog.")
