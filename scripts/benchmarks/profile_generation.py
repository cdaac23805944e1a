"""Where the time of `generate()` goes: encoder, source, decoder steps, and transformers' loop around them.

    python scripts/benchmarks/profile_generation.py --batch 1 --beams 1 --precision float32

Processor time of one thread, so that what else the machine does weighs little: random weights of the base model with a
vocabulary of 10,000, 24 source tokens, 24 forced output tokens, `prepare_for_inference` in a precision or, with
`plain`, without. Medians; the loop is what `generate()` takes and the parts do not.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from generation import by_generate, vaswani_model

from vaswani_transformer.decoding.cpu_inference import PRECISIONS, prepare_for_inference
from vaswani_transformer.model.incremental_decoding_vaswani import DecodingCache


def seconds(work: Callable) -> tuple[float, object]:
    """Processor time of a function without arguments, and what it returns."""
    started = time.thread_time()
    result = work()
    return time.thread_time() - started, result


@torch.no_grad()
def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--precision", choices=("plain", *PRECISIONS), default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = argparse.Namespace(preset="base", vocab_size=10_000, target_length=24)
    model = vaswani_model(options)
    if arguments.precision != "plain":
        prepare_for_inference(model, arguments.precision)
    ids = torch.randint(4, options.vocab_size, (arguments.batch, 24))
    mask, token = torch.ones_like(ids), torch.full((arguments.batch * arguments.beams, 1), 5)
    generate = by_generate(model, options)
    found = []
    for _ in range(arguments.rounds):
        cache = DecodingCache(model, arguments.beams)
        encoder, states = seconds(lambda: model.model.encoder(ids, mask).last_hidden_state)
        source, _ = seconds(lambda cache=cache, states=states: cache.look_at_source(states, mask))
        steps, _ = seconds(lambda cache=cache: [cache.logits(token) for _ in range(options.target_length)])
        whole, _ = seconds(lambda: generate(ids, arguments.beams))
        found.append((encoder, source, steps, whole - encoder - source - steps, whole))
    print(f"batch {arguments.batch}, beam {arguments.beams}, {arguments.precision}: ms of an output position")
    for name, times in zip(("encoder", "source", "step", "loop", "all"), zip(*found, strict=True), strict=True):
        print(f"{name:8} {1000 * median(times) / options.target_length:7.2f}")


if __name__ == "__main__":
    main()
