"""Barriers of a cluster and mbarriers: who counts, what is out of range, what a deadlock or an exit says of them."""

import numpy as np
import pytest

from cake_shared.emulator import (
    AsyncInFlight,
    BarrierMisuse,
    Deadlock,
    Hang,
    IllegalInstruction,
    Module,
    Options,
    PtxSyntaxError,
    SharedRace,
    UninitialisedRead,
    UnwaitedResult,
)

ORDERS = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("random", 3)]
DETECT = ["none", "cheap", "all"]
ARRIVE, WAIT = "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"


def ptx(body: str) -> Module:
    return Module.from_ptx(
        f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out) {{
.reg .b32 t, rank, got, place, data, left;
.reg .b64 at, state;
.reg .pred p, leader, first;
.shared .align 16 .b64 cells[32];
mov.u32 t, %tid.x;
mov.u32 rank, %cluster_ctarank;
mov.u32 place, cells;
add.u32 data, place, 64;
setp.eq.u32 leader, t, 0;
ld.param.u64 at, [out];
{body}
ret;
}}
"""
    )


def run(body: str, order=("eager", 0), block: int = 32, cluster: int = 1, detect: str = "all") -> np.ndarray:
    out = np.zeros(64, np.uint32)
    ptx(body).launch(
        "k",
        cluster,
        block,
        [out],
        cluster=(cluster, 1, 1),
        options=Options(order=order[0], seed=order[1], detect=detect),
    )
    return out


# ---------------------------------------------------------------- the cluster's barrier


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("detect", DETECT)
def test_threads_that_arrive_and_exit_do_not_stand_in_for_others(detect, order):
    """CTA 0 waits; of CTA 1 the second warp arrives and exits, the first arrives after it has stored."""
    body = f"""setp.eq.u32 first, rank, 0;
    @first bra WAITER;
    setp.ge.u32 p, t, 32;
    @p bra LEAVE;
    mov.u32 got, 0;
    SPIN: add.u32 got, got, 1; setp.lt.u32 p, got, 4000; @p bra SPIN;
    @leader st.global.u32 [at+4], 5;
    LEAVE: {ARRIVE}
    ret;
    WAITER: {ARRIVE}
    {WAIT}
    @leader ld.global.u32 got, [at+4];
    @leader st.global.u32 [at], got;"""
    assert run(body, order, block=64, cluster=2, detect=detect)[0] == 5


def test_sleeping_is_no_deadlock():
    body = "mov.u32 got, 0; SPIN: nanosleep.u32 20; add.u32 got, got, 1; setp.lt.u32 p, got, 600; @p bra SPIN;"
    run(body + "@leader st.global.u32 [at], got;")
    with pytest.raises((Deadlock, Hang)):
        ptx("SPIN: nanosleep.u32 20; bra SPIN;").launch(
            "k", 1, 32, [np.zeros(1)], options=Options(max_instructions=9999)
        )
    with pytest.raises(Deadlock):
        run("SPIN: nanosleep.u32 20; ld.volatile.global.u32 got, [at]; setp.eq.u32 p, got, 0; @p bra SPIN;")


def test_a_wait_for_those_who_exited_without_arriving_ends():
    run(f"setp.eq.u32 first, rank, 0; @!first ret; {ARRIVE} {WAIT}", cluster=2)


@pytest.mark.parametrize("detect", DETECT)
@pytest.mark.parametrize(
    "body", [WAIT, ARRIVE + WAIT + WAIT, ARRIVE + WAIT + WAIT + ARRIVE], ids=["first", "second", "then arrives"]
)
def test_a_wait_needs_an_arrival_of_its_own(body, detect):
    with pytest.raises(BarrierMisuse, match="wait without an arrive"):
        run(body, cluster=2, detect=detect)


def test_a_second_arrival_needs_a_wait_between():
    with pytest.raises(BarrierMisuse, match="without a wait between"):
        run(ARRIVE + ARRIVE, cluster=2)
    # Also where the phase that it arrived for is long over.
    with pytest.raises(BarrierMisuse, match="without a wait between"):
        run(ARRIVE + ARRIVE, cluster=1)


def test_an_arrival_at_a_named_barrier_takes_a_count():
    with pytest.raises(PtxSyntaxError, match=r"thread count|operand"):
        ptx("bar.arrive 1;")


# ---------------------------------------------------------------- mbarriers

INIT = "@leader mbarrier.init.shared.b64 [place], {count}; bar.sync 0;"


@pytest.mark.parametrize("detect", DETECT)
def test_the_last_participants_of_an_mbarrier_may_drop_out(detect):
    body = (
        INIT.format(count=2)
        + """@leader mbarrier.arrive_drop.shared.b64 state, [place];
        @leader mbarrier.arrive_drop.shared.b64 state, [place];
        AGAIN: mbarrier.test_wait.parity.shared.b64 p, [place], 0;
        @!p bra AGAIN;
        @leader mbarrier.inval.shared.b64 [place];
        @leader st.global.u32 [at], 1;"""
    )
    assert run(body, detect=detect)[0] == 1


def test_dropping_lowers_the_count_of_the_phases_that_follow():
    body = (
        INIT.format(count=2)
        + """@!leader bra END;
        mbarrier.arrive_drop.shared.b64 state, [place];
        mbarrier.arrive.shared.b64 state, [place];
        mbarrier.arrive.shared.b64 state, [place];
        mbarrier.pending_count.b64 got, state;
        st.global.u32 [at], got;
        mbarrier.test_wait.parity.shared.b64 p, [place], 1;
        @p st.global.u32 [at+4], 1;
        END:"""
    )
    assert run(body)[:2].tolist() == [1, 1]


def test_more_participants_than_there_are_do_not_drop_out():
    body = (
        INIT.format(count=3)
        + """@!leader bra END;
        mbarrier.arrive_drop.shared.b64 state, [place], 2;
        mbarrier.arrive.shared.b64 state, [place];
        mbarrier.arrive_drop.shared.b64 state, [place], 2;
        END:"""
    )
    with pytest.raises(BarrierMisuse, match=r"2 participants drop out|2 arrivals are too many"):
        run(body)


EXPECT = [
    "mbarrier.expect_tx.relaxed.cta.shared.b64 [place], {0};",
    "mbarrier.arrive.expect_tx.shared.b64 _, [place], {0};",
]


@pytest.mark.parametrize("detect", DETECT)
@pytest.mark.parametrize("operation", EXPECT)
@pytest.mark.parametrize("count", [0xFFFFFFF0, 0x80000000, 1 << 20])
def test_a_byte_count_is_unsigned_and_has_a_limit(count, operation, detect):
    with pytest.raises(BarrierMisuse, match=f"{count} more bytes to come are out of range"):
        run(INIT.format(count=2) + "@leader " + operation.format(count), detect=detect)


def test_the_largest_byte_count_is_taken():
    most = (1 << 20) - 1
    run(INIT.format(count=1) + f"@leader mbarrier.expect_tx.relaxed.cta.shared.b64 [place], {most};"
        f"@leader mbarrier.complete_tx.relaxed.cta.shared.b64 [place], {most};")  # fmt: skip


@pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
def test_a_deadlock_shows_the_mbarrier_that_is_waited_for(wait):
    body = (
        INIT.format(count=3)
        + f"""@leader mbarrier.arrive.expect_tx.shared.b64 _, [place], 48;
        AGAIN: mbarrier.{wait}.parity.shared.b64 p, [place], 0;
        @!p bra AGAIN;"""
    )
    with pytest.raises(Deadlock) as caught:
        run(body)
    text = "mbarrier 0x400 (phase 0, 2 of 3 arrivals and 48 bytes to come), waits for the end of phase 0"
    assert text in str(caught.value)


def test_a_deadlock_shows_every_mbarrier_that_lanes_of_a_warp_wait_for():
    body = """@leader mbarrier.init.shared.b64 [place], 1; @leader mbarrier.init.shared.b64 [place+8], 2; bar.sync 0;
        and.b32 got, t, 1; shl.b32 got, got, 3; add.u32 place, place, got;
        AGAIN: mbarrier.test_wait.parity.shared.b64 p, [place], 0;
        @!p bra AGAIN;"""
    with pytest.raises(Deadlock) as caught:
        run(body)
    assert "mbarrier 0x400 (phase 0, 1 of 1 arrivals" in str(caught.value)
    assert "mbarrier 0x408 (phase 0, 2 of 2 arrivals" in str(caught.value)


# ---------------------------------------------------------------- copies that nobody waits for

COPY = """@leader mbarrier.arrive.expect_tx.shared.b64 _, [place], 16;
    @leader cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [data], [at], 16, [place];"""
WAIT_FOR_COPY = "AGAIN{0}: mbarrier.try_wait.parity.shared.b64 p, [place], {0}; @!p bra AGAIN{0};"


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("detect", DETECT)
@pytest.mark.parametrize("wait", ["", WAIT_FOR_COPY.format(1)], ids=["no wait", "the wrong phase"])
def test_a_copy_whose_mbarrier_nobody_waits_for_is_named(wait, detect, order):
    with pytest.raises((AsyncInFlight, Deadlock) if wait else AsyncInFlight) as caught:
        run(INIT.format(count=1) + COPY + wait, order, detect=detect)
    assert caught.value.line
    assert wait or "cp.async.bulk" in str(caught.value)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("detect", DETECT)
def test_every_phase_with_copies_needs_its_wait(detect, order):
    first = INIT.format(count=1) + COPY + WAIT_FOR_COPY.format(0)
    run(first, order, detect=detect)
    run(first + COPY + WAIT_FOR_COPY.format(1), order, detect=detect)
    with pytest.raises(AsyncInFlight):
        run(first + COPY, order, detect=detect)


@pytest.mark.parametrize("detect", DETECT)
def test_cp_async_that_an_mbarrier_counts_needs_a_wait_too(detect):
    copy = """cp.async.ca.shared.global [data], [at], 4;
        cp.async.mbarrier.arrive.noinc.shared.b64 [place];"""
    body = "@leader mbarrier.init.shared.b64 [place], 1; bar.sync 0; @!leader bra END;" + copy
    run(body + WAIT_FOR_COPY.format(0) + "END:", detect=detect)
    with pytest.raises(AsyncInFlight, match=r"cp\.async"):
        run(body + "END:", detect=detect)


@pytest.mark.parametrize("detect", DETECT)
def test_other_copies_that_nobody_waits_for_are_named_too(detect):
    with pytest.raises(AsyncInFlight, match=r"cp\.async\.ca") as caught:
        run("@leader cp.async.ca.shared.global [data], [at], 4;", detect=detect)
    assert caught.value.line
    stores = """st.shared.v4.u32 [data], {0, 0, 0, 0}; fence.proxy.async.shared::cta;
    @leader cp.async.bulk.global.shared::cta.bulk_group [at], [data], 16;"""
    with pytest.raises(AsyncInFlight, match=r"cp\.async\.bulk\.global") as caught:
        run(stores, detect=detect)
    assert caught.value.line


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_copy_that_no_group_has_is_said_to_be_in_none(order):
    copy = "@leader cp.async.ca.shared.global [data], [at], 4;"
    commit, wait, read = "cp.async.commit_group;", "cp.async.wait_group 0;", "@leader ld.shared.u32 got, [data];"
    run(copy + commit + wait + read, order)
    with pytest.raises(UnwaitedResult, match=r"no cp\.async\.commit_group follows it"):
        run(copy + wait + read, order)
    with pytest.raises(UnwaitedResult, match="not been waited for \\["):
        run(copy + commit + read, order)
    with pytest.raises(AsyncInFlight, match=r"no cp\.async\.commit_group follows"):
        run(copy + wait, order)
    with pytest.raises(AsyncInFlight, match="no wait has covered \\["):
        run(copy + commit, order)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_bulk_copy_that_no_group_has_is_said_to_be_in_none(order):
    store = "@leader st.shared.v4.u32 [data], {0, 0, 0, 0};"
    copy = "fence.proxy.async.shared::cta; @leader cp.async.bulk.global.shared::cta.bulk_group [at], [data], 16;"
    commit, wait = "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;"
    run(store + copy + commit + wait + store, order)
    with pytest.raises(SharedRace, match=r"no cp\.async\.bulk\.commit_group follows it"):
        run(store + copy + wait + store, order)
    with pytest.raises(SharedRace, match="no wait that covers it \\["):
        run(store + copy + commit + store, order)
    with pytest.raises(AsyncInFlight, match=r"no cp\.async\.bulk\.commit_group follows"):
        run(store + copy + wait, order)


def test_memory_that_nothing_wrote_is_named_in_its_number():
    with pytest.raises(UninitialisedRead, match="shared byte 0x440 has never been written"):
        run("ld.shared.u8 t, [data];")
    with pytest.raises(UninitialisedRead, match="shared bytes 0x440 to 0x443 have never been written"):
        run("ld.shared.u32 t, [data];")


def test_aligned_barriers_need_whole_warps():
    for barrier in ("bar.sync 0;", "barrier.sync.aligned 0;", ARRIVE):
        with pytest.raises(IllegalInstruction, match="guard is true for lanes 0x1 of 0xffffffff"):
            run("@leader " + barrier, cluster=2)


def test_lanes_that_wait_for_their_copies_do_not_speak_for_the_others_of_their_warp():
    copy = """shl.b32 got, t, 2; add.u32 data, data, got;
        cp.async.ca.shared.global [data], [at], 4;
        cp.async.commit_group;
        setp.lt.u32 first, t, 16;"""
    read = "ld.shared.u32 got, [data]; @!first cp.async.wait_all;"
    run(copy + "cp.async.wait_group 0;" + read)
    run(copy + "@first cp.async.wait_group 0; @first " + read + "@!first cp.async.wait_all;")
    with pytest.raises(UnwaitedResult) as caught:
        run(copy + "@first cp.async.wait_group 0;" + read)
    assert caught.value.lane == 16
    signal = "cp.async.mbarrier.arrive.noinc.shared.b64 [place];"
    wait = "AGAIN: mbarrier.try_wait.parity.shared.b64 p, [place], 0; @!p bra AGAIN;"
    run(INIT.format(count=32) + copy + signal + wait + read)
    with pytest.raises(UnwaitedResult) as caught:
        run(INIT.format(count=16) + copy + "@first " + signal + wait + read)
    assert caught.value.lane == 16
