"""What a package's modules are made of: translation units, the project headers they reach, flags, versions."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import cake_shared
from cake_shared.errors import BuildError
from cake_shared.program import package_directory, programs_of
from cake_shared.target import Target

# Sums are contracted nowhere unless a kernel says so: bits belong to a version, not to a compiler's choice of fma.
DEVICE_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-lineinfo")
# Of a host unit whose module holds portable programs alone, whatever its architecture has.
PORTABLE_FLAGS = ("-DCAKE_PORTABLE_PROGRAMS",)
OBJECT_FLAGS = ("-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall")
LINK_FLAGS = ("-shared", "-cudart", "static", "-Xlinker", "--no-undefined")
EMULATOR_FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-DCAKE_EMULATOR")
EMULATOR_LINK_FLAGS = ("-shared", "-Wl,--no-undefined")

# Raised when the layout of cache entries or the way of building changes.
FORMAT = 1

_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


def include_directories(package: str) -> tuple[Path, Path]:
    """Return where project headers are found: the package's csrc, then cake_shared's include."""
    return package_directory(package) / "csrc", package_directory("cake_shared") / "include"


@dataclass(frozen=True)
class TvmFfi:
    """The installed apache-tvm-ffi: its version, headers and library."""

    version: str
    include: Path
    library: Path


@functools.cache
def tvm_ffi_facts() -> TvmFfi:
    """Return the installed apache-tvm-ffi.

    Raises
    ------
    BuildError
        It is not installed.
    """
    try:
        import tvm_ffi
    except ImportError as error:
        raise BuildError(f"apache-tvm-ffi cannot be imported ({error}). remedy: pip install apache-tvm-ffi") from error
    return TvmFfi(
        tvm_ffi.__version__, Path(tvm_ffi.libinfo.find_include_path()), Path(tvm_ffi.libinfo.find_libtvm_ffi())
    )


def reached_files(units: tuple[str, ...], roots: tuple[Path, ...]) -> dict[str, Path]:
    """Return every project file that the units include, directly or not, by the name under which it is included.

    Parameters
    ----------
    units
        Names relative to the first root.
    roots
        Where names are looked up, in order; a name found in none of them belongs to the toolkit.

    Raises
    ------
    BuildError
        A unit or an included `cake/` header is in none of the roots.
    """
    found: dict[str, Path] = {}
    waiting = [(unit, "programs.json") for unit in units]
    while waiting:
        name, includer = waiting.pop()
        if name in found:
            continue
        path = next((root / name for root in roots if (root / name).is_file()), None)
        if path is None:
            if includer == "programs.json" or name.startswith("cake/"):
                raise BuildError(f"{includer} names {name}, which is in none of {', '.join(map(str, roots))}")
            continue
        found[name] = path
        waiting += [(included, name) for included in _INCLUDE.findall(path.read_text())]
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class SourceSet:
    """What one artefact is made of.

    Attributes
    ----------
    package
        The package whose artefact it is.
    goal
        An architecture for a module or its PTX, `emulator` for a host module.
    units
        Translation units, relative to the package's csrc.
    digest
        SHA-256 of everything that the artefact depends on except compiler and tvm-ffi: contents, flags, versions, goal.
    defines
        Flags beyond those of every module.
    """

    package: str
    goal: str
    units: tuple[str, ...]
    digest: str
    defines: tuple[str, ...] = ()


def source_set(package: str, goal: str, units: tuple[str, ...], flags: tuple[str, ...]) -> SourceSet:
    """Return the sources of an artefact with their digest; see `SourceSet`."""
    files = reached_files(units, include_directories(package))
    facts = {
        "format": FORMAT,
        "package": package,
        "version": importlib.import_module(f"{package}._version").__version__,
        "shared_version": cake_shared.__version__,
        "goal": goal,
        "flags": flags,
        "units": units,
        "files": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()},
    }
    return SourceSet(package, goal, units, hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest())


def kernel_units(package: str, target: Target) -> tuple[str, ...]:
    """Return the sources of the package's records for the target, each once, in the order of the records.

    Raises
    ------
    BuildError
        The package has no record for the target.
    """
    records = programs_of(package).records_for(target.name)
    if not records:
        raise BuildError(f"{package} has no CUDA program for {target.name}: there is nothing to compile")
    return tuple(dict.fromkeys(source for record in records for source in record.sources))


def module_sources(package: str, target: Target) -> SourceSet:
    """Return what the package's module for the target is made of: bind.cu and the sources of its records."""
    units = ("bind.cu", *kernel_units(package, target))
    return source_set(package, target.name, units, DEVICE_FLAGS + OBJECT_FLAGS + LINK_FLAGS + target.gencode_flags)


def portable_units(package: str) -> tuple[str, ...]:
    """Return the sources of the package's portable programs, each once, in the order of the stages.

    Raises
    ------
    BuildError
        No architecture has a portable program for some stage; the message names it.
    """
    programs = programs_of(package)
    found = {record.stage: record.sources for record in programs.records if record.kind == "portable"}
    missing = [stage for stage in programs.stages if stage not in found]
    if missing or not found:
        raise BuildError(f"{package} has no portable program for {', '.join(missing) or 'anything'}")
    return tuple(dict.fromkeys(source for stage in programs.stages for source in found[stage]))


def portable_sources(package: str, target: Target) -> SourceSet:
    """Return what a module of the package's portable programs for the target is made of; see `module_sources`."""
    units = ("bind.cu", *portable_units(package))
    flags = DEVICE_FLAGS + PORTABLE_FLAGS + OBJECT_FLAGS + LINK_FLAGS + target.gencode_flags
    return replace(source_set(package, target.name, units, flags), defines=PORTABLE_FLAGS)


def ptx_sources(package: str, target: Target) -> SourceSet:
    """Return what the PTX of the package's records for the target is made of."""
    return source_set(package, target.name, kernel_units(package, target), DEVICE_FLAGS + target.ptx_flags)


def emulator_sources(package: str) -> SourceSet:
    """Return what the package's host module for the emulator is made of: bind.cu alone."""
    return source_set(package, "emulator", ("bind.cu",), EMULATOR_FLAGS + EMULATOR_LINK_FLAGS)
