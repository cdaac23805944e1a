"""A shortlist: the output layer is computed for the words that a batch's sources make likely, not for all words.

Marian and CTranslate2 have it too. The words are the commonest of the target language, the likeliest translations of
each source token, and the source tokens themselves, which may be copied. What is likely is learned from parallel text
by IBM Model 1 (Brown et al., 1993), or read from a lexicon such as Marian's.

What it approximates: a word outside of the shortlist cannot be chosen, and beam search compares log-probabilities that
are normalised over the shortlist. A batch with a source token that the lexicon does not know gets the whole vocabulary.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from ..data.text_files import read_lines
from ..data.tokenization import has_two_sides, side_of, tokenizer_sha256
from ..errors import UserError
from ..files import written_whole

SHORTLIST = "shortlist.safetensors"
_FORMAT = "vaswani shortlist 1"
_FREQUENT, _BEST = 1000, 100  # words of the target language, and translations of a token
_ROUNDS = 5  # of expectation maximisation
_LEAST = 1e-6  # a probability below is none
_CHUNK = 500  # pairs at once
_PAIRS = 100_000  # that are learned from, at most
_PADDING = -1
_UNKNOWN = -1  # in place of the translations of a token that the lexicon does not have

# P(target token | source token): ids of source and target and the probability, `(entries,)` each.
Lexicon = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sample_pairs(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """So many pairs as a lexicon is learned from, each equally likely, those without blank sides."""
    kept, random = [], Random(0)
    for number, pair in enumerate(pair for pair in pairs if all(side.strip() for side in pair)):
        if number < _PAIRS:
            kept.append(pair)
        elif (place := random.randrange(number + 1)) < _PAIRS:
            kept[place] = pair
    return kept


def learn_lexicon(pairs: Sequence[tuple[list[int], list[int]]]) -> Lexicon:
    """A lexicon from pairs of source and target ids, by IBM Model 1: which of its sources explains a target token."""
    pairs = sorted(pairs, key=lambda pair: len(pair[0]) * len(pair[1]))  # little padding in a chunk
    size = 1 + max(max(target, default=0) for _, target in pairs)
    chunks = []
    for start in range(0, len(pairs), _CHUNK):
        sides = zip(*pairs[start : start + _CHUNK], strict=True)
        source, target = (pad_sequence([torch.tensor(ids) for ids in side], True, _PADDING) for side in sides)
        links = source[:, :, None] * size + target[:, None]  # (pairs, source, target), one number for both tokens
        chunks.append(links.masked_fill_((source[:, :, None] < 0) | (target[:, None] < 0), _PADDING))
    known = torch.cat([links.unique() for links in chunks]).unique()
    places = [torch.searchsorted(known, links).int() for links in chunks]
    source, probability = known.clamp(min=0) // size, (known >= 0).float()
    for _ in range(_ROUNDS):
        counts = torch.zeros_like(probability)
        for place in places:
            share = probability[place]
            share /= share.sum(dim=1, keepdim=True).clamp(min=1e-30)
            counts.index_add_(0, place.flatten(), share.flatten())
        totals = counts.new_zeros(int(source[-1]) + 1).index_add_(0, source, counts)
        probability = counts / totals[source].clamp(min=1e-30)
    is_likely = probability > _LEAST
    return source[is_likely], known[is_likely] % size, probability[is_likely]


def read_lexicon(path: str | Path, tokenizer: Any) -> Lexicon:
    """A lexicon of Marian's (`lex.s2t`): lines of a target token, a source token and a probability.

    Raises:
        UserError: for a line of another form, or if the tokenizer has none of the tokens.
    """
    source_ids, target_ids = (side_of(tokenizer, side).get_vocab() for side in ("source", "target"))
    entries = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        try:
            target, source, probability = line.split()
            probability = float(probability)
        except ValueError:
            raise UserError(f"{path}, line {number}: not a target token, a source token and a probability") from None
        if source in source_ids and target in target_ids:
            entries.append((source_ids[source], target_ids[target], probability))
    if not entries:
        raise UserError(f"{path} has no pair of tokens that the model has: give a lexicon of its own tokens")
    source, target, probability = zip(*entries, strict=True)
    return torch.tensor(source), torch.tensor(target), torch.tensor(probability)


class Shortlist:
    """Which tokens the outputs of a batch may have.

    Args:
        translations: `(source vocabulary, number)` int32 target ids for each source token; -1 where it is unknown.
        frequent: `(number,)` int32 target ids for all batches.
        vocab_size: of the target.
    """

    def __init__(self, translations: torch.Tensor, frequent: torch.Tensor, vocab_size: int):
        self.translations, self.frequent, self.vocab_size = translations, frequent, vocab_size

    @classmethod
    def of(cls, lexicon: Lexicon, tokenizer: Any, config) -> "Shortlist":
        """The shortlist of a lexicon, for a model's tokenizer and configuration."""
        source, target, probability = lexicon
        totals = probability.new_zeros(config.target_vocab_size).index_add_(0, target, probability)
        frequent = totals.topk(min(_FREQUENT, len(totals))).indices
        order = probability.argsort(descending=True, stable=True)
        order = order[source[order].argsort(stable=True)]
        known, counts = source.unique(return_counts=True)
        translations = torch.full((config.vocab_size, _BEST + 1), _UNKNOWN)
        for token, entries in zip(known.tolist(), target[order].split(counts.tolist()), strict=True):
            translations[token] = entries[0]  # in the places that are left over
            translations[token, : len(entries[:_BEST])] = entries[:_BEST]
            if not has_two_sides(tokenizer):
                translations[token, _BEST] = token
        translations[config.pad_token_id] = frequent[0]  # it stands for nothing
        return cls(translations.int(), frequent.int(), config.target_vocab_size)

    def __call__(self, input_ids: torch.LongTensor) -> torch.LongTensor | None:
        """The tokens in ascending order, `(size,)`, for `(sentences, source_length)` ids; None: all of them."""
        ids = input_ids.unique()
        if ids[0] < 0:  # not the source: its encoding was given
            return None
        translations = self.translations[ids]
        if (translations[:, 0] == _UNKNOWN).any():
            return None
        is_likely = torch.zeros(self.vocab_size, dtype=torch.bool)
        is_likely[self.frequent] = is_likely[translations.flatten()] = True
        return is_likely.nonzero().flatten()

    def write(self, folder: str | Path, tokenizer: Any) -> None:
        """Write it into a model's folder, with the hash of the model's tokenizer."""
        with written_whole(Path(folder) / SHORTLIST) as path:
            tensors = {"translations": self.translations, "frequent": self.frequent}
            save_file(tensors, path, _metadata(tokenizer))


