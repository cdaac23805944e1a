"""The command that shows what attention looks at: `vaswani attention`."""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from ..errors import UserError
from .command import add_command, check_output_place
from .files import option_flag
from .options import add_search_options, check_options, generate_options

_DEFAULT = "attention"
_MOST_TOKENS = 1000  # of a sentence: the weights of a longer one would fill the memory
# File names with these endings are no folders: a file of the wrong kind was asked for.
_SUFFIXES = (".png", ".html", ".md", ".json", ".svg", ".pdf", ".jpg", ".jpeg", ".gif", ".htm", ".npz")


def add_attention(commands) -> None:
    """Add `vaswani attention`."""
    from ..attention.weights import KINDS

    parser = add_command(
        commands,
        "attention",
        _attention,
        "draw what every head looks at, write a page to explore it, or a report that names the heads",
        "Show what the attention heads of a model look at: in one sentence, as pictures and as a page for a browser, or"
        " on average over a file (--report). Layers and heads count from 1.",
    )
    parser.usage = "vaswani attention MODEL (SENTENCE | --report FILE) [--target ...] [--output ...] [...]"
    add = parser.add_argument
    add("model", metavar="MODEL", help="model folder")
    add("sentence", metavar="SENTENCE", nargs="?", help="source sentence")
    add("--target", metavar="TEXT", help="its translation (with --report: a file; default: the model's own)")
    add("--kind", choices=list(KINDS), help="one of the three kinds of attention (default: all)")
    for name in ("layer", "head"):
        add(f"--{name}", metavar="N", type=int, action="append", help=f"draw this {name} only; may be repeated")
    add(
        "--output",
        metavar="PATH",
        default=_DEFAULT,
        help="folder for all files, or one FILE.png or FILE.html, with --report FILE.md or FILE.json"
        f" (default: {_DEFAULT})",
    )
    add("--overwrite", action="store_true", help="replace earlier pictures, pages and reports there")
    add = parser.add_argument_group("report").add_argument
    add("--report", metavar="FILE", help="name the heads by what they do on these sources, one a line")
    add("--alignments", metavar="FILE", help="known word alignments of the pairs, 0-0 1-2 (default: the model's own)")
    add("--tokens-per-batch", metavar="N", type=int, help="tokens at once (default: 2048)")
    add_search_options(parser)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps, ...; auto: an accelerator if any")


def _attention(arguments: argparse.Namespace) -> int:
    from ..exported import is_exported

    check_options(arguments)
    if (arguments.sentence is None) == (arguments.report is None):
        raise UserError("give either a SENTENCE or a file of sentences with --report FILE")
    if is_exported(arguments.model):
        raise UserError("an exported model gives no attention weights: give the folder of the model it was made from")
    for name in ("alignments", "tokens_per_batch") if arguments.report is None else ("kind", "layer", "head"):
        if getattr(arguments, name) is not None:
            use = "for --report FILE" if arguments.report is None else "for one sentence and a report covers all heads"
            raise UserError(f"{option_flag(name)} is {use}: leave it out")
    return _show(arguments) if arguments.report is None else _report(arguments)


