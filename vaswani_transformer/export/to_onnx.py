"""Export to ONNX by torch's exporter: an encoder, and a decoder that takes and gives its cache.

`encoder.onnx` runs once a sentence: it also gives the keys and values that the decoder's layers attend to.
`decoder.onnx` runs once a step, for a whole prefix or for one token; its cache may be empty at first. Batch and lengths
are free.
"""

import logging
from pathlib import Path

import numpy as np
import onnxruntime
import onnxscript  # noqa: F401 - torch's exporter needs it
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"


class _Encoder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.encoder = model.model.encoder
        self.attentions = nn.ModuleList(layer.encoder_attn for layer in model.model.decoder.layers)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`(batch_size, source_length)` twice; the encoder's output, then keys and values of each decoder layer."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        outputs = [states]
        for attention in self.attentions:
            for projection, width in ((attention.k_proj, attention.d_k), (attention.v_proj, attention.d_v)):
                outputs.append(projection(states).unflatten(-1, (-1, width)).transpose(1, 2))
        return tuple(outputs)


class _Decoder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.decoder, self.lm_head = model.model.decoder, model.lm_head

    def forward(
        self, input_ids: torch.Tensor, encoder_attention_mask: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """`(batch_size, target_length)`, `(batch_size, source_length)`, and keys and values, `(batch_size, num_heads,
        length, width)`: of the target for each layer, then of the source. The logits, then the target's keys and
        values, longer by the new ones.
        """
        layers = len(self.decoder.layers)
        caches = DynamicCache(), DynamicCache()
        for cache, tensors in zip(caches, (past[: 2 * layers], past[2 * layers :]), strict=True):
            for index in range(layers):
                cache.update(tensors[2 * index], tensors[2 * index + 1], index)
        outputs = self.decoder(
            input_ids=input_ids,
            # Read for its length alone, since keys and values are there.
            encoder_hidden_states=encoder_attention_mask[..., None].to(past[0].dtype),
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=EncoderDecoderCache(*caches),
            use_cache=True,
        )
        present = outputs.past_key_values.self_attention_cache
        keys_and_values = (states for layer in present.layers for states in (layer.keys, layer.values))
        return self.lm_head(outputs.last_hidden_state), *keys_and_values


def cache_names(prefix: str, side: str, layers: int) -> list[str]:
    """Return the names of a cache's tensors in the graphs, such as `past_key_values.0.decoder.key`."""
    return [f"{prefix}.{index}.{side}.{kind}" for index in range(layers) for kind in ("key", "value")]


def write(model, tokenizer, output: Path, quantization: str) -> None:
    """Write `encoder.onnx` and `decoder.onnx` into a folder.

    The model is in float32 on the CPU, in evaluation mode, with `TablePositions`. The tokenizer is not looked at, and
    there is one quantization, float32.
    """
    config = model.config
    layers, heads = config.decoder_layers, config.num_heads
    batch, source, target, past = (torch.export.Dim(name) for name in ("batch", "source", "target", "past"))
    # Example inputs; the exporter would take sizes of 0 and 1 for constants.
    sentences = torch.full((3, min(5, len(model.model.encoder.embed_positions.weight))), config.eos_token_id)
    mask = torch.ones_like(sentences)
    encoded = _Encoder(model)(sentences, mask)
    widths = (config.d_k, config.d_v) * layers
    cached = [torch.zeros(3, heads, 2, width) for width in widths]
    options = {"dynamo": True, "opset_version": 18, "external_data": False, "verbose": False}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it remarks on packages that are missing
    past_names = [name for side in ("decoder", "encoder") for name in cache_names("past_key_values", side, layers)]
    torch.onnx.export(
        _Encoder(model).eval(),
        (sentences, mask),
        dynamic_shapes=({0: batch, 1: source}, {0: batch, 1: source}),
        input_names=["input_ids", "attention_mask"],
        output_names=["last_hidden_state", *cache_names("present", "encoder", layers)],
        **options,
    ).save(output / ENCODER)
    torch.onnx.export(
        _Decoder(model).eval(),
        (sentences[:, :2], mask, *cached, *encoded[1:]),
        dynamic_shapes=(
            {0: batch, 1: target},
            {0: batch, 1: source},
            (*({0: batch, 2: past} for _ in widths), *({0: batch, 2: source} for _ in widths)),
        ),
        input_names=["input_ids", "encoder_attention_mask", *past_names],
        output_names=["logits", *cache_names("present", "decoder", layers)],
        **options,
    ).save(output / DECODER)


def largest_difference(output: Path, sample: dict[str, torch.Tensor], logits: torch.Tensor) -> float:
    """Return the largest difference of a logit from the model's; arguments as of that of `to_ctranslate2`."""
    theirs = decode_in_parts(output, **{name: tensor.numpy() for name, tensor in sample.items()})
    return float((logits - torch.from_numpy(theirs))[sample["attention_mask"].bool()].abs().max())


def decode_in_parts(
    folder: Path, input_ids: np.ndarray, attention_mask: np.ndarray, decoder_input_ids: np.ndarray
) -> np.ndarray:
    """Return the logits of a target by onnxruntime, `(batch_size, target_length, vocab_size)`.

    Those of its first half come at once, the rest token by token on the cache.
    """
    paths, options = (str(folder / name) for name in (ENCODER, DECODER)), {"providers": ["CPUExecutionProvider"]}
    encoder, decoder = (onnxruntime.InferenceSession(path, **options) for path in paths)
    encoded = encoder.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})[1:]
    feed, names = {"encoder_attention_mask": attention_mask}, []
    for value in decoder.get_inputs()[2:]:  # the keys and values, (batch_size, num_heads, length, width) each
        if ".encoder." in value.name:
            feed[value.name] = encoded.pop(0)
        else:
            feed[value.name] = np.zeros((len(input_ids), value.shape[1], 0, value.shape[3]), dtype=np.float32)
            names.append(value.name)
    half = (decoder_input_ids.shape[1] + 1) // 2
    logits = []
    for part in np.split(decoder_input_ids, range(half, decoder_input_ids.shape[1]), axis=1):
        new, *present = decoder.run(None, {"input_ids": part, **feed})
        feed.update(zip(names, present, strict=True))
        logits.append(new)
    return np.concatenate(logits, axis=1)
