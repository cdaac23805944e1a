"""Saving and loading: safetensors only, checked before memory is allocated, with code for users without the package."""

import copy
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: File and class behind `AutoConfig`, `AutoModel` and `AutoModelForSeq2SeqLM` in a saved model.
AUTO_MAP = {
    "AutoConfig": "configuration_vaswani.VaswaniConfig",
    "AutoModel": "modeling_vaswani.VaswaniModel",
    "AutoModelForSeq2SeqLM": "modeling_vaswani.VaswaniForConditionalGeneration",
}
# Weight files hold about as many numbers as the configuration's model; quantized ones, or those without the output
# projection, somewhat fewer. With less than this share they belong to another model.
_LEAST_SHARE = 1 / 4
_HARMLESS = 10**8  # parameters, 400 MB in float32: a model of this size may be loaded from an incomplete file
_ONE_THREAD = 30_000  # numbers: from 32,768 on torch takes several threads
#: Types of weights, as safetensors and torch name them; others would be cast to something else without a word.
WEIGHT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class VaswaniCheckpointMixin:
    """Saving and loading; comes before `PreTrainedModel` in the bases of a model."""

    #: Returns the model card of `push_to_hub`, given the model, the repository and the card that transformers would
    #: push. The package sets it; without the package transformers' card is pushed.
    card_writer: Callable[[object, str, str], str] | None = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, use_safetensors: bool | None = None, **kwargs):
        """Load as `PreTrainedModel` does, from safetensors only.

        Raises:
            ValueError: for `use_safetensors=False`, for weights outside the model's folder, in other types than
                floating point or not finite, and for a configuration that does not belong to the weights.
            OSError: if there are no weights in safetensors.
        """
        if use_safetensors is False:
            raise ValueError("use_safetensors=False asks for pickled weights: this model is read from safetensors only")
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, use_safetensors=True, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        check_finite(model.named_parameters(), str(pretrained_model_name_or_path))
        return loaded

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        # Here the files are known and no memory is allocated yet, unless an adapter is being added to a loaded model.
        if state_dict is None and checkpoint_files and next(model.parameters()).is_meta:
            for file in set(((load_config.sharded_metadata or {}).get("weight_map") or {}).values()):
                if not isinstance(file, str) or Path(file).name != file or "\\" in file:
                    raise ValueError(f"the weight index names {file!r:.200}: it must be a file in the index's folder")
            check_weights(checkpoint_files, model, None if load_config.is_quantized else WEIGHT_TYPES)
        parent = super(VaswaniCheckpointMixin, type(model))
        return parent._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as `PreTrainedModel` does, with the code that users without this package need beside the weights.

        The code, its `auto_map` and the translation pipelines (`custom_pipelines`) are written for classes registered
        by `register_for_auto_class`, as importing the package does for its own.
        """
        sharded = type(self)
        if sharded.__module__.startswith("torch."):  # FSDP2 replaces a model's class by one of torch's
            self.__class__ = next(kind for kind in sharded.__mro__ if not kind.__module__.startswith("torch."))
            try:
                return self.save_pretrained(save_directory, *args, **kwargs)
            finally:
                self.__class__ = sharded
        search = getattr(self, "generation_config", None)
        if search is not None:
            getattr(self, "_unset_trainer_defaults", bool)()  # a user's own class may generate in its own way
            penalty, beams = search.length_penalty, search.num_beams or 1
            search.length_penalty = penalty if beams > 1 else None  # or transformers would refuse to save it
        entries = {}  # of an encoder alone, or a user's own class: our files are not written, so none may be named
        if self._auto_class is not None and f"modeling_vaswani.{type(self).__name__}" in AUTO_MAP.values():
            # Imported here to save time; transformers copies the file because it finds this line.
            from .pipeline_vaswani import CUSTOM_PIPELINES

            entries = {"auto_map": dict(AUTO_MAP), "custom_pipelines": copy.deepcopy(CUSTOM_PIPELINES)}
        # transformers too writes entries for what it saves; the model's own configuration stays as it is.
        own, self.config = self.config, copy.deepcopy(self.config)
        for name in ("auto_map", "custom_pipelines"):  # a loaded model may name the code of another repository
            vars(self.config).pop(name, None)
        vars(self.config).update(entries)
        if hasattr(self, "keep_decoder"):  # PEFT's merging unsets what is tied where any of the matrices is another
            source, target = (stack.embed_tokens.weight for stack in (self.model.encoder, self.model.decoder))
            self.config.tie_word_embeddings |= self.lm_head.weight is target
            if source is target and not self.config.shares_embeddings:
                self.config.share_encoder_decoder_embeddings = True
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.config = own
            if search is not None:
                search.length_penalty = penalty

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # The last step of `push_to_hub`, after the card has been written.
        card = Path(working_dir) / "README.md"
        if self.card_writer is not None and card.is_file():
            text = self.card_writer(repo_id, card.read_text(encoding="utf-8"))
            card.write_text(text, encoding="utf-8", newline="\n")
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no number of a tensor is infinite or NaN.

    Of a sharded tensor only the local part is looked at: asking all would wait for the other processes.
    """
    here = tensor.detach()
    here = here.to_local() if hasattr(here, "to_local") else here
    if here.is_meta or not here.is_floating_point() or is_traceable_wrapper_subclass(here):  # the last: quantised
        return True
    # No sum with an infinite number or NaN in it is finite, and a sum is ten times as fast as a look at each number. It
    # may be too large itself, so that only then each is looked at. On a CPU one thread sums a part of this size:
    # after work on several, a process that is forked, such as a worker that loads data, could hang.
    wide = None if here.dtype == torch.float64 else torch.float32
    parts = here.reshape(-1).split(_ONE_THREAD) if here.is_cpu else [here]
    total = torch.stack([part.sum(dtype=wide) for part in parts]).sum()
    return bool(total.isfinite()) or all(bool(part.isfinite().all()) for part in parts)


