"""A device that computes nothing, and notes each operation that would wait for a real one.

The device is torch's meta device: whatever a program asks of it, it can only ask for shapes. An operation that needs a
number of it, or whose result has a shape that depends on numbers, would wait for all work that a GPU has been given.
`torch.tensor(number, device=device)`, which waits too, cannot be seen.
"""

import sys
import traceback
from functools import partial
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
_ATEN = torch.ops.aten
_READ = {_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default}
_OF_UNKNOWN_SHAPE = {
    _ATEN.nonzero.default, _ATEN.masked_select.default, _ATEN._unique2.default, _ATEN.unique_dim.default,
    _ATEN.unique_consecutive.default, _ATEN.bincount.default, _ATEN.repeat_interleave.Tensor,
}  # fmt: skip
_COPIES = {_ATEN._to_copy.default, _ATEN.copy_.default}
_OURS = "vaswani_transformer"


class WaitingOperations(TorchDispatchMode):
    """Notes in `found`, as `"file.py:12 in step: operation"`, what would wait for the device while it is active.

    What a program reads of the device is 1 everywhere.
    """

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(tensor.device == META for tensor in tensors)
        if function in _READ and on_device:
            self.note(function)
            return 1 if function is _ATEN._local_scalar_dense.default else True
        if on_device and self._has_unknown_shape(function, args, kwargs):
            self.note(function)
            raise NotImplementedError(f"{self.found[-1]} has no shape on this device")
        if function in _COPIES:
            return self._copied(function, tensors, args, kwargs)
        return function(*args, **kwargs)

    @staticmethod
    def _has_unknown_shape(function, args, kwargs) -> bool:
        if function is _ATEN.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        if function in (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default):
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return function in _OF_UNKNOWN_SHAPE

    def _copied(self, function, tensors, args, kwargs):
        """A copy: between host and device it waits unless it is asked not to."""
        source = tensors[-1]
        if function is _ATEN.copy_.default:
            target, waits = args[0].device, not (len(args) > 2 and args[2])
        else:
            target, waits = torch.device(kwargs.get("device") or source.device), not kwargs.get("non_blocking")
        if source.device != target and waits:
            self.note(function)
        if source.device == META and target.type == "cpu":
            dtype = kwargs.get("dtype") or source.dtype
            return args[0].fill_(1) if function is _ATEN.copy_.default else torch.ones(source.shape, dtype=dtype)
        return function(*args, **kwargs)

    def note(self, function) -> None:
        """Note an operation and the line that asked for it: ours, else one of the Trainer's."""
        frames = [frame for frame in traceback.extract_stack()[:-2] if "torch/utils" not in frame.filename]
        ours = [frame for frame in frames if f"/{_OURS}/" in frame.filename and "/tests/" not in frame.filename]
        trainers = [frame for frame in frames if "/transformers/trainer" in frame.filename]
        frame = (ours or trainers or frames)[-1]
        self.found.append(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {function}")


def complete(monkeypatch, waiting: WaitingOperations) -> None:
    """Give torch's meta device what a GPU has and it has not: events, autocast, and the fused Adam that GPUs run."""

    class Event:
        def __init__(self, device):
            self.asked = 0

        def record(self) -> None:
            pass

        def query(self) -> bool:
            self.asked += 1
            return self.asked > 2  # nothing is done at once

        def synchronize(self) -> None:
            waiting.note("Event.synchronize")

    monkeypatch.setattr(torch, "Event", Event)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "autocast"):
        monkeypatch.setattr(torch, name, partial(_as_on_a_cpu, getattr(torch, name)))
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device: True)
    optimizers = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["meta"])


def _as_on_a_cpu(function, device="cpu", **options):
    device = options.pop("device_type", device)
    return function("cpu" if device == "meta" else device, **options)
