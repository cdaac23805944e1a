"""The service behind both HTTP interfaces: requests within limits become translations of their sentences."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from ..decoding.glossary import Glossary
from ..decoding.translator import Hypothesis, Piece
from ..errors import UserError, reading
from .engine import Engine, Options
from .models import Models, ServedModel
from .text import SplitText

logger = logging.getLogger(__name__)

_PAGES = 2  # of attention that are made at once, since each takes much memory
_TERMS = 128  # tokens of a sentence's terms in a glossary: each makes every step of its search longer


@dataclass(frozen=True)
class Limits:
    """Limits of requests."""

    characters: int = 50_000  # of a request
    queue: int = 10_000  # requests, and sentences, that are under way at once
    seconds: float = 60.0  # for a request, from its first byte to the last of its answer

    @property
    def body(self) -> int:
        """Bytes of a request's body: a character has at most twelve, as two escapes of a form or of JSON."""
        return 12 * self.characters + 65_536


@dataclass(frozen=True)
class TranslationRequest:
    """Texts to translate, and options; None leaves an option as the model was saved."""

    texts: Sequence[str]
    prefixes: Sequence[str] | None = None  # of each text's translation
    nbest: int = 1
    beams: int | None = None
    length_penalty: float | None = None
    max_new_tokens: int | None = None
    split: bool = True  # into sentences
    glossary: Glossary | None = None
    scores: bool = False
    alignments: bool = False

    @property
    def needs(self) -> str:
        """Return what CTranslate2 cannot follow."""
        asked = {"a glossary": self.glossary, "a prefix": any(self.prefixes or ()), "alignments": self.alignments}
        return next((name for name, value in asked.items() if value), "")


class Translating:
    """A request at work: its texts, and the hypotheses of their sentences."""

    def __init__(self, engine: Engine, texts: list[SplitText], pieces: list[Piece], options: Options, scores: bool):
        self.engine, self.texts, self._pieces, self._options, self._scores = engine, texts, pieces, options, scores
        self._indices = [(text, number) for text, split in enumerate(texts) for number in range(len(split.sentences))]

    async def sentences(self) -> AsyncIterator[tuple[int, int, list[Hypothesis]]]:
        """Yield the number of a text, of its sentence, and the sentence's hypotheses, best first, as they are ready."""
        async with contextlib.aclosing(self.engine.translate(self._pieces, self._options, self._scores)) as ready:
            async for number, hypotheses in ready:
                possible = [each for each in hypotheses if each.tokens]  # maybe fewer than are asked for
                yield *self._indices[number], possible or hypotheses[:1]

    async def all(self) -> list[list[list[Hypothesis]]]:
        """Return the hypotheses of each sentence of each text."""
        results = [[[] for _ in text.sentences] for text in self.texts]
        async with contextlib.aclosing(self.sentences()) as ready:
            async for text, number, hypotheses in ready:
                results[text][number] = hypotheses
        return results


