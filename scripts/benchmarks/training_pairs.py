"""What the contestants of benchmark_training.py start from: pairs, tokenizer, tokenized pairs, our batches of them."""

import argparse
import gzip
from pathlib import Path

from model_sizes import vaswani_config


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Text files, tokenizer and tokenized pairs in `folder`."""
    import datasets

    from vaswani_transformer import load_pairs, tokenize_pairs
    from vaswani_transformer.data.synthetic import generate_corpus
    from vaswani_transformer.data.tokenization import train_tokenizer

    datasets.disable_progress_bars()
    if options.data:
        for language in ("en", "de"):
            with gzip.open(Path(options.data) / f"train.{language}.gz", "rb") as source:
                (folder / f"train.{language}").write_bytes(source.read())
    else:
        pairs = generate_corpus(train_size=options.pairs, validation_size=100, test_size=100, seed=options.seed).train
        for column, language in enumerate(("en", "de")):
            (folder / f"train.{language}").write_text("".join(f"{pair[column]}\n" for pair in pairs), "utf-8")
    sides = {language: (folder / f"train.{language}").read_text("utf-8").splitlines() for language in ("en", "de")}
    for language, lines in sides.items():
        (folder / f"val.{language}").write_text("\n".join(lines[:100]) + "\n", "utf-8")
    tokenizer = train_tokenizer(sides["en"] + sides["de"], vocab_size=options.vocab_size, show_progress=False)
    tokenizer.save_pretrained(folder / "tokenizer")
    text = load_pairs(source=folder / "train.en", target=folder / "train.de")
    pairs, _ = tokenize_pairs(text, tokenizer, max_length=100)
    pairs.save_to_disk(folder / "pairs")
    for language, column in (("en", "input_ids"), ("de", "labels")):  # JoeyNMT gets the same pieces as words
        lines = (" ".join(tokenizer.convert_ids_to_tokens(ids[:-1])) for ids in pairs[column])
        (folder / f"pieces.{language}").write_text("\n".join(lines) + "\n", "utf-8")
    pieces = [piece for piece in tokenizer.get_vocab() if piece not in tokenizer.all_special_tokens]
    (folder / "pieces.txt").write_text("\n".join(pieces) + "\n", "utf-8")


def token_batches(options: argparse.Namespace, pairs):
    """Our batches of these pairs."""
    from vaswani_transformer.data.batching import TokenBatchSampler

    columns = pairs.with_format("numpy")
    lengths = columns["source_length"][:], columns["target_length"][:]
    return TokenBatchSampler(*lengths, options.batch_tokens, seed=options.seed)


def flops_per_target_token(options: argparse.Namespace, folder: Path) -> float:
    """Training's operations for the pairs' tokens, padding left out, over their target tokens."""
    import datasets

    from vaswani_transformer.training.flops import model_flops

    pairs = datasets.load_from_disk(folder / "pairs").with_format("numpy")
    sources, targets = pairs["source_length"][:], pairs["target_length"][:]
    return model_flops(vaswani_config(options), sources, targets) / float(targets.sum())
