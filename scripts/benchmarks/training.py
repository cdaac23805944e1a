"""Training speed side by side: `vaswani train`, Marian and Seq2SeqTrainer, a bare torch.nn.Transformer loop.

    python scripts/benchmarks/training.py FOLDER_OF_MULTI30K
    python scripts/benchmarks/training.py                       # generated pairs, about as long
    python scripts/benchmarks/training.py --by device --device cuda --preset big --batch-tokens 25000 --vocab-size 37000

One tokenizer, one model size, the same pairs. Each contestant trains in a process of its own, and they take turns in
random order, several rounds. A clock outside reads the log that each writes after every step: start-up and the first
steps do not count, and the process is ended when its time is up. Ratios are taken within each round, and the median of
the rounds is shown. On a machine that others use too only "CPU seconds" mean something.

`vaswani train` is the command itself. Marian trains as transformers' documentation has it: Seq2SeqTrainer,
DataCollatorForSeq2Seq, group_by_length, label smoothing by the Trainer, as many pairs a batch as ours has on average.
The bare loop is torch.nn.Transformer at its best: our token batches made before the clock starts, bf16 autocast, fused
Adam, tied embeddings, torch's own label smoothing, and in a second row malloc keeping freed memory, as ours does.

With --by device, for a GPU, ours alone trains: padded and without padding, eager and compiled. Steps are timed by the
device's events instead of by a log, and some are profiled: a picture (PNG) and a trace (.json.gz, for ui.perfetto.dev)
of each go to --pictures.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from process_clock import Watched, watch
from training_contestants import (
    BARE,
    CONTESTANTS,
    LOG,
    MARIAN,
    OURS,
    SIZES,
    add_whole_numbers,
    flops_per_target_token,
    our_command,
    prepare,
    train_bare,
    train_marian,
    vaswani_config,
)
from training_on_device import ROWS, train_ours
from training_on_device import table as device_table

EARLIER = f"{OURS}, earlier"


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="folder with train.en.gz and train.de.gz; none: generated pairs")
    parser.add_argument("--pairs", type=int, default=29_000, help="pairs to generate without a folder")
    parser.add_argument("--preset", help="model of the paper instead of the sizes below: base or big")
    add_whole_numbers(parser, **SIZES, batch_tokens=4096, rounds=3, threads=0, seed=0)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--warm-up", type=float, default=6.0, help="seconds of training that do not count")
    parser.add_argument("--seconds", type=float, default=25.0, help="seconds of training that count")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    what = "a checkout of an earlier commit: one more row, `vaswani train` of then"
    parser.add_argument("--earlier", metavar="FOLDER", help=what)
    parser.add_argument("--only", nargs="+", choices=[*CONTESTANTS, *ROWS], help="some of the contestants")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="OPTIONS", help="one more row of ours: --variant=--compile"
    )
    parser.add_argument("--by", choices=["log", "device"], default="log", help="what takes the time")
    add_whole_numbers(parser, warm_up_steps=20, steps=100, profiled_steps=5, device_tokens=0)
    parser.add_argument("--pictures", default="profiles", help="folder of pictures and traces, with --by device")
    parser.add_argument("--folder", help="where to work; kept. None: a temporary one")
    parser.add_argument("--contestant", choices=[*CONTESTANTS, *ROWS, "peak"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no NVIDIA GPU here")
    if options.earlier and options.by == "device":
        parser.error("--earlier is timed by the log: leave out --by device")
    if options.preset:
        sizes = {"base": (512, 2048, 8, 6), "big": (1024, 4096, 16, 6)}
        if options.preset not in sizes:
            parser.error(f"there is no preset {options.preset}: base or big")
        options.d_model, options.d_ff, options.heads, options.layers = sizes[options.preset]
    return options


def measure_peak(options: argparse.Namespace) -> None:
    """Operations a second of a large matrix product in float32 and bf16."""
    results = {}
    size = 8192 if options.device == "cuda" else 2048
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.randn(size, size, device=options.device, dtype=dtype) for _ in range(2))
        rates = []
        for _ in range(10):
            started = time.perf_counter()
            left @ right
            if options.device == "cuda":
                torch.cuda.synchronize()
            rates.append(2 * size**3 / (time.perf_counter() - started))
        results[str(dtype).removeprefix("torch.")] = max(rates)
    print(json.dumps(results))


def peak_rates(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """`measure_peak` in a process of its own."""
    command = [sys.executable, __file__, "--contestant", "peak", "--device", options.device]
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(options.threads)} if options.threads else {})}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def run_contestant(name: str, options: argparse.Namespace, folder: Path) -> Watched:
    """One contestant's turn."""
    shutil.rmtree(folder / "output", ignore_errors=True)
    (folder / LOG).unlink(missing_ok=True)
    log = folder / LOG
    if name.startswith(OURS):  # `python -m` takes the package of the folder that it is started in
        more = ["--precision", CONTESTANTS[name]["precision"]] if CONTESTANTS.get(name) else []
        if name not in (*CONTESTANTS, EARLIER):
            more = name.removeprefix(OURS).split()
        command, log = our_command(options, folder, more), folder / "output" / "training_log.jsonl"
    else:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--contestant", name]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    if options.threads:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with (folder / "output.txt").open("w") as output:
        place = options.earlier if name == EARLIER else None
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=place)
        try:
            return watch(process, log, options.warm_up, options.seconds, options.device)
        except RuntimeError as error:
            last = (folder / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"{name} {error}: {' '.join(last)}") from error


