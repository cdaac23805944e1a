"""Measurements during training: throughput, padding, and losses that are not finite."""

import time
from pathlib import Path

import numpy as np
import torch

from ..data.batching import IGNORE_INDEX
from ..errors import UserError
from ..plots import new_figure
from .callbacks import read_training_log


class ThroughputMeter:
    """Target tokens a second and the share of padding since the last reading, validation left out."""

    def __init__(self):
        self._since = None
        self._tokens, self._positions = (np.zeros(2, np.int64) for _ in range(2))

    def start(self, tokens: np.ndarray, positions: np.ndarray) -> None:
        """Start the clock; source and target `tokens` and `positions` that were seen before do not count."""
        self._since, self._tokens, self._positions = time.monotonic(), tokens.copy(), positions.copy()

    def leave_out(self, seconds: float) -> None:
        """Leave out time that was spent on something else than training."""
        if self._since is not None:
            self._since += seconds

    def read(self, tokens: np.ndarray, positions: np.ndarray) -> dict[str, float]:
        """Return `target_tokens_per_second` and `padding` (the share of positions without a token) since the last time.

        Source and target `tokens` are counted from the start of training, without padding, and `positions` with it.
        """
        new_tokens, new_positions, result = tokens - self._tokens, positions - self._positions, {}
        if self._since is not None:
            result["target_tokens_per_second"] = float(new_tokens[1]) / max(time.monotonic() - self._since, 1e-9)
        if new_positions.sum():
            result["padding"] = float(1 - new_tokens.sum() / new_positions.sum())
        self.start(tokens, positions)
        return result


def count_tokens(batch: dict[str, torch.Tensor]) -> np.ndarray:
    """Return source and target tokens of a training batch, padded or not, and its two sides' positions, `(4,)`.

    A batch without padding has its `source_tokens`, which are taken out: the model does not know them.
    """
    labels, mask = batch["labels"], batch.get("attention_mask")
    source = batch.pop("source_tokens") if mask is None else mask.sum()
    target = labels.ne(IGNORE_INDEX).sum()
    return np.array([int(source), int(target), batch["input_ids"].numel(), labels.numel()], np.int64)


class NonFiniteLossError(UserError):
    """The training loss, or a weight, is not finite."""


class NonFiniteCounter:
    """Counts losses that are nan or infinite.

    Of a device only losses are read that have arrived by themselves, so that nothing waits for it.
    """

    def __init__(self):
        self._unread: list[tuple] = []
        self._count = 0

    def note(self, loss: torch.Tensor) -> None:
        """Take the loss of a micro-batch (0-d)."""
        # Copied now: later the device would answer only after all work that it was given in between.
        finite, arrival = torch.isfinite(loss.detach()).to("cpu", non_blocking=True), None
        if not loss.is_cpu:
            arrival = torch.Event(loss.device.type)
            arrival.record()
        self._unread.append((finite, arrival))

    def count(self, wait: bool = False) -> int:
        """Return how many losses were not finite; with `wait` including the latest."""
        while self._unread:
            finite, arrival = self._unread[0]
            if arrival is not None and wait:
                arrival.synchronize()
            elif arrival is not None and not arrival.query():
                break
            self._unread.pop(0)
            self._count += not finite
        return self._count


def refuse_non_finite(step: int, losses: int, weights: int = 0) -> None:
    """Raise `NonFiniteLossError` if any losses or weights are not finite after this step, over all processes."""
    if not losses and not weights:
        return
    reason = f"the loss is not finite around step {step + 1}"
    if not losses:
        reason = f"the weights are not finite after step {step}, though all losses were: a gradient was not finite"
    raise NonFiniteLossError(
        f"{reason}; earlier checkpoints are intact. Lower learning_rate_scale, raise warmup_steps or clip with"
        " max_gradient_norm, and start again"
    )


def plot_learning_curve(log: str | Path, picture: str | Path) -> bool:
    """Draw losses (nats a token), BLEU and learning rate of a log over its steps; returns False without matplotlib."""
    entries = read_training_log(log)
    series = {
        key: ([entry["step"] for entry in entries if key in entry], [entry[key] for entry in entries if key in entry])
        for key in ("loss", "eval_loss", "eval_bleu", "learning_rate")
    }
    has_bleu = bool(series["eval_bleu"][0])
    if (figure := new_figure(figsize=(8, 7 if has_bleu else 5))) is None:
        return False
    axes = figure.subplots(3 if has_bleu else 2, 1, sharex=True, height_ratios=[3, 2, 1] if has_bleu else [3, 1])
    axes[0].plot(*series["loss"], color="tab:blue", alpha=0.7, label="training (label-smoothed)")
    axes[0].plot(*series["eval_loss"], color="tab:orange", marker="o", markersize=3, label="validation")
    axes[0].set_ylabel("loss (nats a token)")
    axes[0].legend()
    if has_bleu:
        axes[1].plot(*series["eval_bleu"], color="tab:green", marker="o", markersize=3)
        axes[1].set_ylabel("validation BLEU\n(greedy)")
    axes[-1].plot(*series["learning_rate"], color="tab:gray")
    axes[-1].set_ylabel("learning rate")
    axes[-1].set_xlabel("optimizer step")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)
    return True
