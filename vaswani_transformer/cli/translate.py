"""The command that translates: `vaswani translate`."""

import contextlib
import functools
import hashlib
import os
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..catalogues.formats import ENDINGS as CATALOGUE_ENDINGS
from ..catalogues.formats import FORMATS as CATALOGUES
from ..data.text_files import has_undecoded
from ..documents.formats import ENDINGS, FORMATS, OFFICE, aligner, translate_document
from ..errors import UserError, reading
from ..files import file_sha256
from ..model.language_codes_vaswani import LanguageCodes
from . import options
from .files import Work, check_work, do_lines, open_output, scan_files, settings_of, timed, write_result
from .options import SEVERAL, AnyModel, Path_, Sampling, Search, Together, group, within


@group("input")
@dataclass
class Files:
    """Options of the input."""

    input: Path_ | None = None
    """translate the lines of this file (.gz works)"""
    prefix: Path_ | None = None
    """how the translation of each line of --input has to begin"""
    glossary: Path_ | None = None
    """terms that translations must have: lines of SOURCE TAB TARGET, or of a word that is not translated"""
    memory: Annotated[tuple[Path_, ...], SEVERAL] = ()
    """earlier translations (TMX, TSV, ...), used for the same source; near ones shown to a model for --fuzzy-matches"""
    max_source_tokens: Annotated[int | None, within(2, 10**6)] = None
    """a line of more tokens is too long"""
    long_lines: Literal["split", "refuse"] = "split"
    """translate a line that is too long in parts, or stop with an error"""
    source_catalogue: Path_ | None = None
    """the source language's catalogue, for formats that have one language in a file; its entries are added"""


@group("what is written")
@dataclass
class Written:
    """Options of the output of each line."""

    nbest: Annotated[int | None, within(1, 10_000)] = None
    """N translations of each line: line number, score, text"""
    scores: bool = False
    """the score before each translation"""
    confidence: bool = False
    """how sure the model is, as the mean probability of the words"""
    alignments: Annotated[bool, Parameter(alias="--return-alignments")] = False
    """word alignments after each, as 0-0 1-2"""
    format: Literal[("text", "json", *FORMATS, *CATALOGUES)] | None = None
    """of lines, fields separated by tabs or JSON lines; the others: a whole document, whose markup stays, or a
    catalogue of messages, in which what is untranslated or fuzzy is filled (default: by the --input's name, else text)
    """
    report: Path_ | None = None
    """write a page about the entries of a catalogue to this file"""
    consistent_terms: bool = False
    """translate terms of a catalogue as nine tenths of its translated entries, and near ones of --memory, have them"""
    source_language: str | None = None
    """code of the language, for the splitting of sentences (default: as the model was trained, or en), or auto"""
    target_language: str | None = None
    """language whose code (fra: `>>fra<<`) comes before each sentence, of a model with several; also a tag: `<2fr>`"""


@Parameter(name="*")
@dataclass
class Request:
    """All options; a worker makes the same translator of them."""

    files: Files = field(default_factory=Files)
    work: Work = field(default_factory=Work)
    written: Written = field(default_factory=Written)
    search: Search = field(default_factory=Search)
    sampling: Sampling = field(default_factory=Sampling)
    computing: Together = field(default_factory=Together)


