"""Recipes: all settings of a run under one name, with the YAML files of those that are shipped.

Reading and checking settings lives here; what a run does with them lives in `training`.
"""
