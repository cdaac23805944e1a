"""A trained model at work: loading it, translating text, scoring pairs."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .batching import IGNORE_INDEX, PairCollator, TokenBatchSampler
from .configuration_vaswani import VaswaniConfig
from .errors import UserError, one_line
from .modeling_vaswani import VaswaniForConditionalGeneration
from .tokenization import check_tokenizer_matches, load_tokenizer


def choose_device(name: str = "auto") -> torch.device:
    """The device of this name; `"auto"` takes an accelerator if there is one.

    Raises:
        UserError: for a device that torch does not know or that is not there.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"cannot use device {name!r}: {str(error).splitlines()[0]}") from error
    return device


def load_model(
    folder: str | Path, device: str = "auto"
) -> tuple[VaswaniForConditionalGeneration, PreTrainedTokenizerBase]:
    """A saved model in evaluation mode and its tokenizer, which must match.

    Args:
        folder: a folder that `vaswani train` or `save_pretrained` wrote.
        device: where to put the model.

    Raises:
        UserError: for a folder that is missing, incomplete, damaged or not of this architecture, a tokenizer that does
            not match the model, or a device that is not there.
    """
    path = Path(folder)
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{folder} is a file: give the folder of a model")
        raise UserError(f"there is no model folder {folder}")
    if not (path / "config.json").is_file():
        hint = " (training there is not finished: run the same `vaswani train` again)" if is_unfinished(path) else ""
        raise UserError(f"{folder} holds no model: it has no config.json{hint}")
    progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(path)
        if not isinstance(config, VaswaniConfig):
            raise UserError(
                f"{folder} holds a {config.model_type!r} model: this command takes models of type 'vaswani'"
            )
        model, report = VaswaniForConditionalGeneration.from_pretrained(path, config=config, output_loading_info=True)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{folder} holds no complete model: {one_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress:
            transformers_logging.enable_progress_bar()
    problems = [(kind, report[f"{kind}_keys"]) for kind in ("missing", "unexpected", "mismatched")]
    for kind, keys in problems:
        if keys:
            raise UserError(
                f"{folder} does not fit its own config.json: {kind} weights, such as {sorted(map(str, keys))[0]}"
            )
    tokenizer = load_tokenizer(path)
    check_tokenizer_matches(tokenizer, config)
    return model.eval().to(choose_device(device)), tokenizer


def is_unfinished(folder: Path) -> bool:
    """Whether a training run in this folder was interrupted before it wrote its model."""
    return (folder / "checkpoints").is_dir() and not (folder / "model.safetensors").is_file()


def check_length(config: VaswaniConfig, number: int, tokens: int) -> None:
    """Refuse a sentence that a model with learned positions has none for.

    Raises:
        UserError: naming the line (counted from 1), its tokens and the limit.
    """
    if config.position_encoding == "learned" and tokens > config.max_position_embeddings:
        raise UserError(
            f"line {number} has {tokens} tokens and the model has learned {config.max_position_embeddings} positions:"
            " split the line into shorter sentences"
        )


def _batches_by_length(lengths: list[int], tokens: int) -> list[list[int]]:
    """Indices in batches of at most `tokens` tokens, padding counted, longest first; one too long comes alone."""
    return list(TokenBatchSampler(lengths, lengths, max(tokens, max(lengths)), shuffle=False)) if lengths else []


class Translator:
    """Text in, text out.

    Args:
        model: the model, in evaluation mode.
        tokenizer: its tokenizer.
        tokens_per_batch: source tokens translated at once, padding counted.
        **generate_options: for `generate()`, over the model's own generation configuration.
    """

    def __init__(self, model, tokenizer, tokens_per_batch: int = 2048, **generate_options):
        self.model, self.tokenizer, self.tokens_per_batch = model, tokenizer, tokens_per_batch
        self.generate_options = {name: value for name, value in generate_options.items() if value is not None}

    @torch.no_grad()
    def translate_ids(self, sources: list[list[int]], progress: tqdm | None = None) -> list[str]:
        """Translations of tokenised sources, in their order; `progress` moves by one a sentence."""
        translations = [""] * len(sources)
        collator = PairCollator(self.model.config.pad_token_id)
        for indices in _batches_by_length([len(source) for source in sources], self.tokens_per_batch):
            inputs = collator([{"input_ids": sources[index], "labels": [0]} for index in indices])
            inputs.pop("labels")
            inputs = {name: tensor.to(self.model.device) for name, tensor in inputs.items()}
            outputs = self.model.generate(**inputs, **self.generate_options)
            texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
            for index, text in zip(indices, texts, strict=True):
                translations[index] = text
            if progress is not None:
                progress.update(len(indices))
        return translations

    def translate(self, sentences: Iterable[str], window: int = 1000, progress: tqdm | None = None) -> Iterator[str]:
        """Translations in the order of the sentences, as they are ready; an empty line gives an empty line.

        Args:
            sentences: one source each; read `window` at a time, so that long files do not have to fit in memory.
            window: sentences sorted by length together.
            progress: a bar that moves by one a sentence.

        Raises:
            UserError: for a sentence that the model has no positions for; those before its window are out by then.
        """
        sentences = iter(sentences)
        done = 0
        while chunk := list(islice(sentences, window)):
            stripped = [sentence.strip() for sentence in chunk]
            filled = [index for index, sentence in enumerate(stripped) if sentence]
            sources = self.tokenizer([stripped[index] for index in filled])["input_ids"] if filled else []
            for index, source in zip(filled, sources, strict=True):
                check_length(self.model.config, done + index + 1, len(source))
            results = dict(zip(filled, self.translate_ids(sources, progress), strict=True))
            if progress is not None:
                progress.update(len(chunk) - len(filled))
            for index in range(len(chunk)):
                # One line out for one line in, whatever the model has written.
                yield " ".join(results.get(index, "").splitlines())
            done += len(chunk)


@torch.no_grad()
def score_pairs(
    model, tokenizer, sources: list[str], targets: list[str], tokens_per_batch: int = 4096
) -> tuple[list[float], list[int]]:
    """How likely the model finds each target, given its source and its own beginning.

    Args:
        model: the model, in evaluation mode.
        tokenizer: its tokenizer.
        sources: source sentences.
        targets: their targets.
        tokens_per_batch: tokens a side scored at once.

    Returns:
        for each pair the negative log-probability of its target in nats, and the target's tokens, `</s>` counted.

    Raises:
        UserError: for a sentence that the model has no positions for, naming its line.
    """
    if not sources:
        return [], []
    pairs = {"input_ids": tokenizer(sources)["input_ids"], "labels": tokenizer(targets)["input_ids"]}
    lengths = [max(map(len, pair)) for pair in zip(pairs["input_ids"], pairs["labels"], strict=True)]
    for number, length in enumerate(lengths, start=1):
        check_length(model.config, number, length)
    collator = PairCollator(model.config.pad_token_id)
    losses, counts = [0.0] * len(sources), [len(ids) for ids in pairs["labels"]]
    for indices in _batches_by_length(lengths, tokens_per_batch):
        batch = collator([{name: ids[index] for name, ids in pairs.items()} for index in indices])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = batch.pop("labels")
        logits = model(**batch, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels)).logits
        token_losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
        for index, loss in zip(indices, token_losses.view(labels.shape).double().sum(dim=1).tolist(), strict=True):
            losses[index] = loss
    return losses, counts
