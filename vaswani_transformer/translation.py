"""A trained model at work: loading it, translating text, scoring pairs."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
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
        config = read_config(path)
        check_generation_config(path, config)
        model, report = VaswaniForConditionalGeneration.from_pretrained(
            path, config=config, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{folder} holds no complete model: {one_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress:
            transformers_logging.enable_progress_bar()
    if report["mismatched_keys"]:
        name, held, wanted = sorted(report["mismatched_keys"])[0]
        raise UserError(
            f"{folder} does not fit its own config.json: {name} has the shape {tuple(held)} and config.json makes it"
            f" {tuple(wanted)}; both files must come from the same model"
        )
    for kind in ("missing", "unexpected"):
        if report[f"{kind}_keys"]:
            raise UserError(
                f"{folder} does not fit its own config.json: {kind} weights, such as"
                f" {min(map(str, report[f'{kind}_keys']))}"
            )
    tokenizer = load_tokenizer(path)
    check_tokenizer_matches(tokenizer, config)
    return model.eval().to(choose_device(device)), tokenizer


def read_config(folder: Path) -> VaswaniConfig:
    """The configuration in a folder; nothing else of the folder is read, and no code in it runs.

    Raises:
        UserError: for one of another architecture.
        Exception: of any kind, for a file that cannot be read as a configuration.
    """
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise UserError(f"{folder} has no usable config.json: it must hold one JSON object")
    if (kind := values.get("model_type")) != VaswaniConfig.model_type:
        raise UserError(f"{folder} holds a {kind!r} model: this command takes models of type 'vaswani'")
    return VaswaniConfig.from_pretrained(folder)


# Settings of `generation_config.json` and what they must be: type, least and largest value. Larger ones are mistakes
# that would fill the memory.
_GENERATION_RULES = {
    "num_beams": (int, 1, 10_000),
    "num_return_sequences": (int, 1, 10_000),
    "max_extra_tokens": (int, 0, 10**6),
    "max_new_tokens": (int, 1, 10**6),
    "max_length": (int, 1, 10**6),
    "min_length": (int, 0, 10**6),
    "length_penalty": (float, -100, 100),
    "temperature": (float, 1e-6, 10**6),
    "repetition_penalty": (float, 1e-6, 10**6),
}


def check_generation_config(folder: Path, config: VaswaniConfig) -> None:
    """Check the settings of `generation_config.json` that decide how long an output takes and what it looks like.

    Raises:
        UserError: naming the setting, its value and the rule, or for a file that is no JSON object.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({one_line(error)}): copy it again, or delete it for the defaults"
        ) from error
    if not isinstance(settings, dict):
        raise UserError(
            f"{path} is damaged: it must hold one JSON object; copy it again, or delete it for the defaults"
        )
    for name, (kind, least, most) in _GENERATION_RULES.items():
        value = settings.get(name)
        number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if value is not None and not (number and least <= value <= most):
            words = "a whole number" if kind is int else "a number"
            raise UserError(f"{name} in {path} is {value!r}: it must be {words} from {least:g} to {most:,}")
    for name, value in settings.items():
        if name.endswith("_token_id") and value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(token) is int and 0 <= token < config.vocab_size for token in ids):
                raise UserError(
                    f"{name} in {path} is {value!r}: it must be a token id, at least 0 and below {config.vocab_size}"
                )


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
            outputs = getattr(outputs, "sequences", outputs)  # as the model's own settings have it
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
