"""What one training step on a GPU computes, moves and dispatches, counted on fake tensors: no GPU is needed.

    python scripts/benchmarks/step_counts.py                        # base and big, 25,000 and 3,125 tokens a side
    python scripts/benchmarks/step_counts.py --presets big --tokens 25000 --operations 12

Counts, not measurements: bf16 autocast, fused AdamW, sdpa attention, a batch of WMT 2014's lengths that stands in the
middle of an epoch's. TFLOP are those of matrix products (`torch.utils.flop_counter`). Other traffic: every operation
that is no matrix product or attention reads its inputs and writes its outputs once, views move nothing, and nothing
stays in a cache. Operations are those dispatched in eager mode, views included; kernels are those that move something.
"""

import argparse
import itertools
from collections import Counter, defaultdict
from contextlib import contextmanager
from unittest import mock

from fake_cuda import fake_cuda, stand_in_for_cuda

stand_in_for_cuda()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration  # noqa: E402
from vaswani_transformer.data.batching import TokenBatchSampler  # noqa: E402
from vaswani_transformer.model import modeling_vaswani  # noqa: E402

PHASES = ("forward", "loss", "backward", "optimizer")
PAIRS = 1_000_000  # of WMT's 4.5 million, enough for the shapes of 1,370 steps
MICRO_BATCHES = 10_960  # of 3,125 tokens: those 1,370 steps of the recipe
NOTHING = {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "empty", "empty_like", "new_empty"}
NOTHING |= {"empty_strided", "new_empty_strided", "set_"}
LOOK_UPS = {"embedding", "gather", "index_select", "index"}  # read as much of their table as they return
WRITES = {"copy_", "fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "new_full", "new_zeros"}
SYNCHRONISING = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2"}


def wmt_lengths(pairs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Made-up lengths with the means of WMT 2014 English-German under 37,000 pieces: 29.5 and 30.6, `</s>` included.

    Log-normal, as sentence lengths roughly are; the spread (0.6) and that of the ratio of the sides (0.2) are guesses.
    """
    random = np.random.default_rng(seed)
    source = random.lognormal(np.log(29.5) - 0.18, 0.6, pairs)
    target = source * random.lognormal(np.log(30.6 / 29.5) - 0.02, 0.2, pairs)
    return tuple(np.clip(side.round(), 2, 250).astype(np.int32) for side in (source, target))


def micro_batches(tokens_per_batch: int, parts: int, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Source and target lengths of the first micro-batches of an epoch."""
    source, target = wmt_lengths(PAIRS)
    sampler = TokenBatchSampler(source, target, tokens_per_batch, micro_batches=parts)
    return [(source[pairs], target[pairs]) for pairs in itertools.islice(sampler, number)]


def padded_shape(batch: tuple[np.ndarray, np.ndarray]) -> tuple[int, int, int]:
    """Pairs, and the lengths that both sides are padded to."""
    source, target = batch
    return len(source), int(source.max()), int(target.max())


def size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor in memory: what is expanded is there once."""
    distinct = [length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return int(np.prod(distinct)) * tensor.element_size()


def tensors(values) -> list[torch.Tensor]:
    """Tensors on the device among arguments or results."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]


class StepCounter(TorchDispatchMode):
    """Counts operations, bytes and floating-point operations by phase."""

    def __init__(self):
        super().__init__()
        self.phase = PHASES[0]
        self.operations, self.kernels = Counter(), Counter()
        self.bytes = defaultdict(Counter)  # by phase, then by name of the operation
        self.flops = Counter()
        self.synchronising = Counter()

    @contextmanager
    def of(self, phase: str):
        """Count what is dispatched within for this phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run and count one operation."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about the tensor, no work
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.operations[self.phase] += 1
        if self._synchronises(name, args, kwargs):
            self.synchronising[name] += 1
            if name in ("_local_scalar_dense", "item"):  # a fake tensor has no value: any will do
                return torch.empty((), dtype=args[0].dtype, device="meta").dtype.is_floating_point and 1.0 or 1
        result = func(*args, **kwargs)
        if func.is_view or name in NOTHING:
            return result
        moved = self._moved(func, name, args, kwargs, result)
        if not moved:
            return result
        self.kernels[self.phase] += 1
        if func.overloadpacket in flop_registry:
            self.flops[self.phase] += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        elif "attn" in name or "attention" in name:
            pass
        else:
            self.bytes[self.phase][name] += moved
        return result

    @staticmethod
    def _synchronises(name: str, args: tuple, kwargs: dict) -> bool:
        """Whether the host would wait for the device."""
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            return any(index is not None and index.dtype == torch.bool for index in args[1])
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if name in ("_to_copy", "copy_"):
            target = kwargs.get("device") or (args[0].device if name == "copy_" else None)
            source = args[1] if name == "copy_" else args[0]
            waits = not kwargs.get("non_blocking") and source.numel() > 0
            return target is not None and waits and torch.device(target).type != source.device.type
        return name in SYNCHRONISING and any(argument.is_cuda for argument in args if torch.is_tensor(argument))

    @staticmethod
    def _moved(func, name: str, args: tuple, kwargs: dict, result) -> int:
        """Bytes read and written."""
        written = sum(map(size, tensors(result)))
        if name in LOOK_UPS:
            return 2 * written + sum(map(size, tensors(args)[1:]))
        if name in WRITES:
            return written + sum(map(size, tensors(args)[1:]))
        if name.startswith("scatter"):
            return 2 * sum(map(size, tensors(args)[1:]))
        if not written:  # lists that are changed in place, as an optimizer's
            mutable = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
            written = sum(
                sum(map(size, tensors(value))) for value, changed in zip(args, mutable, strict=False) if changed
            )
        return written + sum(map(size, tensors((args, kwargs))))


def padded_inputs(batch) -> dict[str, torch.Tensor]:
    """A padded batch on the device, as the trainer passes it to the model."""
    pairs, source_length, target_length = padded_shape(batch)
    source = torch.empty((pairs, source_length), dtype=torch.int64, device="cuda")
    labels = torch.empty((pairs, target_length), dtype=torch.int64, device="cuda")
    return {"input_ids": source, "attention_mask": torch.empty_like(source), "labels": labels}


def count_step(preset: str, batch) -> StepCounter:
    """One micro-batch forward and backward, and the optimizer's step."""
    with fake_cuda():
        with torch.device("cuda"):
            config = VaswaniConfig.from_preset(preset, vocab_size=37_000, attn_implementation="sdpa")
            model = VaswaniForConditionalGeneration(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
        inputs = padded_inputs(batch)
        items = torch.empty((), dtype=torch.int64, device="cuda")
        _step(model, optimizer, inputs, items, StepCounter())  # the optimizer makes its averages
        counter = StepCounter()
        with counter:
            _step(model, optimizer, inputs, items, counter)
    return counter


def _step(model, optimizer, inputs, items, counter: StepCounter) -> None:
    fused = modeling_vaswani.projected_cross_entropy

    def loss_function(*args, **kwargs):
        with counter.of("loss"):
            return fused(*args, **kwargs)

    with (
        mock.patch.object(modeling_vaswani, "projected_cross_entropy", loss_function),
        mock.patch.object(modeling_vaswani, "can_be_fused", lambda *_: True),  # which takes plain tensors only
        torch.autocast("cuda", torch.bfloat16),
    ):
        loss = model(**inputs, num_items_in_batch=items, skip_logits=True).loss
    with counter.of("backward"):
        loss.backward()
    with counter.of("optimizer"):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, float("inf"))  # as transformers' Trainer does in every step
        optimizer.step()
        optimizer.zero_grad()


def row(preset: str, tokens: int, batch, counter: StepCounter) -> list[str]:
    """The cells of one line."""
    gigabytes = {phase: sum(counter.bytes[phase].values()) / 1e9 for phase in PHASES}
    pairs, source, target = padded_shape(batch)
    micro = ("forward", "loss", "backward")
    return [
        preset,
        f"{tokens:,}",
        f"{pairs} x {source}, {pairs} x {target}",
        f"{sum(counter.flops.values()) / 1e12:.1f}",
        f"{sum(gigabytes[phase] for phase in micro):.1f}",
        *(f"{gigabytes[phase]:.1f}" for phase in PHASES),
        f"{sum(counter.operations[phase] for phase in micro):,}",
        *(f"{counter.operations[phase]:,}" for phase in PHASES),
        f"{sum(counter.kernels[phase] for phase in micro):,}",
        str(sum(counter.synchronising.values())),
    ]


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["base", "big"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[25_000, 3_125], help="tokens a side of a device")
    parser.add_argument("--operations", type=int, default=0, help="list the operations that move most")
    options = parser.parse_args()
    header = ["model", "tokens a side", "batch", "TFLOP", "other traffic of a micro-step, GB"]
    header += [f"{phase}, GB" for phase in PHASES] + ["operations of a micro-step"]
    header += [f"of {phase}" for phase in PHASES] + ["kernels of a micro-step", "synchronising"]
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    lists = []
    for tokens in options.tokens:
        batches = micro_batches(25_000, 25_000 // tokens, 1000)
        middle = sorted(batches, key=lambda batch: batch[0].max())[len(batches) // 2]
        for preset in options.presets:
            counter = count_step(preset, middle)
            print("| " + " | ".join(row(preset, tokens, middle, counter)) + " |", flush=True)
            lists.append((preset, tokens, counter))
    for preset, tokens, counter in lists if options.operations else []:
        total = Counter()
        for phase in PHASES:
            total.update({(phase, name): moved for name, moved in counter.bytes[phase].items()})
        print(f"\n{preset}, {tokens:,} tokens a side, GB:")
        for (phase, name), moved in total.most_common(options.operations):
            print(f"- {phase}, {name}: {moved / 1e9:.1f}")
    shapes = {padded_shape(batch) for batch in micro_batches(25_000, 8, MICRO_BATCHES)}
    print(f"\nDistinct shapes of {MICRO_BATCHES:,} micro-batches of 3,125 tokens a side: {len(shapes):,}.")


if __name__ == "__main__":
    main()
