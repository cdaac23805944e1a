"""Recipes: all settings of one training as flat YAML; each field is also an option of `vaswani train`.

`Recipe` holds the defaults, the paper's wherever it gives a value; `VaswaniTrainingArguments` takes them from there.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import os
import re
import typing
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from ..errors import UserError, reading
from ..hardware import MOST_WORKERS
from ..json_and_yaml import MOST_YAML, parse_yaml, read_text
from ..model.settings_vaswani import MAX_EXTRA_TOKENS, broken_range


def _option(group: str, default, help_text: str, flag: str | None = None):
    """Return a field of a group of options; `flag` is a shorter name of its option."""
    return dataclasses.field(default=default, metadata={"help": help_text, "group": group, "flag": flag})


AUTO = "auto"  # the machine decides
AutoInt, AutoFloat = int | Literal["auto"], float | Literal["auto"]
BLEU_TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "spm", "flores101", "flores200", "spBLEU-1K")
DEFAULT_AUGMENTATION = {
    "upper": 0.07, "title": 0.04, "lower": 0.03, "punctuation": 0.04, "typos": 0.08, "emoji": 0.05, "numbers": 0.03,
    "fragments": 0.03, "repeat": 0.02,
}  # fmt: skip
DATA, TOKENIZER, MODEL = "data", "tokenizer", "model"
_data, _tokenizer, _model, _batches, _optimizer, _checks, _decoding, _output = (  # fields of each of these groups
    functools.partial(_option, group)
    for group in (DATA, TOKENIZER, MODEL, "batches", "optimizer", "validation and checkpoints", "decoding", "output")
)


@dataclasses.dataclass
class Recipe:
    """All settings of one training run, which their help documents (Recipe fields). `check_recipe` checks values.

    A `preset` given here leaves label smoothing and vocabulary alone; `load_recipe` takes those too.
    """

    train_source: str | None = _data(None, "text file of training sources, pattern (a.*.en.gz) or URL (s3://b/a.en)")
    train_target: str | None = _data(None, "text file of training targets, aligned with train_source")
    train_data: str | None = _data(None, "instead: TSV, CSV, JSON lines, Parquet, TMX, .po, XLIFF, a folder, Hub data")
    prepared: str | None = _data(None, "folder or URL made by `vaswani prepare`, to train on instead of the text")
    validation_source: str | None = _data(None, "text file of validation sources")
    validation_target: str | None = _data(None, "text file of validation targets")
    validation_data: str | None = _data(None, "instead of two text files, as train_data")
    validation_size: AutoInt = _data(1000, "pairs held out of the training data when there is no validation data")
    data_dir: str | None = _data(None, "folder that relative data paths start from; the current one if none")
    data_config: str | None = _data(None, "configuration of a Hub dataset, such as de-en for wmt14")
    train_split: str = _data("train", "split of Hub data or a folder to train on, or of any text a slice: train[:1000]")
    validation_split: str | None = _data(None, "the same to validate on, of the training text if no other is given")
    source_column: str = _data("source", "column of the sources (of TSV a number too), its key or language: en")
    target_column: str = _data("target", "column of the targets (of TSV a number too), its key or language: de")
    max_length: int = _data(256, "pairs with more tokens than this on a side are dropped (and counted)")
    max_length_ratio: float = _data(3.0, "drop pairs with one side over this many times as long; 0: no limit")
    fuzzy_matches: bool = _data(False, "also show sources beside the translation of their nearest neighbour")
    augmentation: str | None = _data(None, "change some of the pairs: default, none, or upper:0.05,typos:0.1")

    tokenizer: str | None = _tokenizer(None, "folder of a trained tokenizer; none: train one on the data")
    tokenizer_kind: str = _tokenizer("bpe", "kind to train: bpe or wordpiece")
    vocab_size: AutoInt = _tokenizer(37_000, "entries shared by source and target")

    from_model: str | None = _model(
        None, "model folder to start from (fine-tuning): weights, sizes, tokenizer and search are its own", "--from"
    )
    preset: str = _model("base", "sizes: base, big, parsing, of Table 3 (table3-c-dff-1024), or student-6-2")
    d_model: AutoInt | None = _model(None, "width of the model; from the preset if none, as all below")
    d_ff: AutoInt | None = _model(None, "inner width of the feed-forward sublayers")
    num_heads: AutoInt | None = _model(None, "attention heads")
    d_k: int | None = _model(None, "width of a head's queries and keys; d_model / num_heads if none")
    d_v: int | None = _model(None, "width of a head's values; d_model / num_heads if none")
    encoder_layers: AutoInt | None = _model(None, "layers of the encoder")
    decoder_layers: AutoInt | None = _model(None, "layers of the decoder")
    dropout: AutoFloat | None = _model(None, "dropout on sublayer outputs and embedding sums")
    attention_dropout: float | None = _model(None, "dropout on attention weights")
    activation_dropout: float | None = _model(None, "dropout inside the feed-forward sublayers")
    attention_bias: bool | None = _model(None, "biases in the attention projections")
    initialization: str | None = _model(None, "new weights: tensor2tensor (the authors' code), xavier or normal (0.02)")
    position_encoding: str | None = _model(None, "sinusoidal or learned")
    max_position_embeddings: int | None = _model(None, "positions to learn, in tokens; sinusoids have no end")
    attention_window: int | None = _model(None, "positions that self-attention sees; all if none (Section 4)")

    tokens_per_batch: AutoInt = _batches(
        25_000, "source tokens, and as many target tokens, of one optimizer step over all devices, padding not counted"
    )
    tokens_per_device: AutoInt = _batches(
        AUTO, "of these, about what one device takes at once; auto: what its memory holds; 4096 on a CPU or with FSDP"
    )
    padding_free: bool | Literal["auto"] = _batches(
        AUTO, "train on packed sentences, without padding; in a recipe also auto: on NVIDIA GPUs since the A100"
    )
    augmentation_start: AutoInt = _batches(0, "steps before augmentation changes any pair")
    data_workers: AutoInt = _batches(AUTO, "processes that make batches; 0: the training's own; auto: some for a GPU")
    ddp_timeout: int = _batches(1800, "seconds to wait for an unresponsive process before giving up")

    max_steps: AutoInt = _optimizer(100_000, "optimizer steps in all")
    max_minutes: float = _optimizer(0.0, "stop after this many minutes of training; 0 for no limit")
    warmup_steps: AutoInt = _optimizer(4000, "optimizer steps over which the learning rate grows")
    lora_rank: int | None = _optimizer(None, "train adapters of this rank (LoRA) in place of the weights of from_model")
    decline_steps: AutoInt = _optimizer(0, "last steps, in which the rate also falls to zero; 0: none, as in the paper")
    learning_rate_scale: AutoFloat = _optimizer(1.0, "factor on the learning rate of the paper's Equation 3")
    label_smoothing: AutoFloat = _optimizer(0.1, "share of the target probability spread over the vocabulary")
    adam_beta1: float = _optimizer(0.9, "Adam's beta 1")
    adam_beta2: float = _optimizer(0.98, "Adam's beta 2")
    adam_epsilon: float = _optimizer(1e-9, "Adam's epsilon")
    max_gradient_norm: float = _optimizer(0.0, "clip gradients to this norm; 0 for none, as in the paper")
    precision: str = _optimizer("auto", "fp32, bf16, fp16, or auto: bf16 where the device computes in it")
    attention: str = _optimizer("auto", "eager, sdpa, ...; auto: eager on a CPU without a window, else sdpa")
    fused_loss: bool = _optimizer(True, "projection and loss in blocks: a batch's logits never exist at once")
    compile: bool = _optimizer(False, "compile the layers with torch.compile: a minute at the start")
    seed: int = _optimizer(0, "of held-out pairs, samples, initial weights, dropout and shuffling")
    deterministic: bool = _optimizer(False, "on a GPU too the same weights, bit for bit, for a seed: slower")

    evaluate_every: AutoInt = _checks(1000, "optimizer steps between validations, each with a checkpoint")
    log_every: int = _checks(50, "optimizer steps between lines of the training log")
    report_to: str = _checks("none", "what else gets the log, comma-separated: tensorboard, wandb, ...")
    validation_bleu: AutoInt = _checks(500, "pairs to validate on, a fixed sample translated greedily; 0: loss on all")
    bleu_tokenizer: str | None = _checks(
        None, f"sacreBLEU's: {', '.join(BLEU_TOKENIZERS)}; if none, by the target's language or script"
    )
    best_by: str = _checks("loss", "what the best checkpoint is best by: loss or bleu")
    early_stopping: int = _checks(0, "stop after this many validations without a better one; 0 for never")
    average_every: int = _checks(0, "steps between checkpoints to average, near the end; 0: those of validations")
    keep_checkpoints: int = _checks(5, "latest checkpoints kept, beside the best; at least those to average")
    average_checkpoints: int = _checks(5, "average this many latest checkpoints at the end; 0: no")
    keep_weights: str = _checks("better", "average, best, last, or better (of best and average, by validation)")

    num_beams: int | None = _decoding(None, "beam size the saved model decodes with; if none 4, or that of from_model")
    length_penalty: AutoFloat | None = _decoding(
        None, "alpha of the length normalisation; auto: what gives most validation BLEU; if none 0.6, or from_model's"
    )
    max_extra_tokens: int | None = _decoding(
        None, f"tokens an output may be longer than its source; if none {MAX_EXTRA_TOKENS}, or that of from_model"
    )

    output: str | None = _output(None, "folder for the model; runs/NAME-OF-THE-RECIPE if none")
    overwrite: bool = _output(
        False,
        "start again where another run has been: its model, checkpoints, log,"
        " TensorBoard events and data prepared otherwise are removed from the output folder. An interrupted run of the"
        " same settings is resumed",
    )

    def model_overrides(self) -> dict:
        """Return the configuration fields that this recipe sets over its preset."""
        names = [field.name for field in dataclasses.fields(self) if field.metadata["group"] == MODEL]
        values = {name: getattr(self, name) for name in names if name not in ("from_model", "preset")}
        return {name: value for name, value in values.items() if value not in (None, AUTO)}

    def __post_init__(self):
        for name in PATHS:
            if getattr(self, name) == "":  # it would be the current folder
                raise UserError(f"{name} is empty (an unset variable?): give a path, . for the current folder")

    @property
    def save_every(self) -> int:
        """Return the steps between the checkpoints that are averaged."""
        return self.average_every or self.evaluate_every

    @property
    def tokenizer_folder(self) -> str | None:
        """Return the tokenizer's folder; None if it is trained on the data."""
        return self.tokenizer if self.from_model is None else self.from_model


