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
from cake_shared.emulator.guard import Areas
from cake_shared.testing.emulated import EmulatedPackage

if TYPE_CHECKING:
    from cake_shared.jit import CakeLaunch

MAP_BYTES = 128


def _contents(areas: Areas, regions: dict[str, Region]) -> dict[str, np.ndarray]:
    """The areas' bytes; zero for what nothing has written, whose bytes are whatever the memory held."""
    found = {name: np.zeros(end - begin, np.uint8) for name, (begin, end) in areas.bounds.items()}
    for name, region in regions.items():
        area, offset = areas.place[name]
        if region.const or region.written is None:
            data = ctypes.string_at(region.address, region.size)
            found[area][offset : offset + region.size] = np.frombuffer(data, np.uint8)
    return found


class Recorder(EmulatedPackage):
    """An emulated package that keeps what each host call launches, and its tensors before the first launch."""

    def __init__(self, package: str, architecture: str, keeps: Callable[[str], bool]):
        super().__init__(package, architecture, Options(detect="none", threads=os.cpu_count() or 1))
        self.keeps = keeps
        self.buffers: dict[str, np.ndarray] = {}
        self.launches: list[Launch] = []
        # "call tensor" -> buffer, offset, bytes: those that kernels write.
        self.tensors: dict[str, tuple[str, int, int]] = {}
        self.call = 0
        self._areas: Areas | None = None

    def _on_tensor(self, name: str, address: int, size_bytes: int, writable: bool) -> None:
        if self._launched:
            self._areas = None
        super()._on_tensor(name, address, size_bytes, writable)

    def _on_launch(self, kernel: str, launch: CakeLaunch, params: bytes) -> None:
        if not self.keeps(kernel):
            return
        if self._areas is None:
            self.call += 1
            self._areas = Areas(self.regions)
            for name, data in _contents(self._areas, self.regions).items():
                self.buffers[f"{self.call} {name}"] = data
            for name, region in self.regions.items():
                if not region.const:
                    self.tensors[f"{self.call} {name}"] = (*self._find(region.address), region.size)
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

    def _find(self, address: int) -> tuple[str, int] | None:
        """The buffer that an address lies in, and the byte offset."""
        assert self._areas is not None
        place = self._areas.find(address)
        return None if place is None else (f"{self.call} {place[0]}", place[1])

    def _struct(self, params: bytes) -> Struct:
        pointers, maps, at = [], [], 0
        while at + 8 <= len(params):
            found = tensor_maps.decode(params[at : at + MAP_BYTES]) if at % 64 == 0 else None
            if found is not None:
                place = self._find(found.pop("address"))
                if place is None:
                    raise ValueError(f"a tensor map at byte {at} of the parameters lies over no tensor of the call")
                maps.append((at, MapArg(place[0], offset_bytes=place[1], **found)))
                at += MAP_BYTES
                continue
            place = self._find(struct.unpack_from("<Q", params, at)[0])
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
        Which of the kernels' launches to run and keep.
    """
    recorder = Recorder(package, "sm_90a", launches)
    with recorder:
        call(recorder)
    texts = {kernel: module.text for kernel, module in recorder.kernels.items()}
    found = []
    for name, (buffer, offset, size) in recorder.tensors.items():
        check = checks(name, size)
        if check is not None:
            found.append(check.at(buffer, offset))
    units = {launch.unit: texts[launch.unit] for launch in recorder.launches}
    return Case(lambda: units, recorder.buffers, recorder.launches, found)
