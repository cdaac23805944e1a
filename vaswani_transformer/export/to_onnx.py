"""Export to ONNX by torch's exporter, in the files and names of Optimum and of transformers.js for Marian.

`encoder_model.onnx` runs once a sentence. `decoder_model_merged.onnx` runs once a step, for a whole prefix or for one
token, with the caches as inputs and outputs: empty at first, when it computes the source's keys and values too. Batch
and lengths are free. The configuration is that of the Marian model which those programs take it for.
"""

import logging
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxscript  # noqa: F401 - torch's exporter needs it
import torch
from torch import nn
from transformers import MarianConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

ENCODER, DECODER = "onnx/encoder_model", "onnx/decoder_model_merged"
QUANTIZED = "_quantized"  # transformers.js' name for int8, which it takes in browsers


class _Decoder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.decoder, self.lm_head = model.model.decoder, model.lm_head

    def forward(
        self, encoder_attention_mask: torch.Tensor, input_ids: torch.Tensor, states: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """`(batch_size, source_length)`, `(batch_size, target_length)`, the encoder's output, and for each layer keys
        and values of the target, then of the source, `(batch_size, num_heads, length, width)`. The logits, all keys and
        values, longer by the new ones, and the last layer's attention to the source, `(batch_size, num_heads,
        target_length, source_length)`.
        """
        caches, known, length = (DynamicCache(), DynamicCache()), past[2].shape[2], states.shape[1]
        torch._check(known <= length)
        new = states.narrow(1, known, length - known)  # all of them, or none
        for index, layer in enumerate(self.decoder.layers):
            key, value, *source = past[4 * index : 4 * index + 4]
            caches[0].update(key, value, index)
            projections = layer.encoder_attn.k_proj, layer.encoder_attn.v_proj
            for place, (old, projection) in enumerate(zip(source, projections, strict=True)):
                more = projection(new).unflatten(-1, (-1, old.shape[-1])).transpose(1, 2)
                source[place] = torch.cat([old, more], dim=2)
            caches[1].update(*source, index)
        attention: list[torch.Tensor] = []
        watch = self.decoder.layers[-1].encoder_attn.register_forward_hook(lambda *call: attention.append(call[-1][1]))
        outputs = self.decoder(
            input_ids=input_ids,
            encoder_hidden_states=states,  # read for its length alone, since keys and values are there
            encoder_attention_mask=encoder_attention_mask,
            cache=EncoderDecoderCache(*caches),
            use_cache=True,
        )
        watch.remove()
        layers = zip(*(cache.layers for cache in caches), strict=True)
        present = (tensor for pair in layers for side in pair for tensor in (side.keys, side.values))
        return self.lm_head(outputs.last_hidden_state), *present, attention[0]


def cache_names(prefix: str, layers: int) -> list[str]:
    """Return the names of the caches' tensors in the graphs, such as `past_key_values.0.decoder.key`."""
    kinds = [f"{side}.{kind}" for side in ("decoder", "encoder") for kind in ("key", "value")]
    return [f"{prefix}.{index}.{kind}" for index in range(layers) for kind in kinds]


def write(model, tokenizer, output: Path, quantization: str) -> None:
    """Write the graphs in float32, with the `quantization` int8 in that too, and `config.json` into a folder.

    The model is in float32 on the CPU, in evaluation mode, with `TablePositions`. The tokenizer is not looked at.
    """
    config, layers, rows = model.config, model.config.decoder_layers, len(model.model.encoder.embed_positions.weight)
    model.set_attn_implementation("eager")  # which forms the weights of attention
    names = ("batch_size", "source_length", "target_length", "past_length", "past_source_length")
    batch, source, target, past, known = map(torch.export.Dim, names)
    of_source, lengths = {0: batch, 1: source}, (past, past, known, known) * layers
    # Example inputs; the exporter would take sizes of 0 and 1 for constants.
    sentences = torch.full((3, min(5, rows)), config.eos_token_id)
    mask = torch.ones_like(sentences)
    cached = [torch.zeros(3, config.num_heads, 2, width) for width in (config.d_k, config.d_v) * 2 * layers]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it remarks on packages that are missing
    (output / ENCODER).parent.mkdir()
    names, encoder = ["input_ids", "attention_mask"], model.model.encoder
    _save(output / ENCODER, encoder, (sentences, mask), (of_source, of_source), names, ["last_hidden_state"])
    names = ["encoder_attention_mask", "input_ids", "encoder_hidden_states", *cache_names("past_key_values", layers)]
    inputs = (mask, sentences[:, :2], encoder(sentences, mask).last_hidden_state, *cached)
    shapes = (of_source, {0: batch, 1: target}, of_source, tuple({0: batch, 2: length} for length in lengths))
    results = ["logits", *cache_names("present", layers), f"cross_attentions.{layers - 1}"]
    _save(output / DECODER, _Decoder(model).eval(), inputs, shapes, names, results)
    if quantization == "int8":
        for name in (ENCODER, DECODER):
            _quantize(output / f"{name}.onnx", output / f"{name}{QUANTIZED}.onnx")
    same = ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "pad_token_id", "eos_token_id")
    facts = {name: getattr(config, name) for name in (*same, "decoder_start_token_id")}
    facts |= {f"{side}_attention_heads": config.num_heads for side in ("encoder", "decoder")}
    facts |= {f"{side}_ffn_dim": config.d_ff for side in ("encoder", "decoder")}
    facts |= {"decoder_vocab_size": config.target_vocab_size, "max_position_embeddings": rows}
    MarianConfig(**facts, forced_eos_token_id=None, architectures=["MarianMTModel"]).save_pretrained(output)


