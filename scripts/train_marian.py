"""Train a small English-German model on Multi30k with Marian itself, on one core of a CPU.

    PYTHON scripts/train_marian.py FOLDER_OF_MULTI30K --output FOLDER --minutes 70

PYTHON is one that has pymarian and sentencepiece (`pip install pymarian==1.12.42 sentencepiece`). Trains on the pairs
and, as many tokens again, on pairs joined two to six at a time, so that the model has seen the later positions; one
SentencePiece vocabulary of 8,000. Stops at the end of the time; started again, it continues. The model is model.npz in
FOLDER, its weights those of exponential smoothing.
"""

import argparse
import gzip
import random
import subprocess
import sys
from pathlib import Path

LANGUAGES = ("en", "de")
OPTIONS = """
    --type transformer --dim-emb 256 --enc-depth 3 --dec-depth 3 --transformer-dim-ffn 512 --transformer-heads 4
    --transformer-ffn-activation swish --transformer-postprocess dan --transformer-postprocess-emb d
    --tied-embeddings-all --transformer-dropout 0.15 --label-smoothing 0.1 --max-length 200 --mini-batch-words 800
    --mini-batch 1000 --maxi-batch 200 --optimizer adam --optimizer-params 0.9 0.98 1e-09 --learn-rate 0.001
    --lr-warmup 800 --lr-decay-inv-sqrt 1200 --clip-norm 1 --cost-type ce-mean-words --exponential-smoothing 0.002
    --cpu-threads 1 --data-threads 1 --workspace 1500 --seed 17 --disp-freq 100u --valid-freq 1000u --keep-best
    --valid-metrics ce-mean-words perplexity --valid-mini-batch 32 --save-freq 500u --early-stopping 0
"""


def with_joins(pairs: list[tuple[str, str]], seed: int = 1) -> list[tuple[str, str]]:
    """All pairs, and all of them again in random order joined two to six at a time; shuffled."""
    generator, start = random.Random(seed), 0
    order, chosen = list(pairs), list(pairs)
    generator.shuffle(order)
    while start < len(order):
        count = generator.randint(2, 6)
        chosen.append(tuple(" ".join(texts) for texts in zip(*order[start : start + count], strict=True)))
        start += count
    generator.shuffle(chosen)
    return chosen


def prepare(data: Path, folder: Path) -> None:
    """Write the text and the vocabulary."""
    import sentencepiece

    for name in ("train", "val"):
        sides = []
        for language in LANGUAGES:
            with gzip.open(data / f"{name}.{language}.gz", "rt", encoding="utf-8") as file:
                sides.append([line.rstrip("\n") for line in file])
            (folder / f"{name}.{language}").write_text("".join(f"{line}\n" for line in sides[-1]), encoding="utf-8")
        if name == "train":
            joined = zip(*with_joins(list(zip(*sides, strict=True))), strict=True)
            for language, lines in zip(LANGUAGES, joined, strict=True):
                (folder / f"joined.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=",".join(str(folder / f"train.{language}") for language in LANGUAGES), model_prefix=str(folder / "vocab"),
        vocab_size=8000, model_type="unigram", character_coverage=1.0, bos_id=-1, eos_id=0, unk_id=1, pad_id=-1,
        minloglevel=2,
    )  # fmt: skip
    (folder / "vocab.model").rename(folder / "vocab.spm")


def main() -> None:
    """Prepare if needed, then train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with train.en.gz, train.de.gz, val.en.gz and val.de.gz")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=70)
    options = parser.parse_args()
    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "vocab.spm").exists():
        prepare(options.data, folder)
    command = [
        *OPTIONS.split(), "--model", str(folder / "model.npz"), "--log", str(folder / "train.log"),
        "--train-sets", *(str(folder / f"joined.{language}") for language in LANGUAGES),
        "--valid-sets", *(str(folder / f"val.{language}") for language in LANGUAGES),
        "--vocabs", str(folder / "vocab.spm"), str(folder / "vocab.spm"),
    ]  # fmt: skip
    code = "import _pymarian, sys; _pymarian.Trainer(sys.argv[1]).train()"
    training = subprocess.Popen([sys.executable, "-c", code, " ".join(command)])
    try:
        training.wait(timeout=60 * options.minutes)
    except subprocess.TimeoutExpired:
        training.terminate()  # at which Marian writes its model and ends
        training.wait()


if __name__ == "__main__":
    main()
