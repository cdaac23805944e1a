"""Byte-pair encoding by a file of merges, as subword-nmt and fastBPE write it, as a backend of `tokenizers`.

Sennrich, Haddow and Birch (2016, arXiv 1508.07909). A word's pieces are written `un@@ like@@ ly`: all but the last one
end in a separator, and so they are in dictionaries. Inside the backend the last one is marked, as in the file of
merges: `un like ly</w>`.
"""

import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import reading
from ..json_and_yaml import read_text

SEPARATOR = "@@"
_MOST_BYTES = 1 << 24  # of a file of merges; 100,000 of them take 2 MB
_MOST_MERGES = 10**6
_END = "</w>"
# Version 0.1 takes the end of a word for a character of its own. Here it is one of the private use area.
_END_CHARACTER = "\ue000"
_ADVICE = "give the file of merges that subword-nmt or fastBPE learned for this model"


def backend(codes: Path, ids: dict[str, int], *, special_tokens: Sequence[str], end: str, unknown: str) -> Tokenizer:
    """Return a tokenizer that cuts words, which spaces separate, into the pieces that subword-nmt makes of them.

    Pieces that the merges can make and `ids` lacks have ids from `1 + max(ids.values())` on.

    Args:
        codes: merges of subword-nmt (versions 0.1 and 0.2, which differ at the end of words) or of fastBPE.
        ids: the model's dictionary: pieces, with the separator where a word continues, and special tokens.
        special_tokens: those of `ids` that are not pieces.
        end: the special token that ends a text.
        unknown: the special token for characters of no piece.

    Raises:
        UserError: the file is missing, or holds something else than merges.
    """
    merges, is_first_version = _read_merges(codes)
    mark = _END_CHARACTER if is_first_version else _END
    pieces = {_inner(word, mark): number for word, number in ids.items() if word not in special_tokens}
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
        # Not behind characters that no piece has, which would not be joined with it.
        known = "".join(map(re.escape, sorted(symbol for symbol in symbols - {mark} if len(symbol) == 1)))
        tokenizer.normalizer = normalizers.Replace(Regex(rf"(?<=[{known}])(?=\s|$)"), mark)
    tokenizer.decoder = decoders.BPEDecoder(suffix=mark)
    return _finished(tokenizer, ids, special_tokens, end)


def word_backend(ids: dict[str, int], *, special_tokens: Sequence[str], end: str, unknown: str) -> Tokenizer:
    """Return a tokenizer that looks up the words between spaces in the dictionary `ids`."""
    return _finished(Tokenizer(models.WordLevel(ids, unknown)), ids, special_tokens, end)


def _finished(tokenizer: Tokenizer, ids: dict[str, int], special_tokens: Sequence[str], end: str) -> Tokenizer:
    """Return the tokenizer with its special tokens, which cuts at spaces and ends a text with `end`."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    tokenizer.encode_special_tokens = True  # "</s>" in a text is text
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, ids[end])]
    )
    return tokenizer


def _inner(word: str, mark: str) -> str:
    """Return a piece of a dictionary as the backend names it."""
    continues = word.endswith(SEPARATOR) and word != SEPARATOR
    return word.removesuffix(SEPARATOR) if continues else word + mark


def _read_merges(path: Path) -> tuple[list[tuple[str, str]], bool]:
    """Return the merges of a file in their order, each once, and whether they are of subword-nmt's version 0.1."""
    with reading(path):
        lines = read_text(path, _ADVICE, _MOST_BYTES).rstrip("\n").split("\n")
        has_version = lines[0].startswith("#version:")
        version = lines.pop(0).removeprefix("#version:").strip() if has_version else "0.1"
        # fastBPE writes how often it saw a pair behind each, and ends words as version 0.2 does.
        is_fast = bool(lines) and lines[0].strip("\r\n ").count(" ") == 2
        is_first_version = {"0.1": not is_fast, "0.2": False}[version]
        merges = {}
        for line in lines[:_MOST_MERGES]:
            merge = line.strip("\r\n ")
            left, right, times = (merge if is_fast else f"{merge} 1").split(" ")
            merges[left, right] = int(times)
    if is_first_version:
        merges = dict.fromkeys(tuple(symbol.replace(_END, _END_CHARACTER) for symbol in merge) for merge in merges)
    return list(merges), is_first_version
