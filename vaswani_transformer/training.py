"""One training run: from a recipe to a model folder that is complete."""

import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import torch
from accelerate import PartialState
from safetensors.torch import load_file
from transformers import PrinterCallback, ProgressCallback, set_seed
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks
from transformers.trainer_callback import TrainerState

from .averaging import WEIGHTS, average_checkpoints
from .callbacks import (
    LearningCurveCallback,
    ResumableEarlyStoppingCallback,
    StopSignalCallback,
    TimeLimitCallback,
    TrainingLogCallback,
    TrainingProgressCallback,
)
from .configuration_vaswani import VaswaniConfig
from .data import load_pairs, tokenize_pairs
from .errors import UserError
from .memory import keep_freed_memory
from .metrics import score_translations
from .modeling_vaswani import VaswaniForConditionalGeneration
from .plots import plot_learning_curve
from .recipe import Recipe, model_config
from .run_folder import (
    CHECKPOINTS,
    CURVE,
    LOG,
    TOKENIZER,
    check_output,
    check_space,
    claim_output,
    complete_checkpoints,
    step_of,
)
from .tokenization import check_tokenizer_matches, load_tokenizer, train_tokenizer
from .trainer import VaswaniTrainer, VaswaniTrainingArguments

logger = logging.getLogger(__name__)

CURVE_SECONDS = 60.0  # between two pictures of the learning curve while training goes on
TENSORBOARD = "tensorboard"  # folder of its events, in the output folder
TOKENIZER_TEXTS = 2_000_000  # sentences a tokenizer is trained on at most; more change next to nothing


class TrainingStopped(Exception):
    """A signal ended training after a checkpoint; the same command resumes it.

    Args:
        step: the optimizer step of the checkpoint.
        signal_number: the signal.
    """

    def __init__(self, step: int, signal_number: int):
        super().__init__(f"stopped at step {step}, checkpoint written")
        self.step, self.signal_number = step, signal_number


@dataclass(frozen=True)
class TrainingResult:
    """What a finished run leaves: its folder, its last validation and what it took."""

    folder: Path
    steps: int
    seconds: float
    metrics: dict
    averaged: int


def _load(recipe: Recipe, source: str | None, target: str | None, data: str | None, split: str) -> datasets.Dataset:
    """Pairs of one part of the recipe's data; paths start from `data_dir`, a name that is not there is the Hub's."""
    folder = Path(recipe.data_dir or "")
    return load_pairs(
        source=folder / source if source is not None else None,
        target=folder / target if target is not None else None,
        data=folder / data if data is not None and (folder / data).exists() else data,
        config=recipe.data_config,
        split=split,
        source_column=recipe.source_column,
        target_column=recipe.target_column,
    )


