r"""The training loss (Section 5.4): label-smoothed cross-entropy, of logits or fused with the projection.

With z the logits of a token, V the size of the vocabulary and epsilon the smoothing, the loss of the token is
\(\log\sum\exp z - (1 - \epsilon) z_{label} - \epsilon\,\mathrm{mean}(z)\) and its gradient
\(\mathrm{softmax}(z) - (1 - \epsilon)\,\mathrm{onehot}(label) - \epsilon / V\). Of logits torch computes it. Fused
with the projection, both are computed in the forward pass, from one visit to a block of tokens, in float32 whatever the
logits are, and the log-probabilities of the whole batch are never in memory.
"""

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from .linear_vaswani import is_plain, product_dtype

IGNORE_INDEX = -100  # the label that torch, transformers and the Trainer leave out of a loss
BLOCK_ELEMENTS = 2**19  # logits visited at a time on a CPU: 2 MiB in float32, which fit the cache
PROJECTED_ELEMENTS = 2**24  # logits made at a time by the projection that is fused with the loss: 32 MiB in bf16
PROJECTED_WIDTHS = 4  # at least 4 times d_model tokens, or adding up gradients of the matrix would dominate
VOCABULARY_MULTIPLE = 64  # rows that the matrix is filled up to on a GPU: whole tiles of its tensor cores


def label_smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    epsilon: float = 0.1,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The training loss of Section 5.4, in nats a token, computed in float32 or, of such logits, float64.

    Equal to `torch.nn.functional.cross_entropy(..., label_smoothing=epsilon)`: the share epsilon is spread over the
    whole vocabulary, the right label included.

    Args:
        logits: `(..., vocab_size)`.
        labels: `(...)` token ids; -100 is left out.
        epsilon: share of the probability mass spread evenly; 0 gives plain cross-entropy.
        num_items_in_batch: label tokens to divide by; the labels of this call when not given.

    Raises:
        ValueError: unless 0 <= epsilon < 1.
        IndexError: from torch on a CPU, for a label that is no token id.
    """
    labels, items = _flat(labels.to(logits.device), epsilon, num_items_in_batch)
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, label_smoothing=epsilon, reduction="sum") / items


def projected_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    epsilon: float = 0.1,
    num_items_in_batch: torch.Tensor | int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`label_smoothed_cross_entropy` of the logits `hidden @ weight.T + bias`, which never exist all at once.

    25,000 tokens of a vocabulary of 37,000 are 1.9 GB of bf16 logits, and as much again for their gradient. Products
    are computed in autocast's type where it is on.

    `hidden` is `(..., d_model)`, float32 or bf16, `weight` `(vocab_size, d_model)`, `bias` `(vocab_size,)`; all else,
    errors too, as in `label_smoothed_cross_entropy`.
    """
    dtype = product_dtype(hidden)
    labels, items = _flat(labels.to(hidden.device), epsilon, num_items_in_batch)
    with torch.autocast(hidden.device.type, enabled=False):
        return _ProjectedCrossEntropy.apply(hidden.flatten(0, -2), weight, bias, labels, epsilon, items, dtype)


def can_be_fused(projection: nn.Module, hidden: torch.Tensor) -> bool:
    """Return whether `projected_cross_entropy` may replace a projection of `(..., d_model)` states and its loss.

    Not if the matrix is spread over devices, the layer has been replaced or has hooks, or torch is compiling, tracing
    or transforming, and so must know every operation.
    """
    if not is_plain(projection) or projection.weight.device != hidden.device or product_dtype(hidden) == torch.float16:
        return False
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not (is_traced or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active())


