"""The commands that hand a model on: `vaswani push` and `vaswani convert`."""

import argparse
import os
import signal
import sys

from .command import add_command


def add_push(commands) -> None:
    """Add `vaswani push`."""
    parser = add_command(
        commands,
        "push",
        _push,
        "put a trained model on the Hugging Face Hub, with a model card",
        "Put a trained model, its tokenizer and a model card into the repository OWNER/NAME, in one commit. The same"
        " command updates it, or goes on where a push was interrupted. The token is that of `hf auth login` or of the"
        " variable HF_TOKEN.",
    )
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("repository", metavar="OWNER/NAME", help="repository on the Hub; made if it is not there")
    parser.add_argument("--dry-run", action="store_true", help="print the files and the card, send nothing")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", default="main", metavar="BRANCH", help="made if it is not there (default: main)")
    parser.add_argument("--message", metavar="TEXT", help="of the commit")
    parser.add_argument("--token", metavar="TOKEN", help="better in HF_TOKEN, where no list of processes shows it")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights (default: 5GB)")
    card = parser.add_argument_group("model card")
    card.add_argument("--card", metavar="base|big|parser|FILE", help="template; chosen by the model if not given")
    card.add_argument("--overwrite-card", action="store_true", help="replace one that someone else wrote or edited too")
    card.add_argument(
        "--language", action="append", default=[], metavar="CODE", help="such as en; repeat it, source first"
    )
    card.add_argument("--license", metavar="ID", help="licence of the weights, such as mit")
    card.add_argument("--dataset", action="append", default=[], metavar="NAME", help="on the Hub; may be repeated")
    card.add_argument(
        "--evaluation", action="append", default=[], metavar="FILE", help="of `evaluate --json`; may be repeated"
    )


def _push(arguments: argparse.Namespace) -> int:
    from huggingface_hub.utils import logging as hub_logging

    from ..hub.push import clear_staging, publish

    def stop(number, _):
        # No exception: the client would wait until the files that its threads are sending have gone.
        message = f"interrupted: {arguments.repository} has all of the new files or none; push again\n"
        os.write(2, message.encode())
        clear_staging()
        os._exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    hub_logging.set_verbosity_error()  # its lines on every attempt; the last one's error is ours to explain
    try:
        done = publish(
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
            token=arguments.token,
            dry_run=arguments.dry_run,
            progress=sys.stderr.isatty(),
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arguments.dry_run:
        print(f"would go to {done.repo_id}, branch {done.revision} (nothing was sent):")
    elif done.changed:
        print(f"pushed to {done.url}, branch {done.revision}, commit {done.commit[:12]}:")
    else:
        print(f"{done.url}, branch {done.revision}, has all of this already; nothing was changed:")
    for name, size in done.files.items():
        print(f"{size:14,}  {name}")
    for name in done.removed:
        print(f"{'removed':>14}  {name}")
    if arguments.dry_run:
        print(f"\n{done.card}", end="")
    return 0


def add_convert(commands) -> None:
    """Add `vaswani convert`."""
    parser = add_command(
        commands,
        "convert",
        _convert,
        "turn pickled weights into safetensors",
        "Write the weights of FOLDER/pytorch_model.bin as safetensors beside it. Tensors are read and nothing else:"
        " code in the pickle does not run.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="model folder with config.json and pytorch_model.bin")


def _convert(arguments: argparse.Namespace) -> int:
    from ..importing.pickles import convert_pickled_weights

    written = convert_pickled_weights(arguments.folder)
    print(f"wrote {', '.join(map(str, written))}; the pickle is still there and may be deleted")
    return 0
