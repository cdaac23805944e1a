"""Text in, text out: a trained model that translates sentences, in batches of similar length."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import LogitsProcessor, LogitsProcessorList

from ..data.batching import PairCollator, batches_by_length
from ..errors import UserError
from ..hardware import use_free_threads
from ..model.generation_vaswani import MAX_EXTRA_TOKENS
from .glossary import Glossary, Progress, Terms, TermsSentence, Tokens, beams_for, term_forms
from .long_inputs import split_line
from .scoring import LengthRule, check_length, score_ids
from .streaming import WINDOW_LINES, Window, in_windows

_ROUNDS = 4  # times that an output has to end with the same tokens to be cut; a text may repeat a word twice
_JOINING = 4  # sentences join a search when one in so many places is free: the encoder is faster with several at once


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a line."""

    text: str
    tokens: int = 0  # |Y|, `</s>` included where it ends with one
    log_probability: float | None = None  # log P(Y|X) under the model in nats; None if not asked for
    score: float | None = None  # what beam search ranks by, from log-probability and tokens; None as above
    repeats: bool = False  # whether the model went on repeating itself; the text has what it repeated once


@dataclass
class Piece:
    """What is translated by itself: a line, or a part of a line that is too long."""

    place: int  # index of the line in its window
    ids: list[int]  # tokens of the source, `</s>` included
    prefix: list[int] = field(default_factory=list)  # tokens that the translation has to begin with
    terms: Terms | None = None  # what it has to have by a glossary


@dataclass
class PreparedWindow:
    """A window of lines, tokenised."""

    window: Window  # its lines are those before the error, if it has one
    pieces: list[Piece]  # what to translate, in the order of the lines; a blank line has none
    split: list[int]  # numbers of the lines that were too long


