"""Lines read so many at a time, so that files need not fit in memory, and what of them goes through a model at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..data.batching import TokenBatchSampler
from ..errors import UserError
from ..model.configuration_vaswani import VaswaniConfig

WINDOW_LINES = 2000  # more pads less, fewer come out sooner


@dataclass
class Window:
    """Lines that follow each other.

    Args:
        index: of the window, from 0.
        first: number of its first line, from 1.
        lines: what was read, of any kind.
        error: what ended the reading after these lines.
    """

    index: int
    first: int
    lines: list[Any]
    error: Exception | None = None


def in_windows(lines: Iterable[Any], size: int, start: int = 0) -> Iterator[Window]:
    """All lines from a window on; an error while reading comes with the lines before it, and ends the windows.

    Args:
        lines: any items.
        size: lines a window; the last may have less.
        start: windows to pass over.
    """
    lines = iter(lines)
    index = 0
    while True:
        window = Window(index, index * size + 1, [])
        try:
            if index < start:
                passed = sum(1 for _ in islice(lines, size))
            else:
                for line in islice(lines, size):  # not extend(): what came before an error has to stay
                    window.lines.append(line)
                passed = len(window.lines)
        except Exception as error:
            window.error = error
            yield window
            return
        if index >= start and window.lines:
            yield window
        if passed < size:
            return
        index += 1


def batches_by_length(lengths: list[int], tokens: int) -> list[list[int]]:
    """Indices in batches of at most `tokens` tokens, padding counted, longest first; one too long comes alone."""
    return list(TokenBatchSampler(lengths, lengths, max(tokens, max(lengths)), shuffle=False)) if lengths else []


def check_length(config: VaswaniConfig, number: int, tokens: int) -> None:
    """Refuse a sentence that a model with learned positions has none for.

    Raises:
        UserError: naming the line (counted from 1), its tokens and the limit.
    """
    if config.position_encoding == "learned" and tokens > config.max_position_embeddings:
        raise UserError(
            f"line {number} has {tokens} tokens and the model has {config.max_position_embeddings} positions:"
            " split the line into shorter sentences"
        )
