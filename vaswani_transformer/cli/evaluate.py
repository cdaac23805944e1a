"""The commands that compare a model with given translations: `vaswani evaluate` and `score`."""

import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal
from unicodedata import normalize

from cyclopts import Parameter

from ..errors import UserError
from ..model.language_codes_vaswani import LanguageCodes
from ..recipes.recipe import BLEU_TOKENIZERS
from . import files, options
from .files import Work
from .options import AnyModel, Computing, Path_, Search, Together, setting


def evaluate(
    model: AnyModel,
    /,
    *others: Annotated[Path_, Parameter(help="further models, or files of translations, to compare with the first")],
    source: Annotated[Path_, Parameter(allow_repeating=False)],
    reference: Annotated[Path_, Parameter(allow_repeating=False)],
    source_column: str = "source",
    target_column: str = "target",
    output: Path_ | None = None,
    json: Path_ | None = None,
    test_set: str | None = None,
    bleu_tokenizer: Literal[BLEU_TOKENIZERS] | None = None,
    paper_bleu: str | None = None,
    checker: str | None = None,
    stress: bool = False,
    target_language: str | None = None,
    search: Search = Search(),  # noqa: B008 (of cyclopts)
    computing: Computing = Computing(),  # noqa: B008
) -> None:
    """Evaluate a model on a test set by BLEU, chrF and perplexity, or compare several, or files of translations.

    Args:
        source: sources, one a line (.gz works)
        reference: reference translations, line n for line n of --source
        source_column: column, or language of a translation memory (.tmx), where --source and --reference are one file
        target_column: the same of the references
        output: also write the translations here
        json: also write the scores here, and of a model by itself how they were obtained
        test_set: its name in the --json file (default: from the file names)
        bleu_tokenizer: sacreBLEU's (default: by the target language, or the script of the references)
        paper_bleu: also BLEU as in the paper: Moses' tokens of this language (de, fr, ...), German compounds split
        checker: MODULE:FUNCTION, Python of yours, called with each source, output and reference; what it returns, a
            number, a boolean or a dict of them, is averaged
        stress: also translate the test set with capitals, typing errors, emoji and the like, and print what that costs
        target_language: as for translate
    """
    from ..data.augmentation import CHANGES
    from ..data.pair_readers import read_pairs
    from ..data.parallel_text import FORMATS, check_lines, pair_source, suffix
    from ..decoding.scoring import score_tokens
    from ..decoding.stress import stress as stress_rows
    from ..decoding.translator import Translator
    from ..evaluation import metrics
    from ..hub.card_facts import known_languages, longest_source

    files.check_files({"source": source, "reference": reference}, {"output": output, "json": json})
    for name in (model, *others):
        files.check_files({"model": name}, {"json": json})
    one_only = {"output": output, "test_set": test_set, "paper_bleu": paper_bleu, "checker": checker, "stress": stress}
    is_compared = bool(others) or (Path(model).exists() and not Path(model).is_dir())
    options.exclude("several models, or a file of translations,", is_compared, one_only)
    if paper_bleu:
        metrics.moses_tokenizer(paper_bleu)  # before the work, if it is not installed
    if checker:
        metrics.load_checker(checker)
    columns = {"source_column": source_column, "target_column": target_column}
    named = {name: value for name, value in columns.items() if f"{value}_column" != name}
    if suffix(source) in FORMATS and files.are_same_file(Path(source), Path(reference)):
        pairs = list(pair_source(data=source, **columns).stream())
    else:
        check_lines("the same file as --source and --reference", source, reference)
        options.require("one table as --source and --reference", False, named)
        pairs = list(read_pairs("text", [(source, reference)]))
    numbers = [number for number, pair in enumerate(pairs, 1) if all(side.strip() for side in pair)]
    filled = [tuple(normalize("NFC", side.strip()) for side in pairs[number - 1]) for number in numbers]  # as models do
    if not filled:
        raise UserError(f"{source} and {reference} hold blank lines only: nothing to evaluate")
    sources = [source for source, _ in pairs]
    references = [normalize("NFC", reference) for _, reference in pairs]
    known = known_languages(model)
    language = target_language or (known[1] if len(known) == 2 else None)
    bleu = metrics.bleu_metric(references, bleu_tokenizer, language)

    def load(name: str) -> Translator:
        loaded, tokenizer = computing.load(name)
        has_codes = not (others and (target_language or "-")[0].isalpha()) or LanguageCodes(tokenizer).known
        asked = options.generate_options(loaded, search) | {"seed": 0}
        asked["target_language"] = target_language if has_codes else None  # of several models some have no codes
        asked |= {"split_long": True, "max_source_tokens": longest_source(name) or 500}  # as `vaswani translate`
        asked["source_language"] = next(iter(known_languages(name)), None) or "en"
        translator = Translator(loaded, tokenizer, computing.tokens_per_batch, **asked)
        translator.is_repaired = any(known_languages(name))
        options.remark_codes(translator.codes, target_language)
        return translator

    if is_compared:
        return files.write_json(json, _compare([model, *others], sources, references, bleu, load))
    translator = load(model)
    settings = vars(search) | {"precision": computing.precision, "paper_bleu": paper_bleu, "stress": stress or None}
    settings |= {"bleu_tokenizer": bleu_tokenizer, "checker": checker, "target_language": target_language} | named
    if computing.tokens_per_batch != Computing.tokens_per_batch:
        settings["tokens_per_batch"] = computing.tokens_per_batch
    # What was read is hashed before anything is written.
    record = files.record_of(model, source, reference, translator, settings, test_set) if json else {}
    coded = [translator.codes.coded(source) for source, _ in filled]
    targets = [target for _, target in filled]
    scored = score_tokens(translator.model, translator.tokenizer, coded, targets, computing.tokens_per_batch, numbers)
    losses, counts = zip(*((-score.log_probability, len(score.tokens)) for score in scored), strict=True)
    ranked, seconds = files.timed("translating", partial(translator.hypotheses, sources), len(sources))
    outputs = [hypotheses[0] for hypotheses in ranked]
    translations = [normalize("NFC", each.text) for each in outputs]
    if output:  # before the scores: a --checker may fail
        files.write_result(output, "".join(line + "\n" for line in translations))
    scores = metrics.score_translations(translations, references, bleu)
    scores["perplexity"] = metrics.perplexity(losses, counts)
    if paper_bleu:
        scores["paper_bleu"] = metrics.paper_bleu(translations, references, paper_bleu)
    if checker:
        scores["checked"] = metrics.check_outputs(checker, zip(sources, translations, references, strict=True))
    if stress:
        changed = partial(stress_rows, translator, filled, [outputs[number - 1] for number in numbers])
        scores["stress"] = dict(files.timed("changed", changed, len(filled) * len(CHANGES))[0])
    files.write_json(json, scores | {"sentences": len(sources), "seconds": round(seconds, 1)} | record)
    print(f"BLEU {scores['bleu']:.2f}  ({scores['bleu_signature']})")
    if paper_bleu:
        print(f"BLEU {scores['paper_bleu']:.2f}  (tokenised, as in the paper)")
    print(f"chrF {scores['chrf']:.2f}  ({scores['chrf_signature']})")
    if stress:
        import pandas

        rows = pandas.DataFrame(scores["stress"].values(), scores["stress"]).dropna(axis=1, how="all")
        print(rows.to_string(float_format="%.1f", na_rep=""))
    print(f"perplexity {scores['perplexity']:.3f} a target token, {scores['exact_match']:.1f}% of sentences exact")
    for name, value in scores.get("checked", {}).items():
        print(f"{name} {value:.4f}")
    print(f"{len(sources):,} sentences translated in {seconds:.1f} s")


