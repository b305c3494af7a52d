"""Handing shared memory over by strong accesses: what the memory model orders passes, what it does not is a race."""

import numpy as np
import pytest

from cake_shared.emulator import Module, Options, SharedRace

ORDERS = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("random", 3)]


def kernel(producer: str, consumer: str, before: str = "", end: str = "") -> Module:
    """Two warps: the first runs `producer` after writing 7 to `data`, the second `consumer` before reading it."""
    return Module.from_ptx(
        f""".version 8.7
.target sm_90a
.address_size 64
.visible .global .align 4 .u32 gflag;
.visible .entry k(.param .u64 out) {{
.reg .b32 t, seven, one, got, flag, data, seen;
.reg .b64 at, wide;
.reg .pred first, set;
.shared .align 8 .b32 cells[8];
mov.u32 t, %tid.x;
mov.u32 flag, cells;
add.u32 data, flag, 16;
mov.u32 seven, 7;
mov.u32 one, 1;
ld.param.u64 at, [out];
setp.lt.u32 first, t, 32;
setp.eq.u32 set, t, 0;
@set st.shared.u32 [flag], 0;
@set st.shared.u32 [flag+4], 0;
@set st.shared.u32 [data], 0;
{before}
bar.sync 0;
@!first bra CONSUMER;
st.shared.u32 [data], seven;
{producer}
bra DONE;
CONSUMER:
{consumer}
ld.shared.u32 got, [data];
st.global.u32 [at], got;
DONE:
{end}
ret;
}}
"""
    )


def poll(load: str, flag: str = "[flag]", label: str = "AGAIN") -> str:
    return f"{label}: {load} seen, {flag}; setp.eq.u32 set, seen, 0; @set bra {label};"


def run(module: Module, order: tuple[str, int]) -> int:
    out = np.zeros(1, np.uint32)
    module.launch("k", grid=1, block=64, params=[out], options=Options(order=order[0], seed=order[1]))
    return int(out[0])


RIGHT = {
    "release and acquire": ("st.release.cta.shared.u32 [flag], one;", poll("ld.acquire.cta.shared.u32")),
    "fences around relaxed": (
        "fence.acq_rel.cta; st.relaxed.cta.shared.u32 [flag], one;",
        poll("ld.relaxed.cta.shared.u32") + "fence.acq_rel.cta;",
    ),
    "membar around volatile": (
        "membar.cta; st.volatile.shared.u32 [flag], one;",
        poll("ld.volatile.shared.u32") + "membar.cta;",
    ),
    "a volatile flag and __syncwarp": (
        "fence.acq_rel.cta; bar.warp.sync -1; st.volatile.shared.u32 [flag], one;",
        poll("ld.volatile.shared.u32") + "fence.acq_rel.cta; bar.warp.sync -1;",
    ),
    "one-sided fences": (
        "fence.release.sync_restrict::shared::cta.cluster; st.relaxed.cluster.shared.u32 [flag], one;",
        poll("ld.acquire.cluster.shared.u32"),
    ),
    "release store, relaxed load and a fence": (
        "st.release.cta.shared.u32 [flag], one;",
        poll("ld.relaxed.cta.shared.u32") + "fence.acq_rel.cta;",
    ),
    "fence and atomic, acquire": (
        "fence.acq_rel.cta; red.relaxed.cta.shared.add.u32 [flag], one;",
        poll("ld.acquire.cta.shared.u32"),
    ),
    "an atomic that releases": (
        "atom.release.cta.shared.exch.b32 seen, [flag], one;",
        "AGAIN: atom.acquire.cta.shared.cas.b32 seen, [flag], 1, 2; setp.eq.u32 set, seen, 0; @set bra AGAIN;",
    ),
    "a chain of atomics after a release": (
        "st.release.cta.shared.u32 [flag], one; atom.relaxed.cta.shared.add.u32 seen, [flag], one;",
        poll("ld.acquire.cta.shared.u32"),
    ),
    "a release and then a strong write to the same place": (
        "st.release.cta.shared.u32 [flag], one; st.relaxed.cta.shared.u32 [flag], 2;",
        "AGAIN: ld.acquire.cta.shared.u32 seen, [flag]; setp.ne.u32 set, seen, 2; @set bra AGAIN;",
    ),
    "a strong read and then an acquire of the same place": (
        "st.release.cta.shared.u32 [flag], one;",
        poll("ld.relaxed.cta.shared.u32") + "ld.acquire.cta.shared.u32 seen, [flag];",
    ),
    "generic addresses": (
        "cvta.shared.u64 wide, cells; st.release.cta.u32 [wide], one;",
        "cvta.shared.u64 wide, cells;" + poll("ld.acquire.cta.u32", "[wide]"),
    ),
    "a flag in global memory": (
        "st.release.gpu.global.u32 [gflag], one;",
        poll("ld.acquire.gpu.global.u32", "[gflag]") + "bar.warp.sync -1; st.relaxed.gpu.global.u32 [gflag], 0;",
    ),
    "fences around a flag in global memory": (
        "membar.gl; st.volatile.global.u32 [gflag], one;",
        poll("ld.volatile.global.u32", "[gflag]") + "membar.gl; bar.warp.sync -1; st.volatile.global.u32 [gflag], 0;",
    ),
    "the flag is taken back by an ordinary write after it was read": (
        "st.release.cta.shared.u32 [flag], one;",
        poll("ld.acquire.cta.shared.u32") + "st.shared.u32 [flag], 0;",
    ),
    "by one lane for its warp": (
        "st.release.cta.shared.u32 [flag], one;",
        "setp.ne.u32 set, t, 32; @set bra MEET;"
        + poll("ld.acquire.cta.shared.u32")
        + "MEET: bar.warp.sync -1;",
    ),
}  # fmt: skip

