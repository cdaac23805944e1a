"""One model that works for many requests at once.

A thread owns the model. Sentences with the same options share a search, which they join at any step and leave when
they are done, so that nothing waits for a batch to fill or to end; searches with different options take turns, a step
each. What a sentence gets does not depend on the others (docs/explanation/search.md). Where a model has no search that
sentences can join (an export, settings that only transformers' loop follows, a prefix), batches are translated.
"""

import asyncio
import contextlib
import copy
import logging
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from babel.core import get_global

from ..decoding.glossary import Glossary, beams_for
from ..decoding.scoring import positions
from ..decoding.streaming import Window, split_line
from ..decoding.translator import Hypothesis, Piece, Translator
from ..model.language_codes_vaswani import LanguageCodes

logger = logging.getLogger(__name__)

LONGEST = 500  # tokens of a sentence; a longer one is divided, or its attention might fill the memory
_BEAMS = 4  # with so many beams a search has `tokens_per_batch` source tokens; with more it has fewer
_LENGTHS = (64, 256)  # sources longer than these have searches of their own, so that short ones are not padded to them
_SEARCHES = 8  # searches that take turns; where others wait, these end before they take more sentences

Options = tuple[tuple[str, Any], ...]  # names and values for `generate()`, in the order of the names


class _Key(NamedTuple):
    """Properties that sentences of one search share."""

    options: Options
    lengths: int  # of the ranges of lengths, the number
    has_terms: bool  # of a glossary
    is_joinable: bool  # whether they can join a search that is under way


@dataclass(eq=False)
class _Ticket:
    """The sentences of a request."""

    pieces: list[Piece]  # one for each sentence
    options: Options
    scores: bool
    deliver: Callable[[Any], Any]  # takes (number of a sentence, its hypotheses), or an exception


class _Group:
    """Sentences that are searched together."""

    def __init__(self, engine: "Engine", key: _Key):
        self.engine, self.key, self.options = engine, key, dict(key.options)
        self.waiting: dict[_Ticket, deque[int]] = {}  # numbers of sentences; the next one to join is of the first
        self.running: dict[Any, tuple[_Ticket, int]] = {}  # by the search's sentences
        self.beams = self.options.get("num_beams") or engine.model.generation_config.num_beams or 1

    @cached_property
    def search(self):
        """Return the search that sentences join; None where they are translated in batches."""
        return self.engine.model.open_search(**self.options) if self.key.is_joinable else None

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest source that is searched."""
        return max((len(ticket.pieces[number].ids) for ticket, number in self.running.values()), default=0)

    def turn(self, room: int) -> None:
        """Compute a step of the search, or a batch, with what waits as far as it fits into the room."""
        is_joinable = self.search is not None  # before anything is admitted, so that an error reaches all that wait
        admitted = self._admitted(room)
        self.running |= dict(enumerate(admitted))  # under these numbers until they have joined the search
        if is_joinable and admitted:
            from ..decoding.search import join

            sentences = join(self.search, self.engine.model, list(map(self._piece, range(len(admitted)))))
            self.running |= {sentence: self.running.pop(number) for number, sentence in enumerate(sentences)}
        self.engine.note_batch(len(self.running))
        for sentence, hypotheses in self._step() if is_joinable else self._translate():
            ticket, number = self.running.pop(sentence)
            ticket.deliver((number, hypotheses))

    def _admitted(self, room: int) -> list[tuple[_Ticket, int]]:
        """Return the next sentences, one of each request in turn.

        Each request has its part of the room, in which one request more is counted than there are, so that there is
        room for a short one that comes while long ones run.
        """
        admitted, longest, passed = [], self.longest, 0  # passed: requests in a row that have their part
        running = Counter(ticket for ticket, _ in self.running.values())
        requests = len(self.waiting.keys() | running.keys())
        while passed < len(self.waiting):
            ticket, numbers = next(iter(self.waiting.items()))
            length = max(longest, len(ticket.pieces[numbers[0]].ids))
            limit, taken = room // (length * self.beams), len(self.running) + len(admitted)
            if taken and taken >= limit:
                break
            del self.waiting[ticket]
            if running[ticket] and running[ticket] >= limit // (requests + 1):
                passed += 1
            else:
                passed, longest = 0, length
                running[ticket] += 1
                admitted.append((ticket, numbers.popleft()))
            if numbers:
                self.waiting[ticket] = numbers  # as the last
        return admitted

    def _step(self) -> list[tuple[Any, list[Hypothesis]]]:
        """Compute a step of the search, and return the hypotheses of sentences that are done, as `Translator`'s."""
        done, results = self.search.step(), []
        for scores in (False, True):
            sentences = [sentence for sentence in done if self.running[sentence][0].scores == scores]
            outputs = [[output.tokens for output in sentence.outputs()] for sentence in sentences]
            translator = self.engine.with_options(self.key.options, scores)
            ranked = translator.as_hypotheses(list(map(self._piece, sentences)), outputs)
            on_a_line = ([replace(each, text=" ".join(each.text.splitlines())) for each in row] for row in ranked)
            results += zip(sentences, on_a_line, strict=True)
        return results

    def _translate(self) -> list[tuple[Any, list[Hypothesis]]]:
        scores = any(ticket.scores for ticket, _ in self.running.values())
        pieces = [replace(self._piece(number), line=number) for number in self.running]
        window = Window(0, 1, [""] * len(pieces), pieces=pieces)
        ranked = self.engine.with_options(self.key.options, scores).translate_prepared(window)
        return list(zip(self.running, ranked, strict=True))

    def _piece(self, sentence: Any) -> Piece:
        ticket, number = self.running[sentence]
        return ticket.pieces[number]

    def drop(self, ticket: _Ticket) -> None:
        """Forget the sentences of a ticket."""
        self.waiting.pop(ticket, None)
        gone = [sentence for sentence, (own, _) in self.running.items() if own is ticket]
        for sentence in gone:
            del self.running[sentence]
        if gone:
            self.search.give_up(gone)


