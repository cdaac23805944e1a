"""What a training will take, estimated before it starts: `vaswani train --dry-run`."""

import math
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..data.batching import TokenBatchSampler
from ..data.parallel_text import find_shards
from ..data.prepared import check_recipe_matches, open_prepared
from ..data.recipe_data import data_path, data_sources, has_data_dir, load_training_pairs
from ..data.tokenization import load_tokenizer, train_tokenizer
from ..data.tokenized_pairs import pair_lengths, tokenize_pairs
from ..durations import duration
from ..errors import UserError
from ..files import is_local
from ..hardware import (
    DEFAULT_UTILISATION,
    DEVICES,
    HERE,
    UTILISATION_SOURCE,
    choose_precision,
    measure_device,
    on_cpu,
    parse_device,
)
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..recipes.recipe import AUTO, Recipe
from .checkpoints import steps_to_average
from .flops import flops_per_token, model_flops
from .initial_model import model_of_folder, new_model, trained_parameters
from .run import make_tokenizer, reporters
from .run_folder import BYTES_OF_A_MODEL, bytes_of_a_checkpoint, checkpoints_at_most

# Share of `tokens_per_batch` that a batch has on the longer side. `TokenBatchSampler` gave 0.996 for 25,000 tokens and
# 400,000 generated pairs: log-normal lengths of mean 30, sides 20% apart.
EXPECTED_FILL = 0.996
EXPECTED_LENGTH = 30.0  # tokens a sentence, where the recipe expects nothing
BLOCK = 2**20  # pairs whose FLOPs are counted together
LARGEST_READ = 64e6  # bytes of local data that a plan reads; tokenising more takes minutes
FAR_BACK = 0.25  # share of a run; earlier weights do not help an average (the paper's: the last 6% of base)
SHORT_STEP = 0.05  # seconds; shorter steps take longer than their FLOPs

PAPER_GPU, PAPER_GPUS, PAPER_TOKENS = "p100", 8, 25_000
# The share of eight such GPUs' peak that the base model's 0.4 s a step amount to, by our count of its FLOPs.
PAPER_UTILISATION = 0.308
# Preset: steps, seconds a step and the training time they are rounded to (Section 5.2), Table 2's cost in FLOPs.
PAPER_TRAININGS = {
    "base": (100_000, 0.4, 12 * 3600, "12 hours", "3.3e18"),
    "big": (300_000, 1.0, 3.5 * 86400, "3.5 days", "2.3e19"),
}


@dataclass(frozen=True)
class EpochFacts:
    """An epoch in numbers: counted where the data is here, expected otherwise."""

    pairs: int | None  # None if unknown
    source_length: float  # mean tokens, `</s>` included
    target_length: float
    pairs_per_step: float  # mean of an optimizer step
    flops_per_pair: float  # mean of forward and backward
    exact: bool  # whether it was counted
    origin: str  # how, or why not

    @property
    def steps(self) -> int | None:
        """Optimizer steps an epoch; None if the number of pairs is unknown."""
        return None if self.pairs is None else max(1, round(self.pairs / self.pairs_per_step))


