"""Estimates of what a training takes, before it starts: `vaswani train --dry-run`.

Operations are counted from the sizes of model and batch: what a step costs whatever machine it runs on.
"""

import dataclasses

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..data.batching import TokenBatchSampler
from ..data.prepared import PreparedData, check_recipe_matches, open_prepared
from ..data.recipe_data import data_sources
from ..data.tokenization import load_tokenizer
from ..data.tokenized_pairs import pair_lengths
from ..durations import duration
from ..hardware import choose_precision
from ..model.configuration_vaswani import VaswaniConfig
from ..model.local_attention_vaswani import reach
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..recipes.recipe import Recipe, model_config
from .initial_model import model_of_folder, with_attention
from .run import make_tokenizer, reporters, tokenized_pairs
from .settings import choose_settings, micro_batches_of, trial_seconds

# Share of `tokens_per_batch` that a batch has on the longer side. `TokenBatchSampler` gave 0.996 for 25,000 tokens and
# 400,000 generated pairs: log-normal lengths of mean 30, sides 20% apart.
EXPECTED_FILL = 0.996
EXPECTED_LENGTH = 30.0  # tokens a sentence, where the recipe expects nothing
LARGEST_READ = 64e6  # bytes of local data that a plan reads; tokenising more takes minutes


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe's training in numbers: tokens, FLOPs (a multiplication and an addition counting two), seconds, bytes."""

    recipe: Recipe
    config: VaswaniConfig
    parameters: int  # tied ones once
    trained: int  # of these
    processes: int  # that share a step
    micro_batches: int  # parts of a step, over all processes and accumulation
    pairs: int | None  # of an epoch; None if unknown
    source_length: float  # mean tokens, `</s>` included
    target_length: float
    pairs_per_step: float  # mean of an optimizer step
    flops_per_pair: float  # mean of forward and backward
    origin: str  # of these figures: what was counted, or why they are estimates
    step_seconds: float | None = None  # of an optimizer step on this machine, by a trial

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps an epoch; None if the number of pairs is unknown."""
        return None if self.pairs is None else max(1, round(self.pairs / self.pairs_per_step))

    @property
    def step_flops(self) -> float:
        """FLOPs of one optimizer step, padding not counted."""
        return self.pairs_per_step * self.flops_per_pair

    @property
    def bytes(self) -> int:
        """Memory of weights, and of the trained ones' gradients and Adam's two averages, in float32."""
        return 4 * self.parameters + 12 * self.trained


def make_plan(recipe: Recipe, processes: int = 1, trial: bool = True) -> Plan:
    """Plan a training without starting it: no output folder is made, nothing is fetched.

    Args:
        recipe: the settings, checked by `load_recipe`.
        processes: of this launch.
        trial: time ten steps (fewer where they are slow) of a new model of these sizes on this machine.

    Raises:
        UserError: for what `vaswani train` would refuse too.
    """
    choose_precision(recipe.precision)
    reporters(recipe.report_to)
    recipe = choose_settings(recipe)
    prepared = open_prepared(recipe.prepared) if recipe.prepared is not None else None
    if prepared is not None:
        check_recipe_matches(prepared, recipe)
    with torch.device("meta"):
        model = _model(recipe, prepared and prepared.tokenizer)
    micro_batches = micro_batches_of(recipe, processes)
    epoch = _epoch(recipe, model.config, micro_batches, prepared)
    parameters = model.num_parameters(), model.num_parameters(only_trainable=True)
    plan = Plan(recipe, model.config, *parameters, processes, micro_batches, **epoch)
    if not trial:
        return plan
    seconds = trial_seconds(recipe, plan.config, max(plan.source_length, plan.target_length), processes)
    return dataclasses.replace(plan, step_seconds=seconds)


def _model(recipe: Recipe, tokenizer) -> VaswaniForConditionalGeneration:
    """Return the model that would be trained; raises what making it would."""
    if recipe.from_model is not None:
        return model_of_folder(recipe, recipe.from_model, weights=False)
    tokenizer = load_tokenizer(recipe.tokenizer) if tokenizer is None and recipe.tokenizer is not None else tokenizer
    entries = recipe.vocab_size if tokenizer is None else len(tokenizer)
    return with_attention(VaswaniForConditionalGeneration(model_config(recipe, entries)), recipe)


def _epoch(recipe: Recipe, config: VaswaniConfig, micro_batches: int, prepared: PreparedData | None) -> dict:
    """Count an epoch as a training would, or estimate it where its text is large or on the Hub; raises as a training.

    Returns the fields of a `Plan` from `pairs` to `origin`.
    """
    lengths, origin = None, "no training data is named"
    if prepared is not None:
        lengths, origin = prepared.train.lengths, f"prepared: {prepared.counts('train')}"
    elif recipe.train_source or recipe.train_target or recipe.train_data:
        files = data_sources(recipe)[0].files  # raises for bad ones, however large they are
        size = sum(file.stat().st_size for file in files)
        origin = f"{size / 1e6:,.0f} MB are too much to read" if files else "nothing is downloaded for a plan"
        if files and size <= LARGEST_READ:
            _, train, _, origin, _ = tokenized_pairs(recipe, lambda train: make_tokenizer(recipe, train))
            lengths = pair_lengths(train)
    if lengths is not None:
        sampler = TokenBatchSampler(*lengths, recipe.tokens_per_batch, micro_batches=micro_batches)
        pairs = len(lengths[0])
        pairs_per_step = pairs / (len(sampler) // micro_batches)
    else:  # as if all pairs were of the mean lengths
        lengths = [[recipe.expected_source_length], [recipe.expected_target_length]]
        known = [None] not in lengths
        lengths = lengths if known else [[EXPECTED_LENGTH]] * 2
        origin += f": {'the recipe' if known else 'this program'}'s estimates"
        pairs, pairs_per_step = recipe.expected_pairs, EXPECTED_FILL * recipe.tokens_per_batch / max(*lengths)[0]
    source, target = (float(np.mean(side)) for side in lengths)
    figures = {"pairs": pairs, "source_length": source, "target_length": target, "pairs_per_step": pairs_per_step}
    return figures | {"flops_per_pair": model_flops(config, *lengths) / len(lengths[0]), "origin": origin}


def describe_plan(plan: Plan) -> str:
    """Return a plan as text, a screenful."""
    recipe, steps = plan.recipe, plan.recipe.max_steps
    kind = f"preset {recipe.preset}" if recipe.from_model is None else f"weights of {recipe.from_model}"
    trained = "" if plan.trained == plan.parameters else f", of which {plan.trained:,} are trained"
    pairs = "an unknown number of" if plan.pairs is None else f"{plan.pairs:,}"
    source, target = (plan.pairs_per_step * length for length in (plan.source_length, plan.target_length))
    epochs, seconds = "number of epochs unknown: give --expected-pairs", "not tried"
    if plan.steps_per_epoch is not None:
        epochs = f"{plan.steps_per_epoch:,} steps an epoch, {steps / plan.steps_per_epoch:.1f} epochs in all"
    if plan.step_seconds is not None:
        limit = f", or {recipe.max_minutes:g} minutes" if recipe.max_minutes else ""
        whole = duration(plan.step_seconds * steps)
        seconds = f"{steps:,} steps x {plan.step_seconds:.3g} s by a trial here = {whole}{limit}"
    flops = f"{plan.step_flops:.2e} FLOPs a step, in all {plan.step_flops * steps:.2e}"
    rows = [
        ("model", f"{plan.parameters:,} parameters ({kind}, vocabulary {plan.config.target_vocab_size:,}){trained}"),
        ("data", plan.origin),
        ("", f"{pairs} pairs of {plan.source_length:.1f} source and {plan.target_length:.1f} target tokens"),
        ("step", f"{source:,.0f} source and {target:,.0f} target tokens on average, padding not counted"),
        ("", f"in {plan.micro_batches // plan.processes} parts on each of {plan.processes} processes"),
        ("epochs", epochs),
        ("operations", f"{flops} (2 for a product)"),
        ("memory", f"{plan.bytes / 1e9:.2f} GB for weights, gradients and Adam's averages, more for activations"),
        ("time", f"{seconds} (without validation)"),
    ]
    return "\n".join(f"{label:<12}{line}" for label, line in rows)


def model_flops(
    config: VaswaniConfig, source_lengths: ArrayLike, target_lengths: ArrayLike, training: bool = True
) -> float:
    """Count operations of the model's matrix products on these sentence pairs: a multiplication and addition are two.

    Counted as `torch.utils.flop_counter` does: projections, attention's products of queries with keys and of weights
    with values (the decoder's whole square, though its mask hides half), feed-forward sublayers, the projection to the
    vocabulary, and for the backward pass twice as much; nothing else. Of restricted self-attention (`attention_window`)
    the positions in each other's neighbourhood count, whatever a backend computes. Divided by seconds and by the
    device's peak it is the model-FLOPs utilisation.

    Args:
        config: the model.
        source_lengths: tokens of each source, `</s>` included, `(pairs,)`; or a number, which counts as one pair. Give
            lengths without padding for what the model has to do, the padded ones for what the device is given to do.
        target_lengths: the same for targets.
        training: forward and backward; `False` for forward alone.
    """
    sources, targets = (np.atleast_1d(np.asarray(x, np.float64)) for x in (source_lengths, target_lengths))
    # Projections to queries and keys, of values and of outputs.
    attention = 4.0 * config.d_model * config.num_heads * (config.d_k + config.d_v)
    half = attention / 2  # of attention over the source: queries and outputs; a source token pays for keys and values
    layer = attention + 4.0 * config.d_model * config.d_ff
    per_source = config.encoder_layers * layer + config.decoder_layers * half
    per_target = config.decoder_layers * (layer + half) + 2.0 * config.d_model * config.target_vocab_size
    per_product = 2.0 * config.num_heads * (config.d_k + config.d_v)  # a query with a key, and its weight with a value
    products = config.encoder_layers * neighbours(sources, config.attention_window).sum()
    products += config.decoder_layers * (neighbours(targets, config.attention_window).sum() + np.dot(targets, sources))
    forward = per_source * sources.sum() + per_target * targets.sum() + per_product * products
    return float(forward * (3 if training else 1))


def neighbours(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Count pairs of positions in sequences of these lengths, one in the other's neighbourhood, which includes itself.

    `window` is the size r of the neighbourhood, half of it to either side; None for all positions.
    """
    if window is None:
        return lengths * lengths
    far = np.minimum(reach(window), np.maximum(lengths - 1, 0))
    return lengths * (2 * far + 1) - far * (far + 1)  # a band of the square, without what lies beyond its corners
