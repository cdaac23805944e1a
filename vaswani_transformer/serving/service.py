"""The service behind both HTTP interfaces: requests within limits become translations of their sentences."""

import asyncio
import contextlib
import hmac
import math
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any

import regex
from babel.core import get_global
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from ..decoding.glossary import make_glossary
from ..decoding.translator import Hypothesis
from ..documents.kept import has_words
from ..errors import UserError, items_of, reading
from ..model.language_codes_vaswani import typed_code
from ..model.sentence_splitting_vaswani import space_behind, split_into_sentences
from ..model.settings_vaswani import SETTING_RANGES
from .engine import Engine, Options
from .models import Models, ServedModel, language_distance

_TERMS = 128  # tokens of a sentence's terms in a glossary: each makes every step of its search longer
_MOST_BEAMS = 32
_ENDLESS = re.compile(r"\S{500}(?=\S)")  # part of a word for which a tokenizer would take long
_TAGS_AND_ADDRESSES = re.compile(r"(?<!<)</?[a-zA-Z][^<>]*>(?!>)|(?<![!-;=-~])[!-;=-~]*(?:://|www\.|@)[!-;=-~]*")
# A sentence but for pictures, such as emoji, at its ends, with brackets around them.
_SHOWN = regex.compile(
    r"""(?sx)(?(DEFINE)(?P<sign>[^\p{L}\p{N}])(?P<picture>
    [\p{Extended_Pictographic}\p{Regional_Indicator}\p{Emoji_Modifier}\p{Co}\u2190-\u21ff\u2500-\u2bff][\p{M}\u200d]*))
    ((?&sign)*(?&picture)[\s\p{Pe}]*)?(?P<shown>.*[\p{L}\p{N}]((?![\s\p{Ps}]{0,3}(?&picture))(?&sign))*)"""
)
_LEAST, _MOST = SETTING_RANGES["length_penalty"][1:]

Texts = str | Annotated[list[str], Field(min_length=1)]


@dataclass(frozen=True)
class Limits:
    """Limits of requests."""

    characters: int = 50_000  # of a request
    queue: int = 10_000  # requests, and sentences, that are under way at once
    seconds: float = 60.0  # for a request, from its first byte to the last of its answer

    @property
    def body(self) -> int:
        """Return the bytes allowed in a body: a character has at most twelve, as two escapes of a form or of JSON."""
        return 12 * self.characters + 65_536


class GlossaryTerm(BaseModel, extra="forbid"):
    """A term that translations of texts with its source have to have."""

    source: str = Field(description="words; in small letters they are found in any letters", examples=["sofa"])
    target: str | list[str] = Field([], description="one form, or several of which one has to be there; none: as it is")


class TranslationsRequest(BaseModel, extra="forbid"):
    """Texts, and options of their translations; without an option the model's own settings hold."""

    text: Texts = Field(description="a text of any number of sentences, or several", examples=["Two dogs."])
    source: str = Field("auto", description="code of its language; auto where one model only has the target")
    target: str = Field(description="code of the language to translate to", examples=["de"])
    nbest: int = Field(1, ge=1, le=_MOST_BEAMS, description="translations of each sentence")
    beams: int | None = Field(None, ge=1, le=_MOST_BEAMS, description="running hypotheses, at least nbest")
    length_penalty: float | None = Field(None, ge=_LEAST, le=_MOST, description="alpha of the length normalisation")
    max_new_tokens: int | None = Field(None, ge=1, le=1000, description="longest translation of a sentence, in tokens")
    prefix: Texts | None = Field(None, description="how the translation of each text has to begin")
    split_sentences: bool = Field(True, description="translate sentence by sentence; else line by line")
    scores: bool = Field(False, description="log-probability and score of each translation")
    token_scores: bool = Field(False, description="its tokens with their log-probabilities")
    alignments: bool = Field(False, description="which source word each of its words comes from")
    confidence: bool = Field(False, description="how sure the model is of each translation and each of its words")
    glossary: list[GlossaryTerm] = Field([], description="terms that the translations have to have")
    stream: bool = Field(False, description="server-sent events, one for each sentence, in order")

    @property
    def prefixes(self) -> list[str]:
        """Return the prefix of each text's translation."""
        return [""] * len(items_of(self.text)) if self.prefix is None else items_of(self.prefix)

    @property
    def needs(self) -> str:
        """Return what CTranslate2 cannot follow."""
        asked = {"a glossary": self.glossary, "a prefix": any(self.prefixes), "alignments": self.alignments}
        return next((name for name, value in asked.items() if value), "")


