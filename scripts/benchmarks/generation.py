"""How fast outputs are generated, side by side: ours, transformers' Marian, and the fastest engines that there are.

    python scripts/benchmarks/generation.py --output cells.jsonl               # one thread
    python scripts/benchmarks/generation.py --output cells.jsonl --threads 2
    python scripts/benchmarks/generation.py --output cells.jsonl --avx2        # forced, as far as it can be
    python scripts/benchmarks/generation.py --marian-python PYTHON             # one that has pymarian
    python scripts/benchmarks/generation.py --memory --beams 4
    python scripts/benchmarks/generation.py --profile int8 --batches 1 --beams 1
    python scripts/benchmarks/generation.py --model MODEL --source FILE --reference FILE
    python scripts/benchmarks/generation.py --device cuda --batches 1 16 64 256 --vocab-size 37000

Contestants are those of `generation_contestants.py`, which says how each is made; those that are not installed are left
out with a message. All have random weights of one shape (base by default), and but for transformers' Marian the same
ones. A batch of sources of equal length is given, and every output is forced to the same number of tokens, so that all
do the same work. Each contestant has a process of its own, so that none profits from what another changes in its
process; they run in turn and in random order, each for half a second at least, so that only the ratios of one run mean
something; the first round does not count. What an engine does once for a model (packing, quantising, exporting) does
not count either. bfloat16 is left out on a processor for which oneDNN does not compute in it.

The first table gives target tokens a second, medians of the rounds; the second ratios of two contestants in the same
round, their median and in brackets their minimum, and whether the median meets what is wanted of it. Of several of ours
or of a peer the faster one counts. With --output each cell of the table is added to a file when it is measured, cells
that are there already are not measured again, and the tables are of all that the file holds.

With --memory the table is of the most memory that a process had that loaded a model and generated once: a process for
each contestant and batch.

With --profile only ours runs, in a precision of `prepare_for_inference` or, with `plain`, without it: a table of where
its processor time goes, in milliseconds of an output position and percent. The source is what is projected of it for
all steps; products are those of the decoder's layers, other what else the layers do; the search is what `generate()`
takes beyond all these and the output layer. With `--loop transformers` a processor that does nothing lets transformers'
loop search. With `--shortlist 1000` a second model takes turns with the first, whose shortlist has always the first
1,000 tokens.

With --model a trained model translates a text that is sorted by length, text in and text out: ours prepared, with the
shortlist where the folder has one, and CTranslate2 with our weights (and its own rule of lengths). They run in turn in
one process, each in one thread; sentences a second of processor time are medians of the rounds, with BLEU, the size of
the weights, and how many outputs are not those of the first.
"""

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from generation_contestants import (
    AVX2,
    CTRANSLATE2,
    CTRANSLATE2_PARTS,
    END,
    MARIAN,
    MARIAN_FBGEMM,
    ONNX,
    PLAIN,
    PREPARED,
    SPECIAL,
    TRANSFORMERS,
    by_generate,
    contestants,
    our_model,
    processor,
    take_part,
    write_models,
)
from in_turn import InTurn

# What is compared: ours and peers, of which the faster counts, their precision, and the ratio that is wanted.
_BEST, _CTRANSLATE2, _MARIAN = (PLAIN, PREPARED), (CTRANSLATE2, CTRANSLATE2_PARTS), (MARIAN, MARIAN_FBGEMM)
TARGETS = {
    "plain / transformers' Marian": ((PLAIN,), (TRANSFORMERS,), "float32", 1.4),
    "float32 / CTranslate2": (_BEST, _CTRANSLATE2, "float32", 1.0),
    "float32 / Marian": (_BEST, _MARIAN, "float32", 1.0),
    "int8 / CTranslate2": ((PREPARED,), _CTRANSLATE2, "int8", 1.1),
    "int8 / Marian": ((PREPARED,), _MARIAN, "int8", 1.1),
    "int8 / ONNX Runtime": ((PREPARED,), (ONNX,), "int8", None),
}
_SETTING = ("preset", "vocab_size", "source_length", "target_length", "device", "threads", "avx2")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=["base", "big", "student-12-1", "student-6-2"], default="base")
    parser.add_argument("--vocab-size", type=int, default=10_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], metavar="SENTENCES")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--source-length", type=int, default=24)
    parser.add_argument("--target-length", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--avx2", action="store_true", help="no instructions beyond AVX2")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the contestants in the table")
    parser.add_argument("--marian-python", default=sys.executable, metavar="PYTHON", help="one that has pymarian")
    parser.add_argument("--output", type=Path, metavar="FILE", help="to which measured cells are added")
    parser.add_argument("--memory", action="store_true", help="a table of memory in place of speed")
    parser.add_argument("--profile", choices=["plain", "float32", "bfloat16", "int8"], metavar="PRECISION")
    parser.add_argument("--loop", choices=["own", "transformers"], default="own", help="of --profile")
    parser.add_argument("--shortlist", type=int, metavar="TOKENS", help="of --profile")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="that translates a text, in place of all else")
    parser.add_argument("--source", type=Path, metavar="FILE", help="sources, for --model")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="their translations, for --model")
    return parser.parse_args(arguments)


