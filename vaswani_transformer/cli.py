"""The command `vaswani`: parses, calls the package, prints, and turns errors into one line and an exit status."""

import argparse
import contextlib
import dataclasses
import difflib
import logging
import os
import shlex
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from .errors import UserError

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """Errors in one line, with the nearest option for a misspelt one."""

    def error(self, message: str):
        self.exit(EXIT_USAGE, f"error: {message} (see `{self.prog} --help`)\n")

    def refuse_unknown(self, unknown: list[str]) -> None:
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        flag = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(flag.replace("_", "-"), options, n=1, cutoff=0.5)
        hint = f": did you mean {near[0]}?" if near else ""
        self.error(f"unknown argument {flag}{hint}")


def _command(commands, name: str, run, help_text: str, description: str | None = None) -> _Parser:
    parser = commands.add_parser(name, help=help_text, description=description or help_text, allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_generation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beams", type=int, help="beam size; the model's own if not given")
    parser.add_argument("--length-penalty", type=float, help="alpha of the length normalisation; the model's own")
    parser.add_argument("--max-new-tokens", type=int, help="longest output in tokens; source length + 50")
    parser.add_argument("--tokens-per-batch", type=int, default=2048, help="source tokens translated at once")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps, ...; auto: an accelerator if any")


def _add_train(commands) -> None:
    from .recipe import Recipe, field_type

    parser = _command(
        commands,
        "train",
        _train,
        "train a model from a recipe",
        "Train a model. RECIPE is a name from `vaswani recipes` or a YAML file; every option below is a field of it."
        " The same command resumes an interrupted training.",
    )
    parser.usage = "vaswani train RECIPE [--FIELD VALUE ...]"
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    groups = {}
    for field in dataclasses.fields(Recipe):
        name = field.metadata["group"]
        group = groups.setdefault(name, parser.add_argument_group(name))
        kind, _ = field_type(field.name)
        default = "none" if field.default is None else field.default
        options = {"help": f"{field.metadata['help']} (default: {default})".replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = {int: "N", float: "X", str: "TEXT"}[kind]
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, **options)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _train(arguments: argparse.Namespace) -> int:
    from .recipe import Recipe, load_recipe
    from .training import TrainingStopped, train

    names = {field.name for field in dataclasses.fields(Recipe)}
    overrides = {name: value for name, value in vars(arguments).items() if name in names}
    recipe = load_recipe(arguments.recipe, overrides)
    try:
        result = train(recipe, progress=not arguments.quiet)
    except TrainingStopped as stopped:
        _leave_process_group()
        return _report_stop(stopped.signal_number, stopped.step)
    except KeyboardInterrupt:
        return _report_stop(signal.SIGINT, None)
    _leave_process_group()
    if not _is_main_process():
        return 0
    shown = ", ".join(
        f"{label} {result.metrics[key]:.2f}"
        for key, label in (("eval_loss", "loss"), ("eval_perplexity", "perplexity"), ("eval_bleu", "BLEU (greedy)"))
        if key in result.metrics
    )
    kept = f"average of {result.averaged} checkpoints" if result.averaged else "best checkpoint"
    print(f"trained {result.steps:,} steps in {result.seconds / 60:.1f} minutes; kept the {kept}: validation {shown}")
    print(f"model: {result.folder}")
    print(f"translate with it: {command_name()} translate {result.folder} 'a sentence'")
    return 0


def _leave_process_group() -> None:
    """End what connects several processes; left to the interpreter's end, its threads may abort a finished process."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"  # set by accelerate launch and torchrun


def _report_stop(signal_number: int, step: int | None) -> int:
    where = "" if step is None else f" at step {step:,}; checkpoint written"
    if not _is_main_process():
        return 128 + signal_number
    print(f"stopped{where}. To resume, run the same command again:")
    print(f"  {command_name()} {shlex.join(word for word in sys.argv[1:] if word != '--overwrite')}")
    return 128 + signal_number


def command_name() -> str:
    """How this program was called, in a form that can be typed in this folder."""
    script = Path(sys.argv[0])
    if script.name != "vaswani":
        return "python -m vaswani_transformer"
    if shutil.which("vaswani") and Path(shutil.which("vaswani")).samefile(script):
        return "vaswani"
    return os.path.relpath(script)


def _add_translate(commands) -> None:
    parser = _command(commands, "translate", _translate, "translate sentences, a file or standard input")
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("sentences", metavar="SENTENCE", nargs="*", help="sentences; without any, standard input")
    parser.add_argument("--input", metavar="FILE", help="translate the lines of this file (.gz works)")
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of standard output")
    _add_generation_options(parser)


def _lines(path: str | None) -> Iterator[str]:
    """Lines of a file or of standard input, without their ends."""
    from .data import decode_lines, read_lines

    return read_lines(Path(path)) if path is not None else decode_lines(sys.stdin.buffer, "standard input")


def _translator(arguments: argparse.Namespace):
    from .translation import Translator, load_model

    for name in ("beams", "max_new_tokens", "tokens_per_batch"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be 1 or more")
    model, tokenizer = load_model(arguments.model, arguments.device)
    return Translator(
        model,
        tokenizer,
        arguments.tokens_per_batch,
        num_beams=arguments.beams,
        length_penalty=arguments.length_penalty,
        max_new_tokens=arguments.max_new_tokens,
    )


def _translate(arguments: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    if arguments.sentences and arguments.input:
        raise UserError("give sentences or --input, not both")
    for number, sentence in enumerate(arguments.sentences, start=1):
        if not sentence.isprintable() and any("\ud800" <= character <= "\udfff" for character in sentence):
            raise UserError(f"sentence {number} is not valid UTF-8: convert it first")
    files = [Path(name) for name in (arguments.input, arguments.output) if name]
    if len(files) == 2 and all(file.exists() for file in files) and files[0].samefile(files[1]):
        raise UserError(f"--input and --output are the same file, {files[0]}: give another --output")
    translator = _translator(arguments)
    interactive = not arguments.sentences and arguments.input is None and sys.stdin.isatty()
    if interactive:
        print("translating standard input, one sentence a line; Ctrl-D ends it", file=sys.stderr)
    sentences = iter(arguments.sentences) if arguments.sentences else _lines(arguments.input)
    first = list(islice(sentences, 1))  # a missing input is reported before an output is opened
    total = len(arguments.sentences) or None
    with contextlib.ExitStack() as stack:
        output = sys.stdout
        if arguments.output:
            output = stack.enter_context(Path(arguments.output).open("w", encoding="utf-8"))
        bar = stack.enter_context(
            tqdm(total=total, desc="translating", unit="sentence", file=sys.stderr, disable=interactive or total == 1)
        )
        for translation in translator.translate(
            chain(first, sentences), window=1 if interactive else 1000, progress=bar
        ):
            print(translation, file=output, flush=interactive)
    return 0


def _add_evaluate(commands) -> None:
    parser = _command(commands, "evaluate", _evaluate, "BLEU, chrF and perplexity on a test set")
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("--source", required=True, metavar="FILE", help="sources, one a line (.gz works)")
    parser.add_argument("--reference", required=True, metavar="FILE", help="reference translations, aligned")
    parser.add_argument("--output", metavar="FILE", help="also write the translations here")
    parser.add_argument("--json", metavar="FILE", help="also write the scores here, and how they were obtained")
    parser.add_argument("--test-set", metavar="NAME", help="its name in the --json file (default: from the file names)")
    _add_generation_options(parser)


def _evaluate(arguments: argparse.Namespace) -> int:
    import json

    from tqdm.auto import tqdm

    from .data import load_pairs
    from .metrics import PerplexityMetric, TranslationMetric
    from .translation import score_pairs

    _refuse_equal_files(arguments)
    pairs = load_pairs(source=arguments.source, target=arguments.reference)
    sources, references = list(pairs["source"]), list(pairs["target"])
    filled = [pair for pair in zip(sources, references, strict=True) if all(side.strip() for side in pair)]
    if not filled:
        raise UserError(f"{arguments.source} and {arguments.reference} hold blank lines only: nothing to evaluate")
    translator = _translator(arguments)
    # What was read is hashed before anything is written.
    how = _how_obtained(arguments, translator) if arguments.json else {}
    with contextlib.ExitStack() as stack:
        text_file, scores_file = (
            stack.enter_context(_written_at_the_end(Path(path))) if path else None
            for path in (arguments.output, arguments.json)
        )
        losses, counts = score_pairs(translator.model, translator.tokenizer, *map(list, zip(*filled, strict=True)))
        started = time.monotonic()
        bar = stack.enter_context(tqdm(total=len(sources), desc="translating", unit="sentence", file=sys.stderr))
        translations = list(translator.translate(sources, progress=bar))
        bar.close()
        seconds = time.monotonic() - started
        scores = TranslationMetric().compute(predictions=translations, references=references)
        scores |= PerplexityMetric().compute(predictions=losses, references=counts)
        scores |= {"sentences": len(sources), "seconds": round(seconds, 1)}
        scores |= how
        if text_file is not None:
            text_file.writelines(line + "\n" for line in translations)
        if scores_file is not None:
            scores_file.write(json.dumps(scores, indent=2) + "\n")
    print(f"BLEU {scores['bleu']:.2f}  ({scores['bleu_signature']})")
    print(f"chrF {scores['chrf']:.2f}  ({scores['chrf_signature']})")
    print(f"perplexity {scores['perplexity']:.3f} a target token, {scores['exact_match']:.1f}% of sentences exact")
    print(f"{len(sources):,} sentences translated in {seconds:.1f} s")
    return 0


def _refuse_equal_files(arguments: argparse.Namespace) -> None:
    """No file that is written may be one that is read, or be written twice; devices and pipes may."""

    def equal(one: Path, other: Path) -> bool:
        if one.exists() and other.exists():
            return one.is_file() and one.samefile(other)
        return one.resolve() == other.resolve()

    given = {name: getattr(arguments, name) for name in ("source", "reference", "output", "json")}
    names = [name for name, path in given.items() if path]
    for written in ("output", "json"):
        for other in names[: names.index(written)] if written in names else ():
            if equal(Path(given[written]), Path(given[other])):
                raise UserError(
                    f"--{written} and --{other} are the same file, {given[written]}: give another --{written}"
                )


@contextlib.contextmanager
def _written_at_the_end(path: Path):
    """A text file to write, which takes the place of an earlier one only once all of it is there."""
    target = path.resolve()  # a link stays one
    if target.exists() and not target.is_file():  # a device or a pipe
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    if target.exists():
        target.open("r+").close()  # one that is protected is reported now
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        file = temporary.open("x", encoding="utf-8")
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
    try:
        with file:
            yield file
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _how_obtained(arguments: argparse.Namespace, translator) -> dict:
    from .provenance import evaluation_record, search_settings

    generation = search_settings(translator.model.generation_config) | translator.generate_options
    options = {
        "--beams": arguments.beams,
        "--length-penalty": arguments.length_penalty,
        "--max-new-tokens": arguments.max_new_tokens,
    }
    return evaluation_record(
        arguments.model, arguments.source, arguments.reference, generation, options, arguments.test_set
    )


def _add_push(commands) -> None:
    parser = _command(
        commands,
        "push",
        _push,
        "put a trained model on the Hugging Face Hub, with a model card",
        "Put a trained model, its tokenizer and a model card into the repository OWNER/NAME, in one commit. The same"
        " command updates it, or goes on where a push was interrupted. The token is that of `hf auth login` or of the"
        " variable HF_TOKEN.",
    )
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("repository", metavar="OWNER/NAME", help="repository on the Hub; made if it is not there")
    parser.add_argument("--dry-run", action="store_true", help="print the files and the card, send nothing")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", default="main", metavar="BRANCH", help="made if it is not there (default: main)")
    parser.add_argument("--message", metavar="TEXT", help="of the commit")
    parser.add_argument("--token", metavar="TOKEN", help="better in HF_TOKEN, where no list of processes shows it")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights (default: 5GB)")
    card = parser.add_argument_group("model card")
    card.add_argument("--card", metavar="base|big|parser|FILE", help="template; chosen by the model if not given")
    card.add_argument("--overwrite-card", action="store_true", help="replace one that someone else wrote or edited too")
    card.add_argument(
        "--language", action="append", default=[], metavar="CODE", help="such as en; repeat it, source first"
    )
    card.add_argument("--license", metavar="ID", help="licence of the weights, such as mit")
    card.add_argument("--dataset", action="append", default=[], metavar="NAME", help="on the Hub; may be repeated")
    card.add_argument(
        "--evaluation", action="append", default=[], metavar="FILE", help="of `evaluate --json`; may be repeated"
    )


def _push(arguments: argparse.Namespace) -> int:
    from huggingface_hub.utils import logging as hub_logging

    from .publishing import clear_staging, publish

    def stop(number, _):
        # No exception: the client would wait until the files that its threads are sending have gone.
        message = f"interrupted: {arguments.repository} has all of the new files or none; push again\n"
        os.write(2, message.encode())
        clear_staging()
        os._exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    hub_logging.set_verbosity_error()  # its lines on every attempt; the last one's error is ours to explain
    try:
        done = publish(
            arguments.model,
            arguments.repository,
            private=arguments.private,
            revision=arguments.revision,
            message=arguments.message,
            languages=arguments.language,
            license=arguments.license,
            datasets=arguments.dataset,
            evaluations=arguments.evaluation,
            card=arguments.card,
            overwrite_card=arguments.overwrite_card,
            max_shard_size=arguments.max_shard_size,
            token=arguments.token,
            dry_run=arguments.dry_run,
            progress=sys.stderr.isatty(),
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arguments.dry_run:
        print(f"would go to {done.repo_id}, branch {done.revision} (nothing was sent):")
    elif done.changed:
        print(f"pushed to {done.url}, branch {done.revision}, commit {done.commit[:12]}:")
    else:
        print(f"{done.url}, branch {done.revision}, has all of this already; nothing was changed:")
    for name, size in done.files.items():
        print(f"{size:14,}  {name}")
    for name in done.removed:
        print(f"{'removed':>14}  {name}")
    if arguments.dry_run:
        print(f"\n{done.card}", end="")
    return 0


def _add_tokenizer(commands) -> None:
    parser = _command(commands, "tokenizer", _tokenizer, "train a shared subword vocabulary on text files")
    parser.add_argument("files", metavar="FILE", nargs="+", help="text files of both languages (.gz works)")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder for the tokenizer")
    parser.add_argument("--kind", default="bpe", choices=["bpe", "wordpiece"], help="default: bpe, as for en-de")
    parser.add_argument("--vocab-size", type=int, help="entries; 37000 for bpe and 32000 for wordpiece if not given")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer in the folder")


def _tokenizer(arguments: argparse.Namespace) -> int:
    from .data import read_lines
    from .tokenization import train_tokenizer

    folder = Path(arguments.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise UserError(f"cannot write to output folder {folder}: {error.strerror}") from error
    if (folder / "tokenizer.json").exists() and not arguments.overwrite:
        raise UserError(f"{folder} already holds a tokenizer: give another --output, or --overwrite to replace it")
    lines = chain.from_iterable(read_lines(Path(file)) for file in arguments.files)
    tokenizer = train_tokenizer(
        lines, kind=arguments.kind, vocab_size=arguments.vocab_size, show_progress=sys.stderr.isatty()
    )
    tokenizer.save_pretrained(folder)
    print(f"tokenizer of {len(tokenizer):,} entries: {folder}")
    return 0


def _add_convert(commands) -> None:
    parser = _command(
        commands,
        "convert",
        _convert,
        "turn pickled weights into safetensors",
        "Write the weights of FOLDER/pytorch_model.bin as safetensors beside it. Tensors are read and nothing else:"
        " code in the pickle does not run.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="model folder with config.json and pytorch_model.bin")


def _convert(arguments: argparse.Namespace) -> int:
    from .conversion import convert_pickled_weights

    written = convert_pickled_weights(arguments.folder)
    print(f"wrote {', '.join(map(str, written))}; the pickle is still there and may be deleted")
    return 0


def _add_lists(commands) -> None:
    parser = _command(commands, "recipes", _recipes, "list the recipes that ship with the package")
    parser.add_argument("name", nargs="?", help="print this recipe whole")
    parser = _command(commands, "presets", _presets, "list the paper's models by name, with their parameters")


def _recipes(arguments: argparse.Namespace) -> int:
    from .recipe import describe, read_recipe, recipe_names

    if arguments.name:
        print(read_recipe(arguments.name)[0], end="")
        return 0
    names = recipe_names()
    for name in names:
        print(f"{name:{max(map(len, names))}}  {describe(name)}")
    return 0


def _presets(arguments: argparse.Namespace) -> int:
    import torch

    from .configuration_vaswani import VaswaniConfig
    from .modeling_vaswani import VaswaniForConditionalGeneration

    for name in VaswaniConfig.preset_names():
        config = VaswaniConfig.from_preset(name)
        with torch.device("meta"):
            parameters = VaswaniForConditionalGeneration(config).num_parameters()
        print(
            f"{name:28} {parameters / 1e6:7.2f}M parameters: {config.encoder_layers}+{config.decoder_layers} layers,"
            f" d_model {config.d_model}, d_ff {config.d_ff}, {config.num_heads} heads, d_k {config.d_k},"
            f" d_v {config.d_v}, dropout {config.dropout}, vocabulary {config.vocab_size:,}"
        )
    return 0


def _add_demo(commands) -> None:
    parser = _command(commands, "demo", _demo, "train on a generated English-German corpus and show what was learned")
    parser.add_argument("--output", default="demo_output", metavar="FOLDER", help="default: demo_output")
    parser.add_argument("--seed", type=int, default=0, help="of corpus and training")


def _demo(arguments: argparse.Namespace) -> int:
    from .demo import run_demo
    from .training import TrainingStopped

    try:
        return run_demo(Path(arguments.output), arguments.seed, _say, command_name())
    except TrainingStopped as stopped:
        return _report_stop(stopped.signal_number, stopped.step)
    except KeyboardInterrupt:
        return _report_stop(signal.SIGINT, None)


def _say(line: str) -> None:
    print(line, flush=True)  # in step with the progress bar on standard error


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    from . import __version__

    parser = _Parser(
        prog="vaswani",
        description='Train, evaluate and use the Transformer of "Attention Is All You Need".',
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vaswani_transformer {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    work = (_add_demo, _add_train, _add_translate, _add_evaluate, _add_push)
    for add in (*work, _add_tokenizer, _add_convert, _add_lists):
        add(commands)
    return parser


def _quiet_libraries() -> None:
    """Leave standard error to our own messages."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    warnings.filterwarnings("ignore")
    from datasets.utils import logging as datasets_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets_logging.set_verbosity_error()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger(__package__).setLevel(logging.INFO if _is_main_process() else logging.WARNING)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")  # translations are not limited to the terminal's own encoding


def _explain(error: Exception) -> str | None:
    """One line for errors that come from the machine and not from a mistake in our code; None for others."""
    from safetensors import SafetensorError

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    text = str(error)
    if isinstance(error, SafetensorError) or "PytorchStreamWriter" in text or "unexpected pos" in text:
        return f"a file could not be written, is the disk full? ({text.splitlines()[0][:200]})"
    return None


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 (the machine failed), 2 (a mistake in what was given) or 130."""
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.parser.refuse_unknown(unknown)
    _quiet_libraries()
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()  # here, so that a reader of our output who has gone is noticed below
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
