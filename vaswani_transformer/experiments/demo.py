"""`vaswani demo`: from text to translations on a generated corpus, with nothing to download."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..data.synthetic import SyntheticCorpus, generate_corpus, write_corpus
from ..durations import duration
from ..errors import UserError
from ..files import unfinished
from ..output_folder import OutputFolder, is_empty, locked

PICTURE = "attention.png"
SHOWN = 6  # test sentences printed with their translations


def run_demo(folder: Path, seed: int, say: Callable[[str], None], command: str = "vaswani") -> None:
    """Generate text, train on it, and show what was learned on combinations of words that training never saw.

    Args:
        folder: of corpus, model and pictures; an earlier demo there is replaced.
        seed: of corpus and training.
        say: takes each line of the report.
        command: by which the reader calls this program, for the advice at the end.

    Raises:
        UserError: if the folder holds something else than a demo, or a changed one, or another process writes there.
        TrainingStopped: when Ctrl-C ended training after a checkpoint.
    """
    with locked(folder):
        if not (folder / "data").is_dir() and not is_empty(folder):
            raise UserError(f"{folder} exists and is not the folder of an earlier demo: give another --output")
        _run_demo(folder, seed, say, command)


def _run_demo(folder: Path, seed: int, say: Callable[[str], None], command: str) -> None:
    started = time.monotonic()
    corpus, output = generate_corpus(seed=seed), OutputFolder(folder)
    with tempfile.TemporaryDirectory() as name:
        texts = {key: path.read_text(encoding="utf-8") for key, path in write_corpus(corpus, name).items()}
    output.check([*(f"data/{key}" for key in texts), PICTURE])
    for key, text in texts.items():
        output.write_text(f"data/{key}", text)
    say(
        f"1. Corpus: {len(corpus.train):,} generated English-German sentence pairs. The {len(corpus.test)} test"
        " sentences hold combinations of words that training never shows, such as:"
    )
    for english, german in corpus.test[:: max(1, len(corpus.test) // 2)][:2]:
        say(f"     {english}  ->  {german}")
    say("2. Training a Transformer on them (Ctrl-C stops it; the same command resumes it):")
    drawn = _train_and_show(folder, output, corpus, seed, say)
    say(f"4. Done in {duration(time.monotonic() - started)}. What there is now:")
    model, data = folder / "model", folder / "data"
    say(f"     {model}   the model: AutoModelForSeq2SeqLM.from_pretrained loads it")
    if drawn:
        say(f"     {model / 'learning_curve.png'}   losses, BLEU and learning rate over training")
        say(f"     {folder / PICTURE}   what the decoder attends to while it translates: {drawn}")
    say(f"     {model / 'training_log.jsonl'}   every logged step")
    say(f"     {data}   the corpus")
    say("   What to type next:")
    say(f"     {command} translate {model} '{corpus.test[-1][0]}'")
    say(f"     {command} evaluate {model} --source {data / 'test.en'} --reference {data / 'test.de'}")
    say(
        f"     {command} train small --train-source YOUR.en --train-target YOUR.de --output runs/mine   # your own text"
    )


def _train_and_show(
    folder: Path, output: OutputFolder, corpus: SyntheticCorpus, seed: int, say: Callable
) -> str | None:
    """Train and test the model; returns the sentence whose attention is drawn, if it is."""
    # Imported here, since they take seconds: what is printed before is on the screen at once.
    from ..attention.pictures import draw_attention
    from ..attention.weights import attend
    from ..decoding.scoring import score_pairs
    from ..decoding.translator import Translator
    from ..evaluation.metrics import PerplexityMetric, TranslationMetric
    from ..loading import load_model
    from ..plots import can_draw
    from ..recipes.recipe import load_recipe
    from ..training.run import train

    recipe = load_recipe("demo", {"data_dir": str(folder / "data"), "output": str(folder / "model"), "seed": seed})
    recipe.overwrite = True  # an interrupted demo is resumed, a finished one or one of another seed is replaced
    result = train(recipe)
    model, tokenizer = load_model(folder / "model")
    say(f"   {model.num_parameters():,} parameters, {result.steps:,} steps in {duration(result.seconds)}")
    sources, references = map(list, zip(*corpus.test, strict=True))
    translations = list(Translator(model, tokenizer, tokens_per_batch=4096).translate(sources))
    scores = TranslationMetric().compute(predictions=translations, references=references)
    losses, counts = score_pairs(model, tokenizer, sources, references)
    scores |= PerplexityMetric().compute(predictions=losses, references=counts)
    say(
        f"3. On the {len(sources)} unseen test sentences: BLEU {scores['bleu']:.1f},"
        f" {scores['exact_match']:.1f}% exactly right, perplexity {scores['perplexity']:.3f} a token"
    )
    say(f"   ({scores['bleu_signature']})")
    shown = list(zip(sources, translations, references, strict=True))
    for source, translation, reference in shown[:: max(1, len(sources) // SHOWN)][:SHOWN]:
        mark = "right" if translation == reference else f"wrong: {reference}"
        say(f"     {source}\n       -> {translation}   [{mark}]")
    if not can_draw():
        return None
    right = [source for source, translation, reference in shown if translation == reference]
    sentence = min(right or sources, key=lambda source: abs(len(source.split()) - 9))
    new = unfinished(folder / PICTURE)
    draw_attention(attend(model, tokenizer, sentence), "encoder-decoder", new, [model.config.decoder_layers])
    output.move(new, PICTURE)
    return sentence
