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
from ..data.recipe_data import data_path, data_sources, load_training_pairs
from ..data.text_files import home_path
from ..data.tokenization import load_tokenizer, train_tokenizer
from ..data.tokenized_pairs import tokenize_pairs
from ..durations import duration
from ..errors import UserError
from ..hardware import (
    DEFAULT_UTILISATION,
    DEVICES,
    HERE,
    UTILISATION_SOURCE,
    choose_precision,
    measure_device,
    parse_device,
)
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..recipes.recipe import Recipe
from .flops import flops_per_token, model_flops
from .run import make_tokenizer, new_model, reporters
from .run_folder import checkpoints_at_most

# Share of `tokens_per_batch` that is tokens on the longer side, the rest being padding. `TokenBatchSampler` gave 0.92
# to 0.95 for 25,000 tokens and 400,000 generated pairs: log-normal lengths of mean 30, sides 15% to 25% apart.
EXPECTED_FILL = 0.93
EXPECTED_LENGTH = 30.0  # tokens a sentence, where the recipe expects nothing
BLOCK = 2**20  # pairs whose FLOPs are counted together
LARGEST_READ = 64e6  # bytes of local data that a plan reads; tokenising more takes minutes

PAPER_GPU, PAPER_GPUS, PAPER_TOKENS = "p100", 8, 25_000
PAPER_STEPS = {"base": 100_000, "big": 300_000}
# The share of eight such GPUs' peak that the base model's 0.4 s a step amount to, by our count of its FLOPs.
PAPER_UTILISATION = 0.288
# Preset: seconds a step and the training time it is rounded to (Section 5.2), Table 2's cost in FLOPs.
PAPER_TIMES = {"base": (0.4, 12 * 3600, "12 hours", "3.3e18"), "big": (1.0, 3.5 * 86400, "3.5 days", "2.3e19")}


@dataclass(frozen=True)
class EpochFacts:
    """An epoch in numbers: counted where the data is here, expected otherwise.

    Args:
        pairs: sentence pairs; None if unknown.
        source_length: mean tokens of a source, `</s>` included.
        target_length: the same for targets.
        pairs_per_step: of one optimizer step, on average.
        flops_per_pair: of the model, forward and backward, on average.
        steps: optimizer steps an epoch; None if `pairs` is.
        exact: whether it was counted.
        origin: how, or why not.
    """

    pairs: int | None
    source_length: float
    target_length: float
    pairs_per_step: float
    flops_per_pair: float
    steps: int | None
    exact: bool
    origin: str


