"""Vocabularies of JoeyNMT's, and a tokenizer that does to texts what its `tokenizers.py` does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import UserError, shortened
from ..json_and_yaml import read_text
from ..model.tokenization_vaswani import VaswaniTokenizer
from . import sentencepiece, subword_nmt

_ADVICE = "copy it again from the folder that JoeyNMT wrote"
_MOST_BYTES = 1 << 25
_SPACE = "▁"  # what JoeyNMT writes for a space where letters are the pieces
_NORMAL, _BPE = 1, 2  # a type of pieces and a type of models in sentencepiece_model.proto
_DEFAULTS = {"unk": (0, "<unk>"), "pad": (1, "<pad>"), "bos": (2, "<s>"), "eos": (3, "</s>")}


@dataclass
class SpecialSymbols:
    """Names and numbers of the special tokens, by JoeyNMT's names for them."""

    tokens: dict[str, str]
    ids: dict[str, int]

    @classmethod
    def read(cls, data: Any) -> "SpecialSymbols":
        """Those of a configuration's `data.special_symbols`, or JoeyNMT's defaults."""
        settings = data.section("special_symbols") if "special_symbols" in data else {}
        for name in ("lang_tags", "sep_token"):
            if settings.get(name):
                raise settings.refuse(
                    name, settings[name], "models that are told what to do by tags have no counterpart"
                )
        tokens = {name: settings.get(f"{name}_token", token) for name, (_, token) in _DEFAULTS.items()}
        ids = {name: settings.get(f"{name}_id", number) for name, (number, _) in _DEFAULTS.items()}
        # A vocabulary begins with the four in this order, whatever the configuration says.
        if list(ids.values()) != [0, 1, 2, 3] or len({str(token) for token in tokens.values()}) != 4:
            raise data.refuse("special_symbols", settings, "they must be four, numbered 0 to 3 in JoeyNMT's order")
        return cls({name: str(token) for name, token in tokens.items()}, ids)


def read_vocabularies(
    source: Path, data: Any, given: Sequence[Path], symbols: SpecialSymbols, sizes: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """The numbers of the tokens of both sides.

    Args:
        source: the model's folder.
        data: section `data` of its configuration.
        given: one file of both sides or two, instead of those in the folder.
        symbols: the special tokens.
        sizes: rows of the embeddings of source and target.

    Raises:
        UserError: for a vocabulary that is missing, damaged, or has another size.
    """
    if len(given) > 2:
        raise UserError(f"{len(given)} vocabularies were given: give one of both sides, or those of source and target")
    vocabularies = []
    for number, (side, size) in enumerate(zip(("src", "trg"), sizes, strict=True)):
        named = data.section(side).get("voc_file")
        names = [f"{side}_vocab.txt", *([Path(named).name] if isinstance(named, str) else [])]
        paths = [given[min(number, len(given) - 1)]] if given else [source / name for name in names]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise UserError(
                f"{source} holds no {' or '.join(dict.fromkeys(names))}: copy it there, or give --vocabulary"
            )
        # JoeyNMT reads lines so, each entry once, and puts special tokens first if they are not there.
        tokens = dict.fromkeys([*symbols.tokens.values(), *read_text(path, _ADVICE, _MOST_BYTES).splitlines()])
        if len(tokens) != size:
            raise UserError(
                f"{path} has {len(tokens):,} entries with the special ones, and the checkpoint in {source} embeddings"
                f" of {size:,}: give the vocabulary that JoeyNMT wrote for this model"
            )
        vocabularies.append({token: number for number, token in enumerate(tokens)})
    return vocabularies[0], vocabularies[1]


def read_tokenizer(
    source: Path,
    data: Any,
    codes: Path | None,
    symbols: SpecialSymbols,
    vocabularies: tuple[dict[str, int], dict[str, int]],
) -> tuple[VaswaniTokenizer | None, tuple[str, ...]]:
    """A tokenizer that does to texts what JoeyNMT does, and notes for the card.

    Raises:
        UserError: merges or a SentencePiece model are missing or damaged, or a setting has no counterpart.
    """
    backends, moses, notes = [], {}, []
    for name, ids in zip(("src", "trg"), vocabularies, strict=True):
        side = data.section(name)
        try:
            backends.append(_backend(source, side, codes, symbols, ids))
        except sentencepiece.Unsupported as error:
            return None, (f"It has no tokenizer: tokenizers cannot follow its SentencePiece model, since {error}.",)
        if _settings(side).get("pretokenizer", "none") == "moses":
            moses.setdefault("languages", []).append(str(side.get("lang", "en")))
            moses |= {"aggressive_dash_splits": False, "normalize": bool(side.get("normalize"))}
    if moses and len(moses["languages"]) == 1:
        raise data.refuse("src", data["src"], "both sides must have been tokenised by Moses, or neither")
    if moses:
        notes.append("Its texts were tokenised by Moses: the tokenizer needs the package sacremoses.")
    tokenizer = VaswaniTokenizer(
        tokenizer_object=backends[0],
        target_tokenizer_object=backends[1],
        known_tokens=tuple(len(ids) for ids in vocabularies),
        **{f"{name}_token": token for name, token in symbols.tokens.items()},
        **({"moses": moses} if moses else {}),
    )
    return tokenizer, tuple(notes)


def _settings(side: Any) -> dict[str, Any]:
    return side.section("tokenizer_cfg") if side.get("tokenizer_cfg") else {}


def _backend(source: Path, side: Any, codes: Path | None, symbols: SpecialSymbols, ids: dict[str, int]) -> Tokenizer:
    """The backend of one side."""
    options = {
        "special_tokens": list(symbols.tokens.values()),
        "end": symbols.tokens["eos"],
        "unknown": symbols.tokens["unk"],
    }
    level = side.get("level")
    kind = side.get("tokenizer_type", side.get("bpe_type", "sentencepiece")) if level == "bpe" else level
    if kind == "word":
        backend = subword_nmt.word_backend(ids, **options)
    elif kind == "char":
        backend = subword_nmt.finished(
            Tokenizer(models.WordLevel(ids, options["unknown"])), ids, options["special_tokens"], options["end"], None
        )
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
        backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(_SPACE, " ")])
    elif kind == "subword-nmt":
        path = codes or _file(source, side, "codes")
        separator = str(_settings(side).get("separator", subword_nmt.SEPARATOR))
        backend = subword_nmt.backend(path, ids, separator=separator, cuts_again=True, **options)
    elif kind == "sentencepiece":
        backend = _sentencepiece(codes or _file(source, side, "model_file"), ids, options)
    else:
        name = "level" if kind == level else "tokenizer_type"
        raise side.refuse(name, kind, "there are bpe (with subword-nmt or sentencepiece), word and char")
    _add_normalizers(backend, side, is_char=kind == "char")
    return backend


