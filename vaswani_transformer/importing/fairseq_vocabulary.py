"""Dictionaries of fairseq's, and a tokenizer from them and the merges or the SentencePiece model beside them.

Merges of byte-pair encoding (Sennrich, Haddow and Birch, 2016, arXiv 1508.07909) are those that subword-nmt and fastBPE
write. A word's pieces are written `un@@ like@@ ly`: all but the last one end in a separator, and so they are in
dictionaries. Inside the backend the last one is marked, as in the file of merges: `un like ly</w>`.
"""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import UserError, reading, shortened
from ..hub.card_facts import is_language
from ..json_and_yaml import read_text
from ..model.tokenization_vaswani import VaswaniTokenizer
from . import sentencepiece
from .marian_vocabularies import PARTS

_END, _UNKNOWN = "</s>", "<unk>"
SPECIAL_TOKENS = ("<s>", "<pad>", _END, _UNKNOWN)  # the first ids of fairseq's dictionaries
_SEPARATOR, _END_OF_WORD = "@@", "</w>"
#: Files that fairseq's `from_pretrained` looks for beside a checkpoint, and other usual names.
_CODES = ("bpecodes", "code", "codes", "bpe.codes")
_MODELS = ("sentencepiece.bpe.model", "sentencepiece.model", "spm.model")
_ADVICE = "give the dict.LANGUAGE.txt that fairseq-preprocess wrote for this model"


def read_dictionaries(
    checkpoint: Path, paths: Sequence[Path], languages: Sequence[str], sizes: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of a model's words, of its source and of its target.

    Of the dictionaries, `paths` has one for both sides, or two; without them those beside the checkpoint are read, of
    the `languages`, if they are known. `sizes` are rows of the embeddings of source and target.
    """
    paths = list(paths) or [checkpoint.parent / f"dict.{language}.txt" for language in languages]
    if len(paths) not in (1, 2) or not all(path.is_file() for path in paths):
        names = " and ".join(path.name for path in paths) or "dictionaries"
        raise UserError(f"{names} must be beside {checkpoint}: copy them, or give --vocabulary SOURCE TARGET")
    ids = [_read(path) for path in paths]
    for path, numbers, size in zip((paths[0], paths[-1]), (ids[0], ids[-1]), sizes, strict=True):
        if (entries := max(numbers.values()) + 1) != size:
            counts = f"{entries:,} entries, the {len(SPECIAL_TOKENS)} special ones counted"
            raise UserError(f"{path} has {counts}, and {checkpoint} embeddings of {size:,}: {_ADVICE}")
    return ids[0], ids[-1]


def _read(path: Path) -> dict[str, int]:
    """Return the numbers of a dictionary's words: lines of a word and how often it was seen."""
    ids = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    for number, line in enumerate(read_text(path).removesuffix("\n").split("\n"), 1):
        word, _, count = line.rstrip().rpartition(" ")
        if not word or not count.isdecimal() or word in ids:
            raise UserError(f"{path}, line {number}, is not a new word and count ({shortened(line, 60)!r}): {_ADVICE}")
        ids[word] = len(ids)
    return ids


def read_tokenizer(
    checkpoint: Path,
    codes: Path | None,
    settings: dict[str, Any],
    languages: Sequence[str],
    dictionaries: tuple[dict[str, int], dict[str, int]],
) -> tuple[VaswaniTokenizer, str]:
    """Return a tokenizer that prepares texts as for fairseq's training, and a note for the card, perhaps empty."""
    names = _MODELS if settings.get("bpe") == "sentencepiece" else (*_CODES, *_MODELS)
    segmentation = codes or next((path for name in names if (path := checkpoint.parent / name).is_file()), None)
    parts = [sum(word.endswith(_SEPARATOR) or word.startswith("▁") for word in ids) for ids in dictionaries]
    if segmentation is None and any(n > PARTS * len(ids) for n, ids in zip(parts, dictionaries, strict=True)):
        problem = f"hold parts of words, and there is no {_CODES[0]} or {_MODELS[0]} beside it"
        fix = "give --bpe-codes FILE, the merges of subword-nmt or fastBPE or the model of SentencePiece"
        raise UserError(f"the dictionaries of {checkpoint} {problem}: {fix}")
    sides = dictionaries[:1] if dictionaries[0] == dictionaries[1] else dictionaries
    if segmentation is None:
        backends = [with_special_tokens(Tokenizer(models.WordLevel(ids, _UNKNOWN)), ids) for ids in sides]
    elif segmentation.suffix in (".model", ".spm"):
        backends = [sentencepiece.backend(segmentation, ids, ("</s>", "<unk>", "<s>", "<pad>")) for ids in sides]
    else:
        backends = [merges_backend(segmentation, ids) for ids in sides]
    # Few checkpoints record that texts went through Moses' tokenizer, but dictionaries show how it writes ' and ".
    marks = ("&apos;", "&quot;", "&apos;s")
    is_moses = settings.get("tokenizer") == "moses" or any(mark in ids for ids in dictionaries for mark in marks)
    codes = [code if is_language(code) else "en" for code in languages]  # for which it takes English too
    moses = {"languages": codes or ["en", "en"], "escape": not settings.get("moses_no_escape")}
    has_dashes = any("@-@" in word for ids in sides for word in ids)  # as the option -a writes them
    moses["aggressive_dash_splits"] = has_dashes and not settings.get("moses_no_dash_splits")
    tokenizer = VaswaniTokenizer(
        tokenizer_object=backends[0],
        target_tokenizer_object=backends[1] if len(backends) == 2 else None,
        known_tokens=tuple(max(ids.values()) + 1 for ids in dictionaries),
        moses=moses if is_moses else None,
        **dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True)),
    )
    note = "Its texts were tokenised by Moses: the tokenizer needs the package sacremoses."
    return tokenizer, note if is_moses else ""


def merges_backend(codes: Path, ids: dict[str, int]) -> Tokenizer:
    """Return a tokenizer that cuts words, which spaces separate, into the pieces that subword-nmt makes of them.

    The `codes` are merges of subword-nmt (version 0.2; 0.1 ends words in another way) or of fastBPE, `ids` the model's
    dictionary: the special tokens, and pieces, with the separator where a word continues. Pieces that the merges can
    make and `ids` lacks have ids from `1 + max(ids.values())` on.
    """
    merges = _read_merges(codes)
    continues = lambda word: word.endswith(_SEPARATOR) and word != _SEPARATOR  # noqa: E731
    names = {word: word.removesuffix(_SEPARATOR) if continues(word) else word + _END_OF_WORD for word in ids}
    pieces = {names[word]: number for word, number in ids.items() if word not in SPECIAL_TOKENS}
    symbols = pieces.keys() | {symbol for left, right in merges for symbol in (left, right, left + right)}
    others = zip(sorted(symbols - pieces.keys()), count(1 + max(ids.values())), strict=False)
    vocabulary = {token: ids[token] for token in SPECIAL_TOKENS} | pieces | dict(others)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=_UNKNOWN, end_of_word_suffix=_END_OF_WORD))
    tokenizer.decoder = decoders.BPEDecoder(suffix=_END_OF_WORD)
    return with_special_tokens(tokenizer, ids)


def with_special_tokens(tokenizer: Tokenizer, ids: dict[str, int]) -> Tokenizer:
    """Return the tokenizer with its special tokens, which cuts at spaces and ends each text."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.encode_special_tokens = True  # "</s>" in a text is text
    if all(word == word.lower() for word in ids):
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {_END}", f"$A {_END} $B {_END}", [(_END, ids[_END])])
    return tokenizer


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
