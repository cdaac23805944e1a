"""Devices, precisions and threads: which ones are here, what they can multiply at most, what others leave free."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    import torch

HERE = "here"  # the name of this machine
CPU_TOKENS = 4096  # tokens a side that a CPU takes at once, where nothing else is asked for
MOST_WORKERS = 256  # processes or threads that an option may ask for: the processors of a large machine
DEFAULT_UTILISATION = 0.35
# Where the default comes from, for whoever reads a plan.
UTILISATION_SOURCE = (
    "the paper's step times make it 31% (base) and 42% (big) of a P100's 9.5; NVIDIA's own code, big, fp16, with its",
    "tokens/s taken as target tokens: 34% on one V100 (32,942) and one A100 (82,059), 28% on eight A100 (551,599)",
)


@dataclass(frozen=True)
class Device:
    """One kind of device; peaks of dense matrix products in TFLOPS, 0 where it does not compute in that precision."""

    fp32: float  # without TF32
    fp16: float = 0.0  # with float32 sums, like bf16
    bf16: float = 0.0
    source: str = "published dense peak"  # of the figures

    def peak(self, precision: str, name: str) -> tuple[str, float]:
        """The precision that training takes on it, and the peak in FLOP/s.

        Raises:
            UserError: for a precision that it does not compute in.
        """
        chosen = ("bf16" if self.bf16 else "fp32") if precision == "auto" else precision
        teraflops = getattr(self, chosen)
        if chosen == "fp32" and self.fp32:
            teraflops = max(self.fp32, self.bf16 / 2)  # training multiplies in TF32, at half of bf16's rate, if it can
        if not teraflops:
            known = [kind for kind in ("bf16", "fp16", "fp32") if getattr(self, kind)]
            raise UserError(f"precision is {precision!r}, which a {name} does not compute in: use {', '.join(known)}")
        return chosen, teraflops * 1e12


_PAPER = "sustained, by the paper (footnote 5)"
# Footnote 5 of the paper for the first four, the makers' data sheets for the others; SXM boards where there are many.
DEVICES = {
    "k80": Device(2.8, source=_PAPER),
    "k40": Device(3.7, source=_PAPER),
    "m40": Device(6.0, source=_PAPER),
    "p100": Device(9.5, source=_PAPER),
    "v100": Device(15.7, 125.0),
    "t4": Device(8.1, 65.0),
    "a10": Device(31.2, 125.0, 125.0),
    "a100": Device(19.5, 312.0, 312.0),
    "l4": Device(30.3, 121.0, 121.0),
    "l40s": Device(91.6, 362.0, 362.0),
    "h100": Device(67.0, 989.0, 989.0),
    "h100pcie": Device(51.0, 756.0, 756.0),
    "h200": Device(67.0, 989.0, 989.0),
    "rtx3090": Device(35.6, 71.0, 71.0),
    "rtx4090": Device(82.6, 165.2, 165.2),
}


def parse_device(text: str) -> tuple[str, int | None]:
    """A name of `DEVICES`, or `HERE`, and a number or None, from texts such as `"p100 x8"`, `"8x A100"`, `"RTX 4090"`.

    Raises:
        UserError: for an unknown device, with the known names.
    """
    words = text.lower().replace("×", "x")
    match = re.fullmatch(r"(?:(\d{1,6})\s*x\s+)?(\S.*?)(?:\s*(?<=[\d\s])x\s*(\d{1,6}))?", words.strip())
    name = re.sub(r"[\s_-]|nvidia|geforce|tesla", "", match[2]) if match else ""
    counts = [int(count) for count in (match[1], match[3]) if count] if match else []
    if (name not in DEVICES and name != HERE) or len(counts) > 1 or 0 in counts:
        known = ", ".join(DEVICES)
        raise UserError(f"--device {text!r} is not known: give one of {known} or {HERE}, several as in 'p100 x8'")
    return name, counts[0] if counts else None


def check_workers(name: str, number: int, least: int = 1) -> None:
    """Refuse a number of processes or threads that no machine has use for; `name` is what was given."""
    if not least <= number <= MOST_WORKERS:
        raise UserError(f"{name} is {number}: it must be from {least} to {MOST_WORKERS}")


def measure_device(precision: str, seconds: float = 1.0) -> Device:
    """This machine's rate of multiplying matrices in `"fp32"`, `"fp16"` or `"bf16"`, as a device of that precision."""
    import torch
    from torch.utils.benchmark import Timer

    device = accelerator() or torch.device("cpu")
    use_tf32()  # as in training
    size = 1024 if device.type == "cpu" else 8192
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timer = Timer("left @ right", globals={"left": left, "right": right}, num_threads=torch.get_num_threads())
    times = sorted(timer.blocked_autorange(min_run_time=seconds).times)
    peak = 2 * size**3 / times[len(times) // 10] / 1e12  # near the best: other programs only ever slow it down
    return Device(**{"fp32": 0.0, precision: peak}, source=f"measured on this {device.type}")


def accelerator() -> torch.device | None:
    """The kind of accelerator that is here, without a number."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True)


def choose_device(name: str | int | torch.device = "auto") -> torch.device:
    """The device of this name or number; `"auto"` takes an accelerator if any, each of several processes its own.

    Raises:
        UserError: for a device that torch does not know or that is not there.
    """
    import torch

    kind = accelerator()
    if name == "auto":
        if kind is None:
            return torch.device("cpu")
        number = os.environ.get("LOCAL_RANK")  # set by accelerate launch and torchrun
        return kind if number is None else torch.device(kind.type, int(number) % torch.accelerator.device_count())
    here = "there is cpu" if kind is None else f"there is cpu and {kind.type}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        if isinstance(error, NotImplementedError | ImportError):  # pages about how to build torch
            reason = "this torch was built without it"
        raise UserError(f"cannot use device {name!r}: {reason}; {here}") from error
    if device.type == "meta":
        raise UserError(f"cannot use device {name!r}: nothing is computed there; {here}")
    return device


#: What weights and activations may be computed in.
PRECISIONS = ("float32", "bfloat16", "float16")


def on_cpu() -> bool:
    """Whether there is no accelerator to train on."""
    return accelerator() is None


def has_tf32() -> bool:
    """Whether the GPU multiplies float32 matrices faster in TF32, with 10 bits of their 23."""
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 0)


def use_tf32() -> None:
    """Let the GPU multiply float32 matrices in TF32, where it can.

    Not by transformers' `tf32`, which sets torch's newer switches: after it torch refuses to read those of old, as its
    compiler does.
    """
    import torch

    if has_tf32():
        torch.set_float32_matmul_precision("high")


def making_batches() -> int:
    """How many processes should make batches ahead of this one: none for a CPU, which would have to share itself."""
    if on_cpu():
        return 0
    return min(4, max(1, len(own_processors()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1))


def choose_precision(precision: str) -> dict[str, bool]:
    """`bf16` and `fp16` for `TrainingArguments`; auto means bf16 where the hardware multiplies matrices in it.

    Raises:
        UserError: for a precision that this machine does not train in.
    """
    import torch

    if torch.cuda.is_available():
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = on_cpu() and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    if precision == "fp16" and on_cpu():
        raise UserError("precision is 'fp16', which needs a GPU: use bf16, fp32 or auto")
    if precision == "bf16" and torch.cuda.is_available() and not has_bf16:
        raise UserError("precision is 'bf16', which this GPU does not compute in: use fp16, fp32 or auto")
    return {"bf16": precision == "bf16" or (precision == "auto" and has_bf16), "fp16": precision == "fp16"}


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # names and numbers of <malloc.h>


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks for the next step instead of giving them back to the kernel.

    By default each large tensor of a step is fresh memory that the kernel has to clear first (docs/performance.md).
    Returns whether the allocator took the settings; elsewhere than on Linux with glibc nothing happens.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def own_processors() -> list[int]:
    """Numbers of the processors that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def processor_quota(root: Path = Path("/")) -> float:
    """Processors' time that the control groups of Linux, version 1 or 2, grant this process; infinity without a limit.

    A container on 64 processors may have been given the time of two; neither torch nor psutil knows. `root` is the
    root of the file system.
    """
    quotas = [math.inf]
    for folder, version in _control_groups("cpu", root):
        with contextlib.suppress(OSError, ValueError):  # a container sees its own group as the root
            if version == 1:
                limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                limit, period = (folder / "cpu.max").read_text().split()
            quotas += [int(limit) / int(period)] if int(limit) > 0 else []
    return min(quotas)


def memory_limit(root: Path = Path("/")) -> float:
    """Bytes of memory that the control groups of Linux grant this process; as `processor_quota`."""
    limits = [math.inf]
    for folder, version in _control_groups("memory", root):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).read_text()))
    return min(limits)


