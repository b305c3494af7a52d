"""What lanes of a warp execute together: member masks, whole warps, sources of shuffles; both sides in messages."""

import functools
import pathlib
import re

import numpy as np
import pytest

from cake_shared.emulator import (
    AsyncInFlight,
    IllegalInstruction,
    MissingGridWait,
    MissingProxyFence,
    Module,
    Options,
    SharedRace,
    Stream,
    UnwaitedResult,
)

KERNELS = pathlib.Path(__file__).parent / "kernels"
ORDERS = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("random", 3)]


def ptx(body: str, target: str = "sm_90a") -> Module:
    return Module.from_ptx(
        f""".version 8.7
.target {target}
.address_size 64
.visible .entry k(.param .u64 out) {{
.reg .b32 t, v, w, mask, place, a<4>, d<4>;
.reg .b64 at;
.reg .pred p, q, low;
.shared .align 16 .b32 cells[256];
mov.u32 t, %tid.x;
mov.u32 place, cells;
and.b32 v, t, 31;
setp.lt.u32 low, v, 16;
ld.param.u64 at, [out];
mad.wide.u32 at, t, 4, at;
{body}
ret;
}}
""",
        target=target,
    )


def run(body: str, block: int = 32) -> np.ndarray:
    out = np.zeros(64, np.uint32)
    ptx(body).launch("k", 1, block, [out])
    return out


