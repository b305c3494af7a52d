"""CUDA C++ -> PTX for the emulator."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import cake_shared
from cake_shared.errors import BuildError
from cake_shared.jit.compilers import find_nvcc
from cake_shared.target import target_named


def compile_to_ptx(source: str, target: str, flags: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return (PTX text with line information, a name for messages) of a .cu file or of source text.

    Raises
    ------
    BuildError
        There is no nvcc for the target, or it refused the source; the message has its output.
    """
    architecture = target_named(target)
    nvcc = find_nvcc(architecture)
    include = Path(cake_shared.__file__).parent / "include"
    with tempfile.TemporaryDirectory(prefix="cake-ptx-") as scratch:
        if source.endswith(".cu") and "\n" not in source:
            path, shown = Path(source), Path(source).name
        else:
            path, shown = Path(scratch) / "source.cu", "source.cu"
            path.write_text(source)
        out = Path(scratch) / "out.ptx"
        command = [
            nvcc.path,
            "-ptx",
            "-lineinfo",
            "-std=c++20",
            *architecture.ptx_flags,
            "-I",
            include,
            *flags,
            path,
            "-o",
            out,
        ]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise BuildError(f"nvcc refused {shown} for {target}:\n{done.stdout}{done.stderr}")
        return out.read_text(), shown