def _save(path: Path, module: nn.Module, inputs: tuple, shapes: tuple, names: list[str], results: list[str]) -> None:
    options = {"dynamo": True, "opset_version": 18, "external_data": False, "verbose": False}
    options |= {"dynamic_shapes": shapes, "input_names": names, "output_names": results}
    program = torch.onnx.export(module, inputs, **options)
    for node in program.model.graph:
        node.metadata_props.clear()  # half a megabyte in all, with the names of folders on this machine
    program.save(path.with_suffix(".onnx"))


def _quantize(path: Path, output: Path) -> None:
    """Write a graph with matrices in int8 and a scale for each row of a table, and each 32 numbers of other matrices.

    onnxruntime multiplies by the scales when it loads the graph, but for tables, of which it takes few rows. Products
    in int8 are slower in browsers, and by its usual way, with a scale for a column, more translations changed.
    """
    model, make, nodes = onnx.load(path), onnx.helper.make_node, []
    graph, tables = model.graph, {node.input[0] for node in model.graph.node if node.op_type == "Gather"}
    matrices = {each.name: each for each in graph.initializer if len(each.dims) == 2}
    for name, matrix in matrices.items():
        values = onnx.numpy_helper.to_array(matrix)
        rows = values if name in tables or values.size % 32 else values.reshape(-1, 32)
        scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1e-9) / 127
        parts = {"int8": np.rint(rows / scales).astype(np.int8), "scales": scales, "shape": np.array(values.shape)}
        graph.initializer.remove(matrix)
        graph.initializer.extend(onnx.numpy_helper.from_array(x, f"{name}_{part}") for part, x in parts.items())
        nodes.append(make("Cast", [f"{name}_int8"], [f"{name}_float"], to=onnx.TensorProto.FLOAT))
        nodes.append(make("Mul", [f"{name}_float", f"{name}_scales"], [f"{name}_rows"]))
        nodes.append(make("Reshape", [f"{name}_rows", f"{name}_shape"], [name]))
    for node in graph.node:
        if node.op_type == "Gather" and (table := node.input[0]) in matrices:
            [result] = node.output
            nodes += [make("Gather", [f"{table}_{x}", node.input[1]], [f"{result}_{x}"]) for x in ("int8", "scales")]
            nodes.append(make("Cast", [f"{result}_int8"], [f"{result}_float"], to=onnx.TensorProto.FLOAT))
            node = make("Mul", [f"{result}_float", f"{result}_scales"], [result])
        nodes.append(node)
    graph.ClearField("node")
    graph.node.extend(nodes)
    onnx.save(model, output)


def largest_difference(output: Path, sample: dict[str, torch.Tensor], logits: torch.Tensor, kind: str = "") -> float:
    """Return the largest difference of a logit from the model's; arguments as of that of `to_ctranslate2`.

    The graphs are those of this `kind`, the end of their names.
    """
    theirs = decode_in_parts(output, kind=kind, **{name: tensor.numpy() for name, tensor in sample.items()})
    return float((logits - torch.from_numpy(theirs))[sample["attention_mask"].bool()].abs().max())


def decode_in_parts(
    folder: Path, input_ids: np.ndarray, attention_mask: np.ndarray, decoder_input_ids: np.ndarray, kind: str = ""
) -> np.ndarray:
    """Return the logits of a target by onnxruntime, `(batch_size, target_length, vocab_size)`.

    Those of its first half come at once, the rest token by token on the cache.
    """
    paths, providers = [str(folder / f"{name}{kind}.onnx") for name in (ENCODER, DECODER)], ["CPUExecutionProvider"]
    encoder, decoder = (onnxruntime.InferenceSession(path, providers=providers) for path in paths)
    [encoded] = encoder.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})
    feed = {"encoder_attention_mask": attention_mask, "encoder_hidden_states": encoded}
    past = decoder.get_inputs()[3:]  # the keys and values, (batch_size, num_heads, length, width) each
    feed |= {x.name: np.zeros((len(input_ids), x.shape[1], 0, x.shape[3]), dtype=np.float32) for x in past}
    half = (decoder_input_ids.shape[1] + 1) // 2
    logits = []
    for part in np.split(decoder_input_ids, range(half, decoder_input_ids.shape[1]), axis=1):
        new, *present, _ = decoder.run(None, {"input_ids": part, **feed})
        feed.update(zip((value.name for value in past), present, strict=True))
        logits.append(new)
    return np.concatenate(logits, axis=1)
