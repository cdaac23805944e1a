"""The command that translates: `vaswani translate`."""

import argparse
import contextlib
import functools
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..data.text_files import TextScan, has_undecoded
from ..decoding.output import ResumableOutput
from ..documents.formats import FORMATS
from ..errors import UserError
from .command import add_command, add_engine_options
from .files import (
    check_files,
    check_model,
    check_work,
    found_anywhere,
    has_workers,
    input_lines,
    is_file,
    is_in_parts,
    is_interactive,
    open_output,
    option_flag,
    read_first,
    report_unfinished,
    write_parts,
    write_result,
)
from .options import (
    add_model_argument,
    add_model_options,
    add_sampling_options,
    add_search_options,
    add_window,
    check_options,
    generate_options,
    load_for_decoding,
)


def add_translate(commands) -> None:
    """Add `vaswani translate`."""
    parser = add_command(commands, "translate", _translate, "translate sentences, a file or standard input")
    add_model_argument(parser)
    how = "sentences (default: the lines of standard input)"
    parser.add_argument("sentences", metavar="SENTENCE", nargs="*", default=[], help=how)
    parser.words = "sentences"
    files = parser.add_argument_group("files")
    files.add_argument("--input", metavar="FILE", help="translate the lines of this file (.gz works)")
    files.add_argument("--output", metavar="FILE", help="write to this file instead of standard output")
    files.add_argument("--resume", action="store_true", help="continue an --output that was interrupted")
    add_engine_options(files, "processes that translate parts of --input, each on its own GPU if any (default: 1)", 1)
    files.add_argument("--prefix", metavar="FILE", help="how the translation of each line of --input has to begin")
    how = "terms that translations must have: lines of SOURCE TAB TARGET, or of a word that is not translated"
    files.add_argument("--glossary", metavar="FILE", help=how)
    add_window(files, "lines")
    layout = parser.add_argument_group("what is written")
    layout.add_argument("--nbest", metavar="N", type=int, help="N translations of each line: line number, score, text")
    layout.add_argument("--scores", action="store_true", help="the score before each translation")
    how = "how sure the model is: the mean probability of the words"
    layout.add_argument("--confidence", action="store_true", help=how)
    how = "word alignments after each, as 0-0 1-2"
    layout.add_argument("--alignments", "--return-alignments", action="store_true", help=how)
    how = "of lines, fields separated by tabs or JSON lines; the others: a whole document, whose markup stays"
    layout.add_argument("--format", choices=("text", "json", *FORMATS), default="text", help=how)
    how = "code of a document's language, for the splitting of sentences (default: as the model was trained, or en)"
    layout.add_argument("--source-language", metavar="CODE", help=how)
    long = parser.add_argument_group("long lines")
    long.add_argument("--max-source-tokens", metavar="N", type=int, help="a line of more tokens is too long")
    how = "translate a line that is too long in parts (default), or stop there"
    long.add_argument("--long-lines", choices=("split", "refuse"), default="split", help=how)
    add_search_options(parser)
    add_sampling_options(parser)
    add_model_options(parser)


