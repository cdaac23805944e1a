"""`Seq2SeqTrainer` with the paper's batches, optimizer, schedule and loss (Sections 5.1 to 5.4)."""

import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate.utils import gather_object, send_to_device
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..data.augmentation import AugmentedPairs
from ..data.batching import MOST_PADDED, ROOM, PackedCollator, PairCollator, TokenBatchSampler, packed_size
from ..data.tokenized_pairs import pair_lengths
from ..distributed import over_processes
from ..errors import UserError, is_failed_write, reading
from ..files import WRITING, publish
from ..model.checkpoint_vaswani import is_finite
from ..model.loss_vaswani import IGNORE_INDEX
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..recipes.recipe import Recipe, augmentation_shares
from . import checkpoints
from .callbacks import StopAndSaveCallback
from .device_memory import choose_tokens_per_device, count_tokens
from .schedule import NoamSchedulerCallback

logger = logging.getLogger(__name__)
_FORWARD = VaswaniForConditionalGeneration.forward
UNUSED = ("learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "train_sampling_strategy", "data_seed")


@dataclass
class VaswaniTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the paper's values, and the size of a batch in tokens.

    Defaults that differ from transformers': label smoothing 0.1, Adam's beta 2 0.98 and epsilon 1e-9, no gradient
    clipping, 4000 warmup steps. `learning_rate`, `lr_scheduler_type`, `per_device_train_batch_size`, `data_seed`,
    `gradient_accumulation_steps` and `train_sampling_strategy` have no effect: the rate is Equation 3, and the token
    fields give the batches.

    Args:
        tokens_per_batch: the most source tokens, and the most target tokens, in one optimizer step over all
            devices and accumulated parts, padding not counted (the paper: about 25,000).
        tokens_per_device: what one device takes at once; if none, what its memory holds, and on a CPU 4096.
        padding_free: train on batches without padding (`PackedCollator`); validation pads.
        learning_rate_scale: factor on Equation 3.
        decline_steps: last steps, over which the rate also declines to zero.
        fused_loss: compute projection and training loss together (`skip_logits` of the model's `forward`).
        augmentation: as of a recipe: what is changed in a share of the training pairs; needs `processing_class`.
        augmentation_start: steps before any pair is changed.
    """

    tokens_per_batch: int = Recipe.tokens_per_batch
    tokens_per_device: int | None = None
    padding_free: bool = False
    learning_rate_scale: float = Recipe.learning_rate_scale
    decline_steps: int = Recipe.decline_steps
    fused_loss: bool = True
    augmentation: str | None = None
    augmentation_start: int = 0
    warmup_steps: float = Recipe.warmup_steps
    lr_scheduler_type: str = "constant"
    label_smoothing_factor: float = Recipe.label_smoothing
    adam_beta2: float = Recipe.adam_beta2
    adam_epsilon: float = Recipe.adam_epsilon
    max_grad_norm: float = Recipe.max_gradient_norm
    logging_nan_inf_filter: bool = False


class VaswaniTrainer(Seq2SeqTrainer):
    """Trains on batches counted in tokens, with the Noam schedule and label smoothing.

    Datasets have columns `input_ids` and `labels` (lists of token ids, `</s>` included) and for training also
    `source_length` and `target_length`, as `tokenize_pairs` makes them; or they are `PreparedPairs`.

    The loss is the model's own. `label_smoothing_factor` is written into `model.config.label_smoothing`, which smooths
    in training mode only, so that evaluation loss is the plain mean over all tokens of the evaluation set and
    `eval_perplexity` is exact; a stock `Seq2SeqTrainer` smooths its evaluation loss too. All else, and the loss of
    another architecture, which needs its own collator, is as in `Seq2SeqTrainer`, but that there is no `model_init` in
    place of the model. Augmentation needs the tokenizer as `processing_class`.
    """

    def __init__(self, model, args: VaswaniTrainingArguments | None = None, data_collator=None, *others, **kwargs):
        args = VaswaniTrainingArguments() if args is None else args
        if given := [one.name for one in fields(args) if one.name in UNUSED and getattr(args, one.name) != one.default]:
            logger.warning("no effect here: %s; see seed, learning_rate_scale and tokens_per_batch", ", ".join(given))
        if args.n_gpu > 1:
            logger.warning("training on one of %d GPUs: start with `accelerate launch` to use all", args.n_gpu)
            args._n_gpu = 1  # torch's DataParallel would split a batch by sentences and weigh its parts wrongly
        super().__init__(model, args, data_collator or PairCollator(model.config.pad_token_id), *others, **kwargs)
        if self.is_fsdp_enabled:  # or accelerate would put the shared matrix into a group of its own
            model.get_input_embeddings = model.get_output_embeddings = lambda: None
        if hasattr(model.config, "label_smoothing"):  # the model smooths, and in training alone
            model.config.label_smoothing, self.label_smoother = args.label_smoothing_factor, None
        if (settings := self.accelerator.ddp_handler) is not None:
            settings.gradient_as_bucket_view = True  # or gradients are there twice
        self._batched, self.shares = self.train_dataset, augmentation_shares(args.augmentation)
        self.tokens_per_device = args.tokens_per_device or choose_tokens_per_device(self)
        # The number of parts must be a multiple of the number of processes, each of which takes equally many.
        parts = max(1, math.ceil(args.tokens_per_batch / self.tokens_per_device))
        args.gradient_accumulation_steps = math.ceil(parts / args.world_size)
        self.micro_batches = args.gradient_accumulation_steps * args.world_size
        schedule = args.warmup_steps, args.learning_rate_scale, args.decline_steps
        self.add_callback(NoamSchedulerCallback(model.config.d_model, *schedule))
        self.add_callback(_StartCallback(self))
        self.step_tokens = (0, 0)  # source and target tokens of the latest optimizer step, over all processes
        self.tokens_seen = np.zeros(2, np.int64)  # the same, summed over the run
        self.positions_seen = np.zeros(2, np.int64)  # the same with padding
        self.start_clock()
        self._evaluation_totals = np.zeros(2)

    # Batches (Section 5.1)

    @cached_property
    def batch_sampler(self) -> TokenBatchSampler:
        """Return the batches of `train_dataset` for these settings."""
        args = self.args
        is_looked_at = self.shares and args.device.type == "cpu"  # on a GPU that takes as long as to train
        changed = self._changed_pairs.changed_lengths if is_looked_at else None
        start = args.augmentation_start if self.shares else None
        return TokenBatchSampler(*self._lengths, args.tokens_per_batch, self.micro_batches, args.seed, start, changed)

    @cached_property
    def _changed_pairs(self) -> AugmentedPairs:
        """Return `train_dataset` with changes, if there are any."""
        pairs = self.train_dataset
        if isinstance(pairs, datasets.Dataset):
            pairs = pairs.select_columns(["input_ids", "labels"])
        limits = max(2, self.longest_sentence), math.inf, math.inf
        return AugmentedPairs(pairs, self.processing_class, self.shares, self.args.seed, limits)

    @cached_property
    def _lengths(self) -> Sequence:
        pairs = self.train_dataset
        return pairs.lengths if hasattr(pairs, "lengths") else pair_lengths(pairs)  # `PreparedPairs` map them

    @cached_property
    def longest_sentence(self) -> int:
        """Return the tokens of the longest sentence that is trained on."""
        return max(int(side.max()) for side in map(np.asarray, self._lengths))

    def get_train_dataloader(self) -> DataLoader:
        """Return micro-batches in order, sharded over processes by accelerate."""
        if self._batched is not self.train_dataset:  # which may be replaced between trainings
            self._batched = self.train_dataset
            for name in ("batch_sampler", "_changed_pairs", "_lengths", "longest_sentence"):
                self.__dict__.pop(name, None)
        pairs, collator = self._changed_pairs, self.data_collator
        longest, tokens = pairs.limits[0], self.batch_sampler.part_tokens
        if self.shares:
            tokens = int(ROOM * tokens)
            positions = math.inf if self.args.padding_free else MOST_PADDED * tokens
            pairs = replace(pairs, limits=(longest, tokens, positions))
        else:
            pairs = pairs.pairs
        if self.args.padding_free:  # batches are all of one size on a device
            size = None if self.args.device.type == "cpu" else packed_size(tokens, longest)
            collator = PackedCollator(self.model.config.pad_token_id, longest, size, size)
        loader = DataLoader(
            pairs,
            batch_sampler=self.batch_sampler,
            collate_fn=collator,
            num_workers=self.args.dataloader_num_workers,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=4 if self.args.dataloader_num_workers else None,
            worker_init_fn=_leave_signals_to_the_trainer,
            generator=self._loader_generator(),
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )
        return self.accelerator.prepare_data_loader(loader, device_placement=False)

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """Return `Trainer`'s loader, with signals and random numbers as in training."""
        loader = super().get_eval_dataloader(eval_dataset)
        base = getattr(loader, "base_dataloader", loader)
        base.generator, base.worker_init_fn = self._loader_generator(), _leave_signals_to_the_trainer
        return loader

    def _loader_generator(self) -> torch.Generator:
        """Return what seeds a loader's workers: by dropout's generator a resumed run would draw other numbers."""
        return torch.Generator().manual_seed(self.args.seed + self.args.process_index)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        """Return one optimizer step's micro-batches of this process, with their tokens over all processes."""
        # Counted before they are moved: reading a count from a device would wait for all its work.
        samples = list(islice(epoch_iterator, num_batches))
        if not samples:
            return [], None
        here = sum(map(count_tokens, samples))
        stoppers = [each for each in self.callback_handler.callbacks if isinstance(each, StopAndSaveCallback)][:1]
        requests = [each for stopper in stoppers for each in stopper.requests(self.state)]
        # All in one message: each one is a wait for the slowest process.
        counts = over_processes(self.args, [*here.tolist(), *requests])
        for stopper in stoppers:
            stopper.agreed = tuple(count > 0 for count in counts[4:])
        self.step_tokens = tuple(counts[:2])
        self.tokens_seen += self.step_tokens
        self.positions_seen += counts[2:4]
        # Filled in there: a number that is copied to a device may wait for it.
        items = counts[1] if self.args.average_tokens_across_devices else here[1]
        items = torch.full((), int(items), dtype=torch.float32, device=device)
        non_blocking = device.type != "mps"  # Metal may read them after they are gone (pytorch#189690)
        return [send_to_device(sample, device, non_blocking=non_blocking) for sample in samples], items

    # Loss (Section 5.4)

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        """Compute the loss without logits that nothing reads; in evaluation a batch's loss is its own mean."""
        if not self.model.training:
            num_items_in_batch = None
        elif "labels" in inputs and not return_outputs and self.args.fused_loss:
            is_ours = type(self._unwrapped).forward is _FORWARD and self.compute_loss_func is None
            if is_ours and not self._unwrapped._forward_hooks:  # others may use the logits
                inputs = {**inputs, "skip_logits": True}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @cached_property
    def _unwrapped(self) -> torch.nn.Module:
        """Return the model itself; looking for it in each step would walk through all its modules."""
        return self.accelerator.unwrap_model(self.model)

    def floating_point_ops(self, inputs) -> int:
        """Return 0: `Trainer` would walk through the model for each batch to estimate what nothing reads."""
        return 0

    # Validation

    def prediction_step(self, model, inputs, *args, **kwargs):
        """Run `Seq2SeqTrainer`'s step, and add the batch's loss to the sum over tokens."""
        labels = inputs.get("labels")
        state = self.accelerator.gradient_state
        if labels is not None and self.args.world_size > 1 and state.end_of_dataloader and state.remainder > 0:
            # accelerate fills up the last batches with repeated pairs, which must not count.
            labels = labels.clone()
            labels[max(0, state.remainder - self.args.process_index * len(labels)) :] = IGNORE_INDEX
            inputs = {**inputs, "labels": labels}
        outputs = super().prediction_step(model, inputs, *args, **kwargs)
        if outputs[0] is not None and labels is not None and (tokens := int(labels.ne(IGNORE_INDEX).sum())):
            self._evaluation_totals += np.array([float(outputs[0]) * tokens, tokens])
        return outputs

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix: str = "eval", **kwargs):
        """Run `Trainer`'s loop, with the loss averaged over tokens instead of sentences, and perplexity."""
        start = time.monotonic()
        self._evaluation_totals = np.zeros(2)  # loss in nats, and tokens
        self.gather_function = self.accelerator.gather_for_metrics  # Seq2SeqTrainer's choice keeps repeated pairs
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        totals = torch.tensor(self._evaluation_totals, dtype=None if self.args.device.type == "cpu" else torch.float32)
        totals = self.accelerator.reduce(totals.to(self.args.device), "sum")
        if totals[1] > 0:
            loss = float(totals[0] / totals[1])
            output.metrics[f"{metric_key_prefix}_loss"] = loss
            output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(min(loss, 700.0))
        self._logged_at += time.monotonic() - start  # so that tokens a second are those of training
        return output

    # The log

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Log what `Trainer` does, and for training tokens of the step, tokens a second, and the share of padding.

        Raises:
            UserError: in training, for a loss that is not finite; on all processes, of whose losses it is the mean.
        """
        losses = [value for name, value in logs.items() if name in ("loss", "eval_loss")]
        if self.is_in_train and not all(map(math.isfinite, losses)):
            raise _not_finite("loss is", self.state.global_step)
        if "loss" in logs:
            logs["source_tokens"], logs["target_tokens"] = self.step_tokens
            logs["source_tokens_seen"], logs["target_tokens_seen"] = self.tokens_seen.tolist()
            tokens, positions = self.tokens_seen - self._logged_tokens, self.positions_seen - self._logged_positions
            logs["target_tokens_per_second"] = float(tokens[1]) / max(time.monotonic() - self._logged_at, 1e-9)
            logs["padding"] = float(1 - tokens.sum() / max(1, positions.sum()))
            self.start_clock()
        logs.pop("train_samples_per_second", None)  # of batches of a number of sentences
        super().log(logs, *args, **kwargs)

    def start_clock(self) -> None:
        """Note the time, and the tokens and positions seen so far: what the next line of the log counts from."""
        self._logged_at = time.monotonic()
        self._logged_tokens, self._logged_positions = self.tokens_seen.copy(), self.positions_seen.copy()

    # Checkpoints, in the form that `checkpoints` describes

    def _save_checkpoint(self, model, trial) -> None:
        """Write a checkpoint, whole or not at all: under another name first, with a manifest.

        Overridden as of transformers 5.23, which writes it file by file under its final name. All processes raise
        `OSError` if one could not write, and nothing of it is left, and `UserError` for weights that are not finite.
        """
        weights = sum(weight.requires_grad and not is_finite(weight) for weight in self.model.parameters())
        if any(over_processes(self.args, [weights])):
            raise _not_finite("weights are", self.state.global_step)
        folder = Path(self.args.output_dir)
        final = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        writing = final.with_name(WRITING + final.name)
        make = lambda: (shutil.rmtree(writing, ignore_errors=True), writing.mkdir(parents=True))  # noqa: E731
        self._write_together(make, final, on_main_process=True)
        # Sharded models are gathered in the next two parts: a process that failed alone would leave the others waiting,
        # so each part ends with a sum over processes.
        self._write_together(lambda: self.save_model(str(writing), _internal_call=True), final)
        if not self.args.save_only_model:
            self._write_together(lambda: self._save_optimizer_and_scheduler(str(writing)), final)
            self._write_together(lambda: (self._save_scaler(str(writing)), self._save_rng_state(str(writing))), final)
        best = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if best == final or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        self._write_together(lambda: self._seal_checkpoint(writing, final), final, on_main_process=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        self.remove_surplus(folder)

    def create_model_card(self, *args, **kwargs) -> None:
        """Write no card: transformers' has a rate and batches that had no effect. `vaswani push` writes ours."""

    def _write_together(self, write: Callable, final: Path, on_main_process: bool = False) -> None:
        """Write one part of a checkpoint; all processes wait for it, and all fail if one does."""
        failure, writing = None, final.with_name(WRITING + final.name)
        try:
            if self.args.should_save or not on_main_process:
                write()
        except BaseException as error:
            if not is_failed_write(error):
                shutil.rmtree(writing, ignore_errors=True)
                raise
            failure = error
        if not any(over_processes(self.args, [int(failure is not None)])):
            return
        if self.args.should_save:
            shutil.rmtree(writing, ignore_errors=True)
        reasons = gather_object([None if failure is None else str(getattr(failure, "strerror", None) or failure)])
        reason = next(reason for reason in reasons if reason is not None)
        complete = checkpoints.read_checkpoints(final.parent)
        resumed = f"continues from step {complete[-1].step:,}" if complete else "starts again"
        raise OSError(
            f"the checkpoint of step {self.state.global_step:,} could not be written to {final.parent}"
            f" ({' '.join(reason.split())[:200]}): free some space, then the same command {resumed}"
        ) from failure

    def _seal_checkpoint(self, writing: Path, final: Path) -> None:
        """Write trainer state and manifest, and give the checkpoint its name."""
        progress = {"tokens_seen": self.tokens_seen.tolist(), "positions_seen": self.positions_seen.tolist()}
        everyone = (*self.callback_handler.callbacks, self.control)
        states = TrainerState(stateful_callbacks=[each for each in everyone if isinstance(each, ExportableState)])
        self.state.stateful_callbacks |= states.stateful_callbacks
        self.state.stateful_callbacks[type(self).__name__] = {"args": {}, "attributes": progress}
        self.state.save_to_json(str(writing / TRAINER_STATE_NAME))
        by_signal = any(getattr(callback, "by_signal", False) for callback in self.callback_handler.callbacks)
        checkpoints.write_manifest(writing, self.state.global_step, by_signal)
        checkpoints.remove_checkpoint(final)  # an earlier one of this step that was damaged
        if final.exists():  # with files of others
            final.rename(final.with_name(f"{final.name}.{time.time_ns()}"))
        publish(writing, final)

    def remove_surplus(self, folder: Path) -> None:
        """Remove the checkpoints in `folder` that are more than the settings keep."""
        if self.args.should_save:
            now = self.state.global_step  # what has more steps is of an earlier training in this folder
            whole = sorted(checkpoints.read_checkpoints(folder), key=lambda each: (each.step <= now, each.step))
            for checkpoint in checkpoints.surplus(whole, self.args.save_total_limit, self.state.best_global_step):
                checkpoints.remove_checkpoint(checkpoint.path)


class _StartCallback(TrainerCallback):
    """Starts the clock, restores the tokens seen, and sets the sampler's epoch, which shards hide from the Trainer."""

    def __init__(self, trainer: VaswaniTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if args.world_size > 1:
            torch.manual_seed(args.seed + args.process_index)  # or all would drop the same units
        state.compute_steps(args, state.max_steps)  # a state from a checkpoint has the intervals of then
        trainer = self.trainer
        trainer.tokens_seen[:] = trainer.positions_seen[:] = 0
        if state.global_step and (stored := state.stateful_callbacks.get(type(trainer).__name__)):
            with reading(f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"):
                trainer.tokens_seen[:] = stored["attributes"]["tokens_seen"]
                trainer.positions_seen[:] = stored["attributes"]["positions_seen"]
        trainer.start_clock()

    def on_epoch_begin(self, args, state, control, **kwargs):
        sampler = self.trainer.batch_sampler
        sampler.set_epoch(state.global_step // (len(sampler) // sampler.micro_batches))


def _not_finite(what: str, step: int) -> UserError:
    return UserError(
        f"the {what} not finite at step {step:,}; earlier checkpoints are intact. Lower learning_rate_scale, raise"
        " warmup_steps or clip with max_gradient_norm, and start again"
    )


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Let a worker end with the trainer: a terminal sends Ctrl-C, and a cluster SIGTERM, to all processes."""

    def end_with_the_trainer() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of those that have worked before stayed behind
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # on Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=end_with_the_trainer, daemon=True).start()
