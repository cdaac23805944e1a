"""`pipeline("translation", model=...)` for any encoder-decoder model, as it was called in transformers 4."""

from pathlib import Path
from typing import Any

import transformers
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.pipelines.base import Pipeline

from ..errors import UserError, one_line
from ..exported import refuse_exported
from ..hardware import choose_device, on_cpu
from ..model.pipeline_vaswani import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline

PIPELINES = {
    "translation": TranslationPipeline,
    "text2text-generation": Text2TextGenerationPipeline,
    "summarization": SummarizationPipeline,
}


def pipeline(
    task: str | None = None,
    model: Any = None,
    config: str | PreTrainedConfig | None = None,
    tokenizer: str | tuple[str, dict[str, Any]] | PreTrainedTokenizerBase | None = None,
    *,
    device: Any = None,
    device_map: Any = None,
    dtype: Any = "auto",
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool | None = None,
    model_kwargs: dict[str, Any] | None = None,
    pipeline_class: type[Pipeline] | None = None,
    **options,
) -> Pipeline:
    """Build a pipeline, those that transformers 5 removed included; stands in for `transformers.pipeline`.

    Args:
        task: `"translation"`, `"translation_XX_to_YY"`, `"text2text-generation"` or `"summarization"`, for any
            encoder-decoder model. `None` takes the one task that the model's configuration names under
            `custom_pipelines`, else `"text2text-generation"`. Any other task, and any other model without a task, is
            handed to `transformers.pipeline` as it is.
        model: a name on the Hub, a folder, or a loaded model.
        config: a configuration or its name, in place of the model's own.
        tokenizer: a tokenizer, its name, or its name and options for loading it, in place of the model's own.
        device: such as `"cpu"`, `"cuda:0"`, `0`; by default the first accelerator there is.
        device_map: spread the model over devices; not together with `device`.
        dtype: such as `"bfloat16"` or `torch.float16`; `"auto"` is what the model was saved in.
        revision, token, trust_remote_code, model_kwargs: for `from_pretrained`. Models of this package need no
            `trust_remote_code`. Without it no code beside a model runs, and no question about it is asked.
        pipeline_class: a class of your own in place of the task's.
        **options: of [`Text2TextGenerationPipeline`] and of `generate()`. Earlier names still work: `torch_dtype` for
            `dtype`, and `framework="pt"`, which has no effect now.

    Raises:
        UserError: for a task of this module when no model is given, it cannot be loaded, it is no encoder-decoder
            model, it was exported to another engine, it has no tokenizer, a device is not there, or an option has no
            such value.
    """
    if "torch_dtype" in options:
        dtype = options.pop("torch_dtype")
    if (framework := options.pop("framework", None)) not in (None, "pt"):
        raise UserError(f"framework is {framework!r}: transformers 5 has PyTorch only, so leave it out")
    # None would have transformers ask on the terminal.
    hub = {"revision": revision, "token": token, "trust_remote_code": bool(trust_remote_code)}
    hub |= {name: options.pop(name) for name in ("local_files_only", "code_revision") if name in options}
    model = str(model) if isinstance(model, Path) else model
    if isinstance(model, str):
        refuse_exported(model)
    if task is None and model is not None:
        task = _infer_task(model, config, hub)
    kind = "translation" if task is not None and task.startswith("translation_") else task
    if kind not in PIPELINES:
        options |= {"device": device, "device_map": device_map, "pipeline_class": pipeline_class, **hub}
        return transformers.pipeline(
            task, model, config=config, tokenizer=tokenizer, dtype=dtype, model_kwargs=model_kwargs, **options
        )
    if model is None:
        raise UserError(f"no model was given for {task}: give model=..., a name on the Hub, a folder or a loaded model")
    placed = device_map if device_map is not None else (model_kwargs or {}).get("device_map")
    if device is not None and placed is not None:
        raise UserError(f"device is {device!r} and device_map is {placed!r}: give one of the two")
    if device is not None and not (isinstance(device, int) and (device < 0 or on_cpu())):  # as in transformers
        choose_device(device)  # refused before a model is loaded for it
    use_fast = options.pop("use_fast", True)
    hub |= {name: value for name, value in (model_kwargs or {}).items() if name in ("cache_dir", "subfolder")}
    if isinstance(model, str):
        config = _load_config(config or model, hub)
        if not _is_seq2seq(config):
            raise UserError(
                f"{model!r} is a {config.model_type!r} model: {task} takes encoder-decoder models, those that"
                " AutoModelForSeq2SeqLM loads"
            )
    tokenizer = _load_tokenizer(tokenizer, model, {"use_fast": use_fast, **hub})
    if isinstance(model, str):
        loading = {"config": config, "dtype": dtype, "device_map": device_map, **hub, **(model_kwargs or {})}
        model = _load(AutoModelForSeq2SeqLM, "the model", model, loading)
    try:
        return (pipeline_class or PIPELINES[kind])(
            model=model, tokenizer=tokenizer, task=task, device=device, **options
        )
    except Exception as error:
        raise UserError(f"cannot build the pipeline for {task}: {one_line(error)}") from error


