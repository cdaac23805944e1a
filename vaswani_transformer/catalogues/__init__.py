"""Translators' catalogues: gettext, XLIFF, Qt, Android, Java and Apple resources, JSON and YAML.

`formats` reads and fills a file by its format's reader, based on `catalogue`. It knows no model: callers pass what fills.
"""
