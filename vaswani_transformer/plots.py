"""Pictures need matplotlib, the extra `plots`."""

import importlib.util


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None
