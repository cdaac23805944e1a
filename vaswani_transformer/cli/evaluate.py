"""The commands that compare a model with given translations: `vaswani evaluate` and `score`."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from ..errors import UserError
from .files import (
    anywhere,
    are_same_file,
    check_files,
    check_work,
    closing_output,
    is_in_parts,
    open_output,
    record_of,
    scan_files,
    settings_of,
    write_json,
    write_parts,
    write_result,
)
from .options import (
    Computing,
    Engine,
    Path_,
    Search,
    Together,
    Window,
    generate_options,
    load_for_decoding,
    require,
    setting,
)

_OF_PAIRS = (".tmx", ".tsv", ".csv", ".jsonl", ".json", ".parquet")


def _pairs(source: str, target: str) -> Iterator[tuple[str, str]]:
    from ..data.pair_readers import read_pairs

    return read_pairs("text", [(source, target)])


def _test_pairs(source: str, reference: str, columns: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of two text files, or of one file of pairs that is given as both."""
    from ..data.parallel_text import pair_source
    from ..data.text_files import home_path

    names = source, reference
    of_pairs = [name for name in names if home_path(name.removesuffix(".gz")).suffix in _OF_PAIRS]
    if not of_pairs:
        return _pairs(*names)
    if not are_same_file(*map(home_path, names)):
        raise UserError(f"{of_pairs[0]} is a file of pairs: give it as --source and as --reference")
    return pair_source(data=source, **columns).stream()


def evaluate(
    model: Path_,
    /,
    *,
    source: Path_,
    reference: Path_,
    source_column: str = "source",
    target_column: str = "target",
    output: Path_ | None = None,
    json: Path_ | None = None,
    test_set: str | None = None,
    paper_bleu: str | None = None,
    search: Search = Search(),  # noqa: B008 (of cyclopts)
    computing: Computing = Computing(),  # noqa: B008
) -> None:
    """BLEU, chrF and perplexity on a test set.

    Args:
        model: model folder, or one exported to CTranslate2
        source: sources, one a line (.gz works)
        reference: reference translations, line n for line n of --source
        source_column: column, or language of a translation memory (.tmx), where --source and --reference are one file
        target_column: the same of the references
        output: also write the translations here
        json: also write the scores here, and how they were obtained
        test_set: its name in the --json file (default: from the file names)
        paper_bleu: also BLEU as the paper computed it: Moses' tokens of this language (de, fr, ...), German compounds
            split
    """
    from tqdm.auto import tqdm

    from ..decoding.scoring import score_pairs
    from ..decoding.translator import Translator
    from ..evaluation.metrics import moses_tokenizer, perplexity, score_translations
    from ..evaluation.metrics import paper_bleu as score_as_the_paper

    check_files({"source": source, "reference": reference}, {"output": output, "json": json})
    if paper_bleu:
        moses_tokenizer(paper_bleu)  # before the work, if it is not installed
    columns = {"source_column": source_column, "target_column": target_column}
    pairs = list(_test_pairs(source, reference, columns))
    filled = [pair for pair in pairs if all(side.strip() for side in pair)]
    if not filled:
        raise UserError(f"{source} and {reference} hold blank lines only: nothing to evaluate")
    sources, references = map(list, zip(*pairs, strict=True))
    loaded, tokenizer = load_for_decoding(model, computing)
    translator = Translator(loaded, tokenizer, computing.tokens_per_batch, **generate_options(loaded, search))
    options = vars(search) | {"precision": computing.precision, "paper_bleu": paper_bleu}
    changed = {name: value for name, value in columns.items() if f"{value}_column" != name}
    if computing.tokens_per_batch != Computing.tokens_per_batch:
        changed["tokens_per_batch"] = computing.tokens_per_batch
    # What was read is hashed before anything is written.
    record = record_of(model, source, reference, translator, options | changed, test_set) if json else {}
    losses, counts = score_pairs(loaded, tokenizer, *map(list, zip(*filled, strict=True)))
    started = time.monotonic()
    with tqdm(total=len(sources), desc="translating", unit=" sentences", file=sys.stderr) as bar:
        translations = list(translator.translate(sources, progress=bar))
    seconds = time.monotonic() - started
    scores = score_translations(translations, references) | {"perplexity": perplexity(losses, counts)}
    if paper_bleu:
        scores["paper_bleu"] = score_as_the_paper(translations, references, paper_bleu)
    if output:
        write_result(output, "".join(line + "\n" for line in translations))
    write_json(json, scores | {"sentences": len(sources), "seconds": round(seconds, 1)} | record)
    print(f"BLEU {scores['bleu']:.2f}  ({scores['bleu_signature']})")
    if paper_bleu:
        print(f"BLEU {scores['paper_bleu']:.2f}  (tokenised, as in the paper)")
    print(f"chrF {scores['chrf']:.2f}  ({scores['chrf_signature']})")
    print(f"perplexity {scores['perplexity']:.3f} a target token, {scores['exact_match']:.1f}% of sentences exact")
    print(f"{len(sources):,} sentences translated in {seconds:.1f} s")


