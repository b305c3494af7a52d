"""From a package and an architecture to a loaded module: prebuilt, cached, or compiled now, in that order."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cake_shared.errors import BuildError
from cake_shared.jit import builder, settings, store
from cake_shared.jit.compilers import Compiler, find_cxx, find_nvcc
from cake_shared.jit.report import KernelReport, parse_report
from cake_shared.jit.sources import (
    SourceSet,
    emulator_sources,
    module_sources,
    portable_sources,
    ptx_sources,
    tvm_ffi_facts,
)
from cake_shared.program import package_directory
from cake_shared.target import Target, target_named

if TYPE_CHECKING:
    import tvm_ffi

_loaded: dict[tuple[str, str, bool], tvm_ffi.Module] = {}
_loading = threading.Lock()

# What a manifest states: of every entry, and of a module.
_STATED = {"sources": str, "tvm_ffi": str, "core_seconds": float}
_STATED_OF_MODULE = {**_STATED, "kernels": dict}

# Fills an empty directory with an entry's files by way of a scratch directory, and returns the facts for its manifest.
_Fill = Callable[[Path, Path], dict]


def _facts(sources: SourceSet, compiler: Compiler, core_seconds: float) -> dict:
    return {
        "package": sources.package,
        "goal": sources.goal,
        "sources": sources.digest,
        "compiler": compiler.version,
        "tvm_ffi": tvm_ffi_facts().version,
        "core_seconds": round(core_seconds, 2),
    }


def _fill_module(sources: SourceSet, target: Target, nvcc: Compiler, scratch: Path, entry: Path) -> dict:
    core_seconds = builder.compile_module(sources, target, nvcc, scratch)
    shutil.move(scratch / builder.MODULE, entry / builder.MODULE)
    reports = parse_report((scratch / builder.LOG).read_text())
    kernels = {name: report.as_dict() for name, report in sorted(reports.items())}
    return {**_facts(sources, nvcc, core_seconds), "kernels": kernels}


def _fill_ptx(sources: SourceSet, target: Target, nvcc: Compiler, scratch: Path, entry: Path) -> dict:
    core_seconds = builder.compile_ptx(sources, target, nvcc, scratch)
    for path in scratch.glob("*.ptx"):
        shutil.move(path, entry / path.name)
    return _facts(sources, nvcc, core_seconds)


def _fill_emulator_host(sources: SourceSet, cxx: Compiler, scratch: Path, entry: Path) -> dict:
    core_seconds = builder.compile_emulator_host(sources, cxx, scratch)
    shutil.move(scratch / builder.MODULE, entry / builder.MODULE)
    return _facts(sources, cxx, core_seconds)


def _fill_sealed(workshop: Path, fill: _Fill) -> Path:
    scratch, entry = workshop / "scratch", workshop / "entry"
    scratch.mkdir()
    entry.mkdir()
    store.seal(entry, fill(scratch, entry))
    damage = store.damage_of(entry)
    if damage is not None:
        raise BuildError(f"{entry.name}: what the compiler wrote cannot be used: {damage}")
    return entry


def _prefix(kind: str, sources: SourceSet) -> str:
    return f"{kind}-{sources.goal}-{sources.digest[:24]}-ffi{tvm_ffi_facts().version}-"


def _shelf(package: str, stated: dict[str, type]) -> store.Shelf:
    return store.Shelf(settings.cache_directory() / "modules" / package, stated)


@functools.cache
def _private_directory(cache: Path, reason: str) -> Path:
    """Where a process builds for itself alone when the cache cannot be written; removed when it ends."""
    warnings.warn(
        f"the cache directory {cache} cannot be written ({reason}): modules are built for this process alone. "
        f"remedy: set CAKE_CACHE_DIR to a writable directory",
        RuntimeWarning,
        stacklevel=2,
    )
    directory = Path(tempfile.mkdtemp(prefix="cake-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _obtain(package: str, name: str, fill: _Fill, stated: dict[str, type] = _STATED) -> Path:
    """Return the entry of that name, built now if it is not there or damaged, by one process at a time."""
    shelf = _shelf(package, stated)
    found = shelf.find(name)
    if found is not None:
        return found
    try:
        shelf.prepare()
    except OSError as error:
        shelf = store.Shelf(_private_directory(settings.cache_directory(), str(error.strerror)) / package, stated)
    try:
        shelf.prepare()
        with shelf.lock(name) as locked:
            found = shelf.find(name)
            if found is not None:
                return found
            with shelf.workshop(name, locked) as workshop:
                return shelf.publish(_fill_sealed(workshop, fill), name)
    except OSError as error:
        raise BuildError(f"{package}: {name} could not be built in {shelf.directory}: {error}") from error


def _prebuilt(package: str, sources: SourceSet) -> Path | None:
    """The module that came inside the package's wheel, when it is sound and made of exactly the sources here."""
    entry = package_directory(package) / "prebuilt" / sources.goal
    if not entry.is_dir():
        return None
    damage = store.damage_of(entry, _STATED_OF_MODULE)
    if damage is None:
        manifest = store.manifest_of(entry)
        if manifest["sources"] != sources.digest:
            damage = "it is of other sources"
        elif _numbers(manifest["tvm_ffi"])[0] != _numbers(tvm_ffi_facts().version)[0]:
            damage = f"it needs apache-tvm-ffi {manifest['tvm_ffi']}"
    if damage is None:
        return entry
    warnings.warn(f"{entry} is not used: {damage}", RuntimeWarning, stacklevel=2)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _module_entry(package: str, target: Target, portable: bool) -> Path:
    sources = portable_sources(package, target) if portable else module_sources(package, target)
    prebuilt = None if portable else _prebuilt(package, sources)
    if prebuilt is not None:
        return prebuilt
    prefix = _prefix("module", sources)
    try:
        nvcc = find_nvcc(target)
    except BuildError:
        # A machine that has lost its compiler, or never had one, runs what another put into the cache.
        found = _shelf(package, _STATED_OF_MODULE).find_any(prefix)
        if found is None:
            raise
        return found
    fill = functools.partial(_fill_module, sources, target, nvcc)
    return _obtain(package, f"{prefix}nvcc{nvcc.version}", fill, _STATED_OF_MODULE)


