"""The command that shows what attention looks at: `vaswani attention`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from ..errors import UserError
from .options import Model, Path_, Search, generate_options


@Parameter(name="*")
@dataclass
class Shown:
    """Pictures and data of one sentence."""

    kind: Literal["encoder", "decoder", "encoder-decoder"] | None = None
    """one of the three kinds of attention (default: all)"""
    layer: list[int] | None = None
    """draw this layer only; may be repeated"""
    head: list[int] | None = None
    """draw this head only; may be repeated"""
    output: Path_ = "attention"
    """folder for all files, or one FILE.png or FILE.html"""
    overwrite: bool = False
    """replace earlier pictures and pages there"""


def attention(
    model: Model,
    sentence: str,
    /,
    *,
    target: str | None = None,
    device: str = "auto",
    shown: Shown = Shown(),  # noqa: B008 (of cyclopts)
    search: Search = Search(),  # noqa: B008
) -> None:
    """Draw what every head looks at in a sentence, as pictures and as a page to explore in a browser.

    Layers and heads count from 1.

    Args:
        sentence: source sentence
        target: its translation (default: the model's own)
        device: cpu, cuda, cuda:1, mps, ...; auto: an accelerator if any
    """
    from ..attention.page import write_attention_page
    from ..attention.pictures import attention_figure, save_figure
    from ..attention.weights import KINDS, attend
    from ..loading import load_model

    names = {kind: f"{kind}.png" for kind in ([shown.kind] if shown.kind else KINDS)}
    alone = {".png": shown.kind or "encoder-decoder", ".html": "page"}
    files = _files(shown, {"page": "attention.html", **names}, alone)
    loaded, tokenizer = load_model(model, device)
    weights = attend(loaded, tokenizer, sentence, target, **generate_options(loaded, search))
    # All figures come before anything is written, since each may be refused.
    drawn = {kind: path for kind, path in files.items() if kind in KINDS}
    pictures = {path: attention_figure(weights, kind, shown.layer, shown.head) for kind, path in drawn.items()}
    next(iter(files.values())).parent.mkdir(parents=True, exist_ok=True)
    if "page" in files:
        kinds = [shown.kind] if shown.kind else ["encoder-decoder", "encoder", "decoder"]
        first_layer, first_head = (next(iter(numbers or ()), None) for numbers in (shown.layer, shown.head))
        write_attention_page(weights, files["page"], kinds, first_layer or 1, first_head)
    for path, figure in pictures.items():
        save_figure(figure, path)
    print(f"target: {weights.target}")
    for kind, path in files.items():
        print(f"{path}   {KINDS.get(kind, 'all layers and heads, to explore in a browser')}")


def _files(shown: Shown, names: dict[str, str], alone: dict[str, str]) -> dict[str, Path]:
    """Return the files to write, by key: `names` in a folder, or the one whose suffix is in `alone`."""
    output = Path(shown.output)
    is_alone = output.suffix in alone
    files = {alone[output.suffix]: output} if is_alone else {key: output / name for key, name in names.items()}
    for path in files.values():
        if path.exists() and not shown.overwrite:
            raise UserError(f"{path} exists: give another --output, or --overwrite to replace a file")
    return files
