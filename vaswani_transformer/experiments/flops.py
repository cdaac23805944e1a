"""Counting what a training takes: operations, from the sizes of model and batch, whatever machine it runs on."""

import numpy as np
from numpy.typing import ArrayLike

from ..model.configuration_vaswani import VaswaniConfig

# Share of `tokens_per_batch` that a batch has on the longer side. `TokenBatchSampler` gave 0.996 for 25,000 tokens and
# 400,000 generated pairs: log-normal lengths of mean 30, sides 20% apart.
EXPECTED_FILL = 0.996


def model_flops(
    config: VaswaniConfig, source_lengths: ArrayLike, target_lengths: ArrayLike, training: bool = True
) -> float:
    """Count operations of the model's matrix products on these sentence pairs: a multiplication and addition are two.

    Counted as `torch.utils.flop_counter` does: projections, attention's products of queries with keys and of weights
    with values (whole squares, though the decoder's mask hides half and `attention_window` more), feed-forward
    sublayers, the projection to the vocabulary, and for the backward pass twice as much; nothing else. Divided by
    seconds and by the device's peak it is the model-FLOPs utilisation.

    Args:
        config: the model.
        source_lengths: tokens of each source, `</s>` included, `(pairs,)`; or a number, which counts as one pair. Give
            lengths without padding for what the model has to do, the padded ones for what the device is given to do.
        target_lengths: the same for targets.
        training: forward and backward; `False` for forward alone.
    """
    sources, targets = (np.atleast_1d(np.asarray(x, np.float64)) for x in (source_lengths, target_lengths))
    # Projections to queries and keys, of values and of outputs.
    attention = 4.0 * config.d_model * config.num_heads * (config.d_k + config.d_v)
    half = attention / 2  # of attention over the source: queries and outputs; a source token pays for keys and values
    layer = attention + 4.0 * config.d_model * config.d_ff
    per_source = config.encoder_layers * layer + config.decoder_layers * half
    per_target = config.decoder_layers * (layer + half) + 2.0 * config.d_model * config.target_vocab_size
    per_product = 2.0 * config.num_heads * (config.d_k + config.d_v)  # a query with a key, and its weight with a value
    products = config.encoder_layers * np.dot(sources, sources)
    products += config.decoder_layers * (np.dot(targets, targets) + np.dot(targets, sources))
    forward = per_source * sources.sum() + per_target * targets.sum() + per_product * products
    return float(forward * (3 if training else 1))
