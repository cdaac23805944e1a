"""The code that travels to the Hub beside the weights: configuration, layers, model, search, pipelines.

The files import installed libraries and each other only, so that a saved model runs where this package is not
installed (`trust_remote_code=True`). Training, and decoding with this package at hand, live in rooms of their own.
"""
