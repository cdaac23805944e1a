"""What each ingredient of the paper is worth: small models on Multi30k that differ from a baseline in one setting.

    python scripts/benchmarks/ablations.py FOLDER_OF_MULTI30K --output runs/ablations
    python scripts/benchmarks/ablations.py FOLDER_OF_MULTI30K --output runs/ablations --report   # the tables so far

Runs that are finished are not repeated, an interrupted one goes on; `--only NAME` trains some of them, `--list` names
them. Every model is scored on test_2016_flickr: the last checkpoint and the average of the last five, and the baseline
with several searches. `docs/reproducing.md` holds the tables and says where they came from.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

BASELINE = {
    "train_source": "train.en.gz", "train_target": "train.de.gz",
    "validation_source": "val.en.gz", "validation_target": "val.de.gz", "validation_bleu": 0,
    "vocab_size": 6000, "d_model": 128, "d_ff": 512, "num_heads": 4, "encoder_layers": 3, "decoder_layers": 3,
    "dropout": 0.1, "max_length": 100, "tokens_per_batch": 4096, "tokens_per_device": 4096,
    "max_steps": 1800, "warmup_steps": 800, "evaluate_every": 120, "keep_checkpoints": 5, "average_checkpoints": 5,
}  # fmt: skip
# Steps and warmup follow the batch where the same number of epochs is meant.
VARIANTS = {
    "baseline": {},
    "baseline, seed 1": {"seed": 1},
    "baseline, seed 2": {"seed": 2},
    "no label smoothing": {"label_smoothing": 0.0},
    "batches of 1,024 tokens, as many steps": {"tokens_per_batch": 1024},
    "batches of 1,024 tokens, as many epochs": {
        "tokens_per_batch": 1024, "max_steps": 7200, "warmup_steps": 3200, "evaluate_every": 480,
    },
    "batches of 16,384 tokens, as many epochs": {
        "tokens_per_batch": 16384, "max_steps": 450, "warmup_steps": 200, "evaluate_every": 30,
    },
    "warmup of 100 steps": {"warmup_steps": 100},
    "initialised with normal(0, 0.02)": {"initialisation": "normal"},
    "no dropout": {"dropout": 0.0},
}  # fmt: skip
SEARCHES = {
    "beam 4, alpha 0.6": {"num_beams": 4, "length_penalty": 0.6},
    "beam 4, alpha 0": {"num_beams": 4, "length_penalty": 0.0},
    "beam 4, alpha 1": {"num_beams": 4, "length_penalty": 1.0},
    "beam 1": {"num_beams": 1},
    "beam 10, alpha 0.6": {"num_beams": 10, "length_penalty": 0.6},
}
CHOSEN = "beam 4, alpha 0.6"


def folder_of(options: argparse.Namespace, name: str) -> Path:
    """Where a variant's run lies."""
    return Path(options.output) / "".join(letter if letter.isalnum() else "-" for letter in name)


def normal_initialisation(module) -> None:
    """transformers' usual initial weights, `normal(0, 0.02)`, in place of the model's own."""
    import torch

    if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
        torch.nn.init.normal_(module.weight, std=0.02)
    if getattr(module, "bias", None) is not None:
        torch.nn.init.zeros_(module.bias)


def train_one(options: argparse.Namespace, name: str) -> None:
    """Train one variant, then score its last checkpoint and the average of the last five."""
    import torch

    from vaswani_transformer import load_recipe, train
    from vaswani_transformer.training import run as training_module

    torch.set_num_threads(options.threads)
    folder = folder_of(options, name)
    changes = dict(VARIANTS[name])
    initialisation = changes.pop("initialisation", None)
    settings = BASELINE | changes | {"data_dir": options.data, "tokenizer": options.tokenizer, "output": str(folder)}
    make = training_module.new_model

    def make_with_normal_weights(*arguments):
        model = make(*arguments)
        if initialisation is not None:
            torch.manual_seed(0)
            model.apply(normal_initialisation)
            model.tie_weights()
        return model

    if not (folder / "model.safetensors").exists():
        with mock.patch.object(training_module, "new_model", make_with_normal_weights):
            train(load_recipe("small", {**settings, "best_by": "loss", "early_stopping": 0}), progress=False)
    scores = score(options, folder, list(SEARCHES) if name == "baseline" else [CHOSEN])
    (folder / "scores.json").write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")


