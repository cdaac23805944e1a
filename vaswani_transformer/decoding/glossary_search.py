"""The beam search of a glossary: a sentence whose outputs have its terms, kept apart by how many tokens they lack."""

import math

from ..model.search_vaswani import NO_SCORE, BeamSentence, SearchSettings
from .glossary import Progress, Terms

_RATHER, _EMPTY = math.log(0.5), -1.0e9


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
        return last in self._terms.tokens.signs and not progress.begun and self._terms.lacks(progress) > 0

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
        kept = _round_robin(sorted(going_on.values(), key=lambda group: -group[0][0]), count)
        kept += [(_EMPTY, _EMPTY, 0, min(settings.end_ids, default=0), Progress(), _EMPTY)] * (count - len(kept))
        finished = [hypothesis[0] for hypothesis in self._finished]
        best, bound = (max(continuation[index] for continuation in kept) for index in (0, 1))
        self.is_done = not left or not settings.may_improve(best, bound, finished)
        self._running, _, own_beams, own_tokens, self._progress, _ = map(list, zip(*kept, strict=True))
        self._tokens.append(own_tokens)
        self._beams.append(own_beams)
        return self._running, own_beams, own_tokens


def _round_robin(groups: list[list], count: int) -> list:
    """Return the best of each group, the second best of each, and so on, up to `count`."""
    kept, rank = [], 0
    while len(kept) < count and any(len(group) > rank for group in groups):
        kept += [group[rank] for group in groups if len(group) > rank]
        rank += 1
    return kept[:count]
