"""The commands of the constituency parser: `vaswani parse train`, `predict` and `evaluate`."""

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path

from ..durations import duration
from ..errors import UserError
from ..output_folder import locked_together
from .command import (
    Parser,
    add_command,
    add_recipe_options,
    check_output_place,
    command_name,
    is_first_process,
    leave_process_group,
    resumable,
)
from .files import (
    check_files,
    input_lines,
    is_file,
    is_interactive,
    open_output,
    option_flag,
    read_first,
    report_unfinished,
    write_result,
)
from .options import (
    add_model_options,
    add_search_options,
    add_window,
    check_options,
    generate_options,
    load_for_decoding,
)

_RECIPE, _PAPER = "parser-small", "parser"
_OF_TRANSLATION = ("from_model", "lora_rank")
_LIMITS = ("max_length", "max_length_ratio")  # the fields for data that apply to trees, too


def add_parse(commands) -> None:
    """Add `vaswani parse`."""
    parser = commands.add_parser("parse", help="constituency parsing: train, predict, evaluate", allow_abbrev=False)
    own = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _add_train(own)
    _add_predict(own)
    _add_evaluate(own)


def _add_train(commands) -> None:
    from ..recipes.recipe import DATA, Recipe

    description = (
        "Train a parser. RECIPE is a name from `vaswani recipes` (parser-small if none is given; parser is the paper's)"
        " or a YAML file; every option of the groups below is a field of it. The same command resumes an interrupted"
        " training."
    )
    parser = add_command(commands, "train", _train, "train a parser on trees in brackets", description)
    parser.usage = "vaswani parse train [RECIPE] --trees FILE --dev FILE --output FOLDER [--FIELD VALUE ...]"
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default=_RECIPE, help=f"default: {_RECIPE}")
    parser.add_argument("--trees", required=True, metavar="FILE", help="Penn Treebank brackets to train on (.gz works)")
    parser.add_argument("--dev", required=True, metavar="FILE", help="trees for validation")
    parser.add_argument("--tags", action=argparse.BooleanOptionalAction, default=True, help="also tag the words")
    how = f"also write the words into the tree (default: yes, except for the recipe {_PAPER}, which follows the paper)"
    parser.add_argument("--words", action=argparse.BooleanOptionalAction, help=how)
    how = "train N times on each tree and N times on versions with parts exchanged; 0: once on each tree (default)"
    parser.add_argument("--augment", type=int, default=0, metavar="N", help=how)
    _add_skip_bad(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    shown = [field for field in dataclasses.fields(Recipe) if field.metadata["group"] != DATA or field.name in _LIMITS]
    add_recipe_options(parser, [field for field in shown if field.name not in ("tokenizer", *_OF_TRANSLATION)])


def _add_skip_bad(parser: argparse.ArgumentParser) -> None:
    how = "leave bad trees out and count them, instead of stopping"
    parser.add_argument("--skip-bad", action="store_true", help=how)


@resumable
def _train(arguments: argparse.Namespace) -> int:
    from ..data.recipe_data import expand_home
    from ..parsing.parser import TextForm, load_trees, parsing_recipe
    from ..recipes.recipe import Recipe, load_recipe
    from ..training.run import train

    names = {field.name for field in dataclasses.fields(Recipe)}
    recipe = load_recipe(arguments.recipe, {name: value for name, value in vars(arguments).items() if name in names})
    expand_home(recipe)
    train_trees, dev_trees = (load_trees(path, arguments.skip_bad) for path in (arguments.trees, arguments.dev))
    words = arguments.recipe != _PAPER if arguments.words is None else arguments.words
    form = TextForm(arguments.tags, words, arguments.augment)
    with locked_together(recipe.output):
        result = train(parsing_recipe(recipe, train_trees, dev_trees, form), progress=not arguments.quiet)
    leave_process_group()
    if is_first_process():
        print(f"trained {result.steps:,} steps in {duration(result.seconds)}; kept the {result.kept}")
        print(f"model: {result.folder}")
        words = shlex.join([str(result.folder), "--trees", arguments.dev])
        print(f"scores: {command_name()} parse evaluate {words}")
    return 0


def _add_constrained(parser: argparse.ArgumentParser) -> None:
    how = "restrict outputs to trees over the words (default); without it, other outputs are repaired and counted"
    parser.add_argument("--constrained", action=argparse.BooleanOptionalAction, default=True, help=how)


def _add_predict(commands) -> None:
    description = (
        "Parse sentences whose words and punctuation marks are separated by spaces, as in the treebank. The output has"
        " one tree in brackets on a line for each, and a blank line for a blank line."
    )
    help_text = "parse sentences, a file or standard input"
    parser = add_command(commands, "predict", _predict, help_text, description)
    parser.add_argument("model", metavar="MODEL", help="model folder of `vaswani parse train`")
    parser.add_argument("sentences", metavar="SENTENCE", nargs="*", default=[], help="if none, standard input is read")
    parser.words = "sentences"
    parser.add_argument("--input", metavar="FILE", help="parse the lines of this file (.gz works)")
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of standard output")
    parser.add_argument("--resume", action="store_true", help="continue an --output that was interrupted")
    add_window(parser, "sentences")
    parser.add_argument("--text", action="store_true", help="draw the trees with lines instead of brackets")
    parser.add_argument("--pictures", metavar="FOLDER", help="also draw each tree as FOLDER/NUMBER.svg")
    _add_constrained(parser)
    add_search_options(parser)
    add_model_options(parser)


def _load_parser(arguments: argparse.Namespace):
    from ..exported import is_exported
    from ..parsing.parser import Parser as TreeParser

    if any(map(is_exported, [arguments.model, *getattr(arguments, "ensemble", [])])):
        raise UserError("an exported model cannot parse: give the folder of `vaswani parse train`")
    model, tokenizer = load_for_decoding(arguments)
    options = {"constrained": arguments.constrained, "tokens_per_batch": arguments.tokens_per_batch}
    return TreeParser(model, tokenizer, **options, **generate_options(arguments, model))


def _check_predict(arguments: argparse.Namespace) -> None:
    from ..distributed import is_launched

    check_options(arguments)
    if is_launched():
        raise UserError("parse predict runs in one process: start it without torchrun or accelerate launch")
    if arguments.sentences and arguments.input:
        raise UserError("give sentences or --input, not both")
    if arguments.resume and not (is_file(arguments.output) and is_file(arguments.input)):
        raise UserError("--resume continues a file that was made from a file: give --input FILE and --output FILE")
    if arguments.resume and arguments.text:
        raise UserError("--resume continues files with a tree on each line: leave --text out, or --resume")
    check_files(arguments, read=("input",), written=("output",))
    if arguments.pictures is not None:
        if Path(arguments.pictures).is_file():
            raise UserError(f"--pictures {arguments.pictures} is a file: give a folder")
        check_output_place(Path(arguments.pictures), "--pictures")


def _predict(arguments: argparse.Namespace) -> int:
    from ..data.text_files import scan_text
    from ..decoding.streaming import WINDOW_LINES
    from ..parsing.parser import FileParser, checked
    from ..parsing.trees import words_of

    _check_predict(arguments)
    scans = {"--input": scan_text(Path(arguments.input))} if is_file(arguments.input) else {}
    pictures = Path(arguments.pictures) if arguments.pictures else None
    # Where the sentences can be read twice, all mistakes in their words are found before anything is written.
    for _ in checked(map(words_of, arguments.sentences or (input_lines(arguments.input) if scans else ()))):
        pass
    files = FileParser(_load_parser(arguments), arguments.text, pictures, arguments.window or WINDOW_LINES)
    if interactive := is_interactive(arguments, files.doing):
        files.window = 1
    sentences = checked(map(words_of, arguments.sentences or input_lines(arguments.input, scans.get("--input"))))
    if not scans and not interactive:  # a file has been checked as a whole
        sentences = read_first(sentences)
    total = scans["--input"].lines if scans else len(arguments.sentences) or None
    output = open_output(arguments, {} if arguments.text else scans, files.window)
    ahead = not (interactive or arguments.sentences)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(output):
        try:
            with report_unfinished(output):
                files.run(sentences, output, output.done, total, ahead, progress=not interactive and total != 1)
        finally:
            if files.repaired:
                print(f"repaired outputs that were not trees over their words: {files.repaired:,}", file=sys.stderr)
        output.finish()
    return 0


def _add_evaluate(commands) -> None:
    help_text = "labelled bracketing scores of a model, or of predicted trees, by evalb's rules"
    parser = add_command(commands, "evaluate", _evaluate, help_text)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="model folder; or give --predicted")
    parser.add_argument("--trees", required=True, metavar="FILE", help="gold trees (.gz works)")
    parser.add_argument("--predicted", metavar="FILE", help="score these trees, one for each gold tree, in order")
    parser.add_argument("--baselines", metavar="FILE", help="also score two baselines made from these training trees")
    parser.add_argument("--output", metavar="FILE", help="also write the predicted trees here")
    parser.add_argument("--json", metavar="FILE", help="also write scores and settings here")
    parser.add_argument("--test-set", metavar="NAME", help="its name in the --json file (default: the file's)")
    _add_skip_bad(parser)
    _add_constrained(parser)
    add_search_options(parser)
    add_model_options(parser, ensemble=False)


