"""Four small architectures with one tokenizer, and what a user without pipelines writes, for their tests.

A test file takes a fixture of these by its name: `marian = pipeline_models.marian`.
"""

import pytest
import torch
from conftest import tiny_model
from model_folders import save
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig, GPT2Config, GPT2LMHeadModel

from vaswani_transformer import train_tokenizer

TEXTS = [
    "the small dog sees a red house",
    "two birds are playing",
    "my father reads an old book in the garden",
    "red",
]
LIMIT = 40  # positions of the models that have a table
IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
BART_LIKE = {"d_model": 16, "max_position_embeddings": LIMIT, "forced_eos_token_id": None}
for _stack in ("encoder", "decoder"):
    BART_LIKE |= {f"{_stack}_layers": 1, f"{_stack}_attention_heads": 2, f"{_stack}_ffn_dim": 16}
SHORT = {"max_new_tokens": 7}
TRANSLATION = "translation_text"


def randomized(model, scale: float = 3.0, seed: int = 0):
    """The model with random matrices so large that outputs depend on inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(scale * noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def build(name: str, vocab_size: int):
    if name == "vaswani":
        model = tiny_model(seed=5, scale=3.0, vocab_size=vocab_size, decoder_start_token_id=0)
        model.generation_config.num_beams = 4  # as `vaswani train` writes it
    else:
        of_t5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        config = AutoConfig.for_model(name, vocab_size=vocab_size, **(of_t5 if name == "t5" else BART_LIKE), **IDS)
        model = randomized(AutoModelForSeq2SeqLM.from_config(config))
        model.generation_config = GenerationConfig(**IDS)
    return model


def tiny_gpt2(vocab_size: int):
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_embd=8, n_layer=1, n_head=1, n_positions=LIMIT))


def by_hand(model, tokenizer, text: str, **options) -> list[str]:
    """What a user without pipelines writes, one text at a time; 4 beams are the pipelines' default."""
    inputs = tokenizer(text, return_tensors="pt")
    options = {"num_beams": 4, **SHORT, **options}
    return tokenizer.batch_decode(model.generate(**inputs, **options), skip_special_tokens=True)


def texts_by_hand(model, tokenizer, texts=TEXTS, **options) -> list[str]:
    return [by_hand(model, tokenizer, text, **options)[0] for text in texts]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=270)


@pytest.fixture(scope="module")
def marian(tokenizer):
    return build("marian", len(tokenizer))


@pytest.fixture(scope="module")
def marian_folder(marian, tokenizer, tmp_path_factory):
    return save(tmp_path_factory.mktemp("marian"), marian, tokenizer)
