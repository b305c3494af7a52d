"""Conformance programs written in CUDA C++ (``cu/*.cu``): control flow, memory, atomics, warps, copies, clusters."""

from __future__ import annotations

import struct

import numpy as np

from cake_shared.emulator.conformance import nvcc
from cake_shared.emulator.conformance.families import expected as ex
from cake_shared.emulator.conformance.families import expected_movement as moved
from cake_shared.emulator.conformance.model import Case, Check, Launch, Program, Ptr

Array = np.ndarray
ONE = (1, 1, 1)


def _random_words(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def _words_case(source: str, buffers: dict[str, Array], launches: list[Launch], checks: list[Check]) -> Case:
    return Case(lambda: nvcc.ptx_of(source), buffers, launches, checks)


def _single(
    source: str,
    kernel: str,
    inputs: Array | None,
    out_words: int,
    threads: int,
    expected: Array | None,
    *,
    blocks: int = 1,
    cluster: int = 1,
    extra: tuple[object, ...] = (),
    fill: int = 0,
    shared_bytes: int = 0,
) -> Case:
    """A kernel ``kernel(in, out, extra...)`` over 32-bit words with one check on everything in ``out``."""
    buffers = {"out": np.full(out_words, fill, np.uint32)}
    args: tuple[object, ...] = (Ptr("out"), *extra)
    if inputs is not None:
        buffers["in"] = inputs
        args = (Ptr("in", const=True), *args)
    launch = Launch(kernel, (blocks, 1, 1), (threads, 1, 1), args, cluster=(cluster, 1, 1), shared_bytes=shared_bytes)
    return _words_case(source, buffers, [launch], [Check(kernel, "out", "u32", out_words, 0, "bits", expected)])


def _loops() -> Case:
    data = _random_words(500, 1) % 2000 + 1
    return _single(
        "control.cu", "divergent_loops", data, 500, 128, ex.divergent_loops(data), blocks=4, extra=(np.int32(500),)
    )


def _switches() -> Case:
    data = _random_words(500, 2)
    fill = 0xABABABAB
    result = ex.switches(data, fill)
    return _single("control.cu", "switches", data, 500, 128, result, blocks=4, extra=(np.int32(500),), fill=fill)


def _nested() -> Case:
    return _single("control.cu", "nested_reconvergence", None, 64, 64, ex.nested_reconvergence())


def _calls() -> Case:
    data = _random_words(250, 3)
    return _single("control.cu", "calls", data, 250, 128, ex.calls(data), blocks=2, extra=(np.int32(250),))


def _local_arrays() -> Case:
    data = _random_words(250, 4)
    return _single(
        "control.cu", "local_arrays", data, 250, 128, ex.local_arrays(data), blocks=2, extra=(np.int32(250),)
    )


def _vectors() -> Case:
    data = _random_words(128 * 4, 5).view(np.uint8)
    result = ex.vectors(data, 128)
    buffers = {"in": data, "out": np.zeros(result.size, np.uint8)}
    launch = Launch("vectors", ONE, (128, 1, 1), (Ptr("in", const=True), Ptr("out")))
    return _words_case("memory.cu", buffers, [launch], [Check("vectors", "out", "b8", result.size, 0, "bits", result)])


def _variables() -> Case:
    """Two launches: the second sees what the first wrote to module variables."""
    buffers = {"out": np.zeros(128, np.uint32)}
    launches = [Launch("variables", ONE, (64, 1, 1), (Ptr("out", 256 * k),)) for k in range(2)]
    return _words_case(
        "memory.cu", buffers, launches, [Check("variables", "out", "u32", 128, 0, "bits", ex.variables())]
    )


def _by_value() -> Case:
    rng = np.random.default_rng(6)
    first, wide = 200, 0x0123456789ABCDEF
    scale = rng.normal(size=5).astype(np.float32)
    a, b, c = rng.integers(0, 256, 3), 51234, rng.integers(-128, 128, 5)
    table = rng.integers(-(1 << 31), 1 << 31, 32).astype(np.int32)
    # struct Parameters with the C++ layout: 8-byte alignment of `wide`, 2-byte alignment inside Bytes12.
    packed = struct.pack("<B7xQ5f", first, wide, *scale.tolist())
    packed += struct.pack("<3Bx H5bx", *a.tolist(), b, *c.tolist())
    packed += table.tobytes()
    packed += bytes(-len(packed) % 8)
    result = ex.by_value(first, wide, scale, a, b, c, table)
    buffers = {"out": np.zeros(64, np.uint32)}
    launch = Launch("by_value", ONE, (64, 1, 1), (packed, Ptr("out")))
    return _words_case("memory.cu", buffers, [launch], [Check("by_value", "out", "u32", 64, 0, "bits", result)])


def _generic() -> Case:
    data = _random_words(128, 7)
    return _single("memory.cu", "generic_addresses", data, 128, 128, ex.generic_addresses(data))


def _shared() -> Case:
    data = _random_words(512, 8)
    result = ex.shared_memory(data, 512, 96)
    return _single("memory.cu", "shared_memory", data, 96, 96, result, extra=(np.int32(512),), shared_bytes=2048)


def _hints() -> Case:
    data = _random_words(64, 9)
    return _single("memory.cu", "hints", data, 9 * 64, 64, ex.hints(data))


def _special_registers() -> Case:
    buffers = {"out": np.zeros(32 * 16 * 16, np.uint32)}
    launch = Launch("special_registers", (4, 2, 2), (8, 2, 2), (Ptr("out"),), cluster=(2, 1, 1), shared_bytes=512)
    check = Check("special_registers", "out", "u32", 32 * 16 * 16, 0, "bits", ex.special_registers())
    return _words_case("memory.cu", buffers, [launch], [check])


def _integer_atomics() -> Case:
    words = _random_words(48, 10)
    words[36:44] %= 16
    words[44] = 17
    longs = np.random.default_rng(11).integers(0, 1 << 63, 16, dtype=np.uint64)
    buffers = {"words": words, "longs": longs, "returned": np.zeros(8, np.uint32)}
    launch = Launch("integer_atomics", (3, 1, 1), (128, 1, 1), (Ptr("words"), Ptr("longs"), Ptr("returned")))
    got = ex.integer_atomics(words, longs, 384)
    checks = [
        Check("words", "words", "u32", 48, 0, "bits", got[0]),
        Check("longs", "longs", "u64", 16, 0, "bits", got[1]),
        Check("returned", "returned", "u32", 8, 0, "bits", got[2]),
    ]
    return _words_case("atomics.cu", buffers, [launch], checks)


def _float_atomics() -> Case:
    buffers = {
        "f": np.zeros(12, np.float32),
        "d": np.zeros(4, np.float64),
        "h": np.zeros(6, np.uint32),
        "b": np.zeros(6, np.uint32),
    }
    launch = Launch("float_atomics", (2, 1, 1), (128, 1, 1), tuple(Ptr(k) for k in "fdhb"))
    got = ex.float_atomics(256)
    checks = [
        Check("f32 and vectors", "f", "f32", 12, 0, "bits", got["f"]),
        Check("f64", "d", "f64", 4, 0, "bits", got["d"]),
        Check("f16x2", "h", "f16x2", 6, 0, "bits", got["h"]),
        Check("bf16x2", "b", "bf16x2", 6, 0, "bits", got["b"]),
    ]
    return _words_case("atomics.cu", buffers, [launch], checks)


def _shared_atomics() -> Case:
    return _single("atomics.cu", "shared_atomics", None, 56, 192, ex.shared_atomics(192))


def _small(count: int, seed: int) -> Array:
    return _random_words(count, seed) % 32


def _votes() -> Case:
    data = _small(64, 12)
    data[32:] |= 16
    return _single("warp.cu", "votes", data, 64 * 8, 64, moved.votes(data))


def _shuffles() -> Case:
    data = _random_words(64, 13)
    return _single("warp.cu", "shuffles", data, 64 * 16, 64, moved.shuffles(data))


def _matches() -> Case:
    data = _small(96, 14)
    data[64:] = 5
    return _single("warp.cu", "matches", data, 96 * 6, 96, moved.matches(data))


def _reductions() -> Case:
    data = _random_words(64, 15)
    return _single("warp.cu", "reductions", data, 64 * 9, 64, moved.reductions(data))


def _named_barriers() -> Case:
    data = _random_words(64, 16)
    return _single("warp.cu", "named_barriers", data, 64, 128, moved.named_barriers(data))


def _reducing_barriers() -> Case:
    data = _small(128, 17)
    return _single("warp.cu", "reducing_barriers", data, 128 * 4, 128, moved.reducing_barriers(data))


def _diverged_barrier() -> Case:
    return _single("warp.cu", "diverged_barrier", None, 64, 64, moved.diverged_barrier())


def _matrix_loads() -> Case:
    data = _random_words(512, 18)
    return _single("movement.cu", "matrix_loads", data, 15 * 32, 32, moved.matrix_loads(data))


def _matrix_stores() -> Case:
    data = _random_words(128, 19)
    return _single("movement.cu", "matrix_stores", data, 6 * 128, 32, moved.matrix_stores(data))


def _async_copies() -> Case:
    data = _random_words(1024, 20)
    return _single("movement.cu", "async_copies", data, 13 * 128, 128, moved.async_copies(data))


def _async_copies_to_barrier() -> Case:
    data = _random_words(512, 21)
    return _single("movement.cu", "async_copies_to_barrier", data, 64, 64, moved.async_copies_to_barrier(data))


def _bulk_copies() -> Case:
    data = _random_words(256, 22)
    sums = _random_words(8 * 32 + 64, 23)
    sums[192:256] %= 1000
    buffers = {
        "in": data,
        "out": np.zeros(256, np.uint32),
        "sums": sums,
        "floats": np.arange(64, dtype=np.float32),
        "halves": np.full(64, 0x4000, np.uint16),
    }
    args = (Ptr("in", const=True), Ptr("out"), Ptr("sums"), Ptr("floats"), Ptr("halves"))
    got = moved.bulk_copies(data, sums)
    checks = [
        Check("copy in and out", "out", "u32", 256, 0, "bits", got["out"]),
        Check("integer reductions", "sums", "u32", sums.size, 0, "bits", got["sums"]),
        Check("f32 add", "floats", "f32", 64, 0, "bits", got["floats"]),
        Check("bf16 add", "halves", "bf16", 64, 0, "bits", got["halves"]),
    ]
    return _words_case("movement.cu", buffers, [Launch("bulk_copies", ONE, (128, 1, 1), args)], checks)


def _mbarrier_states() -> Case:
    return _single("cluster.cu", "mbarrier_states", None, 12, 32, moved.mbarrier_states())


def _mbarrier_pipeline() -> Case:
    data = _random_words(32 * 9, 24)
    return _single(
        "cluster.cu", "mbarrier_pipeline", data, 96, 128, moved.mbarrier_pipeline(data, 9), extra=(np.int32(9),)
    )


def _distributed_shared() -> Case:
    data = _random_words(64 * 8, 25)
    result = moved.distributed_shared(data, 8, 4)
    return _single("cluster.cu", "distributed_shared", data, 64 * 8, 64, result, blocks=8, cluster=4)


def _remote_copies() -> Case:
    data = _random_words(64 * 4, 26)
    return _single("cluster.cu", "remote_copies", data, 64 * 4, 64, moved.remote_copies(data, 4), blocks=4, cluster=2)


def _register_reallocation() -> Case:
    data = _random_words(384, 27)
    return _single("cluster.cu", "register_reallocation", data, 384, 384, moved.register_reallocation(data))


def _dependent_launch() -> Case:
    count = 64 * 16
    data = _random_words(count, 28)
    buffers = {"in": data, "middle": np.zeros(count, np.uint32), "out": np.zeros(count, np.uint32)}
    launches = [
        Launch("dependent_producer", (16, 1, 1), (64, 1, 1), (Ptr("in", const=True), Ptr("middle"))),
        Launch(
            "dependent_consumer",
            (16, 1, 1),
            (64, 1, 1),
            (Ptr("middle"), Ptr("out"), np.int32(count)),
            programmatic=True,
        ),
    ]
    check = Check("dependent_consumer", "out", "u32", count, 0, "bits", moved.dependent_launch(data))
    return _words_case("cluster.cu", buffers, launches, [check])


PROGRAMS = [
    Program("divergent loops", "control flow", _loops),
    Program("switches", "control flow", _switches),
    Program("nested reconvergence", "control flow", _nested),
    Program("calls", "control flow", _calls),
    Program("local arrays", "control flow", _local_arrays),
    Program("vector loads and stores", "memory", _vectors),
    Program("module variables", "memory", _variables),
    Program("parameters by value", "memory", _by_value),
    Program("generic addresses", "memory", _generic),
    Program("shared memory", "memory", _shared),
    Program("cache hints and memory orders", "memory", _hints),
    Program("special registers", "memory", _special_registers),
    Program("integer atomics", "atomics", _integer_atomics),
    Program("float atomics", "atomics", _float_atomics),
    Program("shared atomics", "atomics", _shared_atomics),
    Program("votes and elect", "warp", _votes),
    Program("shuffles", "warp", _shuffles),
    Program("matches", "warp", _matches),
    Program("warp reductions", "warp", _reductions),
    Program("named barriers", "barriers", _named_barriers),
    Program("reducing barriers", "barriers", _reducing_barriers),
    Program("barrier of diverged lanes", "barriers", _diverged_barrier),
    Program("ldmatrix and movmatrix", "matrix moves", _matrix_loads),
    Program("stmatrix", "matrix moves", _matrix_stores),
    Program("cp.async groups", "cp.async", _async_copies),
    Program("cp.async to mbarriers", "cp.async", _async_copies_to_barrier),
    Program("bulk copies and reductions", "bulk copies", _bulk_copies),
    Program("mbarrier states", "mbarrier", _mbarrier_states),
    Program("mbarrier pipeline", "mbarrier", _mbarrier_pipeline),
    Program("distributed shared memory", "clusters", _distributed_shared),
    Program("st.async and remote bulk copies", "clusters", _remote_copies),
    Program("setmaxnreg", "register reallocation", _register_reallocation),
    Program("griddepcontrol", "dependent launch", _dependent_launch),
]
