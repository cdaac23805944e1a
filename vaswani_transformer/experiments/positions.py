"""Section 3.5 checked, as an experiment: the study of positions, which keeps its own cells."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from .base import Cell, Estimate, Experiment, Setup, logger, told_machine, write_recipe
from .position_report import STUDIES, draw_positions, positions_as_markdown, run_position_study

CELL = "study"
SECONDS = 400.0  # on two cores


class Positions(Experiment):
    """One cell, of the same size at both scales."""

    name = "positions"
    title = "offsets as linear maps of sinusoids, and learned against sinusoidal positions on long sentences"

    def cells(self, setup: Setup) -> list[Cell]:
        """One.

        Raises:
            UserError: for changes.
        """
        if setup.changes:
            raise UserError(f"positions has no setting {next(iter(setup.changes))!r}: leave --set out")
        return [Cell(CELL, "the study", {"tasks": [study.task for study in STUDIES]})]

    def estimate(self, setup: Setup, cell: Cell, device: str | None) -> Estimate:
        """Minutes."""
        return Estimate(seconds=SECONDS)

    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Train what is missing of the study."""
        write_recipe(folder, cell)
        return run_position_study(folder, say=logger.info)

    def report(self, setup: Setup, cells: Sequence[Cell], results: dict[str, dict]) -> str:
        """The tables of the study."""
        found = [positions_as_markdown(result["figures"]) for result in results.values()]
        return "\n".join([*found, told_machine(results)]) + "\n"

    def draw(self, figure, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Nothing: the study draws its own picture."""

    def save_picture(self, picture: Path, cells: Sequence[Cell], results: dict[str, dict]) -> None:
        """Accuracy over length."""
        draw_positions(results[CELL]["figures"], picture)
