"""Export to Marian: `model.npz` with its options inside, vocabularies, and settings for marian-decoder.

A model with Marian's own layout (one that came from there, as all of OPUS-MT) becomes `type: transformer`, which every
version of Marian decodes. All others become `type: transformer-new` of Marian 1.12, with their positions as a table.
That table's first row has the embedding of the decoder's start token, since Marian's decoder starts from zeros.
"""

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from .. import __version__
from ..data.tokenization import side_of
from ..errors import UserError
from ..marian_format import ACTIVATIONS, CONFIG, EOS, LAYER_NORM_EPS, NEW, NO_PROBABILITY, OLD, UNK, stack_parameters
from ..model.configuration_vaswani import VaswaniConfig

_MODEL, _SETTINGS, _JOINT, *_SIDES = "model.npz", "decoder.yml", "vocab.yml", "source.yml", "target.yml"
_BLOCK = 256  # bytes; options are filled up with NULs to a multiple
# Signs in names of pieces by which `importing/sentencepiece.py` keeps texts apart from them.
_SIGNS = str.maketrans({"\ufff2": "<", **dict.fromkeys("\ufff4\ufff5\ufff6")})
# Characters that YAML does not allow, or takes for the end of a line, unless they are escaped.
_UNPRINTABLE = re.compile("[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]")


def type_of(model) -> str:
    """Return Marian's `type` for a model; `UserError` names a field that it does not have, and what Marian has."""
    config = model.config
    start = model.model.decoder.embed_tokens.weight[config.decoder_start_token_id]
    layout = config.position_encoding, config.position_offset, config.scale_embedding, config.layer_norm_eps
    is_old = layout == ("sinusoidal-tensor2tensor", 0, True, LAYER_NORM_EPS[OLD]) and not start.any()
    type, width = OLD if is_old else NEW, config.d_model / config.num_heads
    only = {"attention_window": None, "d_k": width, "d_v": width, "layer_norm_eps": LAYER_NORM_EPS[type]}
    for name, value in only.items():
        if (own := getattr(config, name)) != value:
            problem = f"{name} is {own}: `type: {type}` of Marian has {value}"
            raise UserError(f"{problem}, so this model cannot be exported to it")
    return type


