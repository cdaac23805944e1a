"""How fast outputs are generated, side by side: ours, with each option, Marian of transformers, CTranslate2.

    python scripts/benchmarks/generation.py
    python scripts/benchmarks/generation.py --device cuda --batches 1 16 64 256 --vocab-size 37000
    python scripts/benchmarks/generation.py --profile int8 --batches 1 --beams 1
    python scripts/benchmarks/generation.py --model MODEL --source FILE --reference FILE

All have random weights of one shape (base by default); ours and CTranslate2's are the same ones. A batch of
sources of equal length is given, and every output is forced to the same number of tokens, so that all do the same
work. Each contestant has a process of its own, so that none profits from what another changes in its process; they run
in turn and in random order, so that only the ratios of one run mean something; each figure is the median of the rounds,
the first of which does not count. What an engine does once for a model (packing, quantising, exporting) does not count
either. bfloat16 is left out on a processor for which oneDNN does not compute in it, where it would take minutes.

With --profile only ours runs, in a precision of `prepare_for_inference` or, with `plain`, without it: a table of where
its processor time goes (one thread), in milliseconds of an output position. The source is what is projected of it for
all steps, the search what `generate()` takes beyond encoder, source, layers and the output layer. With `--loop
transformers` a processor that does nothing lets transformers' loop search. With `--shortlist 1000` a second model takes
turns with the first, whose shortlist has always the first 1,000 tokens.

With --model a trained model translates a text that is sorted by length, text in and text out: ours prepared, with the
shortlist where the folder has one, and CTranslate2 with our weights (and its own rule of lengths). They run in turn in
one process, each in one thread; sentences a second of processor time are medians of the rounds, with BLEU, the size of
the weights, and how many outputs are not those of the first.
"""

import argparse
import copy
import itertools
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # their ids: 0 to 3


def parse_options() -> argparse.Namespace:
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
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the contestants in the table")
    parser.add_argument("--loop", choices=["own", "transformers"], default="own", help="of --profile")
    parser.add_argument("--shortlist", type=int, metavar="TOKENS", help="of --profile")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="that translates a text, in place of all else")
    parser.add_argument("--source", type=Path, metavar="FILE", help="sources, for --model")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="their translations, for --model")
    parser.add_argument("--profile", choices=["plain", "float32", "bfloat16", "int8"], metavar="PRECISION")
    return parser.parse_args()


def vaswani_model(options: argparse.Namespace):
    """Our model."""
    from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration

    torch.manual_seed(0)
    config = VaswaniConfig.from_preset(
        options.preset, vocab_size=options.vocab_size, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return VaswaniForConditionalGeneration(config).eval()


def marian_model(config):
    """Marian of the same sizes."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    return MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size, d_model=config.d_model, encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers, encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads, encoder_ffn_dim=config.d_ff, decoder_ffn_dim=config.d_ff,
            activation_function="relu", scale_embedding=True, max_position_embeddings=512, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
        )
    ).eval()  # fmt: skip


def by_generate(model, options: argparse.Namespace, **more) -> Callable:
    """Tokens of transformers' `generate()`, to which `more` is given."""

    def run(ids: torch.Tensor, beams: int) -> int:
        length = options.target_length
        ids = ids.to(model.device)
        outputs = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), num_beams=beams, do_sample=False,
            min_new_tokens=length, max_new_tokens=length, **more,
        )  # fmt: skip
        if model.device.type != "cpu":
            torch.accelerator.synchronize()
        return outputs[:, 1:].numel()

    return run


def by_ctranslate2(model, options: argparse.Namespace, folder: Path, quantization: str) -> Callable:
    """Tokens of CTranslate2's `translate_batch` on our export of the model."""
    import ctranslate2
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from vaswani_transformer.export.to_ctranslate2 import write_ctranslate2

    words = SPECIAL + [f"w{number}" for number in range(len(SPECIAL), options.vocab_size)]
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    saved, exported = folder / "model", folder / quantization
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    write_ctranslate2(saved, copy.deepcopy(model), tokenizer, exported, quantization)
    translator = ctranslate2.Translator(
        str(exported), device=options.device.partition(":")[0], compute_type=quantization, intra_threads=options.threads
    )

    def run(ids: torch.Tensor, beams: int) -> int:
        length = options.target_length
        results = translator.translate_batch(
            [[words[number] for number in row] for row in ids.tolist()],
            beam_size=beams, min_decoding_length=length, max_decoding_length=length, max_batch_size=0,
        )  # fmt: skip
        return sum(len(result.hypotheses[0]) for result in results)

    return run


