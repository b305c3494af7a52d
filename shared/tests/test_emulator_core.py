"""The emulator's own ground: parsing, launching, divergence, detectors, completion orders, counters."""
# ruff: noqa: E501  (lines of PTX in strings)

import numpy as np
import pytest
import torch

from cake_shared.emulator import (
    AsyncInFlight,
    BarrierMisuse,
    ConstWrite,
    Deadlock,
    Hang,
    LaunchError,
    Misaligned,
    MissingProxyFence,
    Module,
    Options,
    OutOfBounds,
    PtxSyntaxError,
    SharedRace,
    Stop,
    Trap,
    UninitialisedRead,
    UnsupportedInstruction,
    UnwaitedResult,
)

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def module(body, params="", module_level="", target="sm_90a"):
    return Module.from_ptx(f"{HEADER}{module_level}\n.visible .entry k({params})\n{{\n{body}\nret;\n}}\n", target)


def shared_module(body, bytes_=1024, params=".param .u64 out"):
    """A kernel with `buf` in shared memory; %tid in %r0, lane's word address in %r1, output pointer in %rd0."""
    return module(
        f""".reg .b32 %r<20>; .reg .b64 %rd<10>; .reg .pred %p<4>; .reg .f32 %f<4>;
        .shared .align 128 .b8 buf[{bytes_}];
        .shared .align 8 .b64 bar;
        mov.u32 %r0, %tid.x; mov.u32 %r2, buf; mov.u32 %r3, bar; shl.b32 %r4, %r0, 2; add.u32 %r1, %r2, %r4;
        ld.param.u64 %rd0, [out]; mul.wide.u32 %rd1, %r0, 4; add.u64 %rd2, %rd0, %rd1;
        {body}""",
        params,
    )


def test_vector_addition_on_arrays_and_tensors_with_every_thread_count():
    m = module(
        """.reg .pred %p; .reg .b32 %r<6>; .reg .f32 %f<4>; .reg .b64 %rd<8>;
        ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c]; ld.param.u32 %r1, [n];
        mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.s32 %r5, %r2, %r3, %r4;
        setp.ge.s32 %p, %r5, %r1; @%p bra done;
        mul.wide.s32 %rd4, %r5, 4; add.u64 %rd5, %rd1, %rd4; add.u64 %rd6, %rd2, %rd4; add.u64 %rd7, %rd3, %rd4;
        ld.global.nc.f32 %f1, [%rd5]; ld.global.f32 %f2, [%rd6]; add.f32 %f3, %f1, %f2; st.global.f32 [%rd7], %f3;
        done:""",
        ".param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n",
    )
    assert [p.type for p in m.kernels["k"].params] == ["u64", "u64", "u64", "u32"]
    a = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    b = torch.arange(1000, dtype=torch.float32)
    for threads in (1, 2, 3):
        c = np.full(1000, np.nan, np.float32)
        report = m.launch("k", 4, 256, [m.const(a), m.const(b), c, 1000], options=Options(threads=threads))
        assert np.array_equal(c, a + b.numpy())
        assert report.bytes["global_read"] == 8000
        assert report.bytes["global_write"] == 4000
        assert report.by_class["float"] == 32


def test_parameters_are_checked():
    m = module("", ".param .f32 x, .param .align 8 .b8 s[16], .param .u64 p")
    good = [1.5, bytes(16), None]
    m.launch("k", 1, 32, good)
    with pytest.raises(TypeError, match=r"takes 3 parameters \(.f32\[4\] x, .b8\[16\] s, .u64\[8\] p\), got 2"):
        m.launch("k", 1, 32, good[:2])
    with pytest.raises(TypeError, match=r"parameter 1 \(s, .b8, 16 bytes\) takes 16 bytes, got 8"):
        m.launch("k", 1, 32, [1.5, bytes(8), None])
    with pytest.raises(TypeError, match="is no pointer"):
        m.launch("k", 1, 32, [np.zeros(4), bytes(16), None])