def score(options: argparse.Namespace, folder: Path, searches: list[str]) -> dict:
    """Test BLEU and validation loss of the last checkpoint and of the average, with each of the searches."""
    from safetensors.torch import load_file

    from vaswani_transformer import TranslationMetric, Translator, average_checkpoints, load_model, load_pairs
    from vaswani_transformer.training.run_folder import complete_checkpoints

    pairs = load_pairs(**{
        side: Path(options.data) / f"test_2016_flickr.{language}.gz"
        for side, language in (("source", "en"), ("target", "de"))
    })  # fmt: skip
    model, tokenizer = load_model(folder, "cpu")
    checkpoints = complete_checkpoints(folder / "checkpoints")[-5:]
    weights = {"last": load_file(checkpoints[-1] / "model.safetensors"), "average": average_checkpoints(checkpoints)}
    result = {}
    for label, state in weights.items():
        model.load_state_dict(state, strict=False)
        model.tie_weights()
        result[label] = {}
        for search in searches:
            translator = Translator(model, tokenizer, 2048, **SEARCHES[search])
            translations = list(translator.translate(list(pairs["source"])))
            metric = TranslationMetric().compute(predictions=translations, references=list(pairs["target"]))
            result[label][search] = {
                "bleu": metric["bleu"], "chrf": metric["chrf"], "signature": metric["bleu_signature"],
                "length_ratio": sum(len(text.split()) for text in translations)
                / sum(len(text.split()) for text in pairs["target"]),
            }  # fmt: skip
    return result


def report(options: argparse.Namespace) -> None:
    """Print the tables of the variants that are finished."""
    done = {name: folder_of(options, name) / "scores.json" for name in VARIANTS}
    done = {name: json.loads(path.read_text()) for name, path in done.items() if path.exists()}
    if "baseline" not in done:
        sys.exit("error: the baseline is not there yet: run without --report")
    seeds = [scores for name, scores in done.items() if name.startswith("baseline")]
    print("| setting | last checkpoint | average of 5 | to the baseline's average |\n|---|---|---|---|")
    reference = done["baseline"]["average"][CHOSEN]["bleu"]
    for name, scores in done.items():
        last, average = (scores[kind][CHOSEN]["bleu"] for kind in ("last", "average"))
        print(f"| {name} | {last:.2f} | {average:.2f} | {average - reference:+.2f} |")
    values = [scores["average"][CHOSEN]["bleu"] for scores in seeds]
    print(f"\n{len(values)} seeds of the baseline: {min(values):.2f} to {max(values):.2f} (average of 5 checkpoints)")
    print("\n| search, baseline | last checkpoint | average of 5 | words to the reference's |\n|---|---|---|---|")
    for search in SEARCHES:
        last, average = (done["baseline"][kind][search] for kind in ("last", "average"))
        print(f"| {search} | {last['bleu']:.2f} | {average['bleu']:.2f} | {average['length_ratio']:.3f} |")
    print(f"\n{done['baseline']['average'][CHOSEN]['signature']}")


def make_tokenizer(options: argparse.Namespace) -> None:
    """One vocabulary for all runs."""
    from itertools import chain

    from vaswani_transformer import train_tokenizer
    from vaswani_transformer.data.parallel_text import read_lines

    if (Path(options.tokenizer) / "tokenizer.json").exists():
        return
    lines = chain.from_iterable(read_lines(Path(options.data) / f"train.{side}.gz") for side in ("en", "de"))
    train_tokenizer(lines, vocab_size=BASELINE["vocab_size"]).save_pretrained(options.tokenizer)


def main() -> None:
    """Train what is missing, a process for each, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", metavar="FOLDER_OF_MULTI30K", help="with train, val and test_2016_flickr .en.gz, .de.gz"
    )
    parser.add_argument("--output", default="runs/ablations", help="folder for the runs")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="NAME", help="train these")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--list", action="store_true", help="name the variants and stop")
    parser.add_argument("--report", action="store_true", help="print the tables of what is finished, train nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tokenizer = str(Path(options.output) / "tokenizer")
    if options.list:
        print("\n".join(VARIANTS))
        return
    if options.report:
        report(options)
        return
    if options.one:
        train_one(options, options.one)
        return
    make_tokenizer(options)
    names = options.only or list(VARIANTS)
    waiting = [name for name in names if not (folder_of(options, name) / "scores.json").exists()]
    running: dict[subprocess.Popen, str] = {}
    failed = []
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            name = waiting.pop(0)
            command = [sys.executable, __file__, options.data, "--output", options.output]
            command += ["--threads", str(options.threads), "--one", name]
            running[subprocess.Popen(command, env=environment)] = name
            print(f"started: {name}", flush=True)
        process = next((one for one in running if one.poll() is not None), None)
        if process is None:
            next(iter(running)).wait() if len(running) == 1 else os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            continue
        name = running.pop(process)
        print(f"{'finished' if process.returncode == 0 else 'FAILED'}: {name}", flush=True)
        failed += [name] if process.returncode else []
    if failed:
        sys.exit(f"error: these runs failed, see above: {', '.join(failed)}")
    report(options)


if __name__ == "__main__":
    main()