#: Fields that `auto` leaves to the text and the time (`training/settings.py`).
CHOSEN = (
    "validation_size", "augmentation", "augmentation_start", "vocab_size", "d_model", "d_ff", "num_heads",
    "encoder_layers", "decoder_layers", "dropout", "tokens_per_batch", "max_steps", "warmup_steps", "decline_steps",
    "learning_rate_scale", "label_smoothing", "evaluate_every", "validation_bleu",
)  # fmt: skip
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
PATHS = (
    "train_source", "train_target", "train_data", "prepared", "validation_source", "validation_target",
    "validation_data", "data_dir", "tokenizer", "from_model", "output",
)  # fmt: skip
_FOLDERS = ("output", "prepared", "tokenizer", "from_model", "data_dir")
_FIELDS = {field.name: field for field in dataclasses.fields(Recipe)}
_TYPES = typing.get_type_hints(Recipe)
# Fields of earlier versions: with the default that changed nothing, and those that never changed a training.
_GONE = {"bpe_dropout": 0.0, "checkpoint_minutes": 0.0, "compress_gradients": False}
_IDLE = ("expected_pairs", "expected_source_length", "expected_target_length")


def field_type(name: str) -> tuple[type, bool]:
    """Return the plain type of a field, and whether it may be none."""
    kinds = typing.get_args(_TYPES[name]) or (_TYPES[name],)
    return kinds[0], type(None) in kinds