@dataclass(frozen=True)
class Plan:
    """A recipe's training in numbers: tokens, FLOPs (a multiplication and an addition counting two), seconds, bytes."""

    recipe: Recipe
    config: VaswaniConfig
    parameters: dict[str, int]  # by part, tied ones once
    trained: int  # of these
    processes: int  # that share a step
    micro_batches: int  # parts of a step, over all processes and accumulation
    epoch: EpochFacts
    device: str | None  # a name of `DEVICES` or "here"; None if none was named, as the next two
    precision: str | None  # that training takes on it
    peak: float | None  # FLOP/s of one device
    peak_source: str
    utilisation: float  # share of the peak that the estimate assumes

    @property
    def step_flops(self) -> float:
        """FLOPs of one optimizer step, padding not counted."""
        return self.epoch.pairs_per_step * self.epoch.flops_per_pair

    @property
    def flops(self) -> float:
        """FLOPs of the whole training."""
        return self.step_flops * self.recipe.max_steps

    @property
    def paper_model(self) -> str | None:
        """`"base"` or `"big"` if the paper gives the step time of this model and batch."""
        sizes = ("d_model", "d_ff", "num_heads", "d_k", "d_v", "encoder_layers", "decoder_layers")
        for name in PAPER_TRAININGS if self.recipe.tokens_per_batch == PAPER_TOKENS else ():
            preset = VaswaniConfig.from_preset(name)
            if all(getattr(preset, size) == getattr(self.config, size) for size in sizes):
                return name
        return None

    @property
    def paper_seconds(self) -> float | None:
        """Seconds that the paper's GPUs take for one step, if the plan is for them and the paper gives it."""
        return PAPER_TRAININGS[self.paper_model][1] if self.device == PAPER_GPU and self.paper_model else None

    @property
    def seconds(self) -> float | None:
        """Of the whole training on the named device: by the paper's step time if it gives one, else FLOPs over peak."""
        if self.device is None:
            return None
        if self.paper_seconds is not None:
            return self.recipe.max_steps * self.paper_seconds * PAPER_GPUS / self.processes
        return self.flops / (self.peak * self.processes * self.utilisation)


def make_plan(recipe: Recipe, device: str | None = None, processes: int = 1, utilisation: float | None = None) -> Plan:
    """Plan a training without starting it: no output folder is made, nothing is fetched.

    Args:
        recipe: the settings, checked by `load_recipe`.
        device: estimate the time on it; a name for `parse_device`; `"here"` measures this machine for a second.
        processes: of this launch; a number of devices in `device` takes its place.
        utilisation: share of the device's peak that training is expected to reach; if none `PAPER_UTILISATION` on the
            paper's GPU, else `DEFAULT_UTILISATION`.

    Raises:
        UserError: for what `vaswani train` would refuse too, and for an unknown device or a utilisation out of range.
    """
    name, count = parse_device(device) if device is not None else (None, None)
    if utilisation is None:
        utilisation = PAPER_UTILISATION if name == PAPER_GPU else DEFAULT_UTILISATION
    if not 0 < utilisation <= 1:
        raise UserError(f"--utilisation is {utilisation}: it must be above 0 and at most 1")
    processes = count or processes
    precision, peak, peak_source = None, None, ""
    if name is not None:
        wanted, kind = recipe.precision, DEVICES.get(name)
        if name == HERE:  # this machine's rules
            wanted = next((name for name, chosen in choose_precision(wanted).items() if chosen), "fp32")
            kind = measure_device(wanted)
        precision, peak = kind.peak(wanted, name.upper())
        peak_source = kind.source
    reporters(recipe.report_to)
    prepared = open_prepared(recipe.prepared) if recipe.prepared is not None else None
    if prepared is not None:
        check_recipe_matches(prepared, recipe)
    model = _empty_model(recipe, prepared and prepared.tokenizer, on_this_machine=name in (None, HERE))
    per_device = recipe.tokens_per_device
    if per_device == AUTO:  # on another machine, where a device has memory for its share
        per_device = recipe.known_tokens_per_device if name in (None, HERE) and on_cpu() else recipe.tokens_per_batch
    micro_batches = processes * math.ceil(math.ceil(recipe.tokens_per_batch / per_device) / processes)
    if prepared is not None:
        counts = f"prepared: {prepared.counts('train')}"
        epoch = _counted_epoch(recipe, model.config, *prepared.train.lengths, micro_batches, counts)
    else:
        epoch = _epoch_of_text(recipe, model.config, micro_batches)
    return Plan(
        recipe=recipe,
        config=model.config,
        parameters=_parameters(model),
        trained=trained_parameters(model),
        processes=processes,
        micro_batches=micro_batches,
        epoch=epoch,
        device=name,
        precision=precision,
        peak=peak,
        peak_source=peak_source,
        utilisation=utilisation,
    )


@dataclass(frozen=True)
class _StandInTokenizer:
    """In place of a tokenizer that is yet to be trained: its size, and the ids of special tokens in ours."""

    entries: int
    bos_token_id: int = 0
    pad_token_id: int = 1
    eos_token_id: int = 2

    def __len__(self) -> int:
        return self.entries

    def get_vocab(self) -> dict[str, int]:
        return {}


