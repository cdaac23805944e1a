"""Train tiny models by Marian itself, and write them with Marian's own scores: `tests/fixtures/marian`.

    python scripts/make_marian_fixture.py tests/fixtures/marian

It needs `pymarian` 1.12.42 (Python 3.11, 604 MB), the tests do not. Each folder below the given one holds a model, its
vocabularies and settings as Marian writes them, and `scores.json`: for pairs of sentences the log-probability of each
target token (5 decimals, as Marian prints them) and their sum, of 6 decimals where the pair was given (`forced`) and of
6 digits where the target was found (`n_best`, whose targets are pieces).
"""

import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path

_MARIAN = "import sys, _pymarian; sys.exit(_pymarian.main(sys.argv[1:]))"
_COMMON = (
    "--cpu-threads 1 --seed 1 --mini-batch 64 --after 8e --learn-rate 0.01 --transformer-heads 2 --dec-depth 1"
    " --workspace 64 --overwrite --disp-freq 100 --keep-best --relative-paths --beam-size 3 --normalize 0.6"
)
_SYLLABLES = [first + last for first in "bdgklm" for last in "aeiou"]
_D16 = "--dim-emb 16 --transformer-dim-ffn 20 --enc-depth 1"
_D8 = "--dim-emb 8 --transformer-dim-ffn 12 --enc-depth"
_TWO, _ONE = "source.yml target.yml", "joint.yml joint.yml"
#: Options and vocabularies of each model.
MODELS = {
    "relu-two": (f"{_D16} --transformer-ffn-activation relu", _TWO),
    "swish-all": (f"{_D8} 2 --tied-embeddings-all", _ONE),
    "gelu-tied": (f"{_D8} 1 --tied-embeddings --transformer-ffn-activation gelu --transformer-postprocess-top n", _TWO),
    "src-spm": (
        f"{_D8} 1 --tied-embeddings-src --output-omit-bias --dim-vocabs 60 60 --sentencepiece-options"
        " --normalization_rule_name=identity",
        "joint.spm joint.spm",
    ),
    "new-learned": (
        f"{_D8} 1 --type transformer-new --transformer-train-position-embeddings --transformer-ffn-activation relu"
        " --max-length 40",
        _TWO,
    ),
}


def marian(command: str, arguments: str, folder: Path) -> str:
    """Run a command of Marian's in a folder; it may crash or hang without harm to this process."""
    done = subprocess.run(
        [sys.executable, "-c", _MARIAN, command, *arguments.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise SystemExit(f"marian {command} {arguments} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def write_corpus(folder: Path) -> None:
    """Sentences of a made-up language, and their words reversed and in capitals; sources have fewer kinds of words."""
    numbers = random.Random(1)
    words = ["".join(numbers.choices(_SYLLABLES, k=numbers.randint(1, 3))) for _ in range(40)]
    sources, targets = [], []
    for _ in range(2000):
        sentence = numbers.choices(words, k=numbers.randint(1, 9))
        sources.append(" ".join(sentence))
        targets.append(" ".join(word.upper() + numbers.choice(["", "", "X"]) for word in reversed(sentence)))
    (folder / "train.src").write_text("\n".join(sources) + "\n")
    (folder / "train.trg").write_text("\n".join(targets) + "\n")


def make(name: str, output: Path) -> None:
    """Train one model and write its scores of its own n-best translations, and of other pairs."""
    options, vocabularies = MODELS[name]
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder)
    if "joint.yml" in vocabularies:
        words = (folder / "train.src").read_text().split() + (folder / "train.trg").read_text().split()
        entries = ["</s>", "<unk>", *sorted(set(words))]
        (folder / "joint.yml").write_text("".join(f"{word}: {index}\n" for index, word in enumerate(entries)))
    kind = "" if "--type" in options else "--type transformer"
    marian(
        "train",
        f"{_COMMON} {kind} {options} --model model.npz --train-sets train.src train.trg --vocabs {vocabularies}",
        folder,
    )
    sources = (folder / "train.src").read_text().splitlines()[:5]
    sources.append(" ".join(sources[:3]))
    (folder / "in").write_text("\n".join(sources) + "\n")
    limit = "--max-length 40" if "new" in name else ""  # the rows of its position table
    common = f"--cpu-threads 1 --quiet {limit} --vocabs {vocabularies}"
    pieces = "--no-spm-decode" if "spm" in vocabularies else ""
    lines = marian(
        "decode",
        f"{common} --models model.npz --input in --beam-size 2 --n-best --word-scores --normalize 0.6 {pieces}",
        folder,
    )
    best = [_scored(line, sources) for line in lines.splitlines()]
    targets = (folder / "train.trg").read_text().splitlines()[2:7]
    (folder / "src").write_text("\n".join(sources[:5]) + "\n")
    (folder / "trg").write_text("\n".join(targets) + "\n")
    sums = marian("score", f"{common} --model model.npz --train-sets src trg --word-scores", folder)
    forced = [
        {"source": source, "target": target, "sum": float(line.split()[0]), "words": _numbers(line)}
        for source, target, line in zip(sources[:5], targets, sums.splitlines(), strict=True)
    ]
    for path in folder.iterdir():
        if path.name in ("train.src", "train.trg", "in", "src", "trg") or re.search(
            r"optimizer|progress|npz\.yml", path.name
        ):
            path.unlink()
    text = json.dumps({"n_best": best, "forced": forced}, ensure_ascii=False).replace("}, {", "},\n{")
    (folder / "scores.json").write_text(text + "\n", encoding="utf-8")


def _numbers(line: str) -> list[float]:
    return [float(number) for number in line.partition("WordScores=")[2].partition("|||")[0].split()]


def _scored(line: str, sources: list[str]) -> dict:
    """A line of an n-best list: number ||| words ||| WordScores= ... ||| F0= sum ||| normalised."""
    number, target, _, total, normalized = line.split(" ||| ")
    return {
        "source": sources[int(number)],
        "target": target,
        "words": _numbers(line),
        "sum": float(total.split()[-1]),
        "normalized": float(normalized),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", choices=MODELS)
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else MODELS:
        make(name, arguments.output)
