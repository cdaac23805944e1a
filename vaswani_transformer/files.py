"""Crash-safe, atomic writes of files and folders.

A URL such as `s3://bucket/folder` is a path as well, of universal_pathlib, which has the methods of `pathlib`.
"""

import contextlib
import glob
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import reading

WINDOWS = os.name == "nt"
WRITING, REMOVING = ".writing-", ".removing-"  # before the names of what is not finished


def to_path(name: str | Path) -> Path:
    """Return a path on this machine or, for a URL, one that fsspec reaches; a path stays as it is.

    `UserError` for a URL of a kind that is not known, or whose package is not installed.
    """
    if not isinstance(name, str):
        return name
    if "://" not in name:
        return Path(name)
    with reading(f"{name} (pip install 'vaswani_transformer[remote]')"):
        from fsspec import get_filesystem_class
        from fsspec.asyn import AsyncFileSystem
        from upath import UPath

        is_store = issubclass(get_filesystem_class(name.partition("://")[0]), AsyncFileSystem)
        # A store's listing must not be remembered: other machines write there too.
        path = UPath(name, **({"use_listings_cache": False} if is_store else {}))
        path.fs  # noqa: B018 - connects
    return path


def cache_folder(name: str) -> Path:
    """Return a folder of ours in the user's cache (`$XDG_CACHE_HOME`, by default `~/.cache`), made if needed."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vaswani_transformer" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_local(path: Path) -> bool:
    """Return whether a path is of this machine's file system, not a URL."""
    return isinstance(path, Path)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if WINDOWS and path.is_dir():  # which cannot be opened there
        return
    descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)  # Windows flushes only what may be written
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
    new = path.with_name(f"{WRITING}{path.name}.{os.getpid()}")
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


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove these files from a folder, in this order, and folders in it that are empty then.

    Other files stay, and so does what a name or a link leads to outside of the folder. Names are relative.
    """
    for path in (folder / name for name in names):
        if path.parent.resolve().is_relative_to(folder.resolve()):
            if path.is_file() and not path.is_symlink():
                path.unlink()
            with contextlib.suppress(OSError):  # not empty, or a link
                while (path := path.parent) != folder:
                    path.rmdir()


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Remove what interrupted writes left in a folder, all of it or that of one name."""
    for path in folder.glob(f"{WRITING}{glob.escape(name)}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal; a `.gz` file is not unpacked."""
    with to_path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
