"""Why outputs are shorter than references: a model's own samples beside what several searches find.

    python scripts/benchmarks/output_length.py MODEL val.en.gz val.de.gz
    python scripts/benchmarks/output_length.py MODEL val.en.gz val.de.gz --pairs 500

A model that knows where sentences end draws samples as long as the references. A search looks for what is most
probable, and every further word costs probability. Words are those of all outputs over those of all references;
log-probabilities are the model's, in nats.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from vaswani_transformer import Translator, load_model, score_pairs
from vaswani_transformer.data.text_files import read_lines
from vaswani_transformer.errors import UserError
from vaswani_transformer.evaluation.metrics import score_translations
from vaswani_transformer.experiments.base import markdown_table

SEARCHES = {f"sample {seed}": {"do_sample": True, "top_k": 0, "num_beams": 1, "seed": seed} for seed in (1, 2, 3)}
SEARCHES["greedy"] = {"num_beams": 1}
SEARCHES |= {
    f"beam {beams}, alpha {alpha:g}": {"num_beams": beams, "length_penalty": alpha}
    for beams, alpha in ((4, 0.0), (4, 0.6), (4, 1.0), (4, 1.5), (4, 2.0), (10, 0.6))
}


def describe(model, tokenizer, sources: list[str], outputs: list[str], references: list[str]) -> list[str]:
    """The columns of a row: words, BLEU, log-probability of a token and of a sentence."""
    words, expected = (sum(len(line.split()) for line in lines) for lines in (outputs, references))
    losses, tokens = score_pairs(model, tokenizer, sources, outputs)
    bleu = score_translations(outputs, references)["bleu"]
    columns = words / expected, bleu, -sum(losses) / sum(tokens), -sum(losses) / len(losses)
    return [f"{value:.{digits}f}" for value, digits in zip(columns, (3, 2, 3, 2), strict=True)]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("source", metavar="SOURCE", type=Path)
    parser.add_argument("reference", metavar="REFERENCE", type=Path)
    parser.add_argument("--pairs", type=int, help="so many from the beginning (default: all)")
    options = parser.parse_args()
    try:
        sources, references = (
            list(islice(read_lines(path), options.pairs)) for path in (options.source, options.reference)
        )
        model, tokenizer = load_model(options.model)
        rows = [["references", *describe(model, tokenizer, sources, references, references)]]
        for name, search in tqdm(SEARCHES.items(), unit="search"):
            outputs = list(Translator(model, tokenizer, **search).translate(sources))
            rows.append([name, *describe(model, tokenizer, sources, outputs, references)])
    except UserError as error:
        sys.exit(f"error: {error}")
    titles = ["outputs", "words / references' words", "BLEU", "log-probability of a token", "of a sentence"]
    print(markdown_table(titles, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
