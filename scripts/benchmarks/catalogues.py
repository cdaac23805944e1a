"""Train on nine tenths of real catalogues' entries, fill the others, check the files by msgfmt, score what was filled.

    python scripts/benchmarks/catalogues.py OUTPUT NAME=FILE.mo ... [--minutes 9] [--corrected 200]

The .mo files of a program's translated packages, of one language, are turned into .po by gettext's msgunfmt, and get
flags (`c-format`, `kde-format`, `gcc-internal-format`) by their placeholders, as far as msgfmt takes the human
translation with them. OUTPUT gets the emptied and the filled catalogues, the model and `result.json`; a model that is
there is taken. Minutes are of the clock. `--corrected` corrects so many of the entries to fill of each file that has
twice as many, trains on that file for 5 minutes, and scores the rest before and after, with `--consistent-terms` too.
"""

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import zlib
from pathlib import Path

import sacrebleu

from vaswani_transformer.catalogues.formats import open_catalogue, pairs
from vaswani_transformer.decoding.glossary import Glossary
from vaswani_transformer.documents import messages
from vaswani_transformer.documents.terms import find_terms

FLAGS = {"kde": r"%\d", "gcc-internal": r"%[-+#]*(q|[<CDELTKF]|\.?\*)", "c": r"%[-+#\d.l*z]*[sdiucfgx]"}
EMPTY = re.compile(r'(msgstr(?:\[\d\])?) "(?:[^"\\]|\\.)*"(?:\n"(?:[^"\\]|\\.)*")*')


def read(path):
    """Return the entries of a catalogue."""
    return open_catalogue(path).entries()


def msgfmt(path: Path) -> set[int]:
    """Return the lines that `msgfmt --check` finds wrong."""
    command = ["msgfmt", "--check", "--use-fuzzy", "-o", "/dev/null", str(path)]
    run = subprocess.run(command, capture_output=True, text=True)
    return {int(line) for line in re.findall(r"\.po:(\d+):", run.stderr)} if run.returncode else set()


def held_out(source: str) -> bool:
    """Return whether a message is one to fill, wherever it occurs."""
    return zlib.crc32(messages.read_label(source)[0].encode()) % 10 == 0


