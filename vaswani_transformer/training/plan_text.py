"""A plan as text: what `vaswani train --dry-run` prints, with the arithmetic."""

import math
import shutil
from pathlib import Path

from ..hardware import DEVICES, HERE, UTILISATION_SOURCE
from .flops import flops_per_token
from .plan import PAPER_GPU, PAPER_GPUS, PAPER_STEPS, PAPER_TIMES, PAPER_UTILISATION, Plan
from .run_folder import checkpoints_at_most

CHECKPOINT_BYTES = 12  # a parameter: the weight and Adam's two averages, in float32
SHORT_STEP = 0.05  # seconds; below it what is not counted here decides


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
    dealt = f"{plan.processes} processes" if plan.processes > 1 else "1 process"
    times = f"{accumulation} parts each, accumulated" if accumulation > 1 else "1 part each, no accumulation"
    tokens = [epoch.pairs_per_step * length for length in (epoch.source_length, epoch.target_length)]
    lines = [
        f"at most {recipe.tokens_per_batch:,} source and {recipe.tokens_per_batch:,} target tokens, padding included",
        f"{mark}{tokens[0]:,.0f} source and {mark}{tokens[1]:,.0f} target tokens without it",
        f"dealt out over {dealt}: {times}, about {part:,.0f} + {part:,.0f} tokens a part",
    ]
    needed = 4 * plan.micro_batches if plan.micro_batches > 1 else 1
    if not epoch.exact and recipe.tokens_per_batch // recipe.max_length < needed:
        lines.append(
            f"may be refused: {plan.micro_batches} parts need {needed} pairs in every batch, and of {recipe.max_length}"
            f" tokens each {recipe.tokens_per_batch // recipe.max_length} fit"
        )
    return lines


def _epoch_lines(plan: Plan) -> list[str]:
    recipe, epoch, mark = plan.recipe, plan.epoch, "" if plan.epoch.exact else "~"
    pairs = recipe.max_steps * epoch.pairs_per_step
    source, target = (f"{mark}{_billions(pairs * length)}" for length in (epoch.source_length, epoch.target_length))
    limit = f", or stops after {recipe.max_minutes:g} minutes" if recipe.max_minutes else ""
    seen = f"{recipe.max_steps:,} steps in all see {source} source and {target} target tokens{limit}"
    if epoch.steps is None:
        return [seen, "how many epochs that is nobody knows: --expected-pairs would say"]
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
                f"too few to average {recipe.average_checkpoints}: --checkpoint-minutes 0 averages those of every"
                " --evaluate-every N steps"
            ]
    folder = Path(recipe.output).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    room = "enough" if free >= needed else f"TOO LITTLE at {folder}"
    return [
        f"{written}; at most {kept} lie there at a time",
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
        "of the model itself, a multiplication and an addition counting two, padding not; backward is twice forward",
        f"a pair: 3 x ({epoch.source_length:.1f} x {_e(source)} + {epoch.target_length:.1f} x {_e(target)})"
        f" + attention {_e(epoch.flops_per_pair - linear)} = {_e(epoch.flops_per_pair)}",
        f"a step: {mark}{epoch.pairs_per_step:,.1f} pairs x {_e(epoch.flops_per_pair)} = {_e(plan.step_flops)}",
        f"in all: {recipe.max_steps:,} steps x {_e(plan.step_flops)} = {mark}{_e(plan.flops)} FLOPs",
    ]


def _paper_lines(plan: Plan) -> list[str]:
    """The paper's estimate by its own method, and what that used of its GPUs; nothing for another model or batch."""
    if plan.paper_model is None:
        return []
    step_seconds, rounded, words, cost = PAPER_TIMES[plan.paper_model]
    steps, peak = plan.recipe.max_steps, DEVICES[PAPER_GPU].fp32 * 1e12
    seconds = steps * step_seconds
    method = f"{PAPER_GPUS} GPUs x {peak / 1e12} TFLOPS"
    lines = [
        f"Section 5.2: {step_seconds} s a step on {PAPER_GPUS} P100: {steps:,} steps x {step_seconds} s ="
        f" {seconds:,.0f} s = {_hours(seconds)}",
        f"its method (footnote 5): {seconds:,.0f} s x {method} sustained = {_e(seconds * PAPER_GPUS * peak)} FLOPs",
    ]
    if steps == PAPER_STEPS[plan.paper_model]:
        lines.append(
            f"rounded as it prints it: {words} = {rounded:,.0f} s x {method} = {_e(rounded * PAPER_GPUS * peak)}"
            f" (Table 2: {cost})"
        )
    rate = plan.step_flops / step_seconds / PAPER_GPUS
    lines.append(
        f"counted as above its GPUs made {_e(plan.step_flops)} / {step_seconds} s / {PAPER_GPUS} ="
        f" {rate / 1e12:.2f} TFLOPS each: {rate / peak:.0%} of {peak / 1e12} in use"
    )
    return lines


def _time_lines(plan: Plan) -> list[str]:
    if plan.device is None:
        known = [*DEVICES, HERE]
        half = len(known) // 2
        return [
            "--device NAME tells the hours on it; several: --device 'a100 x8'",
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
            f" = {_hours(plan.seconds)}"
        ]
    step = plan.seconds / plan.recipe.max_steps
    is_papers = name == PAPER_GPU and plan.utilisation == PAPER_UTILISATION
    what = "what the paper's base model reached" if is_papers else "an assumption"
    lines = [
        f"{shown}, {plan.precision}: {_e(plan.step_flops)} / ({count} x {plan.peak / 1e12:.4g} TFLOPS"
        f" x {plan.utilisation:.0%}) = {step:.3g} s a step",
        f"{plan.recipe.max_steps:,} steps x {step:.3g} s = {_hours(plan.seconds)}, without validation",
        f"peak: {plan.peak_source}; {plan.utilisation:.0%} of it is {what}, --utilisation changes it:",
        *UTILISATION_SOURCE,
    ]
    if step < SHORT_STEP and name != HERE:
        lines.append(
            f"steps of {1000 * step:.0f} ms wait for what is not counted (starting kernels, exchanging gradients):"
            " expect more"
        )
    if plan.precision == "fp32" and plan.recipe.precision == "auto" and DEVICES.get(name) and DEVICES[name].fp16:
        lines.append(f"--precision fp16 makes use of its {DEVICES[name].fp16:.4g} TFLOPS; it has no bf16")
    return lines


def _hours(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours" + (f" = {seconds / 86400:.2f} days" if seconds > 48 * 3600 else "")