def _compare(systems: list[str], sources: list[str], references: list[str], bleu: Any, load: Any) -> dict:
    """Compare models and files of translations with the first of them; prints and returns the scores."""
    from ..data.parallel_text import check_lines
    from ..data.text_files import read_lines
    from ..evaluation.metrics import compare_systems

    check_lines("translations, one a line", *(name for name in systems if not Path(name).is_dir()))
    texts = {}
    for name in sorted(systems, key=lambda name: Path(name).is_dir()):  # models take longer: files, and mistakes, first
        lines = Path(name).exists() and not Path(name).is_dir() and read_lines(Path(name))  # a file or a pipe
        lines = lines or files.timed(name, partial(load(name).translate, sources), len(sources))[0]
        texts[name] = [normalize("NFC", line) for line in lines]
        if len(texts[name]) != len(references):
            raise UserError(f"{name} has {len(texts[name]):,} lines for {len(references):,} references: give as many")
    scores = compare_systems([(name, texts[name]) for name in systems], references, bleu)
    for row, (metric, label) in product(scores["systems"], (("bleu", "BLEU"), ("chrf", "chrF"))):
        low, high = row[f"{metric}_interval"]
        print(f"{row['name']}: {label} {row[metric]:.2f}, 95% from {max(0, low):.2f} to {min(100, high):.2f}")
    print(*scores["verdicts"], scores["bleu_signature"], scores["chrf_signature"], sep="\n")
    return scores | {"sentences": len(sources)}


