"""The Transformer of "Attention Is All You Need" as a Hugging Face-compatible package.

Importing it registers the architecture, so that `AutoModelForSeq2SeqLM.from_pretrained` and its kin load our models.
"""

import importlib

from . import starting as starting  # isort: skip - first, so that Ctrl-C is seen to while the others are imported
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .configuration_vaswani import VaswaniConfig
from .errors import UserError
from .modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel
from .stacks_vaswani import VaswaniPreTrainedModel

__version__ = "0.1.0"

AutoConfig.register(VaswaniConfig.model_type, VaswaniConfig, exist_ok=True)
AutoModel.register(VaswaniConfig, VaswaniModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VaswaniConfig, VaswaniForConditionalGeneration, exist_ok=True)
# So that saved models carry the code that users without this package need to load them (with trust_remote_code).
VaswaniConfig.register_for_auto_class()
VaswaniModel.register_for_auto_class("AutoModel")
VaswaniForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")


def _write_card(model: VaswaniPreTrainedModel, repo_id: str, card: str) -> str:
    from .model_card import card_for_push

    return card_for_push(model, repo_id, card)


VaswaniForConditionalGeneration.card_writer = _write_card

# Imported when first asked for: whoever only loads a model does not wait for datasets, the Trainer and the metrics.
_LAZY = {
    "AttentionWeights": "attention_weights",
    "BracketMetric": "bracket_scores",
    "CTranslate2Translator": "ctranslate2_translation",
    "Ensemble": "ensemble",
    "NoamSchedulerCallback": "schedule",
    "PairCollator": "batching",
    "Parser": "parsing",
    "PerplexityMetric": "metrics",
    "Recipe": "recipe",
    "SummarizationPipeline": "pipeline_vaswani",
    "Text2TextGenerationPipeline": "pipeline_vaswani",
    "TokenBatchSampler": "batching",
    "TranslationMetric": "metrics",
    "TranslationPipeline": "pipeline_vaswani",
    "Tree": "trees",
    "Translator": "translation",
    "VaswaniTrainer": "trainer",
    "VaswaniTrainingArguments": "trainer",
    "align": "alignments",
    "attend": "attention_weights",
    "average_checkpoints": "averaging",
    "average_models": "averaged_model",
    "describe_plan": "plan_text",
    "draw_attention": "attention_pictures",
    "encoder_decoder_attention": "attention_weights",
    "export_model": "exporting",
    "label_smoothed_cross_entropy": "loss",
    "load_ensemble": "ensemble",
    "load_model": "loading",
    "load_pairs": "data",
    "load_recipe": "recipe",
    "load_tokenizer": "tokenization",
    "load_trees": "parsing",
    "make_plan": "plan",
    "name_heads": "attention_report",
    "noam_learning_rate": "schedule",
    "noam_scheduler": "schedule",
    "open_prepared": "prepared",
    "pharaoh": "alignments",
    "pipeline": "pipelines",
    "prepare": "preparation",
    "prepare_for_inference": "inference",
    "publish": "publishing",
    "score_pairs": "scoring",
    "score_tokens": "scoring",
    "score_trees": "bracket_scores",
    "tokenize_pairs": "tokenized_pairs",
    "train": "training",
    "train_tokenizer": "tokenization",
    "write_attention_page": "attention_page",
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
