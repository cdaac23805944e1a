"""The commands that use a model: `vaswani translate` and `vaswani evaluate`."""

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from .command_line import add_command
from .errors import UserError
from .files import written_whole


def _add_generation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beams", type=int, help="beam size; the model's own if not given")
    parser.add_argument("--length-penalty", type=float, help="alpha of the length normalisation; the model's own")
    parser.add_argument("--max-new-tokens", type=int, help="longest output in tokens; source length + 50")
    parser.add_argument("--tokens-per-batch", type=int, default=2048, help="source tokens translated at once")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps, ...; auto: an accelerator if any")


def add_translate(commands) -> None:
    """Add `vaswani translate`."""
    parser = add_command(commands, "translate", _translate, "translate sentences, a file or standard input")
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("sentences", metavar="SENTENCE", nargs="*", help="sentences; without any, standard input")
    parser.add_argument("--input", metavar="FILE", help="translate the lines of this file (.gz works)")
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of standard output")
    _add_generation_options(parser)


def _lines(path: str | None) -> Iterator[str]:
    """Lines of a file or of standard input, without their ends."""
    from .data import decode_lines, read_lines

    return read_lines(Path(path)) if path is not None else decode_lines(sys.stdin.buffer, "standard input")


def _translator(arguments: argparse.Namespace):
    from .translation import Translator, load_model

    for name in ("beams", "max_new_tokens", "tokens_per_batch"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be 1 or more")
    model, tokenizer = load_model(arguments.model, arguments.device)
    return Translator(
        model,
        tokenizer,
        arguments.tokens_per_batch,
        num_beams=arguments.beams,
        length_penalty=arguments.length_penalty,
        max_new_tokens=arguments.max_new_tokens,
    )


def _translate(arguments: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    if arguments.sentences and arguments.input:
        raise UserError("give sentences or --input, not both")
    for number, sentence in enumerate(arguments.sentences, start=1):
        if not sentence.isprintable() and any("\ud800" <= character <= "\udfff" for character in sentence):
            raise UserError(f"sentence {number} is not valid UTF-8: convert it first")
    files = [Path(name) for name in (arguments.input, arguments.output) if name]
    if len(files) == 2 and all(file.exists() for file in files) and files[0].samefile(files[1]):
        raise UserError(f"--input and --output are the same file, {files[0]}: give another --output")
    translator = _translator(arguments)
    interactive = not arguments.sentences and arguments.input is None and sys.stdin.isatty()
    if interactive:
        print("translating standard input, one sentence a line; Ctrl-D ends it", file=sys.stderr)
    sentences = iter(arguments.sentences) if arguments.sentences else _lines(arguments.input)
    first = list(islice(sentences, 1))  # a missing input is reported before an output is opened
    total = len(arguments.sentences) or None
    with contextlib.ExitStack() as stack:
        output = sys.stdout
        if arguments.output:
            output = stack.enter_context(Path(arguments.output).open("w", encoding="utf-8"))
        bar = stack.enter_context(
            tqdm(total=total, desc="translating", unit="sentence", file=sys.stderr, disable=interactive or total == 1)
        )
        for translation in translator.translate(
            chain(first, sentences), window=1 if interactive else 1000, progress=bar
        ):
            print(translation, file=output, flush=interactive)
    return 0


def add_evaluate(commands) -> None:
    """Add `vaswani evaluate`."""
    parser = add_command(commands, "evaluate", _evaluate, "BLEU, chrF and perplexity on a test set")
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("--source", required=True, metavar="FILE", help="sources, one a line (.gz works)")
    parser.add_argument("--reference", required=True, metavar="FILE", help="reference translations, aligned")
    parser.add_argument("--output", metavar="FILE", help="also write the translations here")
    parser.add_argument("--json", metavar="FILE", help="also write the scores here, and how they were obtained")
    parser.add_argument("--test-set", metavar="NAME", help="its name in the --json file (default: from the file names)")
    _add_generation_options(parser)


def _evaluate(arguments: argparse.Namespace) -> int:
    import json

    from tqdm.auto import tqdm

    from .data import load_pairs
    from .metrics import PerplexityMetric, TranslationMetric
    from .translation import score_pairs

    _refuse_equal_files(arguments)
    pairs = load_pairs(source=arguments.source, target=arguments.reference)
    sources, references = list(pairs["source"]), list(pairs["target"])
    filled = [pair for pair in zip(sources, references, strict=True) if all(side.strip() for side in pair)]
    if not filled:
        raise UserError(f"{arguments.source} and {arguments.reference} hold blank lines only: nothing to evaluate")
    translator = _translator(arguments)
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


def _refuse_equal_files(arguments: argparse.Namespace) -> None:
    """No file that is written may be one that is read, or be written twice; devices and pipes may."""

    def equal(one: Path, other: Path) -> bool:
        if one.exists() and other.exists():
            return one.is_file() and one.samefile(other)
        return one.resolve() == other.resolve()

    given = {name: getattr(arguments, name) for name in ("source", "reference", "output", "json")}
    names = [name for name, path in given.items() if path]
    for written in ("output", "json"):
        for other in names[: names.index(written)] if written in names else ():
            if equal(Path(given[written]), Path(given[other])):
                raise UserError(
                    f"--{written} and --{other} are the same file, {given[written]}: give another --{written}"
                )


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
    }
    return evaluation_record(
        arguments.model, arguments.source, arguments.reference, generation, options, arguments.test_set
    )
