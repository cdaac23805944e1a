"""The models of a server: which languages they translate, and which of them are loaded."""

import asyncio
import contextlib
import logging
import math
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from babel import Locale, UnknownLocaleError
from starlette.exceptions import HTTPException

from ..data.text_files import home_path
from ..errors import UserError, one_line
from ..exported import is_exported
from ..hardware import control_group_limit
from ..hub.card_facts import known_languages
from .engine import Engine

_SHARE = 0.5  # of the memory, for all models
_LARGER = 2  # times its files: a model in memory, with its weights in the layout of the kernels
_CODE = r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*?"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A model that is served."""

    source: str  # code of the language
    target: str = field(compare=False)  # of a model with several targets, one of them; all have one engine
    folder: Path
    needs: str = ""  # of requests that CTranslate2 cannot follow: loaded for them whatever the precision is

    @property
    def name(self) -> str:
        """Source and target, as in `en-de`."""
        return f"{self.source}-{self.target}"

    @property
    def bytes(self) -> int:
        """Return about how much memory it takes."""
        with contextlib.suppress(OSError):
            return _LARGER * sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())
        return 0


def find_models(names: Sequence[str]) -> list[ServedModel]:
    """Return what is served, from folders, or languages and folders such as `en-de=FOLDER`.

    A missing folder is reported and left out, unless it is the only one. `UserError` also for a folder whose languages
    are not known, and languages that are given twice.
    """
    models: dict[str, ServedModel] = {}  # by name
    missing = []
    for name in names:
        match = re.fullmatch(rf"({_CODE})-(?!(?<=[a-z]-)[A-Z]{{2}}-[a-z]{{2,3}}[-=])({_CODE})=(.+)", name, re.DOTALL)
        folder = home_path(match[3] if match else name)  # no shell expands en-de=~/FOLDER
        if not folder.is_dir():
            missing.append(folder)
            continue
        languages = match.group(1, 2) if match else [*filter(None, known_languages(folder))]
        if len(languages) != 2:
            raise UserError(f"the languages of {folder} are not known: give them too, as in en-de={folder}")
        served = ServedModel(*(code.replace("_", "-") for code in languages), folder)
        if (other := models.setdefault(served.name.lower(), served)) is not served:
            raise UserError(f"{other.folder} and {folder} are both for {served.name}: give one of them")
    if not models:
        raise UserError(f"there is no model folder {', '.join(names)}: give the folder of a model")
    for folder in missing:
        logger.warning(f"there is no model folder {folder}: it is left out")
    return list(models.values())


def language_distance(*codes: str) -> float:
    """Return the share of subtags that two codes differ in, infinite for other languages or scripts (zh-TW, zh-CN)."""
    subtags = []  # language, script and region, as Unicode's CLDR completes them: of zh-TW zh, hant and tw
    for code in codes:
        with contextlib.suppress(ValueError, UnknownLocaleError):
            code = str(Locale.parse(code.replace("-", "_")))
        subtags.append(re.sub(r"^nb\b", "no", code.lower().replace("_", "-")).split("-"))
    differing = set(subtags[0]) ^ set(subtags[1])
    is_other = subtags[0][0] != subtags[1][0] or sum(len(subtag) == 4 for subtag in differing) == 2
    return math.inf if is_other else len(differing) / sum(map(len, subtags))


class Models:
    """Loads models when they are first asked for, and unloads the least recently used when there are too many.

    `load` starts the engine of a model, in a thread; `most` may be loaded, by default what fits half of the memory.
    """

    def __init__(self, models: Sequence[ServedModel], load: Callable[[ServedModel], Engine], most: int | None = None):
        self.served, self._load, self._most = models, load, most
        self.loaded: dict[ServedModel, Engine] = {}  # the least recently used first
        self._users: dict[ServedModel, int] = defaultdict(int)  # those that wait for it too
        self._loading: dict[ServedModel, asyncio.Task] = {}
        self._changing = asyncio.Lock()  # one model is loaded or unloaded at a time
        self._leaving: ServedModel | None = None  # takes no further users, and is unloaded after the last of them
        self._changed = asyncio.Event()  # there is a user less, or what was leaving is unloaded

    @property
    def pending(self) -> int:
        """Return the number of sentences that wait or are searched."""
        return sum(engine.pending for engine in self.loaded.values())

    @contextlib.asynccontextmanager
    async def engine(self, served: ServedModel, needs: str = "") -> AsyncIterator[Engine]:
        """Yield the engine of a model as `engine_of`, in float32 where CTranslate2 cannot follow what it `needs`."""
        if needs and is_exported(served.folder):
            raise HTTPException(400, f"an exported model cannot take or give {needs}: leave it out")
        ours = replace(served, needs="some requests")
        if not (needs and ours in self.loaded):
            async with self.engine_of(served) as engine:
                if not needs or engine.is_ours:
                    yield engine
                    return
        async with self.engine_of(ours) as engine:
            yield engine

    @contextlib.asynccontextmanager
    async def engine_of(self, served: ServedModel) -> AsyncIterator[Engine]:
        """Yield a model's engine, loaded while the body runs; `HTTPException` if it cannot be: the log says why."""
        while served == self._leaving:
            self._changed.clear()
            await self._changed.wait()
        self._users[served] += 1  # before it is loaded, or it could be unloaded before it is used
        try:
            while served not in self.loaded:
                if served not in self._loading:
                    self._loading[served] = asyncio.create_task(self._add(served))
                await asyncio.shield(self._loading[served])  # it is loaded also if who has asked for it has left
            engine = self.loaded[served] = self.loaded.pop(served)
            yield engine
        finally:
            self._users[served] -= 1
            self._changed.set()

    async def _add(self, served: ServedModel) -> None:
        try:
            async with self._changing:
                await self._make_room(served)
                self.loaded[served] = await asyncio.to_thread(self._load, served)
        except Exception as error:
            logger.error(f"the model for {served.name} cannot be loaded: {one_line(error)}")
            raise HTTPException(503, f"the model for {served.name} is not available") from error
        finally:
            del self._loading[served]
        logger.info(f"loaded {served.folder} for {served.name}")

    async def _make_room(self, served: ServedModel) -> None:
        """Unload models until there is room for another."""
        room = _SHARE * min(psutil.virtual_memory().total, control_group_limit("memory.max"))
        size = lambda: served.bytes + sum(other.bytes for other in self.loaded)  # noqa: E731
        while self.loaded and (size() > room if self._most is None else len(self.loaded) >= self._most):
            idle = (model for model in self.loaded if not self._users[model])
            self._leaving = oldest = next(idle, next(iter(self.loaded)))
            try:
                while self._users[oldest]:
                    self._changed.clear()
                    await self._changed.wait()
                await asyncio.to_thread(self.loaded.pop(oldest).close)
            finally:
                self._leaving = None
                self._changed.set()
            logger.info(f"unloaded {oldest.folder}")

    async def close(self) -> None:
        """Unload all, when what runs is finished."""
        for served in list(self.loaded):
            await asyncio.to_thread(self.loaded.pop(served).close)
