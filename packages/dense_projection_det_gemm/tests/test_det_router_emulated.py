"""The router's CUDA programs in the emulator: layouts, cuts, extreme rows, and no detector fires."""

import math

import pytest
import torch

from cake_shared.emulator import Options
from cake_shared.gemm.problem import RouterProblem
from cake_shared.target import TARGETS
from cake_shared.testing import assert_bitwise_equal
from cake_shared.testing.emulated import emulated_or_skip
from dense_projection_det_gemm import cuda
from dense_projection_det_gemm.cuda_router_plan import plan_router_cuda

BF16, FP32 = torch.bfloat16, torch.float32
TINY, LARGEST = 2.0**-149, torch.finfo(FP32).max
ORDERS = (Options(order="eager"), Options(order="lazy"), Options(order="random", seed=1))


@pytest.fixture(scope="module")
def emulated():
    return emulated_or_skip(cuda.PACKAGE)


def normal(rows, cols, seed=0, dtype=FP32):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def padded(x):
    """`x` in a buffer whose rows of memory are a multiple of 8 elements, and 8 more, apart."""
    buffer = torch.full((x.shape[0], math.ceil(x.shape[1] / 8) * 8 + 8), math.nan, dtype=x.dtype)
    return buffer[:, : x.shape[1]].copy_(x)


def multiply(package, architecture, a, b, *, spread=None, multiprocessors=3, out=None):
    """`a @ b` of `[M, K]` and `[K, N]` views whose layout keeps the rule."""
    out = torch.full((a.shape[0], b.shape[1]), math.nan) if out is None else out
    problem = RouterProblem(
        m=a.shape[0],
        n=b.shape[1],
        k=a.shape[1],
        a_major="k" if a.stride(1) == 1 else "m",
        b_major="n" if b.stride(1) == 1 else "k",
        a_terms=3 if a.dtype == FP32 else 1,
        b_terms=3 if b.dtype == FP32 else 1,
        target="cuda",
    )
    with package:
        backend = cuda.GemmBackend(package.module, architecture, multiprocessors, lambda: 0)
        plan = plan_router_cuda(problem, multiprocessors, backend.router.native, spread=spread)
        backend.router.prepare(problem, a, b, out, plan)[1]()
        if spread is None:
            again = torch.full_like(out, math.nan)
            backend.launcher("router_out", problem)(a, b, again)
            assert_bitwise_equal(again, out, "launcher")
    return out


def forward(package, architecture, x, w, **options):
    return multiply(package, architecture, padded(x), padded(w).t(), **options)


def relative(actual, exact):
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("experts", [40, 200])
@pytest.mark.parametrize("architecture", TARGETS)
def test_three_directions(emulated, architecture, experts, x_dtype):
    """No worse than torch's FP32 product, ragged in every extent, in all three directions."""
    package = emulated(architecture)
    package.options = Options(order="eager")
    x, w, g = normal(150, 72, 1, x_dtype), normal(experts, 72, 2), normal(150, experts, 3)
    for a, b in ((padded(x), padded(w).t()), (padded(g), padded(w)), (padded(g).t(), padded(x))):
        actual = multiply(package, architecture, a, b)
        exact = a.double() @ b.double()
        assert relative(actual, exact) < 1.1e-7, (a.shape, b.shape)


@pytest.mark.parametrize("architecture", TARGETS)
def test_every_order_of_completion(emulated, architecture):
    package = emulated(architecture)
    results = []
    for package.options in ORDERS:
        x, g = normal(700, 136, 1), normal(700, 24, 2)
        results.append(multiply(package, architecture, padded(g).t(), padded(x)))
        results += [forward(package, architecture, normal(140, 100, 3, t), normal(136, 100, 4)) for t in (FP32, BF16)]
    for at, result in enumerate(results):
        assert_bitwise_equal(result, results[at % 3])


