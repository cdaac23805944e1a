"""Callbacks around training steps: progress, log file, early stopping, checkpoints by the clock, stops."""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from accelerate.utils import is_matplotlib_available
from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from ..durations import duration
from ..errors import one_line, reading
from ..files import write_text, written_whole
from ..json_and_yaml import parse_json
from ..output_folder import OutputFolder
from .checkpoints import STOP, TIME

logger = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"  # a folder of a run
EVENTS = f"{TENSORBOARD}/events.out.tfevents.*"
SHOWN = (("eval_loss", "loss"), ("eval_perplexity", "perplexity"), ("eval_bleu", "BLEU"))


class TrainingProgressCallback(TrainerCallback):
    """Loss, learning rate, tokens a second and time left: in a bar on a terminal, as lines where output is a file.

    transformers' own progress bar shows neither rate nor time limit, and prints logs as dictionaries.
    """

    def __init__(self, log: "TrainingLogCallback", max_minutes: float = 0.0):
        self.log, self.max_minutes = log, max_minutes
        self.bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar where training starts or resumes."""
        self.first_step, self.first_seconds = state.global_step, self.log.seconds()
        if state.is_world_process_zero:
            style = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
            options = {"total": state.max_steps, "initial": state.global_step, "desc": "training", "mininterval": 0.5}
            options |= {"dynamic_ncols": True, "bar_format": style, "disable": not sys.stderr.isatty()}
            self.bar = tqdm(**options, file=sys.stderr)

    def on_step_end(self, args, state, control, **kwargs):
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the logged step in the bar, or without a terminal as a line; a validation as a line."""
        if self.bar is None or not logs:
            return
        if "loss" in logs:
            loss, rate = f"loss {logs['loss']:.3f}", f"rate {logs['learning_rate']:.2e}"
            speed = f"{logs['target_tokens_per_second']:,.0f} tok/s"
            seconds = self.log.seconds()
            pace = (seconds - self.first_seconds) / (state.global_step - self.first_step)  # of this session
            seconds_left = (state.max_steps - state.global_step) * pace
            if self.max_minutes:
                seconds_left = max(0.0, min(seconds_left, 60 * self.max_minutes - seconds))
            left = f"{duration(seconds_left)} left"
            if not self.bar.disable:
                self.bar.set_postfix_str(f"{loss}, {rate}, {speed}, {left}")
                return
            gradient = f", gradient {logs['grad_norm']:.2f}" if "grad_norm" in logs else ""
            tokens = f"{logs['source_tokens']:,} + {logs['target_tokens']:,} tokens a step"
            shown = f"{loss}, {rate}{gradient}, {speed}, {tokens}, padding {logs.get('padding', 0):.1%}, {left}"
            self.bar.write(f"step {state.global_step:,} of {state.max_steps:,}: {shown}", file=sys.stderr)
        elif "eval_loss" in logs:
            shown = ", ".join(f"{label} {logs[key]:.2f}" for key, label in SHOWN if key in logs)
            self.bar.write(f"step {state.global_step:,}: validation {shown}", file=sys.stderr)

    def on_train_end(self, args, state, control, **kwargs):
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class NoteEventsCallback(TrainerCallback):
    """Lists the files that TensorBoard starts in a run's folder as ours, so that the run can be replaced."""

    def __init__(self, output: OutputFolder):
        self.output, self._earlier = output, set(output.path.glob(EVENTS))

    def on_train_begin(self, args, state, control, **kwargs):
        """Note the new files, once TensorBoard's own callback has opened them."""
        if new := set(self.output.path.glob(EVENTS)) - self._earlier:
            self._earlier |= new
            self.output.note(path.relative_to(self.output.path).as_posix() for path in new)

    on_log = on_train_begin  # the selection of weights, after the training, opens another file