class Engine:
    """A model, which may be an exported one, in a thread of its own.

    With 4 beams `tokens_per_batch` source tokens are searched at once, padding counted, with more beams fewer.
    `note_batch` is called with the number of sentences of each step and batch; `memory` is as in `Translator`. A
    sentence of more than `longest` tokens, which training had none of, is divided.
    """

    def __init__(
        self, model, tokenizer, tokens_per_batch=2048, note_batch=lambda size: None, memory=None, longest=None
    ):
        self.model, self.tokenizer, self.note_batch = model, tokenizer, note_batch
        self.pending = 0  # sentences that have come and are not done
        self.translator = Translator(model, tokenizer, tokens_per_batch, max_source_tokens=LONGEST, memory=memory)
        self.translator.is_repaired = True
        self._most = min(LONGEST, positions(model.config))
        self._longest = min(longest or LONGEST, self._most)
        self._room, self.is_ours = tokens_per_batch * _BEAMS, hasattr(model, "open_search")
        self._groups: dict[_Key, _Group] = {}
        # Requests are tokenised in their own threads, but no tokenizer is made for two at once.
        self._tokenizing, self._counter = threading.Lock(), copy.deepcopy(tokenizer)
        self.codes = cache(self._language_codes)
        self._thread, self._is_working = ThreadPoolExecutor(1, "engine"), False

    @property
    def precision(self) -> str:
        """Return the type that the model computes in."""
        return str(self.model.dtype).removeprefix("torch.") if self.is_ours else self.model.engine.compute_type

    def with_options(self, options: Options, scores: bool = False) -> Translator:
        """Return the translator with the options of a request."""
        translator = copy.copy(self.translator)
        translator.generate_options, translator.scores = dict(options), scores
        return translator

    def _language_codes(self, language: str) -> LanguageCodes:
        """Return the codes, with that of a target language (of `fr` also `fra`) before texts that have none."""
        names = [code for code, short in get_global("language_aliases").items() if short == language]
        codes = LanguageCodes(self.tokenizer)
        for name in (*names, language):
            with contextlib.suppress(ValueError):
                codes = LanguageCodes(self.tokenizer, name)
        if codes.known and codes.coded(language) == language:
            there = ", ".join(codes.known.values())
            logger.warning(f"texts for {language} get no language code: the model has {there:.300}")
        return codes

    def divide(self, sentence: str, language: str, code: str = "", has_prefix: bool = False) -> list[str]:
        """Return a sentence in as many parts as its length with a code needs, nearly always one; for any thread.

        With a prefix, which is all of the first part's, only where the model can take no more.
        """
        most = self._most if has_prefix else self._longest
        if 4 * len(code + sentence) < most:  # a character has four bytes at most, and rarely as many tokens
            return [sentence]
        with self._tokenizing:
            count = lambda part: len(self._counter(code + part)["input_ids"])  # noqa: E731
            return [sentence] if count(sentence) <= most else split_line(sentence, most, count, language)

    def tokenize(
        self, sentences: Sequence[tuple[str, str]], glossary: Glossary | None = None, options: Options = (), codes=None
    ) -> list[Piece]:
        """Return what `translate` takes, of sentences and the prefixes of their translations; for any thread.

        `codes` has the one of the target language, which a memory's sources may be without. `UserError` for a prefix
        that is too long for the output or that the model cannot follow, a sentence that cannot be divided, or a term
        without tokens.
        """
        with self._tokenizing:
            translator = self.with_options(options)
            translator.codes = codes or translator.codes
            prepared = translator.prepare(Window(0, 1, list(sentences)), glossary)
        prepared.check()
        return prepared.pieces

    async def translate(
        self, pieces: list[Piece], options: Options = (), scores: bool = False
    ) -> AsyncIterator[tuple[int, list[Hypothesis]]]:
        """Yield the number of each sentence and its hypotheses, best first, as they are ready.

        Closing the iterator early frees its rows for others. `UserError` for options that the model cannot follow.
        """
        loop, ready, missing = asyncio.get_running_loop(), asyncio.Queue(), len(pieces)

        def deliver(item: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ready.put_nowait, item)

        ticket = _Ticket(pieces, options, scores, deliver)
        self._thread.submit(self._accept, ticket)
        self.pending += missing
        try:
            while missing:
                item = await ready.get()
                if isinstance(item, BaseException):
                    raise item
                missing, self.pending = missing - 1, self.pending - 1
                yield item
        finally:
            self.pending -= missing
            if missing:
                self._thread.submit(lambda: [group.drop(ticket) for group in self._groups.values()])

    async def call(self, function: Callable, *arguments) -> Any:
        """Return the result of a function that uses the model; it runs between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        """End the thread and let go of the model, since searches hold this engine and the next one needs the memory."""
        self._thread.shutdown()
        vars(self).clear()

    def _work(self) -> None:
        """Let the searches take turns, with what is submitted meanwhile between them, as long as there is work."""
        busy = [group for group in self._groups.values() if group.is_busy]
        busy.sort(key=lambda group: not group.running)  # those that have begun first, then the others by their turns
        for group in busy[:_SEARCHES]:
            self._turn(group, is_last=len(busy) > _SEARCHES)
        self._is_working = bool(busy)
        if busy:
            self._thread.submit(self._work)

    def _accept(self, ticket: _Ticket) -> None:
        """Divide a ticket among the searches."""
        waiting: dict[_Key, deque[int]] = {}
        for number, piece in enumerate(ticket.pieces):
            if piece.known is not None:
                ticket.deliver((number, [Hypothesis(piece.known)]))
                continue
            lengths = sum(len(piece.ids) > limit for limit in _LENGTHS)
            options = ticket.options
            if piece.terms:  # whose search needs more beams
                beams = dict(options).get("num_beams") or self.model.generation_config.num_beams or 1
                options = tuple(sorted((dict(options) | {"num_beams": beams_for(piece.terms, beams)}).items()))
            key = _Key(options, lengths, piece.terms is not None, self.is_ours and not piece.prefix)
            waiting.setdefault(key, deque()).append(number)
        for key, numbers in waiting.items():
            group = self._groups.get(key)
            if group is None or not group.is_busy:
                self._groups.pop(key, None)
                group = self._groups[key] = group or _Group(self, key)  # the last used is the last
            group.waiting[ticket] = numbers
        idle = [key for key, group in self._groups.items() if not group.is_busy]
        for key in idle[: max(0, len(self._groups) - _SEARCHES)]:
            del self._groups[key]
        if not self._is_working:
            self._is_working = True
            self._thread.submit(self._work)

    def _turn(self, group: _Group, is_last: bool) -> None:
        """Let a group work; `is_last`: others wait, so that it takes nothing more until it is done."""
        others = (other for other in self._groups.values() if other is not group)
        taken = sum(len(other.running) * other.longest * other.beams for other in others)  # rows times source tokens
        try:
            group.turn(0 if is_last and group.running else self._room - taken)
        except BaseException as error:  # a tokenizer's panic is no `Exception`
            for ticket in {*group.waiting, *(ticket for ticket, _ in group.running.values())}:
                ticket.deliver(error)
            del self._groups[group.key]  # its search may be broken
            return
        if is_last and not group.running:  # behind those that wait
            self._groups[group.key] = self._groups.pop(group.key)
