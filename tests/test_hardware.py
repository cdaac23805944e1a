"""Threads of torch, as many as other programs leave processors free, within what the control groups grant; TF32."""

import math
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
import translating
from model_folders import PAIRS
from translating import run

from vaswani_transformer import hardware
from vaswani_transformer.hardware import (
    FreeProcessors,
    FreeThreads,
    control_group_limit,
    share_processors,
    use_free_threads,
)

folder = translating.model


@pytest.fixture
def nothing_set(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "_free_threads", None)


@pytest.fixture
def four_threads(nothing_set):
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        (
            {
                "proc/self/cgroup": "0::/user/job\n",
                "sys/fs/cgroup/user/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/user/job/cpu.max": "800000 100000\n",
            },
            3.0,
        ),
    ],
    ids=["no Linux", "none", "container", "unlimited", "of a parent"],
)
def test_what_control_groups_grant(files, expected, tmp_path):
    for name, text in files.items():
        for path in (tmp_path / name, tmp_path / name.replace("cpu.max", "memory.max")):
            path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name.replace("cpu.max", "memory.max")).write_text(text.replace(" 100000", ""))
    assert control_group_limit("cpu.max", tmp_path) == expected
    assert control_group_limit("memory.max", tmp_path) == expected * 100_000


def test_free_is_what_idles_and_what_we_use():
    """Of processors 0 and 2, which are ours, in two seconds: 1.2 idle, 0.4 waiting for a disk, 1.5 used by us."""
    clock, own = [10.0], SimpleNamespace(user=3.0, system=1.0)
    processors = [SimpleNamespace(idle=5.0, iowait=1.0) for _ in range(3)]
    with (
        mock.patch.object(hardware, "own_processors", lambda: [0, 2]),
        mock.patch.object(hardware.time, "monotonic", lambda: clock[0]),
        mock.patch.object(psutil.Process, "cpu_times", lambda self: own),
        mock.patch.object(psutil, "cpu_times", lambda percpu: processors),
    ):
        free = FreeProcessors()
        clock[0] += 0.5
        assert free.look() is None
        clock[0] += 1.5
        processors[0] = SimpleNamespace(idle=6.2, iowait=1.0)
        processors[1] = SimpleNamespace(idle=7.0, iowait=1.0)
        processors[2] = SimpleNamespace(idle=5.0, iowait=1.4)
        own.user, own.system = 4.2, 1.3
        assert free.look() == pytest.approx((1.2 + 0.4 + 1.5) / 2)


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([3.9, 4.0], [4, 4]),
        ([2.2], [2]),  # the first look covers all that a command did before its work
        ([4.0, 2.2, 4.0, 2.2, 2.9, 2.2], [4, 4, 4, 4, 3, 3]),
        ([1.0, 4.0, 2.2, 3.0], [1, 1, 2, 2]),
        ([0.2, 9.0, 9.0], [1, 1, 4]),
        ([2.0, None, 4.0, None, 4.0], [2, 2, 2, 2, 4]),
    ],
    ids=str,
)
def test_two_looks_in_a_row_must_agree(looks, expected, four_threads):
    with mock.patch.object(FreeProcessors, "look", side_effect=looks):
        threads = FreeThreads()
        for number in expected:
            threads.adjust()
            assert torch.get_num_threads() == number


def test_no_more_threads_than_granted(four_threads):
    for quota, expected in ((2.5, 2), (0.5, 1), (64.0, 1)):
        with mock.patch.object(hardware, "control_group_limit", lambda _, quota=quota: quota):
            FreeThreads()
        assert torch.get_num_threads() == expected


def test_who_sets_a_number_keeps_it(four_threads):
    with mock.patch.object(FreeProcessors, "look", side_effect=[2.0, 2.0]):
        threads = FreeThreads()
        torch.set_num_threads(3)
        threads.adjust()
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE", None])
def test_only_commands_share_and_only_unasked(name, four_threads, monkeypatch):
    if name is not None:
        monkeypatch.setenv(name, "4")
        share_processors()
    with mock.patch.object(FreeProcessors, "look", return_value=1.0):
        use_free_threads()
    assert torch.get_num_threads() == 4


def test_commands_look_as_they_work(folder, nothing_set, capsys, tmp_path):
    source = tmp_path / "source"
    source.write_text("".join(f"{line}\n" for line, _ in PAIRS[:3]))
    for command in (
        ["translate", folder, "--input", source],
        ["score", folder, "--source", source, "--target", source],
    ):
        with mock.patch.object(FreeThreads, "adjust") as adjust:
            assert run(*command) == 0
        assert adjust.called


def test_gpus_multiply_float32_in_tf32(monkeypatch):
    before = torch.get_float32_matmul_precision()
    try:
        for has, expected in ((False, before), (True, "high")):
            monkeypatch.setattr(hardware, "has_tf32", lambda has=has: has)
            hardware.use_tf32()
            assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)