def translate(model: AnyModel, /, *sentences: str, request: Request = Request()) -> None:  # noqa: B008 (of cyclopts)
    """Translate sentences, a file or standard input.

    Args:
        sentences: sentences (default: the lines of standard input)
    """
    files, work, written, sampling = request.files, request.work, request.written, request.sampling
    chosen = written.format and f"--format {written.format}"
    if any(map(has_undecoded, sentences)):
        raise UserError("a sentence is not valid UTF-8: convert it first")
    if written.format is None:
        name, formats = (files.input or "").lower(), {**ENDINGS, **CATALOGUE_ENDINGS, ".txt": "text", ".ts": "text"}
        written = replace(written, format=next((formats[end] for end in formats if name.endswith(end)), "text"))
        has_pairs = (inner := name.removesuffix(".gz")).endswith((".tsv", ".csv", ".tmx", ".jsonl", ".parquet"))
        if has_pairs or (inner != name and inner.endswith(tuple(end for end in formats if formats[end] != "text"))):
            problem = "holds pairs: give lines" if has_pairs else "is packed: unpack it"
            raise UserError(f"{files.input} {problem}, or --format text to take its lines as they are")
        request = replace(request, written=written)
    options.exclude("SENTENCE", sentences, {"input": files.input, "prefix": files.prefix})
    if len(sentences) == 1 and os.path.isfile(sentences[0]):  # noqa: PTH113 (Path's fails where it is long)
        print(f"this is a file's name: --input {shlex.quote(sentences[0])} translates the file", file=sys.stderr)
    without = {"prefix": files.prefix, "ensemble": request.computing.ensemble, "sample": sampling.sample}
    options.exclude("--glossary", files.glossary, without)
    options.exclude("--consistent-terms", written.consistent_terms, without)
    options.require("--sample", sampling.sample, vars(sampling))
    of_lines = {name: getattr(written, name) for name in ("nbest", "scores", "confidence", "alignments")}
    of_lines |= {"resume": work.resume, "workers": work.has_workers, "prefix": files.prefix, "SENTENCE": sentences}
    is_catalogue = written.format in CATALOGUES
    chosen = chosen or "the format that --input's name tells (--format text takes lines)"
    options.exclude(chosen, is_catalogue or written.format in FORMATS, of_lines)
    of_catalogues = {"source_catalogue": files.source_catalogue, "report": written.report}
    of_catalogues |= {"consistent_terms": written.consistent_terms}
    options.require("--format po or another catalogue's", is_catalogue, of_catalogues)
    has_both = f"{chosen}, whose files have both languages,"
    options.exclude(has_both, written.format in ("po", "xliff", "ts"), {"source_catalogue": files.source_catalogue})
    read = {"prefix": files.prefix, "glossary": files.glossary, "source_catalogue": files.source_catalogue}
    read |= {f"memory {number}": path for number, path in enumerate(files.memory, 1)}
    check_work(read if is_catalogue else {"input": files.input, **read}, work, report=written.report)
    if is_catalogue:
        from .catalogues import fill_catalogue

        fill_catalogue(model, request, load(model, request).translator, _languages(model, request))
    elif written.format in FORMATS:
        _translate_document(model, request)
    else:
        _translate_lines(model, sentences, request)


def _translate_lines(model: str, sentences: tuple[str, ...], request: Request) -> None:
    """Translate sentences, a file or standard input, in this process or by workers."""
    files, work = request.files, request.work
    read = {"input": files.input, "prefix": files.prefix}
    scans = scan_files(read, files.glossary, *files.memory)
    # Loaded here too where workers are elsewhere: what is wrong with model or options is known at once.
    computing = options.for_checks(request.computing) if work.has_workers else request.computing
    worker = load(model, replace(request, computing=computing))

    def settings() -> dict[str, Any]:
        glossary = files.glossary and file_sha256(files.glossary)
        memory = worker.translator.memory and hashlib.sha256(worker.translator.memory.text).hexdigest()
        groups = request.computing, request.written, request.search, request.sampling
        limits = {"window": work.window, "max_source_tokens": files.max_source_tokens}
        return settings_of(model, *groups, **limits, glossary=glossary, memory=memory)

    lines_per_record = 1 if request.written.format == "json" else request.written.nbest or 1
    with open_output(work, scans, settings, lines_per_record) as output:
        if work.has_workers:
            worker.translator.model = None  # each worker loads its own
        do_lines(worker, output, work, read, scans, sentences, functools.partial(load, model, request))


