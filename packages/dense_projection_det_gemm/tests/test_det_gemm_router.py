"""U57: the router GEMM keeps FP32 accuracy and range through BF16 terms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dense_projection_det_gemm as det
from cake_shared.gemm import oracle
from cake_shared.testing import assert_bitwise_equal, relative_l2

BF16, FP32 = torch.bfloat16, torch.float32
TINY = 2.0**-149  # the smallest FP32 number above 0
LARGEST = torch.finfo(FP32).max


def normal(*shape, seed=0, dtype=FP32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nearest_fp32(exact):
    return exact.to(FP32)


def assert_no_worse_than_plain(actual, plain, exact):
    """Relative L2 error no larger than that of torch's FP32 product of the same operands."""
    assert relative_l2(actual, exact) <= relative_l2(plain, exact)


@pytest.mark.parametrize("x_dtype", [FP32, BF16])
@pytest.mark.parametrize("shift", [0.0, 1.0], ids=["centred", "one-signed"])
@pytest.mark.parametrize(("tokens", "k", "n"), [(512, 6144, 256), (300, 200, 40), (64, 64, 64), (1500, 1024, 128)])
def test_error_is_no_larger_than_plain_fp32(tokens, k, n, shift, x_dtype):
    x, w, g = normal(tokens, k) + shift, normal(n, k, seed=1) + shift, normal(tokens, n, seed=2) + shift
    x = x.to(x_dtype)
    assert_no_worse_than_plain(det.router_forward(x, w), x.float() @ w.t(), oracle.forward(x, w))
    assert_no_worse_than_plain(det.router_dgrad(g, w), g @ w, oracle.dgrad(g, w))
    assert_no_worse_than_plain(det.router_wgrad(g, x), g.t() @ x.float(), oracle.wgrad(g, x))


@pytest.mark.slow
@pytest.mark.parametrize("x_dtype", [FP32, BF16])
def test_expert_sets_are_those_of_float64(x_dtype):
    """Top-8 sets of 256 experts equal float64's, except where the gap is within the error bound of FP32."""
    x, w = normal(1024, 6144).to(x_dtype), normal(256, 6144, seed=1) * 6144**-0.5
    logits, exact = det.router_forward(x, w), oracle.forward(x, w)
    got = torch.zeros_like(exact, dtype=torch.bool).scatter(1, logits.topk(8).indices, True)
    expected = torch.zeros_like(got).scatter(1, exact.topk(8).indices, True)
    ordered = exact.sort(1, descending=True).values
    gap = ordered[:, 7] - ordered[:, 8]
    bound = 2.0**-24 * oracle.magnitude(x, w.t()).amax(1)
    differs = (got != expected).any(1)
    assert not bool((differs & (gap > bound)).any())
    rounded = torch.zeros_like(got).scatter(1, (x.to(BF16) @ w.to(BF16).t()).float().topk(8).indices, True)
    assert int((rounded != expected).any(1).sum()) > 20  # what BF16 logits would do to the same tokens


def test_exact_ties_stay_ties():
    """Columns with equal weights give equal logits, wherever they stand."""
    w = normal(48, 512, seed=1)
    w[[5, 17, 40, 47]] = w[0].clone()
    logits = det.router_forward(normal(200, 512), w)
    for column in (5, 17, 40, 47):
        assert_bitwise_equal(logits[:, column].contiguous(), logits[:, 0].contiguous())


def extreme_weights():
    w = normal(32, 64, seed=1)
    w[1] *= 1e-38
    w[2] = 3.40e38 * torch.sign(w[2])
    w[3] = 0.0
    w[4, 7] = float("inf")
    w[5, 9] = float("nan")
    w[6] *= TINY * 2**20
    w[7] = LARGEST * torch.sign(w[7])
    w[8, 3] = float("-inf")
    w[9, ::2] *= 1e-38
    w[9, 1::2] *= 1e37
    w[10, 0] = -0.0
    return w


ORDINARY = list(range(16, 32))


