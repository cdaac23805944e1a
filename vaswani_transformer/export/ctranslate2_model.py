"""A model exported to CTranslate2 at work, in a model's place in `Translator` and `score_pairs`; imports no torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ctranslate2

from ..decoding.scoring import length_rule
from ..decoding.streaming import batches_by_length
from ..decoding.translator import Piece, Translator
from ..errors import UserError, reading
from ..exported import FACTS, NUMBERS, NotExpressibleError
from ..json_and_yaml import parse_json, read_json, read_text
from ..model.settings_vaswani import broken_range

# CTranslate2's names: one file if source and target have the same tokens.
_VOCABULARIES = ("shared_vocabulary.json", "source_vocabulary.json", "target_vocabulary.json")
_CPU_TOKENS = 512  # source tokens that are searched at once: with 2,048 a small model took 1.2 to 1.4 times as long

#: Settings of numbers, and rules, that the search follows.
FOLLOWED = {
    "num_beams", "num_return_sequences", "length_penalty", "max_extra_tokens", "max_new_tokens", "max_length",
    "length_normalization", "min_new_tokens",
}  # fmt: skip
# Those that it does not follow and that change the outputs of transformers' search, unless they are false, 0 or empty.
_NOT_FOLLOWED = {
    "do_sample", "early_stopping", "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "min_length", "max_time", "stop_strings", "num_beam_groups",
    "diversity_penalty", "guidance_scale", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "constraints", "force_words_ids", "sequence_bias",
    "exponential_decay_length_penalty", "watermarking_config",
}  # fmt: skip
# Further values at which settings do nothing; the search ends on a bound, with which "never" is as False.
_NEUTRAL = {"repetition_penalty": 1, "encoder_repetition_penalty": 1, "num_beam_groups": 1, "guidance_scale": 1,
            "early_stopping": "never", "renormalize_logits": True, "use_cache": True}  # fmt: skip


def check_setting(name: str, value: Any, where: str = "") -> None:
    """Refuse a setting that is out of range (`UserError`) or that the search cannot follow (`NotExpressibleError`).

    `where` names its file, and an unknown option has none.
    """
    is_ignored = name in _NOT_FOLLOWED if where else name not in FOLLOWED
    if is_ignored and value and value != _NEUTRAL.get(name):
        problem = f"{name}{where} is {value!r:.100}, which the search of an exported model does not follow"
        raise NotExpressibleError(f"{problem}: leave it out, or translate with the model itself")
    if name in FOLLOWED and value is not None and (rule := broken_range(name, value)):
        raise UserError(f"{name}{where} is {value!r:.100}: it must be {rule}")


class CTranslate2Model:
    """Takes a model's place where it only has to search and to score; arguments and errors as in `load_exported`."""

    def __init__(
        self, folder: str | Path, device: str, compute_type: str, threads: int = 0, patience: float | None = None
    ):
        self.patience = patience
        facts = Path(folder) / FACTS
        with reading(facts):
            values = read_json(facts)
            numbers = {name: int(values[name]) for name in ("positions", *NUMBERS)}
            if values["format"] != "ctranslate2":
                problem = f"{folder} holds a model exported to {values['format']}"
                raise UserError(f"{problem}: export it with --format ctranslate2")
        # Whatever the positions were before, they are a table now, and have an end.
        rows = numbers["positions"]
        self.config = SimpleNamespace(position_encoding="learned", max_position_embeddings=rows, **numbers)
        settings = read_json(path := Path(folder) / "generation_config.json")
        for name, value in settings.items():
            check_setting(name, value, f" in {path}")
        others = ("suppress_tokens", "bad_words_ids", "forced_eos_token_id", "do_sample", "top_k")
        self.generation_config = SimpleNamespace(**dict.fromkeys((*FOLLOWED, *others)) | settings)
        self.generation_config.eos_token_id = self._end = self.config.eos_token_id
        forced = self.generation_config.forced_eos_token_id
        self._forced = [] if forced is None else [self._end]  # what is appended to an output that is cut at its limit
        if forced not in (None, self._end, self._forced):
            raise NotExpressibleError(f"forced_eos_token_id in {folder} is {forced}, not the end token, {self._end}")
        shared, *sides = (Path(folder) / name for name in _VOCABULARIES)
        vocabularies = []
        for path in sides if sides[0].is_file() else [shared]:
            with reading(path):
                vocabularies.append(list(parse_json(read_text(path))))
        self._source_vocabulary, self.vocabulary = vocabularies[0], vocabularies[-1]
        with reading(folder):
            if len(self._source_vocabulary) != self.config.vocab_size:  # CTranslate2 does not count them
                raise ValueError("the vocabulary and export.json are of different models")
            self._ids = {token: number for number, token in enumerate(self.vocabulary)}
            words = [[token] for token in self.generation_config.suppress_tokens or ()]
            # As in transformers, an end token may come although it is a bad word.
            words += [word for word in self.generation_config.bad_words_ids or () if word != [self._end]]
            self._suppressed = [[self.vocabulary[token] for token in word] for word in words]
            for name in ("model.bin", "config.json"):
                if not (Path(folder) / name).is_file():  # a pipe would be waited for
                    raise ValueError(f"there is no file {name}: export the model again")
            kind, _, number = device.partition(":")
            options = {"compute_type": compute_type, "intra_threads": threads}
            self.engine = ctranslate2.Translator(str(folder), kind, device_index=int(number or 0), **options)

    def search_pieces(self, translator: Translator, pieces: list[Piece]) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield the number of each piece and the ids of its outputs, best first: the search of a `Translator`.

        An output ends with the end token if that was generated or forced; if forced, its log-probability counts as 0.
        One call of CTranslate2 has one longest length for all. Sources that are not settled within it are asked again
        with a longer one, up to the limit of each (Section 6.1). `UserError` for prefixes and terms, and for an option
        of the translator that is unknown or out of range.
        """
        if any(piece.prefix or piece.terms for piece in pieces):
            raise UserError("prefixes and glossaries are not possible with an exported model: give the model itself")
        options = translator.generate_options
        for name, value in options.items():
            check_setting(name, value)
        beams, number = translator.setting("num_beams", 1), translator.setting("num_return_sequences", 1)
        if number > beams or (beams > 1 and 2 * beams > len(self.vocabulary)):
            rule = "there can be 1 to num_beams outputs, and at most half as many beams as the vocabulary has tokens"
            raise UserError(f"{number} outputs are wanted by num_beams {beams}: {rule}, {len(self.vocabulary)}")
        patience = (self.patience or (1.0 if number == 1 else 2.0)) if beams > 1 else 1.0
        rule = length_rule(self.generation_config, options)
        lengths, least = [len(piece.ids) for piece in pieces], translator.setting("min_new_tokens", 0)
        limits = [max(1, translator.output_limit(length) - len(self._forced)) for length in lengths]
        tokens = translator.tokens_per_batch
        tokens = min(tokens, _CPU_TOKENS) if self.engine.device == "cpu" else tokens
        for pending in batches_by_length(lengths, tokens):
            while pending:
                longest, unsettled = min(limits[index] for index in pending), []
                searched = self._ask([pieces[index].ids for index in pending], least, longest, beams, patience)
                for index, outputs in zip(pending, searched, strict=True):
                    if longest == limits[index] or all(ids[-1:] == [self._end] for ids, _ in outputs):
                        ended = [(ids if ids[-1:] == [self._end] else ids + self._forced, log) for ids, log in outputs]
                        ended.sort(key=lambda output: -rule(output[1], len(output[0])))
                        yield index, [ids for ids, _ in ended[:number]]
                    else:
                        unsettled.append(index)
                pending = unsettled

    def _ask(
        self, sources: list[Sequence[int]], least: int, longest: int, beams: int, patience: float
    ) -> Iterator[list[tuple[list[int], float]]]:
        """Yield token ids and log-probabilities of the outputs of one search of CTranslate2 for each source."""
        searched = self.engine.translate_batch(
            [[self._source_vocabulary[number] for number in ids] for ids in sources],
            beam_size=beams,
            patience=patience,
            # Rounded down, and by less than half a hypothesis, since CTranslate2 rounds in a way of its own.
            num_hypotheses=max(1, int(beams * patience + 1e-6)),
            length_penalty=0,  # log-probabilities; with this many hypotheses it does not stop earlier
            min_decoding_length=min(least, longest),
            max_decoding_length=longest,
            max_input_length=0,
            suppress_sequences=self._suppressed or None,
            return_scores=True,
            return_end_token=True,
        )
        for result in searched:
            sequences = [[self._ids[token] for token in tokens] for tokens in result.hypotheses]
            yield list(zip(sequences, result.scores, strict=True))

    def score_ids(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], tokens_per_batch: int
    ) -> list[list[float]]:
        """Return the log-probability of each token of each target, as `scoring.score_ids` does."""
        scores: list[list[float]] = [[] for _ in targets]
        lengths = [max(map(len, pair)) for pair in zip(sources, targets, strict=True)]
        for batch in batches_by_length(lengths, tokens_per_batch):
            source_tokens = [[self._source_vocabulary[number] for number in sources[index]] for index in batch]
            target_tokens = [[self.vocabulary[number] for number in targets[index]] for index in batch]
            for target in target_tokens:
                if target[-1:] == [self.vocabulary[self._end]]:  # CTranslate2 appends an end token itself
                    target.pop()
            scored = self.engine.score_batch(source_tokens, target_tokens, max_input_length=0)
            for index, result in zip(batch, scored, strict=True):
                scores[index] = list(result.log_probs[: len(targets[index])])
        return scores
