"""The command `vaswani`: finds the command, parses its options, turns errors into one line and an exit status."""

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import re
import shlex
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import wrapt
from cyclopts import App, CycloptsError, Parameter

from .. import __version__
from ..distributed import is_first_process, is_launched, reports_error
from ..errors import UserError, is_failed_write, is_of_cache, is_panic, one_line, shortened
from ..hardware import limit_threads

EXIT_FAILURE, EXIT_USAGE = 1, 2
_RESUMED = [[name] for name in ("train", "distill", "demo", "experiment", "prepare", "clean")]
_LONGEST = 1500  # characters of an error message
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_COMMANDS = {  # the function of each command, whose module is imported when it is needed
    "demo": "train:demo", "train": "train:train", "translate": "translate:translate", "serve": "serve:serve",
    "score": "evaluate:score", "evaluate": "evaluate:evaluate", "distill": "train:distill",
    "average": "models:average", "export": "models:export", "push": "models:push",
    "attention": "attention:attention", "experiment": "experiment:experiment", "clean": "data:clean",
    "prepare": "data:prepare", "tokenizer": "data:tokenizer", "import": "models:import_", "recipes": "data:recipes",
}  # fmt: skip
_PARSING = {"train": "parse:train", "predict": "parse:predict", "evaluate": "parse:evaluate"}
_ESCAPE = "\0"  # in front of a word such as "- Yes.", which is no option; no argument of a program can hold it


@functools.cache
def make_app() -> App:
    """Return the application with all commands, none of whose modules is imported yet."""

    def shown(value):
        return str(value) if value not in (None, False, True, (), []) else None

    app = App(
        name="vaswani",
        help='Train, evaluate and use the Transformer of "Attention Is All You Need".',
        version=f"vaswani_transformer {__version__}",
        help_format="plaintext",
        default_parameter=Parameter(negative_bool=(), negative_iterable=(), show_default=shown, allow_repeating=True),
    )
    parse = App(name="parse", help="Train or use a constituency parser.", default_parameter=app.default_parameter)
    app.command(parse)
    for parent, commands in ((app, _COMMANDS), (parse, _PARSING)):
        for name, function in commands.items():
            parent.command(f"{__package__}.{function}", name=name, help_format="markdown")
    app.register_install_completion_command()
    return app


def _prepare_libraries() -> None:
    """Leave standard error to our own messages, and limit threads; libraries follow when they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    warnings.filterwarnings("ignore")
    is_terminal = bool(sys.stderr and sys.stderr.isatty())

    def quieten(module) -> None:
        module.set_verbosity_error()
        module.disable_progress_bar()
        if is_terminal:  # downloads and uploads keep theirs
            module.hf_hub_utils.enable_progress_bars()

    quiet = {
        "transformers.utils.logging": quieten,
        "datasets.utils.logging": lambda module: module.set_verbosity(logging.CRITICAL),  # errors are raised too
        "datasets.utils.tqdm": lambda module: is_terminal or module.disable_progress_bars(),
        "torch": lambda _: limit_threads(),
    }
    for module, hook in quiet.items():
        wrapt.register_post_import_hook(hook, module)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("vaswani_transformer").setLevel(logging.INFO if is_first_process() else logging.WARNING)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")  # translations are not limited to the terminal's own encoding


def _explain(error: BaseException) -> str:
    """Return what is wrong and what to do, for a reader who does not know the code."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, CycloptsError):
        error.verbose = False
        name = " ".join(["vaswani", *(error.command_chain or ())])
        text = one_line(error, _LONGEST).replace(_ESCAPE, "").removesuffix(".")
        if getattr(error, "keyword", "") is None:  # the word that was without a value
            text = text.replace("requires an argument", "is missing")
        return f"{text} (see `{name} --help`)"
    if is_panic(error):  # usually a text on which a regular expression backtracked ten million times
        return f"the tokenizer failed on a text ({one_line(error)}): change the rules in tokenizer.json, or the text"
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        fix = ": give another folder for caches by HF_HOME, HF_DATASETS_CACHE or XDG_CACHE_HOME" * is_of_cache(error)
        fix = ": free some space and run the same command again" if error.errno in _DISK_FULL else fix
        return f"{error.strerror or error}{where}{fix}"
    is_full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if is_full or any(part in str(error) for part in ("DefaultCPUAlloc", "MPS backend out of", "No executable batch")):
        fix = "lower --tokens-per-batch or --beams, of a training --tokens-per-device, which changes no result"
        return f"out of memory: {fix}, or use a machine with more of it"
    if is_failed_write(error):
        return f"a file could not be written ({one_line(error, 200)}): free some space and run the same command again"
    return f"unexpected {type(error).__name__}: {one_line(error)}; the same command with --debug shows where"


