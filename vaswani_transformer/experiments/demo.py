"""`vaswani demo`: from text to translations on a generated corpus, with nothing to download."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..attention.pictures import draw_attention
from ..attention.weights import attend
from ..data.synthetic import generate_corpus, write_corpus
from ..decoding.scoring import score_pairs
from ..decoding.translator import Translator
from ..durations import duration
from ..errors import UserError
from ..evaluation.metrics import PerplexityMetric, TranslationMetric
from ..files import unfinished
from ..loading import load_model
from ..output_folder import OutputFolder, is_empty, locked
from ..plots import new_figure
from ..recipes.recipe import load_recipe
from ..training.run import train

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
    files = {key: folder / "data" / key for key in texts}
    output.check([*(f"data/{key}" for key in texts), PICTURE])
    for key, text in texts.items():
        output.write_text(f"data/{key}", text)
    say(
        f"1. Corpus: {len(corpus.train):,} generated English-German sentence pairs. The {len(corpus.test)} test"
        " sentences hold combinations of words that training never shows, such as:"
    )
    for english, german in corpus.test[:: max(1, len(corpus.test) // 2)][:2]:
        say(f"     {english}  ->  {german}")
    recipe = load_recipe("demo", {"data_dir": str(folder / "data"), "output": str(folder / "model"), "seed": seed})
    recipe.overwrite = True  # an interrupted demo is resumed, a finished one or one of another seed is made anew
    say("2. Training a Transformer on them (Ctrl-C stops it; the same command resumes it):")
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
        f" {scores['exact_match']:.1f}% exactly right,"
        f" perplexity {scores['perplexity']:.3f} a token"
    )
    say(f"   ({scores['bleu_signature']})")
    step = max(1, len(sources) // SHOWN)
    for source, translation, reference in list(zip(sources, translations, references, strict=True))[::step][:SHOWN]:
        mark = "right" if translation == reference else f"wrong: {reference}"
        say(f"     {source}\n       -> {translation}   [{mark}]")
    right = [source for source, *both in zip(sources, translations, references, strict=True) if both[0] == both[1]]
    sentence = min(right or sources, key=lambda source: abs(len(source.split()) - 9))
    drawn = new_figure() is not None
    if drawn:
        last = model.config.decoder_layers
        new = unfinished(folder / PICTURE)
        draw_attention(attend(model, tokenizer, sentence), "encoder-decoder", new, [last])
        output.move(new, PICTURE)
    say(f"4. Done in {duration(time.monotonic() - started)}. What there is now:")
    say(f"     {folder / 'model'}   the model: AutoModelForSeq2SeqLM.from_pretrained loads it")
    if drawn:
        say(f"     {folder / 'model' / 'learning_curve.png'}   losses, BLEU and learning rate over training")
        say(f"     {folder / 'attention.png'}   what the decoder attends to while it translates: {sentence}")
    say(f"     {folder / 'model' / 'training_log.jsonl'}   every logged step")
    say(f"     {files['train.en'].parent}   the corpus")
    say("   What to type next:")
    say(f"     {command} translate {folder / 'model'} '{corpus.test[-1][0]}'")
    say(f"     {command} evaluate {folder / 'model'} --source {files['test.en']} --reference {files['test.de']}")
    say(
        f"     {command} train small --train-source YOUR.en --train-target YOUR.de --output runs/mine   # your own text"
    )
