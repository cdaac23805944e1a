"""Translators' catalogues: gettext, XLIFF, Qt, Android, Java and Apple resources, JSON and YAML.

`formats` reads and fills a file by its format's reader, based on `catalogue`. No model is known: what fills is given.
"""
