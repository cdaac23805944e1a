"""Write docs/measurements.md from the result files beside this script.

    python scripts/benchmarks/results_page.py

A result file is JSON: `section`, `title`, `command`, `commit`, `date`, `processor`, `note`, `columns`, `rows` of
text, perhaps a `picture` of docs/pictures. Files are shown in the order of their names, grouped by section.
"""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "measurements.md"
HEAD = """# Measurements

Every figure of this project, with its command, commit and processor; `results_page.py` writes the page from
`scripts/benchmarks/results/`. The machines are shared: compare within a table, and only rows of one machine. Where
minutes are of processor time, the script replaced the clock that `--max-minutes` reads. Nothing has been trained at the
paper's full size. "Of that commit" marks what is no longer kept. "EPYC" is an AMD EPYC: 2 virtual cores, AVX-512 with
bf16, shared.
"""


def page() -> str:
    """Return the text of docs/measurements.md."""
    parts, section = [HEAD], None
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((HERE / "results").glob("*.json"))]
    for section in dict.fromkeys(result["section"] for result in results):
        parts.append(f"## {section}\n")
        parts += [_table(result) for result in results if result["section"] == section]
    return "\n".join(parts)


def _table(result: dict) -> str:
    head, *rows = ("| " + " | ".join(line) + " |" for line in (result["columns"], *result["rows"]))
    table = "\n".join([head, "|---" * len(result["columns"]) + "|", *rows])
    origin = f"`{result['command']}`; commit {result['commit']}, {result['date']}; {result['processor']}."
    picture = f"\n![{result['title']}](pictures/{result['picture']})\n" if "picture" in result else ""
    return f"### {result['title']}\n\n{origin} {result['note']}\n\n{table}\n{picture}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
