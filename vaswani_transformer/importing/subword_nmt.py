"""Byte-pair encoding by a file of merges, as subword-nmt and fastBPE write it, as a backend of `tokenizers`.

Sennrich, Haddow and Birch (2016, arXiv 1508.07909). A word's pieces are written `un@@ like@@ ly`: all but the last one
end in a separator, and so they are in dictionaries. Inside the backend the last one is marked, as in the file of
merges: `un like ly</w>`.
"""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ..errors import UserError, reading
from ..json_and_yaml import read_text

SEPARATOR = "@@"
_MOST_BYTES = 1 << 24  # of a file of merges; 100,000 of them take 2 MB
_MOST_MERGES = 10**6
_END = "</w>"
_ADVICE = "give the file of merges that subword-nmt or fastBPE learned for this model"


def backend(codes: Path, ids: dict[str, int], *, special_tokens: Sequence[str], end: str, unknown: str) -> Tokenizer:
    """Return a tokenizer that cuts words, which spaces separate, into the pieces that subword-nmt makes of them.

    Pieces that the merges can make and `ids` lacks have ids from `1 + max(ids.values())` on.

    Args:
        codes: merges of subword-nmt (version 0.2; 0.1 ends words in another way) or of fastBPE.
        ids: the model's dictionary: pieces, with the separator where a word continues, and special tokens.
        special_tokens: those of `ids` that are not pieces.
        end: the special token that ends a text.
        unknown: the special token for characters of no piece.

    Raises:
        UserError: the file is missing, or holds something else than merges.
    """
    merges = _read_merges(codes)
    pieces = {_inner(word): number for word, number in ids.items() if word not in special_tokens}
    symbols = pieces.keys() | {symbol for left, right in merges for symbol in (left, right, left + right)}
    others = zip(sorted(symbols - pieces.keys()), count(1 + max(ids.values())), strict=False)
    vocabulary = {token: ids[token] for token in special_tokens} | pieces | dict(others)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, end_of_word_suffix=_END))
    tokenizer.decoder = decoders.BPEDecoder(suffix=_END)
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


def _inner(word: str) -> str:
    """Return a piece of a dictionary as the backend names it."""
    continues = word.endswith(SEPARATOR) and word != SEPARATOR
    return word.removesuffix(SEPARATOR) if continues else word + _END


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """Return the merges of a file in their order, each once."""
    with reading(path):
        lines = read_text(path, _MOST_BYTES).rstrip("\n").split("\n")
        # fastBPE writes how often it saw a pair behind each, and ends words as version 0.2 does.
        is_fast = lines[0].strip("\r\n ").count(" ") == 2
        if not is_fast and lines.pop(0).strip() != "#version: 0.2":
            raise UserError(f"{path} does not begin with '#version: 0.2': {_ADVICE}")
        merges = {}
        for line in lines[:_MOST_MERGES]:
            merge = line.strip("\r\n ")
            left, right, times = (merge if is_fast else f"{merge} 1").split(" ")
            merges[left, right] = int(times)
    return list(merges)
