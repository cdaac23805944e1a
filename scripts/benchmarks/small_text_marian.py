"""Train transformers' MarianMTModel from new weights by its stock `Seq2SeqTrainer`, and score it: for `small_text.py`.

    python scripts/benchmarks/small_text_marian.py TRAIN.tsv VALID.tsv OUTPUT TEST.source TEST.target MINUTES

Marian's default sizes (base), 6 layers, a vocabulary of 10,000 by this program's BPE, batches of 64 pairs, a rate that
grows to 5e-4 in 500 steps and stays, label smoothing 0.1, the time limit; the best checkpoint by validation loss.
"""

import json
import sys
import time
from pathlib import Path

from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from vaswani_transformer import load_pairs, tokenize_pairs, train_tokenizer
from vaswani_transformer.evaluation.metrics import score_translations


class TimeLimit(TrainerCallback):
    """Stops a training after some seconds, with a validation."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def on_step_end(self, args, state, control, **kwargs):
        """Stop at the end."""
        if time.monotonic() > self.end:
            control.should_evaluate = control.should_save = control.should_training_stop = True


def main(train: str, valid: str, output: str, source: str, target: str, minutes: str) -> None:
    """Train, and write `scores.json` beside the output folder."""
    started = time.monotonic()
    texts = [load_pairs(data=path) for path in (train, valid)]
    lines = (side for row in texts[0] for side in row.values())
    tokenizer = train_tokenizer(lines, vocab_size=10_000, show_progress=False)
    data, validation = (tokenize_pairs(text, tokenizer, max_length=200)[0] for text in texts)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    config = MarianConfig(
        vocab_size=len(tokenizer), d_model=512, encoder_ffn_dim=2048, decoder_ffn_dim=2048, encoder_layers=6,
        decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8, dropout=0.1, scale_embedding=True,
        decoder_start_token_id=tokenizer.pad_token_id, forced_eos_token_id=tokenizer.eos_token_id, **ids,
    )  # fmt: skip
    model = MarianMTModel(config)
    arguments = Seq2SeqTrainingArguments(
        output_dir=output, use_cpu=True, learning_rate=5e-4, lr_scheduler_type="constant_with_warmup", warmup_steps=500,
        per_device_train_batch_size=64, train_sampling_strategy="group_by_length", num_train_epochs=1000,
        label_smoothing_factor=0.1, eval_strategy="steps", eval_steps=250, save_steps=250, save_total_limit=2,
        load_best_model_at_end=True, report_to="none", disable_tqdm=True, logging_steps=50,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=data.select_columns(["input_ids", "labels"]),
        eval_dataset=validation.select_columns(["input_ids", "labels"]),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        callbacks=[TimeLimit(60 * float(minutes) - (time.monotonic() - started))],
    )
    trainer.train()
    sources, references = (Path(path).read_text(encoding="utf-8").splitlines() for path in (source, target))
    order, outputs = sorted(range(len(sources)), key=lambda index: len(sources[index])), {}
    for start in range(0, len(order), 32):
        rows = order[start : start + 32]
        batch = tokenizer([sources[row] for row in rows], return_tensors="pt", padding=True)
        batch.pop("token_type_ids", None)
        found = trainer.model.generate(**batch, num_beams=4, max_new_tokens=200)
        outputs |= zip(rows, tokenizer.batch_decode(found, skip_special_tokens=True), strict=True)
    scores = score_translations([outputs[index] for index in range(len(sources))], references)
    Path(output).with_name("scores.json").write_text(json.dumps(scores) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
