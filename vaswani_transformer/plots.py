"""Pictures need matplotlib, the extra `plots`."""

import importlib.util
import logging

logger = logging.getLogger(__name__)


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(**options):
    """Return a matplotlib figure that lays itself out, or None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("no picture drawn: pip install 'vaswani_transformer[plots]' to have one")
        return None
    return Figure(layout="constrained", **options)
