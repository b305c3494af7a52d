"""A package's host chain as a conformance case: its launches, recorded, to be run from the same bytes on either side.

The parameter structs are the host's own. Words of them that point into a tensor are moved to where a runner puts that
tensor, and tensor maps are encoded anew for it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cake_shared.emulator import Options, Region, tensor_maps
from cake_shared.emulator.conformance.model import Case, Check, Launch, MapArg, Struct
from cake_shared.testing.emulated import EmulatedPackage

if TYPE_CHECKING:
    from cake_shared.jit import CakeLaunch

MAP_BYTES = 128


class _Areas:
    """The memory behind the tensors of one host call: those that overlap share an area."""

    def __init__(self, regions: dict[str, Region], prefix: str):
        self.bounds: dict[str, tuple[int, int]] = {}
        self.place: dict[str, tuple[str, int]] = {}  # tensor -> area, byte offset in it
        for name, region in sorted(regions.items(), key=lambda item: (item[1].address, -item[1].size)):
            begin, end = region.address, region.address + region.size
            last = next(reversed(self.bounds), None)
            if last is not None and begin < self.bounds[last][1]:
                self.bounds[last] = (self.bounds[last][0], max(end, self.bounds[last][1]))
            else:
                last = f"{prefix}{name}"
                self.bounds[last] = (begin, end)
            self.place[name] = (last, begin - self.bounds[last][0])

    def find(self, address: int) -> tuple[str, int] | None:
        """The area that holds an address, else the one that ends there, with the byte offset."""
        touching = [(name, begin) for name, (begin, end) in self.bounds.items() if begin <= address <= end]
        return (touching[-1][0], address - touching[-1][1]) if touching else None

    def contents(self, regions: dict[str, Region]) -> dict[str, np.ndarray]:
        """The areas' bytes; zero for what nothing has written, whose bytes are whatever the memory held."""
        found = {name: np.zeros(end - begin, np.uint8) for name, (begin, end) in self.bounds.items()}
        for name, region in regions.items():
            area, offset = self.place[name]
            if region.const or region.written is None:
                data = ctypes.string_at(region.address, region.size)
                found[area][offset : offset + region.size] = np.frombuffer(data, np.uint8)
        return found


class Recorder(EmulatedPackage):
    """An emulated package that keeps what each host call launches, and its tensors before the first launch."""

    def __init__(self, package: str, architecture: str):
        super().__init__(package, architecture, Options(detect="none", threads=os.cpu_count() or 1))
        self.buffers: dict[str, np.ndarray] = {}
        self.launches: list[Launch] = []
        # "call tensor" -> buffer, offset, bytes: those that kernels write.
        self.tensors: dict[str, tuple[str, int, int]] = {}
        self.call = 0
        self._areas: _Areas | None = None

    def _on_tensor(self, name: str, address: int, size_bytes: int, writable: bool) -> None:
        if self._launched:
            self._areas = None
        super()._on_tensor(name, address, size_bytes, writable)

    def _on_launch(self, kernel: str, launch: CakeLaunch, params: bytes) -> None:
        if self._areas is None:
            self.call += 1
            self._areas = _Areas(self.regions, f"{self.call} ")
            self.buffers |= self._areas.contents(self.regions)
            for name, region in self.regions.items():
                if not region.const:
                    self.tensors[f"{self.call} {name}"] = (*self._areas.place[name], region.size)
        self.launches.append(
            Launch(
                kernel,
                tuple(launch.grid),
                tuple(launch.block),
                (self._struct(params),),
                tuple(launch.cluster),
                launch.smem_bytes,
                bool(launch.programmatic),
                unit=kernel,
            )
        )
        super()._on_launch(kernel, launch, params)

    def _struct(self, params: bytes) -> Struct:
        assert self._areas is not None
        pointers, maps, at = [], [], 0
        while at + 8 <= len(params):
            found = tensor_maps.decode(params[at : at + MAP_BYTES]) if at % 64 == 0 else None
            if found is not None:
                place = self._areas.find(found.pop("address"))
                if place is None:
                    raise ValueError(f"a tensor map at byte {at} of the parameters lies over no tensor of the call")
                maps.append((at, MapArg(place[0], offset_bytes=place[1], **found)))
                at += MAP_BYTES
                continue
            place = self._areas.find(struct.unpack_from("<Q", params, at)[0])
            if place is not None:
                pointers.append((at, *place))
            at += 8
        return Struct(params, tuple(pointers), tuple(maps))


def record(
    package: str,
    call: Callable[[Recorder], None],
    checks: Callable[[str, int], Check | None],
    launches: Callable[[str], bool] = lambda kernel: True,
) -> Case:
    """Run a package's host functions in the emulator; return what they launched as a case.

    Parameters
    ----------
    package
        Import name.
    call
        Runs the host functions of the recorder's `module` on CPU tensors.
    checks
        Given "call tensor" and its bytes, the check of that tensor: of buffer "", offset 0. None leaves it out.
    launches
        Which of the kernels' launches to keep.
    """
    recorder = Recorder(package, "sm_90a")
    with recorder:
        call(recorder)
    texts = {kernel: module.text for kernel, module in recorder.kernels.items()}
    found = []
    for name, (buffer, offset, size) in recorder.tensors.items():
        check = checks(name, size)
        if check is not None:
            found.append(check.at(buffer, offset))
    kept = [launch for launch in recorder.launches if launches(launch.kernel)]
    units = {launch.unit: texts[launch.unit] for launch in kept}
    return Case(lambda: units, recorder.buffers, kept, found)
