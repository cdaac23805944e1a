"""Files and folders that are there whole or not at all, after a crash or a power cut too."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

WRITING, REMOVING = ".writing-", ".removing-"  # before the names of what is not finished


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(path: Path) -> Path:
    """The name, in the same folder, that something has until it is whole."""
    return path.with_name(WRITING + path.name)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Name to write a file under; it gets its own, in place of an earlier file, once all of it is on the disk."""
    new = unfinished(path.with_name(f"{path.name}.{os.getpid()}"))
    try:
        yield new
        sync(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file that at any moment holds the earlier text or all of the new one."""
    with written_whole(path) as new:
        new.write_text(text, encoding="utf-8")


def publish(folder: Path, final: Path) -> None:
    """Give a finished folder its final name, in place of what may lie there; its files are on the disk before."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)
    remove(final)
    folder.rename(final)
    sync(final.parent)


def remove(folder: Path) -> None:
    """Remove a folder, if it is there; a removal that is cut off leaves nothing under its name."""
    doomed = folder.with_name(REMOVING + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def place_files(folder: Path, final: Path, last: str) -> None:
    """Move the files of a folder into `final`, on the same disk, replacing those of the same names; `last` comes last.

    Its being there means that all are.
    """
    pending = unfinished(final / last)
    for path in folder.iterdir():
        sync(path)
        path.replace(pending if path.name == last else final / path.name)
    folder.rmdir()
    sync(final)
    pending.replace(final / last)
    sync(final)


def remove_leftovers(folder: Path) -> None:
    """Remove what writing and removing left in a folder when they were cut off."""
    for path in (*folder.glob(f"{WRITING}*"), *folder.glob(f"{REMOVING}*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; a `.gz` file is not unpacked."""
    state = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()
