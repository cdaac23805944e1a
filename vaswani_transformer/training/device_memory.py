"""How many tokens a device takes at once: what its memory holds, found by trial steps that leave nothing behind."""

import logging
import math
from collections.abc import Callable

import torch
from accelerate.utils import send_to_device

from ..data.batching import MOST_PADDED, PackedCollator, packed_size
from ..distributed import over_processes
from ..hardware import CPU_TOKENS
from .monitoring import count_tokens

logger = logging.getLogger(__name__)

TRIAL_TOKENS = 4096  # fills a block of the fused loss: below, a token takes more memory than above
SHARE = 0.85  # of the memory that is free; the rest is for gaps between blocks and what libraries take later
_LESS = 0.8  # of a size that does not fit, to try next


class MemoryMeter:
    """The memory of a device, as torch's allocator counts it.

    Raises:
        AttributeError: for a device that does not count, such as a CPU.
    """

    def __init__(self, device: torch.device):
        self.device, self._module = device, torch.get_device_module(device)
        self.free()

    def free(self) -> int:
        """Bytes that can still be taken."""
        self._module.empty_cache()
        return self._module.mem_get_info(self.device)[0]

    def peak_of(self, step: Callable[[], None]) -> float:
        """Bytes that a step takes at most, beyond what is taken now; infinity if they are not there."""
        before = self._module.memory_allocated(self.device)
        self._module.reset_peak_memory_stats(self.device)
        try:
            step()
            self._module.synchronize(self.device)
        except torch.OutOfMemoryError:
            return math.inf
        return self._module.max_memory_allocated(self.device) - before


def tokens_that_fit(peak_of: Callable[[int], float], limit: float, most: int, least: int) -> int:
    """The number of tokens from `least` to `most` whose step takes `limit` bytes or little less.

    Memory grows linearly with tokens from `TRIAL_TOKENS` on: two small steps predict the size, a step of it confirms.

    Args:
        peak_of: bytes that a step of so many tokens takes.
        limit: the most that it may take.
        most: is not exceeded.
        least: is returned where nothing fits.
    """
    tokens = most
    if most > 2 * TRIAL_TOKENS:
        first, second = peak_of(TRIAL_TOKENS), peak_of(2 * TRIAL_TOKENS)
        if second < math.inf:
            predicted = TRIAL_TOKENS * (1 + (limit - first) / max(second - first, 1))
            tokens = int(min(most, max(least, predicted)))
        else:
            tokens = TRIAL_TOKENS
    while tokens > least and peak_of(tokens) > limit:
        tokens = int(_LESS * tokens)
    return max(tokens, least)


def choose_tokens_per_device(trainer, meter: MemoryMeter | None = None) -> int:
    """What each device of a `VaswaniTrainer` takes at once, the same on all: its share of the batch, if that fits.

    Weights, gradients, random numbers and counts stay as they are.
    """
    args = trainer.args
    most = math.ceil(args.tokens_per_batch / args.world_size)
    try:
        meter = meter or MemoryMeter(args.device)
    except AttributeError:
        return min(CPU_TOKENS, args.tokens_per_batch)
    if trainer.train_dataset is None or trainer.is_fsdp_enabled:  # which has not spread the model over devices yet
        return min(CPU_TOKENS, args.tokens_per_batch)
    weights = sum(
        weight.numel() * weight.element_size() for weight in trainer.model.parameters() if weight.requires_grad
    )
    free = meter.free()
    limit = SHARE * free - 2 * weights  # Adam's averages come with the first step

    def peak_of(tokens: int) -> float:
        peak = meter.peak_of(lambda: _step(trainer, tokens))
        trainer.model.zero_grad()
        meter.free()
        return peak

    was_training = trainer.model.training
    devices = [] if args.device.type == "cpu" else [args.device]
    # Compiled code takes no more memory, and would be compiled for each size.
    with torch.random.fork_rng(devices, device_type=args.device.type), torch.compiler.set_stance("force_eager"):
        chosen = tokens_that_fit(peak_of, limit, most, min(trainer.longest_sentence, most))
    trainer.model.train(was_training)
    [chosen] = over_processes(args, [chosen], "MIN")
    if trainer.is_world_process_zero():
        share = "its whole share of a batch" if chosen == most else f"of its share of {most:,}"
        logger.info("a device takes %s tokens at once, %s: %.1f GB were free", f"{chosen:,}", share, free / 1e9)
    return chosen


def _step(trainer, tokens: int) -> None:
    """Forward and backward pass of the largest batch that counts as so many tokens a side: of the longest sentences."""
    config, longest, device = trainer.model.config, max(2, trainer.longest_sentence), trainer.args.device
    if trainer.args.padding_free:
        collator, positions = PackedCollator(config.pad_token_id, longest), packed_size(tokens + longest, longest)
    else:
        collator, positions = trainer.data_collator, int(MOST_PADDED * tokens)
    sentence = [0] * longest
    batch = collator([{"input_ids": sentence, "labels": sentence}] * -(-positions // longest))
    count_tokens(batch)  # takes out what the model does not know
    items = torch.full((), tokens, dtype=torch.float32, device=device)
    trainer.model.train()
    with trainer.accelerator.autocast():
        loss = trainer.compute_loss(trainer.model, send_to_device(batch, device), num_items_in_batch=items)
    loss.backward()
