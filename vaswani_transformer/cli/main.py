"""The command `vaswani`: finds the command, parses its options, turns errors into one line and an exit status."""

import errno
import functools
import logging
import os
import sys
import time
import traceback
import warnings

import wrapt
from cyclopts import App, CycloptsError, Parameter

from .. import __version__
from ..errors import UserError, is_panic, one_line, shortened
from .running import (
    EXIT_FAILURE,
    EXIT_USAGE,
    REPORTING_SECONDS,
    is_first_process,
    leave_failed,
    leave_process_group,
    report_stop,
)

_LONGEST = 1500  # characters of an error message
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FAILED_WRITES = ("PytorchStreamWriter", "unexpected pos", "iostream error", "(os error ")  # of torch, and of Rust
_COMMANDS = {  # the function of each command, whose module is imported when it is needed
    "demo": "train:demo", "train": "train:train", "translate": "translate:translate", "serve": "serve:serve",
    "score": "evaluate:score", "evaluate": "evaluate:evaluate", "distill": "train:distill",
    "average": "models:average", "export": "models:export", "push": "models:push",
    "attention": "attention:attention", "experiment": "experiment:experiment", "clean": "data:clean",
    "prepare": "data:prepare", "tokenizer": "data:tokenizer", "import": "models:import_", "recipes": "data:recipes",
    "presets": "data:presets",
}  # fmt: skip
_PARSING = {"train": "parse:train", "predict": "parse:predict", "evaluate": "parse:evaluate"}
_ESCAPE = "\0"  # in front of a word such as "- Yes.", which is no option; no argument of a program can hold it


@functools.cache
def make_app() -> App:
    """Return the application with all commands, none of whose modules is imported yet."""

    def shown(value):
        return str(value) if value not in (None, False, True) and value != [] else None

    app = App(
        name="vaswani",
        help='Train, evaluate and use the Transformer of "Attention Is All You Need".',
        version=f"vaswani_transformer {__version__}",
        help_format="plaintext",
        default_parameter=Parameter(negative_bool=(), negative_iterable=(), show_default=shown, allow_repeating=True),
    )
    parse = App(name="parse", help="Constituency parsing: train, predict, evaluate.")
    app.command(parse)
    for parent, commands in ((app, _COMMANDS), (parse, _PARSING)):
        for name, function in commands.items():
            parent.command(f"{__package__}.{function}", name=name)
    app.register_install_completion_command()
    return app


def _prepare_libraries() -> None:
    """Leave standard error to our own messages, and limit threads; libraries follow when they are imported."""
    from ..hardware import limit_threads

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    warnings.filterwarnings("ignore")
    quiet = {
        "transformers.utils.logging": lambda module: (module.set_verbosity_error(), module.disable_progress_bar()),
        "datasets.utils.logging": lambda module: module.set_verbosity_error(),
        "torch": lambda _: limit_threads(),
    }
    for module, hook in quiet.items():
        wrapt.register_post_import_hook(hook, module)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("vaswani_transformer").setLevel(logging.INFO if is_first_process() else logging.WARNING)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")  # translations are not limited to the terminal's own encoding


def _explain(error: BaseException, words: list[str]) -> str:
    """Return what is wrong and what to do, for a reader who does not know the code."""
    if isinstance(error, UserError):
        return str(error)
    if is_panic(error):  # of a text where a regular expression has tried ten million ways, most of all
        return f"the tokenizer failed on a text ({one_line(error)}): change the rules in tokenizer.json, or the text"
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        fix = ": free some space and run the same command again" if error.errno in _DISK_FULL else ""
        return f"{error.strerror or error}{where}{fix}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAlloc" in str(error):
        if words[:1] in (["train"], ["distill"]):
            return "out of memory: lower tokens_per_device; tokens_per_batch, and so the training, stays as it is"
        return "out of memory: lower --tokens-per-batch or --beams, or use a machine with more of it"
    if any(reason in str(error) for reason in _FAILED_WRITES) or type(error).__name__ == "SafetensorError":
        return f"a file could not be written ({one_line(error, 200)}): free some space and run the same command again"
    return f"unexpected {type(error).__name__}: {one_line(error)}; the same command with --debug shows where"


def _on_a_line(message: str) -> str:
    """Return a message, which may quote files of strangers, without what a terminal would obey, and not too long."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
    return shortened(line, _LONGEST)


def _report(error: BaseException, words: list[str], debug: bool) -> int:
    """Print an error, in one line unless `debug`; returns the exit status. One of several processes ends here."""
    message, status = _on_a_line(_explain(error, words)), EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILURE
    if debug:
        traceback.print_exception(error)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        leave_failed(error, message, status)
    print(f"error: {message}", file=sys.stderr)
    return status


def _refuse(error: CycloptsError) -> int:
    """Report a wrong option; of several processes, one on each machine prints it."""
    error.verbose = False
    name = " ".join(["vaswani", *(error.command_chain or ())])
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(REPORTING_SECONDS)
        return EXIT_USAGE
    message = _on_a_line(str(error).replace(_ESCAPE, "")).removesuffix(".")
    print(f"error: {message} (see `{name} --help`)", file=sys.stderr)
    return EXIT_USAGE


def _run(words: list[str]) -> int:
    """Run the command of a command line; returns its exit status."""
    options = words[: words.index("--")] if "--" in words else words
    escaped = [_ESCAPE + word if word[:1] == "-" and " " in word and "=" not in word else word for word in options]
    app = make_app()
    if words[:1] in ([], ["--help"], ["-h"], ["parse"]):  # what each command does is in its module
        for name in _COMMANDS:
            app[name]
        for name in _PARSING:
            app["parse"][name]
    command, bound, _ = app.parse_args(escaped + words[len(options) :], exit_on_error=False, print_error=False)
    _prepare_libraries()
    given = {name: value.lstrip(_ESCAPE) if isinstance(value, str) else value for name, value in bound.kwargs.items()}
    arguments = [value.lstrip(_ESCAPE) if isinstance(value, str) else value for value in bound.args]
    status = command(*arguments, **given)
    sys.stdout.flush()  # here, so that a closed pipe is noticed
    return status or 0


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns 0, 1 (the machine failed), 2 (a mistake of the user) or 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:end]
    words = [word for index, word in enumerate(words) if word != "--debug" or index > end]
    try:
        return _run(words)
    except CycloptsError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return report_stop(words)
    except BrokenPipeError:  # nobody reads our output any more, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        if type(error).__name__ == "TrainingStopped":  # whose module takes seconds to import
            leave_process_group()
            return report_stop(words, error.signal_number, error.step)
        return _report(error, words, debug)
