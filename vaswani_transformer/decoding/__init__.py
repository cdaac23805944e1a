"""Text in, text out: translating sentences and files of any size, scoring pairs, ensembles, faster CPU inference.

The search itself travels with the model and so lives in `model`.
"""
