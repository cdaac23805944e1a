"""Options that several commands share, and the model and the search that they name. Imports no torch."""

import dataclasses
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from ..errors import UserError
from ..hardware import MOST_WORKERS
from ..model.settings_vaswani import SETTING_RANGES
from ..recipes.recipe import AUTO, CHOSEN, PATHS, Recipe, field_type, load_recipe


def _refuse_empty(_, value) -> None:
    if value == "":  # which would be the current folder, or all addresses
        raise ValueError("It is empty: give a name.")


NOT_EMPTY = Parameter(validator=_refuse_empty)
Path_ = Annotated[str, NOT_EMPTY, Parameter(metavar="PATH")]  # a file or folder
SEVERAL = Parameter(consume_multiple=True)  # an option that takes all words up to the next option
REQUIRED = Parameter(required=True)  # words of which there must be one at least


def within(least: float, most: float) -> Parameter:
    """Return the range of an option; NaN is in none."""
    return Parameter(validator=Number(gte=least, lte=most))


def setting(name: str) -> Parameter:
    """Return the allowed range of an option that sets a search setting."""
    return within(*SETTING_RANGES[name][1:])


def group(title: str, **more: Any) -> Callable[[type], type]:
    """Make the fields of a dataclass options of a group, where a command has a parameter of the class."""
    return Parameter(name="*", group=Group.create_ordered(title), **more)


#: A model folder; one that decodes; a recipe; its progress bar; an output; how many workers, and where they run.
Model = Annotated[Path_, Parameter(help="model folder")]
AnyModel = Annotated[Path_, Parameter(help="model folder, or one exported to CTranslate2")]
RecipeName = Annotated[Path_, Parameter(help="name of a recipe, or path of a YAML file")]
Quiet = Annotated[bool, Parameter(help="no progress bar")]
Overwrite = Annotated[bool, Parameter(help="replace what this command has written in the output folder before")]
_PROCESSES = Parameter(help="processes (default: one per processor, fewer for a short text)")
Workers = Annotated[int | None, within(1, MOST_WORKERS), _PROCESSES]
Engine = Annotated[Literal["local", "ray"], Parameter(help="where workers run: this machine, or a cluster by Ray")]


@group("search")
@dataclass
class Search:
    """Settings of the search; None where the model's own decide."""

    beams: Annotated[int | None, setting("num_beams")] = None
    """beam size (default: as the model was saved)"""
    length_penalty: Annotated[float | None, setting("length_penalty")] = None
    """alpha of the length normalisation (default: as the model was saved)"""
    max_new_tokens: Annotated[int | None, setting("max_new_tokens")] = None
    """longest output in tokens (default: as the model was saved, or 50 more than the source has)"""


@group("sampling")
@dataclass
class Sampling:
    """Settings of random translations."""

    sample: bool = False
    """draw translations at random instead of searching"""
    temperature: Annotated[float | None, setting("temperature")] = None
    """below 1 likelier tokens, above 1 rarer ones"""
    top_k: Annotated[int | None, within(1, 10**9)] = None
    """draw from the N likeliest tokens only"""
    top_p: Annotated[float | None, setting("top_p")] = None
    """draw only from the likeliest tokens that make up X of the probability"""
    seed: Annotated[int | None, within(0, 2**62)] = None
    """another seed gives other translations (default: 0)"""


@group("model")
@dataclass
class Computing:
    """Options of a model's computation."""

    ensemble = ()

    device: str = "auto"
    """cpu, cuda, cuda:1, mps, ...; auto: an accelerator if any"""
    precision: str | None = None
    """float32, bfloat16, float16, int8 on a CPU, or a type of CTranslate2 (default: as the model was saved)"""
    tokens_per_batch: Annotated[int, within(1, 10**9)] = 2048
    """source tokens in a batch"""

    def load(self, folder: str, *needs: str, **options: Any) -> tuple[Any, Any]:
        """Return the model or ensemble, ready to decode, and its tokenizer; given `options` count as `needs`."""
        from ..export.engine import load_for_decoding

        needs = [*needs, *flags_given(options)]
        return load_for_decoding([folder, *self.ensemble], self.device, self.precision, needs=needs)


@group("model")
@dataclass
class Together(Computing):
    """Options of a model's computation, and the other members of its ensemble."""

    ensemble: Annotated[tuple[Path_, ...], SEVERAL] = ()
    """further models that translate together with MODEL; all words up to the next option"""