def _is_automatic(name: str, value) -> bool:
    """Return whether a value leaves the field to the machine."""
    return value == AUTO and Literal["auto"] in typing.get_args(_TYPES[name])


def _nearest(name: str, names: Iterable[str], command: str) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"`{command}` lists them"


def convert(name: str, value) -> object:
    """Convert a value from YAML or the command line (a string) to the type of its field.

    Raises:
        UserError: for a value of another type, also where YAML has made a number, a date or true and false of a text,
            for a number beyond 64 bits, and for text with control characters or bytes that are not UTF-8.
    """
    kind, optional = field_type(name)
    text = value.strip() if isinstance(value, str) else value
    if optional and str(text).lower() in ("none", "null"):
        return None
    if _is_automatic(name, text):
        return AUTO
    if kind is str:
        rule = "text in UTF-8 without control characters, in YAML in quotes where it looks like something else"
        if isinstance(text, str | os.PathLike) and all(unicodedata.category(c) not in ("Cc", "Cs") for c in str(text)):
            # The shell expands ~ neither in a file nor in --output=~/x.
            return os.path.expanduser(text) if name in _FOLDERS else str(text)  # noqa: PTH111 - as `home_path`
    elif kind is bool:
        rule = "true or false"
        if (word := str(text).lower()) in ("true", "yes", "false", "no"):
            return word in ("true", "yes")
    else:
        rule = "a whole number below 2**63" if kind is int else "a number"
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            converted = None if isinstance(text, bool) else kind(text)
            is_exact = math.isfinite(converted) and (isinstance(text, str) or converted == text)
            if is_exact and (kind is float or abs(converted) < 2**63):
                return converted
    other = " or auto" if _is_automatic(name, AUTO) else ""
    raise UserError(f"{name} is {value!r:.100}: it must be {rule}{other}")


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with the package."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))


