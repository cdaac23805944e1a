"""Model selection after the last step: the best checkpoint, the average of the last ones, or the last."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers.trainer_callback import TrainerState

from ..distributed import Processes, over_processes
from ..errors import UserError
from ..recipes.recipe import Recipe
from .averaging import average_checkpoints
from .callbacks import SHOWN, best_validation, says_something
from .checkpoints import Checkpoint, check_contents, read_checkpoints, step_of, to_average
from .initial_model import SEARCH
from .trainer import VaswaniTrainer

logger = logging.getLogger(__name__)

BEST, AVERAGE, LAST = "best", "average", "last"
LENGTH_PENALTIES = (0.2, 0.6, 1.0, 1.4, 1.8)  # above 2 outputs no longer end


def _candidates(recipe: Recipe, checkpoints: list[Checkpoint], state: TrainerState) -> dict[str, list[Path]]:
    """Return the checkpoints behind each candidate: best, average and last, as far as there are unchanged ones."""
    unchanged = []
    for checkpoint in checkpoints:
        try:
            check_contents(checkpoint.path, weights_only=True)
            unchanged.append(checkpoint)
        except (UserError, OSError) as error:
            logger.warning("not considered: %s", error)
    averaged = to_average(unchanged, recipe.average_checkpoints, recipe.save_every, state.global_step)
    candidates = {
        BEST: [checkpoint for checkpoint in unchanged if checkpoint.step == state.best_global_step],
        AVERAGE: averaged if len(averaged) > 1 else [],
    }
    if recipe.keep_weights == LAST or not any(candidates.values()):
        candidates[LAST] = unchanged[-1:]
    return {name: [checkpoint.path for checkpoint in chosen] for name, chosen in candidates.items() if chosen}


def select_weights(
    trainer: VaswaniTrainer, recipe: Recipe, folder: Path, processes: Processes
) -> tuple[str, int, dict]:
    """Evaluate and log all candidates among the checkpoints in `folder`, and load into the model what the recipe keeps.

    Without checkpoints the model keeps the weights that it has. All processes call it.

    Returns:
        Which weights they are, in words; of how many checkpoints they are the average, 0 if of one; their validation.
    """
    # By one process for all: they evaluate together, and may not read the disk alike.
    candidates = processes.share("candidates", lambda: _candidates(recipe, read_checkpoints(folder), trainer.state))
    if not candidates:
        return "last weights", 0, trainer.evaluate()
    metrics = {}
    for name, paths in candidates.items():
        _load_average(trainer, paths, processes, f"weights of {name}")
        scores = trainer.evaluate(metric_key_prefix=name)
        metrics[name] = {f"eval_{key.removeprefix(name + '_')}": value for key, value in scores.items()}
        steps = ", ".join(f"{step_of(path):,}" for path in paths)
        shown = [f"{label} {metrics[name][key]:.3f}" for key, label in SHOWN if key in metrics[name]]
        logger.info("%s (of step %s): validation %s", _label(name, paths), steps, ", ".join(shown))
    kept = recipe.keep_weights
    if kept not in candidates:
        if kept != "better":
            logger.info("there is no %s to keep: keeping the better of %s", kept, " and ".join(candidates))
        best = best_validation(metrics.values(), metrics.values(), recipe.best_by)
        kept = next(name for name in metrics if metrics[name] is best)
    if kept != name:  # the last that was evaluated is still loaded
        _load_average(trainer, candidates[kept], processes, "selected weights")
    averaged = len(candidates[kept]) if kept == AVERAGE else 0
    return _label(kept, candidates[kept]), averaged, metrics[kept]


def choose_length_penalty(trainer: VaswaniTrainer, seconds_left: Callable[[], float]) -> None:
    """Translate the validation set with several `LENGTH_PENALTIES`, and give the model the one with most BLEU.

    Section 6.1 chose its alpha on the development set, too. From the model's own it goes to a neighbour that has a
    tenth of a point more, unless more outputs do not end: the others get longer, and BLEU may be higher for that. It
    ends where BLEU says nothing, or another search would take more than `seconds_left`. All processes call it.
    """
    search = trainer.accelerator.unwrap_model(trainer.model).generation_config
    if search.num_beams in (None, 1):
        return
    start = chosen = SEARCH["length_penalty"] if search.length_penalty is None else search.length_penalty
    scores, endless, near, longest = {}, {}, [start], 0.0
    while near and not any(over_processes(trainer.args, [int(seconds_left() < longest)])):
        alpha = max(near)
        options = {"num_beams": search.num_beams, "length_penalty": alpha}
        output = trainer.predict(trainer.eval_dataset, metric_key_prefix="search", **options)
        scores[alpha], longest = output.metrics["search_bleu"], max(longest, output.metrics["search_runtime"])
        endless[alpha] = int((~np.isin(output.predictions[:, 1:], search.eos_token_id).any(axis=1)).sum())
        shown = alpha, search.num_beams, scores[alpha], endless[alpha]
        logger.info("length penalty %g, beam %d: validation BLEU %.2f, %d outputs without end", *shown)
        if not says_something(max(scores.values()), output.metrics["search_bleu_error"]):
            break
        if endless[alpha] <= endless[start] and scores[alpha] >= scores[chosen] + 0.1:
            chosen = alpha
        near = [other for other in LENGTH_PENALTIES if other not in scores and abs(other - chosen) < 0.5]
    logger.info("length penalty %g is chosen", chosen)
    search.length_penalty = chosen


def _label(name: str, paths: list[Path]) -> str:
    start = " (the model that training started from)" if step_of(paths[0]) == 0 else ""
    return f"average of {len(paths)} checkpoints" if name == AVERAGE else f"{name} checkpoint{start}"


def _load_average(trainer: VaswaniTrainer, paths: list[Path], processes: Processes, name: str) -> None:
    """Load the average of checkpoints: process 0 reads them, and the others wait."""
    weights = {}
    processes.share(name, lambda: weights.update(average_checkpoints(paths)))
    put_weights(trainer.model, weights)


def put_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Replace the weights of a trainer's model by name, of tied ones by one of their names.

    Of several processes all have to call this, and the weights that process 0 gives are sent to all, one by one.
    """
    several = distributed.is_available() and distributed.is_initialized()
    options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=several)
    set_model_state_dict(model, dict(weights), options=options)  # it changes the dictionary