WRONG = {
    "relaxed without fences": ("st.relaxed.cta.shared.u32 [flag], one;", poll("ld.relaxed.cta.shared.u32")),
    "volatile without fences": ("st.volatile.shared.u32 [flag], one;", poll("ld.volatile.shared.u32")),
    "no fence of the producer": (
        "st.relaxed.cta.shared.u32 [flag], one;",
        poll("ld.acquire.cta.shared.u32") + "fence.acq_rel.cta;",
    ),
    "no fence of the consumer": ("st.release.cta.shared.u32 [flag], one;", poll("ld.relaxed.cta.shared.u32")),
    "a fence after the flag": (
        "st.relaxed.cta.shared.u32 [flag], one; fence.acq_rel.cta;",
        poll("ld.acquire.cta.shared.u32"),
    ),
    "a fence before the load": (
        "st.release.cta.shared.u32 [flag], one;",
        "fence.acq_rel.cta;" + poll("ld.relaxed.cta.shared.u32"),
    ),
    "a release of another place": (
        "st.release.cta.shared.u32 [flag+4], one; st.relaxed.cta.shared.u32 [flag], one;",
        poll("ld.acquire.cta.shared.u32"),
    ),
    "relaxed atomics": ("red.relaxed.cta.shared.add.u32 [flag], one;", poll("ld.acquire.cta.shared.u32")),
    "an ordinary flag": ("fence.acq_rel.cta; st.shared.u32 [flag], one;", poll("ld.acquire.cta.shared.u32")),
    "written after the release": (
        "st.release.cta.shared.u32 [flag], one; st.shared.u32 [data], 8;",
        poll("ld.acquire.cta.shared.u32"),
    ),
    "fences and no flag": ("fence.acq_rel.cta;", "fence.acq_rel.cta;"),
    "a fence that only acquires": (
        "fence.acquire.sync_restrict::shared::cluster.cluster; st.relaxed.cta.shared.u32 [flag], one;",
        poll("ld.acquire.cta.shared.u32"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("how", RIGHT)
def test_a_hand_over_that_the_memory_model_orders_passes(how, order):
    assert run(kernel(*RIGHT[how]), order) == 7


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("how", WRONG)
def test_a_hand_over_that_it_does_not_order_is_a_race(how, order):
    with pytest.raises(SharedRace):
        run(kernel(*WRONG[how]), order)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_strong_accesses_do_not_race_with_each_other_but_with_ordinary_ones(order):
    count = "atom.relaxed.cta.shared.add.u32 seen, [flag+4], 1; ld.volatile.shared.u32 seen, [flag+4];"
    meet = "bar.sync 0;"
    assert run(kernel(count + "bar.sync 0;", count + meet), order) == 7
    with pytest.raises(SharedRace):
        run(kernel("ld.volatile.shared.u32 seen, [flag+4]; bar.sync 0;", "st.shared.u32 [flag+4], t;" + meet), order)
    with pytest.raises(SharedRace):
        run(kernel("st.volatile.shared.u32 [flag+4], t; bar.sync 0;", "ld.shared.u32 seen, [flag+4];" + meet), order)


def cluster(arrive: str, wait: str, fence: str = "") -> Module:
    """CTA 0 of a pair writes into the shared memory of CTA 1, which reads it after the barrier of the cluster."""
    return Module.from_ptx(
        f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out) {{
.reg .b32 rank, own, remote, got;
.reg .b64 at;
.reg .pred first, second;
.shared .align 8 .b32 cells[8];
mov.u32 rank, %cluster_ctarank;
setp.eq.u32 first, rank, 0;
setp.eq.u32 second, rank, 1;
mov.u32 own, cells;
mapa.shared::cluster.u32 remote, own, 1;
ld.param.u64 at, [out];
@second st.shared.u32 [own], 0;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
@first st.shared::cluster.u32 [remote], 7;
{fence}
{arrive}
{wait}
@second ld.shared.u32 got, [own];
@second st.global.u32 [at], got;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
ret;
}}
"""
    )


def run_cluster(module: Module, order: tuple[str, int]) -> int:
    out = np.zeros(1, np.uint32)
    module.launch(
        "k", grid=2, block=32, cluster=(2, 1, 1), params=[out], options=Options(order=order[0], seed=order[1])
    )
    return int(out[0])


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    ("arrive", "fence"),
    [
        ("barrier.cluster.arrive.release.aligned;", ""),
        ("barrier.cluster.arrive.aligned;", ""),
        ("barrier.cluster.arrive.relaxed.aligned;", "fence.acq_rel.cluster;"),
    ],
)
def test_a_cluster_barrier_that_releases_passes_memory_on(arrive, fence, order):
    assert run_cluster(cluster(arrive, "barrier.cluster.wait.aligned;", fence), order) == 7


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("fence", ["", "fence.mbarrier_init.release.cluster;"])
def test_a_relaxed_arrival_at_the_cluster_barrier_passes_nothing_on(fence, order):
    with pytest.raises(SharedRace):
        run_cluster(
            cluster("barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.wait.acquire.aligned;", fence), order
        )


def test_what_the_cluster_barrier_tells_is_known_after_the_wait_and_not_before():
    early = "@second ld.shared.u32 got, [own];"
    for order in ORDERS[2:]:
        with pytest.raises(SharedRace):
            run_cluster(
                cluster("barrier.cluster.arrive.release.aligned;\n" + early, "barrier.cluster.wait.aligned;"), order
            )


def neighbours(store: str, load: str) -> Module:
    """CTA 0 writes into the shared memory of CTA 1 and sets a flag there with `store`; CTA 1 polls it with `load`."""
    return Module.from_ptx(
        f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out) {{
.reg .b32 rank, own, flag, remote, got, seen;
.reg .b64 at;
.reg .pred first, set;
.shared .align 8 .b32 cells[8];
mov.u32 rank, %cluster_ctarank;
setp.eq.u32 first, rank, 0;
mov.u32 own, cells;
st.shared.u32 [own], 0;
st.shared.u32 [own+4], 0;
mapa.shared::cluster.u32 remote, own, 1;
ld.param.u64 at, [out];
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
@!first bra POLL;
st.shared::cluster.u32 [remote], 7;
{store}
bra DONE;
POLL: {load}
setp.eq.u32 set, seen, 0;
@set bra POLL;
ld.shared.u32 got, [own];
st.global.u32 [at], got;
DONE: barrier.cluster.arrive.relaxed;
barrier.cluster.wait;
ret;
}}
"""
    )


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_hand_over_between_the_ctas_of_a_cluster(order):
    release, relaxed = (f"st.{kind}.cluster.shared::cluster.u32 [remote+4], 1;" for kind in ("release", "relaxed"))
    acquire = "ld.acquire.cluster.shared::cta.u32 seen, [own+4];"
    assert run_cluster(neighbours(release, acquire), order) == 7
    assert run_cluster(neighbours("fence.acq_rel.cluster;" + relaxed, acquire), order) == 7
    for store, load in ((relaxed, acquire), (release, acquire.replace("acquire", "relaxed"))):
        with pytest.raises(SharedRace, match="CTA rank 0"):
            run_cluster(neighbours(store, load), order)


def mbarrier(arrive: str, wait: str, after: str = "") -> Module:
    """The first warp arrives with `arrive`, the second polls with `wait`; count 32."""
    return kernel(
        arrive.replace("AT", "[flag+8]"),
        f"AGAIN: {wait.replace('AT', '[flag+8]')} set, [flag+8], 0; @!set bra AGAIN; {after}",
        before="setp.eq.u32 set, t, 0; @set mbarrier.init.shared.b64 [flag+8], 32;",
    )


RELEASE = "mbarrier.arrive.release.cta.shared::cta.b64 _, AT;"
RELAXED = "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, AT;"
ACQUIRE = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64"
RELAXED_WAIT = "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64"


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    ("arrive", "wait", "after"),
    [
        (RELEASE, ACQUIRE, ""),
        ("fence.acq_rel.cta;" + RELAXED, ACQUIRE, ""),
        (RELEASE, RELAXED_WAIT, "fence.acq_rel.cta;"),
        ("mbarrier.arrive.shared::cta.b64 _, AT;", "mbarrier.test_wait.parity.shared::cta.b64", ""),
    ],
)
def test_an_mbarrier_passes_on_what_its_arrivals_release(arrive, wait, after, order):
    assert run(mbarrier(arrive, wait, after), order) == 7


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    ("arrive", "wait"), [(RELAXED, ACQUIRE), (RELEASE, RELAXED_WAIT), (RELAXED + "fence.acq_rel.cta;", ACQUIRE)]
)
def test_relaxed_operations_on_an_mbarrier_pass_nothing_on(arrive, wait, order):
    with pytest.raises(SharedRace):
        run(mbarrier(arrive, wait), order)
