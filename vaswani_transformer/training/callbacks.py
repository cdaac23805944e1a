"""Callbacks around training steps: progress, log file, early stopping, stops."""

import contextlib
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from ..distributed import over_processes
from ..durations import duration
from ..errors import one_line, reading
from ..files import write_text
from ..json_and_yaml import parse_json
from ..output_folder import OutputFolder

logger = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"  # a folder of a run
EVENTS = f"{TENSORBOARD}/events.out.tfevents.*"
SHOWN = (("eval_loss", "loss"), ("eval_perplexity", "perplexity"), ("eval_bleu", "BLEU"), ("eval_chrf", "chrF"))


class TrainingProgressCallback(ProgressCallback):
    """Loss, learning rate, tokens a second and time left: in a bar on a terminal, as lines where output is a file.

    transformers' own progress bar, which this moves and closes as that does, shows neither rate nor time limit, and
    prints logs as dictionaries.
    """

    def __init__(self, log: "TrainingLogCallback", max_minutes: float = 0.0):
        super().__init__()
        self.log, self.max_minutes = log, max_minutes

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar where training starts or resumes."""
        self.first_step = self.current_step = state.global_step
        self.first_seconds = self.log.seconds()
        if state.is_world_process_zero:
            style = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
            options = {"total": state.max_steps, "initial": state.global_step, "desc": "training", "mininterval": 0.5}
            options |= {"dynamic_ncols": True, "bar_format": style, "disable": not sys.stderr.isatty()}
            self.training_bar = tqdm(**options, file=sys.stderr)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the logged step in the bar, or without a terminal as a line; a validation as a line."""
        if self.training_bar is None or not logs:
            return
        self.training_bar.total = state.max_steps  # which the clock lowers
        if "loss" in logs:
            loss, rate = f"loss {logs['loss']:.3f}", f"rate {logs['learning_rate']:.2e}"
            speed = f"{logs['target_tokens_per_second']:,.0f} tok/s"
            seconds = self.log.seconds()
            pace = (seconds - self.first_seconds) / (state.global_step - self.first_step)  # of this session
            seconds_left = (state.max_steps - state.global_step) * pace
            if self.max_minutes:
                seconds_left = max(0.0, min(seconds_left, 60 * self.max_minutes - seconds))
            left = f"{duration(seconds_left)} left"
            if not self.training_bar.disable:
                self.training_bar.set_postfix_str(f"{loss}, {rate}, {speed}, {left}")
                return
            gradient = f", gradient {logs['grad_norm']:.2f}" if "grad_norm" in logs else ""
            tokens = f"{logs['source_tokens']:,} + {logs['target_tokens']:,} tokens a step"
            shown = f"{loss}, {rate}{gradient}, {speed}, {tokens}, padding {logs.get('padding', 0):.1%}, {left}"
            tqdm.write(f"step {state.global_step:,} of {state.max_steps:,}: {shown}", file=sys.stderr)
        elif "eval_loss" in logs:
            shown = ", ".join(f"{label} {logs[key]:.2f}" for key, label in SHOWN if key in logs)
            tqdm.write(f"step {state.global_step:,}: validation {shown}", file=sys.stderr)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Move the bar of a validation, which translates as well, and of its selections after training."""
        if self.prediction_bar is None:
            options = {"unit": " batches", "leave": False, "disable": None if state.is_world_process_zero else True}
            self.prediction_bar = tqdm(desc="validating", total=len(eval_dataloader), file=sys.stderr, **options)
        super().on_prediction_step(args, state, control, eval_dataloader)


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
        self.restore(state)
        self.started = time.monotonic()
        if state.is_world_process_zero:
            entries = [{"seconds": 0.0} | entry for entry in state.log_history]  # commit b26e237 noted no seconds there
            write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in entries))

    def restore(self, state: TrainerState) -> None:
        """Take the seconds of earlier sessions from the checkpoint that a training resumes from."""
        stored = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        with reading("the trainer's state"):
            self.earlier_seconds = float(stored["attributes"].get("earlier_seconds", 0)) if stored else 0.0

    def seconds(self) -> float:
        """Return the seconds of training so far, earlier sessions included."""
        return self.earlier_seconds + (0.0 if self.started is None else time.monotonic() - self.started)

    def state(self) -> dict:
        """Return what a checkpoint stores."""
        return {"args": {"path": str(self.path)}, "attributes": {"earlier_seconds": self.seconds()}}

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Append one line, which the next checkpoint has too."""
        # The Trainer's summary, `train_loss`, comes after the last checkpoint: a run that is cut off there lacks it.
        has_loss = any(key == "loss" or key.endswith("_loss") for key in logs) and "train_loss" not in logs
        if self.started is not None and state.is_world_process_zero and has_loss:
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
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number < len(lines):  # a crash may have torn the last
                logger.warning("line %d of %s is damaged and dropped (%s)", number, path, one_line(error, 100))
    return entries


