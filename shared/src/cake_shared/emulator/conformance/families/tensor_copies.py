"""A tensor copy (TMA, tiled mode) as data: what it loads and stores, and the kernels that perform it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from cake_shared.emulator.conformance import ptx_text
from cake_shared.emulator.conformance.model import STORAGE, MapArg

Array = np.ndarray
THREADS = 128
FILL_BYTE = 0xAB
COPY_IN = "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
# As the H200 fills: one NaN of 16 bits, repeated.
NAN_FILL = {"f16": 0x7FF7, "bf16": 0x7FF7, "f32": 0x7FF77FF7}


def swizzle(address: Array, span_bytes: int) -> Array:
    """The shared-memory address after a swizzle of 32, 64 or 128 bytes: bits [6:4] ^= bits [9:7], as many as it has."""
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[span_bytes]
    return address ^ (((address >> 7) & mask) << 4)


@dataclasses.dataclass(frozen=True)
class Copy:
    """One tensor copy: a tensor of ``dims`` (innermost first), a box at ``at``, swizzle and fill."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    swizzle_bytes: int = 0
    fill_nan: bool = False
    pad_bytes: int = 0
    element_strides: tuple[int, ...] | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(STORAGE[self.dtype]).itemsize

    @property
    def strides_bytes(self) -> tuple[int, ...]:
        """Byte strides of dimensions 1.., each row padded to 16 bytes plus ``pad_bytes``."""
        strides, step = [], self.dims[0] * self.itemsize
        for extent in self.dims[1:]:
            step = -(-step // 16) * 16 + self.pad_bytes
            strides.append(step)
            step *= extent
        return tuple(strides)

    @property
    def tensor_bytes(self) -> int:
        """Bytes from the first to behind the last element, rounded up to 16."""
        last = (self.dims[0] - 1) * self.itemsize + self.itemsize
        last += sum((extent - 1) * stride for extent, stride in zip(self.dims[1:], self.strides_bytes))
        return -(-last // 16) * 16

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements that the box holds along each dimension: ceil(box / element stride)."""
        steps = self.element_strides or (1,) * len(self.box)
        return tuple(-(-b // s) for b, s in zip(self.box, steps))

    @property
    def box_bytes(self) -> int:
        """Bytes that one box takes in shared memory."""
        return int(np.prod(self.counts)) * self.itemsize

    def map_arg(self, buffer: str, offset_bytes: int = 0) -> MapArg:
        """The tensor map of this copy over ``buffer``."""
        return MapArg(
            buffer, self.dtype, self.dims, self.strides_bytes, self.box, self.swizzle_bytes, self.element_strides,
            self.fill_nan, offset_bytes,
        )  # fmt: skip

    def elements(self, stores: bool = False) -> tuple[Array, Array, Array]:
        """For each box element in order: byte offset in the tensor, byte offset in shared memory, inside or not.

        A store takes the units of 16 bytes that begin inside a row for inside, as the H200 does.
        """
        dims = list(self.dims)
        if stores:
            dims[0] = -(-dims[0] * self.itemsize // 16) * 16 // self.itemsize
        steps = self.element_strides or (1,) * len(self.box)
        axes = [np.arange(c) * s for c, s in zip(self.counts, steps)]
        grid = np.meshgrid(*axes[::-1], indexing="ij")[::-1]
        source = np.zeros(grid[0].shape, np.int64)
        inside = np.ones(grid[0].shape, bool)
        for axis, (index, start, extent) in enumerate(zip(grid, self.at, dims)):
            coordinate = index + start
            inside &= (coordinate >= 0) & (coordinate < extent)
            source += coordinate * (self.itemsize if axis == 0 else self.strides_bytes[axis - 1])
        linear = np.arange(source.size) * self.itemsize
        return source.reshape(-1), swizzle(linear, self.swizzle_bytes), inside.reshape(-1)

    def loaded(self, tensor: Array) -> Array:
        """What a load leaves in shared memory (``tensor`` and result as bytes)."""
        source, target, inside = self.elements()
        fill = NAN_FILL[self.dtype] if self.fill_nan else 0
        values = np.full(source.size, fill, STORAGE[self.dtype])
        rows = source[inside, None] + np.arange(self.itemsize)
        values[inside] = tensor[rows].reshape(-1).view(STORAGE[self.dtype])
        image = np.full(self.box_bytes, FILL_BYTE, np.uint8)
        image[(target[:, None] + np.arange(self.itemsize)).reshape(-1)] = values.view(np.uint8)
        return image

    def stored(self, tensor: Array, image: Array, combine: Callable[[Array, Array], Array] | None = None) -> Array:
        """The tensor after a store of ``image`` from shared memory, or after a reduction with ``combine(old, new)``."""
        source, target, inside = self.elements(stores=True)
        out = tensor.copy()
        from_rows = (target[inside, None] + np.arange(self.itemsize)).reshape(-1)
        to_rows = (source[inside, None] + np.arange(self.itemsize)).reshape(-1)
        new = image[from_rows].view(STORAGE[self.dtype])
        if combine is not None:
            with np.errstate(all="ignore"):
                new = np.ascontiguousarray(combine(out[to_rows].view(STORAGE[self.dtype]), new)).astype(
                    STORAGE[self.dtype]
                )
        out[to_rows] = new.view(np.uint8)
        return out


def _entry_head(name: str, rank: int, pointers: tuple[str, ...]) -> str:
    params = [".param .align 128 .b8 p_map[128]"] + [f".param .u64 p_{p}" for p in pointers]
    params += [f".param .u32 p_c{i}" for i in range(rank)]
    loads = "\n".join(f".reg .b32 c{i};\nld.param.u32 c{i}, [p_c{i}];" for i in range(rank))
    return f""".visible .entry {name}({", ".join(params)})
{{
.reg .b64 map;
.reg .b32 data, barrier, tid;
.reg .pred first;
mov.b64 map, p_map;
cvta.param.u64 map, map;
mov.u32 tid, %tid.x;
setp.eq.u32 first, tid, 0;
{loads}
{ptx_text.parameters(pointers)}
mov.u32 data, dynamic;"""


def barrier_offset(byte_count: int) -> int:
    """Where the mbarrier of a load lies: after its box, at a multiple of 16."""
    return -(-byte_count // 16) * 16


def _fill_shared(byte_count: int) -> str:
    return f"""
{{
.reg .b32 index, here, word;
.reg .pred go;
mov.u32 word, {FILL_BYTE * 0x01010101:#x};
mov.u32 index, %tid.x;
shl.b32 index, index, 2;
again:
setp.lt.u32 go, index, {byte_count};
@!go bra done;
add.u32 here, data, index;
st.shared.b32 [here], word;
add.u32 index, index, {4 * THREADS};
bra again;
done:
}}"""


def load_kernel(name: str, copy: Copy) -> str:
    """One box from global to shared memory, then all of shared memory to the output."""
    rank = len(copy.dims)
    coordinates = ptx_text.braces("c", rank)
    return f"""{_entry_head(name, rank, ("out",))}
add.u32 barrier, data, {barrier_offset(copy.box_bytes)};
{_fill_shared(copy.box_bytes)}
@first mbarrier.init.shared::cta.b64 [barrier], 1;
@first fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
bar.sync 0;
@!first bra issued;
mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [barrier], {copy.box_bytes};
{COPY_IN.format(rank=rank)} [data], [map, {coordinates}], [barrier];
issued:
{ptx_text.wait_parity("barrier", 0)}
{ptx_text.copy_out("out", "data", copy.box_bytes, THREADS)}
ret;
}}"""


def store_kernel(name: str, copy: Copy, operation: str | None = None) -> str:
    """The input to shared memory, then one box from there to global memory: a store, or a reduction."""
    rank = len(copy.dims)
    coordinates = ptx_text.braces("c", rank)
    if operation is None:
        issue = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    else:
        issue = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{operation}.tile.bulk_group"
    return f"""{_entry_head(name, rank, ("source",))}
{ptx_text.copy_in("source", "data", copy.box_bytes, THREADS)}
fence.proxy.async.shared::cta;
bar.sync 0;
@!first bra issued;
{issue} [map, {coordinates}], [data];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
issued:
ret;
}}"""


def multicast_kernel(name: str, copy: Copy, mask: int) -> str:
    """CTA 0 of the cluster loads one box into every CTA of ``mask``; each CTA writes its shared memory out."""
    rank = len(copy.dims)
    coordinates = ptx_text.braces("c", rank)
    return f"""{_entry_head(name, rank, ("out",))}
.reg .b32 rank, bit;
.reg .pred chosen, leader;
.reg .b16 mask;
add.u32 barrier, data, {barrier_offset(copy.box_bytes)};
mov.u32 rank, %cluster_ctarank;
mul.wide.u32 map_step, rank, {copy.box_bytes};
add.u64 out, out, map_step;
shl.b32 bit, 1, rank;
and.b32 bit, bit, {mask};
setp.ne.u32 chosen, bit, 0;
mov.b16 mask, {mask};
{_fill_shared(copy.box_bytes)}
@first mbarrier.init.shared::cta.b64 [barrier], 1;
@first fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
bar.sync 0;
and.pred leader, first, chosen;
@leader mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [barrier], {copy.box_bytes};
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
setp.eq.and.u32 leader, rank, 0, first;
@!leader bra issued;
{COPY_IN.format(rank=rank)}.multicast::cluster [data], [map, {coordinates}], [barrier], mask;
issued:
@!chosen bra skip;
{ptx_text.wait_parity("barrier", 0)}
skip:
{ptx_text.copy_out("out", "data", copy.box_bytes, THREADS)}
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
ret;
}}""".replace(".reg .b32 rank, bit;", ".reg .b32 rank, bit;\n.reg .b64 map_step;")


def join(arrays: list[Array], alignment: int = 256) -> tuple[Array, list[int]]:
    """One buffer of all arrays (uint8), each at an offset of a multiple of ``alignment``; and the offsets."""
    offsets, position = [], 0
    for array in arrays:
        offsets.append(position)
        position += -(-array.size // alignment) * alignment
    joined = np.zeros(max(position, alignment), np.uint8)
    for array, offset in zip(arrays, offsets):
        joined[offset : offset + array.size] = array
    return joined, offsets