@dataclass
class _Scoring:
    """What makes a scorer, in this process or a worker."""

    model: str
    computing: Together
    length_penalty: float | None
    format: str
    tokens: bool
    window: int | None

    def load(self):
        """Return the scorer."""
        from ..decoding.scoring import FileScorer, length_rule
        from ..decoding.streaming import WINDOW_LINES

        model, tokenizer = load_for_decoding(self.model, self.computing)
        rule = length_rule(model.generation_config, {"length_penalty": self.length_penalty})
        layout = {"rule": rule, "json": self.format == "json", "tokens": self.tokens}
        size = {"window": self.window or WINDOW_LINES, "tokens_per_batch": self.computing.tokens_per_batch}
        return FileScorer(model, tokenizer, **layout, **size)


def score(
    model: Path_,
    /,
    *,
    source: Path_,
    target: Path_,
    output: Path_ | None = None,
    resume: bool = False,
    workers: int = 1,
    engine: Engine = "local",
    tokens: bool = False,
    format: Literal["text", "json"] = "text",
    json: Path_ | None = None,
    length_penalty: Annotated[float | None, setting("length_penalty")] = None,
    window: Window = None,
    computing: Together = Together(),  # noqa: B008 (of cyclopts)
) -> None:
    """Log-probabilities of given translations, and their perplexity.

    Args:
        model: model folder, or one exported to CTranslate2
        source: sources, one a line (.gz works)
        target: their translations, line n for line n of --source
        output: write to this file instead of standard output
        resume: continue an --output that was interrupted
        workers: processes that score parts of the files, each on its own GPU if any
        engine: where workers run: on this machine, or on a cluster by Ray
        tokens: also the log-probability of each token
        format: fields separated by tabs, or JSON lines
        json: also write perplexity and sums of the whole file here
        length_penalty: alpha of the length normalisation (default: as the model was saved)
        window: pairs that are sorted by length and written together (default: 2000)
    """
    from ..evaluation.metrics import perplexity

    files = {"source": source, "target": target}
    require("--ensemble", bool(computing.ensemble), {"combine": computing.combine})
    check_work(files, output, resume, workers, engine)
    check_files(files, {"output": output, "json": json})
    scoring = _Scoring(model, computing, length_penalty, format, tokens, window)
    settings = {"length_penalty": length_penalty, "format": format, "tokens": tokens}
    scans = scan_files(files)
    if in_parts := is_in_parts(output, resume, workers, engine):
        # Loaded here too, wherever the workers are: what is wrong with model or options is known at once.
        scorer = replace(scoring, computing=replace(computing, device="cpu", precision=None)).load()
        scorer.model = None
    else:
        scorer = scoring.load()
    settings = settings_of(model, computing, **settings, window=scorer.window) if scans and output else {}
    both = scans if len(scans) == len(files) else {}  # a pipe is read once
    with closing_output(open_output(output, resume or in_parts, both, settings)) as opened:
        if opened.done and not in_parts:
            _add_written(output, scorer)
        if in_parts:
            elsewhere = replace(computing, ensemble=list(map(anywhere, computing.ensemble)))
            make = replace(scoring, model=anywhere(model), computing=elsewhere).load
            write_parts(opened, scorer.doing, make, files, scans, scorer.window, workers, engine)
            _add_written(output, scorer)
        else:
            _score_files(files, scorer, opened, scans["--source"].lines if both else None)
        opened.finish()
    sums = scorer.sums
    if not sums["pairs"]:
        raise UserError("all pairs have a blank side: there is nothing to score")
    sums = {"perplexity": perplexity([-sums["log_probability"]], [sums["tokens"]])} | sums
    print(
        f"perplexity {sums['perplexity']:.3f} a target token: log-probability {sums['log_probability']:,.2f} of"
        f" {sums['tokens']:,} tokens in {sums['pairs']:,} pairs",
        file=sys.stderr,
    )
    write_json(json, sums)


def _score_files(files: dict[str, str], scorer, output, total: int | None) -> None:
    """Score in this process what the output does not hold yet."""
    from tqdm.auto import tqdm

    from ..decoding.streaming import in_windows

    windows = in_windows(_pairs(files["source"], files["target"]), scorer.window, output.done)
    with tqdm(total=total, initial=output.done, desc=scorer.doing, unit=f" {scorer.unit}", smoothing=0) as bar:
        scorer.write(windows, output, bar, done=output.done)


def _add_written(name: str, files) -> None:
    with Path(name).open(encoding="utf-8", newline="\n") as lines:
        files.add(lines)
