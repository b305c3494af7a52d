"""The split programs on a GPU: accuracy and parity with the twin, streams, graphs, repeats; and the hand-over."""

import contextlib
import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import dense_projection_det_gemm as det
import dense_projection_gemm as free
from cake_shared.gemm import oracle
from cake_shared.gemm.problem import GemmProblem
from cake_shared.testing import assert_bitwise_equal, assert_near, poison_
from cake_shared.testing.gemm_cuda import GemmCase, assert_rounded_once, fp32_limit, layout_cases, normal
from cake_shared.workloads import PROJECTIONS
from dense_projection_gemm import cuda
from dense_projection_gemm.cuda_plan import SplitPlan, measured_rows, plan_split

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def split_everything(monkeypatch):
    """Every BF16 GEMM that is not empty runs a split program, measured or not."""

    def plan(problem, architecture, multiprocessors):
        if min(problem.m, problem.n, problem.k, problem.batch) == 0:
            return None
        return plan_split(problem, multiprocessors)

    monkeypatch.setattr(cuda, "plan_measured", plan)
    # Eager calls remember the plan of their signature.
    free.api._FREE.launcher.recipes.forget()
    yield
    free.api._FREE.launcher.recipes.forget()


def gemm(a, b, out, transposed_out=False, accumulate=False):
    return free.dense_projection_gemm(a, b, out, transposed_out, accumulate=accumulate, deterministic=False)


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("extents", [(136, 72, 200), (48, 264, 1000), (304, 520, 64), (640, 1032, 2000)], ids=str)
def test_every_layout(extents, batch):
    for case in layout_cases(*extents, batch=batch, pad=batch % 2):
        case.check(gemm)


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("k", [1, 63, 64, 65, 16231])
@pytest.mark.parametrize(("m", "n"), [(8, 8), (1, 16), (64, 512), (65, 256), (257, 264)])
def test_ragged_extents(m, n, k):
    GemmCase(m, n, k, "m", "n", FP32, pad=1).check(gemm)
    GemmCase(m, n, k, "k", "n", BF16).check(gemm)


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("multiprocessors", [2, 16, 64, 130])
def test_other_numbers_of_multiprocessors(multiprocessors, monkeypatch):
    """Fewer clusters than the device has: other cuts, the same accuracy."""
    backend = cuda.split_backend(torch.device("cuda"))
    monkeypatch.setattr(cuda, "plan_measured", lambda problem, *_: plan_split(problem, multiprocessors))
    free.api._FREE.launcher.recipes.forget()
    monkeypatch.setattr(backend, "multiprocessors", multiprocessors)
    for out_dtype in (FP32, BF16):
        GemmCase(640, 1032, 1000, "m", "n", out_dtype).check(gemm)
        GemmCase(40, 1032, 5000, "m", "n", out_dtype).check(gemm)


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("workload", [w for w in PROJECTIONS if w.tokens == 16231 and w.d_out <= 1024], ids=str)
def test_parity_on_the_published_weight_gradients(workload):
    """Both forms against float64 and against each other."""
    g, x = normal(workload.tokens, workload.d_out), normal(workload.tokens, workload.d_in, seed=1)
    exact = oracle.wgrad(g, x)
    for dtype, limit in ((FP32, fp32_limit(workload.tokens)), (BF16, 2.5e-3)):
        ours = free.projection_wgrad(g, x, out_dtype=dtype, deterministic=False)
        twin = free.projection_wgrad(g, x, out_dtype=dtype)
        assert_bitwise_equal(twin, det.projection_wgrad(g, x, out_dtype=dtype))
        for result in (ours, twin):
            assert_near(result, exact, limit)
        assert_near(ours, twin, 2 * limit)


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("rows", [(0, 1, 8191), (8191, 0, 1), (1, 8191, 0)], ids=str)
def test_u52_partial_sums_keep_fp32(rows):
    """U52, CF5: 256, 1 and -256 sum to 1 in whatever order; a BF16 partial sum would lose the 1."""
    g, x = torch.zeros(8192, 32, dtype=BF16, device="cuda"), torch.zeros(8192, 64, dtype=BF16, device="cuda")
    g[list(rows), :] = 1
    for row, value in zip(rows, (256.0, 1.0, -256.0)):
        x[row] = value
    assert bool((free.projection_wgrad(g, x, out_dtype=FP32, deterministic=False) == 1.0).all())


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_u52_two_streams_and_threads_at_once(dtype):
    """U52: 100 weight gradients on each of two streams at once are right; freed memory comes back full of NaN."""
    pairs = [(normal(8192, 48, seed=i), normal(8192, 512, seed=10 + i)) for i in range(2)]
    exact = [oracle.wgrad(g, x) for g, x in pairs]
    worst = [torch.zeros((), dtype=torch.float64, device="cuda") for _ in pairs]
    torch.cuda.synchronize()

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                result = free.projection_wgrad(*pairs[index], out_dtype=dtype, deterministic=False)
                error = (result.double() - exact[index]).norm() / exact[index].norm()
                worst[index] = torch.fmax(worst[index], torch.nan_to_num(error, nan=1e9))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.cuda.synchronize()
    assert max(float(w) for w in worst) <= (fp32_limit(8192) if dtype == FP32 else 2.5e-3)


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("k", [8192, 16384])
@pytest.mark.parametrize("m", [8, 16, 48])
def test_u53_1000_repeats_on_a_full_gpu(m, k):
    """U53: no hang and no wrong sum, while another stream keeps the GPU full."""
    g, x = normal(k, m), normal(k, 256, seed=1)
    exact = oracle.wgrad(g, x)
    plan = free.prepare_wgrad(g, x, out_dtype=FP32, deterministic=False)
    assert isinstance(plan.plan, SplitPlan)
    busy, side = normal(4096, 4096, seed=4), torch.cuda.Stream()
    worst = torch.zeros((), dtype=torch.float64, device="cuda")
    for repeat in range(1000):
        if repeat % 20 == 10:
            with torch.cuda.stream(side):
                busy @ busy
        error = (plan.launch().double() - exact).norm() / exact.norm()
        worst = torch.fmax(worst, torch.nan_to_num(error, nan=1e9))
    assert float(worst) <= fp32_limit(k)


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize(("prefill", "expected"), [(0.0, 257.0), (0.5, 257.5)])
def test_u54_two_micro_batches_into_one_fp32_buffer(prefill, expected):
    buffer = torch.full((32, 64), prefill, device="cuda")
    for value in (256.0, 1.0):
        g, x = torch.zeros(1000, 32, dtype=BF16, device="cuda"), torch.zeros(1000, 64, dtype=BF16, device="cuda")
        g[517], x[517] = 1, value
        free.projection_wgrad(g, x, out=buffer, accumulate=True, deterministic=False)
    assert bool((buffer == expected).all())


