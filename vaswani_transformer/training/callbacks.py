"""What happens around training steps: progress bar, log file, clean stops, time limit."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from ..distributed import AgreedCallback
from ..files import sync, write_text
from .checkpoints import STOP, TIME

_FINAL = {"best_loss", "average_loss", "last_loss"}  # in lines about the weights to keep, written after the last step
_SHOWN = (("eval_loss", "loss"), ("eval_perplexity", "perplexity"), ("eval_bleu", "BLEU"))


def duration(seconds: float) -> str:
    """Seconds as days, hours, minutes: the two largest that matter."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


class TrainingProgressCallback(TrainerCallback):
    """Loss, learning rate, tokens a second and time left: a bar on a terminal, lines where output goes to a file.

    Args:
        log: counts the seconds of training.
        max_minutes: a limit on them; 0 for none.
    """

    def __init__(self, log: "TrainingLogCallback", max_minutes: float = 0.0):
        self.log, self.max_minutes = log, max_minutes
        self.bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar where training starts or resumes."""
        self.first_step, self.first_seconds = state.global_step, self.log.seconds()
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="training",
                unit="step",
                dynamic_ncols=True,
                mininterval=0.5,
                file=sys.stderr,
                disable=not sys.stderr.isatty(),
                bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def on_step_end(self, args, state, control, **kwargs):
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def seconds_left(self, state) -> float | None:
        """Until the last step or the time limit, at the pace since this session began; None before the first step."""
        seconds, steps = self.log.seconds(), state.global_step - self.first_step
        if steps == 0:
            return None
        left = (state.max_steps - state.global_step) * (seconds - self.first_seconds) / steps
        return max(0.0, min(left, 60 * self.max_minutes - seconds)) if self.max_minutes else left

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show how training goes; validations and, without a terminal, everything as lines."""
        if self.bar is None or not logs:
            return
        if "loss" in logs:
            shown = [f"loss {logs['loss']:.3f}", f"rate {logs['learning_rate']:.2e}"]
            if "target_tokens_per_second" in logs:
                shown.append(f"{logs['target_tokens_per_second']:,.0f} tok/s")
            left = self.seconds_left(state)
            if left is not None:
                shown.append(f"{duration(left)} left")
            self.bar.set_postfix_str(", ".join(shown))
            if self.bar.disable:
                if "grad_norm" in logs:
                    shown.insert(2, f"gradient {logs['grad_norm']:.2f}")
                shown.insert(-1, f"{logs['source_tokens']:,} + {logs['target_tokens']:,} tokens a step")
                shown.insert(-1, f"padding {logs.get('padding', 0):.1%}")
                self._line(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join(shown)}")
        elif "eval_loss" in logs:
            shown = ", ".join(f"{label} {logs[key]:.2f}" for key, label in _SHOWN if key in logs)
            self._line(f"step {state.global_step:,}: validation {shown}")

    def _line(self, text: str) -> None:
        self.bar.write(text, file=sys.stderr)

    def on_train_end(self, args, state, control, **kwargs):
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class LearningCurveCallback(TrainerCallback):
    """Redraws the learning curve while training goes on, after a validation and at most once in so many seconds.

    Args:
        draw: draws it, from the log to the picture.
        seconds: between two pictures.
    """

    def __init__(self, draw: Callable[[], object], seconds: float = 60.0):
        self.draw, self.seconds = draw, seconds
        self._drawn = -float("inf")

    def on_evaluate(self, args, state, control, **kwargs):
        """Draw after a validation, unless the last picture is young."""
        if state.is_world_process_zero and time.monotonic() - self._drawn >= self.seconds:
            self.draw()
            self._drawn = time.monotonic()


