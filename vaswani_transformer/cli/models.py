"""What is done to a finished model: `vaswani average`, `push`, `import` and `export`."""

import argparse
import os
import re
import shlex
import signal
import sys
from pathlib import Path

from ..errors import UserError
from .command import add_command, command_name

DEFAULT_LAST = 5  # Section 6.1, for the base model


def add_average(commands) -> None:
    """Add `vaswani average`."""
    parser = add_command(
        commands,
        "average",
        _average,
        "average checkpoints into a model",
        "Write a model whose weights are the mean of checkpoints. FOLDER is the output folder of a training, of which"
        f" the last {DEFAULT_LAST} are taken, or --last or --best; or several checkpoints or models are given.",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="output folder of a training, or checkpoints")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder for the averaged model")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--last", type=_count, metavar="N", help=f"the last N checkpoints (default: {DEFAULT_LAST})")
    choice.add_argument("--best", type=_count, metavar="N", help="the N checkpoints that validated best")
    parser.add_argument("--by", choices=("loss", "bleu"), help="validation score that --best compares (default: loss)")
    parser.add_argument("--overwrite", action="store_true", help="replace a model in the output folder")


def _count(text: str) -> int:
    if not re.fullmatch(r"\s*\d*[1-9]\d*\s*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of checkpoints: give a whole number, 1 or more")
    return int(text)


def _average(arguments: argparse.Namespace) -> int:
    from ..training.averaging import average_models, best_checkpoints, last_checkpoints
    from ..training.checkpoints import step_of
    from ..training.run_folder import CHECKPOINTS

    folders = [Path(folder) for folder in arguments.folders]
    if arguments.by is not None and arguments.best is None:
        raise UserError("--by is for --best: give --best N")
    first = folders[0]
    of_a_run = len(folders) == 1 and ((first / CHECKPOINTS).is_dir() or first.name == CHECKPOINTS)
    if not of_a_run:
        if arguments.last is not None or arguments.best is not None:
            raise UserError("--last and --best choose among the checkpoints of one training: give its output folder")
        if len(folders) == 1 and first.is_dir():
            raise UserError(
                f"{first} holds no checkpoints/: give the output folder of a training, or two or more checkpoints"
            )
        paths = [folder.resolve() for folder in folders]
        repeated = [folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]
        if repeated:
            raise UserError(f"{repeated[0]} is given twice: give each checkpoint once")
        chosen = folders
    elif arguments.best is not None:
        by = arguments.by or "loss"
        chosen, removed = best_checkpoints(first, arguments.best, by)
        for step, score in removed:
            print(f"step {step:,} validated better ({by} {score:.3f}), but its checkpoint is gone")
    else:
        chosen = last_checkpoints(first, arguments.last or DEFAULT_LAST)
    output = average_models(chosen, arguments.output, overwrite=arguments.overwrite)
    if of_a_run:
        names = f"steps {', '.join(f'{step_of(path):,}' for path in chosen)}"
    else:
        names = ", ".join(map(str, chosen))
    print(f"averaged {len(chosen)} checkpoint{'s' if len(chosen) > 1 else ''}: {names}")
    print(f"model: {output}")
    print(f"evaluate it with: {command_name()} evaluate {output} --source FILE --reference FILE")
    return 0