def load_training_pairs(recipe: Recipe) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Training and validation text; without validation data some training pairs are held out.

    Raises:
        UserError: as `load_pairs`, and when there is not enough to hold out.
    """
    if recipe.data_dir is not None and not Path(recipe.data_dir).is_dir():
        raise UserError(f"data_dir {recipe.data_dir} is not a folder: give the one that holds the data files")
    if recipe.train_data is None and recipe.train_source is None and recipe.train_target is None:
        raise UserError("no training data: give --train-source and --train-target, or --train-data")
    train = _load(recipe, recipe.train_source, recipe.train_target, recipe.train_data, recipe.train_split)
    validation = recipe.validation_source, recipe.validation_target, recipe.validation_data
    if recipe.validation_split is not None and not any(validation):
        validation = None, None, recipe.train_data
    if any(validation):
        return train, _load(recipe, *validation, recipe.validation_split or "validation")
    if not 0 < recipe.validation_size < len(train):
        raise UserError(
            f"cannot hold validation_size {recipe.validation_size} pairs out of {len(train)} training pairs: give"
            " validation data, or another validation_size"
        )
    parts = train.train_test_split(test_size=recipe.validation_size, seed=recipe.seed)
    return parts["train"], parts["test"]


def _tokenizer(recipe: Recipe, train: datasets.Dataset, resumed: bool):
    """The recipe's tokenizer: given, or of the run that is resumed, or trained now."""
    if recipe.tokenizer is not None:
        return load_tokenizer(recipe.tokenizer)
    if resumed:
        return load_tokenizer(Path(recipe.output) / CHECKPOINTS / TOKENIZER)

    def texts():
        for batch in train.select(range(min(len(train), TOKENIZER_TEXTS // 2))).iter(batch_size=1000):
            yield from batch["source"]
            yield from batch["target"]

    return train_tokenizer(
        texts(), kind=recipe.tokenizer_kind, vocab_size=recipe.vocab_size, show_progress=sys.stderr.isatty()
    )


def on_cpu() -> bool:
    """Whether there is no accelerator to train on."""
    return torch.accelerator.current_accelerator(check_available=True) is None


def choose_precision(precision: str) -> dict[str, bool]:
    """`bf16` and `fp16` for `TrainingArguments`; auto means bf16 where the hardware multiplies matrices in it.

    Raises:
        UserError: for a precision that this machine does not train in.
    """
    if torch.cuda.is_available():
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = on_cpu() and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    if precision == "fp16" and on_cpu():
        raise UserError("precision is 'fp16', which needs a GPU: use bf16, fp32 or auto")
    if precision == "bf16" and torch.cuda.is_available() and not has_bf16:
        raise UserError("precision is 'bf16', which this GPU does not compute in: use fp16, fp32 or auto")
    return {"bf16": precision == "bf16" or (precision == "auto" and has_bf16), "fp16": precision == "fp16"}


def reporters(names: str) -> list[str]:
    """What else follows the training log, as `Trainer` calls it, each tried out.

    Raises:
        UserError: for a name that transformers does not have, or whose package is not installed.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip() not in ("", "none")]
    for name in chosen:
        try:
            for callback in get_reporting_integration_callbacks([name]):
                callback()
        except (ValueError, RuntimeError, ImportError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"report_to {name!r} cannot be used ({reason}): install it, or report_to none") from error
    return chosen


def training_arguments(recipe: Recipe, longest: int) -> VaswaniTrainingArguments:
    """The recipe in the Trainer's terms.

    Args:
        recipe: the recipe.
        longest: tokens of the longest validation sentence; a validation batch holds `tokens_per_device` at most.

    Raises:
        UserError: as `choose_precision`.
    """
    return VaswaniTrainingArguments(
        output_dir=str(Path(recipe.output) / CHECKPOINTS),
        tokens_per_batch=recipe.tokens_per_batch,
        tokens_per_device=recipe.tokens_per_device,
        max_steps=recipe.max_steps,
        warmup_steps=recipe.warmup_steps,
        learning_rate_scale=recipe.learning_rate_scale,
        label_smoothing_factor=recipe.label_smoothing,
        adam_beta1=recipe.adam_beta1,
        adam_beta2=recipe.adam_beta2,
        adam_epsilon=recipe.adam_epsilon,
        max_grad_norm=recipe.max_gradient_norm,
        optim="adamw_torch_fused",  # without weight decay AdamW is Adam
        weight_decay=0.0,
        seed=recipe.seed,
        logging_steps=recipe.log_every,
        eval_strategy="steps",
        eval_steps=recipe.evaluate_every,
        save_strategy="steps",
        save_steps=recipe.evaluate_every,
        save_total_limit=max(recipe.keep_checkpoints, recipe.average_checkpoints) + 1,
        load_best_model_at_end=False,  # we choose between the best and the average ourselves
        metric_for_best_model=f"eval_{recipe.best_by}",
        greater_is_better=recipe.best_by == "bleu",
        predict_with_generate=recipe.validation_bleu > 0,
        generation_num_beams=1,
        per_device_eval_batch_size=max(1, min(64, recipe.tokens_per_device // longest)),
        remove_unused_columns=False,
        report_to=reporters(recipe.report_to),
        disable_tqdm=True,
        log_level="error",
        use_cpu=on_cpu(),  # or bf16 is refused there
        **choose_precision(recipe.precision),
    )


def _bleu_metric(tokenizer):
    """`compute_metrics` for the Trainer: generated ids and labels to BLEU."""

    def compute(prediction) -> dict[str, float]:
        def decode(ids):
            ids = ids.copy()
            ids[ids < 0] = tokenizer.pad_token_id
            return tokenizer.batch_decode(ids, skip_special_tokens=True)

        predictions, references = decode(prediction.predictions), decode(prediction.label_ids)
        return {"bleu": score_translations(predictions, references)["bleu"]}

    return compute


def new_model(recipe: Recipe, tokenizer) -> VaswaniForConditionalGeneration:
    """A model with initial weights and the recipe's decoding settings.

    Raises:
        UserError: for a tokenizer without the special tokens that the model needs, sizes that no model can have, or an
            attention implementation that is not there.
    """
    missing = [name for name in ("bos", "pad", "eos") if getattr(tokenizer, f"{name}_token_id") is None]
    if missing:
        raise UserError(f"the tokenizer has no {' and no '.join(missing)} token: use one of `vaswani tokenizer`")
    config: VaswaniConfig = model_config(recipe, len(tokenizer))
    for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    config.decoder_start_token_id = tokenizer.bos_token_id
    check_tokenizer_matches(tokenizer, config)
    set_seed(recipe.seed)
    model = VaswaniForConditionalGeneration(config)
    # On a CPU torch's fused attention is slow backwards for short sequences: scripts/benchmark_training_step.py.
    automatic = "eager" if on_cpu() else "sdpa"
    attention = automatic if recipe.attention == "auto" else recipe.attention
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise UserError(f"attention {attention!r} cannot be used here: {' '.join(str(error).split())[:200]}") from error
    model.generation_config.update(
        num_beams=recipe.num_beams,
        length_penalty=recipe.length_penalty if recipe.num_beams > 1 else None,  # or it would not let itself be saved
        max_extra_tokens=recipe.max_extra_tokens,
    )
    return model


class TrainingRun:
    """A recipe on its way: data, tokenizer, model, trainer. `run()` does it all."""

    def __init__(self, recipe: Recipe, progress: bool = True):
        self.recipe, self.progress = recipe, progress
        self.folder = Path(recipe.output)

    def run(self) -> TrainingResult:
        """Train, choose the weights to keep, write the model folder.

        Raises:
            UserError: for mistakes in the recipe or its data.
            TrainingStopped: after a signal.
        """
        recipe = self.recipe
        if on_cpu():
            keep_freed_memory()
        with PartialState().main_process_first():  # one process reads and tokenizes, the others find it in the cache
            checkpoint = self._find_checkpoint()
            train_text, validation_text = load_training_pairs(recipe)
            self.tokenizer = _tokenizer(recipe, train_text, resumed=checkpoint is not None)
            train, validation = self._tokenize(train_text, validation_text)
        model = new_model(recipe, self.tokenizer)
        logger.info(
            "model: %s parameters, vocabulary %s", f"{model.num_parameters():,}", f"{model.config.vocab_size:,}"
        )
        check_space(self.folder, model.num_parameters(), max(recipe.keep_checkpoints, recipe.average_checkpoints) + 2)
        trainer = self._make_trainer(model, train, validation)
        logger.info("batches: %s", trainer.batch_sampler.statistics())
        if trainer.is_world_process_zero():  # only now: a mistake in what was given has changed nothing
            claim_output(recipe, checkpoint)
            self.tokenizer.save_pretrained(self.folder / CHECKPOINTS / TOKENIZER)
        trainer.accelerator.wait_for_everyone()
        self._train(trainer, checkpoint)
        metrics, averaged = self._choose_weights(trainer)
        return self._finish(trainer, metrics, averaged)

    def _find_checkpoint(self) -> Path | None:
        if PartialState().is_main_process:
            return check_output(self.recipe)
        # The main process has checked already; what it resumes from is what is there and fits.
        return check_output(replace(self.recipe, overwrite=True))

    def _tokenize(self, train_text: datasets.Dataset, validation_text: datasets.Dataset) -> list[datasets.Dataset]:
        tokenized = []
        for part, text in (("training", train_text), ("validation", validation_text)):
            pairs, counts = tokenize_pairs(
                text,
                self.tokenizer,
                max_length=self.recipe.max_length,
                max_length_ratio=self.recipe.max_length_ratio,
                description=f"tokenizing {part} pairs",
            )
            logger.info("%s data: %s", part, counts)
            tokenized.append(pairs)
        return tokenized

    def _train(self, trainer: VaswaniTrainer, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint if there is one; raises `TrainingStopped` after a signal."""
        if checkpoint is not None:
            logger.info("resuming from step %s", f"{step_of(checkpoint):,}")
        if checkpoint is not None and step_of(checkpoint) >= self.recipe.max_steps:  # only the end is missing
            trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            trainer._load_from_checkpoint(str(checkpoint))
            self.log.on_train_begin(trainer.args, trainer.state, trainer.control)
            return
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            self.stopper.restore()
        if self.stopper.received is not None and trainer.state.global_step < trainer.state.max_steps:
            raise TrainingStopped(trainer.state.global_step, self.stopper.received)

    def _make_trainer(self, model, train, validation) -> VaswaniTrainer:
        recipe = self.recipe
        if recipe.validation_bleu and len(validation) > recipe.validation_bleu:
            # Loss is computed on what is translated too: a fixed sample, the same in every run of this seed.
            validation = validation.shuffle(seed=recipe.seed).select(range(recipe.validation_bleu))
        longest = max(max(validation["source_length"]), max(validation["target_length"]))
        validation = validation.sort("source_length").select_columns(["input_ids", "labels"])
        trainer = VaswaniTrainer(
            model=model,
            args=training_arguments(recipe, longest),
            train_dataset=train,
            eval_dataset=validation,
            processing_class=self.tokenizer,
            compute_metrics=_bleu_metric(self.tokenizer) if recipe.validation_bleu else None,
        )
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(self.folder / TENSORBOARD)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        self.log = TrainingLogCallback(self.folder / LOG)
        self.stopper = StopSignalCallback()
        callbacks = [self.log, self.stopper, LearningCurveCallback(self._draw_learning_curve, CURVE_SECONDS)]
        if self.progress:
            callbacks.append(TrainingProgressCallback(self.log, recipe.max_minutes))
        if recipe.max_minutes:
            callbacks.append(TimeLimitCallback(self.log, recipe.max_minutes))
        if recipe.early_stopping:
            callbacks.append(ResumableEarlyStoppingCallback(recipe.early_stopping))
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer

    def _draw_learning_curve(self) -> None:
        new = self.folder / f".new-{CURVE}"
        if plot_learning_curve(self.folder / LOG, new):
            new.replace(self.folder / CURVE)  # whole, for those who look at it meanwhile

    def _choose_weights(self, trainer: VaswaniTrainer) -> tuple[dict, int]:
        """Put the best of the best checkpoint and the average of the last ones into the model."""
        name = f"eval_{self.recipe.best_by}"
        sign = 1 if self.recipe.best_by == "bleu" else -1
        every, end = self.recipe.evaluate_every, trainer.state.global_step
        # Those that a Ctrl-C left in between are not counted: an interrupted run ends as an uninterrupted one.
        checkpoints = [
            checkpoint
            for checkpoint in complete_checkpoints(self.folder / CHECKPOINTS)
            if step_of(checkpoint) % every == 0 or step_of(checkpoint) == end
        ]
        candidates = []
        best = trainer.state.best_model_checkpoint
        if best is not None and Path(best).is_dir():
            candidates.append((0, load_file(Path(best) / "model.safetensors")))
        last = checkpoints[-self.recipe.average_checkpoints :] if self.recipe.average_checkpoints > 1 else []
        if len(last) > 1:
            candidates.append((len(last), average_checkpoints(last)))
        if not candidates:
            return trainer.evaluate(), 0
        results = []
        for averaged, weights in candidates:
            trainer.model.load_state_dict(weights, strict=False)
            trainer.model.tie_weights()
            prefix = "average" if averaged else "best"
            scores = trainer.evaluate(metric_key_prefix=prefix)
            scores = {f"eval_{key.removeprefix(prefix + '_')}": value for key, value in scores.items()}
            results.append((scores, averaged, weights))
            label = (
                f"average of the last {averaged} checkpoints" if averaged else f"best checkpoint ({Path(best).name})"
            )
            shown = ", ".join(
                f"{key} {scores[f'eval_{key}']:.3f}"
                for key in ("loss", "perplexity", "bleu")
                if f"eval_{key}" in scores
            )
            logger.info("%s: validation %s", label, shown)
        metrics, averaged, weights = max(results, key=lambda result: sign * result[0][name])
        trainer.model.load_state_dict(weights, strict=False)
        trainer.model.tie_weights()
        return metrics, averaged

    def _finish(self, trainer: VaswaniTrainer, metrics: dict, averaged: int) -> TrainingResult:
        """Write everything that belongs to the model; the weights come last and whole: they mark a finished run."""
        if trainer.is_world_process_zero():
            self._draw_learning_curve()
            staging = self.folder / CHECKPOINTS / "final"
            trainer.model.config.use_cache = True  # the Trainer has switched it off for training
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(staging)
            self.tokenizer.save_pretrained(staging)
            for path in sorted(staging.iterdir(), key=lambda path: path.name == WEIGHTS):
                path.replace(self.folder / path.name)
            staging.rmdir()
        trainer.accelerator.wait_for_everyone()
        state: TrainerState = trainer.state
        return TrainingResult(self.folder, state.global_step, self.log.seconds(), metrics, averaged)


def train(recipe: Recipe, progress: bool = True) -> TrainingResult:
    """Train as a recipe says, resuming an interrupted run of it; see [`TrainingRun`].

    Args:
        recipe: all settings; `load_recipe` makes one.
        progress: show a bar on standard error.

    Raises:
        UserError: for mistakes in the recipe or its data.
        TrainingStopped: when Ctrl-C or SIGTERM ended training after a checkpoint.
    """
    if not progress:
        datasets.disable_progress_bars()
    if sys.stderr is not None and not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return TrainingRun(recipe, progress).run()
