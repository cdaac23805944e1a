"""What the commands share: the parser, exit statuses, and how a process ends that was stopped or failed."""

import argparse
import difflib
import functools
import os
import re
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..data.workers import ENGINES, LOCAL
from ..errors import UserError
from ..files import check_path
from ..output_folder import is_first_process

_PATH = re.compile(r"\b(FILE|FOLDER|PATH|MODEL|RECIPE)\Z")  # what options for files and folders are shown as
EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
REPORTING_SECONDS = 2.0  # for the process that reports an error: a launcher ends all processes when one ends


class Parser(argparse.ArgumentParser):
    """Errors in one line, with the nearest option for a misspelt one."""

    #: Name of a positional argument of any number of words, also after options, where argparse accepts none.
    words: str | None = None

    def parse_known_args(self, args=None, namespace=None):
        """As of `argparse.ArgumentParser`, with unknown arguments that are no options added to `words`."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if self.words is not None:
            end = unknown.index("--") if "--" in unknown else len(unknown)
            options = [word for word in unknown[:end] if word.startswith("-") and " " not in word]
            further = [word for word in unknown[:end] if word not in options] + unknown[end + 1 :]
            setattr(namespace, self.words, [*getattr(namespace, self.words), *further])
            unknown = options
        return namespace, unknown

    def check_paths(self, arguments: argparse.Namespace) -> None:
        """Raise `UserError` for an empty file or folder: some would be the current folder."""
        for action in self._actions:
            if _PATH.search(str(action.metavar)):
                values = getattr(arguments, action.dest, None)
                for value in values if isinstance(values, list) else [values]:
                    check_path(value, action.option_strings[0] if action.option_strings else action.metavar)

    def error(self, message: str):
        """Exit with status 2, a message and where to read more; of several processes, one on each machine prints it."""
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(REPORTING_SECONDS)
            self.exit(EXIT_USAGE)
        self.exit(EXIT_USAGE, f"error: {message} (see `{self.prog} --help`)\n")

    def refuse_unknown(self, unknown: list[str]) -> None:
        """Exit with status 2, naming the first unknown argument and the nearest option."""
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        flag = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(flag.replace("_", "-"), options, n=1, cutoff=0.5)
        hint = f": did you mean {near[0]}?" if near else ""
        self.error(f"unknown argument {flag}{hint}")


def add_command(commands, name: str, run, help_text: str, description: str | None = None) -> Parser:
    """A new command `name`, which calls `run` with the parsed arguments and exits with the status that it returns."""
    parser = commands.add_parser(name, help=help_text, description=description or help_text, allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_recipe_options(parser: Parser, fields) -> None:
    """Fields of `Recipe` as options of a command, in their groups."""
    from ..recipes.recipe import field_type

    shapes = {int: {"metavar": "N"}, float: {"metavar": "X"}, str: {"metavar": "TEXT"}}
    shapes[bool] = {"action": argparse.BooleanOptionalAction}
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(f.metadata["group"] for f in fields)}
    for field in fields:
        default = "none" if field.default is None else field.default
        help_text = f"{field.metadata['help']} (default: {default})".replace("%", "%%")
        flags = filter(None, (field.metadata["flag"], "--" + field.name.replace("_", "-")))
        groups[field.metadata["group"]].add_argument(
            *flags, dest=field.name, default=argparse.SUPPRESS, help=help_text, **shapes[field_type(field.name)[0]]
        )


def add_engine_options(parser: Any, workers: str, default: int | None = None) -> None:
    """Add who does the work of a command to its parser or to one of its groups; `workers` describes `--workers`."""
    parser.add_argument("--workers", type=int, metavar="N", default=default, help=workers)
    how = "where workers run: on this machine, or on a cluster by Ray (default: local)"
    parser.add_argument("--engine", choices=ENGINES, default=LOCAL, help=how)


def leave_process_group() -> None:
    """Destroy torch's process group, whose threads may otherwise abort a finished process as the interpreter exits."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave_failed(error: Exception, message: str | None, status: int) -> NoReturn:
    """End one of several processes after an error, at once: taking leave of the others could wait for them for ever.

    Of processes that fail together the first reports it: in one line, or where `message` is None with a traceback.
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
    time.sleep(REPORTING_SECONDS)
    os._exit(status)


def resumable(run: Callable[..., int]) -> Callable[..., int]:
    """A function that runs a command; where that is stopped, how to resume it is printed, and the status returned."""

    @functools.wraps(run)
    def run_or_report(*arguments: Any) -> int:
        try:
            return run(*arguments)
        except KeyboardInterrupt:
            return _report_stop(signal.SIGINT, None)
        except Exception as error:
            if type(error).__name__ != "TrainingStopped":  # whose module takes seconds to import
                raise
            leave_process_group()
            return _report_stop(error.signal_number, error.step)

    return run_or_report


def _report_stop(signal_number: int, step: int | None) -> int:
    """Print how to resume a training stopped by a signal, with the step of its checkpoint; returns the exit status."""
    if is_first_process():
        where = "" if step is None else f" at step {step:,}; checkpoint written"
        print(f"stopped{where}. To resume, run the same command again:")
        words = sys.argv[1:]
        if words[:1] == ["prepare"]:  # which would start anew; the others resume with it
            words = [word for word in words if word != "--overwrite"]
        print(f"  {command_name()} {shlex.join(words)}")
    return 128 + signal_number


def command_name() -> str:
    """How this program was called, as a user can type it in the current folder."""
    script = Path(sys.argv[0])
    if script.name != "vaswani":
        return "python -m vaswani_transformer"
    installed = shutil.which("vaswani")
    if installed and (not script.exists() or Path(installed).samefile(script)):
        return "vaswani"
    return os.path.relpath(script)


def check_output_place(output: Path, option: str = "--output") -> None:
    """Raise `UserError` for a folder that cannot be created or written to, before hours are spent."""
    places = (output.absolute(), *output.absolute().parents)
    there = next(path for path in places[not output.is_dir() :] if path.exists())
    if not there.is_dir():
        raise UserError(f"{option} {output} is within the file {there}: give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{option} {output} cannot be written to: give another folder")