def contestants(options: argparse.Namespace, folder: Path) -> dict[str, Callable[[], Callable]]:
    """Whoever takes part, by name; Marian first. Each value makes the function that is timed."""
    from transformers import CompileConfig

    from vaswani_transformer.decoding.cpu_inference import prepare_for_inference
    from vaswani_transformer.model.linear_vaswani import has_onednn

    on_cpu = options.device == "cpu"
    model = vaswani_model(options)
    makers: dict[str, Callable[[], Callable]] = {
        "Marian, float32": lambda: by_generate(marian_model(model.config).to(options.device), options),
        "ours, float32": lambda: by_generate(vaswani_model(options).to(options.device), options),
    }
    compiled = CompileConfig(fullgraph=False)
    compiled._compile_all_devices = True  # on a CPU transformers does not unless asked by this
    makers["ours, float32, static cache, compiled"] = lambda: by_generate(
        vaswani_model(options).to(options.device), options, cache_implementation="static", compile_config=compiled
    )
    if on_cpu:
        for precision in ("float32", *(["bfloat16"] if has_onednn(torch.bfloat16) else []), "int8"):
            makers[f"ours, prepared, {precision}"] = lambda precision=precision: by_generate(
                prepare_for_inference(vaswani_model(options), precision), options
            )
    else:
        for name, maker in (("Marian", lambda: marian_model(model.config)), ("ours", lambda: vaswani_model(options))):
            makers[f"{name}, bfloat16"] = lambda maker=maker: by_generate(
                maker().to(options.device, torch.bfloat16), options
            )
    try:
        import ctranslate2  # noqa: F401

        for quantization in ("float32", "int8") if on_cpu else ("float32", "float16", "int8_float16"):
            makers[f"CTranslate2, {quantization}"] = lambda quantization=quantization: by_ctranslate2(
                model, options, folder, quantization
            )
    except ImportError:
        print("CTranslate2 is not installed: left out", file=sys.stderr)
    unknown = set(options.only or ()) - set(makers)
    if unknown:
        sys.exit(f"error: no contestant {', '.join(sorted(unknown))}: choose of {', '.join(makers)}")
    return {name: make for name, make in makers.items() if not options.only or name in options.only}


def take_part(name: str, options: argparse.Namespace, connection) -> None:
    """What a contestant's process does: for a batch and a number of beams that come in, the seconds go out."""
    torch.set_num_threads(options.threads)
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        run = contestants(options, Path(folder))[name]()
        connection.send(name)
        for ids, beams in iter(connection.recv, None):
            ids = torch.from_numpy(ids)
            started = time.perf_counter()
            tokens = run(ids, beams)
            connection.send((time.perf_counter() - started, tokens))


@torch.no_grad()
def profile(options: argparse.Namespace) -> None:
    """Print where the processor time of our `generate()` goes, for each batch size and number of beams."""
    from vaswani_transformer.decoding.cpu_inference import prepare_for_inference
    from vaswani_transformer.model.incremental_decoding_vaswani import IncrementalDecoder

    torch.set_num_threads(1)
    models = [vaswani_model(options)]
    if options.profile != "plain":
        prepare_for_inference(models[0], options.profile)
        if options.shortlist:
            tokens = torch.arange(options.shortlist)
            models.append(prepare_for_inference(vaswani_model(options), options.profile, lambda ids: tokens))
    taken: dict[str, float] = {}

    def timed(kind: type, name: str, part: str) -> None:
        method = getattr(kind, name)

        def run(*arguments, **more):
            started = time.thread_time()
            result = method(*arguments, **more)
            taken[part] += time.thread_time() - started
            return result

        setattr(kind, name, run)

    timed(type(models[0].model.encoder), "forward", "encoder")
    timed(IncrementalDecoder, "read_source", "source")
    timed(IncrementalDecoder, "step", "layers")
    timed(IncrementalDecoder, "logits", "step")
    more = {"logits_processor": [lambda ids, scores: scores]} if options.loop == "transformers" else {}
    runs = [by_generate(model, options, **more) for model in models]
    head = ["batch", "beam", "encoder", "source", "layers", "output layer", "search", "all"]
    head += ["with the shortlist", "saved"] if len(runs) > 1 else []
    print(f"| {' | '.join(head)} |\n{'|---:' * len(head)}|")
    for batch, beams in itertools.product(options.batches, options.beams):
        ids = torch.randint(len(SPECIAL), options.vocab_size, (batch, options.source_length))
        rounds = [[] for _ in runs]
        for _ in range(options.rounds + 1):
            for generate, times in zip(runs, rounds, strict=True):
                taken.update(encoder=0.0, source=0.0, layers=0.0, step=0.0)
                whole = time.thread_time()
                generate(ids, beams)
                whole = time.thread_time() - whole
                parts = [taken["encoder"], taken["source"], taken["layers"], taken["step"] - taken["layers"]]
                times.append((*parts, whole - taken["encoder"] - taken["source"] - taken["step"], whole))
        columns = list(zip(*rounds[0][1:], strict=True)) + [[times[-1] for times in other[1:]] for other in rounds[1:]]
        medians = [median(column) for column in columns]
        cells = [f"{1000 * seconds / options.target_length:.2f}" for seconds in medians]
        cells += [f"{1 - shorter / medians[5]:.0%}" for shorter in medians[6:]]
        print(f"| {batch} | {beams} | {' | '.join(cells)} |", flush=True)