def _metadata(tokenizer: Any) -> dict[str, str]:
    return {"format": _FORMAT, "tokenizer": tokenizer_sha256(tokenizer)}


def read_shortlist(folder: str | Path, config, tokenizer: Any) -> Shortlist:
    """The shortlist in a model's folder.

    Raises:
        UserError: if there is none, or if it is damaged or was made for another tokenizer.
    """
    path = Path(folder) / SHORTLIST
    advice = f"make one: vaswani shortlist {folder} --source FILE --target FILE"
    if not path.exists():
        raise UserError(f"{folder} has no {SHORTLIST}: {advice}")
    try:
        with safe_open(path, "pt") as file:
            known = file.metadata() == _metadata(tokenizer)
            translations, frequent = file.get_tensor("translations"), file.get_tensor("frequent")
    except SafetensorError:
        known = False
    if known and translations.dtype == frequent.dtype == torch.int32 and min(translations.numel(), frequent.numel()):
        shapes = len(translations), translations.dim(), frequent.dim()
        most = max(translations.max(), frequent.max())
        known = shapes == (config.vocab_size, 2, 1) and most < config.target_vocab_size
        known = known and translations.min() >= _UNKNOWN and frequent.min() >= 0
    else:
        known = False
    if not known:
        raise UserError(f"{path} is no shortlist for this model: {advice}")
    return Shortlist(translations, frequent, config.target_vocab_size)
