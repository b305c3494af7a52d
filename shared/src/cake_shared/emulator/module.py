"""Modules, launches and streams: what a user of the emulator calls."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
import weakref
from dataclasses import dataclass, field

import numpy as np

from cake_shared.emulator import native
from cake_shared.emulator.errors import EmulatorError, LaunchError, from_native
from cake_shared.emulator.guard import GuardedCopies
from cake_shared.emulator.options import DEFAULT_MAX_INSTRUCTIONS, DETECT, ORDERS, Options
from cake_shared.emulator.params import Marked, Param, Region, pack, refuse_const_aliases, region_of, span_of
from cake_shared.emulator.report import Report, report_of
from cake_shared.emulator.stream import Stream
from cake_shared.target import Target, target_named


@dataclass(frozen=True)
class Kernel:
    """A kernel of a module: its parameters and what it asks for; `error` where it cannot be launched."""

    name: str
    params: tuple[Param, ...]
    param_bytes: int
    shared_bytes: int
    max_threads: int
    cluster: tuple[int, int, int]
    register_bytes: int = field(repr=False, default=0)
    instructions: int = field(repr=False, default=0)
    communicates: bool = field(repr=False, default=False)
    demangled: str = field(repr=False, default="")
    error: EmulatorError | None = field(repr=False, default=None, compare=False)

    @property
    def title(self) -> str:
        """Its name as C++ writes it, without what it returns and takes."""
        text, depth = self.demangled or self.name, 0
        if not text.endswith(")"):
            return text
        for at in range(len(text) - 1, -1, -1):
            depth += (text[at] == ")") - (text[at] == "(")
            if depth == 0:
                return text[:at].removeprefix("void ")
        return text


def _kernel(k: dict, file: str) -> Kernel:
    kernel = Kernel(
        name=k["name"],
        params=tuple(Param(p["name"], p["type"], p["offset"], p["bytes"], p["align"]) for p in k["params"]),
        param_bytes=k["param_bytes"],
        shared_bytes=k["shared_bytes"],
        max_threads=k["max_threads"],
        cluster=tuple(k["cluster"]),
        register_bytes=k["register_bytes"],
        instructions=k["instructions"],
        communicates=k["communicates"],
        demangled=k["demangled"],
    )
    if "error" not in k:
        return kernel
    return dataclasses.replace(kernel, error=from_native(k["error"], file=file, kernel=kernel.title))


def _limits(target: Target) -> native.Limits:
    return native.Limits(
        threads=target.threads_per_cta,
        shared_bytes=target.shared_bytes_per_cta,
        registers_per_sm=target.registers_per_sm,
        registers_per_thread=target.registers_per_thread,
        cluster_ctas=target.cluster_ctas,
        tmem_columns=target.tmem_columns,
    )


def _triple(value: int | tuple, name: str) -> tuple[int, int, int]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    sizes = all(isinstance(v, (int, np.integer)) and 0 <= v < 1 << 32 for v in values)
    if not 1 <= len(values) <= 3 or not sizes:
        raise ValueError(f"{name} takes one to three sizes below 2^32, got {value!r}")
    return tuple(int(v) for v in values) + (1,) * (3 - len(values))


def _cluster(value: int | tuple, declared: tuple[int, int, int]) -> tuple[int, int, int]:
    """The shape that a launch asks for; zeros alone stand for what the kernel requires, else one CTA."""
    given = _triple(value, "cluster")[: len(value) if isinstance(value, (tuple, list)) else 1]
    if not any(given):
        return declared if declared[0] else (1, 1, 1)
    if not all(given):
        raise ValueError(f"cluster takes positive sizes, or zeros alone for what the kernel requires, got {value!r}")
    return (*given, 1, 1)[:3]


class Module:
    """PTX text, parsed and decoded, with the memory of its variables."""

    def __init__(self, handle: int, description: dict, name: str, target: str, text: str):
        self.name, self.target, self.text = name, target, text
        self._handle = handle
        self._finalizer = weakref.finalize(self, native.library().cake_emu_module_free, handle)
        self._variables = {v["name"]: (v["address"], v["bytes"]) for v in description["variables"]}
        self.kernels: dict[str, Kernel] = {k["name"]: _kernel(k, name) for k in description["kernels"]}

    @classmethod
    def from_ptx(cls, text: str, target: str = "sm_90a", name: str = "module.ptx") -> Module:
        """Parse and decode PTX text.

        Parameters
        ----------
        text
            PTX as a compiler emits it.
        target
            The architecture to stand for; text for a specific one (`sm_90a`) runs on that one alone.
        name
            Shown in errors.

        Raises
        ------
        PtxSyntaxError
            The text cannot be read, or is for another architecture.
        UnsupportedInstruction, PtxSyntaxError
            All its kernels have instructions that the emulator does not execute, that the text's target does not have,
            or that are malformed. Where some kernels have none, those can be launched; `Kernel.error` and `require`
            tell about the others.
        """
        out = ctypes.c_void_p()
        handle = native.library().cake_emu_module(text.encode(), target.encode(), ctypes.byref(out))
        description = json.loads(native.take_text(out))
        if not handle:
            raise from_native(description, file=name)
        module = cls(handle, description, name, target, text)
        if module.kernels and all(kernel.error for kernel in module.kernels.values()):
            module.require()
        return module

    def require(self, *kernels: str) -> None:
        """Raise the error of the first of these kernels (default: of all) that cannot be launched."""
        for kernel in kernels or self.kernels:
            error = self.kernels[self.function(kernel)].error
            if error is not None:
                raise error

    @classmethod
    def from_cuda(
        cls, source: str, target: str = "sm_90a", flags: tuple[str, ...] = (), name: str | None = None
    ) -> Module:
        """Compile CUDA C++ (a path ending in .cu, or the source itself) to PTX with -lineinfo, and load it.

        Raises
        ------
        BuildError
            There is no nvcc for the target, or it failed.
        """
        from cake_shared.emulator.compile import compile_to_ptx

        text, shown = compile_to_ptx(source, target, flags)
        return cls.from_ptx(text, target, name or shown)

    def function(self, name: str) -> str:
        """Return the full name of a kernel: itself, or the only one that C++ calls so, `f`, `space::f` or `f<128>`."""
        if name in self.kernels:
            return name
        pattern = re.compile(rf"(?<![\w:]){re.escape(name)}(<.*>)?\(|(?<=::){re.escape(name)}(<.*>)?\(")
        found = [key for key, kernel in self.kernels.items() if pattern.search(kernel.demangled)]
        if len(found) != 1:
            known = ", ".join(sorted(kernel.title for kernel in self.kernels.values()))
            raise KeyError(f"{name!r} names {len(found)} kernels of {self.name}: {known}")
        return found[0]

    @staticmethod
    def const(array: object) -> Marked:
        """Mark an array as a const input of a launch: writes to it raise `ConstWrite`."""
        return Marked(array, const=True)

    @staticmethod
    def uninit(array: object) -> Marked:
        """Mark an array as never written: what is read before a write raises `UninitialisedRead`.

        Keep the returned value and pass it to later launches too: it remembers what has been written.
        """
        return Marked(array, written=np.zeros(span_of(array)[1], np.uint8))

    def symbol(self, name: str) -> np.ndarray:
        """Return a view of a `.global` or `.const` variable's bytes (uint8)."""
        if name not in self._variables:
            raise KeyError(f"{self.name} has no variable {name!r}: {', '.join(sorted(self._variables))}")
        address, size = self._variables[name]
        view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        view.flags.writeable = True
        return view

    def launch(
        self,
        kernel: str,
        grid: int | tuple,
        block: int | tuple,
        params: list | tuple = (),
        *,
        cluster: int | tuple = (0, 0, 0),
        smem_bytes: int = 0,
        allocations: list | tuple = (),
        options: Options | None = None,
        stream: Stream | None = None,
        programmatic: bool = False,
    ) -> Report:
        """Run a kernel to its end.

        Parameters
        ----------
        kernel
            Name, mangled or not.
        grid, block, cluster
            Shapes, x first. The cluster's default is what the kernel requires, else one CTA.
        params
            One value a parameter: NumPy arrays or torch CPU tensors for pointers (registered for this launch, read-only
            ones as const), numbers, NumPy scalars, bytes for structs.
        smem_bytes
            Dynamic shared memory.
        allocations
            Arrays whose addresses hide in struct parameters.
        options
            See `Options`.
        stream
            What ran before: a programmatic launch is compared with it.
        programmatic
            The launch may start before its predecessor on the stream ends; the kernel waits by `griddepcontrol.wait`.
            Without a stream its predecessor is unknown, and may write everything.

        Returns
        -------
        Report
            The counters.

        Raises
        ------
        EmulatorError
            The subclass of the detector that fired.
        TypeError, ValueError
            An argument does not fit, or two share memory that is const for one of them alone; the message names them.
        """
        full = self.function(kernel)
        self.require(full)
        data, regions = pack(self.kernels[full].params, params)
        for position, array in enumerate(allocations):
            regions.append(array if isinstance(array, Region) else region_of(array, f"allocation {position}"))
        refuse_const_aliases(regions)
        shape = {"cluster": cluster, "smem_bytes": smem_bytes, "options": options}
        if options is None or not options.guard_bytes:
            return self.launch_packed(
                full, grid, block, data, regions, **shape, stream=stream, programmatic=programmatic
            )
        if stream is not None:
            raise ValueError("guard_bytes: arrays of a stream stay where they are, for later launches to be compared")
        copies = GuardedCopies({region.name: region for region in regions}, options.guard_bytes)
        copies.load()
        report = self.launch_packed(
            full, grid, block, copies.moved(data), copies.regions, **shape, programmatic=programmatic
        )
        copies.store()
        return report

    def launch_packed(
        self,
        kernel: str,
        grid: int | tuple,
        block: int | tuple,
        data: bytes,
        regions: list[Region],
        *,
        cluster: int | tuple = (0, 0, 0),
        smem_bytes: int = 0,
        options: Options | None = None,
        stream: Stream | None = None,
        programmatic: bool = False,
        registers: int = 0,
    ) -> Report:
        """Run a kernel whose parameters are bytes already, with the regions that it may touch.

        `registers` is what a thread uses by the compiler's report, 0 where that is not known; the rest as in `launch`.
        """
        options = options or Options()
        if programmatic and stream is None:
            stream = Stream(unknown_before=True)
        declared = self.kernels[kernel].cluster
        shape = _cluster(cluster, declared)
        if not isinstance(smem_bytes, (int, np.integer)) or not 0 <= smem_bytes < 1 << 32:
            raise LaunchError(
                f"smem_bytes: takes a whole number of bytes below 2^32, got {smem_bytes!r}", kernel=kernel
            )
        table = (native.Allocation * len(regions))()
        for entry, region in zip(table, regions, strict=True):
            entry.begin, entry.bytes, entry.flags = region.address, region.size, int(region.const)
            entry.written = None if region.written is None else region.written.ctypes.data
            entry.name = region.name.encode()
        launch = native.Launch(
            grid=_triple(grid, "grid"),
            block=_triple(block, "block"),
            cluster=shape,
            dynamic_shared=smem_bytes,
            params=data,
            param_bytes=len(data),
            allocations=table,
            allocation_count=len(regions),
            order=ORDERS[options.order],
            detect=DETECT[options.detect],
            threads=options.threads,
            profile=int(options.profile),
            seed=options.seed,
            max_instructions=options.max_instructions or DEFAULT_MAX_INSTRUCTIONS,
            trace_cta=options.trace[0] if options.trace else -1,
            trace_warp=options.trace[1] if options.trace and len(options.trace) > 1 else -1,
            stop_line=options.stop_line or 0,
            dump_shared=(ctypes.c_uint32 * 2)(*(options.dump_shared or (0, 0))),
            dump_tensor=(ctypes.c_uint32 * 2)(*(options.dump_tensor or (0, 0))),
            limits=_limits(target_named(self.target)),
            registers=registers,
            programmatic=int(programmatic),
            stream=None if stream is None else stream.handle,
        )
        out = ctypes.c_void_p()
        status = native.library().cake_emu_launch(
            self._handle, kernel.encode(), ctypes.byref(launch), ctypes.byref(out)
        )
        result = json.loads(native.take_text(out))
        if status:
            raise from_native(result, file=self.name, kernel=self.kernels[kernel].title)
        return report_of(kernel, result)
