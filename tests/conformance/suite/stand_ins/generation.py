"""Stands where upstream has `tests/generation/test_utils.py`, which the source distribution leaves out.

`ModelTesterMixin` only asks whether a tester of a model with `generate` inherits this class. Upstream's holds the tests
of `generate` themselves; nothing takes their place here, so that one test says nothing. Ours of `generate` are
`tests/model/test_generation.py` and `tests/model/test_huggingface.py`.
"""


class GenerationTesterMixin:
    """No tests: see above."""
