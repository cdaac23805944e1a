"""The commands of the constituency parser: `vaswani parse train`, `predict` and `evaluate`."""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..distributed import is_first_process
from ..durations import duration
from ..errors import UserError
from ..recipes.recipe import DATA
from . import files, options
from .files import Writing
from .options import Computing, Path_, Quiet, RecipeName, Search, Together, within

_NOT_OF_TREES = ("tokenizer", "tokenizer_kind", "from_model", "lora_rank", "augmentation_start")
_LIMITS = ("max_length", "max_length_ratio")  # the fields for data that apply to trees, too
TreeOptions = options.recipe_options(
    lambda field: (field.metadata["group"] != DATA or field.name in _LIMITS) and field.name not in _NOT_OF_TREES
)
Switch = Parameter(negative_bool=("no-",))
_RESTRICT = "restrict outputs to trees over the words (the default); else other outputs are repaired and counted"
Constrained = Annotated[bool, Switch, Parameter(help=_RESTRICT)]


def train(
    recipe: RecipeName = "parser-small",
    /,
    *,
    trees: Path_,
    dev: Path_,
    tags: Annotated[bool, Switch] = True,
    words: Annotated[bool | None, Switch] = None,
    augment: Annotated[int, within(0, 1000)] = 0,
    quiet: Quiet = False,
    fields: TreeOptions = TreeOptions(),  # noqa: B008 (of cyclopts)
) -> None:
    """Train a parser on trees in brackets.

    RECIPE is a name from `vaswani recipes` (parser is the paper's) or a YAML file; the grouped options are its fields,
    and a default shown there holds only where it has no value. The same command resumes an interrupted training.

    Args:
        trees: Penn Treebank brackets to train on (.gz works)
        dev: trees for validation
        tags: also tag the words (the default)
        words: also write the words into the tree (default: yes, except for the recipe parser, which follows the paper)
        augment: train N times on each tree and N times on versions with parts exchanged; 0: once on each tree
    """
    from ..output_folder import locked_together
    from ..parsing.parser import TextForm, load_trees, parsing_recipe
    from ..training.run import train as train_recipe

    settings = options.read_recipe(recipe, fields)
    train_trees, dev_trees = map(load_trees, (trees, dev))
    form = TextForm(tags, recipe != "parser" if words is None else words, augment)
    with locked_together(settings.output):
        result = train_recipe(parsing_recipe(settings, train_trees, dev_trees, form), progress=not quiet)
    if is_first_process():
        trees = f"trees {'with' if form.words else 'without'} their words"
        print(f"trained {result.steps:,} steps in {duration(result.seconds)} on {trees}; kept the {result.kept}")
        print(f"model: {result.folder}")
        print(f"scores: vaswani parse evaluate {shlex.join([str(result.folder), '--trees', dev])}")


def _load_parser(folder: str, constrained: bool, search: Search, computing: Computing):
    from ..parsing.parser import Parser

    model, tokenizer = computing.load(folder, "parsing")
    settings = {"constrained": constrained, "tokens_per_batch": computing.tokens_per_batch}
    return Parser(model, tokenizer, **settings, **options.generate_options(model, search))


def predict(
    model: Path_,
    /,
    *sentences: str,
    input: Path_ | None = None,
    constrained: Constrained = True,
    writing: Writing = Writing(),  # noqa: B008 (of cyclopts)
    search: Search = Search(),  # noqa: B008
    computing: Together = Together(),  # noqa: B008
) -> None:
    """Parse sentences, a file or standard input.

    Words and punctuation marks are separated by spaces, as in the treebank. The output has one tree in brackets on a
    line for each sentence, and a blank line for a blank line.

    Args:
        model: model folder of `vaswani parse train`
        sentences: if none, standard input is read
        input: parse the lines of this file (.gz works)
    """
    from ..parsing.parser import FileParser

    options.exclude("SENTENCE", sentences, {"input": input})
    files.check_work({"input": input}, writing)
    scans = files.scan_files({"input": input})
    worker = FileParser(_load_parser(model, constrained, search, computing), window=writing.window)
    settings = partial(files.settings_of, model, computing, search, constrained=constrained, window=writing.window)
    with files.open_output(writing, scans, settings) as output:
        try:
            files.do_lines(worker, output, writing, {"input": input}, scans, sentences)
        finally:
            if worker.repaired:
                print(f"repaired outputs that were not trees over their words: {worker.repaired:,}", file=sys.stderr)


def evaluate(
    model: Path_ | None = None,
    /,
    *,
    trees: Path_,
    predicted: Path_ | None = None,
    output: Path_ | None = None,
    json: Path_ | None = None,
    test_set: str | None = None,
    constrained: Constrained = True,
    search: Search = Search(),  # noqa: B008 (of cyclopts)
    computing: Computing = Computing(),  # noqa: B008
) -> None:
    """Score a model, or predicted trees, by labelled bracketing with evalb's rules.

    Args:
        model: model folder; or give --predicted
        trees: gold trees (.gz works)
        predicted: score these trees, one for each gold tree, in order
        output: also write the predicted trees here
        json: also write scores and settings here
        test_set: its name in the --json file (default: the file's)
    """
    import pandas

    from ..parsing.evalb import score_trees
    from ..parsing.parser import load_trees

    if (model is None) == (predicted is None):
        raise UserError("give a MODEL to evaluate, or the trees of another parser with --predicted: one of the two")
    files.check_files({"trees": trees, "predicted": predicted}, {"output": output, "json": json})
    settings = vars(search) | {"precision": computing.precision, "no_constrained": not constrained or None}
    options.exclude("--predicted", predicted, settings)
    gold = load_trees(trees)
    record: dict = {"test_set": test_set or Path(trees).name.removesuffix(".gz")}
    if predicted:
        parses, extra, name = load_trees(predicted), {}, Path(predicted).name
    else:
        parser, name = _load_parser(model, constrained, search, computing), Path(model).resolve().name
        if json:
            record = files.record_of(model, trees, trees, parser, settings, test_set, "parse evaluate")
            record["generation"]["constrained"] = constrained
        parses, seconds = files.timed("parsing", partial(parser.parse, [tree.words() for tree in gold]), len(gold))
        well_formed = 100 * sum(parse.well_formed for parse in parses) / len(parses)
        parses, extra = [parse.tree for parse in parses], {"well_formed": well_formed, "seconds": round(seconds, 1)}
    scores = score_trees(gold, parses) | extra
    if output:
        files.write_result(output, "".join(f"{tree}\n" for tree in parses))
    files.write_json(json, scores | record)
    row = pandas.DataFrame.from_dict({name: scores}, "index").reindex(columns=list(_COLUMNS)).rename(columns=_COLUMNS)
    print(row.to_string(float_format="{:.2f}".format, na_rep="-"))
    if "seconds" in extra:
        print(f"{scores['sentences']:,} sentences parsed in {extra['seconds']:.1f} s")


_COLUMNS = {"bracket_f1": "F1", "bracket_precision": "precision", "bracket_recall": "recall", "exact_match": "exact"}
_COLUMNS |= {"pos_accuracy": "POS", "well_formed": "well-formed", "bracket_f1_40": "F1 (40 words)"}