@pytest.mark.parametrize("architecture", TARGETS)
def test_parts_in_one_unit_or_several(emulated, architecture, monkeypatch):
    """Segments that a CTA adds up itself and segments that are added at the end: the same bits."""
    monkeypatch.setattr("dense_projection_det_gemm.cuda_router_plan.PART_STEPS", 2)
    plan_router_cuda.cache_clear()
    package = emulated(architecture)
    package.options = Options(order="random", seed=2)
    x, w = normal(140, 120, 1), normal(136, 120, 2)
    x[3] *= 2.0**-120
    x[5, 70], w[7, 100] = 1e-36, math.inf
    together = forward(package, architecture, x, w, spread=False, multiprocessors=1)
    apart = forward(package, architecture, x, w, spread=True, multiprocessors=7)
    assert_bitwise_equal(together, apart)
    assert_bitwise_equal(forward(package, architecture, x[130:], w, spread=True), together[130:].contiguous())
    exact = x.double() @ w.double().t()
    keep = [i for i in range(136) if i != 7]
    assert relative(together[:, keep], exact[:, keep]) < 1.5e-7
    plan_router_cuda.cache_clear()


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_rows_of_x_adjacent_in_memory(emulated, architecture, x_dtype, monkeypatch):
    """x with unit stride on its rows: every sum is stored element by element, alone, added up and from slots."""
    monkeypatch.setattr("dense_projection_det_gemm.cuda_router_plan.PART_STEPS", 2)
    plan_router_cuda.cache_clear()
    package = emulated(architecture)
    package.options = Options(order="eager")
    x, w = normal(141, 72, 1, x_dtype), normal(136, 72, 2)
    a, b = padded(x.t().contiguous()).t(), padded(w).t()
    results = [multiply(package, architecture, a, b, spread=spread) for spread in (False, True)]
    assert_bitwise_equal(*results)
    assert relative(results[0], x.double() @ w.double().t()) < 1.1e-7
    turned = multiply(package, architecture, padded(x), b, spread=False, out=torch.full((136, 144), math.nan).t()[:141])
    assert relative(turned, x.double() @ w.double().t()) < 1.1e-7
    plan_router_cuda.cache_clear()


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adjacent", [False, True], ids=["rows apart", "rows adjacent"])
def test_whole_tiles_have_the_bits_of_ragged_ones(emulated, adjacent, x_dtype, monkeypatch):
    """Code of its own stores whole tiles: ordinary blocks, and those with elements that no split serves."""
    monkeypatch.setattr("dense_projection_det_gemm.cuda_router_plan.PART_STEPS", 2)
    plan_router_cuda.cache_clear()
    package = emulated("sm_90a")
    package.options = Options(order="lazy")
    x, w = normal(256, 72, 1), normal(256, 72, 2)
    x[3] *= 2.0**-120
    x[5, 70], x[9, 2], x[11, 40], w[70, 60], w[100] = 1e-36, math.nan, 1e-38, math.inf, w[100] * 2.0**-130
    x = x.to(x_dtype)
    a, b = padded(x.t().contiguous()).t() if adjacent else padded(x), padded(w).t()
    outs = [torch.full((256, 256), math.nan).t() if adjacent else torch.full((256, 256), math.nan) for _ in range(2)]
    whole, apart = (multiply(package, "sm_90a", a, b, spread=s, out=out) for s, out in zip((False, True), outs))
    ragged = multiply(package, "sm_90a", a[:72], b[:, :136], spread=False)
    assert_bitwise_equal(whole.contiguous(), apart.contiguous())
    assert_bitwise_equal(whole[:72, :136].contiguous(), ragged)
    plan_router_cuda.cache_clear()


@pytest.mark.parametrize("options", ORDERS, ids=["eager", "lazy", "random"])
@pytest.mark.parametrize("adjacent", [False, True], ids=["rows apart", "rows adjacent"])
def test_whoever_comes_last_to_a_tile_adds_its_parts(emulated, adjacent, options, monkeypatch):
    """Of a prepared product, launch after launch: the bits of one unit a tile, and of what no split serves."""
    monkeypatch.setattr("dense_projection_det_gemm.cuda_router_plan.PART_STEPS", 2)
    plan_router_cuda.cache_clear()
    package = emulated("sm_90a")
    package.options = options
    x, w = normal(300, 168, 1), normal(256, 168, 2)
    x[3] *= 2.0**-120
    x[5, 70], x[9, 2], x[290, 40], w[70, 60] = 1e-36, math.nan, 1e-38, math.inf
    a, b = padded(x.t().contiguous()).t() if adjacent else padded(x), padded(w).t()
    expected = multiply(package, "sm_90a", a, b, spread=False)
    problem = RouterProblem(300, 256, 168, "m" if adjacent else "k", "k", 3, 3, "cuda")
    out = torch.full((256, 304), math.nan).t()[:300] if adjacent else torch.full((300, 256), math.nan)
    with package:
        backend = cuda.GemmBackend(package.module, "sm_90a", 24, lambda: 0)
        plan = plan_router_cuda(problem, 24, spread=True)
        assert plan.units_per_tile == 6
        run = backend.router.prepare(problem, a, b, out, plan)[1]
        for _ in range(3):
            out.fill_(math.nan)
            run()
            assert_bitwise_equal(out.contiguous(), expected)
    plan_router_cuda.cache_clear()


def test_which_products_end_themselves(emulated):
    """Native ones whose units keep to their tiles: two launches instead of three."""
    launches = {}
    for architecture in ("sm_90a", "sm_100a"):
        package = emulated(architecture)
        package.options = Options(order="eager")
        x, g = normal(700, 40, 1), normal(700, 24, 2)
        forward(package, architecture, x[:20], normal(40, 40, 2), spread=False)
        launches[architecture] = [len(package.reports)]
        multiply(package, architecture, padded(g).t(), padded(x), spread=False)
        launches[architecture] += [len(package.reports)]
    assert launches == {"sm_90a": [2, 3], "sm_100a": [3, 3]}


