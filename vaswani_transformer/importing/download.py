"""Download of models that are named as on the Hub: the files that an import reads, and no code."""

import fnmatch
import re
from pathlib import Path

from httpx import TransportError
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled

from ..errors import reading

# Kinds of weights, of which the first that is there is taken; Hub repositories often hold the same weights in several.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.npz", "*.pt", "*.ckpt")
# What may accompany them. training_args.bin is never read: that it exists shows that transformers' Trainer was at work.
_BESIDE = ("*.json", "*.txt", "*.model", "*.spm", "*.yml", "*.yaml", "README.md", "training_args.bin")


def is_hub_name(source: str) -> bool:
    """Return whether this has the form `owner/name` of a model on the Hub."""
    return re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", source, re.ASCII) is not None


def download(name: str) -> Path:
    """Return the folder, in the cache of `huggingface_hub`, of a model on the Hub.

    Raises:
        UserError: for a name that the Hub does not know or does not show to this user, and without a connection, unless
            the cache has the model.
    """
    with reading(name):
        try:
            files = [file for file in HfApi().list_repo_files(name) if "/" not in file]
        except (OfflineModeIsEnabled, TransportError):
            # Of one file, since the cached copy lacks those that were not chosen.
            return Path(snapshot_download(name, allow_patterns="README.md", local_files_only=True))
        weights = next((kind for kind in _WEIGHTS if fnmatch.filter(files, kind)), "")
        chosen = [file for kind in (weights, *_BESIDE) for file in fnmatch.filter(files, kind)]
        return Path(snapshot_download(name, allow_patterns=chosen))
