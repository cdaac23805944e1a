"""Write a model of JoeyNMT's for the tests, with what JoeyNMT computes of it: `tests/fixtures/joeynmt/`.

Needs the package joeynmt 2.3.0 and nothing of this one:

    pip install joeynmt==2.3.0 && python scripts/make_joeynmt_fixture.py tests/fixtures/joeynmt
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from joeynmt import transformer_layers
from joeynmt.config import load_config, parse_global_args
from joeynmt.prediction import prepare
from joeynmt.search import search
from joeynmt.training import train
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

POSITIONS = 32  # instead of 5000, of which a checkpoint would hold two tables
NOUNS = {"dog": "Hund", "house": "Haus", "garden": "Garten", "river": "Fluss", "mountain": "Berg", "summer": "Sommer"}
VERBS = {"sees": "sieht", "loves": "liebt", "paints": "malt", "finds": "findet"}
ADJECTIVES = {"old": "alte", "small": "kleine", "green": "grüne", "quiet": "stille"}
#: With words, letters and spaces that the model never saw.
TESTS = ["The old dog sees the river", "the summery hound paintings", "Zebras  love ÄQUATOR 3½ gardens .", "a", "green"]


def sentences(count: int) -> list[tuple[str, str]]:
    """Pairs of German and English sentences."""
    draw, pairs = random.Random(17), []
    for _ in range(count):
        words = [draw.choice(list(table.items())) for table in (ADJECTIVES, NOUNS, VERBS, ADJECTIVES, NOUNS)]
        english, german = zip(*words, strict=True)
        pairs.append(
            ("the {} {} {} the {} {} .".format(*english), "das {} {} {} das {} {} .".format(*german)),
        )
    return pairs


def configuration(data: Path, output: Path) -> dict:
    """A configuration of JoeyNMT's for a tiny post-norm Transformer."""
    side = {
        "level": "bpe",
        "tokenizer_type": "subword-nmt",
        "tokenizer_cfg": {"codes": str(data / "codes"), "num_merges": 60, "pretokenizer": "none"},
    }
    layers = {
        "type": "transformer",
        "num_layers": 2,
        "num_heads": 3,
        "embeddings": {"embedding_dim": 12, "scale": True},
        "hidden_size": 12,
        "ff_size": 20,
        "dropout": 0.1,
        "layer_norm": "post",
        "activation": "gelu",
    }
    return {
        "name": "fixture",
        "joeynmt_version": "2.3.0",
        "model_dir": str(output),
        "use_cuda": False,
        "random_seed": 17,
        "data": {
            "train": str(data / "train"),
            "dev": str(data / "dev"),
            "dataset_type": "plain",
            "src": {"lang": "en", "lowercase": True, "voc_file": str(data / "src_vocab.txt"), **side},
            "trg": {"lang": "de", "lowercase": False, "voc_file": str(data / "trg_vocab.txt"), **side},
        },
        "testing": {"beam_size": 4, "beam_alpha": 1.0, "batch_size": 4, "max_output_length": 30},
        "training": {
            "optimizer": "sgd",
            "learning_rate": 0.05,
            "scheduling": "warmupinversesquareroot",
            "learning_rate_warmup": 5,
            "batch_size": 16,
            "epochs": 2,
            "validation_freq": 20,
            "logging_freq": 20,
            "print_valid_sents": [0],
            "early_stopping_metric": "loss",
            "max_output_length": 30,
            "overwrite": True,
        },
        "model": {
            "initializer": "xavier_uniform",
            "embed_initializer": "normal",
            "embed_init_weight": 0.3,
            "tied_embeddings": False,
            "tied_softmax": True,
            "encoder": layers,
            "decoder": layers,
        },
    }


