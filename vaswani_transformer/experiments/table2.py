"""Table 2: BLEU on the test sets and training cost, base and big, English to German and to French."""

from collections.abc import Sequence

import numpy as np

from ..recipes.recipe import Recipe
from .base import Cell, Setup, as_text, describe_runs, markdown_table
from .paper_tables import TABLE2
from .translation import LAPTOP, WARMUP, Training, TranslationExperiment, scaled_down, with_target

# The paper's big model has three times the steps of the base model, the laptop's twice as many: so that all tables end
# within three hours on two cores.
STEPS = {"base": 2000, "big": 4000}
PAPER = {"keep_weights": "average"}  # Section 6.1, whatever validation prefers
SMALL = PAPER | LAPTOP | {"keep_checkpoints": 1, "validation_bleu": 0}
# A checkpoint at each evaluation. Those averaged must be of the end of training, where weights hardly move: the last 5
# of base are its last tenth, the last 20 of big its last fifth (the paper's, by its minutes: 7.5% and 4%).
EVALUATE_EVERY = 40
# Where a label stands, in points from its dot, so that none lies on another.
_LABELS = {
    "MoE": (-6, -3, "right"), "GNMT + RL": (6, -9, "left"), "ConvS2S Ensemble": (-6, 4, "right"),
    "GNMT + RL Ensemble": (6, -8, "left"), "Deep-Att + PosUnk Ensemble": (-6, -11, "right"),
}  # fmt: skip
WHY = (
    "Two BLEUs of one output. sacreBLEU reads raw text and makes its own tokens (13a), so that anyone gets the same"
    " figure. The paper's (authors' script `get_ende_bleu.sh`) is `multi-bleu.perl` on Moses' tokens with German"
    " compounds put apart at hyphens, `a-b` as `a ##AT##-##AT## b`: where the hyphen and one part are right, n-grams"
    " match that 13a counts as one wrong word, and the sign itself, always right, adds matches. On news, full of"
    " compounds and names with hyphens, that is worth about a point (systems that others scored in both ways: 0.7 to"
    " 1.5); on captions, with a hyphen in one of sixteen, next to nothing. In French it is Moses' tokens that differ,"
    " which part the article of `l'herbe` as 13a does not: about a point. Compare figures of one kind only."
)


def row_training(language: str, size: str, scale: str) -> Training:
    """The training behind one figure of the table: a language, `"de"` or `"fr"`, and a size, `"base"` or `"big"`.

    Paper scale: a shipped recipe, scored on newstest2014 (3,003 sentences). Laptop scale: the same on Multi30k with the
    model `scaled_down`, smaller batches and fewer steps, scored on test_2016_flickr.
    """
    recipe = f"wmt14-en-{language}-{size}"
    if scale == "paper":
        return Training(recipe, PAPER, language, test_split="test", tokenized_bleu=True)
    preset = size if language == "de" else f"{size}-en-fr"
    changes = with_target(language) | SMALL | scaled_down(Recipe(preset=preset)) | {"preset": "base"}
    # Averaged as there: the last 5 checkpoints of base, 20 of big; English-French is word pieces in the paper too.
    changes |= {"tokenizer_kind": "wordpiece" if language == "fr" else "bpe", "evaluate_every": EVALUATE_EVERY}
    changes |= {"max_steps": STEPS[size], "warmup_steps": WARMUP[size]}
    return Training(recipe, changes, language, "test_2016_flickr.en.gz", f"test_2016_flickr.{language}.gz",
                    tokenized_bleu=True)  # fmt: skip


