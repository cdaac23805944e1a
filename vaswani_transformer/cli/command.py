"""What the files of commands share: the parser, exit statuses, how a run's stop is told."""

import argparse
import difflib
import os
import shlex
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from ..errors import UserError

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
SPEAKING_SECONDS = 2.0  # for the one of several processes that says what happened: a launcher ends all when one ends


class Parser(argparse.ArgumentParser):
    """Errors in one line, with the nearest option for a misspelt one."""

    #: Name of a positional argument of any number of words that may stand behind options too; argparse alone takes none
    #: of them once it has met an option.
    words: str | None = None

    def parse_known_args(self, args=None, namespace=None):
        """As in `argparse.ArgumentParser`, with all of `words`."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if self.words is not None:
            end = unknown.index("--") if "--" in unknown else len(unknown)
            options = [word for word in unknown[:end] if word.startswith("-") and " " not in word]
            further = [word for word in unknown[:end] if word not in options] + unknown[end + 1 :]
            setattr(namespace, self.words, [*getattr(namespace, self.words), *further])
            unknown = options
        return namespace, unknown

    def error(self, message: str):
        """End with the message and where to read more; of several processes one on each machine says it."""
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SPEAKING_SECONDS)
            self.exit(EXIT_USAGE)
        self.exit(EXIT_USAGE, f"error: {message} (see `{self.prog} --help`)\n")

    def refuse_unknown(self, unknown: list[str]) -> None:
        """End with the first argument that no option takes, and the nearest option."""
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        flag = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(flag.replace("_", "-"), options, n=1, cutoff=0.5)
        hint = f": did you mean {near[0]}?" if near else ""
        self.error(f"unknown argument {flag}{hint}")


def add_command(commands, name: str, run, help_text: str, description: str | None = None) -> Parser:
    """A new command `name` that calls `run` with its arguments and exits with what that returns."""
    parser = commands.add_parser(name, help=help_text, description=description or help_text, allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_recipe_options(parser: Parser, fields) -> None:
    """Fields of `Recipe` as options of a command, in their groups."""
    from ..recipes.recipe import field_type

    groups = {}
    for field in fields:
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        kind, _ = field_type(field.name)
        default = "none" if field.default is None else field.default
        options = {"help": f"{field.metadata['help']} (default: {default})".replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = {int: "N", float: "X", str: "TEXT"}[kind]
        flag = "--" + field.name.replace("_", "-")
        groups[name].add_argument(flag, dest=field.name, default=argparse.SUPPRESS, **options)


def leave_process_group() -> None:
    """End what connects several processes; left to the interpreter's end, its threads may abort a finished process."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave_failed(error: Exception, message: str | None, status: int) -> NoReturn:
    """End one of several processes after an error, at once: taking leave of the others could wait for them for ever.

    Of processes that fail together the first reports it. A launcher ends the others as soon as one has left.

    Args:
        error: what happened.
        message: it in one line; None where a traceback says more.
        status: the exit status.
    """
    from ..distributed import reports_error

    if reports_error():
        where = f"process {os.environ.get('RANK', '0')} of {os.environ['WORLD_SIZE']}"
        if message is None:
            traceback.print_exception(error)
            message = f"{where} failed with the error above; the others are ended too"
        elif status != EXIT_USAGE and type(error).__name__ != "ProcessLostError":
            message = f"{where}: {message}"
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(SPEAKING_SECONDS)
    os._exit(status)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or the machine, had no memory left."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator: " in str(error)


def is_main_process() -> bool:
    """Whether this is the process, or the first of several, that prints."""
    return os.environ.get("RANK", "0") == "0"  # set by accelerate launch and torchrun


def report_stop(signal_number: int, step: int | None) -> int:
    """Say how to resume a training that a signal ended; returns the exit status."""
    where = "" if step is None else f" at step {step:,}; checkpoint written"
    if not is_main_process():
        return 128 + signal_number
    print(f"stopped{where}. To resume, run the same command again:")
    print(f"  {command_name()} {shlex.join(word for word in sys.argv[1:] if word != '--overwrite')}")
    return 128 + signal_number


def command_name() -> str:
    """How this program was called, in a form that can be typed in this folder."""
    script = Path(sys.argv[0])
    if script.name != "vaswani":
        return "python -m vaswani_transformer"
    found = shutil.which("vaswani")
    if found and (not script.exists() or Path(found).samefile(script)):
        return "vaswani"
    return os.path.relpath(script)


def check_output_place(output: Path, option: str = "--output") -> None:
    """Look whether something can be written under a name, before hours are spent.

    Args:
        output: the name.
        option: that it was given with.

    Raises:
        UserError: where a file is above it, or nothing may be written there.
    """
    places = (output.absolute(), *output.absolute().parents)
    there = next(path for path in places[not output.is_dir() :] if path.exists())
    if not there.is_dir():
        raise UserError(f"{option} {output} is within the file {there}: give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{option} {output} cannot be written to: give another folder")