def _empty_model(recipe: Recipe, tokenizer, on_this_machine: bool) -> VaswaniForConditionalGeneration:
    """The model that would be trained, on the meta device; raises what making it would.

    A plan for another machine (`on_this_machine=False`) does not have to run on this one.
    """
    if on_this_machine:
        choose_precision(recipe.precision)
    else:
        recipe = replace(recipe, attention="auto")
    if recipe.from_model is not None:
        with torch.device("meta"):
            return model_of_folder(recipe, recipe.from_model, weights=False)
    if tokenizer is None and recipe.tokenizer is not None:
        tokenizer = load_tokenizer(recipe.tokenizer)
    elif tokenizer is None:
        train_tokenizer(["any"], kind=recipe.tokenizer_kind, vocab_size=recipe.vocab_size)  # checks the settings
        tokenizer = _StandInTokenizer(recipe.vocab_size)
    with torch.device("meta"):
        return new_model(recipe, tokenizer)


def _parameters(model: VaswaniForConditionalGeneration) -> dict[str, int]:
    """Number of parameters by part; a tied matrix counts once, where it comes first."""
    labels = {"shared": "shared embedding", "encoder": "encoder", "decoder": "decoder"}
    counts = Counter()
    for name, parameter in model.named_parameters():  # model.encoder.layers.0..., or lm_head.weight
        counts[labels.get(name.split(".")[1], "output projection")] += parameter.numel()
    return dict(counts)


def _local_files(recipe: Recipe) -> tuple[list[Path], list[str]]:
    """The training data's files that are here, and its names that match none.

    Raises:
        UserError: from `load_training_pairs`, for a wrong combination of names, or a data_dir that is not there.
    """
    names = [name for name in (recipe.train_source, recipe.train_target, recipe.train_data) if name is not None]
    wrong = names and len(names) != (2 if recipe.train_data is None else 1)
    if wrong or not has_data_dir(recipe):
        load_training_pairs(recipe)  # raises before it reads anything
    files, missing = [], []
    for name in names:
        try:
            paths = find_shards(data_path(recipe, name))
        except UserError:  # of a pattern that no file matches
            paths = []
        folders = [is_local(path) and path.is_dir() for path in paths]
        inside = [path.rglob("*") if is_folder else [path] for path, is_folder in zip(paths, folders, strict=True)]
        here = [file for files in inside for file in files if file.is_file()]
        files += here
        missing += [] if here else [name]
    return files, missing


def _epoch_of_text(recipe: Recipe, config: VaswaniConfig, micro_batches: int) -> EpochFacts:
    """An epoch, counted by tokenising as a training would, or expected where the data is not here or too large."""
    files, missing = _local_files(recipe)
    if files and not missing:
        data_sources(recipe)  # raises for bad ones, however large they are
        size = sum(file.stat().st_size for file in files)
        if size <= LARGEST_READ:
            train, _ = load_training_pairs(recipe)
            tokenizer = make_tokenizer(recipe, train)
            limits = {"max_length": recipe.max_length, "max_length_ratio": recipe.max_length_ratio}
            pairs, counts = tokenize_pairs(train, tokenizer, **limits)
            return _counted_epoch(recipe, config, *pair_lengths(pairs), micro_batches, str(counts))
        reason = f"{size / 1e6:,.0f} MB are too much to read for a plan: `vaswani prepare` counts them"
    elif missing and (recipe.train_data is None or Path(recipe.train_data).suffix):
        reason = f"{' and '.join(missing)} not found: training would stop at that"
    else:
        reason = "nothing is downloaded for a plan" if missing else "no training data is named"
    source, target = recipe.expected_source_length, recipe.expected_target_length
    known = source is not None and target is not None
    source, target = (source, target) if known else (EXPECTED_LENGTH, EXPECTED_LENGTH)
    return EpochFacts(
        pairs=recipe.expected_pairs,
        source_length=source,
        target_length=target,
        pairs_per_step=EXPECTED_FILL * recipe.tokens_per_batch / max(source, target),
        flops_per_pair=model_flops(config, source, target),
        exact=False,
        origin=f"{reason}; what is marked ~ is {'the recipe' if known else 'this program'}'s estimate",
    )