def translators(options: argparse.Namespace, folder: Path) -> dict[str, tuple[Path, Callable]]:
    """Whoever translates a text, by name: where its weights lie, and a function of lines, beams and batch size."""
    from vaswani_transformer import Translator, load_model
    from vaswani_transformer.decoding.cpu_inference import prepare_for_inference
    from vaswani_transformer.decoding.shortlist import SHORTLIST, read_shortlist

    def by_us(precision: str, has_shortlist: bool) -> Callable:
        model, tokenizer = load_model(options.model, "cpu")
        shortlist = read_shortlist(options.model, model.config) if has_shortlist else None
        prepare_for_inference(model, precision, shortlist)
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
        makers[f"ours, {precision}"] = weights, partial(by_us, precision, False)
        if (options.model / SHORTLIST).exists():
            makers[f"ours, {precision}, shortlist"] = weights, partial(by_us, precision, True)
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
    """Run all and print the table."""
    options = parse_options()
    if options.model:
        translate_text(options)
        return
    if options.profile:
        profile(options)
        return
    names = list(contestants(options, Path()))
    context = multiprocessing.get_context("spawn")  # a process that starts from nothing, with threads of its own
    ends, processes = {}, []
    for name in names:
        ends[name], other = context.Pipe()
        process = context.Process(target=take_part, args=(name, options, other), daemon=True)
        process.start()
        processes.append(process)
        other.close()
        ends[name].recv()
        print(f"{name}: ready", file=sys.stderr)
    settings = [(batch, beams) for batch in options.batches for beams in options.beams]
    rates: dict[tuple[str, int, int], float] = {}
    for batch, beams in settings:
        ids = torch.randint(len(SPECIAL), options.vocab_size, (batch, options.source_length)).numpy()
        seconds = {name: [] for name in names}
        for turn in range(options.rounds + 1):
            print(f"batch {batch}, beam {beams}: round {turn} of {options.rounds}", file=sys.stderr)
            for name in random.sample(names, len(names)):
                ends[name].send((ids, beams))
                taken, tokens = ends[name].recv()
                if turn:
                    seconds[name].append(taken)
                if tokens != batch * options.target_length:
                    sys.exit(f"error: {name} gave {tokens} tokens, not {batch * options.target_length}")
        for name in names:
            rates[name, batch, beams] = batch * options.target_length / median(seconds[name])
    for name, process in zip(names, processes, strict=True):
        ends[name].send(None)
        process.join()
    print_table(names, settings, rates)


def print_table(names: list[str], settings: list[tuple[int, int]], rates: dict) -> None:
    """Target tokens a second, and in brackets the ratio to the first contestant."""
    heads = [f"batch {batch}, beam {beams}" for batch, beams in settings]
    print(f"| target tokens a second | {' | '.join(heads)} |")
    print("|---|" + "---:|" * len(settings))
    for name in names:
        own, first = ([rates[who, batch, beams] for batch, beams in settings] for who in (name, names[0]))
        cells = [f"{rate:,.0f} ({rate / base:.2f})" for rate, base in zip(own, first, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
