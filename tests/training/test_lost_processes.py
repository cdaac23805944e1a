"""Processes that train together: launched, stopped, killed, failing, resumed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import datasets
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from children import wait_for
from conftest import ROOT, TINY_RECIPE, free_port
from safetensors.torch import load_file
from torch import distributed
from training_runs import complete_checkpoints, log_of

from vaswani_transformer import load_recipe, train
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.distributed import RESUME, Processes, ProcessLostError
from vaswani_transformer.model.modeling_vaswani import VaswaniForConditionalGeneration

CONFIGS = ROOT / "scripts" / "accelerate"


@pytest.fixture
def processes():
    port = free_port()
    host = distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    clients = [distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(3)]
    yield [Processes(rank, client) for rank, client in enumerate(clients)]
    del host


def test_the_first_process_prepares_for_all(processes, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    order, shared = [], {}

    def follow(process):
        with process.first_process_first():
            order.append(process.rank)
        shared[process.rank] = process.share("name", lambda: "made by another")

    threads = [threading.Thread(target=follow, args=[process]) for process in processes[1:]]
    for thread in threads:
        thread.start()
    with processes[0].first_process_first():
        time.sleep(0.3)
        order.append(0)
        assert processes[0].share("name", lambda: {"made by": 0}) == {"made by": 0}
    for thread in threads:
        thread.join(10)
    assert order[0] == 0 and sorted(order) == [0, 1, 2]
    assert shared == {rank: {"made by": 0} for rank in (1, 2)}


def test_the_first_process_that_fails_reports_it_and_none_waits_for_it(processes):
    assert [process.reports_error() for process in processes] == [True, False, False]
    with pytest.raises(ProcessLostError), processes[1].first_process_first():
        pytest.fail("process 0 has prepared nothing")
    with pytest.raises(ProcessLostError):
        processes[2].share("name", lambda: None)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files_load_and_say_what_their_names_say(path):
    config = load_config_from_file(str(path))  # refuses unknown keys
    expected = {
        "1gpu": (DistributedType.NO, 1, 1),
        "8gpu": (DistributedType.MULTI_GPU, 8, 1),
        "cpu": (DistributedType.MULTI_GPU, 2, 1),
        "multi_node": (DistributedType.MULTI_GPU, 16, 2),
        "fsdp": (DistributedType.FSDP, 8, 1),
    }[path.stem]
    assert (config.distributed_type, config.num_processes, config.num_machines) == expected
    assert config.use_cpu == (path.stem == "cpu")
    assert config.mixed_precision == "no"  # the recipe's, or the two could contradict each other
    if path.stem == "fsdp":
        wrapped = config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"].split(",")
        assert wrapped == VaswaniForConditionalGeneration._no_split_modules
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    assert f"scripts/accelerate/{path.name} " in path.read_text()  # the command


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_corpus(generate_corpus(400, 21, 20), folder)
    settings = TINY_RECIPE | {
        "data_dir": str(folder), "dropout": 0.0, "tokens_per_batch": 1200, "max_steps": 8, "warmup_steps": 8,
        "learning_rate_scale": 0.2, "evaluate_every": 4, "validation_bleu": 8, "average_checkpoints": 2,
        "keep_checkpoints": 2, "precision": "fp32",
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


# The command, in which a method of the trainer fails on one process when it is called for the n-th time.
FAILING = """
import os, sys
import torch
from vaswani_transformer.training.trainer import VaswaniTrainer
from vaswani_transformer.cli.main import main
method, number = VaswaniTrainer.{method}, [0]
def failing(self, *arguments, **options):
    number[0] += 1
    if number[0] == {number} and os.environ["RANK"] == "{rank}":
        raise {error}
    return method(self, *arguments, **options)
