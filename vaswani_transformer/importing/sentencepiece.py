"""A SentencePiece model (.spm) as a backend of `tokenizers`: the same ids for every text, or `Unsupported`.

The ids are those of a dictionary, as Marian and `MarianTokenizer` use them: the .spm cuts a text into pieces, the
dictionary numbers them. The package sentencepiece is not needed.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import UserError, reading
from ..model import sentencepiece_vaswani as rewriting

_SPACE = "▁"  # U+2581, which stands for a space within pieces
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
# SentencePiece's own tables of characters, whose longer keys `SentencePieceText` finds.
_TABLES = ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf")
_LONGEST_PIECE = 1000  # characters, above which `tokenizers` may crash; SentencePiece learns up to 16 by default


class Unsupported(UserError):
    """A SentencePiece model that `tokenizers` cannot follow exactly; the text says why."""


def read_model(path: Path):
    """Return a .spm file as a `ModelProto` of protocol buffers (sentencepiece_model.proto)."""
    from transformers.utils.sentencepiece_model_pb2_new import ModelProto

    with reading(path):
        return ModelProto.FromString(path.read_bytes())


def backend(model: Path, ids: dict[str, int] | None = None, special: Sequence[str] = ("</s>", "<unk>")) -> Tokenizer:
    """Return a backend that gives a text the ids of its pieces in a .spm file and ends it.

    Pieces that `ids` lacks get ids above all of `ids`, to be taken for unknown (`known_tokens` of `VaswaniTokenizer`).
    A few texts must be rewritten before (`SentencePieceText`), which `VaswaniTokenizer` does. The text ``"</s>"`` is
    text, as for SentencePiece. Entries of `ids` like ``>>fra<<`` are tokens where they begin a text.

    The dictionary, `ids`, is by default that of the model; `special` are entries of it: the end of a text, the unknown,
    and others that `decode` may drop. `UserError` if one is missing, or the file is not a SentencePiece model;
    `Unsupported` if `tokenizers` cannot give the same ids.
    """
    spm = read_model(model)
    if ids is None:
        ids = {piece.piece: number for number, piece in enumerate(spm.pieces)}
    eos, unk_token, *_ = special
    codes = [token for token in ids if token.startswith(">>") and token.endswith("<<")]
    scores = {piece.piece: piece.score for piece in spm.pieces if piece.type == _NORMAL}
    known, byte_fallback = set().union(*scores), spm.trainer_spec.byte_fallback
    # SentencePiece gives a run of characters that it lacks as one piece. Where that is in the dictionary, as one of the
    # other language, it has its number.
    words = [] if byte_fallback else [token for token in ids if token not in (*special, *codes)]
    runs = {token for token in words if known.isdisjoint(token)}
    # "<" in texts is renamed. Byte fallback must see an unknown one, which is cut off instead.
    renames = not byte_fallback or "<" in scores
    if fault := _fault(spm, special, scores, runs, renames):
        raise Unsupported(f"{model} cannot be followed exactly, since {fault}")
    names = _names(spm, ids, scores, runs)
    if codes:
        names.append(rewriting.UNKNOWN_CODE)
    if spm.trainer_spec.model_type == _UNIGRAM:
        named, highest = {_name(piece): score for piece, score in scores.items()}, max(scores.values())
        # An unknown character costs 10 more than the lowest score, so that names without a score must not be lower.
        pieces = [(name, named.get(name, highest)) for name in names]
        tokenizer = Tokenizer(models.Unigram(pieces, ids[unk_token], byte_fallback))
    else:
        vocabulary = {name: number for number, name in enumerate(names)}
        # Any two neighbours that make a piece are joined, the best score first.
        best_first = sorted(scores, key=scores.get, reverse=True)
        cuts = ((piece[:cut], piece[cut:]) for piece in best_first for cut in range(1, len(piece)))
        merges = [(_name(left), _name(right)) for left, right in cuts if left in scores and right in scores]
        options = {"unk_token": unk_token, "fuse_unk": True, "byte_fallback": byte_fallback}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, **options))
    tokenizer.normalizer = _normalizer(spm, scores if runs else (), renames)
    splits = [] if renames else [pre_tokenizers.Split("<", "isolated")]
    # The pieces of a word do not depend on others unless a piece crosses the border, or unknown characters do.
    if _SPACE in scores and not any(_SPACE in piece[1:] for piece in scores):
        splits.append(pre_tokenizers.Split(_SPACE, "merged_with_next"))
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = _decoder(spm)
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {eos}", f"$A $B {eos}", [(eos, ids[eos])])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(special)])
    tokenizer.add_tokens([AddedToken(code, normalized=False) for code in (*codes, rewriting.UNKNOWN_CODE) if codes])
    tokenizer.encode_special_tokens = True
    return tokenizer


def _fault(spm, special: Sequence[str], scores: dict[str, float], runs: set[str], renames: bool) -> str:
    """Return what a model has without counterpart here; nothing if there is a counterpart for all of it."""
    kinds, is_bpe = {piece.type for piece in spm.pieces}, spm.trainer_spec.model_type == _BPE
    characters = set().union(*scores)
    faults = {
        "it is neither a unigram model nor one of byte-pair encoding": spm.trainer_spec.model_type > _BPE,
        "it has no pieces, or one that is too long or has no score": not scores
        or any(len(piece) > _LONGEST_PIECE or not math.isfinite(score) for piece, score in scores.items()),
        "spaces are at the end of its pieces": spm.trainer_spec.treat_whitespace_as_suffix,
        "spaces are not escaped": not spm.normalizer_spec.escape_whitespaces,
        # SentencePiece gives them before all others, by scores that would change the price of unknown characters here.
        "it has user-defined or unused pieces": kinds & {_USER_DEFINED, _UNUSED},
        "it has pieces with '<', but not that": not renames and any("<" in piece for piece in scores),
        "a special token has no '<' in its name": any("<" not in token for token in special),
        "its dictionary has pieces of unknown characters": runs and (is_bpe or not characters <= scores.keys()),
        "not every character of its pieces is a piece": is_bpe and not characters <= scores.keys(),
        "its table of characters is none of SentencePiece's own": spm.normalizer_spec.precompiled_charsmap
        and spm.normalizer_spec.name not in _TABLES,
    }
    return next((fault for fault, holds in faults.items() if holds), "")


def _name(piece: str) -> str:
    return piece.replace("<", rewriting.LESS_THAN)


def _names(spm, ids: dict[str, int], scores: dict[str, float], runs: set[str]) -> list[str]:
    """Return a name for each id, so that texts match what they should and nothing else: they have no "<" any more."""
    names = [f"{rewriting.MADE_UP}{number}" for number in range(1 + max(ids.values()))]
    for token, number in ids.items():
        if token in scores:
            names[number] = _name(token)
        elif token in runs:
            names[number] = f"{rewriting.RUN_START}{_name(token)}{rewriting.RUN_END}"
        else:
            names[number] = token if "<" in token else rewriting.MADE_UP + token
    bytes_ = [piece.piece for piece in spm.pieces if piece.type == _BYTE]
    return names + [_name(piece) if piece in scores else piece for piece in (*scores, *bytes_) if piece not in ids]


def _normalizer(spm, pieces: Iterable[str], renames: bool) -> normalizers.Normalizer:
    """Return the rules for characters and spaces of SentencePiece; with `pieces`, marks around others too."""
    spec, extra = spm.normalizer_spec, spm.normalizer_spec.remove_extra_whitespaces
    known = "".join(rf"\x{{{ord(character):x}}}" for character in sorted(set().union(*map(_name, pieces))))
    rules = [
        spec.precompiled_charsmap and normalizers.Precompiled(spec.precompiled_charsmap),
        normalizers.Replace(rewriting.SEPARATOR, ""),
        renames and normalizers.Replace("<", rewriting.LESS_THAN),
        extra and normalizers.Replace(Regex(" {2,}"), " "),
        extra and normalizers.Replace(Regex(r"\A +"), ""),
        normalizers.Replace(" ", _SPACE),
        spec.add_dummy_prefix and normalizers.Prepend(_SPACE),
        extra and normalizers.Replace(Regex(rf"(?<!{_SPACE}){_SPACE}+\z"), ""),
        known and normalizers.Replace(Regex(f"(?<![^{known}])(?=[^{known}])"), rewriting.RUN_START),
        known and normalizers.Replace(Regex(f"(?<=[^{known}])(?![^{known}])"), rewriting.RUN_END),
    ]
    return normalizers.Sequence([rule for rule in rules if rule])


def _decoder(spm) -> decoders.Decoder:
    signs = Regex(f"[{rewriting.MADE_UP}-{rewriting.RUN_END}]")
    to_text = [decoders.Replace(rewriting.LESS_THAN, "<"), decoders.Replace(signs, "")]
    to_text += [decoders.ByteFallback()] if spm.trainer_spec.byte_fallback else []
    to_text += [decoders.Fuse(), decoders.Replace(_SPACE, " "), decoders.Replace(Regex(r"\A "), "")]
    return decoders.Sequence(to_text)
