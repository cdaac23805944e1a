"""What terms that have to be in a translation cost: share kept, where they stand, BLEU, time.

    python scripts/benchmarks/glossary.py MODEL test_2016_flickr.en.gz test_2016_flickr.de.gz

For each sentence one or two terms are drawn from its reference: one to three words, as the target of a word of the
source. The same sentences are translated without a glossary and with these terms, by beams of several sizes.
"""

import argparse
import random
import re
import sys
import time
from itertools import islice
from pathlib import Path

from vaswani_transformer import Translator, load_model
from vaswani_transformer.data.text_files import read_lines
from vaswani_transformer.decoding.cpu_inference import prepare_for_inference
from vaswani_transformer.decoding.glossary import Term
from vaswani_transformer.errors import UserError
from vaswani_transformer.evaluation.metrics import score_translations
from vaswani_transformer.experiments.base import markdown_table


class DrawnTerms:
    """A glossary that has terms of its own for each text."""

    def __init__(self, sources: list[str], references: list[str], number: int, seed: int):
        draw, self._terms = random.Random(seed), {}
        for source, reference in zip(sources, references, strict=True):
            words, phrases = reference.split(), {}
            for place in draw.sample(range(len(words)), min(number, len(words))):
                phrase = " ".join(words[place : place + draw.randint(1, 3)]).strip(".,;:!?\"'()")
                phrases[phrase or words[place]] = None
            self._terms[source.strip()] = tuple(Term(source, (phrase,)) for phrase in phrases)

    def of(self, text: str) -> tuple[Term, ...]:
        """The terms of one of the sources."""
        return self._terms[text]


def kept(texts: list[str], sources: list[str], glossary: DrawnTerms) -> tuple[int, int, int]:
    """The number of terms, of those in the translations as whole words, and of these behind a full stop."""
    number, before = 0, []
    for source, text in zip(sources, texts, strict=True):
        for term in glossary.of(source.strip()):
            number += 1
            match = re.search(rf"(?<!\w){re.escape(term.targets[0])}(?!\w)", text)
            before += [text[: match.start()]] if match else []
    return number, len(before), sum(re.search(r"[.!?]\W*\s", one) is not None for one in before)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("source", metavar="SOURCE", type=Path)
    parser.add_argument("reference", metavar="REFERENCE", type=Path)
    parser.add_argument("--sentences", type=int, help="so many from the beginning (default: all)")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4, 8])
    options = parser.parse_args()
    try:
        files = options.source, options.reference
        sources, references = (list(islice(read_lines(path), options.sentences)) for path in files)
        model, tokenizer = load_model(options.model, "cpu")
    except UserError as error:
        sys.exit(f"error: {error}")
    prepare_for_inference(model)
    rows = []
    for beams in options.beams:
        seconds = {}
        for number in (0, 1, 2):
            glossary = DrawnTerms(sources, references, number or 1, seed=1)
            translator = Translator(model, tokenizer, num_beams=beams, glossary=glossary if number else None)
            started = time.perf_counter()
            texts = list(translator.translate(sources))
            seconds[number] = time.perf_counter() - started
            terms, found, behind = kept(texts, sources, glossary)
            bleu, slower = score_translations(texts, references)["bleu"], seconds[number] / seconds[0]
            what = "none" if not number else f"up to {number}"
            figures = f"{found:,} of {terms:,}", f"{behind}", f"{bleu:.2f}", f"{slower:.2f}"
            rows.append([f"{beams}", what, *figures])
    names = ["beam", "terms a sentence", "terms in the output", "behind a full stop", "BLEU", "time"]
    print(markdown_table(names, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
