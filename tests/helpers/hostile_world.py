"""Everything that commands read, small, in one folder: made by the commands themselves, in one process."""

import gzip
import json
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import import_differences
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from conftest import TESTS, TINY_RECIPE
from experimenting import write_gum
from hostile_targets import EXPERIMENT, HAS_CTRANSLATE2
from model_folders import in_shards, pickle_weights
from random_trees import TINY
from training_runs import stop_after

from vaswani_transformer.cli.main import main
from vaswani_transformer.data import prepare
from vaswani_transformer.data.synthetic import generate_corpus, write_corpus
from vaswani_transformer.decoding.output import ResumableOutput, notes_path
from vaswani_transformer.recipes.recipe import load_recipe

SETTINGS = {"data_dir": "text", "max_steps": 4, "evaluate_every": 2, "average_checkpoints": 1, "num_beams": 2}
SENTENCES = "A small sentence.\nWords and more words.\nThe dog sees a cat.\n"


def build(folder: Path) -> None:
    os.chdir(folder)
    _write_texts()
    _train()
    _use_the_model()
    if HAS_CTRANSLATE2:
        _run("export", "model", "--output", "exported")
    _parse()
    _bring_others()


def _run(*words: str) -> None:
    assert main(list(words)) == 0, words


def _write_texts() -> None:
    corpus = generate_corpus(60, 10, 10)
    Path("text").mkdir()
    write_corpus(corpus, Path("text"))
    Path("recipe.yaml").write_text(yaml.safe_dump(TINY_RECIPE | SETTINGS, sort_keys=False))
    Path("in.txt").write_text(SENTENCES)
    Path("in.txt.gz").write_bytes(gzip.compress(SENTENCES.encode()))
    Path("reference.txt").write_text(SENTENCES)
    Path("prefix.txt").write_text("A\n\nThe\n")
    rows = [{"source": source, "target": target} for source, target in corpus.train]
    Path("pairs").mkdir()
    Path("pairs/pairs.tsv").write_text("source\ttarget\n" + "".join(f"{s}\t{t}\n" for s, t in corpus.train))
    Path("pairs/pairs.csv").write_text("source,target\n" + "".join(f'"{s}","{t}"\n' for s, t in corpus.train))
    Path("pairs/pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), "pairs/pairs.parquet")


def _train() -> None:
    """A run that a signal stopped, the finished one, its model, and prepared pairs: whole, and without a manifest."""
    stop_after(3, load_recipe("recipe.yaml", {"output": "stopped"}))
    shutil.copytree("stopped", "run")
    _run("train", "recipe.yaml", "--quiet", "--output", "run")
    shutil.copytree("run", "model", ignore=shutil.ignore_patterns("checkpoints", "*.py"))
    _run("prepare", "recipe.yaml", "--output", "prepared", "--quiet")
    _run("clean", "recipe.yaml", "--output", "cleaned", "--quiet")
    with patch.object(prepare, "_finish", side_effect=KeyboardInterrupt):
        assert main(["prepare", "recipe.yaml", "--output", "half", "--quiet"]) == 130


def _use_the_model() -> None:
    """Scores, an output whose translation was killed, and weights in shards."""
    _run("evaluate", "model", "--source", "in.txt", "--reference", "reference.txt", "--json", "scores.json")
    with patch.object(ResumableOutput, "finish"):
        _run("translate", "model", "--input", "in.txt", "--output", "out.txt")
    assert notes_path(Path("out.txt")).exists()
    Path("out.txt").write_text(Path("out.txt").read_text().partition("\n")[0] + "\n")  # as if killed in the second line
    in_shards(shards := Path(shutil.copytree("model", "shards")))
    for path in shards.glob("*.py"):
        path.unlink()


def _bring_others() -> None:
    """Models of other toolkits, one of them imported, one pickled, and a translation memory."""
    for make in (import_differences.marianmt, import_differences.fairseq):
        make(Path(make.__name__), torch.float32)
    pickle_weights(Path(shutil.copytree("marianmt", "pickled")))
    for name in ("relu-two", "src-spm"):
        shutil.copytree(TESTS / "fixtures/marian" / name, name)
    _run("import", "marianmt", "--output", "imported-marianmt")
    segments = [f"<tuv xml:lang='{language}'><seg>a %s b</seg></tuv>" for language in ("en", "de")]
    units = "".join(f"<tu>{''.join(segments)}</tu>\n".replace("%s", str(number)) for number in range(9))
    Path("memory.tmx").write_text(f"<tmx version='1.4'><header/><body>\n{units}</body></tmx>\n")


def _parse() -> None:
    """Trees, a parser, and a cell of an experiment."""
    write_gum(Path("gum"))
    Path("gold.trees").write_bytes(gzip.decompress(Path("gum/gum.dev.trees.gz").read_bytes()))
    Path("predicted.trees").write_bytes(Path("gold.trees").read_bytes())
    Path("words.txt").write_text("the dog sees a cat .\nshe runs .\n")
    trees = ["--trees", "gum/gum.train.trees", "--dev", "gold.trees"]
    _run("parse", "train", *trees, "--output", "parser", *TINY)
    _run(*EXPERIMENT, "--data-dir", "gum", "--only", "transformer")