def test_what_is_not_executed_is_named_before_anything_runs():
    with pytest.raises(UnsupportedInstruction, match=r"tex.2d.v4.f32.s32: unknown instruction .*line 7") as caught:
        module("tex.2d.v4.f32.s32 {a,b,c,d}, [t, {x,y}];")
    assert caught.value.line == 7
    with pytest.raises(UnsupportedInstruction, match=r"modifier \.nonsense"):
        module(".reg .b32 %r<3>; add.nonsense.u32 %r1, %r1, %r2;")
    with pytest.raises(PtxSyntaxError, match="line 7"):
        module(".reg .b32 %r<3>; add.u32 %r1 %r2;")
    with pytest.raises(PtxSyntaxError, match="the text is for sm_90a, the target is sm_100a"):
        module("", target="sm_100a")


def test_launch_limits():
    m = module("", ".param .u64 p")
    for wrong in ({"block": 1025}, {"smem_bytes": 240_000}, {"grid": (1, 70_000)}, {"cluster": 3, "grid": 4}):
        with pytest.raises(LaunchError):
            m.launch("k", **{"grid": 1, "block": 32, "params": [None], **wrong})


def test_divergent_loops_calls_and_reconvergence():
    m = module(
        """.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<4>;
        ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd3, %rd1, %rd2;
        mov.u32 %r2, 0; mov.u32 %r3, 0;
        loop: setp.ge.u32 %p1, %r3, %r1; @%p1 bra after;
        { .param .b32 x; st.param.b32 [x], %r3; .param .b32 y; call.uni (y), square, (x); ld.param.b32 %r4, [y]; }
        add.u32 %r2, %r2, %r4; add.u32 %r3, %r3, 1; bra loop;
        after: shfl.sync.bfly.b32 %r5, %r2, 1, 31, -1; add.u32 %r2, %r2, %r5; st.global.u32 [%rd3], %r2;""",
        ".param .u64 out",
        """.func (.param .b32 r) square(.param .b32 v) { .reg .b32 %r<3>; .reg .pred %p;
        ld.param.b32 %r1, [v]; setp.eq.u32 %p, %r1, 3; @%p bra odd; mul.lo.u32 %r2, %r1, %r1; st.param.b32 [r], %r2; ret;
        odd: st.param.b32 [r], 9; ret; }""",
    )
    out = np.zeros(32, np.uint32)
    report = m.launch("k", 1, 32, [out])
    sums = np.array([sum(i * i for i in range(t)) for t in range(32)])
    assert np.array_equal(out, sums + sums[np.arange(32) ^ 1])
    assert report.by_opcode["shfl.sync.bfly.b32"] == 1  # the lanes meet again


def test_one_lane_waits_for_another_of_its_warp():
    body = """mbarrier.init.shared.b64 [%r3], 1;
        setp.ne.u32 %p1, %r0, 0; @%p1 bra other;
        wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra wait; bra join;
        other: setp.ne.u32 %p1, %r0, 1; @%p1 bra join; mbarrier.arrive.shared.b64 _, [%r3];
        join: bar.warp.sync -1; st.global.u32 [%rd2], %r0;"""
    m = shared_module("setp.ne.u32 %p0, %r0, 0; @%p0 bra ready;" + body.replace(";\n", "; ready:\n", 1))
    out = np.zeros(32, np.uint32)
    m.launch("k", 1, 32, [out])
    assert np.array_equal(out, np.arange(32))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("st.global.u32 [%rd2+4], %r0;", OutOfBounds),
        ("add.u64 %rd2, %rd2, 2; st.global.u32 [%rd2-2], %r0; ld.global.u32 %r5, [%rd2];", Misaligned),
        ("st.shared.u32 [%r2+4096], %r0;", OutOfBounds),
        ("st.shared.u32 [0], %r0;", OutOfBounds),
        ("ld.shared.u32 %r5, [%r1]; st.global.u32 [%rd2], %r5;", UninitialisedRead),
        ("ld.local.u32 %r5, [%rd1+64];", OutOfBounds),
        ("bar.sync 1, 96;", Deadlock),
        ("bar.sync 0, 64; bar.sync 1, 40;", BarrierMisuse),
        ("trap;", Trap),
        ("mbarrier.arrive.shared.b64 _, [%r3];", BarrierMisuse),
    ],
)
def test_detectors_of_single_accesses(body, error):
    m = shared_module(body)
    with pytest.raises(error) as caught:
        m.launch("k", 1, 64, [np.zeros(64, np.uint32)])
    assert caught.value.line > 0
    assert error.__name__ in str(caught.value)


