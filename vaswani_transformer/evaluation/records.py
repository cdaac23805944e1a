"""The record of an evaluation: how scores were obtained, and hashes of the weights that they belong to."""

import datetime
import hashlib
import json
import platform
import re
import shlex
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..errors import reading
from ..files import file_sha256
from ..json_and_yaml import read_json

# Settings that change no output: versions, the tokens that every model has, what `generate()` returns beside it.
_NO_SETTINGS = {"transformers_version", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
_NO_SETTINGS |= {"use_cache", "return_dict_in_generate"}
# What outputs depend on besides weights, of a model or an export to CTranslate2.
_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "target_tokenizer.json",
    "source.spm", "target.spm", "vocab.json", "target_vocab.json", "export.json", "model.bin",
)  # fmt: skip
_REQUIRED = {"test_set": str, "weights_sha256": str, "command": str, "generation": dict}  # the rest is checked if shown


def is_weights_file(name: str) -> bool:
    """Return whether `save_pretrained` writes a model's weights, or a shard of them, under this name."""
    return re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", name) is not None


def weights_sha256(folder: str | Path) -> str | None:
    """Return one SHA-256 over a model folder's safetensors files by name; None if there are none."""
    paths = sorted(path for path in Path(folder).glob("*.safetensors") if is_weights_file(path.name))
    if len(paths) == 1:
        return file_sha256(paths[0])
    return hashlib.sha256("".join(map(file_sha256, paths)).encode()).hexdigest() if paths else None


def model_sha256(folder: str | Path) -> str:
    """Return one SHA-256 over every file of a folder, exported or not, that outputs depend on."""
    paths = [path for name in _FILES if (path := Path(folder) / name).is_file()]
    parts = [str(weights_sha256(folder)), *(f"{path.name} {file_sha256(path)}" for path in paths)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def name_of_test_set(source: str | Path, reference: str | Path) -> str:
    """Return a name for two aligned files: `flickr` of `data/flickr.en.gz` and `data/flickr.de.gz`."""
    names = [Path(path).name.removesuffix(".gz") for path in (source, reference)]
    stems = [name.rpartition(".")[0] or name for name in names]
    return stems[0] if stems[0] == stems[1] else " / ".join(names)


def search_settings(generation_config) -> dict:
    """Return the settings of a search over the library's defaults, without the tokens that every model has."""
    settings = {
        name: value
        for name, value in getattr(generation_config, "to_diff_dict", lambda: vars(generation_config))().items()
        if value is not None and not name.startswith(("_", "output_")) and name not in _NO_SETTINGS
    }
    return json.loads(json.dumps(settings, default=str, skipkeys=True))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that scores depend on."""
    libraries = {name: metadata.version(name) for name in ("transformers", "torch", "tokenizers", "sacrebleu")}
    return {"python": platform.python_version(), "vaswani_transformer": __version__, **libraries}


def evaluation_record(
    model_folder: str | Path,
    source: str | Path,
    reference: str | Path,
    generation: dict,
    options: dict,
    test_set: str | None = None,
    command: str = "evaluate",
) -> dict:
    """Return how scores of a model on two files were obtained. Paths are cut to names, since records go to the Hub.

    Args:
        generation: the decoding settings that were in force, such as `num_beams` and `length_penalty`.
        options: the command line's options that override the model's settings, by flag, such as `--beams`; True for
            one without a value, None for one that was not given.
        test_set: a name for the test set; by default made from the file names.
        command: that made the scores; `"parse evaluate"` has one file of trees as `source` and `reference`.
    """
    words = ["vaswani", *command.split(), Path(model_folder).resolve().name]
    texts = {"--source": source, "--reference": reference} if command == "evaluate" else {"--trees": source}
    for flag, value in ({name: Path(path).name for name, path in texts.items()} | options).items():
        words += [] if value is None else [flag] if value is True else [flag, str(value)]
    files = {}
    for side, path in (("source", Path(source)), ("reference", Path(reference))):
        files[f"{side}_file"] = path.name
        if path.is_file():  # a pipe has been read to its end already
            files[f"{side}_sha256"] = file_sha256(path)
    exported = Path(model_folder) / "model.bin"
    return {
        "test_set": test_set or name_of_test_set(source, reference),
        **files,
        "weights_sha256": weights_sha256(model_folder) or (file_sha256(exported) if exported.is_file() else None),
        "generation": {name: value for name, value in generation.items() if value is not None},
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(words),
    }


def read_evaluation(path: str | Path) -> dict:
    """Read the record and scores that `vaswani evaluate --json` wrote."""
    with reading(path):
        record = read_json(path)
        return record | {name: kind(record[name]) for name, kind in _REQUIRED.items()}