def _load_scorer(model: str, computing: Together, target_language: str | None, length_penalty: float | None, *how: Any):
    """Return the model and how its scores are written, a `FileScorer`; workers call this too."""
    from ..decoding.scoring import FileScorer, length_rule

    loaded, tokenizer = computing.load(model)
    rule = length_rule(loaded.generation_config, {"length_penalty": length_penalty})
    scorer = FileScorer(loaded, tokenizer, rule, *how, computing.tokens_per_batch, target_language)
    options.remark_codes(scorer.codes, target_language)
    return scorer


def score(
    model: AnyModel,
    /,
    *,
    source: Path_,
    target: Path_,
    tokens: bool = False,
    format: Literal["text", "json"] = "text",
    json: Path_ | None = None,
    length_penalty: Annotated[float | None, setting("length_penalty")] = None,
    target_language: str | None = None,
    work: Work = Work(),  # noqa: B008 (of cyclopts)
    computing: Together = Together(),  # noqa: B008
) -> None:
    """Score given translations by their log-probabilities, and compute their perplexity.

    Args:
        source: sources, one a line (.gz works)
        target: their translations, line n for line n of --source
        tokens: also the log-probability of each token
        format: fields separated by tabs, or JSON lines
        json: also write perplexity and sums of the whole file here
        length_penalty: alpha of the length normalisation (default: as the model was saved)
        target_language: as for translate
    """
    from ..data.parallel_text import check_lines
    from ..evaluation.metrics import perplexity

    read = {"source": source, "target": target}
    files.check_work(read, work, json=json)
    check_lines("two text files", source, target)
    scans = files.scan_files(read)
    written = target_language, length_penalty, format == "json", tokens, work.window
    # Loaded here too where workers are elsewhere: what is wrong with model or options is known at once.
    here = options.for_checks(computing) if work.has_workers else computing
    scorer = _load_scorer(model, here, *written)
    settings = {"length_penalty": length_penalty, "format": format, "tokens": tokens, "window": work.window}
    settings["target_language"] = target_language
    with files.open_output(work, scans, partial(files.settings_of, model, computing, **settings)) as output:
        if work.has_workers:
            scorer.model = None  # each worker loads its own
        files.do_lines(scorer, output, work, read, scans, make=partial(_load_scorer, model, computing, *written))
        sums = scorer.sums
        if work.has_workers or output.done:  # others have written some of it
            sums.update(dict.fromkeys(sums, 0))
            with Path(work.output).open(encoding="utf-8", newline="\n") as lines:
                scorer.add(lines)
    if not sums["pairs"]:
        raise UserError("all pairs have a blank side: there is nothing to score")
    sums = {"perplexity": perplexity([-sums["log_probability"]], [sums["tokens"]])} | sums
    whole = f"log-probability {sums['log_probability']:,.2f} of {sums['tokens']:,} tokens in {sums['pairs']:,} pairs"
    print(f"perplexity {sums['perplexity']:.3f} a target token: {whole}", file=sys.stderr)
    files.write_json(json, sums)
