"""Floating-point operations of the model, counted from its sizes: what a step costs whatever machine it runs on."""

from collections.abc import Sequence

import numpy as np

from ..model.configuration_vaswani import VaswaniConfig
from ..model.local_attention_vaswani import reach


def model_flops(
    config: VaswaniConfig,
    source_lengths: Sequence[float] | np.ndarray | float,
    target_lengths: Sequence[float] | np.ndarray | float,
    training: bool = True,
) -> float:
    """Operations of the model's matrix products on these sentence pairs, a multiplication and an addition counting two.

    Counted as `torch.utils.flop_counter` does: projections, attention's products of queries with keys and of weights
    with values (the decoder's whole square, though its mask hides half), feed-forward sublayers, the projection to the
    vocabulary, and for the backward pass twice as much; nothing else. Of restricted self-attention (`attention_window`)
    the positions in each other's neighbourhood count, whatever a backend computes. Divided by seconds and by the
    device's peak it is the model-FLOPs utilisation.

    Args:
        config: the model.
        source_lengths: tokens of each source, `</s>` included, `(pairs,)`; or a number, which counts as one pair. Give
            lengths without padding for what the model has to do, the padded ones for what the device is given to do.
        target_lengths: the same for targets.
        training: forward and backward; `False` for forward alone.
    """
    sources, targets = (np.atleast_1d(np.asarray(x, np.float64)) for x in (source_lengths, target_lengths))
    per_source, per_target = flops_per_token(config)
    per_product = 2.0 * config.num_heads * (config.d_k + config.d_v)  # a query with a key, and its weight with a value
    products = config.encoder_layers * neighbours(sources, config.attention_window).sum()
    products += config.decoder_layers * (neighbours(targets, config.attention_window).sum() + np.dot(targets, sources))
    forward = per_source * sources.sum() + per_target * targets.sum() + per_product * products
    return float(forward * (3 if training else 1))


def neighbours(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Pairs of positions of which one is in the other's neighbourhood, itself included, in sequences of these lengths.

    `window` is the size r of the neighbourhood, half of it to either side; None for all positions.
    """
    if window is None:
        return lengths * lengths
    far = np.minimum(reach(window), np.maximum(lengths - 1, 0))
    return lengths * (2 * far + 1) - far * (far + 1)  # a band of the square, without what lies beyond its corners


def flops_per_token(config: VaswaniConfig) -> tuple[float, float]:
    """Forward operations that a source token and a target token cost at any length of their sentences.

    A source token pays for the decoder's keys and values too, a target token for the projection to the vocabulary.
    """
    heads_k, heads_v = config.num_heads * config.d_k, config.num_heads * config.d_v
    attention = 4.0 * config.d_model * (heads_k + heads_v)  # queries and keys, values and outputs
    half = attention / 2  # of attention over the source: queries and outputs; keys and values fall to the source
    feed_forward = 4.0 * config.d_model * config.d_ff
    source = config.encoder_layers * (attention + feed_forward) + config.decoder_layers * half
    target = config.decoder_layers * (attention + half + feed_forward) + 2.0 * config.d_model * config.target_vocab_size
    return source, target