def _counted_epoch(
    recipe: Recipe, config: VaswaniConfig, sources: np.ndarray, targets: np.ndarray, micro_batches: int, origin: str
) -> EpochFacts:
    """An epoch of pairs with these lengths (n,) in tokens; raises what the sampler of a training would."""
    sampler = TokenBatchSampler(sources, targets, recipe.tokens_per_batch, micro_batches=micro_batches)
    blocks = (slice(start, start + BLOCK) for start in range(0, len(sources), BLOCK))
    flops = sum(model_flops(config, sources[block], targets[block]) for block in blocks)
    return EpochFacts(
        pairs=len(sources),
        source_length=float(np.mean(sources)),
        target_length=float(np.mean(targets)),
        pairs_per_step=len(sources) / (len(sampler) // micro_batches),
        flops_per_pair=flops / len(sources),
        exact=True,
        origin=origin,
    )


def describe_plan(plan: Plan) -> str:
    """A plan as text, a screenful, with the arithmetic."""
    mark = "" if plan.epoch.exact else "~"
    rows = {
        "model": [
            f"{sum(plan.parameters.values()):,} parameters ({_kind(plan)}, vocabulary"
            f" {plan.config.target_vocab_size:,})",
            ", ".join(f"{part} {count:,}" for part, count in plan.parameters.items()),
            *_weights_lines(plan),
        ],
        **_token_lines(plan, mark),
        "checkpoints": _checkpoint_lines(plan),
        "operations": _operation_lines(plan, mark),
        "the paper": _paper_lines(plan),
        "time": _time_lines(plan),
    }
    return "\n".join(
        f"{'' if index else label:<13}{line}" for label, lines in rows.items() for index, line in enumerate(lines)
    )


def _kind(plan: Plan) -> str:
    return f"preset {plan.recipe.preset}" if plan.recipe.from_model is None else "sizes of the model to start from"


def _weights_lines(plan: Plan) -> list[str]:
    """Where the weights come from, and how many are trained; nothing for new ones."""
    recipe = plan.recipe
    if recipe.from_model is None:
        return []
    how = (
        "all of them are" if recipe.lora_rank is None else f"adapters of rank {recipe.lora_rank}: {plan.trained:,} are"
    )
    return [f"weights: of {recipe.from_model}; {how} trained"]


def _token_lines(plan: Plan, mark: str) -> dict[str, list[str]]:
    """The tokens of the data, of a step and of all epochs."""
    recipe, epoch, parts = plan.recipe, plan.epoch, plan.micro_batches
    names = [recipe.train_data, recipe.data_config, recipe.train_source, recipe.train_target]
    names = names if recipe.prepared is None else [recipe.prepared]
    pairs = "an unknown number of" if epoch.pairs is None else f"{mark}{epoch.pairs:,}"
    data = [
        " ".join(filter(None, names)) or "none named",
        epoch.origin,
        f"{pairs} pairs of {mark}{epoch.source_length:.1f} source and {mark}{epoch.target_length:.1f} target tokens",
    ]
    accumulation, part = parts // plan.processes, recipe.tokens_per_batch / parts
    processes = f"{plan.processes} processes" if plan.processes > 1 else "1 process"
    times = f"{accumulation} parts each, accumulated" if accumulation > 1 else "1 part each, no accumulation"
    source, target = (epoch.pairs_per_step * length for length in (epoch.source_length, epoch.target_length))
    step = [
        f"at most {recipe.tokens_per_batch:,} source and {recipe.tokens_per_batch:,} target tokens",
        f"{mark}{source:,.0f} source and {mark}{target:,.0f} target tokens on average, padding not counted",
        f"split over {processes}: {times}, about {part:,.0f} + {part:,.0f} tokens a part",
    ]
    needed, fitting = 4 * parts if parts > 1 else 1, recipe.tokens_per_batch // recipe.max_length
    if not epoch.exact and fitting < needed:
        step.append(
            f"may be refused: {parts} parts need {needed} pairs in every batch, which holds {fitting} of"
            f" {recipe.max_length} tokens each"
        )
    source, target = (f"{mark}{_billions(recipe.max_steps * tokens)}" for tokens in (source, target))
    limit = f", or stops after {recipe.max_minutes:g} minutes" if recipe.max_minutes else ""
    epochs = [f"{recipe.max_steps:,} steps in all see {source} source and {target} target tokens{limit}"]
    if epoch.steps is None:
        epochs.append("number of epochs unknown: give --expected-pairs")
    else:
        number = recipe.max_steps / epoch.steps
        epochs.insert(0, f"{mark}{epoch.steps:,} steps an epoch, {mark}{number:.1f} epochs in all")
    return {"data": data, "step": step, "epochs": epochs}


def _billions(number: float) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.2f} million"


