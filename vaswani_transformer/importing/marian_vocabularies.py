"""Vocabularies of Marian's models as tokenizers of ours: `.yml` and `.spm` files, one for both sides or two.

A `.yml` file gives words their ids and says nothing about how a text becomes words: it is split at spaces, as Marian
itself does, unless SentencePiece models lie beside it as in the archives of OPUS-MT.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import UserError
from ..marian_format import EOS, PAD, UNK, read_vocabulary
from ..model.tokenization_vaswani import VaswaniTokenizer
from .sentencepiece import SentencePieceModel, Unsupported, backend

_AGAIN = "give a vocabulary of Marian's, one line `word: id` an entry"
_SEGMENTERS = ("source.spm", "target.spm")  # in archives of OPUS-MT
_NEMATUS = {EOS: "eos", UNK: "UNK"}  # what ids 0 and 1 may be called in a .yml file


@dataclass
class Vocabulary:
    """One side's entries."""

    path: Path
    ids: dict[str, int]  # of each word, less those beyond the model's matrix
    segmenter: Path | None  # the SentencePiece model that makes words of a text
    eos: int
    unk: int

    def names(self, pad: int) -> list[str]:
        """The words by id, up to and with the padding; ids that the file leaves out get names of their own."""
        names = [f"<unused {index}>" for index in range(pad)]
        for name, index in self.ids.items():
            names[index] = name
        return [*names, PAD if PAD not in self.ids else f"<{PAD}>"]


@dataclass
class Vocabularies:
    """Both sides, and the ids that the configuration needs."""

    source: Vocabulary
    target: Vocabulary
    pad: int  # added after the longer one, the same for both

    @property
    def eos(self) -> int:
        """The id of the end token."""
        return self.target.eos

    @property
    def unk(self) -> int:
        """The target's id of unknown words, which Marian does not put out."""
        return self.target.unk

    @classmethod
    def find(
        cls,
        model: Path,
        given: tuple[Path, ...],
        settings: dict[str, Any],
        decoder: dict[str, Any] | None,
        sizes: list[int],
    ) -> "Vocabularies":
        """The vocabularies of a model: those given, or those beside it that its settings name.

        Raises:
            UserError: for vocabularies that are missing, damaged, or of another end token for each side.
        """
        paths = list(given)
        if not paths:
            named = (decoder or {}).get("vocabs") or settings.get("vocabs") or []
            named = named if isinstance(named, list) else [named]
            paths = [model.parent / Path(str(name)).name for name in named]  # a path of another machine leads nowhere
        if missing := [path for path in paths if not path.is_file()]:
            raise UserError(
                f"the vocabulary {missing[0].name} of {model.name} is not beside it: give --vocabulary FILE"
            )
        if len(paths) not in (1, 2):
            raise UserError(
                f"the vocabularies of {model.name} are not known (no decoder.yml beside it names one or two of them):"
                " give --vocabulary FILE, or --vocabulary SOURCE TARGET"
            )
        sides = [_read(path, size, name) for path, size, name in zip((paths * 2)[:2], sizes, _SEGMENTERS, strict=True)]
        if sides[0].eos != sides[1].eos:
            raise UserError(
                f"{EOS} has id {sides[0].eos} in {sides[0].path} and {sides[1].eos} in {sides[1].path}: give"
                " vocabularies of one model"
            )
        return cls(*sides, pad=max(sizes))


def _read(path: Path, size: int, segmenter: str) -> Vocabulary:
    """A vocabulary for a matrix of so many rows."""
    if path.suffix == ".spm":
        pieces = SentencePieceModel.read(path).pieces
        if len(pieces) < size:
            raise UserError(
                f"{path} has {len(pieces):,} pieces and the model {size:,}: give the model's own vocabulary"
            )
        ids = {piece: index for index, (piece, *_) in enumerate(pieces) if index < size}
        return Vocabulary(path, ids, path, *(_required(path, ids, name, None) for name in (EOS, UNK)))
    if path.suffix not in (".yml", ".yaml", ".json"):
        raise UserError(f"{path} is no vocabulary that can be read: give a .yml or a .spm file")
    ids = {}
    for name, number in read_vocabulary(path, _AGAIN):
        if not (number.isascii() and number.isdigit()):
            raise UserError(f"{path} gives {name!r:.100} the id {number!r:.100}, no whole number: {_AGAIN}")
        if int(number) < size:
            ids.setdefault(name, int(number))  # the first one counts in Marian too
    if not ids:
        raise UserError(f"{path} has no entry: {_AGAIN}")
    eos, unk = (_required(path, ids, name, index) for index, name in enumerate((EOS, UNK)))
    beside = path.parent / segmenter
    return Vocabulary(path, ids, beside if beside.is_file() else None, eos, unk)


def _required(path: Path, ids: dict[str, int], name: str, index: int | None) -> int:
    """The id of `</s>` or `<unk>`; in a `.yml` file `index` is theirs too if it is free or has the name of Nematus."""
    if index is not None:
        holder = next((word for word, number in ids.items() if number == index), None)
        if holder is None or holder == _NEMATUS[name]:
            ids.setdefault(name if holder is None else holder, index)
            return index
    if name not in ids:
        raise UserError(f"{path} has no entry {name}, which Marian needs: give a vocabulary of Marian's")
    return ids[name]


def read_tokenizer(vocabularies: Vocabularies) -> PreTrainedTokenizerBase:
    """The tokenizer of a model: one backend where both sides are alike, else two."""
    pad = vocabularies.pad
    source, target = (_backend(side, pad) for side in (vocabularies.source, vocabularies.target))
    names = vocabularies.target.names(pad)
    special = {
        "eos_token": names[vocabularies.eos],
        "unk_token": names[vocabularies.unk],
        "pad_token": names[pad],
        "clean_up_tokenization_spaces": False,
    }
    is_one = source.to_str() == target.to_str()
    if is_one and vocabularies.source.segmenter is None:
        return PreTrainedTokenizerFast(tokenizer_object=source, **special)
    return VaswaniTokenizer(
        tokenizer_object=source,
        target_tokenizer_object=None if is_one else target,
        known_tokens=(pad + 1, pad + 1),
        **special,
    )


def _backend(side: Vocabulary, pad: int) -> Tokenizer:
    """A tokenizer with the ids of one side that ends each text."""
    names = side.names(pad)
    ids = {name: index for index, name in enumerate(names)}
    eos, unk = names[side.eos], names[side.unk]
    if side.segmenter is not None:
        # Models of many languages are told the target's by such a word at the beginning, which no piece may begin in.
        codes = [name for name in side.ids if name.startswith(">>") and name.endswith("<<")]
        try:
            return backend(side.segmenter, ids, eos_token=eos, unk_token=unk, special_tokens=names[pad:], codes=codes)
        except Unsupported as error:
            raise UserError(
                f"{side.segmenter} cannot be read exactly, since {error}: move it elsewhere and give words in place of"
                " texts, its pieces with a space between any two"
            ) from error
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A $B {eos}", special_tokens=[(eos, side.eos)]
    )
    return tokenizer