def test_whole_tiles_stored_under_the_next_ones_products(emulated):
    """One cluster has nine tiles: whole ones are stored late, ragged ones and those that no split serves at once."""
    package = emulated("sm_90a")
    package.options = Options(order="random", seed=4)
    x, w = normal(520, 40, 1), normal(520, 40, 2)
    x[300, 5], w[300, 7] = 1e-36, math.inf
    a, b = padded(x), padded(w).t()
    together = multiply(package, "sm_90a", a, b, multiprocessors=2)
    for row in range(0, 520, 256):
        for column in range(0, 520, 256):
            alone = multiply(package, "sm_90a", a[row : row + 256], b[:, column : column + 256], multiprocessors=2)
            assert_bitwise_equal(together[row : row + 256, column : column + 256].contiguous(), alone)


@pytest.mark.parametrize("architecture", TARGETS)
def test_ranges_and_a_transposed_result(emulated, architecture):
    """The weight gradient's cut: the same bits on 1 and 5 multiprocessors, and written through strides of any order."""
    package = emulated(architecture)
    package.options = Options(order="random", seed=3)
    g, x = normal(1500, 24, 1), normal(1500, 200, 2)
    g[:, 3] *= 2.0**-135
    g[:, 5] *= 2.0**100
    a, b = padded(g).t(), padded(x)
    first = multiply(package, architecture, a, b, multiprocessors=1)
    assert_bitwise_equal(multiply(package, architecture, a, b, multiprocessors=5), first)
    turned = multiply(package, architecture, a, b, out=torch.full((200, 24), math.nan).t())
    assert_bitwise_equal(turned.contiguous(), first)
    bound = 2.0**-23 * (g.double().abs().t() @ x.double().abs()) + TINY / 2
    assert bool(((first.double() - g.double().t() @ x.double()).abs() <= bound).all())


def extreme_weights():
    w = normal(32, 64, seed=1)
    w[1] *= 1e-38
    w[2] = 3.40e38 * torch.sign(w[2])
    w[3] = 0.0
    w[4, 7] = math.inf
    w[5, 9] = math.nan
    w[6] *= TINY * 2**20
    w[7] = LARGEST * torch.sign(w[7])
    w[8, 3] = -math.inf
    w[9, ::2] *= 1e-38
    w[9, 1::2] *= 1e37
    return w


@pytest.mark.parametrize("architecture", TARGETS)
def test_u57_extreme_rows_of_either_operand(emulated, architecture):
    """U57: within FP32's bound, inf and NaN as in FP32, and no other row or column moves a bit."""
    package = emulated(architecture)
    package.options = Options(order="eager")
    x, w = normal(72, 64) * 2.0**-8, extreme_weights()
    clean = forward(package, architecture, x, w[16:])
    for left, right in ((x, w), (w, x)):
        y, exact = forward(package, architecture, left, right), left.double() @ right.double().t()
        bound = 2.0**-23 * (left.double().abs() @ right.double().abs().t()) + TINY / 2
        representable = exact.isfinite() & (exact.abs() <= LARGEST)
        assert bool(((y.double() - exact).abs() <= bound)[representable].all())
        assert torch.equal(y.isnan(), exact.isnan())
        assert torch.equal(y[y.isinf()].sign(), exact[exact.float().isinf()].sign().float())
        if left is x:
            assert_bitwise_equal(y[:, 16:].contiguous(), clean)


@pytest.mark.parametrize("binades", [60, 100, 104, 120, 250])
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_small_elements_beside_large_ones_keep_their_digits(emulated, architecture, binades):
    """Where large elements meet zeros, the product of the small ones is the result, to full FP32 accuracy."""
    package = emulated(architecture)
    package.options = Options(order="eager")
    a, b = normal(24, 7, seed=1).abs() + 1, normal(16, 7, seed=2).abs() + 1
    up, down = binades // 2, binades - binades // 2
    top = min(up, 120)
    x, w = torch.zeros(24, 9), torch.zeros(16, 9)
    x[:, 0], w[:, 8] = 2.0**top, 2.0**top
    small = max(top - binades, -74) if binades == 250 else -down
    x[:, 1:8], w[:, 1:8] = a * 2.0**small, b * 2.0**small
    exact = x.double() @ w.double().t()
    error = (forward(package, architecture, x, w).double() - exact).abs()
    assert bool((error <= 2.0**-23 * exact + TINY / 2).all())


@pytest.mark.parametrize("binade", [-149, -126, -100, 100, 126])
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_powers_of_two_on_a_row_are_exact(emulated, architecture, binade):
    """Scaling rows of x by a power of two scales their logits by exactly that."""
    package = emulated(architecture)
    package.options = Options(order="eager")
    base, w = (normal(4, 40) * 4).round() / 4, normal(24, 40, seed=1)
    if binade < -140:
        base = base.sign()
    y = forward(package, architecture, base, w)
    scaled = forward(package, architecture, base * 2.0**binade, w)
    assert_bitwise_equal(scaled, (y.double() * 2.0**binade).float())
