"""Configuration of the Transformer of "Attention Is All You Need" (Vaswani et al., 2017, arXiv 1706.03762v7)."""

import copy
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

# Changes to the base model, row by row of Table 3, in the table's own order.
_BASE = {"d_model": 512, "d_ff": 2048, "num_heads": 8, "encoder_layers": 6, "decoder_layers": 6, "dropout": 0.1}
_BIG = {**_BASE, "d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3}
_WIDE = {"d_model": 1024, "d_k": 128, "d_v": 128}
_FOUR_LAYERS = {"encoder_layers": 4, "decoder_layers": 4}
PRESETS: dict[str, dict] = {
    "base": _BASE,
    "table3-a-heads-1": {"num_heads": 1, "d_k": 512, "d_v": 512},
    "table3-a-heads-4": {"num_heads": 4, "d_k": 128, "d_v": 128},
    "table3-a-heads-16": {"num_heads": 16, "d_k": 32, "d_v": 32},
    "table3-a-heads-32": {"num_heads": 32, "d_k": 16, "d_v": 16},
    "table3-b-dk-16": {"d_k": 16},
    "table3-b-dk-32": {"d_k": 32},
    "table3-c-layers-2": {"encoder_layers": 2, "decoder_layers": 2},
    "table3-c-layers-4": _FOUR_LAYERS,
    "table3-c-layers-8": {"encoder_layers": 8, "decoder_layers": 8},
    "table3-c-dmodel-256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "table3-c-dmodel-1024": _WIDE,
    "table3-c-dff-1024": {"d_ff": 1024},
    "table3-c-dff-4096": {"d_ff": 4096},
    "table3-d-dropout-0.0": {"dropout": 0.0},
    "table3-d-dropout-0.2": {"dropout": 0.2},
    "table3-d-smoothing-0.0": {"label_smoothing": 0.0},
    "table3-d-smoothing-0.2": {"label_smoothing": 0.2},
    "table3-e-learned-positions": {"position_encoding": "learned"},
    "big": _BIG,
    "base-en-fr": {**_BASE, "vocab_size": 32_000},
    "big-en-fr": {**_BIG, "vocab_size": 32_000, "dropout": 0.1},
    # Section 6.3 gives the layers, d_model and the vocabulary and leaves "all other parameters" as in the base model.
    # It does not print its dropout; 0.2 on residuals and attention is what the authors' released code set.
    "parsing": {**_WIDE, **_FOUR_LAYERS, "vocab_size": 16_000, "dropout": 0.2, "attention_dropout": 0.2},
    # Not the paper's: fast because most of their layers are in the encoder, which reads a sentence once. They learn
    # from a larger model's translations (Kim and Rush, 2016, arXiv 1606.07947).
    "student-12-1": {"encoder_layers": 12, "decoder_layers": 1},  # Kasai et al., 2021, arXiv 2006.10369
    "student-6-2": {"encoder_layers": 6, "decoder_layers": 2},  # Kim et al., 2019, WNGT
}
PRESETS |= {name: _BASE | row for name, row in PRESETS.items() if name.startswith("table3")}

# Far beyond any model of this kind (400 GB in float32): a configuration that asks for more is damaged or hostile, and
# building its model would only fill the memory.
_MAX_PARAMETERS, _MAX_LAYERS, _MAX_OFFSET = 10**11, 1_000, 1_000

# Entries that decide how a model is run, not what it is. Some make transformers fetch and run code (a kernel named by
# `attn_implementation`), so that a file may not set them; an argument of `from_pretrained` may.
_NOT_FROM_FILES = {
    "attn_implementation", "experts_implementation", "fusion_config", "kernel_config", "use_kernels",
    "distributed_config", "per_layer_config", "name_or_path", "transformers_weights",
    "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "sub_configs", "sub_configs_defaults",
    "attribute_map", "keys_to_ignore_at_inference",
    "num_labels",  # has no effect, but transformers builds a table of this many rows before checking anything
}  # fmt: skip


@strict
class VaswaniConfig(PreTrainedConfig):
    r"""Sizes and settings of a `VaswaniModel`; the defaults are the paper's base model (Table 3, first row).

    Args:
        vocab_size (int, defaults to 37000): entries of the vocabulary shared by source and target (Section 5.1).
        decoder_vocab_size (int, optional): entries of the target's vocabulary where it is another one.
        d_model (int, defaults to 512): width of the residual stream and of the embeddings.
        d_ff (int, defaults to 2048): inner width of the feed-forward sublayers (Equation 2).
        num_heads (int, defaults to 8): attention heads, the paper's h.
        d_k (int, optional): width of one head's queries and keys; `d_model // num_heads` when not given.
        d_v (int, optional): width of one head's values; `d_model // num_heads` when not given.
        encoder_layers (int, defaults to 6): layers of the encoder, the paper's N.
        decoder_layers (int, defaults to 6): layers of the decoder.
        dropout (float, defaults to 0.1): the paper's P_drop, on sublayer outputs and on embedding sums (Section 5.4).
        attention_dropout (float, defaults to 0.0): dropout on attention weights.
        activation_dropout (float, defaults to 0.0): dropout after the activation of the feed-forward sublayers.
        activation_function (str, defaults to "relu"): of the feed-forward sublayers: `"relu"` (Equation 2),
            `"gelu"` or `"silu"`.
        label_smoothing (float, defaults to 0.0): share of the target probability that the loss of `forward` spreads
            over the vocabulary (Section 5.4: 0.1). Like dropout it acts in training mode only.
        attention_bias (bool, defaults to False): biases in the attention projections; Section 3.2.2 has none.
        output_bias (bool, defaults to False): a bias in the projection to the vocabulary.
        scale_embedding (bool, defaults to True): embeddings times sqrt(d_model) (Section 3.4).
        add_final_layer_norm (bool, defaults to False): one more layer normalisation after each stack, as
            `torch.nn.Transformer` has.
        position_encoding (str, defaults to "sinusoidal"): `"sinusoidal"` (Section 3.5) or `"learned"` (Table 3 E);
            for models of other toolkits `"sinusoidal-halves"`, the sines before the cosines, or
            `"sinusoidal-tensor2tensor"`, so ordered and with the frequencies of the authors' released code.
        position_offset (int, defaults to 0): number of the first position; for sinusoids only.
        max_position_embeddings (int, defaults to 1024): rows of the position table, in tokens. A limit for learned
            positions only: sinusoids are computed for any position.
        attention_window (int, optional): positions that self-attention sees around each one, half of them to a side
            and its own (Section 4's restricted self-attention, with its r); all positions when not given.
        initialization (str, defaults to "tensor2tensor"): how new weights are drawn: as in the authors' code,
            `"xavier"` (Xavier-uniform for each matrix by itself), or `"normal"`, normal(0, 0.02), as is usual in
            transformers. It has no effect on weights that are loaded.
        layer_norm_eps (float, defaults to 1e-5): added to the variance in layer normalisation.
        tie_word_embeddings (bool, defaults to True): one matrix for both embeddings and the output projection
            (Section 3.4). `False` gives three matrices.
        share_encoder_decoder_embeddings (bool, optional): one matrix for source and target embeddings, tied to
            the output projection or not; as `tie_word_embeddings` when not given, but never for two vocabularies.
        use_cache (bool, defaults to True): keep keys and values between decoding steps.
        bos_token_id, pad_token_id, eos_token_id, decoder_start_token_id (int, default to 0, 1, 2 and 0): special
            tokens as `vaswani tokenizer` numbers them. Padding is not 0 because transformers' beam search fills the
            tail of finished beams with the end token when it is.

    Raises:
        StrictDataclassError: for a value of the wrong type or a rule that `validate_architecture` states.
    """

    model_type = "vaswani"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 (transformers' own form)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "encoder_ffn_dim": "d_ff",
        "decoder_ffn_dim": "d_ff",
        "num_attention_heads": "num_heads",
        "encoder_attention_heads": "num_heads",
        "decoder_attention_heads": "num_heads",
        "num_hidden_layers": "encoder_layers",
        "head_dim": "d_k",
    }

    vocab_size: int = 37_000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int | None = None
    d_v: int | None = None
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    activation_function: Literal["relu", "gelu", "silu"] = "relu"
    label_smoothing: float | int = 0.0
    attention_bias: bool = False
    output_bias: bool = False
    scale_embedding: bool = True
    add_final_layer_norm: bool = False
    position_encoding: Literal["sinusoidal", "learned", "sinusoidal-halves", "sinusoidal-tensor2tensor"] = "sinusoidal"
    position_offset: int = 0
    max_position_embeddings: int = 1024
    attention_window: int | None = None
    initialization: Literal["tensor2tensor", "xavier", "normal"] = "tensor2tensor"
    layer_norm_eps: float | int = 1e-5
    tie_word_embeddings: bool = True
    share_encoder_decoder_embeddings: bool | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    bos_token_id: int | None = 0
    pad_token_id: int = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int = 0

    def __post_init__(self, **kwargs):
        for name in [name for name in kwargs if name in self.attribute_map]:  # heads' widths follow from sizes
            setattr(self, name, kwargs.pop(name))
        if self.num_heads > 0 and self.d_model > 0:
            for name in ("d_k", "d_v"):
                if getattr(self, name) is None:
                    if self.d_model % self.num_heads:
                        sizes = f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}"
                        raise ValueError(f"{sizes}: give {name} too")
                    setattr(self, name, self.d_model // self.num_heads)
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder=None, encoder=None):
        """Return this; to `PreTrainedConfig` a `decoder_...` entry that is not set would be a decoder without one."""
        own = self
        if decoder and not encoder and self.decoder_vocab_size is None:
            own = copy.copy(self)
            own.decoder_vocab_size = self.vocab_size
        return super(VaswaniConfig, own).get_text_config(decoder, encoder)

    @property
    def target_vocab_size(self) -> int:
        """Return the number of entries of the target's vocabulary."""
        return self.vocab_size if self.decoder_vocab_size is None else self.decoder_vocab_size

    @property
    def shares_embeddings(self) -> bool:
        """Return whether one matrix embeds source and target (Section 3.4)."""
        if self.share_encoder_decoder_embeddings is None:
            return self.tie_word_embeddings and self.target_vocab_size == self.vocab_size
        return self.share_encoder_decoder_embeddings

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Read as `PreTrainedConfig` does, without entries of a file that choose how a model is run or hide a method.

        Such as `attn_implementation`, which can name code on the Hub; given as arguments they count.
        """
        is_code = lambda each: callable(each) or (isinstance(each, property) and each.fset is None)  # noqa: E731
        own = {
            name: value
            for name, value in config_dict.items()
            if not (name in _NOT_FROM_FILES or name.startswith("_") or is_code(getattr(cls, name, None)))
        }
        sizes = {cls.attribute_map.get(name, name): value for name, value in kwargs.items()}
        if sizes := {name: value for name, value in sizes.items() if name in ("d_model", "num_heads", "d_k", "d_v")}:
            saved = super().from_dict(dict(own))
            width = saved.d_model // saved.num_heads  # those of heads follow
            own = {name: value for name, value in own.items() if (name, value) not in (("d_k", width), ("d_v", width))}
        return super().from_dict(own | sizes, **kwargs)

    def validate_architecture(self):
        """Check the values of fields; `@strict` calls it on construction and on saving.

        Raises:
            ValueError: naming the field, its value and the rule.
        """

        def check(is_right, name, rule):
            if not is_right:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be {rule}")

        for name in ("vocab_size", "d_model", "d_ff", "num_heads", "d_k", "d_v", "max_position_embeddings"):
            check((getattr(self, name) or 0) > 0, name, "1 or more")
        check(self.target_vocab_size > 0, "decoder_vocab_size", "1 or more, or not given")
        is_right = not self.share_encoder_decoder_embeddings or self.target_vocab_size == self.vocab_size
        rule = f"False, since the vocabularies have {self.vocab_size} and {self.target_vocab_size} entries"
        check(is_right, "share_encoder_decoder_embeddings", rule)
        check(self.attention_window is None or self.attention_window > 0, "attention_window", "1 or more, or not given")
        for name, least in (("encoder_layers", 0), ("decoder_layers", 1)):  # without layers it would not see the source
            check(least <= getattr(self, name) <= _MAX_LAYERS, name, f"{least} or more and at most {_MAX_LAYERS:,}")
        if (parameters := self.num_parameters()) > _MAX_PARAMETERS:
            raise ValueError(f"the sizes make {parameters:,} parameters: at most {_MAX_PARAMETERS:,} are accepted")
        for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            check(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")
        check(0 < self.layer_norm_eps <= 1, "layer_norm_eps", "above 0 and at most 1")
        check(0 <= self.position_offset <= _MAX_OFFSET, "position_offset", f"at least 0 and at most {_MAX_OFFSET:,}")
        rule = "even, since sinusoids come in pairs of sine and cosine (or use position_encoding='learned')"
        check(self.position_encoding == "learned" or self.d_model % 2 == 0, "d_model", rule)
        size = min(self.vocab_size, self.target_vocab_size)
        for name in ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"):
            ids = getattr(self, name)
            is_right = all(token is None or 0 <= token < size for token in (ids if isinstance(ids, list) else [ids]))
            check(is_right, name, f"at least 0 and below the vocabulary size {size}")

    def num_parameters(self) -> int:
        """Count the parameters of a `VaswaniForConditionalGeneration` of these sizes, tied ones once (Table 3)."""
        heads_k, heads_v = self.num_heads * self.d_k, self.num_heads * self.d_v
        attention = 2 * self.d_model * (heads_k + heads_v)
        if self.attention_bias:
            attention += 2 * heads_k + heads_v + self.d_model
        feed_forward = 2 * self.d_model * self.d_ff + self.d_ff + self.d_model
        norm = 2 * self.d_model
        encoder_layer = attention + feed_forward + 2 * norm
        decoder_layer = 2 * attention + feed_forward + 3 * norm
        source, target = self.vocab_size * self.d_model, self.target_vocab_size * self.d_model
        embeddings = target + (0 if self.tie_word_embeddings else target)  # of the target, and the output projection
        embeddings += 0 if self.shares_embeddings else source
        embeddings += self.target_vocab_size if self.output_bias else 0
        positions = 2 * self.max_position_embeddings * self.d_model if self.position_encoding == "learned" else 0
        last_norms = 2 * norm if self.add_final_layer_norm else 0
        layers = self.encoder_layers * encoder_layer + self.decoder_layers * decoder_layer
        return embeddings + positions + layers + last_norms

    @classmethod
    def preset_names(cls) -> list[str]:
        """Return the names that `from_preset` knows: those of the paper in its order, then students."""
        return list(PRESETS)

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "VaswaniConfig":
        """Return a model by name: `"base"`, `"big"`, a row of Table 3, `"parsing"` (Section 6.3), or a student.

        Table 3 prints parameters in rounded millions. With the "about 37000" entries of Section 5.1 and exactly the
        parameters of the paper's equations (no attention biases, one shared embedding matrix, feed-forward biases,
        layer-norm gains and biases) the base model has 63.05M, not 65M. Every base-size row that prints a count rounds
        to it with 41,004 to 41,208 embeddings and with no other number, so the authors' vocabulary was probably larger
        than the text says. The big model has 214.2M, not 213M: no single vocabulary gives both figures.

        Args:
            name: one of `preset_names()`.
            **overrides: fields that differ from the preset, such as `vocab_size=8000`.

        Raises:
            ValueError: for an unknown name, with those that there are.
        """
        if name not in PRESETS:
            raise ValueError(f"no preset named {name!r}: there are {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})