class ForcedPrefixes(LogitsProcessor):
    """Makes each output begin with the token ids of its sentence's prefix, one prefix for each sentence of the batch.

    Scores and limits stay as they are: a prefix counts in log-probability and length like any other tokens.
    """

    def __init__(self, prefixes: list[list[int]]):
        longest = max(map(len, prefixes), default=0)
        self.forced = torch.tensor([prefix + [-1] * (longest - len(prefix)) for prefix in prefixes])

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `(rows, vocab_size)`, the rows of a sentence together, with all but the forced token ruled out."""
        step = input_ids.shape[1] - 1  # without the start token
        if step >= self.forced.shape[1]:
            return scores
        forced = self.forced[:, step].repeat_interleave(len(scores) // len(self.forced)).to(scores.device)
        token = forced.clamp(min=0)[:, None]
        # nearly impossible, not impossible, if another processor has ruled it out
        forced_score = scores.gather(1, token).clamp(min=-1e4)
        only = torch.full_like(scores, -torch.inf).scatter_(1, token, forced_score)
        return torch.where((forced >= 0)[:, None], only, scores)


def _joining_pays(model) -> bool:
    """Whether full batches to the end are faster than batches that sentences only leave.

    They need fewer steps and no fewer rows of them. On a CPU it is the rows that take the time, and rows of different
    length make attention slower.
    """
    return hasattr(model, "open_search") and model.device.type != "cpu"


class Translator:
    """Text in, text out.

    Several threads may use one translator, in which each gets what it would alone, but not while one of them samples:
    the random numbers of a process are shared.

    Args:
        model: the model, or an ensemble, in evaluation mode.
        tokenizer: its tokenizer.
        tokens_per_batch: source tokens translated at once, padding counted.
        max_source_tokens: longest source in tokens, `</s>` included; by default what learned positions allow.
        split_long: split a longer line into sentences, clauses or words and join their translations; else refuse it.
        scores: also compute scores, by one more pass through the decoder for each translation.
        glossary: terms that translations have to have wherever their sources have them.
        seed: for sampling: each window starts from a random state made of the seed and the window's number; torch's
            own is left as it was.
        source_language: code of the sources' language, for the splitting of long lines.
        **generate_options: for `generate()`, over the model's own generation configuration.
    """

    def __init__(
        self,
        model,
        tokenizer,
        tokens_per_batch: int = 2048,
        *,
        max_source_tokens: int | None = None,
        split_long: bool = False,
        scores: bool = False,
        glossary: Glossary | None = None,
        seed: int | None = None,
        source_language: str = "en",
        **generate_options,
    ):
        self.model, self.tokenizer, self.tokens_per_batch = model, tokenizer, tokens_per_batch
        self.max_source_tokens, self.split_long, self.scores, self.seed = max_source_tokens, split_long, scores, seed
        self.glossary, self.source_language = glossary, source_language
        self.generate_options = {name: value for name, value in generate_options.items() if value is not None}
        # `prepare` may run in another thread than decoding, and tokenizers are not made for two at once.
        self._own_tokenizer = copy.deepcopy(tokenizer)

    def _setting(self, name: str, default):
        value = self.generate_options.get(name, getattr(self.model.generation_config, name, None))
        return default if value is None else value

    def prepare(self, window: Window, glossary: Glossary | None = None) -> PreparedWindow:
        """Tokenise a window whose lines are strings, or pairs of a source and the beginning of its translation.

        `glossary` is for this window, in place of the translator's own.
        """
        glossary, encode = glossary or self.glossary, cache(partial(term_forms, self._own_tokenizer))
        pairs = [(line, "") if isinstance(line, str) else line for line in window.lines]
        sources = {place: source.strip() for place, (source, _) in enumerate(pairs) if source.strip()}
        ids = self._own_tokenizer(list(sources.values()))["input_ids"] if sources else []
        pieces, split = [], []
        for (place, source), source_ids in zip(sources.items(), ids, strict=True):
            number = window.first + place
            try:
                parts = self._within_limits(number, source, source_ids)
                prefix = self._prefix_ids(number, pairs[place][1], len(parts[0]))
                terms = self._terms(number, source, parts, glossary, encode) if glossary else [None] * len(parts)
            except UserError as error:  # the lines before it are still translated
                window = replace(window, lines=window.lines[:place], error=error)
                break
            if len(parts) > 1:
                split.append(number)
            prefixes = [prefix, *([] for _ in parts[1:])]
            pieces += [Piece(place, *part) for part in zip(parts, prefixes, terms, strict=True)]
        return PreparedWindow(window, pieces, split)

    def _within_limits(self, number: int, text: str, ids: list[int]) -> list[list[int]]:
        """The tokens of line `number` in one part, or in several if they are too many."""
        config = self.model.config
        limits = [self.max_source_tokens] if self.max_source_tokens is not None else []
        if config.position_encoding == "learned":
            limits.append(config.max_position_embeddings)
        if not limits or len(ids) <= min(limits):
            return [ids]
        if not self.split_long:
            if min(limits) != self.max_source_tokens:
                check_length(config, number, len(ids))
            raise UserError(
                f"line {number} has {len(ids)} tokens and at most {self.max_source_tokens} are taken: split it into"
                " shorter sentences, or raise --max-source-tokens"
            )
        count = lambda part: len(self._own_tokenizer(part)["input_ids"])  # noqa: E731
        texts = split_line(text, min(limits), count, self.source_language)
        parts = self._own_tokenizer(texts)["input_ids"]
        if max(map(len, parts)) > min(limits):
            raise UserError(
                f"line {number} has a letter of {max(map(len, parts))} tokens and at most {min(limits)} fit: raise"
                " --max-source-tokens"
            )
        return parts

    def _prefix_ids(self, number: int, text: str, source_length: int) -> list[int]:
        """The tokens of the prefix of line `number`."""
        if not text.strip():
            return []
        ids = self._own_tokenizer(text_target=text.strip(), add_special_tokens=False)["input_ids"]
        limit = self._output_limit(source_length)
        if len(ids) >= limit:
            raise UserError(
                f"line {number} of the prefixes has {len(ids)} tokens, which leaves no room in an output of at most"
                f" {limit}: shorten it, or raise --max-new-tokens"
            )
        return ids

    def _output_limit(self, source_length: int) -> int:
        """The most tokens of the output for a source of so many tokens."""
        limit = self._setting("max_new_tokens", None)
        if limit is None and (max_length := self._setting("max_length", None)) is not None:
            limit = max_length - 1  # the decoder's start token counts there
        if limit is None:
            limit = source_length + self._setting("max_extra_tokens", MAX_EXTRA_TOKENS)
        config = self.model.config
        return min(limit, config.max_position_embeddings - 1) if config.position_encoding == "learned" else limit

    def _processors(self, pieces: list[Piece]) -> list[LogitsProcessor]:
        """Constraints on the outputs of these pieces; they come before the processors among the options."""
        return [ForcedPrefixes([piece.prefix for piece in pieces])] if any(piece.prefix for piece in pieces) else []

    def _padded(self, pieces: list[Piece]) -> dict[str, torch.Tensor]:
        """Sources as `generate()` takes them."""
        collate = PairCollator(self.model.config.pad_token_id)
        inputs = collate([{"input_ids": piece.ids, "labels": [0]} for piece in pieces])
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items() if name != "labels"}

    @cached_property
    def _tokens(self) -> Tokens:
        """What tokens mean for terms."""
        return Tokens.of(self._own_tokenizer)

    def _terms(self, number: int, source: str, parts: list, glossary: Glossary, encode: Callable) -> list[Terms | None]:
        """What the translation of each part of line `number` has to have."""
        texts = self._own_tokenizer.batch_decode(parts, skip_special_tokens=True) if len(parts) > 1 else [source]
        forms = [[encode(term) for term in glossary.of(text)] for text in texts]
        terms = [Terms(own, self._tokens) if own else None for own in forms]
        config, needed = self.model.config, max((own.lacks(Progress()) for own in terms if own), default=0)
        if config.position_encoding == "learned" and needed >= config.max_position_embeddings - 1:
            raise UserError(
                f"line {number} has terms of {needed} tokens, more than the model's {config.max_position_embeddings}"
                " positions take: leave some out of the glossary"
            )
        return terms

    def _with_terms(self, pieces: list[Piece]) -> Iterator[tuple[int, list[list[int]]]]:
        """As `_outputs`, of the pieces that have terms."""
        asked = self._setting("num_beams", 1)
        beams = {number: beams_for(piece.terms, asked) for number, piece in enumerate(pieces) if piece.terms}
        for size in sorted(set(beams.values())):
            numbers = [number for number, own in beams.items() if own == size]
            for batch in batches_by_length([len(pieces[number].ids) for number in numbers], self.tokens_per_batch):
                chosen = [pieces[numbers[place]] for place in batch]
                open_search = getattr(self.model, "open_search", lambda **_: None)
                search = open_search(**self.generate_options | {"num_beams": size})
                if search is None or self._processors(chosen):
                    raise UserError(
                        "a glossary is for a beam search of one model: leave it out, or leave out prefixes, sampling,"
                        " ensembles and further settings of generate()"
                    )
                kinds = [partial(TermsSentence, piece.terms) for piece in chosen]
                sentences = search.join(**self._padded(chosen), kinds=kinds)
                while search.is_open:
                    search.step()
                for place, sentence in zip(batch, sentences, strict=True):
                    yield numbers[place], [output.tokens for output in sentence.outputs()]

    @torch.no_grad()
    def _generate(self, pieces: list[Piece]) -> list[list[list[int]]]:
        """Token ids of each piece's hypotheses, best first, without the start token and padding."""
        model, inputs = self.model, self._padded(pieces)
        options = dict(self.generate_options)
        if processors := self._processors(pieces):
            options["logits_processor"] = LogitsProcessorList([*processors, *options.get("logits_processor", ())])
        outputs = model.generate(**inputs, **options)
        outputs = getattr(outputs, "sequences", outputs)  # where the model's own settings ask for more than ids
        rows = [self._trimmed(row) for row in outputs.tolist()]
        number = len(rows) // len(pieces)
        return [rows[start : start + number] for start in range(0, len(rows), number)]

    def _trimmed(self, ids: list[int]) -> list[int]:
        """An output without the decoder's start token and the padding after `</s>`."""
        ends = self._setting("eos_token_id", [])
        ends = {ends} if isinstance(ends, int) else set(ends)
        for place, token in enumerate(ids[1:], start=1):
            if token in ends:
                return ids[1 : place + 1]
        while len(ids) > 1 and ids[-1] == self.model.config.pad_token_id:
            ids = ids[:-1]
        return ids[1:]

    def _outputs(self, pieces: list[Piece]) -> Iterator[tuple[int, list[list[int]]]]:
        """The number of each piece and the ids of its hypotheses as in `_generate`, in any order."""
        yield from self._with_terms(pieces)
        others = [number for number, piece in enumerate(pieces) if piece.terms is None]
        for place, outputs in self._freely([pieces[number] for number in others]):
            yield others[place], outputs

    def _freely(self, pieces: list[Piece]) -> Iterator[tuple[int, list[list[int]]]]:
        """The same of pieces without terms."""
        lengths = [len(piece.ids) for piece in pieces]
        if _joining_pays(self.model) and not self._processors(pieces):
            search = self.model.open_search(**self.generate_options)
            if search is not None:
                yield from self._joining(search, pieces, lengths)
                return
        for batch in batches_by_length(lengths, self.tokens_per_batch):
            use_free_threads()
            yield from zip(batch, self._generate([pieces[number] for number in batch]), strict=True)

    def _joining(self, search, pieces: list[Piece], lengths: list[int]) -> Iterator[tuple[int, list[list[int]]]]:
        """The same by one search, which the shorter ones join as the longer ones are done."""
        waiting = sorted(range(len(pieces)), key=lambda number: lengths[number])  # the longest last
        numbers: dict[Any, int] = {}  # of the sentences of the search
        while waiting or search.is_open:
            longest = max(search.source_length, lengths[waiting[-1]] if waiting else 0)  # all are padded to it
            room = max(1, self.tokens_per_batch // longest)
            free = room - search.running
            if waiting and (free * _JOINING >= room or len(waiting) <= free or not search.is_open):
                joining = [waiting.pop() for _ in range(min(free, len(waiting)))]
                sentences = search.join(**self._padded([pieces[number] for number in joining]))
                numbers |= dict(zip(sentences, joining, strict=True))
            for sentence in search.step():
                start = [self.model.config.decoder_start_token_id]
                yield numbers.pop(sentence), [self._trimmed(start + output.tokens) for output in sentence.outputs()]

    def as_hypotheses(self, pieces: list[Piece], outputs: list[list[list[int]]]) -> list[list[Hypothesis]]:
        """The hypotheses of each piece, best first, from the token ids that a search found, without the start token."""
        if not pieces:
            return []
        number, flat = len(outputs[0]), [ids for own in outputs for ids in own]
        kept = [
            self._without_repetition(ids, piece.terms)
            for piece, own in zip(pieces, outputs, strict=True) for ids in own
        ]  # fmt: skip
        texts = self.tokenizer.batch_decode(kept, skip_special_tokens=True)
        found = zip(texts, kept, flat, strict=True)
        hypotheses = [Hypothesis(text, len(ids), repeats=len(cut) < len(ids)) for text, cut, ids in found]
        if self.scores:
            sources = [piece.ids for piece in pieces for _ in range(number)]
            rows = score_ids(self.model, sources, flat, self.tokens_per_batch)
            hypotheses = [self._scored(*pair) for pair in zip(hypotheses, map(math.fsum, rows), strict=True)]
        return [hypotheses[start : start + number] for start in range(0, len(hypotheses), number)]

    def _without_repetition(self, ids: list[int], terms: Terms | None = None) -> list[int]:
        """An output, or of one that goes round in a circle to its limit the beginning up to the end of one round.

        It stays whole where a term would be lost, which may stand across two rounds.
        """
        ends = self._setting("eos_token_id", [])
        if ids and ids[-1] not in ({ends} if isinstance(ends, int) else ends):
            for period in range(1, len(ids) // _ROUNDS + 1):
                start = len(ids) - _ROUNDS * period
                if ids[start:-period] == ids[start + period :]:
                    while start and ids[start - 1] == ids[start - 1 + period]:
                        start -= 1
                    kept = ids[: start + period]
                    return ids if terms and terms.lacks_in(kept) else kept
        return ids

    def _scored(self, hypothesis: Hypothesis, log_probability: float) -> Hypothesis:
        rule = LengthRule.of(self.model.generation_config, self.generate_options)
        score = rule.score(log_probability, hypothesis.tokens)
        return replace(hypothesis, log_probability=log_probability, score=score)

    def translate_prepared(self, prepared: PreparedWindow, progress: tqdm | None = None) -> list[list[Hypothesis]]:
        """The hypotheses of each line of a window, best first; of a blank line they are empty."""
        pieces, lines = prepared.pieces, [[] for _ in prepared.window.lines]
        last_pieces = set({piece.place: index for index, piece in enumerate(pieces)}.values())  # of each line
        progress = progress if progress is not None else tqdm(disable=True)
        progress.update(len(lines) - len(last_pieces))
        outputs: dict[int, list[list[int]]] = {}
        with self._seeded(prepared.window.index):
            for number, ids in self._outputs(pieces):
                outputs[number] = ids
                progress.update(number in last_pieces)
        hypotheses = self.as_hypotheses(pieces, [outputs[number] for number in range(len(pieces))])
        for piece, own in zip(pieces, hypotheses, strict=True):
            lines[piece.place].append(own)
        return [self._joined(parts) for parts in lines]

    @contextlib.contextmanager
    def _seeded(self, window: int) -> Iterator[None]:
        """Start from the random state of the seed and a window's number; afterwards torch's is what it was."""
        if self.seed is None:
            yield
            return
        device = self.model.device
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            torch.manual_seed((self.seed * 1_000_003 + window) % 2**63)
            yield

    def _joined(self, parts: list[list[Hypothesis]]) -> list[Hypothesis]:
        """A line's hypotheses from those of its pieces: the first ones together, the second ones, and so on."""
        if not parts:
            empty = Hypothesis("", 0, 0.0, 0.0) if self.scores else Hypothesis("")
            return [empty] * self._setting("num_return_sequences", 1)
        joined = []
        for ranked in zip(*parts, strict=True):
            # splitlines(): one line out for one line in, whatever the model has written.
            text = " ".join(" ".join(part.text.splitlines()) for part in ranked)
            repeats = any(part.repeats for part in ranked)
            whole = Hypothesis(text, sum(part.tokens for part in ranked), repeats=repeats)
            if self.scores:
                whole = self._scored(whole, math.fsum(part.log_probability for part in ranked))
            joined.append(whole)
        return joined

    def hypotheses(
        self, sentences: Iterable[str | tuple[str, str]], window: int = WINDOW_LINES, progress: tqdm | None = None
    ) -> Iterator[list[Hypothesis]]:
        """The hypotheses of each sentence, best first, in the order of the sentences, as windows of them are ready.

        Args:
            sentences: one source each, or a pair of a source and text that its translation has to begin with.
            window: number of sentences that are read and sorted by length together.
            progress: a progress bar that moves by one for each sentence.

        Raises:
            UserError: for a sentence that is too long, unless such are split; after the hypotheses of those before it.
        """
        for lines in in_windows(sentences, window):
            prepared = self.prepare(lines)
            yield from self.translate_prepared(prepared, progress)
            if prepared.window.error is not None:
                raise prepared.window.error

    def translate(
        self, sentences: Iterable[str | tuple[str, str]], window: int = WINDOW_LINES, progress: tqdm | None = None
    ) -> Iterator[str]:
        """The best of the `hypotheses` of each sentence, with the same Args and Raises; of a blank one it is empty."""
        for hypotheses in self.hypotheses(sentences, window, progress):
            yield hypotheses[0].text
