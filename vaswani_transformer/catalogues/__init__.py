"""Translators' catalogues: gettext, XLIFF, Qt, Android, Java and Apple resources, JSON and YAML.

`formats` opens a file by the reader of its format. No model is known here: callers pass what fills entries.
"""