def build_module(package: str, architecture: str, *, portable: bool = False) -> Path:
    """Return the directory of a package's module, compiled if the cache lacks it. Needs no GPU.

    Parameters
    ----------
    package
        Import name, `cake_gdn_det_train`.
    architecture
        A name of `cake_shared.target.TARGETS`.
    portable
        Of portable programs alone, for comparing them with the native ones that serve the architecture.

    Raises
    ------
    UnsupportedArchError
        The architecture is not known.
    BuildError
        Nothing to compile, no compiler, or the compiler refused; the message has its last lines.
    """
    return _module_entry(package, target_named(architecture), portable)


def build_module_into(package: str, architecture: str, directory: Path) -> Path:
    """Compile a package's module from cold into `directory/<architecture>`; return that directory, replaced.

    This is how modules get into a wheel, and how a cold compilation is timed: the manifest states `core_seconds`.
    Errors are those of `build_module`.
    """
    target = target_named(architecture)
    sources = module_sources(package, target)
    nvcc = find_nvcc(target)
    shelf = store.Shelf(directory)
    shelf.prepare()
    with shelf.workshop(target.name, False) as workshop:
        entry = _fill_sealed(workshop, functools.partial(_fill_module, sources, target, nvcc))
        shutil.rmtree(directory / target.name, ignore_errors=True)
        return shelf.publish(entry, target.name)


def kernel_reports(entry: Path) -> dict[str, KernelReport]:
    """Return what the compiler reported about each kernel of a built module."""
    return {name: KernelReport(**numbers) for name, numbers in store.manifest_of(entry)["kernels"].items()}


def core_seconds(entry: Path) -> float:
    """Return how much processor time it took to build a module, over all cores."""
    return float(store.manifest_of(entry)["core_seconds"])


def load(package: str, architecture: str, *, portable: bool = False) -> tvm_ffi.Module:
    """Return a package's module for an architecture, loaded once a process.

    The first of: the module inside the package's wheel, the cache, a compilation now. A process that finds it in the
    first two starts no compiler. `portable` and errors are those of `build_module`.
    """
    key = (package, architecture, portable)
    module = _loaded.get(key)
    if module is None:
        with _loading:
            module = _loaded.get(key)
            if module is None:
                module = _loaded[key] = _load_library(build_module(package, architecture, portable=portable))
    return module


def _load_library(entry: Path) -> tvm_ffi.Module:
    import tvm_ffi

    path = entry / builder.MODULE
    settings.say(f"loading {path}")
    try:
        return tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError) as error:
        raise BuildError(f"{path} was built but does not load: {error}") from error


def ptx_for(package: str, architecture: str) -> dict[str, str]:
    """Return the PTX of a package's programs: for each kernel, the text of the translation unit that holds it.

    The flags are those of the module, with line information. Needs no GPU. Errors are those of `build_module`.
    """
    target = target_named(architecture)
    sources = ptx_sources(package, target)
    nvcc = find_nvcc(target)
    name = f"{_prefix('ptx', sources)}nvcc{nvcc.version}"
    entry = _obtain(package, name, functools.partial(_fill_ptx, sources, target, nvcc))
    texts = [path.read_text() for path in sorted(entry.glob("*.ptx"))]
    return {kernel: text for text in texts for kernel in _entries_of(text)}


def _entries_of(ptx: str) -> list[str]:
    marker = ".visible .entry "
    return [line[len(marker) :].rstrip("( ") for line in ptx.splitlines() if line.startswith(marker)]


def build_host_for_emulator(package: str) -> tvm_ffi.Module:
    """Return a package's host code compiled against the emulator by the system's C++ compiler, loaded.

    It takes CPU tensors; its launches go to the callback that `install_emulator` sets. Needs no CUDA toolkit.

    Raises
    ------
    BuildError
        No C++ compiler, or it refused.
    """
    sources = emulator_sources(package)
    cxx = find_cxx()
    name = f"{_prefix('host', sources)}cxx{cxx.version}"
    return _load_library(_obtain(package, name, functools.partial(_fill_emulator_host, sources, cxx)))
