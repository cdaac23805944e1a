"""The one exception for mistakes that a user can fix, and other libraries' errors in one line."""

from huggingface_hub.errors import StrictDataclassError


class UserError(ValueError):
    """An expected mistake in what the user gave: files, options, folders.

    The message is one line that says what was given, which rule it breaks and how to fix it. The command line prints
    it as ``error: ...`` and exits with status 2; in a program it is an ordinary `ValueError`.
    """


def one_line(error: Exception, limit: int = 500) -> str:
    """The message of another library's error on one line of at most `limit` characters.

    A configuration's checks wrap the error that says what is wrong in one that names the check: the former counts.
    """
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    text = f"there is no entry {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())[:limit]


def shortened(text: str, limit: int = 300) -> str:
    """A text of about `limit` letters at most: where it is longer, its beginning and its end."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