class TrainingLogCallback(TrainerCallback, ExportableState):
    """Appends what the trainer logs to a JSON lines file, with elapsed seconds.

    `seconds` counts training over all sessions of a run, up to the checkpoint that each resumes from. The file is
    written again from that checkpoint's own log: the steps after it are done again.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.earlier_seconds = 0.0
        self.started: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Continue the log of an interrupted run, or start one."""
        self.earlier_seconds = stored_attribute(state, type(self), "earlier_seconds", 0.0)
        self.started = time.monotonic()
        if state.is_world_process_zero:
            entries = [{"seconds": 0.0} | entry for entry in state.log_history]  # commit b26e237 noted no seconds there
            write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in entries))

    def seconds(self) -> float:
        """Return the seconds of training so far, earlier sessions included."""
        return self.earlier_seconds + (0.0 if self.started is None else time.monotonic() - self.started)

    def state(self) -> dict:
        """Return what a checkpoint stores."""
        return {"args": {"path": str(self.path)}, "attributes": {"earlier_seconds": self.seconds()}}

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Append one line, which the next checkpoint has too."""
        if not logs or self.started is None:
            return
        # The Trainer's summary, `train_loss`, comes after the last checkpoint: a run that is cut off there lacks it.
        has_loss = any(key == "loss" or key.endswith("_loss") for key in logs) and "train_loss" not in logs
        if state.is_world_process_zero and has_loss:
            state.log_history[-1] = {"step": state.global_step, "seconds": round(self.seconds(), 1), **logs}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(state.log_history[-1]) + "\n")


def read_training_log(path: str | Path) -> list[dict]:
    """Return the entries of a training log without a torn last line; damaged ones are dropped with a warning."""
    lines, entries = Path(path).read_bytes().split(b"\n"), []
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_json(line.decode("utf-8"), finite=False)
            entries.append(entry | {"step": int(entry["step"]), "seconds": float(entry["seconds"])})
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):  # a crash may have torn the last
                logger.warning("line %d of %s is damaged and dropped (%s)", number, path, one_line(error, 100))
    return entries


def plot_learning_curve(log: str | Path, picture: Path) -> None:
    """Draw losses (nats a token), BLEU and learning rate of a log over its steps, whole or not at all, as PNG."""
    entries = read_training_log(log)
    series = {
        key: ([entry["step"] for entry in entries if key in entry], [entry[key] for entry in entries if key in entry])
        for key in ("loss", "eval_loss", "eval_bleu", "learning_rate")
    }
    has_bleu = bool(series["eval_bleu"][0])
    if not is_matplotlib_available():
        logger.warning("no picture drawn: pip install 'vaswani_transformer[plots]' to have one")
        return
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", figsize=(8, 7 if has_bleu else 5))
    axes = figure.subplots(3 if has_bleu else 2, 1, sharex=True, height_ratios=[3, 2, 1] if has_bleu else [3, 1])
    axes[0].plot(*series["loss"], color="tab:blue", alpha=0.7, label="training (label-smoothed)")
    axes[0].plot(*series["eval_loss"], color="tab:orange", marker="o", markersize=3, label="validation")
    axes[0].set_ylabel("loss (nats a token)")
    axes[0].legend()
    if has_bleu:
        axes[1].plot(*series["eval_bleu"], color="tab:green", marker="o", markersize=3)
        axes[1].set_ylabel("validation BLEU\n(greedy)")
    axes[-1].plot(*series["learning_rate"], color="tab:gray")
    axes[-1].set(xlabel="optimizer step", ylabel="learning rate")
    for axis in axes:
        axis.grid(alpha=0.3)
    with written_whole(picture) as new:
        figure.savefig(new, dpi=110, format="png")


def stored_attribute(state, callback: type, name: str, default: float) -> float:
    """Return what a callback of this class stored in the checkpoint that a training resumes from."""
    stored = state.stateful_callbacks.get(callback.__name__) if state.global_step else None
    with reading("the trainer's state"):
        return float(stored["attributes"].get(name, default)) if stored else default


class ResumableEarlyStoppingCallback(EarlyStoppingCallback):
    """transformers' early stopping, whose count of validations without progress survives a resume.

    `restore_callback_states_from_checkpoint` would restore the patience too, which a resumed run may change.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        """Restore the count from the checkpoint."""
        super().on_train_begin(args, state, control, **kwargs)
        name = "early_stopping_patience_counter"
        self.early_stopping_patience_counter = stored_attribute(state, type(self), name, 0)