class Service:
    """Takes requests for the models of a server; `keys` are API keys, one of which each needs, if there are any."""

    def __init__(self, models: Models, limits: Limits, keys: Collection[str] = ()):
        self.models, self.limits = models, limits
        self.attending = asyncio.Semaphore(_PAGES)
        self._keys = [_digest(key) for key in keys]

    @property
    def needs_key(self) -> bool:
        """Return whether a translation needs an API key."""
        return bool(self._keys)

    def check_key(self, headers: Mapping[str, str], key: Any = None) -> None:
        """Raise `HTTPException` without a key that is known, given here or as `Authorization: Bearer KEY`."""
        if not self._keys:
            return
        if not key:
            key = headers.get("authorization", "").partition("Bearer ")[2].strip()
        if not any(hmac.compare_digest(_digest(str(key)), known) for known in self._keys):
            missing = 400, "Please contact the server operator to get an API key"
            raise HTTPException(*((403, "Invalid API key") if key else missing))

    def note(self, request, served: ServedModel, texts: Sequence[str]) -> None:
        """Note for log and metrics what a request is about."""
        size = sum(map(len, texts))
        request.app.state.metrics.characters.labels(served.name).inc(size)
        request.state.notes.update(model=served.name, characters=size, texts=texts)

    def model_for(self, source: str, target: str) -> ServedModel:
        """Return the model between two languages, in any case; `auto` is the source if only one model has the target.

        Raises:
            HTTPException: there is none.
        """
        models = [model for model in self.models.served if model.target.lower() == target.lower()]
        if source.lower() != "auto":
            models = [model for model in models if model.source.lower() == source.lower()]
        if len(models) != 1:
            known = ", ".join(model.name for model in self.models.served)
            raise HTTPException(400, f"{source:.20} to {target:.20} is not supported: there are {known}")
        return models[0]

    def check(self, texts: Sequence[str]) -> None:
        """Raise `HTTPException` for texts that are too long or cannot be encoded."""
        size, limit = sum(map(len, texts)), self.limits.characters
        if size > limit:
            raise HTTPException(400, f"Invalid request: request ({size}) exceeds text limit ({limit})")
        with reading("the text"):
            "".join(texts).encode()  # which half a surrogate pair cannot be

    @contextlib.asynccontextmanager
    async def translating(self, served: ServedModel, job: TranslationRequest) -> AsyncIterator[Translating]:
        """Tokenise what is to be translated, with the model loaded.

        Raises:
            HTTPException: texts that are too long, a queue that is full, or a model that cannot be loaded.
            UserError: for a prefix that is too long, or a glossary that the model cannot follow.
        """
        terms = job.glossary.terms.values() if job.glossary else ()
        glossary = [text for term in terms for text in (term.source, *term.targets)]
        self.check([*job.texts, *(job.prefixes or []), *glossary])
        async with self.models.engine(served, job.needs) as engine:
            texts, pieces = await asyncio.to_thread(_prepare, engine, served.source, job)
            pending = self.models.pending
            if pending and pending + len(pieces) > self.limits.queue:
                raise full()
            yield Translating(engine, texts, pieces, _options(engine.model, job), job.scores)


def texts_of(value: str | list[str]) -> list[str]:
    """Return a text, or a list of them, as a list."""
    return value if isinstance(value, list) else [value]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def full() -> HTTPException:
    """Return the refusal of a request that is one too many."""
    return HTTPException(503, "the server has too much to do: try again later", {"Retry-After": "1"})


def _prepare(engine: Engine, language: str, job: TranslationRequest) -> tuple[list[SplitText], list[Piece]]:
    texts = [SplitText(text, language, engine.divide, job.split) for text in job.texts]
    sentences = [(sentence, "") for text in texts for sentence in text.sentences]
    first = 0
    for text, prefix in zip(texts, job.prefixes or [""] * len(texts), strict=True):
        if text.sentences:
            sentences[first] = text.sentences[0], prefix
        first += len(text.sentences)
    pieces = engine.tokenize(sentences, job.glossary, _options(engine.model, job))
    size = max((piece.terms.size for piece in pieces if piece.terms), default=0)
    if size > _TERMS:
        raise UserError(
            f"the glossary's terms of a sentence have {size} tokens in all forms, at most {_TERMS} are taken"
        )
    return texts, pieces


def _options(model: Any, job: TranslationRequest) -> Options:
    """Return the options for `generate()` that were given, and what they imply."""
    saved, beams = model.generation_config, job.beams
    if job.nbest > (beams or saved.num_beams or 1):
        beams = job.nbest
    options = {"length_penalty": job.length_penalty, "max_new_tokens": job.max_new_tokens, "num_beams": beams}
    if job.nbest != (saved.num_return_sequences or 1):
        options["num_return_sequences"] = job.nbest
    return tuple(sorted((name, value) for name, value in options.items() if value is not None))
