"""Train JoeyNMT 2.3 itself, by the settings that it ships for IWSLT 2014, and score it: for `small_text.py`.

    python scripts/benchmarks/small_text_joeynmt.py TRAIN.tsv VALID.tsv OUTPUT TEST.source TEST.target MINUTES

After `pip install --no-deps joeynmt==2.3.0 subword-nmt 'importlib_metadata<8' zipp`. Its settings are those of
`configs/iwslt14_deen_bpe.yaml`, but for 10,000 merges in place of 32,000, cased text, which is not tokenised yet, a
CPU, a limit of time, whose last weights are taken, and greedy search: its beam search takes longer than the training.
"""

import json
import sys
import time
from itertools import chain
from pathlib import Path

from joeynmt import builders
from joeynmt.config import parse_global_args, set_validation_args
from joeynmt.prediction import prepare, test
from joeynmt.training import TrainManager
from sacremoses import MosesTokenizer
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from vaswani_transformer import load_pairs
from vaswani_transformer.evaluation.metrics import score_translations

MERGES, PLATEAU = 10_000, builders.ReduceLROnPlateau
STACK = {
    "type": "transformer", "num_layers": 6, "num_heads": 4, "hidden_size": 256, "ff_size": 1024, "dropout": 0.3,
    "embeddings": {"embedding_dim": 256, "scale": True, "dropout": 0.0}, "layer_norm": "pre", "activation": "relu",
}  # fmt: skip
TRAINING = {
    "optimizer": "adamw", "normalization": "tokens", "adam_betas": [0.9, 0.999], "scheduling": "plateau", "patience": 5,
    "decrease_factor": 0.7, "loss": "crossentropy", "learning_rate": 3e-4, "learning_rate_min": 1e-8,
    "weight_decay": 0.0, "label_smoothing": 0.1, "batch_size": 4096, "batch_type": "token", "validation_freq": 1000,
    "early_stopping_metric": "bleu", "epochs": 10**6, "overwrite": True, "print_valid_sents": [0], "keep_best_ckpts": 1,
}  # fmt: skip
MODEL = {
    "initializer": "xavier_uniform", "embed_initializer": "xavier_uniform", "bias_initializer": "zeros",
    "tied_embeddings": True, "tied_softmax": True, "encoder": STACK, "decoder": STACK,
}  # fmt: skip
TESTING = {
    "eval_metrics": ["bleu"],
    "beam_size": 1,
    "batch_size": 4096,
    "batch_type": "token",
    "max_output_length": 100,
}


def main(train: str, valid: str, output: str, source: str, target: str, minutes: str) -> None:
    """Train, and write `scores.json` beside the output folder."""
    end, folder, moses = time.monotonic() + 60 * float(minutes), Path(output), MosesTokenizer()
    texts = {"train": load_pairs(data=train), "dev": load_pairs(data=valid)}
    rows = {name: [(row["source"], row["target"]) for row in text] for name, text in texts.items()}
    rows["test"] = list(zip(*(Path(path).read_text("utf-8").splitlines() for path in (source, target)), strict=True))
    (folder / "model").mkdir(parents=True, exist_ok=True)
    for name, pairs in rows.items():
        for side, lines in zip(("src", "trg"), zip(*pairs, strict=True), strict=True):
            (folder / f"{name}.{side}").write_text("".join(" ".join(line.split()) + "\n" for line in lines), "utf-8")
    words = [moses.tokenize(line, return_str=True, escape=False) for line in chain(*rows["train"])]
    codes, vocabulary = folder / "codes", folder / "vocabulary"
    with codes.open("w", encoding="utf-8") as file:
        learn_bpe(words, file, MERGES)
    with codes.open(encoding="utf-8") as file:
        bpe = BPE(file)
    pieces = sorted({piece for line in words for piece in bpe.process_line(line).split()})
    vocabulary.write_text("".join(f"{piece}\n" for piece in pieces), "utf-8")
    tokenizer = {"num_merges": MERGES, "codes": str(codes), "pretokenizer": "moses"}
    text = {"level": "bpe", "max_length": 62, "voc_file": str(vocabulary), "tokenizer_type": "subword-nmt"}
    sides = {side: text | {"lang": side, "tokenizer_cfg": tokenizer} for side in ("src", "trg")}
    data = {name: str(folder / name) for name in rows} | {"dataset_type": "plain"} | sides
    parts = {"data": data, "testing": TESTING, "training": TRAINING, "model": MODEL}
    settings = {"name": "peer", "model_dir": str(folder / "model"), "use_cuda": False, "random_seed": 42} | parts
    builders.ReduceLROnPlateau = lambda verbose, **options: PLATEAU(**options)  # torch has no `verbose` any more
    args = parse_global_args(settings, rank=0, mode="train")
    model, training_data, dev, test_data = prepare(args, rank=0, mode="train")

    class Timed(TrainManager):
        def _train_step(self, batch):
            self.stats.is_max_update = time.monotonic() > end
            return super()._train_step(batch)

    own = ("model_dir", "device", "n_gpu", "num_workers", "autocast", "seed")
    trainer = Timed(model=model, **{name: getattr(args, name) for name in own}, rank=0, train_args=args.train,
                    dev_args=set_validation_args(args.test))  # fmt: skip
    trainer.train_and_validate(training_data, dev)
    test(settings, str(folder / "found"), prepared={"dev": None, "test": test_data, "model": model})
    found = (folder / "found.test").read_text("utf-8").splitlines()
    scores = score_translations(found, [reference for _, reference in rows["test"]])
    folder.with_name("scores.json").write_text(json.dumps(scores) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
