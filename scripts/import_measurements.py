"""A model that Marian trained, translated by Marian, this package, transformers and CTranslate2: does it matter which?

    python scripts/import_measurements.py --npz MODEL.npz --vocabulary VOCAB.spm --imported FOLDER \\
        --source test.en --reference test.de --marian-python PYTHON --output FOLDER

PYTHON is one that has pymarian, FOLDER what `vaswani import` wrote. Translates the sentences, and the same sentences
joined three and six at a time, with beam and greedy search; scores by BLEU and chrF with sacreBLEU's paired bootstrap;
compares the log-probabilities of the references with Marian's. Each engine takes part with Marian's positions and with
those that transformers computes, so that positions and search can be told apart. Writes measurements.json, the
translations and tables.md. Files may be gzipped. Speed: `scripts/benchmarks/import_speed.py`.
"""

import argparse
import importlib.metadata
import itertools
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from import_engines import CTranslate2Engine, MarianEngine, OurEngine, TransformersEngine, joined
from import_tables import tables
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from vaswani_transformer.data.text_files import read_lines

JOINS = (1, 3, 6)
LENGTHS = (0, 10, 14, 18, 30, 60, 100, 1000)  # of sources in tokens with the end token; the last is beyond all
PLACES = (0, 10, 20, 40, 80, 120, 1000)  # of target tokens, from 0
MARIAN, OURS, OTHER_POSITIONS = "Marian", "ours", "ours, transformers' positions"
RESAMPLES = 1000


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--npz", type=Path, required=True, help="Marian's model")
    parser.add_argument("--vocabulary", type=Path, required=True, help="its .spm, of both languages")
    parser.add_argument("--imported", type=Path, required=True, help="the folder that `vaswani import` wrote")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--marian-python", default=sys.executable, metavar="PYTHON", help="one that has pymarian")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--lines", type=int, help="only so many sentences, to try the script")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=1.0, help="exponent of the length in a hypothesis' score")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    for path in (options.npz, options.vocabulary, options.imported, options.source, options.reference):
        if not path.exists():
            parser.error(f"there is no {path}")
    return options


def engines(options: argparse.Namespace, folder: Path) -> dict:
    """Whoever takes part, by name; Marian first."""
    alpha = {"alpha": options.alpha}
    ours = OurEngine(options.imported, **alpha)
    tokenizer = ours.tokenizer
    return {
        MARIAN: MarianEngine(options.marian_python, options.npz, options.vocabulary, options.threads, **alpha),
        OURS: ours,
        OTHER_POSITIONS: OurEngine(options.imported, "transformers", **alpha),
        "ours, int8": OurEngine(options.imported, precision="int8", **alpha),
        "transformers": TransformersEngine(options.npz, tokenizer, **alpha),
        "transformers, Marian's positions": TransformersEngine(options.npz, tokenizer, "marian", **alpha),
        "CTranslate2": CTranslate2Engine(options.npz, tokenizer, folder, threads=options.threads, **alpha),
        "CTranslate2, Marian's positions": CTranslate2Engine(
            options.npz, tokenizer, folder, "marian", threads=options.threads, **alpha
        ),
    }


def compare(outputs: dict[str, list[str]], baseline: str, references: list[str]) -> dict[str, dict]:
    """Of each engine BLEU and chrF with their intervals, and p-values of differences from the baseline.

    All by sacreBLEU's paired bootstrap. `identical` is the share of outputs that are the baseline's.
    """
    names = [baseline, *(name for name in outputs if name != baseline)]
    metrics = {"BLEU": BLEU(), "chrF": CHRF()}
    _, scores = PairedTest([(name, outputs[name]) for name in names], metrics, [references], "bs", RESAMPLES)()
    rows = {}
    for place, name in enumerate(names):
        equal = [one == other for one, other in zip(outputs[name], outputs[baseline], strict=True)]
        rows[name] = {"identical": sum(equal) / len(equal)}
        for metric, results in ((key.split("2")[0], value) for key, value in scores.items() if key != "System"):
            result = results[place]
            rows[name][metric] = {"score": result.score, "interval": result.ci, "p": result.p_value}
            rows[name][metric]["baseline"] = results[0].score
    return rows


def difference(metric, system: list[str], baseline: list[str], references: list[str]) -> dict:
    """What a metric gives a system beyond the baseline, and the middle 95% of that over resamples.

    sacreBLEU tests whether there is a difference, and does not return how large it may be.
    """
    places = np.random.default_rng(12345).integers(0, len(references), (RESAMPLES, len(references)))
    resampled, whole = [], []
    for outputs in (system, baseline):
        statistics = np.array(metric._extract_corpus_statistics(outputs, [references]), dtype=np.float64)
        whole.append(metric._compute_score_from_stats(statistics.sum(0)).score)
        resampled.append([metric._compute_score_from_stats(statistics[rows].sum(0)).score for rows in places])
    differences = np.subtract(*resampled)
    return {"difference": whole[0] - whole[1], "between": np.quantile(differences, [0.025, 0.975]).tolist()}


def by_length(outputs: dict[int, dict], texts: dict, lengths: dict[int, list[int]]) -> list[dict]:
    """BLEU of each engine by tokens of the source, over all sets together."""
    rows = []
    for low, high in itertools.pairwise(LENGTHS):
        chosen = [(join, place) for join in JOINS for place, length in enumerate(lengths[join]) if low <= length < high]
        if len(chosen) < 20:  # BLEU of fewer means nothing
            continue
        references = [texts[join][1][place] for join, place in chosen]
        row = {"from": low, "below": high, "sources": len(chosen), "BLEU": {}}
        for name in outputs[1]:
            hypotheses = [outputs[join][name][place] for join, place in chosen]
            row["BLEU"][name] = BLEU().corpus_score(hypotheses, [references]).score
        rows.append(row)
    return rows


