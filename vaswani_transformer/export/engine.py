"""The model that a command decodes with: by torch, or by CTranslate2 where it is exported or int8 on a CPU is asked."""

import contextlib
import ctypes
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..decoding.fast_tokenizer import open_tokenizer
from ..errors import UserError, items_of, reading
from ..evaluation.records import model_sha256
from ..exported import NotExpressibleError, is_exported
from ..files import cache_folder

logger = logging.getLogger(__name__)


def load_for_decoding(
    folders: str | Path | Sequence[str | Path],
    device: str = "auto",
    precision: str | None = None,
    *,
    needs: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Return the model, or the ensemble of several, ready to translate and score, and its tokenizer.

    Neither torch nor transformers is imported for an exported model, or for int8 once the model is converted. The
    weights must stay as they are: what is going to change them, or to add adapters, takes `load_model`.

    Args:
        folders: a model folder, which may be exported to CTranslate2, or the members of an ensemble.
        device: `"auto"`, `"cpu"`, `"cuda"`, `"cuda:1"`, ...
        precision: `"float32"`, `"bfloat16"`, `"float16"`; `"int8"`, by CTranslate2 on a CPU; of an exported model a
            type of CTranslate2. By default as the model was saved.
        needs: names of options in force that CTranslate2 cannot follow, such as `"--glossary"`. With them int8 becomes
            float32, which is logged, and an exported model is refused.

    Raises:
        UserError: for a folder that holds no such model, or a device, precision or need that cannot be.
    """
    folders = list(items_of(folders))
    needs = [*needs, "--ensemble"] if len(folders) > 1 else list(needs)
    if any(map(is_exported, folders)):
        if needs:
            raise UserError(f"{needs[0]} is not possible with an exported model: give the model itself")
        return load_exported(folders[0], device, precision)
    if precision == "int8":
        if device not in ("auto", "cpu"):
            raise UserError(f"--precision int8 is for a CPU and --device is {device}: give --device cpu")
        try:
            if needs:
                raise NotExpressibleError(f"CTranslate2 cannot follow {needs[0]}")
            return load_exported(int8_folder(folders[0]), "cpu")
        except NotExpressibleError as reason:
            logger.warning(f"computed in float32, not int8: {reason}")
        device, precision = "cpu", "float32"
    import torch

    from ..decoding.ensemble import load_ensemble
    from ..hardware import tune_cpu_memory
    from ..loading import load_model

    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN makes a plan for each new shape, which takes far longer
    if len(folders) > 1:
        model, tokenizer = load_ensemble(folders, device, precision=precision)
    else:
        model, tokenizer = load_model(folders[0], device, precision)
        model.keep_decoder()
    if model.dtype == torch.float16 and model.device.type == "cpu" and precision is None:
        model.float()  # several times as fast on processors without AVX-512 FP16
    if model.device.type == "cpu":  # each step of a search of many beams allocates and frees the same large tensors
        tune_cpu_memory()
    return model, tokenizer


def load_exported(
    folder: str | Path, device: str = "auto", precision: str | None = None, **options: Any
) -> tuple[Any, Any]:
    """Return a model exported to CTranslate2 and its tokenizer, for `Translator`.

    Args:
        folder, device: as in `load_for_decoding`.
        precision: what CTranslate2 computes in; by default what the weights are stored in, or the nearest there is.
        **options: `threads` for one batch, 0 for CTranslate2's own choice; `patience`: a search ends when
            `patience * num_beams` hypotheses have ended, by default 1, and 2 for n-best lists. More is slower.

    Raises:
        UserError: for a folder that holds no such model, or a device or precision that CTranslate2 has not.
    """
    with reading("exported models (pip install 'vaswani_transformer[ctranslate2]')"):
        import ctranslate2

    from .ctranslate2_model import CTranslate2Model

    if device in ("auto", "cuda"):  # each of several processes its own GPU
        count = ctranslate2.get_cuda_device_count()
        try:
            if count and device == "auto":
                # Or the first product fails; Windows' PATH is searched, too.
                ctypes.CDLL("cublas64_12.dll" if os.name == "nt" else "libcublas.so.12", winmode=0)
        except OSError:
            logger.warning("on the CPU, since CTranslate2 finds no cuBLAS 12 for the GPU")
            count = 0
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % count}" if count else device.replace("auto", "cpu")
    return CTranslate2Model(folder, device, precision or "default", **options), open_tokenizer(folder)


def int8_folder(folder: str | Path) -> Path:
    """Return the folder of a model exported to CTranslate2 in int8, made on first use.

    It is in `$XDG_CACHE_HOME`, by default `~/.cache`, named by the model's hash, and appears whole or not at all.
    Errors as in `export_model`; `NotExpressibleError` for a model that CTranslate2 has nothing for.
    """
    final = cache_folder("int8") / model_sha256(folder)
    if not final.is_dir():
        from .exporting import export_model

        logger.info(f"converting {folder} to int8, once: {final}")
        with tempfile.TemporaryDirectory(dir=final.parent) as temporary:
            export_model(folder, Path(temporary) / "model", quantization="int8")
            with contextlib.suppress(OSError):  # another process has been faster
                (Path(temporary) / "model").rename(final)
    return final
