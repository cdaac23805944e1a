"""The commands around text and recipes: `vaswani prepare`, `tokenizer`, `recipes` and `presets`."""

import argparse
import dataclasses
import sys
from itertools import chain
from pathlib import Path

from ..errors import UserError
from .command import add_command, add_engine_options, add_recipe_options, resumable


def add_tokenizer(commands) -> None:
    """Add `vaswani tokenizer`."""
    parser = add_command(commands, "tokenizer", _tokenizer, "train a shared subword vocabulary on text files")
    parser.add_argument("files", metavar="FILE", nargs="+", help="text files of both languages (.gz works)")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder for the tokenizer")
    parser.add_argument("--kind", default="bpe", choices=["bpe", "wordpiece"], help="default: bpe, as for en-de")
    parser.add_argument("--vocab-size", type=int, help="entries (default: 37000 for bpe, 32000 for wordpiece)")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer in the folder")


def _tokenizer(arguments: argparse.Namespace) -> int:
    from ..data.text_files import read_lines
    from ..data.tokenization import train_tokenizer
    from ..output_folder import OutputFolder, locked

    with locked(arguments.output):
        folder, names = Path(arguments.output), ("tokenizer_config.json", "tokenizer.json")
        if (folder / names[-1]).exists() and not arguments.overwrite:
            raise UserError(f"{folder} already holds a tokenizer: give another --output, or --overwrite to replace it")
        output = OutputFolder(folder)
        output.check_ours()
        output.check(names)
        lines = chain.from_iterable(read_lines(Path(file)) for file in arguments.files)
        tokenizer = train_tokenizer(
            lines, kind=arguments.kind, vocab_size=arguments.vocab_size, show_progress=sys.stderr.isatty()
        )
        with output.staging() as staging:
            tokenizer.save_pretrained(staging)
            output.place(staging, last=names[-1], stale=names)
    print(f"tokenizer of {len(tokenizer):,} entries: {folder}")
    return 0


def add_prepare(commands) -> None:
    """Add `vaswani prepare`."""
    from ..recipes.recipe import DATA, TOKENIZER, Recipe

    parser = add_command(
        commands,
        "prepare",
        _prepare,
        "tokenise a recipe's data once, for `vaswani train RECIPE --prepared FOLDER`",
        "Tokenise and filter the data of a recipe into a folder that `vaswani train RECIPE --prepared FOLDER` maps into"
        " memory. The same command resumes after an interruption. With --check give the folder instead of a recipe.",
    )
    parser.usage = "vaswani prepare RECIPE --output FOLDER [--workers N] [--FIELD VALUE ...]"
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    parser.add_argument(
        "--output", metavar="FOLDER", help="the folder to make, or to resume in; also s3://bucket/folder"
    )
    add_engine_options(parser, "processes (default: one per processor, fewer for a short text)")
    parser.add_argument("--overwrite", action="store_true", help="remove an earlier preparation in the folder first")
    parser.add_argument("--check", action="store_true", help="read all of a prepared folder and compare its checksums")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    fields = [field for field in dataclasses.fields(Recipe) if field.metadata["group"] in (DATA, TOKENIZER)]
    fields = [field for field in fields if field.name != "prepared" and not field.name.startswith("expected_")]
    fields += [field for field in dataclasses.fields(Recipe) if field.name in ("seed", "from_model")]
    add_recipe_options(parser, fields)


def _prepare(arguments: argparse.Namespace) -> int:
    from ..data.prepared import verify_prepared

    if arguments.check:
        prepared = verify_prepared(arguments.recipe)
        shards = sum(len(part["shards"]) for part in prepared.manifest["parts"].values())
        pairs = len(prepared.train) + len(prepared.validation)
        print(f"{arguments.recipe}: {pairs:,} pairs in {shards:,} shards, all unchanged")
        return 0
    if arguments.output is None:
        raise UserError("no folder to prepare the data in: give --output FOLDER")
    return _prepare_pairs(arguments)


@resumable
def _prepare_pairs(arguments: argparse.Namespace) -> int:
    from ..data.filtering import FilterCounts
    from ..data.prepare import prepare
    from ..data.recipe_data import expand_home
    from ..recipes.recipe import Recipe, load_recipe

    names = {field.name for field in dataclasses.fields(Recipe)} - {"output", "overwrite"}
    overrides = {name: value for name, value in vars(arguments).items() if name in names}
    no_limit = dict.fromkeys(("tokens_per_batch", "tokens_per_device"), 10**9)  # batches are made in training
    recipe = load_recipe(arguments.recipe, overrides | no_limit)
    expand_home(recipe)
    manifest = prepare(
        recipe, arguments.output, arguments.workers, progress=not arguments.quiet, overwrite=arguments.overwrite,
        engine=arguments.engine,
    )  # fmt: skip
    for label, part in (("training", "train"), ("validation", "validation")):
        print(f"{label}: {FilterCounts(**manifest['parts'][part]['counts'])}")
    print(f"prepared: {arguments.output}")
    return 0


def add_lists(commands) -> None:
    """Add `vaswani recipes` and `vaswani presets`."""
    parser = add_command(commands, "recipes", _recipes, "list the recipes that ship with the package")
    parser.add_argument("name", nargs="?", help="print this recipe")
    parser = add_command(commands, "presets", _presets, "list models by name, the paper's first, with their parameters")


def _recipes(arguments: argparse.Namespace) -> int:
    from ..recipes.recipe import describe, read_recipe, recipe_names

    if arguments.name:
        print(read_recipe(arguments.name)[0], end="")
        return 0
    names = recipe_names()
    for name in names:
        print(f"{name:{max(map(len, names))}}  {describe(name)}")
    return 0


def _presets(arguments: argparse.Namespace) -> int:
    import torch

    from ..model.configuration_vaswani import VaswaniConfig
    from ..model.modeling_vaswani import VaswaniForConditionalGeneration

    for name in VaswaniConfig.preset_names():
        config = VaswaniConfig.from_preset(name)
        with torch.device("meta"):
            parameters = VaswaniForConditionalGeneration(config).num_parameters()
        print(
            f"{name:28} {parameters / 1e6:7.2f}M parameters: {config.encoder_layers}+{config.decoder_layers} layers,"
            f" d_model {config.d_model}, d_ff {config.d_ff}, {config.num_heads} heads, d_k {config.d_k},"
            f" d_v {config.d_v}, dropout {config.dropout}, vocabulary {config.vocab_size:,}"
        )
    return 0
