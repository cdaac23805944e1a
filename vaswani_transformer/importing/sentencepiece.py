"""A SentencePiece model (.spm) as a backend of `tokenizers`: the same ids for every text, or `Unsupported`.

The ids are those of a dictionary, as Marian and `MarianTokenizer` use them: the .spm cuts a text into pieces, the
dictionary numbers them. No package is needed, `sentencepiece` neither.
"""

import functools
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import UserError, one_line
from ..model.sentencepiece_vaswani import (
    HAS_VALUE,
    LABEL,
    LESS_THAN,
    MADE_UP,
    OTHERS,
    RUN_END,
    RUN_START,
    SEPARATOR,
    UNKNOWN_CODE,
    VALUE,
    CharacterMap,
    below,
)

_SPACE = "▁"  # U+2581, which stands for a space within pieces
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
_SIZES = {1: 8, 2: None, 5: 4}  # bytes of a field by its kind; one of kind 2 begins with its size
_NODES_AT_ONCE = 4096
_MOST_NODES, _LONGEST_KEY = 1 << 20, 100  # of a table of characters; SentencePiece's own have 260,000
_MOST_BYTES = 1 << 26  # of a .spm file; one of 256,000 pieces takes 5 MB
_LONGEST_PIECE = 1000  # characters; SentencePiece learns none of more than 16 unless it is told to
_LONGEST_INTEGER = 10  # bytes


class Unsupported(Exception):
    """A SentencePiece model that `tokenizers` cannot follow exactly; the text says why."""


