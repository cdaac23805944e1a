"""Attention weights as pictures: a panel for each layer and head, tokens at the edges. They need the extra `plots`."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..files import written_whole
from ..plots import can_draw
from .weights import KINDS, AttentionWeights, check_choice

GRID_TOKENS, PANEL_TOKENS = 40, 120  # the most tokens on a side that can be read, in several panels and in one
_DPI = 110
_INCHES = 0.155, 0.25  # of a token, in several panels and in one; less where there are many
_LEAST = 2.0  # inches of all panels together, up and across: captions stand beside them
_FAR = 8.0  # inches of panels beyond which each has its own labels
_LETTERS = 18  # of a token that are shown
_FONTS = (  # those with many letters
    "DejaVu Sans", "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Noto Emoji", "Unifont",
)  # fmt: skip
_SIDES = {  # captions of rows and columns
    "encoder": ("source token that looks", "source token looked at"),
    "decoder": ("target token just read", "target token looked at"),
    "encoder-decoder": ("target token predicted", "source token looked at"),
}


def _check_readable(weights: AttentionWeights, kind: str, panels: int) -> None:
    """Refuse a sentence whose tokens could not be read in a picture."""
    longest = max(weights.of(kind)[0].shape[2:])
    limit, where, fix = PANEL_TOKENS, "one panel", ""
    if panels > 1:
        limit, where = GRID_TOKENS, f"{panels} panels"
        fix = f"choose one by --layer and --head (up to {PANEL_TOKENS} tokens), "
    if longest > limit:
        raise UserError(
            f"{longest} tokens are too many to read in {where} of {KINDS[kind]}, at most {limit}: {fix}give a shorter"
            " sentence, or --output FILE.html for the page, which takes more"
        )


def require_matplotlib() -> None:
    """Refuse to draw without matplotlib."""
    if not can_draw():
        raise UserError(
            "pictures need matplotlib: pip install 'vaswani_transformer[plots]', or give --output FILE.html"
        )


def draw_attention(
    weights: AttentionWeights,
    kind: str,
    picture: str | Path,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[str]:
    """Draw a row of panels for each layer and a column for each head.

    Args:
        weights: of a sentence pair.
        kind: one of `KINDS`.
        picture: the PNG to write.
        layers, heads: numbers from 1; all when not given.

    Returns:
        letters that no font of this machine has; they are boxes in the picture.

    Raises:
        UserError: for a layer or head that is not there, a sentence too long to read, or without matplotlib.
    """
    return save_figure(attention_figure(weights, kind, layers, heads), Path(picture))


def attention_figure(
    weights: AttentionWeights, kind: str, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
):
    """What `draw_attention` draws, with its errors, as a matplotlib figure."""
    require_matplotlib()
    from matplotlib.figure import Figure

    array, queries, keys = weights.of(kind)
    layers = check_choice("layer", layers, len(array), KINDS[kind])
    heads = check_choice("head", heads, array.shape[1], KINDS[kind])
    _check_readable(weights, kind, len(layers) * len(heads))
    layout = _Layout(len(layers), len(heads), queries, keys)
    figure = Figure(figsize=layout.size)
    _write_title(figure, layout, weights, kind)
    visible, image = weights.visible(kind), None
    for row, layer in enumerate(layers):
        for column, head in enumerate(heads):
            axes = figure.add_axes(layout.panel(row, column))
            image = _draw_panel(axes, array[layer - 1, head - 1], visible)
            axes.set_title(f"layer {layer}, head {head}", fontsize=layout.font, pad=3)
            layout.label(axes, row, column)
    rows, columns = _SIDES[kind]
    figure.text(0.06 / layout.size[0], layout.middle[1], f"← {rows}", rotation=90, va="center", **layout.caption)
    figure.text(layout.middle[0], 0.06 / layout.size[1], f"{columns} →", ha="center", va="bottom", **layout.caption)
    bar = figure.colorbar(image, cax=figure.add_axes(layout.bar), ticks=[0, 0.05, 0.2, 0.5, 1], format="{x:g}")
    bar.set_label("attention weight", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure


class _Layout:
    """Positions in inches from the left and the bottom, such that no labels overlap."""

    def __init__(self, rows: int, columns: int, queries: list[str], keys: list[str]):
        single = rows * columns == 1
        longest = max(len(queries), len(keys))
        self.token = _INCHES[single] if longest <= 40 else 0.14
        self.font = min(9.0, 72 * self.token * 0.72)  # points: seven tenths of a token's width
        self.queries, self.keys = _shortened(queries), _shortened(keys)
        beside, below = (_widest(labels, self.font) + 0.08 for labels in (self.queries, self.keys))
        self.left, self.bottom = 0.3 + beside, 0.3 + below
        self.across = max(self.token * len(self.keys), _LEAST / columns, 0.8)
        self.up = max(self.token * len(self.queries), _LEAST / rows, 0.8)
        self.columns, self.rows, self.top = columns, rows, 0.62
        title = 0.1 + 1.7 * self.font / 72
        # In a large picture each panel has its labels: those of the outer panels would be too far away to follow.
        self.labels_beside, self.labels_below = columns * self.across > _FAR, rows * self.up > _FAR
        self.step = self.across + 0.12 + beside * self.labels_beside, self.up + title + below * self.labels_below
        right = self.left + (columns - 1) * self.step[0] + self.across
        upper = self.bottom + (rows - 1) * self.step[1] + self.up
        self.size = max(right + 0.87, 4.2), max(upper + title + self.top, 2.4)
        self.middle = (self.left + right) / 2 / self.size[0], (self.bottom + upper) / 2 / self.size[1]
        height = min(3.0, upper - self.bottom)
        self.bar = self._shares(right + 0.17, (self.bottom + upper - height) / 2, 0.12, height)
        self.caption = {"fontsize": 9 if max(self.size) < 14 else 12, "color": "0.25"}

    def _shares(self, left: float, bottom: float, width: float, height: float) -> tuple[float, float, float, float]:
        """Inches as fractions of the figure's width and height."""
        return left / self.size[0], bottom / self.size[1], width / self.size[0], height / self.size[1]

    def panel(self, row: int, column: int) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of a panel as fractions of the figure."""
        left, bottom = self.left + column * self.step[0], self.bottom + (self.rows - 1 - row) * self.step[1]
        return self._shares(left, bottom, self.across, self.up)

    def label(self, axes, row: int, column: int) -> None:
        """Write the tokens below and left of a panel where it has labels; `$` starts no formula there."""
        options = {"fontsize": self.font, "parse_math": False, "family": _fonts(), "clip_on": False}
        if self.labels_below or row == self.rows - 1:
            options |= {"rotation": 90, "ha": "center", "va": "top", "transform": axes.get_xaxis_transform()}
            for place, token in enumerate(self.keys):
                axes.text(place, -0.04 / self.up, token, **options)
        if self.labels_beside or column == 0:
            options |= {"rotation": 0, "ha": "right", "va": "center_baseline", "transform": axes.get_yaxis_transform()}
            for place, token in enumerate(self.queries):
                axes.text(-0.04 / self.across, place, token, **options)


def _widest(labels: list[str], font: float) -> float:
    """Width of the widest label, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=_DPI)
    canvas = FigureCanvasAgg(figure)
    options = {"fontsize": font, "parse_math": False, "family": _fonts()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters without a font are reported when they are drawn
        texts = [figure.text(0, 0, label, **options) for label in set(labels)]
        return max(text.get_window_extent(canvas.get_renderer()).width for text in texts) / _DPI


def _shortened(tokens: list[str]) -> list[str]:
    return [token if len(token) <= _LETTERS else token[: _LETTERS - 1] + "…" for token in tokens]


def _draw_panel(axes, weights: np.ndarray, visible: np.ndarray):
    """A map of `(queries, keys)` weights; what a query cannot see is grey."""
    from matplotlib.colors import PowerNorm

    axes.set(facecolor="0.88", xticks=[], yticks=[])
    axes.spines[:].set_linewidth(0.5)
    scale = PowerNorm(0.5, vmin=0, vmax=1)  # or a weight of 0.05, much in a long sentence, could not be seen
    return axes.imshow(np.ma.array(weights, mask=~visible), cmap="Blues", norm=scale, aspect="auto")


def _write_title(figure, layout: _Layout, weights: AttentionWeights, kind: str) -> None:
    """Write the kind of attention and the sentences that it is between, as far as there is room."""
    text = {
        "encoder": weights.source,
        "decoder": weights.target,
        "encoder-decoder": f"{weights.source}  →  {weights.target}",
    }[kind]
    text = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    room = int((layout.size[0] - 0.3) * 72 / (8 * 0.56))  # letters of 8 points
    text = text if len(text) <= room else text[: room - 1] + "…"
    x, height = 0.1 / layout.size[0], layout.size[1]
    figure.text(x, 1 - 0.1 / height, KINDS[kind].capitalize(), va="top", fontsize=11, weight="bold")
    options = {"va": "top", "fontsize": 8, "color": "0.25", "parse_math": False, "family": _fonts()}
    figure.text(x, 1 - 0.33 / height, text, **options)


def _fonts() -> list[str]:
    """Those of `_FONTS` that this machine has."""
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return [name for name in _FONTS if name in installed]


def save_figure(figure, picture: Path) -> list[str]:
    """Write the PNG; returns the letters that were drawn as boxes."""
    with warnings.catch_warnings(record=True) as caught, written_whole(picture) as new:
        warnings.simplefilter("always")
        figure.savefig(new, dpi=_DPI, format="png")
    codes = re.findall(r"^Glyph (\d+) ", "\n".join(str(warning.message) for warning in caught), re.MULTILINE)
    return sorted({chr(int(code)) for code in codes})
