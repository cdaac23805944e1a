"""Devices, precisions, threads and memory: which ones this machine has, and how much of them this process may use."""

import contextlib
import ctypes
import math
import os
import platform
from pathlib import Path

from .errors import UserError, reading

CPU_TOKENS = 4096  # tokens a side that a CPU takes at once, where nothing else is asked for
MOST_WORKERS = 256  # processes or threads that an option may ask for: the processors of a large machine


def measure_peak(precision: str) -> float:
    """Return the FLOP/s of this machine's matrix products in `"fp32"`, `"fp16"` or `"bf16"`."""
    import torch
    from torch.utils.benchmark import Timer

    device = accelerator() or torch.device("cpu")
    use_tf32()  # as in training
    size = 1024 if device.type == "cpu" else 8192
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timer = Timer("left @ right", globals={"left": left, "right": right}, num_threads=torch.get_num_threads())
    times = sorted(timer.blocked_autorange(min_run_time=1.0).times)
    return 2 * size**3 / times[len(times) // 10]  # near the best: other programs only ever slow it down


def accelerator() -> "torch.device | None":  # noqa: F821 (it is imported where it is used)
    """Return the kind of accelerator that is here, without a number."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True)


def choose_device(name: "str | int | torch.device" = "auto") -> "torch.device":  # noqa: F821
    """Return the device of this name or number; `"auto"`: an accelerator if any; several processes have one each.

    Raises:
        UserError: for a device that torch does not know or that is not there.
    """
    import torch

    if name == "auto" or (name == "cuda" and torch.cuda.is_available()):
        if (kind := accelerator()) is None:
            return torch.device("cpu")
        number = os.environ.get("LOCAL_RANK")  # set by accelerate launch and torchrun
        return kind if number is None else torch.device(kind.type, int(number) % torch.accelerator.device_count())
    with reading(f"device {name!r}"):
        device = torch.device(name)
        torch.empty(1, device=device)
    return device


def use_tf32() -> None:
    """Let the GPU multiply float32 matrices in TF32, with 10 of their 23 mantissa bits; no effect on other devices.

    Not by transformers' `tf32`: it sets newer switches, with which torch refuses to read those that its compiler reads.
    """
    import torch

    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")


def default_num_workers() -> int:
    """Return how many processes should make batches ahead of this one.

    None for a CPU, which would share itself, and on a Mac, where forked processes may crash.
    """
    if accelerator() is None or accelerator().type == "mps":
        return 0
    return min(4, max(1, available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1))


def choose_precision(precision: str) -> dict[str, bool]:
    """Return `bf16` and `fp16` for `TrainingArguments`; auto means bf16 where the hardware multiplies matrices in it.

    Raises:
        UserError: for a precision that this machine does not train in.
    """
    import torch

    if torch.cuda.is_available():
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = accelerator() is None and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    if precision == "fp16" and accelerator() is None:
        raise UserError("precision is 'fp16', which needs a GPU: use bf16, fp32 or auto")
    if precision == "bf16" and torch.cuda.is_available() and not has_bf16:
        raise UserError("precision is 'bf16', which this GPU does not compute in: use fp16, fp32 or auto")
    return {"bf16": precision == "bf16" or (precision == "auto" and has_bf16), "fp16": precision == "fp16"}


def tune_cpu_memory() -> None:
    """Let glibc keep freed blocks for the next step, and oneDNN the kernels of one step; before its first product.

    By default each large tensor of a step is fresh memory that the kernel has to clear first, and oneDNN, which
    multiplies in bf16, keeps a program and buffers for each of 1,024 shapes, though batches hardly ever have one twice.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # its own, and that of torch above it
        os.environ.setdefault(name, "20")
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX of <malloc.h>
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def available_cpus() -> int:
    """Return how many CPUs this process may use at once."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(number, control_group_limit("cpu.max"))))


def control_group_limit(name: str, root: Path = Path("/")) -> float:
    """Return what Linux' control groups (version 2) grant this process; infinity without a limit.

    A container on 64 CPUs may have the time of two; neither torch nor psutil knows. A limit holds for all groups below.
    The name is `"cpu.max"` for a number of CPUs, `"memory.max"` for bytes.
    """
    limits, mount = [math.inf], root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):  # another system
        own = mount / (root / "proc/self/cgroup").read_text().rpartition("0::/")[2].partition("\n")[0]
        for folder in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):  # no file, or "max"
                limit, period, *_ = [*(folder / name).read_text().split(), 1]
                limits.append(int(limit) / int(period))
    return min(limits)


def limit_threads() -> None:
    """Let torch take at most the CPUs that this process is granted.

    Nothing changes where the user has set a number of threads, or in one of several processes, whose launcher does.
    """
    import torch

    is_set = any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if not is_set and os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        torch.set_num_threads(max(1, int(min(torch.get_num_threads(), control_group_limit("cpu.max")))))