def _control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """The folders of the groups that may limit this process, and their version; a limit holds for all groups below."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # another system
        return
    for _, controllers, path in groups:
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        place = mount / path.strip("/")
        for folder in (place, *place.parents[: len(place.relative_to(mount).parts)]):
            yield folder, 1 if controllers else 2


class FreeProcessors:
    """How many processors other programs leave to this process, as seen from one look to the next."""

    SECONDS = 1.0  # from one look to the next, at least

    def __init__(self):
        import psutil

        self._process, self._numbers = psutil.Process(), own_processors()
        self._before = self._times()

    def _times(self) -> tuple[float, float]:
        """The clock, and seconds so far in which our processors did nothing or worked for this process."""
        import psutil

        own, all_times = self._process.cpu_times(), psutil.cpu_times(percpu=True)
        processors = [all_times[number] for number in self._numbers if number < len(all_times)]
        idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in processors)
        return time.monotonic(), idle + own.user + own.system

    def look(self) -> float | None:
        """Processors that were free or ours since the last look; None if that was a moment ago."""
        if time.monotonic() - self._before[0] < self.SECONDS:
            return None
        before, self._before = self._before, self._times()
        return (self._before[1] - before[1]) / (self._before[0] - before[0])


class FreeThreads:
    """As many threads of torch as others leave processors free, from one to those that it has at first.

    Of `workers` processes that do the same on this machine each takes its share.

    torch's threads wait for each other by spinning. One thread more than there are free processors holds up all others:
    beside one busy program two threads on two processors are slower than one (`scripts/benchmarks/busy_machine.py`).
    To wait passively (`OMP_WAIT_POLICY`) would cost a fifth to a half of the speed of a quiet machine.
    """

    def __init__(self, workers: int = 1):
        import torch

        self.most = max(1, int(min(torch.get_num_threads(), processor_quota())) // workers)
        torch.set_num_threads(self.most)
        self.threads = self.most
        self._free, self._last = FreeProcessors(), None

    def adjust(self) -> None:
        """Take another number where two looks in a row agree that it should be lower, or higher.

        Where somebody else has set the number since, it stays.
        """
        import torch

        if self.most == 1 or torch.get_num_threads() != self.threads:
            return
        free = self._free.look()
        if free is None:
            return
        wanted = max(1, min(self.most, round(free)))
        lower, higher = sorted((wanted, wanted if self._last is None else self._last))
        self._last = wanted
        threads = min(max(self.threads, lower), higher)
        if threads != self.threads:
            self.threads = threads
            torch.set_num_threads(threads)


_free_threads: FreeThreads | None = None


def share_processors(workers: int = 1) -> None:
    """For commands: from now on `use_free_threads` adapts torch's threads to what other programs leave free.

    Nothing changes where the user has set a number of threads, or in one of several processes, whose launcher does;
    `workers` are those that a command has started itself.
    """
    global _free_threads
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    if not any(name in os.environ for name in names) and os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        _free_threads = FreeThreads(workers)


def use_free_threads() -> None:
    """For loops of long work, every time round: take as many threads as processors are free, if a command wants it."""
    if _free_threads is not None:
        _free_threads.adjust()
