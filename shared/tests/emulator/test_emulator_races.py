"""Races on shared memory: one of each pair leaves an order to luck, which all schedules show; its twin does not."""

import functools
import pathlib
import re

import numpy as np
import pytest

from cake_shared.emulator import (
    AsyncInFlight,
    BarrierMisuse,
    EmulatorError,
    IllegalInstruction,
    MissingProxyFence,
    Module,
    Options,
    OutOfBounds,
    SharedRace,
    UninitialisedRead,
    UnwaitedResult,
)

KERNELS = pathlib.Path(__file__).parent / "kernels"
ORDERS = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("random", 3), ("random", 4), ("random", 5)]

# A read that comes first finds nothing, an operation on an mbarrier that comes first no mbarrier.
STORES = (SharedRace, UninitialisedRead)
BEGIN = (SharedRace, BarrierMisuse)
END = (SharedRace, BarrierMisuse, AsyncInFlight)
PAIRS = {
    "counter": STORES,
    "counter_again": (SharedRace,),
    "masked_counter": STORES,
    "volatile_after_store": STORES,
    "byte_of_a_word": STORES,
    "vector_clear": STORES,
    "spin_lock": STORES,
    "strong_hides_release": STORES,
    "copied_then_counted": STORES,
    "two_volatile_writers": (SharedRace,),
    "read_after_own_atomic": (SharedRace,),
    "last_warp_reads": (SharedRace,),
    "last_arrival_resets": (SharedRace,),
    "counted_in_the_dark": (SharedRace,),
    "reset_after_counting": (SharedRace,),
    "reset_to_the_same": (SharedRace,),
    "same_value_then_another": (SharedRace,),
    "fence_for_barrier": STORES,
    "fence_before_store": (MissingProxyFence,),
    "fence_between_stores": (MissingProxyFence,),
    "fence_of_global": (MissingProxyFence,),
    "init_arrive": BEGIN,
    "init_wait": BEGIN,
    "init_test_wait": BEGIN,
    "init_expect": BEGIN,
    "init_copy": BEGIN,
    "init_cp_async": BEGIN,
    "fill_then_init": BEGIN,
    "inval_wait": END,
    "inval_arrive": END,
    "inval_by_phase": (SharedRace,),
    "inval_copy": END,
    "inval_known_to_another": END,
    "twice_initialised": (SharedRace,),
    "store_over": (BarrierMisuse,),
    "atomic_over": (BarrierMisuse,),
    "read_of": (BarrierMisuse,),
    "copy_over": (BarrierMisuse,),
    "store_after_signal": (SharedRace,),
    "arrives_ahead": BEGIN,
}
CLUSTERS = {
    "remote_arrive": BEGIN,
    "init_fence": (SharedRace,),
    "init_fence_is_of_initialisations": (SharedRace,),
    "multicast": BEGIN,
    "remote_store": BEGIN,
    "remote_add": (UnwaitedResult,),
    "remote_sums": (SharedRace, UninitialisedRead),
    "exit_arrive": (SharedRace, OutOfBounds),
    "exit_read": (SharedRace, OutOfBounds),
    "exit_read_behind_arrival": (SharedRace, OutOfBounds),
    "exit_copy": (SharedRace, OutOfBounds),
}
# Whether these show depends on who comes first.
SOMETIMES = {
    "and_back_again": (SharedRace,),
    "last_of_all": (SharedRace,),
    "last_adds_up": (SharedRace,),
    "runs_ahead": (SharedRace,),
    "counts_ahead": (SharedRace,),
}


@functools.cache
def module(source: str) -> Module:
    return Module.from_cuda(str(KERNELS / source), target="sm_90a")


def launch(kernel: str, order: tuple[str, int]) -> None:
    ctas = 2 if kernel.rpartition("_")[0] in CLUSTERS else 1
    pairs = module("race_mutants.cu")
    if kernel not in pairs.kernels:
        pairs = module("mbarrier_mutants.cu")
    source, out = pairs.const(np.arange(64, dtype=np.uint32)), np.zeros(64, np.uint32)
    options = Options(order=order[0], seed=order[1], max_instructions=200_000)
    block = 32 if ctas > 1 else 128
    pairs.launch(kernel, grid=ctas, block=block, cluster=(ctas, 1, 1), params=[source, out], options=options)


@pytest.mark.parametrize("name", PAIRS | CLUSTERS)
def test_what_is_left_to_luck_is_found_under_every_order(name):
    for order in ORDERS:
        with pytest.raises((PAIRS | CLUSTERS)[name]) as caught:
            launch(f"{name}_wrong", order)
        assert caught.value.line, f"{order}: {caught.value} names no line"


@pytest.mark.parametrize("name", PAIRS | CLUSTERS | SOMETIMES)
def test_the_twin_with_the_order_is_clean(name):
    for order in [*ORDERS, ("random", 6), ("random", 7)]:
        launch(f"{name}_right", order)


@pytest.mark.parametrize("name", SOMETIMES)
def test_a_random_schedule_lets_those_who_do_not_wait_overtake(name):
    shown = 0
    for seed in range(20):
        try:
            launch(f"{name}_wrong", ("random", seed))
        except SOMETIMES[name]:
            shown += 1
    assert shown >= (15 if "ahead" in name else 8), f"{shown} of 20 seeds show it"


def test_who_comes_last_under_eager_comes_first_under_lazy():
    launch("last_of_all_wrong", ("eager", 0))
    with pytest.raises(SharedRace):
        launch("last_of_all_wrong", ("lazy", 0))


def line_of(text: str) -> int:
    """The line of race_mutants.cu with `text`, which it has once."""
    (line,) = (k for k, row in enumerate((KERNELS / "race_mutants.cu").read_text().splitlines(), 1) if text in row)
    return line