def write(model, tokenizer, output: Path, quantization: str = "float32") -> None:
    """Write a model in float32, the one quantization, and its tokenizer into a folder; errors as in `type_of`."""
    type = type_of(model)
    with torch.no_grad():
        arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in _arrays(model, type).items()}
    sizes = [len(arrays.get("Wemb", arrays.get(name))) for name in ("encoder_Wemb", "decoder_Wemb")]
    options = yaml.safe_dump(_options(model.config, type, sizes), sort_keys=False).encode("utf-8") + b"\0"
    arrays[CONFIG] = np.frombuffer(options.ljust(-(-len(options) // _BLOCK) * _BLOCK, b"\0"), dtype=np.int8)
    # As Marian's reader knows archives: numpy.savez would write headers of 64 bits, which it does not.
    with zipfile.ZipFile(output / _MODEL, "w", zipfile.ZIP_STORED, allowZip64=False) as archive:
        for name, array in sorted(arrays.items()):
            content = io.BytesIO()
            np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
            archive.writestr(f"{name}.npy", content.getvalue())
    sides = [side_of(tokenizer, name) for name in ("source", "target")]
    texts = [_vocabulary(side, model.config, size) for side, size in zip(sides, sizes, strict=True)]
    names = [_JOINT] * 2 if texts[0] == texts[1] else _SIDES
    for name, text in zip(names, texts, strict=True):
        (output / name).write_text(text, encoding="utf-8")
    settings = {"relative-paths": True, "models": [_MODEL], "vocabs": names} | _settings(model, tokenizer, type)
    (output / _SETTINGS).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def _arrays(model, type: str) -> dict[str, torch.Tensor]:
    """Return all parameters under Marian's names."""
    config, own = model.config, model.state_dict()
    arrays = {}
    for ours, (name, kind) in stack_parameters(config, type).items():
        tensor = own.get(ours)
        if tensor is None:  # a bias of attention
            tensor = torch.zeros(len(own[ours.replace("bias", "weight")]))
        arrays[name] = tensor.T if kind == "matrix" else tensor[None] if type == OLD else tensor
    if type == NEW:
        for name, stack in (("encoder", model.model.encoder), ("decoder", model.model.decoder)):
            table = stack.embed_positions.weight.clone()
            arrays[f"TransformerBatch{name.title()}->{name}->positionEmbedding->embeddings"] = table
        table[0] += stack.embed_tokens.weight[config.decoder_start_token_id] * stack.embed_scale  # the decoder's
    return arrays | _vocabulary_arrays(model, type)


def _vocabulary_arrays(model, type: str) -> dict[str, torch.Tensor]:
    """Return embeddings and output projection, without the ids at their ends that Marian did not have."""
    stacks = model.model.encoder, model.model.decoder
    source, target = (stack.embed_tokens.weight for stack in stacks)
    output = model.lm_head.weight
    bias = torch.zeros(len(output)) if model.lm_head.bias is None else model.lm_head.bias
    known = 1 + int((bias > NO_PROBABILITY / 2).nonzero().max())  # half: bfloat16 rounds it
    known_source = known if source is target else 1 + int(source.any(dim=1).nonzero().max())
    source, target, output, bias = source[:known_source], target[:known], output[:known], bias[None, :known]
    arrays = {"encoder_Wemb": source, "decoder_Wemb": target, "decoder_ff_logit_out_Wt": output}
    if type == NEW:  # which does not scale where positions are a table
        scale = stacks[0].embed_scale
        arrays |= {"encoder_Wemb": source * scale, "decoder_Wemb": target * scale}
    else:
        if model.config.shares_embeddings:
            arrays = {"Wemb": target, "decoder_ff_logit_out_Wt": output}
        if model.config.tie_word_embeddings:
            del arrays["decoder_ff_logit_out_Wt"]
    return {**arrays, "decoder_ff_logit_out_b": bias}


def _options(config: VaswaniConfig, type: str, sizes: list[int]) -> dict[str, Any]:
    """Return Marian's options of a model, which it reads out of the `.npz` file."""
    source, output = config.shares_embeddings and type == OLD, config.tie_word_embeddings and type == OLD
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation_function)
    return {
        "type": type,
        "dim-vocabs": sizes,
        "dim-emb": config.d_model,
        "enc-depth": config.encoder_layers,
        "dec-depth": config.decoder_layers,
        "transformer-heads": config.num_heads,
        "transformer-dim-ffn": config.d_ff,
        "transformer-decoder-dim-ffn": 0,
        "transformer-ffn-depth": 2,
        "transformer-decoder-ffn-depth": 0,
        "transformer-ffn-activation": activation,
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
        "transformer-postprocess-emb": "d",
        "transformer-postprocess-top": "n" if config.add_final_layer_norm else "",
        "transformer-decoder-autoreg": "self-attention",
        "transformer-train-position-embeddings": type == NEW,
        "transformer-no-projection": False,
        "transformer-tied-layers": [],
        "tied-embeddings-all": source and output,
        "tied-embeddings-src": source and not output,
        "tied-embeddings": output and not source,
        "input-types": [],
        "layer-normalization": False,
        "right-left": False,
        "skip": False,
        "version": f"vaswani_transformer {__version__}",
    }


def _settings(model, tokenizer, type: str) -> dict[str, Any]:
    """Return the settings of marian-decoder: as much of our search as it has."""
    generation = model.generation_config
    # In Marian, a table of positions has `max-length` rows, and ends the program where a sentence is longer.
    rows = len(model.model.encoder.embed_positions.weight)
    limits = {"max-length": rows, "max-length-crop": True} if type == NEW else {}
    return {
        "beam-size": generation.num_beams or 1,
        "normalize": 1.0 if (alpha := getattr(generation, "length_penalty", None)) is None else float(alpha),
        "word-penalty": 0,
        "allow-unk": side_of(tokenizer, "target").unk_token_id not in (generation.suppress_tokens or ()),
        "max-length-factor": 3 if limits else 10,  # of a batch's longest source: 3 cut off what short ones need
        "mini-batch": 16,
        "maxi-batch": 100,
        "maxi-batch-sort": "src",
        **limits,
    }


def _vocabulary(tokenizer, config: VaswaniConfig, size: int) -> str:
    """Return the tokens by id in YAML, with Marian's names for the end and the unknown token."""
    tokens = dict(sorted((index, token) for token, index in tokenizer.get_vocab().items() if index < size))
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown >= size:  # every text has ids; padding is in none
        unknown = config.pad_token_id
    tokens |= {config.eos_token_id: EOS, unknown: UNK}
    names = {index: token.translate(_SIGNS) for index, token in tokens.items()}
    text = "".join(f"{json.dumps(name, ensure_ascii=False)}: {index}\n" for index, name in names.items())
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
