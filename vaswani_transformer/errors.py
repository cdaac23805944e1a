"""The boundary of errors: the one exception for mistakes that a user can fix, and what libraries raise, on one line."""

import contextlib
import errno
from collections.abc import Iterator
from os import PathLike

# The machine's troubles, which another file would not cure: `main` reports them with status 1.
_OF_THE_MACHINE = {
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ESTALE,
}


class UserError(ValueError):
    """An expected mistake in what the user gave: files, options, folders.

    The message is one line that says what was given, which rule it breaks and how to fix it. The command line prints
    it as ``error: ...`` and exits with status 2; in a program it is an ordinary `ValueError`.
    """


@contextlib.contextmanager
def reading(path: str | PathLike) -> Iterator[None]:
    """Report whatever a library raises over a user's file as a mistake in that file.

    Every read of a file that a user gave runs inside this context, so that no reader needs refusals of its own.

    Args:
        path: the file or folder that the body reads, for the message.

    Raises:
        UserError: `PATH: REASON`, where the reason is the library's own, on one line. A `UserError` of the body passes
            through unchanged, as do an interruption and the machine's own troubles (memory, a full or failing disk).
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        if error.errno in _OF_THE_MACHINE:
            raise
        reason = error.strerror or one_line(error.__cause__ or error)  # a store's own error has the name alone
        raise UserError(f"{path}: {reason}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise UserError(f"{path}: {one_line(error) or type(error).__name__}") from error


def is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust gave up: its class is no `Exception` and cannot be imported."""
    return type(error).__name__ == "PanicException"


def one_line(error: Exception, limit: int = 500) -> str:
    """The message of another library's error on one line of at most `limit` characters.

    A configuration's checks wrap the error that says what is wrong in one that names the check: the former counts.
    """
    if type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:  # of huggingface_hub
        error = error.__cause__
    text = f"there is no entry {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())[:limit]


def shortened(text: str, limit: int = 300) -> str:
    """A text of about `limit` letters at most: where it is longer, its beginning and its end."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
