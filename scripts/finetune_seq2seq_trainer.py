"""Fine-tune a trained model on parallel text of your own with transformers' stock `Seq2SeqTrainer`.

    python scripts/finetune_seq2seq_trainer.py MODEL --output NEW_MODEL \
        --train-source mine.en --train-target mine.de --validation-source valid.en --validation-target valid.de

Instead of two text files, --train-data and --validation-data take a TSV, CSV, JSON lines or Parquet file. Checkpoints
go into NEW_MODEL, and the same command with --resume continues from the last one.

--label-smoothing is the model's own, `config.label_smoothing`, which leaves validation loss as it is; the Trainer's
`label_smoothing_factor`, which would smooth that too, stays 0.
"""

import argparse
import contextlib
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from vaswani_transformer import TranslationMetric, UserError, load_pairs, load_tokenizer, tokenize_pairs


def number(text: str, kind: type = int, rule: str = "a whole number from 1", holds=lambda value: value >= 1):
    """A number on the command line that keeps to a rule."""
    with contextlib.suppress(ValueError):
        if holds(kind(text)):
            return kind(text)
    raise argparse.ArgumentTypeError(f"{text} is not {rule}")


def parse_options() -> argparse.Namespace:
    """What the command line says."""
    whole = partial(number, kind=int, rule="a whole number from 0", holds=lambda value: value >= 0)
    rate = partial(number, kind=float, rule="a finite number above 0", holds=lambda value: 0 < value < math.inf)
    smoothing = partial(number, kind=float, rule="a number from 0 to below 1", holds=lambda value: 0 <= value < 1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder of the model to start from")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="for checkpoints and the new model")
    for split in ("train", "validation"):
        parser.add_argument(f"--{split}-source", metavar="FILE", help="sentences, one a line")
        parser.add_argument(f"--{split}-target", metavar="FILE", help="their translations, line for line")
        parser.add_argument(f"--{split}-data", metavar="FILE", help="both in one file, instead")
    parser.add_argument("--source-column", default="source", help="column of --train-data and --validation-data")
    parser.add_argument("--target-column", default="target", help="column of --train-data and --validation-data")
    parser.add_argument("--steps", type=number, default=1000, help="optimizer steps (default: 1000)")
    parser.add_argument("--learning-rate", type=rate, default=1e-4, help="peak rate (default: 1e-4)")
    parser.add_argument("--warmup-steps", type=whole, default=100, help="steps up to the peak rate (default: 100)")
    parser.add_argument("--batch-size", type=number, default=32, help="pairs a device takes at once (default: 32)")
    parser.add_argument("--gradient-accumulation", type=number, default=1, help="such batches to a step (default: 1)")
    parser.add_argument("--label-smoothing", type=smoothing, default=0.1, help="default: 0.1, as in the paper")
    parser.add_argument("--max-length", type=number, default=256, help="longest side of a training pair, in tokens")
    parser.add_argument("--evaluate-every", type=number, default=250, help="steps between checkpoints with validation")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 mixed precision")
    parser.add_argument("--torch-compile", action="store_true", help="compile the training step")
    parser.add_argument("--seed", type=whole, default=0, help="of the order of batches and of dropout")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --output")
    return parser.parse_args()


def find_checkpoint(options: argparse.Namespace) -> str | None:
    """The checkpoint to resume from. Raises UserError rather than write over what is there."""
    output = Path(options.output)
    checkpoint = get_last_checkpoint(output) if output.is_dir() else None
    if options.resume and checkpoint is None:
        raise UserError(f"there is no checkpoint in {output} to resume from: leave out --resume")
    if not options.resume and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not empty: give another --output, or --resume to continue it")
    return checkpoint if options.resume else None


def load_split(options: argparse.Namespace, split: str):
    """The pairs of one split, as columns `source` and `target` of strings."""
    source, target, data = (getattr(options, f"{split}_{name}") for name in ("source", "target", "data"))
    columns = {"source_column": options.source_column, "target_column": options.target_column} if data else {}
    return load_pairs(source=source, target=target, data=data, **columns)


def finetune(options: argparse.Namespace) -> None:
    """Validate, train, validate again, save."""
    cpu = not torch.accelerator.is_available()
    processes = PartialState(cpu=cpu)
    with processes.main_process_first():  # the others find what it has tokenised
        checkpoint = find_checkpoint(options)
        train_text, validation_text = load_split(options, "train"), load_split(options, "validation")
        tokenizer = load_tokenizer(options.model)
        train, counts = tokenize_pairs(train_text, tokenizer, max_length=options.max_length)
    validation = validation_text.map(
        lambda pair: tokenizer(pair["source"], text_target=pair["target"]), remove_columns=["source", "target"]
    )
    processes.print(f"training text: {counts}")
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model, label_smoothing=options.label_smoothing)

    def compute_metrics(prediction) -> dict[str, float]:
        texts = [
            tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        ]
        scores = TranslationMetric().compute(predictions=texts[0], references=texts[1])
        return {"bleu": scores["bleu"], "chrf": scores["chrf"]}

    arguments = Seq2SeqTrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.warmup_steps,
        adam_beta2=0.98,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.gradient_accumulation,
        bf16=options.bf16,
        use_cpu=cpu,
        torch_compile=options.torch_compile,
        predict_with_generate=True,
        eval_strategy="steps",
        eval_steps=options.evaluate_every,
        save_steps=options.evaluate_every,
        save_total_limit=2,
        logging_steps=min(50, options.evaluate_every),
        report_to="none",
        seed=options.seed,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)  # the model makes the decoder's inputs
    trainer = Seq2SeqTrainer(
        model, arguments, collator, train, validation, processing_class=tokenizer, compute_metrics=compute_metrics
    )
    before = trainer.evaluate()
    if checkpoint is not None and int(checkpoint.rpartition("-")[2]) >= options.steps:
        trainer._load_from_checkpoint(checkpoint)  # nothing is left to do, and train() would take a step more
    else:
        trainer.train(resume_from_checkpoint=checkpoint)
    after = trainer.evaluate()
    model.config.use_cache = True  # the Trainer turned it off
    trainer.save_model(options.output)
    processes.print(f"validation loss {before['eval_loss']:.4f} before, {after['eval_loss']:.4f} after")
    processes.print(f"validation BLEU {before['eval_bleu']:.2f} before, {after['eval_bleu']:.2f} after")


if __name__ == "__main__":
    try:
        finetune(parse_options())
    except (ValueError, OSError, KeyboardInterrupt) as error:  # a mistake in what was given, a full disk, Ctrl-C
        stopped = isinstance(error, KeyboardInterrupt)
        print("interrupted" if stopped else f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(130 if stopped else 2)
