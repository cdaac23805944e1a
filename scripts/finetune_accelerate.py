"""Fine-tune a trained model on parallel text of your own in a plain accelerate loop.

    python scripts/finetune_accelerate.py MODEL --output NEW_MODEL \
        --train-source mine.en --train-target mine.de --validation-source valid.en --validation-target valid.de
    accelerate launch --num_processes 2 scripts/finetune_accelerate.py MODEL ...   # on two GPUs
    torchrun --nproc_per_node 2 scripts/finetune_accelerate.py MODEL ...   # on CPUs, where the former starts one only

The loss of an optimizer step is the sum over its target tokens divided by their number, over all processes and
accumulated batches: 8 batches on one process or 4 on each of two make the same step.
"""

import argparse
import contextlib
import json
import math
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, gather_object, set_seed
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

import vaswani_transformer as vt


def number(text: str, kind: type = int, rule: str = "a whole number from 1", holds=lambda value: value >= 1):
    """A number on the command line that keeps to a rule."""
    with contextlib.suppress(ValueError):
        if holds(kind(text)):
            return kind(text)
    raise argparse.ArgumentTypeError(f"{text} is not {rule}")


def parse_options() -> argparse.Namespace:
    """What the command line says."""
    rate = partial(number, kind=float, rule="a finite number above 0", holds=lambda value: 0 < value < math.inf)
    smoothing = partial(number, kind=float, rule="a number from 0 to below 1", holds=lambda value: 0 <= value < 1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder of the model to start from")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="for the new model")
    for text in ("train-source", "train-target", "validation-source", "validation-target"):
        parser.add_argument(f"--{text}", metavar="FILE", required=True, help="sentences, line for line")
    parser.add_argument("--steps", type=number, default=1000, help="optimizer steps (default: 1000)")
    parser.add_argument("--schedule", choices=["constant", "noam"], default="constant", help="after the warmup")
    parser.add_argument("--learning-rate", type=rate, default=1e-4, help="peak of either schedule (default: 1e-4)")
    parser.add_argument("--warmup-steps", type=number, default=100, help="steps of growth (default: 100)")
    parser.add_argument("--batch-size", type=number, default=32, help="pairs a process takes at once (default: 32)")
    parser.add_argument("--gradient-accumulation", type=number, default=1, help="such batches to a step (default: 1)")
    parser.add_argument("--label-smoothing", type=smoothing, default=0.1, help="default: 0.1, as in the paper")
    parser.add_argument("--max-length", type=number, default=256, help="longest side of a training pair, in tokens")
    patience = "seconds after which processes give up one that stands still, or prepares the text (default: 1800)"
    parser.add_argument("--ddp-timeout", type=number, default=1800, help=patience)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 mixed precision")
    parser.add_argument("--seed", type=int, default=0, help="of the order of batches and of dropout")
    return parser.parse_args()


def new_accelerator(options: argparse.Namespace) -> Accelerator:
    """accelerate's view of the processes and the device; the process group is made here."""
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=options.seed)  # the same for all processes
    cpu, precision = not torch.accelerator.is_available(), "bf16" if options.bf16 else "no"
    PartialState(cpu=cpu, timeout=timedelta(seconds=options.ddp_timeout))
    return Accelerator(cpu=cpu, mixed_precision=precision, dataloader_config=order)


def endless(loader):
    """Batches of one epoch after the other, each in an order of its own."""
    for epoch in range(sys.maxsize):
        loader.set_epoch(epoch)
        yield from loader


def new_schedule(optimizer: torch.optim.Optimizer, options: argparse.Namespace, d_model: int):
    """The scheduler. It is stepped once an optimizer step here, so `accelerator.prepare` must not have it."""
    warmup, peak = options.warmup_steps, options.learning_rate
    if options.schedule == "noam":
        return vt.noam_scheduler(optimizer, d_model, warmup, scale=peak * (d_model * warmup) ** 0.5)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: peak * min(1.0, (done + 1) / warmup))


def training_step(accelerator: Accelerator, model, batches: list[dict]) -> float:
    """Gradients of one optimizer step; returns its loss in nats a token, over all processes."""
    tokens = accelerator.reduce(sum(batch["labels"].ne(-100).sum() for batch in batches), "sum")
    total = torch.zeros((), device=accelerator.device)
    for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
        with accelerator.no_sync(model) if left else contextlib.nullcontext():  # gradients travel once a step
            loss = model(**batch, num_items_in_batch=tokens, skip_logits=True).loss  # smoothed, in training mode
            accelerator.backward(loss * accelerator.num_processes)  # the processes' gradients will be averaged
            total += loss.detach()
    return accelerator.reduce(total, "sum").item()


def validate(accelerator: Accelerator, model, tokenizer, pairs) -> dict[str, float]:
    """Loss in nats a token and BLEU; every process scores and translates a share of the pairs."""
    model = accelerator.unwrap_model(model).eval()
    with accelerator.split_between_processes({name: list(pairs[name]) for name in ("source", "target")}) as share:
        losses, counts = vt.score_pairs(model, tokenizer, share["source"], share["target"])
        translations = vt.Translator(model, tokenizer).translate(share["source"])
        rows = list(zip(losses, counts, translations, strict=True))
    losses, counts, translations = zip(*gather_object(rows), strict=True)  # of all pairs, in their order
    texts = {"predictions": list(translations), "references": list(pairs["target"])}
    bleu = vt.TranslationMetric().compute(**texts)["bleu"]
    return {"validation_loss": sum(losses) / sum(counts), "validation_bleu": bleu}


def finetune(options: argparse.Namespace) -> None:
    """Validate, train, validate again, save."""
    accelerator = new_accelerator(options)
    set_seed(options.seed)
    with accelerator.main_process_first():  # the others find what it has tokenised
        if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
            raise vt.UserError(f"{options.output} is not empty: give another --output")
        train_text = vt.load_pairs(source=options.train_source, target=options.train_target)
        validation = vt.load_pairs(source=options.validation_source, target=options.validation_target)
        tokenizer = vt.load_tokenizer(options.model)
        train, counts = vt.tokenize_pairs(train_text, tokenizer, max_length=options.max_length)
    accelerator.print(f"training text: {counts}")
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model, label_smoothing=options.label_smoothing)
    train = train.select_columns(["input_ids", "labels"])
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)  # with `model` it makes the decoder's inputs
    loader = torch.utils.data.DataLoader(train, options.batch_size, shuffle=True, collate_fn=collator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = new_schedule(optimizer, options, model.config.d_model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before = validate(accelerator, model, tokenizer, validation)
    stream, log = endless(loader), []
    model.train()
    for step in range(1, options.steps + 1):
        batches = [next(stream) for _ in range(options.gradient_accumulation)]
        loss = training_step(accelerator, model, batches)
        log.append({"step": step, "loss": loss, "learning_rate": scheduler.get_last_lr()[0]})
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == options.steps:
            accelerator.print(f"step {step}: loss {loss:.4f}")
    after = validate(accelerator, model, tokenizer, validation)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)
        (options.output / "training_log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
        print(f"validation loss {before['validation_loss']:.4f} before, {after['validation_loss']:.4f} after")
        print(f"validation BLEU {before['validation_bleu']:.2f} before, {after['validation_bleu']:.2f} after")
    accelerator.end_training()


if __name__ == "__main__":
    try:
        finetune(parse_options())
    except (ValueError, OSError, KeyboardInterrupt) as error:  # a mistake in what was given, a full disk, Ctrl-C
        stopped = isinstance(error, KeyboardInterrupt)
        print("interrupted" if stopped else f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(130 if stopped else 2)
