"""Training speed side by side: `vaswani train`, Marian and Seq2SeqTrainer, a bare torch.nn.Transformer loop, JoeyNMT.

    python scripts/benchmark_training.py FOLDER_OF_MULTI30K
    python scripts/benchmark_training.py                       # generated pairs, about as long
    python scripts/benchmark_training.py --device cuda --preset big --batch-tokens 25000 --vocab-size 37000

One tokenizer, one model size, the same pairs. Each contestant trains in a process of its own, and they take turns in
random order, several rounds. A clock outside reads the log that each writes after every step: start-up and the first
steps do not count, and the process is ended when its time is up. Ratios are taken within each round, and the median of
the rounds is shown. On a machine that others use too only "CPU seconds" mean something.

`vaswani train` is the command itself. Marian trains as transformers' documentation has it: Seq2SeqTrainer,
DataCollatorForSeq2Seq, group_by_length, label smoothing by the Trainer, as many pairs a batch as ours has on average.
The bare loop is torch.nn.Transformer at its best: our token batches made before the clock starts, bf16 autocast, fused
Adam, tied embeddings, torch's own label smoothing, and in a second row malloc keeping freed memory, as ours does.
"""

import argparse
import gzip
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from process_clock import Watched, watch

# The contestants: name, and the options of `run_contestant` or of `vaswani train`.
OURS, MARIAN, BARE, JOEY = "vaswani train", "Marian, Seq2SeqTrainer", "torch.nn.Transformer, bare loop", "JoeyNMT"
CONTESTANTS = {
    OURS: {},
    f"{OURS}, float32": {"precision": "fp32"},
    MARIAN: {"bf16": False},
    f"{MARIAN}, bf16=True": {"bf16": True},
    BARE: {"keep": False},
    f"{BARE}, freed memory kept": {"keep": True},
    JOEY: {},
}
LOG = "log.jsonl"


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="folder with train.en.gz and train.de.gz; none: generated pairs")
    parser.add_argument("--pairs", type=int, default=29_000, help="pairs to generate without a folder")
    parser.add_argument("--preset", help="model of the paper instead of the sizes below: base or big")
    for name, default in {
        "d_model": 256, "d_ff": 512, "heads": 4, "layers": 3, "vocab_size": 8000, "batch_tokens": 4096, "rounds": 3,
        "threads": 0, "seed": 0,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--warm-up", type=float, default=6.0, help="seconds of training that do not count")
    parser.add_argument("--seconds", type=float, default=25.0, help="seconds of training that count")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--joey", metavar="PYTHON", help="a Python that can import joeynmt 2.3; none: left out")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="some of the contestants")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="OPTIONS", help="one more row of ours: --variant=--compile"
    )
    parser.add_argument("--folder", help="where to work; kept. None: a temporary one")
    parser.add_argument("--contestant", choices=[*CONTESTANTS, "peak"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.preset:
        sizes = {"base": (512, 2048, 8, 6), "big": (1024, 4096, 16, 6)}
        if options.preset not in sizes:
            parser.error(f"there is no preset {options.preset}: base or big")
        options.d_model, options.d_ff, options.heads, options.layers = sizes[options.preset]
    return options


# What every contestant starts from: pairs, tokenizer, tokenized pairs.


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Text files, tokenizer and tokenized pairs in `folder`."""
    import datasets

    from vaswani_transformer.data import load_pairs, tokenize_pairs
    from vaswani_transformer.synthetic import generate_corpus
    from vaswani_transformer.tokenization import train_tokenizer

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
    from vaswani_transformer.batching import TokenBatchSampler

    columns = pairs.with_format("numpy")
    lengths = columns["source_length"][:], columns["target_length"][:]
    return TokenBatchSampler(*lengths, options.batch_tokens, seed=options.seed)


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


# The contestants, each in a process of its own.


def train_marian(options: argparse.Namespace, folder: Path, bf16: bool) -> None:
    """Marian through the stock Trainer."""
    import datasets
    from transformers import (
        DataCollatorForSeq2Seq,
        MarianConfig,
        MarianMTModel,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        TrainerCallback,
    )

    from vaswani_transformer.tokenization import load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer")
    pairs = datasets.load_from_disk(folder / "pairs")
    sentences = round(len(pairs) / len(token_batches(options, pairs)))
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
    model = MarianMTModel(config)
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
        from vaswani_transformer.layers_vaswani import sinusoidal_positions

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

    from vaswani_transformer.batching import PairCollator
    from vaswani_transformer.memory import keep_freed_memory
    from vaswani_transformer.modeling_vaswani import shift_right
    from vaswani_transformer.tokenization import load_tokenizer

    if keep:
        keep_freed_memory()
    tokenizer = load_tokenizer(folder / "tokenizer")
    pairs = datasets.load_from_disk(folder / "pairs")
    collate, cuda = PairCollator(tokenizer.pad_token_id), options.device == "cuda"
    batches = []
    for indices in token_batches(options, pairs):
        batch = collate([pairs[index] for index in indices])
        target = shift_right(batch["labels"], tokenizer.pad_token_id, tokenizer.bos_token_id)
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


def measure_peak(options: argparse.Namespace) -> None:
    """Operations a second of a large matrix product in float32 and bf16."""
    results = {}
    size = 8192 if options.device == "cuda" else 2048
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.randn(size, size, device=options.device, dtype=dtype) for _ in range(2))
        rates = []
        for _ in range(10):
            started = time.perf_counter()
            left @ right
            if options.device == "cuda":
                torch.cuda.synchronize()
            rates.append(2 * size**3 / (time.perf_counter() - started))
        results[str(dtype).removeprefix("torch.")] = max(rates)
    print(json.dumps(results))


def joey_command(options: argparse.Namespace, folder: Path) -> list[str]:
    """Write JoeyNMT's configuration and return the command that trains with it."""
    sizes = {
        "type": "transformer", "num_layers": options.layers, "num_heads": options.heads, "hidden_size": options.d_model,
        "ff_size": options.d_ff, "dropout": options.dropout, "layer_norm": "post",
        "embeddings": {"embedding_dim": options.d_model, "scale": True, "dropout": options.dropout},
    }  # fmt: skip
    side = {"max_length": 100, "level": "word", "voc_file": str(folder / "pieces.txt"), "lowercase": False}
    configuration = {
        "name": "benchmark",
        "joeynmt_version": "2.3.0",
        "model_dir": str(folder / "joey"),
        "use_cuda": options.device == "cuda",
        "fp16": False,
        "data": {
            "train": str(folder / "pieces"), "dev": str(folder / "pieces_dev"), "dataset_type": "plain",
            "src": {"lang": "en", **side}, "trg": {"lang": "de", **side},
        },
        "training": {
            "optimizer": "adamw", "adam_betas": [0.9, 0.98], "learning_rate": 3e-4, "normalization": "tokens",
            "loss": "crossentropy", "label_smoothing": 0.1, "batch_size": options.batch_tokens, "batch_type": "token",
            "scheduling": "warmupinversesquareroot", "learning_rate_warmup": 1000, "epochs": 1000,
            "validation_freq": 10**6, "logging_freq": 1, "overwrite": True, "keep_best_ckpts": 1, "num_workers": 0,
            "early_stopping_metric": "loss", "random_seed": options.seed + 1, "shuffle": True,
        },
        "testing": {"batch_size": 64, "batch_type": "sentence", "eval_metrics": []},
        "model": {
            "initializer": "xavier_uniform", "embed_initializer": "xavier_uniform", "tied_embeddings": True,
            "tied_softmax": True, "encoder": sizes, "decoder": sizes,
        },
    }  # fmt: skip
    for language in ("en", "de"):
        lines = (folder / f"pieces.{language}").read_text("utf-8").splitlines(keepends=True)
        (folder / f"pieces_dev.{language}").write_text("".join(lines[:100]), "utf-8")
    (folder / "joey.json").write_text(json.dumps(configuration), "utf-8")  # JSON is YAML too
    return [options.joey, "-m", "joeynmt", "train", str(folder / "joey.json"), "--skip-test"]


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


def run_contestant(name: str, options: argparse.Namespace, folder: Path) -> Watched:
    """One contestant's turn."""
    for rest in ("output", "joey"):
        shutil.rmtree(folder / rest, ignore_errors=True)
    (folder / LOG).unlink(missing_ok=True)
    log = folder / LOG
    if name.startswith(OURS):
        more = ["--precision", CONTESTANTS[name]["precision"]] if CONTESTANTS.get(name) else []
        if name not in CONTESTANTS:
            more = name.removeprefix(OURS).split()
        command, log = our_command(options, folder, more), folder / "output" / "training_log.jsonl"
    elif name == JOEY:
        command, log = joey_command(options, folder), folder / "joey" / "train.log"
    else:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--contestant", name]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    if options.threads:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            return watch(process, log, options.warm_up, options.seconds, options.device)
        except RuntimeError as error:
            last = (folder / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"{name} {error}: {' '.join(last)}") from error


def peak_rates(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """`measure_peak` in a process of its own."""
    command = [sys.executable, __file__, "--contestant", "peak", "--device", options.device]
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(options.threads)} if options.threads else {})}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def flops_per_target_token(options: argparse.Namespace, folder: Path) -> float:
    """Training's operations for the pairs' tokens, padding left out, over their target tokens."""
    import datasets

    from vaswani_transformer import VaswaniConfig
    from vaswani_transformer.flops import model_flops

    pairs = datasets.load_from_disk(folder / "pairs").with_format("numpy")
    sources, targets = pairs["source_length"][:], pairs["target_length"][:]
    config = VaswaniConfig(
        vocab_size=options.vocab_size,
        d_model=options.d_model,
        d_ff=options.d_ff,
        num_heads=options.heads,
        encoder_layers=options.layers,
        decoder_layers=options.layers,
    )
    return model_flops(config, sources, targets) / float(targets.sum())