def add_push(commands) -> None:
    """Add `vaswani push`."""
    parser = add_command(
        commands,
        "push",
        _push,
        "put a trained model on the Hugging Face Hub, with a model card",
        "Put a trained model, its tokenizer and a model card into the repository OWNER/NAME, in one commit. The same"
        " command updates it, or resumes a push that was interrupted. The token is taken from `hf auth login` or the"
        " variable HF_TOKEN.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="model folder")
    add("repository", metavar="OWNER/NAME", help="repository on the Hub; created if it does not exist")
    add("--dry-run", action="store_true", help="print the files and the card, send nothing")
    add("--private", action="store_true", help="make the repository private")
    add("--revision", default="main", metavar="BRANCH", help="branch, created if it does not exist (default: main)")
    add("--message", metavar="TEXT", help="message of the commit")
    add("--token", metavar="TOKEN", help="prefer HF_TOKEN, which no list of processes shows")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="largest file of weights (default: 5GB)")
    add("--space", action="store_true", help="also publish a Space of this name, with the page of `vaswani serve`")
    add = parser.add_argument_group("model card").add_argument
    add("--card", metavar="base|big|parser|FILE", help="template (default: chosen by the model's size)")
    how = "replace the card, and files of the Space, even if someone wrote or edited them"
    add("--overwrite-card", action="store_true", help=how)
    several = {"action": "append", "default": []}
    add("--language", **several, metavar="CODE", help="language, such as en; repeat it, source first")
    add("--license", metavar="ID", help="licence of the weights, such as mit")
    add("--dataset", **several, metavar="NAME", help="data set on the Hub; may be repeated")
    add("--evaluation", **several, metavar="FILE", help="scores from `evaluate --json`; may be repeated")


