"""The command that translates: `vaswani translate`."""

import contextlib
import functools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..data.text_files import TextScan, has_undecoded
from ..decoding.output import ResumableOutput
from ..documents.formats import FORMATS
from ..errors import UserError
from .files import (
    anywhere,
    check_files,
    check_work,
    closing_output,
    has_workers,
    input_lines,
    is_file,
    is_in_parts,
    is_interactive,
    open_output,
    read_first,
    scan_files,
    settings_of,
    write_parts,
    write_result,
)
from .options import (
    Engine,
    Path_,
    Sampling,
    Search,
    Together,
    Window,
    exclude,
    generate_options,
    group,
    load_for_decoding,
    require,
    within,
)


@group("files")
@dataclass
class Files:
    """What is read and written."""

    input: Path_ | None = None
    """translate the lines of this file (.gz works)"""
    output: Path_ | None = None
    """write to this file instead of standard output"""
    resume: bool = False
    """continue an --output that was interrupted"""
    workers: int = 1
    """processes that translate parts of --input, each on its own GPU if any"""
    engine: Engine = "local"
    """where workers run: on this machine, or on a cluster by Ray"""
    prefix: Path_ | None = None
    """how the translation of each line of --input has to begin"""
    glossary: Path_ | None = None
    """terms that translations must have: lines of SOURCE TAB TARGET, or of a word that is not translated"""
    window: Window = None
    """lines that are sorted by length and written together (default: 2000)"""


@group("what is written")
@dataclass
class Written:
    """What is written of each line."""

    nbest: Annotated[int | None, within(1, 10_000)] = None
    """N translations of each line: line number, score, text"""
    scores: bool = False
    """the score before each translation"""
    confidence: bool = False
    """how sure the model is, as the mean probability of the words"""
    alignments: Annotated[bool, Parameter(alias="--return-alignments")] = False
    """word alignments after each, as 0-0 1-2"""
    format: Literal[("text", "json", *FORMATS)] = "text"
    """of lines, fields separated by tabs or JSON lines; the others: a whole document, whose markup stays"""
    source_language: str | None = None
    """code of a document's language, for the splitting of sentences (default: as the model was trained, or en)"""

    @property
    def lines_per_record(self) -> int:
        """Lines of output for a line of input."""
        return 1 if self.format == "json" else self.nbest or 1


@group("long lines")
@dataclass
class LongLines:
    """What is done with lines that are too long."""

    max_source_tokens: Annotated[int | None, within(2, 10**6)] = None
    """a line of more tokens is too long"""
    long_lines: Literal["split", "refuse"] = "split"
    """translate a line that is too long in parts, or stop there"""


@Parameter(name="*")
@dataclass
class Options:
    """All options; a worker makes the same translator of them."""

    files: Files = field(default_factory=Files)
    written: Written = field(default_factory=Written)
    long: LongLines = field(default_factory=LongLines)
    search: Search = field(default_factory=Search)
    sampling: Sampling = field(default_factory=Sampling)
    computing: Together = field(default_factory=Together)


def translate(model: Path_, /, *sentences: str, options: Options = Options()) -> None:  # noqa: B008 (of cyclopts)
    """Translate sentences, a file or standard input.

    Args:
        model: model folder, or one exported to CTranslate2
        sentences: sentences (default: the lines of standard input)
    """
    _check(sentences, options)
    files = options.files
    if options.written.format in FORMATS:
        _translate_document(model, options)
    elif is_in_parts(files.output, files.resume, files.workers, files.engine):
        _translate_in_parts(model, options)
    else:
        _translate_lines(model, sentences, options)


