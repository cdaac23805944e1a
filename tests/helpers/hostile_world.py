"""Everything that commands read, small, in one folder: made by the commands themselves, in one process."""

import gzip
import importlib.util
import json
import os
import signal
from pathlib import Path

import yaml
from conftest import TESTS
from experimenting import write_gum
from random_trees import TINY

TEXT_RECIPE = {
    "data_dir": "text", "train_source": "train.en", "train_target": "train.de", "validation_source": "validation.en",
    "validation_target": "validation.de", "validation_bleu": 0, "tokens_per_batch": 600, "tokens_per_device": 600,
    "max_length": 60, "warmup_steps": 3, "log_every": 1, "keep_checkpoints": 3, "vocab_size": 400, "d_model": 16,
    "d_ff": 32, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "max_steps": 4, "evaluate_every": 2,
    "average_checkpoints": 1, "num_beams": 2,
}  # fmt: skip
#: Sources of `vaswani import`, with their options.
IMPORTS = [
    ("marianmt",), ("fsmt",), ("relu-two",), ("src-spm",), ("fairseq/model.pt",),
]  # fmt: skip
KEPT = ("marianmt", "fsmt")  # whose imported folders stay
SENTENCES = "A small sentence.\nWords and more words.\nThe dog sees a cat.\n"


def build(folder: str, formats: tuple[str, ...]) -> None:
    """Make all of it; `formats` are those that models are exported to."""
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    _write_texts()
    _train()
    _use_the_model()
    for format in formats:
        _run("export", "model", "--format", format, "--output", "exported" if format == "ctranslate2" else format)
    _parse()
    _bring_others()


def _run(*words: str) -> None:
    from vaswani_transformer.cli.main import main

    assert main(list(words)) == 0, words


def _write_texts() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from vaswani_transformer.data.synthetic import generate_corpus, write_corpus

    corpus = generate_corpus(60, 10, 10)
    Path("text").mkdir()
    write_corpus(corpus, Path("text"))
    Path("recipe.yaml").write_text(yaml.safe_dump(TEXT_RECIPE, sort_keys=False))
    Path("in.txt").write_text(SENTENCES)
    Path("in.txt.gz").write_bytes(gzip.compress(SENTENCES.encode()))
    Path("reference.txt").write_text(SENTENCES)
    Path("prefix.txt").write_text("A\n\nThe\n")
    Path("alignments.txt").write_text("0-0 1-1\n\n0-0\n")
    rows = [{"source": source, "target": target} for source, target in corpus.train]
    Path("pairs").mkdir()
    Path("pairs/pairs.tsv").write_text("source\ttarget\n" + "".join(f"{s}\t{t}\n" for s, t in corpus.train))
    Path("pairs/pairs.csv").write_text("source,target\n" + "".join(f'"{s}","{t}"\n' for s, t in corpus.train))
    Path("pairs/pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), "pairs/pairs.parquet")
    Path("card.md").write_text("---\nlicense: mit\n---\n# {{ 6 * 7 }}\n")


def _train() -> None:
    """A run that a signal stopped, the finished one, its model, and prepared pairs: whole, and without a manifest."""
    import shutil

    from transformers import TrainerCallback

    from vaswani_transformer.cli.main import main
    from vaswani_transformer.data import prepare
    from vaswani_transformer.training import run

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    make_trainer = run.TrainingRun._make_trainer

    def make_with_signal(self, *arguments):
        trainer = make_trainer(self, *arguments)
        trainer.add_callback(Stop())
        return trainer

    train = ["train", "recipe.yaml", "--quiet", "--output"]
    run.TrainingRun._make_trainer = make_with_signal
    assert main([*train, "stopped"]) == 128 + signal.SIGTERM
    run.TrainingRun._make_trainer = make_trainer
    shutil.copytree("stopped", "run")
    _run(*train, "run")
    shutil.copytree("run", "model", ignore=shutil.ignore_patterns("checkpoints", "*.py"))
    _run("prepare", "recipe.yaml", "--output", "prepared", "--quiet")
    _run("clean", "recipe.yaml", "--output", "cleaned", "--quiet")

    def interrupt(*_):
        raise KeyboardInterrupt

    finish, prepare._finish = prepare._finish, interrupt
    assert main(["prepare", "recipe.yaml", "--output", "half", "--quiet"]) == 130
    prepare._finish = finish


def _use_the_model() -> None:
    """Scores, an output whose translation was killed, weights in shards, and pickled ones."""
    import shutil

    import torch
    from safetensors.torch import load_file

    from vaswani_transformer.decoding.output import ResumableOutput, notes_path
    from vaswani_transformer.model.modeling_vaswani import VaswaniForConditionalGeneration

    _run("evaluate", "model", "--source", "in.txt", "--reference", "reference.txt", "--json", "scores.json")
    finish, ResumableOutput.finish = ResumableOutput.finish, lambda self: None
    _run("translate", "model", "--input", "in.txt", "--output", "out.txt")
    ResumableOutput.finish = finish
    assert notes_path(Path("out.txt")).exists()
    Path("out.txt").write_text(Path("out.txt").read_text().partition("\n")[0] + "\n")  # as if killed in the second line
    shutil.copytree("model", "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file("model/model.safetensors"), "pickled/pytorch_model.bin")
    shutil.copytree("model", "shards", ignore=shutil.ignore_patterns("*.safetensors"))
    model = VaswaniForConditionalGeneration.from_pretrained("model")
    model.save_pretrained("shards", max_shard_size="20KB")
    for path in Path("shards").glob("*.py"):
        path.unlink()


def _bring_others() -> None:
    """Models of other toolkits, one of them imported, and a translation memory."""
    import shutil

    import import_differences
    import torch

    for make in (import_differences.marianmt, import_differences.fairseq):
        make(Path(make.__name__), torch.float32)
    Path("fairseq/fsmt").rename("fsmt")
    for name in ("relu-two", "src-spm"):
        shutil.copytree(TESTS / "fixtures/marian" / name, name)
    for folder in ("relu-two", "src-spm"):
        for name in ("expected.json", "scores.json"):
            Path(folder, name).unlink(missing_ok=True)
    for source, *options in IMPORTS:
        if source == "fsmt" and importlib.util.find_spec("sacremoses") is None:
            continue
        _run("import", source, "--output", f"imported-{Path(source).parts[0]}", *options)
        if source not in KEPT:
            shutil.rmtree(f"imported-{Path(source).parts[0]}")
    segments = [f"<tuv xml:lang='{language}'><seg>a %s b</seg></tuv>" for language in ("en", "de")]
    units = "".join(f"<tu>{''.join(segments)}</tu>\n".replace("%s", str(number)) for number in range(9))
    Path("memory.tmx").write_text(f"<tmx version='1.4'><header/><body>\n{units}</body></tmx>\n")


def _parse() -> None:
    """Trees, a parser, and the cells of an experiment that need no training."""
    from vaswani_transformer.parsing.evalb import BASELINES

    write_gum(Path("gum"))
    Path("gold.trees").write_bytes(gzip.decompress(Path("gum/gum.dev.trees.gz").read_bytes()))
    Path("predicted.trees").write_bytes(Path("gold.trees").read_bytes())
    Path("words.txt").write_text("the dog sees a cat .\nshe runs .\n")
    trees = ["--trees", "gum/gum.train.trees", "--dev", "gold.trees"]
    _run("parse", "train", *trees, "--output", "parser", *TINY)
    _run("experiment", "table4", "--data-dir", "gum", "--output", "runs", "--only", *BASELINES)
