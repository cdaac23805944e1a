"""The command that measures a model on a test set: `vaswani evaluate`."""

import argparse
import contextlib
import sys
import time
from pathlib import Path

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

    from ..data.text_files import DEFAULT_COLUMNS, read_pairs
    from ..decoding.scoring import score_pairs
    from ..decoding.translator import Translator
    from ..evaluation.metrics import PerplexityMetric, TranslationMetric
    from ..evaluation.paper_bleu import moses_tokenizer, paper_bleu

    check_options(arguments)
    check_files(arguments, read=("source", "reference"), written=("output", "json"))
    if arguments.paper_bleu:
        moses_tokenizer(arguments.paper_bleu)  # before the work, if it is not installed
    pairs = list(read_pairs("text", [(arguments.source, arguments.reference)], DEFAULT_COLUMNS))
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
