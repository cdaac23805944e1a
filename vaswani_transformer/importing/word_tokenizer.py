"""Tokenizers of tutorials: lists of words, or files of the library tokenizers.

A source may begin with a token; a target ends with one only, since training puts decoder_start_token_id before it.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ..data.tokenization import check_pieces
from ..errors import UserError, one_line
from ..json_and_yaml import parse_json, read_text
from ..model.tokenization_vaswani import VaswaniTokenizer

_MOST_BYTES = 1 << 28  # as of any tokenizer.json


def read_tokenizer(
    files: Sequence[Path], special: dict[str, str | int], rows: Sequence[int], bos_before_source: bool
) -> tuple[VaswaniTokenizer | None, dict[str, int]]:
    """The tokenizer of one or two vocabularies, and the ids of special tokens as fields of a configuration.

    Args:
        files: that of both sides, or those of source and target: a text of a token a line, the first with id 0, where
            words are split at spaces; or a `tokenizer.json`, or a folder that holds one. None give no tokenizer.
        special: `pad`, `bos`, `eos` and, needed for lists of words, `unk`: tokens, or ids.
        rows: of the embeddings of source and target.
        bos_before_source: whether a source begins with `bos`.

    Raises:
        UserError: for files that are missing or damaged, of another size than the embeddings, or without the special
            tokens at the same ids.
    """
    if not files and any(isinstance(token, str) for token in special.values()):
        raise UserError("special_tokens are given as tokens, not as ids: give the vocabularies too, or ids")
    sides = [_read(path, special.get("unk"), size) for path, size in zip((list(files) * 2)[:2], rows, strict=False)]
    tokens, ids = {}, {}
    for name, value in special.items():
        known = [_token_and_id(side, value) for side in sides] or [(None, value)]
        if None in known or len(set(known)) > 1:
            places = " and ".join(f"{path} has {_in_words(pair)}" for path, pair in zip(files, known, strict=False))
            raise UserError(f"special_tokens has {name}: {value!r}, and {places}: it must have the same id everywhere")
        tokens[name], ids[name] = known[0]
    fields = {f"{name}_token_id": ids[name] for name in ("pad", "bos", "eos")} | {"decoder_start_token_id": ids["bos"]}
    if not sides:
        return None, fields
    beginnings = ("bos" if bos_before_source else None), None
    for side, beginning in zip(sides, beginnings, strict=True):
        side.add_special_tokens(list(tokens.values()))
        names = ([tokens[beginning]] if beginning else []) + ["$A", tokens["eos"]]
        used = [(token, ids[name]) for name, token in tokens.items() if token in names]
        side.post_processor = processors.TemplateProcessing(single=" ".join(names), special_tokens=used)
    settings = {f"{name}_token": token for name, token in tokens.items()}
    return VaswaniTokenizer(tokenizer_object=sides[0], target_tokenizer_object=sides[1], **settings), fields


def _read(path: Path, unknown: str | int | None, rows: int) -> Tokenizer:
    """The backend of a vocabulary; each call makes a new one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = read_text(file, "give a list of words or a tokenizer.json", _MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"there is no vocabulary {file}") from None
    if file.suffix == ".json":
        try:
            check_pieces(parse_json(text), file)
            backend = Tokenizer.from_str(text)
        except UserError:
            raise
        except BaseException as error:  # it raises bare Exception, and a BaseException where its code panics
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(f"{file} is no tokenizer ({one_line(error)}): save it again") from error
        size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if size > rows:
            raise UserError(f"{file} has ids up to {size - 1} and the embedding {rows} rows: give its own vocabulary")
        return backend
    words = text.removesuffix("\n").split("\n")
    if len(words) != rows:
        raise UserError(f"{file} has {len(words)} lines and the embedding {rows} rows: give its own vocabulary")
    numbers = {word: number for number, word in enumerate(words)}
    if len(numbers) < len(words):
        number = next(number for number, word in enumerate(words) if numbers[word] != number)
        raise UserError(f"{file} has {words[number]!r:.100} on lines {number + 1} and {numbers[words[number]] + 1}")
    unknown = words[unknown] if isinstance(unknown, int) and 0 <= unknown < rows else unknown
    if unknown not in numbers:
        raise UserError(f"{file} is a list of words without {unknown!r}: give special_tokens an unk that it holds")
    backend = Tokenizer(models.WordLevel(numbers, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def _token_and_id(side: Tokenizer, value: str | int) -> tuple[str, int] | None:
    """Both by one of them, or None."""
    token = value if isinstance(value, str) else side.id_to_token(value) if value >= 0 else None
    number = None if token is None else side.token_to_id(token)
    return None if number is None else (token, number)


def _in_words(pair: tuple[str, int] | None) -> str:
    return "no such token" if pair is None else f"{pair[0]!r} with id {pair[1]}"
