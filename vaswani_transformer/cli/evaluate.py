"""The commands that compare a model with given translations: `vaswani evaluate` and `score`."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..data.text_files import TextScan
from ..errors import UserError
from .command import add_command, add_engine_options
from .files import (
    are_same_file,
    check_files,
    check_model,
    check_work,
    found_anywhere,
    is_file,
    is_in_parts,
    open_output,
    option_flag,
    report_unfinished,
    write_parts,
    write_result,
)
from .options import (
    add_length_penalty,
    add_model_argument,
    add_model_options,
    add_search_options,
    add_window,
    check_options,
    generate_options,
    load_for_decoding,
)

_OF_PAIRS = (".tmx", ".tsv", ".csv", ".jsonl", ".json", ".parquet")


def _add_pairs(parser: argparse.ArgumentParser, target: str, help_text: str) -> None:
    """Add the model and the two files of line-aligned pairs."""
    add_model_argument(parser)
    parser.add_argument("--source", required=True, metavar="FILE", help="sources, one a line (.gz works)")
    how = f"{help_text}, line n for line n of --source"
    parser.add_argument(f"--{target}", required=True, metavar="FILE", help=how)


def _pairs(source: str, target: str) -> Iterator[tuple[str, str]]:
    from ..data.pair_readers import read_pairs

    return read_pairs("text", [(source, target)])


def _test_pairs(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Pairs of two text files, or of one file of pairs that is given as both."""
    from ..data.parallel_text import pair_source
    from ..data.text_files import home_path

    names = arguments.source, arguments.reference
    of_pairs = [name for name in names if home_path(name.removesuffix(".gz")).suffix in _OF_PAIRS]
    if not of_pairs:
        return _pairs(*names)
    if not are_same_file(*map(home_path, names)):
        raise UserError(f"{of_pairs[0]} is a file of pairs: give it as --source and as --reference")
    columns = {"source_column": arguments.source_column, "target_column": arguments.target_column}
    return pair_source(data=names[0], **columns).stream()


def add_evaluate(commands) -> None:
    """Add `vaswani evaluate`."""
    parser = add_command(commands, "evaluate", _evaluate, "BLEU, chrF and perplexity on a test set")
    _add_pairs(parser, "reference", "reference translations")
    both = "column, or language of a translation memory (.tmx), where --source and --reference are one file of pairs"
    for side in ("source", "target"):
        parser.add_argument(f"--{side}-column", metavar="NAME", default=side, help=f"{both} (default: {side})")
    parser.add_argument("--output", metavar="FILE", help="also write the translations here")
    parser.add_argument("--json", metavar="FILE", help="also write the scores here, and how they were obtained")
    parser.add_argument("--test-set", metavar="NAME", help="its name in the --json file (default: from the file names)")
    how = "also BLEU as the paper computed it: Moses' tokens of this language (de, fr, ...), German compounds split"
    parser.add_argument("--paper-bleu", metavar="LANGUAGE", help=how)
    add_search_options(parser)
    add_model_options(parser, ensemble=False)