def _report(error: BaseException, debug: bool) -> int:
    """Print an error, in one line unless `debug`, by the first of the processes that fail; returns the exit status.

    One of several processes ends here: ending together could wait for the others without end.
    """
    status = EXIT_USAGE if isinstance(error, UserError | CycloptsError) else EXIT_FAILURE
    # Files of strangers, which a message may quote, do not control the terminal.
    message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(_explain(error).split()))
    if is_launched() and status == EXIT_FAILURE and type(error).__name__ != "ProcessLostError":
        message = f"process {os.environ.get('RANK', '0')} of {os.environ['WORLD_SIZE']}: {message}"
    if debug:
        traceback.print_exception(error)
    if not is_launched() or reports_error():
        print(f"error: {shortened(message, _LONGEST)}", file=sys.stderr)
    if is_launched():
        sys.stdout.flush()  # as `_exit` does not; stderr is flushed by line
        time.sleep(2)  # for the process that reports the error: a launcher ends all processes when one ends
        os._exit(status)
    return status


def _leave_process_group() -> None:
    """Destroy torch's process group, whose threads may otherwise abort a finished process as the interpreter exits."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _report_stop(words: list[str], signal_number: int = signal.SIGINT, step: int | None = None) -> int:
    """Print how to resume a command that a signal has stopped, `step` of its checkpoint; returns the exit status."""
    if is_first_process() and words[:1] not in _RESUMED and words[:2] != ["parse", "train"]:
        print("interrupted", file=sys.stderr)
    elif is_first_process():
        where = "" if step is None else f" at step {step:,}; checkpoint written"
        if words[0] == "prepare":  # with --overwrite it would start again; the others resume with it
            words = [word for word in words if word != "--overwrite"]
        command = "" if is_launched() else f":\n  vaswani {shlex.join(words)}"  # a launcher's is not known
        print(f"stopped{where}. To resume, run the same command again{command}")
    return 128 + signal_number


def _plain(value: Any) -> Any:
    """Return an argument, which may be a group of options, without what escaped its words."""
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{name: _plain(each) for name, each in vars(value).items()})
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.lstrip(_ESCAPE) if isinstance(value, str) else value


def _run(words: list[str]) -> None:
    options = words[: words.index("--")] if "--" in words else words
    # Shells leave the home folder of `--output=~/x` as it is.
    options = [re.sub("^(--[^=]+=)~(?=/|$)", lambda start: f"{start[1]}{Path.home()}", word) for word in options]
    escaped = [_ESCAPE + word if word[:1] == "-" and " " in word and "=" not in word else word for word in options]
    app = make_app()
    if words[:1] in ([], ["--help"], ["-h"], ["parse"]):  # what each command does is in its module
        app.resolved_commands()
        app["parse"].resolved_commands()
    command, bound, _ = app.parse_args(escaped + words[len(options) :], exit_on_error=False, print_error=False)
    _prepare_libraries()
    command(*map(_plain, bound.args), **{name: _plain(value) for name, value in bound.kwargs.items()})
    _leave_process_group()
    print(end="", flush=True)  # here, so that a closed pipe is noticed


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns 0, 1 (the machine failed), 2 (a mistake of the user) or 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:end]
    words = [word for index, word in enumerate(words) if word != "--debug" or index > end]
    try:
        _run(words)
        return 0
    except KeyboardInterrupt:
        return _report_stop(words)
    except BrokenPipeError:  # nobody reads our output any more, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        if type(error).__name__ == "TrainingStopped":  # whose module takes seconds to import
            _leave_process_group()
            return _report_stop(words, error.signal_number, error.step)
        if isinstance(error, OSError) and error.errno in _DISK_FULL and not error.filename:
            with contextlib.suppress(OSError, AttributeError):  # or Python would fail again as it exits
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _report(error, debug)
