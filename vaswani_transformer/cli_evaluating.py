"""The command that measures a model on a test set: `vaswani evaluate`."""

import argparse
import contextlib
import shutil
import sys
import time
from pathlib import Path

from .command_line import add_command
from .decoding_options import (
    add_model_options,
    add_search_options,
    check_options,
    generate_options,
    load_for_decoding,
    refuse_equal_files,
)
from .errors import UserError
from .files import written_whole


def add_evaluate(commands) -> None:
    """Add `vaswani evaluate`."""
    parser = add_command(commands, "evaluate", _evaluate, "BLEU, chrF and perplexity on a test set")
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("--source", required=True, metavar="FILE", help="sources, one a line (.gz works)")
    parser.add_argument("--reference", required=True, metavar="FILE", help="reference translations, aligned")
    parser.add_argument("--output", metavar="FILE", help="also write the translations here")
    parser.add_argument("--json", metavar="FILE", help="also write the scores here, and how they were obtained")
    parser.add_argument("--test-set", metavar="NAME", help="its name in the --json file (default: from the file names)")
    add_search_options(parser)
    add_model_options(parser, ensemble=False)


def _evaluate(arguments: argparse.Namespace) -> int:
    import json

    from tqdm.auto import tqdm

    from .data import load_pairs
    from .metrics import PerplexityMetric, TranslationMetric
    from .scoring import score_pairs
    from .translation import Translator

    check_options(arguments)
    refuse_equal_files(arguments, read=("source", "reference"), written=("output", "json"))
    pairs = load_pairs(source=arguments.source, target=arguments.reference)
    sources, references = list(pairs["source"]), list(pairs["target"])
    filled = [pair for pair in zip(sources, references, strict=True) if all(side.strip() for side in pair)]
    if not filled:
        raise UserError(f"{arguments.source} and {arguments.reference} hold blank lines only: nothing to evaluate")
    model, tokenizer = load_for_decoding(arguments)
    translator = Translator(model, tokenizer, arguments.tokens_per_batch, **generate_options(arguments, model))
    # What was read is hashed before anything is written.
    how = _how_obtained(arguments, translator) if arguments.json else {}
    with contextlib.ExitStack() as stack:
        text_file, scores_file = (
            stack.enter_context(_written_at_the_end(Path(path))) if path else None
            for path in (arguments.output, arguments.json)
        )
        losses, counts = score_pairs(translator.model, translator.tokenizer, *map(list, zip(*filled, strict=True)))
        started = time.monotonic()
        bar = stack.enter_context(tqdm(total=len(sources), desc="translating", unit="sentence", file=sys.stderr))
        translations = list(translator.translate(sources, progress=bar))
        bar.close()
        seconds = time.monotonic() - started
        scores = TranslationMetric().compute(predictions=translations, references=references)
        scores |= PerplexityMetric().compute(predictions=losses, references=counts)
        scores |= {"sentences": len(sources), "seconds": round(seconds, 1)}
        scores |= how
        if text_file is not None:
            text_file.writelines(line + "\n" for line in translations)
        if scores_file is not None:
            scores_file.write(json.dumps(scores, indent=2) + "\n")
    print(f"BLEU {scores['bleu']:.2f}  ({scores['bleu_signature']})")
    print(f"chrF {scores['chrf']:.2f}  ({scores['chrf_signature']})")
    print(f"perplexity {scores['perplexity']:.3f} a target token, {scores['exact_match']:.1f}% of sentences exact")
    print(f"{len(sources):,} sentences translated in {seconds:.1f} s")
    return 0


@contextlib.contextmanager
def _written_at_the_end(path: Path):
    """A text file to write, which takes the place of an earlier one only once all of it is there."""
    target = path.resolve()  # a link stays one
    if target.exists() and not target.is_file():  # a device or a pipe
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    if target.exists():
        target.open("r+").close()  # one that is protected is reported now
    with written_whole(target) as new:
        try:
            file = new.open("w", encoding="utf-8")
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        with file:
            yield file
        if target.exists():
            shutil.copymode(target, new)


def _how_obtained(arguments: argparse.Namespace, translator) -> dict:
    from .provenance import evaluation_record, search_settings

    generation = search_settings(translator.model.generation_config) | translator.generate_options
    options = {
        "--beams": arguments.beams,
        "--length-penalty": arguments.length_penalty,
        "--max-new-tokens": arguments.max_new_tokens,
        "--precision": arguments.precision,
    }
    return evaluation_record(
        arguments.model, arguments.source, arguments.reference, generation, options, arguments.test_set
    )
