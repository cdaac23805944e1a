"""A model exported to CTranslate2 at work: it stands in a model's place in `Translator` and `score_pairs`."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ctranslate2
import torch
from transformers import GenerationConfig

from ..data.batching import batches_by_length
from ..data.tokenization import load_tokenizer
from ..decoding.scoring import LengthRule
from ..decoding.translator import Translator
from ..errors import UserError, one_line
from ..model.configuration_vaswani import VaswaniConfig
from ..model.generation_vaswani import LENGTH_NORMALIZATIONS, MAX_EXTRA_TOKENS, take_back_defaults
from .folder import ExportFacts, read_vocabulary

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


logger = logging.getLogger(__name__)

# Settings of a generation configuration that are not followed here, and the values at which they do nothing.
_NEUTRAL = {
    "do_sample": False, "num_beam_groups": 1, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
    "guidance_scale": None, "diversity_penalty": 0.0, "early_stopping": False,
}  # fmt: skip
# Of options given to `generate()`, those that are followed, and those that change no result.
_FOLLOWED = {"num_beams", "length_penalty", "max_new_tokens", "num_return_sequences", "length_normalization"}
_HARMLESS = {"use_cache", "temperature", "top_k", "top_p", "return_dict_in_generate"}


def compute_types(device: str) -> list[str]:
    """What CTranslate2 can compute in on a device, `"default"` (as the weights are stored) and `"auto"` included.

    Raises:
        UserError: for a device that is not there.
    """
    name, _, number = device.partition(":")
    try:
        known = ctranslate2.get_supported_compute_types(name, int(number or 0))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"CTranslate2 cannot use device {device!r}: {one_line(error)}") from error
    return ["default", "auto", *sorted(known)]


def read_generation_config(folder: str | Path) -> GenerationConfig:
    """The exported `generation_config.json`, or the paper's for want of one.

    Raises:
        UserError: for a damaged file, or a setting that this search does not follow.
    """
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return GenerationConfig(num_beams=4, length_penalty=0.6)
    try:
        settings = GenerationConfig.from_pretrained(folder)
    except Exception as error:  # whatever a damaged file brings about
        raise UserError(f"{path} is damaged ({one_line(error)}): export the model again") from error
    take_back_defaults(settings, set())
    for name, neutral in _NEUTRAL.items():
        if not _does_nothing(name, getattr(settings, name, None), neutral):
            raise UserError(
                f"{name} in {path} is {getattr(settings, name)!r}: the search of an exported model does not follow it;"
                " delete it there, or translate with the model itself"
            )
    return settings


def _does_nothing(name: str, value, neutral) -> bool:
    if name == "early_stopping" and value == "never":  # as False, where the search ends on a bound anyway
        return True
    return value is None or value == neutral


class CTranslate2Model:
    """Takes a model's place where it only has to generate and to score.

    Args:
        folder: what `vaswani export --format ctranslate2` wrote.
        device: `"cpu"`, `"cuda"`, `"cuda:1"` or `"auto"`.
        compute_type: what CTranslate2 computes in; `"default"` is what the weights are stored in, or the nearest that
            the device has.
        threads: for one batch; 0 leaves it to CTranslate2.
        patience: a search ends when `patience * num_beams` hypotheses have ended; 2 if not given, and 4 at first if
            `exact`.
        exact: prove that no running beam can win any more, as the model itself does; slower, rarely different.

    Raises:
        UserError: for a folder that holds no such model, or a device or type that CTranslate2 has not.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int = 0,
        patience: float | None = None,
        exact: bool = False,
    ):
        self.facts = ExportFacts.read(folder, "ctranslate2")
        self.vocabulary = read_vocabulary(folder)
        self._ids = {token: number for number, token in enumerate(self.vocabulary)}
        if len(self.vocabulary) != self.facts.vocab_size:
            raise UserError(f"{folder} has a vocabulary and an export.json of different models: export the model again")
        self.generation_config = read_generation_config(folder)
        names = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
        self.config = VaswaniConfig(
            **{name: getattr(self.facts, name) for name in names},
            bos_token_id=self.facts.decoder_start_token_id,
            # Whatever they were before, they are a table now, and it has an end.
            position_encoding="learned",
            max_position_embeddings=self.facts.positions,
        )
        self.device = torch.device("cpu")  # of the tensors that go in and out
        self.patience, self.exact = patience, exact
        known = compute_types(device)
        if compute_type not in known:
            raise UserError(f"compute_type is {compute_type!r}: on {device} it must be one of {', '.join(known)}")
        name, _, number = device.partition(":")
        level = ctranslate2.get_log_level()
        ctranslate2.set_log_level(logging.ERROR)  # what it would say comes below, in a line as all others
        try:
            self.engine = ctranslate2.Translator(
                str(folder),
                device=name,
                device_index=int(number or 0),
                compute_type=compute_type,
                intra_threads=threads,
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(f"CTranslate2 cannot load {folder} on {device!r}: {one_line(error)}") from error
        finally:
            ctranslate2.set_log_level(level)
        if compute_type == "default" and self.facts.quantization not in known:
            logger.warning(
                f"{folder} holds weights in {self.facts.quantization}, for which {device} has no fast arithmetic:"
                f" computed in {self.engine.compute_type}"
            )

    def _setting(self, name: str, options: dict, default):
        given = options.get(name)
        given = getattr(self.generation_config, name, None) if given is None else given
        return default if given is None else given

    def _limits(self, sources: Sequence[Sequence[int]], options: dict) -> list[int]:
        """The longest output of each source, in tokens (Section 6.1)."""
        fixed = self._setting("max_new_tokens", options, None)
        if fixed is None and self.generation_config.max_length is not None:
            fixed = self.generation_config.max_length - 1  # the decoder's first token counts there
        extra = self._setting("max_extra_tokens", options, MAX_EXTRA_TOKENS)
        return [
            max(1, min(len(source) + extra if fixed is None else fixed, self.facts.positions)) for source in sources
        ]

    def search(
        self, sources: Sequence[Sequence[int]], number: int = 1, tokens_per_batch: int = 2048, **options
    ) -> list[list[Found]]:
        """The best outputs for tokenised sources.

        Args:
            sources: token ids with the end token.
            number: outputs wanted of each, at most the beam size.
            tokens_per_batch: source tokens at once, padding counted.
            **options: `num_beams`, `length_penalty`, `max_new_tokens` and `length_normalization` over the model's own.

        Returns:
            for each source token ids, log-probability and score of its outputs, best first.

        Raises:
            UserError: for a source with no positions for it, or an option that is unknown or out of range.
        """
        for name, value in options.items():
            if name not in _FOLLOWED | _HARMLESS and not _does_nothing(name, value, _NEUTRAL.get(name)):
                raise UserError(f"{name} is given, which the search of an exported model does not have: leave it out")
        for index, source in enumerate(sources, start=1):
            if len(source) > self.facts.positions:
                raise UserError(
                    f"source {index} has {len(source)} tokens and the exported model has {self.facts.positions}"
                    " positions: split it, or export with more positions if the model has sinusoids"
                )
        rule = LengthRule.of(self.generation_config, options)
        if rule.normalization not in LENGTH_NORMALIZATIONS:
            raise UserError(
                f"length_normalization is {rule.normalization!r}: it must be one of {', '.join(LENGTH_NORMALIZATIONS)}"
            )
        beams = self._setting("num_beams", options, 1)
        if not 1 <= number <= beams:
            raise UserError(f"{number} outputs are wanted of each source: there can be 1 to num_beams, {beams}")
        search = Search(
            engine=self.engine,
            vocabulary=self.vocabulary,
            ids=self._ids,
            end=self.facts.eos_token_id,
            beams=beams,
            rule=rule,
            patience=self.patience,
            exact=self.exact,
            tokens_per_batch=tokens_per_batch,
        )
        return search.run(sources, self._limits(sources, options), number)

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options) -> torch.Tensor:
        """As a model's: `(batch_size, source_length)` ids to `(batch_size * num_return_sequences, length)`.

        Raises:
            UserError: as `search`.
        """
        if attention_mask is None:
            attention_mask = input_ids != self.facts.pad_token_id
        sources = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        number = self._setting("num_return_sequences", options, 1)
        rows = [item.ids for found in self.search(sources, number, input_ids.numel(), **options) for item in found]
        outputs = torch.full((len(rows), 1 + max(map(len, rows))), self.facts.pad_token_id)
        outputs[:, 0] = self.facts.decoder_start_token_id
        for row, ids in zip(outputs, rows, strict=True):
            row[1 : 1 + len(ids)] = torch.tensor(ids)
        return outputs

    def score_ids(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], tokens_per_batch: int = 4096
    ) -> list[list[float]]:
        """Log-probability of each token of each target; `scoring.score_ids` for a model of this kind."""
        end = self.facts.eos_token_id
        scores: list[list[float]] = [[] for _ in targets]
        lengths = [max(map(len, pair)) for pair in zip(sources, targets, strict=True)]
        for batch in batches_by_length(lengths, tokens_per_batch):
            # CTranslate2 puts an end token itself.
            shorn = [targets[index][:-1] if targets[index][-1:] == [end] else targets[index] for index in batch]
            scored = self.engine.score_batch(
                *([[self.vocabulary[number] for number in ids] for ids in side] for side in (
                    [sources[index] for index in batch], shorn
                )),
                max_input_length=0,
            )  # fmt: skip
            for index, result in zip(batch, scored, strict=True):
                scores[index] = list(result.log_probs[: len(targets[index])])
        return scores

    def __call__(self, **inputs):
        """Not possible.

        Raises:
            UserError: always.
        """
        raise UserError("a model exported to CTranslate2 gives no logits: use the model itself")


class CTranslate2Translator(Translator):
    """Text in, text out, by a model that `vaswani export --format ctranslate2` wrote, with the paper's search.

    `translate` gives the translations of sentences in their order, `hypotheses` n-best lists; see `Translator`.

    Args:
        folder: the exported model.
        device, compute_type, threads, patience, exact: as of `CTranslate2Model`.
        **options: as of `Translator`; of those of `generate()`, `num_beams`, `length_penalty`, `max_new_tokens`,
            `num_return_sequences` and `length_normalization`. What is not given is the exported model's own.

    Raises:
        UserError: for a folder that holds no such model, or a device or type that CTranslate2 has not.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int = 0,
        patience: float | None = None,
        exact: bool = False,
        **options,
    ):
        model = CTranslate2Model(folder, device, compute_type, threads, patience, exact)
        super().__init__(model, load_tokenizer(folder), **options)
