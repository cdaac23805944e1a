"""The one exception for mistakes that a user can mend."""


class UserError(ValueError):
    """An expected mistake in what the user gave: files, options, folders.

    The message is one line that says what was given, which rule it breaks and how to mend it. The command line prints
    it as ``error: ...`` and exits with status 2; in a program it is an ordinary `ValueError`.
    """