class SplitText:
    """A text as its sentences and what is before, between and behind them: white space, and what has no words.

    Where they are not to be `split`, lines are translated as they are; so is one that `is_known` to a memory. `divide`
    divides what is too long at once. `code` is of the target language, for all up to one that begins with another.
    """

    def __init__(
        self, text: str, language: str, divide: Callable, split: bool = True, code: str = "", is_known: bool = False
    ):
        self.sentences, self._codes = [], []
        self.gaps = [""]  # one more than sentences
        if is_known and len(text.splitlines()) == 1 and len(list(divide(text.strip(), language, code))) == 1:
            before, sentence, behind = text.partition(text.strip())
            self.sentences, self._codes, self.gaps = [sentence], [code], [before, behind]
            return
        for line in re.split(r"([\r\n\t]+)" if split else r"([\r\n]+)", text):
            end = read = 0
            sentences = split_into_sentences(line, language) if split else [line.strip()]
            for sentence in sentences:
                read = (start := line.index(sentence, read)) + len(sentence)
                if not has_words(sentence):
                    continue
                match = _SHOWN.match(sentence)
                start, shown = start + match.start("shown"), match["shown"]
                self.gaps[-1] += line[end:start]
                end = start + len(shown)
                own, sentence = typed_code(" ".join(shown.split()))
                code = own or code
                for number, part in enumerate(divide(_ENDLESS.sub(r"\g<0> ", sentence), language, code)):
                    self.gaps[-1] += " " * (number > 0)
                    if has_words(part):
                        self.sentences.append(part)
                        self._codes.append(code)
                        self.gaps.append("")
                    else:
                        self.gaps[-1] += part
            self.gaps[-1] += line[end:]

    def coded(self, number: int) -> str:
        """Return a sentence as the model gets it."""
        return self._codes[number] + self.sentences[number]

    def before(self, number: int, last: str) -> str:
        """Return what is before the translation of a sentence; `last`: the translation before it."""
        return space_behind(last, self.gaps[number]) if number else self.gaps[0]

    def joined(self, translations: Sequence[str]) -> str:
        """Return the text with its sentences replaced by translations."""
        pairs = enumerate(zip(["", *translations], translations, strict=False))
        return "".join(self.before(number, last) + text for number, (last, text) in pairs) + self.gaps[-1]


class Translating:
    """A request at work: its texts, and the hypotheses of their sentences.

    `UserError` for a prefix that is too long, or a glossary with empty terms or that the model cannot follow.
    """

    def __init__(self, engine: Engine, served: ServedModel, job: TranslationsRequest):
        self.engine, self._scores, self._options = engine, job.scores, _options(engine.model, job)
        with reading("the text"):
            coded = list(map((codes := engine.codes(served.target)).split, items_of(job.text)))
        memory = None if job.glossary or any(job.prefixes) else engine.translator.memory
        settings, self.texts = (served.source, partial(engine.divide, has_prefix=any(job.prefixes))), []
        for code, text in coded:
            known = memory and (memory.exact(code + text) or (code == codes.default and memory.exact(text)))
            self.texts.append(SplitText(text, *settings, job.split_sentences, code, bool(known)))
        self._indices = [(text, at) for text, split in enumerate(self.texts) for at in range(len(split.sentences))]
        prefixes = job.prefixes
        sentences = [(self.texts[text].coded(at), "" if at else prefixes[text]) for text, at in self._indices]
        terms = ((term.source, items_of(term.target)) for term in job.glossary)
        glossary = make_glossary((f"entry {number} of the glossary", *term) for number, term in enumerate(terms, 1))
        self.pieces = engine.tokenize(sentences, glossary, self._options, codes)
        forms = (chain(*piece.terms.forms) for piece in self.pieces if piece.terms)
        size = max((sum(len(form) for form in each if form[0] >= 0) for each in forms), default=0)
        if size > _TERMS:
            raise UserError(f"a sentence's glossary has {size} tokens in all forms, at most {_TERMS} are taken")

    async def sentences(self) -> AsyncIterator[tuple[int, int, list[Hypothesis]]]:
        """Yield the numbers of each text and its sentences in order, and the sentence's hypotheses, best first."""
        ready, sent = {}, 0
        async with contextlib.aclosing(self.engine.translate(self.pieces, self._options, self._scores)) as results:
            async for number, hypotheses in results:
                possible = [each for each in hypotheses if each.tokens]  # maybe fewer than are asked for
                ready[number] = possible or hypotheses[:1]
                while sent in ready:
                    yield *self._indices[sent], ready.pop(sent)
                    sent += 1

    async def all(self) -> list[list[list[Hypothesis]]]:
        """Return the hypotheses of each sentence of each text."""
        results = [[] for _ in self.texts]
        async with contextlib.aclosing(self.sentences()) as sentences:
            async for text, _, hypotheses in sentences:
                results[text].append(hypotheses)
        return results


