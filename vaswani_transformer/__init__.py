"""The Transformer of "Attention Is All You Need" as a Hugging Face-compatible package.

Importing it registers the architecture, so that `AutoModelForSeq2SeqLM.from_pretrained` and its kin load our models.
It imports neither torch nor transformers: the registration happens when transformers' auto classes are imported, or at
once where they already are.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import wrapt

from .errors import UserError

__version__ = "0.1.0"


def _register_configuration(ours: ModuleType, auto: ModuleType) -> None:
    auto.AutoConfig.register(ours.VaswaniConfig.model_type, ours.VaswaniConfig, exist_ok=True)
    ours.VaswaniConfig.register_for_auto_class()  # saved models bring their code along (for trust_remote_code)


def _register_models(ours: ModuleType, auto: ModuleType) -> None:
    auto.AutoModel.register(ours.VaswaniConfig, ours.VaswaniModel, exist_ok=True)
    auto.AutoModelForSeq2SeqLM.register(ours.VaswaniConfig, ours.VaswaniForConditionalGeneration, exist_ok=True)
    ours.VaswaniModel.register_for_auto_class("AutoModel")
    ours.VaswaniForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
    ours.VaswaniForConditionalGeneration.card_writer = _write_card


def _register_tokenizer(ours: ModuleType, auto: ModuleType) -> None:
    from .model.configuration_vaswani import VaswaniConfig

    auto.AutoTokenizer.register(VaswaniConfig, ours.VaswaniTokenizer, exist_ok=True)
    ours.VaswaniTokenizer.register_for_auto_class()


def _write_card(model, repo_id: str, card: str) -> str:
    from .hub.model_card import card_for_push

    return card_for_push(model, repo_id, card)


def _register_when_imported(ours: str, auto: str, register: Callable[[ModuleType, ModuleType], None]) -> None:
    """Call `register` with both modules as soon as both are imported; importing either one imports the other.

    Ours leads into transformers, which may import its auto classes midway: then `register` is called when ours is
    finished. Where it is the layers that are half imported, the models are left to the module that imports them next.
    """
    waits, layers = ours == "modeling_vaswani", f"{__package__}.model.layers_vaswani"
    ours, auto = f"{__package__}.model.{ours}", f"transformers.models.auto.{auto}"
    wrapt.register_post_import_hook(lambda _: (waits and layers in sys.modules) or importlib.import_module(ours), auto)
    wrapt.register_post_import_hook(lambda module: register(module, importlib.import_module(auto)), ours)


_register_when_imported("configuration_vaswani", "configuration_auto", _register_configuration)
_register_when_imported("modeling_vaswani", "modeling_auto", _register_models)
_register_when_imported("tokenization_vaswani", "tokenization_auto", _register_tokenizer)

# Imported when first used, so that loading a model does not wait for datasets, the Trainer and the metrics.
_MODULES = {
    "attention.alignments": "align pharaoh",
    "attention.pictures": "draw_attention",
    "attention.weights": "AttentionWeights attend",
    "data.batching": "PackedCollator PairCollator TokenBatchSampler",
    "data.parallel_text": "load_pairs",
    "data.prepare": "prepare",
    "data.prepared": "open_prepared",
    "data.tokenization": "load_tokenizer train_tokenizer",
    "data.tokenized_pairs": "tokenize_pairs",
    "decoding.ensemble": "Ensemble load_ensemble",
    "decoding.pipelines": "pipeline",
    "decoding.scoring": "score_pairs score_tokens",
    "decoding.translator": "Translator",
    "evaluation.metrics": "TranslationMetric bleu_metric perplexity score_translations",
    "export.engine": "load_exported load_for_decoding",
    "export.exporting": "export_model",
    "hub.push": "publish",
    "importing.importing": "import_model",
    "loading": "load_model",
    "model.configuration_vaswani": "VaswaniConfig",
    "model.modeling_vaswani": "VaswaniForConditionalGeneration VaswaniModel VaswaniPreTrainedModel",
    "model.pipeline_vaswani": "TranslationPipeline",
    "model.tokenization_vaswani": "VaswaniTokenizer",
    "parsing.evalb": "score_trees",
    "parsing.parser": "Parser load_trees",
    "parsing.trees": "Tree",
    "recipes.recipe": "Recipe load_recipe",
    "training.averaging": "average_checkpoints average_models",
    "model.loss_vaswani": "label_smoothed_cross_entropy",
    "training.run": "train",
    "training.schedule": "NoamSchedulerCallback noam_learning_rate noam_scheduler",
    "training.trainer": "VaswaniTrainer VaswaniTrainingArguments",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["UserError", *sorted(_MODULE_OF)]


def __getattr__(name: str):
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
