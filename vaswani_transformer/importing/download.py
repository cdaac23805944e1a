"""Models named as on the Hub, brought here: the files that an import reads, and no code."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HTTPError, RepositoryNotFoundError

from ..errors import UserError, one_line

# Kinds of weights, of which the first that is there is taken; Hub repositories often hold the same weights in several.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.npz", "*.pt", "*.ckpt")
# What may lie beside them. Of training_args.bin only its being there counts: transformers' Trainer was at work.
_BESIDE = ("*.json", "*.txt", "*.model", "*.spm", "*.yml", "*.yaml", "README.md", "training_args.bin")


def is_hub_name(source: str) -> bool:
    """Whether this has the form `owner/name` of a model on the Hub."""
    return re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", source, re.ASCII) is not None


def download(name: str) -> Path:
    """The folder, in the cache of `huggingface_hub`, of a model on the Hub; what is there is not fetched again.

    Raises:
        UserError: for a name that the Hub does not know or does not show to this user, and without a connection, unless
            the cache has the model.
    """
    try:
        files = HfApi().list_repo_files(name)
        return Path(snapshot_download(name, allow_patterns=_chosen(files)))
    except GatedRepoError as error:
        raise UserError(
            f"{name} is given to users who accept its terms only: do so on its page on the Hub, and log in with"
            " `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"there is neither a file or folder {name} nor a model of this name on the Hub: check the name; for a"
            " private model log in with `hf auth login`"
        ) from error
    except (HfHubHTTPError, HTTPError, OSError, RuntimeError, ValueError) as error:
        try:
            # Of one file, since the cached copy lacks those that were not chosen.
            return Path(snapshot_download(name, allow_patterns="README.md", local_files_only=True))
        except (OSError, ValueError):
            raise UserError(
                f"there is no file or folder {name}, and the model of this name cannot be fetched from the Hub"
                f" ({one_line(error, 200)}): try again with a connection, or give a folder"
            ) from error


def _chosen(files: Sequence[str]) -> list[str]:
    """What to fetch of a repository's files: those of its main folder that an import reads."""
    top = [file for file in files if "/" not in file]
    weights = next((kind for kind in _WEIGHTS if any(fnmatchcase(file, kind) for file in top)), "")
    return [file for file in top if any(fnmatchcase(file, kind) for kind in (weights, *_BESIDE))]
