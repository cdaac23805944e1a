"""Documents: texts with paragraphs and markup, as HTML, Markdown, subtitles and Word files.

A reader for each format finds what is to be translated; all else stays byte for byte. Callers pass the function that
translates sentences: this room knows no model and prints nothing, so that commands and servers use it alike.
"""
