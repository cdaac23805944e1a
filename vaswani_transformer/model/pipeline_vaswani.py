"""Text in, text out: the translation pipelines that transformers 5 no longer has, for models of this architecture.

Calls and results are those of transformers 4 that give text. New are `split_sentences`, and that too long and blank
input is reported and handled instead of ignored.
"""

import copy
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForSeq2SeqLM
from transformers.pipelines.base import Pipeline

from .copying_vaswani import copy_sharing_weights
from .language_codes_vaswani import LanguageCodes
from .sentence_splitting_vaswani import join_translations, split_into_sentences

logger = logging.getLogger(__name__)

#: Entry `custom_pipelines` of a saved model's configuration, by which
#: `transformers.pipeline("translation", model, trust_remote_code=True)` finds this file beside the weights. With more
#: than one task transformers could not infer it where none is given. transformers changes what it reads: write a copy.
CUSTOM_PIPELINES = {"translation": {"impl": "pipeline_vaswani.TranslationPipeline", "pt": ["AutoModelForSeq2SeqLM"]}}

#: Batch size with `split_sentences` when none is given.
SENTENCES_PER_BATCH = 16

_OF_TRANSFORMERS_4 = ("return_text", "clean_up_tokenization_spaces")  # results are text, as it is
_DIRECTION = re.compile(r"translation_(.+)_to_(.+)")  # a task with its languages
_UNLIMITED_LENGTH = 10**9  # tokenizers without a limit have 10^30

Splitter = bool | Callable[[str], Iterable[str]]  # whether texts are split, or what splits each


