"""`vaswani experiment` in this process, on made-up text and of a size that takes seconds."""

import gzip
from pathlib import Path

from vaswani_transformer.cli.main import main
from vaswani_transformer.data.synthetic import generate_corpus

TINY = [
    *("max_steps=4", "warmup_steps=2", "evaluate_every=2", "average_checkpoints=2", "num_beams=1", "vocab_size=300"),
    *("d_model=16", "d_ff=32", "num_heads=2", "d_k=8", "d_v=8", "encoder_layers=1", "decoder_layers=1"),
    *("tokens_per_batch=400", "tokens_per_device=400"),
]


def experiment(capsys, *words: str) -> tuple[int, str, str]:
    """Status, output and errors of `vaswani experiment`."""
    status = main(["experiment", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def write_multi30k(folder: Path) -> Path:
    """Generated text under Multi30k's names; the French is the German."""
    corpus = generate_corpus(150, 10, 12)
    for name, pairs in (("train", corpus.train), ("val", corpus.validation), ("test_2016_flickr", corpus.test)):
        for language, side in (("en", 0), ("de", 1), ("fr", 1)):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{name}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


TREES = [
    "(ROOT (S (NP (DT the) (NN dog)) (VP (VBZ sees) (NP (DT a) (NN cat))) (. .)))",
    "(ROOT (S (NP (PRP she)) (VP (VBZ runs)) (. .)))",
    "(ROOT (NP (DT a) (JJ small) (NN bird)))",
    "(ROOT (S (NP (DT the) (NN bird)) (VP (VBZ sings) (PP (IN in) (NP (DT the) (NN tree)))) (. .)))",
]


def write_gum(folder: Path) -> Path:
    """Made-up trees under the names of GUM's files, one of them packed."""
    folder.mkdir()
    (folder / "gum.train.trees").write_text("\n".join(TREES * 10) + "\n")
    (folder / "gum.dev.trees.gz").write_bytes(gzip.compress(("\n".join(TREES) + "\n").encode()))
    return folder
