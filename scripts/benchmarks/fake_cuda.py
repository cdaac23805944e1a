"""Fake tensors on a GPU that is not there: autograd and autocast as on CUDA, no memory, no arithmetic.

torch's FakeTensorMode computes shapes, types and devices alone. In a build of torch without CUDA the autograd engine
still asks for CUDA's streams and events; `stand_in_for_cuda` gives it some that do nothing, written in C++ and compiled
in seconds. Torch reads them once, at its import: call it first.
"""

import ctypes
import importlib.util
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
"""


def stand_in_for_cuda() -> None:
    """Load the stand-in, before torch is imported; a build of torch with CUDA needs none."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    if list((torch_folder / "lib").glob("libtorch_cuda.*")):
        return
    libraries = torch_folder / "lib"
    with tempfile.TemporaryDirectory(prefix="fake_cuda_") as folder:
        source, library = Path(folder) / "fake_cuda.cpp", Path(folder) / "fake_cuda.so"
        source.write_text(SOURCE)
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(source)]
        command += ["-o", str(library), f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@contextmanager
def fake_cuda():
    """Within it, tensors made on `cuda` are fake, autocast takes place, and attention is torch's kernels for CUDA."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if torch.cuda.is_available():
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
        return
    here = "torch.amp.autocast_mode.torch.cuda"
    with (
        mock.patch(f"{here}.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch(f"{here}.is_bf16_supported", lambda *_, **__: True),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", fused_attention),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def fused_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The kernels that torch takes on CUDA in half precision: flash attention without a mask, "efficient" with one.

    A build without CUDA would take its reference, four products with all scores in memory.
    """
    import torch

    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[
            0
        ]
    if attn_mask.dtype == torch.bool:  # as torch does before the kernel
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    bias = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]
