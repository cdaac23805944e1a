"""Where scores and cards come from: the record of an evaluation, and the seal of a card with what it was made from."""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import logging
import platform
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError, safe_open

from .errors import UserError

logger = logging.getLogger(__name__)

_SEAL = re.compile(r"\n*<!-- Written by `vaswani push`; SHA-256 of what is above: ([0-9a-f]{64}) -->\s*\Z")
_STATE = re.compile(r"^<!-- For the next push: (\{.*\}) -->$", re.MULTILINE)
# The one sentence of transformers' default card that is not of huggingface_hub's template.
_DESCRIPTION = re.compile(r"^.*This model card has been automatically generated\.$", re.MULTILINE)
# What changes no output: versions, the tokens that every model has, and what else `generate()` returns or keeps.
_NO_SETTINGS = {"transformers_version", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
_NO_SETTINGS |= {"use_cache", "return_dict_in_generate"}
LIBRARIES = ("vaswani_transformer", "transformers", "torch", "tokenizers", "sacrebleu")


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; a `.gz` file is not unpacked."""
    state = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def is_weights_file(name: str) -> bool:
    """Whether this is a name under which `save_pretrained` writes a model's weights or a part of them."""
    return re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", name) is not None


def _weights_files(folder: str | Path) -> list[Path]:
    return sorted(path for path in Path(folder).glob("*.safetensors") if is_weights_file(path.name))


def weights_sha256(folder: str | Path) -> str | None:
    """One SHA-256 over a model folder's safetensors files in the order of their names; None if there are none."""
    paths = _weights_files(folder)
    if len(paths) == 1:
        return file_sha256(paths[0])
    return hashlib.sha256("".join(map(file_sha256, paths)).encode()).hexdigest() if paths else None


def tensors_sha256(folder: str | Path) -> str | None:
    """One SHA-256 over names, types, shapes and bytes of a folder's tensors, into however many files they are split.

    None where there are none or they cannot be read.
    """
    state = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in _weights_files(folder)]
            holders = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            for name in sorted(holders):
                tensor = holders[name].get_tensor(name)
                state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                state.update(tensor.reshape(-1).view(torch.uint8).numpy())
        except (OSError, SafetensorError):
            return None
    return state.hexdigest() if holders else None


def name_of_test_set(source: str | Path, reference: str | Path) -> str:
    """A name for two aligned files: what their names have in common.

    >>> name_of_test_set("data/test_2016_flickr.en.gz", "data/test_2016_flickr.de.gz")
    'test_2016_flickr'
    """
    names = [Path(path).name.removesuffix(".gz") for path in (source, reference)]
    stems = [name.rpartition(".")[0] or name for name in names]
    return stems[0] if stems[0] == stems[1] else " / ".join(names)


def search_settings(generation_config) -> dict:
    """What a generation configuration sets over the library's defaults, but for the tokens that every model has."""
    settings = {
        name: value
        for name, value in generation_config.to_diff_dict().items()
        if value is not None and not name.startswith(("_", "output_")) and name not in _NO_SETTINGS
    }
    return json.loads(json.dumps(settings, default=str, skipkeys=True))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:  # run straight from a checkout
            from . import __version__

            versions[library] = __version__
    return versions


def evaluation_record(
    model_folder: str | Path,
    source: str | Path,
    reference: str | Path,
    generation: dict,
    options: dict,
    test_set: str | None = None,
) -> dict:
    """What tells others how a score was obtained. Paths are cut to file names: they may go to the Hub.

    Args:
        model_folder: the evaluated model.
        source: file of the sources.
        reference: file of the references.
        generation: the decoding settings that were in force, such as `num_beams` and `length_penalty`.
        options: the options that were given on the command line over the model's own, by flag, such as `--beams`.
        test_set: a name for the test set; made from the file names if not given.

    Returns:
        `test_set`, names and SHA-256 of the files (of pipes the name alone), `weights_sha256`, `generation`,
        `versions`, `date` (UTC, ISO 8601) and `command`.
    """
    words = ["vaswani", "evaluate", Path(model_folder).resolve().name]
    words += ["--source", Path(source).name, "--reference", Path(reference).name]
    words += [str(word) for flag, value in options.items() if value is not None for word in (flag, value)]
    files = {}
    for side, path in (("source", Path(source)), ("reference", Path(reference))):
        files[f"{side}_file"] = path.name
        if path.is_file():  # a pipe has been read to its end already
            files[f"{side}_sha256"] = file_sha256(path)
    return {
        "test_set": test_set or name_of_test_set(source, reference),
        **files,
        "weights_sha256": weights_sha256(model_folder),
        "generation": {name: value for name, value in generation.items() if value is not None},
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(words),
    }


