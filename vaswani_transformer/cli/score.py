"""The command that scores given translations: `vaswani score`."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ..errors import UserError
from .command import add_command
from .options import (
    add_model_options,
    check_files,
    check_options,
    load_for_decoding,
    written_at_the_end,
)


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
    from ..decoding.read_ahead import read_ahead
    from ..decoding.scoring import LengthRule, PairScorer
    from ..decoding.streaming import WINDOW_LINES, in_windows

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
    from ..data.survey import survey

    paths = [Path(name) for name in (arguments.source, arguments.target)]
    if not all(path.is_file() or not path.exists() for path in paths):
        return None
    counts = [survey(path).lines for path in paths]
    if counts[0] != counts[1]:
        raise UserError(
            f"{paths[0]} has {counts[0]:,} lines and {paths[1]} has {counts[1]:,}; line n of one must be the"
            " translation of line n of the other"
        )
    return counts[0]


def _pairs(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    from ..data.text_files import DEFAULT_COLUMNS, read_pairs

    return read_pairs("text", [(arguments.source, arguments.target)], DEFAULT_COLUMNS)


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