def _check(sentences: tuple[str, ...], options: Options) -> None:
    """Refuse what is wrong whatever the model is."""
    files, written, sampling = options.files, options.written, options.sampling
    ensemble = options.computing.ensemble
    if any(map(has_undecoded, sentences)):
        raise UserError("a sentence is not valid UTF-8: convert it first")
    if sentences:
        exclude("SENTENCE", {"input": files.input})
    if files.glossary is not None:
        exclude("--glossary", {"prefix": files.prefix, "ensemble": ensemble, "sample": sampling.sample})
    drawing = {name: value for name, value in vars(sampling).items() if name != "sample"}
    require("--sample", sampling.sample, drawing)
    require("--ensemble", bool(ensemble), {"combine": options.computing.combine})
    require("--input", files.input is not None, {"prefix": files.prefix})
    require("a document's --format", written.format in FORMATS, {"source_language": written.source_language})
    if written.format in FORMATS:
        lines = {"resume": files.resume, "prefix": files.prefix, "nbest": written.nbest, "scores": written.scores}
        lines |= {"confidence": written.confidence, "alignments": written.alignments}
        lines |= {
            "long_lines": options.long.long_lines != "split",
            "workers": has_workers(files.workers, files.engine),
        }
        exclude(f"--format {written.format}", lines | {"SENTENCE": sentences})
    read = {"input": files.input, "prefix": files.prefix, "glossary": files.glossary}
    check_work(read, files.output, files.resume, files.workers, files.engine)
    check_files(read, {"output": files.output})


def _translate_lines(model: str, sentences: tuple[str, ...], options: Options) -> None:
    """Translate sentences, a file or standard input in this process."""
    from ..decoding.file_translator import with_prefixes

    files = options.files
    scans = scan_files({"input": files.input, "prefix": files.prefix})
    translator = _file_translator(model, options)
    if interactive := is_interactive(sentences, files.input, translator.doing):
        translator.window = 1
    source, prefix = scans.get("--input"), scans.get("--prefix")
    lines: Iterator[Any] = iter(sentences) if sentences else input_lines(files.input, source)
    if files.prefix is not None:
        lines = with_prefixes(lines, Path(files.prefix), prefix and prefix.stamp)
    if not is_file(files.input) and not interactive:  # a file has been checked as a whole
        lines = read_first(lines)
    with _opened(model, options, scans, translator) as output:
        total = source.lines if source else len(sentences) or None
        ahead = not (interactive or sentences)
        translator.run(lines, output, output.done, total, ahead, progress=not interactive and total != 1)
        output.finish()


def _translate_in_parts(model: str, options: Options) -> None:
    """Have a file translated by workers."""
    files = options.files
    paths = {name: path for name in ("input", "prefix") if (path := getattr(files, name)) is not None}
    scans = scan_files(paths)
    # Loaded here too, wherever the workers are: what is wrong with model or options is known at once.
    local = replace(options, computing=replace(options.computing, device="cpu", precision=None))
    translator = _file_translator(model, local)
    translator.translator.model = None
    files.resume = True  # nothing that is there is replaced
    with _opened(model, options, scans, translator) as output:
        sampling = replace(options.sampling, seed=translator.translator.seed)
        computing = replace(options.computing, ensemble=list(map(anywhere, options.computing.ensemble)))
        elsewhere = replace(files, glossary=files.glossary and anywhere(files.glossary))
        shared = replace(options, files=elsewhere, sampling=sampling, computing=computing)
        make = functools.partial(_file_translator, anywhere(model), shared)
        window, lines = translator.window, options.written.lines_per_record
        write_parts(output, translator.doing, make, paths, scans, window, files.workers, files.engine, lines)
        output.finish()


@contextlib.contextmanager
def _opened(model: str, options: Options, scans: dict[str, TextScan], files: Any) -> Iterator[Any]:
    """Open the output; where one is resumed that has drawn a seed, the translator goes on with that."""
    from ..files import file_sha256

    seed, glossary = files.translator.seed, options.files.glossary
    drawn = {"--seed": seed} if options.sampling.seed is None and seed is not None else {}
    values = settings_of(
        model, options.computing, options.written, options.search, options.sampling, window=files.window,
        max_source_tokens=options.long.max_source_tokens,
    )  # fmt: skip
    if glossary is not None and is_file(glossary):  # a pipe is read once, and its output cannot be resumed
        values["--glossary"] = file_sha256(glossary)
    others = [name for name in (options.files.prefix, glossary) if name is not None]
    resumable = scans if "--input" in scans and all(map(is_file, others)) else {}
    lines = options.written.lines_per_record
    output = open_output(options.files.output, options.files.resume, resumable, values, lines, drawn)
    with closing_output(output):
        if isinstance(output, ResumableOutput):
            files.translator.seed = output.settings.get("--seed")
        yield output


