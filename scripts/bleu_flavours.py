"""How much BLEU depends on how it is computed: one set of translations, scored in the ways that people quote.

    python scripts/bleu_flavours.py --translations mine.de --reference test.de
    python scripts/bleu_flavours.py --model runs/mine --source test.en --reference test.de --save mine.de

Prints a Markdown table. The first row is what this package reports: sacreBLEU, cased, on detokenised text. With --model
the sentences are translated first, and the model's vocabulary gives one row more.
"""

import argparse
import json
import sys
from pathlib import Path

from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from vaswani_transformer import Translator, load_model, load_pairs
from vaswani_transformer.errors import UserError
from vaswani_transformer.evaluation.metrics import paper_bleu, split_compounds

TEST_SETS = 2737 / 3003  # sacreBLEU's newstest2014 en-de `wmt14` has so many of the sentences of `wmt14/full`
QUOTES = str.maketrans(dict.fromkeys("„“”«»", '"') | dict.fromkeys("‚‘’", "'"))


def score(translations: list[str], references: list[str], change=None, **settings) -> float:
    """Corpus BLEU after `change` on both sides; settings are sacreBLEU's."""
    if change is not None:
        translations, references = [change(text) for text in translations], [change(text) for text in references]
    return BLEU(force=True, **settings).corpus_score(translations, [references]).score


def flavours(translations: list[str], references: list[str], tokenizer=None) -> list[tuple[str, float]]:
    """Names and scores.

    Args:
        translations: detokenised text, one a reference.
        references: the same.
        tokenizer: of a model, for BLEU on its subwords; None leaves that row out.
    """
    tokens = Tokenizer13a()
    first = max(1, round(TEST_SETS * len(references)))
    rows = [
        ("sacreBLEU as it comes: cased, 13a", score(translations, references)),
        ("lower-cased (`-lc`)", score(translations, references, lowercase=True)),
        ("`--tokenize intl`", score(translations, references, tokenize="intl")),
        ("`--tokenize intl`, lower-cased", score(translations, references, tokenize="intl", lowercase=True)),
        (
            "13a tokens, compounds split at hyphens",
            score(translations, references, lambda text: split_compounds(tokens(text)), tokenize="none"),
        ),
        ("Moses' tokens, compounds split, `multi-bleu`: the paper's", paper_bleu(translations, references, "de")),
        (
            "13a tokens, compounds split, lower-cased and all quotes made alike",
            score(
                translations,
                references,
                lambda text: split_compounds(tokens(text.translate(QUOTES))),
                tokenize="none",
                lowercase=True,
            ),
        ),
        ("words between spaces, punctuation stuck to them", score(translations, references, tokenize="none")),
        (f"13a, the first {first:,} of {len(references):,} sentences", score(translations[:first], references[:first])),
        ("13a, the other sentences", score(translations[first:] or translations, references[first:] or references)),
        ("mean of the sentences' own BLEU", mean_of_sentences(translations, references)),
    ]
    if tokenizer is not None:
        change = lambda text: " ".join(tokenizer.tokenize(text))  # noqa: E731
        rows.append(
            ("on the model's subwords, never put together", score(translations, references, change, tokenize="none"))
        )
    return rows


def mean_of_sentences(translations: list[str], references: list[str]) -> float:
    """Mean of sentence-level BLEU (13a, smoothed), which is not BLEU of the corpus."""
    metric = BLEU(effective_order=True)
    scores = [
        metric.sentence_score(text, [reference]).score for text, reference in zip(translations, references, strict=True)
    ]
    return sum(scores) / len(scores)


def read(options: argparse.Namespace) -> tuple[list[str], list[str], object]:
    """Translations, references, and the model's tokenizer if a model made them."""
    given = options.translations if options.model is None else options.source
    pairs = load_pairs(source=given, target=options.reference)
    if options.model is None:
        return list(pairs["source"]), list(pairs["target"]), None
    model, tokenizer = load_model(options.model)
    translations = list(Translator(model, tokenizer).translate(list(pairs["source"])))
    if options.save:
        Path(options.save).write_text("".join(line + "\n" for line in translations), encoding="utf-8")
    return translations, list(pairs["target"]), tokenizer


def main() -> None:
    """Parse, score, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--translations", metavar="FILE", help="detokenised translations, one a line")
    parser.add_argument("--reference", metavar="FILE", required=True, help="detokenised references; .gz works")
    parser.add_argument("--model", metavar="FOLDER", help="translate --source with this model instead")
    parser.add_argument("--source", metavar="FILE", help="with --model: what to translate; .gz works")
    parser.add_argument("--save", metavar="FILE", help="with --model: write the translations here")
    options = parser.parse_args()
    if (options.model is None) == (options.translations is None) or (options.model is None) != (options.source is None):
        parser.error("give --translations, or --model and --source")
    try:
        translations, references, tokenizer = read(options)
    except UserError as error:
        sys.exit(f"error: {error}")
    rows = flavours(translations, references, tokenizer)
    print("| how | BLEU | to the first row |\n|---|---|---|")
    for name, value in rows:
        print(f"| {name} | {value:.2f} | {value - rows[0][1]:+.2f} |")
    metric = BLEU()
    result = metric.corpus_score(translations, [references], n_bootstrap=1000)
    spread = json.loads(result.format(signature=str(metric.get_signature()), is_json=True))["confidence_var"]
    print(f"\n{len(references):,} sentences, `{metric.get_signature()}`;", end=" ")
    print(f"the first row is good to {spread:.2f} either way (95% of 1,000 bootstrap samples)")


if __name__ == "__main__":
    main()
