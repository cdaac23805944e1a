"""`vaswani translate` on files: what it writes, killed and resumed, and by several processes.

This file is a script too: it forks the commands, so that what they import is imported once.
"""

import gzip
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from model_folders import PAIRS, write_model

from vaswani_transformer import watch
from vaswani_transformer.cli import main
from vaswani_transformer.resumable_output import notes_path
from vaswani_transformer.translation import Translator

ROOT = Path(__file__).resolve().parents[1]
LINES = [source for source, _ in PAIRS] + ["", "   ", "A dog.\tTwo.", "Ein Hund \u2028 bellt."]
DISK = 690  # bytes of a full one
OPTIONS = ["--max-new-tokens", "8", "--beams", "2", "--window", "7"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "in.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.fixture(scope="module")
def expected(model, source, tmp_path_factory):
    """The translations, made in one go."""
    path = tmp_path_factory.mktemp("expected") / "out"
    assert run("translate", model, "--input", source, "--output", path, *OPTIONS) == 0
    return path.read_bytes()


@pytest.fixture(scope="module")
def forked(model, source, tmp_path_factory, expected):
    """What a script saw that forked the command many times."""
    folder = tmp_path_factory.mktemp("forked")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(model), str(source)],
        env=environment | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True, text=True, timeout=240, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "seen.json").read_text())


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail, and returns the one line it prints to standard error."""

    def call(*arguments, status=2):
        capsys.readouterr()
        assert run(*arguments) == status
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]

    return call


def run(*arguments) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        return exit_.code


# What is written.


def test_a_line_for_each_line_and_nothing_beside_it(expected, model, source, tmp_path):
    assert expected.count(b"\n") == len(LINES) and expected.decode().split("\n")[len(PAIRS)] == ""
    with gzip.open(tmp_path / "in.gz", "wb") as file:
        file.write(source.read_bytes())
    assert run("translate", model, "--input", tmp_path / "in.gz", "--output", tmp_path / "out", *OPTIONS) == 0
    assert (tmp_path / "out").read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gz", "out"]


def test_what_is_written_is_there_for_readers_at_once(model, source, tmp_path, monkeypatch):
    seen = []
    translate = Translator.translate_prepared

    def look(self, prepared, progress=None):
        seen.append((tmp_path / "out").read_bytes().count(b"\n"))
        return translate(self, prepared, progress)

    monkeypatch.setattr(Translator, "translate_prepared", look)
    assert run("translate", model, "--input", source, "--output", tmp_path / "out", *OPTIONS) == 0
    assert seen == list(range(0, len(LINES), 7))


def test_the_next_windows_are_tokenised_while_the_model_works(model, source, tmp_path, monkeypatch):
    ahead, prepared = [], []
    prepare, translate = Translator.prepare, Translator.translate_prepared

    def count(self, window):
        prepared.append(window.index)
        return prepare(self, window)

    def wait(self, window, progress=None):
        time.sleep(0.1 if window.window.index < 3 else 0)
        ahead.append(len(prepared) - window.window.index - 1)
        return translate(self, window, progress)

    monkeypatch.setattr(Translator, "prepare", count)
    monkeypatch.setattr(Translator, "translate_prepared", wait)
    assert run("translate", model, "--input", source, "--output", tmp_path / "out", *OPTIONS) == 0
    assert ahead[1] == 3 and max(ahead) <= 3  # two that wait and one that waits to get in; no more


def test_nbest_with_scores_and_json(model, source, expected, tmp_path):
    command = ["translate", model, "--input", source, *OPTIONS[:2], "--window", "7", "--beams", "2", "--nbest", "2"]
    assert run(*command, "--output", tmp_path / "text") == 0
    assert run(*command, "--output", tmp_path / "json", "--format", "json", "--alignments") == 0
    rows = [line.split("\t") for line in (tmp_path / "text").read_text().split("\n")[:-1]]
    assert [int(row[0]) for row in rows] == [number for number in range(1, len(LINES) + 1) for _ in range(2)]
    assert all(float(one[1]) >= float(two[1]) for one, two in zip(rows[::2], rows[1::2], strict=True))
    best = expected.decode().split("\n")[:-1]
    assert [row[2] for row in rows[::2]] == [line.replace("\t", " ") for line in best]
    records = [json.loads(line) for line in (tmp_path / "json").read_text().split("\n")[:-1]]
    assert [record["line"] for record in records] == list(range(1, len(LINES) + 1))
    found = [hypothesis for record in records for hypothesis in record["hypotheses"]]
    for row, hypothesis in zip(rows, found, strict=True):
        assert hypothesis["text"].replace("\t", " ") == row[2]
        assert float(row[1]) == pytest.approx(hypothesis["score"], abs=1e-6)
        if hypothesis["text"].strip():  # the paper's rule, alpha 0.6
            wanted = hypothesis["log_probability"] / ((5 + hypothesis["tokens"]) / 6) ** 0.6
            assert hypothesis["score"] == pytest.approx(wanted) and hypothesis["alignment"]


def test_a_seed_repeats_a_sample_and_windows_do_not_repeat_each_other(model, tmp_path):
    (tmp_path / "in").write_text("A dog.\n" * 14)
    command = ["translate", model, "--input", tmp_path / "in", *OPTIONS[:2], "--window", "7", "--sample"]
    texts = []
    for name, seed in (("one", ["--seed", "5"]), ("two", ["--seed", "5"]), ("three", ["--seed", "6"]), ("four", [])):
        assert run(*command, *seed, "--output", tmp_path / name) == 0
        texts.append((tmp_path / name).read_text().split("\n"))
    assert texts[0] == texts[1] and texts[0] != texts[2] != texts[3] != texts[0]
    assert texts[0][:7] != texts[0][7:14]
    assert run(*command, "--seed", "5", "--top-k", "1", "--output", tmp_path / "greedy") == 0
    assert run(*command[:-1], "--beams", "1", "--output", tmp_path / "plain") == 0
    assert (tmp_path / "greedy").read_text() == (tmp_path / "plain").read_text()


def test_prefixes_begin_their_translations(model, source, tmp_path, fails):
    begins = [target.split()[0] if number % 2 else "" for number, (_, target) in enumerate(PAIRS)]
    (tmp_path / "prefix").write_text("\n".join(begins + ["Ein"] * (len(LINES) - len(PAIRS))) + "\n")
    command = ["translate", model, "--input", source, "--output", tmp_path / "out", "--prefix", tmp_path / "prefix"]
    assert run(*command, "--beams", "2", "--max-new-tokens", "24") == 0
    out = (tmp_path / "out").read_text().split("\n")
    assert all(line.startswith(begin) for line, begin in zip(out, begins, strict=False))
    assert out[len(PAIRS)] == ""  # an empty line stays one
    line = fails(*command[:-3], tmp_path / "short", *command[-2:], "--max-new-tokens", "2")
    assert "line 2 of the prefixes has" in line and "an output of at most 2" in line


def test_an_ensemble_of_two_equal_models_is_that_model(model, source, expected, tmp_path):
    assert run("translate", model, "--input", source, "--output", tmp_path / "out", *OPTIONS, "--ensemble", model) == 0
    assert (tmp_path / "out").read_bytes() == expected


def test_a_long_line_is_split_and_named(model, tmp_path, caplog):
    parts = ["The dog sees a cat.", "A man has a house."]
    (tmp_path / "in").write_text(f"{' '.join(parts)}\nA dog.\n")
    command = ["translate", model, "--input", tmp_path / "in", *OPTIONS]
    assert run(*command, "--max-source-tokens", "12", "--output", tmp_path / "out") == 0
    assert "1 line was longer than the model takes and translated in parts: 1" in caplog.text
    (tmp_path / "in").write_text("\n".join(parts) + "\nA dog.\n")
    assert run(*command, "--output", tmp_path / "parts") == 0
    first, second, third = (tmp_path / "parts").read_text().splitlines()
    assert (tmp_path / "out").read_text() == f"{first} {second}\n{third}\n"


# Mistakes.


def test_mistakes_in_options(model, source, tmp_path, fails):
    assert "--nbest is 3 and the beam size is 2: give --beams 3" in fails(
        "translate", model, "A dog.", "--beams", "2", "--nbest", "3"
    )
    assert "--top-p" in fails("translate", model, "A dog.", "--top-p", "0.5")
    assert "--temperature is 0.0" in fails("translate", model, "A dog.", "--sample", "--temperature", "0")
    assert "--length-penalty is nan" in fails("translate", model, "A dog.", "--length-penalty", "nan")
    assert "--precision is 'int3': it must be one of float32" in fails(
        "translate", model, "A dog.", "--precision", "int3"
    )
    assert "--output" in fails("translate", model, "--input", source, "--resume")
    assert "give --input FILE" in fails("translate", model, "A dog.", "--resume", "--output", tmp_path / "out")
    (tmp_path / "prefix").write_text("Ein\n")
    assert "give a prefix for each line" in fails(
        "translate", model, "--input", source, "--prefix", tmp_path / "prefix"
    )
    assert "different tokenizers" in fails("translate", model, "A dog.", "--ensemble", other_model(tmp_path))
    assert not (tmp_path / "out").exists()


def other_model(folder):
    from vaswani_transformer import train_tokenizer

    tokenizer = train_tokenizer(["Ganz andere Worte."], vocab_size=300)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder / "other")
    tokenizer.save_pretrained(folder / "other")
    return folder / "other"


def test_a_bad_line_of_standard_input_loses_nothing(forked, expected):
    _, seen = forked
    assert seen["standard input"]["status"] == 2 and "standard input, line 11" in seen["standard input"]["error"]
    assert "Traceback" not in seen["standard input"]["error"] and seen["standard input"]["text"].count("\n") == 10
    # The window that was cut short has batches of its own: whole windows are the same to the byte.
    assert seen["standard input"]["text"].split("\n")[:7] == expected.decode().split("\n")[:7]


def test_a_batch_too_large_for_the_memory(model, monkeypatch, fails):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Translator, "_generate", full)
    assert "fewer --tokens-per-batch" in fails("translate", model, "A dog.", status=1)


# Killed, interrupted, out of space; and resumed.


def test_resuming_wants_the_same_input_model_and_options(model, source, tmp_path, fails):
    command = ["translate", model, "--output", tmp_path / "out"]
    bad = tmp_path / "bad"
    bad.write_text("A dog.\n" * 8 + "sees a dog " * 60 + "\n")
    refused = [*command, *OPTIONS, "--max-source-tokens", "50", "--long-lines", "refuse"]
    assert "line 9" in fails(*refused, "--input", bad)
    written = (tmp_path / "out").read_text()
    assert written.count("\n") == 8
    assert "give --resume" in fails(*refused, "--input", bad)
    assert "--input is not what it was" in fails(*refused, "--input", source, "--resume")
    assert "--beams was 2 and is 3 now" in fails(*refused, "--input", bad, "--resume", "--beams", "3")
    other = write_model(tmp_path / "model", seed=3)
    assert "MODEL is not what it was" in fails("translate", other, *refused[2:], "--input", bad, "--resume")
    assert (tmp_path / "out").read_text() == written
    assert run(*refused[:-1], "split", "--input", bad, "--resume") == 0
    assert (tmp_path / "out").read_text().startswith(written) and not notes_path(tmp_path / "out").exists()
    assert "delete it, or give another" in fails(*refused, "--input", bad, "--resume")


def test_killed_at_any_moment_it_resumes_to_the_same_bytes(forked, expected):
    folder, seen = forked
    assert len(seen["killed"]) >= 4 and all(lines < len(LINES) for lines in seen["killed"])
    assert (folder / "killed").read_bytes() == expected and not notes_path(folder / "killed").exists()


def test_killed_samples_resume_to_the_same_bytes(forked):
    """Without a seed one is drawn, and kept in the notes for the next time."""
    folder, seen = forked
    assert seen["killed sample"]
    assert (folder / "sample").read_bytes() == (folder / "whole sample").read_bytes()


def test_ctrl_c_leaves_whole_lines_and_says_how_to_go_on(forked, expected):
    folder, seen = forked
    assert seen["interrupted"]["status"] == 130 and seen["interrupted"]["text"].endswith("\n")
    assert expected.decode().startswith(seen["interrupted"]["text"])
    assert "--resume" in seen["interrupted"]["error"] and "Traceback" not in seen["interrupted"]["error"]
    assert (folder / "interrupted").read_bytes() == expected


def test_a_full_disk_leaves_whole_lines(forked, expected):
    folder, seen = forked
    assert expected[DISK - 1 : DISK] != b"\n"  # it is full in the midst of a line
    assert (
        seen["full"]["status"] == 1
        and seen["full"]["text"].endswith("\n")
        and 0 < len(seen["full"]["text"].encode()) < DISK
    )
    assert expected.decode().startswith(seen["full"]["text"]) and "error: " in seen["full"]["error"]
    assert (folder / "full").read_bytes() == expected


# Several processes.


@pytest.mark.parametrize("number", [2, 3])
def test_several_processes_write_what_one_writes(forked, expected, number):
    folder, seen = forked
    assert seen[f"{number} processes"]["statuses"] == [0] * number, seen
    assert (folder / f"by-{number}").read_bytes() == expected and not notes_path(folder / f"by-{number}").exists()
    shares = seen[f"{number} processes"]["windows"]
    assert sum(shares) == -(-len(LINES) // 7) and max(shares) - min(shares) <= 1


def test_a_process_that_dies_does_not_keep_the_others_waiting(forked, expected):
    folder, seen = forked
    assert seen["lost"]["statuses"][0] not in (0, None) and seen["lost"]["seconds"] < 30
    assert "was lost" in seen["lost"]["error"] and "--resume goes on" in seen["lost"]["error"]
    assert (folder / "lost").read_bytes() == expected  # resumed, by one process


def test_a_mistake_that_another_process_meets_is_told_once(forked):
    folder, seen = forked
    assert seen["mistake"]["statuses"][0] == 2
    assert seen["mistake"]["error"].count("error: ") == 1 and "line 10" in seen["mistake"]["error"]
    assert (folder / "mistake").read_text().count("\n") == 9


@pytest.mark.slow
def test_launched_by_accelerate(model, source, expected, tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "scripts/accelerate/cpu.yaml"]
    command = [
        "-m",
        "vaswani_transformer",
        "translate",
        model,
        "--input",
        source,
        "--output",
        tmp_path / "out",
        *OPTIONS,
    ]
    done = subprocess.run([*launcher, *map(str, command)], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_bytes() == expected


# The script.


def fork(arguments, log: Path, before=None, environment=None) -> int:
    """A command in a process of its own; its number."""
    child = os.fork()
    if child:
        return child
    os.environ.update(environment or {})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell inherit it ignored
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    if before is not None:
        before()
    status = 1
    try:
        status = run(*arguments)
    finally:
        sys.stderr.flush()
        os._exit(status)


def status_of(child: int) -> int | None:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for_lines(path: Path, child: int, lines: int) -> bool:
    """Whether a file has so many lines before its writer ends."""
    until = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        if os.waitpid(child, os.WNOHANG) != (0, 0) or time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def slowly() -> None:
    """Every window takes a moment longer, so that there is time to kill."""
    translate = Translator.translate_prepared

    def wait(self, prepared, progress=None):
        time.sleep(0.03)
        return translate(self, prepared, progress)

    Translator.translate_prepared = wait


def kill_again_and_again(command, output: Path, log: Path, targets, torn: bool = False) -> list[int]:
    """Kill at random moments, later each time, and resume; the lines that were there each time."""
    chance, lines = random.Random(0), []
    for target in targets:
        child = fork([*command, "--output", output, "--resume"], log, slowly)
        if not wait_for_lines(output, child, target):
            break
        time.sleep(chance.random() * 0.06)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines.append(output.read_bytes().count(b"\n") if output.exists() else 0)
        if torn and output.exists() and notes_path(output).exists():  # as a kill in the midst of writing would leave it
            with output.open("ab") as file:
                file.write("Ein h\u00e4lf".encode()[:-2])
    assert status_of(fork([*command, "--output", output, "--resume"], log)) == 0, log.read_text()
    return lines


def several(number: int, arguments, log: Path, environment=None, before=None) -> tuple[list[int], list[int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [
        fork(arguments, log, before and partial(before, rank), meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(number)
    ]


def count_windows(folder: Path, number: int, rank: int) -> None:
    """Notes each window that a process translates."""
    translate = Translator.translate_prepared

    def note(self, prepared, progress=None):
        with (folder / f"windows-{number}-{rank}").open("a") as file:
            file.write("x")
        return translate(self, prepared, progress)

    Translator.translate_prepared = note


def fork_all(folder: Path, model: str, source: str) -> None:
    """What the tests look at."""
    torch.set_num_threads(1)
    seen, log = {}, folder / "log"
    command = ["translate", model, "--input", source, *OPTIONS]
    assert run(*command, "--output", folder / "first") == 0  # so that the forked ones have all imported
    seen["killed"] = kill_again_and_again(command, folder / "killed", log, (0, 20, 41, 70, 100), torn=True)
    sample = ["translate", model, "--input", source, "--window", "7", "--max-new-tokens", "8", "--sample"]
    child = fork([*sample, "--output", folder / "sample"], log, slowly)
    assert wait_for_lines(folder / "sample", child, 10)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    seed = str(json.loads(notes_path(folder / "sample").read_text())["--seed"])
    seen["killed sample"] = kill_again_and_again(sample, folder / "sample", log, (50,))
    assert run(*sample, "--seed", seed, "--output", folder / "whole sample") == 0

    for name, stop in (("interrupted", signal.SIGINT), ("full", None)):
        output, told = folder / name, folder / f"{name}.log"

        def limit():
            slowly()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (DISK, resource.RLIM_INFINITY))

        child = fork([*command, "--output", output], told, slowly if stop else limit)
        if stop:
            assert wait_for_lines(output, child, 30)
            os.kill(child, stop)
        seen[name] = {"status": status_of(child), "text": output.read_text(), "error": told.read_text()}
        assert status_of(fork([*command, "--output", output, "--resume"], log)) == 0, log.read_text()

    watch.ProcessWatch = partial(watch.ProcessWatch, beat=0.1, lost=2.0)
    for number in (2, 3):
        output, told = folder / f"by-{number}", folder / f"by-{number}.log"
        children = several(number, [*command, "--output", output], told, before=partial(count_windows, folder, number))
        statuses = [status_of(child) for child in children]
        windows = [len((folder / f"windows-{number}-{rank}").read_text()) for rank in range(number)]
        seen[f"{number} processes"] = {"statuses": statuses, "windows": windows, "error": told.read_text()}

    output, told = folder / "lost", folder / "lost.log"
    children = several(2, [*command, "--output", output], told, before=lambda rank: slowly())
    assert wait_for_lines(output, children[0], 30)
    begin = time.monotonic()
    os.kill(children[1], signal.SIGKILL)
    statuses = [status_of(child) for child in children]
    seen["lost"] = {"statuses": statuses, "seconds": time.monotonic() - begin, "error": told.read_text()}
    assert status_of(fork([*command, "--output", output, "--resume"], log)) == 0, log.read_text()

    piped, told = folder / "piped", folder / "piped.log"
    (folder / "in").write_bytes(b"\n".join(line.encode() for line in LINES[:10]) + b"\n\xff\nA dog.\n")

    def redirect():
        for path, flags, number in ((folder / "in", os.O_RDONLY, 0), (piped, os.O_WRONLY | os.O_CREAT, 1)):
            os.dup2(os.open(path, flags, 0o644), number)

    child = fork(["translate", model, *OPTIONS], told, redirect)
    seen["standard input"] = {"status": status_of(child), "text": piped.read_text(), "error": told.read_text()}

    bad = folder / "bad.txt"
    bad.write_text("A dog.\n" * 9 + "sees a dog " * 60 + "\n" + "A dog.\n" * 20)
    output, told = folder / "mistake", folder / "mistake.log"
    arguments = ["translate", model, "--input", bad, *OPTIONS, "--max-source-tokens", "50", "--long-lines", "refuse"]
    children = several(2, [*arguments, "--output", output], told)
    seen["mistake"] = {"statuses": [status_of(child) for child in children], "error": told.read_text()}
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        fork_all(Path(sys.argv[1]), *sys.argv[2:])