class TranslationPipeline(Pipeline):
    """Text in, `translation_text` out, or `generated_text` as the task `"text2text-generation"`.

    Args:
        model: of this architecture, with its language-modelling head.
        tokenizer: its tokenizer.
        task: `"text2text-generation"`, `"translation"`, or with the languages `"translation_en_to_fr"`.
        split_sentences: as in a call.
        **options: `device`, `batch_size`, `num_workers`, and whatever a call takes, as the default for all calls.

    `tgt_lang`, in the constructor or a call, or the task chooses the language of a model with codes for it, which are
    tokens before a text (``>>fra<<`` of OPUS-MT): ``"fra"`` puts one before each sentence without. Others ignore it.

    Several threads may use one pipeline: each call gives what it would alone, but samples share random numbers.

    Raises:
        ValueError: for a model of another architecture.
    """

    _load_tokenizer = True
    _load_processor = _load_image_processor = _load_video_processor = _load_feature_extractor = False

    def __init__(self, model, tokenizer=None, *, task: str = "", split_sentences: Splitter = False, **options):
        if (kind := model.config.model_type) != "vaswani":
            raise ValueError(f"this pipeline takes models of type 'vaswani', not {kind!r}: try `vaswani import`")
        self._split_sentences = split_sentences
        self._key = "generated_text" if task == "text2text-generation" else "translation_text"
        is_learned = model.config.position_encoding == "learned"
        self._source_limit = model.config.max_position_embeddings if is_learned else None
        super().__init__(model=model, tokenizer=tokenizer, task=task, **options)

    def __call__(self, inputs, *args, split_sentences: Splitter | None = None, **options):
        """Generate for one text or many.

        Args:
            inputs: a string; a list of strings (or another sized collection, such as a column of a dataset); a torch
                dataset of strings, such as `KeyDataset(dataset, "en")`; a generator or other iterator of strings.
            split_sentences: `True` splits each text by the library sentencex, in the source language as far as it is
                known (`src_lang`, the task, the tokenizer); a function from a text to its sentences by its own rule.
                Sentences are translated in batches across rows (of 16 when no `batch_size` is given) and joined by
                spaces as their language has them, one result a row; k-th alternatives are joined with each other.
            batch_size, num_workers: as in every pipeline of transformers; with `split_sentences` there are no workers.
            truncation (bool, str): cut texts that are longer than `tokenizer.model_max_length` or the model's
                positions, each with a warning. Without it nothing is cut.
            **options: for `generate()`, such as `max_new_tokens`, `num_beams`, `num_return_sequences`.

        Returns:
            for a string a list of dicts, one for each of `num_return_sequences`; for a list of strings a list of dicts,
            or of such lists when `num_return_sequences` is above 1; for a dataset or an iterator a lazy iterator over
            such lists; a blank text gives an empty one.

        Raises:
            TypeError: for input that is not text.
            ValueError: for a text longer than the model has positions.
            ImportError: for `split_sentences=True` where sentencex is not installed.
        """
        splitter = self._split_sentences if split_sentences is None else split_sentences
        is_single = inputs is None or isinstance(inputs, str | bytes | Mapping)
        is_lazy = not is_single and (isinstance(inputs, Dataset) or not isinstance(inputs, Sized))
        texts = [inputs] if is_single else inputs if is_lazy else list(inputs)
        if not is_lazy and not texts:
            return []
        if splitter:
            if splitter is True:
                splitter = partial(split_into_sentences, language=self._source_language(**options))
            results = self._call_on_sentences(texts, splitter, **options)
        elif is_single:
            return super().__call__(inputs, *args, **options)
        else:
            is_iterator = is_lazy and not isinstance(inputs, Dataset)  # transformers knows generators alone
            results = super().__call__((text for text in texts) if is_iterator else texts, *args, **options)
        if is_lazy:
            return results
        results = list(results)
        if is_single:
            return results[0]
        return [records[0] for records in results] if all(len(records) == 1 for records in results) else results

    def _source_language(self, src_lang=None, **options) -> str:
        """Return the language of the sources as far as it is known, else English's code."""
        named = _DIRECTION.fullmatch(self.task or "")
        known = (src_lang, self._preprocess_params.get("src_lang"), named and named[1])
        return next(filter(None, known), None) or getattr(self.tokenizer, "source_lang", None) or "en"

    def _call_on_sentences(self, texts, splitter, num_workers=None, batch_size=None, **options) -> Iterator[list]:
        """Yield results of texts made of those of their sentences, reading no further ahead than a batch."""
        if batch_size is None and (batch_size := self._batch_size) is None:
            batch_size = SENTENCES_PER_BATCH if self.tokenizer.pad_token_id is not None else 1
        counts, key = deque(), self._key

        def sentences():
            for text in texts:
                if isinstance(text, str):  # anything else is refused as without a splitter
                    code, rest = self._codes.split(text)
                    text = [code + part for part in splitter(rest) if part.strip()] or [""]
                parts = text if isinstance(text, list) else [text]
                counts.append(len(parts))
                yield from parts

        # No workers: the sentences are counted in this process.
        results = iter(super().__call__(sentences(), num_workers=0, batch_size=batch_size, **options))
        for first in results:
            parts = [first, *islice(results, counts.popleft() - 1)]
            yield [{key: join_translations(record[key] for record in records)} for records in zip(*parts, strict=True)]

    def _sanitize_parameters(self, truncation=None, src_lang=None, tgt_lang=None, **generate_options):
        """Distribute the options of a call or the constructor to preprocess and forward."""
        preprocess = {"truncation": truncation, "src_lang": src_lang, "tgt_lang": tgt_lang}
        options = {name: x for name, x in generate_options.items() if name not in _OF_TRANSFORMERS_4}
        return {name: value for name, value in preprocess.items() if value is not None}, options, {}

    @cached_property
    def _codes(self) -> LanguageCodes:
        return LanguageCodes(self.tokenizer)

    @cached_property
    def _cutting_tokenizer(self):
        # A tokenizer keeps the truncation of its last call, which another thread might be encoding a text with.
        return copy.deepcopy(self.tokenizer)

    def preprocess(self, text, truncation=False, src_lang=None, tgt_lang=None) -> dict[str, Any]:
        """Return the encoder's inputs of one text, `(1, length)` each, with the code of its target language.

        `src_lang` matters only to the splitting into sentences.
        """
        if not isinstance(text, str):
            hint = "; for a dataset of dicts give KeyDataset(dataset, column)" if isinstance(text, Mapping) else ""
            raise TypeError(f"a pipeline takes strings, not {type(text).__name__}{hint}")
        named = _DIRECTION.fullmatch(self.task or "")
        tgt_lang = tgt_lang or (named and named[2])
        code, rest = self._codes.split(text)
        if tgt_lang and not code and (self._codes.known or not tgt_lang[0].isalpha()):
            code = f"{self._codes.code(tgt_lang)} "
        options = {"return_tensors": "pt", "verbose": False}  # messages about length are raised here
        encoding = self.tokenizer(code + rest, **options)
        length = encoding["input_ids"].shape[1]
        if truncation in (None, False, "do_not_truncate"):
            if self._source_limit is not None and length > self._source_limit:
                fix = "give split_sentences=True, or truncation=True to drop the rest"
                raise ValueError(f"a text has {length} tokens and the model {self._source_limit} positions: {fix}")
        elif length > (limit := min(self._source_limit or _UNLIMITED_LENGTH, self.tokenizer.model_max_length)):
            encoding = self._cutting_tokenizer(code + rest, truncation=truncation, max_length=limit, **options)
            kept = encoding["input_ids"].shape[1]
            logger.warning(f"a text was cut: {kept} of its {length} tokens are kept (truncation={truncation})")
        inputs = {name: value for name, value in encoding.items() if name != "token_type_ids"}
        return {**inputs, "is_blank": torch.tensor([not text.strip()])}

    def _forward(self, model_inputs, **generate_options) -> dict[str, torch.Tensor]:
        """Generate for a batch: token ids of shape `(batch_size, num_return_sequences, length)`."""
        inputs = dict(model_inputs)
        is_blank = inputs.pop("is_blank")
        # Without dropout, also of a model that is being trained, whose modes are not this pipeline's to change.
        in_training = any(module.training for module in self.model.modules())
        model = copy_sharing_weights(self.model) if in_training else self.model
        outputs = model.generate(**inputs, **generate_options)
        outputs = getattr(outputs, "sequences", outputs)
        return {"output_ids": outputs.reshape(len(is_blank), -1, outputs.shape[-1]), "is_blank": is_blank}

    def postprocess(self, model_outputs) -> list[dict[str, str]]:
        """Return the records of one row: a dict for each returned sequence."""
        outputs = model_outputs["output_ids"][0]
        outputs = outputs[:, :0] if model_outputs["is_blank"] else outputs
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return [{self._key: self.tokenizer.decode(ids, **options)} for ids in outputs]


# By this `save_pretrained` of a pipeline writes `custom_pipelines` and a copy of this file.
TranslationPipeline._registered_impl = {"translation": {"impl": TranslationPipeline, "pt": (AutoModelForSeq2SeqLM,)}}
