"""LibreTranslate's translation of files: documents, and catalogues, of which what is missing is filled."""

import asyncio
import io
import secrets
import tempfile
import zipfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anyio import to_thread
from fastapi import APIRouter, HTTPException, Request, Response

from ..catalogues.formats import ENDINGS as CATALOGUES
from ..catalogues.formats import open_catalogue
from ..decoding.scoring import confidences
from ..documents.formats import ENDINGS as DOCUMENTS
from ..documents.formats import aligner, translate_document, translate_parts
from ..documents.messages import Messages
from ..errors import UserError, reading
from .libretranslate import distinct, fields_of
from .limiter import error_response
from .models import ServedModel
from .service import Service, TranslationsRequest

_MOST_FILES = 32  # that wait for their download; the oldest goes first
_AT_ONCE = 16  # sentences
_UNPACKED = 4  # times the bytes of a request: the most that an office file may have unpacked
_CANDIDATES = 4  # translations of a message, of which the first that is valid counts
_ENDINGS = {**DOCUMENTS, **CATALOGUES}

router = APIRouter(tags=["LibreTranslate"])


@router.post("/translate_file")
async def translate_file(request: Request) -> Any:
    """Translate a file, by the ending of its name; the answer says where it is."""
    service: Service = request.app.state.service
    fields = await fields_of(request, service.limits.body)
    service.check_key(request.headers, fields.get("api_key"))
    name = Path(getattr(fields.get("file"), "filename", None) or "").name
    ending = next((ending for ending in _ENDINGS if name.lower().endswith(ending)), None)
    if not ending:
        return error_response(400, f"Invalid request: file is to be one of {', '.join(_ENDINGS)}")
    if not fields.get("target"):
        return error_response(400, "Invalid request: target: Field required")
    served = service.model_for(str(fields.get("source", "auto")), str(fields["target"]))
    data = await fields["file"].read()
    service.note(request, served, [data.decode(errors="ignore")])
    work = _FileWork(service, served, str(fields["target"]))
    try:  # not in asyncio's own threads, of which there are few: the translations that this waits for need one
        result = await to_thread.run_sync(work.translate, data, name, ending, abandon_on_cancel=True)
    finally:
        work.is_over = True  # where a client has left, the thread stops at its next sentence
    files: dict[str, tuple[str, bytes]] = request.app.state.files
    files[token := secrets.token_urlsafe(16)] = name, result
    while len(files) > _MOST_FILES:
        del files[next(iter(files))]
    return {"translatedFileUrl": str(request.url_for("download_file", token=token, name=quote(name)))}


@router.get("/download_file/{token}/{name}")
async def download_file(request: Request, token: str, name: str) -> Response:
    """Return a translated file."""
    name, data = request.app.state.files.get(token, (None, b""))
    if name is None:
        return error_response(404, "this file is not here, or no longer")
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}"}
    return Response(data, media_type="application/octet-stream", headers=headers)


class _FileWork:
    """The translation of a file in a thread, which asks the event loop for translations of its sentences."""

    def __init__(self, service: Service, served: ServedModel, target: str):
        self.service, self.served, self.target = service, served, target
        self.is_over, self.loop = False, asyncio.get_running_loop()

    def translate(self, data: bytes, name: str, ending: str) -> bytes:
        """Return the file translated, whose name may have its language."""
        best = lambda texts: [versions[0] for versions in self._in_parts(self._translations, texts)]  # noqa: E731
        if ending in DOCUMENTS:
            self._check_unpacked(data)
            return translate_document(data, DOCUMENTS[ending], best, self._align, self.served.source)
        several = partial(self._in_parts, partial(self._translations, number=_CANDIDATES))
        place = partial(translate_parts, translate=best, align=self._align, language=self.served.source)
        sure = partial(self._in_parts, partial(self._call, confidences))
        messages = Messages(several, place, sure, self.served.name, self.service.memory, self.served.target)
        with tempfile.TemporaryDirectory() as folder:
            stem = name[: -len(ending)][-50:].replace("\0", "") or "file"
            (path := Path(folder) / f"{stem}{ending}").write_bytes(data)
            try:
                return open_catalogue(path, language=self.target).fill(messages)
            except UserError as error:  # which names the file
                raise HTTPException(400, f"Invalid request: {error}".replace(str(path), "the file")) from error

    def _check_unpacked(self, data: bytes) -> None:
        """Refuse an office file that is small only while it is packed."""
        if zipfile.is_zipfile(io.BytesIO(data)):
            with reading("the file"), zipfile.ZipFile(io.BytesIO(data)) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > (most := _UNPACKED * self.service.limits.body):
                raise HTTPException(413, f"the file has {size} bytes unpacked, at most {most} are taken")

    def _in_parts(self, function: Callable[..., Awaitable[list]], *texts: list[str]) -> list:
        """Return the results for parts of the texts, between which other requests have their turns."""
        results = []
        for start in range(0, len(texts[0]), _AT_ONCE):
            if self.is_over:
                raise HTTPException(499)
            part = (each[start : start + _AT_ONCE] for each in texts)
            results += asyncio.run_coroutine_threadsafe(function(*part), self.loop).result()
        return results

    async def _translations(self, texts: list[str], number: int = 1) -> list[list[str]]:
        if len(texts) > 1 and sum(map(len, texts)) > self.service.limits.characters:  # which are those of a request
            half = len(texts) // 2
            return await self._translations(texts[:half], number) + await self._translations(texts[half:], number)
        job = TranslationsRequest.model_construct(text=texts, nbest=number, split_sentences=False)
        async with self.service.translating(self.served, job) as work:
            return [distinct(*pair) for pair in zip(work.texts, await work.all(), strict=True)]

    def _align(self, sources: list[str], targets: list[str]) -> list:
        links = lambda model, tokenizer, *texts: aligner(model, tokenizer)(*texts)  # noqa: E731
        return self._in_parts(partial(self._call, links), sources, targets)

    async def _call(self, function: Callable, sources: list[str], targets: list[str]) -> Any:
        async with self.service.models.engine(self.served) as engine:
            coded = list(map(engine.codes(self.served.target).coded, sources))
            return await engine.call(function, engine.model, engine.tokenizer, coded, targets)