class TrainingLogCallback(TrainerCallback, ExportableState):
    """Appends what the trainer logs to a JSON lines file, with elapsed seconds.

    `seconds` counts training over all sessions of a run, up to the checkpoint that each resumes from. Lines past that
    are dropped: they describe work that was lost, or that is done again.

    Args:
        path: the file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.earlier_seconds = 0.0
        self.started: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Take up the log of an interrupted run, or start one."""
        entries = read_training_log(self.path) if self.path.is_file() else []
        entries = [
            entry
            for entry in entries
            if entry["step"] <= state.global_step and state.global_step > 0 and not _FINAL & entry.keys()
        ]
        self.earlier_seconds = entries[-1]["seconds"] if entries else 0.0
        stored = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step > 0 and isinstance(stored, dict):
            self.earlier_seconds = stored["attributes"]["earlier_seconds"]
        self.started = time.monotonic()
        if state.is_world_process_zero:
            write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in entries))

    def seconds(self) -> float:
        """Seconds of training so far, earlier sessions included."""
        return self.earlier_seconds + (0.0 if self.started is None else time.monotonic() - self.started)

    def state(self) -> dict:
        """What a checkpoint keeps of it."""
        return {"args": {"path": str(self.path)}, "attributes": {"earlier_seconds": self.seconds()}}

    def on_save(self, args, state, control, **kwargs):
        """Let the lines up to a checkpoint survive a power cut."""
        if state.is_world_process_zero and self.path.is_file():
            sync(self.path)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Append one line."""
        if not logs or self.started is None:
            return
        # The Trainer's summary, `train_loss`, comes after the last checkpoint: a run that is cut off there lacks it.
        told = any(key == "loss" or key.endswith("_loss") for key in logs) and "train_loss" not in logs
        if state.is_world_process_zero and told:
            entry = {"step": state.global_step, "seconds": round(self.seconds(), 1), **logs}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def read_training_log(path: str | Path) -> list[dict]:
    """The entries of a training log; a torn last line is left out."""
    entries = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


class ResumableEarlyStoppingCallback(EarlyStoppingCallback):
    """transformers' early stopping, whose count of validations without progress survives a resume."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Take up the count from the checkpoint."""
        super().on_train_begin(args, state, control, **kwargs)
        stored = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step > 0 and isinstance(stored, dict):
            self.early_stopping_patience_counter = stored["attributes"]["early_stopping_patience_counter"]


class TimeLimitCallback(AgreedCallback):
    """Ends training with a validation and a checkpoint once it has taken so long.

    Args:
        log: counts the seconds, earlier sessions included.
        minutes: the limit.
    """

    def __init__(self, log: TrainingLogCallback, minutes: float):
        super().__init__()
        self.log, self.minutes = log, minutes

    def wants(self) -> bool:
        """When the time is up."""
        return self.log.seconds() >= 60 * self.minutes

    def act(self, control) -> None:
        """Ask for a validation, a checkpoint and the end."""
        control.should_evaluate = control.should_save = control.should_training_stop = True


class TimedCheckpointCallback(AgreedCallback):
    """Asks for a checkpoint every so many minutes of training, at the same step on all processes (Section 6.1: 10).

    Args:
        log: counts the seconds, earlier sessions included.
        minutes: between two checkpoints.
    """

    def __init__(self, log: TrainingLogCallback, minutes: float):
        super().__init__()
        self.log, self.seconds = log, 60 * minutes
        self.save_reason: str | None = None

    def _passed(self) -> float:
        """The latest moment that a checkpoint was due at."""
        return self.log.seconds() // self.seconds * self.seconds

    def on_train_begin(self, args, state, control, **kwargs):
        """Set the clock."""
        self._next = self._passed() + self.seconds

    def wants(self) -> bool:
        """When a checkpoint is due."""
        return self.log.seconds() >= self._next

    def act(self, control) -> None:
        """Ask for it."""
        control.should_save, self.save_reason = True, TIME
        self._next = max(self._next, self._passed()) + self.seconds  # the first of the processes' clocks counts

    def on_save(self, args, state, control, **kwargs):
        """What is written next has other reasons."""
        self.save_reason = None


class StopSignalCallback(AgreedCallback):
    """Ctrl-C or SIGTERM during training: finish the step, write a checkpoint, stop. A second Ctrl-C stops at once."""

    def __init__(self):
        super().__init__()
        self.received: int | None = None
        self._previous = {}

    @property
    def save_reason(self) -> str | None:
        """Why there is a checkpoint, once a signal has come."""
        return None if self.received is None else STOP

    def _receive(self, number, frame):
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # clusters send SIGTERM to all processes, and the launcher passes its own on
        self.received = number
        if os.environ.get("RANK", "0") == "0":
            tqdm.write("stopping after this step, with a checkpoint (once more to stop at once)", file=sys.stderr)

    def on_train_begin(self, args, state, control, **kwargs):
        """Take over the signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._receive)
            except ValueError:  # not in the main thread: the program around us handles signals
                return

    def wants(self) -> bool:
        """When a signal came."""
        return self.received is not None

    def act(self, control) -> None:
        """Ask for a checkpoint and the end."""
        self.received = self.received or signal.SIGTERM
        control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        """Give the signals back."""
        self.restore()

    def restore(self) -> None:
        """Give the signals back, also after an error."""
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)
