"""Export to CTranslate2 through its own converter: a loader for `VaswaniConfig`.

Importing this module registers the loader, so that CTranslate2's `TransformersConverter` takes our model folders.
CTranslate2 has one width for a head's queries, keys and values, and so not Table 3's rows B.
"""

from pathlib import Path

import torch
from ctranslate2.converters.transformers import BartLoader, register_loader
from ctranslate2.specs import transformer_spec
from ctranslate2.specs.common_spec import Activation

from ..data.tokenization import SIDES, side_of
from ..exported import NotExpressibleError
from .ctranslate2_model import CTranslate2Model, check_setting

_ACTIVATIONS = {"relu": Activation.RELU, "gelu": Activation.GELU, "silu": Activation.SWISH}


@register_loader("VaswaniConfig")
class VaswaniLoader(BartLoader):
    """Fills CTranslate2's specification of a Transformer from a `VaswaniForConditionalGeneration`."""

    architecture_name = "AutoModelForSeq2SeqLM"

    def get_model_spec(self, model) -> transformer_spec.TransformerSpec:
        """Return the specification, weights filled in; refuses what CTranslate2 cannot express."""
        config = model.config
        only = {"encoder_layers": config.encoder_layers or "1 or more", "attention_window": None, "d_v": config.d_k}
        for name, value in only.items():
            if (own := getattr(config, name)) != value:
                raise NotExpressibleError(f"{name} is {own}, and CTranslate2 has {value} only for such a model")
        options = {
            "pre_norm": config.add_final_layer_norm,  # which alone makes room for these norms; taken back below
            "activation": _ACTIVATIONS[config.activation_function],
            "head_dim": None if config.num_heads * config.d_k == config.d_model else config.d_k,
        }
        spec = transformer_spec.TransformerSpec(
            transformer_spec.TransformerEncoderSpec(config.encoder_layers, config.num_heads, **options),
            transformer_spec.TransformerDecoderSpec(config.decoder_layers, config.num_heads, **options),
        )
        spec.encoder.pre_norm = spec.decoder.pre_norm = False
        for stack in (model.model.encoder, model.model.decoder):
            if stack.layer_norm is None:  # `BartLoader` fills in what a stack has, whatever it is
                del stack.layer_norm
        self.set_encoder(spec.encoder, model.model.encoder)
        self.set_decoder(spec.decoder, model.model.decoder)
        self.set_linear(spec.decoder.projection, model.lm_head)
        return spec

    def set_position_encodings(self, spec, module) -> None:
        """Set the table, of sinusoids too: CTranslate2's own start at position 1 and are another variant."""
        spec.encodings = (module.table if hasattr(module, "table") else module.weight).detach()

    def get_vocabulary(self, model, tokenizer) -> tuple[list[str], list[str]]:
        """Return a token for every id of source and target; ids without one get made-up names."""
        tokens = []
        for side, size in zip(SIDES, (model.config.vocab_size, model.config.target_vocab_size), strict=True):
            names = {number: token for token, number in side_of(tokenizer, side).get_vocab().items()}
            tokens.append([names.get(number, f"<unused {number}>") for number in range(size)])
        return tokens[0], tokens[1]

    def set_vocabulary(self, spec, tokens: tuple[list[str], list[str]]) -> None:
        """Register source and target; CTranslate2 writes one file if they are the same."""
        spec.register_source_vocabulary(tokens[0])
        spec.register_target_vocabulary(tokens[1])

    def set_config(self, config, model, tokenizer) -> None:
        """Set special tokens and the epsilon of layer normalisation; our tokenizer puts the end token itself."""
        (_, tokens), ours = self.get_vocabulary(model, tokenizer), model.config
        config.eos_token = tokens[ours.eos_token_id]
        config.decoder_start_token = tokens[ours.decoder_start_token_id]
        config.bos_token = config.decoder_start_token if ours.bos_token_id is None else tokens[ours.bos_token_id]
        config.unk_token = tokenizer.unk_token or tokens[ours.pad_token_id]
        config.layer_norm_epsilon = float(ours.layer_norm_eps)
        config.add_source_bos = config.add_source_eos = False


def write(model, tokenizer, output: Path, quantization: str) -> None:
    """Write a model in CTranslate2's format into a folder.

    The model is in float32 on the CPU; quantisation works in place and leaves it unusable. `NotExpressibleError` names
    what CTranslate2 does not have.
    """
    for name, value in model.generation_config.to_diff_dict().items():
        check_setting(name, value, " in generation_config.json")
        is_fixed = name in ("eos_token_id", "decoder_start_token_id")
        if is_fixed and value not in (own := getattr(model.config, name), [own]):
            raise NotExpressibleError(f"{name} is {value} in generation_config.json, and the model's is {own}")
    spec = VaswaniLoader()(model, tokenizer)
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(output))


def largest_difference(output: Path, sample: dict[str, torch.Tensor], logits: torch.Tensor) -> float:
    """Return the largest difference of a token's log-probability from the model's, computed on this CPU.

    The `sample` has sentences, ids with the end token, as sources and as targets: `input_ids`, `attention_mask` and
    `decoder_input_ids`, each `(sentences, longest)`. The `logits` of it are the model's own.
    """
    is_token = sample["attention_mask"].bool()
    sentences = [row[kept].tolist() for row, kept in zip(sample["input_ids"], is_token, strict=True)]
    theirs = CTranslate2Model(output, "cpu", "default").score_ids(sentences, sentences, sample["input_ids"].numel())
    ours = logits.log_softmax(dim=-1).gather(-1, sample["input_ids"][..., None])[..., 0]
    return float((ours[is_token] - torch.tensor([x for row in theirs for x in row])).abs().max())  # NaN if one is