AFTER = "with nothing that orders it after"
INITIALISED = rf"{AFTER} the initialisation by warp 0 at line"


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("masked_counter", rf"a write by warp 2 {AFTER} the write of warp 1 at line \d+ \(.*:{line_of('x == 33')}\)"),
        ("init_wait", rf"mbarrier 0x400: a wait by warp 1 {INITIALISED}"),
        ("init_copy", rf"mbarrier 0x410: a copy that signals it, by warp 2 {INITIALISED}"),
        ("inval_by_phase", rf"mbarrier.inval by warp 0 {AFTER} the wait of warp 2 at line"),
        ("store_over", "0x400 to 0x403: a write to an mbarrier by other than its own operations"),
    ],
)
def test_the_message_names_both_sides(kernel, words):
    orders = [("eager", 0), *(("random", seed) for seed in range(20))]
    messages = []
    for order in orders:
        try:
            launch(f"{kernel}_wrong", order)
        except (SharedRace, BarrierMisuse, UninitialisedRead) as error:
            messages.append(str(error))
    assert any(re.search(words, message) for message in messages), messages[0]


def ptx(body: str) -> Module:
    return Module.from_ptx(
        f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out) {{
.reg .b32 t, lane, got, place;
.reg .b64 at;
.reg .pred p, leader, low, first;
.shared .align 16 .b64 cells[8];
mov.u32 t, %tid.x;
mov.u32 lane, %laneid;
mov.u32 place, cells;
setp.eq.u32 leader, t, 0;
setp.lt.u32 low, lane, 16;
setp.lt.u32 first, t, 32;
ld.param.u64 at, [out];
{body}
END: ret;
}}
"""
    )


def run(body: str, order: tuple[str, int] = ("eager", 0), block: int = 64) -> int:
    out = np.zeros(1, np.uint32)
    ptx(body).launch("k", 1, block, [out], options=Options(order=order[0], seed=order[1], max_instructions=20_000))
    return int(out[0])


def errors_of(body: str, block: int = 64) -> list[EmulatorError | None]:
    found = []
    for order in ORDERS:
        try:
            run(body, order, block)
            found.append(None)
        except EmulatorError as error:
            found.append(error)
    return found


def fails_with(body: str, block: int = 64) -> set[str]:
    return {"nothing" if error is None else type(error).__name__ for error in errors_of(body, block)}


# ---------------------------------------------------------------- an mbarrier's end behind a relaxed wait

RELAXED = """@leader mbarrier.init.shared.b64 [place], {count}; bar.sync 0;
@!first mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [place];
@!first bra END;
AGAIN: {wait} p, [place], 0; {poll}
@leader mbarrier.inval.shared.b64 [place];"""


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_relaxed_wait_comes_after_the_arrivals_that_it_has_seen(order):
    wait = "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64"
    run(RELAXED.format(count=32, wait=wait, poll="@!p bra AGAIN;"), order)
    with pytest.raises((SharedRace, BarrierMisuse)):  # a poll that has seen nothing end
        run(RELAXED.format(count=33, wait=wait, poll=""), order)


# ---------------------------------------------------------------- barriers and parts of warps


def test_a_warp_arrives_at_a_barrier_when_all_of_its_lanes_that_are_left_have():
    """Half of each of four warps is no 64 threads: a count is of whole warps, whatever form the instruction has."""
    half = "@!low bra {0}; barrier.sync 1, 64;"
    assert fails_with(half.format("LATER") + "LATER: bar.sync 0;", 128) <= {"Deadlock", "IllegalInstruction"}
    assert fails_with(half.format("END") + "@leader st.global.u32 [at], 1;") == {"nothing"}
    assert fails_with(half.format("END"), 128) == {"BarrierMisuse"}
    # In two parts, at two instructions.
    parts = "@low bra LOW; barrier.sync 1, 64; bra END; LOW: barrier.sync 1, 64; @leader st.global.u32 [at], 1;"
    assert fails_with(parts) == {"nothing"}
    assert run(parts) == 1


def test_a_barrier_of_all_threads_by_half_of_a_warp():
    """`if (lane < 16) __syncthreads()`: those who exit are not waited for, those who go elsewhere are missed."""
    assert fails_with("@!low bra END; bar.sync 0;") == {"nothing"}
    assert fails_with("@!low bra NEXT; bar.sync 0; NEXT: bar.sync 0;") == {"IllegalInstruction"}
    assert fails_with("@!low bra NEXT; barrier.sync 0; NEXT: bar.warp.sync -1;") <= {"Deadlock", "IllegalInstruction"}
    with pytest.raises(IllegalInstruction, match="guard is true for lanes 0xffff of"):
        run("@low bar.sync 0;")


def test_arrivals_that_nobody_waits_for_are_no_fault():
    assert fails_with("bar.arrive 1, 96;") == {"nothing"}


def test_a_phase_of_a_named_barrier_begins_after_the_one_before():
    """A second arrival that may count for the phase before is named, one that the waiting warp has let go is not."""
    meet = """@first bra FIRST; bar.sync 1, 64; {let} bar.sync 1, 64; bra END;
    FIRST: bar.arrive 1, 64; {held} bar.arrive 1, 64;"""
    assert fails_with(meet.format(let="bar.arrive 2, 64;", held="bar.sync 2, 64;")) == {"nothing"}
    ahead = meet.format(let="", held="")
    assert fails_with(ahead) <= {"BarrierMisuse", "Deadlock"}
    with pytest.raises(BarrierMisuse, match="with nothing that orders it after the arrival of warp 0 at line"):
        run(ahead)  # both arrivals of the first warp fill one phase
    words = "warp 0 arrives at barrier 1 with nothing that orders it after the arrival of warp 1 at line"
    assert any(words in str(error) for error in errors_of(ahead))