@dataclass(frozen=True)
class Plan:
    """A recipe's training in numbers: tokens, FLOPs (a multiplication and an addition counting two), seconds, bytes.

    Args:
        recipe: the settings.
        config: the model.
        parameters: by part, tied ones once.
        processes: that share a step.
        micro_batches: parts of a step, over all processes and accumulation.
        epoch: what an epoch holds.
        step_flops: of one optimizer step, padding not counted.
        device: name, and how many; None if none was named.
        precision: that training takes on the device.
        peak: FLOP/s of one device.
        utilisation: share of the peak that the estimate assumes.
        peak_source: where the peak is from.
    """

    recipe: Recipe
    config: VaswaniConfig
    parameters: dict[str, int]
    processes: int
    micro_batches: int
    epoch: EpochFacts
    step_flops: float
    device: tuple[str, int] | None
    precision: str | None
    peak: float | None
    utilisation: float
    peak_source: str

    @property
    def flops(self) -> float:
        """Of the whole training."""
        return self.step_flops * self.recipe.max_steps

    @property
    def paper_model(self) -> str | None:
        """`"base"` or `"big"` if the paper gives the step time of this model and batch."""
        if self.recipe.tokens_per_batch != PAPER_TOKENS:
            return None
        sizes = ("d_model", "d_ff", "num_heads", "d_k", "d_v", "encoder_layers", "decoder_layers")
        for name in PAPER_TIMES:
            preset = VaswaniConfig.from_preset(name)
            if all(getattr(preset, size) == getattr(self.config, size) for size in sizes):
                return name
        return None

    @property
    def seconds(self) -> float | None:
        """Of the whole training on the named device: by the paper's step time if it gives one, else FLOPs over peak."""
        if self.device is None:
            return None
        name, count = self.device
        if name == PAPER_GPU and self.paper_model:
            return self.recipe.max_steps * PAPER_TIMES[self.paper_model][0] * PAPER_GPUS / count
        return self.flops / (self.peak * count * self.utilisation)


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
    named, count = parse_device(device) if device is not None else (None, None)
    if utilisation is None:
        utilisation = PAPER_UTILISATION if named == PAPER_GPU else DEFAULT_UTILISATION
    if not 0 < utilisation <= 1:
        raise UserError(f"--utilisation is {utilisation}: it must be above 0 and at most 1")
    processes = count or processes
    precision, peak, peak_source = None, None, ""
    if named is not None:
        wanted, kind = recipe.precision, DEVICES.get(named)
        if named == HERE:  # this machine's rules
            wanted = next((name for name, chosen in choose_precision(wanted).items() if chosen), "fp32")
            kind = measure_device(wanted)
        precision, peak = kind.peak(wanted, named.upper())
        peak_source = kind.source
    reporters(recipe.report_to)
    prepared = open_prepared(recipe.prepared) if recipe.prepared is not None else None
    if prepared is not None:
        check_recipe_matches(prepared, recipe)
    model = _empty_model(recipe, prepared and prepared.tokenizer, on_this_machine=named in (None, HERE))
    config = model.config
    accumulation = math.ceil(math.ceil(recipe.tokens_per_batch / recipe.tokens_per_device) / processes)
    if prepared is not None:
        counts = f"prepared: {prepared.counts('train')}"
        epoch = _facts(recipe, config, *prepared.train.lengths, accumulation * processes, counts)
    else:
        epoch = _count(recipe, config, accumulation * processes) or _expect(recipe, config)
    return Plan(
        recipe=recipe,
        config=config,
        parameters=_parameters(model),
        processes=processes,
        micro_batches=accumulation * processes,
        epoch=epoch,
        step_flops=epoch.pairs_per_step * epoch.flops_per_pair,
        device=(named, processes) if named else None,
        precision=precision,
        peak=peak,
        utilisation=utilisation,
        peak_source=peak_source,
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


def _empty_model(recipe: Recipe, tokenizer, on_this_machine: bool) -> VaswaniForConditionalGeneration:
    """The model that would be trained, on the meta device; raises what making it would.

    A plan for another machine (`on_this_machine=False`) does not have to run on this one.
    """
    if on_this_machine:
        choose_precision(recipe.precision)
    else:
        recipe = replace(recipe, attention="auto")
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
    sides, data = (recipe.train_source, recipe.train_target), recipe.train_data
    names = [name for name in (*sides, data) if name is not None]
    if names and ((data is None) != all(sides) or any(sides) != all(sides)):
        load_training_pairs(recipe)  # raises before it reads anything
    if recipe.data_dir is not None and not home_path(recipe.data_dir).is_dir():
        load_training_pairs(recipe)
    files, missing = [], []
    for name in names:
        try:
            found = find_shards(data_path(recipe, name))
        except UserError:  # of a pattern that no file matches
            found = []
        found = [file for path in found for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
        files += found
        missing += [] if found else [name]
    return files, missing


def _count(recipe: Recipe, config: VaswaniConfig, micro_batches: int) -> EpochFacts | None:
    """Read and tokenise the training data as a training would; None where it is not here, or too large."""
    files, missing = _local_files(recipe)
    if not files or missing:
        return None
    data_sources(recipe)  # raises for bad ones, however large they are
    if sum(file.stat().st_size for file in files) > LARGEST_READ:
        return None
    train, _ = load_training_pairs(recipe)
    tokenizer = make_tokenizer(recipe, train)
    pairs, counts = tokenize_pairs(
        train, tokenizer, max_length=recipe.max_length, max_length_ratio=recipe.max_length_ratio
    )
    lengths = pairs.with_format("numpy")
    return _facts(recipe, config, lengths["source_length"][:], lengths["target_length"][:], micro_batches, str(counts))


def _facts(recipe, config, sources: np.ndarray, targets: np.ndarray, micro_batches: int, origin: str) -> EpochFacts:
    """An epoch of pairs with these lengths (n,) in tokens; raises what the sampler of a training would."""
    sampler = TokenBatchSampler(sources, targets, recipe.tokens_per_batch, micro_batches=micro_batches)
    steps = len(sampler) // micro_batches
    blocks = (slice(start, start + BLOCK) for start in range(0, len(sources), BLOCK))
    flops = sum(model_flops(config, sources[block], targets[block]) for block in blocks)
    return EpochFacts(
        pairs=len(sources),
        source_length=float(np.mean(sources)),
        target_length=float(np.mean(targets)),
        pairs_per_step=len(sources) / steps,
        flops_per_pair=flops / len(sources),
        steps=steps,
        exact=True,
        origin=origin,
    )


def _expect(recipe: Recipe, config: VaswaniConfig) -> EpochFacts:
    """An epoch as the recipe expects it."""
    source, target = recipe.expected_source_length, recipe.expected_target_length
    known = source is not None and target is not None
    source, target = (source, target) if known else (EXPECTED_LENGTH, EXPECTED_LENGTH)
    pairs_per_step = EXPECTED_FILL * recipe.tokens_per_batch / max(source, target)
    steps = None if recipe.expected_pairs is None else max(1, round(recipe.expected_pairs / pairs_per_step))
    files, missing = _local_files(recipe)
    if missing and (recipe.train_data is None or Path(recipe.train_data).suffix):
        reason = f"{' and '.join(missing)} not found: training would stop at that"
    elif files and not missing:
        size = sum(file.stat().st_size for file in files) / 1e6
        reason = f"{size:,.0f} MB are too much to read for a plan: `vaswani prepare` counts them"
    else:
        reason = "nothing is downloaded for a plan" if missing else "no training data is named"
    return EpochFacts(
        pairs=recipe.expected_pairs,
        source_length=source,
        target_length=target,
        pairs_per_step=pairs_per_step,
        flops_per_pair=model_flops(config, source, target),
        steps=steps,
        exact=False,
        origin=f"{reason}; what is marked ~ is {'the recipe' if known else 'this program'}'s estimate",
    )


CHECKPOINT_BYTES = 12  # a parameter: the weight and Adam's two averages, in float32
SHORT_STEP = 0.05  # seconds; shorter steps take longer than their FLOPs


def describe_plan(plan: Plan) -> str:
    """A plan as text, a screenful, with the arithmetic."""
    rows = [
        ("model", _model_lines(plan)),
        ("data", _data_lines(plan)),
        ("step", _step_lines(plan)),
        ("epochs", _epoch_lines(plan)),
        ("checkpoints", _checkpoint_lines(plan)),
        ("operations", _operation_lines(plan)),
        ("the paper", _paper_lines(plan)),
        ("time", _time_lines(plan)),
    ]
    return "\n".join(
        f"{label if index == 0 else '':<13}{line}" for label, lines in rows for index, line in enumerate(lines)
    )


def _model_lines(plan: Plan) -> list[str]:
    parts = ", ".join(f"{part} {count:,}" for part, count in plan.parameters.items())
    name = f"preset {plan.recipe.preset}, vocabulary {plan.config.vocab_size:,}"
    return [f"{sum(plan.parameters.values()):,} parameters ({name})", parts]


def _data_lines(plan: Plan) -> list[str]:
    recipe, epoch = plan.recipe, plan.epoch
    names = (recipe.train_data, recipe.data_config, recipe.train_source, recipe.train_target)
    names = [name for name in names if name] if recipe.prepared is None else [recipe.prepared]
    mark = "" if epoch.exact else "~"
    pairs = "an unknown number of" if epoch.pairs is None else f"{mark}{epoch.pairs:,}"
    return [
        " ".join(names) or "none named",
        epoch.origin,
        f"{pairs} pairs of {mark}{epoch.source_length:.1f} source and {mark}{epoch.target_length:.1f} target tokens",
    ]


def _step_lines(plan: Plan) -> list[str]:
    recipe, epoch, mark = plan.recipe, plan.epoch, "" if plan.epoch.exact else "~"
    accumulation = plan.micro_batches // plan.processes
    part = recipe.tokens_per_batch / plan.micro_batches
    processes = f"{plan.processes} processes" if plan.processes > 1 else "1 process"
    times = f"{accumulation} parts each, accumulated" if accumulation > 1 else "1 part each, no accumulation"
    tokens = [epoch.pairs_per_step * length for length in (epoch.source_length, epoch.target_length)]
    lines = [
        f"at most {recipe.tokens_per_batch:,} source and {recipe.tokens_per_batch:,} target tokens, padding included",
        f"{mark}{tokens[0]:,.0f} source and {mark}{tokens[1]:,.0f} target tokens without it",
        f"split over {processes}: {times}, about {part:,.0f} + {part:,.0f} tokens a part",
    ]
    needed = 4 * plan.micro_batches if plan.micro_batches > 1 else 1
    if not epoch.exact and recipe.tokens_per_batch // recipe.max_length < needed:
        lines.append(
            f"may be refused: {plan.micro_batches} parts need {needed} pairs in every batch, which holds"
            f" {recipe.tokens_per_batch // recipe.max_length} of {recipe.max_length} tokens each"
        )
    return lines


def _epoch_lines(plan: Plan) -> list[str]:
    recipe, epoch, mark = plan.recipe, plan.epoch, "" if plan.epoch.exact else "~"
    pairs = recipe.max_steps * epoch.pairs_per_step
    source, target = (f"{mark}{_billions(pairs * length)}" for length in (epoch.source_length, epoch.target_length))
    limit = f", or stops after {recipe.max_minutes:g} minutes" if recipe.max_minutes else ""
    seen = f"{recipe.max_steps:,} steps in all see {source} source and {target} target tokens{limit}"
    if epoch.steps is None:
        return [seen, "number of epochs unknown: give --expected-pairs"]
    return [f"{mark}{epoch.steps:,} steps an epoch, {mark}{recipe.max_steps / epoch.steps:.1f} epochs in all", seen]


def _billions(number: float) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.2f} million"


def _checkpoint_lines(plan: Plan) -> list[str]:
    recipe = plan.recipe
    parameters = sum(plan.parameters.values())
    size, kept = CHECKPOINT_BYTES * parameters / 1e9, checkpoints_at_most(recipe)
    needed = kept * size + 4 * parameters / 1e9
    written = f"every {recipe.evaluate_every:,} steps: {math.ceil(recipe.max_steps / recipe.evaluate_every):,} in all"
    too_few = []
    if recipe.checkpoint_minutes:
        written += f"; every {recipe.checkpoint_minutes:g} minutes"
        timed = None if plan.seconds is None else int(plan.seconds / 60 / recipe.checkpoint_minutes)
        written += "" if timed is None else f": {timed:,} in all"
        if timed is not None and timed < recipe.average_checkpoints:
            too_few = [
                f"too few to average {recipe.average_checkpoints}: with --checkpoint-minutes 0 those of every"
                " --evaluate-every N steps are averaged"
            ]
    folder = Path(recipe.output).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    room = "enough" if free >= needed else f"TOO LITTLE at {folder}"
    return [
        f"{written}; at most {kept} are kept at a time",
        *too_few,
        f"disk needed: {kept} x {size:.2f} GB + the model = {needed:.1f} GB; free: {free:.1f} GB, {room}",
    ]


def _e(number: float) -> str:
    return f"{number:.2e}".replace("e+", "e")


def _operation_lines(plan: Plan) -> list[str]:
    recipe, epoch, mark = plan.recipe, plan.epoch, "" if plan.epoch.exact else "~"
    source, target = flops_per_token(plan.config)
    linear = 3 * (source * epoch.source_length + target * epoch.target_length)
    return [
        "a multiplication and an addition count as two, padding is not counted; backward is twice forward",
        f"a pair: 3 x ({epoch.source_length:.1f} x {_e(source)} + {epoch.target_length:.1f} x {_e(target)})"
        f" + attention {_e(epoch.flops_per_pair - linear)} = {_e(epoch.flops_per_pair)}",
        f"a step: {mark}{epoch.pairs_per_step:,.1f} pairs x {_e(epoch.flops_per_pair)} = {_e(plan.step_flops)}",
        f"in all: {recipe.max_steps:,} steps x {_e(plan.step_flops)} = {mark}{_e(plan.flops)} FLOPs",
    ]


def _paper_lines(plan: Plan) -> list[str]:
    """The paper's estimate by its own method, and its GPUs' utilisation; nothing for another model or batch."""
    if plan.paper_model is None:
        return []
    step_seconds, rounded, words, cost = PAPER_TIMES[plan.paper_model]
    steps, peak = plan.recipe.max_steps, DEVICES[PAPER_GPU].fp32 * 1e12
    seconds = steps * step_seconds
    method = f"{PAPER_GPUS} GPUs x {peak / 1e12} TFLOPS"
    lines = [
        f"Section 5.2: {step_seconds} s a step on {PAPER_GPUS} P100: {steps:,} steps x {step_seconds} s ="
        f" {seconds:,.0f} s = {duration(seconds)}",
        f"its method (footnote 5): {seconds:,.0f} s x {method} sustained = {_e(seconds * PAPER_GPUS * peak)} FLOPs",
    ]
    if steps == PAPER_STEPS[plan.paper_model]:
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
    name, count = plan.device
    shown = f"{name} x{count}"
    if name == PAPER_GPU and plan.paper_model:
        step = PAPER_TIMES[plan.paper_model][0]
        scaled = "" if count == PAPER_GPUS else f" x {PAPER_GPUS} / {count} GPUs"
        return [
            f"{shown}, by the paper's step time: {plan.recipe.max_steps:,} steps x {step} s{scaled}"
            f" = {duration(plan.seconds)}"
        ]
    step = plan.seconds / plan.recipe.max_steps
    is_papers = name == PAPER_GPU and plan.utilisation == PAPER_UTILISATION
    what = "what the paper's base model reached" if is_papers else "an assumption"
    lines = [
        f"{shown}, {plan.precision}: {_e(plan.step_flops)} / ({count} x {plan.peak / 1e12:.4g} TFLOPS"
        f" x {plan.utilisation:.0%}) = {step:.3g} s a step",
        f"{plan.recipe.max_steps:,} steps x {step:.3g} s = {duration(plan.seconds)}, without validation",
        f"peak: {plan.peak_source}; {plan.utilisation:.0%} of it is {what} (--utilisation changes it):",
        *UTILISATION_SOURCE,
    ]
    if step < SHORT_STEP and name != HERE:
        lines.append("such short steps will take longer: launching kernels and exchanging gradients is not counted")
    if plan.precision == "fp32" and plan.recipe.precision == "auto" and DEVICES.get(name) and DEVICES[name].fp16:
        lines.append(f"--precision fp16 uses its {DEVICES[name].fp16:.4g} TFLOPS; it has no bf16")
    return lines
