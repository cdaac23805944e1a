"""Threads and memory within what the control groups grant; kernels that are kept; TF32."""

import math
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from vaswani_transformer import hardware
from vaswani_transformer.data.workers import default_workers
from vaswani_transformer.hardware import control_group_limit, limit_threads


@pytest.mark.parametrize(
    ("group", "quotas", "expected"),
    [
        (None, {}, math.inf),
        ("/", {}, math.inf),
        ("/", {"": "250000"}, 2.5),
        ("/", {"": "max"}, math.inf),
        ("/user/job", {"user": "300000", "user/job": "800000"}, 3.0),
    ],
    ids=["no Linux", "none", "container", "unlimited", "of a parent"],
)
def test_what_control_groups_grant(group, quotas, expected, tmp_path):
    if group is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(f"0::{group}\n")
    for name, quota in quotas.items():
        (folder := tmp_path / "sys/fs/cgroup" / name).mkdir(parents=True)
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
        (folder / "memory.max").write_text(f"{quota}\n")
    assert control_group_limit("cpu.max", tmp_path) == expected
    assert control_group_limit("memory.max", tmp_path) == expected * 100_000


@pytest.mark.parametrize(("granted", "expected"), [(math.inf, 64), (2.5, 2), (0.5, 1)])
def test_workers_are_not_more_than_the_control_groups_grant(granted, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(hardware, "control_group_limit", {"cpu.max": granted}.get)
    assert default_workers(1000) == expected


@pytest.mark.parametrize(
    ("granted", "variable", "expected"),
    [(2.5, None, 2), (0.5, None, 1), (64.0, None, 4),
     *((1.0, name, 4) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE"))],
)  # fmt: skip
def test_no_more_threads_than_granted(granted, variable, expected, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "4")
    torch.set_num_threads(4)
    with mock.patch.object(hardware, "control_group_limit", lambda _: granted):
        limit_threads()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert threads == expected


def test_kernels_of_products_of_many_shapes_are_not_kept():
    """In bf16, where oneDNN makes them; a new process has none yet."""
    supports_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    if not supports_bf16() or "ONEDNN_MAX_CPU_ISA" in os.environ:
        pytest.skip("oneDNN multiplies in bf16 with AVX-512 alone")
    code = """
import psutil, sys, torch
from vaswani_transformer.hardware import tune_cpu_memory
if sys.argv[1] == "few":
    tune_cpu_memory()
matrix = torch.ones(512, 256, dtype=torch.bfloat16)
megabytes = lambda: psutil.Process().memory_info().rss >> 20
for rows in range(400, 900):
    torch.ones(rows, 256, dtype=torch.bfloat16) @ matrix.T
    if rows == 410:
        start = megabytes()
print(megabytes() - start)
"""
    clean = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    few, all_ = (int(subprocess.check_output([sys.executable, "-c", code, each], env=clean)) for each in ("few", "all"))
    assert few < all_ / 3, (few, all_)
