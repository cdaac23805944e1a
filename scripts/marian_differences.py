"""How far models that Marian trained are from Marian when imported, as rows of a Markdown table.

    python scripts/marian_differences.py [--marian PYTHON]

The models are those of `tests/fixtures/marian`, with log-probabilities that Marian printed with 5 decimals (0.000005 is
its rounding). With the Python of an environment that has pymarian, 200 random sentences are translated by both too.
"""

import argparse
import json
import random
import subprocess
import tempfile
from pathlib import Path

import torch
import yaml

from vaswani_transformer import Translator, import_model, load_model

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "marian"


def differences(folder: Path, dtype: torch.dtype) -> tuple[float, float]:
    """The largest of a token's log-probability, and of a given target's, of the pairs in `scores.json`."""
    model, tokenizer = load_imported(folder)
    model = model.to(dtype)
    words, sums = [], []
    scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    target = tokenizer.side("target") if hasattr(tokenizer, "side") else tokenizer
    for pair in scores["forced"] + scores["n_best"]:
        ids = tokenizer(text_target=pair["target"]).input_ids
        if "normalized" in pair:  # these are pieces
            ids = [*target.convert_tokens_to_ids(pair["target"].split()), tokenizer.eos_token_id]
        labels = torch.tensor([ids])
        encoded = tokenizer(pair["source"], return_tensors="pt")
        with torch.no_grad():
            logits = model(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask, labels=labels).logits
        ours = logits.log_softmax(-1).gather(-1, labels[..., None])[0, :, 0]
        theirs = torch.tensor(pair["words"], dtype=dtype)
        words.append(float((ours[: len(theirs)] - theirs).abs().max()))
        if "normalized" not in pair:
            sums.append(abs(float(ours.sum()) - pair["sum"]))
    return max(words), max(sums)


def load_imported(folder: Path):
    """A fixture as `vaswani import` makes it."""
    with tempfile.TemporaryDirectory() as place:
        return load_model(import_model(folder, Path(place) / "model").folder, "cpu")


def identical(folder: Path, python: Path, beams: int) -> int:
    """How many of 200 sentences both translate to the same words."""
    numbers = random.Random(0)
    known = json.loads((folder / "scores.json").read_text(encoding="utf-8"))["n_best"]
    words = sorted({word for pair in known for word in pair["source"].split()})
    lines = [" ".join(numbers.choices(words, k=numbers.randint(1, 10))) for _ in range(200)]
    theirs = _marian(folder, python, beams, lines)
    model, tokenizer = load_imported(folder)
    settings = {"num_beams": beams, "max_extra_tokens": 0, "length_penalty": 0.6}
    ours = list(Translator(model, tokenizer, **settings).translate(lines))
    return sum(one.strip() == other.strip() for one, other in zip(ours, theirs, strict=True))


def _marian(folder: Path, python: Path, beams: int, lines: list[str]) -> list[str]:
    code = "import sys, _pymarian; sys.exit(_pymarian.main(sys.argv[1:]))"
    names = yaml.safe_load((folder / "model.npz.decoder.yml").read_text())["vocabs"]
    vocabularies = " ".join(Path(name).name for name in names)  # from Marian's training, relative to another folder
    options = f"decode -m model.npz -v {vocabularies} --beam-size {beams} --normalize 0.6 --cpu-threads 1 --quiet"
    options += " --mini-batch 1 --max-length 40 --max-length-factor 1"
    command = [str(python), "-c", code, *options.split()]
    done = subprocess.run(
        command, cwd=folder, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout.splitlines()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--marian", type=Path, metavar="PYTHON", help="a Python with pymarian")
    marian = parser.parse_args().marian
    print("| model | a token's log-probability, float32, float64 | a target's | greedy, beam 4 identical of 200 |")
    print("|---|---|---|---|")
    for folder in sorted(FIXTURES.iterdir()):
        token, target = zip(*(differences(folder, dtype) for dtype in (torch.float32, torch.float64)), strict=True)
        found = "" if marian is None else ", ".join(str(identical(folder, marian, beams)) for beams in (1, 4))
        shown = (", ".join(f"{value:.1e}" for value in values) for values in (token, target))
        print(f"| {folder.name} | {' | '.join(shown)} | {found} |", flush=True)


if __name__ == "__main__":
    main()
