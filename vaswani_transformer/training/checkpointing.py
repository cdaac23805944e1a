"""A trainer whose checkpoints are whole or not there, say why they were written, and go on elsewhere."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import Seq2SeqTrainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..distributed import on_any_process
from ..files import publish, remove, unfinished
from .checkpoints import (
    END,
    INTERVAL,
    STOP,
    VALIDATION,
    CheckpointError,
    is_failed_write,
    last_complete_checkpoint,
    read_checkpoints,
    step_of,
    surplus,
    write_manifest,
)

logger = logging.getLogger(__name__)


class CheckpointingTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` with checkpoints as in `checkpoints`; what else it trains, and how, is as it was.

    Args:
        *args: as for `Seq2SeqTrainer`; its settings have a `timed_save_total_limit` too.
        **kwargs: as for `Seq2SeqTrainer`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._validated_step = -1
        self._said_draws_anew = False

    def before_checkpoint(self) -> None:
        """What has to be looked at or noted before one is written, on all processes.

        Raises:
            UserError: on all processes, if there must be none.
        """

    def _evaluate(self, *args, **kwargs):
        metrics = super()._evaluate(*args, **kwargs)
        self._validated_step = self.state.global_step
        return metrics

    def _save_checkpoint(self, model, trial) -> None:
        """As in `Trainer`, but whole or not at all: under another name first, with a manifest (see `checkpoints`).

        Raises:
            CheckpointError: on all processes, if one of them could not write; nothing of it is left then.
            UserError: as `before_checkpoint`.
        """
        self.before_checkpoint()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder = Path(self._get_output_dir(trial=trial))
        final = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        writing = unfinished(final)
        self._together(lambda: self._make_folder(writing), final, writing, on_main_process=True)
        for write in self._parts_of_checkpoint(str(writing)):
            self._together(write, final, writing)
        best = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if best == final or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        self._together(lambda: self._seal_checkpoint(writing, final), final, writing, on_main_process=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        self.remove_surplus(folder)

    def remove_surplus(self, folder: Path) -> None:
        """Remove the checkpoints in `folder` that are more than the settings keep."""
        limits = self.args.save_total_limit, self.args.timed_save_total_limit
        if self.args.should_save and any(limit is not None for limit in limits):
            now = self.state.global_step  # what has more steps is of an earlier training in this folder
            found = sorted(read_checkpoints(folder), key=lambda one: (one.step <= now, one.step))
            for checkpoint in surplus(found, *limits, self.state.best_global_step):
                remove(checkpoint.path)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As in `Trainer`; for a checkpoint of another number of processes dropout draws anew, and that is said."""
        if checkpoint is None:
            return
        earlier = max(1, len(list(Path(checkpoint).glob("rng_state*.pth"))))
        if earlier == self.args.world_size:
            super()._load_rng_state(checkpoint)
            return
        step, rank = self.state.global_step, self.args.process_index
        torch.manual_seed(int(np.random.SeedSequence((self.args.seed, step, rank)).generate_state(1)[0]))
        if not self._said_draws_anew and self.is_world_process_zero():
            logger.info(
                "the checkpoint is of %d process%s, now there are %d: batches, rates and Adam's averages go on as they"
                " were; dropout draws anew from seed, step and process",
                *(earlier, "" if earlier == 1 else "es", self.args.world_size),
            )
        self._said_draws_anew = True

    def _make_folder(self, writing: Path) -> None:
        remove(writing)
        writing.mkdir(parents=True)

    def _together(self, write: Callable, final: Path, writing: Path, on_main_process: bool = False) -> None:
        """One part of writing a checkpoint; all processes wait for it, and fail if one does."""
        failure = None
        try:
            if self.args.should_save or not on_main_process:
                write()
        except BaseException as error:
            if not is_failed_write(error):
                shutil.rmtree(writing, ignore_errors=True)
                raise
            failure = error
        if not any(on_any_process(self.args, failure is not None)):
            return
        if self.args.should_save:
            shutil.rmtree(writing, ignore_errors=True)
        reasons = [None if failure is None else str(getattr(failure, "strerror", None) or failure)]
        if self.args.world_size > 1:
            reasons = gather_object(reasons)  # any of them may be the one that tells
        reason = next(reason for reason in reasons if reason is not None)
        last = last_complete_checkpoint(final.parent)
        resumed = f"goes on from step {step_of(last):,}" if last is not None else "starts again"
        raise CheckpointError(
            f"the checkpoint of step {self.state.global_step:,} could not be written to {final.parent}"
            f" ({' '.join(reason.split())[:200]}): free some space, then the same command {resumed}"
        ) from failure

    def _parts_of_checkpoint(self, writing: str) -> list[Callable]:
        """What writes all files but the trainer's state and the manifest; each process has its own random state.

        Sharded models are gathered in the first two. Only what follows that may fail on one process alone, or the
        others would wait for it in the next sum.
        """
        parts = [lambda: self.save_model(writing, _internal_call=True)]
        if not self.args.save_only_model:
            parts.append(lambda: self._save_optimizer_and_scheduler(writing))
            parts.append(lambda: (self._save_scaler(writing), self._save_rng_state(writing)))
        return parts

    def _seal_checkpoint(self, writing: Path, final: Path) -> None:
        """Write trainer state and manifest, and give the checkpoint its name."""
        states = {}
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        for name, found in states.items():
            self.state.stateful_callbacks[name] = found if len(found) > 1 else found[0]
        self.state.save_to_json(str(writing / TRAINER_STATE_NAME))
        write_manifest(writing, self.state.global_step, self.args.world_size, self._save_reasons())
        publish(writing, final)

    def _save_reasons(self) -> set[str]:
        """Why a checkpoint is written now; callbacks that ask for one say so in `save_reason`."""
        step, every = self.state.global_step, self.state.save_steps
        reasons = {getattr(callback, "save_reason", None) for callback in self.callback_handler.callbacks} - {None}
        if self._validated_step == step:
            reasons.add(VALIDATION)
        elif self.args.save_strategy == "steps" and every and step % every == 0:
            reasons.add(INTERVAL)
        if self.control.should_training_stop and (STOP not in reasons or step >= self.state.max_steps):
            reasons.add(END)
        return reasons or {INTERVAL}
