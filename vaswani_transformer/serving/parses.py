"""Trees of sentences, where a parser is served (Section 6.3)."""

from typing import Annotated

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from ..parsing.trees import words_of
from .engine import Engine
from .service import Service, texts_of

router = APIRouter(tags=["parses"])


class ParsesRequest(BaseModel):
    """Sentences to parse."""

    model_config = ConfigDict(extra="forbid")

    text: str | Annotated[list[str], Field(min_length=1)] = Field(
        description="a sentence, words and punctuation marks separated by spaces, or several", examples=["Dogs bark ."]
    )


class ParseAnswer(BaseModel):
    """A sentence with its tree."""

    words: list[str]
    tree: str | None = Field(description="in brackets, as `vaswani parse predict` writes it; null for no words")


class ParsesAnswer(BaseModel):
    """The trees of all sentences of a request."""

    parses: list[ParseAnswer]


@router.post("/v1/parses")
async def parse(request: Request, body: ParsesRequest) -> ParsesAnswer:
    """Parse sentences with the parser that is served."""
    service: Service = request.app.state.service
    service.check_key(request.headers)
    texts, served = texts_of(body.text), service.models.parser
    service.check(texts)
    if served is None:
        raise HTTPException(400, "no parser is served: give the server the folder of `vaswani parse train`")
    service.note(request, served, texts)
    async with service.models.engine(served, "parses") as engine:
        return ParsesAnswer(parses=[await engine.call(_parse, engine, words_of(text)) for text in texts])


def _parse(engine: Engine, words: list[str]) -> ParseAnswer:
    (parsed,) = engine.parser.parse([words])
    return ParseAnswer(words=words, tree=None if parsed.tree is None else str(parsed.tree))
