"""How often word alignments from attention agree with those known of the generated corpus, layer by layer.

    vaswani demo --output demo_output
    python scripts/benchmarks/alignments.py demo_output/model

Known are the links of nouns, adjectives and number words of the test sentences where the word has one counterpart on
either side. The baseline takes the source word at the same relative place.
"""

import argparse
import re

from vaswani_transformer import align, load_model
from vaswani_transformer.data.synthetic import ADJECTIVES, NOUNS, generate_corpus, number_words


def known_words() -> dict[str, set[str]]:
    """English nouns, adjectives and numbers of the generated corpus and all forms of their German words."""
    known: dict[str, set[str]] = {}
    for noun in NOUNS.values():
        plural = noun.de_plural.lower()
        known.setdefault(noun.en, set()).add(noun.de.lower())
        known.setdefault(noun.en_plural, set()).update({plural, f"{plural}n"})
    for adjective in ADJECTIVES.values():
        forms = {adjective.de, *(adjective.stem + ending for ending in ("e", "en", "er", "es", "em"))}
        known.setdefault(adjective.en, set()).update(forms)
    for number in range(2, 100):
        english, german = number_words(number)
        known.setdefault(english, set()).add(german)
    return known


def known_links(source: str, target: str, known: dict[str, set[str]]) -> dict[int, int]:
    """The source word of each target word that has one candidate, which has no other."""
    english, german = ([re.sub(r"[.,?]", "", word).lower() for word in text.split()] for text in (source, target))
    pairs = [(j, i) for j, de in enumerate(german) for i, en in enumerate(english) if de in known.get(en, ())]
    targets, sources = [j for j, _ in pairs], [i for _, i in pairs]
    return {j: i for j, i in pairs if targets.count(j) == sources.count(i) == 1}


def main() -> None:
    """Print the agreement of every layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a model that the demo trained")
    parser.add_argument("--seed", type=int, default=0, help="of the demo's corpus")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model)
    sources, targets = map(list, zip(*generate_corpus(seed=arguments.seed).test, strict=True))
    known = known_words()
    gold = [known_links(source, target, known) for source, target in zip(sources, targets, strict=True)]
    total = sum(map(len, gold))

    def agreement(links: list[dict[int, int]]) -> float:
        hits = sum(
            predicted[j] == i
            for known_pairs, predicted in zip(gold, links, strict=True)
            for j, i in known_pairs.items()
        )
        return 100 * hits / total

    lengths = [(len(source.split()), len(target.split())) for source, target in zip(sources, targets, strict=True)]
    diagonal = [{j: round(j * (m - 1) / max(n - 1, 1)) for j in range(n)} for m, n in lengths]
    print(f"{total:,} known links in {len(sources)} sentences; same place: {agreement(diagonal):.1f}%")
    for layer in range(model.config.decoder_layers):
        pairs = align(model, tokenizer, sources, targets, layer=layer)
        print(f"decoder layer {layer + 1}: {agreement([{j: i for i, j in links} for links in pairs]):.1f}%")


if __name__ == "__main__":
    main()