def test_rows_of_extreme_weights():
    """Rows at 1e-38, at 3.40e38, subnormal, 0, inf, NaN and of mixed range, each beside ordinary ones."""
    x, w = normal(70, 64) * 2.0**-8, extreme_weights()
    logits, exact, plain = det.router_forward(x, w), oracle.forward(x, w), x @ w.t()
    clean = det.router_forward(x, w[ORDINARY])
    assert_bitwise_equal(logits[:, ORDINARY], clean)
    scale = oracle.magnitude(x, w.t())
    finite = [i for i in range(32) if i not in (4, 5, 8)]
    # Half a unit of the smallest subnormal is the rounding of any FP32 result down there.
    bound = 2.0**-23 * scale[:, finite] + TINY / 2
    error = (logits.double() - exact)[:, finite].abs()
    overflow = exact[:, finite].abs() > LARGEST
    assert bool((error <= bound)[~overflow].all())
    for row in (4, 5, 8):
        assert_bitwise_equal(torch.isnan(logits[:, row]), torch.isnan(plain[:, row]))
        same = ~torch.isnan(plain[:, row])
        assert bool((logits[same, row] == plain[same, row]).all())
    assert bool((logits[:, 3] == 0).all())
    for row in (1, 6, 9):
        assert float((logits.double() - exact)[:, row].norm()) <= float((plain.double() - exact)[:, row].norm())


def test_finite_weights_make_no_nan():
    """No NaN comes from finite operands: sums that leave the range of FP32 on the way come back."""
    x = torch.ones(4, 64)
    w = torch.zeros(16, 64)
    w[0, :32], w[0, 32:] = LARGEST, -LARGEST
    w[1, :32], w[1, 32:], w[1, 0] = LARGEST, -LARGEST, 1e-38
    w[2] = LARGEST
    logits = det.router_forward(x, w)
    assert not bool(torch.isnan(logits).any())
    assert bool((logits[:, 0] == 0).all())
    assert bool((logits[:, 1] == nearest_fp32(oracle.forward(x, w))[:, 1]).all())
    assert bool((logits[:, 2] == float("inf")).all())


@pytest.mark.parametrize("scale", [1.0, 2.0**100, 2.0**-100, 2.0**-126, 2.0**-140, 2.0**120])
def test_powers_of_two_on_a_row_are_exact(scale):
    """Scaling a row of x scales its logits by exactly that, as long as both are normal numbers."""
    base, w = normal(1, 256), normal(24, 256, seed=1)
    if scale < 2.0**-100:
        base = (base * 4).round() / 4  # few bits, so that they survive as subnormals
    x = base * scale
    assert bool((x / scale == base).all())
    expected = nearest_fp32(det.router_forward(base, w).double() * scale)
    actual = det.router_forward(x, w)
    if scale >= 2.0**-100:
        assert_bitwise_equal(actual, expected)
    else:
        assert bool(((actual.double() - expected.double()).abs() <= TINY).all())


@given(
    exponents=st.lists(st.integers(-149, 127), min_size=2, max_size=8),
    seed=st.integers(0, 99),
    side=st.sampled_from(["x", "w", "both"]),
)
def test_any_range_against_float64(exponents, seed, side):
    """Elements of any binade: error within FP32's bound on the sum of magnitudes, or plain rounding at the ends."""
    x, w = normal(3, 24, seed=seed), normal(8, 24, seed=seed + 100)
    scales = torch.tensor([2.0**e for e in exponents], dtype=torch.float64)
    if side != "w":
        x = (x.double() * scales[torch.arange(24) % len(exponents)]).float()
    if side != "x":
        w = (w.double() * scales[(torch.arange(24) + 3) % len(exponents)]).float()
    logits, exact, magnitude = det.router_forward(x, w), oracle.forward(x, w), oracle.magnitude(x, w.t())
    expected_inf = exact.abs() > LARGEST * (1 + 2.0**-24)
    assert not bool(torch.isnan(logits[torch.isfinite(x).all(1)][:, torch.isfinite(w).all(1)]).any())
    comparable = torch.isfinite(exact) & ~expected_inf & torch.isfinite(logits)
    bound = 2.0**-22 * magnitude + TINY
    assert bool(((logits.double() - exact).abs() <= bound)[comparable].all())
    assert bool((logits[expected_inf & torch.isfinite(exact)].isinf()).all())


