"""What every format returns to `importing.py`: a model of another toolkit in our terms."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..json_and_yaml import read_json
from ..model.configuration_vaswani import VaswaniConfig

#: Activation functions by the names that fairseq and transformers have for them, and by ours.
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}


@dataclass
class Facts:
    """Where a model comes from, for its card; what is empty or None is not known."""

    toolkit: str  # that trained it, in words, such as "Marian"
    source: str = ""  # name or URL of the original; `importing.py` fills in the name of the source
    license: str | None = None  # the Hub's identifier
    languages: tuple[str, ...] = ()  # ISO 639 codes, source first
    notes: tuple[str, ...] = ()  # sentences about this import


@dataclass
class Imported:
    """A model of another toolkit in our terms."""

    config: VaswaniConfig
    #: Names and shapes of `VaswaniForConditionalGeneration.state_dict()`; tied ones once or under each name.
    weights: dict[str, torch.Tensor]
    tokenizer: PreTrainedTokenizerBase | None  # saved by `save_pretrained`
    facts: Facts
    generation: dict[str, Any] = field(default_factory=dict)  # entries of generation_config.json besides our defaults


@dataclass
class ImportOptions:
    """What a user may say about a source; what is empty or None is detected."""

    vocabularies: tuple[Path, ...] = ()  # one of both sides, or source and target
    bpe_codes: Path | None = None
    positions: str | None = None  # "marian" or "transformers", for folders of MarianMTModel


def model_type(source: Path) -> str | None:
    """Return the `model_type` of a folder's `config.json`, if it is a folder of transformers.

    Raises:
        UserError: for a `config.json` that is damaged.
    """
    if not (source / "config.json").is_file():
        return None
    kind = read_json(source / "config.json").get("model_type")
    return kind if isinstance(kind, str) else None


def only_one(paths: list[Path], folder: Path) -> Path:
    """Return the one model of a folder.

    Raises:
        UserError: there are several, which are named.
    """
    if len(paths) > 1:
        listed = ", ".join(path.name for path in paths[:5])
        raise UserError(f"{folder} holds {len(paths)} models ({listed}): give one of the files")
    return paths[0]


def sizes_of(weights: dict[str, torch.Tensor]) -> dict[str, int | None]:
    """Return the entries of a configuration that the shapes of weights show, which have our names.

    Raises:
        KeyError: with the name of a weight that is missing.
    """
    source, target = (weights[f"model.{stack}.embed_tokens.weight"] for stack in ("encoder", "decoder"))
    sizes = {
        "vocab_size": len(source),
        "decoder_vocab_size": None if len(target) == len(source) else len(target),
        "d_model": source.shape[1],
        "d_ff": len(weights["model.encoder.layers.0.fc1.weight"]),
    }
    for stack in ("encoder", "decoder"):
        numbers = {match[1] for name in weights if (match := re.match(rf"model\.{stack}\.layers\.(\d+)\.", name))}
        sizes[f"{stack}_layers"] = len(numbers)
    return sizes


def embeddings(
    encoder: torch.Tensor, decoder: torch.Tensor, output: torch.Tensor
) -> tuple[dict[str, bool], dict[str, torch.Tensor]]:
    """Return the ties between both embeddings and the output projection, and these matrices under our names.

    Args:
        encoder: `(vocab_size, d_model)`, and `decoder` and `output` of the decoder's vocabulary.

    Returns:
        the entries `tie_word_embeddings` and `share_encoder_decoder_embeddings` of a configuration, by which of the
        matrices are the same, and the weights, each once.
    """
    tied, shared = torch.equal(decoder, output), torch.equal(encoder, decoder)
    ties = {"tie_word_embeddings": tied, "share_encoder_decoder_embeddings": shared}
    if shared:
        return ties, {"model.shared.weight": decoder} | ({} if tied else {"lm_head.weight": output})
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return ties, dict(zip(names, (encoder, decoder, output), strict=True))
