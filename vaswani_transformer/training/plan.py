"""Estimates of what a training takes, before it starts: `vaswani train --dry-run`."""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from ..data.batching import TokenBatchSampler
from ..data.prepared import check_recipe_matches, open_prepared
from ..data.recipe_data import data_path, data_sources
from ..data.tokenization import load_tokenizer
from ..data.tokenized_pairs import pair_lengths
from ..durations import duration
from ..errors import UserError
from ..hardware import accelerator, choose_precision, on_cpu
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..recipes.recipe import AUTO, Recipe, model_config
from .flops import model_flops
from .initial_model import model_of_folder, trained_parameters, with_attention
from .run import make_tokenizer, reporters, tokenized_pairs

# Share of `tokens_per_batch` that a batch has on the longer side. `TokenBatchSampler` gave 0.996 for 25,000 tokens and
# 400,000 generated pairs: log-normal lengths of mean 30, sides 20% apart.
EXPECTED_FILL = 0.996
EXPECTED_LENGTH = 30.0  # tokens a sentence, where the recipe expects nothing
LARGEST_READ = 64e6  # bytes of local data that a plan reads; tokenising more takes minutes
TRIAL_STEPS, TRIAL_SECONDS = 10, 20.0  # the trial ends with whichever is reached first


@dataclass(frozen=True)
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
    exact: bool  # whether the pairs were counted
    origin: str  # how they were counted, or why not
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
    def flops(self) -> float:
        """FLOPs of the whole training."""
        return self.step_flops * self.recipe.max_steps

    @property
    def bytes(self) -> int:
        """Memory of weights, and of the trained ones' gradients and Adam's two averages, in float32."""
        return 4 * self.parameters + 12 * self.trained

    @property
    def seconds(self) -> float | None:
        """Seconds of the whole training on this machine, validation not counted; None without a trial."""
        return None if self.step_seconds is None else self.step_seconds * self.recipe.max_steps


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
    prepared = open_prepared(recipe.prepared) if recipe.prepared is not None else None
    if prepared is not None:
        check_recipe_matches(prepared, recipe)
    with torch.device("meta"):
        model = _model(recipe, prepared and prepared.tokenizer)
    per_device = recipe.tokens_per_device
    if per_device == AUTO:  # on a GPU its share of a batch, if that fits
        per_device = recipe.known_tokens_per_device if on_cpu() else math.ceil(recipe.tokens_per_batch / processes)
    micro_batches = processes * math.ceil(math.ceil(recipe.tokens_per_batch / per_device) / processes)
    if prepared is not None:
        epoch = _counted(recipe, model.config, micro_batches, *prepared.train.lengths)
        epoch["origin"] = f"prepared: {prepared.counts('train')}"
    else:
        epoch = _epoch_of_text(recipe, model.config, micro_batches)
    longest = math.ceil(max(epoch["source_length"], epoch["target_length"]))
    return Plan(
        recipe=recipe,
        config=model.config,
        parameters=model.num_parameters(),
        trained=trained_parameters(model),
        processes=processes,
        micro_batches=micro_batches,
        step_seconds=_trial_seconds(recipe, model.config, micro_batches, processes, longest) if trial else None,
        **epoch,
    )


def _model(recipe: Recipe, tokenizer) -> VaswaniForConditionalGeneration:
    """Return the model that would be trained; raises what making it would."""
    if recipe.from_model is not None:
        return model_of_folder(recipe, recipe.from_model, weights=False)
    tokenizer = load_tokenizer(recipe.tokenizer) if tokenizer is None and recipe.tokenizer is not None else tokenizer
    entries = recipe.vocab_size if tokenizer is None else len(tokenizer)
    return with_attention(VaswaniForConditionalGeneration(model_config(recipe, entries)), recipe)


def _epoch_of_text(recipe: Recipe, config: VaswaniConfig, micro_batches: int) -> dict:
    """Count an epoch by tokenising as a training would, or estimate it where the data is not here or too large."""
    origin = "no training data is named"
    if recipe.train_source or recipe.train_target or recipe.train_data:
        origin = "nothing is downloaded for a plan"
        try:
            files = data_sources(recipe)[0].files  # raises for bad ones, however large they are
            size = sum(file.stat().st_size for file in files)
            if files and size <= LARGEST_READ:
                train, _, counts = tokenized_pairs(recipe, lambda train: make_tokenizer(recipe, train))
                return {**_counted(recipe, config, micro_batches, *pair_lengths(train)), "origin": counts}
            if files:
                origin = f"{size / 1e6:,.0f} MB are too much to read: `vaswani prepare` counts them"
        except UserError as error:
            if not isinstance(error.__cause__, FileNotFoundError) or not data_path(recipe, "").exists():
                raise
            origin = f"training would stop: {error}"
    source, target = recipe.expected_source_length, recipe.expected_target_length
    known = source is not None and target is not None
    source, target = (source, target) if known else (EXPECTED_LENGTH, EXPECTED_LENGTH)
    return {
        "pairs": recipe.expected_pairs,
        "source_length": source,
        "target_length": target,
        "pairs_per_step": EXPECTED_FILL * recipe.tokens_per_batch / max(source, target),
        "flops_per_pair": model_flops(config, source, target),
        "exact": False,
        "origin": f"{origin}; what is marked ~ is {'the recipe' if known else 'this program'}'s estimate",
    }


