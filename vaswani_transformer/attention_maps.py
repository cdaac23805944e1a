"""Attention weights of a sentence pair, for pictures such as the paper's Figures 3 to 5."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def eager_attention(model) -> Iterator[None]:
    """The model in evaluation mode, with the one implementation of attention that forms the weights."""
    implementation, training = model.config._attn_implementation, model.training
    model.eval().set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
        model.train(training)


@torch.no_grad()
def pass_with_attention(model, batch: dict[str, torch.Tensor]):
    """One pass of a model over a batch, which gives the weights of all its attentions.

    Args:
        model: the model; its attention implementation is changed for the time of the call.
        batch: `input_ids`, `attention_mask` and `labels` as `PairCollator` makes them, on the model's device.

    Returns:
        the model's output, with `encoder_attentions`, `decoder_attentions` and `cross_attentions`: of each layer
        `(batch_size, num_heads, queries, keys)`.
    """
    with eager_attention(model):
        return model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(batch["labels"]),
            output_attentions=True,
            use_cache=False,
        )


@torch.no_grad()
def encoder_decoder_attention(
    model, tokenizer, source: str, target: str | None = None, layer: int = -1
) -> tuple[np.ndarray, list[str], list[str]]:
    """How the decoder looks at the source while it writes a target.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        source: a sentence.
        target: its translation; the model's own when not given.
        layer: decoder layer, from 0, or from the end when negative.

    Returns:
        weights `(num_heads, target_length, source_length)`, and the tokens of source and target as text.

    Raises:
        IndexError: for a layer that the decoder does not have.
    """
    inputs = tokenizer([source], return_tensors="pt").to(model.device)
    if target is None:
        with eager_attention(model):
            outputs = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        target = tokenizer.decode(outputs[0], skip_special_tokens=True)
    labels = tokenizer([target], return_tensors="pt")["input_ids"].to(model.device)
    output = pass_with_attention(model, {**inputs, "labels": labels})
    weights = output.cross_attentions[layer][0].float().cpu().numpy()
    words = [[tokenizer.decode([token]).strip() for token in ids[0].tolist()] for ids in (inputs["input_ids"], labels)]
    return weights, *words
