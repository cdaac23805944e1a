"""The trainings that training.py compares, and the pairs, tokenizer and model sizes that they share.

Marian and the bare loop are functions, each called in a process of its own; `vaswani train` is a command.
"""

import argparse
import gzip
import json
import random
import sys
from pathlib import Path

import torch

# Name, and the options of `train_marian`, `train_bare` or `vaswani train`.
OURS, MARIAN, BARE = "vaswani train", "Marian, Seq2SeqTrainer", "torch.nn.Transformer, bare loop"
CONTESTANTS = {
    OURS: {},
    f"{OURS}, float32": {"precision": "fp32"},
    MARIAN: {"bf16": False},
    f"{MARIAN}, bf16=True": {"bf16": True},
    BARE: {"keep": False},
    f"{BARE}, freed memory kept": {"keep": True},
}
LOG = "log.jsonl"
SIZES = {"vocab_size": 8000, "d_model": 256, "d_ff": 512, "heads": 4, "layers": 3}  # of the recipe multi30k-en-de


def add_whole_numbers(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """One option for each name."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def vaswani_config(options: argparse.Namespace, **more):
    """Our configuration of the sizes that the command line names."""
    from vaswani_transformer import VaswaniConfig  # takes seconds, which --help does without

    return VaswaniConfig(
        vocab_size=options.vocab_size,
        d_model=options.d_model,
        d_ff=options.d_ff,
        num_heads=options.heads,
        encoder_layers=options.layers,
        decoder_layers=options.layers,
        **more,
    )


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


def token_batches(options: argparse.Namespace, pairs):
    """Our batches of these pairs."""
    from vaswani_transformer.data.batching import TokenBatchSampler

    columns = pairs.with_format("numpy")
    lengths = columns["source_length"][:], columns["target_length"][:]
    return TokenBatchSampler(*lengths, options.batch_tokens, seed=options.seed)


def flops_per_target_token(options: argparse.Namespace, folder: Path) -> float:
    """Training's operations, three times parameters and tokens of both sides, over the target tokens."""
    import datasets

    pairs = datasets.load_from_disk(folder / "pairs").with_format("numpy")
    sources, targets = (float(pairs[f"{side}_length"][:].sum()) for side in ("source", "target"))
    return 3.0 * vaswani_config(options).num_parameters() * (sources + targets) / targets


class Log:
    """Appends tokens and positions of both sides of a step to the log that the clock outside reads."""

    def __init__(self, folder: Path):
        self.path = folder / LOG

    def step(self, source_tokens: int, target_tokens: int, positions: int) -> None:
        """One line."""
        padding = 1 - (source_tokens + target_tokens) / positions
        entry = {"source_tokens": source_tokens, "target_tokens": target_tokens, "padding": padding}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def marian_model(options: argparse.Namespace, tokenizer):
    """Marian of our sizes."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(options.seed)
    config = MarianConfig(
        vocab_size=len(tokenizer),
        decoder_vocab_size=len(tokenizer),
        d_model=options.d_model,
        encoder_layers=options.layers,
        decoder_layers=options.layers,
        encoder_ffn_dim=options.d_ff,
        decoder_ffn_dim=options.d_ff,
        encoder_attention_heads=options.heads,
        decoder_attention_heads=options.heads,
        dropout=options.dropout,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=None,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return MarianMTModel(config)


def train_marian(options: argparse.Namespace, folder: Path, bf16: bool) -> None:
    """Marian through the stock Trainer."""
    import datasets
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

    from vaswani_transformer.data.tokenization import load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer")
    pairs = datasets.load_from_disk(folder / "pairs")
    sentences = round(len(pairs) / len(token_batches(options, pairs)))
    model = marian_model(options, tokenizer)
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder / "output"),
        per_device_train_batch_size=sentences,
        train_sampling_strategy="group_by_length",
        label_smoothing_factor=0.1,
        learning_rate=3e-4,
        warmup_steps=1000,
        num_train_epochs=1000,
        save_strategy="no",
        report_to="none",
        bf16=bf16,
        use_cpu=options.device == "cpu",
        seed=options.seed,
    )
    collate, counts, log = DataCollatorForSeq2Seq(tokenizer, model=model), [], Log(folder)

    def count_and_collate(rows):
        batch = collate(rows)
        tokens = int(batch["attention_mask"].sum()), int((batch["labels"] != -100).sum())
        counts.append((*tokens, batch["input_ids"].numel() + batch["labels"].numel()))
        return batch

    class LogSteps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if options.device == "cuda":
                torch.cuda.synchronize()
            log.step(*counts[state.global_step - 1])

    pairs = pairs.select_columns(["input_ids", "labels"])
    trainer = Seq2SeqTrainer(model, arguments, count_and_collate, pairs, callbacks=[LogSteps()])
    trainer.train()


class BareTransformer(torch.nn.Module):
    """torch.nn.Transformer with one matrix for embeddings and projection, and sinusoids."""

    def __init__(self, options: argparse.Namespace, vocab_size: int, pad: int):
        super().__init__()
        from vaswani_transformer.model.layers_vaswani import sinusoidal_positions

        self.pad, self.scale = pad, options.d_model**0.5
        self.embedding = torch.nn.Embedding(vocab_size, options.d_model, padding_idx=pad)
        torch.nn.init.normal_(self.embedding.weight, std=options.d_model**-0.5)
        table = sinusoidal_positions(torch.arange(512), options.d_model).float()
        self.register_buffer("positions", table)
        self.dropout = torch.nn.Dropout(options.dropout)
        sizes = (options.d_model, options.heads, options.layers, options.layers, options.d_ff, options.dropout)
        self.transformer = torch.nn.Transformer(*sizes, batch_first=True)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """`(batch_size, length)` ids to `(batch_size, length, d_model)`."""
        return self.dropout(self.embedding(ids) * self.scale + self.positions[: ids.shape[1]])

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits `(batch_size, target_length, vocab_size)`."""
        padding = source == self.pad
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return torch.nn.functional.linear(hidden, self.embedding.weight)


def train_bare(options: argparse.Namespace, folder: Path, keep: bool) -> None:
    """torch.nn.Transformer in a loop without anything around it."""
    import datasets
    from transformers.models.bart.modeling_bart import shift_tokens_right

    from vaswani_transformer.data.batching import PairCollator
    from vaswani_transformer.data.tokenization import load_tokenizer
    from vaswani_transformer.hardware import tune_cpu_memory

    if keep:
        tune_cpu_memory()
    tokenizer = load_tokenizer(folder / "tokenizer")
    pairs = datasets.load_from_disk(folder / "pairs")
    collate, cuda = PairCollator(tokenizer.pad_token_id), options.device == "cuda"
    batches = []
    for indices in token_batches(options, pairs):
        batch = collate([pairs[index] for index in indices])
        target = shift_tokens_right(batch["labels"], tokenizer.pad_token_id, tokenizer.bos_token_id)
        tokens = int(batch["attention_mask"].sum()), int((batch["labels"] != -100).sum())
        tensors = [tensor.pin_memory() if cuda else tensor for tensor in (batch["input_ids"], target, batch["labels"])]
        batches.append((*tensors, (*tokens, batch["input_ids"].numel() + target.numel())))
    torch.manual_seed(options.seed)
    model = BareTransformer(options, len(tokenizer), tokenizer.pad_token_id).to(options.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    log = Log(folder)
    while True:
        random.shuffle(batches)
        for *tensors, counts in batches:
            source, target, labels = (tensor.to(options.device, non_blocking=True) for tensor in tensors)
            with torch.autocast(options.device, torch.bfloat16):
                logits = model(source, target)
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1
                )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if cuda:
                torch.cuda.synchronize()
            log.step(*counts)


def our_command(options: argparse.Namespace, folder: Path, more: list[str]) -> list[str]:
    """`vaswani train` on the prepared files, never validating."""
    fields = {
        "train_source": folder / "train.en", "train_target": folder / "train.de", "tokenizer": folder / "tokenizer",
        "validation_source": folder / "val.en", "validation_target": folder / "val.de", "validation_bleu": 0,
        "best_by": "loss",
        "output": folder / "output", "max_length": 100, "d_model": options.d_model, "d_ff": options.d_ff,
        "num_heads": options.heads, "encoder_layers": options.layers, "decoder_layers": options.layers,
        "dropout": options.dropout, "tokens_per_batch": options.batch_tokens,
        "tokens_per_device": options.batch_tokens, "max_steps": 10**7, "evaluate_every": 10**7, "log_every": 1,
        "seed": options.seed, "average_checkpoints": 0, "vocab_size": options.vocab_size,
    }  # fmt: skip
    command = [sys.executable, "-m", "vaswani_transformer", "train", "small", "--quiet"]
    for name, value in fields.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    return [*command, *more]