def _load(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """The model, its tokenizer, and the options for `generate()` that were given."""
    from ..loading import load_model

    model, tokenizer = load_model(arguments.model, arguments.device)
    options = {name: value for name, value in generate_options(arguments, model).items() if value is not None}
    return model, tokenizer, options


def _files(arguments: argparse.Namespace, names: dict[str, str], alone: dict[str, str]) -> dict[str, Path]:
    """The files to write, by key.

    Args:
        arguments: of the command line.
        names: the file of each key in an output folder.
        alone: the key that an output is of which ends in a suffix.
    """
    output = Path(arguments.output)
    if output.suffix in alone:
        files = {alone[output.suffix]: output}
    elif output.suffix.lower() in _SUFFIXES:
        known = ", ".join(f"FILE{suffix}" for suffix in alone)
        raise UserError(f"--output {output} is not a kind of file that this command writes: give {known} or a folder")
    else:
        files = {key: output / name for key, name in names.items()}
    if output.suffix not in alone and output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file: give a folder or another name as --output")
    check_output_place(output)
    for path in files.values():
        if path.is_dir():
            raise UserError(f"{path} is a folder: give another --output")
        if path.exists() and not arguments.overwrite:
            raise UserError(f"{path} exists: give another --output, or --overwrite to replace it")
    return files


# One sentence.


def _show(arguments: argparse.Namespace) -> int:
    from ..attention.page import write_attention_page
    from ..attention.pictures import attention_figure, require_matplotlib, save_figure
    from ..attention.weights import KINDS, attend

    names = {kind: f"{kind}.png" for kind in ([arguments.kind] if arguments.kind else KINDS)}
    alone = {".png": arguments.kind or "encoder-decoder", ".html": "page"}
    files = _files(arguments, {"page": "attention.html", **names}, alone)
    pictures = [name for name in files if name != "page"]
    if pictures:
        require_matplotlib()
    model, tokenizer, options = _load(arguments)
    _check_sentences(arguments, model, tokenizer)
    weights = attend(model, tokenizer, arguments.sentence, arguments.target, **options)
    figures = {}  # all of them before anything is written, since each may be refused
    for kind in pictures:
        if len(weights.of(kind)[0]) or arguments.kind or len(pictures) == 1:  # without layers, only if asked for
            figures[kind] = attention_figure(weights, kind, arguments.layer, arguments.head)
    lines, missing_letters = [], set()
    next(iter(files.values())).parent.mkdir(parents=True, exist_ok=True)
    for kind, path in files.items():
        if kind == "page":
            layer, head = (numbers[0] if numbers else None for numbers in (arguments.layer, arguments.head))
            kinds = [arguments.kind] if arguments.kind else ["encoder-decoder", "encoder", "decoder"]
            write_attention_page(weights, path, kinds, layer or 1, head)
            lines.append(f"{path}   all layers and heads, to explore in a browser")
        elif kind in figures:
            missing_letters.update(save_figure(figures[kind], path))
            lines.append(f"{path}   {KINDS[kind]}")
        else:
            lines.append(f"no picture of {KINDS[kind]}, which has no layers")
    print(f"target: {weights.target}", *lines, sep="\n")
    if missing_letters:
        letters = "".join(sorted(missing_letters))[:20]
        print(f"no font here has {letters}: they are boxes in the pictures; Noto Sans CJK has most", file=sys.stderr)
    return 0


def _check_sentences(arguments: argparse.Namespace, model, tokenizer) -> None:
    """Refuse texts that cannot be shown before anything is computed."""
    from ..attention.weights import token_ids

    for side, text in (("source", arguments.sentence), ("target", arguments.target)):
        if text is not None and (tokens := len(token_ids(model, tokenizer, side, text))) > _MOST_TOKENS:
            raise UserError(f"the {side} has {tokens:,} tokens, too many to show, at most {_MOST_TOKENS:,}")


# A file.


def _report(arguments: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    from ..attention.heads import heads_as_markdown, name_heads, read_links
    from ..data.text_files import check_on_disk, read_lines, scan_text
    from ..files import write_text

    files = _files(arguments, {".md": "heads.md", ".json": "heads.json"}, {".md": ".md", ".json": ".json"})
    read = {name: getattr(arguments, name) for name in ("report", "target", "alignments")}
    read = {name: Path(path) for name, path in read.items() if path is not None}
    for path in read.values():
        check_on_disk(path)
    scans = {name: scan_text(path) for name, path in read.items()}
    lines = {name: scan.lines for name, scan in scans.items()}
    for name, number in lines.items():
        if number != lines["report"]:
            counts = f"{read['report']} has {lines['report']:,} lines and {read[name]} has {number:,}"
            raise UserError(f"{counts}: line n of one must belong to line n of the other")
    sources, targets = (
        read_lines(read[name], stamp=scans[name].stamp) if name in read else itertools.repeat(None)
        for name in ("report", "target")
    )
    links = read_links(read["alignments"]) if "alignments" in read else None
    model, tokenizer, options = _load(arguments)
    with tqdm(total=lines["report"], desc="heads", unit=" pairs", file=sys.stderr) as bar:
        report = name_heads(
            model,
            tokenizer,
            zip(sources, targets, strict=False),
            links,
            arguments.tokens_per_batch or 2048,
            progress=bar.update,
            **options,
        )
    report |= _origin(arguments, read)
    text = heads_as_markdown(report)
    contents = {".json": json.dumps(report, indent=1, ensure_ascii=False) + "\n", ".md": text}
    next(iter(files.values())).parent.mkdir(parents=True, exist_ok=True)
    for suffix, path in files.items():
        write_text(path, contents[suffix])
    print(text, *files.values(), sep="\n")
    return 0


def _origin(arguments: argparse.Namespace, read: dict[str, Path]) -> dict[str, Any]:
    """The model, the files (names and hashes, no folders) and the versions that a report was made with."""
    from ..evaluation.records import model_sha256, versions
    from ..files import file_sha256

    files = {name: {"name": path.name, "sha256": file_sha256(path)} for name, path in read.items()}
    model = {"name": Path(arguments.model).resolve().name, "sha256": model_sha256(arguments.model)}
    return {"model": model, "files": files, "versions": versions()}
