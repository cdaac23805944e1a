"""Which weights a finished training keeps: the best checkpoint, the average of the last ones, or the last."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from ..recipes.recipe import Recipe
from .averaging import average_checkpoints
from .checkpoints import read_checkpoint, read_checkpoints, step_of, to_average
from .trainer import VaswaniTrainer

logger = logging.getLogger(__name__)

BEST, AVERAGE, LAST = "best", "average", "last"


@dataclass(frozen=True)
class Candidate:
    """Weights that may be kept.

    Args:
        name: best, average or last: what its scores begin with in the training log.
        checkpoints: folders that they come from.
    """

    name: str
    checkpoints: tuple[Path, ...]

    def __str__(self) -> str:
        if self.name == AVERAGE:
            return f"average of {len(self.checkpoints)} checkpoints"
        return f"{self.name} checkpoint"

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by name."""
        return average_checkpoints(self.checkpoints)


def find_candidates(recipe: Recipe, checkpoints: Path, best_step: int | None, end: int) -> list[Candidate]:
    """What there is to choose from.

    Args:
        recipe: says how many to average, and what to keep.
        checkpoints: the folder of checkpoints.
        best_step: step of the best one by validation, if there was one.
        end: the last step.
    """
    whole = read_checkpoints(checkpoints)
    timed, count = recipe.checkpoint_minutes > 0, recipe.average_checkpoints
    averaged = to_average(whole, count, timed, recipe.evaluate_every, end)
    best = None if best_step is None else read_checkpoint(checkpoints / f"checkpoint-{best_step}")
    found = []
    if best is not None:
        found.append(Candidate(BEST, (best.path,)))
    if len(averaged) > 1:
        found.append(Candidate(AVERAGE, tuple(one.path for one in averaged)))
    if whole and (recipe.keep_weights == LAST or not found):
        found.append(Candidate(LAST, (whole[-1].path,)))
    return found


def choose_weights(trainer: VaswaniTrainer, recipe: Recipe, checkpoints: Path) -> tuple[Candidate | None, dict]:
    """Evaluate what there is to choose from, log it, and put into the model what the recipe keeps.

    Returns:
        What was kept, and its validation; None for the weights that the model has, if there are no checkpoints.
    """
    state = trainer.state
    found = find_candidates(recipe, checkpoints, state.best_global_step, state.global_step)
    if not found:
        return None, trainer.evaluate()
    results = []
    for candidate in found:
        put_weights(trainer.model, candidate.weights())
        scores = trainer.evaluate(metric_key_prefix=candidate.name)
        scores = {f"eval_{key.removeprefix(candidate.name + '_')}": value for key, value in scores.items()}
        results.append((candidate, scores))
        logger.info("%s: validation %s", _describe(candidate), _shown(scores))
    kept = next((result for result in results if result[0].name == recipe.keep_weights), None)
    if kept is None:
        if recipe.keep_weights != "better":
            logger.info("there is no %s to keep: keeping the better of what there is", recipe.keep_weights)
        sign = 1 if recipe.best_by == "bleu" else -1
        kept = max(results, key=lambda result: sign * result[1][f"eval_{recipe.best_by}"])
    if kept is not results[-1]:
        put_weights(trainer.model, kept[0].weights())
    return kept


def put_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Replace a model's weights, also where they are sharded over processes, which then all have to call this.

    Args:
        model: as the trainer holds it.
        weights: by name; of tied matrices one is enough.
    """
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, dict(weights), options=options)  # it changes the dictionary


def _describe(candidate: Candidate) -> str:
    steps = [step_of(path) for path in candidate.checkpoints]
    if candidate.name == AVERAGE:
        return f"average of the last {len(steps)} checkpoints (steps {', '.join(f'{step:,}' for step in steps)})"
    return f"{candidate} (step {steps[0]:,})"


def _shown(scores: dict) -> str:
    names = [name for name in ("loss", "perplexity", "bleu") if f"eval_{name}" in scores]
    return ", ".join(f"{name} {scores[f'eval_{name}']:.3f}" for name in names)