def run_on_device(name: str, options: argparse.Namespace, folder: Path) -> dict:
    """One row of ours in a process of its own, by the device's clock."""
    shutil.rmtree(folder / "output", ignore_errors=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--contestant", name]
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(options.threads)} if options.threads else {})}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def middle(values: list[float]) -> float:
    """The median of what was measured."""
    return median(values) if values else float("nan")


def ratio(rows: dict[str, list[dict]], name: str, other: str, key: str) -> str:
    """Median over the rounds of one contestant's measure over another's in the same round."""
    if other not in rows:
        return "-"
    value = middle([mine[key] / theirs[key] for mine, theirs in zip(rows[name], rows[other], strict=True)])
    return f"{value:.2f}" if value == value else "-"


def table(rows: dict[str, list[dict]], peaks: list[dict], flops: float, options: argparse.Namespace) -> str:
    """The results in Markdown."""
    bare = next((name for name in rows if name.startswith(f"{BARE}, ")), BARE)
    header = (
        "| training | target tokens/s | times Marian | positions/s | times the bare loop | padding"
        " | share of the peak, bf16 | float32 | peak memory (GiB) | target tokens/CPU s | times Marian"
        " | positions/CPU s, times the bare loop |"
    )
    lines = [header, "|---" * 12 + "|"]
    peak = {name: middle([measured[name] for measured in peaks]) for name in peaks[0]}
    for name, rounds in rows.items():
        value = {key: middle([row[key] for row in rounds]) for key in rounds[0]}
        shares = [f"{value['target tokens/s'] * flops / peak[kind]:.0%}" for kind in ("bfloat16", "float32")]
        unknown = value["padding"] != value["padding"]
        cells = [
            name,
            f"{value['target tokens/s']:,.0f}",
            ratio(rows, name, MARIAN, "target tokens/s"),
            "-" if unknown else f"{value['positions/s']:,.0f}",
            ratio(rows, name, bare, "positions/s"),
            "-" if unknown else f"{value['padding']:.1%}",
            *shares,
            f"{value['memory'] / 2**30:.2f}",
            f"{value['target tokens/CPU s']:,.0f}",
            ratio(rows, name, MARIAN, "target tokens/CPU s"),
            ratio(rows, name, bare, "positions/CPU s"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    spread = {name: [f"{row['target tokens/s']:,.0f}" for row in rounds] for name, rounds in rows.items()}
    of_rounds = "; ".join(f"{name} {', '.join(values)}" for name, values in spread.items())
    threads = options.threads or torch.get_num_threads()
    return "\n".join(
        [
            f"Matrix products: {peak['float32'] / 1e9:,.0f} GFLOP/s in float32, {peak['bfloat16'] / 1e9:,.0f} in bf16"
            f" ({options.device}, {threads} threads, torch {torch.__version__}); the model takes"
            f" {flops / 1e6:,.1f} MFLOP a target token, forward and backward, its source's share included.",
            "",
            *lines,
            "",
            f"Positions are tokens and padding of both sides. Target tokens/s of each round: {of_rounds}.",
        ]
    )


def main() -> None:
    """All contestants in turns, then the table."""
    options = parse_options()
    if options.contestant == "peak":
        measure_peak(options)
        return
    if options.contestant:
        if options.contestant in ROWS:
            config = vaswani_config(options, dropout=options.dropout)
            train_ours(options, Path(options.folder), options.contestant, config)
            return
        settings = CONTESTANTS[options.contestant]
        if options.contestant.startswith(MARIAN):
            train_marian(options, Path(options.folder), **settings)
        else:
            train_bare(options, Path(options.folder), **settings)
        return
    began = time.monotonic()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="benchmark_training_")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    by_device = options.by == "device"
    names = options.only or list(ROWS if by_device else CONTESTANTS)
    names += [f"{OURS} {variant}" for variant in options.variant] + [EARLIER] * bool(options.earlier)
    try:
        prepare(options, folder)
        rows, peaks, order = {name: [] for name in names}, [], random.Random(options.seed)
        for round_ in range(options.rounds):
            peaks.append(peak_rates(options, folder))
            for name in order.sample(names, len(names)):
                if by_device:
                    rows[name].append(run_on_device(name, options, folder))
                    continue
                rows[name].append(run_contestant(name, options, folder).rates())
                shown = f"{rows[name][-1]['target tokens/s']:,.0f} target tokens/s"
                print(f"round {round_ + 1}: {name}: {shown}", file=sys.stderr, flush=True)
        flops = flops_per_target_token(options, folder)
        if by_device:
            peak = {name: middle([measured[name] for measured in peaks]) for name in peaks[0]}
            print(device_table(rows, peak, flops, options))
            return
        print(table(rows, peaks, flops, options))
        print(f"\n{(time.monotonic() - began) / 60:.1f} minutes.")
    finally:
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
