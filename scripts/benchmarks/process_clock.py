"""Measures a training process from outside, by the log that it writes after every step."""

import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Watched:
    """What a process trained between two lines of its log, and its resources."""

    seconds: float
    cpu_seconds: float
    source_tokens: int
    target_tokens: int
    positions: float
    memory: float  # bytes: the most that the process had, or the device over what it had before

    def rates(self) -> dict[str, float]:
        """Rates by the clock and by processor time, share of padding, bytes of memory."""
        tokens = self.source_tokens + self.target_tokens
        return {
            "target tokens/s": self.target_tokens / self.seconds,
            "positions/s": self.positions / self.seconds,
            "target tokens/CPU s": self.target_tokens / max(self.cpu_seconds, 1e-9),
            "positions/CPU s": self.positions / max(self.cpu_seconds, 1e-9),
            "padding": 1 - tokens / self.positions,
            "memory": self.memory,
        }


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and all its threads so far, user's and kernel's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(process: subprocess.Popen, log: Path, warm_up: float, seconds: float, device: str = "cpu") -> Watched:
    """Read the log of a training as it grows, then end the process.

    Args:
        process: the training.
        log: what it appends to after each step: JSON with `source_tokens`, `target_tokens` and `padding`, the share of
            both sides' positions.
        warm_up: seconds since the first line that do not count.
        seconds: seconds that count.
        device: cpu or cuda, for the peak of memory.

    Raises:
        RuntimeError: if the process ends by itself, or does not get that far within ten minutes.
    """
    memory = DeviceMemory(device)
    position, started, begun = 0, None, None
    totals, line_rest = [0, 0, 0.0], ""
    deadline = time.monotonic() + 600 + seconds
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
            if not log.is_file():
                continue
            now, used = time.perf_counter(), cpu_seconds(process.pid)
            with log.open(encoding="utf-8", errors="replace") as file:
                file.seek(position)
                text = file.read()
                position = file.tell()
            *lines, line_rest = (line_rest + text).split("\n")
            entries = [json.loads(line) for line in lines if line.startswith("{")]
            if not (entries := [entry for entry in entries if "target_tokens" in entry]):
                continue
            started = now if started is None else started
            if begun is None:
                if now - started >= warm_up:
                    begun = now, used
                continue
            for entry in entries:
                tokens = entry["source_tokens"] + entry["target_tokens"]
                totals[0] += entry["source_tokens"]
                totals[1] += entry["target_tokens"]
                totals[2] += tokens / (1 - entry["padding"])
            if now - begun[0] >= seconds:
                break
        else:
            raise RuntimeError(f"ended early with status {process.poll()}")
    finally:
        process.kill()
        usage = os.wait4(process.pid, 0)[2] if process.returncode is None else None
    elapsed, used = now - begun[0], used - begun[1]
    return Watched(elapsed, used, *totals, memory.peak() or usage.ru_maxrss * 1024)


class DeviceMemory:
    """Peak memory of a GPU beyond what was in use at the start; 0 on a CPU."""

    def __init__(self, device: str):
        self.most, self.before, self.over = 0, 0, device != "cuda"
        if not self.over:
            self.before = self._used()
            self.thread = threading.Thread(target=self._watch, daemon=True)
            self.thread.start()

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _watch(self):
        while not self.over:
            self.most = max(self.most, self._used())
            time.sleep(0.2)

    def peak(self) -> int:
        """Bytes; ends the watch."""
        self.over = True
        return self.most - self.before
