"""`vaswani prepare` with the same tasks done by four engines: seconds, memory, and what a killed worker costs.

    python scripts/benchmarks/engines.py --pairs 2000000        # about 10 minutes; --kill: also kills a worker of each

The engines are processes of this machine as `vaswani prepare` starts them, datatrove's executor for one machine, Ray's
executor of datatrove, and Ray Data. Those that are not installed are left out. Seconds are of whole processes, each
engine in turn; memory is the most that the command and its processes had at once, in resident pages.
"""

import argparse
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from vaswani_transformer import train_tokenizer
from vaswani_transformer.data import prepare as preparation
from vaswani_transformer.data.engines import run_on_cluster, run_tasks
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.recipes.recipe import Recipe

ENGINES = ("local", "datatrove", "datatrove on Ray", "Ray Data")
ROUNDS = 3


def step(task, data, rank: int, world_size: int) -> None:
    """A task as a pipeline of datatrove."""
    task(rank, lambda pairs: None)


def by_datatrove(stages, folder: Path, workers: int) -> None:
    """Do the stages by datatrove's executor for one machine."""
    from datatrove.executor.local import LocalPipelineExecutor

    for name, task, number in stages:
        options = {"tasks": number, "workers": min(workers, number), "logging_dir": str(folder / name)}
        LocalPipelineExecutor([functools.partial(step, task)], **options).run()


def by_ray_data(stages, workers: int) -> None:
    """Do the stages by Ray Data, a row for each task."""
    import ray

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error")
    for _, task, number in stages:
        rows = ray.data.from_items([{"task": one} for one in range(number)], override_num_blocks=number)
        rows.map(functools.partial(ray_row, task), num_cpus=1, concurrency=workers).take_all()


def ray_row(task, row: dict) -> dict:
    """A task as a function of a row of Ray Data."""
    task(int(row["task"]), lambda pairs: None)
    return row


def prepare_by(engine: str, recipe: Recipe, folder: Path, workers: int) -> None:
    """What `prepare` does, by another engine."""
    train, validation = preparation.data_sources(recipe)
    settings = preparation.settings_of(recipe, train, validation)
    folder.mkdir(parents=True, exist_ok=True)
    preparation.start_or_resume(folder, settings)
    tasks = preparation.Preparation.of(recipe, folder, train, validation, settings)
    stages = [(name, functools.partial(tasks.run, name), tasks.tasks(name)) for name in tasks.stages]
    if engine == "local":
        for _, task, number in stages:
            run_tasks(task, number, workers)
    elif engine == "datatrove":
        by_datatrove(stages, folder / ".tasks" / "logs", workers)
    elif engine == "Ray Data":
        by_ray_data(stages, workers)
    else:
        options = {"workers": workers, "mem_per_cpu_gb": 1}
        run_on_cluster("ray", stages, folder / ".tasks" / "logs", options)


def watch(command: list[str], kill_after: float | None, limit: float) -> tuple[str, float, int]:
    """How a command ended, its seconds, and the most bytes that it and its processes had."""
    started, most, killed = time.monotonic(), 0, False
    process = psutil.Process(
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True).pid
    )
    ended = ""
    while not ended:
        children = process.children(recursive=True)
        most = max(most, sum(bytes_of(one) for one in (process, *children)))
        seconds = time.monotonic() - started
        if kill_after is not None and not killed and seconds > kill_after:
            busiest = max(children, key=lambda one: sum(one.cpu_times()[:2]), default=None)
            if busiest is not None:
                busiest.kill()
                killed = True
        try:
            ended = f"status {process.wait(0.2)}"
        except psutil.TimeoutExpired:
            if seconds > limit:
                ended = f"not ended after {limit:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)
    return ended, time.monotonic() - started, most


def bytes_of(process: psutil.Process) -> int:
    """Resident memory of a process; 0 if it has ended."""
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def digest(folder: Path) -> str:
    """One SHA-256 of all shards."""
    state = hashlib.sha256()
    for path in sorted(folder.glob("*.arrow")):
        state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()


def write_text(folder: Path, pairs: int) -> dict:
    """Generated pairs, the same ones again and again; the recipe's fields."""
    once = min(pairs, 50_000)
    write_corpus(generate_corpus(once, 500, 10), folder)
    lines = {side: (folder / f"train.{side}").read_text("utf-8") for side in ("en", "de")}
    for side, text in lines.items():
        with (folder / f"many.{side}").open("w", encoding="utf-8") as file:
            for _ in range(pairs // once):
                file.write(text)
    sentences = [line for text in lines.values() for line in text.splitlines()]
    train_tokenizer(sentences, vocab_size=4000).save_pretrained(folder / "tokenizer")
    return {
        "data_dir": str(folder), "train_source": "many.en", "train_target": "many.de",
        "tokenizer": str(folder / "tokenizer"),
        "validation_source": "validation.en", "validation_target": "validation.de", "max_length": 250,
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=2_000_000)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--kill", action="store_true", help="kill the busiest process of each engine in the middle")
    parser.add_argument("--one", nargs=3, metavar=("ENGINE", "RECIPE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        engine, recipe, folder = options.one
        fields = json.loads(Path(recipe).read_text("utf-8"))
        prepare_by(engine, Recipe(**fields), Path(folder), options.workers)
        return
    with tempfile.TemporaryDirectory() as name:
        folder, seconds, memory, digests = Path(name), {}, {}, {}
        (folder / "recipe.json").write_text(json.dumps(write_text(folder, options.pairs)), "utf-8")
        base = [sys.executable, __file__, "--workers", str(options.workers), "--one"]
        for turn in range(ROUNDS):
            for engine in ENGINES:
                output = folder / f"{engine} {turn}"
                ended, took, most = watch([*base, engine, str(folder / "recipe.json"), str(output)], None, 3600)
                if ended == "status 0":
                    seconds.setdefault(engine, []).append(took)
                    memory[engine] = max(memory.get(engine, 0), most)
                    digests[engine] = digest(output)
                    subprocess.run(["rm", "-r", str(output)], check=True)
        print(f"{options.pairs:,} pairs, {options.workers} workers, median of {ROUNDS} rounds\n")
        print("| engine | s | to local | memory, MB | the same shards |\n|---|---:|---:|---:|---|")
        middle = {engine: sorted(own)[len(own) // 2] for engine, own in seconds.items()}
        for engine, own in middle.items():
            same = "yes" if digests[engine] == digests["local"] else "no"
            print(f"| {engine} | {own:.1f} | {own / middle['local']:.2f} | {memory[engine] / 1e6:.0f} | {same} |")
        for engine in middle if options.kill else ():
            output, limit = folder / f"{engine} killed", 4 * middle[engine] + 60
            command = [*base, engine, str(folder / "recipe.json"), str(output)]
            ended, took, _ = watch(command, 0.6 * middle[engine], limit)
            print(f"\n{engine}, a worker killed: {ended} after {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
