"""Folders that commands write: one process at a time, and only what it provably wrote there is replaced or removed.

A hidden file in the folder lists size and SHA-256 of each file that was written. A file is ours while it is listed and
unchanged. One that is listed and was changed since is set aside where its name is needed. All others are the user's: a
command that would have to replace one of them is refused.
"""

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout

from .distributed import Processes
from .errors import UserError
from .files import (
    REMOVING,
    WRITING,
    check_no_locks,
    check_path,
    file_sha256,
    finish,
    is_inner,
    place_files,
    publish,
    remove,
    remove_files,
    remove_leftovers,
    set_aside,
    sync,
    unfinished,
    write_text,
)
from .json_and_yaml import parse_json, read_json

logger = logging.getLogger(__name__)

RECORD, LOCK = ".vaswani_files.json", ".lock"
SHARING_SECONDS = 60.0  # NFS may hide for so long what another machine has made (its option acdirmax)
OWN = (RECORD, LOCK)  # names that are nobody else's
_held: dict[Path, int] = {}  # locks of this process, and the threads that took them


def is_first_process() -> bool:
    """Whether this is the only process or the first of those that were launched together: the one that writes."""
    return os.environ.get("RANK", "0") == "0"  # set by accelerate launch and torchrun


@contextlib.contextmanager
def locked(folder: str | Path, name: str = LOCK) -> Iterator[None]:
    """Make a folder, and let no other process write it while the body runs; the system frees the lock of a dead one.

    A body within the body of the same thread may lock it again. In the end the lock file is removed, and the folder if
    it is new and nothing was written.

    Raises:
        UserError: for an empty path or a URL, a folder that another process writes, or one that cannot be made or
            written to.
    """
    check_path(folder, "output")
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(folder)):  # of two slashes `Path` has left one
        raise UserError(f"output {folder} is a URL: give a folder on this machine, and upload it when it is done")
    shown, folder = Path(folder), Path(folder).resolve()
    if _held.get(folder / name) == threading.get_ident():
        yield
        return
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not folder.is_dir() and shown.is_symlink():
        raise UserError(f"output {shown} is a link that leads to no folder: give a folder")
    if not above.is_dir():
        what = "is a file: give a folder" if above == folder else f"lies below {above}, which is a file: give another"
        raise UserError(f"output {shown} {what}")
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / name, timeout=0, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # Timeout is one
        if isinstance(error, Timeout):
            raise UserError(
                f"another process is writing to {shown}: wait until it has ended, or give another --output"
            ) from error
        try:
            check_no_locks(error)
        except OSError:
            _remove_empty(new)
            raise UserError(f"cannot write to output folder {shown}: {error.strerror}") from error
    _held[folder / name] = threading.get_ident()
    try:
        yield
    except Exception as error:
        number = _disk_error(error)
        if number is None or getattr(error, "filename", None):
            raise
        raise OSError(number, os.strerror(number), str(shown)) from error  # with the place, which some leave out
    finally:
        del _held[folder / name]
        with contextlib.suppress(OSError):
            (folder / name).unlink()  # while it is locked: who opens it now will find that it has no name
        lock.release()
        _remove_empty(new)


def locked_together(folder: str | Path) -> contextlib.AbstractContextManager:
    """As `locked`, for processes that were launched together and write one folder: the first of them locks it."""
    return locked(folder) if is_first_process() else contextlib.nullcontext()


def check_shared(folder: str | Path, processes: Processes) -> None:
    """Refuse a folder that is not on all machines the one that process 0 has locked; all processes call this.

    Process 0 writes a file there for a moment, and the first process of each other machine looks for it. Where there is
    one machine nothing happens.

    Raises:
        UserError: on a machine that sees another folder, with its name.
    """
    if processes.is_on_one_machine:
        return
    file = unfinished(Path(folder) / secrets.token_hex(8))  # a name that no machine has looked for and remembers

    def write() -> tuple[str, str]:
        file.touch()
        return file.name, socket.gethostname()

    try:
        name, host = processes.share("file in the output folder", write)
        if processes.rank != 0 and processes.is_first_of_machine and not _appears(Path(folder) / name):
            raise UserError(
                f"{Path(folder).absolute()} on {socket.gethostname()} is not the folder that process 0 sees on {host}:"
                " give an --output that all machines share, under the same path on each"
            )
        processes.wait_for_all("output folder")
    finally:
        file.unlink(missing_ok=True)


def _appears(path: Path) -> bool:
    """Whether a file is there, or comes within the time that a network's file system may need."""
    until = time.monotonic() + SHARING_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def is_empty(folder: Path) -> bool:
    """Whether nothing is in a folder but what a command that was cut off while it wrote here has left."""
    return all(path.name in OWN or path.name.startswith((WRITING, REMOVING)) for path in folder.iterdir())


def _disk_error(error: Exception) -> int | None:
    """The system's number for a full disk, also where a library in Rust has put it into a text."""
    in_text = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(in_text[1]) if in_text else None
    return number if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else None


