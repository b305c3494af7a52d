"""Compiles the conformance kernels of ``cu/`` to PTX with the nvcc that the project uses for a target."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import tempfile

from cake_shared.emulator.conformance.model import CU_DIRECTORY
from cake_shared.errors import BuildError


@functools.cache
def ptx_of(source: str, target: str = "sm_90a") -> str:
    """The PTX of ``cu/<source>`` for ``target``, compiled once a process. Raises BuildError with nvcc's own words."""
    from cake_shared.jit.compilers import find_nvcc
    from cake_shared.target import target_named

    where = target_named(target)
    compiler = find_nvcc(where)
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "program.ptx"
        command = [str(compiler.path), "-ptx", "-std=c++17", "-lineinfo", *where.ptx_flags]
        command += ["-o", str(output), str(CU_DIRECTORY / source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"nvcc failed on {source} for {target}:\n{done.stderr}")
        return output.read_text()