@pytest.mark.usefixtures("split_everything")
def test_u56_outputs_beyond_two_to_the_31():
    m, n, k = 65537, 32776, 64
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < 12 * 2**30:
        pytest.skip("needs 12 GiB of device memory")
    a, b = normal(m, k), normal(n, k, seed=1)
    out = free.projection_forward(a, b, deterministic=False)
    assert_rounded_once(out[-70:], a[-70:], b.t())
    assert_rounded_once(out[:, -16:], a, b[-16:].t())


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_prepared_launches(dtype):
    """No allocation, no waiting, every element written, right in a graph on changed operands."""
    g, x = normal(5000, 520), normal(5000, 264, seed=1)
    plan = free.prepare_wgrad(g, x, out_dtype=dtype, deterministic=False)
    assert isinstance(plan.plan, SplitPlan)
    plan.launch()
    limit = fp32_limit(5000) if dtype == FP32 else 2.5e-3
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronisation():
        plan.launch()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.launch()
        eager = free.projection_wgrad(g, x, out_dtype=dtype, deterministic=False)
    for seed in (1, 5):
        x.copy_(normal(5000, 264, seed=seed))
        poison_(plan.out)
        poison_(eager)
        graph.replay()
        for result in (plan.out, eager):
            assert_near(result, oracle.wgrad(g, x), limit)


