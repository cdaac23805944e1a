"""The commands that compare a model with given translations: `vaswani evaluate`, `score` and `calibrate`."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from .command import add_command
from .files import check_files, option_flag, write_result
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

    name = arguments.source
    if name == arguments.reference and home_path(name.removesuffix(".gz")).suffix in _OF_PAIRS:
        columns = {"source_column": arguments.source_column, "target_column": arguments.target_column}
        return pair_source(data=name, **columns).stream()
    return _pairs(arguments.source, arguments.reference)


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
    add_search_options(parser, shortlist=True)
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
    from ..loading import is_exported

    generation = search_settings(translator.model.generation_config) | translator.generate_options
    generation |= {"shortlist": True} if arguments.shortlist else {}
    names = ("beams", "length_penalty", "max_new_tokens", "shortlist", "precision")
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
    parser.add_argument("--tokens", action="store_true", help="also the log-probability of each token")
    how = "fields separated by tabs, or JSON lines"
    parser.add_argument("--format", choices=("text", "json"), default="text", help=how)
    parser.add_argument("--json", metavar="FILE", help="also write perplexity and sums of the whole file here")
    add_length_penalty(parser)
    add_window(parser, "pairs")
    add_model_options(parser)


def _score(arguments: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    from ..decoding.output import StreamOutput
    from ..decoding.scoring import LengthRule, score_windows
    from ..decoding.streaming import WINDOW_LINES
    from ..evaluation.metrics import perplexity

    check_options(arguments)
    check_files(arguments, read=("source", "target"), written=("output", "json"))
    total = _count_pairs(arguments)
    model, tokenizer = load_for_decoding(arguments)
    rule = LengthRule.of(model.generation_config, {"length_penalty": arguments.length_penalty})
    pairs, window = _pairs(arguments.source, arguments.target), arguments.window or WINDOW_LINES
    sums, number = {"pairs": 0, "tokens": 0, "log_probability": 0.0}, 0
    output = StreamOutput(sys.stdout if arguments.output is None else Path(arguments.output))
    with contextlib.closing(output), tqdm(total=total, desc="scoring", unit=" pairs", smoothing=0) as bar:
        for scores in score_windows(model, tokenizer, pairs, window, arguments.tokens_per_batch):
            output.write("".join(_line(*pair, rule, arguments) for pair in enumerate(scores, number + 1)))
            number += len(scores)
            bar.update(len(scores))
            for score in filter(None, scores):
                sums["pairs"] += 1
                sums["tokens"] += len(score.tokens)
                sums["log_probability"] += score.log_probability
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


def _count_pairs(arguments: argparse.Namespace) -> int | None:
    """Lines of both files, which must be as many; None where one of them is a pipe that can be read only once."""
    from ..data.text_files import scan_text

    paths = [Path(name) for name in (arguments.source, arguments.target)]
    if not all(path.is_file() or not path.exists() for path in paths):
        return None
    counts = [scan_text(path).lines for path in paths]
    if counts[0] != counts[1]:
        raise UserError(
            f"{paths[0]} has {counts[0]:,} lines and {paths[1]} has {counts[1]:,}; line n of one must be the"
            " translation of line n of the other"
        )
    return counts[0]


def _line(number: int, score, rule, arguments: argparse.Namespace) -> str:
    if arguments.format == "json":
        values = {"line": number}
        if score is not None:
            ranked = score.score(rule)
            values |= {"score": ranked, "log_probability": score.log_probability, "tokens": len(score.tokens)}
            if arguments.tokens:
                values["token_log_probabilities"] = list(zip(score.tokens, score.log_probabilities, strict=True))
        return json.dumps(values, ensure_ascii=False) + "\n"
    if score is None:
        return "\n"
    fields = [f"{score.score(rule):.6f}", f"{score.log_probability:.6f}", str(len(score.tokens))]
    if arguments.tokens:
        fields.append(" ".join(f"{log:.6f}" for log in score.log_probabilities))
    return "\t".join(fields) + "\n"


def add_calibrate(commands) -> None:
    """Add `vaswani calibrate`."""
    description = (
        "Translates a text, compares the words with references, and notes in the model's folder how sure the model may"
        " be of a word: `vaswani translate --confidence` and the model card show it. Give text that the model was not"
        " trained on."
    )
    help_text = "fit how sure a model is to how often it is right"
    parser = add_command(commands, "calibrate", _calibrate, help_text, description)
    parser.add_argument(
        "model", metavar="MODEL", help="model folder; calibration.json and calibration.png are put there"
    )
    parser.add_argument("--source", required=True, metavar="FILE", help="sources, one a line (.gz works)")
    how = "reference translations, line n for line n of --source"
    parser.add_argument("--reference", required=True, metavar="FILE", help=how)
    add_search_options(parser)
    add_model_options(parser, ensemble=False)


def _calibrate(arguments: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    from ..decoding.confidence import CALIBRATION, check_folder, fit
    from ..decoding.scoring import score_tokens
    from ..decoding.translator import Translator
    from ..evaluation.records import tensors_sha256
    from ..loading import is_exported

    check_options(arguments)
    check_files(arguments, read=("source", "reference"), written=())
    if is_exported(arguments.model):
        raise UserError(f"{arguments.model} is an exported model: calibrate the model that it was made from")
    check_folder(arguments.model)
    pairs = [pair for pair in _pairs(arguments.source, arguments.reference) if all(side.strip() for side in pair)]
    model, tokenizer = load_for_decoding(arguments)
    translator = Translator(model, tokenizer, arguments.tokens_per_batch, **generate_options(arguments, model))
    sources = [source for source, _ in pairs]
    with tqdm(total=len(sources), desc="translating", unit=" sentences", file=sys.stderr) as bar:
        outputs = list(translator.translate(sources, progress=bar))
    scores = score_tokens(model, tokenizer, sources, outputs, arguments.tokens_per_batch)
    calibration = fit(scores, [reference for _, reference in pairs], tensors_sha256(arguments.model))
    calibration.write(arguments.model)
    right, words = calibration.after.right, calibration.after.words
    share = sum(one * number for one, number in zip(right, words, strict=True)) / sum(words)
    print(f"{sum(words):,} words of {calibration.sentences:,} sentences, {share:.1%} of them as in the references")
    print(
        f"expected calibration error {calibration.before.error:.3f} by the model's probabilities,"
        f" {calibration.after.error:.3f} calibrated (on sentences that the fit had not seen)"
    )
    print(f"{Path(arguments.model) / CALIBRATION}")
    return 0
