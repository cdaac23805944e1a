"""`vaswani demo`: from text to translations on a generated corpus, with nothing to download."""

import shlex
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from ..data.synthetic import generate_corpus, write_corpus
from ..durations import duration
from ..output_folder import OutputFolder, locked

say = partial(print, flush=True)  # so that lines stay in step with the progress bar on standard error


def run_demo(folder: Path, seed: int) -> None:
    """Generate text, train on it, and print what was learned on combinations of words that training never saw.

    An earlier demo in the folder is replaced; `UserError` if it holds something else, or another process writes there.
    `TrainingStopped` when Ctrl-C ended training after a checkpoint.
    """
    with locked(folder):
        started, output, corpus = time.monotonic(), OutputFolder(folder), generate_corpus(seed=seed)
        output.check_ours()
        with output.placing("data") as staging:
            write_corpus(corpus, staging)
        say(
            f"1. Corpus: {len(corpus.train):,} generated English-German sentence pairs. The {len(corpus.test)} test"
            " sentences hold combinations of words that training never shows, such as:"
        )
        for english, german in corpus.test[:: len(corpus.test) // 2][:2]:
            say(f"     {english}  ->  {german}")
        say("2. Training a Transformer on them (Ctrl-C stops it; the same command resumes it):")
        _train_and_show(folder, output, corpus, seed)
        model, data = folder / "model", folder / "data"
        say(f"4. Done in {duration(time.monotonic() - started)}. What to type next:")
        say(f"     {shlex.join(['vaswani', 'translate', str(model), corpus.test[-1][0]])}")
        files = "--source", str(data / "test.en"), "--reference", str(data / "test.de")
        say(f"     {shlex.join(['vaswani', 'evaluate', str(model), *files])}")


def _train_and_show(folder: Path, output: OutputFolder, corpus: SimpleNamespace, seed: int) -> None:
    """Train and test the model, and draw its attention to a sentence."""
    # Imported here, since they take seconds: what is printed before is on the screen at once.
    from accelerate.utils import is_matplotlib_available

    from ..attention.pictures import draw_attention
    from ..attention.weights import attend
    from ..decoding.scoring import score_pairs
    from ..decoding.translator import Translator
    from ..evaluation.metrics import perplexity, score_translations
    from ..loading import load_model
    from ..recipes.recipe import load_recipe
    from ..training.run import train

    recipe = load_recipe("demo", {"data_dir": str(folder / "data"), "output": str(folder / "model"), "seed": seed})
    recipe.overwrite = True  # an interrupted demo is resumed, a finished one or one of another seed is replaced
    result = train(recipe)
    model, tokenizer = load_model(folder / "model")
    say(f"   {model.num_parameters():,} parameters, {result.steps:,} steps in {duration(result.seconds)}")
    sources, references = map(list, zip(*corpus.test, strict=True))
    translations = list(Translator(model, tokenizer, tokens_per_batch=4096).translate(sources))
    scores = score_translations(translations, references)
    say(
        f"3. On the {len(sources)} unseen test sentences: BLEU {scores['bleu']:.1f}, {scores['exact_match']:.1f}%"
        f" exactly right, perplexity {perplexity(*score_pairs(model, tokenizer, sources, references)):.3f} a token"
    )
    say(f"   ({scores['bleu_signature']})")
    shown = list(zip(sources, translations, references, strict=True))
    for source, translation, reference in shown[:: len(shown) // 6][:6]:
        mark = "right" if translation == reference else f"wrong: {reference}"
        say(f"     {source}\n       -> {translation}   [{mark}]")
    if not is_matplotlib_available():
        return
    right = [source for source, translation, reference in shown if translation == reference]
    sentence = min(right or sources, key=lambda source: abs(len(source.split()) - 9))
    output.claim(picture := "attention.png")
    weights = attend(model, tokenizer, sentence)
    draw_attention(weights, "encoder-decoder", folder / picture, [model.config.decoder_layers])
    say(f"   {folder / picture} shows what the decoder attends to while it translates: {sentence}")
