r"""The part of the loss of `loss_vaswani` that visits all logits, as one Triton kernel for GPUs.

torch's operations copy the logits to float32 and back and read them once for each of softmax, maximum and sum: 28 bytes
for each bf16 logit. The kernel reads a row for \(\log\sum\exp z\), reads it again, now from the cache, and puts the
gradient in its place: 4 bytes of memory traffic.

Liger-Kernel's loss has the same smoothing, but it waits for the device (`.item()` on the number of labels and
`torch.equal` in its backward pass), divides by the labels of this call only, and subtracts epsilon / V from
probabilities before they are rounded to bf16, which loses the small ones.
"""

from functools import cache

import torch
from transformers.utils import logging
from transformers.utils.import_utils import is_triton_available

logger = logging.get_logger(__name__)
LARGEST_BLOCK = 2**13  # entries visited at a time: 32 registers a thread on Hopper, so that two rows share a processor

if is_triton_available():  # transformers takes what is imported behind this question for optional
    import triton
    import triton.language as tl

    @triton.jit
    def _kernel(logits, width, labels, losses, vocab_size, share, BLOCK: tl.constexpr):
        """One row of `width` logits, of which the first `vocab_size` count."""
        row = tl.program_id(0).to(tl.int64)  # row * width may be beyond 32 bits
        logits += row * width
        label = tl.load(labels + row)
        label_logit = tl.load(logits + label).to(tl.float32)  # before the gradient takes its place
        columns = tl.arange(0, BLOCK)
        largest = -3e38  # not -inf: a block of which all entries are forbidden would make nan
        total = 0.0
        for start in range(0, vocab_size, BLOCK):
            # Memory is bounded by the width, which Triton sees to be a multiple of 16, so that many are loaded at once.
            z = tl.load(logits + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
            z = tl.where(start + columns < vocab_size, z, float("-inf"))
            larger = tl.maximum(largest, tl.max(z, 0))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(z - larger), 0)
            largest = larger
        log_sum = largest + tl.log(total)
        tl.store(losses + row, log_sum - share * label_logit)
        for start in range(0, width, BLOCK):
            z = tl.load(logits + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
            z = tl.where(start + columns < vocab_size, z, float("-inf"))
            gradient = tl.exp(z - log_sum) - tl.where(start + columns == label, share, 0.0)
            tl.store(logits + start + columns, gradient, mask=start + columns < width)


@torch.library.custom_op("vaswani::differentiate_in_place", mutates_args=["logits", "losses"])
def differentiate_in_place(
    logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, vocab_size: int, epsilon: float
) -> None:
    """Losses of `(rows, width)` logits, which become their gradient, both without the terms of the mean logit.

    Logits beyond the first `vocab_size` of a row do not count, and their gradient is 0. They are contiguous, in float32
    or a shorter type; `labels` `(rows,)` are token ids, `losses` `(rows,)` float32 are overwritten.
    """
    rows, width = logits.shape
    block = min(LARGEST_BLOCK, triton.next_power_of_2(width))
    warps = 16 if torch.version.hip else 32  # 1,024 threads
    with torch.cuda.device_of(logits):  # Triton computes on the current device
        _kernel[(rows,)](logits, width, labels, losses, vocab_size, 1 - epsilon, BLOCK=block, num_warps=warps)


@cache
def is_usable() -> bool:
    """Return whether Triton compiles for this GPU. It needs a C compiler on the machine, and logs it where it fails."""
    if not is_triton_available():
        return False
    logits, label, loss = (torch.zeros(size, device="cuda") for size in ((1, 2), 1, 1))
    try:
        differentiate_in_place(logits, label.long(), loss, 2, 0.0)
    except Exception as error:  # of any type: the failing program may be a compiler
        logger.warning(f"the loss is computed without its Triton kernel, which is slower: {error}")
        return False
    return True