def test_const_and_uninitialised_global_memory():
    m = module(
        ".reg .b64 %rd<3>; .reg .b32 %r<3>; ld.param.u64 %rd1, [a]; ld.global.u32 %r1, [%rd1]; st.global.u32 [%rd1], %r1;",
        ".param .u64 a",
    )
    a = np.zeros(1, np.uint32)
    with pytest.raises(ConstWrite, match="parameter 0"):
        m.launch("k", 1, 1, [m.const(a)])
    read_only = np.broadcast_to(a, (1,))
    with pytest.raises(ConstWrite, match="parameter 0"):
        m.launch("k", 1, 1, [read_only])
    with pytest.raises(UninitialisedRead, match="byte 0 of parameter 0"):
        m.launch("k", 1, 1, [m.uninit(a)])
    m.launch("k", 1, 1, [a])


def test_strided_views_are_registered_as_far_as_they_reach():
    m = module(
        ".reg .b64 %rd<3>; .reg .b32 %r<3>; ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [o]; ld.global.u32 %r1, [%rd1+28]; st.global.u32 [%rd2], %r1;",
        ".param .u64 a, .param .u64 o",
    )
    data, out = np.arange(8, dtype=np.uint32), np.zeros(1, np.uint32)
    m.launch("k", 1, 1, [data[0::7], out])
    assert out[0] == 7
    with pytest.raises(OutOfBounds, match="0 bytes past the end of parameter 0"):
        m.launch("k", 1, 1, [data[0::6], out])


def test_races_between_warps_and_what_orders_them():
    write = "st.shared.u32 [%r1], %r0; "
    read = "xor.b32 %r5, %r4, 128; add.u32 %r5, %r5, %r2; ld.shared.u32 %r6, [%r5]; st.global.u32 [%rd2], %r6;"
    out = np.zeros(64, np.uint32)
    shared_module(write + "bar.sync 0; " + read).launch("k", 1, 64, [out])
    assert np.array_equal(out, np.arange(64) ^ 32)
    for missing in ("", "bar.warp.sync -1; "):
        for seed in range(3):
            with pytest.raises((SharedRace, UninitialisedRead)):
                shared_module(write + missing + read).launch(
                    "k", 1, 64, [out], options=Options(order="random", seed=seed)
                )
    with pytest.raises(SharedRace, match="a write by warp 0"):  # write after read
        shared_module(
            write
            + "bar.sync 0; setp.lt.u32 %p1, %r0, 32; @%p1 bra second; ld.shared.u32 %r6, [%r2]; ret; second: st.shared.u32 [%r2], %r0;"
        ).launch("k", 1, 64, [out], options=Options(order="random", seed=5))


def test_all_threads_may_store_one_value_but_not_two():
    store = "st.shared.u32 [%r2], {}; bar.sync 0; ld.shared.u32 %r6, [%r2]; st.global.u32 [%rd2], %r6;"
    out = np.zeros(64, np.uint32)
    shared_module(store.format("7")).launch("k", 1, 64, [out])
    assert (out == 7).all()
    with pytest.raises(SharedRace, match="a write by warp 1"):
        shared_module(store.format("%r0")).launch("k", 1, 64, [out])


def bulk_copy(wait="wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra wait;", expect=128, count=1):
    return shared_module(
        f"""setp.ne.u32 %p1, %r0, 0;
        @!%p1 mbarrier.init.shared.b64 [%r3], {count}; fence.mbarrier_init.release.cluster; bar.sync 0;
        @%p1 bra go;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {expect};
        ld.param.u64 %rd5, [src]; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd5], 128, [%r3];
        go: {wait}
        ld.shared.u32 %r6, [%r1]; st.global.u32 [%rd2], %r6;""",
        params=".param .u64 out, .param .u64 src",
    )


