"""What happens around training steps: progress bar, log file, clean stops, time limit."""

import json
import signal
import sys
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback

_SHOWN = (("eval_loss", "loss"), ("eval_perplexity", "perplexity"), ("eval_bleu", "BLEU"))


class ProgressBarCallback(TrainerCallback):
    """One bar over optimizer steps with loss, rate and tokens a second, and one line for each validation.

    Args:
        trainer: asked for the tokens it has seen.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar where training starts or resumes."""
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="training",
                unit="step",
                dynamic_ncols=True,
                mininterval=0.5,
                file=sys.stderr,
            )
            self.started, self.tokens_at_start = time.monotonic(), self.trainer.tokens_seen[1]

    def on_step_end(self, args, state, control, **kwargs):
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show loss and speed in the bar, validations as lines above it."""
        if self.bar is None or not logs:
            return
        if "loss" in logs:
            self.bar.set_postfix_str(f"loss {logs['loss']:.3f}, {logs.get('target_tokens_per_second', 0):,.0f} tok/s")
        elif "eval_loss" in logs:
            shown = ", ".join(f"{label} {logs[key]:.2f}" for key, label in _SHOWN if key in logs)
            self.bar.write(f"step {state.global_step:,}: validation {shown}", file=sys.stderr)

    def on_train_end(self, args, state, control, **kwargs):
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class TrainingLogCallback(TrainerCallback):
    """Appends what the trainer logs to a JSON lines file, with elapsed seconds and token counts.

    `seconds` counts training over all sessions of a run, `target_tokens_per_second` (padding not counted) is measured
    since the line before. Lines past the step that a run resumes from are dropped: they describe work that was lost.

    Args:
        trainer: asked for the tokens it has seen.
        path: the file.
    """

    def __init__(self, trainer, path: str | Path):
        self.trainer, self.path = trainer, Path(path)
        self.earlier_seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        """Take up the log of an interrupted run, or start one."""
        entries = read_training_log(self.path) if self.path.is_file() else []
        entries = [entry for entry in entries if entry["step"] <= state.global_step and state.global_step > 0]
        self.earlier_seconds = entries[-1]["seconds"] if entries else 0.0
        self.started = self.marked = time.monotonic()
        self.marked_tokens = int(self.trainer.tokens_seen[1])
        if state.is_world_process_zero:
            self.path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")

    def seconds(self) -> float:
        """Seconds of training so far, earlier sessions included."""
        return self.earlier_seconds + time.monotonic() - self.started

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Append one line."""
        if not logs or not hasattr(self, "started"):
            return
        if "loss" in logs:
            now, tokens = time.monotonic(), int(self.trainer.tokens_seen[1])
            logs["target_tokens_per_second"] = (tokens - self.marked_tokens) / max(now - self.marked, 1e-9)
            logs["source_tokens"], logs["target_tokens"] = self.trainer.step_tokens
            self.marked, self.marked_tokens = now, tokens
        if state.is_world_process_zero and any(key == "loss" or key.endswith("_loss") for key in logs):
            entry = {"step": state.global_step, "seconds": round(self.seconds(), 1), **logs}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def on_evaluate(self, args, state, control, **kwargs):
        """Leave validation out of the tokens a second of the next line."""
        self.marked, self.marked_tokens = time.monotonic(), int(self.trainer.tokens_seen[1])


def read_training_log(path: str | Path) -> list[dict]:
    """The entries of a training log; a torn last line is left out."""
    entries = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


def on_any_process(args, flag: bool) -> bool:
    """Whether the flag is up on any process, the same answer on all: else one would stop while others wait for it."""
    if args.world_size == 1:
        return flag
    raised = torch.tensor(int(flag), device=args.device)
    torch.distributed.all_reduce(raised, torch.distributed.ReduceOp.MAX)
    return bool(raised)


class ResumableEarlyStoppingCallback(EarlyStoppingCallback):
    """transformers' early stopping, whose count of validations without progress survives a resume."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Take up the count from the checkpoint."""
        super().on_train_begin(args, state, control, **kwargs)
        stored = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step > 0 and isinstance(stored, dict):
            self.early_stopping_patience_counter = stored["attributes"]["early_stopping_patience_counter"]


class TimeLimitCallback(TrainerCallback):
    """Ends training with a validation and a checkpoint once it has taken so long.

    Args:
        log: counts the seconds, earlier sessions included.
        minutes: the limit.
    """

    def __init__(self, log: TrainingLogCallback, minutes: float):
        self.log, self.minutes = log, minutes

    def on_step_end(self, args, state, control, **kwargs):
        """Ask for a validation, a checkpoint and the end when the time is up."""
        if on_any_process(args, self.log.seconds() >= 60 * self.minutes):
            control.should_evaluate = control.should_save = control.should_training_stop = True
        return control


class StopSignalCallback(TrainerCallback):
    """Ctrl-C or SIGTERM during training: finish the step, write a checkpoint, stop. A second Ctrl-C stops at once."""

    def __init__(self):
        self.received: int | None = None
        self._previous = {}

    def _receive(self, number, frame):
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        tqdm.write("stopping after this step, with a checkpoint (once more to stop at once)", file=sys.stderr)

    def on_train_begin(self, args, state, control, **kwargs):
        """Take over the signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._receive)
            except ValueError:  # not in the main thread: the program around us handles signals
                return

    def on_step_end(self, args, state, control, **kwargs):
        """Ask for a checkpoint and the end if a signal came."""
        if on_any_process(args, self.received is not None):
            self.received = self.received or signal.SIGTERM
            control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, args, state, control, **kwargs):
        """Give the signals back."""
        self.restore()

    def restore(self) -> None:
        """Give the signals back, also after an error."""
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)
