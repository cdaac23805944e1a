"""Speculative decoding: a small model drafts, the large one checks several tokens at once. Same outputs, what speed?

    python scripts/benchmarks/speculative.py MODEL --assistant SMALLER_MODEL --source test_2016_flickr.en.gz

Sentences are translated one by one, greedily, by the model alone and with the assistant, in turn and in random order;
the outputs have to be identical, and the script ends with status 1 where they are not. Both models need one tokenizer.
"""

import argparse
import random
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--assistant", required=True, help="folder of a smaller model with the same tokenizer")
    parser.add_argument("--source", required=True, type=Path, help="sentences, one a line (.gz works)")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 8], help="tokens drafted at once")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    from vaswani_transformer import load_model
    from vaswani_transformer.data.text_files import read_lines

    model, tokenizer = load_model(options.model, options.device)
    assistant, other = load_model(options.assistant, options.device)
    if tokenizer.get_vocab() != other.get_vocab():
        sys.exit("error: the two models have different tokenizers: train the smaller one with --tokenizer MODEL")
    sentences = [line for line in islice(read_lines(options.source), options.sentences) if line.strip()]
    ways = {"alone": {}}
    for tokens in options.drafts:
        ways[f"{tokens} tokens drafted"] = {"assistant_model": assistant, "num_assistant_tokens": tokens}
    seconds, tokens, different = dict.fromkeys(ways, 0.0), 0, 0
    for sentence in tqdm(sentences, unit="sentence"):
        inputs = tokenizer(sentence, return_tensors="pt").to(model.device)
        outputs = {}
        for name in random.sample(list(ways), len(ways)):
            assistant.generation_config.num_assistant_tokens = ways[name].get("num_assistant_tokens")
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            more = {"assistant_model": assistant} if ways[name] else {}
            started = time.perf_counter()
            outputs[name] = model.generate(**inputs, num_beams=1, do_sample=False, **more)[0, 1:].tolist()
            seconds[name] += time.perf_counter() - started
        tokens += len(outputs["alone"])
        different += any(output != outputs["alone"] for output in outputs.values())
    sizes = [sum(parameter.numel() for parameter in one.parameters()) for one in (model, assistant)]
    print(f"{len(sentences)} sentences, {tokens} tokens; model of {sizes[0]:,} parameters, assistant of {sizes[1]:,}")
    print("| greedy search, batch 1 | tokens a second | to the model alone |\n|---|---:|---:|")
    for name, time_taken in seconds.items():
        print(f"| {name} | {tokens / time_taken:,.0f} | {seconds['alone'] / time_taken:.2f} |")
    print(f"outputs that differ: {different}")
    return int(different > 0)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