ORDERS = [Options(order="eager"), Options(order="lazy"), *(Options(order="random", seed=s) for s in range(3))]


def aligned(count):
    raw = np.zeros(count + 16, np.uint32)
    start = (-raw.ctypes.data % 64) // 4
    return raw[start : start + count]


@pytest.mark.parametrize("options", ORDERS, ids=lambda o: f"{o.order}{o.seed}")
def test_bulk_copies_and_their_mutants_under_every_order(options):
    source, out = aligned(32), np.zeros(32, np.uint32)
    source[:] = np.arange(32) * 3
    bulk_copy().launch("k", 1, 32, [out, source], options=options)
    assert np.array_equal(out, source)
    with pytest.raises((UnwaitedResult, UninitialisedRead)):
        bulk_copy(wait="").launch("k", 1, 32, [out, source], options=options)
    with pytest.raises(Deadlock, match="polls"):
        bulk_copy(expect=144).launch("k", 1, 32, [out, source], options=options)
    with pytest.raises(Deadlock):
        bulk_copy(count=2).launch("k", 1, 32, [out, source], options=options)


def test_stores_read_by_the_asynchronous_proxy_need_a_proxy_fence():
    def store(fence, wait="cp.async.bulk.wait_group 0;"):
        return shared_module(
            f"""st.shared.u32 [%r1], %r0; {fence} bar.sync 0; setp.ne.u32 %p1, %r0, 0; @%p1 bra done;
            cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], 256; cp.async.bulk.commit_group; {wait}
            done:"""
        )

    out = aligned(64)
    for options in ORDERS:
        out[:] = 0
        store("fence.proxy.async.shared::cta;").launch("k", 1, 64, [out], options=options)
        assert np.array_equal(out, np.arange(64))
        with pytest.raises(MissingProxyFence):
            store("").launch("k", 1, 64, [out], options=options)
        with pytest.raises(AsyncInFlight):
            store("fence.proxy.async.shared::cta;", wait="").launch("k", 1, 64, [out], options=options)


def test_too_many_arrivals_and_initialising_twice():
    arrive = "mbarrier.arrive.shared.b64 _, [%r3]; "
    init = "setp.ne.u32 %p1, %r0, 0; @!%p1 mbarrier.init.shared.b64 [%r3], 32; bar.sync 0; "
    shared_module(init + arrive).launch("k", 1, 32, [np.zeros(32, np.uint32)])
    with pytest.raises(BarrierMisuse, match=r"too many|exceed"):
        shared_module(
            init.replace("32;", "31;", 1)
            + "setp.lt.u32 %p2, %r0, 40; mbarrier.expect_tx.relaxed.cta.shared.b64 [%r3], 16; "
            + arrive
        ).launch("k", 1, 64, [np.zeros(64, np.uint32)])
    with pytest.raises(BarrierMisuse, match="initialised again"):
        shared_module(init + init.replace("%p1, %r0, 0", "%p1, %r0, 1")).launch("k", 1, 32, [np.zeros(32, np.uint32)])


def test_endless_loops_end():
    with pytest.raises(Hang):
        shared_module("again: add.u32 %r5, %r5, 1; bra again;").launch(
            "k", 1, 32, [np.zeros(32, np.uint32)], options=Options(max_instructions=100_000)
        )


def test_ctas_that_wait_for_each_other_run_together():
    m = module(
        """.reg .b64 %rd<3>; .reg .b32 %r<6>; .reg .pred %p<3>; ld.param.u64 %rd1, [flag]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x;
        wait: ld.acquire.gpu.global.u32 %r3, [%rd1]; sub.u32 %r4, %r2, 1; sub.u32 %r4, %r4, %r1; setp.ne.u32 %p1, %r3, %r4; @%p1 bra wait;
        atom.add.release.gpu.global.u32 %r5, [%rd1], 1;""",
        ".param .u64 flag",
    )
    assert m.kernels["k"].communicates
    for options in (Options(), Options(order="random", seed=3, threads=2)):
        flag = np.zeros(1, np.uint32)
        m.launch("k", 9, 1, [flag], options=options)
        assert flag[0] == 9
    with pytest.raises(Deadlock):
        m.launch("k", 9, 1, [np.full(1, 20, np.uint32)])


