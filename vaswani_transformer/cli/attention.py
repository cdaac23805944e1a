"""The command that shows what attention looks at: `vaswani attention`."""

from pathlib import Path
from typing import Literal

from ..errors import UserError, reading
from .options import Model, Path_, Search, exclude, generate_options


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
    """Draw what every head looks at in a sentence.

    Layers and heads count from 1.

    Args:
        sentence: source sentence
        target: its translation (default: the model's own)
        device: cpu, cuda, cuda:1, mps, ...; auto: an accelerator if any
        kind: one of the three kinds of attention (default: all; of one FILE.png encoder-decoder)
        layer: draw this layer only; may be repeated
        head: draw this head only; may be repeated
        output: folder of a picture for each kind, or one FILE.png
        overwrite: replace earlier pictures there
    """
    from ..attention.pictures import attention_figure, save_figure
    from ..attention.weights import KINDS, attend
    from ..loading import load_model

    exclude("--target", target, vars(search))
    path = Path(output)  # of a folder, or of one file
    files = {each: path / f"{each}.png" for each in ([kind] if kind else KINDS)}
    if path.suffix.lower() == ".png":
        files = {kind or "encoder-decoder": path}
    for path in files.values():
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists: give another --output, or --overwrite to replace a file")
    loaded, tokenizer = load_model(model, device)
    weights = attend(loaded, tokenizer, sentence, target, **generate_options(loaded, search))
    # All figures come before anything is written, since each may be refused.
    figures = {each: attention_figure(weights, each, layer, head) for each in files}
    with reading(output):
        next(iter(files.values())).parent.mkdir(parents=True, exist_ok=True)
    print(f"target: {weights.target}")
    for each, path in files.items():
        save_figure(figures[each], path)
        print(f"{path}   {KINDS[each]}")
