"""Attention weights as pictures: a panel for each layer and head, tokens at the edges. They need the extra `plots`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError, reading
from ..files import written_whole
from .weights import KINDS, AttentionWeights, check_choice

GRID_TOKENS, PANEL_TOKENS = 40, 120  # the most tokens on a side that can be read, in several panels and in one
_LONGEST = 18  # characters of a token that are shown
_FONTS = (  # those with many characters
    "DejaVu Sans", "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Noto Emoji", "Unifont",
)  # fmt: skip
_SIDES = {  # captions of rows and columns
    "encoder": ("source token that looks", "source token looked at"),
    "decoder": ("target token just read", "target token looked at"),
    "encoder-decoder": ("target token predicted", "source token looked at"),
}


def draw_attention(
    weights: AttentionWeights,
    kind: str,
    picture: str | Path,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> None:
    """Draw a row of panels for each layer and a column for each head, as a PNG.

    `kind` is one of `KINDS`; `layers` and `heads` are numbers from 1, by default all.

    Raises:
        UserError: for a layer or head that does not exist, a sentence too long to read, or without matplotlib.
    """
    save_figure(attention_figure(weights, kind, layers, heads), Path(picture))


def attention_figure(
    weights: AttentionWeights, kind: str, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
):
    """Return what `draw_attention` draws, with its errors, as a matplotlib figure."""
    with reading("pictures need matplotlib (pip install 'vaswani_transformer[plots]')"):
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
        from matplotlib.font_manager import fontManager

    array, *sides = weights.of(kind)
    layers = check_choice("layer", layers, len(array), KINDS[kind])
    heads = check_choice("head", heads, array.shape[1], KINDS[kind])
    panels = len(layers) * len(heads)
    limit = PANEL_TOKENS if panels == 1 else GRID_TOKENS
    if (longest := max(map(len, sides))) > limit:
        problem = f"{longest} tokens are too many to read in {panels} panels of {KINDS[kind]}, at most {limit}"
        raise UserError(f"{problem}: choose one by --layer and --head (up to {PANEL_TOKENS} tokens), or a shorter text")
    inches = 0.155 if panels > 1 else 0.25 if longest <= 40 else 0.14  # of a token
    queries, keys = (
        [token if len(token) <= _LONGEST else token[: _LONGEST - 1] + "…" for token in tokens] for tokens in sides
    )
    beside, below = (max(map(len, labels)) * inches * 0.5 + 0.9 for labels in (queries, keys))
    across, up = (
        number * (max(inches * len(tokens), 2.0 / number, 0.8) + 0.3)
        for number, tokens in ((len(heads), keys), (len(layers), queries))
    )
    figure = Figure(figsize=(across + beside + 1.0, up + below + 0.8), dpi=110, layout="constrained")
    grid = figure.subplots(len(layers), len(heads), sharex=True, sharey=True, squeeze=False)
    # `$` starts no formula in a token.
    installed = fontManager.get_font_names()
    text = {"parse_math": False, "family": [name for name in _FONTS if name in installed]}
    labels = text | {"fontsize": min(9.0, 72 * inches * 0.72)}  # points: seven tenths of a token's width
    hidden = (array == 0).all((0, 1))  # no head sees it; a small weight of one may be 0, too
    for axes_of_layer, layer in zip(grid, layers, strict=True):
        for axes, head in zip(axes_of_layer, heads, strict=True):
            scale = PowerNorm(0.5, vmin=0, vmax=1)  # or a weight of 0.05, much in a long sentence, could not be seen
            shown = np.ma.array(array[layer - 1, head - 1], mask=hidden)
            image = axes.imshow(shown, cmap="Blues", norm=scale, aspect="auto")
            axes.set(facecolor="0.88")  # what a query cannot see
            axes.set_title(f"layer {layer}, head {head}", fontsize=labels["fontsize"], pad=3)
            axes.tick_params(length=0)
            axes.set_xticks(range(len(keys)), keys, rotation=90, **labels)
            axes.set_yticks(range(len(queries)), queries, **labels)
    rows, columns = _SIDES[kind]
    figure.supylabel(f"← {rows}", fontsize=9)
    figure.supxlabel(f"{columns} →", fontsize=9)
    bar = figure.colorbar(image, ax=grid, ticks=[0, 0.05, 0.2, 0.5, 1], format="{x:g}", shrink=0.8)
    bar.set_label("attention weight", fontsize=9)
    sentences = {"encoder": [weights.source], "decoder": [weights.target]}.get(kind, [weights.source, weights.target])
    title = "  →  ".join(" ".join(sentence.split()) for sentence in sentences)
    room = int(figure.get_figwidth() * 72 / (8 * 0.56))  # characters of 8 points
    title = title if len(title) <= room else title[: room - 1] + "…"
    figure.suptitle(f"{KINDS[kind].capitalize()}\n{title}", x=0.01, ha="left", fontsize=8, **text)
    return figure


def save_figure(figure, picture: Path) -> None:
    """Write the PNG; matplotlib warns of characters that no font of this machine has."""
    with written_whole(picture) as new:
        figure.savefig(new, format="png")