STORE = "st.global.u32 [at], w;"
COLLECTIVES = {
    "shfl": "shfl.sync.idx.b32 w, v, v, 31, {mask};",
    "vote": "vote.sync.ballot.b32 w, low, {mask};",
    "match": "match.any.sync.b32 w, v, {mask};",
    "redux": "redux.sync.add.u32 w, v, {mask};",
    "elect": "elect.sync w|p, {mask};",
    "syncwarp": "bar.warp.sync {mask};",
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_lane_outside_of_its_member_mask_is_named(name):
    with pytest.raises(IllegalInstruction, match=r"lane 16 executes this with member mask 0xffff, which it is not in"):
        run(COLLECTIVES[name].format(mask="0xffff"))
    with pytest.raises(IllegalInstruction, match=r"lane 3 executes this with member mask 0x30, which it is not in"):
        run("setp.gt.u32 p, v, 3; @p bra END; mov.u32 mask, 7; setp.eq.u32 p, v, 3; @p mov.u32 mask, 0x30;"
            + COLLECTIVES[name].format(mask="mask") + "END:")  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_masks_that_disagree_are_named(name):
    body = "mov.u32 mask, -1; @low mov.u32 mask, 0xffff;" + COLLECTIVES[name].format(mask="mask")
    with pytest.raises(
        IllegalInstruction,
        match=r"lane 16 executes this with member mask 0xffffffff, lane 0, which is in it, with 0xffff",
    ):
        run(body)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_groups_with_masks_of_their_own_pass(name):
    run("mov.u32 mask, 0xffff0000; @low mov.u32 mask, 0xffff;" + COLLECTIVES[name].format(mask="mask"))
    run("@!low bra END;" + COLLECTIVES[name].format(mask="0xffff") + "END:")
    run("@low " + COLLECTIVES[name].format(mask="0xffff"))
    run("@low ret;" + COLLECTIVES[name].format(mask="0xffffffff"))  # those who have exited are not waited for


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_a_shuffle_reads_lanes_that_take_part(mode):
    clamp = 0 if mode == "up" else 31
    reads = {"up": (16, 15), "down": (15, 16), "bfly": (15, 14), "idx": (15, 1)}[mode]
    members = 0xFFFFFFFF & ~(1 << reads[1])
    body = f"setp.eq.u32 p, v, {reads[1]}; @p bra END; shfl.sync.{mode}.b32 w, v, 1, {clamp}, {members:#x}; END:"
    with pytest.raises(
        IllegalInstruction,
        match=rf"lane {reads[0] if mode != 'idx' else 0} reads lane {reads[1]}, which is not in its member mask",
    ):
        run(body)
    with pytest.raises(IllegalInstruction, match=rf"reads lane {reads[1]}, which has exited"):
        run(f"setp.eq.u32 p, v, {reads[1]}; @p ret; shfl.sync.{mode}.b32 w, v, 1, {clamp}, -1;")


def test_a_shuffle_beyond_its_segment_reads_its_own_lane():
    assert run("shfl.sync.down.b32 w, v, 8, 31, -1;" + STORE)[:32].tolist() == [*range(8, 32), *range(24, 32)]
    half = "@!low bra END; shfl.sync.down.b32 w, v, 8, 0x100f, 0xffff;" + STORE + "END:"
    assert run(half)[:16].tolist() == [*range(8, 16), *range(8, 16)]


ALIGNED = {
    "bar": "bar.sync 0;",
    "barrier": "barrier.sync.aligned 0;",
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {d0}, [place];",
    "movmatrix": "movmatrix.sync.aligned.m8n8.trans.b16 d0, a0;",
    "mma": "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {d0,d1,d2,d3}, {a0,a1}, {a2}, {d0,d1,d2,d3};",
    "wgmma": "wgmma.fence.sync.aligned;",
}
WHOLE = [name for name in ALIGNED if not name.startswith("bar")]
FILL = "st.shared.v4.u32 [place], {t, t, t, t}; bar.sync 0;"


@pytest.mark.parametrize("name", ALIGNED)
def test_an_aligned_instruction_under_a_guard_that_lanes_differ_in(name):
    with pytest.raises(IllegalInstruction, match="the guard is true for lanes 0xffff of 0xffffffff") as caught:
        run(FILL + "\n@low " + ALIGNED[name])
    assert caught.value.line == 16


@pytest.mark.parametrize("name", ALIGNED)
def test_an_aligned_instruction_that_parts_of_a_warp_execute_apart(name):
    body = f"{FILL}@low bra LOW;\n{ALIGNED[name]}\nbra END;\nLOW: {ALIGNED[name]}\nEND:"
    with pytest.raises(IllegalInstruction, match="must execute one instruction together") as caught:
        run(body)
    assert caught.value.line in (16, 18)
    assert "line 16" in str(caught.value)
    assert "line 18" in str(caught.value)


@pytest.mark.parametrize("name", ALIGNED)
def test_an_aligned_instruction_after_parts_have_met_again(name):
    run(f"{FILL}@low bra LOW; add.u32 v, v, 1; LOW: {ALIGNED[name]}")


@pytest.mark.parametrize("name", WHOLE)
def test_an_instruction_of_whole_warps_without_all_lanes(name):
    with pytest.raises(IllegalInstruction, match="only lanes 0xffff0000 are alive"):
        run(FILL + "@low ret;" + ALIGNED[name])
    with pytest.raises(IllegalInstruction, match="only lanes 0xff are alive"):
        run(FILL + ALIGNED[name], block=40)


def test_a_barrier_counts_lanes_that_are_alive():
    run("@low ret; bar.sync 0;")
    run("bar.sync 0;", block=40)


# ---------------------------------------------------------------- griddepcontrol.wait


def dependent(body: str, threads: int = 64) -> None:
    """A programmatic launch that runs `body` after one that wrote `out`."""
    writer, reader = ptx("st.global.u32 [at], t;"), ptx(body)
    out = np.zeros(64, np.uint32)
    stream = Stream(Options())
    stream.launch(writer, "k", grid=1, block=threads, params=[out])
    stream.launch(reader, "k", grid=1, block=threads, params=[out], programmatic=True)


@pytest.mark.parametrize(
    "read", ["ld.global.u32 w, [at];", "ld.global.v2.u32 {w, v}, [at];", "atom.global.add.u32 w, [at], 1;"]
)
def test_lanes_that_wait_for_earlier_launches_do_not_speak_for_the_others_of_their_warp(read):
    if "v2" in read:
        read = "and.b32 v, t, 1; setp.eq.u32 q, v, 0; @q " + read
    dependent("griddepcontrol.wait;" + read)
    with pytest.raises(MissingGridWait) as caught:
        dependent("@low griddepcontrol.wait;" + read)
    assert caught.value.lane == 16
    dependent("@low griddepcontrol.wait; @low " + read)
    dependent("@low griddepcontrol.wait; bar.warp.sync -1;" + read)
    dependent(
        "@low bra LOW; bra MEET; LOW: griddepcontrol.wait; bar.warp.sync -1; bra END; MEET: bar.warp.sync -1; END:"
        + read
    )
    dependent("setp.eq.u32 p, t, 33; @p griddepcontrol.wait; bar.sync 0;" + read)


ARRIVAL = """setp.eq.u32 p, t, 0;
    @p mbarrier.init.shared.b64 [place], 16;
    bar.sync 0;
    setp.lt.u32 p, t, 32;
    @!p bra SECOND;
    @low griddepcontrol.wait;
    @{who} mbarrier.arrive.shared.b64 _, [place];
    bra END;
    SECOND: mbarrier.try_wait.parity.shared.b64 p, [place], 0;
    @!p bra SECOND;
    ld.global.u32 w, [at];
    END:"""


def test_an_arrival_by_lanes_that_have_not_waited_tells_nothing():
    with pytest.raises(MissingGridWait):
        dependent(ARRIVAL.format(who="!low"))
    dependent(ARRIVAL.format(who="low"))


# ---------------------------------------------------------------- both sides


@functools.cache
def mutants(source: str) -> Module:
    return Module.from_cuda(str(KERNELS / source), target="sm_90a")


def line_of(source: str, text: str) -> int:
    return next(k for k, row in enumerate((KERNELS / source).read_text().splitlines(), 1) if text in row)


def caught_in(source: str, kernel: str, error: type, order=("eager", 0)) -> Exception:
    data, out = np.arange(512, dtype=np.uint32), np.zeros(512, np.uint32)
    module = mutants(source)
    with pytest.raises(error) as caught:
        module.launch(
            kernel, 1, 128, [module.const(data), out], smem_bytes=128, options=Options(order=order[0], seed=order[1])
        )
    return caught.value


def test_a_race_names_the_source_lines_of_both_accesses():
    source = "simple_mutants.cu"
    error = caught_in(source, "shared_5", SharedRace)
    read, write = line_of(source, "uint32_t v = tile[127 - i];"), line_of(source, "if (Mutant == 5) tile")
    assert error.source.endswith(f"{source}:{read}")
    assert re.search(rf"the write of warp 0 at line \d+ \([^)]*{write}\)", str(error))
    error = caught_in(source, "shared_7", SharedRace)
    line = line_of(source, "two warps write one place")
    assert error.source.endswith(f"{source}:{line}")
    assert re.search(rf"the write of warp \d at line \d+ \([^)]*{line}\)", str(error))


def test_what_is_read_before_its_wait_names_the_copy():
    copy = """setp.eq.u32 p, t, 0; @!p bra END;
        mbarrier.init.shared.b64 [place], 1; mbarrier.arrive.expect_tx.shared.b64 _, [place], 16;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [place+16], [at], 16, [place];
        ld.shared.u32 v, [place+16];
        END:"""
    with pytest.raises(UnwaitedResult, match="the mbarrier of the copy at line 17 that wrote them") as caught:
        run(copy)
    assert caught.value.line == 18
    source = "simple_mutants.cu"
    error = caught_in(source, "bulk_10", MissingProxyFence)
    assert f"{line_of(source, 'result[k] = tile[255 - k] + 5;')})" in str(error)
    error = caught_in(source, "bulk_15", SharedRace)
    assert re.search(
        rf"a bulk copy issued by warp 0 at line \d+ \([^)]*{line_of(source, 'cp.async.bulk.global.shared::cta')}\)",
        str(error),
    )


def test_copies_that_nobody_waits_for_name_their_source_line():
    source = "simple_mutants.cu"
    error = caught_in(source, "bulk_12", AsyncInFlight)
    assert error.source.endswith(f"{source}:{line_of(source, 'cp.async.bulk.global.shared::cta')}")
    error = caught_in(source, "copy_3", (AsyncInFlight, UnwaitedResult), ("lazy", 0))
    assert f"{line_of(source, 'cp.async.cg.shared.global')}" in str(error)
