"""Choice of the settings that a recipe leaves to the text and the time: `auto`.

The rules are `ROWS`, `vocabulary_size` and the constants below; docs/measurements.md has what was measured of them.
"""

import logging
import math
import os
import time
from dataclasses import replace
from itertools import chain, islice, repeat, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from accelerate.utils import find_executable_batch_size, send_to_device
from accelerate.utils.memory import clear_device_cache

from ..data.augmentation import AugmentedPairs
from ..data.batching import MOST_PADDED, ROOM, PairCollator, TokenBatchSampler
from ..data.parallel_text import held_out_rows
from ..data.prepared import open_prepared
from ..data.recipe_data import data_sources, load_training_pairs, recipe_tokenizer
from ..data.tokenization import vocabulary_sizes
from ..data.tokenized_pairs import pair_lengths, tokenize_pairs
from ..data.words import ends_a_sentence, words_of
from ..errors import UserError
from ..hardware import CPU_TOKENS, accelerator, choose_precision
from ..json_and_yaml import read_yaml
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..output_folder import RECIPE
from ..recipes.recipe import AUTO, CHOSEN, Recipe, augmentation_shares, check_recipe, field_type, model_config
from .device_memory import count_tokens, free_memory
from .initial_model import read_model_of, with_attention
from .run_folder import CHECKPOINTS, check_output

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """Settings for texts of at most so many words, both sides together."""

    words: float
    d_model: int
    d_ff: int
    num_heads: int
    encoder_layers: int
    decoder_layers: int
    dropout: float
    tokens_per_batch: int
    rate: float  # the highest learning rate; with 2.8e-3 and little warmup models never attend to the source
    epochs: int  # where no time is given


ROWS = (  # the first two are measured, and larger text steps down to them for few passes; the others are the paper's
    Row(100_000, 128, 512, 4, 3, 3, 0.3, 1024, 2e-3, 100),
    Row(1_000_000, 256, 1024, 4, 3, 3, 0.3, 1024, 1.6e-3, 60),
    Row(4_000_000, 256, 1024, 4, 3, 3, 0.2, 2048, 1.6e-3, 40),
    Row(20_000_000, 384, 1536, 8, 4, 4, 0.1, 4096, 1e-3, 20),
    Row(100_000_000, 512, 2048, 8, 6, 6, 0.1, 12_500, 7e-4, 15),
    Row(math.inf, 512, 2048, 8, 6, 6, 0.1, 25_000, 7e-4, 10),
)
WARMUP, DECLINE = 0.2, 0.5  # shares of the steps
PLAIN = 0.6  # the same: those before pairs are changed, which take less time
SPARE_STEPS = 2.0  # times those that fit by the trial, should a step take less; the clock lowers the number
LEAST_WARMUP = 400  # steps, or 40%: with 208 of 1,039 two models of three never attended to the source
TRAINED = 0.95  # share of the minutes for steps; validations say how many really fit, and the rate declines by that
SENTENCES = 0.33  # share of sources with a final mark from which a text is one of sentences
VALIDATIONS, MINUTES_APART, TRANSLATED = 12, 2.0, 25  # at most so many, so far apart; pairs of each for each minute
LEAST_STEPS = 50
FEW_PASSES, SOME_PASSES = 20, 35  # below the first the row above learns more, below the second dropout of 0.1 does
FEW_STEPS = 2000  # the least without minutes; if these allow fewer, a model that is smaller still
READ = 6.0  # passes; with fewer the vocabulary is that of as much less text
LITTLE_TEXT, SMOOTHING = 400_000, 0.3  # words of both sides, up to which labels are smoothed by more than the paper's
TRIAL_STEPS, TRIAL_SECONDS = 10, 20.0  # the trial ends with whichever is reached first
TOKENS_PER_WORD = 1.3  # in prepared data
SHORT_LINES, WORDS_PER_ENTRY, MOST_OF_SHORT_LINES = 10.0, 8.0, 8000  # the vocabulary of lines of fewer words than these
_SAMPLE = 20_000  # pairs whose words and tokens are counted
_TRIED = 32  # batches that pairs for the trial are enough for; the first and the last are not full


def vocabulary_size(words: float, length: float) -> int:
    """Return entries for a text of so many words, both sides together, in lines of `length` words on average.

    2,000 for 170,000 words, 9,000 for 5 million: Gowda and May (2020, arXiv 2004.02334) found 1,000 to be best for
    30,000 pairs and 8,000 for a million. Short lines, such as those of interfaces, are learnt by whole words sooner.
    """
    entries = 2000 * (words / 170_000) ** 0.45
    if length < SHORT_LINES:
        entries = max(entries, min(words / WORDS_PER_ENTRY, MOST_OF_SHORT_LINES))
    return int(np.clip(round(entries, -2), 500, 37_000))


