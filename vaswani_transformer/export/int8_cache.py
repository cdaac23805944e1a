"""Models converted to CTranslate2 in int8 on first use, in the user's cache."""

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from ..evaluation.records import model_sha256
from .facts import require

logger = logging.getLogger(__name__)


def cache_root() -> Path:
    """Return the folder of converted models, in `$XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vaswani_transformer" / "int8"


def int8_folder(folder: str | Path) -> Path:
    """Return the folder of a model exported to CTranslate2 in int8, made on first use.

    It is named by the hash of weights, configuration and tokenizer, and appears whole or not at all.

    Raises:
        UserError: as `export_model`.
        NotExpressibleError: for a model that CTranslate2 has nothing for.
    """
    require("ctranslate2")
    final = cache_root() / model_sha256(folder)
    if not final.is_dir():
        from .exporting import export_model

        logger.info(f"converting {folder} to int8, once: {final}")
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final.parent) as temporary:
            export_model(folder, Path(temporary) / "model", quantization="int8")
            with contextlib.suppress(OSError):  # another process has been faster
                (Path(temporary) / "model").rename(final)
    return final