def sources(options: argparse.Namespace, batch: int) -> list[list[int]]:
    """Random ids of so many sentences, each with the end token."""
    ids = range(len(SPECIAL), options.vocab_size)
    return [[*random.choices(ids, k=options.source_length - 1), END] for _ in range(batch)]


def machine() -> str:
    """Processor and versions, as they stand above a table."""
    names = [line.partition(": ")[2] for line in processor().splitlines() if line.startswith("model name")]
    known = sorted({"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8"} & set(processor().split()))
    versions = []
    for package in ("torch", "transformers", "ctranslate2", "onnxruntime"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join([f"{names[0] if names else platform.machine()} ({' '.join(known)})", *versions])


def measure(options: argparse.Namespace, done: list[dict]) -> list[dict]:
    """The cells that are not done: each its setting, batch, beams, and the rates of each contestant."""
    setting = {name: getattr(options, name) for name in _SETTING} | {"machine": machine()}
    wanted = [setting | {"batch": batch, "beams": beams} for batch in options.batches for beams in options.beams]
    missing = [cell for cell in wanted if not any(cell.items() <= other.items() for other in done)]
    if not missing:
        return []
    names = contestants(options)
    with tempfile.TemporaryDirectory() as folder:
        write_models(names, options, Path(folder))
        players = InTurn(take_part, {name: (name, options, Path(folder)) for name in names})
        for cell in missing:
            print(f"batch {cell['batch']}, beam {cell['beams']}", file=sys.stderr)
            question = sources(options, cell["batch"]), cell["beams"]
            answers = players.rounds(question, options.rounds)
            cell["rates"] = {name: [rate for rate, _ in own] for name, own in answers.items()}
            if options.output:
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(cell) + "\n")
        players.close()
    return missing


def ratio(rates: dict[str, list[float]], target: str) -> tuple[float, float] | None:
    """Median and minimum of the ratios within a round, of the faster of ours to the faster of the peers."""
    ours, peers, precision, _ = TARGETS[target]
    sides = [[rates[f"{who}, {precision}"] for who in side if f"{who}, {precision}" in rates] for side in (ours, peers)]
    if not all(sides):
        return None
    ratios = [own / peer for own, peer in zip(*(max(side, key=median) for side in sides), strict=True)]
    return median(ratios), min(ratios)


def tables(cells: list[dict]) -> str:
    """Rates and ratios in Markdown, a pair of tables for each setting."""
    settings = {}
    for cell in sorted(cells, key=lambda cell: (cell["batch"], cell["beams"])):
        settings.setdefault(_heading(cell), []).append(cell)
    return "\n".join(f"{head}\n\n{rate_table(own)}\n{target_table(own)}" for head, own in settings.items())


def _heading(cell: dict) -> str:
    threads = f"{cell['threads']} thread{'s' * (cell['threads'] > 1)}"
    shape = f"{cell['preset']}, vocabulary {cell['vocab_size']:,}, {cell['source_length']} tokens in,"
    forced = ", AVX2 forced" if cell["avx2"] else ""
    return f"{threads}{forced}; {shape} {cell['target_length']} out; {cell['machine']}:"


def rate_table(cells: list[dict]) -> str:
    """Target tokens a second, and in brackets the ratio to the first contestant."""
    text = f"| target tokens a second | {' | '.join(map(_place, cells))} |\n|---|{'---:|' * len(cells)}\n"
    names = list(dict.fromkeys(name for cell in cells for name in cell["rates"]))
    for name in names:
        row = []
        for rates in (cell["rates"] for cell in cells):
            own, first = (median(rates[one]) if one in rates else None for one in (name, names[0]))
            row.append("" if own is None else f"{own:,.0f} ({own / first:.2f})" if first else f"{own:,.0f}")
        text += f"| {name} | {' | '.join(row)} |\n"
    return text


