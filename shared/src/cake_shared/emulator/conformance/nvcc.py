"""Compiles the conformance kernels of ``cu/`` to PTX with the nvcc that the project uses for a target."""

from __future__ import annotations

import functools

from cake_shared.emulator.compile import compile_to_ptx
from cake_shared.emulator.conformance.model import CU_DIRECTORY


@functools.cache
def ptx_of(source: str, target: str = "sm_90a") -> str:
    """The PTX of ``cu/<source>`` for ``target``, compiled once a process. Raises BuildError with nvcc's own words."""
    return compile_to_ptx(str(CU_DIRECTORY / source), target)[0]
