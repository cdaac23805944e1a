"""Markdown tables of what `scripts/import_measurements.py` measured."""


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def score(value: dict) -> str:
    """A score and half its 95% interval."""
    return f"{value['score']:.2f} ± {value['interval']:.2f}"


def change(value: dict) -> str:
    """A difference, its 95% interval and p-value."""
    low, high = value["between"]
    return f"{value['difference']:+.2f} ({low:+.2f} to {high:+.2f}){p_value(value)}"


def p_value(value: dict) -> str:
    """The p-value of a difference, if there is one to test."""
    return f", p {value['p']:.3f}" if value["p"] is not None and value["score"] != value["baseline"] else ""


def sentences(join: str) -> str:
    """What a set is made of."""
    return "single" if join == "1" else f"{join} joined"


def positions_table(results: dict) -> str:
    """Ours with Marian's positions against ours with transformers', and against ours in int8."""
    rows = []
    for search in (f"beam {results['beams']}", "beam 1"):
        for join, part in results[search].items():
            for name, values in list(part["positions"].items())[1:]:
                first = next(iter(part["positions"].values()))
                rows.append([
                    f"{sentences(join)}, {'greedy' if search == 'beam 1' else search}",
                    name.removeprefix("ours, "),
                    *(cell for metric in ("BLEU", "chrF") for cell in (score(first[metric]), change(values[metric]))),
                    f"{values['identical']:.1%}",
                ])  # fmt: skip
    heads = ["sentences, search", "changed to", "BLEU", "difference", "chrF", "difference", "identical outputs"]
    return table(heads, rows)


def engines_table(results: dict, search: str) -> str:
    """Each engine against Marian."""
    part, rows = results[search], []
    for name in part["1"]["against Marian"]:
        cells = [name]
        for join in part:
            values = part[join]["against Marian"][name]
            cells += [score(values[metric]) + p_value(values[metric]) for metric in ("BLEU", "chrF")]
            cells.append(f"{values['identical']:.1%}")
        rows.append(cells)
    heads = [f"{sentences(join)}: {what}" for join in part for what in ("BLEU", "chrF", "identical to Marian's")]
    return table(["engine", *heads], rows)


def span(row: dict) -> str:
    """A range of lengths or places."""
    return f"{row['from']} or more" if row["below"] >= 1000 else f"{row['from']} to {row['below'] - 1}"


def lengths_table(results: dict) -> str:
    """BLEU by tokens of the source."""
    names = [name for name in results["beam 1"]["1"]["against Marian"] if "," not in name]  # engines as they come
    rows = [
        [span(row), str(row["sources"]), *(f"{row['BLEU'][name]:.2f}" for name in names)]
        for row in results["by length"]
    ]
    return table(["source tokens", "sources", *names], rows)


def scores_table(results: dict) -> str:
    """Log-probabilities of the references against Marian's."""
    names = list(next(iter(results["scores"].values()))["engines"])
    rows = []
    for name in names:
        cells = [name]
        for part in results["scores"].values():
            values = part["engines"][name]
            cells += [f"{values['largest']:.2g}", f"{values['mean']:.2g}", f"{values['nats_per_token']:.4f}"]
        rows.append(cells)
    heads = [
        f"{sentences(join)}: {what}"
        for join in results["scores"]
        for what in ("largest difference", "mean difference", "nats a token")
    ]
    return table(["engine", *heads], rows)


def places_table(results: dict) -> str:
    """What transformers' positions change, by place in the target."""
    rows = [
        [span(row), f"{row['tokens']:,}", f"{row['mean']:.4f}", f"{row['largest']:.2f}", f"{row['signed']:+.5f}"]
        for row in results["by place"]
    ]
    return table(["place in the target", "tokens", "mean change", "largest change", "mean, signed"], rows)


def tables(results: dict) -> str:
    """All tables of the results, with headings."""
    beam = f"beam {results['beams']}"
    facts = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    sets = "; ".join(
        f"{sentences(join)}: {part['sources']:,} sources of {part['mean tokens']:.1f} tokens on average"
        for join, part in results["sets"].items()
    )
    parts = {
        "Positions alone: ours with Marian's positions, changed to transformers' (or to int8)": positions_table(
            results
        ),
        f"Engines, {beam}": engines_table(results, beam),
        "Engines, greedy": engines_table(results, "beam 1"),
        f"BLEU by length of the source, all sets together, {beam}": lengths_table(results),
        "Log-probabilities of the references, in nats, against Marian's": scores_table(results),
        "What transformers' positions change in a reference token's log-probability": places_table(results),
    }
    head = f"{facts['processor']} ({facts['capability']}); {versions}.\n\n{sets}.\n"
    return head + "".join(f"\n### {title}\n\n{text}" for title, text in parts.items())
