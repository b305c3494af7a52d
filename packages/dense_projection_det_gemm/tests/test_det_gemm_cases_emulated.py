"""Known cases of the BF16 GEMM through the CUDA host chain in the emulator: cut contractions, invariance, views."""

import pytest
import torch

from cake_shared.emulator import Options
from cake_shared.gemm.problem import GemmProblem
from cake_shared.testing import assert_bitwise_equal
from cake_shared.testing.emulated import emulated_or_skip
from cake_shared.testing.gemm_cuda import RAGGED, GemmCase, assert_rounded_once, normal
from dense_projection_det_gemm import cuda
from dense_projection_det_gemm.cuda_plan import plan_gemm_cuda

BF16, FP32 = torch.bfloat16, torch.float32
ARCHITECTURES = ["sm_90a", "sm_100a"]  # the native programs and the portable one


@pytest.fixture(scope="module", params=ARCHITECTURES)
def package(request):
    return emulated_or_skip(cuda.PACKAGE)(request.param), request.param


def run(package, a, b, out, accumulate=False, multiprocessors=6):
    """`out (+)= a @ b` on `[M, K]`, `[K, N]`, `[M, N]` (or batched) views; returns the plan."""
    emulated, architecture = package
    a, b, out = (x if x.dim() == 3 else x[None] for x in (a, b, out))
    problem = GemmProblem(
        batch=out.shape[0],
        m=out.shape[1],
        n=out.shape[2],
        k=a.shape[2],
        a_major="k" if a.stride(2) == 1 else "m",
        b_major="n" if b.stride(2) == 1 else "k",
        out_dtype=str(out.dtype).removeprefix("torch."),
        out_major="n" if out.stride(2) == 1 else "m",
        accumulate=accumulate,
        target="cuda",
    )
    with emulated:
        backend = cuda.GemmBackend(emulated.module, architecture, multiprocessors, lambda: 0)
        plan, launch = backend.prepare("gemm_out", problem, a, b, out)
        launch()
    return plan


def weight_gradient(package, g, x, out=None, **options):
    out = torch.full((g.shape[1], x.shape[1]), float("nan")) if out is None else out
    return out, run(package, g.t(), x, out, **options)


@pytest.mark.parametrize("case", RAGGED[::2], ids=str)
def test_ragged_extents(package, case):
    case.check(lambda a, b, out, transposed, accumulate: run(package, a, b, out, accumulate), "cpu")


@pytest.mark.parametrize("rows", [(0, 1, 2047), (2047, 0, 1), (0, 1023, 1024)], ids=str)
def test_u52_partial_sums_keep_fp32(package, rows):
    """U52, CF5: 256, 1 and -256 sum to 1 wherever the contraction is cut."""
    g, x = torch.zeros(2048, 8, dtype=BF16), torch.zeros(2048, 64, dtype=BF16)
    g[list(rows)] = 1
    for row, value in zip(rows, (256.0, 1.0, -256.0)):
        x[row] = value
    out, plan = weight_gradient(package, g, x)
    assert plan.cut.pieces > 1
    assert bool((out == 1.0).all())


def test_u53_bits_do_not_depend_on_the_order_of_completion_or_the_grid(package):
    emulated, _ = package
    g, x = normal(1500, 16, device="cpu"), normal(1500, 136, seed=1, device="cpu")
    expected, _ = weight_gradient(package, g, x)
    before = emulated.options
    try:
        for seed, multiprocessors in ((1, 2), (2, 6), (3, 132)):
            emulated.options = Options(order="random", seed=seed)
            result, _ = weight_gradient(package, g, x, multiprocessors=multiprocessors)
            assert_bitwise_equal(result, expected)
    finally:
        emulated.options = before


def test_u51_an_anchor_row_among_others(package):
    """U51: forward and input gradient of a row, alone and at three places among 17, 130 and 300."""
    anchor, w, v = (normal(*s, seed=i, device="cpu") for i, s in enumerate(((264,), (72, 264), (264, 72))))
    expected = None
    for rows in (1, 17, 130, 300):
        for position in sorted({0, rows // 2, rows - 1}):
            x = normal(rows, 264, seed=rows, device="cpu")
            x[position] = anchor
            results = []
            for b in (w.t(), v):
                out = torch.full((rows, 72), float("nan"), dtype=BF16)
                run(package, x, b, out)
                results.append(out[position].clone())
            expected = expected or results
            for actual, value in zip(results, expected):
                assert_bitwise_equal(actual, value)


def test_u54_accumulation_in_fp32(package):
    buffer = torch.full((8, 64), 0.5)
    for value in (256.0, 1.0):
        g, x = torch.zeros(700, 8, dtype=BF16), torch.zeros(700, 64, dtype=BF16)
        g[517], x[517] = 1, value
        weight_gradient(package, g, x, buffer, accumulate=True)
    assert bool((buffer == 257.5).all())


def test_u25_heads_of_a_wider_buffer(package):
    """U25: `[T, H, D]` seen as `[H, T, D]`, D a slice of a wider row."""
    wide = torch.full((70, 3, 88), float("nan"), dtype=BF16)
    wide[:, :, 16:80] = normal(70, 3, 64, device="cpu")
    x, w = wide[:, :, 16:80].transpose(0, 1), normal(3, 64, 40, seed=1, device="cpu")
    out = torch.full((70, 3, 48), float("nan"), dtype=BF16)
    run(package, x, w, out[:, :, :40].transpose(0, 1))
    assert_rounded_once(out[:, :, :40].transpose(0, 1), x, w)
    assert bool(torch.isnan(out[:, :, 40:]).all())


def test_the_plan_is_that_of_the_gpu(package):
    """What runs here is what the same problem runs on a GPU of the architecture."""
    case = GemmCase(48, 136, 1500, "m", "n", FP32)
    (a, b), (out, _) = case.operands("cpu"), case.output("cpu")
    plan = run(package, a, b, out)
    assert plan == plan_gemm_cuda(plan.problem, package[1] == "sm_90a")
