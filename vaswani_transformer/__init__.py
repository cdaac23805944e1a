"""The Transformer of "Attention Is All You Need" as a Hugging Face-compatible package.

Importing it registers the architecture, so that `AutoModelForSeq2SeqLM.from_pretrained` and its kin load our models.
"""

import importlib

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from .errors import UserError
from .model.configuration_vaswani import VaswaniConfig
from .model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel, VaswaniPreTrainedModel
from .model.tokenization_vaswani import VaswaniTokenizer

__version__ = "0.1.0"

AutoConfig.register(VaswaniConfig.model_type, VaswaniConfig, exist_ok=True)
AutoModel.register(VaswaniConfig, VaswaniModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VaswaniConfig, VaswaniForConditionalGeneration, exist_ok=True)
AutoTokenizer.register(VaswaniConfig, VaswaniTokenizer, exist_ok=True)
# Saved models bring this code along for users without the package (with trust_remote_code).
VaswaniConfig.register_for_auto_class()
VaswaniModel.register_for_auto_class("AutoModel")
VaswaniForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
VaswaniTokenizer.register_for_auto_class()


def _write_card(model: VaswaniPreTrainedModel, repo_id: str, card: str) -> str:
    from .hub.model_card import card_for_push

    return card_for_push(model, repo_id, card)


VaswaniForConditionalGeneration.card_writer = _write_card

# Imported when first used, so that loading a model does not wait for datasets, the Trainer and the metrics.
_MODULES = {
    "attention.alignments": "align pharaoh",
    "attention.heads": "name_heads",
    "attention.page": "write_attention_page",
    "attention.pictures": "draw_attention",
    "attention.weights": "AttentionWeights attend",
    "data.batching": "PackedCollator PairCollator TokenBatchSampler",
    "data.parallel_text": "load_pairs",
    "data.prepare": "prepare",
    "data.prepared": "open_prepared",
    "data.tokenization": "load_tokenizer train_tokenizer",
    "data.tokenized_pairs": "tokenize_pairs",
    "decoding.cpu_inference": "prepare_for_inference",
    "decoding.ensemble": "Ensemble load_ensemble",
    "decoding.pipelines": "pipeline",
    "decoding.scoring": "score_pairs score_tokens",
    "decoding.translator": "Translator",
    "evaluation.metrics": "PerplexityMetric TranslationMetric",
    "export.ctranslate2_model": "CTranslate2Translator",
    "export.exporting": "export_model",
    "hub.push": "publish",
    "importing.importing": "import_model",
    "loading": "load_model",
    "model.pipeline_vaswani": "SummarizationPipeline Text2TextGenerationPipeline TranslationPipeline",
    "parsing.evalb": "BracketMetric score_trees",
    "parsing.parser": "Parser load_trees",
    "parsing.trees": "Tree",
    "recipes.recipe": "Recipe load_recipe",
    "training.averaging": "average_checkpoints average_models",
    "model.loss_vaswani": "label_smoothed_cross_entropy",
    "training.plan": "describe_plan make_plan",
    "training.run": "train",
    "training.schedule": "NoamSchedulerCallback noam_learning_rate noam_scheduler",
    "training.trainer": "VaswaniTrainer VaswaniTrainingArguments",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "UserError",
    "VaswaniConfig",
    "VaswaniForConditionalGeneration",
    "VaswaniModel",
    "VaswaniPreTrainedModel",
    "VaswaniTokenizer",
    *sorted(_MODULE_OF),
]


def __getattr__(name: str):
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
