"""Documents (HTML, Markdown, subtitles, Word files) and messages: a reader finds what is translated; all else stays.

Callers pass what translates sentences: this room knows no model and prints nothing, for commands and servers alike.
"""