def prepare(name: str, mo: Path, output: Path) -> None:
    """Write NAME.po with flags, and empty/NAME.po without what is held out."""
    subprocess.run(["msgunfmt", str(mo), "-o", str(output / f"{name}.po")], check=True)
    blocks = (output / f"{name}.po").read_text(encoding="utf-8").strip("\n").split("\n\n")
    for number, block in enumerate(blocks[1:], start=1):
        source = block[: block.index("\nmsgstr")]
        kind = next((kind for kind, pattern in FLAGS.items() if re.search(pattern, source)), None)
        blocks[number] = f"#, {kind}-format\n{block}" if kind else block
    wrong = {0}
    while wrong:  # a human translation that is not valid loses its flag, or is left out
        (output / f"{name}.po").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
        wrong, line, kept = msgfmt(output / f"{name}.po"), 1, []
        for block in blocks:
            end = line + block.count("\n") + 1
            is_wrong, line = not wrong.isdisjoint(range(line, end + 1)), end + 1
            kept += [block] if not is_wrong else [block.split("\n", 1)[1]] if block.startswith("#, ") else []
        blocks = kept
    for number, entry in enumerate(read(output / f"{name}.po")):
        if entry.sources[0] and held_out(entry.sources[0]):
            blocks[number] = EMPTY.sub(r'\1 ""', blocks[number])
    (output / "empty" / f"{name}.po").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def vaswani(*words: object) -> float:
    """Run a command, and return the seconds of processor time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "vaswani_transformer", *map(str, words)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def scores(outputs: list[str], references: list[str]) -> dict:
    """Return BLEU and chrF."""
    metrics = sacrebleu.corpus_bleu(outputs, [references]), sacrebleu.corpus_chrf(outputs, [references])
    return {"texts": len(outputs), "bleu": metrics[0].score, "chrf": metrics[1].score}


def update(output: Path, name: str, number: int, minutes: float) -> dict:
    """Correct some entries, train on the file as it is then, and score how the rest is filled before and after."""
    blocks = [(output / part / f"{name}.po").read_text(encoding="utf-8").split("\n\n") for part in ("", "empty")]
    asked = [row for row, pair in enumerate(zip(*blocks, strict=True)) if pair[0] != pair[1]]
    for row in random.Random(0).sample(asked, number):
        blocks[1][row] = blocks[0][row]
    corrected, filled = output / "corrected" / f"{name}.po", output / "corrected" / "filled.po"
    corrected.parent.mkdir(exist_ok=True)
    corrected.write_text("\n\n".join(blocks[1]), encoding="utf-8")
    tuned = output / "corrected" / f"{name}-model"
    if not (tuned / "model.safetensors").exists():
        data = ["--train-data", corrected, "--output", tuned, "--max-minutes", minutes]
        vaswani("train", "finetune", "--from", output / "model", *data)
    result = {}
    for model, label in ((output / "model", "before"), (tuned, "after")):
        for option in ([], ["--consistent-terms"]):
            vaswani("translate", model, "--format", "po", "--input", corrected, "--output", filled, *option)
            todo = [entry.state == "untranslated" for entry in read(corrected)]
            pairs_of = zip(todo, read(filled), read(output / f"{name}.po"), strict=True)
            both = [(entry.targets[0], true.targets[0]) for is_asked, entry, true in pairs_of if is_asked]
            result[" ".join([label, *option])] = scores(*map(list, zip(*filter(all, both), strict=True)))
    return result


def main() -> None:
    """Do all of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("catalogues", nargs="+", metavar="NAME=FILE.mo")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--corrected", type=int, default=0)
    options = parser.parse_args()
    output, model = options.output.absolute(), options.output.absolute() / "model"
    for folder in ("empty", "filled"):
        (output / folder).mkdir(parents=True, exist_ok=True)
    files = dict(each.partition("=")[::2] for each in options.catalogues)
    for name, mo in files.items():
        prepare(name, Path(mo), output)
    known = {pair for name in files for pair in pairs(output / "empty" / f"{name}.po") if not held_out(pair[0])}
    lines = sorted("\t".join(" ".join(text.split()) for text in pair) for pair in known)
    (output / "train.tsv").write_text("source\ttarget\n" + "\n".join(lines) + "\n", encoding="utf-8")
    if not (model / "model.safetensors").exists():
        vaswani("train", "--train-data", output / "train.tsv", "--output", model, "--max-minutes", options.minutes)
    rows, result = {"plain": [], "terms": []}, {"pairs": len(lines), "minutes": options.minutes, "files": {}}
    for name in files:
        empty, true = output / "empty" / f"{name}.po", list(read(output / f"{name}.po"))
        todo = [number for number, entry in enumerate(read(empty)) if entry.state == "untranslated"]
        file = result["files"][name] = {"to fill": len(todo)}
        for kind, more in (("plain", []), ("terms", ["--consistent-terms"])):
            filled = output / "filled" / f"{name}-{kind}.po"
            seconds = vaswani("translate", model, "--format", "po", "--input", empty, "--output", filled, *more)
            entries = list(read(filled))
            for number in todo:
                texts = zip(entries[number].targets, true[number].targets, strict=True)
                rows[kind] += [(entries[number], *pair) for pair in texts if all(pair)]
            number = sum(entries[number].state == "fuzzy" for number in todo)
            file[kind] = {"filled": number, "processor seconds": seconds, "msgfmt finds wrong": len(msgfmt(filled))}
        (output / "lines.txt").write_text("".join(" ".join(true[n].sources[0].split()) + "\n" for n in todo), "utf-8")
        file["as lines, processor seconds"] = vaswani("translate", model, "--input", output / "lines.txt")
        terms = Glossary({term.source: term.targets for term in find_terms(pairs(empty))})
        occur = [(number, forms) for number in todo for forms in terms.of(true[number].sources[0]).values()]
        has = lambda entries: sum(any(form in "".join(entries[n].targets) for form in forms) for n, forms in occur)  # noqa: B023, E731
        file["terms"] |= {"found": len(terms.terms), "occur": len(occur), "there": has(entries), "true": has(true)}
    has = lambda entry: any(messages.pattern_of(entry.flags).search(text) for text in entry.sources)  # noqa: E731
    for kind, all_ in rows.items():
        for name, part in (("with placeholders", [row for row in all_ if has(row[0])]), ("all", all_)):
            result[f"{kind}, {name}"] = scores([row[1] for row in part], [row[2] for row in part])
    if options.corrected:
        large = [name for name, file in result["files"].items() if file["to fill"] >= 2 * options.corrected]
        result["corrected"] = {name: update(output, name, options.corrected, 5) for name in large}
    (output / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
