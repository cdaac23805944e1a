"""What the HTTP interfaces share: requests within limits become translations of their sentences."""

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
from ..errors import UserError
from .engine import Engine, Options
from .models import ModelPlace, Models
from .text import SplitText

logger = logging.getLogger(__name__)

_PAGES = 2  # of attention that are made at once, since each takes much memory
_TERMS = 128  # tokens of a sentence's terms in a glossary: each makes every step of its search longer


@dataclass(frozen=True)
class Limits:
    """What the server takes."""

    characters: int = 50_000  # of a request
    queue: int = 10_000  # requests, and sentences, that are under way at once
    seconds: float = 60.0  # for a request, from its first byte to the last of its answer

    @property
    def body(self) -> int:
        """Bytes of a request's body: a character has at most twelve, as two escapes of a form or of JSON."""
        return 12 * self.characters + 65_536


@dataclass(frozen=True)
class Wish:
    """What is to be translated, and how; what is None is as the model was saved."""

    texts: Sequence[str]
    prefixes: Sequence[str] | None = None  # the beginning of each text's translation
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
        """What CTranslate2 cannot follow."""
        asked = {"a glossary": self.glossary, "a prefix": any(self.prefixes or ()), "alignments": self.alignments}
        return next((name for name, value in asked.items() if value), "")


class Translating:
    """A request at work: its texts, and the hypotheses of their sentences."""

    def __init__(self, engine: Engine, texts: list[SplitText], pieces: list[Piece], options: Options, scores: bool):
        self.engine, self.texts, self._pieces, self._options, self._scores = engine, texts, pieces, options, scores
        self._places = [(number, place) for number, text in enumerate(texts) for place in range(len(text.sentences))]

    async def sentences(self) -> AsyncIterator[tuple[int, int, list[Hypothesis]]]:
        """The number of a text, of its sentence, and the sentence's hypotheses, best first, as they are ready."""
        found = self.engine.translate(self._pieces, self._options, self._scores)
        async with contextlib.aclosing(found):
            async for number, hypotheses in found:
                known = [one for one in hypotheses if one.tokens]  # fewer may be possible than are asked for
                yield *self._places[number], known or hypotheses[:1]

    async def all(self) -> list[list[list[Hypothesis]]]:
        """The hypotheses of each sentence of each text."""
        results = [[[] for _ in text.sentences] for text in self.texts]
        async with contextlib.aclosing(self.sentences()) as found:
            async for number, place, hypotheses in found:
                results[number][place] = hypotheses
        return results