def _infer_task(model: Any, config: Any, hub: dict[str, Any]) -> str | None:
    """A task of this module that fits a model, or `None`."""
    try:
        config = _load_config(config or model, hub) if config or isinstance(model, str) else model.config
    except (UserError, AttributeError):
        if isinstance(model, str) and (Path(model) / "config.json").is_file():
            raise
        return None  # transformers may know what to do with it
    named = getattr(config, "custom_pipelines", None)
    named = [task for task in PIPELINES if task in named] if isinstance(named, dict) else []
    if len(named) == 1:
        return named[0]
    return "text2text-generation" if _is_seq2seq(config) else None


def _is_seq2seq(config: PreTrainedConfig) -> bool:
    remote = getattr(config, "auto_map", None)
    remote = isinstance(remote, dict) and "AutoModelForSeq2SeqLM" in remote
    return remote or type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


def _load(auto_class: type, what: str, name: str, options: dict[str, Any], fix: str = "") -> Any:
    """What `auto_class.from_pretrained` makes of a name; any error in one line."""
    try:
        return auto_class.from_pretrained(name, **options)
    except Exception as error:  # damaged files raise errors of any kind, in `tokenizers` bare Exception
        raise UserError(f"cannot load {what} {name!r}: {one_line(error)}{fix}") from error


def _load_config(name: str | Path | PreTrainedConfig, hub: dict[str, Any]) -> PreTrainedConfig:
    if isinstance(name, PreTrainedConfig):
        return name
    if not isinstance(name, str | Path):
        raise UserError(f"config is of type {type(name).__name__}: give a configuration or its name")
    return _load(AutoConfig, "the configuration of model", str(name), hub)


def _load_tokenizer(tokenizer: Any, model: Any, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer for a pipeline: the user's argument, or the one saved with the model."""
    if isinstance(tokenizer, tuple):
        if len(tokenizer) != 2 or not isinstance(tokenizer[0], str | Path) or not isinstance(tokenizer[1], dict):
            raise UserError("tokenizer is a tuple: it must be a name and a dict of options for loading it")
        tokenizer, options = tokenizer[0], {**options, **tokenizer[1]}
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        if not callable(tokenizer):
            raise UserError(f"tokenizer is of type {type(tokenizer).__name__}: give a tokenizer or its name")
        return tokenizer
    name = str(tokenizer or (model if isinstance(model, str) else getattr(model, "name_or_path", "")))
    if not name:
        raise UserError(f"this {type(model).__name__} came without the name of a tokenizer: give tokenizer=...")
    return _load(AutoTokenizer, "a tokenizer from", name, options, "; give tokenizer=...")
