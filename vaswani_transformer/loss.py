"""Label-smoothed cross-entropy (Section 5.4) in few passes over the logits."""

import torch
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
BLOCK_ELEMENTS = 2**19  # logits visited at a time on a CPU: 2 MiB in float32


class _LabelSmoothedCrossEntropy(torch.autograd.Function):
    """Sum over tokens of (1 - eps) * -log p(label) + eps * mean over the vocabulary of -log p, over `items`.

    torch's `cross_entropy` and transformers' `LabelSmoother` write the log-probabilities of the whole batch to memory
    and read them again for each term. With z the logits of a token the loss is lse(z) - (1 - eps) * z_label - eps *
    mean(z) and its gradient softmax(z) - (1 - eps) * onehot - eps / V: both come from one visit to a block of rows that
    fits the cache, in float32 whatever the logits are.
    """

    @staticmethod
    def forward(ctx, logits, labels, epsilon, items):
        kept = labels != IGNORE_INDEX
        safe_labels = labels.masked_fill(~kept, 0)
        # The gradient is divided where it is made, but for fp16, whose small numbers wait for the gradient scaler.
        ctx.items = items if logits.dtype == torch.float16 else 1
        weight = kept.float() * (ctx.items / items)  # (tokens,)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        rows = len(logits) if not logits.is_cpu else max(1, BLOCK_ELEMENTS // logits.shape[-1])
        for start in range(0, len(logits), rows):
            block = slice(start, start + rows)
            z, label = logits[block].float(), safe_labels[block, None]
            lse = torch.logsumexp(z, dim=-1, keepdim=True)
            losses = lse - (1 - epsilon) * z.gather(-1, label)
            if epsilon:  # or 0 * inf would make a forbidden entry's loss nan
                losses -= epsilon * z.mean(dim=-1, keepdim=True)
            total += losses.masked_fill_(~kept[block, None], 0.0).sum() / items
            if gradient is not None:
                g = torch.sub(z, lse).exp_().sub_(epsilon / z.shape[-1])
                g.scatter_add_(-1, label, g.new_full((1, 1), epsilon - 1).expand_as(label))
                gradient[block] = g.mul_(weight[block, None])
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (gradient,) = ctx.saved_tensors
        factor = grad_output / ctx.items
        if not factor.is_cpu or factor != 1:  # one more visit to all logits, rarely needed
            gradient = gradient * factor.to(gradient.dtype)
        return gradient, None, None, None


def label_smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    epsilon: float = 0.1,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The training loss of Section 5.4, in nats a token, in the form of torch and transformers.

    Equal to `torch.nn.functional.cross_entropy(..., label_smoothing=epsilon)`: the share epsilon is spread over the
    whole vocabulary, the right label included.

    Args:
        logits: `(..., vocab_size)`.
        labels: `(...)` token ids; -100 is left out.
        epsilon: share of the probability mass spread evenly; 0 gives plain cross-entropy.
        num_items_in_batch: label tokens to divide by; the labels of this call when not given.

    Raises:
        ValueError: unless 0 <= epsilon < 1.
    """
    if not 0 <= epsilon < 1:
        raise ValueError(f"label smoothing is {epsilon}: it must be at least 0 and below 1")
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORE_INDEX).sum()
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    labels = labels.flatten().to(logits.device)
    return _LabelSmoothedCrossEntropy.apply(logits.flatten(0, -2), labels, epsilon, num_items_in_batch)