def _checkpoint_lines(plan: Plan) -> list[str]:
    recipe, parameters = plan.recipe, sum(plan.parameters.values())
    size, kept = bytes_of_a_checkpoint(parameters, plan.trained) / 1e9, checkpoints_at_most(recipe)
    needed = kept * size + BYTES_OF_A_MODEL * parameters / 1e9
    steps, end = {*range(recipe.evaluate_every, recipe.max_steps, recipe.evaluate_every), recipe.max_steps}, ""
    if recipe.average_every:
        steps |= set(steps_to_average(recipe.average_checkpoints, recipe.average_every, recipe.max_steps))
        end = f", near the end every {recipe.average_every:,}"
    written = f"every {recipe.evaluate_every:,} steps{end}: {len(steps):,} in all"
    if recipe.checkpoint_minutes:
        written += f"; every {recipe.checkpoint_minutes:g} minutes"
        written += "" if plan.seconds is None else f": {int(plan.seconds / 60 / recipe.checkpoint_minutes):,} in all"
    output = Path(recipe.output).absolute()
    folder = next(path for path in (output, *output.parents) if path.exists())
    free = shutil.disk_usage(folder).free / 1e9
    room = "enough" if free >= needed else f"TOO LITTLE at {folder}"
    return [
        f"{written}; at most {kept} are kept at a time",
        *_average_lines(plan),
        f"disk needed: {kept} x {size:.2f} GB + the model = {needed:.1f} GB; free: {free:.1f} GB, {room}",
    ]


def _average_lines(plan: Plan) -> list[str]:
    """Which steps' checkpoints will be averaged, and a warning of an average that is not of the end of training."""
    recipe, end, every = plan.recipe, plan.recipe.max_steps, plan.recipe.save_every
    if recipe.average_checkpoints < 2:
        return []
    if recipe.checkpoint_minutes:
        if plan.seconds is None:
            return ["averaged: those of the clock, at steps that depend on the machine's speed (--device NAME)"]
        every = max(1, round(60 * recipe.checkpoint_minutes * end / plan.seconds))
    steps = steps_to_average(recipe.average_checkpoints, every, end)
    share, about = (end - steps[0]) / end, "about " if recipe.checkpoint_minutes else ""
    shown = [f"{step:,}" for step in steps]
    shown = shown if len(shown) <= 5 else [*shown[:2], "...", *shown[-2:]]
    lines = [f"averaged: {len(steps)}, of {about}steps {', '.join(shown)}: the last {share:.1%} of {end:,} steps"]
    if len(steps) < recipe.average_checkpoints or share > FAR_BACK:
        steps_apart = "checkpoint_minutes 0 and an average_every" if recipe.checkpoint_minutes else "an average_every"
        few = f"FEWER than {recipe.average_checkpoints}" if len(steps) < recipe.average_checkpoints else "TOO FAR BACK"
        lines.append(f"{few}, an average wants weights of the end: set {steps_apart} of fewer steps")
    return lines


def _e(number: float) -> str:
    return f"{number:.2e}".replace("e+", "e")


