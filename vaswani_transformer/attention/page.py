"""Attention weights as a page for a browser: one file, made from `page.html`, that needs no network."""

import base64
import html
import json
import re
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from ..files import write_text
from ..model.local_attention_vaswani import reach
from .weights import KINDS, AttentionWeights, check_choice

_LEVELS = 255  # of the square root of a weight in the page, which has a byte: what is seen grows with this root


def write_attention_page(
    weights: AttentionWeights,
    page: str | Path,
    kinds: Sequence[str] = tuple(KINDS),
    layer: int = 1,
    head: int | None = None,
) -> None:
    """Write `attention_page`, with its arguments and errors, to the HTML file `page`."""
    write_text(Path(page), attention_page(weights, kinds, layer, head))


def attention_page(
    weights: AttentionWeights, kinds: Sequence[str] = tuple(KINDS), layer: int = 1, head: int | None = None
) -> str:
    """Return the page. It holds all layers and heads, each weight `w` to within `(sqrt(w) + 0.001) / 255`.

    Args:
        weights: of a sentence pair.
        kinds: those of `KINDS` that can be chosen, the one shown first in front.
        layer: shown first, from 1.
        head: shown first, from 1; the mean of the heads when not given.

    Raises:
        UserError: for a layer or head that is not there.
    """
    sides = {kind: weights.of(kind) for kind in kinds}
    first, (array, _, _) = next(iter(sides.items()))
    check_choice("layer", [layer], array.shape[0], KINDS[first])
    check_choice("head", None if head is None else [head], array.shape[1], KINDS[first])
    data = {
        "source": weights.source,
        "target": weights.target,
        "start": {"layer": layer, "head": head or 0},
        "window": None if weights.window is None else reach(weights.window),  # tokens seen to each side
        "kinds": [
            {
                "kind": kind,
                "name": KINDS[kind],
                "layers": array.shape[0],
                "heads": array.shape[1],
                "queries": queries,
                "keys": keys,
                "weights": _packed(array),
            }
            for kind, (array, queries, keys) in sides.items()
        ],
    }
    # Nothing in a sentence may end the element that holds the data.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    title = html.escape(" ".join(weights.source.split())[:80])
    template = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    before, between, after = re.split("@TITLE@|@DATA@", template)  # at once: a sentence may hold a mark too
    return "".join([before, title, between, text, after])


def _packed(weights: np.ndarray) -> str:
    """Return weights as bytes, compressed, in base64."""
    levels = np.rint(np.sqrt(weights, dtype=np.float32) * _LEVELS).astype(np.uint8)
    return base64.b64encode(zlib.compress(levels.tobytes(), level=9)).decode()