def says_something(bleu: float, error: float) -> bool:
    """Return whether a BLEU with this standard error can compare models.

    One sentence for all sources has a BLEU of up to 2, which is another in each validation, and an error of a fifth of
    it: BLEU is believed from 5 on, or from 1 on if it is known to a tenth.
    """
    return bleu >= max(1, min(5, 10 * error or 5))


def best_validation(candidates: Collection[dict], validations: Collection[dict], by: str) -> dict:
    """Return the best of some validations (entries of the log), which are among `validations`.

    By `bleu` it is the one with the lowest loss of those that are at most a standard error below the highest BLEU (the
    one-standard-error rule of Breiman et al., 1984); of all where even the highest says nothing.
    """
    if by == "bleu" and says_something(*(top := _highest_bleu(validations))):
        candidates = [each for each in candidates if each["eval_bleu"] >= top[0] - top[1]]
    return min(candidates, key=lambda each: each["eval_loss"])


def _highest_bleu(validations: Collection[dict]) -> tuple[float, float]:
    """Return the highest BLEU and its standard error, if that was measured."""
    return max((each["eval_bleu"], each.get("eval_bleu_error", 0.0)) for each in validations)


def stalled_validations(state: TrainerState, by: str) -> int:
    """Return how many validations there were since the best one; by `bleu` none count while it says nothing."""
    validations = [entry for entry in state.log_history if "eval_loss" in entry]
    if by == "bleu" and validations and not says_something(*_highest_bleu(validations)):
        return 0
    return sum(entry["step"] > (state.best_global_step or 0) for entry in validations)


class BestValidationCallback(TrainerCallback):
    """Finds the best validation, by what the trainer's state has of them, and stops after some without a better one.

    transformers compares one number at a time. `save` writes the checkpoint of a model that was validated before the
    first step; 0 for no end of `patience`.
    """

    def __init__(self, save: Callable[[], None], by: str, patience: int):
        self.save, self.by, self.patience = save, by, patience

    def on_evaluate(self, args, state, control, **kwargs):
        """Compare the validation with the best so far."""
        validations = [entry for entry in state.log_history if "eval_loss" in entry]
        if not validations:  # weights are selected of a run that ended before the first
            return
        candidates = [each for each in validations if each["step"] in (state.best_global_step, state.global_step)]
        best = best_validation(candidates, validations, self.by)
        state.best_global_step, state.best_metric = best["step"], best[f"eval_{self.by}"]
        if 0 < self.patience <= stalled_validations(state, self.by):
            control.should_training_stop = True
        if state.global_step == 0:
            self.save()


