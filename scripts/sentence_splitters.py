"""Compare libraries that split text into sentences: how well they find the ends, how fast, and whether all text stays.

Text with known ends: captions of Multi30k (English, German) and sentences of GUM (English: interviews, fiction,
academic writing, forums, ...), joined by spaces, ten to a paragraph. A library that is not installed is left out:

    pip install sentencex pysbd sacremoses
    python scripts/sentence_splitters.py FOLDER_OF_MULTI30K GUM_TREES
"""

import argparse
import gzip
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

from sacremoses import MosesDetokenizer

from vaswani_transformer import load_trees
from vaswani_transformer.parsing.trees import unescape

PARAGRAPH = 10  # sentences


def with_sentencex(language: str) -> Callable[[str], list[str]]:
    """Rules in Rust, by Wikimedia."""
    import sentencex

    return lambda text: list(sentencex.segment(language, text))


def with_pysbd(language: str) -> Callable[[str], list[str]]:
    """The Pragmatic Segmenter's rules in Python."""
    import pysbd

    return pysbd.Segmenter(language=language, clean=False).segment


LIBRARIES = {"sentencex": with_sentencex, "pysbd": with_pysbd}


def texts(multi30k: Path, trees: Path) -> Iterator[tuple[str, str, list[str]]]:
    """A name, a language and sentences."""
    for language in ("en", "de"):
        with gzip.open(multi30k / f"test_2016_flickr.{language}.gz", "rt", encoding="utf-8") as lines:
            yield f"Multi30k {language}", language, [line.strip() for line in lines]
    joined = MosesDetokenizer("en").detokenize
    yield "GUM en", "en", [joined([unescape(word) for word in tree.words()]) for tree in load_trees(trees)]


def ends(parts: list[str]) -> set[int]:
    """Where the parts end, all but the last, counted in characters that are no white space."""
    return set(list(accumulate(len("".join(part.split())) for part in parts))[:-1])


def compare(split: Callable[[str], list[str]], sentences: list[str]) -> tuple[float, float, float, int]:
    """Precision and recall of the ends in percent, sentences a second, and paragraphs that are not what went in."""
    paragraphs = [sentences[start : start + PARAGRAPH] for start in range(0, len(sentences), PARAGRAPH)]
    joined = [" ".join(paragraph) for paragraph in paragraphs]
    split(joined[0])  # reads its rules
    start = time.perf_counter()
    found = [split(text) for text in joined]
    seconds = time.perf_counter() - start
    pairs = [(ends(parts), ends(paragraph)) for parts, paragraph in zip(found, paragraphs, strict=True)]
    right = sum(len(ours & gold) for ours, gold in pairs)
    lost = sum("".join(parts) != text for parts, text in zip(found, joined, strict=True))
    precision, recall = (100 * right / max(1, sum(len(pair[side]) for pair in pairs)) for side in (0, 1))
    return precision, recall, len(sentences) / seconds, lost


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("multi30k", type=Path, help="folder with test_2016_flickr.en.gz and .de.gz")
    parser.add_argument("trees", type=Path, help="file of trees, a line each")
    arguments = parser.parse_args()
    print("| text | library | precision | recall | F1 | sentences/s | paragraphs changed |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name, language, sentences in texts(arguments.multi30k, arguments.trees):
        for library, make in LIBRARIES.items():
            try:
                split = make(language)
            except ImportError:
                continue
            precision, recall, speed, lost = compare(split, sentences)
            f1 = 2 * precision * recall / max(precision + recall, 1e-9)
            figures = f"{precision:.1f} | {recall:.1f} | {f1:.1f} | {speed:,.0f} | {lost}"
            print(f"| {name} | {library} {version(library)} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
