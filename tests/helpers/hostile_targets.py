"""Each file that a command reads, with the command: what `test_hostile_files.py` damages and runs."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experimenting import TINY as CHANGES
from random_trees import TINY

HAS_CTRANSLATE2 = importlib.util.find_spec("ctranslate2")
_FORMS = {
    ".json": "json", ".jsonl": "lines of json", ".yaml": "yaml", ".yml": "yaml",
    ".safetensors": "safetensors", ".gz": "gzip",
    **dict.fromkeys([".bin", ".pt", ".pth", ".arrow", ".npy", ".parquet", ".ckpt", ".npz", ".spm"], "bytes"),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A file and a command that reads it.

    `writes` names what the command may write. A `tolerant` command may succeed with a damaged file: any text may be
    meant, and what is incomplete is made anew.
    """

    file: str
    command: str
    writes: tuple[str, ...] = ()
    tolerant: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.command}"

    @property
    def form(self) -> str:
        """What the file's valid content is."""
        return _FORMS.get(Path(self.file).suffix, "text")


def _reads(command: str, *files: str, folder: str = "", **options) -> Iterator[Target]:
    for file in files:
        yield Target(folder + file, command, **options)


_NEW = {"writes": ("new",)}
EXPERIMENT = ["experiment", "table4", "--output", "runs", "--set", *CHANGES, "max_length=60", "vocab_size=700"]
_PUSH, _RESUME = "push model me/it --dry-run", "train recipe.yaml --output stopped --quiet"
_CONTINUE = "translate model --input in.txt --output out.txt --resume"
_PREPARED = "train recipe.yaml --prepared prepared --output new --quiet"
_PAIRS = (
    "prepare recipe.yaml --output new --quiet --train-source none --train-target none --data-dir none"
    " --validation-source none --validation-target none --validation-size 5 --train-data pairs/pairs."
)
_TUNE = "train finetune --from imported-marianmt --output new --quiet --max-steps 1 --validation-size 2"
_MODEL_SETTINGS = ("config.json", "generation_config.json")
_MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
_STATE = ("checkpoint.json", "trainer_state.json", "config.json", "model.safetensors")
_TORCH_STATE = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")

