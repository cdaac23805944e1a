"""Crash-safe, atomic writes of files and folders.

A URL such as `s3://bucket/folder` is a path as well, of universal_pathlib, which has the methods of `pathlib`.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import UserError, one_line

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # of a file system without locks
WRITING, REMOVING = ".writing-", ".removing-"  # before the names of what is not finished


def check_path(path: str | Path | None, name: str) -> None:
    """Raise `UserError` for an empty path, which would be the current folder; `name` is the option or argument."""
    if path is not None and not str(path):
        raise UserError(f"{name} is empty (an unset variable?): give a path, . for the current folder")


def is_url(name: str | Path) -> bool:
    """Return whether a name is a URL, such as `s3://bucket/file`."""
    return isinstance(name, str) and re.match(r"[a-z][a-z0-9+.-]*://", name) is not None


def to_path(name: str | Path) -> Path:
    """Return a path on this machine or, for a URL, one that fsspec reaches; a path stays as it is.

    Raises:
        UserError: for a URL of a kind that is not known, or whose package is not installed.
    """
    if not is_url(name):
        return Path(name) if isinstance(name, str) else name
    try:
        from fsspec import get_filesystem_class
        from fsspec.asyn import AsyncFileSystem
        from upath import UPath

        is_store = issubclass(get_filesystem_class(name.partition("://")[0]), AsyncFileSystem)
        # A store's listing must not be remembered: other machines write there too.
        path = UPath(name, **({"use_listings_cache": False} if is_store else {}))
        path.fs  # noqa: B018 - connects
    except ImportError as error:
        raise UserError(f"{name}: {one_line(error)} (pip install 'vaswani_transformer[remote]')") from error
    except ValueError as error:
        raise UserError(f"{name}: {one_line(error)}") from error
    return path


def is_local(path: Path) -> bool:
    """Return whether a path is of this machine's file system, not a URL."""
    return isinstance(path, Path)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finish(path: Path) -> None:
    """Wait until a new file is on the disk, with the permissions of any new file: some libraries write 0600."""
    if stat.S_IMODE(path.stat().st_mode) == 0o600:
        fresh = path.with_name(path.name + ".mode")
        fresh.touch()  # by the umask, which belongs to all threads, or by an access list of the folder
        path.chmod(stat.S_IMODE(fresh.stat().st_mode))
        fresh.unlink()
    sync(path)


def unfinished(path: Path) -> Path:
    """Return the name, in the same folder, that something has until it is whole."""
    return path.with_name(WRITING + path.name)


def map_in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Apply a function that waits for a disk or a store to each item, sixteen at a time."""
    with ThreadPoolExecutor(16) as executor:
        return list(executor.map(function, items))


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a name to write a file under; it replaces `path` once all of it is on the disk.

    A file for a store is written on this disk and sent there at the end.
    """
    if not is_local(path):
        with tempfile.TemporaryDirectory() as folder:
            yield (new := Path(folder) / path.name)
            path.fs.put_file(str(new), path.path)
        return
    new = unfinished(path.with_name(f"{path.name}.{os.getpid()}"))
    try:
        yield new
        finish(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file that at any moment holds the earlier text or all of the new one."""
    with written_whole(path) as new:
        new.write_text(text, encoding="utf-8")


def publish(folder: Path, final: Path) -> None:
    """Give a finished folder its final name, which is free; its files are on the disk before."""
    for path in list(folder.rglob("*")):
        sync(path) if path.is_dir() else finish(path)
    sync(folder)
    folder.rename(final)
    sync(final.parent)


def free_name(path: Path) -> Path:
    """Return `NAME.1`, or the first such name that is free."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.{number}")):
        number += 1
    return path.with_name(f"{path.name}.{number}")


def remove(folder: Path) -> None:
    """Remove a folder of unfinished work, if it is there; a removal that is cut off leaves nothing under its name."""
    doomed = folder.with_name(REMOVING + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove these files from a folder, in this order, and folders in it that are empty then.

    Other files stay, and no link in the folder is followed. Names are relative, with slashes.
    """
    paths = [folder.joinpath(*PurePosixPath(name).parts) for name in names if is_inner(name)]
    within = {path: [parent for parent in path.parents if folder in parent.parents] for path in paths}
    for path, parents in within.items():
        if path.is_file() and not any(place.is_symlink() for place in (path, *parents)):
            path.unlink()
    for parent in sorted({parent for parents in within.values() for parent in parents}, reverse=True):
        if not parent.is_symlink():
            with contextlib.suppress(OSError):  # not empty
                parent.rmdir()


def is_inner(name: str) -> bool:
    """Return whether a name that was read from a file stays within its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def place_files(folder: Path, final: Path, last: str = "") -> None:
    """Move the files of a folder into `final`, on the same disk, replacing those of the same names; `last` comes last.

    Its presence means that all are there.
    """
    final.mkdir(exist_ok=True)
    pending = unfinished(final / last) if last else None
    for path in list(folder.iterdir()):
        finish(path)
        path.replace(pending if path.name == last else final / path.name)
    folder.rmdir()
    sync(final)
    if last:
        pending.replace(final / last)
        sync(final)


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Remove what interrupted writes and removals left in a folder, all of it or that of one name."""
    for path in (*folder.glob(f"{WRITING}{name}*"), *folder.glob(f"{REMOVING}{name}*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal; a `.gz` file is not unpacked."""
    state = hashlib.sha256()
    with to_path(path).open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()
