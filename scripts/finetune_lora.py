"""Fine-tune low-rank adapters (LoRA, by PEFT) on the attention of a trained model, and merge them into it.

    pip install peft
    python scripts/finetune_lora.py MODEL --output FOLDER \
        --train-source mine.en --train-target mine.de --validation-source valid.en --validation-target valid.de

MODEL, a folder, stays as it is. FOLDER then holds

- `adapter`, small, to be used with MODEL: `PeftModel.from_pretrained(model, "FOLDER/adapter")`,
  `AutoPeftModelForSeq2SeqLM.from_pretrained("FOLDER/adapter")` or `model.load_adapter("FOLDER/adapter")`;
- `merged`, an ordinary model folder that needs no PEFT: `vaswani translate FOLDER/merged`.

Adapters belong on linear layers inside encoder and decoder. Source embeddings, target embeddings and output projection
are one matrix here (Section 3.4), which PEFT cannot adapt or merge as one: name none of `shared`, `embed_tokens` and
`lm_head` in `target_modules` or `modules_to_save`.
"""

import argparse
import contextlib
import math
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate.utils import set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

import vaswani_transformer as vt


def number(text: str, kind: type = int, rule: str = "a whole number from 1", holds=lambda value: value >= 1):
    """A number on the command line that keeps to a rule."""
    with contextlib.suppress(ValueError):
        if holds(kind(text)):
            return kind(text)
    raise argparse.ArgumentTypeError(f"{text} is not {rule}")


def target(text: str) -> str:
    """A layer on the command line that takes an adapter."""
    if text.split(".")[-1] in ("shared", "embed_tokens", "lm_head"):
        raise argparse.ArgumentTypeError(f"{text} is the matrix that embeddings and output share: name other layers")
    return text


def parse_options() -> argparse.Namespace:
    """What the command line says."""
    rate = partial(number, kind=float, rule="a finite number above 0", holds=lambda value: 0 < value < math.inf)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder of the model to adapt")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="for `adapter` and `merged`")
    for text in ("train-source", "train-target", "validation-source", "validation-target"):
        parser.add_argument(f"--{text}", metavar="FILE", required=True, help="sentences, line for line")
    parser.add_argument("--rank", type=number, default=8, help="of the adapters' matrices (default: 8)")
    parser.add_argument("--alpha", type=number, default=16, help="adapters count alpha / rank times (default: 16)")
    parser.add_argument("--targets", nargs="+", type=target, default=["q_proj", "v_proj"], help="layers to adapt")
    parser.add_argument("--steps", type=number, default=1000, help="optimizer steps (default: 1000)")
    parser.add_argument("--learning-rate", type=rate, default=1e-3, help="peak rate (default: 1e-3)")
    parser.add_argument("--batch-size", type=number, default=32, help="pairs at once (default: 32)")
    parser.add_argument("--max-length", type=number, default=256, help="longest side of a training pair, in tokens")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 mixed precision")
    parser.add_argument("--seed", type=int, default=0, help="of adapters, batches and dropout")
    return parser.parse_args()


def validate(model, tokenizer, sources: list[str], targets: list[str]) -> str:
    """Validation loss in nats a token and BLEU of a model, PEFT's too, in words."""
    model.eval()
    losses, counts = vt.score_pairs(model, tokenizer, sources, targets)
    translations = list(vt.Translator(model, tokenizer).translate(sources))
    bleu = vt.TranslationMetric().compute(predictions=translations, references=targets)["bleu"]
    return f"validation loss {sum(losses) / sum(counts):.4f}, BLEU {bleu:.2f}"


@torch.no_grad()
def compare(what: str, model, saved, batch) -> None:
    """Raise UserError unless a saved model has the logits of the trained one, but for what float32 rounds."""
    logits, others = (one.eval()(**batch.to(model.device)).logits for one in (model, saved.to(model.device)))
    difference = ((logits - others).abs().max() / logits.abs().max()).item()  # NaN after training that diverged
    if not difference <= 1e-4:
        raise vt.UserError(f"{what}: logits differ by {difference:.1e} from those of the trained model: do not use it")
    print(f"{what}: logits differ by {difference:.1e}")


def finetune(options: argparse.Namespace) -> None:
    """Train adapters, save them, check what was saved, merge them, check that."""
    output = Path(options.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise vt.UserError(f"{output} is not empty: give another --output")
    train_text = vt.load_pairs(source=options.train_source, target=options.train_target)
    validation = vt.load_pairs(source=options.validation_source, target=options.validation_target)
    sources, targets = list(validation["source"]), list(validation["target"])
    tokenizer = vt.load_tokenizer(options.model)
    load = partial(AutoModelForSeq2SeqLM.from_pretrained, dtype=torch.float32)  # half precision would round the merge
    base = load(options.model)
    train, counts = vt.tokenize_pairs(train_text, tokenizer, max_length=options.max_length)
    print(f"training text: {counts}")
    print(f"before: {validate(base, tokenizer, sources, targets)}")
    sizes = {"r": options.rank, "lora_alpha": options.alpha, "target_modules": options.targets}
    model = get_peft_model(base, LoraConfig(task_type="SEQ_2_SEQ_LM", **sizes))
    trained, total = model.get_nb_trainable_parameters()
    print(f"adapters: {trained:,} of {total:,} parameters are trained")
    arguments = Seq2SeqTrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        warmup_steps=min(100, options.steps // 10),
        per_device_train_batch_size=options.batch_size,
        bf16=options.bf16,
        use_cpu=not torch.accelerator.is_available(),  # the Trainer refuses bf16 on a CPU otherwise
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        seed=options.seed,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=base)  # the model makes the decoder's inputs
    trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=train, data_collator=collator)
    trainer.train()
    model = trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # out of bfloat16
    print(f"with adapters: {validate(model, tokenizer, sources, targets)}")
    model.save_pretrained(output / "adapter")

    batch = tokenizer(sources[:8], text_target=targets[:8], padding=True, return_tensors="pt")
    reloaded = PeftModel.from_pretrained(load(options.model), output / "adapter")
    compare("reloaded adapters", model, reloaded, batch)
    with TemporaryDirectory(dir=output) as folder:  # what is called `merged` has been checked
        unchecked = Path(folder) / "merged"
        reloaded.merge_and_unload().save_pretrained(unchecked)
        tokenizer.save_pretrained(unchecked)
        compare("reloaded merged model", model, load(unchecked), batch)
        unchecked.rename(output / "merged")
    print(f"adapters: {output / 'adapter'}, merged model: {output / 'merged'}")


if __name__ == "__main__":
    given = parse_options()
    try:
        set_seed(given.seed)
        finetune(given)
    except (ValueError, OSError, KeyboardInterrupt) as error:  # a mistake in what was given, a full disk, Ctrl-C
        stopped = isinstance(error, KeyboardInterrupt)
        print("interrupted" if stopped else f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(130 if stopped else 2)