def _translate_document(model: str, options: Options) -> None:
    """Translate a document; the model is loaded when it is known to be one."""
    from tqdm.auto import tqdm

    from ..decoding.streaming import WINDOW_LINES
    from ..documents.formats import aligner, translate_document

    files, written = options.files, options.written
    if written.format == "docx" and files.output is None and sys.stdout.isatty():
        raise UserError("a Word file is not text that a terminal shows: give --output FILE")
    translator = functools.cache(lambda: _make_translator(model, options))

    def translate(sentences: list[str]) -> list[str]:
        with tqdm(total=len(sentences), desc="translating", unit=" sentences", file=sys.stderr, smoothing=0) as bar:
            return list(translator().translate(sentences, files.window or WINDOW_LINES, bar))

    def align(sources: list[str], targets: list[str]) -> list:
        return aligner(translator().model, translator().tokenizer)(sources, targets)

    data = Path(files.input).read_bytes() if files.input is not None else sys.stdin.buffer.read()
    language = written.source_language or _source_language(model)
    result = translate_document(data, written.format, translate, align, language)
    if files.output is not None:
        write_result(files.output, result)
    else:
        sys.stdout.buffer.write(result)
        sys.stdout.buffer.flush()


def _source_language(folder: str) -> str:
    """Return the language of a model's sources, as its recipe or the model that was imported names it; else English."""
    from ..hub.card_facts import known_languages

    return [*known_languages(folder), "en"][0]


def _file_translator(model: str, options: Options):
    """Return the model of the options and all that is done with it."""
    from ..decoding.file_translator import FileTranslator, Layout
    from ..decoding.streaming import WINDOW_LINES

    translator, written = _make_translator(model, options), options.written
    layout = Layout(written.nbest is not None, written.scores, written.format == "json")
    extras = {"words": _confider(translator)} if written.confidence else {}
    extras |= {"alignment": _aligner(translator)} if written.alignments else {}
    return FileTranslator(translator, layout, options.files.window or WINDOW_LINES, **extras)


def _make_translator(folder: str, options: Options):
    from ..decoding.glossary import read_glossary
    from ..decoding.translator import Translator

    files, written, long = options.files, options.written, options.long
    needs = {"sample": options.sampling.sample, "alignments": written.alignments}
    needs |= {"glossary": files.glossary, "prefix": files.prefix}
    glossary = None if files.glossary is None else read_glossary(files.glossary)
    model, tokenizer = load_for_decoding(folder, options.computing, needs)
    drawing, seed = generate_options(model, options.search, options.sampling, written.nbest), options.sampling.seed
    if seed is None and (options.sampling.sample or model.generation_config.do_sample):
        seed = random.SystemRandom().randrange(2**32)
    # What looks at a line and its translation afterwards needs positions for all of it.
    is_whole = model.config.position_encoding == "learned" and (written.alignments or written.confidence)
    return Translator(
        model,
        tokenizer,
        options.computing.tokens_per_batch,
        max_source_tokens=long.max_source_tokens,
        split_long=long.long_lines == "split" and not is_whole,
        scores=written.scores or written.nbest is not None,
        glossary=glossary,
        seed=seed,
        source_language=written.source_language or _source_language(folder),
        **drawing,
    )


def _aligner(translator):
    from ..attention.alignments import align, pharaoh

    def aligned(sources, targets):
        return [pharaoh(links) for links in align(translator.model, translator.tokenizer, sources, targets)]

    return aligned


def _confider(translator):
    from ..decoding.confidence import word_confidences

    return functools.partial(word_confidences, translator.model, translator.tokenizer)