class Service:
    """Takes requests for the models of a server; `keys` are API keys, one of which each needs, if there are any."""

    def __init__(self, models: Models, limits: Limits, keys: Collection[str] = ()):
        self.models, self.limits = models, limits
        self.attending = asyncio.Semaphore(_PAGES)
        self._keys = [_digest(key) for key in keys]

    @property
    def needs_key(self) -> bool:
        """Whether a translation needs an API key."""
        return bool(self._keys)

    def check_key(self, headers: Mapping[str, str], key: Any = None) -> None:
        """Raise `HTTPException` without a key that is known, given here or as `Authorization: Bearer KEY`."""
        if not self._keys:
            return
        if not key:
            key = headers.get("authorization", "").partition("Bearer ")[2].strip()
        if not key:
            raise HTTPException(400, "Please contact the server operator to get an API key")
        given = _digest(str(key))
        if not any(hmac.compare_digest(given, known) for known in self._keys):
            raise HTTPException(403, "Invalid API key")

    def note(self, request, place: ModelPlace, texts: Sequence[str]) -> None:
        """Note for log and metrics what a request is about."""
        size = sum(map(len, texts))
        request.app.state.metrics.characters.labels(place.name).inc(size)
        request.state.notes.update(model=place.name, characters=size, texts=texts)

    def place(self, source: str, target: str) -> ModelPlace:
        """The model from one language to another; the source may be `auto` if only one model has the target.

        Raises:
            HTTPException: there is none.
        """
        places = self.models.places
        if source.lower() == "auto":
            known = [place for place in places if place.target.lower() == target.lower()]
            if len(known) > 1:
                languages = ", ".join(place.source for place in known)
                raise HTTPException(400, f"auto is not supported for {target}: source must be one of {languages}")
            if known:
                return known[0]
        elif place := self.models.find(source, target):
            return place
        for code, side in ((source, "source"), (target, "target")):
            if code.lower() not in {"auto", *(getattr(place, side).lower() for place in places)}:
                raise HTTPException(400, f"{code:.20} is not supported")
        raise HTTPException(400, f"{target} is not available as a target language from {source}")

    def check(self, texts: Sequence[str]) -> None:
        """Raise `HTTPException` for texts that are too long or cannot be encoded."""
        size = sum(map(len, texts))
        if size > self.limits.characters:
            limit = self.limits.characters
            raise HTTPException(400, f"Invalid request: request ({size}) exceeds text limit ({limit})")
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise HTTPException(400, "Invalid request: the text has half a surrogate pair") from error

    @contextlib.asynccontextmanager
    async def translating(self, place: ModelPlace, wish: Wish) -> AsyncIterator[Translating]:
        """Tokenise what is to be translated, with the model loaded.

        Raises:
            HTTPException: texts that are too long, a queue that is full, or a model that cannot be loaded.
            UserError: for a beginning that is too long, or a glossary that the model cannot follow.
        """
        terms = wish.glossary.terms.values() if wish.glossary else ()
        glossary = [text for term in terms for text in (term.source, *term.targets)]
        self.check([*wish.texts, *(wish.prefixes or []), *glossary])
        async with self.models.engine(place, wish.needs) as engine:
            texts, pieces = await asyncio.to_thread(_prepare, engine, place.source, wish)
            pending = self.models.pending
            if pending and pending + len(pieces) > self.limits.queue:
                raise full()
            yield Translating(engine, texts, pieces, _options(engine.model, wish), wish.scores)


def texts_of(value: Any, name: str) -> list[str]:
    """A text, or a list of them, as a list."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise HTTPException(400, f"Invalid request: {name} parameter is not a text or a list of texts")
    return texts


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def full() -> HTTPException:
    """The refusal of a request for which there is no place."""
    return HTTPException(503, "the server has too much to do: try again later", {"Retry-After": "1"})


def _prepare(engine: Engine, language: str, wish: Wish) -> tuple[list[SplitText], list[Piece]]:
    texts = [SplitText(text, language, engine.divide, wish.split) for text in wish.texts]
    sentences = [(sentence, "") for text in texts for sentence in text.sentences]
    first = 0
    for text, prefix in zip(texts, wish.prefixes or [""] * len(texts), strict=True):
        if text.sentences:
            sentences[first] = text.sentences[0], prefix
        first += len(text.sentences)
    pieces = engine.tokenize(sentences, wish.glossary, _options(engine.model, wish))
    for piece in pieces:
        if piece.terms and piece.terms.size > _TERMS:
            raise UserError(
                f"the terms that the glossary has for a sentence have {piece.terms.size} tokens in all forms, and at"
                f" most {_TERMS} are taken: leave some out"
            )
    return texts, pieces


def _options(model: Any, wish: Wish) -> Options:
    """Options for `generate()`: those given, and what they ask for."""
    own, beams = model.generation_config, wish.beams
    if wish.nbest > (beams or own.num_beams or 1):
        beams = wish.nbest
    options = {"length_penalty": wish.length_penalty, "max_new_tokens": wish.max_new_tokens, "num_beams": beams}
    if wish.nbest != (own.num_return_sequences or 1):
        options["num_return_sequences"] = wish.nbest
    return tuple(sorted((name, value) for name, value in options.items() if value is not None))