def test_clusters_share_memory_through_mapped_addresses():
    m = shared_module(
        """mov.u32 %r5, %cluster_ctarank; mad.lo.u32 %r6, %r5, 100, %r0; st.shared.u32 [%r1], %r6;
        barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
        xor.b32 %r7, %r5, 1; mapa.shared::cluster.u32 %r8, %r1, %r7; ld.shared::cluster.u32 %r9, [%r8];
        mul.wide.u32 %rd3, %r5, 128; add.u64 %rd2, %rd2, %rd3; st.global.u32 [%rd2], %r9;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    )
    out = np.zeros(64, np.uint32)
    m.launch("k", 2, 32, [out], cluster=2)
    assert np.array_equal(out, np.concatenate([np.arange(32) + 100, np.arange(32)]))


def test_stop_at_a_line_shows_shared_memory():
    m = shared_module("st.shared.u32 [%r1], %r0;\nbar.sync 0;\nst.global.u32 [%rd2], %r0;")
    with pytest.raises(Stop, match="00000003 00000004") as caught:
        m.launch("k", 1, 32, [np.zeros(32, np.uint32)], options=Options(stop_line=14, dump_shared=(1024, 128)))
    assert caught.value.warp == 0


def test_counters_of_bank_conflicts():
    def stride(words):
        return shared_module(
            f"mul.lo.u32 %r5, %r0, {4 * words}; add.u32 %r5, %r5, %r2; st.shared.u32 [%r5], %r0;", 4096
        )

    conflicts = {
        words: stride(words).launch("k", 1, 32, [np.zeros(32, np.uint32)], options=Options(profile=True)).bank_conflicts
        for words in (1, 2, 3, 32)
    }
    assert conflicts == {1: 0, 2: 1, 3: 0, 32: 31}


@pytest.mark.parametrize(
    ("form", "values", "wanted"),
    [
        ("max.abs.f32", [-5.0, 3.0], 0x40A00000),
        ("min.abs.f32", [-5.0, 3.0], 0x40400000),
        ("min.f32", [0.0, -0.0], 0x80000000),
        ("min.f32", [-0.0, 0.0], 0x80000000),
        ("max.f32", [float("nan"), 2.0], 0x40000000),
        ("max.NaN.f32", [2.0, float("nan")], 0x7FFFFFFF),
        ("max.f32", [float("nan"), float("nan")], 0x7FFFFFFF),
    ],
)
def test_redux_of_floats(form, values, wanted):
    """Every lane counts alike, the first one too; one pattern for NaN, -0 below +0."""
    text = f""".version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 a)
{{
  .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .f32 %f<3>;
  ld.param.u64 %rd1, [a];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd3, %rd1, %rd2;
  ld.global.f32 %f1, [%rd3];
  redux.sync.{form} %f2, %f1, 0xffffffff;
  st.global.f32 [%rd3], %f2;
  ret;
}}
"""
    a = np.array(values * 16, np.float32)
    Module.from_ptx(text, "sm_100a").launch("k", 1, 32, [a])
    assert set(a.view(np.uint32).tolist()) == {wanted}


@pytest.mark.parametrize("shape", [{"grid": 2**32 + 1}, {"block": 2**32 + 32}, {"cluster": 2**32 + 1}])
def test_sizes_do_not_wrap(shape):
    m = module("", "")
    with pytest.raises(ValueError, match="takes one to three sizes below 2\\^32"):
        m.launch("k", **{"grid": 1, "block": 32, **shape})
    with pytest.raises(LaunchError, match="smem_bytes"):
        m.launch("k", 1, 32, smem_bytes=2**32 + 16)
    with pytest.raises(LaunchError, match="65 threads along dimension 2 of the block"):
        m.launch("k", 1, (1, 1, 65))


def test_arrays_of_python_objects_are_refused():
    m = module("", ".param .u64 a")
    with pytest.raises(TypeError, match="holds Python objects"):
        m.launch("k", 1, 32, [np.empty(4, object)])
