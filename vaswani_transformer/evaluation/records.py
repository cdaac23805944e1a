"""Where scores come from: the record of an evaluation, and the weights that it is of."""

import contextlib
import datetime
import hashlib
import json
import platform
import re
import shlex
from importlib import metadata
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from ..files import file_sha256

# What changes no output: versions, the tokens that every model has, and what else `generate()` returns or keeps.
_NO_SETTINGS = {"transformers_version", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
_NO_SETTINGS |= {"use_cache", "return_dict_in_generate"}
LIBRARIES = ("vaswani_transformer", "transformers", "torch", "tokenizers", "sacrebleu")


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


def _exported_sha256(folder: str | Path) -> str | None:
    """SHA-256 of the weights in a folder exported to CTranslate2."""
    path = Path(folder) / "model.bin"
    return file_sha256(path) if path.is_file() else None


def model_sha256(folder: str | Path) -> str:
    """One SHA-256 over all in a folder, exported or not, that outputs depend on: weights, configurations, tokenizer."""
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    names += ["export.json", "model.bin", "shared_vocabulary.json"]  # what an export to CTranslate2 consists of
    paths = [Path(folder) / name for name in names]
    parts = [str(weights_sha256(folder)), *(file_sha256(path) if path.is_file() else "" for path in paths)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


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


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a figure depends on."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:  # run straight from a checkout
            from .. import __version__

            found[library] = __version__
    return found


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
        options: the options that were given on the command line over the model's own, by flag, such as `--beams`; True
            for one without a value.
        test_set: a name for the test set; made from the file names if not given.

    Returns:
        `test_set`, names and SHA-256 of the files (of pipes the name alone), `weights_sha256`, `generation`,
        `versions`, `date` (UTC, ISO 8601) and `command`.
    """
    words = ["vaswani", "evaluate", Path(model_folder).resolve().name]
    words += ["--source", Path(source).name, "--reference", Path(reference).name]
    for flag, value in options.items():
        words += [] if value is None else [flag] if value is True else [flag, str(value)]
    files = {}
    for side, path in (("source", Path(source)), ("reference", Path(reference))):
        files[f"{side}_file"] = path.name
        if path.is_file():  # a pipe has been read to its end already
            files[f"{side}_sha256"] = file_sha256(path)
    return {
        "test_set": test_set or name_of_test_set(source, reference),
        **files,
        "weights_sha256": weights_sha256(model_folder) or _exported_sha256(model_folder),
        "generation": {name: value for name, value in generation.items() if value is not None},
        "versions": versions(),
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
