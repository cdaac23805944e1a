"""Label-smoothed cross-entropy (Section 5.4) in few passes over the logits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
BLOCK_ELEMENTS = 2**19  # logits visited at a time on a CPU: 2 MiB in float32
PROJECTED_ELEMENTS = 2**24  # logits made at a time by the projection that is fused with the loss: 32 MiB in bf16
PROJECTED_WIDTHS = 4  # at least so many times d_model tokens, or adding up gradients of the matrix would cost as much


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
            lse, g = _normalise(z)
            losses = lse - (1 - epsilon) * z.gather(-1, label)
            if epsilon:  # or 0 * inf would make a forbidden entry's loss nan
                losses -= epsilon * z.mean(dim=-1, keepdim=True)
            total += losses.masked_fill_(~kept[block, None], 0.0).sum() / items
            if gradient is not None:
                g.sub_(epsilon / z.shape[-1])
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
    _check_epsilon(epsilon)
    items, labels = _items_and_labels(labels, num_items_in_batch, logits.device)
    return _LabelSmoothedCrossEntropy.apply(logits.flatten(0, -2), labels, epsilon, items)


def _check_epsilon(epsilon: float) -> None:
    if not 0 <= epsilon < 1:
        raise ValueError(f"label smoothing is {epsilon}: it must be at least 0 and below 1")


def _items_and_labels(labels: torch.Tensor, items: torch.Tensor | int | None, device: torch.device) -> tuple:
    """What to divide by, and the labels as one row, both on `device`."""
    if items is None:
        items = (labels != IGNORE_INDEX).sum()
    if torch.is_tensor(items):
        items = items.to(device)
    return items, labels.flatten().to(device)


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The projection to the vocabulary and the loss above, without ever holding the logits of the whole batch.

    Both gradients are products with the gradient of the logits, so they are taken block by block in the forward pass:
    nothing is computed twice. The division by `items` is left to the products' smaller sides; the share of smoothing,
    the same for the whole vocabulary, needs the matrix's mean row only.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, epsilon, items, dtype):
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        matrix = weight.detach().to(dtype)
        mean_row = matrix.mean(dim=0, dtype=torch.float32)
        kept = labels != IGNORE_INDEX
        share = kept.float() / items  # (tokens,)
        label = labels.masked_fill(~kept, 0)[:, None]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if wanted else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        vocab_size, width = weight.shape
        rows = max(1, PROJECTED_ELEMENTS // vocab_size, PROJECTED_WIDTHS * width)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            inputs = hidden[part].to(dtype)
            logits = inputs @ matrix.T
            losses = _differentiate(logits, label[part], epsilon)
            if epsilon:
                losses -= epsilon * (inputs.float() @ mean_row)
            total += losses.masked_fill_(~kept[part], 0.0).sum() / items
            if wanted:
                factor = share[part, None]
                hidden_gradient[part] = factor * ((logits @ matrix).float() - epsilon * mean_row)
                weight_gradient += logits.T @ (inputs * factor).to(dtype)
        if wanted:
            if epsilon:
                weight_gradient -= epsilon / vocab_size * (share @ hidden.to(dtype).float())
            ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        gradients = ctx.saved_tensors
        if not grad_output.is_cpu or grad_output != 1:
            gradients = [gradient * grad_output.to(gradient.dtype) for gradient in gradients]
        return *gradients, None, None, None, None


def _differentiate(logits: torch.Tensor, label: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Put the gradient of the loss of each row in place of its logits, but for the smoothing's share of it.

    Returns the losses without the mean logit's share, `(rows,)` in float32.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    rows = len(logits) if not logits.is_cpu else max(1, BLOCK_ELEMENTS // logits.shape[-1])
    for start in range(0, len(logits), rows):
        block = slice(start, start + rows)
        z = logits[block].float()
        lse, probabilities = _normalise(z)
        losses[block] = (lse - (1 - epsilon) * z.gather(-1, label[block]))[:, 0]
        probabilities.scatter_add_(-1, label[block], lse.new_full((1, 1), epsilon - 1).expand_as(label[block]))
        logits[block] = probabilities
    return losses


def _normalise(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log of the sum of exponentials of each row, `(rows, 1)`, and the probabilities.

    torch's softmax takes half the time of its exp on a CPU; the largest probability gives the sum back, since it is
    never below 1 / V.
    """
    probabilities = torch.softmax(z, dim=-1)
    return z.amax(dim=-1, keepdim=True) - probabilities.amax(dim=-1, keepdim=True).log(), probabilities


def projected_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    epsilon: float = 0.1,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """`label_smoothed_cross_entropy` of the logits `hidden @ weight.T`, which never exist all at once.

    25,000 tokens of a vocabulary of 37,000 are 1.9 GB of bf16 logits, and as much again for their gradient. Products
    are computed in autocast's type where it is on. `scripts/benchmark_loss.py` measures time and memory.

    Args:
        hidden: `(..., d_model)`, float32 or bf16.
        weight: `(vocab_size, d_model)`.
        labels: `(...)` token ids; -100 is left out.
        epsilon: as in `label_smoothed_cross_entropy`.
        num_items_in_batch: as in `label_smoothed_cross_entropy`.

    Raises:
        ValueError: unless 0 <= epsilon < 1; for float16, which wants its gradients scaled before they are made.
    """
    _check_epsilon(epsilon)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if dtype == torch.float16:
        raise ValueError("projected_cross_entropy does not compute in float16: use label_smoothed_cross_entropy")
    items, labels = _items_and_labels(labels, num_items_in_batch, hidden.device)
    with torch.autocast(kind, enabled=False):
        return _ProjectedCrossEntropy.apply(hidden.flatten(0, -2), weight, labels, epsilon, items, dtype)


@contextmanager
def loss_in_place_of_logits(
    projection: torch.nn.Linear,
    labels: torch.Tensor,
    epsilon: float,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> Iterator[None]:
    """Let a model's projection to the vocabulary return `projected_cross_entropy` in place of the logits.

    So the loss is computed within the model's forward pass, as training on several devices needs it, and what wraps
    that pass has no logits to convert to float32, which accelerate otherwise does with every output.

    Args:
        projection: without a bias; as it was again at the end.
        labels: as `projected_cross_entropy`, like all the rest.
        epsilon: share of smoothing.
        num_items_in_batch: what to divide by.
    """
    projection.forward = lambda hidden: projected_cross_entropy(
        hidden, projection.weight, labels, epsilon, num_items_in_batch
    )
    try:
        yield
    finally:
        del projection.forward
