"""A model exported to CTranslate2 at work, in a model's place in `Translator` and `score_pairs`; imports no torch."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..decoding.fast_tokenizer import open_tokenizer
from ..decoding.scoring import LengthRule, length_rule
from ..decoding.streaming import batches_by_length
from ..decoding.translator import Piece, Translator
from ..errors import UserError, reading
from ..exported import is_exported
from ..model.settings_vaswani import MAX_EXTRA_TOKENS
from .ctranslate2_settings import check_setting, open_engine, read_settings
from .facts import ExportFacts, NotExpressibleError, read_vocabularies
from .int8_cache import int8_folder

_PATIENCE = 2.0
_CPU_TOKENS = 512  # source tokens that are searched at once: with 2,048 a small model took 1.2 to 1.4 times as long


class Output(NamedTuple):
    """One output of a search; outputs are ranked by the score."""

    ids: list[int]  # the end token included if it was generated
    log_probability: float  # of all of them, in nats
    score: float


def _ranked(outputs: Iterable[tuple[list[int], float]], rule: LengthRule) -> list[Output]:
    """Return outputs, ids and log-probabilities, with their scores, best first."""
    scored = (Output(ids, log_prob, rule(log_prob, len(ids))) for ids, log_prob in outputs)
    return sorted(scored, key=lambda output: output.score, reverse=True)


class CTranslate2Model:
    """Takes a model's place where it only has to search and to score.

    Args and errors: as of `CTranslate2Translator`.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int = 0,
        patience: float = _PATIENCE,
    ):
        self.patience = patience
        self.facts = ExportFacts.read(folder, "ctranslate2")
        self.generation_config = read_settings(folder)
        self.generation_config.eos_token_id = end = self.facts.eos_token_id
        if (forced := self.generation_config.forced_eos_token_id) not in (None, end, [end]):
            raise NotExpressibleError(
                f"forced_eos_token_id in {folder}/generation_config.json is {forced}: the search of an exported model"
                f" can force its end token alone, {end}"
            )
        self._forces_end = forced is not None
        with reading(folder):
            self._source_vocabulary, self.vocabulary = read_vocabularies(folder)
            if len(self._source_vocabulary) != self.facts.vocab_size:  # CTranslate2 does not count them
                raise ValueError("the vocabulary and export.json are of different models")
            self._ids = {token: number for number, token in enumerate(self.vocabulary)}
            words = [[token] for token in self.generation_config.suppress_tokens or ()]
            # As in transformers, an end token may come although it is a bad word.
            words += [word for word in self.generation_config.bad_words_ids or () if word != [end]]
            self._suppressed = [[self.vocabulary[token] for token in word] for word in words]
        self.config = SimpleNamespace(
            position_encoding="learned",  # whatever it was before, it is a table now, and has an end
            max_position_embeddings=self.facts.positions,
            vocab_size=self.facts.vocab_size,
            target_vocab_size=len(self.vocabulary),
            pad_token_id=self.facts.pad_token_id,
            eos_token_id=self.facts.eos_token_id,
            decoder_start_token_id=self.facts.decoder_start_token_id,
        )
        self.device = SimpleNamespace(type=device.partition(":")[0])
        self.engine = open_engine(folder, device, compute_type=compute_type, intra_threads=threads)

    def _setting(self, name: str, options: dict, default=None):
        """Return an option of a call, else the model's own setting, else the default."""
        values = options.get(name), getattr(self.generation_config, name, None)
        return next((value for value in values if value is not None), default)

    def _limits(self, sources: Sequence[Sequence[int]], options: dict) -> list[int]:
        """Return the longest output of each source, in tokens (Section 6.1)."""
        fixed = self._setting("max_new_tokens", options)
        if fixed is None and self.generation_config.max_length is not None:
            fixed = self.generation_config.max_length - 1  # the decoder's first token counts there
        extra = self._setting("max_extra_tokens", options, MAX_EXTRA_TOKENS)
        lengths = [len(source) + extra if fixed is None else fixed for source in sources]
        return [max(1, min(length, self.facts.positions) - self._forces_end) for length in lengths]

    def search(
        self, sources: Sequence[Sequence[int]], number: int = 1, tokens_per_batch: int = 2048, **options
    ) -> list[list[Output]]:
        """Return the best outputs for tokenised sources.

        Args:
            sources: token ids with the end token, at most as many as the table has positions.
            number: outputs of each, at most the beam size.
            tokens_per_batch: source tokens at once, padding counted.
            **options: `num_beams`, `length_penalty`, `max_new_tokens` and `length_normalization` over the model's own.

        Returns:
            for each source its outputs, best first.

        Raises:
            UserError: for an option that is unknown or out of range.
        """
        for name, value in options.items():
            check_setting(name, value)
        beams, rule = self._setting("num_beams", options, 1), length_rule(self.generation_config, options)
        if number > beams or (beams > 1 and 2 * beams > len(self.vocabulary)):
            raise UserError(
                f"{number} outputs are wanted by num_beams {beams}: there can be 1 to num_beams outputs, and at most"
                f" half as many beams as the vocabulary has tokens, {len(self.vocabulary)}"
            )
        limits = self._limits(sources, options)
        tokens_per_batch = min(tokens_per_batch, _CPU_TOKENS) if self.device.type == "cpu" else tokens_per_batch
        results: list[list[Output]] = [[] for _ in sources]
        for batch in batches_by_length([len(source) for source in sources], tokens_per_batch):
            outputs = self._search_batch([sources[i] for i in batch], [limits[i] for i in batch], beams, rule, number)
            for index, best in zip(batch, outputs, strict=True):
                results[index] = best
        return results

    def search_pieces(self, pieces: list[Piece], tokens_per_batch: int, **options) -> Iterator[tuple[int, list]]:
        """Yield the number of each piece and the ids of its outputs, best first: the search of a `Translator`."""
        if any(piece.prefix or piece.terms for piece in pieces):
            raise UserError("prefixes and glossaries are not possible with an exported model: give the model itself")
        number, sources = self._setting("num_return_sequences", options, 1), [piece.ids for piece in pieces]
        for index, outputs in enumerate(self.search(sources, number, tokens_per_batch, **options)):
            yield index, [output.ids for output in outputs]

    def _search_batch(
        self, sources: list[Sequence[int]], limits: list[int], beams: int, rule: LengthRule, number: int
    ) -> list[list[Output]]:
        """Return the best outputs of sources that are searched together.

        One call of CTranslate2 has one longest length for all. Sources that are not settled within it are asked again
        with a longer one, up to the limit of each.
        """
        results: list[list[Output]] = [[] for _ in sources]
        pending = list(range(len(sources)))
        while pending:
            longest = min(limits[index] for index in pending)
            searched = self._ask([sources[index] for index in pending], longest, beams, rule)
            unsettled = []
            for index, outputs in zip(pending, searched, strict=True):
                if longest == limits[index] or all(self._has_ended(output) for output in outputs):
                    results[index] = self._with_forced_ends(outputs, rule)[:number]
                else:
                    unsettled.append(index)
            pending = unsettled
        return results

    def _has_ended(self, output: Output) -> bool:
        return output.ids[-1:] == [self.facts.eos_token_id]

    def _with_forced_ends(self, outputs: list[Output], rule: LengthRule) -> list[Output]:
        """Return outputs with the end token, if it is forced where they are at their limit, ranked again."""
        end = [self.facts.eos_token_id] if self._forces_end else []
        return _ranked(
            ((output.ids if self._has_ended(output) else output.ids + end, output[1]) for output in outputs), rule
        )

    def _source_tokens(self, sentences: Sequence[Sequence[int]]) -> list[list[str]]:
        return [[self._source_vocabulary[number] for number in ids] for ids in sentences]

    def _ask(self, sources: list[Sequence[int]], longest: int, beams: int, rule: LengthRule) -> list[list[Output]]:
        """Return the outputs of one search of CTranslate2 for each source, ranked by the rule."""
        patience = self.patience if beams > 1 else 1.0
        searched = self.engine.translate_batch(
            self._source_tokens(sources),
            beam_size=beams,
            patience=patience,
            # Rounded down, and by less than half a hypothesis, since CTranslate2 rounds in a way of its own.
            num_hypotheses=max(1, int(beams * patience + 1e-6)),
            length_penalty=0,  # plain log-probabilities; with this many hypotheses it does not stop earlier
            max_decoding_length=longest,
            min_decoding_length=0,
            max_input_length=0,
            suppress_sequences=self._suppressed or None,
            return_scores=True,
            return_end_token=True,
        )
        results = []
        for result in searched:
            sequences = [[self._ids[token] for token in tokens] for tokens in result.hypotheses]
            results.append(_ranked(zip(sequences, result.scores, strict=True), rule))
        return results

    def score_ids(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], tokens_per_batch: int = 4096
    ) -> list[list[float]]:
        """Return the log-probability of each token of each target, as `scoring.score_ids` does."""
        end = self.facts.eos_token_id
        scores: list[list[float]] = [[] for _ in targets]
        lengths = [max(map(len, pair)) for pair in zip(sources, targets, strict=True)]
        for batch in batches_by_length(lengths, tokens_per_batch):
            # CTranslate2 appends an end token itself.
            without_end = [targets[index][:-1] if targets[index][-1:] == [end] else targets[index] for index in batch]
            source_tokens = self._source_tokens([sources[index] for index in batch])
            target_tokens = [[self.vocabulary[number] for number in ids] for ids in without_end]
            scored = self.engine.score_batch(source_tokens, target_tokens, max_input_length=0)
            for index, result in zip(batch, scored, strict=True):
                scores[index] = list(result.log_probs[: len(targets[index])])
        return scores