@dataclass
class SentencePieceModel:
    """What decides the ids in a .spm file, which is a message of protocol buffers (sentencepiece_model.proto)."""

    pieces: list[tuple[str, float, int]]  # with score and type
    kind: int
    byte_fallback: bool
    space_is_suffix: bool
    characters: bytes  # the table that replaces characters
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool

    @classmethod
    def read(cls, model: bytes | Path) -> "SentencePieceModel":
        """Read the content of a .spm file.

        Raises:
            UserError: the file cannot be read, or is no SentencePiece model.
        """
        try:
            message = _message(model if isinstance(model, bytes) else _content(model))
            trainer, normalizer = (_message(message.get(number, [b""])[-1]) for number in (2, 3))
            pieces = [_piece(_message(piece)) for piece in message.get(1, [])]
            if not pieces:
                raise ValueError("it holds no pieces")
            return cls(
                pieces,
                kind=trainer.get(3, [_UNIGRAM])[-1],
                byte_fallback=bool(trainer.get(35, [False])[-1]),
                space_is_suffix=bool(trainer.get(24, [False])[-1]),
                characters=normalizer.get(2, [b""])[-1],
                add_dummy_prefix=bool(normalizer.get(3, [True])[-1]),
                remove_extra_whitespaces=bool(normalizer.get(4, [True])[-1]),
                escape_whitespaces=bool(normalizer.get(5, [True])[-1]),
            )
        except (OSError, ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
            name = "this file" if isinstance(model, bytes) else str(model)
            raise UserError(
                f"{name} is no SentencePiece model ({one_line(error)}): give a .spm or .model file"
            ) from error


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    return content


def _message(data: bytes) -> dict[int, list[Any]]:
    """The fields of a message of protocol buffers by number: integers, or bytes."""
    fields: dict[int, list[Any]] = {}
    place = 0
    while place < len(data):
        key, place = _integer(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _integer(data, place)
        elif kind not in _SIZES:
            raise ValueError("it is no message of protocol buffers")
        else:
            size, place = _integer(data, place) if kind == 2 else (_SIZES[kind], place)
            value, place = data[place : place + size], place + size
            if place > len(data):
                raise ValueError("it is cut off")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _integer(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[place : place + _LONGEST_INTEGER]:
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
    raise ValueError("it is cut off")


def _piece(fields: dict[int, list[Any]]) -> tuple[str, float, int]:
    (score,) = struct.unpack("<f", fields.get(2, [bytes(4)])[-1])
    piece = fields.get(1, [b""])[-1].decode("utf-8")
    if len(piece) > _LONGEST_PIECE or not math.isfinite(score):
        raise ValueError(f"a piece is longer than {_LONGEST_PIECE:,} characters, or its score is no number")
    return piece, score, fields.get(3, [_NORMAL])[-1]


def backend(
    model: bytes | Path | SentencePieceModel,
    ids: dict[str, int] | None = None,
    *,
    eos_token: str = "</s>",
    unk_token: str = "<unk>",
    special_tokens: Iterable[str] = (),
    codes: Iterable[str] = (),
) -> Tokenizer:
    """A backend that gives a text the ids of its pieces, and ends it with `eos_token`.

    Pieces that `ids` lacks get ids above all of `ids`, to be taken for unknown (`known_tokens` of `VaswaniTokenizer`).
    A few texts must be rewritten before (`SentencePieceText`), which `VaswaniTokenizer` does. The text ``"</s>"`` is
    text, as for SentencePiece.

    Args:
        model: a .spm file, its content, or what was read of it.
        ids: the dictionary; none: that of the model.
        eos_token, unk_token: entries of `ids`.
        special_tokens: further entries of `ids` that `decode` may drop.
        codes: entries of `ids` like ``>>fra<<``, which are tokens where they begin a text.

    Raises:
        UserError: this is no SentencePiece model, or `ids` lacks `eos_token` or `unk_token`.
        Unsupported: `tokenizers` cannot give the same ids.
    """
    spm = model if isinstance(model, SentencePieceModel) else SentencePieceModel.read(model)
    if ids is None:
        ids = {piece: number for number, (piece, _, _) in enumerate(spm.pieces)}
    special = dict.fromkeys([eos_token, unk_token, *special_tokens])
    for token in special:
        if token not in ids:
            raise UserError(f"the vocabulary has no {token}: give the one that belongs to the SentencePiece model")
    _check(spm, special)
    codes = list(codes)
    scores = {piece: score for piece, score, kind in spm.pieces if kind == _NORMAL}
    runs = _runs(spm, [token for token in ids if token not in (*special, *codes)], scores)
    names = _names(spm, ids, scores, runs)
    if codes:
        names.append(UNKNOWN_CODE)
    tokenizer = Tokenizer(
        _unigram(spm, names, scores, ids[unk_token])
        if spm.kind == _UNIGRAM
        else models.BPE(
            {name: number for number, name in enumerate(names)},
            [tuple(map(_name, pair)) for pair in _merges(scores)],
            unk_token=unk_token,
            fuse_unk=True,
            byte_fallback=spm.byte_fallback,
        )
    )
    tokenizer.normalizer = _normalizer(spm, scores if runs else ())
    splits = [] if _renames(spm) else [pre_tokenizers.Split("<", "isolated")]
    # The pieces of a word do not depend on others unless a piece crosses the border, or unknown characters do.
    if _SPACE in scores and not any(_SPACE in piece[1:] for piece in scores):
        splits.append(pre_tokenizers.Split(_SPACE, "merged_with_next"))
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = _decoder(spm)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos_token}", pair=f"$A $B {eos_token}", special_tokens=[(eos_token, ids[eos_token])]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(code, normalized=False) for code in (*codes, UNKNOWN_CODE) if codes])
    tokenizer.encode_special_tokens = True
    return tokenizer


def _check(spm: SentencePieceModel, special: Iterable[str]) -> None:
    """Refuse what has no counterpart."""
    kinds = {kind for _, _, kind in spm.pieces}
    faults = {
        "it is neither a unigram model nor one of byte-pair encoding": spm.kind not in (_UNIGRAM, _BPE),
        "spaces are at the end of its pieces": spm.space_is_suffix,
        "spaces are not escaped": not spm.escape_whitespaces,
        # SentencePiece gives them before all others, by scores that would change the price of unknown characters here.
        "it has user-defined or unused pieces": kinds & {_USER_DEFINED, _UNUSED},
        "it has pieces with '<', but not that": not _renames(spm)
        and any("<" in piece for piece, _, kind in spm.pieces if kind == _NORMAL),
        "a special token has no '<' in its name": any("<" not in token for token in special),
    }
    for fault, holds in faults.items():
        if holds:
            raise Unsupported(fault)
    if spm.characters:
        _check_characters(spm.characters)


@functools.lru_cache(maxsize=2)  # most models have the same
def _check_characters(table: bytes) -> None:
    """Refuse a table of characters that `SentencePieceText` cannot follow."""
    characters, single, values = CharacterMap(table), set(), set()
    for key, place in _entries(characters):
        text = key.decode("utf-8")
        if len(text) == 1:
            single.add(text)
        elif not OTHERS.fullmatch(text[1:]):
            raise Unsupported(f"its table of characters replaces {text!r}")
        values.add(place)
    written = set().union(*(characters.value(place) for place in values))
    if written & single:
        raise Unsupported(f"its table of characters replaces {sorted(written & single)[0]!r}, which it writes itself")


def _entries(characters: CharacterMap) -> Iterator[tuple[bytes, int]]:
    """All keys of a table with the places of their values."""
    units = np.frombuffer(characters.units, np.uint32)
    labels = np.arange(1, 256, dtype=np.uint32)
    nodes, keys, seen = np.array([below(int(units[0]))], np.uint32), np.zeros((1, 0), np.uint8), 0
    while len(nodes):
        seen += len(nodes)
        if seen > _MOST_NODES or keys.shape[1] > _LONGEST_KEY:  # paths through shared nodes, or in a circle
            raise ValueError("the table of characters is damaged")
        levels = [], []
        for start in range(0, len(nodes), _NODES_AT_ONCE):
            places = nodes[start : start + _NODES_AT_ONCE, None] ^ labels
            leads = np.take(units, places, mode="clip") & LABEL == labels
            rows, columns = np.nonzero(leads & (places < len(units)))
            levels[0].append(places[rows, columns])
            levels[1].append(np.column_stack([keys[start + rows], labels[columns].astype(np.uint8)]))
        places, keys = np.concatenate(levels[0]), np.concatenate(levels[1])
        nodes = places ^ below(units[places])
        ends = np.flatnonzero(units[places] & HAS_VALUE)
        if (nodes[ends] >= len(units)).any():
            raise ValueError("the table of characters is damaged")
        yield from zip(map(bytes, keys[ends]), (units[nodes[ends]] & VALUE).tolist(), strict=True)


def _renames(spm: SentencePieceModel) -> bool:
    """Whether "<" in texts is renamed. Byte fallback must see an unknown "<", which is cut off instead."""
    return not spm.byte_fallback or any(piece == "<" and kind == _NORMAL for piece, _, kind in spm.pieces)


def _name(piece: str) -> str:
    return piece.replace("<", LESS_THAN)


def _runs(spm: SentencePieceModel, tokens: Iterable[str], scores: dict[str, float]) -> set[str]:
    """Entries of the dictionary that the model has no character of.

    SentencePiece gives a run of unknown characters as one piece. Where that is in the dictionary, as one of the other
    language, it has its number.
    """
    known = set().union(*scores)
    runs = {token for token in tokens if known.isdisjoint(token)} if not spm.byte_fallback else set()
    if runs and (spm.kind == _BPE or not known <= scores.keys()):
        raise Unsupported(f"its dictionary has {min(runs)!r}, of unknown characters")
    return runs


def _names(spm: SentencePieceModel, ids: dict[str, int], scores: dict[str, float], runs: set[str]) -> list[str]:
    """The name for each id, so that texts match what they should and nothing else: texts have no "<" any more."""
    names = [f"{MADE_UP}{number}" for number in range(1 + max(ids.values()))]
    for token, number in ids.items():
        if token in scores:
            names[number] = _name(token)
        elif token in runs:
            names[number] = f"{RUN_START}{_name(token)}{RUN_END}"
        else:
            names[number] = token if "<" in token else MADE_UP + token
    bytes_ = [piece for piece, _, kind in spm.pieces if kind == _BYTE]
    return names + [_name(piece) if piece in scores else piece for piece in (*scores, *bytes_) if piece not in ids]


def _unigram(spm: SentencePieceModel, names: list[str], scores: dict[str, float], unknown: int) -> models.Unigram:
    highest = max(scores.values())
    named = {_name(piece): score for piece, score in scores.items()}
    # An unknown character costs 10 more than the lowest score, so that names without a score must not be lower.
    return models.Unigram([(name, named.get(name, highest)) for name in names], unknown, spm.byte_fallback)


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Pairs that SentencePiece joins, the best score first: any two neighbours that make a piece together."""
    for piece in scores:
        if any(character not in scores for character in piece):
            raise Unsupported(f"not every character of its piece {piece!r} is a piece")
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=scores.get, reverse=True)
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]


def _normalizer(spm: SentencePieceModel, pieces: Iterable[str]) -> normalizers.Normalizer:
    """Characters and spaces as in SentencePiece; with `pieces`, marks around what they have no character of."""
    extra = spm.remove_extra_whitespaces
    known = "".join(rf"\x{{{ord(character):x}}}" for character in sorted(set().union(*map(_name, pieces))))
    rules = [
        spm.characters and normalizers.Precompiled(spm.characters),
        normalizers.Replace(SEPARATOR, ""),
        _renames(spm) and normalizers.Replace("<", LESS_THAN),
        extra and normalizers.Replace(Regex(" {2,}"), " "),
        extra and normalizers.Replace(Regex(r"\A +"), ""),
        normalizers.Replace(" ", _SPACE),
        spm.add_dummy_prefix and normalizers.Prepend(_SPACE),
        extra and normalizers.Replace(Regex(rf"(?<!{_SPACE}){_SPACE}+\z"), ""),
        known and normalizers.Replace(Regex(f"(?<![^{known}])(?=[^{known}])"), RUN_START),
        known and normalizers.Replace(Regex(f"(?<=[^{known}])(?![^{known}])"), RUN_END),
    ]
    return normalizers.Sequence([rule for rule in rules if rule])


def _decoder(spm: SentencePieceModel) -> decoders.Decoder:
    to_text = [decoders.Replace(LESS_THAN, "<"), decoders.Replace(Regex(f"[{MADE_UP}-{RUN_END}]"), "")]
    to_text += [decoders.ByteFallback()] if spm.byte_fallback else []
    to_text += [decoders.Fuse(), decoders.Replace(_SPACE, " "), decoders.Replace(Regex(r"\A "), "")]
    return decoders.Sequence(to_text)