def write_data(data: Path) -> None:
    """Texts, merges and vocabularies; merges of both sides, so that each vocabulary lacks pieces of the other."""
    pairs = sentences(200)
    for name, part in (("train", pairs[:180]), ("dev", pairs[180:])):
        for language, lines in zip(("en", "de"), zip(*part, strict=True), strict=True):
            (data / f"{name}.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with (data / "both").open("w", encoding="utf-8") as both:
        both.writelines(f"{line}\n" for pair in pairs for line in pair)
    with (data / "both").open(encoding="utf-8") as both, (data / "codes").open("w", encoding="utf-8") as codes:
        learn_bpe(both, codes, num_symbols=60)
    with (data / "codes").open(encoding="utf-8") as codes:
        bpe = BPE(codes)
    for number, side in enumerate(("src", "trg")):
        pieces = sorted({piece for pair in pairs for piece in bpe.process_line(pair[number]).split()})
        letters = sorted({letter for pair in pairs for letter in pair[number].replace(" ", "")})
        pieces = dict.fromkeys(["<unk>", "<pad>", "<s>", "</s>", *pieces, *letters, *(f"{x}@@" for x in letters)])
        (data / f"{side}_vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")


def expected(output: Path) -> dict:
    """What JoeyNMT makes of the test sentences: ids, logits, and translations with their log-probabilities."""
    config = load_config(output / "config.yaml")
    config["testing"]["load_model"] = str(output / "best.ckpt")
    model, *_, data = prepare(parse_global_args(config, rank=0, mode="translate"), rank=0, mode="translate")
    model.eval()
    tokenizer = data.tokenizer["en"]
    pieces = [tokenizer(tokenizer.pre_process(text)) for text in TESTS]
    ids, lengths, _ = data.sequence_encoder["en"](pieces, bos=False, eos=True)
    source = torch.tensor(ids)
    mask = (source != 1).unsqueeze(1)
    draw = torch.Generator().manual_seed(17)
    target = torch.randint(4, len(model.trg_vocab), (len(TESTS), 6), generator=draw)
    target[:, 0] = 2
    with torch.no_grad():
        encoded, _ = model.encoder(model.src_embed(source), torch.tensor(lengths), mask)
        trg_mask = torch.ones(len(TESTS), 1, 6, dtype=torch.bool)
        logits, *_ = model.decoder(model.trg_embed(target), encoded, None, mask, None, None, trg_mask)
    record = {
        "texts": TESTS,
        "source": [row[:length] for row, length in zip(ids, lengths, strict=True)],
        "target": target.tolist(),
        "logits": [[[round(x, 7) for x in step] for step in row] for row in logits.double().tolist()],
    }
    texts = ["ein alter Hund", "das kleine Haus liebt Zebras ."]
    tokenizer = data.tokenizer["de"]
    pieces = [tokenizer(tokenizer.pre_process(text)) for text in texts]
    record["target_texts"] = texts
    record["target_ids"] = [[model.trg_vocab.lookup(piece) for piece in row] + [3] for row in pieces]
    for name, size in (("greedy", 1), ("beam", 4)):
        batch = _Batch(source, torch.tensor(lengths), mask)
        output_ids, scores, _ = search(
            model=model, batch=batch, max_output_length=30, beam_size=size, beam_alpha=1.0, n_best=1, return_prob="hyp"
        )
        rows = [[int(x) for x in row if x != 1] for row in output_ids]
        rows = [row[: row.index(3) + 1] if 3 in row else row for row in rows]
        record[name] = rows
        record[f"{name}_texts"] = [
            tokenizer.post_process(words) for words in model.trg_vocab.arrays_to_sentences(output_ids, cut_at_eos=True)
        ]
    record["beam_scores"] = [float(score[0]) for score in scores]
    return record


class _Batch:
    """What `search` reads of a batch."""

    def __init__(self, src, src_length, src_mask):
        self.src, self.src_length, self.src_mask = src, src_length, src_mask
        self.src_prompt_mask = self.trg_input = self.trg_prompt_mask = None
        self.has_trg = False


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data):
        """Write what two layers share twice."""
        return True


def main(folder: str) -> None:
    """Train a model for some steps and copy its files into a folder."""
    transformer_layers.PositionalEncoding.__init__.__defaults__ = (0, POSITIONS)
    with tempfile.TemporaryDirectory() as temporary:
        data, output = Path(temporary) / "data", Path(temporary) / "model"
        data.mkdir()
        output.mkdir()
        write_data(data)
        config_file = output / "config.yaml"
        config_file.write_text(
            yaml.dump(configuration(data, output), Dumper=_WithoutAliases, sort_keys=False), encoding="utf-8"
        )
        train(rank=0, world_size=1, cfg=load_config(config_file), skip_test=True)
        record = expected(output)
        written = Path(folder)
        written.mkdir(parents=True, exist_ok=True)
        for name in ("best.ckpt", "config.yaml", "src_vocab.txt", "trg_vocab.txt", "codes"):
            source = output / name if (output / name).exists() else data / name
            shutil.copyfile(source.resolve(), written / name)
        # Folders of this machine are of no use elsewhere: names of files stay.
        text = (written / "config.yaml").read_text(encoding="utf-8")
        (written / "config.yaml").write_text(text.replace(f"{data}/", "").replace(str(output), "."), encoding="utf-8")
        (written / "expected.json").write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
