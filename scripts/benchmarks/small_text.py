"""Train on small texts by several settings at equal minutes of one thread, and score them on the same test text.

    python scripts/benchmarks/small_text.py TEXTS --output CELLS [--minutes 30] [--only PATTERN] [--report FILE]

TEXTS holds a folder for each text, with `train.tsv`, `valid.tsv` and `test.tsv`, whose first row names the languages.
Each text is used whole, and cut to the first 5,000, 10,000, 30,000 and 100,000 pairs as far as it has more. A cell is
CELLS/TEXT-PAIRS-SYSTEM with its log and `result.json`; the same command runs what is missing. `--report` writes a
result file for `results_page.py`. Systems: the recipes `auto` and `small`, and `small_text_joeynmt.py` and
`small_text_marian.py`, programs of their own.
"""

import argparse
import datetime
import fnmatch
import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

SIZES = (5_000, 10_000, 30_000, 100_000)
PEERS = ("joeynmt", "marian")  # programs of their own
SYSTEMS = ("auto", "small", *PEERS)
# Minutes are of processor time, which others on the machine do not shorten: in these processes it is the clock.
_CLOCK = """import concurrent.futures, runpy, subprocess, sys, threading, time
time.monotonic = time.perf_counter = time.process_time
sys.argv = sys.argv[1:]
(runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module)(sys.argv[0], run_name="__main__")"""
TIMED = [sys.executable, "-c", _CLOCK]
VASWANI = [*TIMED, "vaswani_transformer"]


def cells(texts: Path) -> list[tuple[Path, int]]:
    """Return each text with the pairs that are used of it."""
    found = []
    for folder in sorted(path.parent for path in texts.glob("*/train.tsv")):
        whole = sum(1 for _ in (folder / "train.tsv").open(encoding="utf-8")) - 1
        found += [(folder, size) for size in (*(size for size in SIZES if size < 0.9 * whole), whole)]
    return found


def run_cell(text: Path, pairs: int, system: str, cell: Path, minutes: float) -> None:
    """Train and score one cell, unless it has its result."""
    if (cell / "result.json").exists():
        return
    cell.mkdir(parents=True, exist_ok=True)
    with (text / "train.tsv").open(encoding="utf-8") as lines:
        (cell / "train.tsv").write_text("".join(line for line in islice(lines, pairs + 1)), encoding="utf-8")
    for side, column in (("source", 0), ("target", 1)):
        rows = [line.rstrip("\n").split("\t") for line in (text / "test.tsv").open(encoding="utf-8")][1:1001]
        (cell / f"test.{side}").write_text("".join(row[column] + "\n" for row in rows), encoding="utf-8")
    model = cell / "model"
    data = ["--train-data", cell / "train.tsv", "--validation-data", text / "valid.tsv", "--output", model]
    train = [*VASWANI, "train", system, *data, "--max-minutes", minutes, "--quiet"]
    test = [cell / "test.source", cell / "test.target"]
    score = [*VASWANI, "evaluate", model, "--source", test[0], "--reference", test[1], "--json", cell / "scores.json"]
    if system in PEERS:
        score = [*TIMED, Path(__file__).with_name(f"small_text_{system}.py"), *data[1::2], *test, minutes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (cell / "log").open("a") as log:
        is_trained = system in PEERS or (model / "model.safetensors").exists()  # by itself, or before an interruption
        for command in (score,) if is_trained else (train, score):
            subprocess.run(list(map(str, command)), env=environment, stdout=log, stderr=log, check=True)
    scores = json.loads((cell / "scores.json").read_text())
    result = {"text": text.name, "pairs": pairs, "system": system}
    result |= {name: scores[name] for name in ("bleu", "chrf", "perplexity") if name in scores}
    (cell / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


def report(output: Path, minutes: float) -> dict:
    """Return the result file: a row for each text and size, BLEU and chrF of each system."""
    results = [json.loads(path.read_text()) for path in sorted(output.glob("*/result.json"))]
    systems = [system for system in SYSTEMS if any(result["system"] == system for result in results)]
    rows = []
    for text, pairs in sorted({(result["text"], result["pairs"]) for result in results}):
        row = [text, f"{pairs:,}"]
        for system in systems:
            found = [r for r in results if (r["text"], r["pairs"], r["system"]) == (text, pairs, system)]
            row.append("; ".join(f"{each['bleu']:.1f}, {each['chrf']:.1f}" for each in found))
        rows.append(row)
    processor = (re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [platform.processor()])[0]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return {
        "section": "Quality", "title": f"Small texts: BLEU and chrF after {minutes:g} minutes of processor time",
        "command": f"python scripts/benchmarks/small_text.py TEXTS --output CELLS --minutes {minutes:g}",
        "commit": commit.strip(), "date": datetime.date.today().isoformat(),
        "processor": f"{processor}, one thread a cell",
        "note": "The first 1,000 test pairs, the program's own search.",
        "columns": ["text", "pairs", *systems], "rows": rows,
    }  # fmt: skip


def main() -> None:
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", metavar="TEXTS", type=Path)
    parser.add_argument("--output", metavar="CELLS", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--only", metavar="PATTERN", default="*", help="cells of these names: da-10000-*")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, each on one core")
    parser.add_argument("--report", metavar="FILE", type=Path)
    options = parser.parse_args()
    chosen = [
        (text, pairs, system, options.output / f"{text.name}-{pairs}-{system}", options.minutes)
        for text, pairs in cells(options.texts) for system in SYSTEMS
        if fnmatch.fnmatch(f"{text.name}-{pairs}-{system}", options.only)
    ]  # fmt: skip
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda cell: run_cell(*cell), chosen))
    if options.report:
        options.report.write_text(json.dumps(report(options.output, options.minutes), indent=1) + "\n")


if __name__ == "__main__":
    main()
