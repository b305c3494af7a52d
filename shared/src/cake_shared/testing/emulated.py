"""A package's whole host chain on CPU tensors, its kernels run by the emulator from the PTX of one architecture."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import numpy as np

from cake_shared import jit
from cake_shared.emulator import LaunchError, Module, Options, Region, Report, Stream, native
from cake_shared.emulator.guard import GuardedCopies
from cake_shared.errors import BuildError
from cake_shared.program import Budget, programs_of
from cake_shared.target import target_named

if TYPE_CHECKING:
    from collections.abc import Callable

    import tvm_ffi


# Between the tensors that a kernel runs on.
GUARD_BYTES = 1 << 16


class EmulatedPackage:
    """Launches of a package's bind.cu, run by the emulator while this is entered.

    What the host's checks let through is what kernels may touch: inputs are const, outputs count as never written until
    a kernel writes them. Kernels run on copies with guard bands between. Launches stay within the budgets of the
    package's records. What ran on the stream before a call is unknown: a first launch that is programmatic touches no
    tensor before its `griddepcontrol.wait`. `module` has the package's functions, for CPU tensors.

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
        self.target = target_named(architecture)
        records = programs_of(package).records_for(architecture)
        self.budgets: dict[str, Budget] = {record.program: record.budget for record in records}
        texts = jit.ptx_for(package, architecture)
        units = {text: Module.from_ptx(text, architecture, f"{package}.ptx") for text in set(texts.values())}
        for unit in units.values():
            unit.require()  # every kernel of a package is executed, or the package is not
        self.kernels = {kernel: units[text] for kernel, text in texts.items()}
        self.module: tvm_ffi.Module = jit.build_host_for_emulator(package)
        self.regions: dict[str, Region] = {}
        self.reports: list[Report] = []
        self.error: Exception | None = None
        self._launched = False
        self._stream = Stream(unknown_before=True)
        self._copies: GuardedCopies | None = None

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
            self._stream.restart(unknown_before=True)
        written = np.zeros(size_bytes, np.uint8) if writable == 1 else None
        self.regions[name] = Region(address, size_bytes, name, not writable, written)
        self._copies = None

    def _check_budget(self, kernel: str, launch: jit.CakeLaunch) -> int:
        """Hold a launch against its record; return the registers of a thread, 0 for a kernel without a record."""
        portable = self.target.portable_cluster_ctas  # more is an attribute that launch.h does not set
        if math.prod(launch.cluster) > portable:
            raise LaunchError(f"{math.prod(launch.cluster)} CTAs in a cluster, at most {portable}", kernel=kernel)
        budget = self.budgets.get(kernel)
        if budget is None:
            return 0
        for name, used in (
            ("threads", math.prod(launch.block)),
            ("shared_bytes", launch.smem_bytes + self.kernels[kernel].kernels[kernel].shared_bytes),
        ):
            if used > getattr(budget, name):
                raise LaunchError(f"{used} {name}, the record's budget is {getattr(budget, name)}", kernel=kernel)
        return budget.registers

    def _on_launch(self, kernel: str, launch: jit.CakeLaunch, params: bytes) -> None:
        self._launched = True
        try:
            registers = self._check_budget(kernel, launch)
            if self._copies is None:
                self._copies = GuardedCopies(self.regions, GUARD_BYTES)
            self._copies.load()
            report = self.kernels[kernel].launch_packed(
                kernel,
                tuple(launch.grid),
                tuple(launch.block),
                self._copies.moved(params),
                self._copies.regions,
                cluster=tuple(launch.cluster),
                smem_bytes=launch.smem_bytes,
                options=self.options,
                stream=self._stream,
                programmatic=bool(launch.programmatic),
                registers=registers,
            )
        except Exception as error:
            self.error = error  # the C++ host passes on its text alone
            raise
        self._copies.store()
        self.reports.append(report)

    def unwritten_bytes(self, name: str) -> np.ndarray:
        """Return the offsets of the bytes of an output that no kernel of the last call has written."""
        return np.flatnonzero(self.regions[name].written == 0)


def emulated_or_skip(package: str) -> Callable[[str], EmulatedPackage]:
    """For a fixture: `get(architecture)` is the package in the emulator, made once an architecture.

    The test that asks is skipped where there are no compilers for the architecture.
    """
    made: dict[str, EmulatedPackage] = {}

    def get(architecture: str) -> EmulatedPackage:
        if architecture not in made:
            try:
                made[architecture] = EmulatedPackage(package, architecture)
            except BuildError as error:
                import pytest

                pytest.skip(f"compilers are what this needs: {error}")
        return made[architecture]

    return get
