"""The search of a `Translator` by a model: its pieces become token ids, by `generate()` or an open search."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, zip_longest

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ..data.batching import PairCollator
from ..errors import UserError
from ..model.search_vaswani import NO_SCORE, BeamSentence, SearchSettings
from .glossary import Progress, Terms, beams_for
from .streaming import batches_by_length

_JOINING = 4  # sentences join a search when a fourth of its places is free: the encoder is faster with several at once
# Devices on which batches that sentences only leave are faster than batches that stay full to the end, which need fewer
# steps but no fewer rows: on a CPU the rows take the time, and rows of different length make attention slower.
_FASTER_IN_BATCHES = {"cpu"}
_RATHER, _EMPTY = math.log(0.5), -1.0e9  # log-probabilities of an end that is likelier than not, of no hypothesis


class ForcedPrefixes(LogitsProcessor):
    """Makes each output begin with the token ids of its sentence's prefix, one prefix for each sentence of the batch.

    Scores and limits stay as they are: a prefix counts in log-probability and length like any other tokens.
    """

    def __init__(self, prefixes: list[list[int]]):
        self.prefixes = prefixes

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return scores `(rows, vocab_size)`, a sentence's rows together, with all but the forced token ruled out."""
        step = input_ids.shape[1] - 1  # without the start token
        scores = scores.clone()
        for rows, prefix in zip(scores.view(len(self.prefixes), -1, scores.shape[1]), self.prefixes, strict=True):
            if step < len(prefix):
                # nearly impossible, not impossible, if another processor has ruled it out
                forced = rows[:, prefix[step]].clamp(min=-1e4)
                rows[:] = -torch.inf
                rows[:, prefix[step]] = forced
        return scores


def search_pieces(translator, pieces: list, window: int) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield the number of each piece and the ids of its hypotheses, best first, without the start token and padding.

    With a seed it starts from the random state of that and of the window's number; afterwards torch's is what it was.
    """
    device, seed = translator.model.device, translator.seed
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, seed is not None, device_type=device.type):
        if seed is not None:
            torch.manual_seed((seed * 1_000_003 + window) % 2**63)
        asked = translator.setting("num_beams", 1)
        groups: dict[int, list[int]] = {}  # by the beams that their terms take, 0 without terms
        for number, piece in enumerate(pieces):
            groups.setdefault(beams_for(piece.terms, asked) if piece.terms else 0, []).append(number)
        for beams, numbers in groups.items():
            chosen = [pieces[number] for number in numbers]
            options = translator.generate_options | ({"num_beams": beams} if beams else {})
            # Sentences can join an open search; there is none where only `generate()` does what is asked for.
            is_plain = hasattr(translator.model, "open_search") and not translator.logits_processors(chosen)
            if is_plain and (search := translator.model.open_search(**options)):
                outputs = _joining(translator, search, chosen)
            elif beams:
                others = "prefixes, sampling, ensembles, further settings of generate(); no attention_window takes one"
                raise UserError(f"a glossary is for a beam search of one model: leave it out, or {others}")
            else:
                batches = batches_by_length([len(piece.ids) for piece in chosen], translator.tokens_per_batch)
                rows = (generate(translator, [chosen[number] for number in batch]) for batch in batches)
                outputs = zip(chain(*batches), chain.from_iterable(rows), strict=True)
            yield from ((numbers[index], ids) for index, ids in outputs)


def _joining(translator, search, pieces: list) -> Iterator[tuple[int, list[list[int]]]]:
    """Search for all in one search, the longest first: in batches, or joining as others are done where that pays."""
    pays, lengths = translator.model.device.type not in _FASTER_IN_BATCHES, [len(piece.ids) for piece in pieces]
    waiting = sorted(range(len(pieces)), key=lambda number: -lengths[number])[::-1]  # the next one last
    numbers: dict = {}  # of the sentences of the search
    while waiting or search.running:
        longest = max([*search.cache.source_lengths, lengths[waiting[-1]] if waiting else 0])  # all are padded to it
        room = max(1, translator.tokens_per_batch // longest)
        free = room - search.running
        many_may_join = pays and (free * _JOINING >= room or len(waiting) <= free)
        if waiting and (many_may_join or not search.running):
            joining = [waiting.pop() for _ in range(min(free, len(waiting)))]
            sentences = join(search, translator.model, [pieces[number] for number in joining])
            numbers |= dict(zip(sentences, joining, strict=True))
        for sentence in search.step():
            yield numbers.pop(sentence), [_trimmed(translator, output.tokens) for output in sentence.outputs()]


def join(search, model, pieces: list) -> list:
    """Let pieces join an open search, either all of them with terms or none; returns its sentences."""
    kinds = [partial(TermsSentence, piece.terms) for piece in pieces] if pieces[0].terms else None
    return search.join(**_padded(model, pieces), kinds=kinds)


@torch.no_grad()
def generate(translator, pieces: list) -> list[list[list[int]]]:
    """Return the token ids of each piece's hypotheses by one call of `generate()`, as `search_pieces`."""
    model, options = translator.model, dict(translator.generate_options)
    if processors := translator.logits_processors(pieces):
        options["logits_processor"] = LogitsProcessorList([*processors, *options.get("logits_processor", ())])
    outputs = model.generate(**_padded(model, pieces), **options)
    outputs = getattr(outputs, "sequences", outputs)  # where the model's own settings ask for more than ids
    rows = [_trimmed(translator, row[1:]) for row in outputs.tolist()]
    number = len(rows) // len(pieces)
    return [rows[start : start + number] for start in range(0, len(rows), number)]


