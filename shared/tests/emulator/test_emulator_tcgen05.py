"""tcgen05 beyond what Triton emits: every load and store shape, copies and shifts, products of a pair of CTAs."""

import contextlib

import numpy as np
import pytest

from cake_shared.emulator import Module, Options, SharedRace
from cake_shared.emulator.conformance import ptx_text
from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.families import fragments as fr
from cake_shared.emulator.conformance.model import widen

COLUMNS = 32
# Row and column of register r of thread l, as the PTX ISA's figures have them; registers of one .x1.
SHAPES = {
    "32x32b": (lambda t, r: (t, r), 1, 32),
    "16x64b": (lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r), 1, 16),
    "16x128b": (lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)), 2, 16),
    "16x256b": (lambda t, r: (t // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (t % 4) + 8 * (r // 4)), 4, 16),
    "16x32bx2": (lambda t, r: (t % 16, r + t // 16 * 16), 1, 16),
}
ORDERS = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)]


def entry(pointers, body, shared=""):
    """A kernel of 128 threads that allocates 64 columns at `tmem`, runs `body` and gives them back."""
    return f""".visible .entry k({", ".join(f".param .u64 p_{p}" for p in pointers)})
{{
.reg .b32 thread, warp, quarter, tmem, data, place;
.reg .b64 at;
.reg .pred first, leader;
{ptx_text.parameters(pointers)}
{shared}
.shared .align 8 .b64 slot[2];
mov.u32 thread, %tid.x;
shr.u32 warp, thread, 5;
setp.eq.u32 first, warp, 0;
setp.eq.u32 leader, thread, 0;
mov.u32 data, dynamic;
mov.u32 place, slot;
@first tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [place], 64;
bar.sync 0;
ld.shared.b32 tmem, [place];
shl.b32 quarter, warp, 21;
add.u32 quarter, quarter, tmem;
{body}
bar.sync 0;
@first tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 tmem, 64;
ret;
}}"""


def module(pointers, body, group=1, target="sm_100a"):
    return Module.from_ptx(
        ptx_text.module(entry(pointers, body).replace("GROUP", str(group)), target=target), target=target
    )


def registers_from(pointer, name, count):
    loads = [f"ld.global.b32 {name}{i}, [at+{4 * i}];" for i in range(count)]
    return "\n".join([f".reg .b32 {name}<{count}>;", f"mad.wide.u32 at, thread, {4 * count}, {pointer};", *loads])


def registers_to(pointer, name, count):
    stores = [f"st.global.b32 [at+{4 * i}], {name}{i};" for i in range(count)]
    return "\n".join([f"mad.wide.u32 at, thread, {4 * count}, {pointer};", *stores])


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_load_shape_reads_the_cells_of_its_figure(shape, order):
    where, per, rows = SHAPES[shape]
    times = 16 // per if shape != "16x64b" else 16
    count = times * per
    half = ", 16" if shape == "16x32bx2" else ""
    body = f"""{registers_from("source", "a", COLUMNS)}
tcgen05.st.sync.aligned.32x32b.x32.b32 [quarter], {ptx_text.braces("a", COLUMNS)};
tcgen05.wait::st.sync.aligned;
.reg .b32 d<{count}>;
add.u32 place, quarter, {(32 - rows) << 16};
tcgen05.ld.sync.aligned.{shape}.x{times}.b32 {ptx_text.braces("d", count)}, [place]{half};
tcgen05.wait::ld.sync.aligned;
{registers_to("out", "d", count)}"""
    source = np.arange(128 * COLUMNS, dtype=np.uint32).reshape(128, COLUMNS)
    out = np.zeros((128, count), np.uint32)
    program = module(("source", "out"), body)
    program.launch("k", grid=1, block=128, params=[source, out], options=Options(order=order[0], seed=order[1]))
    want = np.zeros_like(out)
    for thread in range(128):
        for r in range(count):
            row, column = where(thread % 32, r)
            want[thread, r] = source[thread // 32 * 32 + 32 - rows + row, column]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("shape", ["16x64b", "16x128b", "16x256b", "16x32bx2"])
def test_a_store_shape_writes_the_cells_of_its_figure(shape):
    where, per, _ = SHAPES[shape]
    times = 16 // per if shape != "16x64b" else 16
    count = times * per
    half = ", 16" if shape == "16x32bx2" else ""
    values = ptx_text.braces("a", count)
    body = f"""{registers_from("source", "a", count)}
tcgen05.st.sync.aligned.{shape}.x{times}.b32 [quarter]{half}, {values};
add.u32 place, quarter, {16 << 16};
tcgen05.st.sync.aligned.{shape}.x{times}.b32 [place]{half}, {values};
tcgen05.wait::st.sync.aligned;
.reg .b32 d<{COLUMNS}>;
tcgen05.ld.sync.aligned.32x32b.x32.b32 {ptx_text.braces("d", COLUMNS)}, [quarter];
tcgen05.wait::ld.sync.aligned;
{registers_to("out", "d", COLUMNS)}"""
    source = np.arange(1, 128 * count + 1, dtype=np.uint32).reshape(128, count)
    out = np.zeros((128, COLUMNS), np.uint32)
    module(("source", "out"), body).launch("k", grid=1, block=128, params=[source, out], options=Options(order="lazy"))
    want = np.zeros_like(out)
    for thread in range(128):
        for r in range(count):
            row, column = where(thread % 32, r)
            for lower in (0, 16):
                want[thread // 32 * 32 + lower + row, column] = source[thread, r]
    np.testing.assert_array_equal(out, want)


WAIT = f"""{ptx_text.wait_parity("place", 0)}
tcgen05.fence::after_thread_sync;"""
BARRIER = """add.u32 place, place, 8;
@leader mbarrier.init.shared::cta.b64 [place], 1;
@leader fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;"""
DESCRIPTOR = """.reg .b64 {name};
.reg .b32 {name}_at;
add.u32 {name}_at, data, {offset};
shr.u32 {name}_at, {name}_at, 4;
and.b32 {name}_at, {name}_at, 0x3fff;
cvt.u64.u32 {name}, {name}_at;
or.b64 {name}, {name}, {high};"""


def descriptor(name, offset, leading, stride):
    return DESCRIPTOR.format(name=name, offset=offset, high=hex(1 << 46 | leading >> 4 << 16 | stride >> 4 << 32))


COPIES = {
    "128x256b": (128, 2, lambda lane: lane),
    "128x128b": (128, 1, lambda lane: lane),
    "64x128b.warpx2::02_13": (64, 1, lambda lane: lane % 64),
    "64x128b.warpx2::01_23": (64, 1, lambda lane: lane % 32 + lane // 64 * 32),
    "32x128b.warpx4": (32, 1, lambda lane: lane % 32),
}


@pytest.mark.parametrize("shape", COPIES)
def test_a_copy_from_shared_memory_reaches_its_lanes(shape):
    rows, chunks, row_of = COPIES[shape]
    columns = 4 * chunks
    body = f"""{ptx_text.copy_in("source", "data", rows * 16 * chunks, 128)}
{BARRIER}
bar.sync 0;
{descriptor("from", 0, rows * 16, 128)}
@!leader bra issued;
tcgen05.cp.cta_group::1.{shape} [tmem], from;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [place];
issued:
{WAIT}
.reg .b32 d<{columns}>;
tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {ptx_text.braces("d", columns)}, [quarter];
tcgen05.wait::ld.sync.aligned;
{registers_to("out", "d", columns)}"""
    # No swizzle: 16-byte rows of 8-row core matrices, chunk after chunk along the row.
    source = np.arange(rows * 4 * chunks, dtype=np.uint32).reshape(chunks, rows, 4)
    out = np.zeros((128, columns), np.uint32)
    program = module(("source", "out"), body)
    for order, seed in ORDERS:
        program.launch(
            "k", grid=1, block=128, smem_bytes=8192, params=[source, out], options=Options(order=order, seed=seed)
        )
        want = np.stack([source[:, row_of(lane)].reshape(-1) for lane in range(128)])
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("late", "caught"), [(True, False), (False, True)], ids=["after the wait", "before the wait"])
def test_the_source_of_a_copy_is_kept_until_its_commit_is_waited_for(late, caught, order):
    body = f"""{ptx_text.copy_in("source", "data", 2048, 128)}
{BARRIER}
bar.sync 0;
{descriptor("from", 0, 2048, 128)}
@!leader bra issued;
tcgen05.cp.cta_group::1.128x128b [tmem], from;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [place];
issued:
{WAIT if late else ""}
@leader st.shared.b32 [data+64], 0;
{"" if late else WAIT}"""
    program = module(("source",), body)
    with pytest.raises(SharedRace, match="matrix product") if caught else contextlib.nullcontext():
        program.launch(
            "k",
            grid=1,
            block=128,
            smem_bytes=8192,
            params=[np.arange(512, dtype=np.uint32)],
            options=Options(order=order[0], seed=order[1]),
        )


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("m", "n"), [(256, 64), (256, 32), (128, 64)])
def test_a_pair_of_ctas_multiplies_together(m, n, order):
    rng = np.random.default_rng(m + n)
    depth, rows = 16, m // 2
    a, b = (rd.bf16_round(rng.normal(size=(count, depth))) for count in (m, n))
    images = np.zeros((2, 8192), np.uint8)
    for rank in range(2):
        for part, count, offset in ((a[rank * rows :][:rows], rows, 0), (b[rank * n // 2 :][: n // 2], n // 2, 4096)):
            at = fr.shared_offsets(count, depth, 2, 0, False, count * 16, 128) + offset
            images[rank, (at[..., None] + np.arange(2)).reshape(-1)] = (
                np.ascontiguousarray(part).view(np.uint8).reshape(-1)
            )
    instruction = 1 << 4 | 1 << 7 | 1 << 10 | (n >> 3) << 17 | (m >> 4) << 24
    width = n if m == 256 else n // 2
    body = f"""
.reg .b32 rank, eight;
.reg .b16 both;
.reg .pred never, even;
mov.u32 rank, %cluster_ctarank;
mul.wide.u32 at, rank, 8192;
add.u64 source, source, at;
mul.wide.u32 at, rank, {128 * width * 4};
add.u64 out, out, at;
{ptx_text.copy_in("source", "data", 8192, 128)}
{BARRIER}
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
{descriptor("left", 0, rows * 16, 128)}
{descriptor("right", 4096, n // 2 * 16, 128)}
setp.ne.u32 never, 0, 0;
setp.eq.and.u32 even, rank, 0, leader;
mov.b16 both, 3;
mov.u32 eight, {instruction};
@!even bra issued;
tcgen05.mma.cta_group::2.kind::f16 [tmem], left, right, eight, never;
tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [place], both;
issued:
{WAIT}
.reg .b32 d<{width}>;
tcgen05.ld.sync.aligned.32x32b.x{width}.b32 {ptx_text.braces("d", width)}, [quarter];
tcgen05.wait::ld.sync.aligned;
{registers_to("out", "d", width)}
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;"""
    out = np.zeros((2, 128, width), np.float32)
    module(("source", "out"), body, group=2).launch(
        "k",
        grid=2,
        block=128,
        cluster=(2, 1, 1),
        smem_bytes=8192,
        params=[images, out],
        options=Options(order=order[0], seed=order[1]),
    )
    exact = widen(a, "bf16") @ widen(b, "bf16").T
    if m == 256:
        got = out.reshape(256, n)
    else:  # 64 rows a CTA: the right half of the columns lies in lanes 64 to 127
        got = np.concatenate([np.concatenate([part[:64], part[64:]], 1) for part in out])
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-4)


def test_a_shift_moves_rows_down_by_one():
    body = f"""{registers_from("source", "a", 8)}
{BARRIER}
tcgen05.st.sync.aligned.32x32b.x8.b32 [quarter], {ptx_text.braces("a", 8)};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
@!leader bra issued;
tcgen05.shift.cta_group::1.down [tmem];
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [place];
issued:
{WAIT}
.reg .b32 d<8>;
tcgen05.ld.sync.aligned.32x32b.x8.b32 {ptx_text.braces("d", 8)}, [quarter];
tcgen05.wait::ld.sync.aligned;
{registers_to("out", "d", 8)}"""
    source = np.arange(128 * 8, dtype=np.uint32).reshape(128, 8)
    out = np.zeros_like(source)
    module(("source", "out"), body).launch("k", grid=1, block=128, params=[source, out], options=Options(order="lazy"))
    np.testing.assert_array_equal(out[1:], source[:-1])
    np.testing.assert_array_equal(out[0], source[0])
