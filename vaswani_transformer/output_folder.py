"""Folders that commands write: marked as ours, one writer at a time, files whole or not at all.

A hidden file in the folder, its mark, lists the names of the files that were written there. A folder that holds
something and has no mark is the user's and is refused; in a marked one only the listed names are replaced or removed.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from .distributed import is_first_process
from .errors import UserError, reading
from .files import WRITING, finish, remove_files, remove_leftovers, sync, write_text
from .json_and_yaml import read_json

logger = logging.getLogger(__name__)

RECORD, LOCK = ".vaswani_files.json", ".lock"
RECIPE = "recipe.yaml"  # in the folder of a training
OWN = (RECORD, LOCK)  # names that are nobody else's
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # of a file system without locks


@contextlib.contextmanager
def locked(folder: str | Path, name: str = LOCK) -> Iterator[None]:
    """Make a folder, and let no other process write it while the body runs; the system frees the lock of a dead one.

    A thread that holds the lock may take it again. At the end the lock file is removed, and a new folder that is empty.
    `UserError` for an empty path or a URL, a folder that another process writes, or that cannot be written to.
    """
    if not str(folder) or re.match(r"[a-z][a-z0-9+.-]+:/", str(folder)):  # of two slashes `Path` has left one
        raise UserError(f"output {folder} is {'a URL' if str(folder) else 'empty'}: give a folder on this machine")
    shown, folder = Path(folder), Path(folder).resolve()
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / name, timeout=0, is_singleton=True, fallback_to_soft=False)
    with reading(f"cannot write to output folder {shown}"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            advice = "wait until it has ended, or give another --output"
            raise UserError(f"another process is writing to {shown}: {advice}") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("this file system has no locks: let no other process write to %s meanwhile", shown)
    try:
        yield
    finally:
        if lock.lock_counter < 2:  # not within another body
            with contextlib.suppress(PermissionError):  # of Windows, where `release` removes it
                (folder / name).unlink(missing_ok=True)  # while locked: whoever opens it now finds that it has no name
        lock.release()
        with contextlib.suppress(OSError):  # not empty
            for path in new:
                path.rmdir()


def locked_together(folder: str | Path) -> contextlib.AbstractContextManager:
    """Lock as `locked`, for processes that were launched together and write one folder: the first of them does it."""
    return locked(folder) if is_first_process() else contextlib.nullcontext()


def is_empty(folder: Path, *others: str) -> bool:
    """Return whether a folder is missing or holds nothing but `others` and what an interrupted command has left."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return all(name in (*OWN, *others) or name.startswith(WRITING) for name in names)


class OutputFolder:
    """A folder that a command writes, and its mark, the list of the names that were written there.

    Names are relative, with slashes. The folder and those right below it may be links, to another disk.
    """

    def __init__(self, path: str | Path):
        self.path, self.shown = Path(path).resolve(), Path(path)
        mark, self.names = self.path / RECORD, {}  # the listed names, in their order; the values are None
        if mark.is_file():
            with reading(mark):  # a list of names; commit b26e237 wrote a dictionary by name
                names = read_json(mark)["files"]
                self.names = {name: None for name in names if not {"..", "/"} & set(Path(name).parts)}

    def check_ours(self, *others: str) -> None:
        """Raise `UserError` for a folder that holds something, `others` with marks of their own aside, and no mark."""
        if not (self.path / RECORD).is_file() and not is_empty(self.path, *others):
            problem = f"is not empty and was not written by this program (it has no {RECORD})"
            raise UserError(f"{self.shown} {problem}: give another --output")

    def check(self, names: Iterable[str]) -> None:
        """Raise `UserError` for the first of these names that is taken and not listed."""
        for name in names:
            if name not in self.names and os.path.lexists(self.path / name):
                fix = "move it, or give another --output"
                raise UserError(f"{self.shown / name} was not written by this program: {fix}")

    def note(self, names: Iterable[str] = ()) -> None:
        """Mark the folder, and list names before they are written: whenever all is cut off, what is there is listed."""
        self.names = self.names | OutputFolder(self.path).names | dict.fromkeys(names)
        remove_leftovers(self.path, RECORD)
        write_text(self.path / RECORD, json.dumps({"files": list(self.names)}, indent=1) + "\n")

    def claim(self, *names: str) -> None:
        """Check and list names that are about to be written; errors as in `check`."""
        self.check(names)
        self.note(names)

    def write_text(self, name: str, text: str) -> None:
        """Write a file, whole or not at all; errors as in `claim`."""
        self.claim(name)
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path / name, text)

    @contextlib.contextmanager
    def placing(self, within: str = "", last: str = "", stale: Iterable[str] = ()) -> Iterator[Path]:
        """Yield a new folder for files, which move here, or `within` a folder here, when the body has written them all.

        The file `last` means that all are there. Before them those of `stale` that are listed are removed: what stays
        of them would not fit the new files. Errors as in `claim`.
        """
        final = self.path / within
        staging = (final.parent if within else final) / f"{WRITING}files"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            yield staging
            names = (path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file())
            names = sorted(names, key=lambda name: name == last)
            self.claim(*((Path(within) / name).as_posix() for name in names))
            self.remove(stale)
            for name in names:
                finish(staging / name)
                if name == last:
                    sync(final)
                (final / name).parent.mkdir(parents=True, exist_ok=True)
                (staging / name).replace(final / name)
            sync(final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of these files that are listed, and folders below this one that are empty then."""
        for name in filter(self.names.__contains__, names):
            top, _, inner = name.partition("/")
            remove_files((self.path / top).resolve() if inner else self.path, [inner or name])
            if inner:
                with contextlib.suppress(OSError):  # not empty, or a link
                    (self.path / top).rmdir()


@contextlib.contextmanager
def written_at_once(output: str | Path, overwrite: bool, last: str, kind="", no=(RECIPE,)) -> Iterator[Path]:
    """Yield a folder for the files of a model, which move to `output` at the end; `last` means that all are there.

    With `overwrite` they replace all that is listed, if `kind` is (by default `last`) and `no`, of a training, are not.
    Errors as in `locked`; `UserError` for an output that holds something else, or something without `overwrite`.
    """
    with locked(output):
        folder = OutputFolder(output)
        is_kind = (kind or last) in folder.names and folder.names.keys().isdisjoint(no)
        if not is_empty(folder.path) and not (overwrite and is_kind):
            advice = "--overwrite replaces what this command wrote there" if is_kind else "it holds something else"
            raise UserError(f"output {output} is not empty: give another folder ({advice})")
        with folder.placing(last=last, stale=folder.names) as staging:
            yield staging
