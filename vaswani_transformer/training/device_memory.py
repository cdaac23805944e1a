"""Choice of the tokens that a device takes at once: what its memory holds, found by trial steps."""

import logging
import math

import numpy as np
import torch
from accelerate.utils import find_executable_batch_size, send_to_device

from ..data.batching import IGNORE_INDEX, MOST_PADDED, ROOM, PackedCollator, packed_size
from ..distributed import over_processes
from ..hardware import CPU_TOKENS

logger = logging.getLogger(__name__)

SPARE = 0.15  # of the memory that is free: for gaps between blocks and what libraries take later


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of a device that can still be taken; None for one that does not count them, such as a CPU."""
    module = torch.get_device_module(device)
    return module.mem_get_info(device)[0] if hasattr(module, "mem_get_info") else None


def count_tokens(batch: dict[str, torch.Tensor]) -> np.ndarray:
    """Return source and target tokens of a training batch, padded or not, and its two sides' positions, `(4,)`.

    A batch without padding has its `source_tokens`, which are taken out: the model does not know them.
    """
    labels, mask = batch["labels"], batch.get("attention_mask")
    source = batch.pop("source_tokens") if mask is None else mask.sum()
    target = labels.ne(IGNORE_INDEX).sum()
    return np.array([int(source), int(target), batch["input_ids"].numel(), labels.numel()], np.int64)


def choose_tokens_per_device(trainer) -> int:
    """Return what each device of a `VaswaniTrainer` takes at once, the same on all: its share of a batch, if that fits.

    Weights, gradients, random numbers and counts stay as they are.
    """
    args, model = trainer.args, trainer.model
    free = free_memory(args.device)
    # FSDP has not spread the model over devices yet.
    if free is None or trainer.train_dataset is None or trainer.is_fsdp_enabled:
        return min(CPU_TOKENS, args.tokens_per_batch)
    most = math.ceil(args.tokens_per_batch / args.world_size)
    least = min(trainer.longest_sentence, most)
    averages = 2 * sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)  # Adam's
    # Held during the trials, so that what fits beside it fits in training too.
    reserve = torch.empty(averages + int(SPARE * free), dtype=torch.uint8, device=args.device)

    @find_executable_batch_size(starting_batch_size=most)
    def tokens_that_fit(tokens: int) -> int:
        try:
            if tokens > least:
                _step(trainer, tokens)
            return max(tokens, least)
        finally:
            model.zero_grad()

    was_training = model.training
    devices = [] if args.device.type == "cpu" else [args.device]
    # Compiled code takes no more memory, and would be compiled for each size.
    with torch.random.fork_rng(devices, device_type=args.device.type), torch.compiler.set_stance("force_eager"):
        chosen = tokens_that_fit()
    model.train(was_training)
    del reserve
    [chosen] = over_processes(args, [chosen], "MIN")
    if trainer.is_world_process_zero():
        share = "its whole share of a batch" if chosen == most else f"of its share of {most:,}"
        logger.info("a device takes %s tokens at once, %s: %.1f GB were free", f"{chosen:,}", share, free / 1e9)
    return chosen


def _step(trainer, tokens: int) -> None:
    """Run a forward and backward pass on the largest batch that counts as `tokens` tokens a side: longest sentences."""
    config, longest, device = trainer.model.config, max(2, trainer.longest_sentence), trainer.args.device
    tokens = math.ceil(ROOM * tokens) if trainer.shares else tokens
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
