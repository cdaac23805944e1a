"""Byte-pair encoding by a file of merges, as subword-nmt and fastBPE write it, as a backend of `tokenizers`.

Sennrich, Haddow and Birch (2016, arXiv 1508.07909). A word's pieces are written `un@@ like@@ ly`: all but the last one
end in a separator, and so they are in dictionaries. Inside the backend the last one is marked, as in the file of
merges: `un like ly</w>`.
"""

from itertools import count
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ..errors import UserError, reading
from ..json_and_yaml import read_text

_END, _UNKNOWN = "</s>", "<unk>"
SPECIAL_TOKENS = ("<s>", "<pad>", _END, _UNKNOWN)  # the first ids of fairseq's dictionaries
SEPARATOR = "@@"
_END_OF_WORD = "</w>"


def backend(codes: Path, ids: dict[str, int]) -> Tokenizer:
    """Return a tokenizer that cuts words, which spaces separate, into the pieces that subword-nmt makes of them.

    Pieces that the merges can make and `ids` lacks have ids from `1 + max(ids.values())` on.

    Args:
        codes: merges of subword-nmt (version 0.2; 0.1 ends words in another way) or of fastBPE.
        ids: the model's dictionary: the special tokens, and pieces, with the separator where a word continues.

    Raises:
        UserError: the file is missing, or holds something else than merges.
    """
    merges = _read_merges(codes)
    pieces = {_inner(word): number for word, number in ids.items() if word not in SPECIAL_TOKENS}
    symbols = pieces.keys() | {symbol for left, right in merges for symbol in (left, right, left + right)}
    others = zip(sorted(symbols - pieces.keys()), count(1 + max(ids.values())), strict=False)
    vocabulary = {token: ids[token] for token in SPECIAL_TOKENS} | pieces | dict(others)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=_UNKNOWN, end_of_word_suffix=_END_OF_WORD))
    tokenizer.decoder = decoders.BPEDecoder(suffix=_END_OF_WORD)
    return _finished(tokenizer, ids)


def word_backend(ids: dict[str, int]) -> Tokenizer:
    """Return a tokenizer that looks up the words between spaces in the dictionary `ids`."""
    return _finished(Tokenizer(models.WordLevel(ids, _UNKNOWN)), ids)


def _finished(tokenizer: Tokenizer, ids: dict[str, int]) -> Tokenizer:
    """Return the tokenizer with its special tokens, which cuts at spaces and ends each text."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.encode_special_tokens = True  # "</s>" in a text is text
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {_END}", pair=f"$A {_END} $B {_END}", special_tokens=[(_END, ids[_END])]
    )
    return tokenizer


def _inner(word: str) -> str:
    """Return a piece of a dictionary as the backend names it."""
    continues = word.endswith(SEPARATOR) and word != SEPARATOR
    return word.removesuffix(SEPARATOR) if continues else word + _END_OF_WORD


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """Return the merges of a file in their order, each once."""
    with reading(path):
        lines = [line.strip("\r ") for line in read_text(path).rstrip("\n").split("\n")]
        # fastBPE writes how often it saw a pair behind each, and ends words as version 0.2 does.
        is_fast = lines[0].count(" ") == 2
        if not is_fast and lines.pop(0) != "#version: 0.2":
            raise UserError(f"{path} does not begin with '#version: 0.2': give the merges of the model's training")
        merges = {}
        for line in lines:
            left, right, times = (line if is_fast else f"{line} 1").split(" ")
            merges[left, right] = int(times)
    return list(merges)
