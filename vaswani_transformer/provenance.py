"""How a score was obtained: what `vaswani evaluate --json` writes beside the scores, and reading it back."""

import datetime
import hashlib
import json
import platform
import re
import shlex
from importlib import metadata
from pathlib import Path

from .errors import UserError

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


def weights_sha256(folder: str | Path) -> str | None:
    """One SHA-256 over a model folder's safetensors files in the order of their names; None if there are none."""
    paths = sorted(path for path in Path(folder).glob("*.safetensors") if is_weights_file(path.name))
    if len(paths) == 1:
        return file_sha256(paths[0])
    return hashlib.sha256("".join(map(file_sha256, paths)).encode()).hexdigest() if paths else None


def name_of_test_set(source: str | Path, reference: str | Path) -> str:
    """A name for two aligned files: what their names have in common.

    >>> name_of_test_set("data/test_2016_flickr.en.gz", "data/test_2016_flickr.de.gz")
    'test_2016_flickr'
    """
    names = [Path(path).name.removesuffix(".gz") for path in (source, reference)]
    stems = [name.rpartition(".")[0] or name for name in names]
    return stems[0] if stems[0] == stems[1] else " / ".join(names)


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
        or not isinstance(record.get("test_set"), str)
        or not all(isinstance(record.get(key, {}), dict) for key in ("generation", "versions"))
    ):
        raise UserError(
            f"{path} does not say how its scores were obtained: make it anew with `vaswani evaluate --json`"
        )
    return record
