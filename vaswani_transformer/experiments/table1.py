"""Table 1: complexity, sequential operations and path length of layer types, the formulas and what is measured."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from .base import Cell, Estimate, Experiment, Setup, describe_runs, markdown_table, write_recipe
from .layer_types import KINDS, LayerCost, fitted_exponent, measure_layer, path_length

# Sizes measured: lengths at width `width`, widths at length `length`.
SCALES = {
    "laptop": {
        "lengths": [128, 256, 512, 1024, 2048, 4096], "width": 64,
        "widths": [64, 128, 256, 512, 1024], "length": 512,
        "kernel": 3, "neighbourhood": 64, "path_positions": 33, "rounds": 5,
    },
    "paper": {
        "lengths": [256, 512, 1024, 2048, 4096, 8192, 16384], "width": 512,
        "widths": [128, 256, 512, 1024, 2048, 4096], "length": 2048,
        "kernel": 3, "neighbourhood": 64, "path_positions": 33, "rounds": 5,
    },
}  # fmt: skip
# Of a layer type on two cores; at paper scale not known before it is measured.
SECONDS = {"laptop": 10.0, "paper": None}
PATH_KERNEL, PATH_NEIGHBOURHOOD = 3, 8


def table1_settings(setup: Setup) -> dict[str, Any]:
    """The sizes to measure, with the changes of the call: whole numbers, several separated by commas."""
    settings = dict(SCALES[setup.scale])
    for name, text in setup.changes.items():
        if name not in settings:
            raise UserError(f"table1 has no setting {name!r}: there are {', '.join(settings)}")
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            values = []
        several = isinstance(settings[name], list)
        if not values or min(values) < 1 or (not several and len(values) > 1) or (several and len(set(values)) < 2):
            kind = "two whole numbers or more, such as 128,256" if several else "a whole number of 1 or more"
            raise UserError(f"{name} is {text!r}: it must be {kind}")
        settings[name] = sorted(values) if several else values[0]
    if settings["kernel"] % 2 == 0:
        raise UserError(f"kernel is {settings['kernel']}: it must be odd, for a centred convolution")
    if settings["neighbourhood"] % 2:
        raise UserError(f"neighbourhood is {settings['neighbourhood']}: it must be even, half to either side")
    return settings


class Table1(Experiment):
    """A cell for each layer type: time and memory of one layer over lengths and widths."""

    name = "table1"
    title = "layer types: complexity, sequential operations and path length, formulas and measurements"
    one_at_a_time = True

    def cells(self, setup: Setup) -> list[Cell]:
        """One for each of `KINDS`."""
        cells = []
        for name, kind in KINDS.items():
            paper = {"complexity": kind.complexity, "sequential": kind.sequential, "path": kind.path}
            cells.append(Cell(name, kind.label, table1_settings(setup) | {"layer": name}, paper, kind.row))
        return cells

    def estimate(self, setup: Setup, cell: Cell, device: str | None) -> Estimate:
        """Ten seconds at laptop scale, unknown at paper scale; nothing is trained."""
        return Estimate(seconds=SECONDS[setup.scale])

    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Measure a layer over lengths, then over widths, and find its longest path."""
        write_recipe(folder, cell)
        settings, kind = cell.settings, KINDS[cell.name]
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        def measured(length: int, width: int) -> LayerCost:
            layer = kind.make(width, settings["kernel"], settings["neighbourhood"])
            return measure_layer(layer, length, width, device, settings["rounds"])

        over_lengths = [measured(length, settings["width"]) for length in settings["lengths"]]
        over_widths = [measured(settings["length"], width) for width in settings["widths"]]
        exponents = {
            f"{name}_{what}": fitted_exponent(sizes, [getattr(cost, what) for cost in costs])
            for name, sizes, costs in (
                ("n", settings["lengths"], over_lengths), ("d", settings["widths"], over_widths))
            for what in ("forward_seconds", "training_seconds", "forward_bytes", "training_bytes")
        }  # fmt: skip
        positions = settings["path_positions"]
        return {
            "over_lengths": [asdict(cost) for cost in over_lengths],
            "over_widths": [asdict(cost) for cost in over_widths],
            "exponents": exponents,
            "path_length": path_length(cell.name, positions, PATH_KERNEL, PATH_NEIGHBOURHOOD),
        }

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """The formulas with the measured path, then exponents and costs at the largest size."""
        settings = table1_settings(setup)
        positions, lengths, widths = settings["path_positions"], settings["lengths"], settings["widths"]
        kernel, neighbourhood = settings["kernel"], settings["neighbourhood"]
        formulas, measured = [], []
        for cell in cells:
            kind, figures = KINDS[cell.name], results.get(cell.name, {}).get("figures")
            exact = kind.layers_needed(positions, PATH_KERNEL, PATH_NEIGHBOURHOOD)
            path = str(figures["path_length"]) if figures else ""
            formulas.append([kind.label, kind.complexity, kind.sequential, kind.path, str(exact), path])
            if figures:
                fitted, largest = figures["exponents"], figures["over_lengths"][-1]
                over_n = [kind.operations(n, settings["width"], kernel, neighbourhood) for n in lengths]
                over_d = [kind.operations(settings["length"], d, kernel, neighbourhood) for d in widths]
                exponents = (
                    fitted["n_training_seconds"], fitted_exponent(lengths, over_n),
                    fitted["d_training_seconds"], fitted_exponent(widths, over_d),
                    fitted["n_training_bytes"], fitted["d_training_bytes"],
                )  # fmt: skip
                costs = [1e3 * largest[f"{what}_seconds"] for what in ("forward", "training")]
                costs += [largest[f"{what}_bytes"] / 1e6 for what in ("forward", "training")]
                measured.append([kind.label, *(f"{a:.2f}" for a in exponents), *(f"{cost:.1f}" for cost in costs)])
        at = f"n = {lengths[-1]:,}"
        titles = ["one layer", "time ~ n^", "formula", "time ~ d^", "formula", "memory ~ n^", "memory ~ d^",
                  f"forward, {at} (ms)", "and backward (ms)", "memory, forward (MB)", "and backward (MB)"]  # fmt: skip
        return "\n".join([
            f"# Table 1, {setup.scale} scale\n",
            markdown_table(
                ["layer type", "complexity a layer", "sequential operations", "maximum path length",
                 f"at n = {positions}, k = {PATH_KERNEL}, r = {PATH_NEIGHBOURHOOD}", "by gradients"], formulas),
            "", markdown_table(titles, measured), "", self._notes(settings), describe_runs(results), "",
        ])  # fmt: skip

    def _notes(self, settings: dict) -> str:
        lengths, widths = settings["lengths"], settings["widths"]
        return (
            f"One sequence, float32; n from {lengths[0]:,} to {lengths[-1]:,} at d = {settings['width']}, d from"
            f" {widths[0]:,} to {widths[-1]:,} at n = {settings['length']:,}; k = {settings['kernel']}, r ="
            f" {settings['neighbourhood']}. Exponents: least squares of logarithms over the three largest sizes, of"
            f" forward and backward together; time is the shortest of some rounds ({settings['rounds']}; more where"
            ' they are short, two where they are long); "formula": the same fit to the number of the layer\'s'
            " operations, since a formula with two terms has no exponent of its own; memory is the most that torch's"
            " allocator had given out beyond weights and input. Self-attention is one head and without projections, as"
            " the table counts it, unless named otherwise; the restricted one is the model's (`attention_window`). Path"
            " by gradients: layers (in a recurrent one, applications of its cell) until"
            " every output changes with every input."
        )

    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Time and memory of forward and backward over n and over d, log-log."""
        figure.set_size_inches(15, 8)
        axes = figure.subplots(2, 2)
        units = (("training_seconds", 1e3, "ms"), ("training_bytes", 1e-6, "MB"))
        for row, (what, factor, unit) in zip(axes, units, strict=True):
            sides = (("over_lengths", "length", "n (positions)"), ("over_widths", "width", "d"))
            for axis, (costs, size, title) in zip(row, sides, strict=True):
                for place, (name, result) in enumerate(results.items()):
                    figures = result["figures"]
                    exponent = figures["exponents"][f"{'n' if size == 'length' else 'd'}_{what}"]
                    axis.loglog(
                        [cost[size] for cost in figures[costs]], [factor * cost[what] for cost in figures[costs]],
                        marker="os^vDPX*<"[place % 9], markersize=4, color=f"C{place}",
                        linestyle=("-", "--", ":")[place % 3],  # some lie on each other
                        label=f"{KINDS[name].label}: {exponent:.2f}",
                    )  # fmt: skip
                axis.set_xlabel(title)
                axis.set_ylabel(f"{'time' if unit == 'ms' else 'memory'}, forward and backward ({unit})")
                axis.grid(alpha=0.3, which="both")
                sizes = [cost[size] for cost in next(iter(results.values()))["figures"][costs]]
                axis.set_xticks(sizes, [f"{value:,}" for value in sizes])
                axis.set_xticks([], minor=True)
                axis.legend(
                    fontsize=8, title="exponent, three largest sizes", title_fontsize=8, loc="upper left",
                    bbox_to_anchor=(1, 1),
                )  # fmt: skip
        figure.suptitle("Table 1 measured: one layer, one sequence")
