"""A pass of a model that forms the weights of all its attentions, whatever implementation it runs with."""

from collections.abc import Iterator
from contextlib import contextmanager

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
