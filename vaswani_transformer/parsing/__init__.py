"""Constituency parsing (Section 6.3): trees, their linearization, the grammar of outputs, the parser, its scores.

Training and search are those of `training` and `model`; what is here is special to trees.
"""
