"""Sources and flags in, loaded modules out: ninja and nvcc behind a cache that many processes may use at once.

`load(package, architecture)` is the whole of it for a package. A module's key is made of the contents of its sources
and of every project header that they reach, the flags, the target, the versions of package, cake-shared, tvm-ffi and
compiler; the cache is a directory of the user's (`CAKE_CACHE_DIR`). Where that directory cannot be written, a module is
built for the one process, with one warning.
"""

from cake_shared.jit.emulation import CakeLaunch, CakeTensor, install_emulator
from cake_shared.jit.modules import (
    build_host_for_emulator,
    build_module,
    build_module_into,
    core_seconds,
    kernel_reports,
    load,
    ptx_for,
)
from cake_shared.jit.report import KernelReport
from cake_shared.jit.settings import cache_directory

__all__ = [
    "CakeLaunch",
    "CakeTensor",
    "KernelReport",
    "build_host_for_emulator",
    "build_module",
    "build_module_into",
    "cache_directory",
    "core_seconds",
    "install_emulator",
    "kernel_reports",
    "load",
    "ptx_for",
]
