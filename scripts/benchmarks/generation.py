"""How fast a model translates text: by torch in float32, in int8, and by CTranslate2 alone.

    python scripts/benchmarks/generation.py MODEL --source test.en.gz --reference test.de.gz --threads 2
    python scripts/benchmarks/generation.py base --sentences 50      # a preset with random weights, random sentences

"CTranslate2 alone" is its `translate_batch` on the same int8 weights, with its own rule of lengths. All run in one
process and take turns; sentences a second are of the processor time of their best round. With random weights no output
ends by itself: each has `--target-length` tokens.
"""

import argparse
import gzip
import itertools
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ctranslate2
import torch

from vaswani_transformer import Translator, VaswaniConfig, VaswaniForConditionalGeneration, train_tokenizer
from vaswani_transformer.data.synthetic import generate_corpus
from vaswani_transformer.evaluation.metrics import score_translations
from vaswani_transformer.export.engine import int8_folder, load_for_decoding


def read_lines(path: str, number: int) -> list[str]:
    """The first lines of a file, plain or gzipped."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as lines:
        return [line.strip() for line in itertools.islice(lines, number)]


def random_model(preset: str, folder: Path, number: int) -> list[str]:
    """Write a model with random weights into a folder; returns sentences for it."""
    pairs = generate_corpus(2000, 10, 10, seed=0).train
    tokenizer = train_tokenizer((side for pair in pairs for side in pair), vocab_size=1000)
    VaswaniForConditionalGeneration(VaswaniConfig.from_preset(preset)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    choose = random.Random(0)
    return [" ".join(choose.choice(pairs)[0] for _ in range(choose.randint(1, 3))) for _ in range(number)]


def by_translator(folder: str, precision: str, arguments: argparse.Namespace, beams: int) -> Callable:
    """`Translator` in a precision."""
    model, tokenizer = load_for_decoding(folder, "cpu", precision)
    options = {"num_beams": beams, "max_new_tokens": arguments.target_length}
    translator = Translator(model, tokenizer, arguments.tokens_per_batch, **options)
    return lambda lines: list(translator.translate(lines))


def by_ctranslate2(folder: str, arguments: argparse.Namespace, beams: int) -> Callable:
    """CTranslate2's `translate_batch` between our tokenizer's two ways."""
    engine = ctranslate2.Translator(str(int8_folder(folder)), compute_type="int8", intra_threads=arguments.threads)
    _, tokenizer = load_for_decoding(folder, "cpu")
    limit = {"max_batch_size": arguments.tokens_per_batch, "batch_type": "tokens"}
    if arguments.target_length:
        limit["max_decoding_length"] = arguments.target_length

    def run(lines: list[str]) -> list[str]:
        tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(lines)["input_ids"]]
        results = engine.translate_batch(tokens, beam_size=beams, **limit)
        ids = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
        return tokenizer.batch_decode(ids, skip_special_tokens=True)

    return run


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="model folder, or a preset")
    parser.add_argument("--source")
    parser.add_argument("--reference")
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--target-length", type=int, help="of a preset's outputs (default: 30)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.model
        if not Path(folder).is_dir():
            folder, arguments.target_length = temporary, arguments.target_length or 30
            lines = random_model(arguments.model, Path(folder), arguments.sentences)
        else:
            lines = read_lines(arguments.source, arguments.sentences)
        references = read_lines(arguments.reference, arguments.sentences) if arguments.reference else None
        print("| beams | engine | sentences/s | times float32 | BLEU |\n|---|---|---|---|---|")
        for beams in arguments.beams:
            contestants = {
                "float32": by_translator(folder, "float32", arguments, beams),
                "int8": by_translator(folder, "int8", arguments, beams),
                "CTranslate2 alone, int8": by_ctranslate2(folder, arguments, beams),
            }
            outputs, seconds = {}, dict.fromkeys(contestants, float("inf"))
            for name in [name for _ in range(arguments.rounds + 1) for name in contestants]:
                started = time.process_time()
                outputs[name] = contestants[name](lines)
                seconds[name] = min(seconds[name], time.process_time() - started)
            for name in contestants:
                bleu = f"{score_translations(outputs[name], references)['bleu']:.2f}" if references else ""
                rates = f"{len(lines) / seconds[name]:,.0f} | {seconds['float32'] / seconds[name]:.2f}"
                print(f"| {beams} | {name} | {rates} | {bleu} |", flush=True)


if __name__ == "__main__":
    main()
