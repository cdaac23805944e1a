"""Peak memory of `vaswani translate` and `vaswani score` for files of several lengths: it should not grow with them.

    python scripts/benchmarks/translate_memory.py --lines 100000 1000000

A model of random weights, small enough that the command and not the arithmetic takes the time, and outputs of few
tokens. Prints a table in Markdown.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration, train_tokenizer
from vaswani_transformer.data.synthetic import generate_corpus

SEARCH = ["--beams", "1", "--max-new-tokens", "3", "--tokens-per-batch", "16000"]


def write_model(folder: Path, sentences: Sequence[str]) -> None:
    """A model folder with random weights."""
    tokenizer = train_tokenizer(sentences, vocab_size=500)
    sizes = {"d_model": 16, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_lines(path: Path, sentences: Sequence[str], number: int) -> None:
    """Random sentences, one a line."""
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            file.write(chance.choice(sentences) + "\n")


def run(arguments: Sequence[str], output: Path) -> tuple[float, float]:
    """Peak memory in MB and seconds of a command, which must succeed."""
    begin = time.monotonic()
    words = [sys.executable, "-m", "vaswani_transformer", *arguments, "--output", str(output)]
    child = os.posix_spawn(sys.executable, words, os.environ)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} failed")
    return usage.ru_maxrss / 1024, time.monotonic() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, nargs="+", default=[100_000, 1_000_000], metavar="N")
    options = parser.parse_args()
    sentences = sorted({source for source, _ in generate_corpus(2000, 10, 10).train})
    print("| command | lines | peak memory (MB) | seconds |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model, lines, output = (Path(folder) / name for name in ("model", "lines", "output"))
        write_model(model, sentences)
        for number in options.lines:
            write_lines(lines, sentences, number)
            files = {"translate": ["--input", str(lines), *SEARCH]}
            files["score"] = ["--source", str(lines), "--target", str(lines), "--tokens-per-batch", "16000"]
            for command, arguments in files.items():
                memory, seconds = run([command, str(model), *arguments], output)
                with output.open("rb") as file:
                    written = sum(1 for _ in file)
                assert written == number, f"{written} lines written for {number}"
                print(f"| `vaswani {command}` | {number:,} | {memory:,.0f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
