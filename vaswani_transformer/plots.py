"""Pictures need the extra `plots`: an empty figure, or one line of advice where matplotlib is missing."""

import logging

logger = logging.getLogger(__name__)


def new_figure(**options):
    """A matplotlib figure that lays itself out, or None, with one line of advice, where matplotlib is missing.

    Args:
        options: of the figure, such as `figsize` in inches.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("no picture drawn: pip install 'vaswani_transformer[plots]' to have one")
        return None
    return Figure(layout="constrained", **options)