def read_evaluation(path: str | Path) -> dict:
    """What `vaswani evaluate --json` wrote.

    Raises:
        UserError: for a file that is missing, is not JSON, or does not say what it is an evaluation of.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read evaluation file {path}: {error.strerror}") from error
    except ValueError as error:  # JSON and UTF-8 errors
        raise UserError(f"{path} is not a file of `vaswani evaluate --json`: it is not JSON ({error})") from error
    if (
        not isinstance(record, dict)
        or not all(isinstance(record.get(key), str) for key in ("test_set", "weights_sha256", "command"))
        or not isinstance(record.get("generation"), dict)
        or not isinstance(record.get("versions", {}), dict)
        or not all(
            isinstance(value, str)
            for key, value in record.items()
            if key == "date" or key.endswith(("_file", "_sha256", "_signature"))
        )
    ):
        raise UserError(
            f"{path} does not say of which weights its scores are and how they were obtained: evaluate again with"
            " `vaswani evaluate --json` of this version"
        )
    return record


@dataclass(frozen=True)
class EarlierCard:
    """What a card of ours says that no file of a model does.

    Args:
        languages: codes (ISO 639), source first.
        license: the Hub's identifier of the weights' licence.
        datasets: names of datasets on the Hub.
        weights: `tensors_sha256` of the weights that it describes.
        evaluations: records of `vaswani evaluate --json`.
    """

    languages: Sequence[str] = ()
    license: str | None = None
    datasets: Sequence[str] = ()
    weights: str | None = None
    evaluations: Sequence[Mapping] = ()


def _digest(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").rstrip().encode()).hexdigest()


def seal(text: str, weights: str | None = None, evaluations: Sequence[Mapping] = ()) -> str:
    """The card with last lines by which `is_sealed` knows it again and `read_card` what it was made from."""
    text = text.rstrip()
    if weights is not None:
        state = json.dumps({"weights": weights, "evaluations": list(evaluations)}, ensure_ascii=False)
        state = state.replace("<", "\\u003c").replace(">", "\\u003e")  # nothing in it ends the comment
        text += f"\n\n<!-- For the next push: {state} -->"
    return f"{text}\n\n<!-- Written by `vaswani push`; SHA-256 of what is above: {_digest(text)} -->\n"


def is_sealed(text: str) -> bool:
    """Whether a card is as `vaswani push` wrote it: not one of someone else's, and not edited since."""
    match = _SEAL.search(text)
    return match is not None and match.group(1) == _digest(text[: match.start()])


def may_be_replaced(text: str) -> bool:
    """Whether nobody wrote this card: it is ours as we wrote it, or transformers' default one, unedited."""
    if is_sealed(text):
        return True
    sentence = _DESCRIPTION.search(text.replace("\r\n", "\n"))
    if sentence is None:
        return False
    stub = ModelCard.from_template(ModelCardData(), model_description=sentence.group())
    with contextlib.suppress(ValueError, TypeError, KeyError, yaml.YAMLError):
        return ModelCard(text).text.split() == stub.text.split()
    return False


def read_card(text: str) -> EarlierCard | None:
    """What a sealed card says; None for any other."""
    if not is_sealed(text):
        return None
    text, state = text.replace("\r\n", "\n"), {}
    with contextlib.suppress(ValueError, IndexError):
        state = json.loads(_STATE.findall(text)[-1])
    try:
        data = ModelCard(text).data
    except (ValueError, TypeError, KeyError, yaml.YAMLError):
        data = ModelCardData()

    def names(value) -> list[str]:
        return [name for name in ([value] if isinstance(value, str) else value or []) if isinstance(name, str)]

    return EarlierCard(
        languages=names(data.language),
        license=data.license if isinstance(data.license, str) else None,
        datasets=names(data.datasets),
        weights=state.get("weights"),
        evaluations=state.get("evaluations") or [],
    )


def describes(text: str, weights: str | None) -> bool:
    """Whether this is a card of ours on just these weights."""
    earlier = read_card(text)
    return earlier is not None and weights is not None and earlier.weights == weights


def carry_over(facts, text: str, given: Collection[str] = ()):
    """The facts for a new card, with what stays true of a card of ours on the Hub; one line is logged that says so.

    Licence, languages and datasets stay where nothing else is known, and on the same weights unless they are given;
    scores stay on the same weights only.

    Args:
        facts: a [`CardFacts`].
        text: of the card on the Hub.
        given: names of the facts that the user gave.
    """
    earlier = read_card(text)
    if earlier is None:
        return facts
    same, kept = describes(text, facts.weights), {}
    for name in ("license", "languages", "datasets"):
        value, known = getattr(earlier, name), getattr(facts, name)
        if value and name not in given and (same or not known) and value != (known if name == "license" else [*known]):
            kept[name] = value
    if earlier.evaluations and not facts.evaluations:
        if same:
            kept["evaluations"] = earlier.evaluations
        else:
            logger.warning("the scores on the card on the Hub are of other weights and left out: evaluate these")
    if kept:
        words = [
            f"{name} {value if isinstance(value, str) else ', '.join(value)}"
            for name, value in kept.items()
            if name != "evaluations"
        ]
        words += [f"scores on {record['test_set']}" for record in kept.get("evaluations", ())]
        logger.info("kept from the card on the Hub: %s", "; ".join(words))
    return dataclasses.replace(facts, **kept)
