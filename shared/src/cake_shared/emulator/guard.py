"""Copies of a call's tensors, apart from each other by bands that no kernel may touch.

Tensors of one process may lie side by side, so that an access past the end of one is an access to another. Here it
meets a band. What parameters hold is moved along: every aligned word of them that points into a tensor, and with it the
base of a tensor map. Pointers that lie in memory are not.
"""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from cake_shared.emulator.params import Region

_ALIGNMENT = 4096


class Areas:
    """The memory behind tensors: those that overlap share an area, so that they still do where it is moved to.

    Attributes
    ----------
    bounds
        First byte and end of each area, named after its first tensor.
    place
        Area of each tensor, and its byte offset in it.
    """

    def __init__(self, regions: dict[str, Region]):
        self.bounds: dict[str, tuple[int, int]] = {}
        self.place: dict[str, tuple[str, int]] = {}
        last = None
        for name, region in sorted(regions.items(), key=lambda item: (item[1].address, -item[1].size)):
            begin, end = region.address, region.address + region.size
            if last is not None and begin < self.bounds[last][1]:
                self.bounds[last] = (self.bounds[last][0], max(end, self.bounds[last][1]))
            else:
                last = name
                self.bounds[last] = (begin, end)
            self.place[name] = (last, begin - self.bounds[last][0])

    def find(self, address: int) -> tuple[str, int] | None:
        """The area that holds an address, else the one that ends there, with the byte offset in it."""
        touching = [(name, begin) for name, (begin, end) in self.bounds.items() if begin <= address <= end]
        return (touching[-1][0], address - touching[-1][1]) if touching else None


class GuardedCopies:
    """Copies of the areas of some regions, `band` bytes and more apart.

    Attributes
    ----------
    regions
        The regions where the copies have them.
    """

    def __init__(self, regions: dict[str, Region], band: int):
        self._originals, self._areas = regions, Areas(regions)
        self._at: dict[str, int] = {}
        size = 0
        for name, (begin, end) in self._areas.bounds.items():
            # As the original lies within a page, so that alignment is what it was.
            self._at[name] = -(-(size + band) // _ALIGNMENT) * _ALIGNMENT + begin % _ALIGNMENT
            size = self._at[name] + end - begin
        self._memory = np.empty(size + band + _ALIGNMENT, np.uint8)
        base = -(-self._memory.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self._at = {name: base + offset for name, offset in self._at.items()}
        self.regions = [
            Region(self._at[area] + offset, region.size, name, region.const, region.written)
            for name, region in regions.items()
            for area, offset in (self._areas.place[name],)
        ]

    def load(self) -> None:
        """Copy the tensors' bytes here."""
        for name, (begin, end) in self._areas.bounds.items():
            ctypes.memmove(self._at[name], begin, end - begin)

    def store(self) -> None:
        """Copy what kernels may write back to the tensors."""
        for copy in self.regions:
            if not copy.const:
                ctypes.memmove(self._originals[copy.name].address, copy.address, copy.size)

    def moved(self, params: bytes) -> bytes:
        """Parameters for the copies."""
        data = bytearray(params)
        for at in range(0, len(params) - 7, 8):
            place = self._areas.find(struct.unpack_from("<Q", params, at)[0])
            if place is not None:
                struct.pack_into("<Q", data, at, self._at[place[0]] + place[1])
        return bytes(data)
