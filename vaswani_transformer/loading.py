"""Loading saved models: their folder, settings and weights, device and precision."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from threading import RLock

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .data.tokenization import check_tokenizer_matches, load_tokenizer, refuse_special_files
from .errors import UserError, reading
from .exported import refuse_exported
from .hardware import choose_device
from .json_and_yaml import read_json
from .model.checkpoint_vaswani import WEIGHT_TYPES
from .model.configuration_vaswani import VaswaniConfig
from .model.modeling_vaswani import VaswaniForConditionalGeneration

# What transformers calls the searches that the model has; others would be ignored, or fetch code from the Hub.
_SEARCHES = ("greedy_search", "beam_search", "sample", "beam_sample")


def load_model(
    folder: str | Path, device: str = "auto", precision: str | None = None
) -> tuple[VaswaniForConditionalGeneration, PreTrainedTokenizerBase]:
    """Load a saved model in evaluation mode, and its tokenizer.

    Args:
        folder: a folder that `vaswani train` or `save_pretrained` wrote.
        device: where to put the model.
        precision: what it computes in, float32, bfloat16 or float16; as it was saved if not given.

    Raises:
        UserError: for a folder that is missing, incomplete, damaged, exported or not of this architecture, weights that
            are not finite (in this precision either), settings that the search does not support, a tokenizer that does
            not match the model or does not end texts, a device that is not there, or an unknown precision.
    """
    if precision not in (None, "float32", "bfloat16", "float16"):
        raise UserError(f"precision is {precision!r}: it must be one of float32, bfloat16, float16")
    folder = Path(folder)
    check_folder(folder)
    settings = folder / "generation_config.json"
    with quiet_transformers():
        with reading(folder):
            config = read_config(folder)
            if settings.exists():  # transformers lets NaN and a repeated key pass
                read_json(settings)
            model, report = VaswaniForConditionalGeneration.from_pretrained(
                folder, config=config, dtype=precision or "auto", output_loading_info=True, ignore_mismatched_sizes=True
            )
        for kind in ("missing", "unexpected", "mismatched"):
            if keys := report[f"{kind}_keys"]:
                example = min(map(str, keys))  # a name, or a name with the shapes in the file and of config.json
                raise UserError(f"{folder} does not fit its own config.json: {kind} weights, such as {example}")
        for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(model.generation_config, name) is None:  # a generation_config.json without it
                setattr(model.generation_config, name, getattr(model.config, name))
        with reading(settings):
            check_search(model.eval())
    tokenizer = load_tokenizer(folder)
    check_tokenizer_matches(tokenizer, model.config)
    return model.to(device=choose_device(device)), tokenizer


def check_folder(folder: str | Path) -> None:
    """Raise `UserError` for a folder that is missing, or holds no model, an exported one or an adapter."""
    path = Path(folder)
    refuse_exported(path)
    if not (path / "config.json").is_file():
        hint = "training there is not finished" if (path / "checkpoints").is_dir() else "it has no config.json"
        at = f" (of the Hub: hf download {path} --local-dir DIR)" * (len(path.parts) == 2 and not path.parent.exists())
        raise UserError(f"{path} holds no model: {hint}" if path.is_dir() else f"there is no model folder {path}{at}")
    refuse_special_files(path)  # a pipe would be waited for
    if (path / "adapter_config.json").exists():  # transformers would fetch the model that it names
        raise UserError(f"{folder} holds an adapter (adapter_config.json): give the folder of its model")


# These settings, and torch's default type, which transformers changes while it loads, are of the whole process: two
# threads at once would each put back what the other has changed.
_one_at_a_time = RLock()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers while the body runs, in one thread at a time."""
    with _one_at_a_time:
        progress, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
        downloads = not are_progress_bars_disabled()
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if progress:
                transformers_logging.enable_progress_bar()
            if downloads:  # whose bars are switched off with the others
                enable_progress_bars()


def read_config(folder: Path) -> VaswaniConfig:
    """Return the configuration in a folder; no code in it runs. Values of a wrong kind raise errors of any kind."""
    values = read_json(folder / "config.json")
    if (kind := values.get("model_type")) != VaswaniConfig.model_type:
        raise UserError(f"{folder} holds a {kind!r} model: this command takes models of type 'vaswani'")
    types = (None, *(str(kind).removeprefix("torch.") for kind in WEIGHT_TYPES.values()))
    # Weights would be cast to integers, or read as quantized ones, without a word.
    names = [name for name in ("dtype", "torch_dtype") if values.get(name) not in types]
    names += [name for name in ("quantization_config", "compression_config") if values.get(name) is not None]
    if names:
        raise UserError(f"{names[0]} in {folder}/config.json asks for other weights than those of {types[1:]}")
    return VaswaniConfig.from_dict(values)


def check_search(model: VaswaniForConditionalGeneration) -> None:
    """Raise an error of any kind for settings of a model that its search cannot follow."""
    model.open_search()  # transformers checks values and makes all processors
    settings = model.generation_config
    if (search := settings.get_generation_mode()) not in _SEARCHES or settings.guidance_scale not in (None, 1):
        raise ValueError(f"its settings ask for {search.value} or guidance, which this model does not have")
