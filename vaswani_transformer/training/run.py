"""One training run: from a recipe to a model folder that is complete."""

import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate import PartialState
from sacrebleu.metrics import BLEU
from transformers import PreTrainedTokenizerBase, PrinterCallback
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks
from transformers.trainer_callback import TrainerState

from ..data.prepare import prepare_if_large
from ..data.prepared import MANIFEST, TRAIN, VALIDATION, check_recipe_matches, open_prepared
from ..data.recipe_data import data_sources, load_training_pairs, recipe_tokenizer
from ..data.tokenization import TOKENIZER_FILES, load_tokenizer
from ..data.tokenized_pairs import tokenize_pairs
from ..distributed import Processes, joined_processes, over_processes
from ..errors import UserError, reading
from ..evaluation.metrics import bleu_metric, compare_systems
from ..files import is_local
from ..hardware import CPU_TOKENS, accelerator, choose_precision, default_num_workers, tune_cpu_memory, use_tf32
from ..json_and_yaml import read_json
from ..model.checkpoint_vaswani import check_finite
from ..model.configuration_vaswani import VaswaniConfig
from ..model.language_codes_vaswani import LanguageCodes, typed_code
from ..model.packed_sentences_vaswani import can_use_flash_attention
from ..output_folder import locked_together
from ..recipes.recipe import AUTO, Recipe, check_recipe, languages_of
from . import callbacks, run_folder, verdict
from .checkpoints import WEIGHTS, averaged_from, read_state, step_of
from .initial_model import merged_adapters, model_of_folder, new_model, origin, read_model_of
from .run_folder import ADAPTER, CHECKPOINTS, LOG, PREPARED, TOKENIZER, VERDICT
from .selection import choose_length_penalty, select_weights
from .settings import choose_settings
from .trainer import VaswaniTrainer, VaswaniTrainingArguments

logger = logging.getLogger(__name__)


class TrainingStopped(Exception):
    """A signal ended training after the checkpoint of optimizer step `step`; the same command resumes it."""

    def __init__(self, step: int, signal_number: int):
        super().__init__(f"stopped at step {step}, checkpoint written")
        self.step, self.signal_number = step, signal_number


@dataclass(frozen=True)
class TrainingResult:
    """A finished run."""

    folder: Path  # holds the model
    steps: int
    seconds: float  # of training, over all sessions
    metrics: dict  # validation of the selected weights
    averaged: int  # how many checkpoints they are the average of; 0 if they are of one
    kept: str = "best checkpoint"  # which they are, in words
    verdict: Sequence[str] = ()  # on text and scores
    languages: Sequence[str] = ()  # source and target, as the text's catalogues name them, or blank