VaswaniTrainer.{method} = failing
sys.exit(main(sys.argv[1:]))
"""
COMMAND = (sys.executable, "-m", "vaswani_transformer")
ENDLESS = ("--max-steps", "100000", "--evaluate-every", "20", "--quiet")


def failing(method, rank, number, error):
    return sys.executable, "-c", FAILING.format(method=method, rank=rank, number=number, error=error)


@pytest.fixture
def start(recipe, tmp_path):
    """Starts the command for a recipe; gives processes and the files that they print to."""
    started = []

    def begin(name, command, *options, program=COMMAND, **environment):
        text = tmp_path / f"{name}.txt"
        # What a launcher or an earlier test in this process has set is not for this one.
        launch = ("ACCELERATE_", "TORCHELASTIC", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(launch)}
        cache = {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(recipe.parent / "cache"), "PYTHONUNBUFFERED": "1"}
        words = [*command, *program[1 if command else 0 :], "train", str(recipe), "--output", str(tmp_path / "run")]
        variables = inherited | cache | environment
        with text.open("w") as file:
            process = subprocess.Popen(
                [*words, *options], cwd=ROOT, stdout=file, stderr=file, env=variables, start_new_session=True
            )
        started.append(process)
        return process, text

    def by_hand(number, *options, program=COMMAND):
        port = str(free_port())
        return [
            begin(f"rank-{rank}", (), *options, program=program, RANK=str(rank), LOCAL_RANK=str(rank),
                  WORLD_SIZE=str(number), LOCAL_WORLD_SIZE=str(number), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            for rank in range(number)
        ]  # fmt: skip

    def launched(*options, name="launched"):
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "cpu.yaml")]
        return begin(name, launcher, *options)

    def on_two_machines(port, name, *options):
        """One of two groups of two processes, as on a machine of its own, by the script for such."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        words = [str(ROOT / "scripts" / "torchrun_elastic.sh"), f"127.0.0.1:{port}"]
        return begin(name, words, *options, program=[""], PROCESSES="2", NODES="2", PATH=path)

    begin.by_hand, begin.launched, begin.on_two_machines = by_hand, launched, on_two_machines
    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_steps(folder, processes, number=30):
    log, until = folder / "training_log.jsonl", time.monotonic() + 90
    while not log.is_file() or log.read_text().count("\n") < number:
        assert time.monotonic() < until and all(process.poll() is None for process, _ in processes), said(processes)
        time.sleep(0.1)


def said(processes):
    return "\n".join(text.read_text() for _, text in processes)


def errors(processes):
    """Our own lines about what went wrong, of all processes."""
    return [line for line in said(processes).splitlines() if line.startswith("error: ")]


def losses(folder):
    entries = [entry for entry in log_of(folder) if "loss" in entry]
    tokens = [(entry["source_tokens"], entry["target_tokens"]) for entry in entries]
    return {entry["step"]: entry["loss"] for entry in entries}, tokens


def assert_same_run(folder, other, rel=1e-5):
    """Losses, tokens of every step, and the weights that are kept, ten times as far apart."""
    (one, tokens), (two, other_tokens) = losses(folder), losses(other)
    assert one.keys() == two.keys() and tokens == other_tokens
    for step in one:
        assert one[step] == pytest.approx(two[step], rel=rel)
    weights, others = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() <= 10 * rel * weight.abs().max(), name


@pytest.fixture
def train_alone(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", recipe.parent / "cache")

    def run(**changes):
        return train(load_recipe(str(recipe), {"output": str(tmp_path / "alone"), **changes}), progress=False).folder

    return run


def children_of(launcher):
    """Ids of the processes that a launcher has started, by rank."""
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_process_ends_the_others(start, train_alone, tmp_path, victim):
    """The launcher names it, another process prints how to resume; then one process resumes."""
    launcher = start.launched(*ENDLESS)
    wait_for_steps(tmp_path / "run", [launcher])
    children = children_of(launcher[0])
    killed = time.monotonic()
    os.kill(children[victim], signal.SIGKILL)
    assert launcher[0].wait(timeout=60) != 0
    assert time.monotonic() - killed < 60
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    [line] = errors([launcher])
    lost = "error: one of the 2 processes was lost or cannot be reached: "
    assert line.startswith(lost) and line.endswith(f"; {RESUME}") and len(line) > len(f"{lost}; {RESUME}") + 10
    report = launcher[1].read_text()
    assert f"rank      : {victim}" in report and "SIGKILL" in report
    if victim == 0:
        return
    step = int(complete_checkpoints(tmp_path / "run" / "checkpoints")[-1].name.rpartition("-")[2])
    process, text = start("resumed", (), *ENDLESS, "--max-steps", str(step + 20))
    assert process.wait(timeout=120) == 0, text.read_text()
    assert f"resuming from step {step}" in text.read_text()
    assert_same_run(train_alone(max_steps=step + 20, evaluate_every=20), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "machine"])