TARGETS = [
    # A model.
    *_reads("translate model words", *_MODEL, folder="model/"),
    *_reads(_PUSH, *_MODEL, folder="model/"),
    *_reads(_PUSH, "recipe.yaml", "training_log.jsonl", folder="model/", tolerant=True),
    *_reads("translate shards words", "shards/model.safetensors.index.json"),
    *_reads("import pickled --output new", "pickled/pytorch_model.bin", tolerant=True, **_NEW),
    # What goes onto a card.
    *_reads(f"{_PUSH} --evaluation scores.json", "scores.json"),
    # A recipe.
    *_reads("prepare recipe.yaml --output new --quiet", "recipe.yaml", **_NEW),
    # A run that is resumed.
    # An edited recipe is set aside: the run has its settings in its checkpoints too.
    *_reads(_RESUME, "recipe.yaml", folder="stopped/", writes=("stopped",), tolerant=True),
    *_reads(_RESUME, "checkpoints/contents.json", folder="stopped/", writes=("stopped",)),
    *_reads(_RESUME, "training_log.jsonl", "checkpoints/tokenizer/tokenizer.json", folder="stopped/",
            writes=("stopped",), tolerant=True),
    *_reads(_RESUME, *_STATE, *_TORCH_STATE, folder="stopped/checkpoints/checkpoint-3/", writes=("stopped",),
            tolerant=True),
    # Checkpoints that are averaged.
    *_reads("average run --output new --last 1", *_STATE, folder="run/checkpoints/checkpoint-4/", tolerant=True,
            **_NEW),
    # Prepared pairs.
    *_reads(_PREPARED, "prepared/manifest.json", "prepared/train.lengths.npy", "prepared/tokenizer/tokenizer.json",
            "prepared/train-00000.arrow", **_NEW),
    *_reads("prepare recipe.yaml --output half --quiet", "preparation.json", "tokenizer/tokenizer.json",
            folder="half/", writes=("half",)),
    *_reads("prepare recipe.yaml --output half --quiet", "half/train-00000.arrow", writes=("half",), tolerant=True),
    *_reads("clean recipe.yaml --output cleaned --quiet", "cleaned/cleaning.json", writes=("cleaned",)),
    # Text.
    *_reads("prepare recipe.yaml --output new --quiet", "text/train.en", tolerant=True, **_NEW),
    *(Target(f"pairs/pairs.{kind}", _PAIRS + kind, ("new",), True) for kind in ("tsv", "csv", "jsonl", "parquet")),
    *_reads("tokenizer in.txt --vocab-size 300 --output new", "in.txt", tolerant=True, **_NEW),
    *_reads("translate model --input in.txt.gz --output new", "in.txt.gz", tolerant=True, **_NEW),
    *_reads("translate model --input in.txt --prefix prefix.txt", "in.txt", "prefix.txt", tolerant=True),
    *_reads("score model --source in.txt --target reference.txt", "in.txt", "reference.txt", tolerant=True),
    *_reads("evaluate model --source in.txt --reference reference.txt", "reference.txt", tolerant=True),
    # An output that is continued.
    *_reads(_CONTINUE, "out.txt.unfinished.json", writes=("out.txt", "out.txt.unfinished.json")),
    *_reads(_CONTINUE, "out.txt", writes=("out.txt", "out.txt.unfinished.json", "nothing"), tolerant=True),
    # Trees.
    *_reads("parse evaluate --trees gold.trees --predicted predicted.trees", "gold.trees", "predicted.trees",
            tolerant=True),
    *_reads(" ".join(["parse train --trees gold.trees --dev predicted.trees --output new", *TINY]), "gold.trees",
            tolerant=True, **_NEW),
    *_reads("parse predict parser --input words.txt", "words.txt", tolerant=True),
    *_reads("parse predict parser --input words.txt", "tokenizer.json", "generation_config.json", folder="parser/"),
    # Experiments.
    *_reads(" ".join([*EXPERIMENT, "--report"]), "result.json", folder="runs/table4/laptop/transformer/",
            writes=("runs",)),
]  # fmt: skip
if HAS_CTRANSLATE2:
    TARGETS += _reads("translate exported words", "export.json", "config.json", "shared_vocabulary.json",
                      "generation_config.json", "tokenizer.json", "model.bin", folder="exported/")  # fmt: skip
TARGETS += [
    # Models of other toolkits.
    *_reads("import marianmt --output new", "source.spm", "target.spm", "vocab.json", "tokenizer_config.json",
            *_MODEL_SETTINGS, "model.safetensors", folder="marianmt/", tolerant=True, **_NEW),
    *_reads("import relu-two --output new", "model.npz", "model.npz.decoder.yml", "target.yml", folder="relu-two/",
            tolerant=True, **_NEW),
    *_reads("import src-spm --output new", "src-spm/joint.spm", tolerant=True, **_NEW),
    *_reads("import fairseq/model.pt --output new", "model.pt", "dict.de.txt", folder="fairseq/", tolerant=True,
            **_NEW),
    *_reads("translate imported-marianmt words", "config.json", "tokenizer.json", "target_tokenizer.json",
            "tokenizer_config.json", folder="imported-marianmt/", tolerant=True),
    *_reads(f"{_TUNE} --train-source train.en --train-target train.de --data-dir text", *_MODEL, "import.json",
            "target_tokenizer.json", folder="imported-marianmt/", tolerant=True, **_NEW),
    *_reads(f"{_TUNE} --train-data memory.tmx --source-column en --target-column de", "memory.tmx", tolerant=True,
            **_NEW),
]  # fmt: skip
