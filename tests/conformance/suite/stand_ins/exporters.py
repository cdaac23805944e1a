"""Stands where upstream has `tests/exporters/test_export.py`, which the source distribution leaves out.

`ModelTesterMixin` inherits this class. Upstream's holds the tests of `torch.export`, ONNX and ExecuTorch; nothing takes
their place here. Ours of `torch.export` are in `tests/model/test_huggingface.py`.
"""


class ExportTesterMixin:
    """No tests: see above."""