def target_table(cells: list[dict]) -> str:
    """Ratios to the peers, and which are below what is wanted."""
    shown = {name: own[-1] for name, own in TARGETS.items() if any(ratio(cell["rates"], name) for cell in cells)}
    heads = [name if least is None else f"{name}, at least {least}" for name, least in shown.items()]
    text = f"| times the peer, median (minimum) | {' | '.join(heads)} |\n|---|{'---:|' * len(shown)}\n"
    met, missed = 0, []
    for cell in cells:
        row = []
        for name, least in shown.items():
            found = ratio(cell["rates"], name)
            row.append("" if found is None else f"{found[0]:.2f} ({found[1]:.2f})")
            if found and least and found[0] >= least:
                row[-1] += " met"
                met += 1
            elif found and least:
                missed.append(f"{_place(cell)}: {name} {found[0]:.2f}")
                row[-1] = f"**{row[-1]} missed**"
        text += f"| {_place(cell)} | {' | '.join(row)} |\n"
    return f"{text}\n{met} met, {len(missed)} missed{': ' * bool(missed)}{'; '.join(missed)}.\n"


def _place(cell: dict) -> str:
    return f"batch {cell['batch']}, beam {cell['beams']}"


def memory(options: argparse.Namespace) -> None:
    """Print the peak of memory of each contestant: loaded, and with each batch."""
    names = contestants(options)
    settings = list(itertools.product(options.batches, options.beams))
    heads = [f"batch {batch}, beam {beams}" for batch, beams in settings]
    print(f"{machine()}, {options.threads} thread{'s' * (options.threads > 1)}:\n")
    print(f"| peak memory, MB | loaded | {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) + 1)}")
    with tempfile.TemporaryDirectory() as folder:
        write_models(names, options, Path(folder))
        for name in names:
            row = []
            for batch, beams in settings:
                player = InTurn(take_part, {name: (name, options, Path(folder))})
                [(_, peak)] = player.rounds((sources(options, batch), beams), 1)[name]
                row += [peak] if row else [player.ready[name], peak]
                player.close()
            print(f"| {name} | {' | '.join(f'{peak:,.0f}' for peak in row)} |", flush=True)


def profile(options: argparse.Namespace) -> None:
    """Print where the processor time of our `generate()` goes, for each batch size and number of beams."""
    import torch

    from vaswani_transformer.decoding.cpu_inference import prepare_for_inference
    from vaswani_transformer.model.incremental_decoding_vaswani import IncrementalDecoder
    from vaswani_transformer.model.linear_vaswani import Projection

    torch.set_num_threads(options.threads)
    models = [our_model(options)]
    if options.profile != "plain":
        prepare_for_inference(models[0], options.profile)
        if options.shortlist:
            tokens = torch.arange(options.shortlist)
            models.append(prepare_for_inference(our_model(options), options.profile, lambda ids: tokens))
    taken: dict[str, float] = {}

    def timed(kind: type, name: str, part: str) -> None:
        method = getattr(kind, name)

        def run(*arguments, **more):
            started, products = time.thread_time(), taken["products"]
            result = method(*arguments, **more)
            taken[part] += time.thread_time() - started
            if part == "layers":
                taken["their products"] += taken["products"] - products
            return result

        setattr(kind, name, run)

    timed(type(models[0].model.encoder), "forward", "encoder")
    timed(IncrementalDecoder, "read_source", "source")
    timed(IncrementalDecoder, "step", "layers")
    timed(IncrementalDecoder, "logits", "step")
    timed(Projection, "__call__", "products")
    more = {"logits_processor": [lambda ids, scores: scores]} if options.loop == "transformers" else {}
    runs = [by_generate(model, options, **more) for model in models]
    head = ["batch", "beam", "encoder", "source", "products", "other", "output layer", "search", "all"]
    head += ["with the shortlist", "saved"] if len(runs) > 1 else []
    print(f"| {' | '.join(head)} |\n{'|---:' * len(head)}|")
    for batch, beams in itertools.product(options.batches, options.beams):
        ids = sources(options, batch)
        rounds = [[] for _ in runs]
        for _ in range(options.rounds + 1):
            for generate, times in zip(runs, rounds, strict=True):
                taken.update(dict.fromkeys(("encoder", "source", "layers", "step", "products", "their products"), 0.0))
                whole = time.thread_time()
                generate(ids, beams)
                whole = time.thread_time() - whole
                parts = [taken["encoder"], taken["source"], taken["their products"]]
                parts += [taken["layers"] - taken["their products"], taken["step"] - taken["layers"]]
                times.append((*parts, whole - sum(parts), whole))
        columns = list(zip(*rounds[0][1:], strict=True)) + [[times[-1] for times in other[1:]] for other in rounds[1:]]
        medians = [median(column) for column in columns]
        whole = medians[6]
        cells = [f"{1000 * seconds / options.target_length:.2f}" for seconds in medians]
        cells[:6] = [f"{cell} ({part / whole:.0%})" for cell, part in zip(cells, medians[:6], strict=False)]
        cells += [f"{1 - shorter / whole:.0%}" for shorter in medians[7:]]
        print(f"| {batch} | {beams} | {' | '.join(cells)} |", flush=True)


