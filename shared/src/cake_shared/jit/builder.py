"""Runs the compilers: writes a ninja file into a private directory, runs it, turns a failure into one clear error."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cake_shared.errors import BuildError
from cake_shared.jit import settings
from cake_shared.jit.compilers import Compiler
from cake_shared.jit.sources import (
    DEVICE_FLAGS,
    EMULATOR_FLAGS,
    EMULATOR_LINK_FLAGS,
    LINK_FLAGS,
    OBJECT_FLAGS,
    SourceSet,
    include_directories,
    tvm_ffi_facts,
)
from cake_shared.target import Target

MODULE = "module.so"
LOG = "build.log"

_LOG_TAIL_LINES = 40


def _escaped(text: str) -> str:
    return text.replace("$", "$$")


def _quoted(argument: str | Path) -> str:
    text = str(argument)
    plain = all(c.isalnum() or c in "/._-+=,:@%" for c in text)
    return _escaped(text if plain else "'" + text.replace("'", "'\"'\"'") + "'")


def _path(path: str | Path) -> str:
    return _escaped(str(path)).replace(":", "$:").replace(" ", "$ ")


@dataclass(frozen=True)
class Edge:
    """One step of a build: a command with `$in` and `$out`."""

    command: tuple[str | Path, ...]
    inputs: tuple[str | Path, ...]
    output: str


def _ninja_text(edges: list[Edge]) -> str:
    lines = ["ninja_required_version = 1.8"]
    for number, edge in enumerate(edges):
        command = " ".join(part if part in ("$in", "$out") else _quoted(part) for part in edge.command)
        lines += [f"rule r{number}", f"  command = {command}"]
        lines += [f"build {_path(edge.output)}: r{number} {' '.join(map(_path, edge.inputs))}"]
    return "\n".join(lines) + "\n"


def find_ninja() -> Path:
    """Return the ninja program: PyPI's, which cake-shared depends on, else that on PATH.

    Raises
    ------
    BuildError
        There is neither.
    """
    name = "ninja.exe" if sys.platform == "win32" else "ninja"
    try:
        import ninja

        candidate = Path(ninja.BIN_DIR) / name
        if candidate.is_file():
            return candidate
    except ImportError:
        settings.say("PyPI's ninja is not installed; looking on PATH")
    found = shutil.which("ninja")
    if found is None:
        raise BuildError("no ninja: neither PyPI's ninja nor one on PATH. remedy: pip install ninja")
    return Path(found)


def _environment() -> dict[str, str]:
    # What these add to every command line is not part of a module's key.
    return {
        name: value for name, value in os.environ.items() if name not in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    }


def run_ninja(directory: Path, edges: list[Edge], what: str) -> float:
    """Run the edges in a directory, write `build.log`, return the core-seconds that they took.

    Raises
    ------
    BuildError
        A command failed; the message ends with the last lines of its output.
    """
    (directory / "build.ninja").write_text(_ninja_text(edges))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [find_ninja(), "-v"],
        cwd=directory,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (directory / LOG).write_text(done.stdout)
    if settings.verbose():
        settings.say(f"{what}\n{done.stdout}")
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-_LOG_TAIL_LINES:])
        raise BuildError(f"{what} failed:\n{tail}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _include_flags(package: str) -> tuple[str | Path, ...]:
    own, shared = include_directories(package)
    return ("-I", own, "-I", shared, "-isystem", tvm_ffi_facts().include)


def _link_tvm_ffi() -> tuple[str, ...]:
    library = tvm_ffi_facts().library
    return (f"-L{library.parent}", "-ltvm_ffi")


def _wrapped(directory: Path, unit: str) -> str:
    """A .cu file that includes a unit: units are headers by name, so that other units may include them too."""
    name = "unit_" + unit.replace("/", "_").rsplit(".", 1)[0] + ".cu"
    (directory / name).write_text(f'#include "{unit}"\n')
    return name


def compile_module(sources: SourceSet, target: Target, nvcc: Compiler, directory: Path) -> float:
    """Compile and link a package's module to `module.so` in an empty directory; return core-seconds."""
    flags = (*DEVICE_FLAGS, *sources.defines, *OBJECT_FLAGS, *target.gencode_flags)
    compile_command = (nvcc.path, *flags, *_include_flags(sources.package))
    edges = []
    for unit in sources.units:
        wrapper = _wrapped(directory, unit)
        edges.append(
            Edge((*compile_command, "-c", "$in", "-o", "$out"), (wrapper,), wrapper.removesuffix(".cu") + ".o")
        )
    link_command = (nvcc.path, *LINK_FLAGS, *target.gencode_flags, "$in", *_link_tvm_ffi(), "-o", "$out")
    edges.append(Edge(link_command, tuple(edge.output for edge in edges), MODULE))
    what = f"{sources.package}: compiling for {target.name} with {nvcc.path} ({nvcc.version}, from {nvcc.place})"
    return run_ninja(directory, edges, what)


def compile_ptx(sources: SourceSet, target: Target, nvcc: Compiler, directory: Path) -> float:
    """Compile a package's kernels to PTX, one `.ptx` a unit, in an empty directory; return core-seconds."""
    command = (nvcc.path, "-ptx", *DEVICE_FLAGS, *target.ptx_flags, *_include_flags(sources.package))
    edges = []
    for unit in sources.units:
        wrapper = _wrapped(directory, unit)
        edges.append(Edge((*command, "$in", "-o", "$out"), (wrapper,), wrapper.removesuffix(".cu") + ".ptx"))
    what = f"{sources.package}: PTX for {target.name} with {nvcc.path} ({nvcc.version}, from {nvcc.place})"
    return run_ninja(directory, edges, what)


def compile_emulator_host(sources: SourceSet, cxx: Compiler, directory: Path) -> float:
    """Compile a package's bind.cu against the emulator to `module.so` in an empty directory; return core-seconds."""
    unit = include_directories(sources.package)[0] / "bind.cu"
    command = (cxx.path, *EMULATOR_FLAGS, *_include_flags(sources.package), *EMULATOR_LINK_FLAGS, "$in", "-x", "none")
    edges = [Edge((*command, *_link_tvm_ffi(), "-o", "$out"), (unit,), MODULE)]
    return run_ninja(directory, edges, f"{sources.package}: compiling bind.cu for the emulator with {cxx.path}")
