"""Inputs for small models, passes through them, and how far two results are apart."""

import torch
from conftest import padded_batch

IMPLEMENTATIONS = ["eager", "sdpa"]
# What models of other toolkits have and the paper's has not.
OTHER_TOOLKITS = [
    {"activation_function": "gelu"},
    {"activation_function": "silu", "output_bias": True},
    {"decoder_vocab_size": 31},
    {"share_encoder_decoder_embeddings": False},
    {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": True},
    {"scale_embedding": False, "add_final_layer_norm": True},
    {"position_encoding": "sinusoidal-halves"},
    {"position_encoding": "sinusoidal-tensor2tensor", "position_offset": 2},
    {
        "activation_function": "silu", "output_bias": True, "attention_bias": True, "decoder_vocab_size": 33,
        "add_final_layer_norm": True, "position_encoding": "sinusoidal-tensor2tensor",
    },
]  # fmt: skip


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest expected value."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max())


def batch_of_three(seed: int = 0):
    """A padded source with its mask, and decoder inputs padded on the right (mask as well)."""
    input_ids, attention_mask = padded_batch((7, 4, 2), seed=seed)
    decoder_input_ids, decoder_mask = padded_batch((5, 6, 3), seed=seed + 100)
    decoder_input_ids[:, 0] = 0
    return input_ids, attention_mask, decoder_input_ids, decoder_mask


@torch.no_grad()
def step_by_step(model, input_ids, attention_mask, decoder_input_ids):
    """Logits of one decoder token after another through a cache."""
    encoder_outputs = model.model.encoder(input_ids, attention_mask=attention_mask)
    inputs, logits, cache = {"attention_mask": attention_mask, "encoder_outputs": encoder_outputs}, [], None
    for token in decoder_input_ids.split(1, dim=1):
        outputs = model(**inputs, decoder_input_ids=token, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1)


def embedding_matrices(model) -> list[torch.Tensor]:
    """Of the encoder, of the decoder, of the output: one and the same where they are tied."""
    return [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight]
