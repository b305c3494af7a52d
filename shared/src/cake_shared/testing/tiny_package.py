"""A package of one kernel that compiles in about a second: what the tests of the JIT build, break and load."""

import json
import os
import stat
import sys
import textwrap
from pathlib import Path

PROGRAMS = {
    "stages": {"fill": "one number"},
    "records": [
        {
            "stage": "fill",
            "architecture": "sm_90a",
            "program": "fill_any",
            "kind": "portable",
            "sources": ["any/fill.cuh"],
            "budget": {"threads": 32, "registers": 32, "shared_bytes": 0, "tmem_columns": 0, "ctas_per_sm": 1},
            "evidence": [],
        }
    ],
}

# By tvm-ffi's C ABI, so that its C++ headers, which take seconds, stay out of the tests.
BIND = """
    #include <tvm/ffi/c_api.h>
    #include "cake/host/kernel_ref.h"
    #include "params.h"

    extern "C" __attribute__((visibility("default"))) int __tvm_ffi_answer(void*, const TVMFFIAny*, int32_t,
                                                                           TVMFFIAny* result) {
      result->type_index = kTVMFFIInt;
      result->v_int64 = kAnswer;
      return CAKE_KERNEL_REF(fill_any).name == nullptr;
    }
"""
PARAMS = """
    #pragma once
    #include <cstdint>
    #include "cake/host/kernel_ref.h"
    #include "number.h"
    struct FillParams { int32_t* out; };
    CAKE_DECLARE_KERNEL(fill_any, FillParams)
"""
KERNEL = """
    #pragma once
    #include "params.h"
    extern "C" __global__ void fill_any(const __grid_constant__ FillParams p) { p.out[threadIdx.x] = kAnswer; }
"""


class TinyPackage:
    """The package's files under a root that is on sys.path."""

    def __init__(self, root: Path, name: str):
        self.name = name
        self.directory = root / name
        self.csrc = self.directory / "csrc"
        (self.csrc / "any").mkdir(parents=True)
        (self.directory / "__init__.py").write_text("")
        (self.directory / "_version.py").write_text('__version__ = "1.0.0"\n')
        (self.directory / "programs.json").write_text(json.dumps(PROGRAMS))
        (self.csrc / "bind.cu").write_text(textwrap.dedent(BIND))
        (self.csrc / "params.h").write_text(textwrap.dedent(PARAMS))
        (self.csrc / "any" / "fill.cuh").write_text(textwrap.dedent(KERNEL))
        self.set_answer(42)

    def set_answer(self, answer: int) -> None:
        """Rewrite the header that both units include, so that the module answers another number."""
        (self.csrc / "number.h").write_text(f"#pragma once\nconstexpr int kAnswer = {answer};\n")


def script(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return path


def fake_nvcc(path: Path, version: str) -> Path:
    """Write an nvcc that knows how to say its version and counts in `<path>.runs` how often it was asked."""
    release = ".".join(version.split(".")[:2])
    return script(path, f'echo run >> "{path}.runs"\necho "Cuda compilation tools, release {release}, V{version}"')


def runs(path: Path) -> int:
    """Return how often a counting script was started."""
    counted = Path(f"{path}.runs")
    return len(counted.read_text().splitlines()) if counted.exists() else 0


def counting_nvcc(path: Path, real: Path) -> Path:
    """Write an nvcc that counts its compilations (not its --version) in `<path>.runs` and is otherwise the real one."""
    return script(path, f'case "$*" in *--version*) ;; *) echo run >> "{path}.runs" ;; esac\nexec "{real}" "$@"')


def without_compilers(monkeypatch) -> None:
    """Hide every nvcc of this machine."""
    for name in ("CAKE_NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    kept = [p for p in os.environ["PATH"].split(os.pathsep) if p and not (Path(p) / "nvcc").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(kept))
    monkeypatch.setattr("cake_shared.jit.compilers._pypi_roots", list)


def forget(name: str) -> None:
    """Make the next load of a package read everything from disk again, as a new process would."""
    from cake_shared.jit import modules
    from cake_shared.program import programs_of

    for key in [key for key in modules._loaded if key[0] == name]:
        del modules._loaded[key]
    programs_of.cache_clear()
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[module]