def read_recipe(name_or_path: str) -> tuple[str, str]:
    """Return text and name of a recipe, shipped or one's own; raises `UserError` if missing, too large or no text."""
    path, names = Path(name_or_path), recipe_names()
    if path.suffix in (".yaml", ".yml") or path.is_file() or (path.exists() and name_or_path not in names):
        return read_text(path, MOST_YAML), path.stem
    if name_or_path not in names:
        nearest = _nearest(name_or_path, names, "vaswani recipes")
        raise UserError(f"there is no recipe {name_or_path!r:.300} and no such file: {nearest}")
    return Path(__file__).with_name(f"{name_or_path}.yaml").read_text("utf-8"), name_or_path


def load_recipe(name_or_path: str, overrides: dict | None = None) -> Recipe:
    """Load a shipped recipe by name (`recipe_names()`), or one's own by path, with some fields replaced.

    `overrides` are names and values, as on the command line; a preset replaces what the file says of its fields,
    a table of pairs its two text files, and these a table.

    Raises:
        UserError: for a missing or malformed file, unknown or repeated fields, wrong types and values out of range.
    """
    from ..model.configuration_vaswani import PRESETS

    text, name = read_recipe(name_or_path)
    with reading(name_or_path):
        values, overrides = dict(parse_yaml(text) or {}), overrides or {}
    values = {name: value for name, value in values.items() if name not in _IDLE and value != _GONE.get(name, _GONE)}
    preset = PRESETS.get(str(overrides.get("preset", values.get("preset"))), {})
    replaced = {*preset} if "preset" in overrides else set()
    for part in ("train", "validation"):
        replaced |= {f"{part}_source", f"{part}_target"} if overrides.get(f"{part}_data") else set()
        replaced |= {f"{part}_data"} if overrides.get(f"{part}_source") else set()
    kept = {name: value for name, value in values.items() if name not in replaced}
    values = {name: preset[name] for name in ("label_smoothing", "vocab_size") if name in preset} | kept | overrides
    for field in values:
        if field not in _FIELDS:
            nearest = _nearest(f"{field!s:.100}".replace("-", "_"), _FIELDS, "vaswani train --help")
            raise UserError(f"there is no recipe field {str(field)!r:.100}: {nearest}")
    recipe = Recipe(**{field: convert(field, value) for field, value in values.items()})
    if recipe.output is None:
        recipe.output = str(Path("runs") / name)
    check_recipe(recipe)
    return recipe


_CHOICES = {
    "tokenizer_kind": ("bpe", "wordpiece"),
    "precision": ("auto", "fp32", "bf16", "fp16"),
    "bleu_tokenizer": BLEU_TOKENIZERS,
    "best_by": ("loss", "bleu"),
    "keep_weights": ("better", "average", "best", "last"),
}
_RULES = (
    ("lora_rank tokens_per_batch tokens_per_device ddp_timeout max_steps warmup_steps evaluate_every"
     " log_every keep_checkpoints", lambda value: value >= 1, "1 or more"),
    ("validation_size max_minutes max_gradient_norm validation_bleu early_stopping average_checkpoints"
     " average_every decline_steps seed augmentation_start", lambda value: value >= 0, "0 or more"),
    ("data_workers", lambda number: 0 <= number <= MOST_WORKERS, f"from 0 to {MOST_WORKERS}"),
    ("max_length", lambda length: length >= 2, "2 or more, since </s> counts"),
    ("max_length_ratio", lambda ratio: ratio == 0 or ratio >= 1, "1 or more, or 0 for no limit"),
    ("seed", lambda seed: seed < 2**32, "below 2**32"),
    ("learning_rate_scale adam_epsilon", lambda value: value > 0, "above 0"),
    ("label_smoothing adam_beta1 adam_beta2", lambda share: 0 <= share < 1, "at least 0 and below 1"),
    *((name, choices.__contains__, f"one of {', '.join(choices)}") for name, choices in _CHOICES.items()),
)  # fmt: skip


def augmentation_shares(augmentation: str | None) -> dict[str, float]:
    """Return the shares of the pairs for `augmentation`, by the kind of change; raises `UserError` for what is none."""
    if augmentation in ("default", "none", AUTO):
        return DEFAULT_AUGMENTATION if augmentation == "default" else {}
    with reading(f"augmentation is {augmentation!r:.100}"):
        parts = (part.partition(":") for part in (augmentation or "").split(",") if part)
        shares = {kind.strip(): float(share or "nan") for kind, _, share in parts}
        is_known = shares.keys() <= DEFAULT_AUGMENTATION.keys()
        if not (is_known and 0 <= min(shares.values(), default=0) <= sum(shares.values()) <= 1):
            raise ValueError(f"it must be default, none, or shares of {', '.join(DEFAULT_AUGMENTATION)}, 1 at most")
    return shares