def _sentencepiece(path: Path, ids: dict[str, int], options: dict[str, Any]) -> Tokenizer:
    model = sentencepiece.SentencePieceModel.read(path)
    # JoeyNMT's SetVocabulary: pieces that the vocabulary lacks are not used, but for single letters.
    pieces = [piece for piece in model.pieces if piece[2] != _NORMAL or len(piece[0]) == 1 or piece[0] in ids]
    if len(pieces) < len(model.pieces) and model.kind == _BPE:
        raise sentencepiece.Unsupported("pieces of byte-pair encoding that the vocabulary lacks would be cut again")
    return sentencepiece.backend(
        replace(model, pieces=pieces),
        ids,
        eos_token=options["end"],
        unk_token=options["unknown"],
        special_tokens=options["special_tokens"],
    )


def _file(source: Path, side: Any, name: str) -> Path:
    """A file that the tokenizer's settings name, in the model's folder."""
    value = _settings(side).get(name)
    if not isinstance(value, str) or not Path(value).name:
        raise UserError(f"{side.path} has no {side.name}.tokenizer_cfg.{name}: give --bpe-codes FILE")
    path = source / Path(value).name
    if not path.is_file():
        raise UserError(f"{source} holds no {shortened(path.name, 60)}: copy it there, or give --bpe-codes FILE")
    return path


def _add_normalizers(backend: Tokenizer, side: Any, is_char: bool) -> None:
    """What JoeyNMT does to a text before it cuts it, where Moses' tokenizer does not come between."""
    rules = []
    if side.get("normalize") and _settings(side).get("pretokenizer", "none") != "moses":
        rules += [normalizers.NFKC()]
        rules += [normalizers.Replace(*pair) for pair in (("’", "'"), ("“", '"'), ("”", '"'), ("\u200b", ""))]
        rules += [normalizers.Replace(Regex("[ \u3000]+"), " ")]
        rules += [normalizers.Replace(f" {mark}", mark) for mark in "?!,.:"]
        rules += [normalizers.Strip()]
    if side.get("lowercase"):
        rules.append(normalizers.Lowercase())
    if is_char:
        rules.append(normalizers.Replace(" ", _SPACE))
    if rules:
        rules += [backend.normalizer] if backend.normalizer is not None else []
        backend.normalizer = normalizers.Sequence(rules)
