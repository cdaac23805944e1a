"""The Transformer of "Attention Is All You Need" as a Hugging Face-compatible package.

Importing it registers the architecture, so that `AutoModelForSeq2SeqLM.from_pretrained` and its kin load our models.
"""

import importlib

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .errors import UserError
from .model.configuration_vaswani import VaswaniConfig
from .model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel, VaswaniPreTrainedModel

__version__ = "0.1.0"

AutoConfig.register(VaswaniConfig.model_type, VaswaniConfig, exist_ok=True)
AutoModel.register(VaswaniConfig, VaswaniModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VaswaniConfig, VaswaniForConditionalGeneration, exist_ok=True)
# So that saved models carry the code that users without this package need to load them (with trust_remote_code).
VaswaniConfig.register_for_auto_class()
VaswaniModel.register_for_auto_class("AutoModel")
VaswaniForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")


def _write_card(model: VaswaniPreTrainedModel, repo_id: str, card: str) -> str:
    from .hub.model_card import card_for_push

    return card_for_push(model, repo_id, card)


VaswaniForConditionalGeneration.card_writer = _write_card

# Imported when first asked for: whoever only loads a model does not wait for datasets, the Trainer and the metrics.
_LAZY = {
    "AttentionWeights": "attention.weights",
    "BracketMetric": "parsing.evalb",
    "CTranslate2Translator": "export.ctranslate2_model",
    "Ensemble": "decoding.ensemble",
    "NoamSchedulerCallback": "training.schedule",
    "PairCollator": "data.batching",
    "Parser": "parsing.parser",
    "PerplexityMetric": "evaluation.metrics",
    "Recipe": "recipes.recipe",
    "SummarizationPipeline": "model.pipeline_vaswani",
    "Text2TextGenerationPipeline": "model.pipeline_vaswani",
    "TokenBatchSampler": "data.batching",
    "TranslationMetric": "evaluation.metrics",
    "TranslationPipeline": "model.pipeline_vaswani",
    "Tree": "parsing.trees",
    "Translator": "decoding.translator",
    "VaswaniTrainer": "training.trainer",
    "VaswaniTrainingArguments": "training.trainer",
    "align": "attention.alignments",
    "attend": "attention.weights",
    "average_checkpoints": "training.averaging",
    "average_models": "training.averaging",
    "describe_plan": "training.plan",
    "draw_attention": "attention.pictures",
    "encoder_decoder_attention": "attention.weights",
    "export_model": "export.exporting",
    "label_smoothed_cross_entropy": "model.loss_vaswani",
    "load_ensemble": "decoding.ensemble",
    "load_model": "loading",
    "load_pairs": "data.parallel_text",
    "load_recipe": "recipes.recipe",
    "load_tokenizer": "data.tokenization",
    "load_trees": "parsing.parser",
    "make_plan": "training.plan",
    "name_heads": "attention.heads",
    "noam_learning_rate": "training.schedule",
    "noam_scheduler": "training.schedule",
    "open_prepared": "data.prepared",
    "pharaoh": "attention.alignments",
    "pipeline": "decoding.pipelines",
    "prepare": "data.prepare",
    "prepare_for_inference": "decoding.cpu_inference",
    "publish": "hub.push",
    "score_pairs": "decoding.scoring",
    "score_tokens": "decoding.scoring",
    "score_trees": "parsing.evalb",
    "tokenize_pairs": "data.tokenized_pairs",
    "train": "training.run",
    "train_tokenizer": "data.tokenization",
    "write_attention_page": "attention.page",
}

__all__ = [
    "UserError",
    "VaswaniConfig",
    "VaswaniForConditionalGeneration",
    "VaswaniModel",
    "VaswaniPreTrainedModel",
    *_LAZY,
]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
