"""Train with and without near matches, and score both with an empty memory, the training text, and later text.

    python scripts/benchmarks/memory.py TEXT --output FOLDER [--minutes 60] [--later FILE ...] [OPTIONS OF TRAIN]

TEXT holds `train.tsv`, `valid.tsv` and `test.tsv`, whose first row names the languages. BLEU is by bands of similarity
of the test sources to the memory: "exact", 0.9 and more, and so on; with an empty memory by that to the training text.
"Copied" counts translations that are the target of their match, where that is not the reference. FOLDER gets the models
and `result.json`; the same command resumes. Minutes are of processor time (`small_text.py`).
"""

import argparse
import json
import os
import subprocess
from itertools import product
from pathlib import Path

from small_text import VASWANI

from vaswani_transformer import Translator, load_model
from vaswani_transformer.data.memory import Memory
from vaswani_transformer.data.parallel_text import load_pairs, pairs_of
from vaswani_transformer.evaluation.metrics import bleu_metric

BANDS = {"exact": 1.0, "90": 0.9, "70": 0.7, "50": 0.5, "below": 0.0}  # by their least similarity
TRAINED = {"plain": [], "fuzzy": ["--fuzzy-matches"]}


def train_model(text: Path, folder: Path, minutes: float, options: list[str]) -> None:
    """Train a model, unless it is there."""
    if not (folder / "model.safetensors").exists():
        data = ["--train-data", text / "train.tsv", "--validation-data", text / "valid.tsv", "--output", folder]
        command = [*VASWANI, "train", *data, "--max-minutes", minutes, "--quiet", *options]
        subprocess.run(list(map(str, command)), env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def bands_of(memory: Memory, sources: list[str]) -> tuple[list[str], list[str | None]]:
    """Return each source's band, and the target of its match."""
    bands, targets = [], []
    for source, matches in zip(sources, memory.near(sources), strict=True):
        known, similarity = memory.exact(source), matches[0][0] if matches else 0.0
        band = next(name for name, least in BANDS.items() if similarity >= least and (known or name != "exact"))
        bands.append(band)
        targets.append(known or (matches[0][2] if matches else None))
    return bands, targets


def main() -> None:
    """Train what is not trained yet, score all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", metavar="TEXT", type=Path)
    parser.add_argument("--output", metavar="FOLDER", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--later", metavar="FILE", nargs="*", default=[], help="pairs that come to the memory later")
    parser.add_argument("--test", metavar="PAIRS", type=int, default=1000, help="so many are translated")
    options, others = parser.parse_known_args()
    for name, more in TRAINED.items():
        train_model(options.text, options.output / name, options.minutes, [*others, *more])
    known = list(pairs_of(load_pairs(data=options.text / "train.tsv")))
    later = [pair for file in options.later for pair in pairs_of(load_pairs(data=file))]
    memories = {"training text": Memory(known)} | ({"and later": Memory(known + later)} if later else {})
    sources, references = zip(*list(pairs_of(load_pairs(data=options.text / "test.tsv")))[: options.test], strict=True)
    rows = []
    for name, kind in product(TRAINED, ("empty", *memories)):
        memory = memories.get(kind)
        bands, targets = bands_of(memory or memories["training text"], list(sources))
        outputs = list(Translator(*load_model(options.output / name, "cpu"), memory=memory).translate(sources))
        for band in BANDS:
            chosen = [number for number, own in enumerate(bands) if own == band]
            if chosen:
                texts, expected = ([side[number] for number in chosen] for side in (outputs, references))
                bleu = bleu_metric(expected).corpus_score(texts, [expected]).score
                copied = sum(outputs[n] == targets[n] != references[n] for n in chosen)
                rows.append([name, kind, band, len(chosen), round(bleu, 2), copied])
                print(*rows[-1], sep="\t", flush=True)
    columns = ["trained", "memory", "similarity", "sentences", "BLEU", "copied"]
    (options.output / "result.json").write_text(json.dumps({"columns": columns, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
