"""Real processes that train together: launched, stopped, killed, failing, resumed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from conftest import ROOT
from safetensors.torch import load_file

from vaswani_transformer import distributed as watch
from vaswani_transformer import load_recipe, train
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.model.modeling_vaswani import VaswaniForConditionalGeneration
from vaswani_transformer.training.run_folder import complete_checkpoints

CONFIGS = ROOT / "scripts" / "accelerate"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# The watch by itself, with short times.


class Quiet(watch.ProcessWatch):
    """Notes why it would end its process."""

    reason = "none"

    def _leave(self, reason):
        if self.reason == "none":
            self.reason = reason
        self._stop.set()


@pytest.fixture
def watches(monkeypatch):
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(watch, "CLOSED_SECONDS", 0.3)
    made = []

    def make(world_size=3, by_launcher=False):
        port = free_port()
        host = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        for rank in range(world_size):
            client = torch.distributed.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
            )
            store = torch.distributed.PrefixStore("test", client)
            made.append(Quiet(rank, world_size, store, by_launcher, beat=0.05, lost=1.0))
            made[-1].start()
        return [host], made

    yield make
    for one in made:
        one._stop.set()


def reasons(made, seconds):
    """Why each would leave, once all that will have noticed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(one.reason == "none" for one in made):
        time.sleep(0.05)
    return [one.reason for one in made]


def test_processes_that_live_are_left_alone(watches):
    _, made = watches()
    assert reasons(made, 2.5) == ["none"] * 3
    assert made[1].lost(1.0) is None


def test_a_process_without_signs_of_life_is_named(watches):
    _, made = watches()
    time.sleep(0.3)
    made[2]._stop.set()  # as if killed
    for reason in reasons(made[:2], 5):
        assert reason.startswith(f"process 2 ({socket.gethostname()}) of 3 was lost") and "same command" in reason


def test_one_of_several_speaks(watches):
    _, made = watches()
    assert [one.speaks_first() for one in made] == [True, False, False]


@pytest.mark.parametrize("failed", [False, True])
def test_an_end_that_is_meant_is_no_loss(watches, failed):
    """Of a process that has finished; one that failed has said so itself, and the others leave without a word."""
    _, made = watches()
    time.sleep(0.3)
    made[1].stop(failed)
    assert reasons([made[0], made[2]], 4) == ([None, None] if failed else ["none", "none"])


@pytest.mark.parametrize("by_launcher", [False, True])
def test_the_one_that_keeps_the_store_is_missed(watches, by_launcher):
    host, made = watches(by_launcher=by_launcher)
    time.sleep(0.3)
    host.clear()
    for reason in reasons(made[1:], 5):
        who = "the launcher" if by_launcher else "process 0 of 3"
        assert reason.startswith(f"{who} was lost: its connection is closed")


def test_a_process_that_stood_still_itself_accuses_nobody(watches, monkeypatch):
    """All were suspended, as clusters do: whoever wakes first must not take the others for lost."""
    _, made = watches()
    time.sleep(0.3)
    clock, late = time.monotonic, [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock() + late[0])
    late[0] = 1000.0
    assert reasons(made, 1.5) == ["none"] * 3


def test_what_the_first_process_makes(watches):
    _, made = watches(2)
    order, got = [], []

    def follow():
        with made[1].first_process_first():
            order.append(1)
        got.append(made[1].share("name", lambda: "made by the second"))

    thread = threading.Thread(target=follow)
    os.environ.pop("LOCAL_RANK", None)
    thread.start()
    with made[0].first_process_first():
        time.sleep(0.3)
        order.append(0)
        assert made[0].share("name", lambda: "made by the first") == "made by the first"
    thread.join(10)
    assert order == [0, 1] and got == ["made by the first"]


# The launch files.


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