# The report.


def middle(values: list[float]) -> float:
    """The median of what was measured."""
    return median(values) if values else float("nan")


def ratio(rows: dict[str, list[dict]], name: str, other: str, key: str) -> str:
    """Median over the rounds of one contestant's measure over another's in the same round."""
    if other not in rows:
        return "-"
    value = middle([mine[key] / theirs[key] for mine, theirs in zip(rows[name], rows[other], strict=True)])
    return f"{value:.2f}" if value == value else "-"


def table(rows: dict[str, list[dict]], peaks: list[dict], flops: float, options: argparse.Namespace) -> str:
    """The results in Markdown."""
    bare = next((name for name in rows if name.startswith(f"{BARE}, ")), BARE)
    header = (
        "| training | target tokens/s | times Marian | positions/s | times the bare loop | padding"
        " | share of the peak, bf16 | float32 | peak memory (GiB) | target tokens/CPU s | times Marian"
        " | positions/CPU s, times the bare loop |"
    )
    lines = [header, "|---" * 12 + "|"]
    peak = {name: middle([found[name] for found in peaks]) for name in peaks[0]}
    for name, found in rows.items():
        value = {key: middle([row[key] for row in found]) for key in found[0]}
        shares = [f"{value['target tokens/s'] * flops / peak[kind]:.0%}" for kind in ("bfloat16", "float32")]
        unknown = value["padding"] != value["padding"]
        cells = [
            name,
            f"{value['target tokens/s']:,.0f}",
            ratio(rows, name, MARIAN, "target tokens/s"),
            "-" if unknown else f"{value['positions/s']:,.0f}",
            ratio(rows, name, bare, "positions/s"),
            "-" if unknown else f"{value['padding']:.1%}",
            *shares,
            f"{value['memory'] / 2**30:.2f}",
            f"{value['target tokens/CPU s']:,.0f}",
            ratio(rows, name, MARIAN, "target tokens/CPU s"),
            ratio(rows, name, bare, "positions/CPU s"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    spread = {name: [f"{row['target tokens/s']:,.0f}" for row in found] for name, found in rows.items()}
    rounds = "; ".join(f"{name} {', '.join(values)}" for name, values in spread.items())
    threads = options.threads or torch.get_num_threads()
    return "\n".join(
        [
            f"Matrix products: {peak['float32'] / 1e9:,.0f} GFLOP/s in float32, {peak['bfloat16'] / 1e9:,.0f} in bf16"
            f" ({options.device}, {threads} threads, torch {torch.__version__}); the model takes"
            f" {flops / 1e6:,.1f} MFLOP a target token, forward and backward, its source's share included.",
            "",
            *lines,
            "",
            f"Positions are tokens and padding of both sides. Target tokens/s of each round: {rounds}.",
        ]
    )


def main() -> None:
    """All contestants in turns, then the table."""
    options = parse_options()
    if options.contestant == "peak":
        measure_peak(options)
        return
    if options.contestant:
        settings = CONTESTANTS[options.contestant]
        if options.contestant.startswith(MARIAN):
            train_marian(options, Path(options.folder), **settings)
        else:
            train_bare(options, Path(options.folder), **settings)
        return
    began = time.monotonic()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="benchmark_training_"))
    folder.mkdir(parents=True, exist_ok=True)
    names = options.only or [name for name in CONTESTANTS if name != JOEY or options.joey]
    names += [f"{OURS} {variant}" for variant in options.variant]
    try:
        prepare(options, folder)
        rows, peaks, order = {name: [] for name in names}, [], random.Random(options.seed)
        for round_ in range(options.rounds):
            peaks.append(peak_rates(options, folder))
            for name in order.sample(names, len(names)):
                rows[name].append(run_contestant(name, options, folder).rates())
                shown = f"{rows[name][-1]['target tokens/s']:,.0f} target tokens/s"
                print(f"round {round_ + 1}: {name}: {shown}", file=sys.stderr, flush=True)
        print(table(rows, peaks, flops_per_target_token(options, folder), options))
        print(f"\n{(time.monotonic() - began) / 60:.1f} minutes. ", end="")
        missing = importlib.util.find_spec("joeynmt") is None and not options.joey
        print("JoeyNMT was left out: no --joey PYTHON was given." if missing and not options.only else "")
    finally:
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
