"""`Seq2SeqTrainer` with the paper's batches, optimizer, schedule and loss (Sections 5.1 to 5.4)."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from .batching import IGNORE_INDEX, PairCollator, TokenBatchSampler
from .loss import label_smoothed_cross_entropy
from .schedule import NoamSchedulerCallback

logger = logging.getLogger(__name__)


@dataclass
class VaswaniTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the paper's values, and the size of a batch in tokens.

    Defaults that differ from transformers': label smoothing 0.1, Adam's beta 2 0.98 and epsilon 1e-9, no gradient
    clipping, 4000 warmup steps. `lr_scheduler_type` and `learning_rate` have no effect: the rate is Equation 3.
    `gradient_accumulation_steps` is worked out from the two token fields below.

    Args:
        tokens_per_batch: at most so many source tokens, and as many target tokens, in one optimizer step over all
            devices and accumulated parts, padding counted (the paper: about 25,000).
        tokens_per_device: what one device takes at once.
        learning_rate_scale: factor on Equation 3; 1 in the paper.
    """

    tokens_per_batch: int = field(default=25_000, metadata={"help": "tokens a side of one optimizer step"})
    tokens_per_device: int = field(default=4096, metadata={"help": "tokens a side that one device takes at once"})
    learning_rate_scale: float = field(default=1.0, metadata={"help": "factor on the learning rate of Equation 3"})
    warmup_steps: float = field(default=4000, metadata={"help": "steps of linear growth of the learning rate"})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "not used: the rate is Equation 3"})
    label_smoothing_factor: float = field(default=0.1, metadata={"help": "label smoothing in training"})
    adam_beta2: float = field(default=0.98, metadata={"help": "Adam's beta 2"})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Adam's epsilon"})
    max_grad_norm: float = field(default=0.0, metadata={"help": "clip gradients to this norm; 0: do not"})