def _operation_lines(plan: Plan, mark: str) -> list[str]:
    epoch, step = plan.epoch, _e(plan.step_flops)
    source, target = flops_per_token(plan.config)
    linear = 3 * (source * epoch.source_length + target * epoch.target_length)
    return [
        "a multiplication and an addition count as two, padding is not counted; backward is twice forward",
        f"a pair: 3 x ({epoch.source_length:.1f} x {_e(source)} + {epoch.target_length:.1f} x {_e(target)})"
        f" + attention {_e(epoch.flops_per_pair - linear)} = {_e(epoch.flops_per_pair)}",
        f"a step: {mark}{epoch.pairs_per_step:,.1f} pairs x {_e(epoch.flops_per_pair)} = {step}",
        f"in all: {plan.recipe.max_steps:,} steps x {step} = {mark}{_e(plan.flops)} FLOPs",
    ]


def _paper_lines(plan: Plan) -> list[str]:
    """The paper's estimate by its own method, and its GPUs' utilisation; nothing for another model or batch."""
    if plan.paper_model is None:
        return []
    paper_steps, step_seconds, rounded, words, cost = PAPER_TRAININGS[plan.paper_model]
    steps, peak = plan.recipe.max_steps, DEVICES[PAPER_GPU].fp32 * 1e12
    seconds = steps * step_seconds
    method = f"{PAPER_GPUS} GPUs x {peak / 1e12} TFLOPS"
    lines = [
        f"Section 5.2: {step_seconds} s a step on {PAPER_GPUS} P100: {steps:,} steps x {step_seconds} s ="
        f" {seconds:,.0f} s = {duration(seconds)}",
        f"its method (footnote 5): {seconds:,.0f} s x {method} sustained = {_e(seconds * PAPER_GPUS * peak)} FLOPs",
    ]
    if steps == paper_steps:
        lines.append(
            f"rounded as in the paper: {words} = {rounded:,.0f} s x {method} = {_e(rounded * PAPER_GPUS * peak)}"
            f" (Table 2: {cost})"
        )
    rate = plan.step_flops / step_seconds / PAPER_GPUS
    lines.append(
        f"counted as above, its GPUs reached {_e(plan.step_flops)} / {step_seconds} s / {PAPER_GPUS} ="
        f" {rate / 1e12:.2f} TFLOPS each: {rate / peak:.0%} of {peak / 1e12}"
    )
    return lines


def _time_lines(plan: Plan) -> list[str]:
    if plan.device is None:
        known = [*DEVICES, HERE]
        half = len(known) // 2
        return [
            "--device NAME estimates the time on it; several: --device 'a100 x8'",
            f"known: {', '.join(known[:half])},",
            f"{', '.join(known[half:])} (this machine, measured)",
        ]
    name, count, steps = plan.device, plan.processes, f"{plan.recipe.max_steps:,} steps"
    if plan.paper_seconds is not None:
        scaled = "" if count == PAPER_GPUS else f" x {PAPER_GPUS} / {count} GPUs"
        product = f"{steps} x {plan.paper_seconds} s{scaled}"
        return [f"{name} x{count}, by the paper's step time: {product} = {duration(plan.seconds)}"]
    step = plan.seconds / plan.recipe.max_steps
    is_papers = name == PAPER_GPU and plan.utilisation == PAPER_UTILISATION
    what = "what the paper's base model reached" if is_papers else "an assumption"
    lines = [
        f"{name} x{count}, {plan.precision}: {_e(plan.step_flops)} / ({count} x {plan.peak / 1e12:.4g} TFLOPS"
        f" x {plan.utilisation:.0%}) = {step:.3g} s a step",
        f"{steps} x {step:.3g} s = {duration(plan.seconds)}, without validation",
        f"peak: {plan.peak_source}; {plan.utilisation:.0%} of it is {what} (--utilisation changes it):",
        *UTILISATION_SOURCE,
    ]
    if step < SHORT_STEP and name != HERE:
        lines.append("such short steps will take longer: launching kernels and exchanging gradients is not counted")
    if plan.precision == "fp32" and plan.recipe.precision == "auto" and name != HERE and DEVICES[name].fp16:
        lines.append(f"--precision fp16 uses its {DEVICES[name].fp16:.4g} TFLOPS; it has no bf16")
    return lines
