"""A server: a loaded model that many requests share, the models of a server, and the HTTP interfaces.

`engine.py` batches and needs no web framework. Options and printing are in `cli/serve.py`.
"""