def check_finite(weights: Iterable[tuple[str, torch.Tensor]], where: str) -> None:
    """Raise `ValueError` for the first of named weights that is not finite; `where` says whose they are."""
    for name, tensor in weights:
        if not is_finite(tensor):
            problem = "has numbers that are infinite or NaN, from which every output would be wrong"
            raise ValueError(f"{name} of {where} {problem}: use another checkpoint, or copy the weights again")


def check_weights(files: list[str], model: torch.nn.Module, types: Iterable[str] | None) -> None:
    """Compare the headers of a model's safetensors files with the configuration's model, on the meta device.

    `types` are those of safetensors that the model's weights may have; any if None.

    Raises:
        ValueError: for a damaged file, for a weight of another type, which would be cast in silence, and for a model
            far larger than its weights, which would fill the memory.
    """
    numbers, parameters = 0, model.num_parameters()
    # A file's other entries are not loaded, and a decoder alone may be loaded from the file of a whole model.
    own = {"shared.weight"} | {key.removeprefix("model.") for key in model.state_dict()}
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                parts = [(key, weights.get_slice(key)) for key in weights.keys()]  # noqa: SIM118 (no dictionary)
                headers = [(key, part.get_shape(), part.get_dtype()) for key, part in parts]
        except SafetensorError as error:  # which does not name the file
            raise ValueError(f"{file} is damaged or not complete ({error}): copy or download it again") from error
        for key, shape, kind in headers:
            numbers += math.prod(shape)
            if types is not None and kind not in types and key.removeprefix("model.") in own:
                rule = f"weights must be in one of {', '.join(types)}"
                raise ValueError(f"{key:.200} in {file} has numbers of type {kind}: {rule}")
    if numbers < _LEAST_SHARE * parameters and parameters > _HARMLESS:
        counts = f"it describes a {type(model).__name__} of {parameters:,} parameters, and these hold {numbers:,}"
        raise ValueError(f"the configuration does not fit the weights: {counts}")
