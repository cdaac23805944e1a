"""A model exported to CTranslate2 at work: it stands in a model's place in `Translator` and `score_pairs`."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ctranslate2
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.nn.utils.rnn import pad_sequence

from ..data.batching import batches_by_length
from ..data.tokenization import load_tokenizer
from ..decoding.scoring import LengthRule
from ..decoding.translator import Translator
from ..errors import UserError, one_line
from ..hardware import check_workers
from ..json_and_yaml import read_json
from ..loading import FACTS
from ..model.configuration_vaswani import VaswaniConfig
from ..model.generation_vaswani import LENGTH_NORMALIZATIONS, MAX_EXTRA_TOKENS
from .ctranslate2_settings import does_nothing, is_end_forced, read_generation_config, suppressed
from .folder import ExportFacts, read_vocabularies

_PATIENCE = 2.0
# Of options given to `generate()`, those that are followed, and those that change no result.
_FOLLOWED = {"num_beams", "length_penalty", "max_new_tokens", "num_return_sequences", "length_normalization"}
_HARMLESS = {"use_cache", "temperature", "top_k", "top_p", "return_dict_in_generate"}

logger = logging.getLogger(__name__)


class Output(NamedTuple):
    """One output of a search; outputs are ranked by the score."""

    ids: list[int]  # the end token included if it was generated
    log_probability: float  # of all of them, in nats
    score: float


def _device_options(device: str) -> dict[str, str | int]:
    """`"cuda:1"` as CTranslate2 takes it."""
    name, _, number = device.partition(":")
    return {"device": name, "device_index": int(number or 0)}


def _compute_types(device: str) -> list[str]:
    """What CTranslate2 can compute in on a device, `"default"` (as the weights are stored) and `"auto"` included."""
    try:
        known = ctranslate2.get_supported_compute_types(*_device_options(device).values())
    except (RuntimeError, ValueError) as error:
        raise UserError(f"CTranslate2 cannot use device {device!r}: {one_line(error)}") from error
    return ["default", "auto", *sorted(known)]


def open_engine(folder: str | Path, device: str = "cpu", **options) -> ctranslate2.Translator:
    """CTranslate2's own translator of an exported folder, without the warnings that CTranslate2 prints by itself.

    Raises:
        UserError: for files that are missing or damaged, and what CTranslate2 cannot load on this device.
    """
    read_vocabularies(folder)
    for name in ("model.bin", "config.json"):
        if not (Path(folder) / name).is_file():  # a pipe would be waited for
            raise UserError(f"{folder} has no file {name}: export the model again")
    level = ctranslate2.get_log_level()
    ctranslate2.set_log_level(logging.ERROR)
    try:
        return ctranslate2.Translator(str(folder), **_device_options(device), **options)
    except Exception as error:  # C++ errors of many kinds, for files that are damaged or changed meanwhile
        raise UserError(f"CTranslate2 cannot load {folder} on {device!r}: {one_line(error)}") from error
    finally:
        ctranslate2.set_log_level(level)


def _check_engine_config(path: Path, facts: ExportFacts, vocabulary: list[str]) -> None:
    """Refuse a `config.json` that `vaswani export` did not write: CTranslate2 follows it as it searches, unchecked."""
    advice = "export the model again"
    config = read_json(path, advice)
    expected = {"add_source_bos": False, "add_source_eos": False}
    expected["eos_token"] = vocabulary[facts.eos_token_id]
    expected["decoder_start_token"] = vocabulary[facts.decoder_start_token_id]
    for name in ("bos_token", "unk_token"):  # no part of the search
        expected[name] = str(config.get(name))
    for name, value in expected.items():
        if type(config.get(name)) is not type(value) or config[name] != value:
            raise UserError(f"{path} is damaged ({name} is {config.get(name)!r:.40}, not {value!r:.40}): {advice}")


class CTranslate2Model:
    """Takes a model's place where it only has to generate and to score.

    Args and errors: as of `CTranslate2Translator`.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int = 0,
        patience: float | None = None,
    ):
        if patience is not None and patience < 1:
            raise UserError(f"patience is {patience}: it must be 1 or more")
        check_workers("threads", threads, least=0)
        self.patience = patience
        self.facts = ExportFacts.read(folder, "ctranslate2")
        self._source_vocabulary, self.vocabulary = read_vocabularies(folder)
        self._ids = {token: number for number, token in enumerate(self.vocabulary)}
        if len(self._source_vocabulary) != self.facts.vocab_size:
            raise UserError(f"{folder} has a vocabulary and an export.json of different models: export the model again")
        self.generation_config = read_generation_config(folder, len(self.vocabulary))
        self._suppressed = suppressed(self.generation_config, self.vocabulary, self.facts.eos_token_id)
        self._forced_end = is_end_forced(self.generation_config, folder, self.facts.eos_token_id)
        names = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
        try:
            self.config = VaswaniConfig(
                **{name: getattr(self.facts, name) for name in names},
                decoder_vocab_size=None if len(self.vocabulary) == self.facts.vocab_size else len(self.vocabulary),
                bos_token_id=self.facts.decoder_start_token_id,
                # Whatever they were before, they are a table now, and it has an end.
                position_encoding="learned",
                max_position_embeddings=self.facts.positions,
            )
        except (ValueError, StrictDataclassError) as error:
            raise UserError(f"{Path(folder) / FACTS} is damaged ({one_line(error)}): export the model again") from error
        _check_engine_config(Path(folder) / "config.json", self.facts, self.vocabulary)
        self.device = torch.device("cpu")  # of the tensors that go in and out
        known = _compute_types(device)
        if compute_type not in known:
            raise UserError(
                f"compute_type (--precision) is {compute_type!r}: an exported model computes on {device} in one of"
                f" {', '.join(known)}"
            )
        self.engine = open_engine(folder, device, compute_type=compute_type, intra_threads=threads)
        if compute_type == "default" and self.facts.quantization not in known:
            logger.warning(
                f"{folder} holds weights in {self.facts.quantization}, for which {device} has no fast arithmetic:"
                f" computed in {self.engine.compute_type}"
            )

    def _setting(self, name: str, options: dict, default=None):
        """An option of a call, else the model's own setting, else the default."""
        values = options.get(name), getattr(self.generation_config, name, None)
        return next((value for value in values if value is not None), default)

    def _limits(self, sources: Sequence[Sequence[int]], options: dict) -> list[int]:
        """The longest output of each source, in tokens (Section 6.1)."""
        fixed = self._setting("max_new_tokens", options)
        if fixed is None and self.generation_config.max_length is not None:
            fixed = self.generation_config.max_length - 1  # the decoder's first token counts there
        extra = self._setting("max_extra_tokens", options, MAX_EXTRA_TOKENS)
        lengths = [len(source) + extra if fixed is None else fixed for source in sources]
        lengths = [min(length, self.facts.positions) - self._forced_end for length in lengths]
        return [max(1, length) for length in lengths]

    def search(
        self, sources: Sequence[Sequence[int]], number: int = 1, tokens_per_batch: int = 2048, **options
    ) -> list[list[Output]]:
        """The best outputs for tokenised sources.

        Args:
            sources: token ids with the end token.
            number: outputs wanted of each, at most the beam size.
            tokens_per_batch: source tokens at once, padding counted.
            **options: `num_beams`, `length_penalty`, `max_new_tokens` and `length_normalization` over the model's own.

        Returns:
            for each source its outputs, best first.

        Raises:
            UserError: for a source longer than the table of positions, or an option that is unknown or out of range.
        """
        for name, value in options.items():
            if name not in _FOLLOWED | _HARMLESS and not does_nothing(name, value):
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
        if beams > 1 and 2 * beams > len(self.vocabulary):
            raise UserError(f"num_beams is {beams}: it must be at most half of {len(self.vocabulary)} tokens")
        limits = self._limits(sources, options)
        results: list[list[Output]] = [[] for _ in sources]
        for batch in batches_by_length([len(source) for source in sources], tokens_per_batch):
            outputs = self._search_batch([sources[i] for i in batch], [limits[i] for i in batch], beams, rule, number)
            for index, best in zip(batch, outputs, strict=True):
                results[index] = best
        return results

    def _search_batch(
        self, sources: list[Sequence[int]], limits: list[int], beams: int, rule: LengthRule, number: int
    ) -> list[list[Output]]:
        """The best outputs of sources that are searched together.

        One call of CTranslate2 has one longest length for all. Sources that are not settled within it are asked again
        with a longer one, up to the limit of each.
        """
        results: list[list[Output]] = [[] for _ in sources]
        pending = list(range(len(sources)))
        while pending:
            longest = min(limits[index] for index in pending)
            found = self._ask([sources[index] for index in pending], longest, beams, rule)
            unsettled = []
            for index, outputs in zip(pending, found, strict=True):
                ended = [output for output in outputs if output.ids[-1:] == [self.facts.eos_token_id]]
                if longest == limits[index] or len(ended) == len(outputs):
                    results[index] = self._with_forced_ends(outputs, rule)[:number]
                else:
                    unsettled.append(index)
            pending = unsettled
        return results

    def _with_forced_ends(self, outputs: list[Output], rule: LengthRule) -> list[Output]:
        """Outputs at their limit, which do not end, with the end token if it is forced, ranked again."""
        end = self.facts.eos_token_id
        if not self._forced_end or all(output.ids[-1:] == [end] for output in outputs):
            return outputs
        whole = [
            output
            if output.ids[-1:] == [end]
            else Output(
                [*output.ids, end], output.log_probability, rule.score(output.log_probability, len(output.ids) + 1)
            )
            for output in outputs
        ]
        return sorted(whole, key=lambda output: output.score, reverse=True)

    def _source_tokens(self, sentences: Sequence[Sequence[int]]) -> list[list[str]]:
        return [[self._source_vocabulary[number] for number in ids] for ids in sentences]

    def _ask(self, sources: list[Sequence[int]], longest: int, beams: int, rule: LengthRule) -> list[list[Output]]:
        """What one search of CTranslate2 finds for each source, ranked by the rule."""
        patience = self.patience or _PATIENCE if beams > 1 else 1.0
        found = self.engine.translate_batch(
            self._source_tokens(sources),
            beam_size=beams,
            patience=patience,
            # Rounded down, and by less than half a hypothesis, since CTranslate2 rounds in a way of its own.
            num_hypotheses=max(1, int(beams * patience + 1e-6)),
            length_penalty=0,  # plain log-probabilities; with so many hypotheses wanted it does not stop earlier
            max_decoding_length=longest,
            min_decoding_length=0,
            max_input_length=0,
            suppress_sequences=self._suppressed or None,
            return_scores=True,
            return_end_token=True,
        )
        results = []
        for result in found:
            sequences = [[self._ids[token] for token in tokens] for tokens in result.hypotheses]
            pairs = zip(sequences, result.scores, strict=True)
            outputs = [Output(ids, log_prob, rule.score(log_prob, len(ids))) for ids, log_prob in pairs]
            results.append(sorted(outputs, key=lambda output: output.score, reverse=True))
        return results

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options) -> torch.Tensor:
        """As a model's: `(batch_size, source_length)` ids to `(batch_size * num_return_sequences, length)`.

        Raises:
            UserError: as `search`.
        """
        if attention_mask is None:
            attention_mask = input_ids != self.facts.pad_token_id
        sources = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        number = self._setting("num_return_sequences", options, 1)
        found = self.search(sources, number, input_ids.numel(), **options)
        start = self.facts.decoder_start_token_id
        rows = [torch.tensor([start, *output.ids]) for outputs in found for output in outputs]
        return pad_sequence(rows, batch_first=True, padding_value=self.facts.pad_token_id)

    def score_ids(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], tokens_per_batch: int = 4096
    ) -> list[list[float]]:
        """Log-probability of each token of each target; `scoring.score_ids` for a model of this kind."""
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

    def __call__(self, **inputs):
        """Raises `UserError`: there are no logits."""
        raise UserError("a model exported to CTranslate2 gives no logits: use the model itself")


class CTranslate2Translator(Translator):
    """Text in, text out, by a model that `vaswani export --format ctranslate2` wrote, with the paper's search.

    `translate` gives the translations of sentences in their order, `hypotheses` n-best lists; see `Translator`.

    Args:
        folder: the exported model.
        device: `"cpu"`, `"cuda"`, `"cuda:1"` or `"auto"`.
        compute_type: what CTranslate2 computes in; `"default"` is what the weights are stored in, or the nearest that
            the device has.
        threads: for one batch; 0 leaves it to CTranslate2.
        patience: a search ends when `patience * num_beams` hypotheses have ended; 2 if not given. More is slower, and
            rarely finds anything better.
        **options: as of `Translator`; of those of `generate()`, `num_beams`, `length_penalty`, `max_new_tokens`,
            `num_return_sequences` and `length_normalization`. What is not given is the exported model's own.

    Raises:
        UserError: for a folder that holds no such model, a device or type that CTranslate2 does not have, or a patience
            below 1.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int = 0,
        patience: float | None = None,
        **options,
    ):
        model = CTranslate2Model(folder, device, compute_type, threads, patience)
        super().__init__(model, load_tokenizer(folder), **options)