class StopAndSaveCallback(TrainerCallback):
    """Stops on Ctrl-C or SIGTERM with a checkpoint, and at a time limit.

    All of it at the end of a step and on all processes at once: transformers' callbacks decide in each process alone,
    and one that stops leaves the others waiting for it. What one of several processes asks for goes to the others with
    the next step's count of tokens (`VaswaniTrainer.get_batch_samples`). A second Ctrl-C stops at once.

    Args:
        log: counts the seconds, earlier sessions included.
        max_minutes: for training with a validation after a third or before, and for the selection of weights; 0 for no
            limit. Where the rate declines, each validation sets the trainer's `max_steps` to the steps that fit.
        averaged_from: takes the last step, returns the first with a periodic checkpoint that no validation asks for.
        searched: how many validations a search with one length penalty takes; two more get up to 2% of the minutes.
    """

    def __init__(self, log, max_minutes: float = 0, averaged_from=lambda end: 0, searched: float = 0):
        self.averaged_from, self.first_step, self.searched = averaged_from, averaged_from(sys.maxsize), searched
        self.log, self.limit = log, 60 * max_minutes
        self.received: int | None = None  # the signal
        self.by_signal = False  # whether the next checkpoint is for a signal alone
        self.agreed = (False, False)  # on several processes: what any of them asked for before this step
        self._earlier_handlers = {}

    def _receive(self, number, frame):
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # clusters send SIGTERM to all processes, and the launcher passes its own on
        self.received = number
        if os.environ.get("RANK", "0") == "0":
            tqdm.write("stopping after this step, with a checkpoint (Ctrl-C again to stop at once)", file=sys.stderr)

    def on_train_begin(self, args, state, control, **kwargs):
        """Install the signal handlers; resume the decline of the rate, of which the Trainer forgets the end."""
        if state.best_global_step is not None:
            self._end_by_the_clock(args, state)
        with contextlib.suppress(ValueError):  # outside the main thread the program around us handles signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._earlier_handlers[number] = signal.signal(number, self._receive)

    def seconds_left(self) -> float:
        """Return the seconds until the limit."""
        return self.limit - self.log.seconds() if self.limit else math.inf

    def must_end(self, state: TrainerState, validations: int) -> bool:
        """Return whether there is no time for more than so many validations, and for what comes after training."""
        return bool(self.limit) and self.seconds_left() <= self._needed(state, validations)

    def _needed(self, state: TrainerState, validations: int) -> float:
        seconds = [entry["eval_runtime"] for entry in state.log_history if "eval_runtime" in entry]
        if not seconds:
            return 0.65 * self.limit
        return seconds[-1] * (validations + 2 + self.searched) + min(2 * self.searched * seconds[-1], 0.02 * self.limit)

    def requests(self, state: TrainerState) -> tuple[bool, bool]:
        """Return what this process asks for: to stop, to end."""
        # One validation, and as much for checkpoints to be written and averaged.
        return self.received is not None, self.must_end(state, 2)

    def on_step_end(self, args, state, control, **kwargs):
        """Do what was asked for."""
        if control.should_evaluate:
            control.should_save = True
        elif state.global_step < self.first_step:
            control.should_save = False
        stopped, time_is_up = self.requests(state) if args.world_size == 1 else self.agreed
        if stopped:
            self.received = self.received or signal.SIGTERM  # another process may have had it
            self.by_signal = not (control.should_save or time_is_up)
            control.should_save = control.should_training_stop = True
        if time_is_up:
            control.should_evaluate = control.should_save = True

    def on_evaluate(self, args, state, control, **kwargs):
        """End training unless there is time for more of it."""
        if any(over_processes(args, [int(self.must_end(state, 3))])):
            control.should_training_stop = True
        else:
            self._end_by_the_clock(args, state)

    def _end_by_the_clock(self, args, state: TrainerState) -> None:
        """Note the end by the limit of time; let a rate that declines be zero there: set the trainer's `max_steps`."""
        [steps] = over_processes(args, [min(args.max_steps, self.steps_that_fit(state))], "MIN")
        self.first_step = self.averaged_from(steps)
        if args.decline_steps:
            state.max_steps = steps

    def steps_that_fit(self, state: TrainerState) -> int:
        """Return the steps of a whole training that fit into the time, by those so far."""
        if not (self.limit and state.global_step):
            return sys.maxsize
        return int(state.global_step * (self.limit - self._needed(state, 3)) / self.log.seconds())

    def restore(self) -> None:
        """Restore the earlier signal handlers; for whoever called `Trainer.train`, since that may end in an error."""
        while self._earlier_handlers:
            signal.signal(*self._earlier_handlers.popitem())
