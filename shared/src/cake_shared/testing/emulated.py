"""A package's whole host chain on CPU tensors, its kernels run by the emulator from the PTX of one architecture."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from cake_shared import jit
from cake_shared.emulator import Module, Options, Region, Report, native

if TYPE_CHECKING:
    import tvm_ffi


class EmulatedPackage:
    """Launches of a package's bind.cu, run by the emulator while this is entered.

    What the host's checks let through is what kernels may touch: inputs are const, outputs count as never written until
    a kernel writes them. `module` has the package's functions, for CPU tensors.

    Parameters
    ----------
    package
        Import name.
    architecture
        Whose PTX runs.
    options
        Completion order, detectors, threads; see `cake_shared.emulator.Options`.
    """

    def __init__(self, package: str, architecture: str, options: Options | None = None):
        self.options = options or Options()
        texts = jit.ptx_for(package, architecture)
        units = {text: Module.from_ptx(text, architecture, f"{package}.ptx") for text in set(texts.values())}
        self.kernels = {kernel: units[text] for kernel, text in texts.items()}
        self.module: tvm_ffi.Module = jit.build_host_for_emulator(package)
        self.regions: dict[str, Region] = {}
        self.reports: list[Report] = []
        self.error: Exception | None = None
        self._launched = False

    def __enter__(self) -> EmulatedPackage:
        """Send the host module's launches here."""
        jit.install_emulator(self.module, self._on_launch, self._on_tensor)
        if self.module.implements_function("cake_set_emulator_encode_tiled"):  # its host makes tensor maps
            encode = native.library().cake_emulator_encode_tiled
            self.module["cake_set_emulator_encode_tiled"](ctypes.cast(encode, ctypes.c_void_p))
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the host module without an emulator."""
        jit.install_emulator(self.module, None)

    def _on_tensor(self, name: str, address: int, size_bytes: int, writable: int) -> None:
        if self._launched:  # the first tensor of another call
            self.regions, self.reports, self._launched = {}, [], False
        written = np.zeros(size_bytes, np.uint8) if writable == 1 else None
        self.regions[name] = Region(address, size_bytes, name, not writable, written)

    def _on_launch(self, kernel: str, launch: jit.CakeLaunch, params: bytes) -> None:
        self._launched = True
        try:
            report = self.kernels[kernel].launch_packed(
                kernel,
                tuple(launch.grid),
                tuple(launch.block),
                params,
                list(self.regions.values()),
                cluster=tuple(launch.cluster),
                smem_bytes=launch.smem_bytes,
                options=self.options,
            )
        except Exception as error:
            self.error = error  # the C++ host passes on its text alone
            raise
        self.reports.append(report)

    def unwritten_bytes(self, name: str) -> np.ndarray:
        """Return the offsets of the bytes of an output that no kernel of the last call has written."""
        return np.flatnonzero(self.regions[name].written == 0)