def _flat(labels: torch.Tensor, epsilon: float, items: torch.Tensor | int | None) -> tuple:
    """Return the labels as one row, and the number to divide by, both on the device of the labels."""
    if not 0 <= epsilon < 1:
        raise ValueError(f"label smoothing is {epsilon}: it must be at least 0 and below 1")
    if items is None:
        items = (labels != IGNORE_INDEX).sum()
    elif torch.is_tensor(items):
        items = items.to(labels.device).reshape(())  # DataParallel gives each of its devices a matrix of one number
    return labels.flatten(), items


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The projection to the vocabulary and its loss, without ever holding the logits of the whole batch.

    Both gradients are products with the gradient of the logits, so they are taken block by block in the forward pass
    and nothing is computed twice. The products' smaller sides are divided by `items`; smoothing, the same for the whole
    vocabulary, needs the matrix's mean row only.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, epsilon, items, dtype):
        wanted, weight_wanted = any(ctx.needs_input_grad), ctx.needs_input_grad[1]  # not that of a frozen matrix
        vocab_size, width = weight.shape
        on_tensor_cores = _has_tensor_cores(hidden, dtype)
        entries = vocab_size + (-vocab_size % VOCABULARY_MULTIPLE if on_tensor_cores else 0)
        matrix = _cast(weight.detach(), dtype, entries)
        mean_row = matrix[:vocab_size].mean(dim=0, dtype=torch.float32)
        offset = None if bias is None else _cast(bias.detach(), dtype, entries)
        mean_bias = 0.0 if bias is None else bias.detach().mean(dtype=torch.float32)
        kept = labels != IGNORE_INDEX
        share = kept.float() / items  # (tokens,)
        label = labels.masked_fill(~kept, 0)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if wanted else None
        weight_gradient = torch.zeros_like(matrix, dtype=torch.float32) if weight_wanted else None
        bias_gradient = torch.zeros_like(offset, dtype=torch.float32) if wanted and bias is not None else None
        rows = max(1, PROJECTED_ELEMENTS // vocab_size, PROJECTED_WIDTHS * width)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            inputs = hidden[part].to(dtype)
            logits = nn.functional.linear(inputs, matrix, offset)
            losses = _differentiate_in_place(logits, label[part], vocab_size, epsilon)
            if epsilon:
                losses -= epsilon * (inputs.float() @ mean_row + mean_bias)
            total += losses.masked_fill_(~kept[part], 0.0).sum() / items
            if wanted:
                factor = share[part, None]
                torch.mul(logits @ matrix - epsilon * mean_row, factor, out=hidden_gradient[part])
                scaled = torch.mul(inputs, factor, out=torch.empty_like(inputs)) if weight_wanted else None
                if weight_wanted and on_tensor_cores:  # the product is added as it is made, and not rounded before
                    torch.addmm(weight_gradient, logits.T, scaled, out_dtype=torch.float32, out=weight_gradient)
                elif weight_wanted:
                    weight_gradient += logits.T @ scaled
                if bias is not None:
                    bias_gradient += (logits.T @ factor.to(dtype))[:, 0]
        if wanted:
            gradients = [hidden_gradient, None]
            if weight_wanted:
                weight_gradient = weight_gradient[:vocab_size]
                if epsilon:
                    weight_gradient -= epsilon / vocab_size * (share @ hidden.to(dtype).float())
                gradients[1] = weight_gradient.to(weight.dtype)
            if bias is not None:
                bias_gradient = bias_gradient[:vocab_size] - epsilon / vocab_size * share.sum()
                gradients.append(bias_gradient.to(bias.dtype))
            ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        gradients = ctx.saved_tensors
        if not grad_output.is_cpu or grad_output != 1:
            gradients = [each if each is None else each * grad_output.to(each.dtype) for each in gradients]
        return *gradients, *[None] * (7 - len(gradients))


def _has_tensor_cores(hidden: torch.Tensor, dtype: torch.dtype) -> bool:
    return hidden.is_cuda and torch.version.hip is None and dtype == torch.bfloat16


def _cast(tensor: torch.Tensor, dtype: torch.dtype, rows: int) -> torch.Tensor:
    """Return a tensor in another type, with rows of zeros below."""
    if rows == len(tensor):
        return tensor.to(dtype)
    result = torch.zeros(rows, *tensor.shape[1:], dtype=dtype, device=tensor.device)
    result[: len(tensor)] = tensor
    return result


def _differentiate_in_place(logits, label, vocab_size: int, epsilon: float) -> torch.Tensor:
    """Return losses `(rows,)` of `(rows, vocab_size or more)` logits, without the terms of the mean logit.

    The gradient, without them too, replaces the logits. Those beyond the vocabulary are 0 and stay so.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if kernel := _kernel(logits):
        kernel(logits, label, losses, vocab_size, epsilon)
        return losses
    logits = logits[:, :vocab_size]
    rows = max(1, BLOCK_ELEMENTS // vocab_size) if logits.is_cpu else max(1, len(logits))  # as many as fit the cache
    for start in range(0, len(logits), rows):
        block = slice(start, start + rows)
        losses[block], logits[block] = _differentiate(logits[block].float(), label[block, None], epsilon)
    return losses


def _kernel(logits: torch.Tensor):
    """Return the Triton kernel that does the same, if it can."""
    if not logits.is_cuda or logits.dtype == torch.float64:
        return None
    from .loss_kernel_vaswani import differentiate_in_place, is_usable  # Triton takes half a second to import

    return differentiate_in_place if is_usable() else None


def _differentiate(z: torch.Tensor, label: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses `(rows,)` and gradient of float32 logits `(rows, vocab_size)`, without the terms of the mean logit.

    torch's softmax takes half the time of its exp on a CPU; the largest probability, never below 1 / V, gives the sum
    of exponentials. `label` is `(rows, 1)`.
    """
    probabilities = torch.softmax(z, dim=-1)
    log_sum = z.amax(dim=-1, keepdim=True) - probabilities.amax(dim=-1, keepdim=True).log()
    losses = log_sum - (1 - epsilon) * z.gather(-1, label)
    return losses[:, 0], probabilities.scatter_add_(-1, label, z.new_full((1, 1), epsilon - 1).expand_as(label))
