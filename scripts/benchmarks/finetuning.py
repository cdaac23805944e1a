"""Fine-tuning by rate, all weights or adapters: a small model of Multi30k, then 1,000 captions on sport.

    python scripts/benchmarks/finetuning.py FOLDER_OF_MULTI30K --output runs/finetuning

Captions whose English names a sport (3,400 of 29,000) are kept from a model that is trained on the others. It is then
fine-tuned on 1,000 of them by the recipe `finetune`, with other rates and batches, all weights or low-rank adapters.
Prints a Markdown table: perplexity and BLEU (beam 4) on 500 other captions on sport, and on 500 validation captions
that are not. A run that is finished is not repeated, an interrupted one is resumed.
"""

import argparse
import re
import sys
import time
from pathlib import Path

from vaswani_transformer import Translator, load_model, load_pairs, score_pairs, train
from vaswani_transformer.errors import UserError
from vaswani_transformer.evaluation.metrics import perplexity, score_translations
from vaswani_transformer.recipes.recipe import load_recipe

SPORT = re.compile(
    r"\b(balls?|soccer|football|baseball|basketball|tennis|teams?|players?|hockey|rac(es?|ing)|bikes?|bicycles?|ski|"
    r"skates?|skateboards?|games?|match|golf)\b",
    re.IGNORECASE,
)
MODEL = {
    "vocab_size": 4000, "d_model": 128, "d_ff": 512, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2,
    "dropout": 0.1, "tokens_per_batch": 2500, "tokens_per_device": 2500, "max_length": 100, "warmup_steps": 500,
    "evaluate_every": 250, "validation_bleu": 0, "best_by": "loss",
}  # fmt: skip
TESTED = 500  # pairs
PARTS = {"train": (0, 1000), "valid": (1000, 1300), "test": (1300, 1800)}  # of the captions on sport


def write_texts(data: Path, text: Path) -> None:
    """Two files of each part: general, general-valid, and sport's train, valid and test."""
    pairs = load_pairs(source=data / "train.en.gz", target=data / "train.de.gz")
    general_valid = load_pairs(source=data / "val.en.gz", target=data / "val.de.gz")
    parts, sport = {"general": [], "general-valid": []}, []
    for pair in zip(pairs["source"], pairs["target"], strict=True):
        (sport if SPORT.search(pair[0]) else parts["general"]).append(pair)
    for pair in zip(general_valid["source"], general_valid["target"], strict=True):
        if not SPORT.search(pair[0]):
            parts["general-valid"].append(pair)
    parts |= {f"sport-{name}": sport[start:end] for name, (start, end) in PARTS.items()}
    text.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        for side, language in enumerate(("en", "de")):
            (text / f"{name}.{language}").write_text("".join(row[side] + "\n" for row in rows), encoding="utf-8")


def files(text: Path, part: str, valid: str) -> dict[str, str]:
    """The recipe's fields for two parts."""
    names = {"train": part, "validation": valid}
    return {
        f"{use}_{side}": str(text / f"{name}.{language}")
        for use, name in names.items()
        for side, language in (("source", "en"), ("target", "de"))
    }


def run(recipe: str, output: Path, **fields) -> float:
    """Train, unless it has been done; returns the seconds that it took."""
    started = time.monotonic()
    if not (output / "model.safetensors").exists():
        train(load_recipe(recipe, {**fields, "output": str(output)}), progress=False)
    return time.monotonic() - started


def scores(folder: Path, text: Path) -> list[str]:
    """Perplexity and BLEU on sport and on the rest."""
    model, tokenizer = load_model(folder)
    cells = []
    for part in ("sport-test", "general-valid"):
        sources, targets = ((text / f"{part}.{side}").read_text("utf-8").splitlines()[:TESTED] for side in ("en", "de"))
        losses, counts = score_pairs(model, tokenizer, sources, targets)
        translations = list(Translator(model, tokenizer).translate(sources))
        cells += [f"{perplexity(losses, counts):.2f}", f"{score_translations(translations, targets)['bleu']:.1f}"]
    return cells


def row(*cells: str) -> None:
    """Print a line of the table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Train, fine-tune, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="FOLDER_OF_MULTI30K", type=Path)
    parser.add_argument("--output", metavar="FOLDER", type=Path, required=True)
    parser.add_argument("--steps", metavar="N", type=int, default=1500, help="of the first training (default: 1500)")
    parser.add_argument("--scales", metavar="X", type=float, nargs="*", default=[0.03, 0.1, 0.3])
    parser.add_argument("--lora-scales", metavar="X", type=float, nargs="*", default=[0.1, 0.3, 1.0])
    parser.add_argument("--rank", metavar="N", type=int, default=8)
    options = parser.parse_args()
    text, base = options.output / "text", options.output / "base"
    write_texts(options.data, text)
    run("small", base, **files(text, "general", "general-valid"), max_steps=options.steps, **MODEL)
    row("trained", "rate scale", "perplexity, sport", "BLEU, sport", "perplexity, rest", "BLEU, rest", "seconds")
    row("---", *["---:"] * 6)
    row("before", "", *scores(base, text), "")
    choices = [("all weights", None, scale) for scale in options.scales]
    choices += [(f"adapters of rank {options.rank}", options.rank, scale) for scale in options.lora_scales]
    for label, rank, scale in choices:
        output = options.output / f"{'weights' if rank is None else f'rank-{rank}'}-{scale:g}"
        fields = {"from_model": str(base), "learning_rate_scale": scale, "lora_rank": rank, "validation_bleu": 0}
        seconds = run("finetune", output, **files(text, "sport-train", "sport-valid"), **fields)
        row(label, f"{scale:g}", *scores(output, text), f"{seconds:.0f}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
