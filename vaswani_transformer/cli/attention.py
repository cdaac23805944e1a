"""The command that shows what attention looks at: `vaswani attention`."""

from pathlib import Path
from typing import Literal

from ..errors import UserError
from .options import Model, Path_, Search, generate_options


def attention(
    model: Model,
    sentence: str,
    /,
    *,
    target: str | None = None,
    device: str = "auto",
    kind: Literal["encoder", "decoder", "encoder-decoder"] | None = None,
    layer: list[int] | None = None,
    head: list[int] | None = None,
    output: Path_ = "attention",
    overwrite: bool = False,
    search: Search = Search(),  # noqa: B008 (of cyclopts)
) -> None:
    """Draw what every head looks at in a sentence, as pictures and as a page to explore in a browser.

    Layers and heads count from 1.

    Args:
        sentence: source sentence
        target: its translation (default: the model's own)
        device: cpu, cuda, cuda:1, mps, ...; auto: an accelerator if any
        kind: one of the three kinds of attention (default: all)
        layer: draw this layer only; may be repeated
        head: draw this head only; may be repeated
        output: folder for all files, or one FILE.png or FILE.html
        overwrite: replace earlier pictures and pages there
    """
    from ..attention.page import write_attention_page
    from ..attention.pictures import attention_figure, save_figure
    from ..attention.weights import KINDS, attend
    from ..loading import load_model

    names = {"page": "attention.html"} | {each: f"{each}.png" for each in ([kind] if kind else KINDS)}
    alone = {".png": kind or "encoder-decoder", ".html": "page"}
    path = Path(output)  # of a folder, or of one file
    files = {alone[path.suffix]: path} if path.suffix in alone else {key: path / name for key, name in names.items()}
    for path in files.values():
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists: give another --output, or --overwrite to replace a file")
    loaded, tokenizer = load_model(model, device)
    weights = attend(loaded, tokenizer, sentence, target, **generate_options(loaded, search))
    # All figures come before anything is written, since each may be refused.
    drawn = {path: each for each, path in files.items() if each in KINDS}
    pictures = {path: attention_figure(weights, each, layer, head) for path, each in drawn.items()}
    next(iter(files.values())).parent.mkdir(parents=True, exist_ok=True)
    if "page" in files:
        kinds = [kind] if kind else ["encoder-decoder", "encoder", "decoder"]
        first_layer, first_head = (next(iter(numbers or ()), None) for numbers in (layer, head))
        write_attention_page(weights, files["page"], kinds, first_layer or 1, first_head)
    for path, figure in pictures.items():
        save_figure(figure, path)
    print(f"target: {weights.target}")
    for each, path in files.items():
        print(f"{path}   {KINDS.get(each, 'all layers and heads, to explore in a browser')}")
