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
from functools import cache
from unittest import mock

from fake_cuda import fake_cuda, stand_in_for_cuda

stand_in_for_cuda()  # before torch

import numpy as np  # noqa: E402
import torch  # noqa: E402
from inductor_counts import counting_backend, like_an_h100  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration  # noqa: E402
from vaswani_transformer.data.batching import PackedCollator, TokenBatchSampler, packed_size  # noqa: E402
from vaswani_transformer.model import (  # noqa: E402
    layers_vaswani,
    loss_kernel_vaswani,
    modeling_vaswani,
    packed_sentences_vaswani,
)

PHASES = ("forward", "loss", "backward", "optimizer")
VARIANTS = {
    "padded": {},
    "padded, compiled": {"is_compiled": True},
    "without padding": {"padding_free": True},
    "without padding, compiled": {"padding_free": True, "is_compiled": True},
}
LONGEST = 250
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
    return tuple(np.clip(side.round(), 2, LONGEST).astype(np.int32) for side in (source, target))


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


def _is_changed(argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class StepCounter(TorchDispatchMode):
    """Counts operations, bytes and floating-point operations by phase."""

    def __init__(self):
        super().__init__()
        self.phase = PHASES[0]
        self.is_fused = False  # within a compiled graph, of which only the products are dispatched one by one
        self.clear()

    def clear(self) -> None:
        """Start again."""
        self.operations, self.kernels = Counter(), Counter()
        self.bytes = defaultdict(Counter)  # by phase, then by name of the operation
        self.flops = Counter()
        self.synchronising = Counter()
        self.names = Counter()  # of kernels, by phase and name of the operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """So that torch.compile works within."""
        return True

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
        name = func.overloadpacket.__name__
        is_product = func.overloadpacket in flop_registry or "attn" in name or "attention" in name
        if func.namespace == "prim" or (self.is_fused and not is_product):  # prim: a question, no work
            return func(*args, **kwargs)
        self.operations[self.phase] += 1
        if self._synchronises(name, args, kwargs):
            self.synchronising[name] += 1
            if name in ("_local_scalar_dense", "item"):
                return 1.0 if args[0].is_floating_point() else 1  # a fake tensor has no value: any will do
        result = func(*args, **kwargs)
        if func.is_view or name in NOTHING:
            return result
        moved = self._moved(func, name, args, kwargs, result)
        if not moved:
            return result
        self.kernels[self.phase] += 1
        if func.overloadpacket in flop_registry:
            count = flop_registry[func.overloadpacket]
            if name.startswith("_varlen_attn"):
                pass  # of sentences of which no formula knows the lengths: see `attention_flops`
            elif name in ("mm", "addmm"):  # an overload with the result's type is not known there
                self.flops[self.phase] += count(*filter(torch.is_tensor, args), out_val=result)
            else:
                self.flops[self.phase] += count(*args, **kwargs, out_val=result)
        elif not is_product:
            self.bytes[self.phase][name] += moved
        self.names[self.phase, name] += 1
        return result

    def run_fused(self, graph_module, kernels: int, moved: int):
        """For `counting_backend`: what runs a graph on fake tensors and counts its kernels."""

        def run(arguments: list):
            self.is_fused = True
            try:
                results = graph_module(*arguments)
            finally:
                self.is_fused = False
                arguments.clear()
            self.operations[self.phase] += kernels
            self.kernels[self.phase] += kernels
            self.bytes[self.phase]["fused"] += moved
            self.names[self.phase, "fused"] += kernels
            return results

        run._boxed_call = True
        return run

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
            arguments = zip(func._schema.arguments, args, strict=False)
            written = sum(map(size, tensors([value for argument, value in arguments if _is_changed(argument)])))
        return written + sum(map(size, tensors((args, kwargs))))


def inputs_of(batch, padding_free: bool, size_of_side: int) -> dict:
    """A batch on the device, as the trainer passes it to the model."""
    if not padding_free:
        pairs, source, target = padded_shape(batch)
        shapes = {"input_ids": (pairs, source), "attention_mask": (pairs, source), "labels": (pairs, target)}
        return {name: torch.empty(shape, dtype=torch.int64, device="cuda") for name, shape in shapes.items()}
    made = pack(batch, size_of_side)
    del made["source_tokens"]
    on_device = {name: torch.empty_like(value, device="cuda") for name, value in made.items() if torch.is_tensor(value)}
    return {**made, **on_device}


def side_size(batches: list) -> int:
    """The size of a side that holds any of these batches without padding."""
    return packed_size(max(int(side.sum()) for batch in batches for side in batch), LONGEST)


def pack(batch, size_of_side: int) -> dict:
    """What the trainer's collator makes of pairs of these lengths."""
    collate = PackedCollator(0, LONGEST, size_of_side, size_of_side)
    ids = np.ones(LONGEST, np.int64)
    return collate([{"input_ids": ids[:source], "labels": ids[:target]} for source, target in zip(*batch, strict=True)])


def attention_flops(config: VaswaniConfig, batch) -> float:
    """Of attention within each sentence, forward and backward, of which no formula knows the lengths."""
    source, target = (side.astype(float) for side in batch)
    pairs_of_tokens = config.encoder_layers * (source**2).sum()
    pairs_of_tokens += config.decoder_layers * ((target**2).sum() + (source * target).sum())
    return 2.0 * config.num_heads * (config.d_k + config.d_v) * pairs_of_tokens * 3.5  # scores are computed again


def count_step(
    preset: str, batch, size_of_side: int, padding_free: bool = False, is_compiled: bool = False
) -> StepCounter:
    """One micro-batch forward and backward, and the optimizer's step."""
    torch._dynamo.reset()
    counter = StepCounter()
    with fake_cuda(), as_on_a_gpu(counting_backend(counter.run_fused)), like_an_h100():
        with torch.device("cuda"):
            config = VaswaniConfig.from_preset(preset, vocab_size=37_000, attn_implementation="sdpa")
            model = VaswaniForConditionalGeneration(config).train()
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            layer.is_compiled = is_compiled
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
        inputs = inputs_of(batch, padding_free, size_of_side)
        items = torch.empty((), dtype=torch.float32, device="cuda")
        _step(model, optimizer, inputs, items, counter)  # compiles, and the optimizer makes its averages
        counter.clear()
        with counter:
            _step(model, optimizer, inputs, items, counter)
    if padding_free:
        counter.flops["forward"] += attention_flops(config, batch)
    return counter


@contextmanager
def as_on_a_gpu(backend):
    """Our choices as on an H100: flash attention for batches without padding, the loss by its Triton kernel."""
    with (
        mock.patch.object(packed_sentences_vaswani, "_has_kernel", lambda _: True),
        mock.patch.object(loss_kernel_vaswani, "is_usable", lambda: True),
        mock.patch.object(modeling_vaswani, "can_be_fused", lambda *_: True),  # of fake tensors, too
        mock.patch.object(torch._dynamo, "mark_dynamic", lambda *_: None),
        mock.patch.object(
            layers_vaswani,
            "compiled",
            cache(lambda function, _: torch.compile(function, backend=backend, dynamic=False)),
        ),
    ):
        yield


def _step(model, optimizer, inputs, items, counter: StepCounter) -> None:
    fused = modeling_vaswani.projected_cross_entropy

    def loss_function(*args, **kwargs):
        with counter.of("loss"):
            return fused(*args, **kwargs)

    with (
        mock.patch.object(modeling_vaswani, "projected_cross_entropy", loss_function),
        torch.autocast("cuda", torch.bfloat16),
    ):
        loss = model(**inputs, num_items_in_batch=items, skip_logits=True).loss
    with counter.of("backward"):
        loss.backward()
    with counter.of("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def row(name: str, preset: str, tokens: int, counter: StepCounter) -> list[str]:
    """The cells of one line."""
    moved = {phase: sum(counter.bytes[phase].values()) / 1e9 for phase in PHASES}
    micro = PHASES[:3]
    cells = [f"{preset}, {tokens:,}", name, f"{sum(counter.flops.values()) / 1e12:.1f}"]
    cells += [f"{sum(moved.values()):.1f}", *(f"{moved[phase]:.1f}" for phase in PHASES)]
    cells += [f"{sum(counts[phase] for phase in micro):,}" for counts in (counter.kernels, counter.operations)]
    return [*cells, str(sum(counter.synchronising.values()))]


def count_shapes(tokens_per_batch: int = 25_000, parts: int = 8) -> dict[str, int]:
    """Distinct shapes among the micro-batches of 1,370 steps, padded and without padding."""
    batches = micro_batches(tokens_per_batch, parts, MICRO_BATCHES)
    packed, size_of_side = set(), side_size(batches)
    for batch in batches:
        made = pack(batch, size_of_side)
        packed.add(tuple(tuple(value.shape) for value in made.values() if torch.is_tensor(value)))
    return {"padded": len({padded_shape(batch) for batch in batches}), "without padding": len(packed)}


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["base", "big"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[25_000, 3_125], help="tokens a side of a device")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="some of the rows")
    parser.add_argument("--operations", type=int, default=0, help="list the operations that move most")
    parser.add_argument("--no-shapes", action="store_true", help="do not count shapes")
    options = parser.parse_args()
    header = ["model, tokens a side", "batches and layers", "TFLOP", "other traffic, GB", *(f"of {p}" for p in PHASES)]
    header += ["operations that move something", "all operations", "synchronising"]
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    lists = []
    for tokens, preset in itertools.product(options.tokens, options.presets):
        batches = micro_batches(25_000, 25_000 // tokens, 1000)
        middle = sorted(batches, key=lambda batch: batch[0].max())[len(batches) // 2]
        for name in options.only:
            counter = count_step(preset, middle, side_size(batches), **VARIANTS[name])
            print("| " + " | ".join(row(name, preset, tokens, counter)) + " |", flush=True)
            lists.append((f"{preset}, {tokens:,} tokens a side, {name}", counter))
    for name, counter in lists if options.operations else []:
        total = Counter({(phase, kind): moved for phase in PHASES for kind, moved in counter.bytes[phase].items()})
        print(f"\n{name}:")
        for key, moved in total.most_common(options.operations):
            print(f"- {', '.join(key)}: {moved / 1e9:.1f} GB in {counter.names[key]:,} operations")
    if not options.no_shapes:
        counts = "; ".join(f"{name} {number:,}" for name, number in count_shapes().items())
        print(f"\nDistinct shapes of {MICRO_BATCHES:,} micro-batches of 3,125 tokens a side: {counts}.")


if __name__ == "__main__":
    main()
