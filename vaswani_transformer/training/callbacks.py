"""What happens around training steps: progress, log file, early stopping, checkpoints by the clock, stops."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from ..distributed import on_any_process
from ..durations import duration
from ..files import sync, write_text
from .checkpoints import STOP, TIME

_FINAL = {"best_loss", "average_loss", "last_loss"}  # in entries of model selection, written after the last step
_SHOWN = (("eval_loss", "loss"), ("eval_perplexity", "perplexity"), ("eval_bleu", "BLEU"))


class TrainingProgressCallback(TrainerCallback):
    """Loss, learning rate, tokens a second and time left: in a bar on a terminal, as lines where output is a file.

    transformers' own progress bar shows neither rate nor time limit, and prints logs as dictionaries.

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
        """Seconds to the last step or the time limit at this session's pace; None before its first step."""
        seconds, steps = self.log.seconds(), state.global_step - self.first_step
        if steps == 0:
            return None
        left = (state.max_steps - state.global_step) * (seconds - self.first_seconds) / steps
        return max(0.0, min(left, 60 * self.max_minutes - seconds)) if self.max_minutes else left

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the logged step in the bar, or without a terminal as a line; a validation as a line."""
        if self.bar is None or not logs:
            return
        if "loss" in logs:
            as_line, left = self.bar.disable, self.seconds_left(state)
            shown = [f"loss {logs['loss']:.3f}", f"rate {logs['learning_rate']:.2e}"]
            if as_line and "grad_norm" in logs:
                shown.append(f"gradient {logs['grad_norm']:.2f}")
            if "target_tokens_per_second" in logs:
                shown.append(f"{logs['target_tokens_per_second']:,.0f} tok/s")
            if as_line:
                shown.append(f"{logs['source_tokens']:,} + {logs['target_tokens']:,} tokens a step")
                shown.append(f"padding {logs.get('padding', 0):.1%}")
            if left is not None:
                shown.append(f"{duration(left)} left")
            if as_line:
                self._print(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join(shown)}")
            else:
                self.bar.set_postfix_str(", ".join(shown))
        elif "eval_loss" in logs:
            shown = ", ".join(f"{label} {logs[key]:.2f}" for key, label in _SHOWN if key in logs)
            self._print(f"step {state.global_step:,}: validation {shown}")

    def _print(self, text: str) -> None:
        self.bar.write(text, file=sys.stderr)

    def on_train_end(self, args, state, control, **kwargs):
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class LearningCurveCallback(TrainerCallback):
    """Redraws the learning curve during training, after a validation and at most once in so many seconds.

    Args:
        draw: draws it, from the log to the picture.
        seconds: between two pictures.
    """

    def __init__(self, draw: Callable[[], object], seconds: float = 60.0):
        self.draw, self.seconds = draw, seconds
        self._drawn = -float("inf")

    def on_evaluate(self, args, state, control, **kwargs):
        """Draw, unless the last picture is recent."""
        if state.is_world_process_zero and time.monotonic() - self._drawn >= self.seconds:
            self.draw()
            self._drawn = time.monotonic()


class TrainingLogCallback(TrainerCallback, ExportableState):
    """Appends what the trainer logs to a JSON lines file, with elapsed seconds.

    `seconds` counts training over all sessions of a run, up to the checkpoint that each resumes from. Lines after that
    are dropped: the steps that they describe are done again.

    Args:
        path: the file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.earlier_seconds = 0.0
        self.started: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Continue the log of an interrupted run, or start one."""
        entries = read_training_log(self.path) if state.global_step > 0 and self.path.is_file() else []
        entries = [entry for entry in entries if entry["step"] <= state.global_step and not _FINAL & entry.keys()]
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
        """What a checkpoint stores."""
        return {"args": {"path": str(self.path)}, "attributes": {"earlier_seconds": self.seconds()}}

    def on_save(self, args, state, control, **kwargs):
        """Wait until the lines up to a checkpoint are on the disk."""
        if state.is_world_process_zero and self.path.is_file():
            sync(self.path)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Append one line."""
        if not logs or self.started is None:
            return
        # The Trainer's summary, `train_loss`, comes after the last checkpoint: a run that is cut off there lacks it.
        has_loss = any(key == "loss" or key.endswith("_loss") for key in logs) and "train_loss" not in logs
        if state.is_world_process_zero and has_loss:
            entry = {"step": state.global_step, "seconds": round(self.seconds(), 1), **logs}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def read_training_log(path: str | Path) -> list[dict]:
    """The entries of a training log; an incomplete last line is left out."""
    entries = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