def _push(arguments: argparse.Namespace) -> int:
    from huggingface_hub.utils import logging as hub_logging

    from ..hub.push import clear_staging, publish

    def stop(number, _):
        # Not by an exception: the client would wait for its threads to finish sending their files.
        message = f"interrupted: {arguments.repository} has all of the new files or none; push again\n"
        os.write(2, message.encode())
        clear_staging()
        os._exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    hub_logging.set_verbosity_error()  # not a line for every attempt: if the last one fails, our error explains it
    try:
        result = publish(
            arguments.model,
            arguments.repository,
            private=arguments.private,
            revision=arguments.revision,
            message=arguments.message,
            languages=arguments.language,
            license=arguments.license,
            datasets=arguments.dataset,
            evaluations=arguments.evaluation,
            card=arguments.card,
            overwrite_card=arguments.overwrite_card,
            max_shard_size=arguments.max_shard_size,
            space=arguments.space,
            token=arguments.token,
            dry_run=arguments.dry_run,
            progress=sys.stderr.isatty(),
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arguments.dry_run:
        print(f"would go to {result.repo_id}, branch {result.revision} (nothing was sent):")
    elif result.changed:
        print(f"pushed to {result.url}, branch {result.revision}, commit {result.commit[:12]}:")
    else:
        print(f"{result.url}, branch {result.revision}, has all of this already; nothing was changed:")
    for name, size in result.files.items():
        print(f"{size:14,}  {name}")
    for name in result.removed:
        print(f"{'removed':>14}  {name}")
    if result.space is not None:
        _print_space(result)
    if arguments.dry_run:
        print(f"\n{result.card}", end="")
        for name, text in result.space.files.items() if result.space else ():
            print(f"\n==> Space, {name} <==\n{text}", end="")
    return 0


def _print_space(result) -> None:
    space = result.space
    if space.url is None:
        print(f"would go to the Space {result.repo_id}:")
    elif space.changed:
        print(f"pushed to {space.url}:")
    else:
        print(f"{space.url} has all of this already; nothing was changed:")
    for name, text in space.files.items():
        print(f"{'not ours' if name in space.kept else f'{len(text.encode()):,}':>14}  {name}")


def add_import(commands) -> None:
    """Add `vaswani import`."""
    parser = add_command(
        commands,
        "import",
        _import,
        "make a model of another toolkit a model of this package",
        "Write a model that another toolkit trained as a model folder, with its tokenizer and a card. SOURCE is the"
        " folder or Hub name (owner/name) of a MarianMT (OPUS-MT) or FSMT model of transformers, Marian's .npz,"
        " fairseq's .pt, or a folder of this package with pickled weights. The format is found out. Of pickles tensors"
        " are read and nothing else: code in them does not run.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="file, folder, or name of a model on the Hub")
    add("--output", required=True, metavar="FOLDER", help="a new folder for the model")
    add(
        "--vocabulary",
        nargs="+",
        default=[],
        metavar="FILE",
        help="vocabulary of both languages, or of source and target, where it does not lie beside SOURCE",
    )
    add("--bpe-codes", metavar="FILE", help="merges of byte-pair encoding, of fairseq")
    add(
        "--positions",
        choices=("marian", "transformers"),
        help="of a MarianMT folder: Marian's own, which Helsinki-NLP/opus-mt-* and all others that Marian trained have,"
        " or those of transformers, for a model that was trained or fine-tuned there (default: marian, or transformers"
        " where its Trainer has left training_args.bin or trainer_state.json)",
    )
    add("--overwrite", action="store_true", help="replace an imported model in the output folder")


def _import(arguments: argparse.Namespace) -> int:
    from huggingface_hub.utils import disable_progress_bars

    from ..importing.importing import import_model

    if not sys.stderr.isatty():
        disable_progress_bars()  # of downloads
    print(f"importing {arguments.source}", file=sys.stderr)
    result = import_model(
        arguments.source,
        arguments.output,
        vocabularies=arguments.vocabulary,
        bpe_codes=arguments.bpe_codes,
        positions=arguments.positions,
        overwrite=arguments.overwrite,
    )
    print(f"imported {result.format}: {arguments.output}, {result.parameters:,} parameters")
    for note in result.facts.notes:
        print(note)
    if result.has_tokenizer:
        print(f"use it with: {command_name()} translate {shlex.quote(arguments.output)}")
    return 0


def add_export(commands) -> None:
    """Add `vaswani export`."""
    from ..export.facts import EXTRAS, QUANTIZATIONS

    parser = add_command(
        commands,
        "export",
        _export,
        "write a model for CTranslate2, ONNX Runtime or Marian",
        "Write a model in the format of another engine, its tokenizer beside it, and compare the two on a few"
        " sentences before the folder appears. CTranslate2 and ONNX Runtime are extras: pip install"
        " 'vaswani_transformer[ctranslate2]' or '[onnx]'; Marian is not run.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="model folder")
    add("--format", choices=list(EXTRAS), default="ctranslate2", help="(default: ctranslate2)")
    add("--output", required=True, metavar="FOLDER", help="a new folder for the exported model")
    add("--quantization", choices=QUANTIZATIONS, help="how CTranslate2 stores the weights (default: float32)")
    longest = "longest source and output of the exported model, in tokens (default: max_position_embeddings)"
    add("--positions", type=int, metavar="N", help=longest)
    add("--overwrite", action="store_true", help="replace an exported model in the output folder")


def _export(arguments: argparse.Namespace) -> int:
    from ..export.exporting import export_model

    print(f"exporting {arguments.model} to {arguments.format}", file=sys.stderr)
    result = export_model(
        arguments.model,
        arguments.output,
        format=arguments.format,
        quantization=arguments.quantization,
        positions=arguments.positions,
        overwrite=arguments.overwrite,
    )
    what = "log-probabilities" if arguments.format == "ctranslate2" else "logits"
    print(f"exported: {arguments.output}, {result.bytes / 1e6:,.1f} MB, {result.positions:,} positions")
    if arguments.format == "marian":
        settings = shlex.quote(f"{arguments.output}/decoder.yml")
        print(
            f"use it with: marian-decoder -c {settings}, on the tokens of this folder's tokenizer, separated by spaces"
        )
        return 0
    print(
        f"{what} differ from the model's by at most {result.difference:.2g} on this CPU (3 sentences of random tokens)"
    )
    if arguments.format == "ctranslate2":
        if "int8" in (arguments.quantization or ""):
            print("on a processor without VNNI int8 differs more: give `translate` --precision float32 there")
        print(f"use it with: {command_name()} translate {shlex.quote(arguments.output)}")
    return 0
