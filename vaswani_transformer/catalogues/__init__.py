"""Translators' catalogues: gettext, XLIFF, Qt, Android, Java and Apple resources, JSON and YAML.

`formats` reads and fills a file by the reader of its format, whose base is in `catalogue`. Nothing here knows a model:
what fills entries is given.
"""