def _remove_empty(folders: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


class OutputFolder:
    """A folder that a command writes, and the record of the files that are ours in it.

    Names are relative, with slashes. The folder may be a link, and so may the folders right below it, which a user puts
    on another disk. A log, which grows while a program runs, is ours as long as it begins as one.
    """

    def __init__(self, path: str | Path):
        self.path, self.shown = Path(path).resolve(), Path(path)
        # By name: size and SHA-256 of what it has held; None for one that grows.
        self._versions: dict[str, list] = self._recorded()

    def _recorded(self) -> dict[str, list]:
        try:
            files = read_json(self.path / RECORD, "remove it")["files"]
            return {
                name: [one for one in versions if one is None or len(one) == 2]
                for name, versions in files.items()
                if is_inner(name)
            }
        except (OSError, UserError, KeyError, TypeError, AttributeError):
            return {}  # none, or damaged: then nothing is known to be ours

    def __contains__(self, name: str) -> bool:
        """Whether a file of this name was written here, whatever it holds now."""
        return name in self._versions

    def names(self, folder: str = "") -> list[str]:
        """The names of files that were written here, or below a folder in it."""
        return [name for name in self._versions if name.startswith(folder)]

    def is_ours(self, name: str) -> bool:
        """Whether a file is there as it was written; a link is not."""
        path, versions = self.path / name, self._versions.get(name, ())
        if path.is_symlink() or not path.is_file():
            return False
        if None in versions:
            return is_log(path)
        size = path.stat().st_size
        digests = [digest for bytes_, digest in versions if bytes_ == size]
        return bool(digests) and file_sha256(path) in digests

    def check(self, names: Iterable[str]) -> None:
        """Raise `UserError` for the first of these names that is taken by what was never ours."""
        for name in names:
            if name not in self and os.path.lexists(self.path / name):
                raise UserError(
                    f"{self.shown / name} was not written by this program: move it, or give another --output"
                )

    def make_way(self, names: Iterable[str]) -> None:
        """Set aside what has one of these names, was written here and has been changed since.

        Raises:
            UserError: as `check`; nothing is set aside then.
        """
        names = list(names)
        self.check(names)
        for name in names:
            if os.path.lexists(self.path / name) and not self.is_ours(name):
                kept = set_aside(self.path / name)
                logger.warning("%s was changed since it was written: kept as %s", self.shown / name, kept.name)

    def adopt(self, names: Iterable[str]) -> None:
        """Take files for ours as they are, in a folder that is ours by other evidence."""
        for path in (self.path / name for name in names if name not in self):
            if path.is_file() and not path.is_symlink():
                self._versions[path.relative_to(self.path).as_posix()] = [_version(path)]

    def note(self, files: dict[str, Path | None]) -> None:
        """List files that are about to get these names, by where they lie now; None for one that will grow.

        First, so that a file that is there is ours whenever the program is cut off.
        """
        self._versions |= self._recorded()
        for name, path in files.items():
            version = None if path is None else _version(path)
            now = self.path / name
            size = now.stat().st_size if now.is_file() else None
            earlier = [one for one in self._versions.get(name, ()) if one != version and (one or [size])[0] == size]
            self._versions[name] = [*earlier, version]
        write_text(self.path / RECORD, json.dumps({"files": self._versions}, indent=1) + "\n")

    def move(self, new: Path, name: str) -> None:
        """Give a finished file on the same disk its name here.

        Raises:
            UserError: as `check`.
        """
        finish(new)
        self.make_way([name])
        self.note({name: new})
        new.replace(self.path / name)
        sync((self.path / name).parent)

    def write_text(self, name: str, text: str) -> None:
        """Write a file, whole or not at all, unless it holds just this already."""
        path = self.path / name
        if path.is_symlink() or not path.is_file() or path.read_bytes() != text.encode("utf-8"):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = unfinished(path)
            try:
                new.write_text(text, encoding="utf-8")
                self.move(new, name)
            finally:
                new.unlink(missing_ok=True)
        elif not self.is_ours(name):
            self.note({name: path})

    @contextlib.contextmanager
    def staging(self, within: str = "") -> Iterator[Path]:
        """A new folder here, or `within` one here, for files to `place` once all are there; removed at the end."""
        remove_leftovers(self.path, RECORD)
        folder = unfinished(self.path / within / "files")
        remove(folder)
        folder.mkdir()
        try:
            yield folder
        finally:
            remove(folder)

    def place(self, staging: Path, last: str, stale: Iterable[str] = ()) -> None:
        """Move files here from a folder on the same disk, which is removed; `last` comes last.

        Before them those of `stale` that are ours are removed: what stays of them would not fit the new files.

        Raises:
            UserError: as `check`.
        """
        files = {path.name: path for path in staging.iterdir()}
        self.make_way(files)
        self.note(files)
        self.remove(stale)
        place_files(staging, self.path, last)

    def publish(self, staging: Path, name: str) -> None:
        """Give a finished folder its name here; what lies under it is set aside."""
        self.note({f"{name}/{path.name}": path for path in staging.iterdir()})
        publish(staging, self.path / name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of these files that are ours, and folders below this one that are empty then.

        Those that were changed are set aside, others stay.
        """
        names = [name for name in names if name in self]
        for name in names:
            top, _, inner = name.partition("/")
            within = [self.path / parent for parent in PurePosixPath(name).parents][:-2]
            if any(parent.is_symlink() for parent in within):
                continue
            if not self.is_ours(name):
                self.make_way([name])
            elif inner:
                remove_files((self.path / top).resolve(), [inner])
            else:
                remove_files(self.path, [name])
        for top in {name.partition("/")[0] for name in names if "/" in name}:
            with contextlib.suppress(OSError):  # not empty, or a link
                (self.path / top).rmdir()


def _version(path: Path) -> list:
    return [path.stat().st_size, file_sha256(path)]


def is_log(path: Path) -> bool:
    """Whether a file begins as a training's log, if with half a line; what follows may be damaged."""
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    text = line.decode("utf-8", errors="replace").rstrip("\0\n")  # a power cut may leave zeros
    try:
        return not text or {"step", "seconds"} <= parse_json(text, finite=False).keys()
    except (ValueError, AttributeError):
        start = '{"step": '
        return not line.endswith(b"\n") and start.startswith(text[: len(start)])