@pytest.mark.usefixtures("split_everything")
def test_operands_of_the_call_before_are_waited_for():
    """The program reads operands before the launch before it has ended: they must still be what the stream wrote."""
    g, x = normal(3000, 512), normal(3000, 256, seed=1)
    slow = normal(4096, 4096, seed=3)
    for seed in range(20):
        source = normal(3000, 256, seed=seed)
        torch.cuda.synchronize()
        slow @ slow
        x.copy_(source)
        result = free.projection_wgrad(g, x, out_dtype=FP32, deterministic=False)
        following = free.projection_wgrad(result.bfloat16(), result.bfloat16(), out_dtype=FP32, deterministic=False)
        rounded = result.bfloat16()
        assert_near(result, oracle.wgrad(g, source), fp32_limit(3000))
        assert_near(following, oracle.wgrad(rounded, rounded), fp32_limit(512))


@pytest.mark.usefixtures("split_everything")
def test_training_step_under_main_grad():
    x, w, g = normal(3000, 264).requires_grad_(), normal(520, 264, seed=1).requires_grad_(), normal(3000, 520, seed=2)
    main_grad = torch.zeros(520, 264, device="cuda")
    for _ in range(2):
        free.projection_forward(x, w, main_grad=main_grad, deterministic=False).backward(g)
    assert_near(main_grad, 2 * oracle.wgrad(g, x), fp32_limit(3000))
    assert w.grad is None


def test_contraction_of_length_zero_and_empty_results():
    out = normal(40, 16, dtype=FP32)
    before = out.clone()
    assert_bitwise_equal(gemm(normal(40, 0), normal(0, 16), out, accumulate=True), before)
    assert_bitwise_equal(gemm(normal(40, 0), normal(0, 16), out), torch.zeros_like(out))
    gemm(normal(0, 8), normal(8, 16), torch.empty(0, 16, device="cuda"))


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_is_not_measured_has_the_bits_of_the_twin(deterministic):
    """A token count that no table lists, and the router."""
    x, w, g = normal(1003, 520), normal(72, 520, seed=1), normal(1003, 72, seed=2)
    keywords = {"deterministic": deterministic}
    assert_bitwise_equal(free.projection_forward(x, w, **keywords), det.projection_forward(x, w))
    assert_bitwise_equal(free.projection_dgrad(g, w, **keywords), det.projection_dgrad(g, w))
    assert_bitwise_equal(free.projection_wgrad(g, x, **keywords), det.projection_wgrad(g, x))
    xf, wf, gf = x.float(), w.float(), g.float()
    assert_bitwise_equal(free.router_forward(xf, wf, **keywords), det.router_forward(xf, wf))
    assert_bitwise_equal(free.router_dgrad(gf, wf, **keywords), det.router_dgrad(gf, wf))
    assert_bitwise_equal(free.router_wgrad(gf, xf, **keywords), det.router_wgrad(gf, xf))


def test_what_is_measured_runs_its_split_program():
    """Every row of the table for this device: the plan is the split one, and right."""
    architecture, multiprocessors = cuda._facts_of(torch.cuda.current_device())
    rows = [row for key, row in measured_rows().items() if key[:2] == (architecture, multiprocessors)]
    if not rows:
        pytest.skip("no split program is chosen for this device")
    names = [field.name for field in dataclasses.fields(GemmProblem)]
    for row in rows:
        values = {name: row[name] for name in names if name in row}
        case = GemmCase(
            row["m"],
            row["n"],
            row["k"],
            row["a_major"],
            row["b_major"],
            getattr(torch, row["out_dtype"]),
            row["out_major"],
            row["accumulate"],
            row["batch"],
        )
        (a, b), (out, _) = case.operands("cuda"), case.output("cuda")
        prepared = free.prepare_gemm(a, b, out, row["out_major"] == "m", deterministic=False)
        assert isinstance(prepared.plan, SplitPlan), values
        prepared.launch()
        assert_rounded_once(out, a, b)


def test_what_compute_sanitizer_is_given_runs_to_its_end():
    script = Path(__file__).parents[1] / "benchmarks" / "check_split.py"
    finished = subprocess.run([sys.executable, str(script), "--launch"], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