class ResumableEarlyStoppingCallback(EarlyStoppingCallback):
    """transformers' early stopping, whose count of validations without progress survives a resume.

    `restore_callback_states_from_checkpoint` would restore the patience too, which a resumed run may change.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        """Restore the count from the checkpoint."""
        super().on_train_begin(args, state, control, **kwargs)
        stored = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step > 0 and isinstance(stored, dict):
            self.early_stopping_patience_counter = stored["attributes"]["early_stopping_patience_counter"]


class TogetherCallback(TrainerCallback):
    """Ends or saves at the end of a step, on all processes at once, when one of them wants to.

    transformers' callbacks decide in each process alone, and one that stops leaves the others waiting for it. One
    message a step serves all of the callbacks.

    Args:
        callbacks: have `wants()`, whether this process wants to act, and `act(control)`, called on all processes then.
    """

    def __init__(self, callbacks: Sequence[TrainerCallback]):
        self.callbacks = list(callbacks)

    def on_step_end(self, args, state, control, **kwargs):
        """Ask all processes, and act."""
        wanted = on_any_process(args, *(callback.wants() for callback in self.callbacks))
        for callback, is_wanted in zip(self.callbacks, wanted, strict=True):
            if is_wanted:
                callback.act(control)
        return control


class TimeLimitCallback(TrainerCallback):
    """Ends training with a validation and a checkpoint once it has taken so long; for [`TogetherCallback`].

    Args:
        log: counts the seconds, earlier sessions included.
        minutes: the limit.
    """

    def __init__(self, log: TrainingLogCallback, minutes: float):
        self.log, self.minutes = log, minutes

    def wants(self) -> bool:
        """Whether the time is up."""
        return self.log.seconds() >= 60 * self.minutes

    def act(self, control) -> None:
        """Ask for a validation, a checkpoint and the end."""
        control.should_evaluate = control.should_save = control.should_training_stop = True


class TimedCheckpointCallback(TrainerCallback):
    """Asks for a checkpoint every so many minutes of training (Section 6.1: 10); for [`TogetherCallback`].

    Args:
        log: counts the seconds, earlier sessions included.
        minutes: between two checkpoints.
    """

    def __init__(self, log: TrainingLogCallback, minutes: float):
        self.log, self.interval = log, 60 * minutes
        self.save_reason: str | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Set the clock."""
        self.next_second = self._after(self.log.seconds())

    def _after(self, seconds: float) -> float:
        return (seconds // self.interval + 1) * self.interval

    def wants(self) -> bool:
        """Whether a checkpoint is due."""
        return self.log.seconds() >= self.next_second

    def act(self, control) -> None:
        """Ask for it."""
        control.should_save, self.save_reason = True, TIME
        # The clock that is ahead of the others counts.
        self.next_second = max(self.next_second + self.interval, self._after(self.log.seconds()))

    def on_save(self, args, state, control, **kwargs):
        """Forget the reason: the next checkpoint has its own."""
        self.save_reason = None


class StopSignalCallback(TrainerCallback):
    """On Ctrl-C or SIGTERM: finish the step, write a checkpoint, stop; for [`TogetherCallback`].

    A second Ctrl-C stops at once. transformers' own `enable_jit_checkpoint` does not serve: it knows SIGTERM alone,
    waits 3 seconds, may save within a step, and each process decides for itself.
    """

    def __init__(self):
        self.received: int | None = None
        self._earlier_handlers = {}

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
            tqdm.write("stopping after this step, with a checkpoint (Ctrl-C again to stop at once)", file=sys.stderr)

    def on_train_begin(self, args, state, control, **kwargs):
        """Install the signal handlers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._earlier_handlers[number] = signal.signal(number, self._receive)
            except ValueError:  # outside the main thread the program around us handles signals
                return

    def wants(self) -> bool:
        """Whether a signal came."""
        return self.received is not None

    def act(self, control) -> None:
        """Ask for a checkpoint and the end."""
        self.received = self.received or signal.SIGTERM  # another process may have had it
        control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        """Restore the earlier signal handlers."""
        self.restore()

    def restore(self) -> None:
        """Restore the earlier signal handlers; also called after an error."""
        while self._earlier_handlers:
            signal.signal(*self._earlier_handlers.popitem())
