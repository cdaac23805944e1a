"""The paper's search (Section 6.1) made of CTranslate2's.

CTranslate2 scores by log-probability / length^alpha with the end token not counted, and stops when so many hypotheses
have ended. Its running beams are chosen as in transformers, so the hypotheses that it meets are the same. Here it is
asked for all that it has met, with plain log-probabilities; they are ranked by the paper's rule, and where it stopped
too early it is asked again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..decoding.scoring import LengthRule
from ..decoding.streaming import batches_by_length
from ..errors import UserError

_PATIENCE = 2.0
_EXACT_PATIENCE = 4.0  # at first, where the result will be proven: more leave less to ask again


class Found(NamedTuple):
    """One output of a search.

    Args:
        ids: generated token ids, the end token included if it was generated.
        log_probability: of all of them, in nats.
        score: what outputs are ranked by.
    """

    ids: list[int]
    log_probability: float
    score: float


@dataclass(frozen=True)
class Search:
    """One call's search.

    Args:
        engine: a `ctranslate2.Translator`.
        vocabulary: the model's tokens, by id.
        ids: the same the other way round.
        end: id of the end token.
        beams: beam size; 1 is greedy search.
        rule: how scores are made.
        patience: a search ends when `patience * beams` hypotheses have ended; 2 if not given, 4 at first if `exact`.
        exact: go on until no running beam can win any more.
        tokens_per_batch: source tokens at once, padding counted.
    """

    engine: object
    vocabulary: Sequence[str]
    ids: Mapping[str, int]
    end: int
    beams: int
    rule: LengthRule
    patience: float | None = None
    exact: bool = False
    tokens_per_batch: int = 2048

    def __post_init__(self):
        if self.beams < 1:
            raise UserError(f"num_beams is {self.beams}: it must be 1 or more")
        if self.patience is not None and self.patience < 1:
            raise UserError(f"patience is {self.patience}: it must be 1 or more")
        if self.beams > 1 and 2 * self.beams > len(self.vocabulary):
            raise UserError(f"num_beams is {self.beams}: it must be at most half of {len(self.vocabulary)} tokens")

    def run(self, sources: Sequence[Sequence[int]], limits: Sequence[int], number: int = 1) -> list[list[Found]]:
        """The best outputs of each source, best first.

        Args:
            sources: token ids with the end token.
            limits: the longest output of each, in tokens.
            number: outputs wanted of each, at most the beam size.
        """
        results: list[list[Found]] = [[] for _ in sources]
        for batch in batches_by_length([len(source) for source in sources], self.tokens_per_batch):
            for index, found in self._run_batch(sources, limits, batch, number):
                results[index] = sorted(found, key=lambda item: item.score, reverse=True)[:number]
        return results

    def _run_batch(self, sources, limits, batch: list[int], number: int) -> Iterator[tuple[int, list[Found]]]:
        """Ask until every source is settled; all of one call have one longest length."""
        pending, cut = batch, max(limits[index] for index in batch)
        patience = self.patience or (_EXACT_PATIENCE if self.exact else _PATIENCE)
        while pending:
            longest = min(cut, *(limits[index] for index in pending))
            again, reached = [], 0
            outputs = self._ask([sources[index] for index in pending], longest, patience)
            for index, output in zip(pending, outputs, strict=True):
                found = []
                for words, log_probability in zip(output.hypotheses, output.scores, strict=True):
                    ids = [self.ids[word] for word in words]
                    found.append(Found(ids, log_probability, self.rule.score(log_probability, len(ids))))
                if self._is_done(found, number, longest, limits[index], patience):
                    yield index, found
                else:
                    again.append(index)
                    reached = max(reached, *(len(item.ids) for item in found))
            pending = again
            if self.exact and self.beams > 1 and pending:
                # All that is met up to a length, which grows until nothing longer can win.
                cut = reached + reached // 4 + 4
                patience = float(max(limits[index] for index in pending))

    def _ask(self, sources: list[Sequence[int]], longest: int, patience: float) -> list:
        """CTranslate2's own results, with plain log-probabilities."""
        wide = self.beams > 1
        return self.engine.translate_batch(
            [[self.vocabulary[number] for number in source] for source in sources],
            beam_size=self.beams,
            patience=patience if wide else 1,
            num_hypotheses=self._most(patience) if wide else 1,
            length_penalty=0,  # plain log-probabilities; with so many hypotheses wanted it does not stop earlier
            max_decoding_length=longest,
            min_decoding_length=0,
            max_input_length=0,
            return_scores=True,
            return_end_token=True,
        )

    def _most(self, patience: float) -> int:
        # Rounded down to what is half a hypothesis from neither side: CTranslate2 rounds in its own way.
        return max(1, int(self.beams * patience + 1e-6))

    def _is_open(self, item: Found) -> bool:
        return not item.ids or item.ids[-1] != self.end

    def _is_done(self, found: list[Found], number: int, longest: int, limit: int, patience: float) -> bool:
        is_cut = any(self._is_open(item) for item in found)
        if longest == limit and (is_cut or patience >= longest):
            return True  # it ran as far as it may
        if self.beams == 1 or not self.exact:
            return not is_cut
        return self._is_proven(found, number, limit, self._most(patience))

    def _is_proven(self, found: list[Found], number: int, limit: int, most: int) -> bool:
        """Whether nothing that CTranslate2 did not return can be among the best.

        A beam's log-probability can only fall. Where all beams of a step have ended, the least probable of them bounds
        what ran on; where the search was cut at a length, the most probable one that had not ended does.
        """
        ended: dict[int, list[float]] = {}
        running = []
        for item in found:
            if self._is_open(item):
                running.append(item.log_probability)
            else:
                ended.setdefault(len(item.ids), []).append(item.log_probability)
        best = sorted((item.score for item in found if not self._is_open(item)), reverse=True)
        if len(best) < number:
            return False
        last = max(len(item.ids) for item in found)
        full_steps = [min(step) for step in ended.values() if len(step) == self.beams]
        bound = min([max(running, default=0.0), *full_steps])
        long_is_better = self.rule.length_penalty > 0
        possible = self.rule.score(bound, limit if long_is_better else last + 1)
        if len(found) >= most:  # there may have been more, less probable than all of these
            least = min(item.log_probability for item in found)
            possible = max(possible, self.rule.score(least, last if long_is_better else 1))
        return possible <= best[number - 1]