# The command, with several processes.


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_corpus(generate_corpus(400, 21, 20), folder)
    settings = {
        "data_dir": str(folder), "train_source": "train.en", "train_target": "train.de",
        "validation_source": "validation.en", "validation_target": "validation.de", "vocab_size": 400,
        "d_model": 16, "d_ff": 32, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0,
        "tokens_per_batch": 1200, "tokens_per_device": 600, "max_length": 60, "max_steps": 8, "warmup_steps": 8,
        "learning_rate_scale": 0.2, "evaluate_every": 4, "log_every": 1, "validation_bleu": 8,
        "average_checkpoints": 2, "keep_checkpoints": 2, "precision": "fp32",
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


FAILING = """
import os, sys
import torch
from vaswani_transformer.training import trainer
from vaswani_transformer.cli.main import main
step, number = trainer.VaswaniTrainer.training_step, [0]
def failing(self, *arguments, **options):
    number[0] += 1
    if number[0] == 9 and os.environ["RANK"] == "1":
        raise {error}
    return step(self, *arguments, **options)
trainer.VaswaniTrainer.training_step = failing
sys.exit(main(sys.argv[1:]))
"""
COMMAND = (sys.executable, "-m", "vaswani_transformer")
ENDLESS = ("--max-steps", "100000", "--evaluate-every", "20", "--quiet")


@pytest.fixture
def start(recipe, tmp_path):
    """Starts the command for a recipe; gives processes and the files that they print to."""
    started = []

    def begin(name, command, *options, program=COMMAND, **environment):
        text = tmp_path / f"{name}.txt"
        # What a launcher or an earlier test in this process has set is not for this one.
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TORCHELASTIC"))
        }
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            inherited.pop(key, None)
        cache = {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(recipe.parent / "cache"), "PYTHONUNBUFFERED": "1"}
        arguments = [
            *command,
            *program[1 if command else 0 :],
            "train",
            str(recipe),
            "--output",
            str(tmp_path / "run"),
            *options,
        ]
        with text.open("w") as file:
            process = subprocess.Popen(
                arguments,
                cwd=ROOT,
                stdout=file,
                stderr=file,
                env=inherited | cache | environment,
                start_new_session=True,
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

    def launched(*options, config="cpu", more=(), name="launched", program=COMMAND):
        launcher = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(CONFIGS / f"{config}.yaml"),
        ]
        return begin(name, [*launcher, *more], *options, program=program)

    begin.by_hand, begin.launched = by_hand, launched
    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps_done(folder):
    log = folder / "training_log.jsonl"
    return log.read_text().count("\n") if log.is_file() else 0


def wait_for_steps(folder, processes, number=30):
    until = time.monotonic() + 90
    while steps_done(folder) < number:
        assert time.monotonic() < until and all(process.poll() is None for process, _ in processes), said(processes)
        time.sleep(0.1)


def said(processes):
    return "\n".join(text.read_text() for _, text in processes)


def errors(processes):
    """Our own lines about what went wrong, of all processes."""
    return [line for line in said(processes).splitlines() if line.startswith("error: ")]


def losses(folder):
    entries = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}, [
        (entry["source_tokens"], entry["target_tokens"]) for entry in entries if "loss" in entry
    ]


def assert_same_run(folder, other):
    """Losses, tokens of every step, and the weights that are kept."""
    (one, tokens), (two, other_tokens) = losses(folder), losses(other)
    assert one.keys() == two.keys() and tokens == other_tokens
    for step in one:
        assert one[step] == pytest.approx(two[step], rel=1e-5)
    weights, others = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() <= 1e-4 * weight.abs().max(), name