class _EpochCallback(TrainerCallback):
    """Tells the sampler its epoch where the Trainer cannot reach it: behind a shard and behind skipped batches."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        sampler = self.trainer.batch_sampler
        sampler.set_epoch(state.global_step // (len(sampler) // sampler.micro_batches))


class VaswaniTrainer(Seq2SeqTrainer):
    """Trains on batches counted in tokens, with the Noam schedule and label smoothing.

    Datasets have columns `input_ids` and `labels` (lists of token ids, `</s>` included) and for training also
    `source_length` and `target_length`, as `tokenize_pairs` makes them.

    Training loss is label-smoothed by `label_smoothed_cross_entropy`, which was measured to take less time and memory
    than the Trainer's own `LabelSmoother` at the paper's vocabulary (`scripts/benchmark_loss.py`) and takes its place:
    `label_smoothing_factor` is the one switch, and smooths once. Evaluation loss is the plain mean over all tokens of
    the evaluation set, so that `eval_perplexity` is exact; a stock `Seq2SeqTrainer` smooths its evaluation loss too.

    Args:
        model: the model.
        args: the settings.
        **kwargs: as for `Seq2SeqTrainer`.

    Raises:
        ValueError: without a model, for other settings than `VaswaniTrainingArguments`, or for a loss given as well.
    """

    def __init__(self, model=None, args: VaswaniTrainingArguments | None = None, **kwargs):
        if model is None:
            raise ValueError("VaswaniTrainer needs a model (it does not support model_init)")
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func was given to VaswaniTrainer, whose loss is cross-entropy smoothed by"
                " label_smoothing_factor: leave it out, or use Seq2SeqTrainer for a loss of your own"
            )
        kwargs.pop("compute_loss_func", None)
        args = VaswaniTrainingArguments() if args is None else args
        if not isinstance(args, VaswaniTrainingArguments):
            raise ValueError(f"args are {type(args).__name__}: give VaswaniTrainer a VaswaniTrainingArguments")
        if args.n_gpu > 1:
            logger.warning("training on one of %d GPUs: start with `accelerate launch` to use all", args.n_gpu)
            args._n_gpu = 1  # torch's DataParallel would split a batch by sentences and weigh its parts wrongly
        self.micro_batches = max(1, math.ceil(args.tokens_per_batch / args.tokens_per_device))
        # The number of parts must be a multiple of the number of processes, each of which takes equally many.
        args.gradient_accumulation_steps = math.ceil(self.micro_batches / args.world_size)
        self.micro_batches = args.gradient_accumulation_steps * args.world_size
        kwargs.setdefault("data_collator", PairCollator(model.config.pad_token_id))
        super().__init__(model=model, args=args, compute_loss_func=self._training_or_plain_loss, **kwargs)
        self.label_smoother = None  # smoothing happens in our loss, and in training alone
        self.add_callback(NoamSchedulerCallback(model.config.d_model, int(args.warmup_steps), args.learning_rate_scale))
        self.add_callback(_EpochCallback(self))
        self.step_tokens = (0, 0)  # source and target tokens of the latest optimizer step, over all processes
        self.tokens_seen = np.zeros(2, np.int64)  # the same, summed since this object was made
        self._evaluation_totals = [0.0, 0]

    def _training_or_plain_loss(self, outputs, labels, num_items_in_batch=None) -> torch.Tensor:
        epsilon = self.args.label_smoothing_factor if self.model.training else 0.0
        return label_smoothed_cross_entropy(outputs["logits"], labels, epsilon, num_items_in_batch)

    def compute_loss(self, model, inputs, *args, **kwargs):
        """As in `Trainer`; makes the decoder's inputs first, since the labels do not reach the model."""
        if "labels" in inputs and "decoder_input_ids" not in inputs:
            unwrapped = self.accelerator.unwrap_model(model)
            inputs = {**inputs, "decoder_input_ids": unwrapped.prepare_decoder_input_ids_from_labels(inputs["labels"])}
        if not self.model.training:
            kwargs["num_items_in_batch"] = None
        return super().compute_loss(model, inputs, *args, **kwargs)

    @cached_property
    def batch_sampler(self) -> TokenBatchSampler:
        """The batches of `train_dataset` for these settings.

        Raises:
            UserError: as `TokenBatchSampler`.
        """
        lengths = self.train_dataset.with_format("numpy")
        return TokenBatchSampler(
            lengths["source_length"][:],
            lengths["target_length"][:],
            self.args.tokens_per_batch,
            micro_batches=self.micro_batches,
            seed=self.args.seed,
        )

    def get_train_dataloader(self) -> DataLoader:
        """Micro-batches in order, sharded over processes by accelerate."""
        loader = DataLoader(
            self.train_dataset.select_columns(["input_ids", "labels"]),
            batch_sampler=self.batch_sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )
        return self.accelerator.prepare(loader)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        """One optimizer step's micro-batches of this process, with their tokens counted over all processes."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if samples:
            counts = torch.stack(
                [
                    sum(sample["attention_mask"].sum() for sample in samples),
                    sum(sample["labels"].ne(IGNORE_INDEX).sum() for sample in samples),
                ]
            )
            if self.args.world_size > 1:
                counts = self.accelerator.reduce(counts.to(device), "sum")
            self.step_tokens = tuple(counts.tolist())
            self.tokens_seen += self.step_tokens
        return samples, num_items

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        """As in `Seq2SeqTrainer`; also adds the batch's loss to the sum over tokens."""
        labels = inputs.get("labels")
        state = self.accelerator.gradient_state
        if labels is not None and self.args.world_size > 1 and state.end_of_dataloader and state.remainder > 0:
            # accelerate fills the last batches up with pairs from the beginning: they do not count.
            labels = labels.clone()
            labels[max(0, state.remainder - self.args.process_index * len(labels)) :] = IGNORE_INDEX
            inputs = {**inputs, "labels": labels}
        loss, outputs, output_labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **gen_kwargs
        )
        if loss is not None and labels is not None:
            tokens = int(labels.ne(IGNORE_INDEX).sum())
            if tokens:
                self._evaluation_totals[0] += float(loss) * tokens
                self._evaluation_totals[1] += tokens
        return loss, outputs, output_labels

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix: str = "eval", **kwargs):
        """As in `Trainer`, with the loss averaged over tokens instead of sentences, and perplexity."""
        self._evaluation_totals = [0.0, 0]
        self.gather_function = self.accelerator.gather_for_metrics  # Seq2SeqTrainer's choice keeps repeated pairs
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        totals = torch.tensor(self._evaluation_totals, dtype=torch.float64 if self.args.device.type == "cpu" else None)
        if self.args.world_size > 1:
            totals = self.accelerator.reduce(totals.to(self.args.device), "sum")
        if totals[1] > 0:
            loss = float(totals[0] / totals[1])
            output.metrics[f"{metric_key_prefix}_loss"] = loss
            output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(min(loss, 700.0))
        return output