@pytest.mark.parametrize("binades", [40, 98, 99, 100, 120, 250])
def test_small_elements_beside_large_ones_keep_their_digits(binades):
    """Where large elements meet zeros, the product of the small ones is the result, to full FP32 accuracy."""
    a, b = normal(24, 7, seed=1).abs() + 1, normal(16, 7, seed=2).abs() + 1
    up, down = binades // 2, binades - binades // 2
    top = min(up, 120)
    x, w = torch.zeros(24, 9), torch.zeros(16, 9)
    x[:, 0], w[:, 8] = 2.0**top, 2.0**top
    small = max(top - binades, -74) if binades == 250 else -down
    x[:, 1:8], w[:, 1:8] = a * 2.0**small, b * 2.0**small
    exact = oracle.forward(x, w)
    assert float(exact.min()) > 2.0**-149
    error = (det.router_forward(x, w).double() - exact).abs()
    assert bool((error <= 2.0**-23 * exact + TINY / 2).all())


def test_which_path_a_row_takes_is_its_own_affair():
    """A special row among ordinary ones, and the other way round, keep their bits."""
    w = normal(24, 300, seed=1)
    ordinary, special = normal(300, seed=2), normal(300, seed=3)
    special[0], special[1] = 1e-38, 1e38
    alone = det.router_forward(ordinary[None], w)[0], det.router_forward(special[None], w)[0]
    x = normal(130, 300, seed=4)
    x[5], x[100], x[64], x[65] = ordinary, ordinary, special, special
    together = det.router_forward(x, w)
    for row, expected in ((5, alone[0]), (100, alone[0]), (64, alone[1]), (65, alone[1])):
        assert_bitwise_equal(together[row], expected)


def test_gradients_with_extreme_rows():
    """The two gradients: a row of g near the top of the range, one far below FP32's normal numbers."""
    g, w, x = normal(70, 24), normal(24, 64, seed=1), normal(70, 64, seed=2)
    g[3] *= 2.0**124 / 4
    g[9] *= 2.0**-140
    g[11] = float("inf")
    dx, exact = det.router_dgrad(g, w), oracle.dgrad(g, w)
    rows = [i for i in range(70) if i != 11]
    bound = 2.0**-23 * oracle.magnitude(g, w) + TINY / 2
    assert bool(((dx.double() - exact).abs() <= bound)[rows].all())
    assert not bool(torch.isfinite(dx[11]).any())
    g = normal(70, 24)
    g[:, 2] *= 2.0**-130
    g[:, 4] *= 2.0**110
    dw = det.router_wgrad(g, x)
    bound = 2.0**-23 * oracle.magnitude(g.t(), x) + TINY / 2
    assert bool(((dw.double() - oracle.wgrad(g, x)).abs() <= bound).all())


def test_terms_of_a_split_are_exact_bf16():
    """x1 + x2 + x3 is x, and each term is a BF16 number: nothing is lost in the splitting."""
    from cake_shared.gemm.router_cpu import _split

    tile = normal(64, 256) * 2.0**40
    buffers = {"a_bf16": torch.empty(64, 256, dtype=BF16)}
    buffers |= {f"a_term{i}": torch.empty(64, 256) for i in (1, 2)}
    terms = _split(tile.clone(), 3, "a", True, buffers)
    for term in terms:
        assert_bitwise_equal(term.to(BF16).float(), term)
    assert bool((sum(t.double() for t in terms) == tile.double()).all())


def test_plan_states_six_products_smallest_first():
    plan = det.prepare_router_forward(normal(8, 16), normal(8, 16)).plan
    assert plan.products == ((3, 1), (2, 2), (1, 3), (2, 1), (1, 2), (1, 1))
    plan = det.prepare_router_forward(normal(8, 16).to(BF16), normal(8, 16)).plan
    assert plan.products == ((1, 3), (1, 2), (1, 1))
