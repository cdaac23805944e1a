"""Train on nine tenths of real catalogues' entries, fill the others, check the files by msgfmt, score what was filled.

    python scripts/benchmarks/catalogues.py OUTPUT NAME=FILE.mo ... [--minutes 9] [--constrained]

The .mo files of a program's translated packages, of one language, are turned into .po by gettext's msgunfmt, and get
flags (`c-format`, `kde-format`, `gcc-internal-format`) by their placeholders, as far as msgfmt takes the human
translation with them. OUTPUT gets the emptied and the filled catalogues, the model and `result.json`; a model that is
there is taken. Minutes are of the clock. `--constrained` searches what no candidate was valid for again, with
placeholders as terms of a glossary, beside the document's way that counts.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import time
import zlib
from pathlib import Path

import sacrebleu

from vaswani_transformer import Translator, load_model
from vaswani_transformer.catalogues.formats import pairs, read
from vaswani_transformer.decoding.glossary import Term
from vaswani_transformer.documents import messages

FLAGS = {"kde": r"%\d", "gcc-internal": r"%[-+#]*(q|[<CDELTKF]|\.?\*)", "c": r"%[-+#\d.l*z]*[sdiucfgx]"}
EMPTY = re.compile(r'(msgstr(?:\[\d\])?) "(?:[^"\\]|\\.)*"(?:\n"(?:[^"\\]|\\.)*")*')


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


def constrained(model: Path, rows: list) -> dict:
    """Compare constraint and the document's way on the messages of which no candidate is valid."""
    segments = {row: messages.Message(*row[0].texts()[0], row[0].flags).parts[0][1] for row in rows}
    loaded = load_model(model, "cpu")
    plain = Translator(*loaded, num_return_sequences=4)
    valid = lambda s, texts: next((t for t in texts if not messages.problem(s.text, t, s.flags)), None)  # noqa: E731
    sources = [segment.text for segment in segments.values()]
    candidates = [[each.text for each in ranked] for ranked in plain.hypotheses(sources)]
    left = {row: s for (row, s), texts in zip(segments.items(), candidates, strict=True) if not valid(s, texts)}

    class Placeholders:
        """A glossary of each text's own placeholders."""

        def of(self, text: str) -> list[Term]:
            segment = next(segment for segment in left.values() if segment.text == text)
            parts = dict.fromkeys(messages.pattern_of(segment.flags).findall(text))
            return [Term(part, (part,)) for part in parts]

    forced = Translator(*loaded, glossary=Placeholders(), num_beams=8, num_return_sequences=4)
    found = forced.hypotheses([segment.text for segment in left.values()])
    pairs_of = zip(left.items(), ([each.text for each in ranked] for ranked in found), strict=True)
    both = [(row, text) for (row, segment), texts in pairs_of if (text := valid(segment, texts))]
    references = [row[2] for row, _ in both]
    result = {"without a valid candidate": len(left), "valid by constraint": len(both)}
    result["constraint"] = scores([text for _, text in both], references)
    return result | {"document": scores([row[1] for row, _ in both], references)}


def main() -> None:
    """Do all of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("catalogues", nargs="+", metavar="NAME=FILE.mo")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--constrained", action="store_true")
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
    rows, result = [], {"pairs": len(lines), "minutes": options.minutes, "files": {}}
    for name in files:
        empty, filled, started = output / "empty" / f"{name}.po", output / "filled" / f"{name}.po", time.monotonic()
        seconds = vaswani("translate", model, "--format", "po", "--input", empty, "--output", filled)
        todo = [entry.state == "untranslated" for entry in read(empty)]
        both = zip(todo, read(filled), read(output / f"{name}.po"), strict=True)
        entries = [(entry, true) for is_asked, entry, true in both if is_asked]
        for entry, true in entries:
            rows += [(entry, *pair) for pair in zip(entry.targets, true.targets, strict=True) if all(pair)]
        result["files"][name] = {
            "to fill": len(entries),
            "filled": sum(entry.state == "fuzzy" for entry, _ in entries),
            "seconds": time.monotonic() - started,
            "processor seconds": seconds,
            "msgfmt finds wrong": len(msgfmt(filled)),
        }
    has = lambda entry: any(messages.pattern_of(entry.flags).search(text) for text in entry.sources)  # noqa: E731
    for name, part in (("with placeholders", [row for row in rows if has(row[0])]), ("all", rows)):
        result[name] = scores([row[1] for row in part], [row[2] for row in part])
    if options.constrained:
        single = [row for row in rows if has(row[0]) and not row[0].counts and "\n" not in row[0].sources[0]]
        result["ways"] = constrained(model, single)
    (output / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