def choose_settings(recipe: Recipe) -> Recipe:
    """Return the recipe with values in place of `auto`, and log each with its reason.

    An interrupted run keeps what was chosen when it began. With `max_minutes` a trial here says how many steps fit.

    Raises:
        UserError: for a text or model that cannot be read, fewer minutes than are needed, and as `check_output`.
    """
    left = [name for name in CHOSEN if getattr(recipe, name) == AUTO]
    if left and check_output(recipe) is not None:
        earlier = read_yaml(Path(recipe.output) / CHECKPOINTS / RECIPE)
        if "max_steps" in left and (more := recipe.max_minutes / (earlier.get("max_minutes") or math.inf)) > 1:
            earlier |= {name: round(more * earlier.get(name, 0)) for name in ("max_steps", "decline_steps")}
        chosen = {name: earlier.get(name, getattr(Recipe, name)) for name in left}
        shown = ", ".join(f"{name} {value}" for name, value in chosen.items())
        logger.info("resuming with what was chosen before (with --overwrite, other minutes start again): %s", shown)
        return replace(recipe, **chosen)
    # By itself it needs no look at the text: `auto` is understood where pairs are held out.
    chosen_later = {"validation_size"} if recipe.prepared is None else set()
    return _Choice(recipe, left).recipe if {*left} - chosen_later else recipe


