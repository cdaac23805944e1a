"""The boundary of errors: the one exception for mistakes that a user can fix, and what libraries raise, on one line."""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path

# The machine's troubles, which another file would not cure: `main` reports them with status 1.
_OF_THE_MACHINE = {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class UserError(ValueError):
    """An expected mistake in what the user gave: files, options, folders.

    The message is one line. The command line prints it as ``error: ...`` and exits with status 2.
    """


@contextlib.contextmanager
def reading(path: str | PathLike) -> Iterator[None]:
    """Report whatever a library raises over a user's file as a mistake in that file.

    Every read of a file that a user gave runs inside this context, so that no reader needs refusals of its own.

    The `UserError` is `PATH: REASON`, where the reason is the library's own, on one line. A `UserError` of the body
    passes through unchanged, as do an interruption and the machine's troubles (memory, a full disk, a cache).
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "DatasetGenerationError":  # of `datasets`, which wraps what other libraries raise
            error = error.__cause__ or error
        passes = isinstance(error, UserError | MemoryError) or getattr(error, "errno", None) in _OF_THE_MACHINE
        if passes or is_of_cache(error, str(path)) or not (isinstance(error, Exception) or is_panic(error)):
            raise error
        reason = getattr(error, "strerror", None)
        if not reason:  # a store's own error has the name alone
            cause = error.__cause__ if isinstance(error, OSError) else None
            reason = one_line(cause or error) or type(error).__name__
            reason = "empty" if isinstance(error, StopIteration) else reason  # its first item was asked for
        raise UserError(f"{path}: {reason}") from error


def items_of(values: Iterable) -> Iterable:
    """Return what to iterate over, one string or path alone; `UserError` for a table, which yields its columns."""
    if isinstance(values, Mapping) or hasattr(values, "columns"):
        raise UserError(f"a {type(values).__name__} is given in place of texts: give one of its columns")
    return [values] if isinstance(values, str | PathLike) else values


def texts_in(texts: str | Iterable[str], what: str = "text", first: int = 1) -> list[str]:
    """Return texts as a list, one string as a list of it alone, as tokenizers take them; numbered from `first`.

    `UserError` names the number of None, NaN, a row of a dataset or anything else that is no string.
    """
    texts = list(items_of(texts))
    for number, text in enumerate(texts, first):
        if not isinstance(text, str):
            raise UserError(f"{what} {number} is {text!r:.60}, not text: give strings, of a dataset one column")
    return texts


def is_of_cache(error: BaseException, path: str = "") -> bool:
    """Return whether, while `path` was read, a library could not open or make a file or folder of its cache."""
    names = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")
    caches = [Path(name).expanduser() for name in (*filter(None, map(os.environ.get, names)), "~/.cache")]
    file = Path(str(getattr(error, "filename", None) or path))
    related = (cache for cache in caches if file.is_relative_to(cache) or cache.is_relative_to(file))
    return any(str(cache) not in path and str(file) not in path for cache in related)


def is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust gave up: its class is no `Exception` and cannot be imported."""
    return type(error).__name__ == "PanicException"


def is_failed_write(error: BaseException) -> bool:
    """Return whether a file could not be written, as the system, torch or a library in Rust reports it."""
    words = ("PytorchStreamWriter", "unexpected pos", "iostream error", "(os error ", "SafetensorError")
    return isinstance(error, OSError) or any(each in f"{type(error).__name__} {error}" for each in words)


def one_line(error: Exception, limit: int = 500) -> str:
    """Return the message of another library's error on one line of at most `limit` characters.

    A configuration's checks wrap the error that says what is wrong in one that names the check: the former counts.
    """
    if type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:  # of huggingface_hub
        error = error.__cause__
    text = f"there is no entry {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())[:limit]


def shortened(text: str, limit: int = 300) -> str:
    """Return a text of at most about `limit` characters: of a longer one the start and the end."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