def _padded(model, pieces: list) -> dict[str, torch.Tensor]:
    """Return sources as `generate()` takes them: `input_ids` and `attention_mask`, `(pieces, longest)`."""
    collate = PairCollator(model.config.pad_token_id)
    inputs = collate([{"input_ids": piece.ids} for piece in pieces])
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def _trimmed(translator, ids: list[int]) -> list[int]:
    """Return an output without the padding after `</s>`, or at its end."""
    ends, pad = translator.end_ids, translator.model.config.pad_token_id
    end = next((index for index, token in enumerate(ids) if token in ends), None)
    if end is not None:
        return ids[: end + 1]
    while ids and ids[-1] == pad:
        ids = ids[:-1]
    return ids


class TermsSentence(BeamSentence):
    """A sentence in a beam search whose outputs have its terms.

    A hypothesis that lacks terms is over where it ends with a sign and the model would rather end it there than not:
    its terms would come behind the full stop. It is not continued, unless all are over.
    """

    def __init__(self, terms: Terms, limit: int, settings: SearchSettings):
        super().__init__(max(limit, terms.lacks(Progress()) + 1), settings)
        self._terms = terms
        self._progress = [Progress()] * settings.num_beams
        self._running = [0.0] * settings.num_beams  # log-probabilities

    def wanted(self) -> list[tuple[int, int]]:
        """Return continuations that have to be looked at, however unlikely: beams and tokens."""
        continuations = []
        for beam, progress in enumerate(self._progress):
            tokens = self._terms.wanted(progress)
            if (progress.ending and not tokens) or self._may_be_over(beam):
                tokens |= self.settings.end_ids
            continuations += [(beam, token) for token in sorted(tokens)]
        return continuations

    def _may_be_over(self, beam: int) -> bool:
        """Return whether a hypothesis ends with a sign and lacks terms, of which it has begun none."""
        progress, last = self._progress[beam], int(self._tokens[-1][beam]) if self._tokens else None
        lacks_some = self._terms.lacks(progress) > 0 and not self._terms.has_begun(progress)
        return lacks_some and last in self._terms.tokens.signs

    def extend(self, values, scores, bounds, beams, tokens):
        """Extend as `BeamSentence` does, by any number of continuations in any order."""
        settings, terms, count = self.settings, self._terms, self.settings.num_beams
        left, step = self.limit - self.length - 1, self.length  # tokens that may follow
        self.length += 1
        ranks: dict[tuple[int, int], int] = {}  # of each continuation, the best first
        for rank in sorted(range(len(values)), key=lambda rank: -values[rank]):
            if values[rank] > NO_SCORE:
                ranks.setdefault((int(beams[rank]), int(tokens[rank])), rank)
        over = {
            beam
            for (beam, token), rank in ranks.items()
            if token in settings.end_ids and values[rank] - self._running[beam] > _RATHER and self._may_be_over(beam)
        }
        groups: tuple[dict[int, list], dict[int, list]] = {}, {}  # of those that are not over, and of those that are
        for (beam, token), rank in ranks.items():
            if token in settings.end_ids:
                if not terms.lacks(self._progress[beam]):
                    self._finished.append((scores[rank], step, beam, token))
                continue
            after = terms.after(self._progress[beam], token)
            if (lacking := terms.lacks(after)) <= left:
                continuation = values[rank], bounds[rank], beam, token, after, scores[rank]
                groups[beam in over].setdefault(lacking, []).append(continuation)
        going_on = groups[0] or groups[1]
        if not left and (groups[0] or not self._finished):
            ends = [(score, step, beam, token) for own in going_on.values() for _, _, beam, token, _, score in own]
            self._finished += ends
        self._finished.sort(key=lambda hypothesis: -hypothesis[0])
        del self._finished[count:]
        # The best of each group, then the second best of each, and so on.
        ranked = zip_longest(*sorted(going_on.values(), key=lambda group: -group[0][0]))
        kept = list(islice(filter(None, chain.from_iterable(ranked)), count))
        kept += [(_EMPTY, _EMPTY, 0, min(settings.end_ids, default=0), Progress(), _EMPTY)] * (count - len(kept))
        finished = [hypothesis[0] for hypothesis in self._finished]
        best, bound = (max(continuation[index] for continuation in kept) for index in (0, 1))
        self.is_done = not left or not settings.may_improve(best, bound, finished)
        self._running, _, own_beams, own_tokens, self._progress, _ = map(list, zip(*kept, strict=True))
        self._tokens.append(own_tokens)
        self._beams.append(own_beams)
        return self._running, own_beams, own_tokens