class CTranslate2Translator(Translator):
    """Text in, text out, by a model that `vaswani export --format ctranslate2` wrote, with the paper's search.

    `translate` gives the translations of sentences in their order, `hypotheses` n-best lists; see `Translator`.

    Args:
        folder: the exported model; a model itself is converted to int8 on first use, into the user's cache.
        device: `"cpu"`, `"cuda"`, `"cuda:1"` or `"auto"`.
        compute_type: what CTranslate2 computes in; `"default"` is what the weights are stored in, or the nearest that
            the device has.
        threads: for one batch; 0 leaves it to CTranslate2.
        patience: a search ends when `patience * num_beams` hypotheses have ended. More is slower, and rarely finds
            anything better.
        **options: as of `Translator`; of those of `generate()`, `num_beams`, `length_penalty`, `max_new_tokens`,
            `num_return_sequences` and `length_normalization`. What is not given is the exported model's own.

    Raises:
        UserError: for a folder that holds no such model, or a device or type that CTranslate2 does not have.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int = 0,
        patience: float = _PATIENCE,
        **options: Any,
    ):
        folder = folder if is_exported(folder) else int8_folder(folder)
        model = CTranslate2Model(folder, device, compute_type, threads, patience)
        super().__init__(model, open_tokenizer(folder), **options)
