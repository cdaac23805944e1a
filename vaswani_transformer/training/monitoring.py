"""Measurements during training: the tokens of a batch, and the learning curve."""

import logging
from pathlib import Path

import numpy as np
import torch

from ..data.batching import IGNORE_INDEX
from ..files import written_whole
from ..plots import can_draw
from .callbacks import read_training_log

logger = logging.getLogger(__name__)


def count_tokens(batch: dict[str, torch.Tensor]) -> np.ndarray:
    """Return source and target tokens of a training batch, padded or not, and its two sides' positions, `(4,)`.

    A batch without padding has its `source_tokens`, which are taken out: the model does not know them.
    """
    labels, mask = batch["labels"], batch.get("attention_mask")
    source = batch.pop("source_tokens") if mask is None else mask.sum()
    target = labels.ne(IGNORE_INDEX).sum()
    return np.array([int(source), int(target), batch["input_ids"].numel(), labels.numel()], np.int64)


def plot_learning_curve(log: str | Path, picture: Path) -> None:
    """Draw losses (nats a token), BLEU and learning rate of a log over its steps, whole or not at all, as PNG."""
    entries = read_training_log(log)
    series = {
        key: ([entry["step"] for entry in entries if key in entry], [entry[key] for entry in entries if key in entry])
        for key in ("loss", "eval_loss", "eval_bleu", "learning_rate")
    }
    has_bleu = bool(series["eval_bleu"][0])
    if not can_draw():
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