def forced_scores(named: dict, options: argparse.Namespace, texts: dict) -> dict[int, dict]:
    """How the log-probabilities of the references differ from Marian's, in nats; and by place in the target."""
    tokenizer = named[OURS].tokenizer
    scorers = {name: engine for name, engine in named.items() if "int8" not in name}
    for positions in ("transformers", "marian"):
        engine = TransformersEngine(options.npz, tokenizer, positions, pad_bias=-1e4)
        scorers["transformers, " * (positions == "transformers") + "no probability of <pad>"] = engine
        if positions == "marian":
            scorers["transformers, Marian's positions, no probability of <pad>"] = scorers.pop(
                "no probability of <pad>"
            )
    report = {}
    for join, (sources, references) in texts.items():
        expected = np.array(named[MARIAN].score(sources, references))
        tokens = sum(map(len, tokenizer(text_target=references)["input_ids"]))
        rows = {}
        for name, engine in scorers.items():
            scores = expected if name == MARIAN else np.array(engine.score(sources, references))
            rows[name] = {
                "largest": float(np.abs(scores - expected).max()),
                "mean": float(np.abs(scores - expected).mean()),
                "lower": float((scores < expected).mean()),
                "nats_per_token": float(scores.sum() / tokens),
            }
        report[join] = {"tokens": tokens, "engines": rows}
        print(f"log-probabilities of joins of {join} done", file=sys.stderr, flush=True)
    return report


def by_place(named: dict, texts: dict) -> list[dict]:
    """How much transformers' positions change a target token's log-probability, by its place, over all sets."""
    places, changes = [], []
    for sources, references in texts.values():
        pairs = [named[name].token_scores(sources, references) for name in (OURS, OTHER_POSITIONS)]
        for ours, theirs in zip(*pairs, strict=True):
            places += range(len(ours))
            changes += np.subtract(theirs, ours).tolist()
    places, changes = np.array(places), np.array(changes)
    rows = []
    for low, high in itertools.pairwise(PLACES):
        chosen = changes[(low <= places) & (places < high)]
        if len(chosen):
            row = {"from": low, "below": high, "tokens": len(chosen), "mean": float(np.abs(chosen).mean())}
            rows.append(row | {"largest": float(np.abs(chosen).max()), "signed": float(chosen.mean())})
    return rows


def machine(python: str) -> dict:
    """Processor and versions."""
    names = ("torch", "transformers", "ctranslate2", "sacrebleu")
    versions = {name: importlib.metadata.version(name) for name in names}
    code = "import importlib.metadata as m; print(m.version('pymarian'))"
    versions["pymarian"] = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
    processor = platform.processor() or platform.machine()
    if (path := Path("/proc/cpuinfo")).exists():
        lines = [line for line in path.read_text().splitlines() if line.startswith("model name")]
        processor = lines[0].partition(":")[2].strip() if lines else processor
    return {"processor": processor, "capability": torch.backends.cpu.get_cpu_capability(), "versions": versions}


def main() -> None:
    """Measure all and write the results."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    sides = [[line.strip() for line in read_lines(path)] for path in (options.source, options.reference)]
    texts = {join: [joined(side[: options.lines], join) for side in sides] for join in JOINS}
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        named = engines(options, Path(folder))
        tokenizer = named[OURS].tokenizer
        lengths = {join: [len(ids) for ids in tokenizer(sources)["input_ids"]] for join, (sources, _) in texts.items()}
        results = {"machine": machine(options.marian_python), "beams": options.beams, "alpha": options.alpha}
        results["sets"] = {
            join: {"sources": len(values), "mean tokens": float(np.mean(values))} for join, values in lengths.items()
        }
        for beams in (options.beams, 1):
            outputs = {}
            for join, (sources, references) in texts.items():
                outputs[join] = {}
                for name, engine in named.items():
                    outputs[join][name] = engine.translate(sources, beams)
                    path = options.output / f"{re.sub(r'[^a-zA-Z0-9]+', '-', name)}.x{join}.beam{beams}.txt"
                    path.write_text("\n".join(outputs[join][name]) + "\n", encoding="utf-8")
                    print(f"{time.time() - started:.0f} s: {path.name}", file=sys.stderr, flush=True)
                part = results.setdefault(f"beam {beams}", {}).setdefault(join, {})
                part["against Marian"] = compare(outputs[join], MARIAN, references)
                pair = {name: outputs[join][name] for name in (OURS, OTHER_POSITIONS, "ours, int8")}
                part["positions"] = compare(pair, OURS, references)
                for name in pair:
                    for metric, scorer in (("BLEU", BLEU()), ("chrF", CHRF())):
                        values = difference(scorer, pair[name], pair[OURS], references)
                        part["positions"][name][metric] |= values
            if beams == options.beams:
                results["by length"] = by_length(outputs, texts, lengths)
        results["scores"] = forced_scores(named, options, texts)
        results["by place"] = by_place(named, texts)
        named[MARIAN].close()
    text = json.dumps(results, indent=1, default=float)  # some are numpy's
    (options.output / "measurements.json").write_text(text + "\n", encoding="utf-8")
    page = tables(json.loads(text))
    (options.output / "tables.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
