"""Vocabularies of Marian's models as tokenizers of ours: `.yml` and `.spm` files, one for both sides or two.

A `.yml` file gives words their ids and says nothing about how a text becomes words: it is split at spaces, as Marian
itself does, unless there are SentencePiece models beside it as in the archives of OPUS-MT.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import UserError, reading
from ..marian_format import EOS, PAD, UNK, read_vocabulary
from ..model.tokenization_vaswani import VaswaniTokenizer
from .sentencepiece import backend, read_model

logger = logging.getLogger(__name__)

PARTS = 0.01  # of a vocabulary's entries that look like parts of words, so that it is one of parts of words
_SEGMENTERS = ("source.spm", "target.spm")  # in archives of OPUS-MT


@dataclass
class Vocabulary:
    """One side's entries."""

    ids: dict[str, int]  # of each word, less those beyond the model's matrix
    segmenter: Path | None  # the SentencePiece model that makes words of a text
    pad: int  # added after the longer vocabulary, the same for both

    def names(self) -> list[str]:
        """Return the words by id, up to and with the padding; ids that the file leaves out get made-up names."""
        names = {index: name for name, index in self.ids.items()}
        return [*(names.get(n, f"<unused {n}>") for n in range(self.pad)), f"<{PAD}>" if PAD in self.ids else PAD]


def find_vocabularies(
    model: Path, paths: Sequence[Path], settings: dict[str, Any], decoder: dict[str, Any] | None
) -> tuple[Vocabulary, Vocabulary]:
    """Return the vocabularies of source and target: those of `paths`, or else those that a model's settings name."""
    if not paths:
        names = (decoder or {}).get("vocabs") or settings.get("vocabs") or []
        names = names if isinstance(names, list) else [names]
        paths = tuple(model.parent / Path(str(name)).name for name in names)  # of another machine's paths
    if len(paths) not in (1, 2) or not all(path.is_file() for path in paths):
        missing = ", ".join(path.name for path in paths if not path.is_file())
        problem = f"are not beside it ({missing or 'no decoder.yml names one or two'})"
        fix = "give --vocabulary FILE, or --vocabulary SOURCE TARGET"
        raise UserError(f"the vocabularies of {model.name} {problem}: {fix}")
    sizes = settings["dim-vocabs"]
    source, target = map(_read, (paths[0], paths[-1]), sizes, (max(sizes),) * 2, _SEGMENTERS)
    return source, target


def _read(path: Path, size: int, pad: int, segmenter: str) -> Vocabulary:
    """Return a vocabulary for a matrix of `size` rows."""
    ids, is_spm = {}, path.suffix == ".spm"
    with reading(path):
        if is_spm:
            entries = [(piece.piece, number) for number, piece in enumerate(read_model(path).pieces)]
        else:
            entries = read_vocabulary(path)
        for name, number in entries:
            if 0 <= int(number) < size:
                ids.setdefault(name, int(number))  # the first one counts in Marian too
    if (is_spm and len(entries) < size) or not {EOS, UNK} <= ids.keys():
        raise UserError(f"{path} lacks {EOS}, {UNK} or ids of the model's {size:,}: give the model's own vocabulary")
    beside = path if is_spm else path.parent / segmenter
    parts = sum(name.endswith("@@") or name.startswith(("▁", "Ġ")) for name in ids)
    if parts > PARTS * len(ids) and not beside.is_file():
        logger.warning("%s holds parts of words: with no %s beside it, give text cut into them", path, segmenter)
    return Vocabulary(ids, beside if beside.is_file() else None, pad)


def read_tokenizer(source: Vocabulary, target: Vocabulary) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model: one backend where both sides are alike, else two."""
    backends = [_backend(side) for side in (source, target)]
    names = target.names()
    special = {"eos_token": names[target.ids[EOS]], "unk_token": names[target.ids[UNK]], "pad_token": names[target.pad]}
    options = {"tokenizer_object": backends[0], "clean_up_tokenization_spaces": False, **special}
    is_same = backends[0].to_str() == backends[1].to_str()
    if is_same and source.segmenter is None:
        return PreTrainedTokenizerFast(**options)
    other = None if is_same else backends[1]
    return VaswaniTokenizer(target_tokenizer_object=other, known_tokens=(target.pad + 1,) * 2, **options)


def _backend(side: Vocabulary) -> Tokenizer:
    """Return a tokenizer with the ids of one side that ends each text."""
    names = side.names()
    ids = {name: index for index, name in enumerate(names)}
    eos, unk = names[side.ids[EOS]], names[side.ids[UNK]]
    if side.segmenter is not None:
        return backend(side.segmenter, ids, (eos, unk, names[side.pad]))
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {eos}", f"$A $B {eos}", [(eos, side.ids[EOS])])
    return tokenizer
