"""How fast a model of Marian's translates in four engines, side by side: Marian, ours, transformers, CTranslate2.

    python scripts/benchmarks/import_speed.py --npz MODEL.npz --vocabulary VOCAB.spm --imported FOLDER \\
        --source test.en --marian-python PYTHON

The engines are those of `scripts/import_engines.py`, all with the same beam, score and sentences, sorted by length in
batches of about 32. Each has a process of its own; they run in turn and in random order, so that only the ratios of one
run mean something; each figure is the best of the rounds, after one that does not count. Loading, converting and
quantising do not count, tokenising does. Only CPUs.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from in_turn import InTurn

sys.path.insert(0, str(Path(__file__).parent.parent))  # for import_engines

CONTESTANTS = ("Marian", "ours", "transformers", "CTranslate2")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--npz", type=Path, required=True, help="Marian's model")
    parser.add_argument("--vocabulary", type=Path, required=True, help="its .spm, of both languages")
    parser.add_argument("--imported", type=Path, required=True, help="the folder that `vaswani import` wrote")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--marian-python", default=sys.executable, metavar="PYTHON", help="one that has pymarian")
    parser.add_argument("--lines", type=int, default=320)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=1.0, help="exponent of the length in a hypothesis' score")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, help="a file for the rates in JSON")
    return parser.parse_args(arguments)


def contestants() -> list[tuple[str, str]]:
    """Engines and precisions; transformers has no int8 of its own on a CPU."""
    every = [(name, precision) for precision in ("float32", "int8") for name in CONTESTANTS]
    return [pair for pair in every if pair != ("transformers", "int8")]


def make_engine(name: str, precision: str, threads: int, options: argparse.Namespace, folder: Path):
    """The engine, ready to translate."""
    import torch
    import transformers
    from import_engines import CTranslate2Engine, MarianEngine, OurEngine, TransformersEngine

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    alpha = {"alpha": options.alpha}
    if name == "Marian":
        engine = MarianEngine(options.marian_python, options.npz, options.vocabulary, threads, **alpha)
        return engine if precision == "float32" else engine.int8(folder)
    if name == "ours":
        return OurEngine(options.imported, precision=precision, **alpha)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.imported)
    if name == "transformers":
        return TransformersEngine(options.npz, tokenizer, **alpha)
    return CTranslate2Engine(options.npz, tokenizer, folder, precision=precision, threads=threads, **alpha)


def take_part(name: str, precision: str, threads: int, options: argparse.Namespace, connection) -> None:
    """What a contestant's process does: for lines that come in, the seconds that they took go out."""
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(name, precision, threads, options, Path(folder))
        connection.send("ready")
        for lines in iter(connection.recv, None):
            started = time.perf_counter()
            engine.translate(lines, options.beams)
            connection.send(time.perf_counter() - started)
        if name == "Marian":
            engine.close()


def measure(threads: int, options: argparse.Namespace, lines: list[str]) -> dict[str, float]:
    """Sentences a second of each contestant."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for the processes that start
    players = InTurn(take_part, {", ".join(pair): (*pair, threads, options) for pair in contestants()})
    seconds = players.rounds(lines, options.rounds, first=lines[: len(lines) // 4])
    players.close()
    return {name: len(lines) / min(taken) for name, taken in seconds.items()}


def speed_table(rates: dict[str, dict[str, float]]) -> str:
    """Sentences a second by threads and contestant, and in brackets the ratio to Marian in float32."""
    heads = [f"{threads} thread{'s' * (threads != '1')}" for threads in rates]
    text = f"| sentences a second | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}\n"
    for name in next(iter(rates.values())):
        cells = [f"{part[name]:.1f} ({part[name] / part['Marian, float32']:.2f})" for part in rates.values()]
        text += f"| {name} | {' | '.join(cells)} |\n"
    return text


def main() -> None:
    """Run all and print the table."""
    from vaswani_transformer.data.text_files import read_lines

    options = parse_options()
    lines = [line.strip() for line in read_lines(options.source)][: options.lines]
    started = time.time()
    rates = {}
    for threads in options.threads:
        rates[str(threads)] = measure(threads, options, lines)
        print(f"{threads} threads done after {time.time() - started:.0f} s", file=sys.stderr)
    if options.output:
        options.output.write_text(json.dumps(rates, indent=1) + "\n", encoding="utf-8")
    print(speed_table(rates), end="")


if __name__ == "__main__":
    main()