def make_tokenizer(recipe: Recipe, train: datasets.Dataset, resumed: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the recipe names, or of the resumed run, or one trained on the training pairs."""
    if resumed and recipe.tokenizer is None:  # the model that was started from may be gone
        return load_tokenizer(Path(recipe.output) / CHECKPOINTS / TOKENIZER)
    return recipe_tokenizer(recipe, train)


def tokenized_pairs(
    recipe: Recipe, tokenizer_of: Callable[[datasets.Dataset], PreTrainedTokenizerBase]
) -> tuple[PreTrainedTokenizerBase, datasets.Dataset, datasets.Dataset, str, tuple[datasets.Dataset, datasets.Dataset]]:
    """Return tokenizer, training and validation pairs, in words how many training pairs, and the text of both.

    `tokenizer_of` makes the tokenizer, of the training text.
    """
    texts, parts, counts = load_training_pairs(recipe), [], []
    tokenizer = tokenizer_of(texts[0])
    limits = {"max_length": recipe.max_length, "max_length_ratio": recipe.max_length_ratio}
    for name, text in zip(("training", "validation"), texts, strict=True):
        pairs, count = tokenize_pairs(text, tokenizer, **limits, description=f"tokenizing {name} pairs")
        logger.info("%s data: %s", name, count)
        parts.append(pairs)
        counts.append(str(count))
    return tokenizer, *parts, counts[0], texts


def join_process_group(recipe: Recipe) -> None:
    """Join torch's process group, if this process was launched as one of several."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and accelerator() is None:
        raise UserError("FSDP was launched without a GPU, where accelerate would train without it: use GPUs")
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        logger.info("the launcher's mixed_precision is not used: the recipe's precision decides")
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    # The Trainer finds it made.
    state = PartialState(cpu=accelerator() is None, timeout=timedelta(seconds=recipe.ddp_timeout))
    if os.environ.get("WORLD_SIZE", str(state.num_processes)) != str(state.num_processes):
        fix = "set LOCAL_RANK too, or start with accelerate launch or torchrun"
        raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and this process is alone: {fix}")


def reporters(names: str) -> list[str]:
    """Return transformers' integrations that the log is also sent to (`"tensorboard,wandb"`, `"none"`), tried out."""
    chosen = [name.strip() for name in names.split(",") if name.strip() not in ("", "none")]
    for name in chosen:
        extra = " (needs the extra: pip install 'vaswani_transformer[tensorboard]')" if name == "tensorboard" else ""
        with reading(f"report_to {name!r}{extra}"):
            for callback in get_reporting_integration_callbacks([name]):
                callback()
    return chosen


def training_arguments(recipe: Recipe, longest: int) -> VaswaniTrainingArguments:
    """Return the recipe in the Trainer's terms; `longest` is the tokens of the longest validation sentence."""
    workers = default_num_workers() if recipe.data_workers == AUTO else recipe.data_workers
    same = ("tokens_per_batch", "max_steps", "warmup_steps", "decline_steps", "learning_rate_scale", "fused_loss")
    same += ("adam_beta1", "adam_beta2", "adam_epsilon", "seed", "ddp_timeout", "augmentation", "augmentation_start")
    averaged, tokens = recipe.average_checkpoints, recipe.tokens_per_device
    if recipe.average_every:  # validations between them have checkpoints too
        averaged += averaged * recipe.average_every // recipe.evaluate_every + 1
    return VaswaniTrainingArguments(
        **{name: getattr(recipe, name) for name in same},
        output_dir=str(Path(recipe.output) / CHECKPOINTS),
        tokens_per_device=None if tokens == AUTO else tokens,
        label_smoothing_factor=recipe.label_smoothing,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        max_grad_norm=recipe.max_gradient_norm,
        optim="adamw_torch_fused",  # without weight decay, as by default, AdamW is Adam
        full_determinism=recipe.deterministic,
        logging_steps=recipe.log_every,
        eval_strategy="steps",
        eval_steps=recipe.evaluate_every,
        save_steps=recipe.save_every,  # the stopper leaves out those long before the end
        save_total_limit=max(recipe.keep_checkpoints, averaged) + 1,  # with the best
        predict_with_generate=recipe.validation_bleu > 0,
        generation_num_beams=1,
        per_device_eval_batch_size=max(1, min(64, (CPU_TOKENS if tokens == AUTO else tokens) // longest)),
        remove_unused_columns=False,
        report_to=reporters(recipe.report_to),
        disable_tqdm=True,
        ddp_find_unused_parameters=False,  # there are none; looking for them costs a walk through the graph each step
        ddp_broadcast_buffers=False,  # tables of sinusoids, the same everywhere
        ddp_bucket_cap_mb=None if accelerator() is None else 100,  # fast links are best used by large messages
        log_level="error",
        log_level_replica="error",
        use_cpu=accelerator() is None,  # or bf16 is refused there
        **choose_precision(recipe.precision),
    )


def is_padding_free(recipe: Recipe, config: VaswaniConfig, arguments: VaswaniTrainingArguments) -> bool:
    """Return whether to train on batches without padding; by default where attention takes them as they are.

    Raises:
        UserError: where the recipe asks for them and the model or the GPU has no attention for them.
    """
    dtype = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else torch.float32
    states = torch.empty(0, dtype=dtype, device=arguments.device)
    is_quick = can_use_flash_attention(config, states) and not config.attention_dropout
    if recipe.padding_free == AUTO:
        return is_quick and recipe.attention == AUTO and config.attention_window is None
    # On another GPU sentences would be padded to max_length each.
    if recipe.padding_free and (config.attention_window is not None or not (is_quick or states.is_cpu)):
        needs = "a GPU of compute capability 8.0 with bf16 or fp16, equal d_k and d_v in multiples of 8 up to 256"
        raise UserError(f"padding_free takes {needs}, no attention_dropout and no attention_window: leave it out")
    return recipe.padding_free


def validation_sample(pairs: datasets.Dataset, recipe: Recipe) -> datasets.Dataset:
    """Return the pairs to validate on: those that are translated, if any, a fixed sample in every run of this seed."""
    if not 0 < recipe.validation_bleu < len(pairs):
        return pairs
    return pairs.shuffle(seed=recipe.seed).select(range(recipe.validation_bleu))


def _scores(tokenizer, bleu: BLEU, prediction) -> dict[str, float]:
    """`compute_metrics` for the Trainer: generated ids and labels to BLEU and chrF, each with its standard error."""
    sides = (np.where(ids < 0, tokenizer.pad_token_id, ids) for ids in (prediction.predictions, prediction.label_ids))
    texts = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in sides]
    [row] = compare_systems([("", texts[0])], texts[1], bleu)["systems"]
    # Half of the 95% interval of samples of the sentences (Koehn, 2004), as sacreBLEU estimates it.
    errors = {f"{name}_error": np.ptp(row[f"{name}_interval"]).item() / 2 / 1.96 for name in ("bleu", "chrf")}
    return {"bleu": row["bleu"], "chrf": row["chrf"]} | errors


def check_trainable(recipe: Recipe, tokenizer) -> None:
    """Refuse what a training would refuse of this recipe once it has its data, without making or writing anything."""
    with torch.device("meta"):
        new_model(recipe, tokenizer)
    choose_precision(recipe.precision)
    reporters(recipe.report_to)


class TrainingRun:
    """A recipe on its way: data, tokenizer, model, trainer. The arguments are those of `train`."""

    def __init__(self, recipe: Recipe, progress: bool = True):
        self.recipe, self.progress, self.languages = recipe, progress, ()
        self.folder = Path(recipe.output)

    def run(self, processes: Processes) -> TrainingResult:
        """Train, select the weights, write the model folder."""
        recipe = self.recipe
        with processes.first_process_first():  # one process reads and tokenizes, the others find it in the cache
            checkpoint = processes.share("checkpoint", lambda: run_folder.check_output(recipe))
            if recipe.from_model is not None and checkpoint is None:
                read_model_of(recipe.from_model)  # mistakes are found before the data is read
            train, validation = self._load_data(processes, checkpoint is not None)
        if recipe.from_model is None:
            model = new_model(recipe, self.tokenizer)
        else:  # a checkpoint has all of it: the model that was started from is not read again
            model = model_of_folder(recipe, checkpoint or recipe.from_model, weights=checkpoint is None)
        parameters, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
        logger.info("model: %s parameters, vocabulary %s", f"{parameters:,}", f"{model.config.vocab_size:,}")
        if recipe.from_model is not None:
            logger.info("weights: of %s; %s parameters are trained", recipe.from_model, f"{trained:,}")
        trainer = self._make_trainer(model, train, validation)
        sampler = trainer.batch_sampler  # on all processes: what it refuses, all refuse
        if trainer.is_world_process_zero():  # only now: nothing was written before mistakes in what was given are found
            logger.info("batches: %s", sampler.statistics())
            hashes = run_folder.content_hashes(self.tokenizer, train, validation)
            if checkpoint is not None:
                run_folder.check_contents(self.folder, hashes)
            start = {} if checkpoint or recipe.from_model is None else origin(recipe.from_model)
            self.output = run_folder.claim_output(recipe, checkpoint, self.tokenizer, hashes, start)
            trainer.add_callback(callbacks.NoteEventsCallback(self.output))
        trainer.accelerator.wait_for_everyone()
        try:
            self._train(trainer, checkpoint)
            kept, averaged, metrics = select_weights(trainer, recipe, self.folder / CHECKPOINTS, processes)
            if recipe.length_penalty == AUTO and recipe.validation_bleu:
                choose_length_penalty(trainer, self.stopper.seconds_left)
            is_held_out = not (recipe.validation_source or recipe.validation_data)
            is_made = Path(recipe.train_source or "/").absolute().parent == self.folder.absolute()  # by `distill`
            own = " against the teachers' translations" if is_held_out and is_made else ""
            lines = [*self.text_verdict, *verdict.of_scores(metrics, f"validation{own}, greedy")]
            steps, seconds = trainer.state.global_step, self.log.seconds()
            result = TrainingResult(self.folder, steps, seconds, metrics, averaged, kept, lines, self.languages)
            self._finish(trainer, result)
            return result
        finally:
            # Ends the processes that make batches: torch waits 5 seconds for each that garbage collection finds.
            for loader in trainer.accelerator._dataloaders:
                getattr(loader, "base_dataloader", loader)._iterator = None

    def _prepared_folder(self, processes: Processes, resumed: bool) -> str | Path | None:
        """Return the prepared data of the recipe, or in the run's own folder that of large text; None for less."""
        made_here = self.folder / PREPARED
        if self.recipe.prepared is not None:
            return self.recipe.prepared
        if resumed and (made_here / MANIFEST).exists():
            # The folder may be of a run before.
            began_with = read_json(self.folder / CHECKPOINTS / run_folder.CONTENTS).get("training data")
            return made_here if open_prepared(made_here).train.sha256() == began_with else None
        return processes.share("prepared", lambda: prepare_if_large(self.recipe, made_here, self.progress))

    def _load_data(self, processes: Processes, resumed: bool) -> tuple:
        """Return training and validation pairs as token ids; sets the tokenizer, and the verdict on the text."""
        recipe = self.recipe
        if (folder := self._prepared_folder(processes, resumed)) is not None:
            prepared = open_prepared(folder)
            if not resumed:  # the pairs themselves are compared then
                check_recipe_matches(prepared, recipe)
            # Each machine may have a copy of its own; of a store each file is compared when it is fetched.
            if processes.is_first_of_machine and is_local(prepared.folder):
                prepared.verify()
            self.tokenizer = prepared.tokenizer
            for name, part in (("training", TRAIN), ("validation", VALIDATION)):
                logger.info("%s data: %s", name, prepared.counts(part))
            self.text_verdict = [f"training text: {prepared.counts(TRAIN)}"]
            self.languages = languages_of(prepared.manifest["recipe"])
            return prepared.train, prepared.validation.as_dataset()
        self.tokenizer, train, validation, counts, texts = tokenized_pairs(
            recipe, lambda train: processes.share("tokenizer", lambda: make_tokenizer(recipe, train, resumed))
        )
        codes = LanguageCodes(self.tokenizer)
        if codes.known:
            tags = {typed_code(source)[0].strip() for source in texts[0]["source"]} - {""}
            with reading("the sources"):  # a code that the model lacks would be an unknown word
                found = [codes.code(tag) for tag in tags]
            if not (found or any(codes.split(source)[0] for source in texts[0][:100]["source"])):
                logger.warning("sources have no code, as this model's do (%.100s)", ", ".join(codes.known.values()))
        self.text_verdict = [] if processes.rank else verdict.of_text(counts, *texts, self.tokenizer)
        self.languages = data_sources(recipe)[0].languages or languages_of(vars(recipe))
        return train, validation

    def _train(self, trainer: VaswaniTrainer, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint if there is one; raises `TrainingStopped` after a signal."""
        if checkpoint is not None:
            logger.info("resuming from step %s", f"{step_of(checkpoint):,}")
            state = read_state(checkpoint)
            if self._has_ended(state):  # only model selection is missing
                state.init_training_references(trainer, self.recipe.max_steps, 1, None)
                trainer.state = state
                trainer._load_from_checkpoint(str(checkpoint))
                self.log.on_train_begin(trainer.args, trainer.state, trainer.control)
                trainer.remove_surplus(checkpoint.parent)  # a kill may have come before
                return
        try:
            # A model that was trained before may be better than what becomes of it.
            trainer.args.eval_on_start = checkpoint is None and self.recipe.from_model is not None
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            is_stopped = any(over_processes(trainer.args, [int(self.stopper.received is not None)]))
            if is_stopped and trainer.is_world_process_zero():
                # While another SIGTERM, of a launcher, does no harm.
                run_folder.plot_learning_curve(self.folder)
        finally:
            self.stopper.restore()
        if is_stopped:
            trainer.accelerator.wait_for_everyone()  # another may still be removing files, or drawing
            raise TrainingStopped(trainer.state.global_step, self.stopper.received or signal.SIGTERM)

    def _has_ended(self, state: TrainerState) -> bool:
        """Return whether a run with this state has nothing left to train, by the recipe's present limits."""
        recipe = self.recipe
        self.log.restore(state)
        fitting = self.stopper.steps_that_fit(state) if recipe.decline_steps and state.best_global_step else math.inf
        return (
            state.global_step >= min(recipe.max_steps, fitting)
            or 0 < recipe.early_stopping <= callbacks.stalled_validations(state, recipe.best_by)
            or (state.best_global_step is not None and self.stopper.must_end(state, 3))
        )

    def _make_trainer(self, model, train, validation) -> VaswaniTrainer:
        recipe = self.recipe
        validation = validation_sample(validation, recipe)
        longest = max(max(validation["source_length"]), max(validation["target_length"]))
        validation = validation.sort("source_length").select_columns(["input_ids", "labels"])
        if recipe.validation_bleu:
            references = self.tokenizer.batch_decode([*validation["labels"]], skip_special_tokens=True)
            bleu = bleu_metric(references, recipe.bleu_tokenizer, *languages_of(vars(recipe))[1:])
            logger.info("validation BLEU: on the tokens of %s", bleu.tokenizer_signature)
        arguments = training_arguments(recipe, longest)
        arguments.padding_free = is_padding_free(recipe, model.config, arguments)
        trainer = VaswaniTrainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=validation,
            processing_class=self.tokenizer,
            compute_metrics=partial(_scores, self.tokenizer, bleu) if recipe.validation_bleu else None,
        )
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(self.folder / callbacks.TENSORBOARD)
        trainer.remove_callback(PrinterCallback)
        self.log = callbacks.TrainingLogCallback(self.folder / LOG)
        searches = recipe.length_penalty == AUTO and recipe.validation_bleu > 0
        searched = 0.5 * (model.generation_config.num_beams or 1) * searches  # times as long as a greedy one
        averaged = partial(averaged_from, recipe)
        self.stopper = callbacks.StopAndSaveCallback(self.log, recipe.max_minutes, averaged, searched)
        save = partial(trainer._save_checkpoint, model, None)
        trainer.add_callback(self.log)
        trainer.add_callback(callbacks.BestValidationCallback(save, recipe.best_by, recipe.early_stopping))
        trainer.add_callback(self.stopper)
        if self.progress:
            trainer.add_callback(callbacks.TrainingProgressCallback(self.log, recipe.max_minutes))
        return trainer

    def _finish(self, trainer: VaswaniTrainer, result: TrainingResult) -> None:
        """Write the model folder, its weights last: their presence marks a finished run."""
        recipe, sharded = self.recipe, trainer.is_fsdp_enabled  # then all processes have to gather the weights
        weights = trainer.accelerator.get_state_dict(trainer.model) if sharded else None
        if trainer.is_world_process_zero():
            with reading(f"no model was written, checkpoints are in {self.folder}"):
                check_finite((weights or trainer.model.state_dict()).items(), "the trained model")
            run_folder.plot_learning_curve(self.folder)
            trainer.model.config.use_cache = True  # the Trainer has switched it off for training
            model = trainer.accelerator.unwrap_model(trainer.model)
            if recipe.lora_rank is not None:
                # Those of a start that was cut off here go.
                stale = [name for name in self.output.names if name.startswith(f"{ADAPTER}/")]
                with self.output.placing(ADAPTER, stale=stale) as staging:
                    merged_adapters(model, recipe, staging)
            with self.output.placing(last=WEIGHTS, stale=TOKENIZER_FILES) as staging:
                model.save_pretrained(staging, state_dict=weights)
                self.tokenizer.save_pretrained(staging)
                (staging / VERDICT).write_text(json.dumps(vars(result), default=str, indent=1), encoding="utf-8")
        trainer.accelerator.wait_for_everyone()


def train(recipe: Recipe, progress: bool = True) -> TrainingResult:
    """Train a model by a recipe, resuming an interrupted run of it; `progress`: show a bar on standard error.

    Raises:
        UserError: for mistakes in the recipe or its data.
        TrainingStopped: when Ctrl-C or SIGTERM ended training after a checkpoint.
    """
    check_recipe(recipe)
    if not progress or (sys.stderr is not None and not sys.stderr.isatty()):
        datasets.disable_progress_bars()
    if accelerator() is None:
        tune_cpu_memory()
    mode = torch.get_deterministic_debug_mode()
    use_tf32()
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN makes a plan for each new shape, which takes far longer
    try:
        join_process_group(recipe)
        with joined_processes() as processes, locked_together(recipe.output):
            recipe = processes.share("settings", lambda: choose_settings(recipe))
            return TrainingRun(recipe, progress).run(processes)
    finally:
        torch.set_deterministic_debug_mode(mode)  # which the recipe may have had changed for all of the process
