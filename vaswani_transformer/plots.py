"""Pictures that need the extra `plots`: the learning curve of a run, an empty figure for those of other modules."""

import logging
from pathlib import Path

from .training.callbacks import read_training_log

logger = logging.getLogger(__name__)


def _pyplot():
    """matplotlib without a screen, or None with one line of advice."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("no picture drawn: pip install 'vaswani_transformer[plots]' to have one")
        return None
    return Figure


def new_figure():
    """An empty matplotlib figure that lays itself out, or None, with one line of advice, where there is none."""
    figure_class = _pyplot()
    return None if figure_class is None else figure_class(layout="constrained")


def plot_learning_curve(log: str | Path, picture: str | Path) -> bool:
    """Draw losses (nats a token), BLEU and learning rate over optimizer steps.

    Args:
        log: a training log, JSON lines.
        picture: the PNG to write.

    Returns:
        Whether matplotlib was there to draw it.
    """
    if (figure_class := _pyplot()) is None:
        return False
    entries = read_training_log(log)
    series = {
        key: ([entry["step"] for entry in entries if key in entry], [entry[key] for entry in entries if key in entry])
        for key in ("loss", "eval_loss", "eval_bleu", "learning_rate")
    }
    has_bleu = bool(series["eval_bleu"][0])
    figure = figure_class(figsize=(8, 7 if has_bleu else 5), layout="constrained")
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
