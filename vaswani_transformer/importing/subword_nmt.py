"""Byte-pair encoding by a file of merges, as subword-nmt and fastBPE write it, as a backend of `tokenizers`.

Sennrich, Haddow and Birch (2016, arXiv 1508.07909). A word's pieces are written `un@@ like@@ ly`: all but the last one
end in a separator, and so they stand in dictionaries. Inside the backend the last one is marked, as in the file of
merges: `un like ly</w>`.
"""

import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import UserError, shortened
from ..json_and_yaml import read_text

SEPARATOR = "@@"
_MOST_BYTES = 1 << 24  # of a file of merges; 100,000 of them take 2 MB
_MOST_MERGES = 10**6
_END = "</w>"
# Version 0.1 takes the end of a word for a letter of its own. Here it is one of the private use area.
_END_LETTER = "\ue000"
_ADVICE = "give the file of merges that subword-nmt or fastBPE learned for this model"


def backend(
    codes: Path,
    ids: dict[str, int],
    *,
    special_tokens: Sequence[str],
    end: str,
    unknown: str,
    separator: str = SEPARATOR,
) -> Tokenizer:
    """A tokenizer that cuts words, which spaces separate, into the pieces that subword-nmt makes of them.

    Pieces that the merges can make and `ids` lacks have ids from `1 + max(ids.values())` on.

    Args:
        codes: merges of subword-nmt (versions 0.1 and 0.2, which differ at the end of words) or of fastBPE.
        ids: the model's dictionary: pieces, with the separator where a word continues, and special tokens.
        special_tokens: those of `ids` that are no pieces.
        end: the special token that ends a text.
        unknown: the special token that stands for letters of no piece.
        separator: what pieces within a word end in.

    Raises:
        UserError: there is no such file, or it holds something else than merges.
    """
    merges, is_first_version = _read_merges(codes)
    mark = _END_LETTER if is_first_version else _END
    pieces = {_inner(word, separator, mark): number for word, number in ids.items() if word not in special_tokens}
    symbols = pieces.keys() | {symbol for left, right in merges for symbol in (left, right, left + right)} - {mark}
    if is_first_version:
        # A word whose end was not merged has its last piece followed by the end: joined after all other merges.
        known = set(merges)
        symbols |= set("".join(symbols))
        merges += [(symbol, mark) for symbol in sorted(symbols) if mark not in symbol and (symbol, mark) not in known]
        symbols |= {mark, *(left + right for left, right in merges)}
    others = zip(sorted(symbols - pieces.keys()), count(1 + max(ids.values())), strict=False)
    vocabulary = {token: ids[token] for token in special_tokens} | pieces | dict(others)
    suffix = {} if is_first_version else {"end_of_word_suffix": mark}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, **suffix))
    if is_first_version:
        # Not behind letters that no piece has, which would not be joined with it.
        letters = "".join(map(re.escape, sorted(symbol for symbol in symbols - {mark} if len(symbol) == 1)))
        tokenizer.normalizer = normalizers.Replace(Regex(rf"(?<=[{letters}])(?=\s|$)"), mark)
    return finished(tokenizer, ids, special_tokens, end, decoders.BPEDecoder(suffix=mark))


def word_backend(ids: dict[str, int], *, special_tokens: Sequence[str], end: str, unknown: str) -> Tokenizer:
    """A tokenizer that takes the words between spaces as they stand in the dictionary `ids`."""
    return finished(Tokenizer(models.WordLevel(ids, unknown)), ids, special_tokens, end, None)


def finished(tokenizer: Tokenizer, ids: dict[str, int], special_tokens: Sequence[str], end: str, decoder) -> Tokenizer:
    """The tokenizer with its special tokens, which cuts at spaces and ends a text with `end`."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    tokenizer.encode_special_tokens = True  # "</s>" in a text is text
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, ids[end])]
    )
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def _inner(word: str, separator: str, mark: str) -> str:
    """A piece of a dictionary as the backend names it."""
    continues = word.endswith(separator) and word != separator
    return word.removesuffix(separator) if continues else word + mark


def _read_merges(path: Path) -> tuple[list[tuple[str, str]], bool]:
    """The merges of a file in their order, each once, and whether they are of subword-nmt's version 0.1."""
    try:
        text = read_text(path, _ADVICE, _MOST_BYTES).rstrip("\n")
    except FileNotFoundError:
        raise UserError(f"there is no file of BPE merges {path}: {_ADVICE}") from None
    if text.count("\n") > _MOST_MERGES:
        raise UserError(f"{path} has more than {_MOST_MERGES:,} lines: {_ADVICE}")
    lines = text.split("\n")
    first = 1 if lines[0].startswith("#version:") else 0
    version = lines[0].removeprefix("#version:").strip() if first else "0.1"
    if version not in ("0.1", "0.2"):
        raise UserError(f"{path} has BPE merges of version {version[:20]!r}, known are 0.1 and 0.2: {_ADVICE}")
    rows = [line.strip("\r\n ").split(" ") for line in lines[first:]]
    # fastBPE writes how often it saw a pair behind each, and ends words as version 0.2 does.
    is_fast = bool(rows) and len(rows[0]) == 3
    for number, row in enumerate(rows, 1 + first):
        if len(row) != 2 + is_fast or "" in row[:2] or (is_fast and not row[2].isdecimal()):
            text = shortened(" ".join(row), 60)
            raise UserError(f"{path}, line {number}, is no merge of two pieces ({text!r}): {_ADVICE}")
    is_first_version = version == "0.1" and not is_fast
    merges = dict.fromkeys((left, right) for left, right, *_ in rows)
    if is_first_version:
        merges = dict.fromkeys(tuple(symbol.replace(_END, _END_LETTER) for symbol in merge) for merge in merges)
    return list(merges), is_first_version
