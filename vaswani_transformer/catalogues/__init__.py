"""Translators' catalogues: gettext, XLIFF and Qt Linguist's.

`formats` reads and fills a file by the reader of its format, whose base is in `catalogue`. Nothing here knows a model:
what fills entries is given.
"""