class _Choice:
    """A recipe whose open fields get their values one after the other."""

    def __init__(self, recipe: Recipe, left: list[str]):
        self.recipe, self.left = recipe, left
        self.processes = int(os.environ.get("WORLD_SIZE", "1"))  # set by accelerate launch and torchrun
        if recipe.from_model is not None:
            read_model_of(recipe.from_model)  # before its tokenizer is missed
        pairs, words, tokens = self._prepared() if recipe.prepared is not None else self._text()
        size = f"for {float(f'{words:.2g}'):,.0f} words"
        self.choose("label_smoothing", SMOOTHING if words <= LITTLE_TEXT else Recipe.label_smoothing, size)
        first = place = next(place for place, row in enumerate(ROWS) if words <= row.words)
        fit = self._steps_that_fit(self._row(place))
        passes = fit[2] / (pairs * tokens) if fit else math.inf
        while "d_model" in left and passes < FEW_PASSES and place and (place == first or fit[0] < FEW_STEPS):
            place -= 1
            fit = self._steps_that_fit(self._row(place))
        row, reason = self._row(place), size
        if "vocab_size" in left and recipe.prepared is None:
            read = fit[2] / (pairs * tokens) if fit else math.inf
            if read < READ and recipe.tokenizer is recipe.from_model is None:
                tokens = self._tokenize(words * read / READ)
                fit, self.vocabulary = self._steps_that_fit(row), f"few entries are learned in {read:.1f} passes"
            own = max(vocabulary_sizes(self.tokenizer)), "as the tokenizer has"
            self.choose("vocab_size", *(own if recipe.tokenizer else (self.recipe.vocab_size, self.vocabulary)))
        if passes < SOME_PASSES:
            row, reason = row._replace(dropout=min(0.1, row.dropout)), "few minutes for so much text"
        for name, value in row._asdict().items():
            self.choose(name, value, reason)
        self._choose_steps(row, fit, max(1, pairs * tokens / self.recipe.tokens_per_batch))
        check_recipe(self.recipe)

    def _row(self, place: int) -> Row:
        """Return a row with heads that divide a given width, and batches of four of the longest pairs a process."""
        pairs, row, width = 4 * self.processes if self.processes > 1 else 1, ROWS[place], self.recipe.d_model
        row = row._replace(num_heads=math.gcd(row.num_heads, width if isinstance(width, int) else 0))
        return row._replace(tokens_per_batch=max(row.tokens_per_batch, pairs * self.recipe.max_length))

    def choose(self, name: str, value: float | str | None, reason: str) -> None:
        """Set a field that was left open."""
        if name in self.left:
            kind = field_type(name)[0]
            value = value if str in (kind, type(value)) else kind(f"{value:.3g}") if kind is float else round(value)
            self.recipe = replace(self.recipe, **{name: value})
            shown = "none" if value is None else f"{value:,}" if isinstance(value, int) else value
            logger.info("%s: %s (%s)", name, shown, reason)

    def _text(self) -> tuple[int, float, float]:
        """Return pairs, words of both sides, and mean tokens of the longer side; keeps a tokenized sample."""
        source, validation = data_sources(self.recipe)
        text = source.load()
        sample = text.select(np.linspace(0, len(text) - 1, min(len(text), _SAMPLE)).astype(int))
        words = sum(len(words_of(side)) for row in sample for side in row.values()) * len(text) / len(sample)
        reason = "validation data is given: no effect" if validation else "a tenth of all, at most 1,000"
        self.choose("validation_size", len(held_out_rows(max(2, len(text)), AUTO, 0)), reason)
        sides = ((row["source"], row["target"]) for row in sample)  # of programs and labels the target is ASCII
        ends = np.mean([bool(ends_a_sentence(a) and (ends_a_sentence(b) or not b.isascii())) for a, b in sides])
        kind = "default" if ends >= SENTENCES else None
        self.choose("augmentation", kind, f"{ends:.0%} of the pairs end as sentences do")
        self.length = length = words / 2 / len(text)
        reason = "short lines are learnt by the word" if length < SHORT_LINES else "each entry has to be seen often"
        self.vocabulary = f"{len(text):,} pairs of {length:.1f} words: {reason}"
        if self.recipe.fuzzy_matches:
            text = load_training_pairs(self.recipe)[0]
            sample = text.select(np.linspace(0, len(text) - 1, min(len(text), _SAMPLE)).astype(int))
        self.text = sample
        return len(text), words, self._tokenize(words)

    def _tokenize(self, words: float) -> float:
        """Set the vocabulary to that of so many words, and return as `_text` the mean tokens of the longer side."""
        if "vocab_size" in self.left:
            self.recipe = replace(self.recipe, vocab_size=vocabulary_size(words, self.length))
        self.tokenizer = recipe_tokenizer(self.recipe, self.text)
        limits = {"max_length": self.recipe.max_length, "max_length_ratio": self.recipe.max_length_ratio}
        self.sample, _ = tokenize_pairs(self.text, self.tokenizer, **limits, description="counting tokens")
        return max(float(np.mean(side)) for side in pair_lengths(self.sample)) * len(self.sample) / len(self.text)

    def _prepared(self) -> tuple[int, float, float]:
        """Return the same of prepared data, whose words are estimated."""
        prepared = open_prepared(self.recipe.prepared)
        pairs, self.tokenizer = len(prepared.train), prepared.tokenizer
        self.sample = prepared.train.as_dataset(np.linspace(0, pairs - 1, min(pairs, _SAMPLE)).astype(int))
        own = {"validation_size": Recipe.validation_size, "vocab_size": len(prepared.tokenizer), "augmentation": None}
        for name, other in own.items():
            self.choose(name, prepared.manifest["recipe"].get(name) or other, "as the data was prepared")
        means = np.mean(prepared.train.lengths, axis=1)
        return pairs, float(pairs * means.sum() / TOKENS_PER_WORD), float(means.max())

    def _choose_steps(self, row: Row, fit: tuple | None, epoch: float) -> None:
        """Set the fields for steps; `fit` is of `_steps_that_fit`, `epoch` the steps of one pass through the text."""
        minutes = self.recipe.max_minutes
        enough = max(FEW_STEPS, row.epochs * epoch)
        steps, reason = enough, "{:.1f} passes: where the text has been seen often enough"
        if fit:
            fitting, seconds, _ = fit
            if fitting < (least := LEAST_STEPS if "max_steps" in self.left else 1):
                problem = f"max_minutes {minutes:g} is enough for {fitting:.0f} steps of {seconds:.2g} s"
                times = math.ceil(11 * least / fitting) / 10  # with a margin: no two trials take the same time
                raise UserError(f"{problem}, and a training needs {least} or more: give {times:g} times the minutes")
            if fitting < steps:
                trial = f"by a trial {fitting:,.0f} steps of {seconds:.2g} s fit"
                steps, reason = fitting, f"the clock decides; {trial}, {{:.1f}} passes"
        self.choose("max_steps", min(enough, SPARE_STEPS * steps), reason.format(steps / epoch))
        steps = steps if "max_steps" in self.left else min(self.recipe.max_steps, fit[0] if fit else math.inf)
        warmup = np.clip(WARMUP * steps, max(1, min(LEAST_WARMUP, 0.4 * steps)), 4000)
        self.choose("warmup_steps", warmup, f"{WARMUP:.0%} of the steps, up to 40% of few, at most the paper's")
        width = _config(self.recipe, self.recipe.vocab_size).d_model
        rate = min(each.rate for each in ROWS if each.d_model <= max(width, ROWS[0].d_model))  # of the model as it is
        scale = rate * (width * self.recipe.warmup_steps) ** 0.5  # of Equation 3 at the end of the warmup
        self.choose("learning_rate_scale", scale, f"for a highest rate of {rate:g}")
        is_late = bool(augmentation_shares(self.recipe.augmentation)) and steps / epoch < SOME_PASSES
        reason = f"{PLAIN:.0%} of the steps: passes are few, and unchanged pairs are quicker" if is_late else "at once"
        self.choose("augmentation_start", is_late * PLAIN * steps, reason)
        self.choose("decline_steps", DECLINE * self.recipe.max_steps, "the rate ends at zero")
        number = np.clip(minutes / MINUTES_APART if minutes else VALIDATIONS, 3, VALIDATIONS)
        self.choose("evaluate_every", max(1, math.ceil(steps / number)), f"{number:.0f} validations")
        self.choose("validation_bleu", np.clip(TRANSLATED * (minutes or 20), 100, 500), "fewer for few minutes")

    def _steps_that_fit(self, row: Row) -> tuple | None:
        """Return by a trial the steps that fit into the minutes with a row's settings, their seconds and tokens."""
        depending = {"max_steps", "warmup_steps", "augmentation_start", "d_model", "dropout", "evaluate_every"}
        if not (self.recipe.max_minutes and depending & {*self.left}):
            return None
        trial = replace(self.recipe, **{name: value for name, value in row._asdict().items() if name in self.left})
        most = math.ceil(trial.tokens_per_batch / micro_batches_of(trial, self.processes))

        @find_executable_batch_size(starting_batch_size=most)
        def seconds_of_a_step(tokens: int) -> float:
            tokens = max(tokens, min(most, 4 * trial.max_length))  # or a part may have too few pairs
            return trial_seconds(replace(trial, tokens_per_device=tokens), self.sample, self.tokenizer, self.processes)

        seconds = seconds_of_a_step()
        clear_device_cache(garbage_collection=True)  # whose free memory is looked at next
        steps = TRAINED * 60 * self.recipe.max_minutes / seconds
        return steps, seconds, steps * trial.tokens_per_batch


