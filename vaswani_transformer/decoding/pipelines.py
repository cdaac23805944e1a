"""`pipeline("translation", model=...)`, as it was called before transformers 5 removed it."""

from pathlib import Path
from typing import Any

import transformers
from transformers.pipelines.base import Pipeline

from ..errors import UserError, reading
from ..exported import refuse_exported
from ..model.pipeline_vaswani import TranslationPipeline

_OF_HUB = ("revision", "token", "local_files_only")


def pipeline(
    task: str | None = None,
    model: Any = None,
    tokenizer: Any = None,
    *,
    device: Any = None,
    device_map: Any = None,
    dtype: Any = "auto",
    trust_remote_code: bool | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **options,
) -> Pipeline:
    """Build a pipeline of a model of this package.

    Args:
        task: `"translation"`, which is the default, `"translation_XX_to_YY"`, or `"text2text-generation"`.
        model: a name on the Hub, a folder, or a loaded model.
        tokenizer: a tokenizer or its name, in place of the model's own.
        device: such as `"cpu"`, `"cuda:0"`, `0`; by default the first accelerator, if any.
        device_map: spread the model over devices; not together with `device`.
        dtype: such as `"bfloat16"` or `torch.float16`; `"auto"` is what the model was saved in.
        trust_remote_code: run the code beside a model. Models of this package need none, and without it none runs.
        model_kwargs: for the model's `from_pretrained`.
        **options: of `TranslationPipeline` and `generate()`; `revision`, `token`, `local_files_only`.

    Raises:
        UserError: with the library's reason, where the model cannot be loaded, is exported or of another architecture,
            has no tokenizer, or where a device or option is wrong.
    """
    kind = "translation" if task is None or task.startswith("translation_") else task
    loading = {"device_map": device_map, "dtype": options.pop("torch_dtype", None) or dtype}  # its name before
    # None would have transformers ask on the terminal.
    hub = {"trust_remote_code": bool(trust_remote_code)}
    hub |= {name: options.pop(name) for name in _OF_HUB if name in options}
    name = model if isinstance(model, str | Path) else getattr(model, "name_or_path", "")
    if kind not in ("translation", "text2text-generation"):
        raise UserError(f"task {task!r} is not translation, translation_XX_to_YY or text2text-generation")
    with reading(name or kind):
        if isinstance(model, str | Path):
            refuse_exported(model)
            loading |= hub | (model_kwargs or {})
            model = transformers.AutoModelForSeq2SeqLM.from_pretrained(model, **loading)
        if not callable(tokenizer):
            with reading(f"tokenizer {tokenizer or name}"):
                tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer or name, **hub)
        return TranslationPipeline(model, tokenizer, task=task or kind, device=device, **options)
