"""The native library: compiled once for this machine's CPU, kept in the cache, loaded with ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import platform
import shutil
from pathlib import Path

from cake_shared.errors import BuildError
from cake_shared.jit import builder, settings, store
from cake_shared.jit.compilers import Compiler, find_cxx

SOURCES = Path(__file__).parent / "cpp"
_LIBRARY = "emulator.so"
# Files that are compiled as one: apart, most of their time would go into the same headers and templates again. Those of
# a unit share one unnamed namespace.
_UNITS = (
    "ptx_lexer ptx_parser ptx_body ptx_constant isa isa_table isa_table_memory types",
    "decode decode_check decode_operands module api trace where",
    "shadow strong order_mbarrier clocks flight overlap access memory",
    "gang scheduler lanes async tensor_memory exec_sync",
    "exec_memory exec_store_async exec_async exec_warp",
    "exec_float exec_half exec_convert",
    "exec_integer exec_bits",
    "exec_predicate exec_control exec_move",
    "exec_approx exec_mbarrier exec_bulk",
    "exec_wgmma tensor_core tile",
    "exec_tcgen05 tcgen05_mma",
    "exec_tensor tensor_map reduce",
    "exec_mma exec_atomic",
)
# Contraction would fuse what PTX keeps apart; -O2 alone does not vectorise the lane loops.
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
)


class Allocation(ctypes.Structure):
    """Mirror of CakeEmuAllocation."""

    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("written", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    ]


class Limits(ctypes.Structure):
    """Mirror of CakeEmuLimits."""

    _fields_ = [
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("registers_per_sm", ctypes.c_uint32),
        ("registers_per_thread", ctypes.c_uint32),
        ("cluster_ctas", ctypes.c_uint32),
        ("tmem_columns", ctypes.c_uint32),
    ]


class Launch(ctypes.Structure):
    """Mirror of CakeEmuLaunch."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint32),
        ("params", ctypes.c_char_p),
        ("param_bytes", ctypes.c_uint64),
        ("allocations", ctypes.POINTER(Allocation)),
        ("allocation_count", ctypes.c_uint64),
        ("order", ctypes.c_uint32),
        ("detect", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("profile", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("max_instructions", ctypes.c_uint64),
        ("trace_cta", ctypes.c_int64),
        ("trace_warp", ctypes.c_int32),
        ("stop_line", ctypes.c_uint32),
        ("dump_shared", ctypes.c_uint32 * 2),
        ("dump_tensor", ctypes.c_uint32 * 2),
        ("limits", Limits),
        ("registers", ctypes.c_uint32),
        ("programmatic", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
    ]


def _cpu() -> str:
    """What -march=native depends on: the library must not travel to another kind of CPU through a shared cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    facts = {}
    for line in lines:
        name = line.split(":")[0].strip()
        if name in wanted:
            facts.setdefault(name, line)
    return platform.machine() + "".join(facts.values())


def _files() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp"))


def _name(compiler: Compiler) -> str:
    digest = hashlib.sha256()
    for part in (*_FLAGS, *_UNITS, _cpu(), str(compiler.path), str(compiler.version)):
        digest.update(part.encode() + b"\0")
    for path in _files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"emulator-{digest.hexdigest()[:24]}"


def _build(compiler: Compiler, workshop: Path) -> Path:
    scratch, entry = workshop / "scratch", workshop / "entry"
    scratch.mkdir()
    entry.mkdir()
    edges = []
    for number, files in enumerate(_UNITS):
        unit = scratch / f"unit{number}.cpp"
        unit.write_text("".join(f'#include "{SOURCES / name}.cpp"\n' for name in files.split()))
        edges.append(builder.Edge((compiler.path, *_FLAGS, "-c", "$in", "-o", "$out"), (unit,), f"unit{number}.o"))
    objects = tuple(edge.output for edge in edges)
    edges.append(builder.Edge((compiler.path, "-shared", "-pthread", "$in", "-o", "$out"), objects, _LIBRARY))
    seconds = builder.run_ninja(scratch, edges, "compiling the emulator")
    shutil.move(scratch / _LIBRARY, entry / _LIBRARY)
    store.seal(entry, {"core_seconds": seconds, "compiler": str(compiler.path)})
    return entry


def library_path() -> Path:
    """Return the compiled library, building it first where the cache has none of these sources.

    Raises
    ------
    BuildError
        There is no C++ compiler, it failed, or the cache directory cannot be written.
    """
    compiler = find_cxx()
    name = _name(compiler)
    shelf = store.Shelf(settings.cache_directory() / "emulator")
    found = shelf.find(name)
    if found is None:
        try:
            shelf.prepare()
            with shelf.lock(name) as locked:
                found = shelf.find(name)
                if found is None:
                    with shelf.workshop(name, locked) as workshop:
                        found = shelf.publish(_build(compiler, workshop), name)
        except OSError as error:
            raise BuildError(f"the emulator could not be built in {shelf.directory}: {error}") from error
    return found / _LIBRARY


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded library with its signatures set."""
    lib = ctypes.CDLL(str(library_path()))
    text = ctypes.POINTER(ctypes.c_void_p)
    lib.cake_emu_module.restype = ctypes.c_void_p
    lib.cake_emu_module.argtypes = [ctypes.c_char_p, ctypes.c_char_p, text]
    lib.cake_emu_module_free.restype = None
    lib.cake_emu_module_free.argtypes = [ctypes.c_void_p]
    lib.cake_emu_launch.restype = ctypes.c_int
    lib.cake_emu_launch.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(Launch), text]
    lib.cake_emu_stream.restype = ctypes.c_void_p
    lib.cake_emu_stream.argtypes = [ctypes.c_int]
    lib.cake_emu_stream_restart.restype = None
    lib.cake_emu_stream_restart.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.cake_emu_stream_free.restype = None
    lib.cake_emu_stream_free.argtypes = [ctypes.c_void_p]
    lib.cake_emu_forms.restype = ctypes.c_void_p
    lib.cake_emu_forms.argtypes = []
    lib.cake_emu_free.restype = None
    lib.cake_emu_free.argtypes = [ctypes.c_void_p]
    return lib


def take_text(pointer: ctypes.c_void_p) -> str:
    """Copy a string that the library returned, and free it."""
    value = ctypes.cast(pointer, ctypes.c_char_p).value
    library().cake_emu_free(pointer)
    return "" if value is None else value.decode(errors="replace")


def forms() -> list[tuple[str, str, str, str]]:
    """Return the table of instructions: base, modifiers, operands, targets of each form, as cpp/isa_table.cpp says."""
    return [tuple(form) for form in json.loads(take_text(ctypes.c_void_p(library().cake_emu_forms())))]