def _counted(
    recipe: Recipe, config: VaswaniConfig, micro_batches: int, sources: np.ndarray, targets: np.ndarray
) -> dict:
    """Count an epoch of pairs with these lengths (n,) in tokens; raises what the sampler of a training would."""
    sampler = TokenBatchSampler(sources, targets, recipe.tokens_per_batch, micro_batches=micro_batches)
    return {
        "pairs": len(sources),
        "source_length": float(np.mean(sources)),
        "target_length": float(np.mean(targets)),
        "pairs_per_step": len(sources) / (len(sampler) // micro_batches),
        "flops_per_pair": model_flops(config, sources, targets) / len(sources),
        "exact": True,
    }


def _trial_seconds(recipe: Recipe, config: VaswaniConfig, micro_batches: int, processes: int, length: int) -> float:
    """Time steps of a new model, each of one random micro-batch; returns the seconds of an optimizer step.

    The first is not counted where there are more: memory is taken and kernels are chosen in it.
    """
    device = accelerator() or torch.device("cpu")
    model = VaswaniForConditionalGeneration(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    precision = choose_precision(recipe.precision)
    dtype = torch.float16 if precision["fp16"] else torch.bfloat16
    rows = max(1, recipe.tokens_per_batch // micro_batches // length)
    ids = torch.randint(3, max(4, min(config.vocab_size, config.target_vocab_size)), (rows, length), device=device)
    times = [time.perf_counter()]
    while len(times) <= TRIAL_STEPS and times[-1] - times[0] <= TRIAL_SECONDS:
        with torch.autocast(device.type, dtype, enabled=any(precision.values())):
            model(input_ids=ids, labels=ids, skip_logits=recipe.fused_loss).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter())
    seconds = np.diff(times)
    return micro_batches / processes * float(np.mean(seconds[1:] if len(seconds) > 1 else seconds))


def describe_plan(plan: Plan) -> str:
    """Return a plan as text, a screenful."""
    recipe, steps, mark = plan.recipe, plan.recipe.max_steps, "" if plan.exact else "~"
    names = [recipe.prepared] if recipe.prepared else [recipe.train_data, recipe.train_source, recipe.train_target]
    pairs = "an unknown number of" if plan.pairs is None else f"{mark}{plan.pairs:,}"
    tokens = [f"{mark}{plan.pairs_per_step * length:,.0f}" for length in (plan.source_length, plan.target_length)]
    lengths = [f"{mark}{length:.1f}" for length in (plan.source_length, plan.target_length)]
    epochs = "number of epochs unknown: give --expected-pairs"
    if plan.steps_per_epoch is not None:
        number = steps / plan.steps_per_epoch
        epochs = f"{mark}{plan.steps_per_epoch:,} steps an epoch, {mark}{number:.1f} epochs in all"
    kind = f"preset {recipe.preset}" if recipe.from_model is None else f"weights of {recipe.from_model}"
    trained = "" if plan.trained == plan.parameters else f", of which {plan.trained:,} are trained"
    seconds = "not tried"
    if plan.seconds is not None:
        limit = f", or {recipe.max_minutes:g} minutes" if recipe.max_minutes else ""
        seconds = f"{steps:,} steps x {plan.step_seconds:.3g} s by a trial here = {duration(plan.seconds)}{limit}"
    rows = [
        ("model", f"{plan.parameters:,} parameters ({kind}, vocabulary {plan.config.target_vocab_size:,}){trained}"),
        ("data", f"{' '.join(filter(None, names)) or 'none named'} ({plan.origin})"),
        ("", f"{pairs} pairs of {lengths[0]} source and {lengths[1]} target tokens"),
        ("step", f"{tokens[0]} source and {tokens[1]} target tokens on average, padding not counted"),
        ("", f"in {plan.micro_batches // plan.processes} parts on each of {plan.processes} processes"),
        ("epochs", epochs),
        ("operations", f"{mark}{plan.step_flops:.2e} FLOPs a step, in all {mark}{plan.flops:.2e} (2 for a product)"),
        ("memory", f"{plan.bytes / 1e9:.2f} GB for weights, gradients and Adam's averages, more for activations"),
        ("time", f"{seconds} (without validation)"),
    ]
    return "\n".join(f"{label:<12}{line}" for label, line in rows)
