"""Values of the BF16 GEMMs against float64: shapes, strides, batched views, outputs, accumulation, empty extents."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dense_projection_det_gemm as det
from cake_shared.gemm import oracle
from cake_shared.testing import GuardBand, assert_bitwise_equal

BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(actual, a, b, prior=0.0):
    """Elementwise: FP32 accumulation over K terms, then one rounding to the dtype of the result."""
    exact = oracle.product(a, b) + prior
    depth = max(a.shape[-1], 1)
    accumulation = 2.0**-24 * (4 + depth**0.5) * (oracle.magnitude(a, b) + abs(prior))
    rounding = exact.abs() * (2.0**-8 if actual.dtype == BF16 else 2.0**-24)
    excess = (actual.double() - exact).abs() - (1.01 * rounding + accumulation)
    assert not bool((excess > 0).any() or torch.isnan(actual).any()), f"beyond the bound by {excess.max().item():.3e}"


def pitched(batch, rows, cols, pad, seed, dtype=BF16):
    """`[batch, rows, cols]` inside wider rows, whose other columns are NaN."""
    pitch = -(-cols // 8) * 8 + 8 * pad
    buffer = torch.full((batch, rows, pitch), float("nan"), dtype=dtype)
    buffer[:, :, :cols] = normal(batch, rows, cols, seed=seed, dtype=dtype)
    return buffer[:, :, :cols]


extents = st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 130, 513]))


@given(
    batch=st.integers(1, 3),
    m=extents,
    n=st.sampled_from([0, 8, 16, 24, 72, 520]),
    k=st.one_of(extents, st.sampled_from([511, 512, 1030])),
    a_major=st.sampled_from("mk"),
    b_major=st.sampled_from("kn"),
    out_major=st.sampled_from("nm"),
    out_dtype=st.sampled_from([BF16, FP32]),
    accumulate=st.booleans(),
    pad=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_any_shape_and_layout(batch, m, n, k, a_major, b_major, out_major, out_dtype, accumulate, pad, seed):
    accumulate = accumulate and out_dtype == FP32
    a = pitched(batch, m, k, pad, seed) if a_major == "k" else pitched(batch, k, m, pad, seed).transpose(1, 2)
    b = pitched(batch, k, n, pad, seed + 1) if b_major == "n" else pitched(batch, n, k, pad, seed + 1).transpose(1, 2)
    if out_major == "n":
        out = pitched(batch, m, n, pad, seed, out_dtype)
    else:
        out = pitched(batch, n, m, pad, seed, out_dtype).transpose(1, 2)
    prior = out.double().clone() if accumulate else torch.zeros(())
    if not accumulate:
        out.fill_(float("nan"))
    result = det.dense_projection_det_gemm(a, b, out, out_major == "m", accumulate=accumulate)
    assert result is out
    exact = oracle.product(a, b) + prior
    bound = 2.0**-24 * (4 + max(k, 1) ** 0.5) * (oracle.magnitude(a, b) + prior.abs())
    bound += 1.01 * exact.abs() * (2.0**-8 if out_dtype == BF16 else 2.0**-24)
    assert bool(((out.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_three_layouts_of_training(out_dtype):
    x, w, g = normal(3, 50, 136), normal(72, 136, seed=1), normal(3, 50, 72, seed=2)
    assert_rounded_once(det.prepare_forward(x, w, torch.empty(3, 50, 72, dtype=out_dtype)).launch(), x, w.t())
    assert_rounded_once(det.prepare_dgrad(g, w, torch.empty(3, 50, 136, dtype=out_dtype)).launch(), g, w)
    dw = det.projection_wgrad(g, x, out_dtype=out_dtype)
    assert dw.dtype == out_dtype
    assert_rounded_once(dw, g.reshape(-1, 72).t(), x.reshape(-1, 136))
    assert_bitwise_equal(det.projection_wgrad(g, x, torch.full((72, 136), float("nan"), dtype=out_dtype)), dw)


def test_functions_return_contiguous_bf16():
    x, w, g = normal(2, 3, 16), normal(8, 16), normal(2, 3, 8)
    for result, shape in (
        (det.projection_forward(x, w), (2, 3, 8)),
        (det.projection_dgrad(g, w), (2, 3, 16)),
        (det.projection_wgrad(g, x), (8, 16)),
        (det.projection_forward(x[0, 0], w), (8,)),
    ):
        assert result.dtype == BF16
        assert result.shape == shape
        assert result.is_contiguous()


def test_batched_head_views_run_without_copies():
    tokens, heads, head_dim, width = 70, 5, 24, 40
    fused = torch.full((tokens, heads, head_dim + 16), float("nan"), dtype=BF16)
    fused[:, :, :head_dim] = normal(tokens, heads, head_dim)
    weights = normal(heads, head_dim, width, seed=1)
    result = torch.full((tokens, heads, width), float("nan"), dtype=BF16)
    a = fused[:, :, :head_dim].transpose(0, 1)
    assert a.data_ptr() == fused.data_ptr()
    det.dense_projection_det_gemm(a, weights, result.transpose(0, 1))
    assert_rounded_once(result.transpose(0, 1), a, weights)
    # One weight for all heads: a batch stride of zero.
    shared = weights[:1].expand(heads, head_dim, width)
    det.dense_projection_det_gemm(a, shared, result.transpose(0, 1))
    assert_rounded_once(result.transpose(0, 1), a, shared)


@pytest.mark.parametrize(("m", "n"), [(24, 40), (40, 40), (1, 8), (8, 8)])
def test_transposed_out_as_view_and_as_buffer(m, n):
    a, b = normal(2, m, 16), normal(2, 16, n, seed=1)
    plain = det.dense_projection_det_gemm(a, b, torch.empty(2, m, n, dtype=FP32))
    pitch = -(-m // 8) * 8
    as_view, as_buffer = (torch.full((2, n, pitch), float("nan"))[:, :, :m] for _ in range(2))
    det.dense_projection_det_gemm(a, b, as_view.transpose(1, 2), transposed_out=True)
    assert det.dense_projection_det_gemm(a, b, as_buffer, transposed_out=True) is as_buffer
    assert_bitwise_equal(as_view.transpose(1, 2), plain)
    assert_bitwise_equal(as_buffer.transpose(1, 2), plain)


def test_writes_stay_inside_the_output():
    a, b = normal(70, 24), normal(24, 40, seed=1)
    buffer = torch.full((72, 64), 7.0)
    det.dense_projection_det_gemm(a, b, buffer[1:71, 8:48])
    outside = torch.ones(72, 64, dtype=torch.bool)
    outside[1:71, 8:48] = False
    assert bool((buffer[outside] == 7.0).all())
    assert_rounded_once(buffer[1:71, 8:48], a, b)
    band = GuardBand((70, 40), dtype=FP32)
    det.dense_projection_det_gemm(a, b, band.tensor)
    band.check()


@pytest.mark.parametrize("accumulate", [False, True])
def test_contraction_of_length_zero(accumulate):
    a, b = torch.empty(3, 0, dtype=BF16), torch.empty(0, 8, dtype=BF16)
    out = torch.full((3, 8), 2.5)
    det.dense_projection_det_gemm(a, b, out, accumulate=accumulate)
    assert bool((out == (2.5 if accumulate else 0.0)).all())
    assert_bitwise_equal(det.projection_wgrad(normal(0, 8), normal(0, 16)), torch.zeros(8, 16, dtype=BF16))
    assert_bitwise_equal(det.router_wgrad(torch.empty(0, 8), torch.empty(0, 16)), torch.zeros(8, 16))


@pytest.mark.parametrize("shape", [(0, 3, 8, 16), (2, 0, 8, 16), (2, 3, 0, 16)])
def test_empty_outputs(shape):
    batch, m, n, k = shape
    out = torch.empty(batch, m, n, dtype=BF16)
    result = det.dense_projection_det_gemm(torch.zeros(batch, m, k, dtype=BF16), normal(batch, k, n), out)
    assert result.shape == (batch, m, n)
    assert det.projection_forward(normal(0, 16), normal(8, 16)).shape == (0, 8)
    assert det.projection_forward(normal(4, 0, 16), normal(8, 16)).shape == (4, 0, 8)


def cancelling(tokens, n=8, k=16):
    """Rows 0, 1 and the last hold terms 256, 1 and -256 of every sum, all else is zero."""
    g, x = torch.zeros(tokens, n, dtype=BF16), torch.zeros(tokens, k, dtype=BF16)
    x[[0, 1, tokens - 1]] = 1.0
    g[0], g[1], g[tokens - 1] = 256.0, 1.0, -256.0
    return g, x


@pytest.mark.parametrize("tokens", [3, 512, 513, 8192])
def test_cf5_partial_sums_keep_fp32(tokens):
    """CF5, U52: 256 + 1 - 256 is 1; it would be 0 had any partial sum been rounded to BF16."""
    g, x = cancelling(tokens)
    expected = torch.ones(8, 16)
    assert_bitwise_equal(det.projection_wgrad(g, x, out_dtype=FP32), expected)
    assert_bitwise_equal(det.projection_wgrad(g, x), expected.to(BF16))
    assert_bitwise_equal(det.router_wgrad(g.float(), x), expected)
    a, w = g.t().contiguous(), x.t().contiguous()
    out = torch.full((8, 16), float("nan"))
    if tokens % 8 == 0:
        assert_bitwise_equal(det.prepare_forward(a, w, out).launch(), expected)


@pytest.mark.parametrize(("prefill", "expected"), [(0.0, 257.0), (0.5, 257.5)])
def test_u54_two_micro_batches_into_one_fp32_buffer(prefill, expected):
    """U54: gradients 256 and 1 accumulate to 257; BF16 would lose the 1."""
    one = torch.ones(1, 8, dtype=BF16)
    out = torch.full((8, 8), prefill)
    for value in (256.0, 1.0):
        assert det.projection_wgrad(one * value, one, out=out, accumulate=True) is out
    assert bool((out == expected).all())


@pytest.mark.parametrize("stale", [0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_u54_without_accumulate_stale_contents_are_overwritten(stale, dtype):
    """U54: nothing of what `out` held survives."""
    one = torch.ones(1, 8, dtype=BF16)
    out = torch.full((8, 8), stale, dtype=dtype)
    det.projection_wgrad(one * 256, one, out=out)
    assert bool((out == 256.0).all())