class Table2(TranslationExperiment):
    """Four trainings: base and big, to German and to French."""

    name = "table2"
    title = "BLEU and training cost, English to German and to French"

    def trainings(self, setup: Setup) -> dict[str, tuple[str, str, Training, dict]]:
        """Base, then big; each to German, then to French."""
        trainings = {}
        for size, row in (("base", TABLE2[-2]), ("big", TABLE2[-1])):
            for language in ("de", "fr"):
                paper = {"paper_bleu": getattr(row, f"bleu_{language}"), "flops": getattr(row, f"flops_{language}")}
                training = row_training(language, size, setup.scale)
                trainings[f"en-{language}-{size}"] = (f"{row.model}, en-{language}", language, training, paper)
        return trainings

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """Ours beside the paper's row, then the paper's table."""
        rows = []
        for cell in cells:
            ours = results.get(cell.name, {}).get("figures", {})
            rows.append([
                cell.label, as_text(ours.get("bleu")), as_text(ours.get("paper_bleu")),
                as_text(ours["parameters"] / 1e6) if ours else "", as_text(ours.get("minutes"), ".1f"),
                as_text(ours.get("flops_by_time"), ".1e"), as_text(ours.get("flops_counted"), ".1e"),
                as_text(cell.paper["paper_bleu"], ".1f"), as_text(cell.paper["flops"], ".1e"),
            ])  # fmt: skip
        titles = ["", "BLEU, sacreBLEU", "BLEU, as the paper", "params (M)", "minutes", "FLOPs, time x devices x peak",
                  "FLOPs, counted", "paper: BLEU", "FLOPs"]  # fmt: skip
        signature = next((result["figures"]["bleu_signature"] for result in results.values()), "")
        test = "test_2016_flickr of Multi30k" if setup.scale == "laptop" else "newstest2014, 3,003 sentences"
        notes = [f"Test set: {test}; the paper: newstest2014."]
        if setup.scale == "laptop" and not setup.changes:
            notes.append("Widths divided by 4, layers by 2, vocabulary 4,000.")
        if signature:
            notes.append(f"sacreBLEU: `{signature}`.")
        peaks = sorted({f"{result['figures']['sustained_tflops']:.2f}" for result in results.values()})
        if peaks:
            # Of a training that was resumed with another number of devices the last.
            counts = sorted({result["figures"].get("devices", 1) for result in results.values()})
            notes.append(
                f"Cost by the paper's method (footnote 5): seconds of training times devices"
                f" ({', '.join(map(str, counts))}) times the sustained TFLOPS of one, measured here:"
                f" {', '.join(peaks)}. Counted: the model's matrix products, forward and backward, without padding."
            )
        theirs = [
            [row.model, *(as_text(value, ".2f").removesuffix("0") for value in (row.bleu_de, row.bleu_fr)),
             *(as_text(value, ".1e") for value in (row.flops_de, row.flops_fr))]
            for row in TABLE2
        ]  # fmt: skip
        return "\n".join([
            f"# Table 2, {setup.scale} scale\n", markdown_table(titles, rows), "", " ".join(notes), "", WHY, "",
            describe_runs(results), "\nThe paper's table (newstest2014):\n",
            markdown_table(["model", "BLEU en-de", "BLEU en-fr", "FLOPs en-de", "FLOPs en-fr"], theirs), "",
        ])  # fmt: skip

    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """BLEU over training cost, a panel a language: the paper's models, ours among them or, of Multi30k, below."""
        is_small = any(result["scale"] == "laptop" for result in results.values())
        figure.set_size_inches(11, 8 if is_small else 5)
        panels = figure.subplots(2 if is_small else 1, 2, squeeze=False)
        for above, below, language in zip(panels[0], panels[-1], ("de", "fr"), strict=True):
            _draw_paper(above, language)
            for place, cell in enumerate(cell for cell in cells if cell.group == language and cell.name in results):
                figures = results[cell.name]["figures"]
                point = figures["flops_by_time"], figures["paper_bleu"]
                below.scatter(*point, color="tab:blue")
                offset = (6, 4 if place == 0 else -10)  # the two may lie on each other
                below.annotate(f"here: {cell.name}", point, offset, textcoords="offset points", fontsize=7)
            direction = f"English to {'German' if language == 'de' else 'French'}"
            for axis in {above, below}:
                axis.set_xscale("log")
                axis.set_ylabel("BLEU, tokenised")
                axis.set_title(f"{direction}, {'Multi30k, here' if is_small and axis is below else 'newstest2014'}")
                axis.grid(alpha=0.3)
                _set_limits(axis)
            below.set_xlabel("training cost (FLOPs: time x devices x sustained TFLOPS)")
        if is_small:
            figure.suptitle("Table 2. Captions are another test set: do not compare BLEU below with BLEU above")


def _set_limits(axis) -> None:
    """Powers of ten on the x axis, so that each has a label; at least 5 BLEU, or a tenth would look like a lead."""
    if not axis.collections:
        return
    points = np.concatenate([dots.get_offsets() for dots in axis.collections]).T
    axis.set_xlim(10 ** np.floor(np.log10(points[0].min())) / 1.5, 10 ** np.ceil(np.log10(points[0].max())) * 1.5)
    axis.xaxis.set_minor_formatter("")  # or they would lie on each other
    low, high = points[1].min(), points[1].max()
    reach = max(2.5, 0.55 * (high - low))
    axis.set_ylim((low + high) / 2 - reach, (low + high) / 2 + reach)


def _draw_paper(axis, language: str) -> None:
    for row in TABLE2:
        bleu, flops = getattr(row, f"bleu_{language}"), getattr(row, f"flops_{language}")
        if bleu is not None and flops is not None:
            ours = row.model.startswith("Transformer")
            axis.scatter(flops, bleu, color="tab:orange" if ours else "tab:gray")
            *place, side = _LABELS.get(row.model, (6, 4, "left"))
            axis.annotate(row.model, (flops, bleu), place, textcoords="offset points", fontsize=7, ha=side)
