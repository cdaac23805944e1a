"""The command that measures a model on a test set: `vaswani evaluate`."""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ..errors import UserError
from .command import add_command
from .options import (
    add_model_options,
    add_search_options,
    check_files,
    check_options,
    generate_options,
    load_for_decoding,
    written_at_the_end,
)


def add_evaluate(commands) -> None:
    """Add `vaswani evaluate`."""
    parser = add_command(commands, "evaluate", _evaluate, "BLEU, chrF and perplexity on a test set")
    parser.add_argument("model", metavar="MODEL", help="model folder, or one exported to CTranslate2")
    parser.add_argument("--source", required=True, metavar="FILE", help="sources, one a line (.gz works)")
    parser.add_argument("--reference", required=True, metavar="FILE", help="reference translations, aligned")
    parser.add_argument("--output", metavar="FILE", help="also write the translations here")
    parser.add_argument("--json", metavar="FILE", help="also write the scores here, and how they were obtained")
    parser.add_argument("--test-set", metavar="NAME", help="its name in the --json file (default: from the file names)")
    parser.add_argument(
        "--paper-bleu",
        metavar="LANGUAGE",
        help="also BLEU as the paper computed it: Moses' tokens of this language (de, fr, ...), German compounds split",
    )
    add_search_options(parser, exact=True)
    add_model_options(parser, ensemble=False)


def _evaluate(arguments: argparse.Namespace) -> int:
    import json

    from tqdm.auto import tqdm

    from ..data.pair_readers import read_pairs
    from ..decoding.scoring import score_pairs
    from ..decoding.translator import Translator
    from ..evaluation.metrics import PerplexityMetric, TranslationMetric, moses_tokenizer, paper_bleu

    check_options(arguments)
    check_files(arguments, read=("source", "reference"), written=("output", "json"))
    if arguments.paper_bleu:
        moses_tokenizer(arguments.paper_bleu)  # before the work, if it is not installed
    pairs = list(read_pairs("text", [(arguments.source, arguments.reference)]))
    sources, references = map(list, zip(*pairs, strict=True))
    filled = [pair for pair in pairs if all(side.strip() for side in pair)]
    if not filled:
        raise UserError(f"{arguments.source} and {arguments.reference} hold blank lines only: nothing to evaluate")
    model, tokenizer = load_for_decoding(arguments)
    translator = Translator(model, tokenizer, arguments.tokens_per_batch, **generate_options(arguments, model))
    # What was read is hashed before anything is written.
    how = _how_obtained(arguments, translator) if arguments.json else {}
    with contextlib.ExitStack() as stack:
        text_file, scores_file = (
            stack.enter_context(written_at_the_end(Path(path))) if path else None
            for path in (arguments.output, arguments.json)
        )
        losses, counts = score_pairs(translator.model, translator.tokenizer, *map(list, zip(*filled, strict=True)))
        started = time.monotonic()
        bar = stack.enter_context(tqdm(total=len(sources), desc="translating", unit=" sentences", file=sys.stderr))
        translations = list(translator.translate(sources, progress=bar))
        bar.close()
        seconds = time.monotonic() - started
        scores = TranslationMetric().compute(predictions=translations, references=references)
        scores |= PerplexityMetric().compute(predictions=losses, references=counts)
        if arguments.paper_bleu:
            scores["paper_bleu"] = paper_bleu(translations, references, arguments.paper_bleu)
        scores |= {"sentences": len(sources), "seconds": round(seconds, 1)}
        scores |= how
        if text_file is not None:
            text_file.writelines(line + "\n" for line in translations)
        if scores_file is not None:
            scores_file.write(json.dumps(scores, indent=2) + "\n")
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
    if arguments.exact:
        generation["exact"] = True
    options = {
        "--beams": arguments.beams,
        "--length-penalty": arguments.length_penalty,
        "--max-new-tokens": arguments.max_new_tokens,
        "--exact": arguments.exact,
        "--precision": arguments.precision,
    }
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
    parser.add_argument("model", metavar="MODEL", help="model folder, or one exported to CTranslate2")
    parser.add_argument("--source", required=True, metavar="FILE", help="sources, one a line (.gz works)")
    parser.add_argument("--target", required=True, metavar="FILE", help="their translations, aligned")
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of standard output")
    parser.add_argument("--tokens", action="store_true", help="also the log-probability of each token")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="fields with tabs, or JSON lines")
    parser.add_argument("--json", metavar="FILE", help="also write perplexity and sums of the whole file here")
    parser.add_argument(
        "--length-penalty", metavar="X", type=float, help="alpha of the length normalisation; the model's own"
    )
    how = "pairs that are sorted by length and written together (default: 2000)"
    parser.add_argument("--window", metavar="N", type=int, help=how)
    add_model_options(parser)


@dataclass
class _Sums:
    """Of a whole file."""

    pairs: int = 0
    tokens: int = 0
    log_probability: float = 0.0

    def add(self, score) -> None:
        self.pairs += 1
        self.tokens += len(score.tokens)
        self.log_probability += score.log_probability

    def as_json(self) -> dict:
        perplexity = math.exp(min(-self.log_probability / self.tokens, 700.0))
        return {"perplexity": perplexity, **vars(self)}


def _score(arguments: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    from ..decoding.output import StreamOutput
    from ..decoding.scoring import LengthRule, PairScorer
    from ..decoding.streaming import WINDOW_LINES, in_windows, read_ahead

    check_options(arguments)
    check_files(arguments, read=("source", "target"), written=("output", "json"))
    total = _count_pairs(arguments)
    model, tokenizer = load_for_decoding(arguments)
    rule = LengthRule.of(model.generation_config, {"length_penalty": arguments.length_penalty})
    scorer = PairScorer(model, tokenizer, arguments.tokens_per_batch)
    windows = in_windows(_pairs(arguments), arguments.window or WINDOW_LINES)
    sums = _Sums()
    with contextlib.ExitStack() as stack:
        sums_file = stack.enter_context(written_at_the_end(Path(arguments.json))) if arguments.json else None
        output = StreamOutput(sys.stdout if arguments.output is None else Path(arguments.output))
        stack.callback(output.close)
        bar = stack.enter_context(tqdm(total=total, desc="scoring", unit=" pairs", file=sys.stderr, smoothing=0))
        prepared = stack.enter_context(read_ahead(map(scorer.prepare, windows)))
        done = 0
        for scores in scorer.score_windows(prepared):
            for score in scores:
                if score is not None:
                    sums.add(score)
            output.write("".join(_line(done + place, score, rule, arguments) for place, score in enumerate(scores, 1)))
            done += len(scores)
            bar.update(len(scores))
        bar.close()
        _report(sums, sums_file)
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


def _pairs(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    from ..data.pair_readers import read_pairs

    return read_pairs("text", [(arguments.source, arguments.target)])


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


def _report(sums: _Sums, file: TextIO | None) -> None:
    if not sums.pairs:
        raise UserError("all pairs have a blank side: there is nothing to score")
    values = sums.as_json()
    print(
        f"perplexity {values['perplexity']:.3f} a target token: log-probability {sums.log_probability:,.2f} of"
        f" {sums.tokens:,} tokens in {sums.pairs:,} pairs",
        file=sys.stderr,
    )
    if file is not None:
        file.write(json.dumps(values, indent=2) + "\n")