def translators(options: argparse.Namespace, folder: Path) -> dict[str, tuple[Path, Callable]]:
    """Whoever translates a text, by name: where its weights lie, and a function of lines, beams and batch size."""

    from vaswani_transformer import Translator, load_model
    from vaswani_transformer.decoding.cpu_inference import prepare_for_inference

    def by_us(precision: str) -> Callable:
        model, tokenizer = load_model(options.model, "cpu")
        prepare_for_inference(model, precision)
        own = {beams: Translator(model, tokenizer, 10**9, num_beams=beams) for beams in options.beams}
        return lambda lines, beams, sentences: list(own[beams].translate(lines, window=sentences))

    def by_ctranslate2(path: Path, quantization: str) -> Callable:
        export_model(options.model, path, quantization=quantization)
        translator = ctranslate2.Translator(str(path), compute_type=quantization, intra_threads=1)
        _, tokenizer = load_model(options.model, "cpu")

        def run(lines: list[str], beams: int, sentences: int) -> list[str]:
            tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(lines)["input_ids"]]
            found = translator.translate_batch(tokens, max_batch_size=sentences, beam_size=beams)
            ids = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in found]
            return tokenizer.batch_decode(ids, skip_special_tokens=True)

        return run

    weights, makers = options.model / "model.safetensors", {}
    for precision in ("float32", "int8"):
        makers[f"ours, {precision}"] = weights, partial(by_us, precision)
    try:
        import ctranslate2

        from vaswani_transformer.export.exporting import export_model

        for quantization in ("float32", "int8"):
            path = folder / quantization
            makers[f"CTranslate2, {quantization}"] = path / "model.bin", partial(by_ctranslate2, path, quantization)
    except ImportError:
        print("CTranslate2 is not installed: left out", file=sys.stderr)
    return {name: (path, make()) for name, (path, make) in makers.items() if not options.only or name in options.only}


def translate_text(options: argparse.Namespace) -> None:
    """Print how fast and how well a text is translated."""
    import torch

    from vaswani_transformer import load_model
    from vaswani_transformer.data.pair_readers import read_pairs
    from vaswani_transformer.evaluation.metrics import score_translations

    torch.set_num_threads(1)
    _, tokenizer = load_model(options.model, "cpu")
    pairs = read_pairs("text", [(options.source, options.reference)])
    pairs = sorted(pairs, key=lambda pair: len(tokenizer(pair[0])["input_ids"]))
    lines, references = map(list, zip(*pairs, strict=True))
    print("| | batch | beam | sentences/s | times the first | other outputs | BLEU | weights, MB |")
    print("|---|" + "---:|" * 7)
    with tempfile.TemporaryDirectory() as folder:
        runs = translators(options, Path(folder))
        for batch, beams in itertools.product(options.batches, options.beams):
            seconds, outputs = {name: [] for name in runs}, {}
            for turn in range(options.rounds + 1):
                print(f"batch {batch}, beam {beams}: round {turn} of {options.rounds}", file=sys.stderr)
                for name in random.sample(list(runs), len(runs)):
                    started = time.process_time()
                    outputs[name] = runs[name][1](lines, beams, batch)
                    if turn:
                        seconds[name].append(time.process_time() - started)
            first = next(iter(runs))
            for name, (weights, _) in runs.items():
                rate, base = (len(lines) / median(seconds[own]) for own in (name, first))
                others = sum(own != other for own, other in zip(outputs[name], outputs[first], strict=True))
                bleu = score_translations(outputs[name], references)["bleu"]
                size = weights.stat().st_size / 1e6
                cells = f"{rate:.0f} | {rate / base:.2f} | {others} | {bleu:.2f} | {size:.1f}"
                print(f"| {name} | {batch} | {beams} | {cells} |", flush=True)


def main() -> None:
    """Run all and print the tables."""
    options = parse_options()
    # For the processes that start.
    os.environ.update(AVX2 if options.avx2 else {}, OMP_NUM_THREADS=str(options.threads))
    if options.model:
        translate_text(options)
    elif options.profile:
        profile(options)
    elif options.memory:
        memory(options)
    else:
        done = []
        if options.output and options.output.exists():
            done = [json.loads(line) for line in options.output.read_text(encoding="utf-8").splitlines()]
        print(tables(done + measure(options, done)), end="")


if __name__ == "__main__":
    main()