def _translate(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if arguments.format in FORMATS:
        _translate_document(arguments)
    elif is_in_parts(arguments):
        _translate_in_parts(arguments)
    else:
        _translate_lines(arguments)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what is wrong whatever the model is."""
    check_options(arguments)
    if arguments.sentences and arguments.input:
        raise UserError("give sentences or --input, not both")
    for number, sentence in enumerate(arguments.sentences, start=1):
        if has_undecoded(sentence):
            raise UserError(f"sentence {number} is not valid UTF-8: convert it first")
    for name in ("prefix", "ensemble", "sample"):
        if arguments.glossary is not None and getattr(arguments, name):
            raise UserError(f"--glossary and {option_flag(name)} cannot be combined: leave one of them out")
    if arguments.prefix is not None and arguments.input is None:
        raise UserError("--prefix is for the lines of a file: give --input")
    if arguments.format in FORMATS:
        _check_document(arguments)
    elif arguments.source_language is not None:
        raise UserError(f"--source-language is for documents: give --format {'|'.join(FORMATS)}, or leave it out")
    check_work(arguments, "translate", ("input", "prefix", "glossary"))
    check_files(arguments, read=("input", "prefix", "glossary"), written=("output",))


def _check_document(arguments: argparse.Namespace) -> None:
    """Refuse what is for lines alone."""
    document = f"--format {arguments.format} is for a whole document"
    if arguments.sentences or has_workers(arguments):
        what = "sentences" if arguments.sentences else "several workers"
        raise UserError(f"{document}, not for {what}: give --input FILE or standard input, to one process")
    for name in ("resume", "prefix", "nbest", "scores", "confidence", "alignments", "long_lines"):
        if getattr(arguments, name) not in (None, False, "split"):
            raise UserError(f"{document} and {option_flag(name)} for lines: leave one of them out")
    if arguments.format == "docx" and arguments.output is None and sys.stdout.isatty():
        raise UserError("a Word file is not text that a terminal shows: give --output FILE")


def _translate_lines(arguments: argparse.Namespace) -> None:
    """Translate sentences, a file or standard input in this process."""
    from ..decoding.file_translator import with_prefixes

    scans = _scan_files(arguments)
    files = _file_translator(arguments)
    if interactive := is_interactive(arguments, files.doing):
        files.window = 1
    source, prefix = scans.get("--input"), scans.get("--prefix")
    lines: Iterator[Any] = iter(arguments.sentences) if arguments.sentences else input_lines(arguments.input, source)
    if arguments.prefix is not None:
        lines = with_prefixes(lines, Path(arguments.prefix), prefix and prefix.stamp)
    if not is_file(arguments.input) and not interactive:  # a file has been checked as a whole
        lines = read_first(lines)
    with _opened(arguments, scans, files.window, files.translator.seed) as (output, files.translator.seed):
        total = source.lines if source else len(arguments.sentences) or None
        ahead = not (interactive or arguments.sentences)
        files.run(lines, output, output.done, total, ahead, progress=not interactive and total != 1)
        output.finish()


def _translate_in_parts(arguments: argparse.Namespace) -> None:
    """Have a file translated by workers."""
    from ..decoding.file_translator import FileTranslator

    scans, values = _scan_files(arguments), vars(found_anywhere(arguments))
    # Loaded here too, wherever the workers are: what is wrong with model or options is known at once.
    files = _file_translator(argparse.Namespace(**values | {"device": "cpu", "precision": None}))
    window, seed = files.window, files.translator.seed
    del files
    arguments.resume = True  # nothing that is there is replaced
    with _opened(arguments, scans, window, seed) as (output, seed):
        make = partial(_file_translator, argparse.Namespace(**values | {"seed": seed}), output.settings["MODEL"])
        write_parts(arguments, output, FileTranslator, make, scans, window, _lines_per_record(arguments))
        output.finish()


def _lines_per_record(arguments: argparse.Namespace) -> int:
    return 1 if arguments.format == "json" else arguments.nbest or 1


@contextlib.contextmanager
def _opened(
    arguments: argparse.Namespace, scans: dict[str, TextScan], window: int, seed: int | None
) -> Iterator[tuple[Any, int | None]]:
    """The output and its seed: if one was drawn before that one."""
    drawn = {"--seed": seed} if arguments.seed is None and seed is not None else {}
    output = open_output(arguments, scans, window, _lines_per_record(arguments), drawn)
    with contextlib.closing(output), report_unfinished(output):
        yield output, output.settings.get("--seed") if isinstance(output, ResumableOutput) else seed


def _translate_document(arguments: argparse.Namespace) -> None:
    """Translate a document; the model is loaded when it is known to be one."""
    from tqdm.auto import tqdm

    from ..decoding.streaming import WINDOW_LINES
    from ..documents.formats import aligner, translate_document

    made = functools.cache(lambda: _make_translator(arguments))

    def translate(sentences: list[str]) -> list[str]:
        translator = made()
        with tqdm(total=len(sentences), desc="translating", unit=" sentences", file=sys.stderr, smoothing=0) as bar:
            return list(translator.translate(sentences, arguments.window or WINDOW_LINES, bar))

    def align(sources: list[str], targets: list[str]) -> list:
        return aligner(made().model, made().tokenizer)(sources, targets)

    data = Path(arguments.input).read_bytes() if arguments.input is not None else sys.stdin.buffer.read()
    language = arguments.source_language or _source_language(arguments.model)
    result = translate_document(data, arguments.format, translate, align, language)
    if arguments.output is not None:
        write_result(Path(arguments.output), result)
    else:
        sys.stdout.buffer.write(result)
        sys.stdout.buffer.flush()


def _source_language(folder: str) -> str:
    """The language of a model's sources, as its recipe or the model that was imported names it; else English."""
    from ..hub.card_facts import known_languages

    return [*known_languages(folder), "en"][0]


def _scan_files(arguments: argparse.Namespace) -> dict[str, TextScan]:
    from ..data.text_files import scan_text

    names = {"--input": arguments.input, "--prefix": arguments.prefix}
    scans = {option: scan_text(Path(name)) for option, name in names.items() if is_file(name)}
    if len(scans) == 2 and scans["--input"].lines != scans["--prefix"].lines:
        raise UserError(
            f"{arguments.input} has {scans['--input'].lines:,} lines and {arguments.prefix} has"
            f" {scans['--prefix'].lines:,}: give a prefix for each line, an empty one for none"
        )
    return scans


def _file_translator(arguments: argparse.Namespace, sha256: str | None = None):
    """The model of the arguments and all that is done with it; `sha256` is what it must still have."""
    from ..decoding.file_translator import FileTranslator, Layout
    from ..decoding.streaming import WINDOW_LINES

    check_model(arguments.model, sha256)
    translator = _make_translator(arguments)
    layout = Layout(arguments.nbest is not None, arguments.scores, arguments.format == "json")
    plugins = {"align": _aligner(arguments, translator), "confide": _confider(arguments, translator)}
    return FileTranslator(translator, layout, window=arguments.window or WINDOW_LINES, **plugins)


def _make_translator(arguments: argparse.Namespace):
    from ..decoding.glossary import read_glossary
    from ..decoding.translator import Translator

    glossary = None if arguments.glossary is None else read_glossary(arguments.glossary)
    model, tokenizer = load_for_decoding(arguments)
    options = generate_options(arguments, model)
    seed = arguments.seed
    if seed is None and (arguments.sample or model.generation_config.do_sample):
        seed = random.SystemRandom().randrange(2**32)
    # What looks at a line and its translation afterwards needs positions for all of it.
    is_whole = model.config.position_encoding == "learned" and (arguments.alignments or arguments.confidence)
    return Translator(
        model,
        tokenizer,
        arguments.tokens_per_batch,
        max_source_tokens=arguments.max_source_tokens,
        split_long=arguments.long_lines == "split" and not is_whole,
        scores=arguments.scores or arguments.nbest is not None,
        glossary=glossary,
        seed=seed,
        source_language=arguments.source_language or _source_language(arguments.model),
        **options,
    )


def _aligner(arguments: argparse.Namespace, translator):
    if not arguments.alignments:
        return None
    from ..attention.alignments import align, pharaoh

    def aligned(sources, targets):
        return [pharaoh(links) for links in align(translator.model, translator.tokenizer, sources, targets)]

    return aligned


def _confider(arguments: argparse.Namespace, translator):
    if not arguments.confidence:
        return None
    from ..decoding.confidence import word_confidences

    return partial(word_confidences, translator.model, translator.tokenizer)
