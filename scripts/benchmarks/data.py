"""Memory and time of `vaswani prepare` and of the start of `vaswani train --prepared`, against the number of pairs.

    python scripts/benchmarks/data.py --pairs 1000000 5000000 --workers 2

Text is generated: words of a Zipf distribution over 20,000 made-up words, as many in a sentence as in Multi30k English
(log-normal, mean 12.2, standard deviation 4.1), targets 0.97 times as long with a spread of 15%, in gzipped shards.
More than five million pairs are the first five million again and again, which nothing here notices.
Both commands run as they are, in processes of their own. Memory is sampled all the time over all processes of a
command: what they hold themselves (anonymous), and pages of the mapped data, which the kernel may drop. The difference
of two rows is what a pair costs: the index holds 4 bytes a pair on disk, ordering an epoch takes 8 and keeps 4.

A million pairs take about a minute on 2 cores, most of it for preparing them.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

SHARD = 250_000  # pairs a file of text
DISTINCT = 20  # files, of which the others are links
RECIPE = """\
train_source: a.*.en.gz
train_target: a.*.de.gz
validation_size: 1000
max_length: 100
vocab_size: 8000
d_model: 64
d_ff: 128
num_heads: 4
encoder_layers: 1
decoder_layers: 1
tokens_per_batch: 4096
tokens_per_device: 4096
max_steps: 5
warmup_steps: 100
evaluate_every: 5
log_every: 1
validation_bleu: 0
average_checkpoints: 0
"""


def write_text(folder: Path, pairs: int, seed: int = 0) -> None:
    """Shards `a.00000.en.gz` and `a.00000.de.gz` of so many generated pairs."""
    random = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmwfgypbvk"))
    words = {}
    for side in ("en", "de"):
        sizes = np.clip(random.poisson(4.5, 20_000) + 1, 1, 12)
        words[side] = np.array(["".join(random.choice(letters, size)) for size in sizes], object)
    frequency = 1 / np.arange(1, 20_001)
    cumulative = np.cumsum(frequency / frequency.sum())
    for number, start in enumerate(range(0, pairs, SHARD)):
        size = min(SHARD, pairs - start)
        if number >= DISTINCT and size == SHARD:
            for side in words:
                os.link(folder / f"a.{number % DISTINCT:05d}.{side}.gz", folder / f"a.{number:05d}.{side}.gz")
            continue
        source = np.clip(random.lognormal(2.45, 0.32, size), 2, 80).astype(int)
        target = np.clip(source * random.normal(0.97, 0.15, size), 2, 80).astype(int)
        for side, lengths in (("en", source), ("de", target)):
            drawn = words[side][np.searchsorted(cumulative, random.random(lengths.sum()))].tolist()
            ends = np.cumsum(lengths).tolist()
            with gzip.open(folder / f"a.{number:05d}.{side}.gz", "wt", encoding="utf-8", compresslevel=1) as file:
                begin = 0
                for end in ends:
                    file.write(" ".join(drawn[begin:end]) + " .\n")
                    begin = end


def processes_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            pids += processes_of(int(child))
    return pids


def memory_of(pid: int, folder: Path) -> tuple[float, float]:
    """Anonymous memory, and mapped pages of files in a folder, in MB, over the process and its descendants.

    Both as proportional set size, which counts what processes share once.
    """
    anonymous = mapped = 0
    for process in processes_of(pid):
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            mappings = Path(f"/proc/{process}/smaps").read_text()
        except OSError:
            continue
        anonymous += int(dict(re.findall(r"^(\w+):\s+(\d+) kB", rollup, re.MULTILINE)).get("Pss_Anon", 0))
        path = ""
        for line in mappings.splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                path = line.split(maxsplit=5)[5] if line.count("/") else ""
            elif line.startswith("Pss:") and path.startswith(str(folder)):
                mapped += int(line.split()[1])
    return anonymous / 1024, mapped / 1024


def run(command: list[str], folder: Path, marks: dict[str, str]) -> dict[str, float]:
    """Run a command; seconds, peaks of memory in MB, and seconds and peaks until lines that begin with the marks."""
    begin, peaks, result = time.monotonic(), [0.0, 0.0], {}
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "vaswani_transformer", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    is_done = threading.Event()

    def sample() -> None:
        taken = 0.0
        while not is_done.wait(max(0.02, 19 * taken)):  # a twentieth of a core at most: both are needed
            started = time.thread_time()
            for index, value in enumerate(memory_of(process.pid, folder)):
                peaks[index] = max(peaks[index], value)
            taken = time.thread_time() - started

    sampler = threading.Thread(target=sample)
    sampler.start()
    lines = []
    for line in process.stdout:
        lines.append(line)
        for name, beginning in marks.items():
            if line.startswith(beginning) and name not in result:
                result[name] = time.monotonic() - begin
                result[f"{name} anonymous"] = peaks[0]
    status = process.wait()
    is_done.set()
    sampler.join()
    if status:
        sys.exit(f"{' '.join(command)} ended with status {status}:\n{''.join(lines)}")
    return result | {"seconds": time.monotonic() - begin, "anonymous": peaks[0], "mapped": peaks[1]}


def measure(pairs: int, workers: int, folder: Path) -> dict[str, float]:
    """All figures for so many pairs."""
    folder.mkdir()
    write_text(folder, pairs)
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    command = ["prepare", "recipe.yaml", "--output", "prepared", "--workers", str(workers), "--quiet"]
    preparation = run(command, folder, {})
    manifest = json.loads((folder / "prepared" / "manifest.json").read_text(encoding="utf-8"))
    part = manifest["parts"]["train"]
    training = start_training(folder, "prepared")
    size = sum(shard["bytes"] for shard in part["shards"])
    result = {f"prepare {name}": value for name, value in preparation.items()}
    result |= {f"train {name}": value for name, value in training.items()}
    return result | {"index bytes": part["index"]["bytes"] / part["pairs"], "shard bytes": size / part["pairs"]}


def start_training(folder: Path, prepared: str) -> dict[str, float]:
    """A few steps on a prepared folder."""
    marks = {"start": "batches:", "first step": "step 1 of"}
    return run(["train", "recipe.yaml", "--prepared", prepared, "--output", f"model-{prepared}"], folder, marks)


def enlarge(folder: Path, times: int) -> int:
    """Make `folder/enlarged`, in which each shard of `folder/prepared` is linked so many times; returns its pairs.

    Of such a folder only training can be measured, but without waiting for hours until it is prepared.
    """
    prepared, enlarged = folder / "prepared", folder / "enlarged"
    shutil.copytree(prepared, enlarged, ignore=shutil.ignore_patterns("train*"))
    manifest = json.loads((prepared / "manifest.json").read_text(encoding="utf-8"))
    part = manifest["parts"]["train"]
    shards = []
    for shard in part["shards"] * times:
        shards.append(shard | {"file": f"train-{len(shards):05d}.arrow"})
        os.link(prepared / shard["file"], enlarged / shards[-1]["file"])
    part["shards"] = shards
    for facts, names in ((part, ("pairs", "source_tokens", "target_tokens")),
                         (part["counts"], ("read", "kept", "empty", "too_long", "ratio"))):  # fmt: skip
        facts |= {name: times * facts[name] for name in names}
    index = enlarged / part["index"]["file"]
    np.save(index, np.tile(np.load(prepared / part["index"]["file"]), (1, times)))
    part["index"] |= {"bytes": index.stat().st_size, "sha256": hashlib.sha256(index.read_bytes()).hexdigest()}
    (enlarged / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return part["pairs"]


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, nargs="+", default=[1_000_000, 5_000_000], metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument(
        "--enlarged",
        type=int,
        default=36_000_000,
        metavar="N",
        help="start training on about so many pairs too, the last preparation's shards linked many times; 0: no",
    )
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder if none, removed at the end")
    arguments = parser.parse_args()
    if not Path("/proc/self/smaps_rollup").exists():
        parser.error("memory is read from /proc/PID/smaps_rollup, which is not there: run it on Linux")
    columns = {
        "prepare, s": "prepare seconds",
        "peak memory, MB": "prepare anonymous",
        "train: start, s": "train start",
        "first step, s": "train first step",
        "peak memory to it, MB": "train first step anonymous",
        "pages of the data, MB": "train mapped",
        "index, B a pair": "index bytes",
        "shards, B a pair": "shard bytes",
    }
    print(f"| pairs | {' | '.join(columns)} |\n|{'---:|' * (len(columns) + 1)}", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for pairs in arguments.pairs:
            folder = Path(name) / str(pairs)
            result = measure(pairs, arguments.workers, folder)
            shown = [f"{result[key]:,.{1 if unit.endswith(('s', 'pair')) else 0}f}" for unit, key in columns.items()]
            print(f"| {pairs:,} | {' | '.join(shown)} |", flush=True)
            if pairs == arguments.pairs[-1] and arguments.enlarged:
                number = enlarge(folder, max(1, arguments.enlarged // pairs))
                training = start_training(folder, "enlarged")
                result = dict.fromkeys(columns.values()) | {f"train {key}": value for key, value in training.items()}
                shown = [f"{result[key]:,.1f}" if result[key] is not None else "" for key in columns.values()]
                print(f"| {number:,} | {' | '.join(shown)} |", flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
