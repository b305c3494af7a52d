"""Which compiler builds a module: four places for nvcc, in a fixed order, and one message when none of them serves."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path

from cake_shared.errors import BuildError
from cake_shared.jit import settings, store
from cake_shared.target import Target

_REMEDY = (
    "remedy: pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl, "
    "or point CAKE_NVCC at an nvcc, or install a wheel with modules built in"
)


@dataclass(frozen=True)
class Compiler:
    """A compiler that serves a target.

    Attributes
    ----------
    path
        The program.
    version
        What the cache tells compilers apart by: `13.0.88`, or a digest for a C++ compiler.
    place
        Where it was found.
    """

    path: Path
    version: str
    place: str


class _Unusable(Exception):
    """Why the compiler of one place does not serve."""


def _identity(path: Path) -> str:
    """A digest that changes when the file at `path` is replaced, taken without running it."""
    found = path.stat()
    text = f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _nvcc_version(path: Path) -> str:
    """`13.0.88` of the nvcc at `path`, remembered in the cache directory so that a warm start runs no compiler."""
    memo = settings.cache_directory() / "compilers" / f"{_identity(path)}.json"
    try:
        version = json.loads(memo.read_text())["version"]
        if isinstance(version, str) and re.fullmatch(r"\d+\.\d+\.\d+", version):
            return version
    except (OSError, ValueError, KeyError, TypeError):
        version = None  # not asked yet, or the memo is damaged: ask the compiler
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unusable(f"{path} does not run ({error})") from error
    match = re.search(r"release \d+\.\d+, V(\d+\.\d+\.\d+)", asked.stdout)
    if asked.returncode != 0 or match is None:
        raise _Unusable(f"{path} --version answers {(asked.stdout + asked.stderr).strip()[-200:]!r}")
    try:
        store.write_atomically(memo, json.dumps({"path": str(path), "version": match[1]}))
    except OSError as error:
        settings.say(f"version of {path} not remembered: {error}")
    return match[1]


def _checked(path: Path, place: str, target: Target) -> Compiler:
    if not path.is_file():
        raise _Unusable(f"{path} is not a file")
    if not os.access(path, os.X_OK):
        raise _Unusable(f"{path} is not executable")
    version = _nvcc_version(path)
    if tuple(int(part) for part in version.split(".")[:2]) < target.min_nvcc:
        raise _Unusable(f"{path} is {version}")
    return Compiler(path, version, place)


def _from_setting(target: Target) -> Compiler:
    chosen = settings.nvcc_setting()
    if chosen is None:
        raise _Unusable("not set")
    return _checked(Path(chosen).expanduser(), "CAKE_NVCC", target)


def _from_cuda_home(target: Target) -> Compiler:
    # A stray colon makes a list of it; each entry is tried.
    entries = [entry.strip() for entry in os.environ.get("CUDA_HOME", "").split(os.pathsep) if entry.strip()]
    return _first(entries, lambda entry: _checked(Path(entry) / "bin" / "nvcc", "CUDA_HOME", target), "not set")


def _from_path(target: Target) -> Compiler:
    entries = [Path(entry) / "nvcc" for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    found = [path for path in dict.fromkeys(entries) if path.is_file()]
    return _first(found, lambda path: _checked(path, "PATH", target), "no nvcc")


def _pypi_roots() -> list[str]:
    """Where the running environment keeps the packages of the `nvidia` namespace."""
    spec = importlib.util.find_spec("nvidia")
    return sorted(spec.submodule_search_locations or ()) if spec is not None else []


def _from_pypi(target: Target) -> Compiler:
    found = [path for root in _pypi_roots() for path in sorted(Path(root).glob("cu*/bin/nvcc"), reverse=True)]
    return _first(found, lambda path: _checked(path, "PyPI's nvidia-cuda-nvcc", target), "not installed")


def _first(candidates, check, none: str) -> Compiler:
    reasons = []
    for candidate in candidates:
        try:
            return check(candidate)
        except _Unusable as reason:
            reasons.append(str(reason))
    raise _Unusable("; ".join(reasons) or none)


_PLACES = (
    ("CAKE_NVCC", _from_setting),
    ("CUDA_HOME", _from_cuda_home),
    ("PATH", _from_path),
    ("PyPI's nvidia-cuda-nvcc", _from_pypi),
)


def find_nvcc(target: Target) -> Compiler:
    """Return the first nvcc that supports the target: of `CAKE_NVCC`, `CUDA_HOME`, `PATH`, PyPI's nvidia-cuda-nvcc.

    Raises
    ------
    BuildError
        None does; the one-line message names the four places, what was wrong with each, and the remedy.
    """
    reasons = []
    for place, look in _PLACES:
        try:
            compiler = look(target)
        except _Unusable as reason:
            reasons.append(f"{place}: {reason}")
            continue
        if settings.nvcc_setting() is not None and place != "CAKE_NVCC":
            warnings.warn(f"{reasons[0]}; {place}'s {compiler.path} is used instead", RuntimeWarning, stacklevel=2)
        settings.say(f"{target.name}: {compiler.path} {compiler.version} from {place}")
        return compiler
    oldest = ".".join(str(part) for part in target.min_nvcc)
    raise BuildError(f"no nvcc for {target.name} (needs {oldest} or newer). {'. '.join(reasons)}. {_REMEDY}")


def find_cxx() -> Compiler:
    """Return the system's C++ compiler: the first of c++, g++, clang++ on PATH.

    Raises
    ------
    BuildError
        There is none.
    """
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found is not None:
            return Compiler(Path(found), _identity(Path(found)), "PATH")
    raise BuildError("no C++ compiler: none of c++, g++, clang++ is on PATH. remedy: install g++")
