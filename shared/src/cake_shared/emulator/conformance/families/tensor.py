"""Tensor copies (TMA, tiled mode): ranks 1 to 5, every swizzle, out-of-bounds fill, stores, reductions, multicast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from cake_shared.emulator.conformance import ptx_text
from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.model import STORAGE, Case, Check, Launch, MapArg, Program, Ptr, Refusal, widen

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


LOADS = [
    Copy("1d u8", "u8", (100,), (64,), (16,)),
    Copy("1d f32 beyond the end", "f32", (50,), (32,), (40,)),
    Copy("1d f32 before the start", "f32", (50,), (32,), (-8,)),
    Copy("1d f64", "f64", (40,), (16,), (4,)),
    Copy("2d bf16 no swizzle", "bf16", (72, 20), (16, 8), (8, 4)),
    Copy("2d bf16 32B", "bf16", (72, 40), (16, 24), (8, 3), 32),
    Copy("2d bf16 64B", "bf16", (72, 40), (32, 24), (8, 2), 64),
    Copy("2d bf16 128B", "bf16", (136, 40), (64, 32), (64, 5), 128),
    Copy("2d bf16 128B all corners out", "bf16", (40, 10), (64, 16), (-8, -3), 128),
    Copy("2d bf16 entirely outside", "bf16", (40, 10), (16, 8), (64, 32)),
    Copy("2d f16 NaN fill 128B", "f16", (40, 10), (64, 16), (8, 4), 128, True),
    Copy("2d f32 NaN fill", "f32", (20, 6), (16, 8), (-4, 2), 0, True),
    Copy("2d bf16 NaN fill", "bf16", (20, 6), (16, 8), (8, -2), 32, True),
    Copy("2d f32 128B padded rows", "f32", (40, 20), (32, 16), (12, 2), 128, False, 48),
    Copy("2d u8 128B", "u8", (200, 20), (128, 8), (112, 9), 128),
    Copy("2d u32 64B", "u32", (30, 20), (16, 20), (20, 1), 64),
    Copy("2d u64 128B", "u64", (30, 9), (16, 8), (2, 2), 128),
    Copy("3d bf16 128B", "bf16", (72, 12, 5), (64, 8, 3), (24, 6, 3), 128),
    Copy("3d f32 64B", "f32", (20, 7, 6), (16, 4, 2), (-4, 5, 4), 64),
    Copy("4d u16 32B", "u16", (24, 5, 4, 3), (16, 4, 2, 2), (8, 2, -1, 2), 32),
    Copy("5d bf16", "bf16", (16, 5, 4, 3, 3), (8, 3, 2, 2, 2), (8, 3, 1, -1, 2)),
    Copy("5d f32 128B", "f32", (40, 3, 4, 3, 2), (32, 2, 2, 2, 2), (12, 2, 3, 1, 1), 128),
    Copy("2d bf16 element strides", "bf16", (64, 32), (16, 16), (8, 3), 0, False, 0, (1, 2)),
]

STORES = [
    Copy("1d u32", "u32", (50,), (32,), (28,)),
    Copy("2d bf16", "bf16", (40, 20), (16, 8), (32, 15)),
    Copy("2d bf16 32B", "bf16", (40, 20), (16, 8), (32, 14), 32),
    Copy("2d bf16 64B", "bf16", (72, 40), (32, 16), (48, 30), 64),
    Copy("2d bf16 128B", "bf16", (136, 40), (64, 16), (64, 5), 128),
    Copy("2d f32 128B", "f32", (40, 20), (32, 16), (20, 10), 128),
    Copy("3d u8 128B", "u8", (144, 6, 4), (128, 4, 2), (32, 3, 1), 128),
    Copy("4d f32", "f32", (20, 4, 3, 3), (8, 2, 2, 2), (16, 3, 2, 0)),
    Copy("5d u64 64B", "u64", (12, 3, 3, 2, 2), (8, 2, 2, 2, 2), (6, 2, 2, 1, 1), 64),
]


def _integer_reduction(operation: str, signed: str | None) -> Callable[[Array, Array], Array]:
    functions = {
        "add": lambda a, b: a + b,
        "min": np.minimum,
        "max": np.maximum,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
        "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
    }
    function = functions[operation]
    if signed is None:
        return function
    return lambda a, b: function(a.view(signed), b.view(signed)).view(a.dtype)


def _half_reduction(kind: str, operation: str) -> Callable[[Array, Array], Array]:
    fmt, bits = {"f16": (rd.F16, rd.f16_bits), "bf16": (rd.BF16, rd.bf16_bits)}[kind]
    function = {"add": lambda x, y: x + y, "min": np.minimum, "max": np.maximum}[operation]
    return lambda a, b: bits(rd.round_to(function(widen(a, kind), widen(b, kind)), 0.0, fmt, "rn"))


def _f32_add(a: Array, b: Array) -> Array:
    return (a.view(np.float32) + b.view(np.float32)).view(np.uint32)


REDUCTIONS: list[tuple[str, Copy, Callable[[Array, Array], Array]]] = [
    (op, Copy(f"{op} u32", "u32", (40, 12), (16, 8), (28, 6), 64), _integer_reduction(op, None))
    for op in ("add", "min", "max", "and", "or", "xor", "inc", "dec")
]
REDUCTIONS += [
    ("add", Copy("add s32", "s32", (40, 12), (16, 8), (28, 6)), _integer_reduction("add", None)),
    ("min", Copy("min s32", "s32", (40, 12), (16, 8), (28, 6)), _integer_reduction("min", "int32")),
    ("max", Copy("max s32", "s32", (40, 12), (16, 8), (28, 6)), _integer_reduction("max", "int32")),
    ("add", Copy("add u64", "u64", (40, 12), (16, 8), (28, 6)), _integer_reduction("add", None)),
    ("min", Copy("min s64", "s64", (40, 12), (16, 8), (28, 6)), _integer_reduction("min", "int64")),
    ("add", Copy("add f32 128B", "f32", (40, 12), (32, 8), (20, 6), 128), _f32_add),
]
REDUCTIONS += [
    (op, Copy(f"{op} {kind} 128B", kind, (72, 12), (64, 8), (16, 6), 128), _half_reduction(kind, op))
    for kind in ("f16", "bf16")
    for op in ("add", "min", "max")
]


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


def _barrier_offset(byte_count: int) -> int:
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
add.u32 barrier, data, {_barrier_offset(copy.box_bytes)};
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
add.u32 barrier, data, {_barrier_offset(copy.box_bytes)};
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


def _tensors(copies: list[Copy], seed: int, floats_tame: bool = False) -> list[Array]:
    rng = np.random.default_rng(seed)
    tensors = []
    for copy in copies:
        data = rng.integers(0, 256, copy.tensor_bytes, dtype=np.uint8)
        if floats_tame and copy.dtype in ("f16", "bf16", "f32"):
            values = rng.normal(size=copy.tensor_bytes // copy.itemsize).astype(np.float32)
            bits = {"f32": lambda v: v.view(np.uint32), "f16": lambda v: v.astype(np.float16), "bf16": rd.bf16_round}
            data = np.ascontiguousarray(bits[copy.dtype](values)).view(np.uint8)
        tensors.append(data)
    return tensors


def _join(arrays: list[Array], alignment: int = 256) -> tuple[Array, list[int]]:
    offsets, position = [], 0
    for array in arrays:
        offsets.append(position)
        position += -(-array.size // alignment) * alignment
    joined = np.zeros(max(position, alignment), np.uint8)
    for array, offset in zip(arrays, offsets):
        joined[offset : offset + array.size] = array
    return joined, offsets


def _coordinates(copy: Copy) -> tuple[np.int32, ...]:
    return tuple(np.int32(c) for c in copy.at)


def build_loads() -> Case:
    """Every load of ``LOADS``."""
    joined, offsets = _join(_tensors(LOADS, 11))
    out, out_offsets = _join([np.zeros(c.box_bytes, np.uint8) for c in LOADS])
    launches, checks, entries = [], [], []
    for i, copy in enumerate(LOADS):
        entries.append(load_kernel(f"load{i}", copy))
        tensor = joined[offsets[i] : offsets[i] + copy.tensor_bytes]
        args = (copy.map_arg("tensor", offsets[i]), Ptr("out", out_offsets[i]), *_coordinates(copy))
        shared_bytes = _barrier_offset(copy.box_bytes) + 16
        launches.append(Launch(f"load{i}", (1, 1, 1), (THREADS, 1, 1), args, shared_bytes=shared_bytes))
        checks.append(Check(copy.name, "out", "b8", copy.box_bytes, out_offsets[i], "bits", copy.loaded(tensor)))
    return Case(lambda: ptx_text.module(*entries), {"tensor": joined, "out": out}, launches, checks)


def _build_writes(rows: list[tuple[str | None, Copy, Callable[[Array, Array], Array] | None]], seed: int) -> Case:
    copies = [copy for _, copy, _ in rows]
    tensors = _tensors(copies, seed, floats_tame=True)
    joined, offsets = _join(tensors)
    rng = np.random.default_rng(seed + 1)
    images = []
    for copy in copies:
        twin = dataclasses.replace(copy, dims=(copy.box_bytes // copy.itemsize,), box=(16,), at=(0,), pad_bytes=0)
        images.append(_tensors([twin], int(rng.integers(1 << 30)), floats_tame=True)[0][: copy.box_bytes])
    sources, source_offsets = _join(images)
    launches, checks, entries = [], [], []
    for i, (operation, copy, combine) in enumerate(rows):
        entries.append(store_kernel(f"write{i}", copy, operation))
        args = (copy.map_arg("tensor", offsets[i]), Ptr("source", source_offsets[i], const=True), *_coordinates(copy))
        launches.append(Launch(f"write{i}", (1, 1, 1), (THREADS, 1, 1), args, shared_bytes=copy.box_bytes))
        expected = copy.stored(tensors[i], images[i], combine)
        checks.append(Check(copy.name, "tensor", "b8", copy.tensor_bytes, offsets[i], "bits", expected))
    return Case(lambda: ptx_text.module(*entries), {"tensor": joined, "source": sources}, launches, checks)


def build_stores() -> Case:
    """Every store of ``STORES``."""
    return _build_writes([(None, copy, None) for copy in STORES], 21)


def build_reductions() -> Case:
    """Every reduction of ``REDUCTIONS``."""
    return _build_writes(list(REDUCTIONS), 31)


MULTICASTS = [
    (2, 0b11, Copy("2 CTAs", "bf16", (72, 20), (64, 8), (16, 15), 128)),
    (4, 0b1011, Copy("3 of 4 CTAs", "f32", (40, 20), (16, 8), (-4, 3), 64)),
]


def build_multicasts() -> Case:
    """Multicast loads into clusters; CTAs outside of the mask keep what they had."""
    copies = [copy for _, _, copy in MULTICASTS]
    joined, offsets = _join(_tensors(copies, 41))
    out, out_offsets = _join([np.zeros(c.box_bytes * size, np.uint8) for size, _, c in MULTICASTS])
    launches, checks, entries = [], [], []
    for i, (size, mask, copy) in enumerate(MULTICASTS):
        entries.append(multicast_kernel(f"multicast{i}", copy, mask))
        tensor = joined[offsets[i] : offsets[i] + copy.tensor_bytes]
        args = (copy.map_arg("tensor", offsets[i]), Ptr("out", out_offsets[i]), *_coordinates(copy))
        shared_bytes = _barrier_offset(copy.box_bytes) + 16
        launches.append(
            Launch(
                f"multicast{i}", (size, 1, 1), (THREADS, 1, 1), args, cluster=(size, 1, 1), shared_bytes=shared_bytes
            )
        )
        untouched = np.full(copy.box_bytes, FILL_BYTE, np.uint8)
        images = [copy.loaded(tensor) if mask >> rank & 1 else untouched for rank in range(size)]
        expected = np.concatenate(images)
        checks.append(Check(copy.name, "out", "b8", expected.size, out_offsets[i], "bits", expected))
    return Case(lambda: ptx_text.module(*entries), {"tensor": joined, "out": out}, launches, checks)


def _build_refused(copy: Copy, store: bool) -> Case:
    """A copy that an H200 answers with an illegal instruction."""
    args = (copy.map_arg("tensor"), Ptr("data", const=store), *_coordinates(copy))
    launch = Launch("k", (1, 1, 1), (THREADS, 1, 1), args, shared_bytes=_barrier_offset(copy.box_bytes) + 16)
    buffers = {"tensor": np.zeros(copy.tensor_bytes, np.uint8), "data": np.zeros(copy.box_bytes, np.uint8)}
    refused = Refusal("IllegalInstruction", "CUDA_ERROR_ILLEGAL_INSTRUCTION")
    kernel = store_kernel("k", copy) if store else load_kernel("k", copy)
    return Case(lambda: ptx_text.module(kernel), buffers, [launch], [], refused)


# Starts of the innermost dimension that are no multiple of 16 bytes; and, for stores alone, negative ones in any.
REFUSED = [
    (False, Copy("unaligned start, before the tensor", "f32", (50, 8), (32, 4), (-9, 0))),
    (False, Copy("unaligned start, inside", "bf16", (72, 20), (64, 8), (3, 2), 128)),
    (True, Copy("store, negative inner start", "bf16", (40, 20), (16, 8), (-8, 2), 32)),
    (True, Copy("store, negative outer start", "f32", (20, 4, 3, 3), (8, 2, 2, 2), (16, -1, 2, 0))),
    (True, Copy("store, negative outermost start", "u64", (12, 3, 3, 2, 2), (8, 2, 2, 2, 2), (2, 2, 1, -1, 1), 64)),
]

PROGRAMS = [
    *(
        Program(f"tensor copy refused: {copy.name}", "tensor copies", lambda c=copy, s=store: _build_refused(c, s))
        for store, copy in REFUSED
    ),
    Program("tensor copy loads", "tensor copies", build_loads),
    Program("tensor copy stores", "tensor copies", build_stores),
    Program("tensor copy reductions", "tensor copies", build_reductions),
    Program("tensor copy multicast", "tensor copies", build_multicasts),
]