class Service:
    """Takes requests for the models of a server; `keys` are API keys, one of which each needs, if there are any."""

    def __init__(self, models: Models, limits: Limits, keys: Collection[str] = (), memory=None):
        self.models, self.limits, self.memory = models, limits, memory
        self.keys = [key.encode() for key in keys]

    def check_key(self, headers: Mapping[str, str], key: Any = None) -> None:
        """Raise `HTTPException` without a key that is known, given here or as `Authorization: Bearer KEY`."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        sent = token.strip(" \t").encode("latin-1") if scheme.lower() == "bearer" else b""  # the bytes as they came
        encoded = str(key).encode(errors="surrogatepass") if key else sent
        if self.keys and not sum(hmac.compare_digest(encoded, known) for known in self.keys):
            missing = 400, "Please contact the server operator to get an API key"
            raise HTTPException(*((403, "Invalid API key") if encoded else missing))

    def note(self, request, served: ServedModel | None, texts: Sequence[str]) -> None:
        """Note for log and metrics what a request is about."""
        size, name = sum(map(len, texts)), served.name if served else "none"
        request.app.state.metrics.characters.labels(name).inc(size)
        request.state.notes = {"model": name, "characters": size}

    def model_for(self, source: str, target: str, may_stay: bool = False) -> ServedModel | None:
        """Return the model whose languages are nearest; `auto` is the source if only one model has the target.

        None for texts that are in the target language already, if they `may_stay`; `HTTPException` without a model.
        """
        is_auto, served = source.lower() == "auto", self.models.served
        sources = [0 if is_auto else language_distance(source, model.source) for model in served]
        targets = [language_distance(target, model.target) for model in served]
        distances = [sum(pair) for pair in zip(sources, targets, strict=True)]
        nearest, is_known = min(distances), min(sources + targets) < math.inf
        if may_stay and is_known and nearest and not is_auto and language_distance(source, target) < 0.5:
            return None
        if nearest == math.inf or (is_auto and distances.count(nearest) > 1):
            known = ", ".join(model.name for model in served)
            raise HTTPException(400, f"{source:.20} to {target:.20} is not supported: there are {known}")
        return served[distances.index(nearest)]

    def detect(self, texts: Sequence[str], target: str = "") -> dict[str, float]:
        """Return how likely texts are in each language that is served, at most 1, or in a target and its sources."""
        served = [one for one in self.models.served if not target or language_distance(target, one.target) < math.inf]
        codes = dict.fromkeys(code for model in served for code in (model.source, model.target))
        with reading("detection of languages (pip install 'vaswani_transformer[serve]')"):
            from ..data.cleaning_rules import likely_languages

            shown = _TAGS_AND_ADDRESSES.sub(" ", text := " ".join(texts)).split() or text.split()
            likely = likely_languages(" ".join(shown).lower())
        short = get_global("language_aliases") | {"nb": "no", "nob": "no", "fil": "tl", "tgl": "tl", "tl": "tl"}
        names = {code: short.get(name := code.lower().partition("-")[0], name) for code in codes}  # of eng en, of nb no
        total = max(0.1, sum(likely.get(name, 0.0) for name in {*names.values()}))  # a text in none of them has less
        return dict(sorted(((code, likely.get(names[code], 0) / total) for code in names), key=lambda each: -each[1]))

    def check(self, texts: Sequence[str]) -> None:
        """Raise `HTTPException` for texts that are too long or cannot be encoded."""
        size, limit = sum(map(len, texts)), self.limits.characters
        if size > limit:
            raise HTTPException(400, f"Invalid request: request ({size}) exceeds text limit ({limit})")
        with reading("the text"):
            "".join(texts).encode()  # which half a surrogate pair cannot be

    @contextlib.asynccontextmanager
    async def translating(self, served: ServedModel, job: TranslationsRequest) -> AsyncIterator[Translating]:
        """Tokenise what is to be translated, with the model loaded; errors as in `Translating`.

        `HTTPException` for texts that are too long, a queue that is full, or a model that cannot be loaded.
        """
        terms = [text for term in job.glossary for text in (term.source, *items_of(term.target))]
        self.check([*items_of(job.text), *job.prefixes, *terms])
        async with self.models.engine(served, job.needs) as engine:
            work = await asyncio.to_thread(Translating, engine, served, job)
            pending = self.models.pending
            if pending and pending + len(work.pieces) > self.limits.queue:
                raise full()
            yield work


def full() -> HTTPException:
    """Return the refusal of a request that is one too many."""
    return HTTPException(503, "the server is overloaded: try again later", {"Retry-After": "1"})


def _options(model: Any, job: TranslationsRequest) -> Options:
    """Return the options for `generate()` that were given, and what they imply."""
    saved = model.generation_config
    beams = job.nbest if job.nbest > (job.beams or saved.num_beams or 1) else job.beams
    options = {"length_penalty": job.length_penalty, "max_new_tokens": job.max_new_tokens, "num_beams": beams}
    if job.nbest != (saved.num_return_sequences or 1):
        options["num_return_sequences"] = job.nbest
    return tuple(sorted((name, value) for name, value in options.items() if value is not None))
