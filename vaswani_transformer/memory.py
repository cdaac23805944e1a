"""How the C library's allocator treats freed memory while a model trains or translates on a CPU."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # names and numbers of <malloc.h>


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks for the next step instead of giving them back to the kernel.

    A step of training or of a beam search frees and takes the same large tensors again; by default each of them is
    fresh memory that the kernel has to clear first (`scripts/benchmark_training_step.py`, and docs/performance.md for
    decoding). Returns whether the allocator took the settings; elsewhere than on Linux with glibc nothing happens.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
