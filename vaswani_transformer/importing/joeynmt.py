"""Model folders of JoeyNMT 2: `config.yaml`, a checkpoint, two vocabularies, and merges or a SentencePiece model.

What each setting does to the arithmetic was read from JoeyNMT 2.3's `transformer_layers.py`, `encoders.py`,
`decoders.py` and `embeddings.py`.
"""

import re
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError, one_line, shortened
from ..json_and_yaml import read_yaml
from ..model.configuration_vaswani import VaswaniConfig
from .checkpoints import read_checkpoint, tensors_of
from .joeynmt_vocabulary import SpecialSymbols, read_tokenizer, read_vocabularies
from .source import ACTIVATIONS, Facts, Imported, ImportOptions, sizes_of

NAME = "a model of JoeyNMT (.ckpt and config.yaml)"

_CONFIG = "config.yaml"
_ADVICE = "copy it again from the folder that JoeyNMT wrote"
_SAME = ("hidden_size", "ff_size", "num_heads", "activation")  # settings that both stacks must have alike
_POSITIONS = 5000  # rows of JoeyNMT's table of sinusoids
#: Parts of JoeyNMT's names and ours.
_NAMES = [
    (r"^src_embed\.lut", "model.encoder.embed_tokens"),
    (r"^trg_embed\.lut", "model.decoder.embed_tokens"),
    (r"^decoder\.output_layer", "lm_head"),
    (r"^(?=(?:en|de)coder\.)", "model."),
    (r"\.(?:src_src|trg_trg)_att\.", ".self_attn."),
    (r"\.src_trg_att\.", ".encoder_attn."),
    (r"\.([kvq])_layer\.", r".\1_proj."),
    (r"\.output_layer\.", ".out_proj."),
    (r"\.feed_forward\.layer_norm\.", ".final_layer_norm."),
    (r"\.feed_forward\.pwff_layer\.0\.", ".fc1."),
    (r"\.feed_forward\.pwff_layer\.3\.", ".fc2."),
    (r"(?<=\d)\.(?:x_)?layer_norm\.", ".self_attn_layer_norm."),
    (r"\.dec_layer_norm\.", ".encoder_attn_layer_norm."),
]


def is_one(source: Path) -> bool:
    """Whether a source is JoeyNMT's: a folder with a configuration and checkpoints, or one of these checkpoints."""
    if source.is_dir():
        return (source / _CONFIG).is_file() and any(source.glob("*.ckpt"))
    return source.suffix == ".ckpt" and (source.parent / _CONFIG).is_file()


def read(source: Path, options: ImportOptions) -> Imported:
    """A Transformer of JoeyNMT's in our terms, with its vocabularies.

    Raises:
        UserError: for a file that is missing, damaged or holds more than plain values, a setting without a
            counterpart here, by its name, and vocabularies that do not fit.
    """
    given, source = (None, source) if source.is_dir() else (source, source.parent)
    path = source / _CONFIG
    config = _Section(read_yaml(path, _ADVICE), "", path)
    model, data = config.section("model"), config.section("data")
    encoder, decoder = model.section("encoder"), model.section("decoder")
    _check(model, encoder, decoder)
    checkpoint = given or _checkpoint(source, config)
    weights = _renamed(tensors_of(read_checkpoint(checkpoint, _ADVICE), "model_state", checkpoint))
    symbols = SpecialSymbols.read(data)
    try:
        ours, generation = _config(model, encoder, weights, symbols), _search(config, symbols)
    except KeyError as error:
        raise UserError(f"{checkpoint} is no whole model of JoeyNMT: {one_line(error)}") from error
    except Exception as error:  # values of a wrong kind make errors of many kinds
        raise UserError(f"{path} has settings that make no model: {one_line(error)}") from error
    sizes = ours.vocab_size, ours.target_vocab_size
    vocabularies = read_vocabularies(source, data, options.vocabularies, symbols, sizes)
    tokenizer, notes = read_tokenizer(source, data, options.bpe_codes, symbols, vocabularies)
    languages = tuple(str(data.section(side).get("lang", "")) for side in ("src", "trg"))
    facts = Facts(toolkit="JoeyNMT", languages=languages if all(languages) else (), notes=notes)
    return Imported(ours, weights, tokenizer, facts, generation)


class _Section(dict):
    """A part of a configuration that knows its name, for messages."""

    def __init__(self, values: Any, name: str, path: Path):
        if not isinstance(values, dict):
            raise UserError(f"{path} has no section {name or 'at all'}, as those of JoeyNMT 2 have: {_ADVICE}")
        super().__init__(values)
        self.name, self.path = name, path

    def section(self, name: str) -> "_Section":
        """A part of this part."""
        return _Section(self.get(name), f"{self.name}.{name}".lstrip("."), self.path)

    def refuse(self, name: str, value: Any, reason: str) -> UserError:
        """An error about one setting of this part."""
        value = shortened(str(value), 60)
        return UserError(f"{self.path} has {self.name}.{name}: {value} and cannot be imported: {reason}")