class StopAndSaveCallback(TrainerCallback):
    """Stops on Ctrl-C or SIGTERM with a checkpoint, stops at a time limit, and asks for checkpoints by the clock.

    All of it at the end of a step and on all processes at once: transformers' callbacks decide in each process alone,
    and one that stops leaves the others waiting for it. What one of several processes asks for goes to the others with
    the next step's count of tokens (`VaswaniTrainer.get_batch_samples`). A second Ctrl-C stops at once.

    Args:
        log: counts the seconds, earlier sessions included.
        max_minutes: training then ends with a validation and a checkpoint; 0 for no limit.
        checkpoint_minutes: between two checkpoints (Section 6.1: 10); 0 for none.
        first_step: before this step the Trainer's periodic checkpoints are written only at validations.
    """

    def __init__(
        self, log: "TrainingLogCallback", max_minutes: float = 0.0, checkpoint_minutes: float = 0.0, first_step: int = 0
    ):
        self.first_step = first_step
        self.log, self.limit, self.interval = log, 60 * max_minutes, 60 * checkpoint_minutes
        self.received: int | None = None  # the signal
        self.save_reasons: set[str] = set()  # of the next checkpoint
        self.agreed = (False, False, False)  # on several processes: what any of them asked for before this step
        self._earlier_handlers = {}

    def _receive(self, number, frame):
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # clusters send SIGTERM to all processes, and the launcher passes its own on
        self.received = number
        if os.environ.get("RANK", "0") == "0":
            tqdm.write("stopping after this step, with a checkpoint (Ctrl-C again to stop at once)", file=sys.stderr)

    def _next_checkpoint(self, seconds: float) -> float:
        return (seconds // self.interval + 1) * self.interval if self.interval else float("inf")

    def on_train_begin(self, args, state, control, **kwargs):
        """Set the clock, install the signal handlers."""
        self.next_second = self._next_checkpoint(self.log.seconds())
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._earlier_handlers[number] = signal.signal(number, self._receive)
            except ValueError:  # outside the main thread the program around us handles signals
                return

    def requests(self) -> tuple[bool, bool, bool]:
        """Return what this process asks for: to stop, to end, a checkpoint."""
        seconds = self.log.seconds()
        return self.received is not None, 0 < self.limit <= seconds, seconds >= self.next_second

    def on_step_end(self, args, state, control, **kwargs):
        """Do what was asked for."""
        if control.should_evaluate:
            control.should_save = True
        elif state.global_step < self.first_step:
            control.should_save = False
        stopped, time_is_up, checkpoint_is_due = self.requests() if args.world_size == 1 else self.agreed
        if stopped:
            self.received = self.received or signal.SIGTERM  # another process may have had it
            control.should_save = control.should_training_stop = True
            self.save_reasons.add(STOP)
        if time_is_up:
            control.should_evaluate = control.should_save = control.should_training_stop = True
        if checkpoint_is_due:
            control.should_save = True
            self.save_reasons.add(TIME)
            # The clock that is ahead of the others counts.
            self.next_second = max(self.next_second + self.interval, self._next_checkpoint(self.log.seconds()))
        return control

    def on_save(self, args, state, control, **kwargs):
        """Forget the reasons: the next checkpoint has its own."""
        self.save_reasons = set()

    def restore(self) -> None:
        """Restore the earlier signal handlers; for whoever called `Trainer.train`, since that may end in an error."""
        while self._earlier_handlers:
            signal.signal(*self._earlier_handlers.popitem())