def micro_batches_of(recipe: Recipe, processes: int) -> int:
    """Return the parts of an optimizer step, over all processes and accumulation."""
    per_device = recipe.tokens_per_device
    if per_device == AUTO:  # on a GPU whose memory is known its share of a batch, if that fits
        is_known = (device := accelerator()) is not None and free_memory(device) is not None
        per_device = math.ceil(recipe.tokens_per_batch / processes) if is_known else CPU_TOKENS
    return processes * math.ceil(math.ceil(recipe.tokens_per_batch / per_device) / processes)


def _config(recipe: Recipe, vocab_size: int) -> VaswaniConfig:
    """Return the configuration of the model that is trained: of a preset or row, or that of `from_model`."""
    return model_config(recipe, vocab_size) if recipe.from_model is None else read_model_of(recipe.from_model).config


def trial_seconds(recipe: Recipe, pairs: datasets.Dataset, tokenizer: Any, processes: int) -> float:
    """Time steps of a new model, each of a micro-batch of these pairs; returns the seconds of an optimizer step.

    `processes` share a step. Batches are made as in training; on a GPU they are padded, which takes about as long. The
    first is not counted where there are more: memory is taken and kernels are chosen in it.
    """
    device, config = accelerator() or torch.device("cpu"), _config(recipe, max(vocabulary_sizes(tokenizer)))
    model = with_attention(VaswaniForConditionalGeneration(config), replace(recipe, compile=False)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    kinds, parts = choose_precision(recipe.precision), micro_batches_of(recipe, processes)
    more = max(map(np.sum, pair_lengths(pairs))) // (_TRIED * recipe.tokens_per_batch)  # times as much as is needed
    lengths = pair_lengths(pairs := pairs.select(range(0, len(pairs), max(1, int(more)))))
    limits = max(2, *map(np.max, lengths)), math.inf, math.inf
    changed = AugmentedPairs(pairs, tokenizer, augmentation_shares(recipe.augmentation), recipe.seed, limits)
    longer = changed.changed_lengths if changed.shares and device.type == "cpu" else None
    sampler = TokenBatchSampler(*lengths, recipe.tokens_per_batch, parts, recipe.seed, 0, longer)
    sampler.set_epoch(1)  # with its changes
    most, collator = int(ROOM * sampler.part_tokens), PairCollator(config.pad_token_id)
    changed = replace(changed, limits=(limits[0], most, MOST_PADDED * most))
    times = [time.perf_counter()]
    batches = islice(chain.from_iterable(repeat(sampler)), TRIAL_STEPS)
    for numbers in takewhile(lambda _: times[-1] - times[0] <= TRIAL_SECONDS, batches):
        batch = collator(changed.__getitems__(numbers))
        count_tokens(batch)  # takes out what the model does not know
        with torch.autocast(device.type, torch.float16 if kinds["fp16"] else torch.bfloat16, any(kinds.values())):
            model(**send_to_device(batch, device), skip_logits=recipe.fused_loss).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        next(model.parameters())[0].sum().item()  # waits for a GPU
        times.append(time.perf_counter())
    seconds = np.diff(times)
    return parts / processes * float(np.mean(seconds[1:] if len(seconds) > 1 else seconds))