def _evaluate(arguments: argparse.Namespace) -> int:
    from ..parsing.evalb import BASELINES, Baselines, score_trees
    from ..parsing.parser import load_trees

    check_options(arguments)
    if (arguments.model is None) == (arguments.predicted is None):
        raise UserError("give a MODEL to evaluate, or the trees of another parser with --predicted: one of the two")
    if arguments.predicted and arguments.skip_bad:
        raise UserError("--skip-bad does not go with --predicted, which needs a tree for each gold tree: correct them")
    check_files(arguments, read=("trees", "predicted", "baselines"), written=("output", "json"))
    advice = {"advice": "correct the tree"} if arguments.predicted else {}
    gold = load_trees(arguments.trees, arguments.skip_bad, **advice)
    labels = arguments.baselines and Baselines(load_trees(arguments.baselines, arguments.skip_bad, **advice))
    record: dict = {"test_set": arguments.test_set or Path(arguments.trees).name.removesuffix(".gz")}
    if arguments.predicted:
        predicted = load_trees(arguments.predicted, **advice)
        name, extra = Path(arguments.predicted).name, {}
    else:
        predicted, extra, record = _parse_gold(arguments, gold)
        name = Path(arguments.model).resolve().name
    scores = score_trees(gold, predicted) | extra
    baselines = {
        kind: score_trees(gold, [make(labels, tree.words()) for tree in gold])
        for kind, make in (BASELINES.items() if labels else ())
    }
    if arguments.output:
        write_result(Path(arguments.output), "".join(f"{tree}\n" for tree in predicted))
    if arguments.json:
        full = scores | ({"baselines": baselines} if baselines else {}) | record
        write_result(Path(arguments.json), json.dumps(full, indent=2) + "\n")
    _print_table({name: scores} | baselines)
    if "seconds" in extra:
        print(f"{scores['sentences']:,} sentences parsed in {extra['seconds']:.1f} s")
    return 0