@pytest.fixture
def train_alone(recipe, tmp_path, monkeypatch):
    """Trains the same recipe in this process, into a folder of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", recipe.parent / "cache")

    def run(**changes):
        return train(load_recipe(str(recipe), {"output": str(tmp_path / "alone"), **changes}), progress=False).folder

    return run


@pytest.mark.slow
def test_launched_on_two_processes_trains_as_one(start, train_alone, tmp_path):
    process, text = start.launched("--quiet")
    assert process.wait(timeout=120) == 0, text.read_text()
    assert (tmp_path / "run" / "model.safetensors").is_file()
    checkpoint = complete_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert sorted(path.name for path in checkpoint.glob("rng_state*")) == ["rng_state_0.pth", "rng_state_1.pth"]
    assert text.read_text().count("training data: ") == 1  # one of them reads and tokenizes
    assert_same_run(train_alone(), tmp_path / "run")


@pytest.mark.slow
def test_two_machines(start, train_alone, tmp_path):
    """The launch file for several machines, with one process on each of two."""
    port = str(free_port())
    processes = [
        start.launched("--quiet", config="multi_node", name=f"machine-{rank}", more=(
            "--num_processes", "2", "--machine_rank", str(rank), "--main_process_ip", "127.0.0.1",
            "--main_process_port", port,
        ))
        for rank in range(2)
    ]  # fmt: skip
    assert [process.wait(timeout=120) for process, _ in processes] == [0, 0], said(processes)
    assert_same_run(train_alone(), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_lost_process_is_named_and_the_rest_leaves(start, train_alone, tmp_path, victim, number):
    """Started by hand, as srun does, so that nobody ends the rest; then the same command goes on, in one process."""
    processes = start.by_hand(3 if victim else 2, *ENDLESS)
    wait_for_steps(tmp_path / "run", processes)
    processes[victim][0].send_signal(number)
    stopped = time.monotonic()
    others = [pair for rank, pair in enumerate(processes) if rank != victim]
    assert {process.wait(timeout=60) for process, _ in others} == {1}, said(processes)
    assert time.monotonic() - stopped < 60
    processes[victim][0].kill()
    found = errors(others)
    assert found and all(f"process {victim} " in line and "last complete checkpoint" in line for line in found)
    assert len(found) == 1
    assert "Traceback" not in said(processes)
    step = int(complete_checkpoints(tmp_path / "run" / "checkpoints")[-1].name.rpartition("-")[2])
    if (victim, number) != (1, signal.SIGKILL):
        return
    process, text = start("resumed", (), *ENDLESS, "--max-steps", str(step + 20))
    assert process.wait(timeout=120) == 0, text.read_text()
    assert f"resuming from step {step}" in text.read_text() and "of 3 processes, now there are 1" in text.read_text()
    assert_same_run(train_alone(max_steps=step + 20, evaluate_every=20), tmp_path / "run")


@pytest.mark.slow
def test_a_process_that_a_launcher_misses(start, tmp_path):
    launcher = start.launched(*ENDLESS)
    wait_for_steps(tmp_path / "run", [launcher])
    children = Path(f"/proc/{launcher[0].pid}/task/{launcher[0].pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    assert launcher[0].wait(timeout=60) != 0
    [line] = errors([launcher])
    assert "process 1 " in line and "was lost" in line and "last complete checkpoint" in line
    assert complete_checkpoints(tmp_path / "run" / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("error", ["torch.OutOfMemoryError('CUDA out of memory.')", "KeyError('a mistake of ours')"])
def test_a_process_that_fails_says_so_alone(start, tmp_path, error):
    processes = start.by_hand(2, *ENDLESS, program=(sys.executable, "-c", FAILING.format(error=error)))
    assert [process.wait(timeout=60) for process, _ in processes] == [1, 1], said(processes)
    [line] = errors(processes)
    assert "process 1 of 2" in line and (processes[1][1].read_text().count(line) == 1)
    if "Memory" in error:
        assert "tokens_per_device" in line and "Traceback" not in said(processes)
    else:
        assert said(processes).count("Traceback") == 1


FULL_DISK = """
import os, sys
from vaswani_transformer.training import trainer
from vaswani_transformer.cli.main import main
save, number = trainer.VaswaniTrainer.{method}, [0]
def failing(self, *arguments, **options):
    number[0] += 1
    if number[0] == 2 and os.environ["RANK"] == "{rank}":
        raise OSError(28, "No space left on device")
    return save(self, *arguments, **options)
trainer.VaswaniTrainer.{method} = failing
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rank"), [("save_model", 0), ("_save_rng_state", 1), ("_seal_checkpoint", 0)])
def test_a_disk_that_is_full_for_one_process(start, tmp_path, method, rank):
    """All agree that there is no checkpoint; none is left in a sum that the other one has skipped."""
    program = (sys.executable, "-c", FULL_DISK.format(method=method, rank=rank))
    processes = start.by_hand(2, *ENDLESS, program=program)
    assert [process.wait(timeout=60) for process, _ in processes] == [1, 1], said(processes)
    [line] = errors(processes)
    assert "checkpoint of step 40 could not be written" in line and "No space left" in line, said(processes)
    assert line.endswith("goes on from step 20") and "Traceback" not in said(processes)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["checkpoint-20", "contents.json", "tokenizer"]


@pytest.mark.slow
def test_a_cluster_stops_all_with_one_checkpoint(start, train_alone, tmp_path):
    """SIGTERM to the launcher and to both processes, which get it twice then."""
    launcher = start.launched(*ENDLESS, "--evaluate-every", "100000")
    wait_for_steps(tmp_path / "run", [launcher])
    children = Path(f"/proc/{launcher[0].pid}/task/{launcher[0].pid}/children").read_text().split()
    for pid in (*map(int, children), launcher[0].pid):
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


@pytest.mark.slow
def test_a_batch_that_cannot_be_dealt_out_is_refused_once(start, tmp_path):
    processes = start.by_hand(4, "--quiet", "--tokens-per-device", "60")
    assert [process.wait(timeout=60) for process, _ in processes] == [2] * 4, said(processes)
    [line] = errors(processes)
    assert "pairs" in line and "tokens_per_batch" in line and "fewer processes" in line
    assert "Traceback" not in said(processes)
