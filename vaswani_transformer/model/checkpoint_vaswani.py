"""Model folders: safetensors only, checked before anything is allocated, and complete for users without this package.

This file travels to the Hub beside the weights: it may import installed libraries and siblings in its own folder only.
"""

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

#: Where a folder that stands alone holds the classes behind `AutoConfig`, `AutoModel` and `AutoModelForSeq2SeqLM`.
AUTO_MAP = {
    "AutoConfig": "configuration_vaswani.VaswaniConfig",
    "AutoModel": "modeling_vaswani.VaswaniModel",
    "AutoModelForSeq2SeqLM": "modeling_vaswani.VaswaniForConditionalGeneration",
}
PORTABLE_ENTRIES = ("auto_map", "custom_pipelines")  # what names code files in a configuration
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Weights that belong to a configuration hold at least as many numbers as its model; quantized ones, or those without
# the output projection, somewhat fewer. Beyond this ratio the two have nothing to do with each other.
_MOST_MISSING = 4
_HARMLESS = 10**8  # numbers, 400 MB in float32: a model of this size may be loaded from an incomplete file


class VaswaniCheckpointMixin:
    """Saving and loading; stands before `PreTrainedModel` in the bases of a model."""

    #: Writes the model card of `push_to_hub` from model, repository and the card that transformers would push. The
    #: package sets it; without the package transformers' card stays.
    card_writer: Callable[[object, str, str], str] | None = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, use_safetensors: bool | None = None, **kwargs):
        """`PreTrainedModel.from_pretrained` that reads safetensors only; see there for the arguments.

        Raises:
            ValueError: for pickled weights (`pytorch_model.bin`, or `use_safetensors=False`), for damaged files, and
                for a configuration that has nothing to do with the weights.
            OSError: where there are no weights.
        """
        if use_safetensors is False:
            raise ValueError("use_safetensors=False asks for pickled weights: this model is read from safetensors only")
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, use_safetensors=True, **kwargs)
        except OSError as error:
            folder = Path(pretrained_model_name_or_path) / (kwargs.get("subfolder") or "")
            if not any((folder / name).is_file() for name in PICKLED_WEIGHTS):
                raise
            raise ValueError(
                f"{folder} holds its weights in {PICKLED_WEIGHTS[0]}, a pickle, which can run code when it is read:"
                f" `vaswani convert {folder}` (of the package vaswani_transformer) writes them as model.safetensors,"
                " reading tensors and nothing else from it"
            ) from error

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs):
        # The files are known here and the model is still without memory; it has some where an adapter is added to it.
        if state_dict is None and checkpoint_files and next(model.parameters()).is_meta:
            check_weights(checkpoint_files, model.num_parameters(), type(model).__name__)
            if not model.config.tie_word_embeddings:
                state_dict = untied_weights(checkpoint_files)
        parent = super(VaswaniCheckpointMixin, type(model))
        return parent._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """`PreTrainedModel.save_pretrained`, with the code that users without this package need beside the weights.

        The code, its `auto_map` and the translation pipelines (`custom_pipelines`) are written for the classes that
        `register_for_auto_class` has been called for; importing the package does so for its own.
        """
        sharded = type(self)
        if sharded.__module__.startswith("torch."):  # FSDP2 gives a model a class of torch's; its code is not ours
            self.__class__ = next(kind for kind in sharded.__mro__ if not kind.__module__.startswith("torch."))
            try:
                return self.save_pretrained(save_directory, *args, **kwargs)
            finally:
                self.__class__ = sharded
        for module in self.modules():  # layers made for inference alone refuse, before a file is written
            getattr(module, "refuse_saving", bool)()
        if getattr(self, "generation_config", None) is not None:
            self._take_back_defaults()
        if self._auto_class is not None and f"modeling_vaswani.{type(self).__name__}" in AUTO_MAP.values():
            # Imported here because it costs time; transformers copies the file because it finds this line.
            from .pipeline_vaswani import CUSTOM_PIPELINES

            self.config.auto_map = dict(AUTO_MAP)  # whatever repository the model came from: its code is here now
            self.config.custom_pipelines = {task: dict(entry) for task, entry in CUSTOM_PIPELINES.items()}
            return super().save_pretrained(save_directory, *args, **kwargs)
        # An encoder alone, or a class derived by a user: our files do not go with it, so nothing may name them.
        entries = {name: vars(self.config).pop(name) for name in PORTABLE_ENTRIES if name in vars(self.config)}
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            vars(self.config).update(entries)  # the configuration may be that of a whole model too

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # The last step of `push_to_hub`; the card is there by now.
        card = Path(working_dir) / "README.md"
        if self.card_writer is not None and card.is_file():
            written = self.card_writer(repo_id, card.read_text(encoding="utf-8"))
            card.write_text(written, encoding="utf-8", newline="\n")
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)


def untied_weights(files: list[str]) -> dict | None:
    """Weights of a tied model with its one matrix under the names of three, for loading it untied.

    Args:
        files: safetensors files.

    Returns:
        tensors by name; None for weights that are untied already.
    """
    names = []
    for file in files:
        with safe_open(file, framework="pt") as weights:
            names += weights.keys()
    shared = next((name for name in names if name.rpartition("shared.weight")[1:] == ("shared.weight", "")), None)
    if shared is None:
        return None
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    matrix, prefix = weights.pop(shared), shared.removesuffix("shared.weight")
    for name in ("lm_head.weight", f"{prefix}encoder.embed_tokens.weight", f"{prefix}decoder.embed_tokens.weight"):
        weights.setdefault(name, matrix.clone())
    return weights


def check_weights(files: list[str], parameters: int, name: str) -> None:
    """Read the headers of weight files and compare their size with the model's; reads no weights.

    Args:
        files: safetensors files.
        parameters: numbers in the model that the configuration describes, tied ones counted once.
        name: of the model's class, for the message.

    Raises:
        ValueError: for a file that is no whole safetensors file, or a model far larger than its weights.
    """
    held = 0
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file} is not a safetensors file: convert it with `vaswani convert FOLDER`")
        try:
            with safe_open(file, framework="pt") as weights:
                for key in weights.keys():  # noqa: SIM118 (no dictionary)
                    numbers = 1
                    for size in weights.get_slice(key).get_shape():
                        numbers *= size
                    held += numbers
        except SafetensorError as error:
            raise ValueError(
                f"{file} is damaged or not complete ({error}): copy or download it again, or use another checkpoint"
            ) from error
    if parameters > max(_MOST_MISSING * held, _HARMLESS):
        raise ValueError(
            f"the configuration does not fit the weights: it describes a {name} of {parameters:,} parameters and the"
            f" weights hold {held:,}; config.json and weights must come from the same model"
        )


__all__ = ["AUTO_MAP", "VaswaniCheckpointMixin", "check_weights", "untied_weights"]
