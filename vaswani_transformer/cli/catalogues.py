"""Catalogues of messages that `vaswani translate --format po` fills, and the page about them."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tqdm.auto import tqdm

from ..catalogues.catalogue import Entry, Filling, with_codes
from ..catalogues.formats import open_catalogue, pairs_of
from ..decoding.glossary import Glossary, term_forms
from ..decoding.scoring import confidences
from ..decoding.translator import Translator
from ..documents.formats import aligner, translate_parts
from ..documents.messages import NO_WORDS, Messages
from ..documents.report import Row, catalogue_report
from ..documents.terms import find_terms
from ..errors import UserError
from .files import check_files, is_file, write_result

_ENTRIES = 500  # that are translated at once


def fill_catalogue(model: str, request, translator: Translator, languages: list[str]) -> None:
    """Fill a catalogue, which may be its own output, and say what was left out; Ctrl-C writes what is there by then."""
    files, written, window = request.files, request.written, request.work.window
    if not is_file(files.input):
        raise UserError(f"--format {written.format} reads a file twice: give --input FILE")
    check_files({"input": files.input}, {"report": written.report})
    language, target = languages[0], (written.target_language or "").strip("<2>") or [*languages, None][1]
    if target is None and files.source_catalogue:
        print("plural forms, if any, will be those of English: name the language by --target-language", file=sys.stderr)
    given = {"format": written.format, "source": files.source_catalogue, "language": target}
    states, translated, asked = Counter(), [], []
    for entry in open_catalogue(files.input, **given).entries():
        states[entry.state] += any(entry.sources)  # a header has none
        translated += pairs_of(entry) if written.consistent_terms and entry.state == "translated" else ()
        shown = [with_codes(source, entry.codes) for source in entry.sources]
        asked += shown if written.consistent_terms and entry.state != "translated" else ()
        if entry.state == "refused":
            print(f"{files.input}:{entry.line}: left as it is: {entry.notes}", file=sys.stderr)
    if written.consistent_terms:
        near = translator.near(asked) if translator.memory else ()
        own, terms = translator.glossary or Glossary({}), {}
        for term in find_terms([*(match[1:] for matches in near for match in matches), *translated]):
            with contextlib.suppress(UserError):  # the vocabulary cannot write it
                if not own.of(term.source) and term_forms(translator.tokenizer, term.targets):
                    terms[term.source], shown = term.targets, " | ".join(term.targets)
                    print(f"term: {term.source}: {shown} ({term.count} of {term.total})", file=sys.stderr)
        translator.glossary = Glossary(terms | own.terms)
    translator.is_exact = False  # messages look for these, by their contexts
    translator.generate_options["num_return_sequences"] = translator.setting("num_beams", 1)

    def translate(texts: list[str]) -> list[list[str]]:
        return [[each.text for each in ranked] for ranked in translator.hypotheses(texts, window)]

    def confidence(sources: list[str], targets: list[str]) -> list[float]:
        return confidences(translator.model, translator.tokenizer, list(map(translator.codes.coded, sources)), targets)

    align = aligner(translator.model, translator.tokenizer, translator.codes.coded)
    place = partial(translate_parts, translate=translator.translate, align=align, language=language)
    messages = Messages(translate, place, confidence, Path(model).resolve().name, translator.memory, target)
    rows, stopped, catalogue = [], False, open_catalogue(files.input, **given)

    def as_written(entry: Entry, filling: Filling) -> Filling:
        if filling.reason == NO_WORDS and entry.place is None:  # what shows the key alone without it
            filling = filling._replace(targets=tuple(text for text, _ in entry.texts()))
        is_lost = filling.targets and not catalogue.takes(entry, filling)  # which is logged
        return filling._replace(targets=(), reason="the file cannot hold it") if is_lost else filling

    def answer(entries: list) -> Iterator:
        nonlocal stopped
        messages.language = target or catalogue.language  # which XLIFF names at its beginning
        for start in range(0, len(entries), _ENTRIES):
            part, fillings = entries[start : start + _ENTRIES], []
            with contextlib.suppress(KeyboardInterrupt):
                fillings = [] if stopped else list(map(as_written, part, messages(part)))
            stopped = not fillings
            rows.extend(map(Row, part, fillings))
            yield from fillings or [None] * len(part)
            bar.update(len(fillings))

    with tqdm(total=states["untranslated"] + states["fuzzy"], desc="filling", unit=" entries", file=sys.stderr) as bar:
        write_result(request.work.output, catalogue.fill(answer))
    shown = [row for row in rows if row.filling.reason != NO_WORDS]
    refused = [row for row in shown if row.filling.reason]
    for row in refused:
        print(f"{files.input}:{row.entry.line}: not translated: {row.filling.reason}", file=sys.stderr)
    counts = len(shown) - len(refused), len(refused), len(rows) - len(shown), states["translated"]
    summary = "{:,} filled, {:,} refused, {:,} without words, {:,} translated before".format(*counts)
    print(f"entries: {summary}", file=sys.stderr)
    if written.report is not None:
        if translator.memory:
            near = translator.near([with_codes(row.entry.sources[0], row.entry.codes) for row in shown])
            shown = [row._replace(near=next(iter(match), None)) for row, match in zip(shown, near, strict=True)]
        write_result(written.report, catalogue_report(shown, Path(files.input).name, summary))
    if stopped:
        raise KeyboardInterrupt
