"""`pipeline("translation", model=...)` for any encoder-decoder model, as it was called in transformers 4."""

from pathlib import Path
from typing import Any

import transformers
from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines.base import Pipeline

from ..errors import reading
from ..exported import refuse_exported
from ..model.pipeline_vaswani import PIPELINES

_OF_HUB = ("revision", "token", "local_files_only", "code_revision")


def pipeline(
    task: str | None = None,
    model: Any = None,
    config: Any = None,
    tokenizer: Any = None,
    *,
    device: Any = None,
    device_map: Any = None,
    dtype: Any = "auto",
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
        device: such as `"cpu"`, `"cuda:0"`, `0`; by default the first accelerator, if any.
        device_map: spread the model over devices; not together with `device`.
        dtype: such as `"bfloat16"` or `torch.float16`; `"auto"` is what the model was saved in.
        trust_remote_code, model_kwargs: for `from_pretrained`, as are `revision` and `token` among the options. Models
            of this package need no `trust_remote_code`. Without it no code beside a model runs, and no question about
            it is asked.
        pipeline_class: a class of your own in place of the task's.
        **options: of [`Text2TextGenerationPipeline`] and of `generate()`. Earlier names still work: `torch_dtype` for
            `dtype`, and `framework`, which has no effect now.

    Raises:
        UserError: for a task of this module, with the library's reason, where the model cannot be loaded, is exported
            or not an encoder-decoder model, has no tokenizer, or where a device or option is wrong.
    """
    dtype = options.pop("torch_dtype", dtype)
    options.pop("framework", None)  # transformers 5 has PyTorch only
    # None would have transformers ask on the terminal.
    hub = {"trust_remote_code": bool(trust_remote_code)}
    hub |= {name: options.pop(name) for name in _OF_HUB if name in options}
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
    hub |= {name: value for name, value in (model_kwargs or {}).items() if name in ("cache_dir", "subfolder")}
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
    use_fast = options.pop("use_fast", True)
    with reading(name or task):
        if isinstance(model, str):
            if isinstance(config, str):
                config = AutoConfig.from_pretrained(config, **hub)
            loading = {"dtype": dtype, "device_map": device_map, **({"config": config} if config else {}), **hub}
            model = AutoModelForSeq2SeqLM.from_pretrained(model, **loading | (model_kwargs or {}))
        if not callable(tokenizer):
            source, more = tokenizer if isinstance(tokenizer, tuple) else (tokenizer or name, {})
            with reading(f"tokenizer {source}"):
                tokenizer = AutoTokenizer.from_pretrained(str(source), **{"use_fast": use_fast, **hub, **more})
        return (pipeline_class or PIPELINES[kind])(
            model=model, tokenizer=tokenizer, task=task, device=device, **options
        )


def _infer_task(model: Any, config: Any, hub: dict[str, Any]) -> str | None:
    """Return a task of this module that fits a model, or `None`: transformers may know what to do with it."""
    config = config or (model if isinstance(model, str) else getattr(model, "config", None))
    if isinstance(config, str):
        with reading(config):
            config = AutoConfig.from_pretrained(config, **hub)
    named = getattr(config, "custom_pipelines", None)
    named = [task for task in PIPELINES if task in named] if isinstance(named, dict) else []
    if len(named) == 1:
        return named[0]
    remote = getattr(config, "auto_map", None)
    is_seq2seq = isinstance(remote, dict) and "AutoModelForSeq2SeqLM" in remote
    return "text2text-generation" if is_seq2seq or type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING else None