def languages_of(recipe: Mapping) -> list[str]:
    """Return source and target language if files or columns are named by codes of two characters; else empty."""
    columns = [recipe.get("source_column"), recipe.get("target_column")]
    files = [str(recipe.get(f"train_{side}")).removesuffix(".gz") for side in ("source", "target")]
    endings = [name.rpartition(".")[2] for name in files]
    if all(re.search(r"(^|[\\/])(distilled|back_translated)\.[^.]+$", name) for name in files):  # by what a teacher has
        codes = ["" if code in ("source", "target") else code for code in endings]
        return codes if codes[0] != codes[1] else []
    for codes in (endings, columns):
        codes = [re.sub("[-_]([A-Za-z]{2}|[A-Z][a-z]{3})$", "", code or "") for code in codes]  # of a region
        if codes[0] != codes[1] and all(re.fullmatch("[a-z]{2}", code) for code in codes):
            return codes
    return []


def check_recipe(recipe: Recipe) -> None:
    """Check ranges, choices, and that the model can be built; raises `UserError` naming field, value and rule."""
    augmentation_shares(recipe.augmentation)
    for mistake in _mistakes(recipe):
        raise UserError(mistake)


def _mistakes(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong: values out of range, and those that would be ignored or fail after hours."""
    for names, is_right, rule in _RULES:
        for name in names.split():
            value = getattr(recipe, name)
            if value is not None and not _is_automatic(name, value) and not is_right(value):
                other = ", or none" if field_type(name)[1] else ", or auto" if _is_automatic(name, AUTO) else ""
                yield f"{name} is {value!r}: it must be {rule}{other}"
    for name in ("num_beams", "length_penalty", "max_extra_tokens"):
        value = getattr(recipe, name)
        if value is not None and not _is_automatic(name, value) and (rule := broken_range(name, value)):
            yield f"{name} is {value}: it must be {rule}"
    if recipe.best_by == "bleu" and recipe.validation_bleu == 0:
        yield "best_by is 'bleu' but validation_bleu is 0: set validation_bleu, or best_by to 'loss'"
    if recipe.from_model is None and recipe.lora_rank is not None:
        yield f"lora_rank is {recipe.lora_rank} and there is no model to adapt: give --from FOLDER too"
    of_model = [name for name in recipe.model_overrides() if name not in DROPOUTS]
    of_model += ["preset", *(field.name for field in _FIELDS.values() if field.metadata["group"] == TOKENIZER)]
    for name in of_model if recipe.from_model is not None else ():
        if getattr(recipe, name) != _FIELDS[name].default:
            problem = f"{name} is {getattr(recipe, name)!r} and a model to start from is given, which has its own"
            yield f"{problem}: leave {name} out (the recipe `finetune` does), or --from"
    config = model_config(recipe, recipe.vocab_size)
    if config.position_encoding == "learned" and recipe.max_length > config.max_position_embeddings:
        positions = f"the {config.max_position_embeddings} positions that the model learns"
        yield f"max_length {recipe.max_length} is above {positions}: raise max_position_embeddings or lower max_length"


def model_config(recipe: Recipe, vocab_size: int) -> "VaswaniConfig":  # noqa: F821 (transformers takes seconds to import)
    """Return the configuration of the recipe's model, for a vocabulary of this many entries.

    Raises:
        UserError: for an unknown preset or sizes that no model can have, in one line.
    """
    from ..model.configuration_vaswani import VaswaniConfig

    overrides = recipe.model_overrides()
    if AUTO in (recipe.d_model, recipe.num_heads):  # which is chosen to go with the other
        overrides |= {"d_model": AUTO, "num_heads": AUTO}
    if {"d_model", "num_heads"} & overrides.keys():  # a preset's own head widths belong to its own d_model and heads
        overrides = {"d_k": None, "d_v": None, **overrides}
    smoothing = Recipe.label_smoothing if recipe.label_smoothing == AUTO else recipe.label_smoothing
    overrides |= {"vocab_size": vocab_size, "label_smoothing": smoothing}
    overrides = {name: value for name, value in overrides.items() if value != AUTO}
    with reading("the recipe's model"):
        return VaswaniConfig.from_preset(recipe.preset, **overrides)
