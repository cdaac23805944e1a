"""The command `vaswani`: parses arguments, runs a command, turns errors into one line and an exit status."""

import argparse
import errno
import functools
import logging
import os
import sys
import warnings

from ..errors import UserError, is_panic, one_line, shortened
from .attention import add_attention
from .clean import add_clean
from .command import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, Parser, is_first_process, leave_failed
from .data import add_lists, add_prepare, add_tokenizer
from .evaluate import add_evaluate, add_score
from .experiment import add_experiment
from .files import option_flag
from .models import add_average, add_export, add_import, add_push
from .parse import add_parse
from .serve import add_serve
from .train import add_demo, add_distill, add_train
from .translate import add_translate

_LONGEST = 1500  # letters of an error message
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_COMMANDS = (
    add_demo, add_train, add_translate, add_serve, add_score, add_evaluate, add_distill,
    add_average, add_export, add_push, add_attention, add_parse, add_experiment, add_clean, add_prepare, add_tokenizer,
    add_import, add_lists,
)  # fmt: skip


@functools.cache
def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    from .. import __version__

    description = 'Train, evaluate and use the Transformer of "Attention Is All You Need".'
    parser = Parser(prog="vaswani", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"vaswani_transformer {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for add_command in _COMMANDS:
        add_command(commands)
    return parser


def _quiet_libraries() -> None:
    """Leave standard error to our own messages."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    warnings.filterwarnings("ignore")
    from datasets.utils import logging as datasets_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets_logging.set_verbosity_error()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("vaswani_transformer").setLevel(logging.INFO if is_first_process() else logging.WARNING)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")  # translations are not limited to the terminal's own encoding


def _explain(error: BaseException, arguments: argparse.Namespace) -> str | None:
    """An error of the user or of the machine in one line; None for one that may be a mistake in our code."""
    import torch

    from ..training.checkpoints import is_failed_write

    if isinstance(error, UserError):
        return str(error)
    if is_panic(error):  # of a text where a regular expression has tried ten million ways, most of all
        return f"the tokenizer failed on a text ({one_line(error)}): change the rules in tokenizer.json, or the text"
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        fix = ": free some space and run the same command again" if error.errno in _DISK_FULL else ""
        return f"{error.strerror or error}{where}{fix}"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator: " in str(error):
        if arguments.parser.prog.endswith((" train", " distill")):
            return "out of memory: lower tokens_per_device; tokens_per_batch, and so the training, stays as it is"
        # What was given of those whose product is the memory of a search.
        names = ("beams", "nbest", "max_new_tokens", "tokens_per_batch")
        given = [option_flag(name) for name in names if getattr(arguments, name, None) is not None]
        return f"out of memory: lower {' or '.join(given)}" if given else "out of memory: use a machine with more of it"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):  # of `Path.resolve`
        return f"{str(error).removeprefix('Symlink loop from ')} is a link that leads to itself: give another name"
    if is_failed_write(error):
        reason = str(error).splitlines()[0][:200]
        return f"a file could not be written ({reason}): is the disk full? Free some space and run the command again"
    return None


def _on_a_line(message: str) -> str:
    """A message, which may quote files of strangers, without what a terminal would obey, and not too long to read."""
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in " ".join(message.split()))
    return shortened(line, _LONGEST)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns 0, 1 (the machine failed), 2 (a mistake of the user) or 130 (Ctrl-C)."""
    try:
        from ..hardware import limit_threads

        arguments, unknown = make_parser().parse_known_args(argv)
        if unknown:
            arguments.parser.refuse_unknown(unknown)
        arguments.parser.check_paths(arguments)
        _quiet_libraries()
        limit_threads()
        status = arguments.run(arguments)
        sys.stdout.flush()  # here, so that a closed pipe is noticed below
        return status
    except KeyboardInterrupt:
        if is_first_process():
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # nobody reads our output any more, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        message = _explain(error, arguments)
        status = EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILURE
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            leave_failed(error, message, status)
        if message is None:
            raise
        print(f"error: {_on_a_line(message)}", file=sys.stderr)
        return status
