"""The same mathematics a second time, written from the paper or left to torch: what the tests compare with.

Nothing here imports the package but the type of a model whose weights are copied.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from vaswani_transformer import VaswaniForConditionalGeneration


def sinusoids_by_formula(length: int, d_model: int) -> list[list[float]]:
    """Section 3.5 in plain Python: sines on even and cosines on odd columns."""
    table = []
    for position in range(length):
        row = [0.0] * d_model
        for i in range(d_model // 2):
            angle = position / 10_000 ** (2 * i / d_model)
            row[2 * i] = math.sin(angle)
            row[2 * i + 1] = math.cos(angle)
        table.append(row)
    return table


def halves_by_formula(length: int, d_model: int) -> list[list[float]]:
    """The same numbers, all sines before all cosines."""
    return [row[0::2] + row[1::2] for row in sinusoids_by_formula(length, d_model)]


def tensor2tensor_sinusoids(length: int, d_model: int) -> list[list[float]]:
    """`get_timing_signal_1d` of tensor2tensor: timescales from 1 to 10000, both ends included."""
    step = math.log(10_000) / (d_model // 2 - 1)
    angles = [[position * math.exp(-i * step) for i in range(d_model // 2)] for position in range(length)]
    return [[math.sin(angle) for angle in row] + [math.cos(angle) for angle in row] for row in angles]


SINUSOIDS = {
    "sinusoidal": sinusoids_by_formula,
    "sinusoidal-halves": halves_by_formula,
    "sinusoidal-tensor2tensor": tensor2tensor_sinusoids,
}


def _copy_linear(target: nn.Linear, source: nn.Linear) -> None:
    target.weight.copy_(source.weight)
    target.bias.zero_() if source.bias is None else target.bias.copy_(source.bias)


def _copy_attention(target: nn.MultiheadAttention, source: nn.Module) -> None:
    projections = (source.q_proj, source.k_proj, source.v_proj)
    target.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
    target.in_proj_bias.zero_()
    if source.q_proj.bias is not None:
        target.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
    _copy_linear(target.out_proj, source.out_proj)


@torch.no_grad()
def torch_transformer(model: VaswaniForConditionalGeneration) -> nn.Transformer:
    """`torch.nn.Transformer` in float64 with the weights of `model`, whose d_k and d_v must be d_model / num_heads."""
    config = model.config
    assert config.d_k == config.d_v == config.d_model // config.num_heads, "torch knows this case only"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")  # of an odd number of heads; harmless
        reference = nn.Transformer(
            d_model=config.d_model,
            nhead=config.num_heads,
            num_encoder_layers=config.encoder_layers,
            num_decoder_layers=config.decoder_layers,
            dim_feedforward=config.d_ff,
            dropout=0.0,
            activation={"relu": "relu", "gelu": "gelu", "silu": nn.functional.silu}[config.activation_function],
            layer_norm_eps=config.layer_norm_eps,
            batch_first=True,
            norm_first=False,
            dtype=torch.float64,
        )
    for stack, own in ((reference.encoder, model.model.encoder), (reference.decoder, model.model.decoder)):
        if config.add_final_layer_norm:
            stack.norm.load_state_dict(own.layer_norm.state_dict())
        else:
            stack.norm = None  # torch adds a last norm that the paper does not have
        for target, source in zip(stack.layers, own.layers, strict=True):
            _copy_attention(target.self_attn, source.self_attn)
            _copy_linear(target.linear1, source.fc1)
            _copy_linear(target.linear2, source.fc2)
            norms = [source.self_attn_layer_norm, source.final_layer_norm]
            if own is model.model.decoder:
                _copy_attention(target.multihead_attn, source.encoder_attn)
                norms.insert(1, source.encoder_attn_layer_norm)
            for number, norm in enumerate(norms, 1):
                getattr(target, f"norm{number}").load_state_dict(norm.state_dict())
    return reference.train()  # without dropout the same function as eval(), but not torch's fused path


@torch.no_grad()
def torch_transformer_logits(
    model: VaswaniForConditionalGeneration,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    decoder_input_ids: torch.Tensor,
) -> torch.Tensor:
    """Logits `(batch_size, target_length, vocab_size)` in float64, of a model with sinusoids."""

    def embed(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        config = model.config
        first, formula = config.position_offset, SINUSOIDS[config.position_encoding]
        positions = torch.tensor(formula(first + ids.shape[1], config.d_model)[first:], dtype=torch.float64)
        return weight.double()[ids] * (config.d_model**0.5 if config.scale_embedding else 1.0) + positions

    is_padding = attention_mask == 0
    length = decoder_input_ids.shape[1]
    hidden = torch_transformer(model)(
        embed(input_ids, model.model.encoder.embed_tokens.weight),
        embed(decoder_input_ids, model.model.decoder.embed_tokens.weight),
        tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
        src_key_padding_mask=is_padding,
        memory_key_padding_mask=is_padding,
    )
    logits = hidden @ model.lm_head.weight.double().T
    return logits if model.lm_head.bias is None else logits + model.lm_head.bias.double()


def naive_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    w_q: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    w_o: torch.Tensor,
    num_heads: int,
    is_allowed: Callable[[int, int], bool] = lambda query, key: True,
) -> torch.Tensor:
    """Section 3.2.2 for one sequence, head by head and position by position; any d_k and d_v.

    Args:
        queries: `(query_length, d_model)`.
        keys: `(key_length, d_model)`, the values too.
        w_q, w_k: `(num_heads * d_k, d_model)`, as `torch.nn.Linear` keeps them.
        w_v: `(num_heads * d_v, d_model)`.
        w_o: `(d_model, num_heads * d_v)`.
        num_heads: the paper's h.
        is_allowed: whether a query position may see a key position.

    Returns:
        `(query_length, d_model)`.
    """
    d_k, d_v = w_q.shape[0] // num_heads, w_v.shape[0] // num_heads
    rows = []
    for i in range(len(queries)):
        heads = []
        for head in range(num_heads):
            head_q, head_k = w_q[head * d_k : (head + 1) * d_k], w_k[head * d_k : (head + 1) * d_k]
            head_v = w_v[head * d_v : (head + 1) * d_v]
            seen = [j for j in range(len(keys)) if is_allowed(i, j)]
            exponentials = [math.exp(float((head_q @ queries[i]) @ (head_k @ keys[j])) / math.sqrt(d_k)) for j in seen]
            total = sum(exponentials)
            heads.append(sum((e / total) * (head_v @ keys[j]) for e, j in zip(exponentials, seen, strict=True)))
        rows.append(w_o @ torch.cat(heads))
    return torch.stack(rows)


def outputs_within(vocab_size: int, eos_token_id: int, max_tokens: int) -> Iterator[tuple[int, ...]]:
    """All outputs that a search may return: ended by the end token within the limit, or cut at the limit."""
    others = [token for token in range(vocab_size) if token != eos_token_id]
    for length in range(1, max_tokens + 1):
        for prefix in itertools.product(others, repeat=length - 1):
            yield (*prefix, eos_token_id)
    yield from itertools.product(others, repeat=max_tokens)