def flag(name: str) -> str:
    """Return the option that a field or parameter is given by, `--nbest` for `nbest`."""
    return "--" + name.replace("_", "-")


def flags_given(options: Mapping[str, Any]) -> list[str]:
    """Return those of these options that were given, of which each is None, false or empty by default."""
    return [flag(name) for name, value in options.items() if value not in (None, [], ()) and value is not False]


def remark_codes(codes: Any, target_language: str | None) -> None:
    """Say, once of all workers, that a model of several target languages chooses one itself, if none is given."""
    known = ", ".join(codes.known.values())
    if known and not target_language and multiprocessing.parent_process() is None:
        print(f"no --target-language: texts without a code ({known:.300}) may become any language", file=sys.stderr)


def for_checks(computing: Any) -> Any:
    """Return the options by which the parent of workers checks a model: on the CPU, where it converts to int8 once."""
    return dataclasses.replace(computing, device="cpu", precision="int8" if computing.precision == "int8" else None)


def exclude(what: str, holds: Any, others: Mapping[str, Any]) -> None:
    """Raise `UserError` if `what` holds and one of these options is given, which cannot be combined with it."""
    for option in flags_given(others) if holds else ():
        raise UserError(f"{what} and {option} cannot be combined: leave one of them out")


def require(what: str, holds: bool, others: Mapping[str, Any]) -> None:
    """Raise `UserError` if one of these options is given and what it is for, `what`, is not."""
    for option in flags_given(others) if not holds else ():
        raise UserError(f"{option} is for {what}: give that too, or leave {option} out")


def recipe_options(is_wanted: Callable[[dataclasses.Field], bool] = lambda field: True) -> type:
    """Return a dataclass of options for fields of `Recipe`; those that are not given are None.

    Values stay text, which `load_recipe` converts as it does those of a YAML file.
    """
    groups: dict[str, Group] = {}
    options = []
    for each in filter(is_wanted, dataclasses.fields(Recipe)):
        kind, title = field_type(each.name)[0], each.metadata["group"]
        default = "" if each.default is None else f" (default: {each.default})"
        parameter = Parameter(
            name=[option for option in (each.metadata["flag"], flag(each.name)) if option],
            negative_bool=("no-",),
            group=groups.setdefault(title, Group.create_ordered(title)),
            help=each.metadata["help"] + default,
            metavar="PATH" if each.name in PATHS else kind.__name__.upper(),
        )
        options.append((each.name, Annotated[(bool if kind is bool else str) | None, parameter], None))
    made = dataclasses.make_dataclass("RecipeOptions", options)
    made.__module__ = __name__  # else cyclopts takes it for a type of Python's own
    return Parameter(name="*")(made)


def read_recipe(name: str, options: Any, chooses: bool = False, **more: Any) -> Recipe:
    """Return a recipe with the fields that the options give, and `more`; `chooses`: fields may be `auto`."""
    recipe = load_recipe(name, {name: value for name, value in vars(options).items() if value is not None} | more)
    anywhere = ("validation_size", "validation_bleu")  # `finetune` has these
    fields = [field for field in CHOSEN if getattr(recipe, field) == AUTO and field not in anywhere]
    if fields and not chooses:
        raise UserError(f"{fields[0]} is auto, which `vaswani train` alone chooses: give another recipe, or a value")
    return recipe


def generate_options(model: Any, search: Search, sampling: Sampling | None = None, nbest: int | None = None) -> dict:
    """Return the options for `generate()` that are not left to the model's own configuration."""
    own, beams = model.generation_config, search.beams
    options: dict[str, Any] = {"length_penalty": search.length_penalty, "max_new_tokens": search.max_new_tokens}
    if sampling is not None and sampling.sample:
        beams = beams or 1
        top_k = 0 if sampling.top_k is None and own.top_k is None else sampling.top_k  # the library's default is 50
        options |= {"do_sample": True, "temperature": sampling.temperature, "top_k": top_k, "top_p": sampling.top_p}
    size = beams or own.num_beams or 1
    draws = size == 1 and (options.get("do_sample") or own.do_sample)
    if nbest is not None and nbest > size and not draws:
        raise UserError(f"--nbest is {nbest} and the beam size is {size}: give --beams {nbest} or more")
    one = 1 if (own.num_return_sequences or 1) > 1 else None  # one line out for one line in
    options |= {"num_beams": beams, "num_return_sequences": nbest or one}
    return {name: value for name, value in options.items() if value is not None}
