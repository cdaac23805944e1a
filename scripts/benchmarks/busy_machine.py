"""Training and translating while other programs use the processors: what the commands' own settings bring.

    vaswani demo                                                    # its folder, demo_output, is what this needs
    python scripts/benchmarks/busy_machine.py demo_output

`vaswani train demo` and `vaswani translate` run as a user starts them, each with the settings that the commands choose
(now) and as torch would run by itself (before: as many threads as processors, which spin while they wait). All are
started once and stopped (SIGSTOP); then they take turns in random order, beside 0, 1 and 2 processes that do nothing
but count. Target tokens a second, the median of the rounds; in brackets the share of the same command's speed before,
on the quiet machine. Linux and macOS; 5 minutes.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

SETTINGS = {
    "before": {"OMP_NUM_THREADS": str(os.cpu_count()), "GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"},
    "now": {},
}  # the first with the defaults of GNU's and LLVM's OpenMP
SETTLE = 4.0  # seconds in which a command that continues sees what the others take
WORKS = ("training", "translation")


@dataclass
class Contestant:
    """A command that runs, or is stopped; what it has done stands in a file that grows."""

    work: str
    setting: str
    process: subprocess.Popen
    output: Path

    def tokens(self, start: int, end: int, tokenizer) -> int:
        """Target tokens in a part of the file."""
        lines = self.output.read_bytes()[start:end].decode().splitlines()
        if self.work == "training":
            return sum(json.loads(line).get("target_tokens", 0) for line in lines)
        return sum(len(ids) for ids in tokenizer(lines)["input_ids"])

    def measure(self, seconds: float, settle: float) -> tuple[int, int, float]:
        """Let it run: where the file's growth began and ended, and the seconds between, once it has settled."""
        self.process.send_signal(signal.SIGCONT)
        time.sleep(settle)
        seen = []  # when the file had which size
        while not seen or seen[-1][0] - seen[0][0] < seconds:
            if self.process.poll() is not None:
                sys.exit(f"error: {self.work}, {self.setting}, ended with status {self.process.returncode}")
            size = self.output.stat().st_size if self.output.exists() else 0
            if size and (not seen or size > seen[-1][1]):
                seen.append((time.perf_counter(), size))
            time.sleep(0.005)
        self.process.send_signal(signal.SIGSTOP)
        (started, start), (ended, end) = seen[0], seen[-1]
        return start, end, ended - started


def start(work: str, setting: str, demo: Path, folder: Path) -> Contestant:
    """Start a command."""
    place = folder / f"{work}-{setting}"
    command = [sys.executable, "-m", "vaswani_transformer"]
    if work == "training":
        steps = ["--max-steps", "1000000", "--evaluate-every", "1000000", "--log-every", "1"]
        command += ["train", "demo", "--data-dir", demo / "data", "--output", place, "--quiet", *steps]
        output = place / "training_log.jsonl"
    else:
        source, output = folder / "source.en", place
        source.write_text(20 * (demo / "data" / "train.en").read_text(encoding="utf-8"), encoding="utf-8")
        command += ["translate", demo / "model", "--input", source, "--output", output, "--window", "100"]
    names = {name for values in SETTINGS.values() for name in values}
    environment = {name: value for name, value in os.environ.items() if name not in (*names, "OMP_WAIT_POLICY")}
    errors = (folder / f"{work}-{setting}.txt").open("w")
    return Contestant(
        work, setting, subprocess.Popen(command, env=environment | SETTINGS[setting], stderr=errors), output
    )


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """So many processes that count."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("demo", type=Path, metavar="FOLDER", help="what `vaswani demo` wrote")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], metavar="PROCESSES")
    parser.add_argument("--seconds", type=float, default=3.0, help="that count of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--setting", action="append", default=[], metavar="NAME:VARIABLE=VALUE,...", help="one more")
    options = parser.parse_args()
    for text in options.setting:
        name, _, values = text.partition(":")
        SETTINGS[name] = dict(value.split("=") for value in values.split(","))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what was started, too
    rates: dict[tuple[str, str, int], list[float]] = {}
    from transformers import AutoTokenizer

    import vaswani_transformer  # noqa: F401 - its tokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.demo / "model")
    with tempfile.TemporaryDirectory() as name:
        contestants = []
        try:
            for work in options.works:
                for setting in SETTINGS:
                    contestants.append(start(work, setting, options.demo.absolute(), Path(name)))
                    contestants[-1].measure(1.0, 0.0)
                    print(f"{work}, {setting}: ready", file=sys.stderr)
            for turn in range(options.rounds):
                for number in random.sample(options.busy, len(options.busy)):
                    for contestant in random.sample(contestants, len(contestants)):
                        with busy(number):
                            begun, ended, seconds = contestant.measure(options.seconds, SETTLE)
                        rate = contestant.tokens(begun, ended, tokenizer) / seconds
                        rates.setdefault((contestant.work, contestant.setting, number), []).append(rate)
                        what = f"{contestant.work}, {contestant.setting}, {number} busy: {rate:,.0f}"
                        print(f"round {turn + 1} of {options.rounds}: {what}", file=sys.stderr)
        finally:
            for contestant in contestants:
                contestant.process.kill()
                contestant.process.wait()
    heads = [f"{number} busy" for number in options.busy]
    print(f"| target tokens a second | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    for work in options.works:
        whole = median(rates[work, "before", options.busy[0]])
        for setting in SETTINGS:
            values = [median(rates[work, setting, number]) for number in options.busy]
            print(f"| {work}, {setting} | {' | '.join(f'{value:,.0f} ({value / whole:.0%})' for value in values)} |")


if __name__ == "__main__":
    main()