def _parse_gold(arguments: argparse.Namespace, gold: list) -> tuple[list, dict, dict]:
    """The model's trees for the words of gold trees, the share of well-formed outputs and seconds, and the record."""
    from tqdm.auto import tqdm

    parser = _load_parser(arguments)
    record = _how_obtained(arguments, parser.translator) if arguments.json else {}
    started = time.monotonic()
    with tqdm(total=len(gold), desc="parsing", unit=" sentences", file=sys.stderr) as bar:
        parses = list(parser.parse((tree.words() for tree in gold), progress=bar))
    well_formed = 100 * sum(parse.well_formed for parse in parses) / len(parses)
    extra = {"well_formed": well_formed, "seconds": round(time.monotonic() - started, 1)}
    return [parse.tree for parse in parses], extra, record


def _how_obtained(arguments: argparse.Namespace, translator) -> dict:
    from ..evaluation.records import evaluation_record, search_settings

    generation = search_settings(translator.model.generation_config) | translator.generate_options
    generation |= {"constrained": arguments.constrained}
    record = evaluation_record(arguments.model, arguments.trees, arguments.trees, generation, {}, arguments.test_set)
    words = ["vaswani", "parse", "evaluate", Path(arguments.model).resolve().name, "--trees", record["source_file"]]
    for name in ("beams", "length_penalty", "max_new_tokens", "precision"):
        value = getattr(arguments, name)
        words += [] if value is None else [option_flag(name), str(value)]
    words += [] if arguments.constrained else ["--no-constrained"]
    return record | {"command": shlex.join(words)}


_COLUMNS = {
    "bracket_f1": "F1",
    "bracket_precision": "precision",
    "bracket_recall": "recall",
    "exact_match": "exact",
    "pos_accuracy": "POS",
    "well_formed": "well-formed",
    "bracket_f1_40": "F1 (40 words)",
}


def _print_table(rows: dict[str, dict]) -> None:
    width = max(map(len, rows))
    print("  ".join([" " * width, *_COLUMNS.values()]))
    for name, scores in rows.items():
        cells = [f"{scores[key]:.2f}" if key in scores else "-" for key in _COLUMNS]
        cells = [cell.rjust(len(title)) for cell, title in zip(cells, _COLUMNS.values(), strict=True)]
        print("  ".join([name.ljust(width), *cells]))
