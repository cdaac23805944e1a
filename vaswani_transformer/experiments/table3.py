"""Table 3: variations of the base model, perplexity and BLEU on the development set."""

from collections.abc import Sequence

from ..recipes.recipe import Recipe
from .base import Cell, Setup, as_text, describe_runs, markdown_table
from .paper_tables import TABLE3, VariationRow
from .translation import LAPTOP, WARMUP, Training, TranslationExperiment, draw_against, scaled_down, spread, with_target

SEEDS = 3  # of the base model: their range shows which differences may be chance
# Rows whose difference lies in training and not in the model.
SMOOTHING = {"table3-d-smoothing-0.0": 0.0, "table3-d-smoothing-0.2": 0.2}
# The last checkpoint: Table 3 is without averaging (its caption).
PAPER = {"average_checkpoints": 0, "keep_weights": "last"}
SMALL = PAPER | LAPTOP | {"max_steps": 2000, "evaluate_every": 500, "keep_checkpoints": 1, "validation_bleu": 0}
BIG_STEPS = 3  # times those of the others, in the paper and here


def row_training(row: VariationRow, scale: str, seed: int = 0) -> Training:
    """The training of one row of `TABLE3`.

    Paper scale: the recipe of the base or the big model with the row's sizes. Laptop scale: the same on Multi30k with
    the row's sizes `scaled_down`, smaller batches and fewer steps; the big model has three times those steps, as there.
    """
    big = row.preset == "big"
    recipe = "wmt14-en-de-big" if big else "wmt14-en-de-base"
    dropout = {"table3-d-dropout-0.0": 0.0, "table3-d-dropout-0.2": 0.2, "big": 0.3}.get(row.preset, 0.1)
    changes = {"preset": row.preset, "label_smoothing": SMOOTHING.get(row.preset, 0.1), "seed": seed}
    changes["dropout"] = dropout
    if scale == "paper":
        return Training(recipe, PAPER | changes, tokenized_bleu=True)
    changes |= scaled_down(Recipe(preset=row.preset)) | {"preset": "base"}
    steps = SMALL["max_steps"] * (BIG_STEPS if big else 1)
    warmup = WARMUP["big" if big else "base"]
    settings = with_target("de") | SMALL | changes | {"max_steps": steps, "warmup_steps": warmup}
    return Training(recipe, settings, test_source="val.en.gz", test_target="val.de.gz", tokenized_bleu=True)


def _row_label(cell: Cell) -> str:
    return f"({cell.group}) {cell.label}" if len(cell.group) == 1 else cell.label


class Table3(TranslationExperiment):
    """Rows (A) to (E), base and big; the base model with three seeds."""

    name = "table3"
    title = "variations of the base model: development perplexity and BLEU, parameters"

    def trainings(self, setup: Setup) -> dict[str, tuple[str, str, Training, dict]]:
        """One for each row; further seeds of the base model follow it."""
        trainings = {}
        for row in TABLE3:
            paper = {"perplexity": row.perplexity, "bleu": row.bleu}
            paper |= {} if row.millions is None else {"millions": row.millions}
            training = row_training(row, setup.scale)
            trainings[row.preset.removeprefix("table3-")] = (row.label, row.group, training, paper)
            for seed in range(1, SEEDS if row.preset == "base" else 1):
                again = row_training(row, setup.scale, seed)
                trainings[f"base-seed-{seed}"] = (f"base, seed {seed}", "base", again, paper)
        return trainings

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """Perplexity, BLEU and parameters of each row, ours and the paper's, and how far each is from the base."""
        bases = [results[cell.name]["figures"] for cell in cells if cell.group == "base" and cell.name in results]
        rows = []
        for cell in cells:
            ours = results.get(cell.name, {}).get("figures", {})
            differences = [
                f"{ours[key] - spread([base[key] for base in bases])[0]:+.2f}" if ours and bases else ""
                for key in ("perplexity", "paper_bleu")
            ]
            rows.append([
                _row_label(cell),
                as_text(ours.get("perplexity")), differences[0], as_text(ours.get("bleu")),
                as_text(ours.get("paper_bleu")), differences[1],
                as_text(ours["parameters"] / 1e6) if ours else "", as_text(ours.get("minutes"), ".1f"),
                as_text(cell.paper["perplexity"]), f"{cell.paper['perplexity'] - TABLE3[0].perplexity:+.2f}",
                as_text(cell.paper["bleu"], ".1f"), f"{cell.paper['bleu'] - TABLE3[0].bleu:+.1f}",
                as_text(cell.paper.get("millions"), "d"),
            ])  # fmt: skip
        titles = ["", "PPL", "to base", "sacreBLEU", "BLEU, as the paper", "to base", "params (M)", "minutes",
                  "paper: PPL", "to base", "BLEU", "to base", "params (M)"]  # fmt: skip
        return "\n".join([
            f"# Table 3, {setup.scale} scale: development set\n", markdown_table(titles, rows), "",
            self._notes(setup, bases), describe_runs(results), "",
        ])  # fmt: skip

    def _notes(self, setup: Setup, bases: list[dict]) -> str:
        text = "Perplexity a word piece, not comparable between vocabularies."
        if setup.scale == "laptop":
            sizes = "" if setup.changes else ", widths divided by 4 and layers by 2, vocabulary 4,000"
            text += (
                f" Here: Multi30k English-German, validation set{sizes};"
                " the paper: WMT 2014, newstest2013. \"To base\" is the difference to the mean of the base's seeds;"
                " row labels are the paper's sizes."
            )  # fmt: skip
        if len(bases) > 1:
            (bleu, bleu_range), (perplexity, perplexity_range) = (
                spread([base[key] for base in bases]) for key in ("paper_bleu", "perplexity")
            )
            text += (
                f" {len(bases)} seeds of the base: perplexity {perplexity:.2f} ± {perplexity_range:.2f}, BLEU"
                f" {bleu:.2f} ± {bleu_range:.2f} (half the range): a difference within that is chance."
            )
        if bases:
            text += f" sacreBLEU: `{bases[0]['bleu_signature']}`; as the paper: tokenised (see Table 2)."
        return text

    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Distance of each row from the base, in perplexity (relative) and BLEU, ours beside the paper's."""
        figure.set_size_inches(11, 7)
        left, right = figure.subplots(1, 2, sharey=True)
        bases = [results[cell.name]["figures"] for cell in cells if cell.group == "base" and cell.name in results]
        if not bases:
            return
        labels = list(map(_row_label, cells))
        for axis, key, mine, title in (
            (left, "perplexity", "perplexity", "perplexity, % of base"),
            (right, "bleu", "paper_bleu", "tokenised BLEU, to base"),
        ):
            seeds = [base[mine] for base in bases]
            mean, _ = spread(seeds)
            base = getattr(TABLE3[0], key)

            def distance(value, reference, key=key):
                return 100 * value / reference if key == "perplexity" else value - reference

            ours = [
                distance(results[cell.name]["figures"][mine], mean) if cell.name in results else None for cell in cells
            ]
            draw_against(axis, labels, ours, [distance(cell.paper[key], base) for cell in cells])
            axis.axvspan(*(distance(end, mean) for end in (min(seeds), max(seeds))), color="tab:blue", alpha=0.15)
            axis.set_xlabel(title)
        left.legend()
        figure.suptitle("Table 3: distance from the base model (band: range of the base's seeds here)")