def _translate_document(model: str, request: Request) -> None:
    """Translate a document; the model is loaded when it is known to be one."""
    files, written, output = request.files, request.written, request.work.output
    if written.format in OFFICE and output is None and sys.stdout.isatty():
        raise UserError("an office file cannot be shown in a terminal: give --output FILE")
    translator = functools.cache(lambda: load(model, request).translator)

    def translate(sentences: list[str]) -> list[str]:
        decode = functools.partial(translator().hypotheses, sentences, request.work.window)
        best = [ranked[0] for ranked in timed("translating", decode, len(sentences))[0]]
        if number := sum(each.repeats for each in best):
            print(f"cut where the model repeated itself without end: {number} sentences", file=sys.stderr)
        return [each.text for each in best]

    def align(sources: list[str], targets: list[str]) -> list:
        return aligner(translator().model, translator().tokenizer, translator().codes.coded)(sources, targets)

    with reading(files.input or "standard input"):
        data = Path(files.input).read_bytes() if files.input is not None else sys.stdin.buffer.read()
    write_result(output, translate_document(data, written.format, translate, align, _languages(model, request)[0]))


def _languages(folder: str, request: Request) -> list[str]:
    """Return a model's languages, that of its sources first: as given, or as recipe or import has them, or English."""
    from ..hub.card_facts import known_languages

    known, target = [*known_languages(folder)] or ["en"], request.written.target_language
    if target:
        name = target.strip("<2>")
        with contextlib.suppress(ImportError):  # of extras
            from babel.core import get_global

            short = get_global("language_aliases").get(name.partition("_")[0], name)
            name = short if len(short) == 2 < len(name) else name
        known[1:] = known[1:] if len(known) == 2 < len(name) else [name]  # perhaps an unknown code of it: >>pob<<
    return [request.written.source_language or known[0] or "en", *known[1:]]


def load(folder: str, request: Request):
    """Return the model of the options and all that is done with it, a `FileTranslator`; workers call this too."""
    from ..data.memory import read_memory
    from ..decoding.file_translator import FileTranslator, record
    from ..decoding.glossary import read_glossary
    from ..decoding.scoring import word_confidences
    from ..decoding.translator import Translator
    from ..hub.card_facts import known_languages, longest_source

    files, written = request.files, request.written
    needs = {name: getattr(written, name) for name in ("alignments", "consistent_terms")}
    needs |= {"sample": request.sampling.sample}
    glossary = None if files.glossary is None else read_glossary(files.glossary)
    memory = read_memory(files.memory, _languages(folder, request)) if files.memory else None
    model, tokenizer = request.computing.load(folder, **needs, glossary=files.glossary, prefix=files.prefix)
    settings = options.generate_options(model, request.search, request.sampling, written.nbest)
    of_others = written.format in CATALOGUES or memory  # plural forms and segments, which it names
    is_tag = not (written.target_language or "-")[0].isalpha()  # such as <2fr>, which is no name of a language
    has_codes = not of_others or LanguageCodes(tokenizer).known or is_tag
    # What looks at a line and its translation afterwards needs positions for all of it.
    is_whole = model.config.position_encoding == "learned" and (written.alignments or written.confidence)
    is_split = files.long_lines == "split" and not is_whole
    learned = (longest_source(folder) or 500) if is_split and not files.prefix else None
    translator = Translator(
        model,
        tokenizer,
        request.computing.tokens_per_batch,
        max_source_tokens=files.max_source_tokens or learned,
        split_long=is_split,
        scores=written.scores or written.nbest is not None,
        glossary=glossary,
        memory=memory,
        seed=(request.sampling.seed or 0) if settings.get("do_sample", model.generation_config.do_sample) else None,
        source_language=_languages(folder, request)[0],
        target_language=written.target_language if has_codes else None,
        **settings,
    )

    translator.is_repaired = bool(written.source_language) or any(known_languages(folder))
    options.remark_codes(translator.codes, written.target_language)
    most = {"tokens_per_batch": request.computing.tokens_per_batch}
    extras = {"words": functools.partial(word_confidences, model, tokenizer, **most)} if written.confidence else {}
    if written.alignments:
        from ..attention.alignments import align, pharaoh

        extras["alignment"] = lambda *texts: map(pharaoh, align(model, tokenizer, *texts))
    fields = {"numbered": written.nbest is not None, "scores": written.scores, "as_json": written.format == "json"}
    return FileTranslator(translator, functools.partial(record, **fields), request.work.window, **extras)