def test_two_machines_start_anew_when_one_loses(start, tmp_path, victim):
    """A process, which its launcher starts again, or all of a machine, whose launcher is then started by hand."""
    port = free_port()
    options = ("--quiet", "--max-steps", "120", "--evaluate-every", "20")
    machines = [start.on_two_machines(port, "machine-0", *options)]
    time.sleep(2 * (victim == "machine"))  # the first one to come keeps the launchers' store
    machines.append(start.on_two_machines(port, "machine-1", *options))
    wait_for_steps(tmp_path / "run", machines, 45)
    if victim == "worker":
        os.kill(children_of(machines[1][0])[1], signal.SIGKILL)
    else:
        for pid in (machines[1][0].pid, *children_of(machines[1][0])):
            os.kill(pid, signal.SIGKILL)
        machines[1][0].wait()
        machines[1] = start.on_two_machines(port, "machine-1-again", *options)
    assert [process.wait(timeout=200) for process, _ in machines] == [0, 0], said(machines)
    text = said(machines)
    assert text.count("resuming from step 40") + text.count("resuming from step 60") == 1, text
    assert not list((tmp_path / "run").glob(".writing*"))
    # As many processes: of one alone, other roundings would have grown in so many steps.
    others = start.by_hand(4, *options, "--output", str(tmp_path / "undisturbed"))
    assert [process.wait(timeout=200) for process, _ in others] == [0] * 4, said(others)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "run", rel=1e-3)


@pytest.mark.slow
def test_processes_end_with_a_checkpoint_when_their_launcher_is_killed(start, tmp_path):
    launcher = start.launched(*ENDLESS, "--evaluate-every", "100000")
    wait_for_steps(tmp_path / "run", [launcher])
    children = children_of(launcher[0])
    launcher[0].kill()
    commands = [Path(f"/proc/{pid}/cmdline") for pid in children]
    wait_for(lambda: not any(command.is_file() and command.read_bytes() for command in commands))
    [checkpoint] = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert f"stopped at step {checkpoint.name.rpartition('-')[2]}" in launcher[1].read_text().replace(",", "")
    assert not errors([launcher])


@pytest.mark.slow
@pytest.mark.parametrize("error", ["torch.OutOfMemoryError('CUDA out of memory.')", "KeyError('a mistake of ours')"])
def test_a_process_that_fails_says_so_alone(start, error):
    processes = start.by_hand(2, *ENDLESS, program=failing("training_step", 1, 9, error))
    assert [process.wait(timeout=60) for process, _ in processes] == [1, 1], said(processes)
    [line] = errors(processes)
    assert "process 1 of 2" in line and (processes[1][1].read_text().count(line) == 1)
    assert ("--tokens-per-device" if "Memory" in error else "--debug") in line and "Traceback" not in said(processes)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rank"), [("save_model", 0), ("_save_rng_state", 1), ("_seal_checkpoint", 0)])
def test_a_disk_that_is_full_for_one_process(start, tmp_path, method, rank):
    """All agree that there is no checkpoint; none is left in a sum that the other one has skipped."""
    processes = start.by_hand(2, *ENDLESS, program=failing(method, rank, 2, "OSError(28, 'No space left on device')"))
    assert [process.wait(timeout=60) for process, _ in processes] == [1, 1], said(processes)
    [line] = errors(processes)
    assert "checkpoint of step 40 could not be written" in line and "No space left" in line, said(processes)
    assert line.endswith("continues from step 20") and "Traceback" not in said(processes)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["checkpoint-20", "contents.json", "recipe.yaml", "tokenizer"]


@pytest.mark.slow
def test_a_cluster_stops_all_with_one_checkpoint(start, train_alone, tmp_path):
    """SIGTERM to the launcher and to both processes, which get it twice then."""
    launcher = start.launched(*ENDLESS, "--evaluate-every", "100000")
    wait_for_steps(tmp_path / "run", [launcher])
    for pid in (*children_of(launcher[0]), launcher[0].pid):
        os.kill(pid, signal.SIGTERM)
    assert launcher[0].wait(timeout=60) != 0
    text = launcher[1].read_text()
    [checkpoint] = complete_checkpoints(tmp_path / "run" / "checkpoints")
    step = int(checkpoint.name.rpartition("-")[2])
    assert text.count(f"stopped at step {step:,}; checkpoint written") == text.count("To resume") == 1
    assert not errors([launcher])
    options = (*ENDLESS, "--evaluate-every", "100000", "--max-steps", str(step + 3))
    process, text = start.launched(*options, name="again")
    assert process.wait(timeout=120) == 0, text.read_text()
    assert f"resuming from step {step}" in text.read_text()
    assert_same_run(train_alone(max_steps=step + 3, evaluate_every=100000), tmp_path / "run")
