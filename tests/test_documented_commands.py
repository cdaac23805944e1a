"""Every shell command of README.md and of the pages runs as it is printed, with small text and few steps."""

import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import import_differences
import pytest
import torch
from conftest import ROOT, free_port
from document_files import run, word_file
from experimenting import TREES, write_gum, write_multi30k
from hub_server import HUB, Repository
from test_docs import PAGES, shell_commands

from vaswani_transformer.data.synthetic import generate_corpus, write_corpus

pytestmark = pytest.mark.slow

SKIPPED = {  # of these patterns each occurs: what is not run here, and why
    r"^git clone|^make |^source ": "sets up a checkout",
    r"^pip install|^export PIP": "needs an index of packages",
    r"^paste|^head|^tail": "there is less text here, and it is divided already",
    r"^hf auth login": "asks for a token of the Hub",
    r"^accelerate launch .*8gpu|--engine ray|^srun": "needs GPUs, or a cluster",
    r"^g\+\+|^\./translate": "needs CTranslate2's headers",
    r"(?<!--target)-text\b": "the text of other tasks needs further packages, and minutes",
}
_STEPS = "--max-steps 4 --warmup-steps 2 --evaluate-every 2"
_SIZES = "--d-model 32 --d-ff 64 --num-heads 2 --encoder-layers 2 --decoder-layers 2"
_CELLS = "--set max_steps=4 --set warmup_steps=2 --set evaluate_every=2"
SMALLER = {  # options added to commands that train, or take many minutes
    "(train|prepare|distill) .*--train-": "--validation-size 20",
    "train (small|--)": f"{_STEPS} {_SIZES} --vocab-size 400 --length-penalty 0.6 --max-steps 12 --max-extra-tokens 2",
    "prepare small": "--vocab-size 400",
    "train finetune": _STEPS,
    "distill ": f"{_STEPS} {_SIZES}",
    "parse train": f"{_STEPS} {_SIZES} --vocab-size 420 --num-beams 2",
    "finetune_(seq2seq|accelerate)": "--steps 4 --warmup-steps 2",
    "experiment table2": f"--only en-de-base {_CELLS}",
    "experiment table3": f"--only base {_CELLS}",
    "experiment table4": _CELLS,
    "attention runs/mine .Two": "--target 'Zwei Hunde.'",  # a small model's own translation is too long for a picture
}
SERVE = "vaswani serve en-de=runs/mine --port 5000"


def shrunk(command: str, port: int) -> str:
    """A command with names of this test, and with further options."""
    command = command.replace("5000", str(port)).replace("OWNER/", "tester/")
    return " ".join([command, *(options for pattern, options in SMALLER.items() if re.search(pattern, command))])


class Shell:
    """Runs lines in a folder; a server keeps running until the next one is started."""

    def __init__(self, folder: Path):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.environment["XDG_CACHE_HOME"] = str(folder / "cache")
        self.folder, self.server, self.port = folder, None, free_port()

    def run(self, line: str) -> None:
        line = shrunk(line, self.port)
        if " serve " in line:
            return self.serve(line)
        options = {"cwd": self.folder, "env": self.environment, "text": True, "capture_output": True, "timeout": 600}
        done = subprocess.run(["bash", "-o", "pipefail", "-c", line], **options)
        assert done.returncode == 0 and "Traceback" not in done.stderr, f"{line}\n{done.stderr[-3000:]}"

    def serve(self, line: str) -> None:
        self.stop()
        options = {"cwd": self.folder, "env": self.environment, "text": True, "stdout": subprocess.PIPE}
        self.server = subprocess.Popen(["bash", "-c", f"exec {line}"], **options)
        assert self.server.stdout.readline().startswith("serving ")

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            assert self.server.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """What the pages name: text, documents, trees, a model; a model of Marian on the Hub."""
    folder = tmp_path_factory.mktemp("world")
    write_corpus(generate_corpus(200, 20, 20), folder)
    for name, other in (("train", "mine"), ("validation", "valid"), ("test", "test")):
        for side in ("en", "de"):
            (folder / f"{name}.{side}").rename(folder / f"{other}.{side}")
    english = (folder / "test.en").read_text()
    (folder / "mono.en").write_text(english)
    (folder / "mono.de").write_text((folder / "test.de").read_text())
    (folder / "big.en.gz").write_bytes(gzip.compress(english.encode()))
    (folder / "page.html").write_text("<h1>Two dogs</h1>\n<p>Every <b>small cat</b> sees it.</p>\n")
    (folder / "page.md").write_text("# Two dogs\n\nEvery **small cat** sees it.\n")
    (folder / "letter.docx").write_bytes(word_file(f"<w:p>{run('Two dogs.')}</w:p>"))
    (folder / "terms.tsv").write_text("woman\tFrau|Dame\nsofa\n")
    sides = [zip(("en", "de"), pair, strict=True) for pair in generate_corpus(50, 1, 1).train]
    units = ["".join(f"<tuv xml:lang='{side}'><seg>{text}</seg></tuv>" for side, text in pair) for pair in sides]
    body = "".join(f"<tu>{unit}</tu>" for unit in units)
    (folder / "memory.tmx").write_text(f"<tmx version='1.4'><header/><body>{body}</body></tmx>")
    (folder / "po").mkdir()
    header, entry = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n', 'msgid "{}"\nmsgstr "{}"\n\n'
    catalogue = header + "".join(entry.format(*pair) for pair in generate_corpus(200, 1, 1).train)
    (folder / "po" / "de.po").write_text(catalogue)
    (folder / "de.po").write_text(catalogue + entry.format("Two <b>%s</b>", ""))
    for name, times in (("train", 20), ("dev", 1)):
        (folder / f"{name}.trees").write_text("\n".join(TREES * times) + "\n")
    (folder / "FOLDER_OF_MULTI30K").mkdir()
    write_multi30k(folder / "FOLDER_OF_MULTI30K")
    write_gum(folder / "FOLDER_OF_GUM")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    import_differences.marianmt(folder / "marian", torch.float32)
    repository = HUB.repositories["Helsinki-NLP/opus-mt-fr-en"] = Repository()
    repository.commit("main", "a model", {path.name: path.read_bytes() for path in (folder / "marian").iterdir()})
    Shell(folder).run("vaswani train --train-source mine.en --train-target mine.de --output runs/mine")
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if shell_commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page, world, tmp_path):
    folder = shutil.copytree(world, tmp_path / "world", symlinks=True)
    lines = [line for line in shell_commands(page) if not any(re.search(pattern, line) for pattern in SKIPPED)]
    if any(re.search(r"--output runs/mine( |$)", line) for line in lines):
        shutil.rmtree(folder / "runs")
    shell = Shell(folder)
    try:
        for line in ([SERVE] if "curl" in lines[0] else []) + lines if lines else []:
            shell.run(line)
    finally:
        shell.stop()


def test_what_is_skipped_occurs():
    lines = [line for page in PAGES for line in shell_commands(page)]
    assert not [pattern for pattern in SKIPPED if not any(re.search(pattern, line) for line in lines)]