def _check(model: _Section, encoder: _Section, decoder: _Section) -> None:
    """Refuse what computes something else than our model, by the setting's name."""
    # The second values are JoeyNMT's where a setting is missing.
    for stack, default_type, default_norm in ((encoder, "recurrent", "pre"), (decoder, "transformer", "post")):
        if (kind := stack.get("type", default_type)) != "transformer":
            raise stack.refuse("type", kind, "only Transformers can be")
        if (norm := stack.get("layer_norm", default_norm)) != "post":
            raise stack.refuse("layer_norm", norm, "only post-norm models can be, whose layers normalise their output")
        if (alpha := stack.get("alpha", 1.0)) != 1:
            raise stack.refuse("alpha", alpha, "only residual connections of weight 1 can be")
        if (activation := stack.get("activation", "relu")) not in ACTIVATIONS:
            raise stack.refuse("activation", activation, f"only {', '.join(ACTIVATIONS)} can be")
    defaults = {"hidden_size": 512, "ff_size": 2048, "activation": "relu"}
    for name in _SAME:
        # By default JoeyNMT's stacks have other numbers of heads.
        values = [stack.get(name, defaults.get(name, heads)) for stack, heads in ((encoder, 4), (decoder, 8))]
        if values[0] != values[1]:
            raise decoder.refuse(name, values[1], f"the encoder has {shortened(str(values[0]), 60)}")
    scales = [bool(stack.section("embeddings").get("scale", False)) for stack in (encoder, decoder)]
    if scales[0] != scales[1] and not model.get("tied_embeddings"):
        raise decoder.refuse("embeddings.scale", scales[1], f"the encoder has {scales[0]}")


def _checkpoint(source: Path, config: _Section) -> Path:
    """The checkpoint that JoeyNMT would load: the one that the configuration names, the best, or the latest."""
    testing = config.get("testing")
    named = testing.get("load_model") if isinstance(testing, dict) else None
    names = [Path(named).name] if isinstance(named, str) else []
    for name in (*names, "best.ckpt", "latest.ckpt"):
        if (source / name).is_file():
            return source / name
    paths = sorted(path for path in source.glob("*.ckpt") if path.is_file())
    if len(paths) == 1:
        return paths[0]
    raise UserError(f"{source} holds no best.ckpt and {len(paths)} other checkpoints: name the right one best.ckpt")


def _renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters under our names, without the tables of positions, which are computed."""
    weights = {}
    for name, tensor in state.items():
        if name in ("encoder.pe.pe", "decoder.pe.pe"):
            continue
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        weights[name] = tensor
    return weights


def _config(
    model: _Section, encoder: _Section, weights: dict[str, torch.Tensor], symbols: SpecialSymbols
) -> VaswaniConfig:
    dropout = encoder.get("dropout", 0.1)  # of sublayers, and of attention and feed-forward layers within
    ties = bool(model.get("tied_softmax"))
    return VaswaniConfig(
        **sizes_of(weights),
        num_heads=encoder.get("num_heads", 4),
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        activation_function=ACTIVATIONS[encoder.get("activation", "relu")],
        attention_bias=True,
        scale_embedding=bool(encoder.section("embeddings").get("scale", False)),
        position_encoding="sinusoidal",
        max_position_embeddings=_POSITIONS,
        layer_norm_eps=1e-6,
        tie_word_embeddings=ties,
        share_encoder_decoder_embeddings=bool(model.get("tied_embeddings")),
        bos_token_id=symbols.ids["bos"],
        pad_token_id=symbols.ids["pad"],
        eos_token_id=symbols.ids["eos"],
        decoder_start_token_id=symbols.ids["bos"],
    )


_LIKE_OURS = (
    ("max_output_length", "max_new_tokens"), ("repetition_penalty", "repetition_penalty"),
    ("no_repeat_ngram_size", "no_repeat_ngram_size"),
)  # fmt: skip


def _search(config: _Section, symbols: SpecialSymbols) -> dict[str, Any]:
    """The settings of JoeyNMT's search, whose scores are divided by the paper's term ((5 + |Y|) / 6)^alpha."""
    testing = config.get("testing") if isinstance(config.get("testing"), dict) else {}
    alpha = testing.get("beam_alpha", testing.get("alpha", -1))
    never = [symbols.ids["bos"], symbols.ids["pad"]]
    if not testing.get("generate_unk", True):
        never.append(symbols.ids["unk"])
    return {
        "num_beams": max(1, int(testing.get("beam_size", 1))),
        "length_penalty": max(0.0, float(alpha)),
        "suppress_tokens": sorted(never),
        "min_new_tokens": max(0, int(testing.get("min_output_length", 1))),
        **{name: testing[theirs] for theirs, name in _LIKE_OURS if float(testing.get(theirs) or 0) > 0},
    }
