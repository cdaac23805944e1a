"""Measurements during training: throughput, padding, and losses that are not finite."""

import json
import time
from pathlib import Path

import numpy as np
import torch

from ..data.batching import IGNORE_INDEX
from ..data.tokenization import SIDES, side_of
from ..errors import UserError
from ..model.checkpoint_vaswani import is_finite
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


def is_read_at_once(loss: torch.Tensor) -> bool:
    """Return whether a loss can be read without waiting for a device."""
    return loss.is_cpu


class NonFiniteLossError(UserError):
    """The training loss, or a weight, is not finite; the batch of such a loss was saved."""


class FiniteLossGuard:
    """Counts a trainer's losses that are nan or infinite and saves the batch of the first.

    Of a device only losses are read that have arrived by themselves, so that nothing waits for it.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self._unread: list[tuple] = []
        self._saved: Path | None = None
        self._count = 0

    def note(self, loss: torch.Tensor, inputs: dict) -> None:
        """Check the loss of a micro-batch (0-d), computed from `inputs`."""
        loss = loss.detach()
        # Copied now: later the device would answer only after all work that it was given in between.
        finite, arrival = torch.isfinite(loss).to("cpu", non_blocking=True), None
        if not loss.is_cpu:
            arrival = torch.Event(loss.device.type)
            arrival.record()
        self._unread.append((loss, finite, arrival, inputs))
        self._read(wait=is_read_at_once(loss))

    def count(self, wait: bool = False) -> int:
        """Return how many losses were not finite; with `wait` including the latest."""
        if wait:
            self._read(wait=True)
        return self._count

    def broken_weights(self) -> list[str]:
        """Return the names of the trained weights that hold a number that is not finite, each matrix once.

        A gradient may be infinite though the loss is finite; the next loss would be the first to show it.
        """
        parameters = self.trainer.model.named_parameters()
        return [name for name, weight in parameters if weight.requires_grad and not is_finite(weight)]

    def _read(self, wait: bool) -> None:
        while self._unread:
            loss, finite, arrival, inputs = self._unread[0]
            if not wait and (arrival is None or not arrival.query()):
                return
            if wait and arrival is not None:
                arrival.synchronize()
            self._unread.pop(0)
            if not finite:
                self._count += 1
                if self._saved is None:
                    self._saved = self._save(float(loss), inputs)

    def _save(self, loss: float, inputs: dict) -> Path:
        """Write a batch, as ids and as text, with learning rate and weights that are not finite."""
        trainer, tokenizer = self.trainer, self.trainer.processing_class
        rank = f"-rank-{trainer.args.process_index}" if trainer.args.world_size > 1 else ""
        path = Path(trainer.args.output_dir) / f"non-finite-loss-after-step-{trainer.state.global_step}{rank}.json"
        ids = {side: inputs[name].tolist() for side, name in zip(SIDES, ("input_ids", "labels"), strict=True)}
        texts = {}
        if tokenizer is not None:  # of a batch without padding all sentences are in one row
            kept = {side: [[token for token in row if token >= 0] for row in rows] for side, rows in ids.items()}
            texts = {side: side_of(tokenizer, side).batch_decode(rows) for side, rows in kept.items()}
        rate = trainer.optimizer.param_groups[0]["lr"] if trainer.optimizer is not None else None
        record = {"loss": str(loss), "steps_done": trainer.state.global_step, "learning_rate": rate}
        record |= {"parameters_not_finite": self.broken_weights(), "ids": ids, "texts": texts}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    def refuse(self, losses: int, weights: int = 0) -> None:
        """Raise `NonFiniteLossError` if any losses or weights are not finite, counted over all processes."""
        if not losses and not weights:
            return
        step, folder = self.trainer.state.global_step, self.trainer.args.output_dir
        if self._saved is not None:
            what = f"the loss is not finite around step {step + 1}: its batch is in {self._saved}"
        elif losses:
            what = f"the loss is not finite around step {step + 1}: another process saved its batch in {folder}"
        else:
            what = f"the weights are not finite after step {step}, though all losses were: a gradient was not finite"
        raise NonFiniteLossError(
            f"{what}; earlier checkpoints are intact. Lower learning_rate_scale, raise warmup_steps or clip with"
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