def _evaluate(arguments: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    from ..decoding.scoring import score_pairs
    from ..decoding.translator import Translator
    from ..evaluation.metrics import moses_tokenizer, paper_bleu, perplexity, score_translations

    check_options(arguments)
    check_files(arguments, read=("source", "reference"), written=("output", "json"))
    if arguments.paper_bleu:
        moses_tokenizer(arguments.paper_bleu)  # before the work, if it is not installed
    pairs = list(_test_pairs(arguments))
    sources, references = map(list, zip(*pairs, strict=True))
    filled = [pair for pair in pairs if all(side.strip() for side in pair)]
    if not filled:
        raise UserError(f"{arguments.source} and {arguments.reference} hold blank lines only: nothing to evaluate")
    model, tokenizer = load_for_decoding(arguments)
    translator = Translator(model, tokenizer, arguments.tokens_per_batch, **generate_options(arguments, model))
    # What was read is hashed before anything is written.
    how = _how_obtained(arguments, translator) if arguments.json else {}
    losses, counts = score_pairs(model, tokenizer, *map(list, zip(*filled, strict=True)))
    started = time.monotonic()
    with tqdm(total=len(sources), desc="translating", unit=" sentences", file=sys.stderr) as bar:
        translations = list(translator.translate(sources, progress=bar))
    seconds = time.monotonic() - started
    scores = score_translations(translations, references) | {"perplexity": perplexity(losses, counts)}
    if arguments.paper_bleu:
        scores["paper_bleu"] = paper_bleu(translations, references, arguments.paper_bleu)
    scores |= {"sentences": len(sources), "seconds": round(seconds, 1)} | how
    if arguments.output:
        write_result(Path(arguments.output), "".join(line + "\n" for line in translations))
    if arguments.json:
        write_result(Path(arguments.json), json.dumps(scores, indent=2) + "\n")
    print(f"BLEU {scores['bleu']:.2f}  ({scores['bleu_signature']})")
    if arguments.paper_bleu:
        print(f"BLEU {scores['paper_bleu']:.2f}  (tokenised, as in the paper)")
    print(f"chrF {scores['chrf']:.2f}  ({scores['chrf_signature']})")
    print(f"perplexity {scores['perplexity']:.3f} a target token, {scores['exact_match']:.1f}% of sentences exact")
    print(f"{len(sources):,} sentences translated in {seconds:.1f} s")
    return 0


def _how_obtained(arguments: argparse.Namespace, translator) -> dict:
    from ..evaluation.records import evaluation_record, search_settings
    from ..exported import is_exported

    generation = search_settings(translator.model.generation_config) | translator.generate_options
    names = ["beams", "length_penalty", "max_new_tokens", "precision", "paper_bleu"]
    others = ("source_column", "target_column", "tokens_per_batch")
    names += [name for name in others if getattr(arguments, name) != arguments.parser.get_default(name)]
    options = {option_flag(name): getattr(arguments, name) for name in names}
    record = evaluation_record(
        arguments.model, arguments.source, arguments.reference, generation, options, arguments.test_set
    )
    if is_exported(arguments.model):
        facts = translator.model.facts
        record["exported"] = {"format": facts.format, "quantization": facts.quantization}
    return record


def add_score(commands) -> None:
    """Add `vaswani score`."""
    parser = add_command(commands, "score", _score, "log-probabilities of given translations, and their perplexity")
    _add_pairs(parser, "target", "their translations")
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of standard output")
    parser.add_argument("--resume", action="store_true", help="continue an --output that was interrupted")
    add_engine_options(parser, "processes that score parts of the files, each on its own GPU if any (default: 1)", 1)
    parser.add_argument("--tokens", action="store_true", help="also the log-probability of each token")
    how = "fields separated by tabs, or JSON lines"
    parser.add_argument("--format", choices=("text", "json"), default="text", help=how)
    parser.add_argument("--json", metavar="FILE", help="also write perplexity and sums of the whole file here")
    add_length_penalty(parser)
    add_window(parser, "pairs")
    add_model_options(parser)


def _score(arguments: argparse.Namespace) -> int:
    from ..evaluation.metrics import perplexity

    check_options(arguments)
    check_work(arguments, "score", ("source", "target"))
    check_files(arguments, read=("source", "target"), written=("output", "json"))
    sums = _score_in_parts(arguments) if is_in_parts(arguments) else _score_files(arguments)
    if not sums["pairs"]:
        raise UserError("all pairs have a blank side: there is nothing to score")
    sums = {"perplexity": perplexity([-sums["log_probability"]], [sums["tokens"]])} | sums
    print(
        f"perplexity {sums['perplexity']:.3f} a target token: log-probability {sums['log_probability']:,.2f} of"
        f" {sums['tokens']:,} tokens in {sums['pairs']:,} pairs",
        file=sys.stderr,
    )
    if arguments.json:
        write_result(Path(arguments.json), json.dumps(sums, indent=2) + "\n")
    return 0


def _score_files(arguments: argparse.Namespace) -> dict[str, Any]:
    """Score in this process; returns the sums."""
    from tqdm.auto import tqdm

    from ..decoding.streaming import in_windows

    scans = _scan_pairs(arguments)
    files, total = _file_scorer(arguments), scans["--source"].lines if scans else None
    output = open_output(arguments, scans, files.window)
    with contextlib.closing(output), report_unfinished(output):
        if output.done:
            _add_written(arguments.output, files)
        windows = in_windows(_pairs(arguments.source, arguments.target), files.window, output.done)
        bar = tqdm(total=total, initial=output.done, desc=files.doing, unit=f" {files.unit}", smoothing=0)
        with bar:
            remarks = files.write(windows, output, bar, output.done)
        remarks.report()
        output.finish()
    return files.sums


def _score_in_parts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Have workers score; returns the sums."""
    from ..decoding.scoring import FileScorer

    scans, values = _scan_pairs(arguments), found_anywhere(arguments)
    # Loaded here too, wherever the workers are: what is wrong with model or options is known at once.
    files = _file_scorer(argparse.Namespace(**vars(values) | {"device": "cpu", "precision": None}))
    files.model = None
    arguments.resume = True  # nothing that is there is replaced
    output = open_output(arguments, scans, files.window)
    with contextlib.closing(output), report_unfinished(output):
        make = partial(_file_scorer, values, output.settings["MODEL"])
        write_parts(arguments, output, FileScorer, make, scans, files.window)
        _add_written(arguments.output, files)
        output.finish()
    return files.sums


def _file_scorer(arguments: argparse.Namespace, sha256: str | None = None):
    """The model of the arguments and how scores are written; `sha256` is what it must still have."""
    from ..decoding.scoring import FileScorer, LengthRule, ScoreLayout
    from ..decoding.streaming import WINDOW_LINES

    check_model(arguments.model, sha256)
    model, tokenizer = load_for_decoding(arguments)
    rule = LengthRule.of(model.generation_config, {"length_penalty": arguments.length_penalty})
    layout = ScoreLayout(rule, arguments.format == "json", arguments.tokens)
    return FileScorer(model, tokenizer, layout, arguments.window or WINDOW_LINES, arguments.tokens_per_batch)


def _add_written(name: str, files) -> None:
    with Path(name).open(encoding="utf-8", newline="\n") as lines:
        files.layout.add(lines, files.sums)


def _scan_pairs(arguments: argparse.Namespace) -> dict[str, TextScan]:
    """Both files read through, which must have as many lines; nothing where one is a pipe, which is read once."""
    from ..data.text_files import scan_text

    names = {"--source": arguments.source, "--target": arguments.target}
    if not all(map(is_file, names.values())):
        return {}
    scans = {option: scan_text(Path(name)) for option, name in names.items()}
    source, target = (scan.lines for scan in scans.values())
    if source != target:
        raise UserError(
            f"{arguments.source} has {source:,} lines and {arguments.target} has {target:,}; line n of one must be the"
            " translation of line n of the other"
        )
    return scans
