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
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from vaswani_transformer import (
    TranslationMetric,
    Translator,
    UserError,
    load_pairs,
    load_tokenizer,
    score_pairs,
    tokenize_pairs,
)


def count(text: str) -> int:
    """A whole number from 1 on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def parse_options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder of the model to adapt")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="for `adapter` and `merged`")
    for split in ("train", "validation"):
        parser.add_argument(f"--{split}-source", metavar="FILE", required=True, help="sentences, one a line")
        parser.add_argument(f"--{split}-target", metavar="FILE", required=True, help="their translations")
    parser.add_argument("--rank", type=count, default=8, help="of the adapters' matrices (default: 8)")
    parser.add_argument("--alpha", type=int, default=16, help="adapters count alpha / rank times (default: 16)")
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"], help="layers (default: q_proj v_proj)")
    parser.add_argument("--steps", type=count, default=1000, help="optimizer steps (default: 1000)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak rate (default: 1e-3)")
    parser.add_argument("--batch-size", type=count, default=32, help="pairs at once (default: 32)")
    parser.add_argument("--max-length", type=int, default=256, help="longest side of a training pair, in tokens")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 mixed precision")
    parser.add_argument("--seed", type=int, default=0, help="of adapters, batches and dropout")
    return parser.parse_args()


def validate(model, tokenizer, sources: list[str], targets: list[str]) -> str:
    """Validation loss in nats a token and BLEU of a model, PEFT's too, in words."""
    model.eval()
    losses, counts = score_pairs(model, tokenizer, sources, targets)
    translations = list(Translator(model, tokenizer).translate(sources))
    bleu = TranslationMetric().compute(predictions=translations, references=targets)["bleu"]
    return f"validation loss {sum(losses) / sum(counts):.4f}, BLEU {bleu:.2f}"


@torch.no_grad()
def largest_difference(one, other, tokenizer, sources: list[str], targets: list[str]) -> float:
    """How far the logits of two models are apart on the first pairs, relative to the largest logit."""
    batch = tokenizer(sources[:8], text_target=targets[:8], padding=True, return_tensors="pt").to(one.device)
    logits, others = (model.eval()(**batch).logits for model in (one, other.to(one.device)))
    return ((logits - others).abs().max() / logits.abs().max()).item()


def finetune(options: argparse.Namespace) -> None:
    """Train adapters, save them, check what was saved, merge them, check that."""
    output = Path(options.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not empty: give another --output")
    train_text = load_pairs(source=options.train_source, target=options.train_target)
    validation = load_pairs(source=options.validation_source, target=options.validation_target)
    sources, targets = list(validation["source"]), list(validation["target"])
    tokenizer = load_tokenizer(options.model)
    base = AutoModelForSeq2SeqLM.from_pretrained(options.model)
    train, counts = tokenize_pairs(train_text, tokenizer, max_length=options.max_length)
    print(f"training text: {counts}")
    print(f"before: {validate(base, tokenizer, sources, targets)}")
    settings = LoraConfig(
        task_type=TaskType.SEQ_2_SEQ_LM, r=options.rank, lora_alpha=options.alpha, target_modules=options.targets
    )
    model = get_peft_model(base, settings)
    trained, total = model.get_nb_trainable_parameters()
    print(f"adapters: {trained:,} of {total:,} parameters are trained")
    arguments = Seq2SeqTrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        warmup_steps=min(100, options.steps // 10),
        per_device_train_batch_size=options.batch_size,
        bf16=options.bf16,
        use_cpu=not torch.accelerator.is_available(),  # bf16 wants to be told
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        seed=options.seed,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=base)  # the model makes the decoder's inputs
    Seq2SeqTrainer(model=model, args=arguments, train_dataset=train, data_collator=collator).train()
    print(f"with adapters: {validate(model, tokenizer, sources, targets)}")
    model.save_pretrained(output / "adapter")

    reloaded = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(options.model), output / "adapter")
    difference = largest_difference(model, reloaded, tokenizer, sources, targets)
    print(f"reloaded adapters: logits differ by {difference:.1e}")
    merged = reloaded.merge_and_unload()
    difference = largest_difference(model, merged, tokenizer, sources, targets)
    print(f"merged: logits differ by {difference:.1e}")
    merged.save_pretrained(output / "merged")
    tokenizer.save_pretrained(output / "merged")
    print(f"adapters: {output / 'adapter'}, merged model: {output / 'merged'}")


if __name__ == "__main__":
    given = parse_options()
    set_seed(given.seed)
    try:
        finetune(given)
    except (ValueError, OSError) as error:  # a mistake in what was given, or a disk that is full
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
