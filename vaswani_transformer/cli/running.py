"""How a command runs: exit statuses, how a process ends that was stopped or failed, and how to resume it."""

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from ..output_folder import is_first_process

EXIT_FAILURE, EXIT_USAGE = 1, 2
_RESUMED = [[name] for name in ("train", "distill", "demo", "experiment", "prepare", "clean")]
REPORTING_SECONDS = 2.0  # for the process that reports an error: a launcher ends all processes when one ends


def leave_process_group() -> None:
    """Destroy torch's process group, whose threads may otherwise abort a finished process as the interpreter exits."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave_failed(error: BaseException, message: str, status: int) -> NoReturn:
    """End one of several processes after an error, at once: ending together could wait for the others without end.

    Of processes that fail together the first reports it.
    """
    from ..distributed import reports_error

    if reports_error():
        if status != EXIT_USAGE and type(error).__name__ != "ProcessLostError":
            message = f"process {os.environ.get('RANK', '0')} of {os.environ['WORLD_SIZE']}: {message}"
        print(f"error: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(REPORTING_SECONDS)
    os._exit(status)


def report_stop(words: list[str], signal_number: int = signal.SIGINT, step: int | None = None) -> int:
    """Print how to resume a command that a signal has stopped, `step` of its checkpoint; returns the exit status."""
    if not is_first_process():
        return 128 + signal_number
    if words[:1] not in _RESUMED and words[:2] != ["parse", "train"]:
        print("interrupted", file=sys.stderr)
        return 128 + signal_number
    where = "" if step is None else f" at step {step:,}; checkpoint written"
    if words[0] == "prepare":  # with --overwrite it would start again; the others resume with it
        words = [word for word in words if word != "--overwrite"]
    print(f"stopped{where}. To resume, run the same command again:\n  {command_name()} {shlex.join(words)}")
    return 128 + signal_number


def command_name() -> str:
    """Return how this program was called, as a user can type it."""
    return "vaswani" if Path(sys.argv[0]).name == "vaswani" else "python -m vaswani_transformer"
