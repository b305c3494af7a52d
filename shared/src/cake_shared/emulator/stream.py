"""Kernels in order, as on a CUDA stream."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from cake_shared.emulator import native
from cake_shared.emulator.options import Options
from cake_shared.emulator.report import Report

if TYPE_CHECKING:
    from cake_shared.emulator.module import Module


class Stream:
    """Kernels in order, as on a CUDA stream, and what each has done to global memory.

    A launch that is programmatic may overlap those before it, so that what it touches before `griddepcontrol.wait` is
    compared with what they touch (`MissingGridWait`).

    Parameters
    ----------
    options
        Of the launches.
    unknown_before
        Something unknown may still run when the first launch comes.
    """

    def __init__(self, options: Options | None = None, unknown_before: bool = False):
        self.options = options or Options()
        self.reports: list[Report] = []
        self.handle: int = native.library().cake_emu_stream(int(unknown_before))
        self._finalizer = weakref.finalize(self, native.library().cake_emu_stream_free, self.handle)

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: int | tuple,
        block: int | tuple,
        params: list | tuple = (),
        *,
        cluster: int | tuple = (0, 0, 0),
        smem_bytes: int = 0,
        allocations: list | tuple = (),
        programmatic: bool = False,
    ) -> Report:
        """Run a kernel after those before it; see `Module.launch`."""
        report = module.launch(
            kernel,
            grid,
            block,
            params,
            cluster=cluster,
            smem_bytes=smem_bytes,
            allocations=allocations,
            options=self.options,
            stream=self,
            programmatic=programmatic,
        )
        self.reports.append(report)
        return report

    def restart(self, unknown_before: bool = False) -> None:
        """Forget the launches so far: all have ended, or with `unknown_before` something else may still run."""
        native.library().cake_emu_stream_restart(self.handle, int(unknown_before))

    def synchronize(self) -> None:
        """Wait for everything that was launched: nothing of it overlaps what comes after."""
        self.restart()
