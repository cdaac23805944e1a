"""The command that shows what attention looks at: `vaswani attention`."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..errors import UserError
from .files import scan_files
from .options import Model, Path_, Search, exclude, generate_options, group, within


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
    """folder for all files, or one FILE.png or FILE.html, with --report FILE.md or FILE.json"""
    overwrite: bool = False
    """replace earlier pictures, pages and reports there"""


@group("report")
@dataclass
class Report:
    """Reports on a file."""

    report: Path_ | None = None
    """name the heads by what they do on these sources, one a line"""
    alignments: Path_ | None = None
    """known word alignments of the pairs, 0-0 1-2 (default: the model's own)"""
    tokens_per_batch: Annotated[int, within(1, 10**9)] = 2048
    """tokens at once"""


def attention(
    model: Model,
    sentence: str | None = None,
    /,
    *,
    target: str | None = None,
    device: str = "auto",
    shown: Shown = Shown(),  # noqa: B008 (of cyclopts)
    report: Report = Report(),  # noqa: B008
    search: Search = Search(),  # noqa: B008
) -> None:
    """Draw what every head looks at, write a page to explore it, or a report that names the heads.

    In one sentence, as pictures and as a page for a browser, or on average over a file (--report). Layers and heads
    count from 1.

    Args:
        sentence: source sentence
        target: its translation (with --report: a file; default: the model's own)
        device: cpu, cuda, cuda:1, mps, ...; auto: an accelerator if any
    """
    from ..loading import load_model

    if (sentence is None) == (report.report is None):
        raise UserError("give either a SENTENCE or a file of sentences with --report FILE")

    def load() -> tuple[Any, Any, dict[str, Any]]:
        loaded, tokenizer = load_model(model, device)
        return loaded, tokenizer, generate_options(loaded, search)

    if report.report is None:
        exclude("SENTENCE", True, {"alignments": report.alignments})
        _show(sentence, target, shown, load)
    else:
        exclude("--report", True, {"kind": shown.kind, "layer": shown.layer, "head": shown.head})
        _report(model, target, report, shown, load)


def _files(shown: Shown, names: dict[str, str], alone: dict[str, str]) -> dict[str, Path]:
    """Return the files to write, by key: `names` in a folder, or the one whose suffix is in `alone`."""
    output = Path(shown.output)
    is_alone = output.suffix in alone
    files = {alone[output.suffix]: output} if is_alone else {key: output / name for key, name in names.items()}
    for path in files.values():
        if path.exists() and not shown.overwrite:
            raise UserError(f"{path} exists: give another --output, or --overwrite to replace a file")
    return files


def _show(sentence: str, target: str | None, shown: Shown, load) -> None:
    """Draw the attention in one sentence."""
    from ..attention.page import write_attention_page
    from ..attention.pictures import attention_figure, save_figure
    from ..attention.weights import KINDS, attend

    names = {kind: f"{kind}.png" for kind in ([shown.kind] if shown.kind else KINDS)}
    alone = {".png": shown.kind or "encoder-decoder", ".html": "page"}
    files = _files(shown, {"page": "attention.html", **names}, alone)
    model, tokenizer, options = load()
    weights = attend(model, tokenizer, sentence, target, **options)
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


def _report(model: str, target: str | None, report: Report, shown: Shown, load) -> None:
    """Name the heads by what they do on the sentences of a file."""
    from tqdm.auto import tqdm

    from ..attention.heads import heads_as_markdown, name_heads, read_links
    from ..data.pair_readers import read_pairs
    from ..data.text_files import check_on_disk, read_lines
    from ..evaluation.records import model_sha256, versions
    from ..files import file_sha256, write_text

    files = _files(shown, {".md": "heads.md", ".json": "heads.json"}, {".md": ".md", ".json": ".json"})
    read = {"report": report.report, "target": target, "alignments": report.alignments}
    paths = {name: Path(path) for name, path in read.items() if path is not None}
    for path in paths.values():
        check_on_disk(path)
    lines = scan_files(read)["report"].lines
    if target is None:
        pairs = ((line, None) for line in read_lines(paths["report"]))
    else:
        pairs = read_pairs("text", [(paths["report"], paths["target"])])
    links = read_links(paths["alignments"]) if "alignments" in paths else None
    loaded, tokenizer, options = load()
    pairs = tqdm(pairs, "heads", lines, unit=" pairs", file=sys.stderr)
    heads = name_heads(loaded, tokenizer, pairs, links, report.tokens_per_batch, **options)
    heads["model"] = {"name": Path(model).resolve().name, "sha256": model_sha256(model)}
    heads["files"] = {name: {"name": path.name, "sha256": file_sha256(path)} for name, path in paths.items()}
    heads["versions"] = versions()
    text = heads_as_markdown(heads)
    contents = {".json": json.dumps(heads, indent=1, ensure_ascii=False) + "\n", ".md": text}
    next(iter(files.values())).parent.mkdir(parents=True, exist_ok=True)
    for suffix, path in files.items():
        write_text(path, contents[suffix])
    print(text, *files.values(), sep="\n")
